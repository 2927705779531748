#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "base/env.h"
#include "engine/engine.h"
#include "model/device.h"
#include "model/model.h"
#include "policy/save_plan.h"
#include "state/cost_profile.h"
#include "state/identity.h"

namespace hcache::state {
namespace {

using ::testing::HasSubstr;

class TempDir {
 public:
  TempDir() {
    std::string name = (std::filesystem::temp_directory_path() / "hcache-test-XXXXXX").string();
    path_ = mkdtemp(name.data());
  }
  ~TempDir() { std::filesystem::remove_all(path_); }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
};

CostProfile sample_profile() {
  CostProfile p;
  p.key = "model=abc threads=2";
  p.layer.project = policy::CostCurve::table({{16, 0.001}, {512, 0.02}}).value();
  p.layer.load_kv = policy::CostCurve::affine(1e-6, 2e-7);
  p.layer.dense = policy::CostCurve::table({{1, 0.002}, {64, 0.05}, {512, 0.3}}).value();
  p.layer.attn_per_key = policy::CostCurve::table({{64, 3e-6}}).value();
  p.layer.hidden_bytes = 648;
  p.layer.kv_bytes = 768;
  p.finish_s = 0.004;
  p.compute_scale = 1.25;
  p.read_bytes_per_s = 1.7e9;
  p.gemm_flops_per_s = 1.9e11;
  p.packings = {.lossless = {.ratio = 0.875, .unpack_row_s = 3e-7},
                .q8_0 = {.ratio = 0.53, .unpack_row_s = 4e-7},
                .q4_0 = {.ratio = 0.28, .unpack_row_s = 5e-7}};
  return p;
}

void expect_same(const policy::CostCurve& a, const policy::CostCurve& b) {
  for (const int64_t rows : {1, 16, 50, 64, 333, 512, 4096}) {
    EXPECT_DOUBLE_EQ(a.at(rows), b.at(rows)) << rows;
  }
}

TEST(CostProfileFile, RoundTrips) {
  const TempDir dir;
  const CostProfile p = sample_profile();
  ASSERT_TRUE(save_cost_profile(Env::real(), dir.path() + "/profiles", p).ok());
  const Result<CostProfile> q = load_cost_profile(Env::real(), dir.path() + "/profiles", p.key);
  ASSERT_TRUE(q.ok()) << q.status().to_string();
  EXPECT_EQ(q->key, p.key);
  expect_same(q->layer.project, p.layer.project);
  expect_same(q->layer.load_kv, p.layer.load_kv);
  expect_same(q->layer.dense, p.layer.dense);
  expect_same(q->layer.attn_per_key, p.layer.attn_per_key);
  EXPECT_EQ(q->layer.hidden_bytes, p.layer.hidden_bytes);
  EXPECT_EQ(q->layer.kv_bytes, p.layer.kv_bytes);
  EXPECT_DOUBLE_EQ(q->finish_s, p.finish_s);
  EXPECT_DOUBLE_EQ(q->compute_scale, p.compute_scale);
  EXPECT_DOUBLE_EQ(q->read_bytes_per_s, p.read_bytes_per_s);
  EXPECT_DOUBLE_EQ(q->upload_bytes_per_s, p.upload_bytes_per_s);
  EXPECT_DOUBLE_EQ(q->gemm_flops_per_s, p.gemm_flops_per_s);
  for (const auto mode :
       {policy::PackMode::kOn, policy::PackMode::kQ8_0, policy::PackMode::kQ4_0}) {
    EXPECT_DOUBLE_EQ(q->packings.of(mode).ratio, p.packings.of(mode).ratio);
    EXPECT_DOUBLE_EQ(q->packings.of(mode).unpack_row_s, p.packings.of(mode).unpack_row_s);
  }
}

// Each device's layers have costs of their own, which plans are made with.
TEST(CostProfileFile, KeepsEachDevicesCosts) {
  const TempDir dir;
  CostProfile p = sample_profile();
  for (const double factor : {1.0, 3.0}) {
    StageCosts stage{.n_layers = 2, .layer = p.layer, .upload_bytes_per_s = factor > 1 ? 5e9 : 0};
    stage.layer.project = p.layer.project.scaled(factor);
    stage.layer.hidden_bytes += static_cast<int64_t>(factor);
    p.stages.push_back(stage);
  }
  ASSERT_TRUE(save_cost_profile(Env::real(), dir.path(), p).ok());
  const Result<CostProfile> q = load_cost_profile(Env::real(), dir.path(), p.key);
  ASSERT_TRUE(q.ok()) << q.status().to_string();
  ASSERT_EQ(q->stages.size(), 2U);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(q->stages[i].n_layers, 2);
    expect_same(q->stages[i].layer.project, p.stages[i].layer.project);
    expect_same(q->stages[i].layer.dense, p.stages[i].layer.dense);
    EXPECT_EQ(q->stages[i].layer.hidden_bytes, p.stages[i].layer.hidden_bytes);
    EXPECT_DOUBLE_EQ(q->stages[i].upload_bytes_per_s, p.stages[i].upload_bytes_per_s);
  }
  EXPECT_FALSE(q->is_synchronous());
  EXPECT_TRUE(sample_profile().is_synchronous());
  EXPECT_DOUBLE_EQ(q->longest_project_s(512), 3 * p.layer.project.at(512));
}

TEST(CostProfileFile, AnotherKeyIsAnotherProfile) {
  const TempDir dir;
  ASSERT_TRUE(save_cost_profile(Env::real(), dir.path(), sample_profile()).ok());
  EXPECT_EQ(load_cost_profile(Env::real(), dir.path(), "threads=3").code(), Code::kNotFound);
}

TEST(CostProfileFile, DamageIsToldFromAbsence) {
  const TempDir dir;
  const CostProfile p = sample_profile();
  ASSERT_TRUE(save_cost_profile(Env::real(), dir.path(), p).ok());
  const std::string path = dir.path() + "/" + Env::real().list_dir(dir.path()).value().front();
  const std::string good = read_whole_file(Env::real(), path).value();
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return text.replace(at, from.size(), to);
  };
  for (const std::string& text :
       {std::string(), std::string("{"), std::string("[]"), good.substr(0, good.size() / 2),
        with("\"version\": 4", "\"version\": 99"), with("\"ratio\": 0.875", "\"ratio\": -1"),
        with("\"compute_scale\": 1.25", "\"compute_scale\": 0"),
        with("\"finish_s\": 0.004", "\"finish_s\": -1"),
        with("\"kv_bytes\": 768", "\"kv_bytes\": \"x\""), with("threads=2", "threads=3"),
        with("0.02", "-0.02"), with("\"points\"", "\"pints\"")}) {
    ASSERT_TRUE(write_whole_file(Env::real(), path, text).ok());
    const Result<CostProfile> q = load_cost_profile(Env::real(), dir.path(), p.key);
    EXPECT_EQ(q.code(), Code::kDataLoss) << text;
    EXPECT_THAT(q.status().message(), HasSubstr(path));
  }
}

