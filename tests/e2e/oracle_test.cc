// Our logits against libllama's on the CPU: tiny random models of every architecture and weight
// type, and SmolLM2 itself, over prefill in odd chunk sizes and decode. Ours run on
// HCACHE_TEST_DEVICE.
#include "oracle.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "../unit/model_fixtures.h"
#include "../unit/split_model.h"
#include "../unit/test_device.h"
#include "engine/engine.h"

namespace hcache::test {
namespace {

using engine::AttentionKind;
using engine::BatchItem;
using engine::Engine;
using engine::EngineOptions;

constexpr std::array kTypes = {GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16, GGML_TYPE_Q8_0,
                               GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q4_K};

using Shape = model::test::ArchCase;
constexpr std::array kShapes = {Shape{"llama", 4}, Shape{"llama", 2}, Shape{"llama", 1},
                                Shape{"qwen2", 2}, Shape{"qwen3", 2}, Shape{"falcon", 1},
                                Shape{"falcon", 2}};

constexpr int kTinyVocab = 320;

// How a token stream is cut: odd prefill chunks on both sides of the tiled kernels' sizes, then
// single tokens.
constexpr std::array kChunks = {1, 67, 3, 130, 17, 1, 1, 1, 1, 1, 1};

Tokens random_tokens(int n, int n_vocab, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_int_distribution<int32_t> pick(0, n_vocab - 1);
  Tokens out(static_cast<size_t>(n));
  for (int32_t& t : out) t = pick(random);
  return out;
}

class Ours {
 public:
  // The first adapter counts `scale`, the others nothing.
  Ours(const std::string& path, const EngineOptions& options,
       const std::vector<std::string>& adapters = {}, float scale = 0,
       const model::RopeOverride& rope = {}) {
    device_ = model::Device::open(hcache::testing::test_device(), 1).value();
    auto model = model::Model::load(path, *device_, {.rope = rope, .adapters = adapters});
    EXPECT_TRUE(model.ok()) << model.status().to_string();
    model_ = std::move(model).value();
    engine_ = Engine::create(*model_, options).value();
    sequence_ = engine_->create_sequence().value();
    if (adapters.empty()) return;
    std::vector<float> scales(adapters.size());
    scales.front() = scale;
    EXPECT_TRUE(engine_->set_adapters(sequence_, scales).ok());
  }
  std::vector<Row> append(std::span<const int32_t> tokens) {
    const BatchItem item = {.seq = sequence_,
                            .tokens = tokens,
                            .first_pos = -1,
                            .output = BatchItem::Output::kAll,
                            .hidden = hidden_};
    const auto logits = engine_->decode({&item, 1});
    EXPECT_TRUE(logits.ok()) << logits.status().to_string();
    std::vector<Row> out;
    if (!logits.ok()) return out;
    for (const auto& row : logits->rows) out.emplace_back(row.begin(), row.end());
    return out;
  }
  // append() gives the rows behind the final norm.
  void give_hidden() { hidden_ = true; }

