#include "state/block_restore.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "packed_kv.h"
#include "state/identity.h"

namespace hcache::state {
namespace {

using engine::BlockKind;
using engine::HybridEngine;
using engine::kBlockTokens;

static_assert(kBlockTokens == store::kChunkTokens, "a chunk of the store is a block of the cache");

constexpr size_t kGroupChunks = 8;  // read together, layer by layer, so that reads are long

// The page of a layer that blocks of a kind take; null: there is none that fits.
const store::PageInfo* page_of(const HybridEngine& engine, const store::ChunkInfo& info,
                               BlockKind kind, int layer) {
  const auto encoding = kind == BlockKind::kKv ? std::optional(store::Encoding::kKv)
                                               : hidden_encoding(engine.activation_type(layer));
  if (!encoding) return nullptr;
  const store::PageInfo* page = info.find_state(static_cast<uint16_t>(layer), *encoding);
  if (page == nullptr) return nullptr;
  const bool fits = page_fits(page->encoding, engine.options().kv_type, page->bytes,
                              kBlockTokens * engine.row_bytes(kind, layer));
  return fits ? page : nullptr;
}

bool has_all_layers(const HybridEngine& engine, const store::ChunkInfo& info, BlockKind kind) {
  const auto kv_type = element_type(engine.options().kv_type);
  if (kind == BlockKind::kKv && (info.k_type != kv_type || info.v_type != kv_type)) return false;
  if (kind == BlockKind::kAct && !engine.can_keep_activations()) return false;
  for (int layer = 0; layer < engine.n_layer(); ++layer) {
    if (page_of(engine, info, kind, layer) == nullptr) return false;
  }
  return true;
}

// As which kind of block a chunk can be taken.
std::optional<BlockKind> kind_of(const HybridEngine& engine, const store::MatchedChunk& chunk) {
  const store::ChunkInfo& info = chunk.chunk.info();
  const bool whole = chunk.usable_rows == kBlockTokens && info.tokens.size() == kBlockTokens;
  if (!whole || engine.options().recomputed_layers > 0) return std::nullopt;
  if (has_all_layers(engine, info, BlockKind::kKv)) return BlockKind::kKv;
  if (has_all_layers(engine, info, BlockKind::kAct)) return BlockKind::kAct;
  return std::nullopt;
}

class BlockRestoreImpl final : public BlockRestore {
 public:
  BlockRestoreImpl(Env& env, HybridEngine& engine, store::Store& store, const BlockRestoreRun& run)
      : env_(env), engine_(engine), store_(store), run_(run), start_ns_(env.monotonic_ns()) {}
  BlockRestoreImpl(const BlockRestoreImpl&) = delete;
  BlockRestoreImpl& operator=(const BlockRestoreImpl&) = delete;
  ~BlockRestoreImpl() override {
    reader_.reset();
    engine_.end_known(run_.id, {}).ignore("blocks that were begun are dropped");
  }

  Status init() {
    const int64_t most = std::min({restorable_rows(engine_, *run_.match), run_.upto,
                                   static_cast<int64_t>(run_.tokens.size())});
    n_chunks_ = static_cast<size_t>(std::max<int64_t>(most, 0) / kBlockTokens);
    return next_group();
  }

  Result<bool> advance(bool wait) override;
  double fraction() const override {
    return n_chunks_ == 0 ? 1 : static_cast<double>(begin_) / static_cast<double>(n_chunks_);
  }
  int64_t rows() const override { return rows_; }
  const policy::RestoreRecord& record() const override { return record_; }

 private:
  struct Target {
    int block = 0;  // of the group
    int layer = 0;
    store::Encoding encoding = store::Encoding::kKv;
  };

  // Begins the blocks of the next chunks and their reads; without any more, it is done.
  Status next_group();
  Status take(store::PageView view);
  Status end_group();
  void end() {
    done_ = true;
    record_.restored_tokens = rows_;
    record_.restore_s = static_cast<double>(env_.monotonic_ns() - start_ns_) * 1e-9;
    if (reader_) {
      const store::ReaderStats stats = reader_->stats();
      record_.read = {
          .dram = stats.dram_bytes, .disk = stats.disk_bytes, .remote = stats.remote_bytes};
      record_.io_busy_s = stats.busy_s;
    }
    reader_.reset();
  }

