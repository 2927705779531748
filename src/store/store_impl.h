// The store behind store.h: joins the catalog, the segments and what decides about them.
//
// Locks, in the order in which they are taken: write_mutex_ (one changer at a time; held during
// I/O), then the catalog's own, then that of Pins (held for moments, never during I/O).
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "base/sync.h"
#include "catalog.h"
#include "chains.h"
#include "disk_order.h"
#include "owners.h"
#include "page_reader.h"
#include "pins.h"
#include "put_draft.h"
#include "quota.h"
#include "records.h"
#include "remote.h"
#include "removal.h"
#include "segment_writer.h"
#include "segments.h"
#include "sessions.h"
#include "snapshots.h"
#include "space.h"
#include "store/store.h"
#include "tier_copies.h"

namespace hcache::store {

// How much an opening writer compares with the records.
enum class Recovery {
  kIfNeeded,  // all, if the last writer died
  kCompare,   // all
  kRebuild,   // makes the catalog anew
  kRebuilt,   // that has been done: all, and no second time
};

class StoreImpl final : public Store, public PageSource {
 public:
  StoreImpl(Env& env, StoreOptions options, PageMemory memory);
  ~StoreImpl() override;

  [[nodiscard]] Status open(Recovery recovery);
  // What open() has mended.
  [[nodiscard]] RepairReport repaired() HCACHE_EXCLUDES(write_mutex_) {
    MutexLock lock(write_mutex_);
    return repaired_;
  }

  [[nodiscard]] Result<PutReport> put(std::span<const ChunkWrite> batch) override;
  [[nodiscard]] Result<Match> match(const ChainFingerprints& chain, const SaltId& salt,
                                    std::span<const std::int32_t> tokens) override;
  void look_up(const ChainFingerprints& chain, const SaltId& salt,
               std::span<const std::int32_t> tokens) override;
  [[nodiscard]] Result<ChunkRef> find(const ChunkId& id) override;
  [[nodiscard]] Result<std::unique_ptr<PageReader>> new_reader(ReaderOptions options) override;
  void prepare_readers(std::size_t n, ReaderOptions options) override;
  [[nodiscard]] std::vector<PageOrigin> origins(const ChunkRef& chunk) const override;
  [[nodiscard]] double remote_bytes_per_s() const override;
  [[nodiscard]] Status quarantine(const ChunkId& id, std::uint16_t layer,
                                  Encoding encoding) override;
  void want(std::uint64_t ticket, const Match& match) override;
  void dispatch(std::uint64_t ticket) override;
  void unwant(std::uint64_t ticket) override;
  [[nodiscard]] Status set_costs(const policy::RestoreCosts& costs,
                                 double disk_bytes_per_s) override;
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
  [[nodiscard]] const Seal& seal() const override { return seal_; }
  void count_checksum_failure() override { ++checksum_failures_; }

 private:
  struct Pin;

  [[nodiscard]] Status check_open() const;
  [[nodiscard]] Status check_writable() const;
  [[nodiscard]] Status open_or_rebuild(Recovery recovery) HCACHE_REQUIRES(write_mutex_);
  [[nodiscard]] Status open_catalog(Recovery recovery) HCACHE_REQUIRES(write_mutex_);
  // Makes what stands between the catalog and a store that can be used.
  [[nodiscard]] Status prepare() HCACHE_REQUIRES(write_mutex_);
  // Counts what pages and records use, after comparing the records with the catalog if asked to.
  // data_loss: rows are damaged and `may_rebuild`.
  [[nodiscard]] Status count(bool compare, bool may_rebuild) HCACHE_REQUIRES(write_mutex_);
  // Returns how many rows are damaged.
  [[nodiscard]] Result<std::uint64_t> count_chunks(
      const std::function<void(const RecordRef&)>& count_record) HCACHE_REQUIRES(write_mutex_);
  // Disk blocks of the record files.
  [[nodiscard]] std::uint64_t record_file_bytes() const;
  [[nodiscard]] Result<std::vector<RecordRef>> write_records(std::span<const Draft> drafts)
      HCACHE_REQUIRES(write_mutex_);

  // nullopt when the store changed meanwhile.
  [[nodiscard]] Result<std::optional<Match>> try_match(const ChainFingerprints& fingerprints,
                                                       const SaltId& salt,
                                                       std::span<const std::int32_t> tokens);
  // Of a chunk that has been pinned.
  [[nodiscard]] ChunkRef make_ref(ChunkRecord record);