 private:
  std::unique_ptr<model::Device> device_;
  std::unique_ptr<model::Model> model_;
  std::unique_ptr<Engine> engine_;
  engine::SeqId sequence_ = -1;
  bool hidden_ = false;
};

int n_tokens() {
  int total = 0;
  for (const int chunk : kChunks) total += chunk;
  return total;
}

template <typename A, typename B>
Difference run(A& oracle, B& ours, const Tokens& tokens) {
  std::vector<Row> expected;
  std::vector<Row> actual;
  std::span<const int32_t> rest = tokens;
  for (const int chunk : kChunks) {
    const auto part = rest.first(static_cast<size_t>(chunk));
    rest = rest.subspan(static_cast<size_t>(chunk));
    for (Row& row : oracle.append(part)) expected.push_back(std::move(row));
    for (Row& row : ours.append(part)) actual.push_back(std::move(row));
  }
  return compare(expected, actual);
}

template <typename A, typename B>
Difference run(A& oracle, B& ours, unsigned seed) {
  return run(oracle, ours, random_tokens(n_tokens(), kTinyVocab, seed));
}

struct Case {
  Shape shape;
  ggml_type type;
};

std::vector<Case> all_cases() {
  // Fewer weight types: a device in software compiles its shaders for each.
  if (!hcache::testing::on_cpu()) {
    return {{{"llama", 4}, GGML_TYPE_F16},  {{"llama", 2}, GGML_TYPE_Q8_0},
            {{"llama", 1}, GGML_TYPE_Q4_K}, {{"qwen2", 2}, GGML_TYPE_F16},
            {{"qwen3", 2}, GGML_TYPE_Q4_0}, {{"falcon", 1}, GGML_TYPE_Q8_0},
            {{"falcon", 2}, GGML_TYPE_F32}};
  }
  std::vector<Shape> shapes(kShapes.begin(), kShapes.end());
  const auto& more = model::test::kMoreArchitectures;
  shapes.insert(shapes.end(), more.begin(), more.end());
  std::vector<Case> out;
  for (const Shape& shape : shapes) {
    for (const ggml_type type : kTypes) out.push_back({shape, type});
  }
  return out;
}

// The attention that is not chosen by itself knows nothing of weights' types: it meets all of them
// in the architectures of kShapes, two in the others.
bool meets_other_attention(const Case& c) {
  const bool meets_all = std::any_of(kShapes.begin(), kShapes.end(), [&](const Shape& shape) {
    return std::string_view(shape.arch) == c.shape.arch;
  });
  return meets_all || c.type == GGML_TYPE_F32 || c.type == GGML_TYPE_Q8_0;
}

class TinyModels : public ::testing::TestWithParam<Case> {
 protected:
  std::string path() {
    return model::test::make_tiny(
        dir_, model::test::tiny_options(GetParam().shape.arch, GetParam().shape.n_head_kv,
                                        GetParam().type));
  }
  model::test::TempDir dir_;
};

INSTANTIATE_TEST_SUITE_P(Oracle, TinyModels, ::testing::ValuesIn(all_cases()),
                         [](const auto& info) {
                           std::string name = std::string(info.param.shape.arch) +
                                              std::to_string(info.param.shape.n_head_kv) + "_" +
                                              ggml_type_name(info.param.type);
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

// What a difference in the order of sums may do to logits whose standard deviation is two: nothing
// visible with F32 weights; elsewhere it tips activations over a rounding edge of the type in which
// the product consumes them.
struct Bounds {
  double max_logit;
  double mean_kl;
};

// CUDA's attention multiplies in half precision, which large biases of Q and K (qwen2) make
// visible, and its products of F32 are those of TF32.
bool on_cuda() { return hcache::testing::test_device().starts_with("cuda"); }

Bounds bounds(ggml_type weights) {
  if (on_cuda() && weights == GGML_TYPE_F16) return {1.5, 2e-3};
  switch (weights) {
    case GGML_TYPE_F32: return {5e-3, 1e-6};
    case GGML_TYPE_F16: return {2e-2, 1e-5};
    case GGML_TYPE_BF16: return {1e-1, 5e-5};
    default: return {3e-1, 5e-4};
  }
}

// Where activations are rounded, one of two experts that are as good may be chosen here and the
// other there, in a row now and then: means hold, one logit may not.
constexpr double kOtherExpert = 1;

// `scale`: of the bound of logits.
void expect_close(const Difference& d, ggml_type weights, const char* arch, double scale = 1) {
  Bounds b = bounds(weights);
  b.max_logit *= scale;
  const auto& spec = *model::find_decoder_spec(arch);
  const bool has_experts = model::tiny_shape(spec, 2).n_expert > 0;
  if (has_experts && weights != GGML_TYPE_F32) b.max_logit = kOtherExpert;
  EXPECT_TRUE(d.finite);
  EXPECT_LT(d.max_logit, b.max_logit);
  EXPECT_LT(d.mean_kl, b.mean_kl);
  ::testing::Test::RecordProperty("max_logit", std::to_string(d.max_logit));
  ::testing::Test::RecordProperty("mean_kl", std::to_string(d.mean_kl));
}

TEST_P(TinyModels, AgreeWithGgmlAttention) {
  if (!hcache::testing::on_cpu()) GTEST_SKIP() << "elsewhere all attention is ggml's";
  if (!meets_other_attention(GetParam())) GTEST_SKIP() << "attention knows no weights' types";
  const std::string file = path();
  Oracle oracle(file, GGML_TYPE_F32, false);
  Ours ours(file,
            {.arena_tokens = 1024, .kv_type = GGML_TYPE_F32, .attention = AttentionKind::kGgml});
  expect_close(run(oracle, ours, 1), GetParam().type, GetParam().shape.arch);
}

// With low-rank adapters on every matrix, of which one counts.
TEST_P(TinyModels, AgreeWithAdapters) {
  const ggml_type type = GetParam().type;
  if (type != GGML_TYPE_F32 && type != GGML_TYPE_Q8_0) GTEST_SKIP() << "what adapters add is F32";
  constexpr float kScale = -0.7F;
  const std::string file = path();
  std::vector<std::string> adapters;
  for (const uint64_t seed : {uint64_t{1}, uint64_t{2}}) {
    model::AdapterOptions options;
    options.model = file;
    options.seed = seed;
    adapters.push_back(dir_.file("adapter-" + std::to_string(seed) + ".gguf"));
    ASSERT_TRUE(model::synthesise_adapter(options, adapters.back()).ok());
  }
  const EngineOptions options = {
      .arena_tokens = 1024, .kv_type = GGML_TYPE_F32, .attention = AttentionKind::kScores};
  Oracle oracle(file, GGML_TYPE_F32, false);
  oracle.add_adapter(adapters.front(), kScale);
  Ours ours(file, options, adapters, kScale);
  const Difference d = run(oracle, ours, 1);
  expect_close(d, type, GetParam().shape.arch);
  if (type != GGML_TYPE_F32) return;
  // They do count.
  Ours plain(file, options);
  Ours changed(file, options, adapters, kScale);
  EXPECT_GT(run(plain, changed, 1).mean_kl, 100 * d.mean_kl);
}

// What vectors of texts are made of.
TEST_P(TinyModels, AgreeOnFinalNorms) {
  const ggml_type type = GetParam().type;
  if (type != GGML_TYPE_F32) GTEST_SKIP() << "logits tell what weights' types make of it";
  const std::string file = path();
  Oracle oracle(file, GGML_TYPE_F32, false,
                [](llama_context_params* cp) { cp->pooling_type = LLAMA_POOLING_TYPE_NONE; });
  oracle.give_hidden();
  Ours ours(file,
            {.arena_tokens = 1024, .kv_type = GGML_TYPE_F32, .attention = AttentionKind::kScores});
  ours.give_hidden();
  const Difference d = run(oracle, ours, 1);
  EXPECT_TRUE(d.finite);
  EXPECT_LT(d.max_logit, bounds(type).max_logit);
}

// With rotary positions that are not the file's.
TEST_P(TinyModels, AgreeOnOtherPositions) {
  if (GetParam().type != GGML_TYPE_F32) GTEST_SKIP() << "positions know nothing of weights' types";
  using Scaling = model::RopeOverride::Scaling;
  const std::string file = path();
  const EngineOptions options = {
      .arena_tokens = 1024, .kv_type = GGML_TYPE_F32, .attention = AttentionKind::kScores};
  for (const model::RopeOverride& rope :
       {model::RopeOverride{.scaling = Scaling::kYarn, .freq_scale = 0.25F, .orig_ctx = 64},
        model::RopeOverride{.scaling = Scaling::kYarn,
        .freq_scale = 0.5F,
        .ext_factor = 0.5F,
        .beta_fast = 16,
        .beta_slow = 2},
        model::RopeOverride{.freq_base = 50000, .freq_scale = 0.5F},
        model::RopeOverride{.scaling = Scaling::kNone, .attn_factor = 0.9F}}) {
    auto device = model::Device::open(hcache::testing::test_device(), 1).value();
    const auto taken = model::Model::load(file, *device, {.rope = rope});
    if (taken.code() == Code::kUnimplemented || taken.code() == Code::kInvalidArgument) {
      GTEST_SKIP() << taken.status().message();
    }
    Oracle oracle(file, GGML_TYPE_F32, false, [&](llama_context_params* cp) {
      cp->rope_scaling_type = rope.scaling == Scaling::kYarn ? LLAMA_ROPE_SCALING_TYPE_YARN
                              : rope.scaling == Scaling::kNone
                                  ? LLAMA_ROPE_SCALING_TYPE_NONE
                                  : LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED;
      cp->rope_freq_base = rope.freq_base;
      cp->rope_freq_scale = rope.freq_scale;
      cp->yarn_orig_ctx = static_cast<uint32_t>(rope.orig_ctx);
      cp->yarn_ext_factor = rope.ext_factor;
      cp->yarn_attn_factor = rope.attn_factor;
      cp->yarn_beta_fast = rope.beta_fast;
      cp->yarn_beta_slow = rope.beta_slow;
    });
    Ours ours(file, options, {}, 0, rope);
    expect_close(run(oracle, ours, 1), GGML_TYPE_F32, GetParam().shape.arch);
  }
}

// As where the device's flash attention lacks the size of heads.
TEST_P(TinyModels, AgreeWithScoresInFull) {
  if (!meets_other_attention(GetParam())) GTEST_SKIP() << "attention knows no weights' types";
  const std::string file = path();
  Oracle oracle(file, GGML_TYPE_F32, false);
  Ours ours(file,
            {.arena_tokens = 1024, .kv_type = GGML_TYPE_F32, .attention = AttentionKind::kScores});
  expect_close(run(oracle, ours, 1), GetParam().type, GetParam().shape.arch);
}

TEST_P(TinyModels, AgreeWithOurAttention) {
  const std::string file = path();
  Oracle oracle(file, GGML_TYPE_F16, true);
  Ours ours(file, {.arena_tokens = 1024, .attention = AttentionKind::kAuto});
  // ggml's kernel sums values in F16. What comes of noise is small beside the residual, unless a
  // norm behind attention makes it as large; with scores in F32 (above) these agree as all do.
  const char* arch = GetParam().shape.arch;
  const bool enlarged = model::find_decoder_spec(arch)->post_norm;
  expect_close(run(oracle, ours, 2), GetParam().type, arch, enlarged ? 4 : 1);
}

// Architectures that have models with experts and others without.
TEST(Oracle, MixturesOfDenseArchitecturesAgree) {
  if (!hcache::testing::on_cpu()) GTEST_SKIP() << "about the metadata, not the device";
  const model::test::TempDir dir;
  for (const char* arch : {"llama", "granite"}) {
    for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K}) {
      auto options = model::test::tiny_options(arch, 2, type);
      options.shape.n_expert = 4;
      options.shape.n_expert_used = 2;
      options.shape.n_ff_expert = options.shape.n_ff;
      const std::string file = model::test::make_tiny(dir, options);
      Oracle oracle(file, GGML_TYPE_F32, false);
      Ours ours(
          file,
          {.arena_tokens = 1024, .kv_type = GGML_TYPE_F32, .attention = AttentionKind::kGgml});
      SCOPED_TRACE(std::string(arch) + " " + ggml_type_name(type));
      expect_close(run(oracle, ours, 8), type, "qwen3moe");
    }
  }
}

// The parts are llama.cpp's as well as ours.
TEST(Oracle, ModelsInSeveralFilesAgree) {
  if (!hcache::testing::on_cpu()) GTEST_SKIP() << "about the files, not the device";
  const model::test::TempDir dir;
  const std::string whole =
      model::test::make_tiny(dir, model::test::tiny_options("qwen2", 2, GGML_TYPE_F32));
  const std::string file = model::test::split_model(whole, dir.file("parts"), 3).front();
  Oracle oracle(file, GGML_TYPE_F32, false);
  Ours ours(file,
            {.arena_tokens = 1024, .kv_type = GGML_TYPE_F32, .attention = AttentionKind::kGgml});
  expect_close(run(oracle, ours, 4), GGML_TYPE_F32, "qwen2");
}

// RoPE in all the ways the metadata can ask for.
TEST(Oracle, RopeScalingAgrees) {
  if (!hcache::testing::on_cpu()) GTEST_SKIP() << "about the metadata, not the device";
  const model::test::TempDir dir;
  const auto check = [&](model::SynthOptions options, const char* what) {
    const std::string file = model::test::make_tiny(dir, options);
    Oracle oracle(file, GGML_TYPE_F32, false);
    Ours ours(file,
              {.arena_tokens = 1024, .kv_type = GGML_TYPE_F32, .attention = AttentionKind::kGgml});
    const Difference d = run(oracle, ours, 3);
    EXPECT_LT(d.max_logit, 5e-3) << what;
    EXPECT_LT(d.mean_kl, 1e-6) << what;
  };
  for (const char* arch : {"llama", "qwen2"}) {
    const std::string prefix = std::string(arch) + ".rope.scaling.";
    auto options = model::test::tiny_options(arch, 2, GGML_TYPE_F32);
    options.shape.n_ctx = 256;
    options.extra_numbers = {{prefix + "factor", 8.0F}};
    check(options, "linear");
    options.extra_strings = {{prefix + "type", "yarn"}};
    check(options, "yarn");
    options.extra_numbers.emplace_back(prefix + "attn_factor", 1.3F);
    check(options, "yarn with attention factor");
    options.extra_strings = {{prefix + "type", "none"}};
    check(options, "none");
  }
  auto options = model::test::tiny_options("llama", 2, GGML_TYPE_F32);
  options.rope_factors = true;
  options.shape.rope_freq_base = 5e5F;
  check(options, "frequency factors");

  // LongRoPE: the oracle's context of 1,024 is beyond the original one, then within.
  for (const uint32_t original : {512U, 2048U}) {
    options = model::test::tiny_options("phi3", 4, GGML_TYPE_F32);
    options.shape.n_ctx = original == 512 ? 1024 : 2048;
    options.long_rope = true;
    options.extra_strings = {{"phi3.rope.scaling.type", "longrope"}};
    options.extra_integers = {{"phi3.rope.scaling.original_context_length", original}};
    options.extra_numbers = {{"phi3.rope.scaling.attn_factor", 1.2F}};
    check(options, original == 512 ? "long factors" : "short factors");
  }
}

// The multi-head twin answers as the original does.
TEST(Oracle, ExpandedHeadsAnswerTheSame) {
  if (!hcache::testing::on_cpu()) GTEST_SKIP() << "about the files, not the device";
  const model::test::TempDir dir;
  for (const char* arch : {"llama", "qwen2", "qwen3", "falcon", "olmo2", "glm4"}) {
    for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_Q4_1}) {
      const std::string file =
          model::test::make_tiny(dir, model::test::tiny_options(arch, 2, type));
      const std::string twin = dir.file("twin.gguf");
      ASSERT_TRUE(model::expand_kv(file, twin, 1, nullptr).ok());
      const EngineOptions options = {.arena_tokens = 1024};
      Ours original(file, options);
      Ours expanded(twin, options);
      const Difference d = run(original, expanded, 4);
      EXPECT_LT(d.max_logit, 1e-4) << arch << " " << ggml_type_name(type);
    }
  }
}

