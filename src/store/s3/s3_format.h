// The bytes of an S3 tier's objects (docs/format.md, "In S3"): indexes of chunks, and data objects
// with the pages of one or several chunks.
//
// Threading: plain values.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "format.h"
#include "seal.h"

namespace hcache::store {

inline constexpr std::uint64_t kObjectBytes = 64U
                                              << 20;  // of pages in one object of several chunks
inline constexpr std::size_t kMaxObjectChunks = 128;

using ObjectName = Id128<struct ObjectNameTag>;

// ---- Indexes

// Where a page lies.
struct S3Entry {
  PageInfo page;
  std::uint64_t checksum = 0;
  ObjectName object;
  std::uint64_t offset = 0;
};

struct S3Index {
  ChunkRecord record;  // without pages
  std::vector<S3Entry> entries;
};

[[nodiscard]] inline bool entry_before(const S3Entry& a, const S3Entry& b) {
  return std::pair(a.page.layer, a.page.encoding) < std::pair(b.page.layer, b.page.encoding);
}

// Of a chunk, under the id that it has there (Seal::hide).
[[nodiscard]] std::string index_key(const ChunkId& hidden);
[[nodiscard]] std::string data_key(const ObjectName& name);

// The entries are sorted by entry_before.
[[nodiscard]] std::string encode_index(const S3Index& index, const Seal& seal);
// data_loss says what is wrong with it.
[[nodiscard]] Result<S3Index> decode_index(const ChunkId& id, std::string_view body,
                                           const Seal& seal);
// The record with its pages, as match() offers it.
[[nodiscard]] ChunkRecord record_of(const S3Index& index);
// A chunk whose pages share objects with no other chunk's: a tail, which is deleted when it grows.
[[nodiscard]] inline bool lies_alone(const ChunkInfo& info) {
  return info.tokens.size() < kChunkTokens;
}

// ---- Data objects

// The head of an object with several chunks: which ones' pages it holds still.
struct S3Member {
  ChunkId id;  // hidden
  bool erased = false;
};

[[nodiscard]] constexpr std::size_t head_bytes(std::size_t members) {
  return 8 + 4 + members * 17 + 8;
}
// As much of an object as has its head for certain.
inline constexpr std::size_t kMaxHeadBytes = head_bytes(kMaxObjectChunks);

// 1 to kMaxObjectChunks members.
[[nodiscard]] std::string encode_head(std::span<const S3Member> members);
// Of the beginning of an object. nullopt: it has none (it was written before there were heads), or
// a damaged one.
[[nodiscard]] std::optional<std::vector<S3Member>> decode_head(std::string_view object);

// Where an erased page lay in an object.
struct S3Hole {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

// An object without what was erased: the holes are filled with zeros, so what else it holds stays
// where every index says, and its head counts the chunks as erased. nullopt: nothing else is left
// in it.
[[nodiscard]] std::optional<std::string> without_chunks(std::string object,
                                                        std::span<const ChunkId> chunks,
                                                        std::span<const S3Hole> holes);

}  // namespace hcache::store
