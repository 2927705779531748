// Opening and closing, matching and pinning, sessions.
#include <fmt/format.h>

#include <algorithm>

#include "base/log.h"
#include "base/tokens.h"
#include "store_impl.h"

namespace hcache::store {
namespace {

constexpr const char* kLockName = "hcache-store.lock";
constexpr const char* kDiskFileName = "hcache-disk";
constexpr std::uint64_t kMinSegmentBytes = 16ULL << 10;
constexpr std::uint64_t kMaxSegmentBytes = 64ULL << 30;
constexpr std::uint64_t kMinRingBytes = 256ULL << 10;
// Blocks beyond its pages that a file system may count for a segment (its own extent tree, say).
constexpr std::uint64_t kAllocationSlack = 64ULL << 10;
constexpr int kMatchAttempts = 8;
// A gigabit per second, until something has been read.
constexpr double kGuessedRemoteSpeed = 125e6;
constexpr std::uint64_t kMinMeasuredBytes = 4ULL << 20;
// For what waits to be written to the remote tier, when the store closes.
constexpr std::int64_t kRemoteCloseNs = 5'000'000'000;

// Pages of `there` that `here`, the same chunk, lacks.
void add_missing_pages(const ChunkRecord& there, ChunkRecord* here) {
  ChunkInfo& info = here->info;
  for (std::size_t i = 0; i < there.info.pages.size(); ++i) {
    const PageInfo& page = there.info.pages[i];
    if (info.find_page(page.layer, page.encoding) != nullptr) continue;
    if (page.encoding == Encoding::kKv) {
      // All kv pages of a chunk have the same types.
      const bool other = info.k_type != ElementType::kNone &&
                         (info.k_type != there.info.k_type || info.v_type != there.info.v_type);
      if (other) continue;
      info.k_type = there.info.k_type;
      info.v_type = there.info.v_type;
    }
    const auto at = std::lower_bound(
        info.pages.begin(), info.pages.end(), page, [](const PageInfo& a, const PageInfo& b) {
          return std::pair(a.layer, a.encoding) < std::pair(b.layer, b.encoding);
        });
    here->places.insert(here->places.begin() + (at - info.pages.begin()), there.places[i]);
    info.pages.insert(at, page);
  }
}

std::string without_slash(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

Status check_options(const StoreOptions& options) {
  if (options.dirs.empty()) return invalid_argument("a store needs at least one directory");
  if (options.dirs.size() >= kMaxDisks) return invalid_argument("a store has at most 254 disks");
  std::set<std::string> seen;
  for (const std::string& dir : options.dirs) {
    if (dir.empty()) return invalid_argument("a store directory's name is empty");
    if (!seen.insert(without_slash(dir)).second) {
      return invalid_argument(fmt::format("store directory {} is given twice", dir));
    }
  }
  if (options.segment_bytes < kMinSegmentBytes || options.segment_bytes > kMaxSegmentBytes) {
    return invalid_argument("segment_bytes must be 16 KiB to 64 GiB");
  }
  if (!options.dram_memory.empty() && options.dram_memory.size() < options.dram_bytes) {
    return invalid_argument("the memory given for pages is smaller than dram_bytes");
  }
  return {};
}

}  // namespace

struct StoreImpl::Pin : PinnedChunk {
  StoreImpl* owner = nullptr;
  ~Pin() { owner->unpin(record.info.id); }
};

Result<std::unique_ptr<Store>> Store::open(Env& env, StoreOptions options) {
  HCACHE_RETURN_IF_ERROR(check_options(options));
  for (std::string& dir : options.dirs) dir = without_slash(std::move(dir));
  if (options.catalog_dir.empty()) options.catalog_dir = options.dirs[0];
  PageMemory memory;
  if (options.dram_memory.empty()) {
    auto mapped = PageMemory::map(options.dram_bytes, options.dram_place);
    if (!mapped.ok()) return mapped.status().with_context("host memory for saved state");
    memory = *std::move(mapped);
  } else {
    memory = PageMemory::over(options.dram_memory);
  }
  auto store = std::make_unique<StoreImpl>(env, std::move(options), std::move(memory));
  HCACHE_RETURN_IF_ERROR(store->open());
  return std::unique_ptr<Store>(std::move(store));
}

Status Store::destroy(Env& env, const StoreOptions& options) {
  HCACHE_RETURN_IF_ERROR(check_options(options));
  const std::string catalog_dir =
      options.catalog_dir.empty() ? options.dirs[0] : options.catalog_dir;
  std::unique_ptr<FileLock> lock;
  HCACHE_ASSIGN_OR_RETURN(const FileInfo there, env.file_info(catalog_dir));
  if (there.exists) {
    HCACHE_ASSIGN_OR_RETURN(lock, env.lock_file(join_path(catalog_dir, kLockName)));
  }
  auto remove_if_there = [&](const std::string& path) -> Status {
    const Status status = env.remove_path(path);
    return status.code() == Code::kNotFound ? Status() : status;
  };
  // The catalog first: without it the rest is garbage, with it the rest would be missed.
  for (const char* name : {"catalog.db", "catalog.db-wal", "catalog.db-shm"}) {
    HCACHE_RETURN_IF_ERROR(remove_if_there(join_path(catalog_dir, name)));
  }
  for (const std::string& dir : options.dirs) {
    const auto names = env.list_dir(dir);
    if (!names.ok()) continue;
    for (const std::string& name : *names) {
      std::uint32_t number = 0;
      if (name == kDiskFileName || parse_segment_name(name, &number)) {
        HCACHE_RETURN_IF_ERROR(remove_if_there(join_path(dir, name)));
      }
    }
  }
  return remove_if_there(join_path(catalog_dir, kLockName));
}

StoreImpl::StoreImpl(Env& env, StoreOptions options, PageMemory memory)
    : env_(env),
      options_(std::move(options)),
      cache_(env, options_.dram_bytes, options_.dram_evict, std::move(memory)) {}

StoreImpl::~StoreImpl() {
  if (catalog_ == nullptr) return;
  const Status status = close();
  if (!status.ok() && status.code() != Code::kFailedPrecondition) {
    log::warn("closing the store in {}: {}", options_.dirs[0], status.to_string());
  }
}

Status StoreImpl::open() {
  MutexLock lock(write_mutex_);
  if (!options_.read_only) {
    HCACHE_RETURN_IF_ERROR(env_.make_dirs(options_.catalog_dir));
    auto locked = env_.lock_file(join_path(options_.catalog_dir, kLockName));
    if (!locked.ok()) {
      return locked.status().with_context(
          fmt::format("cannot open the store in {} for writing", options_.catalog_dir));
    }
    lock_ = std::move(*locked);
  }
  CatalogOptions catalog;
  catalog.dir = options_.catalog_dir;
  catalog.vfs = options_.catalog_vfs;
  catalog.read_only = options_.read_only;
  HCACHE_ASSIGN_OR_RETURN(auto opened, Catalog::open(env_, catalog));
  catalog_ = std::move(opened);
  auto ready = [&]() HCACHE_REQUIRES(write_mutex_) -> Status {
    HCACHE_ASSIGN_OR_RETURN(std::vector<std::string> dirs, resolve_disks());
    segments_ = std::make_unique<Segments>(env_, catalog_->store_id(), std::move(dirs),
                                           options_.read_only, options_.direct_io);
    if (!options_.remote.url.empty()) {
      HCACHE_ASSIGN_OR_RETURN(auto tier, open_tier(env_, options_.remote));
      remote_ = std::make_unique<Remote>(env_, options_.remote, std::move(tier));
    }
    if (options_.read_only) return {};
    HCACHE_RETURN_IF_ERROR(rebuild_free_space());
    std::uint64_t removed = 0;
    return reclaim(false, &removed);
  };
  Status status = ready();
  if (!status.ok()) {
    catalog_.reset();
    lock_.reset();
  }
  return status;
}

// Which directory is which disk. New directories become new disks.
Result<std::vector<std::string>> StoreImpl::resolve_disks() {
  HCACHE_ASSIGN_OR_RETURN(const std::vector<std::uint32_t> known, catalog_->disks());
  std::vector<std::string> dirs;      // by disk
  std::vector<std::string> unmarked;  // no disk file
  std::vector<std::string> damaged;   // an unreadable one
  auto place = [&](std::uint32_t disk, const std::string& dir) -> Status {
    if (disk >= kMaxDisks) return data_loss(fmt::format("{}: disk {} is too high", dir, disk));
    if (dirs.size() <= disk) dirs.resize(disk + std::size_t{1});
    if (!dirs[disk].empty()) {
      return failed_precondition(
          fmt::format("{} and {} both say they are disk {} of the store", dirs[disk], dir, disk));
    }
    dirs[disk] = dir;
    return {};
  };
  for (const std::string& dir : options_.dirs) {
    const std::string path = join_path(dir, kDiskFileName);
    HCACHE_ASSIGN_OR_RETURN(const FileInfo info, env_.file_info(path));
    if (!info.exists) {
      unmarked.push_back(dir);
      continue;
    }
    HCACHE_ASSIGN_OR_RETURN(const std::string text, read_whole_file(env_, path));
    const auto file = decode_disk_file(text);
    if (!file.ok()) {
      if (file.code() != Code::kDataLoss) return file.status().with_context(path);
      damaged.push_back(dir);
      continue;
    }
    if (file->store != catalog_->store_id()) {
      return failed_precondition(
          fmt::format("{} belongs to store {}, the catalog in {} to store {}", dir,
                      to_hex(file->store), options_.catalog_dir, to_hex(catalog_->store_id())));
    }
    HCACHE_RETURN_IF_ERROR(place(file->disk, dir));
  }
  std::vector<std::uint32_t> missing;
  for (const std::uint32_t disk : known) {
    if (disk >= dirs.size() || dirs[disk].empty()) missing.push_back(disk);
  }
  if (missing.size() == 1 && damaged.size() == 1) {
    // It can only be this one. Pages have checksums of their own, so a wrong guess shows.
    log::warn("{} is damaged; taking {} as disk {}", join_path(damaged[0], kDiskFileName),
              damaged[0], missing[0]);
    HCACHE_RETURN_IF_ERROR(place(missing[0], damaged[0]));
    if (!options_.read_only) {
      HCACHE_RETURN_IF_ERROR(
          write_whole_file(env_, join_path(damaged[0], kDiskFileName),
                           encode_disk_file({catalog_->store_id(), missing[0]})));
    }
    missing.clear();
    damaged.clear();
  }
  if (!damaged.empty()) {
    return data_loss(fmt::format("{} is damaged", join_path(damaged[0], kDiskFileName)));
  }
  if (!missing.empty()) {
    return failed_precondition(
        fmt::format("disk {} of the store in {} is not among the given directories (not mounted?)",
                    missing[0], options_.catalog_dir));
  }
  if (options_.read_only) {
    if (dirs.empty())
      return not_found(fmt::format("the store in {} has no disks", options_.dirs[0]));
    return dirs;
  }
  for (const std::string& dir : unmarked) {
    const auto disk = static_cast<std::uint32_t>(dirs.size());
    HCACHE_RETURN_IF_ERROR(env_.make_dirs(dir));
    HCACHE_RETURN_IF_ERROR(write_whole_file(env_, join_path(dir, kDiskFileName),
                                            encode_disk_file({catalog_->store_id(), disk})));
    HCACHE_RETURN_IF_ERROR(place(disk, dir));
  }
  if (dirs.size() > known.size()) {
    HCACHE_ASSIGN_OR_RETURN(auto transaction, catalog_->begin());
    for (std::uint32_t disk = 0; disk < dirs.size(); ++disk) {
      HCACHE_RETURN_IF_ERROR(transaction.add_disk(disk, env_.wall_ns()));
    }
    HCACHE_RETURN_IF_ERROR(transaction.commit());
  }
  return dirs;
}

Status StoreImpl::rebuild_free_space() {
  free_space_.assign(segments_->disks(), Allocator(options_.segment_bytes));
  for (std::uint32_t disk = 0; disk < segments_->disks(); ++disk) {
    HCACHE_ASSIGN_OR_RETURN(const auto numbers, segments_->list(disk));
    for (const std::uint32_t number : numbers) free_space_[disk].add_segment(number);
  }
  HCACHE_ASSIGN_OR_RETURN(owners_, catalog_->owners());
  std::uint64_t damaged = 0;
  HCACHE_RETURN_IF_ERROR(catalog_->scan([&](ChunkRow&& row) HCACHE_REQUIRES(write_mutex_) {
    if (!row.record.ok()) {
      ++damaged;
      return true;
    }
    owned_bytes_[owner_of(row.record->info.salt)] += page_bytes(*row.record);
    for (std::size_t i = 0; i < row.record->places.size(); ++i) {
      const PagePlace& place = row.record->places[i];
      if (place.disk >= free_space_.size() ||
          !free_space_[place.disk].add_page(place.segment, place.offset,
                                            row.record->info.pages[i].bytes)) {
        ++damaged;
      }
    }
    return true;
  }));
  if (damaged > 0) {
    log::warn(
        "the catalog in {} has {} damaged rows; they are not used (`hcache store gc` removes them)",
        options_.catalog_dir, damaged);
  }
  return {};
}

Status StoreImpl::reclaim(bool always, std::uint64_t* segments_removed) {
  for (std::uint32_t disk = 0; disk < segments_->disks(); ++disk) {
    Allocator& space = free_space_[disk];
    for (const std::uint32_t number : space.segments()) {
      if (space.used_bytes(number) == 0) {
        const Status status = segments_->remove(disk, number);
        if (!status.ok() && status.code() != Code::kNotFound) return status;
        space.remove_segment(number);
        ++*segments_removed;
        continue;
      }
      const auto info = env_.file_info(segments_->path(disk, number));
      if (!info.ok() || !info->exists) continue;  // its pages will be found missing when read
      const std::uint64_t end = space.end_of_use(number);
      const std::uint64_t expected = space.used_bytes(number) + kSegmentHeaderBytes;
      if (!always && info->allocated_bytes <= expected + kAllocationSlack && info->size <= end) {
        continue;
      }
      const auto file = segments_->open(disk, number);
      if (!file.ok()) {
        log::warn("cannot reclaim space: {}", file.status().to_string());
        continue;
      }
      if (info->size > end) HCACHE_RETURN_IF_ERROR((*file)->truncate(end));
      for (const Extent& hole : space.holes(number)) {
        HCACHE_RETURN_IF_ERROR((*file)->punch_hole(hole.offset, hole.bytes));
      }
    }
  }
  return {};
}

Status StoreImpl::check_open() const {
  MutexLock lock(mutex_);
  if (closed_) return failed_precondition("the store is closed");
  return {};
}

Status StoreImpl::check_writable() const {
  HCACHE_RETURN_IF_ERROR(check_open());
  if (options_.read_only) return failed_precondition("the store is open for reading only");
  return {};
}

Status StoreImpl::close() {
  MutexLock lock(write_mutex_);
  HCACHE_RETURN_IF_ERROR(check_open());
  Status status;
  if (!options_.read_only) {
    settle_deferred();
    promote();
    auto flush = [&]() -> Status {
      HCACHE_ASSIGN_OR_RETURN(auto transaction, catalog_->begin());
      HCACHE_RETURN_IF_ERROR(flush_touches(&transaction));
      HCACHE_RETURN_IF_ERROR(transaction.commit());
      return catalog_->checkpoint();
    };
    status = flush();
  }
  if (remote_ != nullptr) {
    const Status there = remote_->flush(env_.monotonic_ns() + kRemoteCloseNs);
    if (!there.ok()) log::warn("the remote store lacks what was saved last: {}", there.message());
  }
  {
    MutexLock state(mutex_);
    closed_ = true;
    if (!pins_.empty()) log::warn("{} chunks are pinned in a store that closes", pins_.size());
  }
  write_queue_.reset();
  catalog_.reset();
  lock_.reset();
  return status;
}

// ---- Matching and pinning ---------------------------------------------------------------------

Result<std::optional<ChunkRecord>> StoreImpl::find_record(const ChunkId& id, Where where) {
  auto found = catalog_->find(id);
  if (remote_ == nullptr || where == Where::kDisks) return found;
  if (!found.ok() && found.code() != Code::kDataLoss) return found;
  std::optional<ChunkRecord> there = remote_->find(id);
  if (!there.has_value()) return found;
  if (!found.ok() || !found->has_value()) return there;
  add_missing_pages(*there, &**found);
  return found;
}

Result<std::vector<ChunkRecord>> StoreImpl::walk(const Fingerprint& fingerprint, const SaltId& salt,
                                                 std::span<const std::int32_t> tokens, Where where,
                                                 std::vector<std::uint32_t>* rows) {
  std::vector<ChunkRecord> chain;
  ChunkId parent;
  auto fits = [&](const ChunkInfo& info) {
    return info.parent == parent && info.fingerprint == fingerprint && info.salt == salt;
  };
  rows->clear();
  while (!tokens.empty()) {
    if (tokens.size() >= kChunkTokens) {
      const auto wanted = tokens.first(kChunkTokens);
      auto found = find_record(chunk_id(fingerprint, salt, parent, wanted), where);
      if (!found.ok() && found.code() != Code::kDataLoss) return found.status();
      if (!found.ok()) log::warn("{}", found.status().to_string());
      if (found.ok() && found->has_value() && fits((*found)->info) &&
          common_prefix((*found)->info.tokens, wanted) == kChunkTokens) {
        parent = (*found)->info.id;
        chain.push_back(std::move(**found));
        rows->push_back(kChunkTokens);
        tokens = tokens.subspan(kChunkTokens);
        continue;
      }
    }
    auto siblings = catalog_->children(sibling_key(fingerprint, salt, parent), tokens[0]);
    if (!siblings.ok()) {
      if (siblings.code() != Code::kDataLoss) return siblings.status();
      log::warn("{}", siblings.status().to_string());
      break;
    }
    if (remote_ != nullptr && where == Where::kEverywhere) {
      const ChunkId key = sibling_key(fingerprint, salt, parent);
      for (ChunkRecord& there : remote_->children(key, tokens[0])) {
        const auto here =
            std::find_if(siblings->begin(), siblings->end(),
                         [&](const ChunkRecord& s) { return s.info.id == there.info.id; });
        if (here == siblings->end()) {
          siblings->push_back(std::move(there));
        } else {
          add_missing_pages(there, &*here);
        }
      }
    }
    ChunkRecord* best = nullptr;
    std::uint32_t best_rows = 0;
    for (ChunkRecord& sibling : *siblings) {
      if (!fits(sibling.info)) continue;
      const auto n = static_cast<std::uint32_t>(common_prefix(sibling.info.tokens, tokens));
      if (n > best_rows || (n == best_rows && best != nullptr &&
                            sibling.info.pages.size() > best->info.pages.size())) {
        best = &sibling;
        best_rows = n;
      }
    }
    if (best != nullptr && best_rows > 0) {
      chain.push_back(std::move(*best));
      rows->push_back(best_rows);
    }
    break;
  }
  return chain;
}

Result<std::optional<Match>> StoreImpl::try_match(const Fingerprint& fingerprint,
                                                  const SaltId& salt,
                                                  std::span<const std::int32_t> tokens) {
  std::uint64_t epoch = 0;
  {
    MutexLock lock(mutex_);
    if (closed_) return failed_precondition("the store is closed");
    epoch = epoch_;
  }
  std::vector<std::uint32_t> rows;
  HCACHE_ASSIGN_OR_RETURN(auto chain, walk(fingerprint, salt, tokens, Where::kEverywhere, &rows));
  const std::int64_t now = env_.wall_ns();
  Match match;
  MutexLock lock(mutex_);
  if (epoch != epoch_) return std::optional<Match>();
  for (std::size_t i = 0; i < chain.size(); ++i) {
    const ChunkId id = chain[i].info.id;
    if (dying_.contains(id)) break;
    match.n_tokens += rows[i];
    if (!options_.read_only) touched_[id] = now;
    const auto& places = chain[i].places;
    const bool afar = std::any_of(places.begin(), places.end(),
                                  [](const PagePlace& place) { return place.disk == kRemoteDisk; });
    if (afar) remote_->keep(chain[i]);
    match.chunks.push_back({make_ref(std::move(chain[i])), rows[i]});
  }
  return std::optional<Match>(std::move(match));
}

Result<Match> StoreImpl::match(const Fingerprint& fingerprint, const SaltId& salt,
                               std::span<const std::int32_t> tokens) {
  for (int attempt = 1; attempt < kMatchAttempts; ++attempt) {
    HCACHE_ASSIGN_OR_RETURN(auto match, try_match(fingerprint, salt, tokens));
    if (match.has_value()) return std::move(*match);
  }
  // Changes came too fast: keep them out for once.
  MutexLock lock(write_mutex_);
  HCACHE_ASSIGN_OR_RETURN(auto match, try_match(fingerprint, salt, tokens));
  if (!match.has_value()) return internal_error("a match changed under the writer's lock");
  return std::move(*match);
}

void StoreImpl::look_up(const Fingerprint& fingerprint, const SaltId& salt,
                        std::span<const std::int32_t> tokens) {
  if (remote_ == nullptr || !check_open().ok()) return;
  std::vector<std::uint32_t> rows;
  const auto chain = walk(fingerprint, salt, tokens, Where::kDisks, &rows);
  if (!chain.ok()) return;
  // Up to the first chunk that has fewer pages than another the disks have it all.
  std::size_t most = 0;
  for (const ChunkRecord& record : *chain) most = std::max(most, record.info.pages.size());
  ChunkId parent;
  std::size_t at = 0;
  std::size_t have_tail = 0;
  for (std::size_t i = 0; i < chain->size(); ++i) {
    const ChunkInfo& info = (*chain)[i].info;
    if (info.pages.empty() || info.pages.size() < most) break;
    if (rows[i] < kChunkTokens) {
      have_tail = rows[i];
      break;
    }
    parent = info.id;
    at += kChunkTokens;
  }
  if (at + have_tail < tokens.size()) {
    remote_->look_up(fingerprint, salt, parent, tokens.subspan(at), have_tail);
  }
}

Result<ChunkRef> StoreImpl::find(const ChunkId& id) {
  HCACHE_RETURN_IF_ERROR(check_open());
  while (true) {
    std::uint64_t epoch = 0;
    {
      MutexLock lock(mutex_);
      epoch = epoch_;
    }
    HCACHE_ASSIGN_OR_RETURN(auto record, catalog_->find(id));
    MutexLock lock(mutex_);
    if (!record.has_value() || dying_.contains(id)) {
      return not_found(fmt::format("there is no chunk {}", to_hex(id)));
    }
    if (epoch == epoch_) return make_ref(std::move(*record));
  }
}

ChunkRef StoreImpl::make_ref(ChunkRecord record) {
  auto pin = std::make_shared<Pin>();
  pin->record = std::move(record);
  pin->store = this;
  pin->owner = this;
  ++pins_[pin->record.info.id];
  ChunkRef ref;
  ref.info_ = &pin->record.info;
  ref.pin_ = std::shared_ptr<const PinnedChunk>(std::move(pin));
  return ref;
}

void StoreImpl::unpin(const ChunkId& id) {
  MutexLock lock(mutex_);
  const auto at = pins_.find(id);
  if (at != pins_.end() && --at->second == 0) pins_.erase(at);
}

bool StoreImpl::pinned(const ChunkId& id) const {
  MutexLock lock(mutex_);
  return pins_.contains(id);
}

Result<std::unique_ptr<PageReader>> StoreImpl::new_reader(ReaderOptions options) {
  HCACHE_RETURN_IF_ERROR(check_open());
  if (options.ring_bytes < kMinRingBytes) {
    return invalid_argument(fmt::format("a reader's ring needs at least {} bytes", kMinRingBytes));
  }
  if (reinterpret_cast<std::uintptr_t>(options.ring_memory) % kDirectAlignment != 0) {
    return invalid_argument(fmt::format("ring memory must be aligned to {}", kDirectAlignment));
  }
  if (options.link_bytes_per_s < 0) return invalid_argument("a link's speed can't be negative");
  options.ring_bytes = options.ring_bytes / kBlock * kBlock;
  options.request_bytes = std::max<std::uint64_t>(options.request_bytes, kBlock);
  options.queue_depth = std::clamp<std::uint32_t>(options.queue_depth, 1, 1024);
  const std::size_t own_ring = options.ring_memory == nullptr ? options.ring_bytes : 0;
  HCACHE_ASSIGN_OR_RETURN(ReaderParts parts, readers_.take(env_, own_ring, options.queue_depth));
  return std::unique_ptr<PageReader>(std::make_unique<PageReaderImpl>(
      env_, *this, readers_, segments_->disks(), options, std::move(parts)));
}

Result<PageJob> StoreImpl::job(const PageRequest& page) const {
  PageJob job;
  job.chunk = std::static_pointer_cast<const PinnedChunk>(page.chunk.pin_);
  if (job.chunk == nullptr || job.chunk->store != this) {
    return invalid_argument("a page request needs a chunk of this store");
  }
  const ChunkInfo& info = job.chunk->record.info;
  const PageInfo* found = info.find_page(page.layer, page.encoding);
  if (found == nullptr) {
    job.status = not_found(fmt::format("chunk {} has no page of layer {} in {}", to_hex(info.id),
                                       page.layer, encoding_name(page.encoding)));
  } else {
    job.page = static_cast<std::size_t>(found - info.pages.data());
  }
  return job;
}

std::vector<PageOrigin> StoreImpl::origins(const ChunkRef& chunk) const {
  const auto& pin = *static_cast<const PinnedChunk*>(chunk.pin_.get());
  std::vector<PageOrigin> out;
  for (const PagePlace& place : pin.record.places) {
    out.push_back(place.disk == kRemoteDisk ? PageOrigin::kRemote : PageOrigin::kDisk);
  }
  if (cache_.enabled()) cache_.mark(pin.record, out);
  return out;
}

double StoreImpl::remote_bytes_per_s() const {
  if (remote_ == nullptr) return kGuessedRemoteSpeed;
  const RemoteStat stat = remote_->stat();
  const bool enough = stat.bytes_read >= kMinMeasuredBytes && stat.read_busy_s > 0;
  return enough ? static_cast<double>(stat.bytes_read) / stat.read_busy_s : kGuessedRemoteSpeed;
}

Result<std::shared_ptr<File>> StoreImpl::segment(const PagePlace& place) {
  return segments_->open(place.disk, place.segment);
}

std::string StoreImpl::segment_path(const PagePlace& place) const {
  return segments_->path(place.disk, place.segment);
}

bool StoreImpl::page_moved(const ChunkRecord& record, std::size_t page) {
  if (!options_.read_only) return false;  // pins keep pages in place
  const auto now = catalog_->find(record.info.id);
  if (!now.ok()) return false;
  if (!now->has_value()) return true;
  const PageInfo& wanted = record.info.pages[page];
  const PageInfo* found = (*now)->info.find_page(wanted.layer, wanted.encoding);
  if (found == nullptr) return true;
  const auto index = static_cast<std::size_t>(found - (*now)->info.pages.data());
  return (*now)->places[index] != record.places[page];
}

void StoreImpl::want(std::uint64_t place, const Match& match) {
  if (!cache_.enabled()) return;
  std::vector<ChunkId> chunks;
  for (const MatchedChunk& matched : match.chunks) chunks.push_back(matched.chunk.info().id);
  cache_.want(place, chunks);
}

// ---- Sessions ---------------------------------------------------------------------------------

Status StoreImpl::put_session(const Session& session) {
  if (session.name.empty()) return invalid_argument("a session needs a name");
  MutexLock lock(write_mutex_);
  HCACHE_RETURN_IF_ERROR(check_writable());
  Session saved = session;
  saved.updated_ns = env_.wall_ns();
  saved.created_ns = saved.updated_ns;
  const auto before = catalog_->find_session(session.name);
  if (before.ok() && before->has_value()) saved.created_ns = (*before)->created_ns;
  HCACHE_ASSIGN_OR_RETURN(auto transaction, catalog_->begin());
  HCACHE_RETURN_IF_ERROR(transaction.put_session(saved));
  return transaction.commit();
}

Result<Session> StoreImpl::get_session(std::string_view name) {
  HCACHE_RETURN_IF_ERROR(check_open());
  HCACHE_ASSIGN_OR_RETURN(auto session, catalog_->find_session(name));
  if (!session.has_value()) return not_found(fmt::format("there is no session '{}'", name));
  return std::move(*session);
}

Result<std::vector<SessionSummary>> StoreImpl::list_sessions() {
  HCACHE_RETURN_IF_ERROR(check_open());
  HCACHE_ASSIGN_OR_RETURN(const auto names, catalog_->session_names());
  std::vector<SessionSummary> out;
  for (const std::string& name : names) {
    const auto session = catalog_->find_session(name);
    if (!session.ok()) {
      if (session.code() != Code::kDataLoss) return session.status();
      log::warn("{}", session.status().to_string());
      continue;
    }
    if (!session->has_value()) continue;
    const Session& s = **session;
    out.push_back({s.name, s.fingerprint, s.tokens.size(), s.created_ns, s.updated_ns});
  }
  return out;
}

Result<std::uint64_t> StoreImpl::delete_session(std::string_view name) {
  MutexLock lock(write_mutex_);
  HCACHE_RETURN_IF_ERROR(check_writable());
  settle_deferred();
  cache_.clear();  // what is deleted is nowhere
  auto found = catalog_->find_session(name);
  if (!found.ok() && found.code() != Code::kDataLoss) return found.status();
  if (found.ok() && !found->has_value()) {
    return not_found(fmt::format("there is no session '{}'", name));
  }
  std::vector<ChunkRecord> own;
  std::vector<ChunkId> elsewhere;  // of the remote tier, which may have more of it than the disks
  if (found.ok()) {                // of a damaged session only the row goes
    const Session& session = **found;
    std::vector<std::uint32_t> rows;
    HCACHE_ASSIGN_OR_RETURN(
        own, walk(session.fingerprint, session.salt, session.tokens, Where::kDisks, &rows));
    // A last chunk that goes on differently is somebody else's.
    if (!own.empty() && rows.back() < own.back().info.tokens.size()) own.pop_back();
    // Tokens up to which some other session needs the chain.
    std::uint64_t shared = 0;
    HCACHE_ASSIGN_OR_RETURN(const auto names, catalog_->session_names());
    for (const std::string& other_name : names) {
      if (other_name == name) continue;
      const auto other = catalog_->find_session(other_name);
      if (!other.ok() || !other->has_value()) continue;
      const Session& o = **other;
      if (o.fingerprint != session.fingerprint || o.salt != session.salt) continue;
      auto common = static_cast<std::uint64_t>(common_prefix(session.tokens, o.tokens));
      // One that ends inside of a chunk has its state there.
      if (common == o.tokens.size()) common = round_up(common, kChunkTokens);
      shared = std::max(shared, common);
    }
    std::uint64_t end = 0;
    std::size_t keep = 0;
    for (const ChunkRecord& record : own) {
      end += record.info.tokens.size();
      if (round_up(end, kChunkTokens) > shared) break;
      ++keep;
    }
    own.erase(own.begin(), own.begin() + static_cast<std::ptrdiff_t>(keep));
    ChunkId parent;
    auto left = std::span<const std::int32_t>(session.tokens);
    const auto id_of = [&](std::size_t n) {
      return chunk_id(session.fingerprint, session.salt, parent, left.first(n));
    };
    std::uint64_t at = 0;
    for (; left.size() >= kChunkTokens; at += kChunkTokens) {
      parent = id_of(kChunkTokens);
      if (at >= shared) elsewhere.push_back(parent);
      left = left.subspan(kChunkTokens);
    }
    // The last token is never computed, and an answer may have been saved as it grew.
    for (std::size_t n = 1; n <= left.size() && at >= shared; ++n) elsewhere.push_back(id_of(n));
  }
  // From the end on, as long as no other chain goes through and nobody uses it.
  std::vector<ChunkRecord> victims;
  HCACHE_ASSIGN_OR_RETURN(auto transaction, catalog_->begin());
  bool existed = false;
  HCACHE_RETURN_IF_ERROR(transaction.erase_session(name, &existed));
  Status status;
  while (!own.empty() && status.ok()) {
    const auto followed = transaction.has_children(own.back().info.id);
    if (!followed.ok()) status = followed.status();
    if (!followed.ok() || *followed) break;
    std::vector<ChunkRecord> one;
    one.push_back(std::move(own.back()));
    own.pop_back();
    mark_dying(&one);
    if (one.empty()) break;
    status = transaction.erase(one[0].info.id);
    victims.push_back(std::move(one[0]));
  }
  if (status.ok()) status = transaction.commit();
  bury(victims, status.ok());
  HCACHE_RETURN_IF_ERROR(status);
  if (remote_ != nullptr) remote_->erase(elsewhere);
  return static_cast<std::uint64_t>(victims.size());
}

}  // namespace hcache::store
