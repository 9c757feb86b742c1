import { setTimeout as sleep } from "node:timers/promises";

import {
  create,
  type DescMessage,
  type DescMethod,
  fromBinary,
  type MessageInitShape,
  type MessageShape,
  toBinary,
} from "@bufbuild/protobuf";
import { ChannelCredentials, Client, credentials, Metadata, type ServiceError } from "@grpc/grpc-js";

import { TidegateError } from "./errors.js";
import {
  type AttachRequestSchema,
  type CancelResponse,
  type DetokenizeResponse,
  type GenerateRequestSchema,
  type GenerateResponse,
  InferenceService,
  type ListModelsRequestSchema,
  type ListModelsResponse,
  type TokenizeRequestSchema,
  type TokenizeResponse,
  type DetokenizeRequestSchema,
} from "./gen/tidegate/inference/v1/inference_pb.js";
import { Recovery } from "./reattach.js";

/** How to reach the scheduler. */
export interface ClientOptions {
  /** Default: no encryption. */
  credentials?: ChannelCredentials;
  /** Options of the gRPC channel, over the client's own. */
  channelOptions?: Record<string, string | number>;
}

/** What goes with one call. */
export interface CallOptions {
  /** The call's deadline from now; the server ends the request when it passes. Default: none. */
  timeoutMs?: number;
  /** Ends the call, and with it the request on the server. */
  signal?: AbortSignal;
  /** Headers to send. */
  metadata?: Record<string, string>;
  /** W3C trace context for the server's spans to continue. */
  traceparent?: string;
  /**
   * Of generate: how long to try to go on when the scheduler ends and one with its journal may come back.
   * Default: 0, a loss is an UNAVAILABLE error.
   */
  reattachMs?: number;
}

/** Calls one scheduler, over one connection. */
export class TidegateClient {
  readonly #client: Client;

