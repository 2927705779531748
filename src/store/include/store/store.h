// The chunk store: saved state of token chains on local disks, checked on every read.
//
// What is stored. A chain of tokens is cut into chunks of kChunkTokens (the last may be shorter: a
// tail chunk). A chunk has pages: one layer's state for its tokens in one encoding; a layer may
// have pages in several encodings or in none. Tokens are always kept. docs/format.md has the bytes.
//
// The cache contract, on one page:
//   match    finds the longest stored chain for some tokens, down to the token, and pins it;
//   pin      a ChunkRef pins its chunk while it (or a copy) lives: a pinned chunk is not evicted;
//   put      makes chunks durable: data first, then one catalog transaction, all or nothing;
//   evict    happens inside put when a quota asks for it: in the order of
//   StoreOptions::disk_policy,
//            leaf first, never pinned; freed disk blocks go back to the file system at once. What
//            snapshots have too much of their own quota they lose alone (policy/snapshots.h): their
//            chunks stay;
//   check_integrity  proves the invariants (tests call it after everything they do).
// Nothing that is read is trusted: catalog rows and pages carry checksums, tokens are compared. A
// failed check is data_loss with the place, and the caller recomputes.
//
// Processes. One process writes; a second writer gets failed_precondition naming the directory and
// the process. Any number may open the store read-only meanwhile. What a reader process has pinned
// the writer may still evict; its pages then fail with unavailable, never with wrong bytes.
//
// Crashes. After a crash or power cut at any point each put has happened wholly or not at all, and
// every put that returned ok has happened.
//
// Threading: Store may be used from any thread; put, remove, gc and close take turns, match and
// reads never wait for a put's I/O. Other types state their own rule. Everything that a Store gives
// out (ChunkRef, PageReader) must be gone before the Store is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/env.h"
#include "base/ids.h"
#include "base/status.h"
#include "policy/chain_order.h"
#include "policy/restore_plan.h"
#include "store/key.h"

namespace hcache::store {

// Tokens of a full chunk.
inline constexpr std::uint32_t kChunkTokens = 64;
// Bytes that the catalog and the record files take for a token of full chunks with `pages` pages
// each (docs/format.md): rows in a half full B-tree with its indexes, the session's own tokens, and
// the record: 412 bytes and 24 a page, in units of 64. An estimate, above what was measured.
constexpr std::int64_t catalog_bytes_per_token(std::int64_t pages) {
  const std::int64_t rows = 16 + pages;
  const std::int64_t record = (412 + 24 * pages + 63) / 64 * 64;
  return rows + (record + kChunkTokens - 1) / kChunkTokens;
}
// Pages that a reader hands out start at a multiple of this, in bytes.
inline constexpr std::size_t kPageAlignment = 64;

// How a page holds its layer's state. Numbers are on disk: frozen.
enum class Encoding : std::uint8_t {
  kHiddenF32 = 1,
  kHiddenF16 = 2,
  kHiddenBf16 = 3,
  kHiddenQ8_0 = 4,
  kHiddenQ8_1 = 5,
  kHiddenQ8_K = 6,
  // All K rows, then all V rows, exactly as the arena holds them. Types in ChunkInfo.
  kKv = 16,
  // The same page, compressed (state/packed_kv.h): read whole or not at all. Of a layer a chunk has
  // K and V in one of both.
  kKvPacked = 17,
  // Of models on libllama: the rows of one tensor of a cache, as it holds them; `layer` is the
  // tensor's number.
  kRows = 32,
  // And a part of what stands for all tokens up to the chunk's last one; `layer` is the part's
  // number. Of use whole, behind the whole chunk, or not at all. Our engine's own are rows that
  // layers keep of these tokens (state/kept_state.h).
  kSnapshot = 33,
  // Of the first chunk behind a cut (policy/truncation.h): which rows before it were chosen to stay
  // (state/chosen_rows.h). No layer's: `layer` is 0.
  kChosen = 34,
};

// Element types of K and V rows. Numbers are on disk: frozen.
enum class ElementType : std::uint8_t {
  kNone = 0,
  kF32 = 1,
  kF16 = 2,
  kBf16 = 3,
  kQ8_0 = 4,
  kQ8_1 = 5,
  kQ8_K = 6,
};

[[nodiscard]] std::string_view encoding_name(Encoding encoding);  // "hidden-q8_1", "kv"
[[nodiscard]] std::string_view element_type_name(ElementType type);
[[nodiscard]] inline bool is_kv(Encoding e) {
  return e == Encoding::kKv || e == Encoding::kKvPacked;
}
[[nodiscard]] inline bool is_hidden(Encoding e) { return e < Encoding::kKv; }

struct PageInfo {
  std::uint16_t layer = 0;
  Encoding encoding = Encoding::kKv;
  std::uint32_t bytes = 0;  // as stored; a multiple of the chunk's number of tokens
};

// Which state the tokens of a chain have: that of one fingerprint, unless its sequence was cut
// (policy/truncation.h), behind which the same tokens have another one. A chunk has one.
class ChainFingerprints {
 public:
  ChainFingerprints(const Fingerprint& whole)  // NOLINT(google-explicit-constructor)
      : parts_{{0, whole}} {}
  // From `begin` on: a multiple of kChunkTokens, more than those before.
  void add(std::uint64_t begin, const Fingerprint& fingerprint) {
    parts_.push_back({begin, fingerprint});
  }
  // Of the token at this position.
  [[nodiscard]] const Fingerprint& at(std::uint64_t position) const;
  [[nodiscard]] const Fingerprint& last() const { return parts_.back().fingerprint; }

