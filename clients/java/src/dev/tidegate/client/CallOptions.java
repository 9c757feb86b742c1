package dev.tidegate.client;

import io.grpc.Metadata;
import java.time.Duration;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Optional;

/**
 * What goes with one call. Immutable; each method returns another one.
 *
 * @param timeout the deadline from now; the server ends the request when it passes
 * @param headers metadata to send
 * @param reattach of a generation: how long to try to go on when the scheduler ends and one with its journal may come
 *     back; without it a loss is an UNAVAILABLE error
 */
public record CallOptions(Optional<Duration> timeout, Map<String, String> headers, Optional<Duration> reattach) {
  /** No deadline and no headers. */
  public static final CallOptions NONE = new CallOptions(Optional.empty(), Map.of(), Optional.empty());

  /** Sets the deadline. */
  public CallOptions withTimeout(Duration value) {
    return new CallOptions(Optional.of(value), headers, reattach);
  }

  /** Adds a header. */
  public CallOptions withHeader(String name, String value) {
    Map<String, String> more = new LinkedHashMap<>(headers);
    more.put(name, value);
    return new CallOptions(timeout, Map.copyOf(more), reattach);
  }

  /** Has the server's spans continue the W3C trace that traceparent names. */
  public CallOptions withTraceparent(String traceparent) {
    return withHeader("traceparent", traceparent);
  }

  /** Has a generation go on by itself after the loss of its scheduler, if it comes back within that time. */
  public CallOptions withReattach(Duration value) {
    return new CallOptions(timeout, headers, Optional.of(value));
  }

  Metadata metadata() {
    Metadata metadata = new Metadata();
    headers.forEach((name, value) -> metadata.put(Metadata.Key.of(name, Metadata.ASCII_STRING_MARSHALLER), value));
    return metadata;
  }
}
