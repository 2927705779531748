// Whose quota counts a salt's chunks, and how many bytes of pages count for each owner.
//
// Threading: one thread at a time (the store's writer).
#pragma once

#include <cstdint>
#include <unordered_map>
#include <unordered_set>

#include "base/ids.h"
#include "base/status.h"
#include "catalog.h"

namespace hcache::store {

class Owners {
 public:
  // `owners`: of salts that are not their own.
  void load(std::unordered_map<SaltId, SaltId> owners) { owners_ = std::move(owners); }

  [[nodiscard]] const SaltId& owner_of(const SaltId& salt) const;
  // From now on `owner` for all that the salt has, if it has none and `owner` is not zero.
  void adopt(const SaltId& salt, const SaltId& owner);

  // Pages of a salt's chunk come or go.
  void add(const SaltId& salt, std::uint64_t bytes) { bytes_[owner_of(salt)] += bytes; }
  void subtract(const SaltId& salt, std::uint64_t bytes) { bytes_[owner_of(salt)] -= bytes; }
  [[nodiscard]] std::uint64_t bytes(const SaltId& owner) const;
  [[nodiscard]] const std::unordered_map<SaltId, std::uint64_t>& all_bytes() const {
    return bytes_;
  }

  // Writes what the catalog does not have yet; after the commit call saved().
  [[nodiscard]] Status save(Catalog::Transaction* transaction) const;
  void saved() { unsaved_.clear(); }
  // Forgets owners of salts without chunks.
  [[nodiscard]] Status drop_unused(Catalog* catalog);

 private:
  std::unordered_map<SaltId, SaltId> owners_;
  std::unordered_set<SaltId> unsaved_;  // keys of owners_
  std::unordered_map<SaltId, std::uint64_t> bytes_;
};

}  // namespace hcache::store
