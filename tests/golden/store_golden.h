// What the golden stores contain, told in code that does not change with the library's helpers.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "store/archive.h"
#include "store/store.h"

namespace hcache::store::golden {

inline Fingerprint fingerprint() {
  Fingerprint id;
  for (std::size_t i = 0; i < id.bytes.size(); ++i) id.bytes[i] = static_cast<std::uint8_t>(i * 7);
  return id;
}

// Of the encrypted ones.
inline StoreKey key() {
  StoreKey key;
  for (std::size_t i = 0; i < key.bytes.size(); ++i) {
    key.bytes[i] = static_cast<std::uint8_t>(5 * i + 3);
  }
  return key;
}

inline constexpr const char* kSaltText = "tenant";
inline constexpr const char* kSessionName = "a talk";
inline constexpr const char* kMetadata = R"({"title":"golden"})";

inline std::vector<std::int32_t> tokens() {
  std::vector<std::int32_t> out;
  for (std::int32_t i = 0; i < 100; ++i)
    out.push_back((i * i * 31 + 5) % 32000 - (i == 50 ? 1 : 0));
  return out;
}

// The page of a chunk's layer in an encoding: 5 bytes per row and tensor.
inline std::vector<std::byte> page(std::size_t chunk, std::uint16_t layer, Encoding encoding,
                                   std::size_t rows) {
  const std::size_t row_bytes = is_kv(encoding) ? 10 : 5;
  std::vector<std::byte> out(rows * row_bytes);
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<std::byte>(i * 13 + chunk * 101 + layer * 29 +
                                    static_cast<std::size_t>(encoding) * 3);
  }
  return out;
}

// Which encodings there were when a file was written.
enum class Era { kFirst, kPacked, kLlama, kCut };

// Layers 0 … 5 are in one hidden encoding each, layers 0 and 2 are kv as well; since kPacked layers
// 1 and 6 are kv-packed; since kLlama layer 0 has a snapshot and layer 3 rows; since kCut chosen
// rows are told.
inline std::vector<std::pair<std::uint16_t, Encoding>> pages(Era era) {
  const bool packed = era >= Era::kPacked;
  std::vector<std::pair<std::uint16_t, Encoding>> out;
  for (std::uint16_t layer = 0; layer < 6; ++layer) {
    out.emplace_back(layer, static_cast<Encoding>(layer + 1));
    if (layer == 0 || layer == 2) out.emplace_back(layer, Encoding::kKv);
    if (packed && layer == 1) out.emplace_back(layer, Encoding::kKvPacked);
    if (era >= Era::kLlama && layer == 3) out.emplace_back(layer, Encoding::kRows);
    if (era >= Era::kLlama && layer == 0) out.emplace_back(layer, Encoding::kSnapshot);
    if (era >= Era::kCut && layer == 0) out.emplace_back(layer, Encoding::kChosen);
  }
  if (packed) out.emplace_back(6, Encoding::kKvPacked);
  return out;
}

inline ArchiveHead archive_head() {
  return {.fingerprint = fingerprint(),
          .model = "a model",
          .name = kSessionName,
          .tokens = tokens(),
          .metadata_json = kMetadata};
}

}  // namespace hcache::store::golden
