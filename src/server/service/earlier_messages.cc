#include "earlier_messages.h"

#include <fmt/format.h>

#include <iterator>
#include <memory>
#include <utility>

#include "messages.h"

namespace hcache::server {
namespace {

using api::Json;
using model::ChatMessage;

// Behind the first of its own where that stays the first.
void put_before(std::vector<ChatMessage> earlier, bool keep_first, std::vector<ChatMessage>* own) {
  own->insert(own->begin() + (keep_first ? 1 : 0), std::make_move_iterator(earlier.begin()),
              std::make_move_iterator(earlier.end()));
}

Result<std::vector<ChatMessage>> of_response(Conversations& conversations, const SaltId& salt,
                                             const std::string& id) {
  const auto stored = conversations.messages(salt, id);
  if (stored.code() == Code::kNotFound || (stored.ok() && stored->empty())) {
    return not_found(fmt::format(
        "previous_response_id: there is no stored response '{}'; send the whole input", id));
  }
  HCACHE_RETURN_IF_ERROR(stored.status());
  HCACHE_ASSIGN_OR_RETURN(std::vector<ChatMessage> messages, messages_from_text(*stored));
  // Instructions are not carried over: the new request has its own.
  std::erase_if(messages, [](const ChatMessage& m) { return m.role == "system"; });
  return messages;
}

Result<std::vector<ChatMessage>> of_conversation(Conversations& conversations, const SaltId& salt,
                                                 const std::string& id) {
  HCACHE_ASSIGN_OR_RETURN(const ItemList list, conversations.items(salt, id));
  std::vector<Json> items;
  items.reserve(list.items.size());
  for (const ItemPtr& item : list.items) {
    HCACHE_ASSIGN_OR_RETURN(Json json, item_json(*item));
    items.push_back(std::move(json));
  }
  return api::messages_of_items(items);
}

}  // namespace

Status add_earlier_messages(Conversations& conversations, const SaltId& salt,
                            api::GenerationRequest* request) {
  if (!request->chat) return {};
  std::vector<ChatMessage>& own = request->chat->messages;
  if (!request->previous_response_id.empty()) {
    HCACHE_ASSIGN_OR_RETURN(std::vector<ChatMessage> messages,
                            of_response(conversations, salt, request->previous_response_id));
    const bool begins_with_system = !own.empty() && own.front().role == "system";
    put_before(std::move(messages), begins_with_system, &own);
  }
  if (!request->conversation_id.empty()) {
    uint64_t bytes = 0;
    for (const Json& item : request->input_items) bytes += api::to_text(item).size();
    const std::string& id = request->conversation_id;
    // An answer that can't be added is not written either.
    const Status room = conversations.check_room(salt, id, bytes);
    if (!room.ok()) return room.with_context("conversation");
    auto messages = of_conversation(conversations, salt, id);
    if (!messages.ok()) return messages.status().with_context("conversation");
    put_before(std::move(*messages), request->instructed, &own);
    if (own.empty()) return invalid_argument("input: empty, and so is the conversation");
  }
  return {};
}

Result<Json> item_json(const Item& item) {
  Result<Json> json = api::parse_body(item.json);
  if (json.ok() && json->is_object()) return json;
  return data_loss(fmt::format("item '{}' can't be read", item.id));
}

ItemPtr make_item(const Json& item, const std::string& id) {
  return std::make_shared<const Item>(Item{id, api::to_text(api::kept_item(item, id))});
}

}  // namespace hcache::server