TEST(CostProfile, ReadSpeedFollowsWhatIsObserved) {
  CostProfile p;
  observe_read_speed(p, 1000);
  EXPECT_DOUBLE_EQ(p.read_bytes_per_s, 1000);  // the first one counts whole
  observe_read_speed(p, 2000);
  EXPECT_DOUBLE_EQ(p.read_bytes_per_s, 1300);
  for (const double nonsense : {0.0, -5.0, std::nan(""), HUGE_VAL}) observe_read_speed(p, nonsense);
  EXPECT_DOUBLE_EQ(p.read_bytes_per_s, 1300);
}

TEST(CostProfile, ComputeScaleFollowsWhatIsObserved) {
  CostProfile p;
  observe_project_time(p, 0.6, 0.5);
  EXPECT_DOUBLE_EQ(p.compute_scale, 1.06);
  observe_project_time(p, 50, 0.5);  // a burst of somebody else's counts as twice the time
  EXPECT_DOUBLE_EQ(p.compute_scale, 1.06 * 1.3);
  const double before = p.compute_scale;
  observe_project_time(p, 0.5, 0.001);  // too little work to tell
  observe_project_time(p, std::nan(""), 0.5);
  observe_project_time(p, 0.5, std::nan(""));
  EXPECT_DOUBLE_EQ(p.compute_scale, before);

  // Predictions that follow what is observed settle on the truth from either side.
  for (const double truth : {0.4, 3.0}) {
    CostProfile q;
    for (int i = 0; i < 40; ++i) observe_project_time(q, truth, q.compute_scale);
    EXPECT_NEAR(q.compute_scale, truth, 0.01 * truth);
    for (int i = 0; i < 100; ++i) observe_project_time(q, 1e9, 1);
    EXPECT_LE(q.compute_scale, 8);
  }
}

class RealModel : public ::testing::Test {
 protected:
  void SetUp() override {
    device_ = model::Device::open("cpu", 1).value();
    model_ = model::Model::load(HCACHE_TEST_MODEL, *device_).value();
  }
  std::unique_ptr<engine::Engine> engine(engine::EngineOptions options) {
    return engine::Engine::create(*model_, options).value();
  }
  std::unique_ptr<model::Device> device_;
  std::unique_ptr<model::Model> model_;
};