 private:
  struct Part {
    std::uint64_t begin = 0;
    Fingerprint fingerprint;
  };
  std::vector<Part> parts_;
};

// What the catalog knows of a chunk. Immutable snapshot.
struct ChunkInfo {
  ChunkId id;
  ChunkId parent;  // zero: first of its chain
  Fingerprint fingerprint;
  SaltId salt;
  std::uint64_t first_position = 0;         // of tokens[0] in its chain
  std::vector<std::int32_t> tokens;         // 1 … kChunkTokens
  ElementType k_type = ElementType::kNone;  // of kKv pages
  ElementType v_type = ElementType::kNone;
  std::vector<PageInfo> pages;  // sorted by (layer, encoding)

  [[nodiscard]] const PageInfo* find_page(std::uint16_t layer, Encoding encoding) const;
  // The same, where of K and V either form will do.
  [[nodiscard]] const PageInfo* find_state(std::uint16_t layer, Encoding encoding) const;
};

// A pinned chunk. Copies share the pin. Threading: as a shared_ptr. Must not outlive the Store.
class ChunkRef {
 public:
  ChunkRef() = default;
  [[nodiscard]] explicit operator bool() const { return pin_ != nullptr; }
  [[nodiscard]] const ChunkInfo& info() const { return *info_; }

