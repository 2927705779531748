// SQLite on an Env: the catalog meets the same faults as the segment files.
//
// No shared memory, so the catalog is held exclusively; locks are left to the store's own lock
// file. Threading: as the Env.
#pragma once

#include <memory>
#include <string>

#include "base/env.h"

namespace hcache::store::testing {

// Registers a VFS for as long as it lives. No database may be open when it goes.
class EnvVfs {
 public:
  explicit EnvVfs(Env& env);
  EnvVfs(const EnvVfs&) = delete;
  EnvVfs& operator=(const EnvVfs&) = delete;
  ~EnvVfs();
  [[nodiscard]] const std::string& name() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace hcache::store::testing