TEST_F(RealModel, IsMeasuredAndLeftAsItWas) {
  const auto e = engine({.arena_tokens = 700, .max_batch_rows = 128});
  const engine::SeqId mine = e->create_sequence().value();
  const std::vector<int32_t> tokens = {1, 2, 3};
  const engine::BatchItem item = {.seq = mine, .tokens = tokens};
  ASSERT_TRUE(e->decode(std::span(&item, 1)).ok());
  const int64_t free_before = e->arena_free_cells();

  double last = 0;
  const auto progress = [&](const std::string& what, double fraction) {
    EXPECT_FALSE(what.empty());
    EXPECT_GE(fraction, last);
    EXPECT_LE(fraction, 1);
    last = fraction;
    return true;
  };
  const Result<CostProfile> p = measure_cost_profile(
      Env::real(), *e, "key", parse_state_type("native", *e).value(), progress);
  ASSERT_TRUE(p.ok()) << p.status().to_string();
  EXPECT_EQ(e->length(mine), 3);
  EXPECT_EQ(e->arena_free_cells(), free_before);

  EXPECT_EQ(p->key, "key");
  EXPECT_EQ(p->layer.hidden_bytes, 576 / 32 * 36);  // Q8_1
  EXPECT_EQ(p->layer.kv_bytes, 2 * 3 * 64 * 2);
  EXPECT_GT(p->layer.project.at(128), 0);
  EXPECT_GT(p->layer.load_kv.at(128), 0);
  EXPECT_GT(p->layer.dense.at(128), p->layer.dense.at(1));
  EXPECT_GE(p->layer.attn_per_key.at(128), 0);
  EXPECT_GE(p->finish_s, 0);
  EXPECT_GT(p->gemm_flops_per_s, 0);
  EXPECT_GT(p->packings.lossless.ratio, 0.7);
  EXPECT_LT(p->packings.lossless.ratio, 0.88);
  EXPECT_NEAR(p->packings.q8_0.ratio, 34.0 / 64, 0.01);
  EXPECT_NEAR(p->packings.q4_0.ratio, 18.0 / 64, 0.01);
  for (const auto mode :
       {policy::PackMode::kOn, policy::PackMode::kQ8_0, policy::PackMode::kQ4_0}) {
    EXPECT_GT(p->packings.of(mode).unpack_row_s, 0);
  }

  const policy::RestoreCosts costs = restore_costs(*p, *e, 0);
  EXPECT_TRUE(policy::validate(costs).ok()) << policy::validate(costs).to_string();
  EXPECT_EQ(costs.n_layer, 30);
  EXPECT_EQ(costs.batch_rows, 128);
  EXPECT_EQ(costs.slice_rows, 128);
  EXPECT_TRUE(costs.re_tail_projects);
  EXPECT_DOUBLE_EQ(restore_costs(*p, *e, 1.9e7).link.bytes_per_s, 1.9e7);
  EXPECT_DOUBLE_EQ(restore_costs(*p, *e, 1e15).link.bytes_per_s, costs.link.bytes_per_s);
  EXPECT_TRUE(policy::plan_save(costs, {}, nullptr).ok());

  CostProfile slower = *p;
  slower.compute_scale = 2;
  const policy::RestoreCosts scaled = restore_costs(slower, *e, 0);
  for (const int l : {0, 29}) {
    EXPECT_DOUBLE_EQ(scaled.layer(l).project.at(128), 2 * costs.layer(l).project.at(128));
    EXPECT_DOUBLE_EQ(scaled.layer(l).dense.at(128), 2 * costs.layer(l).dense.at(128));
    EXPECT_DOUBLE_EQ(scaled.layer(l).load_kv.at(128), costs.layer(l).load_kv.at(128));
  }
  EXPECT_DOUBLE_EQ(scaled.finish_s, 2 * costs.finish_s);
}

