package dev.tidegate.examples;

import dev.tidegate.client.CallOptions;
import dev.tidegate.client.Generation;
import dev.tidegate.client.TidegateClient;
import dev.tidegate.client.TidegateException;
import dev.tidegate.inference.v1.GenerateRequest;
import dev.tidegate.inference.v1.GenerateResponse;
import dev.tidegate.inference.v1.SamplingParams;
import dev.tidegate.inference.v1.StoppingParams;
import java.time.Duration;

/**
 * Streams one generation, then shows a cancel, a deadline and an error with its details.
 *
 * <pre>build/example [target] [prompt]</pre>
 */
public final class Stream {
  /** In a program that traces, this comes from its current span. */
  private static final String TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

  public static void main(String[] arguments) {
    String target = arguments.length > 0 ? arguments[0] : "localhost:50051";
    String prompt = arguments.length > 1 ? arguments[1] : "Once upon a time";
    try (TidegateClient client = TidegateClient.plaintext(target)) {
      print(client, prompt);
      leave(client, prompt);
      show(client, request(prompt, 400), CallOptions.NONE.withTimeout(Duration.ofMillis(50)));
      GenerateRequest bad = request(prompt, 40).toBuilder().setSampling(SamplingParams.newBuilder().setTopP(0)).build();
      show(client, bad, CallOptions.NONE);
    }
  }

  /** Prints text as it comes. The deadline is a minute; the server's spans join the caller's trace. */
  private static void print(TidegateClient client, String prompt) {
    CallOptions options = CallOptions.NONE.withTimeout(Duration.ofMinutes(1)).withTraceparent(TRACEPARENT);
    try (Generation generation = client.generate(request(prompt, 40), options)) {
      for (GenerateResponse message : generation) {
        switch (message.getEventCase()) {
          case DELTA -> System.out.print(message.getDelta().getText());
          case FINISHED -> System.out.printf("%n[%s, %d tokens]%n", message.getFinished().getReason(),
              message.getFinished().getUsage().getOutputTokens());
          default -> { }
        }
      }
    }
  }

  /** Leaves after the first tokens: closing the generation frees what the request holds on the server. */
  private static void leave(TidegateClient client, String prompt) {
    try (Generation generation = client.generate(request(prompt, 400), CallOptions.NONE)) {
      while (generation.hasNext() && !generation.next().hasDelta()) {
        continue;
      }
    }
    System.out.println("[cancelled]");
  }

  /** Shows what an error carries. */
  private static void show(TidegateClient client, GenerateRequest request, CallOptions options) {
    try (Generation generation = client.generate(request, options)) {
      generation.forEachRemaining(message -> { });
    } catch (TidegateException error) {
      System.out.printf("[%s %s: %s]%n", error.code(), error.reason(), error.getMessage());
      error.fields().forEach(field -> System.out.printf("[%s: %s]%n", field.subject(), field.description()));
      error.retryAfter().ifPresent(wait -> System.out.printf("[try again in %s]%n", wait));
    }
  }

  private static GenerateRequest request(String prompt, int maxTokens) {
    return GenerateRequest.newBuilder()
        .setText(prompt)
        .setSampling(SamplingParams.newBuilder().setTemperature(0))
        .setStopping(StoppingParams.newBuilder().setMaxTokens(maxTokens).setIgnoreEos(true))
        .build();
  }
}
