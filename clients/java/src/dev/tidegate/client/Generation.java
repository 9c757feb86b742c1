package dev.tidegate.client;

import dev.tidegate.inference.v1.AttachRequest;
import dev.tidegate.inference.v1.GenerateResponse;
import io.grpc.Context;
import io.grpc.StatusRuntimeException;
import java.util.Iterator;
import java.util.NoSuchElementException;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.function.Function;
import java.util.function.Supplier;

/**
 * One generation as it streams: Admitted, then deltas, then a Finished for each candidate. Closing it before its end
 * cancels the request. One thread iterates; any may close. Iterating throws {@link TidegateException}.
 */
public final class Generation implements Iterator<GenerateResponse>, Iterable<GenerateResponse>, AutoCloseable {
  private final Context.CancellableContext context;
  private final Function<AttachRequest, Iterator<GenerateResponse>> attach;
  private final Recovery recovery;
  private final CountDownLatch closed = new CountDownLatch(1);
  private Iterator<GenerateResponse> messages;
  private GenerateResponse ahead; // what hasNext found

  Generation(Context.CancellableContext context, Recovery recovery, Supplier<Iterator<GenerateResponse>> open,
      Function<AttachRequest, Iterator<GenerateResponse>> attach) {
    this.context = context;
    this.recovery = recovery;
    this.attach = attach;
    messages = open(open);
  }

  @Override
  public boolean hasNext() {
    while (ahead == null) {
      try {
        if (!messages.hasNext()) {
          return false;
        }
        GenerateResponse message = messages.next();
        ahead = recovery.take(message) ? message : null;
      } catch (StatusRuntimeException error) {
        sleep(recovery.pauseAfter(new TidegateException(error)).toNanos());
        messages = open(() -> attach.apply(recovery.request()));
      }
    }
    return true;
  }

  @Override
  public GenerateResponse next() {
    if (!hasNext()) {
      throw new NoSuchElementException("the generation has ended");
    }
    GenerateResponse message = ahead;
    ahead = null;
    return message;
  }

  @Override
  public Iterator<GenerateResponse> iterator() {
    return this;
  }

  /** Ends the request on the server, if it still runs. */
  @Override
  public void close() {
    closed.countDown();
    context.cancel(null);
  }

  private Iterator<GenerateResponse> open(Supplier<Iterator<GenerateResponse>> call) {
    Context previous = context.attach();
    try {
      return call.get();
    } finally {
      context.detach(previous);
    }
  }

  private void sleep(long nanos) {
    try {
      closed.await(nanos, TimeUnit.NANOSECONDS); // once closed, the next call is cancelled
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
      close();
    }
  }
}