// Padding for K-quants changes no answer: shown with F32, where nothing else changes one.
TEST(Oracle, PaddedModelsAnswerTheSame) {
  if (!hcache::testing::on_cpu()) GTEST_SKIP() << "about the files, not the device";
  const model::test::TempDir dir;
  auto options = model::test::tiny_options("llama", 3, GGML_TYPE_F32);
  options.shape.n_embd = 288;
  options.shape.n_head = 9;
  options.shape.n_head_kv = 3;
  options.shape.head_dim = 32;
  options.shape.n_ff = 96;
  const std::string file = model::test::make_tiny(dir, options);
  const std::string q6 = dir.file("q6.gguf");
  const std::string padded = dir.file("padded.gguf");
  ASSERT_TRUE(model::requantise(file, q6, GGML_TYPE_Q6_K, 1, nullptr).ok());
  ASSERT_TRUE(model::requantise(q6, padded, GGML_TYPE_F32, 1, nullptr).ok());
  const EngineOptions engine_options = {
      .arena_tokens = 1024, .kv_type = GGML_TYPE_F32, .attention = AttentionKind::kGgml};
  Ours original(file, engine_options);
  Ours wide(padded, engine_options);
  const Difference d = run(original, wide, 5);
  EXPECT_LT(d.mean_kl, 5e-3);  // what six bits per weight cost
  Oracle oracle(padded, GGML_TYPE_F32, false);
  Ours again(padded, engine_options);
  EXPECT_LT(run(oracle, again, 6).max_logit, 5e-3);
}

