#include "messages.h"

#include <nlohmann/json.hpp>

namespace hcache::server {
namespace {

using Json = nlohmann::json;
using model::ChatMessage;
using model::ToolCall;

Json to_json(const ChatMessage& message) {
  Json calls = Json::array();
  for (const ToolCall& call : message.tool_calls) {
    calls.push_back({call.id, call.name, call.arguments});
  }
  return {message.role,     message.content,      message.reasoning,
          std::move(calls), message.tool_call_id, message.name};
}

// Throws what nlohmann throws where the shape is another one.
ChatMessage from_json(const Json& json) {
  ChatMessage message;
  message.role = json.at(0).get<std::string>();
  message.content = json.at(1).get<std::string>();
  message.reasoning = json.at(2).get<std::string>();
  for (const Json& call : json.at(3)) {
    message.tool_calls.push_back({call.at(0).get<std::string>(), call.at(1).get<std::string>(),
                                  call.at(2).get<std::string>()});
  }
  message.tool_call_id = json.at(4).get<std::string>();
  message.name = json.at(5).get<std::string>();
  return message;
}

}  // namespace

std::string messages_text(std::span<const ChatMessage> messages) {
  Json json = Json::array();
  for (const ChatMessage& message : messages) json.push_back(to_json(message));
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Result<std::vector<ChatMessage>> messages_from_text(std::string_view text) {
  std::vector<ChatMessage> messages;
  try {
    for (const Json& json : Json::parse(text)) messages.push_back(from_json(json));
  } catch (const Json::exception& error) {
    return data_loss(std::string("stored messages can't be read: ") + error.what());
  }
  return messages;
}

}  // namespace hcache::server
