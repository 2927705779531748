// A snapshot – state that stands for all tokens up to the end of a chunk – as pages of that chunk
// (Encoding::kSnapshot, docs/format.md): its length (u64, little-endian), its bytes, and zeros to a
// multiple of the chunk's tokens, cut into parts that are multiples as well and are numbered as
// layers are.
//
// Threading: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "store/store.h"

namespace hcache::state {

// What a snapshot behind a chunk of so many tokens begins with.
inline constexpr size_t kSnapshotFrame = sizeof(uint64_t);
[[nodiscard]] std::vector<std::byte> framed_snapshot(std::span<const std::byte> snapshot,
                                                     size_t n_tokens);
// The pages of a framed one, which they refer to. Parts have so many bytes at most: a reader's ring
// holds several of them.
inline constexpr size_t kSnapshotPart = size_t{8} << 20;
[[nodiscard]] std::vector<store::PageWrite> snapshot_pages(std::span<const std::byte> framed,
                                                           size_t n_tokens,
                                                           size_t part_bytes = kSnapshotPart);

// Whether a chunk has a snapshot, and of how many parts.
[[nodiscard]] size_t snapshot_parts(const store::ChunkInfo& chunk);
// The length that the first part tells, or kDataLoss where `n_bytes`, those of all parts, are less.
[[nodiscard]] Result<size_t> snapshot_length(std::span<const std::byte> first_part, size_t n_bytes);
// What pages of parts say of the whole: the snapshot, or kDataLoss.
[[nodiscard]] Result<std::vector<std::byte>> join_snapshot(std::vector<std::byte> parts);

}  // namespace hcache::state
