package dev.tidegate.client;

import dev.tidegate.inference.v1.AttachRequest;
import dev.tidegate.inference.v1.AttachResponse;
import dev.tidegate.inference.v1.CancelRequest;
import dev.tidegate.inference.v1.CancelResponse;
import dev.tidegate.inference.v1.DetokenizeRequest;
import dev.tidegate.inference.v1.DetokenizeResponse;
import dev.tidegate.inference.v1.GenerateRequest;
import dev.tidegate.inference.v1.GenerateResponse;
import dev.tidegate.inference.v1.InferenceServiceGrpc;
import dev.tidegate.inference.v1.InferenceServiceGrpc.InferenceServiceBlockingStub;
import dev.tidegate.inference.v1.ListModelsRequest;
import dev.tidegate.inference.v1.ListModelsResponse;
import dev.tidegate.inference.v1.TokenizeRequest;
import dev.tidegate.inference.v1.TokenizeResponse;
import io.grpc.Context;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.StatusRuntimeException;
import io.grpc.stub.MetadataUtils;
import java.util.Iterator;
import java.util.Optional;
import java.util.concurrent.TimeUnit;
import java.util.function.Function;

/** Calls one scheduler. It may be used by any number of threads. */
public final class TidegateClient implements AutoCloseable {
  private final ManagedChannel channel;
  private final InferenceServiceBlockingStub stub;

  /** A client without encryption. The connection to target, such as "localhost:50051", is made by the first call. */
  public static TidegateClient plaintext(String target) {
    return new TidegateClient(ManagedChannelBuilder.forTarget(target).usePlaintext());
  }

  /** A client over a channel with settings of one's own, such as TLS; closing the client closes the channel. */
  public TidegateClient(ManagedChannelBuilder<?> builder) {
    channel = builder.keepAliveTime(30, TimeUnit.SECONDS).keepAliveTimeout(20, TimeUnit.SECONDS).build();
    stub = InferenceServiceGrpc.newBlockingStub(channel);
  }

  /** Streams one generation. Close it: that cancels the request if it has not ended. */
  public Generation generate(GenerateRequest request, CallOptions options) {
    InferenceServiceBlockingStub calls = with(options); // Attach shares its deadline
    return new Generation(Context.current().withCancellation(), new Recovery(options.reattach()),
        () -> calls.generate(request), attaching -> events(calls.attach(attaching)));
  }

  /**
   * Goes on with a generation by its name, as after the end of the process that started it. What the request says was
   * received is left out. Events are those of {@link #generate}.
   */
  public Generation attach(AttachRequest request, CallOptions options) {
    InferenceServiceBlockingStub calls = with(options);
    return new Generation(Context.current().withCancellation(), new Recovery(Optional.empty()),
        () -> events(calls.attach(request)), attaching -> events(calls.attach(attaching)));
  }

  private static Iterator<GenerateResponse> events(Iterator<AttachResponse> messages) {
    return new Iterator<>() {
      @Override
      public boolean hasNext() {
        return messages.hasNext();
      }

      @Override
      public GenerateResponse next() {
        return messages.next().getEvent();
      }
    };
  }

  /** Cancels a request by its name; its own stream ends with FINISH_REASON_CANCELLED. */
  public CancelResponse cancel(CancelRequest request, CallOptions options) {
    return unary(options, calls -> calls.cancel(request));
  }

  /** The token ids that generate would use for a prompt. */
  public TokenizeResponse tokenize(TokenizeRequest request, CallOptions options) {
    return unary(options, calls -> calls.tokenize(request));
  }

  /** The text of token ids. */
  public DetokenizeResponse detokenize(DetokenizeRequest request, CallOptions options) {
    return unary(options, calls -> calls.detokenize(request));
  }

  /** The models that are served. */
  public ListModelsResponse listModels(ListModelsRequest request, CallOptions options) {
    return unary(options, calls -> calls.listModels(request));
  }

  /** Closes the connection. Requests that are running are cancelled. */
  @Override
  public void close() {
    channel.shutdownNow();
  }

  private InferenceServiceBlockingStub with(CallOptions options) {
    InferenceServiceBlockingStub calls =
        stub.withInterceptors(MetadataUtils.newAttachHeadersInterceptor(options.metadata()));
    return options.timeout()
        .map(timeout -> calls.withDeadlineAfter(timeout.toNanos(), TimeUnit.NANOSECONDS))
        .orElse(calls);
  }

  private <T> T unary(CallOptions options, Function<InferenceServiceBlockingStub, T> call) {
    try {
      return call.apply(with(options));
    } catch (StatusRuntimeException error) {
      throw new TidegateException(error);
    }
  }
}
