// What a miss of saved rows costs.

#include <gtest/gtest.h>

#include "policy/hardware_plan.h"
#include "policy/miss_cost.h"

namespace hcache::policy {
namespace {

RestoreCosts costs_of(const char* model) {
  HardwareSetup setup;
  setup.device = find_device("a100").value();
  setup.model = find_model(model).value();
  return hardware_costs(setup).value();
}

SavedRows as_kv(const RestoreCosts& costs, int64_t first, int64_t rows) {
  return {.first = first,
          .rows = rows,
          .bytes = static_cast<double>(costs.layers[0].kv_bytes * costs.n_layer * rows),
          .copied = costs.n_layer};
}

TEST(MissCost, ChunksAddUpToThePrefill) {
  const RestoreCosts costs = costs_of("llama2-7b");
  double chunks_s = 0;
  for (int64_t first = 0; first < 4096; first += 64) {
    chunks_s += recompute_rows_s(costs, first, 64);
  }
  const double prefill_s =
      costs.n_layer * prefill_layer_s(costs.layers[0], 4096, 0, costs.batch_rows);
  EXPECT_NEAR(chunks_s, prefill_s, 1e-6 * prefill_s);
}

TEST(MissCost, RowsFurtherBackAreDearer) {
  const TierCosts tier{.costs = costs_of("llama2-7b"), .bytes_per_s = 32e9};
  double before_s = 0;
  for (const int64_t first : {0, 4096, 65536}) {
    const double s = tier.miss_s(as_kv(tier.costs, first, 64));
    EXPECT_GT(s, before_s);
    before_s = s;
  }
}

TEST(MissCost, WhatATierBelowHasCostsTheSlowerRead) {
  const RestoreCosts costs = costs_of("llama2-7b");
  const SavedRows rows = as_kv(costs, 1024, 64);
  const TierCosts memory{.costs = costs, .bytes_per_s = 32e9, .below_bytes_per_s = 16e9};
  EXPECT_NEAR(memory.miss_s(rows), rows.bytes / 16e9 - rows.bytes / 32e9, 1e-9);
  // Slower than computing again: then that is done.
  const TierCosts over_modem{.costs = costs, .below_bytes_per_s = 1e6};
  EXPECT_DOUBLE_EQ(over_modem.without_s(rows), recompute_rows_s(costs, 1024, 64));
  const TierCosts useless{.costs = costs, .bytes_per_s = 1e6};
  EXPECT_EQ(useless.miss_s(rows), 0);
}

// Hidden states take their products.
TEST(MissCost, ProjectingCountsWhereReadingIsFaster) {
  const RestoreCosts costs = costs_of("llama2-7b");
  SavedRows rows = as_kv(costs, 0, 512);
  rows.projected = costs.n_layer;
  rows.copied = 0;
  EXPECT_NEAR(restore_rows_s(costs, rows, 0),
              costs.n_layer * sliced_s(costs.layers[0].project, 512, costs.slice_rows), 1e-9);
}

TEST(MissCost, OfSeveralDevicesTheSlowestCounts) {
  RestoreCosts costs = costs_of("llama2-7b");
  SavedRows rows = as_kv(costs, 0, 512);
  rows.projected = costs.n_layer;
  rows.copied = 0;
  const double one = restore_rows_s(costs, rows, 0);
  costs.device_layers = {costs.n_layer / 4, costs.n_layer - costs.n_layer / 4};
  EXPECT_NEAR(restore_rows_s(costs, rows, 0), 0.75 * one, 1e-9);
}

}  // namespace
}  // namespace hcache::policy
