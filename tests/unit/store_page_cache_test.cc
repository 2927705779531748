// Which pages stay in host memory.

#include <gtest/gtest.h>

#include <vector>

#include "page_cache.h"

namespace hcache::store {
namespace {

using policy::EvictPolicy;

ChunkId chunk(uint8_t number) {
  ChunkId id;
  id.bytes[0] = number;
  return id;
}

// Three layers of a chunk, a hundred bytes each.
void put(PageCache& cache, uint8_t number, uint8_t parent = 0) {
  for (uint16_t layer = 0; layer < 3; ++layer) {
    const std::vector<std::byte> bytes(100, std::byte{number});
    cache.insert({chunk(number), layer, Encoding::kKv, 7}, chunk(parent), bytes);
  }
}

int pages_of(PageCache& cache, uint8_t number) {
  int found = 0;
  for (uint16_t layer = 0; layer < 3; ++layer) {
    const auto page = cache.find({chunk(number), layer, Encoding::kKv, 7});
    if (page == nullptr) continue;
    EXPECT_EQ(page->size(), 100U);
    EXPECT_EQ(page->data()[99], std::byte{number});
    ++found;
  }
  return found;
}

TEST(PageCache, KeepsWholeChunksTheLastUsedLongest) {
  PageCache cache(Env::real(), 1000, EvictPolicy::kLru);
  for (const uint8_t number : {1, 2, 3}) put(cache, number);
  put(cache, 4);
  EXPECT_EQ(pages_of(cache, 1), 0);
  for (const uint8_t number : {2, 3, 4}) EXPECT_EQ(pages_of(cache, number), 3) << int{number};
  StoreStat stat;
  cache.describe(&stat);
  EXPECT_EQ(stat.dram_bytes, 900U);
  EXPECT_EQ(stat.dram_hits, 9U);
  EXPECT_EQ(stat.dram_misses, 3U);
  cache.clear();
  cache.describe(&stat);
  EXPECT_EQ(stat.dram_bytes, 0U);
}

TEST(PageCache, AChunkGoesBeforeTheOneThatItContinues) {
  PageCache cache(Env::real(), 1000, EvictPolicy::kLru);
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
  PageCache cache(Env::real(), 1000, EvictPolicy::kSchedulerAware);
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

TEST(PageCache, APageWithAnotherChecksumTakesTheOldOnesPlace) {
  PageCache cache(Env::real(), 1000, EvictPolicy::kLru);
  put(cache, 1);
  const std::vector<std::byte> bytes(50, std::byte{9});
  cache.insert({chunk(1), 0, Encoding::kKv, 8}, {}, bytes);
  EXPECT_EQ(cache.find({chunk(1), 0, Encoding::kKv, 7}), nullptr);
  EXPECT_NE(cache.find({chunk(1), 0, Encoding::kKv, 8}), nullptr);
  StoreStat stat;
  cache.describe(&stat);
  EXPECT_EQ(stat.dram_bytes, 250U);
}

TEST(PageCache, TwoChunksThatLookAlikeDoNotMix) {
  PageCache cache(Env::real(), 1000, EvictPolicy::kLru);
  ChunkId twin = chunk(1);
  twin.bytes[15] = 1;
  put(cache, 1);
  const std::vector<std::byte> bytes(100);
  cache.insert({twin, 0, Encoding::kKv, 7}, {}, bytes);
  EXPECT_EQ(cache.find({twin, 0, Encoding::kKv, 7}), nullptr);
  EXPECT_EQ(pages_of(cache, 1), 3);
  const std::vector<std::byte> large(1001);
  cache.insert({chunk(2), 0, Encoding::kKv, 7}, {}, large);
  EXPECT_EQ(pages_of(cache, 1), 3);
}

}  // namespace
}  // namespace hcache::store
