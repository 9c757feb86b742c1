/**
 * Streams one generation, then shows a cancel, a deadline and an error with its details.
 *
 *     node dist/examples/stream.js [target] [prompt]
 */
import { FinishReason, TidegateClient, TidegateError } from "../src/index.js";

const client = new TidegateClient(process.argv[2] ?? "localhost:50051");
const prompt = { case: "text" as const, value: process.argv[3] ?? "Once upon a time" };
const greedy = { temperature: 0 };

// Text as it comes. The deadline is a minute; the server's spans join the caller's trace, whose traceparent
// comes from the current span in a program that traces.
const traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const request = { prompt, sampling: greedy, stopping: { maxTokens: 40 } };
for await (const { event } of client.generate(request, { timeoutMs: 60_000, traceparent })) {
  if (event.case === "delta") process.stdout.write(event.value.text);
  if (event.case === "finished") {
    console.log(`\n[${FinishReason[event.value.reason]}, ${event.value.usage?.outputTokens} tokens]`);
  }
}

// Leaving the loop frees what the request holds on the server.
const long = { prompt, sampling: greedy, stopping: { maxTokens: 400, ignoreEos: true } };
for await (const { event } of client.generate(long)) {
  if (event.case === "delta") break;
}
console.log("[cancelled]");

// Less time than the request needs.
try {
  for await (const _ of client.generate(long, { timeoutMs: 50 }));
} catch (error) {
  if (!(error instanceof TidegateError)) throw error;
  console.log(`[deadline: ${error.code}]`);
}

// What an error carries.
try {
  for await (const _ of client.generate({ prompt, sampling: { topP: 0 } }));
} catch (error) {
  if (!(error instanceof TidegateError)) throw error;
  console.log(`[refused: ${error.code} ${error.reason}]`, error.fields);
  if (error.retryAfterMs !== undefined) console.log(`[try again in ${error.retryAfterMs} ms]`);
}
client.close();
