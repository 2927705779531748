// The batch engine: its logits are those of a resident run to the bit, whatever the kinds and
// places of its blocks, the mini-batches and the buffers.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "engine_hybrid_testing.h"

namespace hcache::engine::testing {
namespace {

constexpr size_t kPlenty = size_t{1} << 30;

struct ModelCase {
  const char* name;
  int n_head_kv;
  ggml_type type;
  const char* arch = "llama";
};

class HybridBits : public ::testing::TestWithParam<ModelCase> {
 protected:
  // Thirty-two requests of mixed lengths: from under a block to several.
  void SetUp() override {
    model_ = &tiny_model(GetParam().arch, GetParam().n_head_kv, GetParam().type);
    batch_ = mixed_batch(*model_, 32, 2, 230, 4);
    expected_ = resident_replies(*model_, batch_);
  }

  HybridOptions options(double share) {
    HybridOptions options;
    options.buffer_tokens = 1024;
    options.max_batch_rows = 96;
    options.max_step_rows = 700;
    options.decisions = act_share(share);
    options.disk_dir = dir_.path().string();
    return options;
  }

  void expect_same(const HybridOptions& options, const std::string& what) {
    const auto engine = HybridEngine::create(*model_, options);
    ASSERT_TRUE(engine.ok()) << engine.status().to_string();
    EXPECT_TRUE(same_replies(expected_, hybrid_replies(**engine, batch_))) << what;
    const HybridCacheUse use = (*engine)->cache_use();
    HCACHE_EXPECT_OK((*engine)->flush());
    EXPECT_EQ((*engine)->cache_use().disk_bytes, 0U) << what;
    EXPECT_EQ(use.device_bytes, 0U) << what;
  }