 private:
  friend class StoreImpl;
  std::shared_ptr<const void> pin_;  // unpins on destruction; also holds where the pages lie
  const ChunkInfo* info_ = nullptr;
};

struct MatchedChunk {
  ChunkRef chunk;
  // Leading tokens of the chunk that equal the wanted ones: all of them except in the last chunk,
  // whose first rows may be used alone (a page's rows are in order; see Encoding).
  std::uint32_t usable_rows = 0;
  // Of a part of a chain, as state/held_match.h makes them; match() gives whole ones. Rows before
  // the usable ones; and by how many positions they have moved since they were saved, time by time.
  std::uint32_t first_row = 0;
  std::vector<std::int64_t> moves = {};
};

struct Match {
  std::vector<MatchedChunk> chunks;  // from the first position on, without a hole
  std::uint64_t n_tokens = 0;        // sum of usable_rows
};

struct PageWrite {
  std::uint16_t layer = 0;
  Encoding encoding = Encoding::kKv;
  // Row by row, equally long rows; kKv: K rows then V rows. Packed: a multiple of the number of
  // rows all the same. Not empty; below 64 MiB.
  std::span<const std::byte> bytes;
};

// One chunk to be saved. Spans must stay valid during put().
struct ChunkWrite {
  ChunkId id;      // must equal chunk_id(fingerprint, salt, parent, tokens)
  ChunkId parent;  // zero or a full chunk, stored already or earlier in the batch
  Fingerprint fingerprint;
  SaltId salt;
  SaltId owner;  // whose quota counts it; zero: the salt's own
  std::uint64_t first_position = 0;
  std::span<const std::int32_t> tokens;  // 1 … kChunkTokens
  ElementType k_type = ElementType::kNone;
  ElementType v_type = ElementType::kNone;
  std::vector<PageWrite> pages;  // each (layer, encoding) at most once; may be empty
};

struct PutReport {
  std::uint32_t chunks_new = 0;
  std::uint32_t chunks_extended = 0;  // existed; encodings were added
  std::uint32_t chunks_known = 0;     // existed with all of these pages (or a longer tail did)
  // Not written since the parent is not in the store (evicted or never saved): unreachable.
  std::uint32_t chunks_without_parent = 0;
  std::uint32_t tails_superseded = 0;  // shorter tails that the batch made redundant
  std::uint32_t chunks_evicted = 0;    // to stay within the quota
  // To stay within that of snapshots; of the batch's own, which are not written then, as well.
  std::uint32_t snapshots_dropped = 0;
  std::uint64_t page_bytes = 0;  // newly written
};

// Calls each(0) to each(n - 1), by several threads at once if it can, and returns when all have
// returned.
using Share = std::function<void(std::size_t n, const std::function<void(std::size_t)>& each)>;

struct ReaderOptions {
  // Memory for read-ahead. What the caller holds unreleased should stay below half of it, or
  // reading stalls. At least 4 times the largest page.
  std::uint64_t ring_bytes = 64ULL << 20;
  // Adjacent pages are read together up to this.
  std::uint64_t request_bytes = 1ULL << 20;
  std::uint32_t queue_depth = 32;          // requests in flight
  std::uint64_t ahead_bytes = UINT64_MAX;  // see PageReader::set_ahead()
  // A prefetch, for which no request waits: pages are read while the disks read nothing for a
  // running request, a request per disk at a time.
  bool background = false;
  // Seconds after submit() in which the remote tier may owe pages; what it has not brought then is
  // unavailable. No more than computing them again would take; RemoteOptions::timeout_s if that is
  // longer. While no page is asked of it, as there is no room, the time does not run.
  double remote_timeout_s = 10;
  // Checks pages, and decrypts them, when they are taken, a few at a time. For a caller whose own
  // threads have every core: the I/O thread, which checks them as they come if this is null, would
  // take one from them. Without effect where the ring has a mirror.
  Share check_with = nullptr;
};

// The same bytes as a reader's ring, in a device's memory: what is read from a disk is there too,
// from where a device copies faster (DirectStorage). Threading: any, for parts that don't overlap.
class RingMirror {
 public:
  RingMirror() = default;
  RingMirror(const RingMirror&) = delete;
  RingMirror& operator=(const RingMirror&) = delete;
  virtual ~RingMirror() = default;

  // As File::read_at, into a part of the ring and its mirror.
  [[nodiscard]] virtual Result<std::size_t> read(File& file, std::uint64_t offset,
                                                 std::span<std::byte> part) = 0;
  // Others have written this part of the ring.
  [[nodiscard]] virtual Status update(std::span<const std::byte> part) = 0;
};

struct PageRequest {
  ChunkRef chunk;
  std::uint16_t layer = 0;
  Encoding encoding = Encoding::kKv;
};

// Where a page came from.
enum class PageOrigin : std::uint8_t { kMemory, kDisk, kRemote };

struct PageView {
  std::size_t index = 0;             // in order of submission over the reader's life, from 0
  std::span<const std::byte> bytes;  // valid until release(index); empty unless status is ok
  // When its request began and when it was there, on the monotonic clock; 0: nothing was read.
  std::int64_t read_begin_ns = 0;
  std::int64_t read_end_ns = 0;
  PageOrigin origin = PageOrigin::kDisk;
  // data_loss (checksum; names chunk, layer, file and offset: quarantine it), not_found (no such
  // page), unavailable (the file is gone, another process evicted the page, or the remote tier did
  // not bring it; the store does not offer a remote page again that failed).
  Status status;
};

struct ReaderStats {
  std::uint64_t pages = 0;         // delivered ok
  std::uint64_t page_bytes = 0;    // of those
  std::uint64_t dram_bytes = 0;    // of those pages, found in host memory
  std::uint64_t remote_bytes = 0;  // of those pages, read from the remote tier
  std::uint64_t disk_bytes = 0;    // read from disks: alignment and gaps included
  std::uint64_t requests = 0;
  std::uint64_t failed_pages = 0;
  double busy_s = 0;  // seconds with a request in flight
};

// Reads pages ahead of their use, in the order submitted.
//
// Pages that host memory holds are delivered from there, without the disks; pages that only the
// remote tier has come from there, beside what the disks read.
// An I/O thread of its own keeps the disks busy as far as the ring has room, merges adjacent pages
// and checks each page, unless the options leave that to others. A failed page fails alone.
// Threading: submit, next, try_next, release, cancel and stats may be called from any threads; next
// and try_next from one at a time.
class PageReader {
 public:
  PageReader() = default;
  PageReader(const PageReader&) = delete;
  PageReader& operator=(const PageReader&) = delete;
  virtual ~PageReader() = default;  // cancels and waits for what is in flight

