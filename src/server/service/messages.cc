#include "messages.h"

#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/base64.h"

namespace hcache::server {
namespace {

using Json = nlohmann::json;
using model::ChatMessage;
using model::Medium;
using model::ToolCall;

constexpr size_t kMediaAt = 6;  // of a message's array, where it has media

// Each as base64, or as an array of its file's name.
Json media_json(std::span<const Medium> media) {
  Json json = Json::array();
  for (const Medium& medium : media) {
    json.push_back(medium.bytes ? Json(base64(*medium.bytes)) : Json::array({medium.name}));
  }
  return json;
}

Result<std::vector<Medium>> media_from_json(const Json& json) {
  std::vector<Medium> media;
  for (const Json& item : json) {
    Medium& medium = media.emplace_back();
    if (item.is_array()) {
      medium.name = item.at(0).get<std::string>();
      continue;
    }
    HCACHE_ASSIGN_OR_RETURN(std::string bytes, from_base64(item.get_ref<const std::string&>()));
    medium.bytes = std::make_shared<const std::string>(std::move(bytes));
  }
  return media;
}

Json to_json(const ChatMessage& message) {
  Json calls = Json::array();
  for (const ToolCall& call : message.tool_calls) {
    calls.push_back({call.id, call.name, call.arguments});
  }
  Json json = {message.role,     message.content,      message.reasoning,
               std::move(calls), message.tool_call_id, message.name};
  if (!message.media.empty()) json.push_back(media_json(message.media));
  return json;
}

// Throws what nlohmann throws where the shape is another one.
Result<ChatMessage> from_json(const Json& json) {
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
  if (json.size() > kMediaAt) {
    HCACHE_ASSIGN_OR_RETURN(message.media, media_from_json(json.at(kMediaAt)));
  }
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
    for (const Json& json : Json::parse(text)) {
      HCACHE_ASSIGN_OR_RETURN(ChatMessage message, from_json(json));
      messages.push_back(std::move(message));
    }
  } catch (const Json::exception& error) {
    return data_loss(std::string("stored messages can't be read: ") + error.what());
  }
  return messages;
}

}  // namespace hcache::server