  const model::Model* model_ = nullptr;
  BatchOfRequests batch_;
  Replies expected_;
  TempDir dir_;
};

TEST_P(HybridBits, EveryKindInHostMemory) {
  for (const double share : {0.0, 1.0, 0.5, 0.7}) {
    expect_same(options(share), "share " + std::to_string(share));
  }
}

TEST_P(HybridBits, EveryKindOnDisk) {
  for (const double share : {0.0, 1.0, 0.6}) {
    HybridOptions disk = options(share);
    disk.host_bytes = 0;
    disk.disk_bytes = kPlenty;
    expect_same(disk, "share " + std::to_string(share));
  }
}

// A layer's weights come from disk once a step, whatever the number of mini-batches.
TEST_P(HybridBits, WeightsStreamedFromDisk) {
  const auto device = model::Device::open("cpu", 2).value();
  const auto streamed =
      model::Model::load(model_->path(), *device, {.weights = model::WeightPlace::kDisk});
  ASSERT_TRUE(streamed.ok()) << streamed.status().to_string();
  ASSERT_NE((*streamed)->streamed(), nullptr);
  EXPECT_EQ((*streamed)->streamed()->first_layer, 0);
  for (const double share : {0.0, 0.6, 1.0}) {
    HybridOptions disk = options(share);
    disk.host_bytes = 0;
    disk.disk_bytes = kPlenty;
    const auto engine = HybridEngine::create(**streamed, disk);
    ASSERT_TRUE(engine.ok()) << engine.status().to_string();
    EXPECT_TRUE(same_replies(expected_, hybrid_replies(**engine, batch_))) << "share " << share;
  }
}

// By halves, the second ones of all mini-batches together; layers recomputed and tokens too.
TEST_P(HybridBits, WeightsStreamedByHalves) {
  const auto device = model::Device::open("cpu", 2).value();
  model::LoadOptions load{.weights = model::WeightPlace::kDisk};
  {
    const auto whole = model::Model::load(model_->path(), *device, load).value();
    load.device_memory = memory_for_halves(*whole);
  }
  const auto halved = model::Model::load(model_->path(), *device, load).value();
  ASSERT_TRUE(halved->streamed()->halves);
  for (const int recomputed : {0, 1, 2}) {
    for (const int rows : {64, 96, 700}) {
      HybridOptions disk = options(0.6);
      disk.host_bytes = 0;
      disk.disk_bytes = kPlenty;
      disk.recomputed_layers = recomputed;
      disk.max_batch_rows = rows;
      if (recomputed == 2) {
        disk.recomputed_layers = 0;
        disk.decisions.next_kind = [](const BlockQuestion& asked) {
          return asked.n_recomputed < 2 ? BlockKind::kTokens : BlockKind::kKv;
        };
      }
      const auto engine = HybridEngine::create(*halved, disk);
      ASSERT_TRUE(engine.ok()) << engine.status().to_string();
      EXPECT_TRUE(same_replies(expected_, hybrid_replies(**engine, batch_)))
          << recomputed << " recomputed, graphs of " << rows;
    }
  }
}

TEST_P(HybridBits, EveryKindOnTheDevice) {
  for (const double share : {0.0, 1.0, 0.6}) {
    HybridOptions device = options(share);
    device.host_bytes = 0;
    device.device_bytes = kPlenty;
    expect_same(device, "share " + std::to_string(share));
  }
}

TEST_P(HybridBits, AllPlacesTogether) {
  HybridOptions mixed = options(0.5);
  mixed.device_bytes = 2 << 20;
  mixed.host_bytes = 2 << 20;
  mixed.disk_bytes = kPlenty;
  mixed.n_buffers = 3;
  expect_same(mixed, "all places");
}

TEST_P(HybridBits, LayersRecomputedFromTokens) {
  for (const int n_layers : {1, 2, 3}) {
    HybridOptions recomputed = options(0.5);
    recomputed.recomputed_layers = n_layers;
    recomputed.host_bytes = 0;
    recomputed.disk_bytes = kPlenty;
    expect_same(recomputed, std::to_string(n_layers) + " layers");
  }
}

// Of each prompt a share holds nothing, the rest is KV and ACT by turns.
TEST_P(HybridBits, TokensRecomputedThroughAllLayers) {
  for (const double share : {0.5, 1.0}) {
    HybridOptions tokens = options(0);
    tokens.host_bytes = 0;
    tokens.disk_bytes = kPlenty;
    tokens.decisions.next_kind = [share](const BlockQuestion& asked) {
      const int64_t n_blocks = asked.prompt_tokens / kBlockTokens;
      const double wanted = share * static_cast<double>(n_blocks);
      if (static_cast<double>(asked.n_recomputed) < wanted) return BlockKind::kTokens;
      return asked.n_act < asked.n_kv ? BlockKind::kAct : BlockKind::kKv;
    };
    expect_same(tokens, "share " + std::to_string(share));
  }
}

TEST_P(HybridBits, MiniBatchesOfAnyForm) {
  HybridOptions one_each = options(0.5);
  one_each.decisions.form_batches = [](std::span<const BatchMember> members, int64_t) {
    std::vector<std::vector<int>> batches;
    for (size_t i = 0; i < members.size(); ++i) batches.push_back({static_cast<int>(i)});
    return batches;
  };
  expect_same(one_each, "one request each");
  HybridOptions large = options(0.5);
  large.buffer_tokens = 8192;
  large.max_step_rows = 8192;
  large.max_batch_rows = 1024;
  expect_same(large, "all requests in one");
}

INSTANTIATE_TEST_SUITE_P(Models, HybridBits,
                         ::testing::Values(ModelCase{"MultiHeadF16", 4, GGML_TYPE_F16},
                                           ModelCase{"GroupedF16", 2, GGML_TYPE_F16},
                                           ModelCase{"MultiHeadQ8", 4, GGML_TYPE_Q8_0},
                                           ModelCase{"GroupedQ8", 2, GGML_TYPE_Q8_0},
                                           ModelCase{"ExpertsQ8", 4, GGML_TYPE_Q8_0, "olmoe"}),
                         [](const auto& tested) { return std::string(tested.param.name); });

}  // namespace
}  // namespace hcache::engine::testing