  // Appends pages to the list. The best order is by layer, then by chunk. invalid_argument if a
  // chunk is of another store or a page does not fit the ring.
  [[nodiscard]] virtual Status submit(std::span<const PageRequest> pages) = 0;
  // The next page of the list; waits for it. out_of_range when the list is at its end, cancelled
  // after cancel(). A failed page comes as a view with its status.
  [[nodiscard]] virtual Result<PageView> next() = 0;
  // As next(), but nullopt instead of waiting.
  [[nodiscard]] virtual Result<std::optional<PageView>> try_next() = 0;
  // The same, but waits for so long at most.
  [[nodiscard]] virtual Result<std::optional<PageView>> next_within(std::int64_t timeout_ns) = 0;
  // Bytes that the disks may bring before they are taken, as far as the ring has room: a fast disk
  // fills it at once, and checking what came takes a core for milliseconds. Reading goes on when
  // half of it is left. Never waits.
  virtual void set_ahead(std::uint64_t bytes) = 0;
  // Gives a page's memory back; any order. Each delivered page once, failed ones too.
  virtual void release(std::size_t index) = 0;
  // Wakes next(); nothing more is read. Delivered pages stay valid until released.
  virtual void cancel() = 0;
  [[nodiscard]] virtual ReaderStats stats() const = 0;
};

// The key of a session's metadata that says whether its state was computed with adapters or with a
// budget of rows, which its salt keeps apart from other state, and its fingerprint does not.
inline constexpr const char* kAdapted = "adapted";

// A named conversation. Its tokens are all kept, whatever became of its chunks.
struct Session {
  std::string name;
  Fingerprint fingerprint;
  SaltId salt;
  std::vector<std::int32_t> tokens;
  std::string metadata_json;    // the caller's, stored as it is
  std::int64_t created_ns = 0;  // wall clock; put_session fills both
  std::int64_t updated_ns = 0;
};

struct SessionSummary {
  std::string name;
  Fingerprint fingerprint;
  std::uint64_t n_tokens = 0;
  std::int64_t created_ns = 0;
  std::int64_t updated_ns = 0;
};

struct ChunkSummary {
  ChunkInfo info;
  std::int64_t last_used_ns = 0;  // wall clock
  std::uint64_t page_bytes = 0;
};

struct DiskStat {
  std::string dir;
  std::uint64_t segments = 0;
  std::uint64_t page_bytes = 0;       // live pages
  std::uint64_t allocated_bytes = 0;  // disk blocks of the segment files
  std::uint64_t free_bytes = 0;       // left on the file system
};

// Of this process' use of the remote tier, since the store was opened.
struct RemoteStat {
  std::string name;  // its URL without the password
  bool available = false;
  std::uint64_t chunks_found = 0;  // when it was asked for them
  std::uint64_t pages_read = 0;
  std::uint64_t bytes_read = 0;
  double read_busy_s = 0;  // with a read in flight
  std::uint64_t pages_written = 0;
  std::uint64_t bytes_written = 0;
  std::uint64_t backlog_requests = 0;  // of writing and erasing, under way or waiting
  std::uint64_t backlog_bytes = 0;     // accepted, not written yet
  std::uint64_t pages_skipped = 0;     // not written: it was down, or too much was waiting
  std::uint64_t pages_promoted = 0;    // read from it and kept on the disks as well
  std::uint64_t failures = 0;          // refused, unanswered or damaged
};

struct StoreStat {
  std::uint32_t format_version = 0;
  std::uint64_t chunks = 0;
  std::uint64_t tokens = 0;  // in chunks; shared prefixes count once
  std::uint64_t pages = 0;
  std::uint64_t sessions = 0;
  std::uint64_t page_bytes = 0;
  std::uint64_t allocated_bytes = 0;  // segment files of all disks
  std::uint64_t catalog_bytes = 0;    // disk blocks of the catalog and its log
  std::uint64_t record_bytes = 0;     // disk blocks of the record files
  std::uint64_t quota_bytes = 0;
  std::uint64_t snapshots = 0;       // chunks that have one
  std::uint64_t snapshot_bytes = 0;  // of page_bytes
  std::uint64_t snapshot_quota_bytes = 0;
  std::uint64_t snapshots_dropped = 0;  // to stay within it, since the store was opened
  std::vector<DiskStat> disks;
  // The host memory in front of the disks (StoreOptions::dram_bytes), of this process alone.
  std::uint64_t dram_capacity_bytes = 0;
  std::uint64_t dram_bytes = 0;
  std::uint64_t dram_hits = 0;  // pages, since the store was opened
  std::uint64_t dram_misses = 0;
  // Pages that did not pass their check when they were read, since the store was opened.
  std::uint64_t checksum_failures = 0;
  std::optional<RemoteStat> remote;
};

struct Damage {
  ChunkId chunk;
  std::uint16_t layer = 0;
  Encoding encoding = Encoding::kKv;
  Status status;  // says the place
};

struct VerifyReport {
  std::uint64_t chunks = 0;
  std::uint64_t pages = 0;
  std::uint64_t page_bytes = 0;
  std::vector<Damage> damaged_pages;
  std::vector<Status> damaged_catalog;  // rows that fail their checks, SQLite's own findings
  [[nodiscard]] bool ok() const { return damaged_pages.empty() && damaged_catalog.empty(); }
};

struct GcReport {
  std::uint64_t bytes_before = 0;  // allocated: segments and catalog
  std::uint64_t bytes_after = 0;
  std::uint64_t segments_removed = 0;
  std::uint64_t pages_moved = 0;
};

// What was wrong with a store and has been mended.
struct RepairReport {
  std::string damage;             // why the catalog was made anew; empty: it was not
  std::string set_aside;          // where the damaged catalog is now; empty: there was none
  std::uint64_t chunks_kept = 0;  // read from the damaged catalog
  std::uint64_t sessions_kept = 0;
  std::uint64_t chunks_found = 0;  // known only from the records
  std::uint64_t sessions_found = 0;
  std::uint64_t chunks_dropped = 0;   // nothing leads to them, or all their pages are gone
  std::uint64_t pages_dropped = 0;    // their place is gone or another's
  std::uint64_t records_written = 0;  // of chunks and sessions that lacked one
  std::uint64_t records_erased = 0;   // of what is not in the store any more
  [[nodiscard]] bool clean() const {
    return damage.empty() && chunks_found + sessions_found + chunks_dropped + pages_dropped +
                                     records_written + records_erased ==
                                 0;
  }
};

// Which chunks to remove; conditions are joined by "and". No condition: everything.
struct RemoveFilter {
  std::optional<ChunkId> chunk;  // and all that follow it
  std::optional<Fingerprint> fingerprint;
  std::optional<SaltId> salt;
  std::optional<std::int64_t> unused_since_ns;  // last used before this wall-clock time
};

// What goes to the remote tier.
enum class RemoteWrite : std::uint8_t {
  kOff,      // nothing: it is only read
  kThrough,  // what is put, at once
  kBack,     // what a quota evicts from the disks
};

// A store beyond this machine that several processes share (docs/operations.md).
struct RemoteOptions {
  std::string url;  // redis://…, rediss://…, s3://…; empty: none
  // Of S3; no access key: requests are not signed.
  std::string access_key;
  std::string secret_key;
  std::string session_token;
  double ttl_s = 86400;  // chunks that are not used for so long expire; 0: never
  RemoteWrite write = RemoteWrite::kThrough;  // in the background
  double timeout_s = 0.25;  // for the answer whether it has a chain; see ReaderOptions, too
  std::uint64_t queue_bytes = 256ULL << 20;  // of pages that wait to be written there
};

// What is being done, and the share of it that is done; returning false stops with cancelled.
using RecoveryReport = std::function<bool(std::string_view what, double fraction)>;

struct StoreOptions {
  // One per disk; created (0700) when missing. The order does not matter after the first time; a
  // disk may be added later.
  std::vector<std::string> dirs;
  std::string catalog_dir;                 // empty: dirs[0]
  std::uint64_t quota_bytes = 0;           // page blocks and catalog; 0: as much as the disks have
  std::uint64_t owner_quota_bytes = 0;     // pages of one owner's chunks; 0: no limit
  std::uint64_t snapshot_quota_bytes = 0;  // kSnapshot pages; 0: no limit
  std::uint64_t dram_bytes = 0;            // pages kept in host memory as well; 0: none
  // What leaves when the quota or the host memory is full.
  policy::TierPolicy disk_policy;
  policy::TierPolicy dram_policy;
  std::string dram_place;  // where host memory lies: HostMemory::map()
  // The caller's own memory instead (pinned memory of a device, say): at least dram_bytes, which
  // outlive the store, its readers and their views. Empty: the store maps some.
  std::span<std::byte> dram_memory;
  // Makes the memory of readers' rings, from any thread (pinned memory of a device, say). Empty:
  // ordinary memory.
  std::function<AlignedBuffer(std::size_t bytes)> new_ring;
  // Makes a ring's mirror, from any thread; null: this ring has none. Empty: no ring has one.
  std::function<Result<std::unique_ptr<RingMirror>>(std::span<std::byte> ring)> new_mirror;
  RemoteOptions remote;
  // Encrypts what is stored, here and in the remote tier (docs/format.md). A store has its key from
  // the beginning, or never has one: open() is failed_precondition otherwise, and changes nothing.
  std::optional<StoreKey> key;
  bool read_only = false;
  bool direct_io = true;                       // O_DIRECT where the file system has it
  std::uint64_t segment_bytes = 256ULL << 20;  // size at which a new segment file is begun
  // A registered SQLite VFS for the catalog. Empty: SQLite's own. With another one the catalog is
  // held exclusively (no shared memory is asked of it), so no other process can read meanwhile.
  std::string catalog_vfs;
  // Told how far recovery is while the store opens. Empty: it is logged every two seconds.
  RecoveryReport recovery_progress;
};

// (pages done, pages in all); returning false stops with cancelled.
using Progress = std::function<bool(std::uint64_t, std::uint64_t)>;

class Store {
 public:
  Store() = default;
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;
  virtual ~Store() = default;  // closes; errors of that are logged

