// The store behind store.h: catalog, segments, free space, pins.
//
// Locks, in the order in which they are taken: write_mutex_ (one changer at a time; held during
// I/O), then the catalog's own, and mutex_ (pins and marks; held for moments, never during I/O).
// How eviction and matching meet without waiting for each other: a changer marks chunks as dying
// under mutex_ (never pinned ones), commits their removal, then clears the marks and raises epoch_.
// A match looks up without locks, then pins under mutex_: what is dying ends the match, and if the
// epoch changed meanwhile it looks again.
#pragma once

#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "allocator.h"
#include "base/sync.h"
#include "catalog.h"
#include "page_reader.h"
#include "remote.h"
#include "segments.h"
#include "store/store.h"

namespace hcache::store {

class StoreImpl final : public Store, public PageSource {
 public:
  StoreImpl(Env& env, StoreOptions options, PageMemory memory);
  ~StoreImpl() override;

  [[nodiscard]] Status open();

  [[nodiscard]] Result<PutReport> put(std::span<const ChunkWrite> batch) override;
  [[nodiscard]] Result<Match> match(const Fingerprint& fingerprint, const SaltId& salt,
                                    std::span<const std::int32_t> tokens) override;
  void look_up(const Fingerprint& fingerprint, const SaltId& salt,
               std::span<const std::int32_t> tokens) override;
  [[nodiscard]] Result<ChunkRef> find(const ChunkId& id) override;
  [[nodiscard]] Result<std::unique_ptr<PageReader>> new_reader(ReaderOptions options) override;
  [[nodiscard]] std::vector<PageOrigin> origins(const ChunkRef& chunk) const override;
  [[nodiscard]] double remote_bytes_per_s() const override;
  [[nodiscard]] Status quarantine(const ChunkId& id, std::uint16_t layer,
                                  Encoding encoding) override;
  void want(std::uint64_t place, const Match& match) override;
  void dispatch(std::uint64_t place) override { cache_.dispatch(place); }
  void unwant(std::uint64_t place) override { cache_.unwant(place); }
  [[nodiscard]] Status put_session(const Session& session) override;
  [[nodiscard]] Result<Session> get_session(std::string_view name) override;
  [[nodiscard]] Result<std::vector<SessionSummary>> list_sessions() override;
  [[nodiscard]] Result<std::uint64_t> delete_session(std::string_view name) override;
  [[nodiscard]] Result<StoreStat> stat() override;
  [[nodiscard]] std::uint64_t owned_bytes(const SaltId& owner) override;
  [[nodiscard]] Status list(const std::function<bool(const ChunkSummary&)>& visit) override;
  [[nodiscard]] Result<VerifyReport> verify(const Progress& progress) override;
  [[nodiscard]] Result<GcReport> gc() override;
  [[nodiscard]] Result<std::uint64_t> remove(const RemoveFilter& filter) override;
  [[nodiscard]] Status check_integrity() override;
  [[nodiscard]] Status close() override;

  [[nodiscard]] Result<PageJob> job(const PageRequest& page) const override;
  [[nodiscard]] Result<std::shared_ptr<File>> segment(const PagePlace& place) override;
  [[nodiscard]] std::string segment_path(const PagePlace& place) const override;
  [[nodiscard]] bool page_moved(const ChunkRecord& record, std::size_t page) override;
  [[nodiscard]] PageCache& cache() override { return cache_; }
  [[nodiscard]] Traffic& traffic() override { return traffic_; }
  [[nodiscard]] Remote* remote() override { return remote_.get(); }
  void count_checksum_failure() override { ++checksum_failures_; }

 private:
  struct Pin;
  // A chunk that a put (or gc) is about to commit.
  struct Draft {
    ChunkRecord record;
    bool exists = false;  // an update, not an insertion
    // Per page of the record what is to be written; empty for pages that are there already.
    std::vector<std::span<const std::byte>> sources;
  };
  struct PutDraft {
    std::vector<Draft> chunks;
    std::vector<ChunkRecord> superseded;
    std::unordered_set<ChunkId> keep;  // must not be evicted to make room
    std::vector<ChunkId> used;
    PutReport report;
  };
  struct DiskExtent {
    std::uint32_t disk = 0;
    Extent extent;
  };
  // One contiguous write: pages of `draft` with their offsets inside the run.
  struct RunPage {
    Draft* draft = nullptr;
    std::size_t page = 0;
    std::uint64_t at = 0;
  };
  struct Run {
    std::uint32_t disk = 0;
    std::vector<RunPage> pages;
    std::uint64_t bytes = 0;
    Extent extent;
    bool reserved = false;
  };
  // Space that may be given back only once its chunk is not pinned any more.
  struct DeferredPage {
    ChunkId chunk;
    PagePlace place;
    std::uint32_t bytes = 0;
  };

