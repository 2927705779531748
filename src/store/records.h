// The record files of a store's disks: writes records, erases them, keeps their free space.
//
// Records are a copy of what the catalog says, so they are synced now and then, not with every put;
// after a process or a machine died, the next writer compares them with the catalog (recovery.h).
// Threading: one thread at a time (the store's writer).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "allocator.h"
#include "base/env.h"
#include "record_file.h"

namespace hcache::store {

class Records {
 public:
  // dirs[i] is the directory of disk i. `sealed`: the store is encrypted, and so are the bodies.
  Records(Env& env, const StoreId& store, bool sealed, std::vector<std::string> dirs);

  // ---- What is there

  // Makes the files on the disks known. What they hold is told by add().
  [[nodiscard]] Status list_files();
  // False: it lies outside of any possible file.
  [[nodiscard]] bool add(const RecordPlace& place, std::uint64_t bytes);
  // Gives blocks that no record uses back to the file system, and removes files without any.
  [[nodiscard]] Status reclaim();

  // ---- Changes

  // A record that write() is to write; it fills in the batch.
  struct Draft {
    RecordHead head;
    std::string name;
    std::string body;
  };
  // Writes records that belong together, and returns them in the same order.
  [[nodiscard]] Result<std::vector<RecordRef>> write(std::vector<Draft> records);
  // Overwrites records with zeros and frees their space; what is not the record that `ref` names
  // stays as it is. Failures cost space only, and are logged. `durably`: synced when it returns.
  void erase(std::span<const RecordRef> refs, bool durably);
  // The records are not what the catalog says: the next writer has to compare them.
  void set_incomplete() { complete_ = false; }
  [[nodiscard]] bool complete() const { return complete_; }
  // Syncs what has been written, if that was not done for a while or `now`.
  [[nodiscard]] Status sync(bool now);

  // Blocks in use and the files' headers.
  [[nodiscard]] std::uint64_t used_bytes() const;
  [[nodiscard]] std::span<const std::string> dirs() const { return dirs_; }
  // internal_error unless the blocks in use are what these records need.
  [[nodiscard]] Status check(std::span<const RecordRef> refs) const;

 private:
  using Key = std::pair<std::uint32_t, std::uint32_t>;  // disk, file
  // Space that is reserved, of which the next records take the front.
  struct Open {
    std::uint32_t disk = 0;
    Extent extent;
    std::uint64_t used = 0;
  };

  [[nodiscard]] std::string path(const Key& key) const;
  [[nodiscard]] Result<std::shared_ptr<File>> open(const Key& key, bool fresh);
  // Room for `bytes` behind each other.
  [[nodiscard]] Result<RecordPlace> make_room(std::uint64_t bytes);
  void close_open();
  [[nodiscard]] Status erase_one(const RecordRef& ref);

  Env& env_;
  const StoreId store_;
  const bool sealed_;
  const std::vector<std::string> dirs_;
  std::vector<Allocator> space_;  // per disk
  std::map<Key, std::shared_ptr<File>> files_;
  std::set<Key> unsynced_;
  Open open_;
  std::uint32_t next_disk_ = 0;
  std::uint64_t last_batch_ = 0;
  std::int64_t last_sync_ns_ = 0;
  bool complete_ = true;
};

}  // namespace hcache::store
