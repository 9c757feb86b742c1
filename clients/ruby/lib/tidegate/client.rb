# frozen_string_literal: true

require 'grpc'

module Tidegate
  # One generation as it streams: Admitted, then deltas, then a Finished for each candidate. It can be iterated once;
  # leaving the iteration early cancels the request. Raises Tidegate::Error.
  class Generation
    include Enumerable

    # Yields the request to attach with, or nil for the first call; must return the call's operation.
    def initialize(recovery, &start)
      @recovery = recovery
      @start = start
      @operation = start.call(nil)
      @cancelled = Queue.new
    end

    def each(&block)
      until read(&block)
        @operation = @start.call(@recovery.request)
        @operation.cancel unless @cancelled.empty?
      end
    ensure
      cancel
    end

    # Ends the request on the server, if it still runs. Any thread may call it.
    def cancel
      @cancelled << true
      @operation.cancel
    end

    private

    # Reads one call; whether that was the stream's end. Otherwise it goes on by Attach.
    def read
      @operation.execute.each do |message|
        message = message.event if message.is_a?(Inference::V1::AttachResponse)
        yield message if message && @recovery.take(message)
      end
      true
    rescue GRPC::BadStatus => e
      sleep(@recovery.pause_after(Error.new(e)))
      false
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

    # Streams one generation. reattach: seconds to try to go on when the scheduler ends and one with its journal may come
    # back; 0: not at all, a loss is an UNAVAILABLE error.
    def generate(request, reattach: 0, **options)
      arguments = arguments(**options) # Attach shares its deadline
      Generation.new(Recovery.new(reattach)) do |attaching|
        attaching ? open(:attach, attaching, arguments) : open(:generate, request, arguments)
      end
    end

    # Goes on with a generation by its name, as after the end of the process that started it. What the request says was
    # received is left out. Messages are those of generate.
    def attach(request, **options)
      Generation.new(Recovery.new(0)) { open(:attach, request, arguments(**options)) }
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

    def open(method, request, arguments)
      @stub.public_send(method, request, return_op: true, **arguments)
    end

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
