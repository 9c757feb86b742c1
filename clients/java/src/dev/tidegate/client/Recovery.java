package dev.tidegate.client;

import dev.tidegate.inference.v1.AttachRequest;
import dev.tidegate.inference.v1.Delta;
import dev.tidegate.inference.v1.GenerateResponse;
import dev.tidegate.inference.v1.Received;
import io.grpc.Status;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Map;
import java.util.Optional;
import java.util.TreeMap;
import java.util.concurrent.ThreadLocalRandom;

/** What has come of one generation, and what becomes of it when a call fails. Waits for nothing. */
final class Recovery {
  private static final Duration FIRST_PAUSE = Duration.ofMillis(100);
  private static final Duration LONGEST_PAUSE = Duration.ofSeconds(2);

  private final Duration patience;
  private final Map<Integer, Received.Builder> received = new TreeMap<>();
  private String requestId = "";
  private TidegateException loss; // what broke the stream that is to go on
  private long giveUpAt;
  private long pauseNanos;

  Recovery(Optional<Duration> patience) {
    this.patience = patience.orElse(Duration.ZERO);
  }

  /** Counts an event in; whether its reader has not seen it: a stream that goes on begins with Admitted again. */
  boolean take(GenerateResponse message) {
    loss = null;
    switch (message.getEventCase()) {
      case ADMITTED -> {
        boolean isNew = requestId.isEmpty();
        requestId = message.getAdmitted().getRequestId();
        return isNew;
      }
      case DELTA -> {
        Delta delta = message.getDelta();
        Received.Builder entry = of(delta.getIndex());
        int tokens = Math.max(delta.getTokenIdsCount(), delta.getLogprobsCount());
        int bytes = delta.getText().getBytes(StandardCharsets.UTF_8).length;
        entry.setNumTokens(entry.getNumTokens() + tokens).setTextBytes(entry.getTextBytes() + bytes);
      }
      case FINISHED -> of(message.getFinished().getIndex()).setFinished(true);
      default -> { }
    }
    return true;
  }

  /** How long to wait before the request goes on by Attach; throws what ends the stream. */
  Duration pauseAfter(TidegateException error) {
    Status.Code code = error.code();
    if (loss == null) {
      // A scheduler that gives another reason is there.
      boolean isLoss = code == Status.Code.UNAVAILABLE
          && (error.reason().isEmpty() || error.reason().equals("ENGINE_LOST"));
      if (!isLoss || requestId.isEmpty() || patience.isZero()) {
        throw error;
      }
      loss = error;
      giveUpAt = System.nanoTime() + patience.toNanos();
      pauseNanos = FIRST_PAUSE.toNanos() / 2;
    } else if (code == Status.Code.NOT_FOUND || code == Status.Code.UNIMPLEMENTED) {
      throw loss;
    } else if (code != Status.Code.UNAVAILABLE && code != Status.Code.ALREADY_EXISTS) {
      throw error; // ALREADY_EXISTS: it has not yet noticed that the old stream broke
    }
    pauseNanos = Math.min(2 * pauseNanos, LONGEST_PAUSE.toNanos());
    long pause = ThreadLocalRandom.current().nextLong(pauseNanos / 2, pauseNanos);
    if (System.nanoTime() + pause - giveUpAt > 0) {
      throw loss;
    }
    return Duration.ofNanos(pause);
  }

  /** Asks for what has not come. */
  AttachRequest request() {
    AttachRequest.Builder request = AttachRequest.newBuilder().setRequestId(requestId);
    received.values().forEach(request::addReceived);
    return request.build();
  }

  private Received.Builder of(int index) {
    return received.computeIfAbsent(index, key -> Received.newBuilder().setIndex(key));
  }
}
