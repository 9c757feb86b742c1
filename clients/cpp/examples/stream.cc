// Streams one generation, then shows a cancel, a deadline and an error with its details.
//
//   build/example [target] [prompt]
#include <iostream>

#include "tidegate/client.h"

using tidegate::v1::GenerateRequest;
using tidegate::v1::GenerateResponse;

GenerateRequest MakeRequest(const std::string& prompt, int max_tokens) {
  GenerateRequest request;
  request.set_text(prompt);
  request.mutable_sampling()->set_temperature(0);
  request.mutable_stopping()->set_max_tokens(max_tokens);
  request.mutable_stopping()->set_ignore_eos(true);
  return request;
}

// Prints text as it comes. The deadline is a minute; the server's spans join the caller's trace, whose traceparent
// comes from the current span in a program that traces.
void PrintStream(tidegate::Client& client, const std::string& prompt) {
  tidegate::CallOptions options;
  options.timeout = std::chrono::minutes(1);
  options.traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
  tidegate::Stream stream = client.Generate(MakeRequest(prompt, 40), options);
  GenerateResponse message;
  while (stream.Next(&message)) {
    if (message.has_delta()) std::cout << message.delta().text() << std::flush;
    if (message.has_finished()) {
      std::cout << "\n[" << tidegate::v1::FinishReason_Name(message.finished().reason()) << ", "
                << message.finished().usage().output_tokens() << " tokens]\n";
    }
  }
}

// Leaves after the first tokens: destroying the stream frees what the request holds on the server.
void Leave(tidegate::Client& client, const std::string& prompt) {
  tidegate::Stream stream = client.Generate(MakeRequest(prompt, 400));
  GenerateResponse message;
  while (stream.Next(&message) && !message.has_delta()) {
  }
  std::cout << "[cancelled]\n";
}

// Shows what an error carries.
void PrintError(tidegate::Client& client, const GenerateRequest& request, const tidegate::CallOptions& options) {
  try {
    tidegate::Stream stream = client.Generate(request, options);
    GenerateResponse message;
    while (stream.Next(&message)) {
    }
  } catch (const tidegate::Error& error) {
    std::cout << "[" << tidegate::CodeName(error.code) << " " << error.reason << ": " << error.what() << "]\n";
    for (const auto& field : error.fields) std::cout << "[" << field.subject << ": " << field.description << "]\n";
    if (error.retry_after) std::cout << "[try again in " << error.retry_after->count() / 1e9 << " s]\n";
  }
}

int main(int argc, char** argv) {
  const std::string target = argc > 1 ? argv[1] : "localhost:50051";
  const std::string prompt = argc > 2 ? argv[2] : "Once upon a time";
  try {
    tidegate::Client client(target);
    PrintStream(client, prompt);
    Leave(client, prompt);
    tidegate::CallOptions hurried;
    hurried.timeout = std::chrono::milliseconds(50);
    PrintError(client, MakeRequest(prompt, 400), hurried);
    GenerateRequest bad = MakeRequest(prompt, 40);
    bad.mutable_sampling()->set_top_p(0);
    PrintError(client, bad, {});
  } catch (const tidegate::Error& error) {
    std::cerr << tidegate::CodeName(error.code) << ": " << error.what() << "\n";
    return 1;
  }
}