  [[nodiscard]] Status check_open() const HCACHE_EXCLUDES(mutex_);
  [[nodiscard]] Status check_writable() const HCACHE_EXCLUDES(mutex_);
  [[nodiscard]] Result<std::vector<std::string>> resolve_disks() HCACHE_REQUIRES(write_mutex_);
  [[nodiscard]] Status rebuild_free_space() HCACHE_REQUIRES(write_mutex_);
  // Gives what no live page uses back to the file system and removes files without any.
  [[nodiscard]] Status reclaim(bool always, std::uint64_t* segments_removed)
      HCACHE_REQUIRES(write_mutex_);

  // Which places a walk through a chain looks at.
  enum class Where { kDisks, kEverywhere };
  // Looks a chain up without pinning. `rows[i]` gets the usable rows of the i-th chunk.
  [[nodiscard]] Result<std::vector<ChunkRecord>> walk(const Fingerprint& fingerprint,
                                                      const SaltId& salt,
                                                      std::span<const std::int32_t> tokens,
                                                      Where where,
                                                      std::vector<std::uint32_t>* rows);
  // A chunk as the catalog and the remote tier's directory have it together.
  [[nodiscard]] Result<std::optional<ChunkRecord>> find_record(const ChunkId& id, Where where);
  // nullopt when the store changed meanwhile.
  [[nodiscard]] Result<std::optional<Match>> try_match(const Fingerprint& fingerprint,
                                                       const SaltId& salt,
                                                       std::span<const std::int32_t> tokens)
      HCACHE_EXCLUDES(mutex_);
  [[nodiscard]] ChunkRef make_ref(ChunkRecord record) HCACHE_REQUIRES(mutex_);
  void unpin(const ChunkId& id) HCACHE_EXCLUDES(mutex_);
  [[nodiscard]] bool pinned(const ChunkId& id) const HCACHE_EXCLUDES(mutex_);

  // Pages from the remote tier are on their way down, not up.
  enum class Source { kCaller, kRemote };
  [[nodiscard]] Result<PutReport> put_batch(std::span<const ChunkWrite> batch, Source source)
      HCACHE_REQUIRES(write_mutex_);
  // Puts down what has been read from the remote tier since the last time.
  void promote() HCACHE_REQUIRES(write_mutex_);
  [[nodiscard]] Result<PutDraft> draft_put(std::span<const ChunkWrite> batch)
      HCACHE_REQUIRES(write_mutex_);
  [[nodiscard]] std::vector<Run> lay_out(std::vector<Draft>* chunks) HCACHE_REQUIRES(write_mutex_);
  // Evicts until `bytes` more fit the quota, and what the draft adds its owners'.
  [[nodiscard]] Status make_room(std::uint64_t bytes, const PutDraft& draft, PutReport* report)
      HCACHE_REQUIRES(write_mutex_);
  [[nodiscard]] Status keep_to_owner_quota(const PutDraft& draft,
                                           const std::unordered_set<ChunkId>& spared,
                                           PutReport* report) HCACHE_REQUIRES(write_mutex_);
  // Evicts leaves for which `may` holds, the least recently used first, while there is an excess.
  // Returns what is left of it: none, or nobody may go.
  [[nodiscard]] Result<std::uint64_t> evict(const std::unordered_set<ChunkId>& spared,
                                            const std::function<bool(const ChunkInfo&)>& may,
                                            const std::function<std::uint64_t()>& excess,
                                            PutReport* report) HCACHE_REQUIRES(write_mutex_);
  // Hands what is about to go to the remote tier, if that is its way to come by it.
  void write_back(const std::vector<ChunkRecord>& victims) HCACHE_REQUIRES(write_mutex_);
  // As the disk has it; null: it can't be read, or fails its check.
  [[nodiscard]] std::shared_ptr<const AlignedBuffer> read_page(const PagePlace& place,
                                                               std::uint32_t bytes)
      HCACHE_REQUIRES(write_mutex_);
  // Whose quota counts a salt's chunks.
  [[nodiscard]] const SaltId& owner_of(const SaltId& salt) const HCACHE_REQUIRES(write_mutex_);
  // From now on `owner` for all that the salt has.
  void adopt(const SaltId& salt, const SaltId& owner) HCACHE_REQUIRES(write_mutex_);
  // Writes and syncs the runs. On failure nothing stays reserved.
  [[nodiscard]] Status write_runs(std::vector<Run>* runs) HCACHE_REQUIRES(write_mutex_);
  [[nodiscard]] Status write_run_pages(std::vector<Run>* runs) HCACHE_REQUIRES(write_mutex_);
  [[nodiscard]] Result<std::shared_ptr<File>> file_for_writing(std::uint32_t disk,
                                                               std::uint32_t segment, bool fresh)
      HCACHE_REQUIRES(write_mutex_);
  void cancel_runs(std::vector<Run>* runs) HCACHE_REQUIRES(write_mutex_);
  // Copies what was written into host memory and, unless it came from there, to the remote tier.
  void copy_to_tiers(const PutDraft& draft, Source source);
  // After a commit that failed.
  void abandon_runs(std::vector<Run>* runs, const Status& why) HCACHE_REQUIRES(write_mutex_);
  // Turns reservations into the pages' own use of their blocks.
  void settle_runs(std::vector<Run>* runs) HCACHE_REQUIRES(write_mutex_);