  // Opens a store, creating it where there is none (not with read_only: not_found). Space that a
  // crash left allocated is reclaimed. A damaged or missing catalog is set aside and made anew from
  // what can be read of it and from the records beside the pages (not with read_only: data_loss).
  // failed_precondition: another writer, directories that belong to different stores, a missing
  // disk. data_loss: nothing says which store the directories are of. unimplemented: a format
  // version of the future.
  [[nodiscard]] static Result<std::unique_ptr<Store>> open(Env& env, StoreOptions options);
  // Opens the store for writing, compares all records with the catalog and mends what differs, as
  // after a crash. `rebuild`: makes the catalog anew even if nothing seems wrong with it.
  [[nodiscard]] static Result<RepairReport> repair(Env& env, StoreOptions options, bool rebuild);
  // Removes a store's files (whatever their state) and nothing else. failed_precondition while a
  // process writes it.
  [[nodiscard]] static Status destroy(Env& env, const StoreOptions& options);

  // ---- Cache -------------------------------------------------------------------------------

  // Makes a batch durable; on any error nothing of it has happened (evictions to make room may
  // have). Pages are laid out layer by layer within the batch, so batches of several consecutive
  // chunks read faster later than single ones. Shorter tails that a new chunk extends disappear. A
  // chunk that is there already only gets the pages that it lacks.
  // Errors: resource_exhausted (disk full, or a quota can't be met without pinned chunks),
  // invalid_argument, failed_precondition (read_only), unavailable (a directory vanished).
  [[nodiscard]] virtual Result<PutReport> put(std::span<const ChunkWrite> batch) = 0;
  // The longest stored prefix of `tokens` (from position 0) under this chain's fingerprints and
  // salt, pinned and marked as used. Damaged catalog rows end the match; they are never returned.
  // No disk I/O beyond the catalog.
  [[nodiscard]] virtual Result<Match> match(const ChainFingerprints& chain, const SaltId& salt,
                                            std::span<const std::int32_t> tokens) = 0;
  // Asks the remote tier for what the store lacks of these tokens, so that match() offers it: its
  // pages are read from there. Waits RemoteOptions::timeout_s at most; nothing to do without a
  // remote tier. A tier that is down costs nothing.
  virtual void look_up(const ChainFingerprints& chain, const SaltId& salt,
                       std::span<const std::int32_t> tokens) = 0;
  // One chunk by id, pinned. not_found.
  [[nodiscard]] virtual Result<ChunkRef> find(const ChunkId& id) = 0;
  [[nodiscard]] virtual Result<std::unique_ptr<PageReader>> new_reader(ReaderOptions options) = 0;
  // Makes the memory of so many readers with these options, as far as the store keeps it for later
  // ones, so that none of them has to: 64 MiB of pages take the kernel some 15 to 60 ms.
  virtual void prepare_readers(std::size_t n, ReaderOptions options) = 0;
  // Where each page of the chunk (as in ChunkInfo::pages) would be read from now.
  [[nodiscard]] virtual std::vector<PageOrigin> origins(const ChunkRef& chunk) const = 0;
  // Of reading from the remote tier, as measured so far; before that, and without one, a guess.
  [[nodiscard]] virtual double remote_bytes_per_s() const = 0;
  // Drops a page that failed its check, so that it is not offered again; of a snapshot all parts,
  // which are of no use without it. A page that is gone already is ok. failed_precondition:
  // read_only.
  [[nodiscard]] virtual Status quarantine(const ChunkId& id, std::uint16_t layer,
                                          Encoding encoding) = 0;

