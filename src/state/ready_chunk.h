// Chunks that the saver has filled, on their way into the store.
//
// Threading: plain values and pure functions.
#pragma once

#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/ids.h"
#include "engine/engine.h"
#include "packed_kv.h"
#include "store/store.h"

namespace hcache::state {

// One layer's rows of a chunk that is being filled, with room for a full one.
struct PageBuffer {
  ggml_type hidden_type = GGML_TYPE_COUNT;
  std::vector<std::byte> hidden;
  std::vector<std::byte> kv;         // K rows, and V rows from the middle on
  std::vector<std::byte> packed_kv;  // instead of them: the same, packed
};

// A chunk on its way into the store; owns everything that its ChunkWrite points to.
struct ReadyChunk {
  engine::SeqId seq = -1;  // -1: pages that are added to a chunk of the store
  ChunkId id;
  ChunkId parent;
  Fingerprint fingerprint;
  Salt salt;
  int64_t first_pos = 0;
  std::vector<int32_t> tokens;
  std::vector<PageBuffer> layers;        // exactly tokens.size() rows
  std::vector<std::byte> snapshot = {};  // framed; empty: none
  std::vector<std::byte> chosen = {};    // a page of Encoding::kChosen; empty: none
};

// Packs the pages of K and V that get shorter by it, with loss where `mode` says so.
void pack_pages(std::span<ReadyChunk> chunks, ggml_type kv_type, policy::PackMode mode,
                KvPacker* packer);

// What the store is to put. Sequences with the same tokens give the same chunk, which then has the
// pages of all of them. Refers to the chunks.
[[nodiscard]] std::vector<store::ChunkWrite> writes_of(std::span<const ReadyChunk> chunks,
                                                       store::ElementType kv_type);

}  // namespace hcache::state
