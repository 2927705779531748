// What a session has that is one of OpenAI's conversations: items in the order in which they were
// said.
//
// Threading: a value; items are immutable and shared by copies of a list.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace hcache::server {

struct Item {
  std::string id;
  std::string json;
};
using ItemPtr = std::shared_ptr<const Item>;

struct ItemList {
  int64_t created_s = 0;  // since 1970-01-01 UTC
  std::string metadata;   // JSON, the client's
  std::vector<ItemPtr> items;

  // Of texts.
  [[nodiscard]] uint64_t bytes() const {
    uint64_t sum = metadata.size();
    for (const ItemPtr& item : items) sum += item->id.size() + item->json.size();
    return sum;
  }
  bool operator==(const ItemList&) const = default;
};

}  // namespace hcache::server