  [[nodiscard]] Result<PutReport> put_batch(std::span<const ChunkWrite> batch, Source source)
      HCACHE_REQUIRES(write_mutex_);
  [[nodiscard]] Status commit_put(const PutDraft& draft) HCACHE_REQUIRES(write_mutex_);
  [[nodiscard]] Status commit_rewrite(std::span<const Draft> drafts) HCACHE_REQUIRES(write_mutex_);
  // In one transaction; their space is given back once they are not pinned.
  [[nodiscard]] Status drop_pages(std::span<const ShrunkChunk> chunks)
      HCACHE_REQUIRES(write_mutex_);
  // Drops snapshots until those that the draft brings fit their quota; what is worth less than what
  // is there leaves the draft instead.
  [[nodiscard]] Status make_room_for_snapshots(PutDraft* draft, PutReport* report)
      HCACHE_REQUIRES(write_mutex_);
  [[nodiscard]] Status drop_snapshots(std::span<const ChunkId> ids) HCACHE_REQUIRES(write_mutex_);
  [[nodiscard]] Status remove_set_aside() HCACHE_REQUIRES(write_mutex_);
  // Puts what has been read from the remote tier since the last time on the disks.
  void promote() HCACHE_REQUIRES(write_mutex_);

  // The catalog's part of verify(): SQLite's findings, rows, segment headers, sessions. `ids` gets
  // the chunks, and the number of their pages is returned.
  [[nodiscard]] Result<std::uint64_t> verify_catalog(VerifyReport* report,
                                                     std::vector<ChunkId>* ids);
  void verify_segment_headers(VerifyReport* report);
  void verify_sessions(VerifyReport* report);
  void verify_records(VerifyReport* report) HCACHE_EXCLUDES(write_mutex_);
  [[nodiscard]] bool record_intact(const RecordRef& ref);
  // Pins the chunks and appends their pages, in the order of the disk, and returns how many bytes
  // of read-ahead they want.
  [[nodiscard]] Result<std::uint64_t> verify_requests(std::span<const ChunkId> ids,
                                                      VerifyReport* report,
                                                      std::vector<PageRequest>* requests);

  // Chunks that match() can't reach or that a longer tail makes redundant, and damaged rows.
  [[nodiscard]] Status drop_unreachable() HCACHE_REQUIRES(write_mutex_);
  // Chunks with pages in segments of which less than half is used move elsewhere, unless pinned.
  [[nodiscard]] Result<std::uint64_t> move_sparse_pages() HCACHE_REQUIRES(write_mutex_);
  // Reads the chunks' pages and writes them anew, together. Damaged pages stay where they are.
  [[nodiscard]] Result<std::uint64_t> rewrite(std::vector<ChunkRecord> records)
      HCACHE_REQUIRES(write_mutex_);

  [[nodiscard]] Status check_families(std::span<const ChunkRecord> chunks);
  [[nodiscard]] Status check_places(std::span<const ChunkRecord> chunks);
  [[nodiscard]] Status check_records(std::span<const RecordRef> refs) HCACHE_REQUIRES(write_mutex_);
  [[nodiscard]] Status check_owners(std::span<const ChunkRecord> chunks)
      HCACHE_REQUIRES(write_mutex_);

  Env& env_;
  StoreOptions options_;
  const Seal seal_;
  std::unique_ptr<FileLock> lock_;
  std::unique_ptr<Catalog> catalog_;
  std::unique_ptr<Segments> segments_;
  ReaderPool readers_;
  PageCache cache_;
  Traffic traffic_;
  std::unique_ptr<Remote> remote_;
  std::unique_ptr<Chains> chains_;
  std::unique_ptr<DiskOrder> order_;
  std::unique_ptr<Snapshots> snapshots_;
  Pins pins_;
  std::atomic<std::uint64_t> checksum_failures_ = 0;
  std::atomic<std::uint64_t> snapshots_dropped_ = 0;
  std::atomic<bool> closed_ = false;

  Mutex write_mutex_;
  Owners owners_ HCACHE_GUARDED_BY(write_mutex_);
  RepairReport repaired_ HCACHE_GUARDED_BY(write_mutex_);
  std::unique_ptr<Records> records_ HCACHE_GUARDED_BY(write_mutex_);
  std::unique_ptr<Space> space_ HCACHE_GUARDED_BY(write_mutex_);
  std::unique_ptr<SegmentWriter> writer_ HCACHE_GUARDED_BY(write_mutex_);
  std::unique_ptr<Removal> removal_ HCACHE_GUARDED_BY(write_mutex_);
  std::unique_ptr<TierCopies> copies_ HCACHE_GUARDED_BY(write_mutex_);
  std::unique_ptr<Quota> quota_ HCACHE_GUARDED_BY(write_mutex_);
  std::unique_ptr<Sessions> sessions_;  // its own rule
};

}  // namespace hcache::store
