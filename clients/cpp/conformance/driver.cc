// Executes commands of the conformance suite; see clients/conformance/README.md. JSON is read and written as
// google.protobuf.Struct, so that no other library is needed.
#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>
#include <google/protobuf/wrappers.pb.h>

#include <iostream>

#include "tidegate/client.h"

using google::protobuf::ListValue;
using google::protobuf::Message;
using google::protobuf::Struct;
using google::protobuf::Value;
using google::protobuf::util::JsonStringToMessage;
using google::protobuf::util::MessageToJsonString;
namespace v1 = tidegate::v1;

const Value* Find(const Struct& object, const std::string& key) {
  auto found = object.fields().find(key);
  return found == object.fields().end() ? nullptr : &found->second;
}

int Number(const Struct& object, const std::string& key, int fallback) {
  const Value* value = Find(object, key);
  return value ? static_cast<int>(value->number_value()) : fallback;
}

std::string ToJson(const Message& message) {
  std::string json;
  if (!MessageToJsonString(message, &json).ok()) std::abort();
  return json;
}

void FromJson(const std::string& json, Message* message) {
  auto status = JsonStringToMessage(json, message);
  if (status.ok()) return;
  std::cerr << status << "\n";
  std::exit(1);
}

std::string DecodeBase64(const std::string& text) {
  google::protobuf::BytesValue bytes;  // the JSON form of bytes is base64
  FromJson("\"" + text + "\"", &bytes);
  return bytes.value();
}

template <typename Request>
Request Parse(const Struct& command) {
  Request request;
  if (const Value* raw = Find(command, "request_base64")) {
    request.ParseFromString(DecodeBase64(raw->string_value()));
  } else {
    FromJson(ToJson(*Find(command, "request")), &request);
  }
  return request;
}

void Add(const Message& message, ListValue* messages) { FromJson(ToJson(message), messages->add_values()); }

void AddPairs(const std::vector<tidegate::Violation>& violations, Value* list) {
  list->mutable_list_value();
  for (const auto& each : violations) {
    auto* pair = list->mutable_list_value()->add_values()->mutable_list_value();
    pair->add_values()->set_string_value(each.subject);
    pair->add_values()->set_string_value(each.description);
  }
}

void Fail(const tidegate::Error& error, Struct* answer) {
  auto& fields = *answer->mutable_fields();
  fields["code"].set_string_value(tidegate::CodeName(error.code));
  fields["message"].set_string_value(error.what());
  auto& details = *fields["error"].mutable_struct_value()->mutable_fields();
  details["reason"].set_string_value(error.reason);
  details["domain"].set_string_value(error.domain);
  auto& metadata = *details["metadata"].mutable_struct_value()->mutable_fields();
  for (const auto& [key, value] : error.metadata) metadata[key].set_string_value(value);
  if (error.retry_after) {
    details["retry_after_ms"].set_number_value(error.retry_after->count() / 1e6);
  } else {
    details["retry_after_ms"].set_null_value({});
  }
  AddPairs(error.fields, &details["violations"]);
  AddPairs(error.quota, &details["quota"]);
}

Struct Execute(tidegate::Client& client, const Struct& command);

void ExecuteStream(tidegate::Client& client, const Struct& command, const tidegate::CallOptions& options,
                   ListValue* messages, ListValue* during_answers) {
  const int cancel_after = Number(command, "cancel_after_messages", -1);
  const Value* during = Find(command, "during");
  const int during_after = during ? Number(during->struct_value(), "after_messages", -1) : -1;
  const bool attach = Find(command, "method")->string_value() == "Attach";
  tidegate::Stream stream = attach ? client.Attach(Parse<v1::AttachRequest>(command), options)
                                   : client.Generate(Parse<v1::GenerateRequest>(command), options);
  v1::GenerateResponse message;
  do {
    if (messages->values_size() == cancel_after) stream.Cancel();
    if (messages->values_size() == during_after) {
      for (const auto& inner : Find(during->struct_value(), "commands")->list_value().values()) {
        *during_answers->add_values()->mutable_struct_value() = Execute(client, inner.struct_value());
      }
    }
    if (!stream.Next(&message)) return;
    Add(message, messages);
  } while (true);
}

Struct Execute(tidegate::Client& client, const Struct& command) {
  Struct answer;
  auto& fields = *answer.mutable_fields();
  fields["code"].set_string_value("OK");
  fields["message"].set_string_value("");
  fields["error"].set_null_value({});
  ListValue* messages = fields["messages"].mutable_list_value();
  ListValue* during = fields["during"].mutable_list_value();
  tidegate::CallOptions options;
  options.timeout = std::chrono::milliseconds(Number(command, "deadline_ms", 0));
  options.reattach = std::chrono::milliseconds(Number(command, "reattach_ms", 0));
  if (const Value* metadata = Find(command, "metadata")) {
    for (const auto& [key, value] : metadata->struct_value().fields()) {
      (key == "traceparent" ? options.traceparent : options.metadata[key]) = value.string_value();
    }
  }
  const std::string& method = Find(command, "method")->string_value();
  try {
    if (method == "Generate" || method == "Attach") ExecuteStream(client, command, options, messages, during);
    if (method == "Cancel") Add(client.Cancel(Parse<v1::CancelRequest>(command), options), messages);
    if (method == "Tokenize") Add(client.Tokenize(Parse<v1::TokenizeRequest>(command), options), messages);
    if (method == "Detokenize") Add(client.Detokenize(Parse<v1::DetokenizeRequest>(command), options), messages);
    if (method == "ListModels") Add(client.ListModels(Parse<v1::ListModelsRequest>(command), options), messages);
  } catch (const tidegate::Error& error) {
    Fail(error, &answer);
  }
  return answer;
}

int main(int, char** argv) {
  tidegate::Client client(argv[1]);
  std::cout << R"({"language": "C++", "runtime": "gRPC )" << grpc::Version() << ", protobuf "
            << google::protobuf::internal::VersionString(GOOGLE_PROTOBUF_VERSION) << R"("})" << std::endl;
  std::string line;
  while (std::getline(std::cin, line)) {
    Struct command;
    FromJson(line, &command);
    std::cout << ToJson(Execute(client, command)) << std::endl;
  }
}
