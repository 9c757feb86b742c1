# frozen_string_literal: true

module Tidegate
  # What has come of one generation, and what becomes of it when a call fails. Waits for nothing.
  class Recovery
    FIRST_PAUSE = 0.1
    LONGEST_PAUSE = 2.0

    # patience: seconds to try for after a loss; 0: not at all
    def initialize(patience)
      @patience = patience
      @request_id = ''
      @received = {}
    end

    # Counts an event in; whether its reader has not seen it: a stream that goes on begins with Admitted again.
    def take(message)
      @loss = nil
      case message.event
      when :admitted
        new = @request_id.empty?
        @request_id = message.admitted.request_id
        return new
      when :delta then count(message.delta)
      when :finished then of(message.finished.index).finished = true
      end
      true
    end

    # Seconds to wait before the request goes on by Attach. Raises what ends the stream.
    def pause_after(error)
      if @loss.nil?
        begin_after(error)
      elsif %w[NOT_FOUND UNIMPLEMENTED].include?(error.code)
        raise @loss
      elsif !%w[UNAVAILABLE ALREADY_EXISTS].include?(error.code)
        raise error # ALREADY_EXISTS: it has not yet noticed that the old stream broke
      end
      @pause = [2 * @pause, LONGEST_PAUSE].min
      pause = @pause * rand(0.5..1.0)
      raise @loss if now + pause > @give_up_at

      pause
    end

    # Asks for what has not come.
    def request
      Inference::V1::AttachRequest.new(request_id: @request_id, received: @received.values)
    end

    private

    def begin_after(error)
      # A scheduler that gives another reason is there.
      loss = error.code == 'UNAVAILABLE' && ['', 'ENGINE_LOST'].include?(error.reason)
      raise error if !loss || @request_id.empty? || @patience.zero?

      @loss = error
      @give_up_at = now + @patience
      @pause = FIRST_PAUSE / 2
    end

    def count(delta)
      received = of(delta.index)
      received.num_tokens += [delta.token_ids.size, delta.logprobs.size].max
      received.text_bytes += delta.text.bytesize
    end

    def of(index)
      @received[index] ||= Inference::V1::Received.new(index: index)
    end

    def now
      Process.clock_gettime(Process::CLOCK_MONOTONIC)
    end
  end
end
