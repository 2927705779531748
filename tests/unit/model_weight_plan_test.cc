// How many layers stay on the device, and where the others are kept.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

#include "model/streamed_weights.h"

namespace hcache::model {
namespace {

constexpr uint64_t kMiB = 1 << 20;

// Eight layers of 10 MiB beside 5 MiB that belong to none; the third layer is a little larger.
WeightSizes sizes() {
  WeightSizes s;
  s.shared_bytes = 5 * kMiB;
  s.layer_bytes.assign(8, 10 * kMiB);
  s.slot_bytes.assign(8, 10 * kMiB);
  s.layer_bytes[2] = 11 * kMiB;
  s.slot_bytes[2] = 11 * kMiB;
  return s;
}
constexpr uint64_t kAll = 86 * kMiB;
constexpr uint64_t kTwoSlots = 27 * kMiB;

WeightPlan plan(WeightPlace wanted, uint64_t device_bytes, bool limited, bool own_memory = false,
                uint64_t host_bytes = 0) {
  const auto planned = plan_weights(wanted, sizes(),
                                    {.device_limited = limited,
                                     .device_bytes = device_bytes,
                                     .host_bytes = host_bytes,
                                     .own_memory = own_memory});
  EXPECT_TRUE(planned.ok()) << planned.status().to_string();
  return planned.ok() ? *planned : WeightPlan{};
}
void expect(const WeightPlan& plan, WeightPlace place, int n_resident) {
  EXPECT_EQ(weight_place_name(plan.place), weight_place_name(place));
  EXPECT_EQ(plan.n_resident, n_resident);
}

TEST(WeightPlan, AutoStreamsOnlyWhatDoesNotFit) {
  for (const bool limited : {false, true}) {
    expect(plan(WeightPlace::kAuto, kAll, limited), WeightPlace::kResident, 8);
    expect(plan(WeightPlace::kAuto, kTwoSlots, limited), WeightPlace::kDisk, 0);
  }
  // Beside two slots for the largest of the others, the third layer included, two fit.
  expect(plan(WeightPlace::kAuto, kAll - 1, false), WeightPlace::kDisk, 5);
  expect(plan(WeightPlace::kAuto, 47 * kMiB, false), WeightPlace::kDisk, 2);
  expect(plan(WeightPlace::kAuto, 47 * kMiB - 1, false), WeightPlace::kDisk, 1);
}

TEST(WeightPlan, AutoTakesTheHostsMemoryOfDevicesThatHaveTheirOwn) {
  expect(plan(WeightPlace::kAuto, 47 * kMiB, false, true, 61 * kMiB), WeightPlace::kHost, 2);
  expect(plan(WeightPlace::kAuto, 47 * kMiB, false, true, 61 * kMiB - 1), WeightPlace::kDisk, 2);
}

TEST(WeightPlan, AnOrderedPlaceStreamsAllUnlessTheDeviceWasLimited) {
  const uint64_t plenty = std::numeric_limits<uint64_t>::max();
  expect(plan(WeightPlace::kDisk, plenty, false), WeightPlace::kDisk, 0);
  expect(plan(WeightPlace::kDisk, 1, false), WeightPlace::kDisk, 0);
  expect(plan(WeightPlace::kDisk, 47 * kMiB, true), WeightPlace::kDisk, 2);
  expect(plan(WeightPlace::kDisk, kAll, true), WeightPlace::kResident, 8);
  expect(plan(WeightPlace::kHost, 47 * kMiB, true, true), WeightPlace::kHost, 2);
  expect(plan(WeightPlace::kResident, 1, false), WeightPlace::kResident, 8);
}

// An attention block of 4 MiB and a feed-forward block of 6, or 7 in the third layer.
WeightSizes halved_sizes() {
  WeightSizes s = sizes();
  s.half_bytes.assign(8, {4 * kMiB, 6 * kMiB});
  s.half_bytes[2][1] = 7 * kMiB;
  return s;
}

TEST(WeightPlan, LayersAreHalvedWhereTwoDoNotFit) {
  constexpr uint64_t kHalves = 16 * kMiB;
  for (const WeightPlace wanted : {WeightPlace::kAuto, WeightPlace::kDisk}) {
    const auto planned = [&](uint64_t device_bytes) {
      return plan_weights(wanted, halved_sizes(),
                          {.device_limited = true, .device_bytes = device_bytes});
    };
    EXPECT_FALSE(planned(kTwoSlots).value().halves);
    EXPECT_TRUE(planned(kTwoSlots - 1).value().halves);
    EXPECT_TRUE(planned(kHalves).value().halves);
    EXPECT_EQ(planned(kHalves).value().n_resident, 0);
    EXPECT_EQ(planned(kHalves - 1).status().code(), Code::kResourceExhausted);
  }
  // By what is free, where the user has not limited it.
  const auto ordered = [](uint64_t device_bytes) {
    return plan_weights(WeightPlace::kDisk, halved_sizes(), {.device_bytes = device_bytes});
  };
  EXPECT_FALSE(ordered(kTwoSlots).value().halves);
  EXPECT_TRUE(ordered(kTwoSlots - 1).value().halves);
  EXPECT_TRUE(ordered(1).value().halves);
}

TEST(WeightPlan, WhatCantBeIsSaid) {
  const auto code = [](WeightPlace wanted, uint64_t device_bytes) {
    return plan_weights(wanted, sizes(),
                        {.device_limited = true, .device_bytes = device_bytes, .host_bytes = 0})
        .status()
        .code();
  };
  EXPECT_EQ(code(WeightPlace::kResident, kAll - 1), Code::kResourceExhausted);
  EXPECT_EQ(code(WeightPlace::kDisk, kTwoSlots - 1), Code::kResourceExhausted);
  EXPECT_EQ(code(WeightPlace::kAuto, kTwoSlots - 1), Code::kResourceExhausted);
  EXPECT_EQ(code(WeightPlace::kHost, kAll), Code::kInvalidArgument);
  EXPECT_EQ(parse_weight_place("ram").status().code(), Code::kInvalidArgument);
  EXPECT_EQ(parse_weight_place("disk").value(), WeightPlace::kDisk);
}

}  // namespace
}  // namespace hcache::model
