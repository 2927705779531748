// Packed pages: the page again to the bit, and nothing but an error from anything else.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "packed_kv.h"
#include "rounded_f16.h"

namespace hcache::state {
namespace {

using Bytes = std::vector<std::byte>;
using Row = std::vector<float>;

constexpr size_t kRows = 64;

// Rows as attention has them: each channel has a scale of its own.
Bytes normal_page(ggml_type type, size_t n_rows, size_t width, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> scales(2 * width);
  for (float& s : scales) s = std::exp(normal(random));
  std::vector<float> values(2 * n_rows * width);
  for (size_t i = 0; i < values.size(); ++i) {
    const size_t channel = i / (n_rows * width) * width + i % width;
    values[i] = scales[channel] * normal(random);
  }
  const auto n = static_cast<int64_t>(values.size());
  Bytes page(ggml_row_size(type, n));
  if (type == GGML_TYPE_F32) {
    std::memcpy(page.data(), values.data(), page.size());
  } else {
    ggml_get_type_traits(type)->from_float_ref(values.data(), page.data(), n);
  }
  return page;
}

TEST(PackedKv, IsThePageAgain) {
  KvPacker packer;
  for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_F32}) {
    for (const size_t n_rows : {size_t{1}, size_t{7}, kRows}) {
      SCOPED_TRACE(std::string(ggml_type_name(type)) + " " + std::to_string(n_rows));
      const Bytes page = normal_page(type, n_rows, 192, static_cast<unsigned>(n_rows));
      const Bytes packed = packer.pack(page, type, policy::PackMode::kOn, n_rows);
      ASSERT_FALSE(packed.empty());
      EXPECT_LT(packed.size(), page.size());
      EXPECT_EQ(packed.size() % n_rows, 0U);
      Bytes again(page.size(), std::byte{0xEE});
      const Status status = packer.unpack(packed, again);
      EXPECT_TRUE(status.ok()) << status.to_string();
      EXPECT_EQ(again, page);
    }
  }
}

TEST(PackedKv, TakesAnEighthOffNormalRows) {
  const Bytes page = normal_page(GGML_TYPE_F16, kRows, 192, 3);
  const Bytes packed = KvPacker().pack(page, GGML_TYPE_F16, policy::PackMode::kOn, kRows);
  EXPECT_LT(static_cast<double>(packed.size()), 0.89 * static_cast<double>(page.size()));
}

TEST(PackedKv, LeavesNoiseAsItIs) {
  std::mt19937 random(1);
  Bytes page(2 * kRows * 64);
  for (std::byte& b : page) b = static_cast<std::byte>(random());
  EXPECT_TRUE(KvPacker().pack(page, GGML_TYPE_F16, policy::PackMode::kOn, kRows).empty());
}

TEST(PackedKv, ZerosTakeNextToNothing) {
  const Bytes page(2 * 2 * kRows * 192);
  KvPacker packer;
  const Bytes packed = packer.pack(page, GGML_TYPE_F16, policy::PackMode::kOn, kRows);
  ASSERT_FALSE(packed.empty());
  EXPECT_LE(packed.size(), 2 * kRows);
  Bytes again(page.size(), std::byte{1});
  EXPECT_TRUE(packer.unpack(packed, again).ok());
  EXPECT_EQ(again, page);
}

TEST(PackedKv, TypesWhoseBytesAreAlike) {
  EXPECT_EQ(packable_bytes(GGML_TYPE_F16), 2U);
  EXPECT_EQ(packable_bytes(GGML_TYPE_BF16), 2U);
  EXPECT_EQ(packable_bytes(GGML_TYPE_F32), 4U);
  EXPECT_EQ(packable_bytes(GGML_TYPE_Q8_0), 0U);
}

Row values_of(const Bytes& page, ggml_type type) {
  Row values(page.size() / packable_bytes(type));
  if (type == GGML_TYPE_F32) {
    std::memcpy(values.data(), page.data(), page.size());
  } else {
    ggml_get_type_traits(type)->to_float(page.data(), values.data(),
                                         static_cast<int64_t>(values.size()));
  }
  return values;
}

// A block of 32 values is as exact as its largest value allows.
TEST(PackedKv, RoundsToSoManyBits) {
  struct Case {
    policy::PackMode mode;
    double bytes;  // of a block of 32
    double steps;  // the largest value over the largest error
  };
  KvPacker packer;
  for (const Case& c :
       {Case{policy::PackMode::kQ8_0, 34, 254}, Case{policy::PackMode::kQ4_0, 18, 8}}) {
    for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_F32}) {
      for (const size_t n_rows : {size_t{1}, size_t{7}, kRows}) {
        SCOPED_TRACE(std::string(ggml_type_name(type)) + " " + std::to_string(n_rows));
        const Bytes page = normal_page(type, n_rows, 192, static_cast<unsigned>(n_rows));
        const Bytes packed = packer.pack(page, type, c.mode, n_rows);
        ASSERT_FALSE(packed.empty());
        const Row values = values_of(page, type);
        EXPECT_LE(static_cast<double>(packed.size()),
                  c.bytes / 32 * static_cast<double>(values.size()) + 8 + 64);
        EXPECT_EQ(packed.size() % n_rows, 0U);
        Bytes again(page.size(), std::byte{0xEE});
        const Status status = packer.unpack(packed, again);
        ASSERT_TRUE(status.ok()) << status.to_string();
        const Row rounded = values_of(again, type);
        EXPECT_NE(again, page);
        for (size_t i = 0; i < values.size(); i += 32) {
          float top = 0;
          for (size_t j = i; j < i + 32; ++j) top = std::max(top, std::abs(values[j]));
          for (size_t j = i; j < i + 32; ++j) {
            // Half a step, and what the scale and the element are rounded by; four bits reach
            // from -8 to 7 steps, so that the largest value's opposite is a whole one off.
            EXPECT_NEAR(rounded[j], values[j], 1.02 * top / c.steps + 0.005 * top) << j;
          }
        }
      }
    }
  }
}

