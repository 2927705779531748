// Segment files of all disks: names, headers and open handles.
//
// Threading: any thread. A handle that was given out stays readable even after its file was
// removed.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "base/sync.h"
#include "format.h"
#include "seal.h"

namespace hcache::store {

class Segments {
 public:
  // dirs[i] is the directory of disk i.
  Segments(Env& env, StoreId store, Seal seal, std::vector<std::string> dirs, bool read_only,
           bool direct);

  [[nodiscard]] std::uint32_t disks() const { return static_cast<std::uint32_t>(dirs_.size()); }
  [[nodiscard]] const std::string& dir(std::uint32_t disk) const { return dirs_[disk]; }
  [[nodiscard]] std::string path(std::uint32_t disk, std::uint32_t segment) const;
  // Numbers of the files on a disk, sorted.
  [[nodiscard]] Result<std::vector<std::uint32_t>> list(std::uint32_t disk) const;

  // An existing segment, its header checked (and, by a writer, mended). not_found, data_loss,
  // failed_precondition: it belongs to another store.
  [[nodiscard]] Result<std::shared_ptr<File>> open(std::uint32_t disk, std::uint32_t segment)
      HCACHE_EXCLUDES(mutex_);
  // A new one with a durable header and directory entry; replaces a leftover file.
  [[nodiscard]] Result<std::shared_ptr<File>> create(std::uint32_t disk, std::uint32_t segment)
      HCACHE_EXCLUDES(mutex_);
  // A page of a chunk; null: it can't be read, or fails its check.
  [[nodiscard]] std::shared_ptr<const AlignedBuffer> read_page(const ChunkRecord& record,
                                                               std::size_t page)
      HCACHE_EXCLUDES(mutex_);
  [[nodiscard]] const Seal& seal() const { return seal_; }
  [[nodiscard]] Status remove(std::uint32_t disk, std::uint32_t segment) HCACHE_EXCLUDES(mutex_);

 private:
  using Key = std::pair<std::uint32_t, std::uint32_t>;
  void remember(const Key& key, std::shared_ptr<File> file) HCACHE_REQUIRES(mutex_);

  Env& env_;
  const StoreId store_;
  const Seal seal_;
  const std::vector<std::string> dirs_;
  const bool read_only_;
  const bool direct_;
  Mutex mutex_;
  std::map<Key, std::shared_ptr<File>> open_ HCACHE_GUARDED_BY(mutex_);
};

}  // namespace hcache::store
