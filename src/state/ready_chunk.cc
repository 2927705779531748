#include "ready_chunk.h"

#include <algorithm>
#include <unordered_map>

#include "base/pace.h"
#include "state/identity.h"
#include "state/snapshot_pages.h"

namespace hcache::state {
namespace {

// Of the rows that layers keep: what is loaded while the next part is read.
constexpr size_t kKeptPart = size_t{1} << 20;

void add_page(store::ChunkWrite& write, const store::PageWrite& page) {
  const bool known = std::any_of(write.pages.begin(), write.pages.end(), [&](const auto& other) {
    const bool both_kv = store::is_kv(other.encoding) && store::is_kv(page.encoding);
    return other.layer == page.layer && (both_kv || other.encoding == page.encoding);
  });
  if (!known && !page.bytes.empty()) write.pages.push_back(page);
}

}  // namespace

void pack_pages(std::span<ReadyChunk> chunks, ggml_type kv_type, policy::PackMode mode,
                KvPacker* packer) {
  if (packable_bytes(kv_type) == 0) return;
  for (ReadyChunk& chunk : chunks) {
    for (PageBuffer& page : chunk.layers) {
      if (page.kv.empty()) continue;
      Pace::point();
      page.packed_kv = packer->pack(page.kv, kv_type, mode, chunk.tokens.size());
      if (!page.packed_kv.empty()) page.kv = {};
    }
  }
}

std::vector<store::ChunkWrite> writes_of(std::span<const ReadyChunk> chunks,
                                         store::ElementType kv_type) {
  std::vector<store::ChunkWrite> batch;
  std::unordered_map<ChunkId, size_t> index;  // of the batch
  for (const ReadyChunk& chunk : chunks) {
    const auto [at, is_new] = index.emplace(chunk.id, batch.size());
    if (is_new) {
      batch.push_back({.id = chunk.id,
                       .parent = chunk.parent,
                       .fingerprint = chunk.fingerprint,
                       .salt = chunk.salt.id,
                       .owner = chunk.salt.owner,
                       .first_position = static_cast<uint64_t>(chunk.first_pos),
                       .tokens = chunk.tokens,
                       .k_type = kv_type,
                       .v_type = kv_type,
                       .pages = {}});
    }
    store::ChunkWrite& write = batch[at->second];
    for (size_t i = 0; i < chunk.layers.size(); ++i) {
      const auto layer = static_cast<uint16_t>(i);
      const PageBuffer& page = chunk.layers[i];
      if (!page.hidden.empty()) {
        add_page(write, {layer, *hidden_encoding(page.hidden_type), page.hidden});
      }
      if (!page.packed_kv.empty()) {
        add_page(write, {layer, store::Encoding::kKvPacked, page.packed_kv});
      } else {
        add_page(write, {layer, store::Encoding::kKv, page.kv});
      }
    }
    for (const store::PageWrite& page :
         snapshot_pages(chunk.snapshot, chunk.tokens.size(), kKeptPart)) {
      add_page(write, page);
    }
    add_page(write, {0, store::Encoding::kChosen, chunk.chosen});
  }
  return batch;
}

}  // namespace hcache::state
