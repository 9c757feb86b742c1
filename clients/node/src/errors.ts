import { fromBinary } from "@bufbuild/protobuf";
import { anyUnpack, durationMs } from "@bufbuild/protobuf/wkt";
import { type ServiceError, status } from "@grpc/grpc-js";

import {
  BadRequestSchema,
  ErrorInfoSchema,
  QuotaFailureSchema,
  RetryInfoSchema,
} from "./gen/google/rpc/error_details_pb.js";
import { StatusSchema } from "./gen/google/rpc/status_pb.js";

/** What is wrong with one field of a request, or which quota is used up. */
export interface Violation {
  /** A field such as "sampling.top_p", or what the quota belongs to. */
  subject: string;
  /** For people, with the numbers. */
  description: string;
}

/** How a call failed: the gRPC status and what the server said beside it. */
export class TidegateError extends Error {
  /** Name of the gRPC code, such as "RESOURCE_EXHAUSTED". */
  readonly code: string;
  /** A constant such as "QUEUE_FULL"; empty if the server gave none. */
  reason = "";
  /** Whose reason it is: "tidegate.dev". */
  domain = "";
  /** The numbers behind the reason. */
  metadata: Record<string, string> = {};
  /** How long the server asks to wait before the request is sent again, if it said so. */
  retryAfterMs: number | undefined;
  /** What is wrong with the request. */
  fields: Violation[] = [];
  /** Which limits were reached. */
  quota: Violation[] = [];

  constructor(cause: ServiceError) {
    super(cause.details, { cause });
    this.name = "TidegateError";
    this.code = status[cause.code] ?? String(cause.code);
    const details = cause.metadata?.get("grpc-status-details-bin")[0];
    if (details instanceof Uint8Array) this.decode(details);
  }

  private decode(details: Uint8Array): void {
    let decoded;
    try {
      decoded = fromBinary(StatusSchema, details);
    } catch {
      return; // malformed details: the code and the message still hold
    }
    for (const detail of decoded.details) {
      const info = anyUnpack(detail, ErrorInfoSchema);
      if (info) Object.assign(this, { reason: info.reason, domain: info.domain, metadata: info.metadata });
      const delay = anyUnpack(detail, RetryInfoSchema)?.retryDelay;
      if (delay) this.retryAfterMs = durationMs(delay);
      for (const violation of anyUnpack(detail, BadRequestSchema)?.fieldViolations ?? []) {
        this.fields.push({ subject: violation.field, description: violation.description });
      }
      for (const violation of anyUnpack(detail, QuotaFailureSchema)?.violations ?? []) {
        this.quota.push({ subject: violation.subject, description: violation.description });
      }
    }
  }
}