// One pass or two: the same bits, subnormal numbers and those that F16 can't hold included.
TEST(PackedKv, RoundedValuesAreThoseOfEveryMachine) {
  for (const ggml_type type : {GGML_TYPE_Q8_0, GGML_TYPE_Q4_0}) {
    const size_t block_bytes = ggml_type_size(type);
    constexpr size_t kScales = 0x7C00;  // every finite one, of both signs
    Bytes blocks(2 * kScales * block_bytes);
    std::mt19937 random(7);
    for (std::byte& byte : blocks) byte = static_cast<std::byte>(random());
    for (size_t i = 0; i < 2 * kScales; ++i) {
      const auto scale = static_cast<uint16_t>(i < kScales ? i : i - kScales + 0x8000);
      std::memcpy(&blocks[i * block_bytes], &scale, sizeof(scale));
    }
    const size_t n = 2 * kScales * 32;
    std::vector<float> values(n);
    ggml_get_type_traits(type)->to_float(blocks.data(), values.data(), static_cast<int64_t>(n));
    Bytes expected(2 * n);
    ggml_get_type_traits(GGML_TYPE_F16)
        ->from_float_ref(values.data(), expected.data(), static_cast<int64_t>(n));
    Bytes halves(2 * n);
    if (!rounded_to_f16(type, blocks, halves)) GTEST_SKIP() << "this machine has no such pass";
    EXPECT_TRUE(halves == expected) << ggml_type_name(type);
    EXPECT_FALSE(rounded_to_f16(GGML_TYPE_Q5_0, blocks, halves));
  }
}

TEST(PackedKv, LeavesAloneWhatCanNotBeRounded) {
  const Bytes odd(2 * 2 * 3 * 20);  // 120 values
  EXPECT_TRUE(KvPacker().pack(odd, GGML_TYPE_F16, policy::PackMode::kQ8_0, 3).empty());
  const Bytes tiny(2 * 32);  // the head makes it longer
  EXPECT_TRUE(KvPacker().pack(tiny, GGML_TYPE_F16, policy::PackMode::kQ8_0, 64).empty());
}

TEST(PackedKv, ADamagedRoundedPageIsAnError) {
  KvPacker packer;
  const Bytes page = normal_page(GGML_TYPE_F16, kRows, 16, 5);
  const Bytes packed = packer.pack(page, GGML_TYPE_F16, policy::PackMode::kQ4_0, kRows);
  ASSERT_FALSE(packed.empty());
  Bytes out(page.size());
  const size_t needed = 8 + 18 * page.size() / 2 / 32;
  for (size_t n = 0; n < needed; ++n) {
    EXPECT_EQ(packer.unpack(std::span(packed).first(n), out).code(), Code::kDataLoss) << n;
  }
  for (const size_t byte : {size_t{0}, size_t{1}, size_t{2}, size_t{4}, size_t{5}}) {
    Bytes changed = packed;
    changed[byte] ^= std::byte{0x40};
    EXPECT_EQ(packer.unpack(changed, out).code(), Code::kDataLoss) << byte;
  }
  // The other width of block needs more bytes than there are.
  Bytes wider = packed;
  wider[2] = std::byte{8};
  EXPECT_EQ(packer.unpack(wider, out).code(), Code::kDataLoss);
  EXPECT_TRUE(packer.unpack(packed, out).ok());
}

// A store checks what it reads; this is for what passes all the same.
TEST(PackedKv, AnythingElseIsAnError) {
  KvPacker packer;
  const Bytes page = normal_page(GGML_TYPE_F16, kRows, 16, 5);
  const Bytes packed = packer.pack(page, GGML_TYPE_F16, policy::PackMode::kOn, kRows);
  ASSERT_FALSE(packed.empty());
  Bytes out(page.size());
  const auto expect_lost = [&](std::span<const std::byte> from, std::span<std::byte> to) {
    EXPECT_EQ(packer.unpack(from, to).code(), Code::kDataLoss);
  };
  expect_lost({}, out);
  for (size_t n = 0; n < packed.size() - kRows; ++n) expect_lost(std::span(packed).first(n), out);
  expect_lost(packed, std::span(out).first(out.size() - 2));
  Bytes longer(page.size() + 2);
  expect_lost(packed, longer);
  for (const size_t byte : {size_t{0}, size_t{1}, size_t{4}, size_t{8}, size_t{12}}) {
    Bytes changed = packed;
    changed[byte] ^= std::byte{0x40};
    expect_lost(changed, out);
  }
  // And it still works.
  EXPECT_TRUE(packer.unpack(packed, out).ok());
  EXPECT_EQ(out, page);
}

}  // namespace
}  // namespace hcache::state
