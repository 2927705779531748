// Which pages stay in host memory.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "page_cache.h"

namespace hcache::store {
namespace {

using policy::EvictPolicy;

PageCache cache_of(uint64_t bytes, EvictPolicy policy) {
  return {Env::real(), bytes, {.evict = policy}, PageMemory::map(bytes, "").value()};
}

ChunkId chunk(uint8_t number) {
  ChunkId id;
  id.bytes[0] = number;
  return id;
}

ChunkInfo behind(uint8_t parent) {
  ChunkInfo info;
  info.parent = chunk(parent);
  return info;
}

// Three layers of a chunk, a hundred bytes each.
void put(PageCache& cache, uint8_t number, uint8_t parent = 0) {
  for (uint16_t layer = 0; layer < 3; ++layer) {
    const std::vector<std::byte> bytes(100, std::byte{number});
    cache.insert({chunk(number), layer, Encoding::kKv, 7}, behind(parent), bytes);
  }
}

int pages_of(PageCache& cache, uint8_t number) {
  int found = 0;
  for (uint16_t layer = 0; layer < 3; ++layer) {
    const auto page = cache.find({chunk(number), layer, Encoding::kKv, 7});
    if (!page) continue;
    EXPECT_EQ(page.bytes.size(), 100U);
    EXPECT_EQ(page.bytes[99], std::byte{number});
    ++found;
  }
  return found;
}

TEST(PageCache, KeepsWholeChunksTheLastUsedLongest) {
  PageCache cache = cache_of(1000, EvictPolicy::kLru);
  for (const uint8_t number : {1, 2, 3}) put(cache, number);
  put(cache, 4);
  EXPECT_EQ(pages_of(cache, 1), 0);
  for (const uint8_t number : {2, 3, 4}) EXPECT_EQ(pages_of(cache, number), 3) << int{number};
  StoreStat stat;
  cache.describe(&stat);
  EXPECT_EQ(stat.dram_bytes, 900U);
  EXPECT_EQ(stat.dram_hits, 9U);
  EXPECT_EQ(stat.dram_misses, 3U);
  const std::vector<ChunkId> gone = {chunk(1), chunk(3), chunk(4)};
  cache.erase(gone);
  cache.describe(&stat);
  EXPECT_EQ(stat.dram_bytes, 300U);
  EXPECT_EQ(pages_of(cache, 2), 3);
}

TEST(PageCache, AChunkGoesBeforeTheOneThatItContinues) {
  PageCache cache = cache_of(1000, EvictPolicy::kLru);
  put(cache, 1);
  put(cache, 2, 1);
  put(cache, 3, 2);
  put(cache, 4);
  EXPECT_EQ(pages_of(cache, 3), 0);
  EXPECT_EQ(pages_of(cache, 1), 3);
  put(cache, 5);
  EXPECT_EQ(pages_of(cache, 2), 0);
  EXPECT_EQ(pages_of(cache, 1), 3);
}

TEST(PageCache, WhatTheQueueWantsStays) {
  PageCache cache = cache_of(1000, EvictPolicy::kSchedulerAware);
  for (const uint8_t number : {1, 2, 3}) put(cache, number);
  cache.want(20, std::vector{chunk(1)});
  cache.want(10, std::vector{chunk(2), chunk(4)});
  put(cache, 4);  // wanted before it comes
  EXPECT_EQ(pages_of(cache, 3), 0);
  put(cache, 5);                     // nobody wants it, all others are wanted
  EXPECT_LT(pages_of(cache, 5), 3);  // what is left of the room may hold some of it
  cache.want(5, std::vector{chunk(6)});
  put(cache, 6);
  EXPECT_EQ(pages_of(cache, 1), 0);  // its turn comes last
  cache.unwant(10);
  put(cache, 7);
  EXPECT_EQ(pages_of(cache, 2), 0);
  EXPECT_EQ(pages_of(cache, 6), 3);
}

// K and V are only read, hidden states are multiplied as well: less is saved by having them here.
TEST(PageCache, CostAwareKeepsWhatMemorySavesMostOf) {
  PageCache cache = cache_of(300, EvictPolicy::kCostAware);
  policy::LayerCosts layer;
  layer.dense = policy::CostCurve::affine(0, 1);
  layer.project = policy::CostCurve::affine(0, 1e-3);
  policy::RestoreCosts costs;
  costs.n_layer = 1;
  costs.layers = {layer};
  cache.set_costs({.costs = costs, .below_bytes_per_s = 1000});
  const auto put_page = [&](uint8_t number, Encoding encoding) {
    ChunkInfo info;
    info.tokens.resize(50);
    info.pages = {{0, encoding, 100}};
    const std::vector<std::byte> bytes(100);
    cache.insert({chunk(number), 0, encoding, 7}, info, bytes);
  };
  put_page(1, Encoding::kKv);
  put_page(2, Encoding::kHiddenQ8_1);
  put_page(3, Encoding::kKv);
  put_page(4, Encoding::kKv);
  EXPECT_TRUE(cache.find({chunk(1), 0, Encoding::kKv, 7}));
  EXPECT_FALSE(cache.find({chunk(2), 0, Encoding::kHiddenQ8_1, 7}));
  EXPECT_TRUE(cache.find({chunk(3), 0, Encoding::kKv, 7}));
}

TEST(PageCache, APageWithAnotherChecksumTakesTheOldOnesPlace) {
  PageCache cache = cache_of(1000, EvictPolicy::kLru);
  put(cache, 1);
  const std::vector<std::byte> bytes(50, std::byte{9});
  cache.insert({chunk(1), 0, Encoding::kKv, 8}, {}, bytes);
  EXPECT_FALSE(cache.find({chunk(1), 0, Encoding::kKv, 7}));
  EXPECT_TRUE(cache.find({chunk(1), 0, Encoding::kKv, 8}));
  StoreStat stat;
  cache.describe(&stat);
  EXPECT_EQ(stat.dram_bytes, 250U);
}

TEST(PageCache, TwoChunksThatLookAlikeDoNotMix) {
  PageCache cache = cache_of(1000, EvictPolicy::kLru);
  ChunkId twin = chunk(1);
  twin.bytes[15] = 1;
  put(cache, 1);
  const std::vector<std::byte> bytes(100);
  cache.insert({twin, 0, Encoding::kKv, 7}, {}, bytes);
  EXPECT_FALSE(cache.find({twin, 0, Encoding::kKv, 7}));
  EXPECT_EQ(pages_of(cache, 1), 3);
  const std::vector<std::byte> large(1001);
  cache.insert({chunk(2), 0, Encoding::kKv, 7}, {}, large);
  EXPECT_EQ(pages_of(cache, 1), 3);
}

TEST(PageCache, WhatIsBeingReadStaysReadable) {
  PageCache cache = cache_of(64 << 10, EvictPolicy::kLru);
  const std::vector<std::byte> large(30 << 10, std::byte{1});
  cache.insert({chunk(1), 0, Encoding::kKv, 7}, {}, large);
  cache.insert({chunk(2), 0, Encoding::kKv, 7}, {}, large);
  HeldBytes held = cache.find({chunk(1), 0, Encoding::kKv, 7});
  ASSERT_TRUE(held);
  const auto drop_all = [&] { cache.erase(std::vector{chunk(1), chunk(2), chunk(3), chunk(4)}); };
  drop_all();
  // The piece is taken as long as somebody reads it: there is room for one more, not for two.
  cache.insert({chunk(3), 0, Encoding::kKv, 7}, {}, large);
  cache.insert({chunk(4), 0, Encoding::kKv, 7}, {}, large);
  const auto holds = [&](uint8_t number) {
    return static_cast<bool>(cache.find({chunk(number), 0, Encoding::kKv, 7}));
  };
  EXPECT_NE(holds(3), holds(4));
  EXPECT_TRUE(std::ranges::equal(held.bytes, large));
  held = {};
  drop_all();
  cache.insert({chunk(5), 0, Encoding::kKv, 7}, {}, large);
  cache.insert({chunk(6), 0, Encoding::kKv, 7}, {}, large);
  EXPECT_TRUE(holds(5));
  EXPECT_TRUE(holds(6));
}

// Pages of several sizes come and go: none is written over, and what fits at first still fits at
// the end.
TEST(PageCache, MemoryIsNotLostToPieces) {
  constexpr uint64_t kBytes = 1 << 20;
  PageCache cache = cache_of(kBytes, EvictPolicy::kLru);
  std::mt19937 random(1);
  int found = 0;
  for (int i = 0; i < 20'000; ++i) {
    ChunkId id;
    const uint32_t number = random() % 500;
    std::memcpy(id.bytes.data(), &number, sizeof number);
    const std::vector<std::byte> bytes(1000 + number % 7 * 800, std::byte(number % 251));
    const PageKey key{id, static_cast<uint16_t>(random() % 4), Encoding::kKv, number};
    cache.insert(key, {}, bytes);
    const HeldBytes held = cache.find(key);
    if (!held) continue;  // its chunk was the one to go
    found++;
    ASSERT_TRUE(std::ranges::equal(held.bytes, bytes));
  }
  EXPECT_GT(found, 15'000);
  StoreStat stat;
  cache.describe(&stat);
  EXPECT_GT(stat.dram_bytes, kBytes / 4 * 3);
  EXPECT_LE(stat.dram_bytes, kBytes);
}

}  // namespace
}  // namespace hcache::store
