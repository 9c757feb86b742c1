# frozen_string_literal: true

require 'grpc'

module Tidegate
  # One generation as it streams: Admitted, then deltas, then a Finished for each candidate. It can be iterated once;
  # leaving the iteration early cancels the request. Raises Tidegate::Error.
  class Generation
    include Enumerable

    def initialize(operation)
      @operation = operation
    end

    def each(&block)
      @operation.execute.each(&block)
    rescue GRPC::BadStatus => e
      raise Error, e
    ensure
      cancel
    end

    # Ends the request on the server, if it still runs. Any thread may call it.
    def cancel
      @operation.cancel
    end
  end

  # Calls one scheduler. Every call takes timeout: (seconds; the server ends the request when it passes),
  # traceparent: (W3C trace context for the server's spans to continue) and metadata: (further headers), and raises
  # Tidegate::Error when it fails.
  class Client
    CHANNEL_ARGS = { 'grpc.keepalive_time_ms' => 30_000, 'grpc.keepalive_timeout_ms' => 20_000 }.freeze

    # The connection to target, such as "localhost:50051", is made by the first call.
    def initialize(target, credentials: :this_channel_is_insecure, channel_args: {})
      @stub = Inference::V1::InferenceService::Stub.new(
        target, credentials, channel_args: CHANNEL_ARGS.merge(channel_args)
      )
    end

    # Streams one generation.
    def generate(request, **options)
      Generation.new(@stub.generate(request, return_op: true, **arguments(**options)))
    end

    # Cancels a request by its name; its own stream ends with FINISH_REASON_CANCELLED.
    def cancel(request, **options)
      unary(:cancel, request, options)
    end

    # The token ids that generate would use for a prompt.
    def tokenize(request, **options)
      unary(:tokenize, request, options)
    end

    # The text of token ids.
    def detokenize(request, **options)
      unary(:detokenize, request, options)
    end

    # The models that are served.
    def list_models(request = Inference::V1::ListModelsRequest.new, **options)
      unary(:list_models, request, options)
    end

    private

    def unary(method, request, options)
      @stub.public_send(method, request, **arguments(**options))
    rescue GRPC::BadStatus => e
      raise Error, e
    end

    def arguments(timeout: nil, traceparent: nil, metadata: {})
      metadata = metadata.merge('traceparent' => traceparent) if traceparent
      { metadata: metadata, deadline: timeout && (Time.now + timeout) }
    end
  end
end
