/** Client of the Tidegate inference service: streamed generation over gRPC. */
export { TidegateClient, type CallOptions, type ClientOptions } from "./client.js";
export { TidegateError, type Violation } from "./errors.js";
export * from "./gen/tidegate/inference/v1/inference_pb.js";
