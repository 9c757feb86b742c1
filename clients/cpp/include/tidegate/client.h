// Client of the Tidegate inference service: streamed generation over gRPC.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "tidegate/inference/v1/inference.grpc.pb.h"

namespace tidegate {

namespace v1 = inference::v1;

// What is wrong with one field of a request, or which quota is used up.
struct Violation {
  std::string subject;      // a field such as "sampling.top_p", or what the quota belongs to
  std::string description;  // for people, with the numbers
};

// How a call failed: the gRPC status and what the server said beside it. what() is the status' message.
class Error : public std::runtime_error {
 public:
  explicit Error(const grpc::Status& status);

  grpc::StatusCode code;
  std::string reason;                                   // a constant such as "QUEUE_FULL"; empty if there is none
  std::string domain;                                   // whose reason it is: "tidegate.dev"
  std::map<std::string, std::string> metadata;          // the numbers behind the reason
  std::optional<std::chrono::nanoseconds> retry_after;  // how long the server asks to wait, if it said so
  std::vector<Violation> fields;                        // what is wrong with the request
  std::vector<Violation> quota;                         // which limits were reached
};

// Name of a code, such as "RESOURCE_EXHAUSTED".
std::string CodeName(grpc::StatusCode code);

// What goes with one call.
struct CallOptions {
  std::optional<std::chrono::milliseconds> timeout;  // the deadline from now; the server ends the request then
  std::string traceparent;                           // W3C trace context for the server's spans to continue
  std::map<std::string, std::string> metadata;       // further headers
  // Of Generate: how long to try to go on when the scheduler ends and one with its journal may come back. 0: not at
  // all, a loss is an UNAVAILABLE error.
  std::chrono::milliseconds reattach{0};
};

// One generation. Destroying it before its end cancels the request. One thread reads; any may cancel.
class Stream {
 public:
  ~Stream();
  Stream(Stream&&) noexcept;

  // Waits for the next event. False: the generation is complete. Throws Error.
  bool Next(v1::GenerateResponse* message);

  // Ends the request on the server; Next throws CANCELLED once what has arrived is read.
  void Cancel();

 private:
  friend class Client;
  class Call;
  class State;
  explicit Stream(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

// Calls one scheduler. It may be used by any number of threads. Each call throws Error when it fails.
class Client {
 public:
  // The connection to target, such as "localhost:50051", is made by the first call.
  explicit Client(const std::string& target,
                  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials());

  // Streams one generation: Admitted, then deltas, then a Finished for each candidate.
  Stream Generate(const v1::GenerateRequest& request, const CallOptions& options = {});

  // Goes on with a generation by its name, as after the end of the process that started it. What the request says was
  // received is left out. Events are those of Generate.
  Stream Attach(const v1::AttachRequest& request, const CallOptions& options = {});

  // Cancels a request by its name; its own stream ends with FINISH_REASON_CANCELLED.
  v1::CancelResponse Cancel(const v1::CancelRequest& request, const CallOptions& options = {});

  // The token ids that Generate would use for a prompt.
  v1::TokenizeResponse Tokenize(const v1::TokenizeRequest& request, const CallOptions& options = {});

  // The text of token ids.
  v1::DetokenizeResponse Detokenize(const v1::DetokenizeRequest& request, const CallOptions& options = {});

  // The models that are served.
  v1::ListModelsResponse ListModels(const v1::ListModelsRequest& request = {}, const CallOptions& options = {});

 private:
  std::unique_ptr<v1::InferenceService::Stub> stub_;
};

}  // namespace tidegate