  // A request in the queue wants a match's chunks, until it is unwanted: policies that look ahead
  // keep them in host memory and on the disks, for the smallest queue ticket first. No other
  // request has that ticket.
  virtual void want(std::uint64_t ticket, const Match& match) = 0;
  virtual void dispatch(std::uint64_t ticket) = 0;  // it waits no longer and runs
  virtual void unwant(std::uint64_t ticket) = 0;
  // What restores of this model cost, for policies that weigh it (policy/miss_cost.h).
  [[nodiscard]] virtual Status set_costs(const policy::RestoreCosts& costs,
                                         double disk_bytes_per_s) = 0;

  // ---- Sessions ----------------------------------------------------------------------------

  // Creates or replaces by name. Durable when it returns. created_ns is kept from the first put.
  [[nodiscard]] virtual Status put_session(const Session& session) = 0;
  [[nodiscard]] virtual Result<Session> get_session(std::string_view name) = 0;
  [[nodiscard]] virtual Result<std::vector<SessionSummary>> list_sessions() = 0;
  // Deletes the session and those chunks of its chain that no other session and no other chain
  // goes through. not_found. Returns the number of chunks removed.
  [[nodiscard]] virtual Result<std::uint64_t> delete_session(std::string_view name) = 0;

  // ---- Administration ----------------------------------------------------------------------

