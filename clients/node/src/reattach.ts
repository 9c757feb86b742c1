import { create } from "@bufbuild/protobuf";

import type { TidegateError } from "./errors.js";
import {
  type AttachRequest,
  AttachRequestSchema,
  type GenerateResponse,
  type Received,
  ReceivedSchema,
} from "./gen/tidegate/inference/v1/inference_pb.js";

const FIRST_PAUSE_MS = 100;
const LONGEST_PAUSE_MS = 2_000;

/** What has come of one generation, and what becomes of it when a call fails. Waits for nothing. */
export class Recovery {
  #requestId = "";
  readonly #received = new Map<number, Received>();
  #loss: TidegateError | undefined;
  #giveUpAt = 0;
  #pauseMs = 0;

  /** @param patienceMs how long to try for after a loss; 0: not at all */
  constructor(private readonly patienceMs: number) {}

  /** Counts an event in; whether its reader has not seen it: a stream that goes on begins with Admitted again. */
  take({ event }: GenerateResponse): boolean {
    this.#loss = undefined;
    if (event.case === "admitted") {
      const isNew = this.#requestId === "";
      this.#requestId = event.value.requestId;
      return isNew;
    }
    if (event.case === "delta") {
      const received = this.#of(event.value.index);
      received.numTokens += Math.max(event.value.tokenIds.length, event.value.logprobs.length);
      received.textBytes += BigInt(Buffer.byteLength(event.value.text));
    } else if (event.case === "finished") {
      this.#of(event.value.index).finished = true;
    }
    return true;
  }

  /** How long to wait before the request goes on by Attach. @throws TidegateError what ends the stream */
  pauseMsAfter(error: TidegateError): number {
    if (this.#loss === undefined) {
      // A scheduler that gives another reason is there.
      const isLoss = error.code === "UNAVAILABLE" && ["", "ENGINE_LOST"].includes(error.reason);
      if (!isLoss || this.#requestId === "" || this.patienceMs === 0) throw error;
      this.#loss = error;
      this.#giveUpAt = Date.now() + this.patienceMs;
      this.#pauseMs = FIRST_PAUSE_MS / 2;
    } else if (error.code === "NOT_FOUND" || error.code === "UNIMPLEMENTED") {
      throw this.#loss;
    } else if (error.code !== "UNAVAILABLE" && error.code !== "ALREADY_EXISTS") {
      throw error; // ALREADY_EXISTS: it has not yet noticed that the old stream broke
    }
    this.#pauseMs = Math.min(2 * this.#pauseMs, LONGEST_PAUSE_MS);
    const pauseMs = this.#pauseMs * (0.5 + Math.random() / 2);
    if (Date.now() + pauseMs > this.#giveUpAt) throw this.#loss;
    return pauseMs;
  }

  /** Asks for what has not come. */
  request(): AttachRequest {
    return create(AttachRequestSchema, { requestId: this.#requestId, received: [...this.#received.values()] });
  }

  #of(index: number): Received {
    let received = this.#received.get(index);
    if (received === undefined) {
      received = create(ReceivedSchema, { index });
      this.#received.set(index, received);
    }
    return received;
  }
}
