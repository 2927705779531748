#include "recovery.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <unordered_set>

#include "base/log.h"
#include "snapshots.h"

namespace hcache::store {
namespace {

constexpr std::int64_t kReportEveryNs = 2'000'000'000;
constexpr std::uint32_t kRowsPerCommit = 1000;
constexpr std::size_t kRecordsPerWrite = 256;

// Byte ranges of segment files that chunks have claimed; neighbours are joined.
class Claims {
 public:
  // False, and nothing is claimed: a part of it is claimed already.
  bool claim(const PagePlace& place, std::uint64_t bytes) {
    auto& ranges = files_[{place.disk, place.segment}];
    std::uint64_t begin = place.offset;
    std::uint64_t end = round_up(place.offset + bytes, kPageAlignment);
    auto next = ranges.lower_bound(begin);
    if (next != ranges.end() && next->first < end) return false;
    if (next != ranges.begin() && std::prev(next)->second > begin) return false;
    if (next != ranges.end() && next->first == end) {
      end = next->second;
      next = ranges.erase(next);
    }
    if (next != ranges.begin() && std::prev(next)->second == begin) {
      begin = std::prev(next)->first;
    }
    ranges[begin] = end;
    return true;
  }

 private:
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::map<std::uint64_t, std::uint64_t>> files_;
};

// Takes pages from chunks that cannot be where the catalog says: another chunk that was used later
// is there, or the file ends before.
class OverlapCheck {
 public:
  OverlapCheck(Env& env, Catalog& catalog, std::span<const std::string> dirs)
      : env_(env), catalog_(catalog), dirs_(dirs) {}

  Status run(RepairReport* report) {
    HCACHE_RETURN_IF_ERROR(catalog_.by_use([&](ChunkRow&& row) {
      if (!row.record.ok()) return true;
      check(std::move(*row.record), report);
      return true;
    }));
    if (changed_.empty()) return {};
    HCACHE_ASSIGN_OR_RETURN(auto transaction, catalog_.begin());
    for (const ChunkRecord& chunk : changed_) {
      // Its record says more than is true: tidy() writes another.
      HCACHE_RETURN_IF_ERROR(chunk.places.empty() ? transaction.erase(chunk.info.id)
                                                  : transaction.update(chunk, {}));
    }
    return transaction.commit();
  }

 private:
  void check(ChunkRecord chunk, RepairReport* report) {
    ChunkRecord kept = chunk;
    kept.info.pages.clear();
    kept.places.clear();
    for (std::size_t i = 0; i < chunk.places.size(); ++i) {
      const PagePlace& place = chunk.places[i];
      const std::uint64_t bytes = chunk.info.pages[i].bytes;
      if (place.offset + bytes > size_of(place) || !claims_.claim(place, bytes)) continue;
      kept.info.pages.push_back(chunk.info.pages[i]);
      kept.places.push_back(place);
    }
    if (kept.places.size() == chunk.places.size()) return;
    // Parts of a snapshot are of no use without the others.
    if (snapshot_bytes(kept.info) < snapshot_bytes(chunk.info)) kept = without_snapshot(kept).left;
    report->pages_dropped += chunk.places.size() - kept.places.size();
    if (kept.places.empty()) ++report->chunks_dropped;
    changed_.push_back(std::move(kept));
  }

  std::uint64_t size_of(const PagePlace& place) {
    if (place.disk >= dirs_.size()) return 0;
    const auto [at, fresh] = sizes_.try_emplace({place.disk, place.segment}, 0);
    if (fresh) {
      const auto info = env_.file_info(join_path(dirs_[place.disk], segment_name(place.segment)));
      if (info.ok() && info->exists) at->second = info->size;
    }
    return at->second;
  }

