#include "tidegate/client.h"

#include "context.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace tidegate {
namespace {

template <typename Request, typename Response>
Response Unary(v1::InferenceService::Stub& stub,
               grpc::Status (v1::InferenceService::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
               const Request& request, const CallOptions& options) {
  Response response;
  grpc::ClientContext context;
  Prepare(context, options, DeadlineOf(options));
  grpc::Status status = (stub.*method)(&context, request, &response);
  if (!status.ok()) throw Error(status);
  return response;
}

}  // namespace

Error::Error(const grpc::Status& status) : std::runtime_error(status.error_message()), code(status.error_code()) {
  google::rpc::Status details;
  if (!details.ParseFromString(status.error_details())) return;  // malformed: code and message still hold
  google::rpc::ErrorInfo info;
  google::rpc::RetryInfo retry;
  google::rpc::BadRequest bad_request;
  google::rpc::QuotaFailure quota_failure;
  for (const auto& detail : details.details()) {
    if (detail.UnpackTo(&info)) {
      reason = info.reason();
      domain = info.domain();
      metadata.insert(info.metadata().begin(), info.metadata().end());
    } else if (detail.UnpackTo(&retry)) {
      const auto& delay = retry.retry_delay();
      retry_after = std::chrono::seconds(delay.seconds()) + std::chrono::nanoseconds(delay.nanos());
    } else if (detail.UnpackTo(&bad_request)) {
      for (const auto& each : bad_request.field_violations()) fields.push_back({each.field(), each.description()});
    } else if (detail.UnpackTo(&quota_failure)) {
      for (const auto& each : quota_failure.violations()) quota.push_back({each.subject(), each.description()});
    }
  }
}

std::string CodeName(grpc::StatusCode code) {
  static const char* const names[] = {
      "OK",        "CANCELLED",         "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
      "NOT_FOUND", "ALREADY_EXISTS",    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
      "ABORTED",   "OUT_OF_RANGE",      "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
      "DATA_LOSS", "UNAUTHENTICATED"};
  const auto number = static_cast<size_t>(code);
  return number < std::size(names) ? names[number] : std::to_string(number);
}

Client::Client(const std::string& target, std::shared_ptr<grpc::ChannelCredentials> credentials) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 30000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20000);
  stub_ = v1::InferenceService::NewStub(grpc::CreateCustomChannel(target, credentials, arguments));
}

v1::CancelResponse Client::Cancel(const v1::CancelRequest& request, const CallOptions& options) {
  return Unary(*stub_, &v1::InferenceService::Stub::Cancel, request, options);
}

v1::TokenizeResponse Client::Tokenize(const v1::TokenizeRequest& request, const CallOptions& options) {
  return Unary(*stub_, &v1::InferenceService::Stub::Tokenize, request, options);
}

v1::DetokenizeResponse Client::Detokenize(const v1::DetokenizeRequest& request, const CallOptions& options) {
  return Unary(*stub_, &v1::InferenceService::Stub::Detokenize, request, options);
}

v1::ListModelsResponse Client::ListModels(const v1::ListModelsRequest& request, const CallOptions& options) {
  return Unary(*stub_, &v1::InferenceService::Stub::ListModels, request, options);
}

}  // namespace tidegate
