// How a call's context is made from its options.
#pragma once

#include "tidegate/client.h"

namespace tidegate {

using Deadline = std::optional<std::chrono::system_clock::time_point>;

inline Deadline DeadlineOf(const CallOptions& options) {
  if (!options.timeout) return std::nullopt;
  return std::chrono::system_clock::now() + *options.timeout;
}

inline void Prepare(grpc::ClientContext& context, const CallOptions& options, const Deadline& deadline) {
  if (deadline) context.set_deadline(*deadline);
  if (!options.traceparent.empty()) context.AddMetadata("traceparent", options.traceparent);
  for (const auto& [key, value] : options.metadata) context.AddMetadata(key, value);
}

}  // namespace tidegate