  Env& env_;
  Catalog& catalog_;
  std::span<const std::string> dirs_;
  Claims claims_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::uint64_t> sizes_;  // of segment files
  std::vector<ChunkRecord> changed_;
};

// The chunk that a record is of.
ChunkId chunk_of(const RecordHead& head, const Seal& seal) {
  ChunkId stored;
  stored.bytes = head.key.bytes;
  return seal.show(stored);
}

// Removes chunks whose parent is not there, then those that this leaves without one.
Status drop_orphans(Catalog* catalog, RepairReport* report) {
  while (true) {
    std::unordered_set<ChunkId> ids;
    HCACHE_RETURN_IF_ERROR(catalog->scan([&](ChunkRow&& row) {
      ids.insert(row.id);
      return true;
    }));
    std::vector<ChunkId> orphans;
    HCACHE_RETURN_IF_ERROR(catalog->scan([&](ChunkRow&& row) {
      if (!row.record.ok()) return true;
      const ChunkId& parent = row.record->info.parent;
      if (!parent.is_zero() && !ids.contains(parent)) orphans.push_back(row.id);
      return true;
    }));
    if (orphans.empty()) return {};
    report->chunks_dropped += orphans.size();
    HCACHE_ASSIGN_OR_RETURN(auto transaction, catalog->begin());
    for (const ChunkId& id : orphans) HCACHE_RETURN_IF_ERROR(transaction.erase(id));
    HCACHE_RETURN_IF_ERROR(transaction.commit());
  }
}

class Rebuild {
 public:
  Rebuild(Env& env, const StoreOptions& options, const Seal& seal, RecoveryProgress* progress,
          RepairReport* report)
      : env_(env), options_(options), seal_(seal), progress_(progress), report_(report) {}

  Status run() {
    HCACHE_ASSIGN_OR_RETURN(disks_, find_disks(env_, options_.dirs));
    HCACHE_RETURN_IF_ERROR(seal_.fits(disks_.store, disks_.sealed, options_.dirs[0]));
    HCACHE_RETURN_IF_ERROR(create());
    HCACHE_RETURN_IF_ERROR(salvage());
    HCACHE_RETURN_IF_ERROR(scan_records(
        env_, disks_.store, disks_.dirs, [&](const FoundRecord& r) { return add(r); },
        [&](std::uint64_t done, std::uint64_t all) {
          return progress_->update("rebuilding the catalog from the records", done, all);
        }));
    HCACHE_RETURN_IF_ERROR(end_transaction());
    HCACHE_RETURN_IF_ERROR(OverlapCheck(env_, *catalog_, disks_.dirs).run(report_));
    HCACHE_RETURN_IF_ERROR(drop_orphans(catalog_.get(), report_));
    HCACHE_RETURN_IF_ERROR(catalog_->checkpoint());
    catalog_.reset();
    return install();
  }

 private:
  [[nodiscard]] std::string path(const std::string& name) const {
    return join_path(options_.catalog_dir, name);
  }
  Status remove_if_there(const std::string& name) {
    const Status status = env_.remove_path(path(name));
    return status.code() == Code::kNotFound ? Status() : status;
  }
  Status move_if_there(const std::string& from, const std::string& to) {
    HCACHE_ASSIGN_OR_RETURN(const FileInfo info, env_.file_info(path(from)));
    return info.exists ? env_.rename_file(path(from), path(to)) : remove_if_there(to);
  }

  Status create() {
    for (const char* suffix : {"", "-wal", "-shm"}) {
      HCACHE_RETURN_IF_ERROR(remove_if_there(std::string(kNewCatalogName) + suffix));
    }
    CatalogOptions options;
    options.dir = options_.catalog_dir;
    options.vfs = options_.catalog_vfs;
    options.file = kNewCatalogName;
    options.store_id = disks_.store;
    options.seal = seal_;
    HCACHE_ASSIGN_OR_RETURN(catalog_, Catalog::open(env_, options));
    HCACHE_RETURN_IF_ERROR(begin());
    for (std::uint32_t disk = 0; disk < disks_.dirs.size(); ++disk) {
      HCACHE_RETURN_IF_ERROR(transaction_->add_disk(disk, env_.wall_ns()));
    }
    return {};
  }

