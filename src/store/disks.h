// Which directory is which disk of a store.
//
// Threading: one thread at a time (the store's writer, or the thread that opens it).
#pragma once

#include <string>
#include <vector>

#include "base/env.h"
#include "catalog.h"

namespace hcache::store {

inline constexpr const char* kDiskFileName = "hcache-disk";

// Directories by disk. A writer makes new directories into new disks and mends a damaged disk file
// if only one is. failed_precondition: a disk is missing or of another store.
[[nodiscard]] Result<std::vector<std::string>> resolve_disks(Env& env, Catalog& catalog,
                                                             const StoreOptions& options);

}  // namespace hcache::store
