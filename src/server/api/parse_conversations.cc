// OpenAI: /v1/conversations.
#include <fmt/format.h>

#include <utility>

#include "api/conversations.h"
#include "request_fields.h"
#include "response_items.h"

namespace hcache::api {
namespace {

// `least`: how many there must be.
void items_field(Fields& f, std::vector<Json>* items, size_t least, std::string_view doc) {
  Json schema = {{"type", "array"}, {"items", item_schema()}, {"maxItems", kMaxNewItems}};
  if (least > 0) schema["minItems"] = least;
  f.value("items", std::move(schema), doc,
          [&](const Json& value, const std::string& path) -> Status {
            if (!value.is_array()) return wrong_kind(path, "an array of items", value);
            if (value.size() < least || value.size() > kMaxNewItems) {
              return invalid_argument(fmt::format("{}: {} are given, {} to {} are allowed", path,
                                                  value.size(), least, kMaxNewItems));
            }
            model::ChatInput chat;
            for (size_t i = 0; i < value.size(); ++i) {
              HCACHE_RETURN_IF_ERROR(read_item(value[i], fmt::format("{}[{}]", path, i), &chat));
              items->push_back(value[i]);
            }
            return {};
          });
}

}  // namespace

void create_conversation_fields(Fields& f, CreateConversation* r) {
  metadata_field(f, &r->metadata, "Kept with the conversation.");
  items_field(f, &r->items, 0, "What was said before.");
}

void update_conversation_fields(Fields& f, Json* metadata) {
  metadata_field(f.required(), metadata, "What it is to have instead of what it has.");
}

void create_items_fields(Fields& f, std::vector<Json>* items) {
  items_field(f.required(), items, 1, "What is added at its end.");
}

Result<CreateConversation> parse_create_conversation(const Json& body) {
  CreateConversation r;
  if (body.is_null()) return r;  // all of it may be left out
  HCACHE_RETURN_IF_ERROR(read_fields(body, [&](Fields& f) { create_conversation_fields(f, &r); }));
  return r;
}

Result<Json> parse_update_conversation(const Json& body) {
  Json metadata;
  HCACHE_RETURN_IF_ERROR(
      read_fields(body, [&](Fields& f) { update_conversation_fields(f, &metadata); }));
  return metadata;
}

Result<std::vector<Json>> parse_create_items(const Json& body) {
  std::vector<Json> items;
  HCACHE_RETURN_IF_ERROR(read_fields(body, [&](Fields& f) { create_items_fields(f, &items); }));
  return items;
}

Json conversation_answer(const std::string& id, int64_t created_s, Json metadata) {
  return {{"id", id},
          {"object", "conversation"},
          {"created_at", created_s},
          {"metadata", std::move(metadata)}};
}

Json conversation_deleted_answer(const std::string& id) {
  return {{"id", id}, {"object", "conversation.deleted"}, {"deleted", true}};
}

}  // namespace hcache::api