// libllama knows no OPT; scripts/opt_golden.py had `transformers` compute these logits in F32.
TEST(Oracle, OptAgreesWithTransformers) {
  const std::string folder = HCACHE_TEST_DATA "/golden";
  std::ifstream in(folder + "/opt_tiny.json");
  const auto golden = nlohmann::json::parse(in);
  const auto tokens = golden.at("tokens").get<Tokens>();
  const auto expected = golden.at("logits").get<std::vector<Row>>();

  // The file holds F16; widened to F32 nothing but the order of sums differs from transformers.
  const model::test::TempDir dir;
  const std::string narrow = folder + "/opt_tiny.gguf";
  const std::string wide = dir.file("f32.gguf");
  ASSERT_TRUE(model::requantise(narrow, wide, GGML_TYPE_F32, 1, nullptr).ok());
  struct Run {
    const std::string& path;
    EngineOptions options;
    double max_logit;
  };
  const Run runs[] = {
      {wide, {.kv_type = GGML_TYPE_F32, .attention = AttentionKind::kGgml}, 1e-3},
      {narrow, {.attention = AttentionKind::kAuto}, 3e-2},
  };
  for (const Run& r : runs) {
    Ours ours(r.path, r.options);
    std::vector<Row> actual;
    std::span<const int32_t> rest = tokens;
    while (!rest.empty()) {
      // A prefill of odd size, then single tokens.
      const size_t n = actual.empty() ? 29 : 1;
      std::vector<Row> rows = ours.append(rest.first(n));
      ASSERT_EQ(rows.size(), n) << "the engine said why";
      for (Row& row : rows) actual.push_back(std::move(row));
      rest = rest.subspan(n);
    }
    const Difference d = compare(expected, actual);
    EXPECT_TRUE(d.finite);
    EXPECT_LT(d.max_logit, on_cuda() ? 0.1 : r.max_logit) << r.path;
  }
}

