// Conversations with items.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "conversations.h"

namespace hcache::server {

Result<Conversations::Entry*> Conversations::find_with_items(const SaltId& salt,
                                                             std::string_view name) {
  const Result<Entry*> entry = find(salt, name);
  if (entry.ok() && (*entry)->items) return *entry;
  return not_found(fmt::format("there is no conversation '{}'", name));
}

Status Conversations::check_room(const Tenant& tenant, uint64_t before, uint64_t after) {
  if (after <= before) return {};
  if (after > kMaxItemBytes) {
    return invalid_argument(
        fmt::format("the conversation is full: it would have {} bytes, at most "
                    "{} are allowed; begin another one, or delete items",
                    after, kMaxItemBytes));
  }
  if (tenant.item_bytes - before + after > kMaxSaltItemBytes) {
    return resource_exhausted(
        fmt::format("all conversations together would have more than {} bytes; delete some",
                    kMaxSaltItemBytes));
  }
  return {};
}

void Conversations::set_items(Tenant* tenant, Entry* entry, ItemList list) {
  tenant->item_bytes -= item_bytes(entry->items);
  entry->items = std::move(list);
  tenant->item_bytes += item_bytes(entry->items);
}

Status Conversations::begin(const SaltId& salt, const std::string& name, ItemList list) {
  Entry entry;
  Conversation& c = entry.conversation;
  c.name = name;
  c.named = true;
  c.created_ns = c.updated_ns = env_.wall_ns();
  entry.items = std::move(list);
  return insert_new(salt, std::move(entry));
}

Result<ItemList> Conversations::items(const SaltId& salt, std::string_view name) {
  MutexLock lock(mutex_);
  HCACHE_ASSIGN_OR_RETURN(const Entry* entry, find_with_items(salt, name));
  return *entry->items;
}

Status Conversations::change_items(const SaltId& salt, std::string_view name,
                                   const Change& change) {
  ItemList before;
  ItemList after;
  {
    MutexLock lock(mutex_);
    HCACHE_ASSIGN_OR_RETURN(Entry * entry, find_with_items(salt, name));
    before = after = *entry->items;
    HCACHE_RETURN_IF_ERROR(change(&after));
    Tenant& tenant = tenants_[salt];
    HCACHE_RETURN_IF_ERROR(
        check_room(tenant, item_bytes(entry->items), after.bytes() + kItemListBytes));
    set_items(&tenant, entry, after);
    entry->conversation.updated_ns = env_.wall_ns();
  }
  const Status status = persist(salt, name);
  if (status.ok()) return status;
  // What is not on disk is taken back, unless more was built upon it: then that is written with it.
  MutexLock lock(mutex_);
  const Result<Entry*> now = find_with_items(salt, name);
  if (now.ok() && (*now)->items == after) set_items(&tenants_[salt], *now, std::move(before));
  return status;
}

Status Conversations::check_room(const SaltId& salt, std::string_view name, uint64_t bytes) {
  MutexLock lock(mutex_);
  HCACHE_ASSIGN_OR_RETURN(const Entry* entry, find_with_items(salt, name));
  const uint64_t before = item_bytes(entry->items);
  return check_room(tenants_[salt], before, before + bytes);
}

Status Conversations::append(FinishedChain chain, const std::vector<ItemPtr>& items) {
  const std::string text = chain_text(chain.tokens);
  MutexLock lock(mutex_);
  HCACHE_ASSIGN_OR_RETURN(Entry * entry, find_with_items(chain.salt, chain.name));
  ItemList list = *entry->items;
  list.items.insert(list.items.end(), items.begin(), items.end());
  set_items(&tenants_[chain.salt], entry, std::move(list));
  entry->conversation.updated_ns = env_.wall_ns();
  if (!chain.tokens.empty()) keep(std::move(chain), text);
  return {};
}

}  // namespace hcache::server
