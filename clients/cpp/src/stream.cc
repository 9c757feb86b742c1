// A generation as it streams, and how it goes on when its scheduler is lost.
#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <random>

#include "context.h"

namespace tidegate {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

namespace {

constexpr milliseconds kFirstPause{100};
constexpr milliseconds kLongestPause{2000};

// What has come of one generation, and what becomes of it when a call fails. Waits for nothing.
class Recovery {
 public:
  explicit Recovery(milliseconds patience) : patience_(patience) {}

  // Counts an event in; whether its reader has not seen it: a stream that goes on begins with Admitted again.
  bool Take(const v1::GenerateResponse& message) {
    loss_.reset();
    if (message.has_admitted()) {
      const bool is_new = request_id_.empty();
      request_id_ = message.admitted().request_id();
      return is_new;
    }
    if (message.has_delta()) {
      const auto& delta = message.delta();
      auto& received = Of(delta.index());
      received.set_num_tokens(received.num_tokens() + std::max(delta.token_ids_size(), delta.logprobs_size()));
      received.set_text_bytes(received.text_bytes() + delta.text().size());
    } else if (message.has_finished()) {
      Of(message.finished().index()).set_finished(true);
    }
    return true;
  }

  // How long to wait before the request goes on by Attach. Throws what ends the stream.
  milliseconds PauseAfter(const Error& error) {
    if (!loss_) {
      // A scheduler that gives another reason is there.
      const bool is_loss =
          error.code == grpc::UNAVAILABLE && (error.reason.empty() || error.reason == "ENGINE_LOST");
      if (!is_loss || request_id_.empty() || patience_.count() == 0) throw error;
      loss_ = error;
      give_up_at_ = steady_clock::now() + patience_;
      pause_ = kFirstPause / 2;
    } else if (error.code == grpc::NOT_FOUND || error.code == grpc::UNIMPLEMENTED) {
      throw *loss_;
    } else if (error.code != grpc::UNAVAILABLE && error.code != grpc::ALREADY_EXISTS) {
      throw error;  // ALREADY_EXISTS: it has not yet noticed that the old stream broke
    }
    pause_ = std::min(2 * pause_, kLongestPause);
    const milliseconds pause(std::uniform_int_distribution<long>(pause_.count() / 2, pause_.count())(random_));
    if (steady_clock::now() + pause > give_up_at_) throw *loss_;
    return pause;
  }

  // Asks for what has not come.
  v1::AttachRequest Request() const {
    v1::AttachRequest request;
    request.set_request_id(request_id_);
    for (const auto& [index, received] : received_) *request.add_received() = received;
    return request;
  }

 private:
  v1::Received& Of(uint32_t index) {
    auto& received = received_[index];
    received.set_index(index);
    return received;
  }

  milliseconds patience_;
  std::string request_id_;
  std::map<uint32_t, v1::Received> received_;
  std::optional<Error> loss_;  // what broke the stream that is to go on
  steady_clock::time_point give_up_at_;
  milliseconds pause_{0};
  std::minstd_rand random_{std::random_device{}()};
};

}  // namespace

// One RPC of a stream: Generate, or Attach.
class Stream::Call {
 public:
  virtual ~Call() = default;
  virtual bool Read(v1::GenerateResponse* message) = 0;
  virtual grpc::Status Finish() = 0;

  grpc::ClientContext context;
};

namespace {

template <typename Base>
class GenerateCall : public Base {
 public:
  void Start(v1::InferenceService::Stub& stub, const v1::GenerateRequest& request) {
    reader_ = stub.Generate(&this->context, request);
  }
  bool Read(v1::GenerateResponse* message) override { return reader_->Read(message); }
  grpc::Status Finish() override { return reader_->Finish(); }

 private:
  std::unique_ptr<grpc::ClientReader<v1::GenerateResponse>> reader_;
};

template <typename Base>
class AttachCall : public Base {
 public:
  void Start(v1::InferenceService::Stub& stub, const v1::AttachRequest& request) {
    reader_ = stub.Attach(&this->context, request);
  }
  bool Read(v1::GenerateResponse* message) override {
    v1::AttachResponse answer;
    if (!reader_->Read(&answer)) return false;
    message->Swap(answer.mutable_event());
    return true;
  }
  grpc::Status Finish() override { return reader_->Finish(); }

 private:
  std::unique_ptr<grpc::ClientReader<v1::AttachResponse>> reader_;
};

}  // namespace

class Stream::State {
 public:
  State(v1::InferenceService::Stub& stub, const CallOptions& options)
      : stub_(stub), options_(options), deadline_(DeadlineOf(options)), recovery_(options.reattach) {}

  ~State() {
    if (!call_) return;
    call_->context.TryCancel();
    v1::GenerateResponse rest;
    while (call_->Read(&rest)) {
    }
    call_->Finish();
  }

  template <template <typename> class Kind, typename Request>
  void Start(const Request& request) {
    auto call = std::make_unique<Kind<Call>>();
    Prepare(call->context, options_, deadline_);
    call->Start(stub_, request);
    std::lock_guard<std::mutex> lock(mutex_);
    if (cancelled_) call->context.TryCancel();
    call_ = std::move(call);
  }

  bool Next(v1::GenerateResponse* message) {
    while (call_) {
      while (call_->Read(message)) {
        if (recovery_.Take(*message)) return true;
      }
      const grpc::Status status = End();
      if (status.ok()) return false;
      const milliseconds pause = recovery_.PauseAfter(Error(status));
      {
        std::unique_lock<std::mutex> lock(mutex_);
        cancel_.wait_for(lock, pause, [this] { return cancelled_; });
      }
      Start<AttachCall>(recovery_.Request());  // which fails at once if it was cancelled
    }
    return false;
  }

  void Cancel() {
    std::lock_guard<std::mutex> lock(mutex_);
    cancelled_ = true;
    cancel_.notify_all();
    if (call_) call_->context.TryCancel();
  }

 private:
  grpc::Status End() {
    const grpc::Status status = call_->Finish();
    std::lock_guard<std::mutex> lock(mutex_);
    call_.reset();
    return status;
  }

  v1::InferenceService::Stub& stub_;
  const CallOptions options_;
  const Deadline deadline_;
  Recovery recovery_;
  std::mutex mutex_;  // for what Cancel touches: call_ and cancelled_
  std::condition_variable cancel_;
  bool cancelled_ = false;
  std::unique_ptr<Call> call_;  // none: the stream has ended
};

Stream::Stream(std::unique_ptr<State> state) : state_(std::move(state)) {}
Stream::~Stream() = default;
Stream::Stream(Stream&&) noexcept = default;
bool Stream::Next(v1::GenerateResponse* message) { return state_->Next(message); }
void Stream::Cancel() { state_->Cancel(); }

Stream Client::Generate(const v1::GenerateRequest& request, const CallOptions& options) {
  auto state = std::make_unique<Stream::State>(*stub_, options);
  state->Start<GenerateCall>(request);
  return Stream(std::move(state));
}

Stream Client::Attach(const v1::AttachRequest& request, const CallOptions& options) {
  CallOptions once = options;
  once.reattach = milliseconds(0);
  auto state = std::make_unique<Stream::State>(*stub_, once);
  state->Start<AttachCall>(request);
  return Stream(std::move(state));
}

}  // namespace tidegate