class DefaultModel : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!hcache::testing::on_cpu()) GTEST_SKIP() << "takes a fast device";
    ASSERT_TRUE(std::filesystem::exists(HCACHE_TEST_MODEL)) << "make print-model fetches it";
  }
};

// A text for the model that was trained on text: on noise its answers are far more fragile.
constexpr const char* kText =
    "The lighthouse keeper wrote everything down. On Monday the wind came from the north and the "
    "supply boat could not land, so he ate the last of the bread and mended the blue net. On "
    "Tuesday a merchant ship passed close to the rocks; he lit the lamp at noon and rang the bell "
    "until the captain turned away. The captain waved. On Wednesday the sea was flat like a plate, "
    "and two girls rowed over from the village with a letter from the harbour office. It asked him "
    "to count the birds that nested below the gallery: how many pairs, how many eggs, and on which "
    "side of the tower. He climbed down with a rope around his waist and counted forty-one nests, "
    "most of them facing east, where the morning sun warms the stone. He wrote the number on a "
    "slip of paper, put it into a bottle and gave the bottle to the girls. What they thought of it "
    "he never learned, but in the spring the office sent him a telescope, a box of good pencils "
    "and "
    "a second letter, which asked him to count the birds again. So he did, and this time he also "
    "counted the ships, the storms and the days on which nobody came.";

TEST_F(DefaultModel, AgreesWithEitherAttention) {
  for (const AttentionKind kind : {AttentionKind::kAuto, AttentionKind::kGgml}) {
    Oracle oracle(HCACHE_TEST_MODEL, GGML_TYPE_F16, true);
    Ours ours(HCACHE_TEST_MODEL, {.arena_tokens = 1024, .attention = kind});
    Tokens tokens = oracle.tokenize(kText);
    ASSERT_GE(tokens.size(), static_cast<size_t>(n_tokens()));
    const Difference d = run(oracle, ours, tokens);
    EXPECT_TRUE(d.finite);
    EXPECT_LT(d.mean_kl, 5e-3);
    RecordProperty(kind == AttentionKind::kAuto ? "mean_kl_ours" : "mean_kl_ggml",
                   std::to_string(d.mean_kl));
  }
}

}  // namespace
}  // namespace hcache::test
