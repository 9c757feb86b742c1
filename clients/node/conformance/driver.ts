/** Executes commands of the conformance suite; see clients/conformance/README.md. */
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

import { type DescMessage, fromBinary, fromJson, type JsonValue, type MessageShape, toJson } from "@bufbuild/protobuf";

import {
  AttachRequestSchema,
  type CallOptions,
  CancelRequestSchema,
  CancelResponseSchema,
  DetokenizeRequestSchema,
  DetokenizeResponseSchema,
  GenerateRequestSchema,
  GenerateResponseSchema,
  ListModelsRequestSchema,
  ListModelsResponseSchema,
  TidegateClient,
  TidegateError,
  TokenizeRequestSchema,
  TokenizeResponseSchema,
  type Violation,
} from "../src/index.js";

interface Command {
  method: string;
  request?: JsonValue;
  request_base64?: string;
  deadline_ms: number;
  metadata?: Record<string, string>;
  cancel_after_messages?: number;
  reattach_ms?: number;
  during?: { after_messages: number; commands: Command[] };
}

interface Answer {
  messages: JsonValue[];
  code: string;
  message: string;
  error: object | null;
  during: Answer[];
}

const client = new TidegateClient(process.argv[2]!);

async function execute(command: Command): Promise<Answer> {
  const answer: Answer = { messages: [], code: "OK", message: "", error: null, during: [] };
  const { traceparent, ...metadata } = command.metadata ?? {};
  const options: CallOptions = { timeoutMs: command.deadline_ms, metadata };
  if (traceparent !== undefined) options.traceparent = traceparent;
  try {
    await call(command, options, answer);
  } catch (error) {
    if (!(error instanceof TidegateError)) throw error;
    answer.code = error.code;
    answer.message = error.message;
    answer.error = {
      reason: error.reason,
      domain: error.domain,
      metadata: error.metadata,
      retry_after_ms: error.retryAfterMs ?? null,
      violations: pairs(error.fields),
      quota: pairs(error.quota),
    };
  }
  return answer;
}

async function call(command: Command, options: CallOptions, answer: Answer): Promise<void> {
  switch (command.method) {
    case "Generate":
    case "Attach":
      return stream(command, options, answer);
    case "Cancel": {
      const { requestId } = parse(CancelRequestSchema, command);
      answer.messages.push(toJson(CancelResponseSchema, await client.cancel(requestId, options)));
      return;
    }
    case "Tokenize": {
      const reply = await client.tokenize(parse(TokenizeRequestSchema, command), options);
      answer.messages.push(toJson(TokenizeResponseSchema, reply));
      return;
    }
    case "Detokenize": {
      const reply = await client.detokenize(parse(DetokenizeRequestSchema, command), options);
      answer.messages.push(toJson(DetokenizeResponseSchema, reply));
      return;
    }
    case "ListModels": {
      const reply = await client.listModels(parse(ListModelsRequestSchema, command), options);
      answer.messages.push(toJson(ListModelsResponseSchema, reply));
      return;
    }
    default:
      throw new Error(`unknown method ${command.method}`);
  }
}

async function stream(command: Command, options: CallOptions, answer: Answer): Promise<void> {
  const cancel = new AbortController();
  const calling = { ...options, signal: cancel.signal, reattachMs: command.reattach_ms ?? 0 };
  const messages =
    command.method === "Attach"
      ? client.attach(parse(AttachRequestSchema, command), calling)
      : client.generate(parse(GenerateRequestSchema, command), calling);
  for (;;) {
    const next = messages.next();
    if (answer.messages.length === command.cancel_after_messages) cancel.abort();
    if (answer.messages.length === command.during?.after_messages) {
      for (const inner of command.during.commands) answer.during.push(await execute(inner));
    }
    const message = await next;
    if (message.done) return;
    answer.messages.push(toJson(GenerateResponseSchema, message.value));
  }
}

function parse<T extends DescMessage>(schema: T, command: Command): MessageShape<T> {
  if (command.request_base64 !== undefined) return fromBinary(schema, Buffer.from(command.request_base64, "base64"));
  return fromJson(schema, command.request ?? {});
}

function pairs(violations: Violation[]): string[][] {
  return violations.map(({ subject, description }) => [subject, description]);
}

const { version } = createRequire(import.meta.url)("@grpc/grpc-js/package.json") as { version: string };
console.log(JSON.stringify({ language: "Node", runtime: `Node ${process.versions.node}, grpc-js ${version}` }));
for await (const line of createInterface({ input: process.stdin })) {
  console.log(JSON.stringify(await execute(JSON.parse(line) as Command)));
}
client.close();
