// OpenAI's conversations: what is asked of them, their items, and how they are worded.
//
// An item is kept in the form in which it is shown: its type, an id, a status, and its content as
// parts. Threading: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "api/json.h"
#include "base/status.h"
#include "model/chat.h"

namespace hcache::api {

inline constexpr size_t kMaxNewItems = 20;  // of one request, as OpenAI limits it

struct CreateConversation {
  Json metadata = Json::object();  // an object of texts
  std::vector<Json> items;         // as the client words them, checked
};
[[nodiscard]] Result<CreateConversation> parse_create_conversation(const Json& body);
// The metadata that a conversation is to have.
[[nodiscard]] Result<Json> parse_update_conversation(const Json& body);
// As CreateConversation has them; one at least.
[[nodiscard]] Result<std::vector<Json>> parse_create_items(const Json& body);

// An item in the form in which it is kept, of one that a parser has checked or an answer has as
// its output.
[[nodiscard]] Json kept_item(const Json& item, std::string_view id);
// An id for it: what its type begins with, and then `unique`.
[[nodiscard]] std::string item_id(const Json& item, std::string_view unique);
// What kept items say. kDataLoss where they can't be read.
[[nodiscard]] Result<std::vector<model::ChatMessage>> messages_of_items(
    std::span<const Json> items);

[[nodiscard]] Json conversation_answer(const std::string& id, int64_t created_s, Json metadata);
[[nodiscard]] Json conversation_deleted_answer(const std::string& id);

}  // namespace hcache::api