  // What the old catalog still says is as true as ever: it knows of removals and of times of use.
  Status salvage() {
    HCACHE_ASSIGN_OR_RETURN(const FileInfo info, env_.file_info(path(kCatalogFileName)));
    if (!info.exists || info.size == 0) return {};
    CatalogOptions options;
    options.dir = options_.catalog_dir;
    options.vfs = options_.catalog_vfs;
    options.seal = seal_;
    auto old = Catalog::open_damaged(options);
    if (!old.ok()) {
      log::warn("nothing can be read from the old catalog: {}", old.status().to_string());
      return {};
    }
    Status status;
    const auto keep = [&](Status added) {
      status = std::move(added);
      return status.ok();
    };
    const Status chunks = (*old)->salvage_chunks([&](ChunkRow&& row) {
      return keep(add_chunk(*row.record, row.last_used_ns, {}, &report_->chunks_kept));
    });
    HCACHE_RETURN_IF_ERROR(status);
    const Status sessions =
        (*old)->salvage_sessions([&](Session&& session) { return keep(keep_session(session)); });
    HCACHE_RETURN_IF_ERROR(status);
    const auto owners = (*old)->owners();
    if (owners.ok()) {
      for (const auto& [salt, owner] : *owners) {
        HCACHE_RETURN_IF_ERROR(transaction_->put_owner(salt, owner));
      }
    }
    if (!chunks.ok() || !sessions.ok()) {
      log::warn("of the old catalog, {} chunks and {} sessions can be read", report_->chunks_kept,
                report_->sessions_kept);
    }
    last_salvaged_ = report_->chunks_kept;  // numbers of rows begin at 1
    return {};
  }

  Status keep_session(const Session& session) {
    RecordPlace unused;
    HCACHE_ASSIGN_OR_RETURN(const auto there, transaction_->find_session(session.name, &unused));
    if (there.has_value()) return {};
    ++report_->sessions_kept;
    return transaction_->put_session(session, {});
  }

  Status add_chunk(const ChunkRecord& chunk, std::int64_t used_ns, const RecordPlace& place,
                   std::uint64_t* counter) {
    HCACHE_ASSIGN_OR_RETURN(const auto there, transaction_->find(chunk.info.id));
    if (!there.has_value()) {
      ++*counter;
      HCACHE_RETURN_IF_ERROR(transaction_->insert(chunk, used_ns, place));
      return ++rows_ % kRowsPerCommit == 0 ? next_transaction() : Status();
    }
    if (!place) return {};
    if (there->record_ref.place) {
      // Two records of one chunk: one of them was about to be erased.
      std::string buffer;
      const auto other =
          read_record(env_, disks_.store, disks_.dirs, there->record_ref.place, &buffer);
      if (other.ok() && static_cast<std::int64_t>(other->head.batch) >= used_ns) return {};
      if (there->seq > static_cast<std::int64_t>(last_salvaged_)) {
        return transaction_->update(chunk, place);
      }
    }
    return transaction_->set_record(chunk.info.id, place);
  }

  Status add(const FoundRecord& record) {
    if (record.head.kind == RecordKind::kSession) return add_session(record);
    if (record.head.kind != RecordKind::kChunk) return {};  // of a later program
    const auto chunk = decode_chunk(chunk_of(record.head, seal_), record.body, seal_);
    if (!chunk.ok()) return {};
    for (const PagePlace& place : chunk->places) {
      if (place.disk >= disks_.dirs.size()) {
        return failed_precondition(fmt::format(
            "disk {} of the store in {} is not among the given directories (not mounted?)",
            place.disk, options_.catalog_dir));
      }
    }
    const SaltId owner = seal_.show(record.head.owner);
    if (!owner.is_zero() && owner != chunk->info.salt && owned_.insert(chunk->info.salt).second) {
      HCACHE_RETURN_IF_ERROR(transaction_->put_owner(chunk->info.salt, owner));
    }
    return add_chunk(*chunk, static_cast<std::int64_t>(record.head.batch), record.place,
                     &report_->chunks_found);
  }

  Status add_session(const FoundRecord& record) {
    const auto session = decode_session(record.name, record.body, seal_);
    if (!session.ok()) return {};
    RecordPlace before;
    HCACHE_ASSIGN_OR_RETURN(const auto there, transaction_->find_session(session->name, &before));
    if (there.has_value() && there->updated_ns > session->updated_ns) return {};
    if (there.has_value() && there->updated_ns == session->updated_ns) {
      return transaction_->set_record(session->name, record.place);
    }
    if (!there.has_value()) ++report_->sessions_found;
    return transaction_->put_session(*session, record.place);
  }

