#include "conversation_endpoints.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "api/conversations.h"
#include "conversation_key.h"
#include "earlier_messages.h"

namespace hcache::server {
namespace {

using api::Json;

constexpr size_t kUsualItems = 20;  // of a page, as OpenAI has it
constexpr size_t kMostItems = 100;

Result<Json> list_json(const std::vector<ItemPtr>& items, const api::ListPage& page) {
  std::vector<std::string_view> ids;
  ids.reserve(items.size());
  for (const ItemPtr& item : items) ids.push_back(item->id);
  return api::page_json(ids, page, [&](size_t i) { return item_json(*items[i]); });
}

Result<Json> conversation_json(const std::string& id, const ItemList& list) {
  HCACHE_ASSIGN_OR_RETURN(Json metadata, api::parse_body(list.metadata));
  if (!metadata.is_object()) return data_loss(fmt::format("metadata of '{}' can't be read", id));
  return api::conversation_answer(id, list.created_s, std::move(metadata));
}

// The place of the item that the path names.
Result<size_t> place_of(const Call& call, const ItemList& list) {
  const std::string& id = *call.request.param("item_id");
  const auto found =
      std::ranges::find_if(list.items, [&](const ItemPtr& item) { return item->id == id; });
  if (found == list.items.end()) {
    return not_found(fmt::format("there is no item '{}' in the conversation '{}'", id,
                                 *call.request.param("id")));
  }
  return static_cast<size_t>(found - list.items.begin());
}

}  // namespace

Result<ItemList> ConversationEndpoints::find(const Call& call) const {
  return service_.conversations().items(salt_of(service_, call.request).id,
                                        *call.request.param("id"));
}

Status ConversationEndpoints::change(const Call& call, const Conversations::Change& change) {
  return service_.conversations().change_items(salt_of(service_, call.request).id,
                                               *call.request.param("id"), change);
}

std::vector<ItemPtr> ConversationEndpoints::make_items(const std::vector<Json>& items) {
  std::vector<ItemPtr> out;
  for (const Json& item : items) {
    out.push_back(make_item(item, api::item_id(item, service_.new_id())));
  }
  return out;
}

// Its id begins with the key by which a balancer finds its server again.
Result<Json> ConversationEndpoints::create(const Call& call) {
  HCACHE_ASSIGN_OR_RETURN(const api::CreateConversation asked,
                          api::parse_create_conversation(call.body));
  std::string unique = service_.new_id();
  const std::string* key = call.request.header("x-hcache-conversation");
  if (key != nullptr && !key->empty()) unique = keyed_id(conversation_key(*key, {}), unique);
  const std::string id = "conv_" + unique;
  ItemList list;
  list.created_s = service_.env().wall_ns() / 1'000'000'000;
  list.metadata = api::to_text(asked.metadata);
  list.items = make_items(asked.items);
  Result<Json> answer = conversation_json(id, list);
  HCACHE_RETURN_IF_ERROR(
      service_.conversations().begin(salt_of(service_, call.request).id, id, std::move(list)));
  return answer;
}

Result<Json> ConversationEndpoints::get(const Call& call) const {
  HCACHE_ASSIGN_OR_RETURN(const ItemList list, find(call));
  return conversation_json(*call.request.param("id"), list);
}

Result<Json> ConversationEndpoints::update(const Call& call) {
  HCACHE_ASSIGN_OR_RETURN(const Json metadata, api::parse_update_conversation(call.body));
  ItemList now;
  HCACHE_RETURN_IF_ERROR(change(call, [&](ItemList* list) {
    list->metadata = api::to_text(metadata);
    now = *list;
    return Status();
  }));
  return conversation_json(*call.request.param("id"), now);
}

Result<Json> ConversationEndpoints::remove(const Call& call) {
  HCACHE_RETURN_IF_ERROR(find(call).status());
  const std::string& id = *call.request.param("id");
  HCACHE_RETURN_IF_ERROR(service_.remove_session(salt_of(service_, call.request).id, id));
  return api::conversation_deleted_answer(id);
}

Result<Json> ConversationEndpoints::list_items(const Call& call) const {
  HCACHE_ASSIGN_OR_RETURN(const api::ListPage page,
                          page_of(call.request, kUsualItems, kMostItems, "after", nullptr));
  HCACHE_ASSIGN_OR_RETURN(const bool oldest_first, is_ascending(call.request));
  HCACHE_ASSIGN_OR_RETURN(ItemList list, find(call));
  if (!oldest_first) std::ranges::reverse(list.items);
  return list_json(list.items, page);
}

Result<Json> ConversationEndpoints::add_items(const Call& call) {
  HCACHE_ASSIGN_OR_RETURN(const std::vector<Json> asked, api::parse_create_items(call.body));
  const std::vector<ItemPtr> added = make_items(asked);
  HCACHE_RETURN_IF_ERROR(change(call, [&](ItemList* list) {
    list->items.insert(list->items.end(), added.begin(), added.end());
    return Status();
  }));
  return list_json(added, {.limit = added.size()});
}

Result<Json> ConversationEndpoints::get_item(const Call& call) const {
  HCACHE_ASSIGN_OR_RETURN(const ItemList list, find(call));
  HCACHE_ASSIGN_OR_RETURN(const size_t place, place_of(call, list));
  return item_json(*list.items[place]);
}

Result<Json> ConversationEndpoints::remove_item(const Call& call) {
  ItemList now;
  HCACHE_RETURN_IF_ERROR(change(call, [&](ItemList* list) -> Status {
    HCACHE_ASSIGN_OR_RETURN(const size_t place, place_of(call, *list));
    list->items.erase(list->items.begin() + static_cast<std::ptrdiff_t>(place));
    now = *list;
    return {};
  }));
  return conversation_json(*call.request.param("id"), now);
}

void ConversationEndpoints::add_to(http::Router* router) {
  const auto add = [&](const char* method, const char* path, auto answer) {
    router->add(method, path, answer_on(service_.keeper(), [this, answer](Call& call) {
                  return (this->*answer)(call);
                }));
  };
  using Self = ConversationEndpoints;
  add("POST", "/v1/conversations", &Self::create);
  add("GET", "/v1/conversations/{id}", &Self::get);
  add("POST", "/v1/conversations/{id}", &Self::update);
  add("DELETE", "/v1/conversations/{id}", &Self::remove);
  add("GET", "/v1/conversations/{id}/items", &Self::list_items);
  add("POST", "/v1/conversations/{id}/items", &Self::add_items);
  add("GET", "/v1/conversations/{id}/items/{item_id}", &Self::get_item);
  add("DELETE", "/v1/conversations/{id}/items/{item_id}", &Self::remove_item);
}

}  // namespace hcache::server
