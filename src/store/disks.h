// Which directory is which disk of a store.
//
// Threading: one thread at a time (the store's writer, or the thread that opens it).
#pragma once

#include <string>
#include <vector>

#include "base/env.h"
#include "catalog.h"
#include "format.h"

namespace hcache::store {

inline constexpr const char* kDiskFileName = "hcache-disk";

// What the directories themselves say, without a catalog.
struct DiskSet {
  StoreId store;
  bool sealed = false;
  std::vector<std::string> dirs;  // by disk
};
// data_loss: nothing says which store they are of. failed_precondition: they are of several, or a
// disk is missing.
[[nodiscard]] Result<DiskSet> find_disks(Env& env, const std::vector<std::string>& dirs);
// Whether the directories hold records of a store.
[[nodiscard]] bool have_records(Env& env, const std::vector<std::string>& dirs);

// Directories by disk. A writer makes new directories into new disks, mends a damaged or lost disk
// file where the disk's other files or the other disks tell which it is, and removes what a process
// that died while it wrote a disk file has left. failed_precondition: a disk is missing or of
// another store.
[[nodiscard]] Result<std::vector<std::string>> resolve_disks(Env& env, Catalog& catalog,
                                                             const StoreOptions& options);

}  // namespace hcache::store
