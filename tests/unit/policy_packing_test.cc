// Whether K and V are worth packing.
#include <gtest/gtest.h>

#include "policy/packing.h"

namespace hcache::policy {
namespace {

constexpr int32_t kLayers = 8;
constexpr int64_t kKvBytes = 4000;

// Copying a row takes a microsecond.
RestoreCosts costs(double link_bytes_per_s) {
  LayerCosts layer;
  layer.project = CostCurve::affine(0, 1e-3);
  layer.load_kv = CostCurve::affine(0, 1e-6);
  layer.dense = CostCurve::affine(0, 1e-3);
  layer.attn_per_key = CostCurve::affine(0, 1e-9);
  layer.hidden_bytes = kKvBytes;
  layer.kv_bytes = kKvBytes;
  RestoreCosts costs;
  costs.n_layer = kLayers;
  costs.layers.assign(kLayers, layer);
  costs.link.bytes_per_s = link_bytes_per_s;
  return costs;
}

const std::vector<Encoding> kAllKv(kLayers, kHasKv);
constexpr KvPacking kPacking{.ratio = 0.85, .unpack_row_s = 4e-6};

bool pays(double link_bytes_per_s, const std::vector<Encoding>& layers = kAllKv,
          bool was_packed = false, const KvPacking& packing = kPacking) {
  SaveRequest request;
  request.new_tokens = 0;
  const auto result = packing_pays(costs(link_bytes_per_s), request, layers, packing, was_packed);
  EXPECT_TRUE(result.ok()) << result.status().to_string();
  return result.ok() && *result;
}

// A row comes in 4 us at 1 GB/s, and takes 5 to unpack and copy: faster links gain nothing.
TEST(Packing, PaysOverSlowLinksAlone) {
  EXPECT_TRUE(pays(1e8));
  EXPECT_TRUE(pays(5e8));
  EXPECT_FALSE(pays(2e9));
  EXPECT_FALSE(pays(1e10));
}

// New tokens are computed beside the reads: where that takes longer, fewer bytes gain nothing.
TEST(Packing, PaysNotWhereComputingTakesLonger) {
  SaveRequest request;
  request.new_tokens = 512;
  EXPECT_FALSE(packing_pays(costs(5e8), request, kAllKv, kPacking, false).value());
}

TEST(Packing, PaysNowhereWithoutKvOrWithoutGain) {
  EXPECT_FALSE(pays(1e8, std::vector<Encoding>(kLayers, kHasHidden)));
  EXPECT_FALSE(pays(1e8, kAllKv, false, {}));
  EXPECT_FALSE(pays(1e8, kAllKv, true, {.ratio = 1, .unpack_row_s = 4e-6}));
}

TEST(Packing, StaysWhileItIsNoSlower) {
  // Of a hundredth of the time.
  const KvPacking little{.ratio = 0.995, .unpack_row_s = 1e-9};
  EXPECT_FALSE(pays(1e8, kAllKv, false, little));
  EXPECT_TRUE(pays(1e8, kAllKv, true, little));
  EXPECT_FALSE(pays(1e10, kAllKv, true));
}

TEST(Packing, CostsOfAShare) {
  const RestoreCosts plain = costs(1e9);
  const RestoreCosts half = with_packed(plain, {.share = 0.5, .ratio = 0.8}, 4e-6);
  EXPECT_EQ(half.layer(3).kv_bytes, 3600);
  EXPECT_EQ(half.layer(3).hidden_bytes, kKvBytes);
  EXPECT_DOUBLE_EQ(half.layer(3).load_kv.at(100), 300e-6);
  const RestoreCosts none = with_packed(plain, {}, 4e-6);
  EXPECT_EQ(none.layer(0).kv_bytes, kKvBytes);
  EXPECT_DOUBLE_EQ(none.layer(0).load_kv.at(100), 100e-6);
}

TEST(Packing, ModesHaveNames) {
  for (const PackMode mode : {PackMode::kAuto, PackMode::kOn, PackMode::kOff}) {
    EXPECT_EQ(*parse_pack_mode(pack_mode_name(mode)), mode);
  }
  EXPECT_EQ(parse_pack_mode("zip").code(), Code::kInvalidArgument);
}

TEST(CostCurve, WithMoreForEachRow) {
  EXPECT_DOUBLE_EQ(CostCurve::affine(1, 2).with_row_s(3).at(10), 51);
  const CostCurve table = CostCurve::table({{1, 1.0}, {10, 5.0}}).value().with_row_s(0.5);
  EXPECT_DOUBLE_EQ(table.at(1), 1.5);
  EXPECT_DOUBLE_EQ(table.at(10), 10);
  EXPECT_DOUBLE_EQ(table.at(19), 18.5);
}

// By what is allowed, by what the link makes of it, and by what was chosen before.
TEST(Rounding, IsChosenWhereItIsAllowedAndPays) {
  const KvPackings packings = {.lossless = {.ratio = 0.87, .unpack_row_s = 2e-7},
                               .q8_0 = {.ratio = 0.53, .unpack_row_s = 5e-7},
                               .q4_0 = {.ratio = 0.28, .unpack_row_s = 5e-7}};
  const RoundingKl kl = {.q8_0 = 0.001, .q4_0 = 0.05};
  SaveRequest request;
  request.mode = SaveMode::kKv;
  request.new_tokens = 0;
  const auto choose = [&](double link, double most_kl, PackMode in_force) {
    return choose_rounding(costs(link), request, packings, kl, most_kl, in_force).value();
  };
  constexpr double kSlow = 30e6;
  constexpr double kFast = 1e12;
  EXPECT_EQ(choose(kSlow, 0.0001, PackMode::kAuto), PackMode::kAuto) << "none is exact enough";
  EXPECT_EQ(choose(kSlow, 0.01, PackMode::kAuto), PackMode::kQ8_0);
  EXPECT_EQ(choose(kSlow, 0.1, PackMode::kAuto), PackMode::kQ4_0);
  EXPECT_EQ(choose(kFast, 0.1, PackMode::kAuto), PackMode::kAuto) << "unpacking costs more";
  // What was chosen stays unless much is won, or it is no longer allowed.
  EXPECT_EQ(choose(kSlow, 0.01, PackMode::kQ4_0), PackMode::kQ8_0);
  EXPECT_EQ(choose(kSlow, 0.1, PackMode::kQ8_0), PackMode::kQ4_0) << "half of the bytes";
  EXPECT_EQ(choose(kSlow, 0.0001, PackMode::kQ8_0), PackMode::kAuto);
}

}  // namespace
}  // namespace hcache::policy
