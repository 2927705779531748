// /v1/conversations: OpenAI's conversations, each a session with items.
//
// Threading: as a Service; add_to() from one thread.
#pragma once

#include <vector>

#include "conversations.h"
#include "endpoint.h"

namespace hcache::server {

class ConversationEndpoints {
 public:
  explicit ConversationEndpoints(Service& service) : service_(service) {}

  void add_to(http::Router* router);

 private:
  Result<api::Json> create(const Call& call);
  Result<api::Json> get(const Call& call) const;
  Result<api::Json> update(const Call& call);
  Result<api::Json> remove(const Call& call);
  Result<api::Json> list_items(const Call& call) const;
  Result<api::Json> add_items(const Call& call);
  Result<api::Json> get_item(const Call& call) const;
  Result<api::Json> remove_item(const Call& call);

  // Of the salt and the conversation that the request names.
  [[nodiscard]] Result<ItemList> find(const Call& call) const;
  Status change(const Call& call, const Conversations::Change& change);
  [[nodiscard]] std::vector<ItemPtr> make_items(const std::vector<api::Json>& items);

  Service& service_;
};

}  // namespace hcache::server
