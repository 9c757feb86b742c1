package dev.tidegate.conformance;

import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.Message;
import com.google.protobuf.MessageOrBuilder;
import com.google.protobuf.util.JsonFormat;
import dev.tidegate.client.CallOptions;
import dev.tidegate.client.Generation;
import dev.tidegate.client.TidegateClient;
import dev.tidegate.client.TidegateException;
import dev.tidegate.inference.v1.AttachRequest;
import dev.tidegate.inference.v1.CancelRequest;
import dev.tidegate.inference.v1.DetokenizeRequest;
import dev.tidegate.inference.v1.GenerateRequest;
import dev.tidegate.inference.v1.ListModelsRequest;
import dev.tidegate.inference.v1.TokenizeRequest;
import io.grpc.internal.GrpcUtil;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Base64;
import java.util.List;
import java.util.Map;

/** Executes commands of the conformance suite; see clients/conformance/README.md. */
public final class Driver {
  private static final Gson GSON = new GsonBuilder().serializeNulls().disableHtmlEscaping().create();
  private final TidegateClient client;

  private Driver(TidegateClient client) {
    this.client = client;
  }

  public static void main(String[] arguments) throws IOException {
    PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
    BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    try (TidegateClient client = TidegateClient.plaintext(arguments[0])) {
      String version = GrpcUtil.getGrpcBuildVersion().getImplementationVersion();
      String runtime = "Java " + Runtime.version().feature() + ", grpc-java " + version;
      out.println(GSON.toJson(Map.of("language", "Java", "runtime", runtime)));
      Driver driver = new Driver(client);
      for (String line = in.readLine(); line != null; line = in.readLine()) {
        out.println(GSON.toJson(driver.execute(JsonParser.parseString(line).getAsJsonObject())));
      }
    }
  }

  private JsonObject execute(JsonObject command) throws InvalidProtocolBufferException {
    JsonArray messages = new JsonArray();
    JsonArray during = new JsonArray();
    JsonObject answer = new JsonObject();
    answer.addProperty("code", "OK");
    answer.addProperty("message", "");
    answer.add("error", null);
    answer.add("messages", messages);
    answer.add("during", during);
    try {
      call(command, messages, during);
    } catch (TidegateException error) {
      answer.addProperty("code", error.code().name());
      answer.addProperty("message", error.getMessage() == null ? "" : error.getMessage());
      answer.add("error", details(error));
    }
    return answer;
  }

  private void call(JsonObject command, JsonArray messages, JsonArray during) throws InvalidProtocolBufferException {
    CallOptions options = options(command);
    String method = command.get("method").getAsString();
    switch (method) {
      case "Generate", "Attach" -> stream(command, options, messages, during);
      case "Cancel" -> messages.add(
          json(client.cancel(parse(command, CancelRequest.newBuilder()).build(), options)));
      case "Tokenize" -> messages.add(
          json(client.tokenize(parse(command, TokenizeRequest.newBuilder()).build(), options)));
      case "Detokenize" -> messages.add(
          json(client.detokenize(parse(command, DetokenizeRequest.newBuilder()).build(), options)));
      case "ListModels" -> messages.add(
          json(client.listModels(parse(command, ListModelsRequest.newBuilder()).build(), options)));
      default -> throw new IllegalArgumentException("unknown method " + method);
    }
  }

  private void stream(JsonObject command, CallOptions options, JsonArray messages, JsonArray during)
      throws InvalidProtocolBufferException {
    int cancelAfter = number(command, "cancel_after_messages");
    JsonObject inner = command.has("during") ? command.getAsJsonObject("during") : new JsonObject();
    int duringAfter = number(inner, "after_messages");
    try (Generation generation = open(command, options)) {
      while (true) {
        if (messages.size() == cancelAfter) {
          generation.close();
        }
        if (messages.size() == duringAfter) {
          for (JsonElement each : inner.getAsJsonArray("commands")) {
            during.add(execute(each.getAsJsonObject()));
          }
        }
        if (!generation.hasNext()) {
          return;
        }
        messages.add(json(generation.next()));
      }
    }
  }

  private Generation open(JsonObject command, CallOptions options) throws InvalidProtocolBufferException {
    if (command.get("method").getAsString().equals("Attach")) {
      return client.attach(parse(command, AttachRequest.newBuilder()).build(), options);
    }
    GenerateRequest request = parse(command, GenerateRequest.newBuilder()).build();
    int patienceMs = number(command, "reattach_ms");
    return client.generate(request, patienceMs < 0 ? options : options.withReattach(Duration.ofMillis(patienceMs)));
  }

  private static CallOptions options(JsonObject command) {
    CallOptions options = CallOptions.NONE.withTimeout(Duration.ofMillis(command.get("deadline_ms").getAsLong()));
    if (command.has("metadata")) {
      for (Map.Entry<String, JsonElement> header : command.getAsJsonObject("metadata").entrySet()) {
        String value = header.getValue().getAsString();
        options = header.getKey().equals("traceparent")
            ? options.withTraceparent(value)
            : options.withHeader(header.getKey(), value);
      }
    }
    return options;
  }

  private static <B extends Message.Builder> B parse(JsonObject command, B builder)
      throws InvalidProtocolBufferException {
    if (command.has("request_base64")) {
      builder.mergeFrom(Base64.getDecoder().decode(command.get("request_base64").getAsString()));
    } else {
      JsonFormat.parser().merge(command.get("request").toString(), builder);
    }
    return builder;
  }

  private static JsonElement json(MessageOrBuilder message) throws InvalidProtocolBufferException {
    return JsonParser.parseString(JsonFormat.printer().print(message));
  }

  private static JsonObject details(TidegateException error) {
    JsonObject details = new JsonObject();
    details.addProperty("reason", error.reason());
    details.addProperty("domain", error.domain());
    details.add("metadata", GSON.toJsonTree(error.metadata()));
    details.addProperty("retry_after_ms", error.retryAfter().map(wait -> wait.toNanos() / 1e6).orElse(null));
    details.add("violations", pairs(error.fields()));
    details.add("quota", pairs(error.quota()));
    return details;
  }

  private static JsonElement pairs(List<TidegateException.Violation> violations) {
    return GSON.toJsonTree(violations.stream().map(each -> List.of(each.subject(), each.description())).toList());
  }

  private static int number(JsonObject object, String key) {
    return object.has(key) ? object.get(key).getAsInt() : -1;
  }
}
