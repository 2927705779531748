// Making batches durable: draft, room, data, one transaction. Also removal, the way back.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/log.h"
#include "store_impl.h"

namespace hcache::store {
namespace {

constexpr std::size_t kWriteBytes = 1 << 20;  // of one write
constexpr std::size_t kWriteDepth = 8;        // writes in flight
// A run is what is contiguous for sure; large enough for any read-ahead, small enough to find room.
constexpr std::uint64_t kMaxRunBytes = 32ULL << 20;

bool page_before(const PageInfo& a, const PageInfo& b) {
  return std::pair(a.layer, a.encoding) < std::pair(b.layer, b.encoding);
}

bool starts_with(std::span<const std::int32_t> tokens, std::span<const std::int32_t> prefix) {
  return prefix.size() <= tokens.size() && std::equal(prefix.begin(), prefix.end(), tokens.begin());
}

// Whether `have` offers every (layer, encoding) of `wanted`.
bool covers(const ChunkInfo& have, const std::vector<PageInfo>& wanted) {
  return std::all_of(wanted.begin(), wanted.end(), [&](const PageInfo& page) {
    return have.find_page(page.layer, page.encoding) != nullptr;
  });
}

// Of the pages that are to be written.
std::uint64_t new_bytes(const std::vector<std::span<const std::byte>>& sources) {
  std::uint64_t sum = 0;
  for (const std::span<const std::byte> source : sources) sum += source.size();
  return sum;
}

bool siblings(const ChunkInfo& a, const ChunkInfo& b) {
  return a.parent == b.parent && a.fingerprint == b.fingerprint && a.salt == b.salt;
}

Status check_write(const ChunkWrite& write, std::uint64_t max_page_bytes) {
  auto bad = [&](const std::string& why) {
    return invalid_argument(fmt::format("chunk {}: {}", to_hex(write.id), why));
  };
  const std::size_t n = write.tokens.size();
  if (n == 0 || n > kChunkTokens) return bad(fmt::format("{} tokens", n));
  if (chunk_id(write.fingerprint, write.salt, write.parent, write.tokens) != write.id) {
    return bad("the id is not the hash of its content");
  }
  for (const PageWrite& page : write.pages) {
    const std::size_t bytes = page.bytes.size();
    if (!valid_encoding(static_cast<std::uint8_t>(page.encoding))) return bad("unknown encoding");
    if (bytes == 0 || bytes > max_page_bytes || bytes % n != 0) {
      return bad(fmt::format("a page of {} bytes for {} tokens (at most {} bytes)", bytes, n,
                             max_page_bytes));
    }
    if (page.encoding == Encoding::kKv &&
        (write.k_type == ElementType::kNone || write.v_type == ElementType::kNone)) {
      return bad("kv pages without types");
    }
  }
  return {};
}

}  // namespace

// ---- Draft ------------------------------------------------------------------------------------

Result<StoreImpl::PutDraft> StoreImpl::draft_put(std::span<const ChunkWrite> batch) {
  PutDraft draft;
  for (const ChunkWrite& write : batch) adopt(write.salt, write.owner);
  std::unordered_map<ChunkId, std::size_t> index;  // of drafts, dropped ones included
  std::vector<bool> dropped;
  for (const ChunkWrite& write : batch) {
    HCACHE_RETURN_IF_ERROR(check_write(
        write, std::min<std::uint64_t>(kMaxPageBytes, free_space_[0].max_extent_bytes())));
    Draft chunk;
    ChunkInfo& info = chunk.record.info;
    auto found = catalog_->find(write.id);
    // A damaged row counts as none; the insertion replaces it.
    if (!found.ok() && found.code() != Code::kDataLoss) return found.status();
    chunk.exists = found.ok() && found->has_value();
    if (index.contains(write.id)) {
      return invalid_argument(fmt::format("chunk {} is twice in a batch", to_hex(write.id)));
    }
    if (chunk.exists) {
      chunk.record = std::move(**found);
      draft.keep.insert(write.id);
      draft.used.push_back(write.id);
    } else {
      info.id = write.id;
      info.parent = write.parent;
      info.fingerprint = write.fingerprint;
      info.salt = write.salt;
      info.first_position = write.first_position;
      info.tokens.assign(write.tokens.begin(), write.tokens.end());
    }
    // The pages that are missing, in their places.
    struct Entry {
      PageInfo info;
      PagePlace place;
      std::span<const std::byte> source;
    };
    std::vector<Entry> entries;
    for (std::size_t i = 0; i < info.pages.size(); ++i) {
      entries.push_back({info.pages[i], chunk.record.places[i], {}});
    }
    std::vector<PageInfo> wanted;
    const std::size_t had = entries.size();
    for (const PageWrite& page : write.pages) {
      const PageInfo page_info{page.layer, page.encoding,
                               static_cast<std::uint32_t>(page.bytes.size())};
      wanted.push_back(page_info);
      if (page.encoding == Encoding::kKv) {
        const bool kv_before = info.k_type != ElementType::kNone;
        if (kv_before && (info.k_type != write.k_type || info.v_type != write.v_type)) {
          return invalid_argument(fmt::format(
              "chunk {}: kv pages of other types are stored already", to_hex(write.id)));
        }
        info.k_type = write.k_type;
        info.v_type = write.v_type;
      }
      if (chunk.exists && info.find_page(page.layer, page.encoding) != nullptr) continue;
      entries.push_back({page_info, {}, page.bytes});
    }
    const bool adds = entries.size() > had;
    std::sort(entries.begin(), entries.end(),
              [](const Entry& a, const Entry& b) { return page_before(a.info, b.info); });
    for (std::size_t i = 1; i < entries.size(); ++i) {
      if (!page_before(entries[i - 1].info, entries[i].info)) {
        return invalid_argument(fmt::format("chunk {}: layer {} {} is given twice",
                                            to_hex(write.id), entries[i].info.layer,
                                            encoding_name(entries[i].info.encoding)));
      }
    }
    info.pages.clear();
    chunk.record.places.clear();
    for (const Entry& entry : entries) {
      info.pages.push_back(entry.info);
      chunk.record.places.push_back(entry.place);
      chunk.sources.push_back(entry.source);
    }
    if (chunk.exists && !adds) {
      ++draft.report.chunks_known;
      continue;
    }
    if (chunk.exists) {
      ++draft.report.chunks_extended;
      index.emplace(write.id, draft.chunks.size());
      draft.chunks.push_back(std::move(chunk));
      dropped.push_back(false);
      continue;
    }
    if (!write.parent.is_zero()) {
      bool parent_ok = false;
      if (const auto at = index.find(write.parent); at != index.end()) {
        parent_ok = draft.chunks[at->second].record.info.tokens.size() == kChunkTokens;
      } else {
        const auto parent = catalog_->find(write.parent);
        if (!parent.ok() && parent.code() != Code::kDataLoss) return parent.status();
        parent_ok =
            parent.ok() && parent->has_value() && (*parent)->info.tokens.size() == kChunkTokens;
        if (parent_ok) draft.keep.insert(write.parent);
      }
      if (!parent_ok) {
        ++draft.report.chunks_without_parent;
        continue;
      }
    }
    // Longer siblings make this one needless; it makes shorter ones needless.
    bool known = false;
    std::vector<ChunkRecord> shorter;
    auto stored =
        catalog_->children(sibling_key(info.fingerprint, info.salt, info.parent), info.tokens[0]);
    if (!stored.ok()) return stored.status();
    for (ChunkRecord& sibling : *stored) {
      if (!siblings(sibling.info, info) || sibling.info.id == info.id) continue;
      if (starts_with(sibling.info.tokens, info.tokens) && covers(sibling.info, wanted)) {
        known = true;
        draft.keep.insert(sibling.info.id);
        draft.used.push_back(sibling.info.id);
      } else if (starts_with(info.tokens, sibling.info.tokens) &&
                 covers(info, sibling.info.pages)) {
        shorter.push_back(std::move(sibling));
      }
    }
    for (std::size_t i = 0; i < draft.chunks.size() && !known; ++i) {
      const ChunkInfo& other = draft.chunks[i].record.info;
      if (dropped[i] || draft.chunks[i].exists || !siblings(other, info)) continue;
      if (starts_with(other.tokens, info.tokens) && covers(other, wanted)) {
        known = true;
      } else if (starts_with(info.tokens, other.tokens) && covers(info, other.pages)) {
        dropped[i] = true;
        --draft.report.chunks_new;
        ++draft.report.tails_superseded;
      }
    }
    if (known) {
      ++draft.report.chunks_known;
      continue;
    }
    for (ChunkRecord& tail : shorter) {
      // A tail that this batch adds pages to stays until the next time.
      if (index.contains(tail.info.id)) continue;
      draft.superseded.push_back(std::move(tail));
    }
    ++draft.report.chunks_new;
    index.emplace(write.id, draft.chunks.size());
    draft.chunks.push_back(std::move(chunk));
    dropped.push_back(false);
  }
  std::vector<Draft> kept;
  for (std::size_t i = 0; i < draft.chunks.size(); ++i) {
    if (!dropped[i]) kept.push_back(std::move(draft.chunks[i]));
  }
  draft.chunks = std::move(kept);
  return draft;
}

// Layer first: what a layer-wise restore reads together lies together.
std::vector<StoreImpl::Run> StoreImpl::lay_out(std::vector<Draft>* chunks) {
  struct Placed {
    std::uint32_t disk;
    std::size_t chunk;
    std::size_t page;
  };
  std::vector<Placed> order;
  const std::uint32_t disks = segments_->disks();
  for (std::size_t c = 0; c < chunks->size(); ++c) {
    const Draft& draft = (*chunks)[c];
    const std::uint64_t in_chain = draft.record.info.first_position / kChunkTokens;
    for (std::size_t p = 0; p < draft.sources.size(); ++p) {
      if (draft.sources[p].empty()) continue;
      const auto disk =
          static_cast<std::uint32_t>((in_chain + draft.record.info.pages[p].layer) % disks);
      order.push_back({disk, c, p});
    }
  }
  std::stable_sort(order.begin(), order.end(), [&](const Placed& a, const Placed& b) {
    const PageInfo& x = (*chunks)[a.chunk].record.info.pages[a.page];
    const PageInfo& y = (*chunks)[b.chunk].record.info.pages[b.page];
    return std::tuple(a.disk, x.encoding, x.layer) < std::tuple(b.disk, y.encoding, y.layer);
  });
  std::vector<Run> runs;
  for (const Placed& placed : order) {
    Draft& draft = (*chunks)[placed.chunk];
    const std::uint64_t bytes = draft.sources[placed.page].size();
    const std::uint64_t most = std::min(kMaxRunBytes, free_space_[placed.disk].max_extent_bytes());
    const bool fits = !runs.empty() && runs.back().disk == placed.disk &&
                      round_up(runs.back().bytes, kPageAlignment) + bytes <= most;
    if (!fits) {
      runs.emplace_back();
      runs.back().disk = placed.disk;
    }
    Run& run = runs.back();
    const std::uint64_t at = round_up(run.bytes, kPageAlignment);
    run.pages.push_back({&draft, placed.page, at});
    run.bytes = at + bytes;
  }
  return runs;
}

// ---- Data -------------------------------------------------------------------------------------

Result<std::shared_ptr<File>> StoreImpl::file_for_writing(std::uint32_t disk, std::uint32_t segment,
                                                          bool fresh) {
  if (!fresh) {
    auto file = segments_->open(disk, segment);
    // A file that was deleted under us is made anew; its pages will be found missing when read.
    if (file.ok() || file.code() != Code::kNotFound) return file;
  }
  auto file = segments_->create(disk, segment);
  if (file.code() == Code::kNotFound) {
    return unavailable(fmt::format("the directory {} has vanished", segments_->dir(disk)));
  }
  return file;
}

Status StoreImpl::write_runs(std::vector<Run>* runs) {
  const Status status = write_run_pages(runs);
  if (!status.ok()) cancel_runs(runs);
  return status;
}

Status StoreImpl::write_run_pages(std::vector<Run>* runs) {
  if (write_queue_ == nullptr) {
    HCACHE_ASSIGN_OR_RETURN(write_queue_, env_.new_io_queue(kWriteDepth));
    write_buffer_ = AlignedBuffer(kWriteBytes * kWriteDepth);
  }
  std::vector<std::shared_ptr<File>> files;  // with data to sync; keeps them open
  struct InFlight {
    File* file = nullptr;
    std::uint64_t offset = 0;
    std::size_t bytes = 0;
  };
  std::vector<InFlight> writes(kWriteDepth);
  std::vector<std::size_t> idle;
  for (std::size_t i = 0; i < kWriteDepth; ++i) idle.push_back(i);
  std::vector<IoCompletion> completions;
  Status status;
  auto buffer = [&](std::size_t slot) HCACHE_REQUIRES(write_mutex_) {
    return write_buffer_.span().subspan(slot * kWriteBytes, kWriteBytes);
  };
  auto reap = [&](bool block) HCACHE_REQUIRES(write_mutex_) {
    completions.clear();
    const Status reaped = write_queue_->reap(block, &completions);
    if (!reaped.ok()) die("the I/O queue failed: " + reaped.to_string());
    for (const IoCompletion& done : completions) {
      const InFlight& write = writes[done.tag];
      Status result = done.status;
      if (result.ok() && done.bytes < write.bytes) {  // the rest, from a block's start
        const std::size_t from = done.bytes / kBlock * kBlock;
        result = write.file->write_at(write.offset + from,
                                      buffer(done.tag).subspan(from, write.bytes - from));
      }
      if (status.ok()) status = result;
      idle.push_back(done.tag);
    }
  };
  for (Run& run : *runs) {
    if (!status.ok()) break;
    bool fresh = false;
    run.extent = free_space_[run.disk].reserve(run.bytes, &fresh);
    run.reserved = true;
    auto opened = file_for_writing(run.disk, run.extent.segment, fresh);
    if (!opened.ok()) {
      status = opened.status();
      break;
    }
    if (std::find(files.begin(), files.end(), *opened) == files.end()) files.push_back(*opened);
    File* file = opened->get();
    status = file->allocate(run.extent.offset, run.extent.bytes);
    if (!status.ok()) break;

    // The run as one stream of full buffers; gaps and the end are zeros.
    std::size_t slot = kWriteDepth;
    std::size_t filled = 0;
    std::uint64_t written = 0;
    auto flush = [&]() HCACHE_REQUIRES(write_mutex_) {
      if (filled == 0) return;
      const std::size_t padded = round_up(filled, kBlock);
      std::memset(buffer(slot).data() + filled, 0, padded - filled);
      writes[slot] = {file, run.extent.offset + written, padded};
      IoRequest io;
      io.op = IoOp::kWrite;
      io.file = file;
      io.offset = writes[slot].offset;
      io.buffer = buffer(slot).first(padded);
      io.tag = slot;
      const Status submitted = write_queue_->submit(io);
      if (!submitted.ok()) {
        if (status.ok()) status = submitted;
        idle.push_back(slot);
      }
      written += padded;
      filled = 0;
      slot = kWriteDepth;
    };
    auto emit = [&](const std::byte* data, std::uint64_t size) HCACHE_REQUIRES(write_mutex_) {
      while (size > 0 && status.ok()) {
        if (slot == kWriteDepth) {
          while (idle.empty()) reap(true);
          slot = idle.back();
          idle.pop_back();
        }
        const std::size_t n = std::min<std::uint64_t>(size, kWriteBytes - filled);
        if (data != nullptr) {
          std::memcpy(buffer(slot).data() + filled, data, n);
          data += n;
        } else {
          std::memset(buffer(slot).data() + filled, 0, n);
        }
        filled += n;
        size -= n;
        if (filled == kWriteBytes) flush();
      }
    };
    std::uint64_t at = 0;
    for (const RunPage& page : run.pages) {
      const std::span<const std::byte> source = page.draft->sources[page.page];
      PagePlace& place = page.draft->record.places[page.page];
      place.disk = static_cast<std::uint8_t>(run.disk);
      place.segment = run.extent.segment;
      place.offset = run.extent.offset + page.at;
      place.checksum = checksum(source);
      emit(nullptr, page.at - at);
      emit(source.data(), source.size());
      at = page.at + source.size();
    }
    flush();
    if (slot != kWriteDepth) idle.push_back(slot);
    reap(false);
  }
  while (write_queue_->in_flight() > 0) reap(true);
  for (const auto& file : files) {
    if (status.ok()) status = file->sync();
  }
  return status;
}

void StoreImpl::release_extent(const DiskExtent& reserved) {
  std::vector<DiskExtent> freed;
  free_page({static_cast<std::uint8_t>(reserved.disk), reserved.extent.segment,
             reserved.extent.offset, 0},
            static_cast<std::uint32_t>(reserved.extent.bytes), &freed);
  punch(std::move(freed));
}

void StoreImpl::cancel_runs(std::vector<Run>* runs) {
  for (Run& run : *runs) {
    if (!run.reserved) continue;
    run.reserved = false;
    release_extent({run.disk, run.extent});
  }
}

void StoreImpl::abandon_runs(std::vector<Run>* runs, const Status& why) {
  // A log that ran out of space holds no commit. After any other failure, of a sync say, nobody
  // knows what a power cut would leave: until a later commit has settled it, the space stays taken.
  if (why.code() == Code::kResourceExhausted) return cancel_runs(runs);
  for (const Run& run : *runs) limbo_.push_back({run.disk, run.extent});
}

void StoreImpl::settle_runs(std::vector<Run>* runs) {
  for (Run& run : *runs) {
    Allocator& space = free_space_[run.disk];
    for (const RunPage& page : run.pages) {
      const PagePlace& place = page.draft->record.places[page.page];
      if (!space.add_page(place.segment, place.offset,
                          page.draft->record.info.pages[page.page].bytes)) {
        die("a page was written outside of its segment");
      }
    }
    space.cancel(run.extent);
    run.reserved = false;
  }
}

void StoreImpl::copy_to_tiers(const PutDraft& draft, Source source) {
  const bool remote =
      remote_ != nullptr && remote_->writes() == RemoteWrite::kThrough && source != Source::kRemote;
  if (!cache_.enabled() && !remote) return;
  for (const Draft& chunk : draft.chunks) {
    const ChunkInfo& info = chunk.record.info;
    TierWrite write;
    for (std::size_t i = 0; i < chunk.sources.size(); ++i) {
      const std::span<const std::byte> bytes = chunk.sources[i];
      if (bytes.empty()) continue;  // was there already
      const PageInfo& page = info.pages[i];
      const std::uint64_t checksum = chunk.record.places[i].checksum;
      if (cache_.enabled()) {
        cache_.insert({info.id, page.layer, page.encoding, checksum}, info.parent, bytes);
      }
      if (!remote) continue;
      auto copy = std::make_shared<AlignedBuffer>(bytes.size());
      std::memcpy(copy->data(), bytes.data(), bytes.size());
      write.pages.push_back({page, checksum, std::move(copy)});
    }
    if (!remote) continue;
    write.info = info;
    remote_->write(std::move(write));
  }
  if (!remote || draft.superseded.empty()) return;
  std::vector<ChunkId> tails;
  for (const ChunkRecord& tail : draft.superseded) tails.push_back(tail.info.id);
  remote_->erase(tails);
}

// ---- Put --------------------------------------------------------------------------------------

Result<PutReport> StoreImpl::put(std::span<const ChunkWrite> batch) {
  MutexLock lock(write_mutex_);
  HCACHE_RETURN_IF_ERROR(check_writable());
  settle_deferred();
  promote();  // first: the batch may go on from there
  return put_batch(batch, Source::kCaller);
}

void StoreImpl::promote() {
  if (remote_ == nullptr) return;
  const std::vector<TierWrite> kept = remote_->take_kept();
  if (kept.empty()) return;
  std::vector<ChunkWrite> batch;
  std::uint64_t pages = 0;
  for (const TierWrite& chunk : kept) {
    ChunkWrite& write = batch.emplace_back();
    write.id = chunk.info.id;
    write.parent = chunk.info.parent;
    write.fingerprint = chunk.info.fingerprint;
    write.salt = chunk.info.salt;
    write.first_position = chunk.info.first_position;
    write.tokens = chunk.info.tokens;
    write.k_type = chunk.info.k_type;
    write.v_type = chunk.info.v_type;
    for (const TierPage& page : chunk.pages) {
      write.pages.push_back(
          {page.info.layer, page.info.encoding, {page.bytes->data(), page.bytes->size()}});
    }
    pages += write.pages.size();
  }
  const auto put = put_batch(batch, Source::kRemote);
  if (put.ok()) {
    remote_->count_promoted(pages);
  } else {
    log::warn("what was read from the remote store is not kept: {}", put.status().to_string());
  }
}

Result<PutReport> StoreImpl::put_batch(std::span<const ChunkWrite> batch, Source source) {
  HCACHE_ASSIGN_OR_RETURN(PutDraft draft, draft_put(batch));
  PutReport report = draft.report;
  {
    MutexLock state(mutex_);
    const std::int64_t now = env_.wall_ns();
    for (const ChunkId& id : draft.used) touched_[id] = now;
  }
  if (draft.chunks.empty()) return report;

  std::vector<Run> runs = lay_out(&draft.chunks);
  std::uint64_t bytes = 0;
  for (const Run& run : runs) {
    bytes += round_up(run.bytes, kBlock);
    report.page_bytes += run.bytes;
  }
  HCACHE_RETURN_IF_ERROR(make_room(bytes, draft, &report));
  HCACHE_RETURN_IF_ERROR(write_runs(&runs));

  const std::size_t tails = draft.superseded.size();
  std::vector<ChunkId> pinned_tails;
  for (const ChunkRecord& tail : draft.superseded) pinned_tails.push_back(tail.info.id);
  mark_dying(&draft.superseded);
  for (const ChunkRecord& tail : draft.superseded) std::erase(pinned_tails, tail.info.id);
  auto commit = [&]() -> Status {
    HCACHE_ASSIGN_OR_RETURN(auto transaction, catalog_->begin());
    const std::int64_t now = env_.wall_ns();
    for (const Draft& chunk : draft.chunks) {
      if (chunk.exists) {
        HCACHE_RETURN_IF_ERROR(transaction.update(chunk.record));
      } else {
        HCACHE_RETURN_IF_ERROR(transaction.erase(chunk.record.info.id));  // a damaged row
        HCACHE_RETURN_IF_ERROR(transaction.insert(chunk.record, now));
      }
    }
    for (const ChunkRecord& tail : draft.superseded) {
      HCACHE_RETURN_IF_ERROR(transaction.erase(tail.info.id));
    }
    for (const SaltId& salt : new_owners_) {
      HCACHE_RETURN_IF_ERROR(transaction.put_owner(salt, owners_.at(salt)));
    }
    HCACHE_RETURN_IF_ERROR(flush_touches(&transaction));
    return transaction.commit();
  };
  const Status committed = commit();
  if (!committed.ok()) {
    abandon_runs(&runs, committed);
    bury(draft.superseded, false);
    return committed;
  }
  settle_runs(&runs);
  new_owners_.clear();
  for (const Draft& chunk : draft.chunks) {
    owned_bytes_[owner_of(chunk.record.info.salt)] += new_bytes(chunk.sources);
  }
  copy_to_tiers(draft, source);
  bury(draft.superseded, true);
  superseded_.insert(superseded_.end(), pinned_tails.begin(), pinned_tails.end());
  report.tails_superseded += static_cast<std::uint32_t>(tails);
  for (const DiskExtent& lost : limbo_) release_extent(lost);
  limbo_.clear();
  return report;
}

std::uint64_t StoreImpl::used_bytes() {
  std::uint64_t sum = catalog_->allocated_bytes(env_);
  for (const Allocator& space : free_space_) {
    sum += space.used_bytes() + space.segments().size() * kSegmentHeaderBytes;
  }
  return sum;
}

Status StoreImpl::make_room(std::uint64_t bytes, const PutDraft& draft, PutReport* report) {
  if (options_.quota_bytes == 0 && options_.owner_quota_bytes == 0) return {};
  std::unordered_set<ChunkId> spared = draft.keep;
  std::uint64_t soon_free = 0;
  for (const ChunkRecord& tail : draft.superseded) {
    spared.insert(tail.info.id);
    if (!pinned(tail.info.id)) soon_free += page_bytes(tail);
  }
  HCACHE_RETURN_IF_ERROR(keep_to_owner_quota(draft, spared, report));
  if (options_.quota_bytes == 0) return {};
  const auto excess = [&]() HCACHE_REQUIRES(write_mutex_) -> std::uint64_t {
    const std::uint64_t needed = used_bytes() + bytes;
    const std::uint64_t allowed = options_.quota_bytes + soon_free;
    return needed > allowed ? needed - allowed : 0;
  };
  const auto exhausted = [&](std::uint64_t over) {
    return resource_exhausted(
        fmt::format("the store's quota of {} bytes is {} bytes too small for {} more",
                    options_.quota_bytes, over, bytes));
  };
  if (bytes > options_.quota_bytes) return exhausted(bytes - options_.quota_bytes);
  // The catalog's log counts as well, and it can be emptied.
  if (excess() > 0) HCACHE_RETURN_IF_ERROR(catalog_->checkpoint());
  const auto any = [](const ChunkInfo&) { return true; };
  HCACHE_ASSIGN_OR_RETURN(const std::uint64_t over, evict(spared, any, excess, report));
  return over == 0 ? Status() : exhausted(over);
}

Status StoreImpl::keep_to_owner_quota(const PutDraft& draft,
                                      const std::unordered_set<ChunkId>& spared,
                                      PutReport* report) {
  if (options_.owner_quota_bytes == 0) return {};
  std::unordered_map<SaltId, std::uint64_t> added;
  for (const Draft& chunk : draft.chunks) {
    added[owner_of(chunk.record.info.salt)] += new_bytes(chunk.sources);
  }
  std::unordered_map<SaltId, std::uint64_t> soon_free;
  for (const ChunkRecord& tail : draft.superseded) {
    if (!pinned(tail.info.id)) soon_free[owner_of(tail.info.salt)] += page_bytes(tail);
  }
  for (const auto& [id, bytes] : added) {
    const SaltId& owner = id;
    const std::uint64_t needed = bytes;
    const auto excess = [&]() HCACHE_REQUIRES(write_mutex_) -> std::uint64_t {
      const std::uint64_t total = owned_bytes_[owner] + needed;
      const std::uint64_t allowed = options_.owner_quota_bytes + soon_free[owner];
      return total > allowed ? total - allowed : 0;
    };
    const auto its = [&](const ChunkInfo& chunk)
                         HCACHE_REQUIRES(write_mutex_) { return owner_of(chunk.salt) == owner; };
    HCACHE_ASSIGN_OR_RETURN(const std::uint64_t over, evict(spared, its, excess, report));
    if (over > 0) {
      return resource_exhausted(
          fmt::format("the quota of {} bytes for each key is {} bytes too small for {} more",
                      options_.owner_quota_bytes, over, needed));
    }
  }
  return {};
}

Result<std::uint64_t> StoreImpl::evict(const std::unordered_set<ChunkId>& spared,
                                       const std::function<bool(const ChunkInfo&)>& may,
                                       const std::function<std::uint64_t()>& excess,
                                       PutReport* report) {
  std::uint64_t over = excess();
  for (; over > 0; over = excess()) {
    HCACHE_ASSIGN_OR_RETURN(auto transaction, catalog_->begin());
    HCACHE_RETURN_IF_ERROR(flush_touches(&transaction));
    std::vector<ChunkRecord> victims;
    std::uint64_t found = 0;
    Status status;
    const auto may_go = [&](const ChunkRow& row) {
      return row.record.ok() && !spared.contains(row.id) && !pinned(row.id) &&
             may(row.record->info);
    };
    // Round by round: what is pinned meanwhile stays, and others have to go instead.
    for (std::size_t before = 1; found < over && victims.size() != before && status.ok();) {
      before = victims.size();
      std::vector<ChunkRecord> leaves;
      std::vector<std::int64_t> damaged_rows;
      std::unordered_map<ChunkId, std::int64_t> going;  // of the followers of each
      Status climbed;
      const auto visited = transaction.leaves_by_use([&](ChunkRow&& row) {
        if (!row.record.ok()) {
          damaged_rows.push_back(row.seq);
          return true;
        }
        // From the end of a chain up, as far as the chunks before are no younger and followed by
        // nothing else: so the oldest conversation goes, and not the ends of all.
        std::optional<ChunkRow> next = std::move(row);
        while (next && found < over && may_go(*next)) {
          const std::int64_t used = next->last_used_ns;
          const ChunkId parent = next->record->info.parent;
          found += page_bytes(*next->record);
          leaves.push_back(std::move(*next->record));
          next.reset();
          if (parent.is_zero()) break;
          auto found_parent = transaction.followed_by(parent, ++going[parent]);
          if (!found_parent.ok()) {
            climbed = found_parent.status();
            return false;
          }
          next = std::move(*found_parent);
          if (next && next->last_used_ns > used) next.reset();
        }
        return found < over;
      });
      status = visited.ok() ? climbed : visited;
      mark_dying(&leaves);
      for (const std::int64_t seq : damaged_rows) {
        if (status.ok()) status = transaction.erase_row(seq);
      }
      for (ChunkRecord& leaf : leaves) {
        if (status.ok()) status = transaction.erase(leaf.info.id);
        victims.push_back(std::move(leaf));
      }
    }
    if (victims.empty()) return status.ok() ? Result<std::uint64_t>(over) : status;
    if (status.ok()) status = transaction.commit();
    if (status.ok()) write_back(victims);
    bury(victims, status.ok());
    HCACHE_RETURN_IF_ERROR(status);
    report->chunks_evicted += static_cast<std::uint32_t>(victims.size());
  }
  return over;
}

void StoreImpl::write_back(const std::vector<ChunkRecord>& victims) {
  if (remote_ == nullptr || remote_->writes() != RemoteWrite::kBack) return;
  for (const ChunkRecord& victim : victims) {
    const std::optional<ChunkRecord> there = remote_->find(victim.info.id);
    TierWrite write;
    for (std::size_t i = 0; i < victim.places.size(); ++i) {
      const PageInfo& page = victim.info.pages[i];
      if (there && there->info.find_page(page.layer, page.encoding) != nullptr) continue;
      auto bytes = read_page(victim.places[i], page.bytes);
      if (bytes) write.pages.push_back({page, victim.places[i].checksum, std::move(bytes)});
    }
    if (write.pages.empty()) continue;
    write.info = victim.info;
    remote_->write(std::move(write));
  }
}

std::shared_ptr<const AlignedBuffer> StoreImpl::read_page(const PagePlace& place,
                                                          std::uint32_t bytes) {
  const auto file = segments_->open(place.disk, place.segment);
  if (!file.ok()) return nullptr;
  const std::uint64_t from = place.offset / kBlock * kBlock;
  AlignedBuffer blocks(round_up(place.offset + bytes - from, kBlock));
  const auto got = (*file)->read_at(from, blocks.span());
  const std::uint64_t within = place.offset - from;
  if (!got.ok() || *got < within + bytes) return nullptr;
  const auto page = blocks.span().subspan(within, bytes);
  if (checksum(page) != place.checksum) return nullptr;
  auto out = std::make_shared<AlignedBuffer>(bytes);
  std::memcpy(out->data(), page.data(), bytes);
  return out;
}

const SaltId& StoreImpl::owner_of(const SaltId& salt) const {
  const auto it = owners_.find(salt);
  return it == owners_.end() ? salt : it->second;
}

void StoreImpl::adopt(const SaltId& salt, const SaltId& owner) {
  if (owner.is_zero() || owner == salt || owners_.contains(salt)) return;
  // What it had until now counted for itself (another server wrote it, or an older program did).
  const auto own = owned_bytes_.extract(salt);
  if (!own.empty()) owned_bytes_[owner] += own.mapped();
  owners_.emplace(salt, owner);
  new_owners_.insert(salt);
}

Status StoreImpl::flush_touches(Catalog::Transaction* transaction) {
  std::unordered_map<ChunkId, std::int64_t> touched;
  {
    MutexLock lock(mutex_);
    touched.swap(touched_);
  }
  for (const auto& [id, when] : touched) {
    HCACHE_RETURN_IF_ERROR(transaction->touch(id, when));
  }
  return {};
}

// ---- Removal ----------------------------------------------------------------------------------

void StoreImpl::mark_dying(std::vector<ChunkRecord>* victims) {
  MutexLock lock(mutex_);
  std::unordered_set<ChunkId> staying;
  const auto stays = [&](const ChunkRecord& victim) HCACHE_REQUIRES(mutex_) {
    if (!pins_.contains(victim.info.id) && !staying.contains(victim.info.id)) return false;
    staying.insert(victim.info.parent);
    return true;
  };
  // Followers may come before or behind those that they follow.
  while (std::erase_if(*victims, stays) > 0) {
  }
  for (const ChunkRecord& victim : *victims) dying_.insert(victim.info.id);
}

void StoreImpl::bury(const std::vector<ChunkRecord>& victims, bool committed) {
  {
    MutexLock lock(mutex_);
    for (const ChunkRecord& victim : victims) dying_.erase(victim.info.id);
    ++epoch_;
  }
  if (!committed) return;
  std::vector<DiskExtent> freed;
  for (const ChunkRecord& victim : victims) {
    owned_bytes_[owner_of(victim.info.salt)] -= page_bytes(victim);
    for (std::size_t i = 0; i < victim.places.size(); ++i) {
      free_page(victim.places[i], victim.info.pages[i].bytes, &freed);
    }
  }
  punch(std::move(freed));
}

Result<std::uint64_t> StoreImpl::erase_chunks(std::vector<ChunkRecord> victims) {
  if (victims.empty()) return std::uint64_t{0};
  mark_dying(&victims);
  auto commit = [&]() -> Status {
    HCACHE_ASSIGN_OR_RETURN(auto transaction, catalog_->begin());
    for (const ChunkRecord& victim : victims) {
      HCACHE_RETURN_IF_ERROR(transaction.erase(victim.info.id));
    }
    HCACHE_RETURN_IF_ERROR(flush_touches(&transaction));
    return transaction.commit();
  };
  const Status status = commit();
  bury(victims, status.ok());
  HCACHE_RETURN_IF_ERROR(status);
  return static_cast<std::uint64_t>(victims.size());
}

void StoreImpl::free_page(const PagePlace& place, std::uint32_t bytes,
                          std::vector<DiskExtent>* freed) {
  if (place.disk >= free_space_.size() || !free_space_[place.disk].has_segment(place.segment)) {
    return;  // a damaged row that was never counted
  }
  std::vector<Extent> extents;
  free_space_[place.disk].remove_page(place.segment, place.offset, bytes, &extents);
  for (const Extent& extent : extents) freed->push_back({place.disk, extent});
}

// Giving blocks back is a courtesy: what goes wrong costs space until the next open.
void StoreImpl::punch(std::vector<DiskExtent> freed) {
  auto start = [](const DiskExtent& e) {
    return std::tuple(e.disk, e.extent.segment, e.extent.offset);
  };
  std::sort(freed.begin(), freed.end(),
            [&](const DiskExtent& a, const DiskExtent& b) { return start(a) < start(b); });
  for (std::size_t i = 0; i < freed.size();) {
    DiskExtent whole = freed[i];
    for (++i; i < freed.size(); ++i) {
      const auto end =
          std::tuple(whole.disk, whole.extent.segment, whole.extent.offset + whole.extent.bytes);
      if (start(freed[i]) != end) break;
      whole.extent.bytes += freed[i].extent.bytes;
    }
    const auto file = segments_->open(whole.disk, whole.extent.segment);
    Status status = file.status();
    if (file.ok()) status = (*file)->punch_hole(whole.extent.offset, whole.extent.bytes);
    if (!status.ok() && status.code() != Code::kNotFound) {
      log::warn("cannot give space back: {}", status.to_string());
    }
  }
}

Result<bool> StoreImpl::redundant(const ChunkRecord& record) {
  const ChunkInfo& info = record.info;
  if (info.tokens.size() == kChunkTokens) return false;
  HCACHE_ASSIGN_OR_RETURN(
      const auto others,
      catalog_->children(sibling_key(info.fingerprint, info.salt, info.parent), info.tokens[0]));
  return std::any_of(others.begin(), others.end(), [&](const ChunkRecord& other) {
    return siblings(other.info, info) && other.info.tokens.size() > info.tokens.size() &&
           starts_with(other.info.tokens, info.tokens) && covers(other.info, info.pages);
  });
}

void StoreImpl::settle_deferred() {
  std::vector<DeferredPage> still;
  std::vector<DiskExtent> freed;
  for (const DeferredPage& page : deferred_) {
    if (pinned(page.chunk)) {
      still.push_back(page);
    } else {
      free_page(page.place, page.bytes, &freed);
    }
  }
  deferred_ = std::move(still);
  punch(std::move(freed));
  std::vector<ChunkRecord> tails;
  std::vector<ChunkId> later;
  for (const ChunkId& id : superseded_) {
    if (pinned(id)) {
      later.push_back(id);
      continue;
    }
    auto found = catalog_->find(id);
    if (!found.ok() || !found->has_value()) continue;
    const auto needless = redundant(**found);
    if (needless.ok() && *needless) tails.push_back(std::move(**found));
  }
  superseded_ = std::move(later);
  std::vector<ChunkId> ids;
  for (const ChunkRecord& tail : tails) ids.push_back(tail.info.id);
  if (remote_ != nullptr && remote_->writes() != RemoteWrite::kOff && !ids.empty()) {
    remote_->erase(ids);
  }
  const auto erased = erase_chunks(std::move(tails));
  if (!erased.ok()) log::warn("removing extended tails: {}", erased.status().to_string());
}

Status StoreImpl::quarantine(const ChunkId& id, std::uint16_t layer, Encoding encoding) {
  MutexLock lock(write_mutex_);
  HCACHE_RETURN_IF_ERROR(check_writable());
  settle_deferred();
  HCACHE_ASSIGN_OR_RETURN(auto record, catalog_->find(id));
  if (!record.has_value()) return {};
  const PageInfo* page = record->info.find_page(layer, encoding);
  if (page == nullptr) return {};
  const auto index = page - record->info.pages.data();
  const DeferredPage freed{id, record->places[static_cast<std::size_t>(index)], page->bytes};
  record->info.pages.erase(record->info.pages.begin() + index);
  record->places.erase(record->places.begin() + index);
  HCACHE_ASSIGN_OR_RETURN(auto transaction, catalog_->begin());
  HCACHE_RETURN_IF_ERROR(transaction.update(*record));
  HCACHE_RETURN_IF_ERROR(transaction.commit());
  {
    MutexLock state(mutex_);
    ++epoch_;
  }
  owned_bytes_[owner_of(record->info.salt)] -= freed.bytes;
  deferred_.push_back(freed);
  settle_deferred();
  return {};
}

}  // namespace hcache::store
