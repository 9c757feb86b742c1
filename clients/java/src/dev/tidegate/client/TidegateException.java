package dev.tidegate.client;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.util.Durations;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.QuotaFailure;
import com.google.rpc.RetryInfo;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.Optional;

/** How a call failed: the gRPC status and what the server said beside it. */
public final class TidegateException extends RuntimeException {
  private static final long serialVersionUID = 1;
  private static final Metadata.Key<byte[]> DETAILS =
      Metadata.Key.of("grpc-status-details-bin", Metadata.BINARY_BYTE_MARSHALLER);

  /**
   * What is wrong with one field of a request, or which quota is used up.
   *
   * @param subject a field such as "sampling.top_p", or what the quota belongs to
   * @param description for people, with the numbers
   */
  public record Violation(String subject, String description) {}

  private final Status.Code code;
  private String reason = "";
  private String domain = "";
  private Map<String, String> metadata = Map.of();
  private Duration retryAfter;
  private final List<Violation> fields = new ArrayList<>();
  private final List<Violation> quota = new ArrayList<>();

  TidegateException(StatusRuntimeException cause) {
    super(cause.getStatus().getDescription(), cause);
    code = cause.getStatus().getCode();
    Metadata trailers = cause.getTrailers();
    byte[] details = trailers == null ? null : trailers.get(DETAILS);
    if (details == null) {
      return;
    }
    try {
      for (Any detail : com.google.rpc.Status.parseFrom(details).getDetailsList()) {
        decode(detail);
      }
    } catch (InvalidProtocolBufferException malformed) {
      addSuppressed(malformed); // the code and the message still hold
    }
  }

  private void decode(Any detail) throws InvalidProtocolBufferException {
    if (detail.is(ErrorInfo.class)) {
      ErrorInfo info = detail.unpack(ErrorInfo.class);
      reason = info.getReason();
      domain = info.getDomain();
      metadata = info.getMetadataMap();
    } else if (detail.is(RetryInfo.class)) {
      retryAfter = Duration.ofNanos(Durations.toNanos(detail.unpack(RetryInfo.class).getRetryDelay()));
    } else if (detail.is(BadRequest.class)) {
      detail.unpack(BadRequest.class).getFieldViolationsList()
          .forEach(each -> fields.add(new Violation(each.getField(), each.getDescription())));
    } else if (detail.is(QuotaFailure.class)) {
      detail.unpack(QuotaFailure.class).getViolationsList()
          .forEach(each -> quota.add(new Violation(each.getSubject(), each.getDescription())));
    }
  }

  /** The code of the status. */
  public Status.Code code() {
    return code;
  }

  /** A constant such as "QUEUE_FULL"; empty if the server gave none. */
  public String reason() {
    return reason;
  }

  /** Whose reason it is: "tidegate.dev". */
  public String domain() {
    return domain;
  }

  /** The numbers behind the reason. */
  public Map<String, String> metadata() {
    return metadata;
  }

  /** How long the server asks to wait before the request is sent again, if it said so. */
  public Optional<Duration> retryAfter() {
    return Optional.ofNullable(retryAfter);
  }

  /** What is wrong with the request. */
  public List<Violation> fields() {
    return Collections.unmodifiableList(fields);
  }

  /** Which limits were reached. */
  public List<Violation> quota() {
    return Collections.unmodifiableList(quota);
  }
}
