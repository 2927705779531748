// Packed pages: the page again to the bit, and nothing but an error from anything else.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "packed_kv.h"

namespace hcache::state {
namespace {

using Bytes = std::vector<std::byte>;

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
      const Bytes packed = packer.pack(page, packable_bytes(type), n_rows);
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
  const Bytes packed = KvPacker().pack(page, 2, kRows);
  EXPECT_LT(static_cast<double>(packed.size()), 0.89 * static_cast<double>(page.size()));
}

TEST(PackedKv, LeavesNoiseAsItIs) {
  std::mt19937 random(1);
  Bytes page(2 * kRows * 64);
  for (std::byte& b : page) b = static_cast<std::byte>(random());
  EXPECT_TRUE(KvPacker().pack(page, 2, kRows).empty());
}

TEST(PackedKv, ZerosTakeNextToNothing) {
  const Bytes page(2 * 2 * kRows * 192);
  KvPacker packer;
  const Bytes packed = packer.pack(page, 2, kRows);
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

// A store checks what it reads; this is for what passes all the same.
TEST(PackedKv, AnythingElseIsAnError) {
  KvPacker packer;
  const Bytes page = normal_page(GGML_TYPE_F16, kRows, 16, 5);
  const Bytes packed = packer.pack(page, 2, kRows);
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