  Status begin() {
    HCACHE_ASSIGN_OR_RETURN(auto transaction, catalog_->begin());
    transaction_.emplace(std::move(transaction));
    return {};
  }
  Status end_transaction() {
    const Status status = transaction_->commit();
    transaction_.reset();
    return status;
  }
  Status next_transaction() {
    HCACHE_RETURN_IF_ERROR(end_transaction());
    return begin();
  }

  // The old catalog's log goes before the new catalog comes: it must never meet another database.
  Status install() {
    HCACHE_ASSIGN_OR_RETURN(const FileInfo old, env_.file_info(path(kCatalogFileName)));
    if (old.exists) {
      const std::string aside = kDamagedCatalogName;
      HCACHE_RETURN_IF_ERROR(env_.rename_file(path(kCatalogFileName), path(aside)));
      HCACHE_RETURN_IF_ERROR(move_if_there(std::string(kCatalogFileName) + "-wal", aside + "-wal"));
      report_->set_aside = path(aside);
    }
    for (const char* suffix : {"-wal", "-shm"}) {
      HCACHE_RETURN_IF_ERROR(remove_if_there(std::string(kCatalogFileName) + suffix));
    }
    HCACHE_RETURN_IF_ERROR(env_.sync_dir(options_.catalog_dir));
    HCACHE_RETURN_IF_ERROR(env_.rename_file(path(kNewCatalogName), path(kCatalogFileName)));
    return env_.sync_dir(options_.catalog_dir);
  }