  // Marks those that are not pinned, and that nothing pinned among them follows, as dying and
  // leaves the others out.
  void mark_dying(std::vector<ChunkRecord>* victims) HCACHE_EXCLUDES(mutex_);
  // After the removal (or its failure): clears marks, raises the epoch, frees space if committed.
  void bury(const std::vector<ChunkRecord>& victims, bool committed) HCACHE_REQUIRES(write_mutex_);
  // Removes chunks in one transaction of their own, except pinned ones. Returns how many.
  [[nodiscard]] Result<std::uint64_t> erase_chunks(std::vector<ChunkRecord> victims)
      HCACHE_REQUIRES(write_mutex_);
  // Ends a page's use of its blocks; `freed` gets those that nobody uses any more, for punch().
  void free_page(const PagePlace& place, std::uint32_t bytes, std::vector<DiskExtent>* freed)
      HCACHE_REQUIRES(write_mutex_);
  void release_extent(const DiskExtent& reserved) HCACHE_REQUIRES(write_mutex_);
  void punch(std::vector<DiskExtent> freed) HCACHE_REQUIRES(write_mutex_);
  // Whether a longer sibling has all of the tail's tokens and pages.
  [[nodiscard]] Result<bool> redundant(const ChunkRecord& record);
  // Frees deferred pages and removes superseded tails whose pins are gone.
  void settle_deferred() HCACHE_REQUIRES(write_mutex_);
  [[nodiscard]] Status flush_touches(Catalog::Transaction* transaction) HCACHE_EXCLUDES(mutex_);
  [[nodiscard]] std::uint64_t used_bytes() HCACHE_REQUIRES(write_mutex_);

  // Chunks that match() can't reach or that a longer tail makes redundant, and damaged rows.
  [[nodiscard]] Status drop_unreachable() HCACHE_REQUIRES(write_mutex_);
  // Owners of salts without chunks.
  [[nodiscard]] Status drop_unused_owners() HCACHE_REQUIRES(write_mutex_);
  [[nodiscard]] Result<std::uint64_t> move_sparse_pages() HCACHE_REQUIRES(write_mutex_);
  [[nodiscard]] Result<std::uint64_t> rewrite(std::vector<ChunkRecord> records)
      HCACHE_REQUIRES(write_mutex_);

  Env& env_;
  StoreOptions options_;
  std::unique_ptr<FileLock> lock_;
  std::unique_ptr<Catalog> catalog_;
  std::unique_ptr<Segments> segments_;
  ReaderPool readers_;
  PageCache cache_;
  Traffic traffic_;
  std::unique_ptr<Remote> remote_;
  std::atomic<std::uint64_t> checksum_failures_ = 0;

  Mutex write_mutex_;
  std::vector<Allocator> free_space_ HCACHE_GUARDED_BY(write_mutex_);  // per disk
  std::vector<DeferredPage> deferred_ HCACHE_GUARDED_BY(write_mutex_);
  std::vector<ChunkId> superseded_ HCACHE_GUARDED_BY(write_mutex_);
  // Of salts that are not their own; those in new_owners_ are not in the catalog yet.
  std::unordered_map<SaltId, SaltId> owners_ HCACHE_GUARDED_BY(write_mutex_);
  std::unordered_set<SaltId> new_owners_ HCACHE_GUARDED_BY(write_mutex_);
  std::unordered_map<SaltId, std::uint64_t> owned_bytes_ HCACHE_GUARDED_BY(write_mutex_);
  std::vector<DiskExtent> limbo_ HCACHE_GUARDED_BY(write_mutex_);  // of commits that failed
  std::unique_ptr<IoQueue> write_queue_ HCACHE_GUARDED_BY(write_mutex_);
  AlignedBuffer write_buffer_ HCACHE_GUARDED_BY(write_mutex_);

  mutable Mutex mutex_ HCACHE_ACQUIRED_AFTER(write_mutex_);
  std::unordered_map<ChunkId, std::uint32_t> pins_ HCACHE_GUARDED_BY(mutex_);
  std::unordered_set<ChunkId> dying_ HCACHE_GUARDED_BY(mutex_);
  std::unordered_map<ChunkId, std::int64_t> touched_ HCACHE_GUARDED_BY(mutex_);
  std::uint64_t epoch_ HCACHE_GUARDED_BY(mutex_) = 0;
  bool closed_ HCACHE_GUARDED_BY(mutex_) = false;
};

}  // namespace hcache::store
