// The background half of an S3 tier: gathers chunks of one chain into objects, uploads them with
// their indexes, and erases chunks. Of two things that are asked of one chunk the second waits for
// the first.
//
// Threading: any thread. Work goes on two threads of its own and the client's.
#pragma once

#include <deque>
#include <memory>
#include <span>
#include <thread>
#include <unordered_set>
#include <vector>

#include "base/env.h"
#include "base/sync.h"
#include "net/tier_account.h"
#include "s3/s3_client.h"
#include "s3/s3_eraser.h"
#include "s3/s3_format.h"
#include "tier.h"

namespace hcache::store {

class S3Writer {
 public:
  // All of them outlive the calls' ends: the client is to be destroyed first, once stop() returned.
  S3Writer(Env& env, const Seal& seal, S3Client& client, TierAccount& account);
  S3Writer(const S3Writer&) = delete;
  S3Writer& operator=(const S3Writer&) = delete;
  ~S3Writer() { stop(); }

  [[nodiscard]] bool write(TierWrite write) HCACHE_EXCLUDES(mutex_);
  void erase(std::span<const ChunkId> ids) HCACHE_EXCLUDES(mutex_);
  // What is being gathered goes at once.
  void hurry() HCACHE_EXCLUDES(mutex_);
  // Ends the threads; what waits is lost.
  void stop() HCACHE_EXCLUDES(mutex_);

 private:
  // Consecutive chunks of one chain, to be one object.
  struct Group {
    std::vector<TierWrite> chunks;
    std::uint64_t bytes = 0;
    std::int64_t since_ns = 0;
  };
  // An object on its way: its chunks are busy until it and the last index are there.
  struct Upload {
    std::vector<ChunkId> ids;
    std::vector<S3Index> indexes;
    std::vector<bool> more;  // of a chunk: it has other pages that may be there already
    std::uint64_t pages = 0;
    std::uint64_t bytes = 0;
    std::size_t requests = 0;  // under way; guarded by mutex_
  };
  using UploadPtr = std::shared_ptr<Upload>;

  void gather() HCACHE_EXCLUDES(mutex_);
  void erase_in_turn() HCACHE_EXCLUDES(mutex_);
  // The first group that may go now; end(): none.
  [[nodiscard]] std::deque<Group>::iterator due_group() HCACHE_REQUIRES(mutex_);
  void upload(Group group) HCACHE_EXCLUDES(mutex_);
  void uploaded(const UploadPtr& upload, const Status& status) HCACHE_EXCLUDES(mutex_);
  void write_index(const UploadPtr& upload, std::size_t chunk) HCACHE_EXCLUDES(mutex_);
  void put_index(const UploadPtr& upload, const S3Index& index) HCACHE_EXCLUDES(mutex_);
  // A request of an upload begins or ends.
  void begin(const UploadPtr& upload) HCACHE_EXCLUDES(mutex_);
  void end(const UploadPtr& upload, const Status& status) HCACHE_EXCLUDES(mutex_);

  // Of a chunk's pages as they stand there.
  [[nodiscard]] std::uint64_t bytes_of(const TierWrite& write) const;

  Env& env_;
  const Seal seal_;
  S3Client& client_;
  TierAccount& account_;
  S3Eraser eraser_;
  Mutex mutex_;
  CondVar wake_;
  std::deque<Group> groups_ HCACHE_GUARDED_BY(mutex_);
  std::vector<std::vector<ChunkId>> erasures_ HCACHE_GUARDED_BY(mutex_);  // that wait
  std::unordered_set<ChunkId> erasing_ HCACHE_GUARDED_BY(mutex_);         // waiting or under way
  std::unordered_set<ChunkId> uploading_ HCACHE_GUARDED_BY(mutex_);
  bool hurry_ HCACHE_GUARDED_BY(mutex_) = false;
  bool stop_ HCACHE_GUARDED_BY(mutex_) = false;
  std::thread gather_thread_;
  std::thread eraser_thread_;
};

}  // namespace hcache::store
