package dev.tidegate.client;

import dev.tidegate.inference.v1.GenerateResponse;
import io.grpc.Context;
import io.grpc.StatusRuntimeException;
import java.util.Iterator;
import java.util.function.Supplier;

/**
 * One generation as it streams: Admitted, then deltas, then a Finished for each candidate. Closing it before its end
 * cancels the request. One thread iterates; any may close. Iterating throws {@link TidegateException}.
 */
public final class Generation implements Iterator<GenerateResponse>, Iterable<GenerateResponse>, AutoCloseable {
  private final Context.CancellableContext context;
  private final Iterator<GenerateResponse> messages;

  Generation(Context.CancellableContext context, Supplier<Iterator<GenerateResponse>> open) {
    this.context = context;
    Context previous = context.attach();
    try {
      messages = open.get();
    } finally {
      context.detach(previous);
    }
  }

  @Override
  public boolean hasNext() {
    try {
      return messages.hasNext();
    } catch (StatusRuntimeException error) {
      throw new TidegateException(error);
    }
  }

  @Override
  public GenerateResponse next() {
    try {
      return messages.next();
    } catch (StatusRuntimeException error) {
      throw new TidegateException(error);
    }
  }

  @Override
  public Iterator<GenerateResponse> iterator() {
    return this;
  }

  /** Ends the request on the server, if it still runs. */
  @Override
  public void close() {
    context.cancel(null);
  }
}
