// Opening and closing, matching and pinning, sessions.
#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "base/log.h"
#include "disks.h"
#include "recovery.h"
#include "store_impl.h"

namespace hcache::store {
namespace {

constexpr const char* kLockName = "hcache-store.lock";
constexpr std::uint64_t kMinSegmentBytes = 16ULL << 10;
constexpr std::uint64_t kMaxSegmentBytes = 64ULL << 30;
constexpr std::uint64_t kMinRingBytes = 256ULL << 10;
constexpr int kMatchAttempts = 8;
// A gigabit per second, until something has been read.
constexpr double kGuessedRemoteSpeed = 125e6;
constexpr std::uint64_t kMinMeasuredBytes = 4ULL << 20;
// For what waits to be written to the remote tier, when the store closes.
constexpr std::int64_t kRemoteCloseNs = 5'000'000'000;

std::string without_slash(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

ReaderOptions usable(ReaderOptions options) {
  options.ring_bytes = options.ring_bytes / kBlock * kBlock;
  options.request_bytes = std::max<std::uint64_t>(options.request_bytes, kBlock);
  options.queue_depth = std::clamp<std::uint32_t>(options.queue_depth, 1, 1024);
  return options;
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
  ~Pin() { owner->pins_.unpin(record.info.id); }
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
  HCACHE_RETURN_IF_ERROR(store->open(Recovery::kIfNeeded));
  return std::unique_ptr<Store>(std::move(store));
}

Result<RepairReport> Store::repair(Env& env, StoreOptions options, bool rebuild) {
  HCACHE_RETURN_IF_ERROR(check_options(options));
  for (std::string& dir : options.dirs) dir = without_slash(std::move(dir));
  if (options.catalog_dir.empty()) options.catalog_dir = options.dirs[0];
  HCACHE_ASSIGN_OR_RETURN(const FileInfo catalog,
                          env.file_info(join_path(options.catalog_dir, kCatalogFileName)));
  if (!catalog.exists && !have_records(env, options.dirs)) {
    return not_found(fmt::format("there is no store in {}", options.dirs[0]));
  }
  options.read_only = false;
  options.remote = {};
  options.dram_bytes = 0;
  StoreImpl store(env, std::move(options), PageMemory());
  HCACHE_RETURN_IF_ERROR(store.open(rebuild ? Recovery::kRebuild : Recovery::kCompare));
  HCACHE_RETURN_IF_ERROR(store.close());
  return store.repaired();
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
  for (const std::string name : {kCatalogFileName, kDamagedCatalogName, kNewCatalogName}) {
    for (const char* suffix : {"", "-wal", "-shm"}) {
      HCACHE_RETURN_IF_ERROR(remove_if_there(join_path(catalog_dir, name + suffix)));
    }
  }
  for (const std::string& dir : options.dirs) {
    const auto names = env.list_dir(dir);
    if (!names.ok()) continue;
    for (const std::string& name : *names) {
      std::uint32_t number = 0;
      if (name == kDiskFileName || parse_segment_name(name, &number) ||
          parse_record_file_name(name, &number)) {
        HCACHE_RETURN_IF_ERROR(remove_if_there(join_path(dir, name)));
      }
    }
  }
  return remove_if_there(join_path(catalog_dir, kLockName));
}

StoreImpl::StoreImpl(Env& env, StoreOptions options, PageMemory memory)
    : env_(env),
      options_(std::move(options)),
      seal_(options_.key ? Seal(*options_.key) : Seal()),
      readers_(options_),
      cache_(env, options_.dram_bytes, options_.dram_policy, std::move(memory)) {}

StoreImpl::~StoreImpl() {
  if (catalog_ == nullptr) return;
  const Status status = close();
  if (!status.ok() && status.code() != Code::kFailedPrecondition) {
    log::warn("closing the store in {}: {}", options_.dirs[0], status.to_string());
  }
}

Status StoreImpl::open(Recovery recovery) {
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
  Status status = open_or_rebuild(recovery);
  if (!status.ok()) {
    catalog_.reset();
    lock_.reset();
  }
  return status;
}

Status StoreImpl::open_or_rebuild(Recovery recovery) {
  if (options_.read_only) {
    Status status = open_catalog(recovery);
    if (status.code() == Code::kDataLoss) {
      return status.with_context("`hcache store repair` makes the catalog anew");
    }
    return status;
  }
  const std::string path = join_path(options_.catalog_dir, kCatalogFileName);
  HCACHE_ASSIGN_OR_RETURN(const FileInfo catalog, env_.file_info(path));
  const bool missing = !catalog.exists || catalog.size == 0;
  Status status;
  if (missing && have_records(env_, options_.dirs)) {
    status = data_loss(fmt::format("there is no catalog {}", path));
  } else if (recovery == Recovery::kRebuild && !missing) {
    status = data_loss("it is made anew as asked");
  } else {
    status = open_catalog(recovery);
  }
  // What SQLite says of a file whose header makes no sense to it is not always that it is damaged.
  const bool damaged = status.code() == Code::kDataLoss || status.code() == Code::kInternal ||
                       status.code() == Code::kPermissionDenied;
  if (!damaged) return status;
  log::warn("the catalog in {} is rebuilt: {}", options_.catalog_dir, status.message());
  catalog_.reset();
  RepairReport report;
  report.damage = status.message();
  RecoveryProgress progress(env_, options_);
  if (Status rebuilt = rebuild_catalog(env_, options_, seal_, &progress, &report); !rebuilt.ok()) {
    if (rebuilt.code() == Code::kCancelled) return rebuilt;
    return rebuilt.code() == Code::kDataLoss
               ? status
               : rebuilt.with_context("rebuilding the catalog, which is damaged");
  }
  repaired_ = std::move(report);
  HCACHE_RETURN_IF_ERROR(open_catalog(Recovery::kRebuilt));
  log::warn(
      "the catalog in {} has been rebuilt: {} chunks and {} sessions of the old one, {} and "
      "{} from the records; the old one is {}",
      options_.catalog_dir, repaired_.chunks_kept, repaired_.sessions_kept, repaired_.chunks_found,
      repaired_.sessions_found, repaired_.set_aside.empty() ? "gone" : repaired_.set_aside);
  return {};
}

Status StoreImpl::open_catalog(Recovery recovery) {
  CatalogOptions catalog;
  catalog.dir = options_.catalog_dir;
  catalog.vfs = options_.catalog_vfs;
  catalog.read_only = options_.read_only;
  catalog.seal = seal_;
  catalog.create = !have_records(env_, options_.dirs);
  HCACHE_ASSIGN_OR_RETURN(catalog_, Catalog::open(env_, catalog));
  bool compare = recovery != Recovery::kIfNeeded;
  if (!options_.read_only) {
    HCACHE_ASSIGN_OR_RETURN(const auto findings, catalog_->sqlite_check());
    if (!findings.empty()) return data_loss(findings.front());
    HCACHE_ASSIGN_OR_RETURN(const bool was_open, catalog_->mark_open());
    compare = compare || was_open;
  }
  HCACHE_RETURN_IF_ERROR(prepare());
  return options_.read_only ? Status() : count(compare, recovery != Recovery::kRebuilt);
}

Status StoreImpl::prepare() {
  HCACHE_ASSIGN_OR_RETURN(std::vector<std::string> dirs, resolve_disks(env_, *catalog_, options_));
  records_ = std::make_unique<Records>(env_, catalog_->store_id(), seal_.on(), dirs);
  segments_ = std::make_unique<Segments>(env_, catalog_->store_id(), seal_, std::move(dirs),
                                         options_.read_only, options_.direct_io);
  if (!options_.remote.url.empty() && remote_ == nullptr) {
    HCACHE_ASSIGN_OR_RETURN(auto tier, open_tier(env_, options_.remote, seal_));
    remote_ = std::make_unique<Remote>(env_, options_.remote, std::move(tier));
  }
  chains_ = std::make_unique<Chains>(*catalog_, remote_.get());
  space_ = std::make_unique<Space>(env_, *segments_, options_.segment_bytes);
  writer_ = std::make_unique<SegmentWriter>(env_, *segments_, *space_);
  const bool evicts =
      !options_.read_only && (options_.quota_bytes > 0 || options_.owner_quota_bytes > 0);
  order_ = std::make_unique<DiskOrder>(env_, *catalog_, options_.disk_policy, evicts);
  snapshots_ =
      std::make_unique<Snapshots>(env_, options_.read_only ? 0 : options_.snapshot_quota_bytes);
  removal_ = std::make_unique<Removal>(*catalog_, pins_, *space_, *records_, owners_, *order_,
                                       *snapshots_, cache_, remote_.get());
  copies_ = std::make_unique<TierCopies>(cache_, remote_.get(), *segments_);
  const QuotaLimits limits = {options_.quota_bytes, options_.owner_quota_bytes,
                              options_.disk_policy};
  quota_ = std::make_unique<Quota>(env_, limits, *order_, *catalog_, pins_, *space_, *records_,
                                   owners_, *removal_, *copies_);
  sessions_ = std::make_unique<Sessions>(env_, *catalog_, *chains_, pins_, *records_, *removal_,
                                         remote_.get());
  return {};
}

Status StoreImpl::count(bool compare, bool may_rebuild) {
  HCACHE_RETURN_IF_ERROR(space_->list_segments());
  HCACHE_RETURN_IF_ERROR(records_->list_files());
  std::optional<Reconciliation> comparison;
  if (compare) {
    const auto dirs = records_->dirs();
    comparison.emplace(env_, *catalog_, *segments_,
                       std::vector<std::string>(dirs.begin(), dirs.end()));
    RecoveryProgress progress(env_, options_);
    HCACHE_RETURN_IF_ERROR(comparison->take_in(&progress, &repaired_));
  }
  bool lost_records = false;
  const auto count_record = [&](const RecordRef& ref) HCACHE_REQUIRES(write_mutex_) {
    if (comparison && !comparison->seen(ref.place)) return;
    if (!records_->add(ref.place, ref.bytes)) lost_records = true;
  };
  HCACHE_ASSIGN_OR_RETURN(std::uint64_t damaged, count_chunks(count_record));
  HCACHE_ASSIGN_OR_RETURN(const auto sessions, catalog_->session_records());
  for (const SessionRow& row : sessions) {
    if (!row.status.ok()) ++damaged;
    count_record(row.record_ref);
  }
  if (damaged > 0) {
    const std::string what = fmt::format("{} rows of the catalog are damaged", damaged);
    if (may_rebuild) return data_loss(what);
    log::warn("{} in {}; they are not used (`hcache store gc` removes them)", what,
              options_.catalog_dir);
  }
  if (lost_records && !comparison) {  // a record file is gone, say
    HCACHE_RETURN_IF_ERROR(prepare());
    return count(true, may_rebuild);
  }
  if (comparison) {
    HCACHE_RETURN_IF_ERROR(comparison->tidy(records_.get(), owners_, &repaired_));
    HCACHE_RETURN_IF_ERROR(records_->reclaim());
  }
  std::uint64_t removed = 0;
  return space_->reclaim(false, &removed);
}

Result<std::uint64_t> StoreImpl::count_chunks(
    const std::function<void(const RecordRef&)>& count_record) {
  owners_ = Owners();
  HCACHE_ASSIGN_OR_RETURN(auto owners, catalog_->owners());
  owners_.load(std::move(owners));
  std::uint64_t damaged = 0;
  HCACHE_RETURN_IF_ERROR(catalog_->scan([&](ChunkRow&& row) HCACHE_REQUIRES(write_mutex_) {
    order_->load(row);
    snapshots_->load(row);
    if (!row.record.ok()) {
      ++damaged;
      return true;
    }
    owners_.add(row.record->info.salt, page_bytes(*row.record));
    for (std::size_t i = 0; i < row.record->places.size(); ++i) {
      if (!space_->add_page(row.record->places[i], row.record->info.pages[i].bytes)) ++damaged;
    }
    count_record(row.record_ref);
    return true;
  }));
  snapshots_->loaded();
  return damaged;
}

Status StoreImpl::check_open() const {
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
    removal_->finish_unpinned();
    promote();
    auto flush = [&]() HCACHE_REQUIRES(write_mutex_) -> Status {
      HCACHE_ASSIGN_OR_RETURN(auto transaction, catalog_->begin());
      HCACHE_RETURN_IF_ERROR(save_uses(&pins_, &transaction));
      // Unless the records are what the catalog says, the next writer compares them.
      const Status synced = records_->sync(true);
      if (synced.ok() && records_->complete()) HCACHE_RETURN_IF_ERROR(transaction.mark_closed());
      HCACHE_RETURN_IF_ERROR(transaction.commit());
      return catalog_->checkpoint();
    };
    status = flush();
  }
  if (remote_ != nullptr) {
    const Status there = remote_->flush(env_.monotonic_ns() + kRemoteCloseNs);
    if (!there.ok()) log::warn("the remote store lacks what was saved last: {}", there.message());
  }
  closed_ = true;
  if (const std::size_t pinned = pins_.count(); pinned > 0) {
    log::warn("{} chunks are pinned in a store that closes", pinned);
  }
  writer_.reset();
  catalog_.reset();
  lock_.reset();
  return status;
}

// ---- Matching and pinning ---------------------------------------------------------------------

const Fingerprint& ChainFingerprints::at(std::uint64_t position) const {
  std::size_t part = parts_.size() - 1;
  while (parts_[part].begin > position) --part;
  return parts_[part].fingerprint;
}

Result<std::optional<Match>> StoreImpl::try_match(const ChainFingerprints& fingerprints,
                                                  const SaltId& salt,
                                                  std::span<const std::int32_t> tokens) {
  HCACHE_RETURN_IF_ERROR(check_open());
  const std::uint64_t epoch = pins_.epoch();
  HCACHE_ASSIGN_OR_RETURN(Chain chain,
                          chains_->walk(fingerprints, salt, tokens, Where::kEverywhere));
  std::vector<ChunkId> ids;
  for (const ChunkRecord& record : chain.chunks) ids.push_back(record.info.id);
  std::optional<std::int64_t> used_ns;
  if (!options_.read_only) used_ns = env_.wall_ns();
  const auto pinned = pins_.pin(ids, epoch, used_ns);
  if (!pinned.has_value()) return std::optional<Match>();
  order_->use(std::span(ids).first(*pinned));
  snapshots_->use(std::span(ids).first(*pinned));
  Match match;
  for (std::size_t i = 0; i < *pinned; ++i) {
    match.n_tokens += chain.rows[i];
    const auto& places = chain.chunks[i].places;
    const bool remote = std::any_of(places.begin(), places.end(), [](const PagePlace& place) {
      return place.disk == kRemoteDisk;
    });
    if (remote) remote_->keep(chain.chunks[i]);
    match.chunks.push_back(
        {.chunk = make_ref(std::move(chain.chunks[i])), .usable_rows = chain.rows[i]});
  }
  return std::optional<Match>(std::move(match));
}

Result<Match> StoreImpl::match(const ChainFingerprints& chain, const SaltId& salt,
                               std::span<const std::int32_t> tokens) {
  for (int attempt = 1; attempt < kMatchAttempts; ++attempt) {
    HCACHE_ASSIGN_OR_RETURN(auto match, try_match(chain, salt, tokens));
    if (match.has_value()) return std::move(*match);
  }
  // Changes came too fast: keep them out for once.
  MutexLock lock(write_mutex_);
  HCACHE_ASSIGN_OR_RETURN(auto match, try_match(chain, salt, tokens));
  if (!match.has_value()) return internal_error("a match changed under the writer's lock");
  return std::move(*match);
}

void StoreImpl::look_up(const ChainFingerprints& chain, const SaltId& salt,
                        std::span<const std::int32_t> tokens) {
  if (check_open().ok()) chains_->look_up_remote(chain, salt, tokens);
}

Result<ChunkRef> StoreImpl::find(const ChunkId& id) {
  HCACHE_RETURN_IF_ERROR(check_open());
  while (true) {
    const std::uint64_t epoch = pins_.epoch();
    HCACHE_ASSIGN_OR_RETURN(auto record, catalog_->find(id));
    if (record.has_value()) {
      const auto pinned = pins_.pin({&id, 1}, epoch, std::nullopt);
      if (!pinned.has_value()) continue;
      if (*pinned == 1) return make_ref(std::move(*record));
    }
    return not_found(fmt::format("there is no chunk {}", to_hex(id)));
  }
}

ChunkRef StoreImpl::make_ref(ChunkRecord record) {
  auto pin = std::make_shared<Pin>();
  pin->record = std::move(record);
  pin->store = this;
  pin->owner = this;
  ChunkRef ref;
  ref.info_ = &pin->record.info;
  ref.pin_ = std::shared_ptr<const PinnedChunk>(std::move(pin));
  return ref;
}

Result<std::unique_ptr<PageReader>> StoreImpl::new_reader(ReaderOptions options) {
  HCACHE_RETURN_IF_ERROR(check_open());
  if (options.ring_bytes < kMinRingBytes) {
    return invalid_argument(fmt::format("a reader's ring needs at least {} bytes", kMinRingBytes));
  }
  options = usable(options);
  options.remote_timeout_s = std::max(options.remote_timeout_s, options_.remote.timeout_s);
  HCACHE_ASSIGN_OR_RETURN(ReaderParts parts,
                          readers_.take(env_, options.ring_bytes, options.queue_depth));
  return std::unique_ptr<PageReader>(std::make_unique<PageReaderImpl>(
      env_, *this, readers_, segments_->disks(), options, std::move(parts)));
}

void StoreImpl::prepare_readers(std::size_t n, ReaderOptions options) {
  options = usable(options);
  if (options.ring_bytes >= kMinRingBytes) {
    readers_.prepare(env_, n, options.ring_bytes, options.queue_depth);
  }
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

std::uint64_t StoreImpl::record_file_bytes() const {
  std::uint64_t sum = 0;
  for (std::uint32_t disk = 0; disk < segments_->disks(); ++disk) {
    const auto names = env_.list_dir(segments_->dir(disk));
    if (!names.ok()) continue;
    std::uint32_t number = 0;
    for (const std::string& name : *names) {
      if (!parse_record_file_name(name, &number)) continue;
      const auto info = env_.file_info(join_path(segments_->dir(disk), name));
      if (info.ok()) sum += info->allocated_bytes;
    }
  }
  return sum;
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

void StoreImpl::want(std::uint64_t ticket, const Match& match) {
  std::vector<ChunkId> chunks;
  for (const MatchedChunk& matched : match.chunks) chunks.push_back(matched.chunk.info().id);
  cache_.want(ticket, chunks);
  order_->want(ticket, chunks);
}

void StoreImpl::dispatch(std::uint64_t ticket) {
  cache_.dispatch(ticket);
  order_->dispatch(ticket);
}

void StoreImpl::unwant(std::uint64_t ticket) {
  cache_.unwant(ticket);
  order_->unwant(ticket);
}

Status StoreImpl::set_costs(const policy::RestoreCosts& costs, double disk_bytes_per_s) {
  HCACHE_RETURN_IF_ERROR(check_open());
  cache_.set_costs({.costs = costs, .below_bytes_per_s = disk_bytes_per_s});
  MutexLock lock(write_mutex_);
  const bool below = remote_ != nullptr && remote_->writes() != RemoteWrite::kOff;
  return order_->set_costs({.costs = costs,
                            .bytes_per_s = disk_bytes_per_s,
                            .below_bytes_per_s = below ? remote_bytes_per_s() : 0});
}

// ---- Sessions ---------------------------------------------------------------------------------

Status StoreImpl::put_session(const Session& session) {
  MutexLock lock(write_mutex_);
  HCACHE_RETURN_IF_ERROR(check_writable());
  return sessions_->put(session);
}

Result<Session> StoreImpl::get_session(std::string_view name) {
  HCACHE_RETURN_IF_ERROR(check_open());
  return sessions_->get(name);
}

Result<std::vector<SessionSummary>> StoreImpl::list_sessions() {
  HCACHE_RETURN_IF_ERROR(check_open());
  return sessions_->list();
}

Result<std::uint64_t> StoreImpl::delete_session(std::string_view name) {
  MutexLock lock(write_mutex_);
  HCACHE_RETURN_IF_ERROR(check_writable());
  removal_->finish_unpinned();
  return sessions_->erase(name);
}

}  // namespace hcache::store
