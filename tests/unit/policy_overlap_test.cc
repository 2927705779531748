// Loading and saving beside computation.

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "policy/overlap.h"

namespace hcache::policy {
namespace {

// AttentionStore's Fig. 6: three layers, loading takes as long as computing.
TEST(Overlap, LoadingHidesBehindComputation) {
  const LayerwiseLoad even{3, 2, 2};
  EXPECT_DOUBLE_EQ(prefill_behind_load_s(even, -1), 12);
  EXPECT_DOUBLE_EQ(prefill_behind_load_s(even, 0), 8);  // the first layer's load alone shows
  EXPECT_DOUBLE_EQ(prefill_behind_load_s(even, 1), 6);
  // Fig. 7: loading takes longer, and every layer waits.
  const LayerwiseLoad slow{3, 4, 2};
  EXPECT_DOUBLE_EQ(prefill_behind_load_s(slow, 0), 14);
  EXPECT_DOUBLE_EQ(prefill_behind_load_s(slow, 1), 10);
  EXPECT_DOUBLE_EQ(prefill_behind_load_s(slow, 2), 6);
}

TEST(Overlap, TheReadBufferIsAsLargeAsItMustBe) {
  EXPECT_EQ(read_buffer_bytes(1e9, 0.5, 0.2), 300'000'000);
  EXPECT_EQ(read_buffer_bytes(1e9, 0.2, 0.5), 0);
  std::mt19937 random(1);
  std::uniform_real_distribution<double> seconds(0.1, 10);
  for (int i = 0; i < 500; ++i) {
    const LayerwiseLoad load{1 + static_cast<int32_t>(random() % 80), seconds(random),
                             seconds(random)};
    constexpr double kBytesPerS = 1e9;
    const double buffer =
        static_cast<double>(read_buffer_bytes(kBytesPerS, load.n_layer * load.load_s,
                                              load.n_layer * load.compute_s)) /
        (kBytesPerS * load.load_s);  // layers
    const double computing = load.n_layer * load.compute_s;
    // The formula leaves out that the last layer computes when all is there: one layer at most.
    const auto enough = static_cast<int32_t>(std::ceil(buffer)) + 1;
    EXPECT_NEAR(prefill_behind_load_s(load, enough), computing, 1e-9);
    if (buffer < 1) continue;
    const auto too_small = static_cast<int32_t>(std::ceil(buffer)) - 1;
    EXPECT_GT(prefill_behind_load_s(load, too_small), computing + 1e-9);
  }
}

TEST(Overlap, WhatIsNotSavedWhenTheLastStepEnds) {
  // Writing is slower than prefilling; 3 x 4 s after the first layer's 1 s, less what follows it.
  EXPECT_DOUBLE_EQ(unsaved_s({3, 1, 4, 0, 0, 0}), 10);
  EXPECT_DOUBLE_EQ(unsaved_s({3, 1, 4, 5, 1, 0.5}), 7.5);  // the steps' own rows come last
  EXPECT_DOUBLE_EQ(unsaved_s({3, 1, 4, 40, 1, 0.5}), 0.5);
  EXPECT_DOUBLE_EQ(unsaved_s({3, 4, 1, 0, 0, 0}), 1);  // the last layer's
}

}  // namespace
}  // namespace hcache::policy
