// What the store's tests share: a temporary directory, chains with made-up pages, and a check of
// everything that a match offers against what was saved.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "base/env.h"
#include "base_testing.h"
#include "store/store.h"

namespace hcache::store::testing {

using hcache::testing::TempDir;

inline Fingerprint fingerprint_of(std::string_view name) {
  return Hasher("test model").add(name).finish<Fingerprint>();
}

// `n` tokens that depend on the seed from position `fork` on and are all alike before it.
inline std::vector<std::int32_t> tokens_of(std::size_t n, std::uint32_t seed = 0,
                                           std::size_t fork = 0) {
  std::vector<std::int32_t> out(n);
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t s = i < fork ? 0 : seed;
    out[i] = static_cast<std::int32_t>((i * 2654435761U + s * 40503U + 7) % 50000);
  }
  return out;
}

// The id of a chain's first chunk.
inline ChunkId first_chunk(const Fingerprint& fingerprint, const SaltId& salt,
                           const std::vector<std::int32_t>& tokens) {
  return chunk_id(fingerprint, salt, {}, std::span<const std::int32_t>(tokens).first(kChunkTokens));
}

// The made-up state of one row: a function of everything up to that token, like the real one.
inline std::vector<std::byte> row_bytes(const ChunkId& parent, std::span<const std::int32_t> tokens,
                                        std::size_t row, std::uint16_t layer, Encoding encoding,
                                        std::size_t size) {
  std::uint64_t x = std::hash<ChunkId>()(parent) + layer * 1000003ULL +
                    static_cast<std::uint64_t>(encoding) * 7919ULL;
  for (std::size_t i = 0; i <= row; ++i) {
    x = (x ^ static_cast<std::uint32_t>(tokens[i])) * 0x9e3779b97f4a7c15ULL;
    x ^= x >> 29;
  }
  std::vector<std::byte> out(size);
  for (std::byte& b : out) {
    x = x * 6364136223846793005ULL + 1442695040888963407ULL;
    b = static_cast<std::byte>(x >> 56);
  }
  return out;
}

inline std::vector<std::byte> page_bytes_of(const ChunkId& parent,
                                            std::span<const std::int32_t> tokens,
                                            std::uint16_t layer, Encoding encoding,
                                            std::size_t row_size) {
  std::vector<std::byte> out;
  for (std::size_t row = 0; row < tokens.size(); ++row) {
    const auto bytes = row_bytes(parent, tokens, row, layer, encoding, row_size);
    out.insert(out.end(), bytes.begin(), bytes.end());
  }
  return out;
}

struct Shape {
  std::uint16_t layers = 4;
  std::vector<Encoding> encodings = {Encoding::kHiddenQ8_1};
  std::size_t row_size = 72;
};

// A chain cut into chunks, with the memory that its pages need.
class Chain {
 public:
  Chain(const ChainFingerprints& fingerprints, const SaltId& salt, std::vector<std::int32_t> tokens,
        const Shape& shape)
      : tokens_(std::move(tokens)) {
    ChunkId parent;
    for (std::size_t at = 0; at < tokens_.size(); at += kChunkTokens) {
      const Fingerprint& fingerprint = fingerprints.at(at);
      ChunkWrite& write = chunks_.emplace_back();
      write.tokens = std::span<const std::int32_t>(tokens_).subspan(
          at, std::min<std::size_t>(kChunkTokens, tokens_.size() - at));
      write.parent = parent;
      write.fingerprint = fingerprint;
      write.salt = salt;
      write.first_position = at;
      write.id = chunk_id(fingerprint, salt, parent, write.tokens);
      write.k_type = ElementType::kF16;
      write.v_type = ElementType::kF16;
      for (std::uint16_t layer = 0; layer < shape.layers; ++layer) {
        for (const Encoding encoding : shape.encodings) {
          memory_.push_back(page_bytes_of(parent, write.tokens, layer, encoding, shape.row_size));
          write.pages.push_back({layer, encoding, memory_.back()});
        }
      }
      parent = write.id;
    }
  }
  // A snapshot behind a chunk, of so many parts with `row_size` bytes for each token of the chunk.
  void add_snapshot(std::size_t chunk, std::uint16_t parts, std::size_t row_size) {
    ChunkWrite& write = chunks_[chunk];
    for (std::uint16_t part = 0; part < parts; ++part) {
      memory_.push_back(
          page_bytes_of(write.parent, write.tokens, part, Encoding::kSnapshot, row_size));
      write.pages.push_back({part, Encoding::kSnapshot, memory_.back()});
    }
  }
  void set_owner(const SaltId& owner) {
    for (ChunkWrite& write : chunks_) write.owner = owner;
  }
  [[nodiscard]] std::span<const ChunkWrite> chunks() const { return chunks_; }
  [[nodiscard]] const std::vector<std::int32_t>& tokens() const { return tokens_; }
  [[nodiscard]] std::uint64_t bytes() const {
    std::uint64_t sum = 0;
    for (const auto& page : memory_) sum += page.size();
    return sum;
  }