  Env& env_;
  HybridEngine& engine_;
  store::Store& store_;
  const BlockRestoreRun run_;
  const int64_t start_ns_;
  std::unique_ptr<store::PageReader> reader_;
  KvPacker packer_;
  std::vector<std::byte> unpacked_;  // the page that is being taken
  size_t n_chunks_ = 0;
  size_t begin_ = 0;  // of the group, in chunks
  std::vector<BlockKind> kinds_;
  std::vector<Target> targets_;  // in the order of the group's reads
  size_t n_taken_ = 0;           // of them
  size_t n_sound_ = 0;           // leading chunks of the group without a damaged page so far
  int64_t rows_ = 0;
  bool done_ = false;
  policy::RestoreRecord record_;
};

Status BlockRestoreImpl::next_group() {
  const size_t n = std::min(kGroupChunks, n_chunks_ - begin_);
  kinds_.clear();
  targets_.clear();
  n_taken_ = 0;
  n_sound_ = n;
  if (n == 0) {
    end();
    return {};
  }
  std::vector<store::PageRequest> pages;
  uint64_t largest = 0;
  for (size_t i = 0; i < n; ++i)
    kinds_.push_back(*kind_of(engine_, run_.match->chunks[begin_ + i]));
  for (int layer = 0; layer < engine_.n_layer(); ++layer) {
    for (size_t i = 0; i < n; ++i) {
      const store::ChunkRef& chunk = run_.match->chunks[begin_ + i].chunk;
      const store::Encoding encoding = page_of(engine_, chunk.info(), kinds_[i], layer)->encoding;
      targets_.push_back({.block = static_cast<int>(i), .layer = layer, .encoding = encoding});
      pages.push_back({chunk, static_cast<uint16_t>(layer), encoding});
      largest = std::max<uint64_t>(largest, kBlockTokens * engine_.row_bytes(kinds_[i], layer));
    }
  }
  if (!reader_) {
    // Pages are copied as they come: a few of them are enough.
    HCACHE_ASSIGN_OR_RETURN(
        reader_, store_.new_reader({.ring_bytes = std::max<uint64_t>(8 * largest, 4U << 20)}));
  }
  HCACHE_RETURN_IF_ERROR(engine_.begin_known(run_.id, kinds_));
  return reader_->submit(pages);
}

Status BlockRestoreImpl::take(store::PageView view) {
  const Target& target = targets_[n_taken_++];
  const auto block = static_cast<size_t>(target.block);
  // K rows, then V rows; or activation rows alone.
  std::span<const std::byte> from = view.bytes;
  if (view.status.ok() && target.encoding == store::Encoding::kKvPacked) {
    unpacked_.resize(kBlockTokens * engine_.row_bytes(BlockKind::kKv, target.layer));
    view.status = packer_.unpack(view.bytes, unpacked_);
    from = unpacked_;
  }
  if (!view.status.ok()) {
    n_sound_ = std::min(n_sound_, block);
    ++record_.damaged_pages;
    if (run_.on_damage) {
      run_.on_damage({.chunk = run_.match->chunks[begin_ + block].chunk.info().id,
                      .layer = static_cast<uint16_t>(target.layer),
                      .encoding = target.encoding,
                      .status = view.status,
                      .remote = view.origin == store::PageOrigin::kRemote});
    }
  } else if (block < n_sound_) {
    for (int part = 0; !from.empty(); ++part) {
      const std::span<std::byte> to = engine_.known_page(run_.id, target.block, target.layer, part);
      if (to.empty() || to.size() > from.size()) {
        return internal_error("a page of the store does not fit its block");
      }
      std::memcpy(to.data(), from.data(), to.size());
      from = from.subspan(to.size());
    }
    (kinds_[block] == BlockKind::kKv ? record_.kv_pages : record_.hidden_pages) += tier_bytes(view);
  }
  reader_->release(view.index);
  return {};
}

Status BlockRestoreImpl::end_group() {
  const size_t n = n_sound_;
  const bool damaged = n < kinds_.size();
  const auto n_rows = static_cast<int64_t>(n) * kBlockTokens;
  HCACHE_RETURN_IF_ERROR(engine_.end_known(
      run_.id, run_.tokens.subspan(static_cast<size_t>(rows_), static_cast<size_t>(n_rows))));
  rows_ += n_rows;
  for (size_t i = 0; i < n; ++i) {
    (kinds_[i] == BlockKind::kKv ? record_.kv_tokens : record_.hidden_tokens) += kBlockTokens;
  }
  begin_ = damaged ? n_chunks_ : begin_ + n;
  return next_group();
}

Result<bool> BlockRestoreImpl::advance(bool wait) {
  while (!done_) {
    if (n_taken_ == targets_.size()) {
      HCACHE_RETURN_IF_ERROR(end_group());
      continue;
    }
    std::optional<store::PageView> view;
    if (wait) {
      HCACHE_ASSIGN_OR_RETURN(view, reader_->next());
      wait = false;
    } else {
      HCACHE_ASSIGN_OR_RETURN(view, reader_->try_next());
    }
    if (!view) return false;
    HCACHE_RETURN_IF_ERROR(take(std::move(*view)));
  }
  return true;
}

}  // namespace

int64_t restorable_rows(const HybridEngine& engine, const store::Match& match) {
  int64_t rows = 0;
  for (const store::MatchedChunk& chunk : match.chunks) {
    if (!kind_of(engine, chunk)) break;
    rows += kBlockTokens;
  }
  return rows;
}

Result<std::unique_ptr<BlockRestore>> BlockRestore::begin(Env& env, HybridEngine& engine,
                                                          store::Store& store,
                                                          const BlockRestoreRun& run) {
  auto restore = std::make_unique<BlockRestoreImpl>(env, engine, store, run);
  HCACHE_RETURN_IF_ERROR(restore->init());
  return std::unique_ptr<BlockRestore>(std::move(restore));
}

}  // namespace hcache::state