  Env& env_;
  const StoreOptions& options_;
  const Seal seal_;
  RecoveryProgress* const progress_;
  RepairReport* const report_;
  DiskSet disks_;
  std::unique_ptr<Catalog> catalog_;
  std::optional<Catalog::Transaction> transaction_;
  std::uint64_t rows_ = 0;
  std::uint64_t last_salvaged_ = 0;
  std::unordered_set<SaltId> owned_;  // salts whose owners have been written
};

}  // namespace

bool RecoveryProgress::update(std::string_view what, std::uint64_t done, std::uint64_t all) {
  const double fraction = all == 0 ? 1 : static_cast<double>(done) / static_cast<double>(all);
  if (options_.recovery_progress) return options_.recovery_progress(what, fraction);
  const std::int64_t now = env_.monotonic_ns();
  if (last_ns_ == 0) last_ns_ = now;
  if (now - last_ns_ < kReportEveryNs) return true;
  last_ns_ = now;
  log::info("{}: {:.0f} %", what, 100 * fraction);
  return true;
}

Status rebuild_catalog(Env& env, const StoreOptions& options, const Seal& seal,
                       RecoveryProgress* progress, RepairReport* report) {
  return Rebuild(env, options, seal, progress, report).run();
}

// ---- Reconciliation ---------------------------------------------------------------------------

Records::Draft chunk_record_draft(const ChunkRecord& chunk, const Owners& owners,
                                  const Seal& seal) {
  Records::Draft draft;
  draft.head.kind = RecordKind::kChunk;
  draft.head.key = record_key(seal.hide(chunk.info.id));
  const SaltId& owner = owners.owner_of(chunk.info.salt);
  if (owner != chunk.info.salt) draft.head.owner = seal.hide(owner);
  draft.body = encode_chunk(chunk, seal);
  return draft;
}

Records::Draft session_record_draft(const Session& session, const Seal& seal) {
  Records::Draft draft;
  draft.head.kind = RecordKind::kSession;
  draft.name = seal.hide_name(session.name);
  draft.head.key = record_key(draft.name);
  draft.body = encode_session(session, seal);
  return draft;
}

// The record goes before the row: a record without a row could be taken for a put that the catalog
// has lost, a row without a record gets another.
Status commit_with_records(Catalog::Transaction* transaction, Records* records, bool durably) {
  records->erase(transaction->erased(), durably);
  Status status = transaction->commit();
  if (!status.ok() && !transaction->erased().empty()) records->set_incomplete();
  return status;
}

Status Reconciliation::sort_in(const FoundRecord& record) {
  const RecordRef ref{record.head.key, record.place, record.bytes};
  if (record.head.kind == RecordKind::kChunk) {
    const ChunkId id = chunk_of(record.head, catalog_.seal());
    HCACHE_ASSIGN_OR_RETURN(const auto place, catalog_.record_of(id));
    if (place.has_value() && *place == record.place) {
      seen_.push_back(record.place.pack());
    } else if (place.has_value()) {
      stale_.push_back(ref);
    } else {
      unknown_.push_back({record.head, ref});
    }
    return {};
  }
  if (record.head.kind == RecordKind::kSession) unknown_.push_back({record.head, ref});
  return {};
}

Status Reconciliation::take_in(RecoveryProgress* progress, RepairReport* report) {
  HCACHE_RETURN_IF_ERROR(scan_records(
      env_, catalog_.store_id(), dirs_, [&](const FoundRecord& r) { return sort_in(r); },
      [&](std::uint64_t done, std::uint64_t all) {
        return progress->update("comparing the records with the catalog", done, all);
      }));
  std::stable_sort(unknown_.begin(), unknown_.end(),
                   [](const Unknown& a, const Unknown& b) { return a.head.batch < b.head.batch; });
  std::uint64_t taken = 0;
  for (std::size_t at = 0; at < unknown_.size();) {
    std::size_t end = at + 1;
    while (end < unknown_.size() && unknown_[end].head.batch == unknown_[at].head.batch) ++end;
    const auto batch = std::span(unknown_).subspan(at, end - at);
    const bool session = batch[0].head.kind == RecordKind::kSession;
    HCACHE_ASSIGN_OR_RETURN(const bool known,
                            session ? take_in_session(batch[0]) : take_in_chunks(batch));
    for (const Unknown& unknown : batch) {
      if (known) {
        seen_.push_back(unknown.ref.place.pack());
        if (!session) ++taken;
      } else {
        stale_.push_back(unknown.ref);
      }
    }
    at = end;
  }
  std::sort(seen_.begin(), seen_.end());
  report->chunks_found += taken;
  if (taken == 0) return {};
  // A removal that was lost with the log may have made room for what has been taken in.
  HCACHE_RETURN_IF_ERROR(OverlapCheck(env_, catalog_, dirs_).run(report));
  return drop_orphans(&catalog_, report);
}

bool Reconciliation::intact(const ChunkRecord& chunk) {
  for (std::size_t i = 0; i < chunk.places.size(); ++i) {
    if (segments_.read_page(chunk, i) == nullptr) return false;
  }
  return true;
}

// All of a batch or nothing, as with a put.
Result<bool> Reconciliation::take_in_chunks(std::span<const Unknown> batch) {
  if (batch.size() != batch[0].head.batch_size) return false;
  std::vector<ChunkRecord> chunks;
  std::unordered_set<ChunkId> ids;
  for (const Unknown& unknown : batch) {
    if (unknown.head.kind != RecordKind::kChunk) return false;
    std::string buffer;
    const auto record = read_record(env_, catalog_.store_id(), dirs_, unknown.ref.place, &buffer);
    if (!record.ok()) return false;
    const ChunkId id = chunk_of(unknown.head, catalog_.seal());
    auto chunk = decode_chunk(id, record->body, catalog_.seal());
    if (!chunk.ok() || !intact(*chunk)) return false;
    ids.insert(id);
    chunks.push_back(std::move(*chunk));
  }
  for (const ChunkRecord& chunk : chunks) {
    const ChunkId& parent = chunk.info.parent;
    if (parent.is_zero() || ids.contains(parent)) continue;
    const auto stored = catalog_.find(parent);
    if (!stored.ok() || !stored->has_value()) return false;
  }
  HCACHE_ASSIGN_OR_RETURN(auto transaction, catalog_.begin());
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    const RecordHead& head = batch[i].head;
    HCACHE_RETURN_IF_ERROR(
        transaction.insert(chunks[i], static_cast<std::int64_t>(head.batch), batch[i].ref.place));
    const SaltId owner = catalog_.seal().show(head.owner);
    if (!owner.is_zero() && owner != chunks[i].info.salt) {
      HCACHE_RETURN_IF_ERROR(transaction.put_owner(chunks[i].info.salt, owner));
    }
  }
  HCACHE_RETURN_IF_ERROR(transaction.commit());
  return true;
}