 private:
  std::vector<std::int32_t> tokens_;
  std::deque<std::vector<std::byte>> memory_;
  std::vector<ChunkWrite> chunks_;
};

// All pages of a match in layer order, as a restore asks for them.
inline std::vector<PageRequest> requests_of(const Match& match) {
  std::vector<PageRequest> out;
  for (const MatchedChunk& m : match.chunks) {
    for (const PageInfo& page : m.chunk.info().pages) {
      out.push_back({m.chunk, page.layer, page.encoding});
    }
  }
  std::stable_sort(out.begin(), out.end(), [](const PageRequest& a, const PageRequest& b) {
    return std::pair(a.layer, a.encoding) < std::pair(b.layer, b.encoding);
  });
  return out;
}

// Changes a byte of a segment, counted from the end of its header on.
inline void damage_byte(const std::string& segment, std::uint64_t at) {
  OpenOptions options;
  options.write = true;
  auto file = Env::real().open_file(segment, options);
  ASSERT_OK(file);
  std::array<std::byte, 1> byte{};
  at += 4096;
  ASSERT_OK((*file)->read_at(at, byte));
  byte[0] ^= std::byte{0x5a};
  ASSERT_OK((*file)->write_at(at, byte));
}

struct ReadBack {
  std::size_t good = 0;
  std::vector<Status> failed;
};

// Reads every page of a match. Bytes that are delivered as good must be the right ones.
inline ReadBack read_back(Store& store, const Match& match, ReaderOptions options = {}) {
  ReadBack out;
  if (options.ring_bytes == ReaderOptions().ring_bytes) options.ring_bytes = 1 << 20;
  auto reader = store.new_reader(options);
  EXPECT_OK(reader);
  if (!reader.ok()) return out;
  const auto requests = requests_of(match);
  EXPECT_OK((*reader)->submit(requests));
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const auto view = (*reader)->next();
    EXPECT_OK(view);
    if (!view.ok()) return out;
    EXPECT_EQ(view->index, i);
    if (view->status.ok()) {
      const ChunkInfo& info = requests[i].chunk.info();
      const auto expected =
          page_bytes_of(info.parent, info.tokens, requests[i].layer, requests[i].encoding,
                        view->bytes.size() / info.tokens.size());
      EXPECT_TRUE(
          std::equal(expected.begin(), expected.end(), view->bytes.begin(), view->bytes.end()))
          << "wrong bytes delivered as good";
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(view->bytes.data()) % kPageAlignment, 0U);
      ++out.good;
    } else {
      EXPECT_TRUE(view->bytes.empty());
      out.failed.push_back(view->status);
    }
    (*reader)->release(i);
  }
  EXPECT_EQ((*reader)->next().code(), Code::kOutOfRange);
  return out;
}

// The tokens of a match must be the wanted ones.
inline void expect_prefix(const Match& match, std::span<const std::int32_t> tokens) {
  std::uint64_t at = 0;
  ASSERT_LE(match.n_tokens, tokens.size());
  for (const MatchedChunk& m : match.chunks) {
    ASSERT_LE(m.usable_rows, m.chunk.info().tokens.size());
    for (std::uint32_t i = 0; i < m.usable_rows; ++i) {
      ASSERT_EQ(m.chunk.info().tokens[i], tokens[at + i]);
    }
    at += m.usable_rows;
  }
  EXPECT_EQ(at, match.n_tokens);
}

inline StoreKey key_of(std::uint8_t seed) {
  StoreKey key;
  for (std::size_t i = 0; i < key.bytes.size(); ++i) {
    key.bytes[i] = static_cast<std::uint8_t>(seed * i + 1);
  }
  return key;
}

// The options that most tests begin with. HCACHE_TEST_STORE_KEY in the environment: their stores
// are encrypted.
struct TestOptions : StoreOptions {
  TestOptions() {
    if (std::getenv("HCACHE_TEST_STORE_KEY") != nullptr) key = key_of(7);
  }
};

inline std::unique_ptr<Store> open_store(Env& env, const StoreOptions& options) {
  auto store = Store::open(env, options);
  EXPECT_OK(store);
  return store.ok() ? std::move(*store) : nullptr;
}

}  // namespace hcache::store::testing
