// Loading well-formed files; model_corrupt_test has the others.
#include <ggml-cpu.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <span>
#include <utility>

#include "base/fault_env.h"
#include "gguf_file.h"
#include "model_fixtures.h"
#include "weight_types.h"

namespace hcache::model {
namespace {

using test::TempDir;

using Case = test::ArchCase;

std::vector<Case> all_cases() {
  std::vector<Case> cases = {{"llama", 4}, {"llama", 2},  {"llama", 1},  {"qwen2", 2},
                             {"qwen3", 2}, {"falcon", 1}, {"falcon", 2}, {"opt", 4}};
  cases.insert(cases.end(), test::kMoreArchitectures.begin(), test::kMoreArchitectures.end());
  return cases;
}

class EveryArchitecture : public ::testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(Model, EveryArchitecture, ::testing::ValuesIn(all_cases()),
                         [](const auto& info) {
                           std::string name =
                               std::string(info.param.arch) + std::to_string(info.param.n_head_kv);
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

// Which types an architecture is loaded in: the first ones in all, the others in one type of each
// kind.
bool is_loaded(std::string_view arch, ggml_type type) {
  const auto& others = test::kMoreArchitectures;
  const bool is_other = std::any_of(others.begin(), others.end(),
                                    [&](const Case& other) { return other.arch == arch; });
  constexpr std::array kOfEachKind = {GGML_TYPE_F32, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_1,
                                      GGML_TYPE_Q4_K};
  return !is_other || std::ranges::find(kOfEachKind, type) != kOfEachKind.end();
}

TEST_P(EveryArchitecture, LoadsInEveryWeightType) {
  const TempDir dir;
  const auto device = test::open_cpu();
  for (const WeightType& t : weight_types()) {
    if (!is_loaded(GetParam().arch, t.type)) continue;
    auto options = test::tiny_options(GetParam().arch, GetParam().n_head_kv, t.type);
    if (std::string_view(ggml_type_name(t.type)).starts_with("iq")) {
      // Codebooks are slow to search, the smallest most: one architecture and few weights.
      const std::string_view name = ggml_type_name(t.type);
      if (options.shape.arch != "qwen3" || name.starts_with("iq1") || name.starts_with("iq2")) {
        continue;
      }
      options.shape.n_layer = 1;
      options.shape.n_vocab = 32;
      options.shape.n_ff = 256;
    }
    const std::string path = test::make_tiny(dir, options);
    auto loaded = Model::load(path, *device);
    ASSERT_TRUE(loaded.ok()) << loaded.status().to_string();
    const Model& m = **loaded;
    const HParams& h = m.hparams();
    EXPECT_EQ(h.arch, GetParam().arch);
    EXPECT_EQ(h.n_vocab, options.shape.n_vocab);
    EXPECT_EQ(h.n_head_kv, GetParam().n_head_kv);
    EXPECT_EQ(h.head_dim, 64);
    EXPECT_FLOAT_EQ(h.attention_scale, 0.125F);
    ASSERT_EQ(m.weights().layers.size(), static_cast<size_t>(options.shape.n_layer));
    for (const LayerWeights& l : m.weights().layers) {
      // k and v stay in plain memory, whatever the others do.
      for (const Linear* w : {&l.k, &l.v}) {
        EXPECT_EQ(w->w->type, t.type);
        EXPECT_EQ(w->w->ne[1], h.n_embd_kv());
        EXPECT_TRUE(ggml_backend_buffer_is_host(w->w->buffer));
      }
      EXPECT_EQ(l.q.b != nullptr, options.shape.qkv_bias);
      EXPECT_EQ(l.q_norm.w != nullptr, m.spec().head_norm == HeadNorm::kHead ||
                                           m.spec().head_norm == HeadNorm::kRow ||
                                           options.head_norms);
      EXPECT_EQ(l.attn_norm_2.w != nullptr, options.shape.two_norms);
      const bool shares_norm = h.parallel && m.spec().parallel != Parallel::kByKey;
      EXPECT_EQ(l.ffn_norm.w == nullptr, shares_norm || !m.spec().pre_norm);
      EXPECT_EQ(l.attn_norm.w == nullptr, !m.spec().pre_norm);
      EXPECT_EQ(l.attn_post_norm.w != nullptr, m.spec().post_norm);
      const bool has_experts = h.has_experts(static_cast<int>(&l - m.weights().layers.data()));
      EXPECT_EQ(l.gate.w != nullptr, m.spec().gated_ffn && !has_experts);
      EXPECT_EQ(l.experts.router.w != nullptr, has_experts);
      if (has_experts) {
        EXPECT_EQ(l.experts.down.w->ne[2], options.shape.n_expert);
      }
    }
    std::filesystem::remove(path);
  }
}

TEST_P(EveryArchitecture, EmbeddingsAreTheTablesRows) {
  const TempDir dir;
  const auto device = test::open_cpu();
  const std::string path = test::make_tiny(
      dir, test::tiny_options(GetParam().arch, GetParam().n_head_kv, GGML_TYPE_F16));
  auto model = Model::load(path, *device);
  ASSERT_TRUE(model.ok()) << model.status().to_string();
  const int n_embd = (*model)->hparams().n_embd;
  auto file = GgufFile::open(path);
  ASSERT_TRUE(file.ok());
  const GgufTensor* table = (*file)->tensor("token_embd.weight");
  ASSERT_NE(table, nullptr);

  const std::vector<int32_t> tokens = {7, 0, 319, 7};
  std::vector<float> rows(tokens.size() * static_cast<size_t>(n_embd));
  ASSERT_TRUE((*model)->embed_tokens(tokens, rows.data()).ok());
  const auto* data = reinterpret_cast<const ggml_fp16_t*>(table->data.data());
  for (size_t i = 0; i < tokens.size(); i++) {
    for (int j = 0; j < n_embd; j++) {
      ASSERT_EQ(rows[i * n_embd + j], (*model)->hparams().embedding_scale *
                                          ggml_fp16_to_fp32(data[tokens[i] * n_embd + j]));
    }
  }
  for (const int32_t bad : {-1, 320, INT32_MAX}) {
    const std::vector<int32_t> one = {bad};
    EXPECT_EQ((*model)->embed_tokens(one, rows.data()).code(), Code::kInvalidArgument);
  }
}

TEST(Model, LearnedPositionsAreAddedWithTheirOffset) {
  const TempDir dir;
  const auto device = test::open_cpu();
  const std::string path = test::make_tiny(dir, test::tiny_options("opt", 4, GGML_TYPE_F32));
  auto model = Model::load(path, *device);
  ASSERT_TRUE(model.ok()) << model.status().to_string();
  auto file = GgufFile::open(path);
  ASSERT_TRUE(file.ok());
  const GgufTensor* table = (*file)->tensor("position_embd.weight");
  ASSERT_NE(table, nullptr);
  EXPECT_EQ(table->ne[1], 2050);
  std::vector<float> row(256, 1.0F);
  const std::vector<int32_t> position = {5};
  ASSERT_TRUE((*model)->add_learned_positions(position, row.data()).ok());
  const auto* data = reinterpret_cast<const float*>(table->data.data());
  for (int j = 0; j < 256; j++) ASSERT_EQ(row[j], 1.0F + data[(5 + 2) * 256 + j]);
  const std::vector<int32_t> last = {2047};
  EXPECT_TRUE((*model)->add_learned_positions(last, row.data()).ok());
  const std::vector<int32_t> beyond = {2048};
  EXPECT_EQ((*model)->add_learned_positions(beyond, row.data()).code(), Code::kOutOfRange);
}

// The bytes of a weight as they are on the device.
std::vector<uint8_t> bytes_of(const ggml_tensor* t) {
  std::vector<uint8_t> out(ggml_nbytes(t));
  ggml_backend_tensor_get(t, out.data(), 0, out.size());
  return out;
}

TEST(Model, FusedMatricesAreSplitByRows) {
  const TempDir dir;
  const auto device = test::open_cpu();
  const std::string path = test::make_tiny(dir, test::tiny_options("falcon", 2, GGML_TYPE_Q4_1));
  auto model = Model::load(path, *device);
  ASSERT_TRUE(model.ok()) << model.status().to_string();
  auto file = GgufFile::open(path);
  ASSERT_TRUE(file.ok());
  const GgufTensor* fused = (*file)->tensor("blk.1.attn_qkv.weight");
  ASSERT_NE(fused, nullptr);
  const LayerWeights& l = (*model)->weights().layers[1];
  std::vector<uint8_t> joined = bytes_of(l.q.w);
  for (const Linear* part : {&l.k, &l.v}) {
    const auto bytes = bytes_of(part->w);
    joined.insert(joined.end(), bytes.begin(), bytes.end());
  }
  EXPECT_TRUE(std::equal(joined.begin(), joined.end(), fused->data.begin(), fused->data.end()));
}

TEST(Model, WithoutMappingTheWeightsAreTheSame) {
  const TempDir dir;
  const auto device = test::open_cpu();
  const std::string path = test::make_tiny(dir, test::tiny_options("llama", 2, GGML_TYPE_Q8_0));
  LoadOptions copied;
  copied.use_mmap = false;
  copied.use_extra_buffers = false;
  auto a = Model::load(path, *device);
  auto b = Model::load(path, *device, copied);
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_EQ(bytes_of((*a)->weights().layers[2].k.w), bytes_of((*b)->weights().layers[2].k.w));
  EXPECT_EQ(bytes_of((*a)->weights().output_norm.w), bytes_of((*b)->weights().output_norm.w));
}

TEST(Model, ProgressMayCancelLoading) {
  const TempDir dir;
  const auto device = test::open_cpu();
  const std::string path = test::make_tiny(dir, test::tiny_options("llama", 2, GGML_TYPE_F16));
  LoadOptions options;
  options.use_mmap = false;
  float last = 0;
  options.progress = [&](float f) {
    EXPECT_GE(f, last);
    last = f;
    return true;
  };
  EXPECT_TRUE(Model::load(path, *device, options).ok());
  EXPECT_EQ(last, 1.0F);
  options.progress = [](float) { return false; };
  EXPECT_EQ(Model::load(path, *device, options).code(), Code::kCancelled);
}

TEST(Model, DigestFollowsWeightsAndNumbersOnly) {
  const TempDir dir;
  const auto device = test::open_cpu();
  const auto digest = [&](const SynthOptions& options, const std::string& cache) {
    const std::string path = test::make_tiny(dir, options);
    auto model = Model::load(path, *device);
    EXPECT_TRUE(model.ok()) << model.status().to_string();
    return (*model)->content_digest(cache, nullptr).value();
  };
  auto options = test::tiny_options("llama", 2, GGML_TYPE_F16);
  const std::string first = digest(options, "");
  EXPECT_EQ(first.size(), 32U);
  EXPECT_EQ(digest(options, dir.file("cache")), first);
  EXPECT_EQ(digest(options, dir.file("cache")), first);  // the file is new, its content is not
  auto renamed = options;
  renamed.extra_strings = {{"general.description", "another text"}};
  EXPECT_EQ(digest(renamed, dir.file("cache")), first);
  auto reseeded = options;
  reseeded.seed = 2;
  EXPECT_NE(digest(reseeded, dir.file("cache")), first);
  auto other_rope = options;
  other_rope.shape.rope_freq_base = 5e5F;
  EXPECT_NE(digest(other_rope, dir.file("cache")), first);
  // The same tensors, computed with otherwise.
  auto beside = test::tiny_options("gptneox", 4, GGML_TYPE_F16);
  auto behind = beside;
  behind.shape.two_blocks = true;
  EXPECT_NE(digest(beside, dir.file("cache")), digest(behind, dir.file("cache")));
}

TEST(Model, DigestIsTakenFromTheCache) {
  const TempDir dir;
  const auto device = test::open_cpu();
  const std::string path = test::make_tiny(dir, test::tiny_options("llama", 2, GGML_TYPE_F16));
  auto model = Model::load(path, *device);
  ASSERT_TRUE(model.ok());
  const std::string cache = dir.file("cache");
  const std::string digest = (*model)->content_digest(cache, nullptr).value();
  bool hashed = false;
  const Progress watch = [&](float) { return hashed = true; };
  EXPECT_EQ((*model)->content_digest(cache, watch).value(), digest);
  EXPECT_FALSE(hashed);
  EXPECT_EQ((*model)->content_digest("", watch).value(), digest);
  EXPECT_TRUE(hashed);
  EXPECT_EQ((*model)->content_digest("", [](float) { return false; }).code(), Code::kCancelled);
}

// A tiny model's file in a FaultEnv.
class ModelInEnv : public ::testing::Test {
 protected:
  static std::string content(uint64_t seed) {
    const TempDir dir;
    SynthOptions options = test::tiny_options("llama", 2, GGML_TYPE_F16);
    options.seed = seed;
    const std::vector<uint8_t> bytes = test::read_file(test::make_tiny(dir, options));
    return {bytes.begin(), bytes.end()};
  }
  void SetUp() override {
    ASSERT_TRUE(env_.make_dirs("/models").ok());
    ASSERT_TRUE(write_whole_file(env_, kPath, content(1)).ok());
  }
  Result<std::unique_ptr<Model>> load(const std::string& path = kPath) {
    LoadOptions options;
    options.env = &env_;
    return Model::load(path, *device_, options);
  }

  static constexpr const char* kPath = "/models/tiny.gguf";
  FaultEnv env_;
  std::unique_ptr<Device> device_ = test::open_cpu();
};

TEST_F(ModelInEnv, AReadErrorIsReported) {
  env_.set_failing_reads("tiny");
  const Status status = load().status();
  EXPECT_EQ(status.code(), Code::kDataLoss);
  EXPECT_NE(status.message().find(kPath), std::string::npos) << status.to_string();
  env_.set_failing_reads("");
  EXPECT_EQ(load("/models/absent").code(), Code::kNotFound);
  EXPECT_TRUE(load().ok());
  EXPECT_EQ(env_.files(), std::vector<std::string>{kPath}) << "loading writes nothing";
}

TEST_F(ModelInEnv, ADamagedDigestCacheIsNoError) {
  const auto model = load();
  ASSERT_TRUE(model.ok()) << model.status().to_string();
  const std::string digest = (*model)->content_digest("/cache", nullptr).value();
  ASSERT_EQ(env_.list_dir("/cache")->size(), 1U);
  const std::string entry = "/cache/" + env_.list_dir("/cache")->front();
  const std::string whole = read_whole_file(env_, entry).value();
  bool hashed = false;
  const Progress watch = [&](float) { return hashed = true; };
  EXPECT_EQ((*model)->content_digest("/cache", watch).value(), digest);
  EXPECT_FALSE(hashed);

  // One that can't be written is left without a file.
  env_.set_failing_syncs(true);
  EXPECT_EQ((*model)->content_digest("/other", nullptr).value(), digest);
  EXPECT_TRUE(env_.list_dir("/other")->empty());
  env_.set_failing_syncs(false);
  // One that can't be read, or was cut short, is not used, and is whole afterwards.
  env_.set_failing_reads("digest-");
  EXPECT_EQ((*model)->content_digest("/cache", watch).value(), digest);
  EXPECT_TRUE(std::exchange(hashed, false));
  env_.set_failing_reads("");
  EXPECT_EQ(read_whole_file(env_, entry).value(), whole);
  ASSERT_TRUE(write_whole_file(env_, entry, whole.substr(0, whole.size() - 9)).ok());
  EXPECT_EQ((*model)->content_digest("/cache", watch).value(), digest);
  EXPECT_TRUE(hashed);
  EXPECT_EQ(read_whole_file(env_, entry).value(), whole);
}

TEST_F(ModelInEnv, TheDigestOfAFileThatWasWrittenOverIsNotUsed) {
  const std::string before = load().value()->content_digest("/cache", nullptr).value();
  const std::string other = content(2);
  OpenOptions options;
  options.write = true;
  auto file = env_.open_file(kPath, options).value();
  ASSERT_EQ(file->size().value(), other.size());
  ASSERT_TRUE(file->write_at(0, std::as_bytes(std::span<const char>(other))).ok());
  EXPECT_NE(load().value()->content_digest("/cache", nullptr).value(), before);
}

HParams load_hparams(const TempDir& dir, SynthOptions options) {
  const auto device = test::open_cpu();
  auto model = Model::load(test::make_tiny(dir, options), *device);
  EXPECT_TRUE(model.ok()) << model.status().to_string();
  return model.ok() ? (*model)->hparams() : HParams();
}

TEST(Model, RopeScalingFollowsTheMetadata) {
  const TempDir dir;
  auto options = test::tiny_options("llama", 2, GGML_TYPE_F32);
  EXPECT_EQ(load_hparams(dir, options).rope_freq_scale, 1.0F);

  options.extra_numbers = {{"llama.rope.scaling.factor", 4.0F}};
  HParams h = load_hparams(dir, options);
  EXPECT_EQ(h.rope_freq_scale, 0.25F);
  EXPECT_EQ(h.rope_ext_factor, 0.0F);
  EXPECT_EQ(h.rope_attn_factor, 1.0F);

  options.extra_strings = {{"llama.rope.scaling.type", "yarn"}};
  h = load_hparams(dir, options);
  EXPECT_EQ(h.rope_ext_factor, 1.0F);
  EXPECT_NEAR(h.rope_attn_factor, 1.0F, 1e-6F);  // ggml multiplies by 1 + 0.1 ln 4 itself

  options.extra_strings = {{"llama.rope.scaling.type", "none"}};
  EXPECT_EQ(load_hparams(dir, options).rope_freq_scale, 1.0F);
}

TEST(Model, FrequencyFactorsAreShared) {
  const TempDir dir;
  const auto device = test::open_cpu();
  auto options = test::tiny_options("llama", 2, GGML_TYPE_F32);
  options.rope_factors = true;
  auto model = Model::load(test::make_tiny(dir, options), *device);
  ASSERT_TRUE(model.ok()) << model.status().to_string();
  const auto& layers = (*model)->weights().layers;
  ASSERT_NE(layers[0].rope_factors, nullptr);
  EXPECT_EQ(layers[0].rope_factors->ne[0], 32);
  EXPECT_EQ(layers[2].rope_factors, layers[0].rope_factors);
}

TEST(Model, DefaultModelLoads) {
  ASSERT_TRUE(std::filesystem::exists(HCACHE_TEST_MODEL)) << "make print-model fetches it";
  const auto device = test::open_cpu();
  auto model = Model::load(HCACHE_TEST_MODEL, *device);
  ASSERT_TRUE(model.ok()) << model.status().to_string();
  const Model& m = **model;
  EXPECT_EQ(m.type_name(), "Q4_1");
  EXPECT_EQ(m.hparams().n_layer, 30);
  EXPECT_EQ(m.hparams().n_head, 9);
  EXPECT_EQ(m.hparams().n_head_kv, 3);
  EXPECT_EQ(m.n_params(), 134515008U);
  std::vector<float> row(576);
  const std::vector<int32_t> token = {1};
  ASSERT_TRUE(m.embed_tokens(token, row.data()).ok());
  for (const float v : row) EXPECT_TRUE(std::isfinite(v));
}

}  // namespace
}  // namespace hcache::model