Result<bool> Reconciliation::take_in_session(const Unknown& unknown) {
  std::string buffer;
  const auto record = read_record(env_, catalog_.store_id(), dirs_, unknown.ref.place, &buffer);
  if (!record.ok()) return false;
  const auto session = decode_session(record->name, record->body, catalog_.seal());
  if (!session.ok()) return false;
  HCACHE_ASSIGN_OR_RETURN(auto transaction, catalog_.begin());
  RecordPlace place;
  const auto there = transaction.find_session(session->name, &place);
  if (!there.ok() && there.code() != Code::kDataLoss) return there.status();
  const bool has = there.ok() && there->has_value();
  if (has && place == unknown.ref.place) return true;
  if (has && (*there)->updated_ns >= session->updated_ns) return false;
  HCACHE_RETURN_IF_ERROR(transaction.put_session(*session, unknown.ref.place));
  HCACHE_RETURN_IF_ERROR(transaction.commit());
  return true;
}

bool Reconciliation::seen(const RecordPlace& place) const {
  return place && std::binary_search(seen_.begin(), seen_.end(), place.pack());
}

Status Reconciliation::tidy(Records* records, const Owners& owners, RepairReport* report) {
  for (const RecordRef& ref : stale_) {
    if (records->add(ref.place, ref.bytes)) records->erase({&ref, 1}, false);
  }
  report->records_erased += stale_.size();
  HCACHE_RETURN_IF_ERROR(write_missing_chunks(records, owners, report));
  HCACHE_RETURN_IF_ERROR(write_missing_sessions(records, report));
  return records->sync(true);
}

Status Reconciliation::write_missing_chunks(Records* records, const Owners& owners,
                                            RepairReport* report) {
  std::vector<Records::Draft> drafts;
  std::vector<ChunkId> ids;
  const auto write = [&]() -> Status {
    if (ids.empty()) return {};
    HCACHE_ASSIGN_OR_RETURN(const auto written, records->write(std::exchange(drafts, {})));
    HCACHE_ASSIGN_OR_RETURN(auto transaction, catalog_.begin());
    for (std::size_t i = 0; i < ids.size(); ++i) {
      HCACHE_RETURN_IF_ERROR(transaction.set_record(ids[i], written[i].place));
    }
    report->records_written += ids.size();
    ids.clear();
    return transaction.commit();
  };
  Status status;
  HCACHE_RETURN_IF_ERROR(catalog_.scan([&](ChunkRow&& row) {
    if (!row.record.ok() || seen(row.record_ref.place)) return true;
    drafts.push_back(chunk_record_draft(*row.record, owners, catalog_.seal()));
    ids.push_back(row.id);
    if (ids.size() >= kRecordsPerWrite) status = write();
    return status.ok();
  }));
  HCACHE_RETURN_IF_ERROR(status);
  return write();
}

Status Reconciliation::write_missing_sessions(Records* records, RepairReport* report) {
  HCACHE_ASSIGN_OR_RETURN(const auto rows, catalog_.session_records());
  for (const SessionRow& row : rows) {
    if (seen(row.record_ref.place)) continue;
    const auto session = catalog_.find_session(row.name);
    if (!session.ok() || !session->has_value()) continue;
    std::vector<Records::Draft> draft;
    draft.push_back(session_record_draft(**session, catalog_.seal()));
    HCACHE_ASSIGN_OR_RETURN(const auto written, records->write(std::move(draft)));
    HCACHE_ASSIGN_OR_RETURN(auto transaction, catalog_.begin());
    HCACHE_RETURN_IF_ERROR(transaction.set_record(row.name, written[0].place));
    HCACHE_RETURN_IF_ERROR(transaction.commit());
    ++report->records_written;
  }
  return {};
}

}  // namespace hcache::store
