// Synthesis, rewriting and description of model files. What rewritten models answer is tested
// with the engine (tests/e2e/oracle_test.cc); here it is what the files hold.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <nlohmann/json.hpp>

#include "gguf_file.h"
#include "model/tools.h"
#include "model_fixtures.h"

namespace hcache::model {
namespace {

using test::TempDir;

std::vector<float> widen(const GgufTensor& t) {
  std::vector<float> out(static_cast<size_t>(t.n_elements()));
  if (t.type == GGML_TYPE_F32) {
    memcpy(out.data(), t.data.data(), t.data.size());
  } else {
    ggml_get_type_traits(t.type)->to_float(t.data.data(), out.data(), t.n_elements());
  }
  return out;
}

std::unique_ptr<GgufFile> open(const std::string& path) {
  auto file = GgufFile::open(path);
  EXPECT_TRUE(file.ok()) << file.status().to_string();
  return std::move(file).value();
}

TEST(Shapes, PublishedShapesAreConsistent) {
  for (const ModelShape& s : published_shapes()) {
    EXPECT_NE(find_decoder_spec(s.arch), nullptr) << s.name;
    EXPECT_EQ(s.n_head % s.n_head_kv, 0) << s.name;
    EXPECT_EQ(find_shape(s.name).value().n_ff, s.n_ff);
  }
  const auto missing = find_shape("gpt-5");
  EXPECT_EQ(missing.code(), Code::kNotFound);
  EXPECT_NE(missing.status().message().find("llama2-7b"), std::string::npos);
}

TEST(Synth, SameBytesWithAnyThreads) {
  const TempDir dir;
  auto options = test::tiny_options("qwen3", 2, GGML_TYPE_Q4_K);
  const auto one = test::read_file(test::make_tiny(dir, options));
  options.n_threads = 3;
  EXPECT_EQ(test::read_file(test::make_tiny(dir, options)), one);
  options.seed = 9;
  EXPECT_NE(test::read_file(test::make_tiny(dir, options)), one);
}

TEST(Synth, WeightsHaveTheirScale) {
  const TempDir dir;
  const auto file = open(test::make_tiny(dir, test::tiny_options("llama", 2, GGML_TYPE_F32)));
  const auto moments = [&](const char* name) {
    const GgufTensor* t = file->tensor(name);
    EXPECT_NE(t, nullptr) << name;
    double sum = 0;
    double squares = 0;
    for (const float v : widen(*t)) {
      sum += v;
      squares += double{v} * v;
    }
    const auto n = static_cast<double>(t->n_elements());
    return std::pair(sum / n, std::sqrt(squares / n));
  };
  EXPECT_NEAR(moments("blk.0.attn_q.weight").second, 1.0 / 16, 1e-3);
  EXPECT_NEAR(moments("blk.0.attn_q.weight").first, 0.0, 1e-3);
  EXPECT_NEAR(moments("token_embd.weight").second, 1.0, 1e-2);
  EXPECT_NEAR(moments("blk.2.ffn_norm.weight").first, 1.0, 2e-2);
}

TEST(Synth, LargeQuantisedTensorsHaveTheSameScale) {
  const TempDir dir;
  auto options = test::tiny_options("llama", 2, GGML_TYPE_Q4_K);
  options.shape.n_layer = 1;
  options.shape.n_vocab = 32768;  // 2^23 weights: composed of blocks
  const std::string path = test::make_tiny(dir, options);
  const auto values = widen(*open(path)->tensor("token_embd.weight"));
  double sum = 0;
  double squares = 0;
  for (const float v : values) {
    sum += v;
    squares += double{v} * v;
  }
  const auto n = static_cast<double>(values.size());
  EXPECT_NEAR(sum / n, 0.0, 1e-2);
  EXPECT_NEAR(std::sqrt(squares / n), 1.0, 2e-2);
  for (size_t row = 1; row < 64; row++) {
    const auto other = values.begin() + static_cast<std::ptrdiff_t>(row * 256);
    EXPECT_FALSE(std::equal(other, other + 256, values.begin()));
  }
  const auto first = test::read_file(path);
  options.n_threads = 3;
  EXPECT_EQ(test::read_file(test::make_tiny(dir, options)), first);
}

TEST(Synth, CopiesAVocabulary) {
  ASSERT_TRUE(std::filesystem::exists(HCACHE_TEST_MODEL)) << "make print-model fetches it";
  const TempDir dir;
  auto options = test::tiny_options("llama", 2, GGML_TYPE_Q8_0);
  options.vocab_from = HCACHE_TEST_MODEL;
  const auto file = open(test::make_tiny(dir, options));
  EXPECT_EQ(file->tensor("token_embd.weight")->ne[1], 49152);
  EXPECT_EQ(file->find("tokenizer.ggml.tokens")->count, 49152U);
  EXPECT_NE(file->find("tokenizer.ggml.merges"), nullptr);
  options.vocab_from = dir.file("absent");
  EXPECT_EQ(synthesise_model(options, dir.file("x")).code(), Code::kNotFound);
}

TEST(Synth, RefusesWhatCannotBe) {
  const TempDir dir;
  SynthOptions options;
  options.shape = find_shape("falcon-7b").value();  // 4544 is no multiple of 256
  options.n_layer = 1;
  options.type = GGML_TYPE_Q4_K;
  EXPECT_EQ(synthesise_model(options, dir.file("x")).code(), Code::kInvalidArgument);
  options.type = GGML_TYPE_I8;
  EXPECT_EQ(synthesise_model(options, dir.file("x")).code(), Code::kInvalidArgument);
  options = test::tiny_options("llama", 2, GGML_TYPE_F16);
  EXPECT_EQ(synthesise_model(options, dir.file("no/such/dir")).code(), Code::kNotFound);
  options.progress = [](float) { return false; };
  EXPECT_EQ(synthesise_model(options, dir.file("x")).code(), Code::kCancelled);
  EXPECT_TRUE(std::filesystem::is_empty(dir.file("")));  // nothing half-written stays
}

TEST(ExpandKv, RepeatsEachHeadForItsReaders) {
  const TempDir dir;
  for (const char* arch : {"llama", "qwen2", "falcon", "olmo2"}) {
    const std::string in = test::make_tiny(dir, test::tiny_options(arch, 2, GGML_TYPE_Q4_1));
    const std::string out = dir.file("twin.gguf");
    ASSERT_TRUE(expand_kv(in, out, 2, nullptr).ok());
    const auto old_file = open(in);
    const auto new_file = open(out);
    const std::string key = std::string(arch) + ".attention.head_count_kv";
    EXPECT_EQ(new_file->integer(key).value().value_or(0), 4);
    const bool fused = find_decoder_spec(arch)->fused_qkv;
    const std::string name = fused ? "blk.1.attn_qkv.weight" : "blk.1.attn_k.weight";
    const GgufTensor* a = old_file->tensor(name);
    const GgufTensor* b = new_file->tensor(name);
    const int64_t first = fused ? 256 : 0;  // Q's rows stay
    ASSERT_EQ(b->ne[1], fused ? 256 * 3 : 256);
    for (int64_t row = 0; row < 256; row++) {
      const int64_t head = row / 64 / 2;
      const auto from = static_cast<size_t>(first + head * 64 + row % 64) * a->row_bytes();
      const auto to = static_cast<size_t>(first + row) * b->row_bytes();
      ASSERT_EQ(memcmp(a->data.data() + from, b->data.data() + to, a->row_bytes()), 0);
    }
    if (std::string(arch) == "qwen2") {
      const auto x = widen(*old_file->tensor("blk.0.attn_v.bias"));
      const auto y = widen(*new_file->tensor("blk.0.attn_v.bias"));
      ASSERT_EQ(y.size(), 256U);
      for (size_t i = 0; i < y.size(); i++) ASSERT_EQ(y[i], x[i / 128 * 64 + i % 64]);
    }
    const auto device = test::open_cpu();
    EXPECT_TRUE(Model::load(out, *device).ok());
  }
}

TEST(Requantise, WidensAndNarrowsWithoutPadding) {
  const TempDir dir;
  const std::string in = test::make_tiny(dir, test::tiny_options("falcon", 1, GGML_TYPE_Q4_1));
  const std::string out = dir.file("f32.gguf");
  ASSERT_TRUE(requantise(in, out, GGML_TYPE_F32, 1, nullptr).ok());
  const auto old_file = open(in);
  const auto new_file = open(out);
  for (const GgufTensor& t : old_file->tensors()) {
    const GgufTensor* u = new_file->tensor(t.name);
    ASSERT_NE(u, nullptr);
    EXPECT_EQ(widen(t), widen(*u)) << t.name;
  }
  ASSERT_TRUE(requantise(out, dir.file("q4.gguf"), GGML_TYPE_Q4_K, 1, nullptr).ok());
  EXPECT_EQ(open(dir.file("q4.gguf"))->tensor("blk.0.ffn_up.weight")->type, GGML_TYPE_Q4_K);
}

// A grouped-query model whose width, heads and feed-forward all need padding.
SynthOptions narrow_options() {
  auto options = test::tiny_options("llama", 3, GGML_TYPE_F32);
  options.shape.n_embd = 288;
  options.shape.n_head = 9;
  options.shape.n_head_kv = 3;
  options.shape.head_dim = 32;
  options.shape.n_ff = 96;
  return options;
}

TEST(Requantise, PadsWhatDoesNotDivide) {
  const TempDir dir;
  const std::string in = test::make_tiny(dir, narrow_options());
  const std::string out = dir.file("q4_k.gguf");
  const Status status = requantise(in, out, GGML_TYPE_Q4_K, 1, nullptr);
  ASSERT_TRUE(status.ok()) << status.to_string();
  const auto device = test::open_cpu();
  auto model = Model::load(out, *device);
  ASSERT_TRUE(model.ok()) << model.status().to_string();
  const HParams& h = (*model)->hparams();
  EXPECT_EQ(h.n_embd, 512);
  EXPECT_EQ(h.n_ff, 256);
  EXPECT_EQ(h.n_head_kv, 3);
  EXPECT_EQ(h.n_head, 24);  // 8 per K/V head: 24 * 32 divides by 256
  EXPECT_EQ(h.head_dim, 32);
  EXPECT_FLOAT_EQ(h.norm_eps, 1e-5F * 288 / 512);
  const auto file = open(out);
  const auto embedding = widen(*file->tensor("token_embd.weight"));
  for (size_t i = 288; i < 512; i++) ASSERT_EQ(embedding[i], 0.0F);

  auto layer_norm = test::tiny_options("falcon", 1, GGML_TYPE_F16);
  layer_norm.shape.n_ff = 96;
  EXPECT_EQ(requantise(test::make_tiny(dir, layer_norm), out, GGML_TYPE_Q4_K, 1, nullptr).code(),
            Code::kUnimplemented);
}

TEST(Describe, ReportsKnownAndUnknownModels) {
  const TempDir dir;
  const std::string path = test::make_tiny(dir, test::tiny_options("qwen2", 2, GGML_TYPE_Q4_0));
  const auto info = describe_model(path);
  ASSERT_TRUE(info.ok()) << info.status().to_string();
  EXPECT_TRUE(info->supported);
  EXPECT_EQ(info->hparams.n_vocab, 320);
  EXPECT_EQ(info->kv_bytes_per_token(), 3U * 2 * 2 * 128);
  EXPECT_EQ(info->types.substr(0, 4), "Q4_0");
  const auto j = nlohmann::json::parse(to_json(*info, true));
  EXPECT_EQ(j["architecture"], "qwen2");
  EXPECT_EQ(j["tensors"].size(), info->tensors.size());
  EXPECT_EQ(j["metadata"]["qwen2.attention.head_count"], "4");
  EXPECT_FALSE(nlohmann::json::parse(to_json(*info, false)).contains("tensors"));

  auto bytes = test::read_file(path);
  const std::string arch = "qwen2";
  const auto at = std::search(bytes.begin(), bytes.end(), arch.begin(), arch.end());
  *at = 'Q';
  test::write_file(path, bytes);
  const auto unknown = describe_model(path);
  ASSERT_TRUE(unknown.ok()) << unknown.status().to_string();
  EXPECT_FALSE(unknown->supported);
  EXPECT_NE(unknown->unsupported.find("Qwen2"), std::string::npos);
  EXPECT_EQ(nlohmann::json::parse(to_json(*unknown, false))["supported"], false);
  EXPECT_EQ(describe_model(dir.file("absent")).code(), Code::kNotFound);
}

}  // namespace
}  // namespace hcache::model