// Computing is measured with the weights at hand; what bringing them takes is added for the layers
// that are streamed.
TEST_F(RealModel, StreamedLayersTakeAsLongAsTheirWeights) {
  model::LoadOptions load;
  load.weights = model::WeightPlace::kDisk;
  const auto streamed = model::Model::load(HCACHE_TEST_MODEL, *device_, load).value();
  const auto e =
      engine::Engine::create(*streamed, {.arena_tokens = 700, .max_batch_rows = 128}).value();
  const StateTypes types = parse_state_type("native", *e).value();
  EXPECT_THAT(profile_key(*e, "digest", types), HasSubstr("weights=plain"));
  const Result<CostProfile> p = measure_cost_profile(Env::real(), *e, "key", types, {});
  ASSERT_TRUE(p.ok()) << p.status().to_string();
  constexpr double kSlow = 1e3;  // bytes/s, slower than any kernel on any machine
  const policy::RestoreCosts costs = restore_costs(*p, *e, kSlow);
  EXPECT_TRUE(policy::validate(costs).ok()) << policy::validate(costs).to_string();
  for (const int l : {0, 29}) {
    const double all_s =
        static_cast<double>(e->weights().layer_bytes(l, model::LayerPart::kAll)) / kSlow;
    EXPECT_DOUBLE_EQ(costs.layer(l).dense.at(1), all_s);
    EXPECT_DOUBLE_EQ(costs.layer(l).dense.at(128), all_s);
    EXPECT_GT(costs.layer(l).project.at(128), p->layer.project.at(128));
    EXPECT_LT(costs.layer(l).project.at(128), all_s);
  }
  EXPECT_TRUE(policy::plan_save(costs, {}, nullptr).ok());
}

// Two devices that differ in nothing but their layers: each is measured, and named in the key.
TEST_F(RealModel, EachDeviceIsMeasured) {
  const auto other = model::Device::open("cpu", 1).value();
  model::LoadOptions options;
  options.placement.devices = {device_.get(), other.get()};
  options.placement.split = {2, 1};
  const auto placed = model::Model::load(HCACHE_TEST_MODEL, *device_, options).value();
  const auto e =
      engine::Engine::create(*placed, {.arena_tokens = 512, .max_batch_rows = 64}).value();
  const StateTypes types = parse_state_type("native", *e).value();
  double last = 0;
  const Result<CostProfile> p = measure_cost_profile(
      Env::real(), *e, "key", types, [&](const std::string& /*what*/, double fraction) {
        EXPECT_GE(fraction, last);
        last = fraction;
        return true;
      });
  ASSERT_TRUE(p.ok()) << p.status().to_string();
  ASSERT_EQ(p->stages.size(), 2U);
  EXPECT_EQ(p->stages[0].n_layers, 20);
  EXPECT_EQ(p->stages[1].n_layers, 10);
  EXPECT_TRUE(p->is_synchronous());
  const policy::RestoreCosts costs = restore_costs(*p, *e, 0);
  EXPECT_TRUE(policy::validate(costs).ok()) << policy::validate(costs).to_string();
  for (const int layer : {0, 19, 20, 28}) {
    const StageCosts& stage = p->stages[layer < 20 ? 0 : 1];
    EXPECT_GT(stage.layer.project.at(64), 0);
    EXPECT_DOUBLE_EQ(costs.layer(layer).project.at(64), stage.layer.project.at(64));
    EXPECT_DOUBLE_EQ(costs.layer(layer).load_kv.at(64), stage.layer.load_kv.at(64));
    EXPECT_DOUBLE_EQ(costs.layer(layer).dense.at(64), stage.layer.dense.at(64));
  }
  EXPECT_THAT(profile_key(*e, "m", types), HasSubstr("device=cpu[0,20)+cpu[20,30) "));
  EXPECT_THAT(profile_key(*engine({.arena_tokens = 256, .max_batch_rows = 64}), "m", types),
              HasSubstr("device=cpu kernels="));
}

TEST_F(RealModel, MeasuringCanBeCancelled) {
  const auto e = engine({.arena_tokens = 256, .max_batch_rows = 64});
  const Result<CostProfile> p =
      measure_cost_profile(Env::real(), *e, "key", parse_state_type("native", *e).value(),
                           [](const std::string&, double) { return false; });
  EXPECT_EQ(p.code(), Code::kCancelled);
  EXPECT_EQ(e->arena_free_cells(), 256);
}

TEST_F(RealModel, AFullArenaIsSaid) {
  const auto e = engine({.arena_tokens = 256, .max_batch_rows = 64});
  const engine::SeqId mine = e->create_sequence().value();
  ASSERT_TRUE(e->reserve_rows(mine, 254).ok());
  EXPECT_EQ(measure_cost_profile(Env::real(), *e, "key", parse_state_type("native", *e).value(), {})
                .code(),
            Code::kResourceExhausted);
}

