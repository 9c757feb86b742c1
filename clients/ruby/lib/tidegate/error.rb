# frozen_string_literal: true

require 'google/protobuf/well_known_types'
require 'google/rpc/error_details_pb'
require 'google/rpc/status_pb'

module Tidegate
  # What is wrong with one field of a request, or which quota is used up. The subject is a field such as
  # "sampling.top_p", or what the quota belongs to; the description is for people, with the numbers.
  Violation = Struct.new(:subject, :description)

  # How a call failed: the gRPC status and what the server said beside it.
  class Error < StandardError
    # Name of the gRPC code, such as "RESOURCE_EXHAUSTED".
    attr_reader :code
    # A constant such as "QUEUE_FULL"; empty if the server gave none.
    attr_reader :reason
    # Whose reason it is: "tidegate.dev".
    attr_reader :domain
    # The numbers behind the reason.
    attr_reader :metadata
    # Seconds that the server asks to wait before the request is sent again; nil if it did not say.
    attr_reader :retry_after
    # What is wrong with the request.
    attr_reader :fields
    # Which limits were reached.
    attr_reader :quota

    # status: a GRPC::BadStatus
    def initialize(status)
      super(status.details.to_s.dup.force_encoding(Encoding::UTF_8))
      @code = CODE_NAMES.fetch(status.code, status.code.to_s)
      @reason = @domain = ''
      @metadata = {}
      @fields = []
      @quota = []
      decode(status.metadata['grpc-status-details-bin'])
    end

    private

    CODE_NAMES = GRPC::Core::StatusCodes.constants.to_h { |name| [GRPC::Core::StatusCodes.const_get(name), name.to_s] }
                                        .freeze
    private_constant :CODE_NAMES

    def decode(details)
      return if details.nil?

      Google::Rpc::Status.decode(details).details.each { |detail| take(detail) }
    rescue Google::Protobuf::ParseError
      nil # malformed details: the code and the message still hold
    end

    def take(detail)
      if (info = detail.unpack(Google::Rpc::ErrorInfo))
        @reason = info.reason
        @domain = info.domain
        @metadata = info.metadata.to_h
      elsif (retry_info = detail.unpack(Google::Rpc::RetryInfo))
        @retry_after = retry_info.retry_delay.seconds + (retry_info.retry_delay.nanos / 1e9)
      elsif (request = detail.unpack(Google::Rpc::BadRequest))
        @fields = request.field_violations.map { |each| Violation.new(each.field, each.description) }
      elsif (failure = detail.unpack(Google::Rpc::QuotaFailure))
        @quota = failure.violations.map { |each| Violation.new(each.subject, each.description) }
      end
    end
  end
end