  /** @param target such as "localhost:50051"; the connection is made by the first call */
  constructor(target: string, options: ClientOptions = {}) {
    this.#client = new Client(target, options.credentials ?? credentials.createInsecure(), {
      "grpc.keepalive_time_ms": 30_000,
      "grpc.keepalive_timeout_ms": 20_000,
      ...options.channelOptions,
    });
  }

  /**
   * Streams one generation: Admitted, then deltas, then a Finished for each candidate. Leaving the loop early
   * (break, return, throw) cancels the request.
   *
   * @throws TidegateError
   */
  async *generate(
    request: MessageInitShape<typeof GenerateRequestSchema>,
    options: CallOptions = {},
  ): AsyncGenerator<GenerateResponse, void, undefined> {
    const recovery = new Recovery(options.reattachMs ?? 0);
    const endsAt = options.timeoutMs === undefined ? undefined : Date.now() + options.timeoutMs;
    let messages = this.#stream(InferenceService.method.generate, request, options, endsAt);
    for (;;) {
      try {
        for await (const message of messages) if (recovery.take(message)) yield message;
        return;
      } catch (error) {
        if (!(error instanceof TidegateError)) throw error;
        const pauseMs = recovery.pauseMsAfter(error);
        await sleep(pauseMs, undefined, { signal: options.signal }).catch(() => {}); // the next call is cancelled then
      }
      messages = this.#attach(recovery.request(), options, endsAt);
    }
  }

  /**
   * Goes on with a generation by its name, as after the end of the process that started it. What the request says
   * was received is left out. Events are those of generate.
   *
   * @throws TidegateError
   */
  attach(
    request: MessageInitShape<typeof AttachRequestSchema>,
    options: CallOptions = {},
  ): AsyncGenerator<GenerateResponse, void, undefined> {
    const endsAt = options.timeoutMs === undefined ? undefined : Date.now() + options.timeoutMs;
    return this.#attach(request, options, endsAt);
  }

  async *#attach(
    request: MessageInitShape<typeof AttachRequestSchema>,
    options: CallOptions,
    endsAt: number | undefined,
  ): AsyncGenerator<GenerateResponse, void, undefined> {
    for await (const { event } of this.#stream(InferenceService.method.attach, request, options, endsAt)) {
      if (event) yield event;
    }
  }

  async *#stream<I extends DescMessage, O extends DescMessage>(
    method: DescMethod & { input: I; output: O },
    request: MessageInitShape<I>,
    options: CallOptions,
    endsAt: number | undefined,
  ): AsyncGenerator<MessageShape<O>, void, undefined> {
    const call = this.#client.makeServerStreamRequest(
      ...codec(method),
      create(method.input, request),
      metadata(options),
      endsAt === undefined ? {} : { deadline: endsAt },
    );
    const abort = () => call.cancel();
    options.signal?.addEventListener("abort", abort);
    if (options.signal?.aborted) abort();
    try {
      yield* call as AsyncIterable<MessageShape<O>>;
    } catch (error) {
      throw new TidegateError(error as ServiceError);
    } finally {
      options.signal?.removeEventListener("abort", abort);
      call.on("error", () => {}); // that of our own cancel, when nobody listens any more
      call.cancel();
    }
  }

  /** Cancels a request by its name; its own stream ends with FINISH_REASON_CANCELLED. @throws TidegateError */
  cancel(requestId: string, options: CallOptions = {}): Promise<CancelResponse> {
    return this.#unary(InferenceService.method.cancel, { requestId }, options);
  }

  /** The token ids that generate would use for a prompt. @throws TidegateError */
  tokenize(
    request: MessageInitShape<typeof TokenizeRequestSchema>,
    options: CallOptions = {},
  ): Promise<TokenizeResponse> {
    return this.#unary(InferenceService.method.tokenize, request, options);
  }

  /** The text of token ids. @throws TidegateError */
  detokenize(
    request: MessageInitShape<typeof DetokenizeRequestSchema>,
    options: CallOptions = {},
  ): Promise<DetokenizeResponse> {
    return this.#unary(InferenceService.method.detokenize, request, options);
  }

  /** The models that are served. @throws TidegateError */
  listModels(
    request: MessageInitShape<typeof ListModelsRequestSchema> = {},
    options: CallOptions = {},
  ): Promise<ListModelsResponse> {
    return this.#unary(InferenceService.method.listModels, request, options);
  }

  /** Closes the connection. Requests that are running are cancelled. */
  close(): void {
    this.#client.close();
  }

  #unary<I extends DescMessage, O extends DescMessage>(
    method: DescMethod & { input: I; output: O },
    request: MessageInitShape<I>,
    options: CallOptions,
  ): Promise<MessageShape<O>> {
    return new Promise((resolve, reject) => {
      const call = this.#client.makeUnaryRequest(
        ...codec(method),
        create(method.input, request),
        metadata(options),
        deadline(options),
        (error, response) => (error ? reject(new TidegateError(error)) : resolve(response!)),
      );
      options.signal?.addEventListener("abort", () => call.cancel(), { once: true });
      if (options.signal?.aborted) call.cancel();
    });
  }
}

/** A method's path, and how its messages become bytes and back. */
function codec<I extends DescMessage, O extends DescMessage>(method: DescMethod & { input: I; output: O }) {
  return [
    `/${method.parent.typeName}/${method.name}`,
    (message: MessageShape<I>) => Buffer.from(toBinary(method.input, message)),
    (bytes: Buffer) => fromBinary(method.output, bytes),
  ] as const;
}

function metadata(options: CallOptions): Metadata {
  const headers = new Metadata();
  for (const [key, value] of Object.entries(options.metadata ?? {})) headers.set(key, value);
  if (options.traceparent !== undefined) headers.set("traceparent", options.traceparent);
  return headers;
}

function deadline(options: CallOptions) {
  return options.timeoutMs === undefined ? {} : { deadline: Date.now() + options.timeoutMs };
}