TEST_F(RealModel, KeyTellsEverythingThatMatters) {
  const auto e = engine({.arena_tokens = 256, .max_batch_rows = 64});
  const std::string key = profile_key(*e, "digest", StateTypes(30, GGML_TYPE_Q8_1));
  EXPECT_NE(key, profile_key(*e, "other", StateTypes(30, GGML_TYPE_Q8_1)));
  EXPECT_NE(key, profile_key(*e, "digest", StateTypes(30, GGML_TYPE_F16)));
  EXPECT_NE(key, profile_key(*engine({.arena_tokens = 256, .max_batch_rows = 32}), "digest",
                             StateTypes(30, GGML_TYPE_Q8_1)));
  device_->set_n_threads(2);
  EXPECT_NE(key, profile_key(*e, "digest", StateTypes(30, GGML_TYPE_Q8_1)));
}

TEST_F(RealModel, StateTypesByName) {
  const auto e = engine({.arena_tokens = 256, .max_batch_rows = 64});
  EXPECT_EQ(parse_state_type("native", *e).value(), StateTypes(30, GGML_TYPE_Q8_1));
  EXPECT_EQ(parse_state_type("q8", *e).value(), StateTypes(30, GGML_TYPE_Q8_1));
  EXPECT_EQ(parse_state_type("f32", *e).value(), StateTypes(30, GGML_TYPE_F32));
  EXPECT_EQ(parse_state_type("f16", *e).value(), StateTypes(30, GGML_TYPE_F16));
  EXPECT_EQ(parse_state_type("bf16", *e).value(), StateTypes(30, GGML_TYPE_BF16));
  const Result<StateTypes> wrong = parse_state_type("q4", *e);
  EXPECT_EQ(wrong.code(), Code::kInvalidArgument);
  EXPECT_THAT(wrong.status().message(), HasSubstr("native, f32, f16, bf16, q8"));
}

TEST(Identity, StateTypesAreDescribedByRuns) {
  EXPECT_EQ(describe(StateTypes(3, GGML_TYPE_Q8_1)), "q8_1");
  EXPECT_EQ(describe({GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, GGML_TYPE_Q8_1, GGML_TYPE_COUNT}),
            "q8_0:2 q8_1:1 none:1");
}

TEST(Identity, TypesMapBothWays) {
  for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0,
                               GGML_TYPE_Q8_1, GGML_TYPE_Q8_K}) {
    const auto encoding = hidden_encoding(type);
    ASSERT_TRUE(encoding.has_value());
    EXPECT_EQ(hidden_type(*encoding), type);
    EXPECT_TRUE(element_type(type).has_value());
  }
  EXPECT_EQ(hidden_encoding(GGML_TYPE_Q4_0), std::nullopt);
  EXPECT_EQ(element_type(GGML_TYPE_Q4_0), std::nullopt);
  EXPECT_EQ(hidden_type(store::Encoding::kKv), std::nullopt);
}

TEST(Identity, FingerprintCoversWhatShapesKv) {
  model::HParams hp;
  hp.n_rot = 64;
  const Fingerprint base = state_fingerprint("digest", hp, GGML_TYPE_F16);
  EXPECT_EQ(base, state_fingerprint("digest", hp, GGML_TYPE_F16));
  EXPECT_NE(base, state_fingerprint("digesu", hp, GGML_TYPE_F16));
  EXPECT_NE(base, state_fingerprint("digest", hp, GGML_TYPE_F32));
  // Rounded state is another; packed without loss it is the same.
  EXPECT_EQ(base, state_fingerprint("digest", hp, GGML_TYPE_F16, policy::PackMode::kOn));
  const Fingerprint rounded =
      state_fingerprint("digest", hp, GGML_TYPE_F16, policy::PackMode::kQ8_0);
  EXPECT_NE(base, rounded);
  EXPECT_NE(rounded, state_fingerprint("digest", hp, GGML_TYPE_F16, policy::PackMode::kQ4_0));
  EXPECT_EQ(state_fingerprint("digest", hp, GGML_TYPE_Q8_0),
            state_fingerprint("digest", hp, GGML_TYPE_Q8_0, policy::PackMode::kQ4_0))
      << "a type that is saved as it is";
  EXPECT_NE(base, state_fingerprint("digest", hp, GGML_TYPE_F16, policy::PackMode::kOff, 1));
  hp.rope_freq_base = 1e6F;
  EXPECT_NE(base, state_fingerprint("digest", hp, GGML_TYPE_F16));
  hp = {};
  hp.n_rot = 64;
  hp.rope_freq_scale = 0.5F;
  EXPECT_NE(base, state_fingerprint("digest", hp, GGML_TYPE_F16));
}

}  // namespace
}  // namespace hcache::state