  [[nodiscard]] virtual Result<StoreStat> stat() = 0;
  // Bytes of the pages that count for an owner's quota. Waits for a put.
  [[nodiscard]] virtual std::uint64_t owned_bytes(const SaltId& owner) = 0;
  // Calls `visit` for every chunk until it returns false. Order: as first saved.
  [[nodiscard]] virtual Status list(const std::function<bool(const ChunkSummary&)>& visit) = 0;
  // Reads and checks everything. Damage is in the report, not in the status.
  [[nodiscard]] virtual Result<VerifyReport> verify(const Progress& progress) = 0;
  // Drops chunks that nothing reaches, moves pages out of sparse segments, removes empty ones,
  // shrinks the catalog.
  [[nodiscard]] virtual Result<GcReport> gc() = 0;
  // Removes the chunks that the filter names and what follows them, except pinned ones and their
  // ancestors. Returns the number removed.
  [[nodiscard]] virtual Result<std::uint64_t> remove(const RemoveFilter& filter) = 0;
  // Pages in the catalog do not overlap, lie within their segments, ids hash to their content,
  // parents exist, the free space is what the pages leave. Reads no page. internal_error if not.
  [[nodiscard]] virtual Status check_integrity() = 0;
  // Writes what is pending (times of use), shrinks the log and releases the lock. Everything else
  // was durable before. No other call may be running; later ones fail with failed_precondition.
  [[nodiscard]] virtual Status close() = 0;
};

// Bytes/s of reading a fresh scratch file of `bytes` in `dir` with large direct requests, bypassing
// the page cache where the file system allows. Takes a few hundred milliseconds on an SSD.
[[nodiscard]] Result<double> measure_read_speed(Env& env, const std::string& dir,
                                                std::uint64_t bytes = 32ULL << 20);
// Bytes/s at which a reader decrypts pages: more than that can't be read of an encrypted store.
// Takes a few milliseconds.
[[nodiscard]] double measure_decryption(Env& env, const StoreKey& key);

}  // namespace hcache::store
