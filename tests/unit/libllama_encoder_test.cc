// Vectors and ranks of texts: as libllama itself gives them, and the same in any company.
#include <gmock/gmock.h>
#include <llama.h>

#include <cmath>
#include <numeric>

#include "libllama/llama_encoder.h"
#include "model/tokenizer.h"
#include "model_fixtures.h"
#include "tiny_encoder.h"

namespace hcache::libllama {
namespace {

using ::testing::HasSubstr;

using Text = std::vector<int32_t>;

// Of a number in a vector of length 1, or of a score. libllama's kernels round otherwise in other
// batches, and its GELU goes through a table of half-precision numbers.
constexpr float kClose = 1e-4F;

std::string tiny_file(const model::test::TempDir& dir, const test::TinyEncoder& options) {
  std::string path = dir.file("encoder.gguf");
  EXPECT_TRUE(test::TinyEncoderFile(options).write(path));
  return path;
}

Text text_of(int n, int32_t first) {
  Text text(static_cast<size_t>(n));
  for (size_t i = 0; i < text.size(); ++i) {
    text[i] = 5 + (first + 7 * static_cast<int32_t>(i)) % 40;
  }
  return text;
}

std::unique_ptr<LlamaEncoder> loaded(const std::string& path, EncoderOptions options = {}) {
  options.n_threads = 1;
  auto encoder = LlamaEncoder::load(path, options);
  EXPECT_TRUE(encoder.ok()) << encoder.status().to_string();
  return std::move(*encoder);
}

EncoderOptions pooled_by(model::Pooling pooling) {
  EncoderOptions options;
  options.pooling = pooling;
  return options;
}

float length_of(const std::vector<float>& row) {
  return std::sqrt(std::inner_product(row.begin(), row.end(), row.begin(), 0.0F));
}

void expect_close(const EncodedText& a, const EncodedText& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t row = 0; row < a.size(); ++row) {
    ASSERT_EQ(a[row].size(), b[row].size());
    const float length = std::max(1.0F, length_of(b[row]));
    for (size_t i = 0; i < a[row].size(); ++i) {
      ASSERT_NEAR(a[row][i] / length, b[row][i] / length, kClose);
    }
  }
}

// What libllama gives for one text, used by its own functions alone.
EncodedText by_libllama(const std::string& path, const Text& text, enum llama_pooling_type pooling,
                        int width) {
  llama_model* model = llama_model_load_from_file(path.c_str(), llama_model_default_params());
  llama_context_params params = llama_context_default_params();
  params.n_ctx = params.n_batch = params.n_ubatch = 512;
  params.n_threads = params.n_threads_batch = 1;
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
  params.embeddings = true;
  params.pooling_type = pooling;
  llama_context* context = llama_init_from_model(model, params);
  Text tokens = text;
  EXPECT_EQ(llama_decode(context,
                         llama_batch_get_one(tokens.data(), static_cast<int32_t>(tokens.size()))),
            0);
  EncodedText rows;
  if (pooling == LLAMA_POOLING_TYPE_NONE) {
    for (int i = 0; i < static_cast<int>(text.size()); ++i) {
      const float* row = llama_get_embeddings_ith(context, i);
      rows.emplace_back(row, row + width);
    }
  } else {
    const float* row = llama_get_embeddings_seq(context, 0);
    rows.emplace_back(row, row + width);
  }
  llama_free(context);
  llama_model_free(model);
  return rows;
}

TEST(LlamaEncoder, GivesWhatLibllamaGives) {
  const model::test::TempDir dir;
  const Text text = text_of(21, 3);
  for (const auto& [pooling, type] : {std::pair{model::Pooling::kMean, LLAMA_POOLING_TYPE_MEAN},
                                      std::pair{model::Pooling::kFirst, LLAMA_POOLING_TYPE_CLS},
                                      std::pair{model::Pooling::kLast, LLAMA_POOLING_TYPE_LAST},
                                      std::pair{model::Pooling::kNone, LLAMA_POOLING_TYPE_NONE}}) {
    const std::string path = tiny_file(dir, {});
    const auto encoder = loaded(path, pooled_by(pooling));
    const auto rows = encoder->encode({&text, 1});
    ASSERT_TRUE(rows.ok()) << rows.status().to_string();
    expect_close(rows->front(), by_libllama(path, text, type, encoder->width()));
  }
  const std::string ranker = tiny_file(dir, {.pooling = 4});
  const auto encoder = loaded(ranker);
  EXPECT_EQ(encoder->width(), 1);
  expect_close(encoder->encode({&text, 1}).value().front(),
               by_libllama(ranker, text, LLAMA_POOLING_TYPE_RANK, 1));
}

TEST(LlamaEncoder, GivesATextTheSameInAnyCompany) {
  const model::test::TempDir dir;
  std::vector<Text> texts;
  for (int i = 0; i < 20; ++i) texts.push_back(text_of(1 + i * 3, i));
  for (const int pooling : {0, 1, 2, 4}) {
    const std::string path = tiny_file(dir, {.pooling = pooling});
    EncoderOptions options;
    options.max_batch_tokens = 200;
    options.max_batch_texts = 7;
    const auto encoder = loaded(path, options);
    const std::vector<EncodedText> together = encoder->encode(texts).value();
    ASSERT_EQ(together.size(), texts.size());
    for (size_t i = 0; i < texts.size(); ++i) {
      EXPECT_EQ(together[i].size(), pooling == 0 ? texts[i].size() : 1);
      expect_close(together[i], encoder->encode({&texts[i], 1}).value().front());
    }
    if (pooling == 0) continue;
    EXPECT_GT(std::abs(together[3][0][0] - together[9][0][0]), kClose) << "all texts are the same";
  }
}

TEST(LlamaEncoder, TakesADecoderByItsPooling) {
  const model::test::TempDir dir;
  auto options = model::test::tiny_options("qwen3", 2, GGML_TYPE_F32);
  options.extra_integers = {{"qwen3.pooling_type", 3}};
  const std::string path = model::test::make_tiny(dir, options);
  const auto encoder = loaded(path);
  EXPECT_EQ(encoder->options().pooling, model::Pooling::kLast);
  const std::vector<Text> texts = {text_of(30, 1), text_of(9, 2), text_of(17, 3)};
  const std::vector<EncodedText> together = encoder->encode(texts).value();
  for (size_t i = 0; i < texts.size(); ++i) {
    const EncodedText alone =
        by_libllama(path, texts[i], LLAMA_POOLING_TYPE_LAST, encoder->width());
    ASSERT_EQ(together[i].front().size(), alone.front().size());
    for (size_t k = 0; k < alone.front().size(); ++k) {
      EXPECT_NEAR(together[i].front()[k], alone.front()[k], 2e-3);  // its cache is F16
    }
  }
}

TEST(LlamaEncoder, TakesADecoderThatRanks) {
  const model::test::TempDir dir;
  auto options = model::test::tiny_options("qwen3", 2, GGML_TYPE_F32);
  options.ranking_labels = 2;
  const std::string path = model::test::make_tiny(dir, options);
  const auto encoder = loaded(path);
  EXPECT_EQ(encoder->options().pooling, model::Pooling::kRank);
  EXPECT_EQ(encoder->width(), 2);
  const std::vector<Text> texts = {text_of(30, 1), text_of(9, 2), text_of(17, 3)};
  const std::vector<EncodedText> together = encoder->encode(texts).value();
  for (size_t i = 0; i < texts.size(); ++i) {
    const std::vector<float>& scores = together[i].front();
    const EncodedText alone = by_libllama(path, texts[i], LLAMA_POOLING_TYPE_RANK, 2);
    ASSERT_EQ(scores.size(), 2);
    for (size_t k = 0; k < 2; ++k) EXPECT_NEAR(scores[k], alone.front()[k], 2e-3);
    EXPECT_NEAR(scores[0] + scores[1], 1, 1e-5);  // shares of the labels
  }
  EXPECT_GT(std::abs(together[0].front()[0] - together[1].front()[0]), 1e-2) << "all are the same";
}

TEST(LlamaEncoder, SaysWhatItCantTake) {
  const model::test::TempDir dir;
  const std::string path = tiny_file(dir, {});
  const auto encoder = loaded(path);
  const auto refused = [&](Text text) { return encoder->encode({&text, 1}).status(); };
  EXPECT_EQ(refused(text_of(65, 0)).message(),
            "a text has 65 tokens, and the model takes 64 at most");
  EXPECT_EQ(refused(text_of(65, 0)).code(), Code::kOutOfRange);
  EXPECT_EQ(refused({}).code(), Code::kInvalidArgument);
  EXPECT_EQ(refused({5, 100000}).message(), "the vocabulary has no token 100000");
  EncoderOptions shorter;
  shorter.max_text_tokens = 10;
  EXPECT_EQ(loaded(path, shorter)->options().max_text_tokens, 10);
  const auto ranks = LlamaEncoder::load(path, pooled_by(model::Pooling::kRank));
  EXPECT_EQ(ranks.code(), Code::kFailedPrecondition);
  EXPECT_THAT(ranks.status().message(), HasSubstr("no head that ranks"));
}

TEST(LlamaEncoder, HasTheTokenizerOfItsFile) {
  const model::test::TempDir dir;
  const std::string path = tiny_file(dir, {.pooling = 4});
  EXPECT_TRUE(model::encoder_facts(path).value().encodes);
  EXPECT_TRUE(model::encoder_facts(path).value().has_head);
  const auto tokenizer = model::Tokenizer::load(path);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().to_string();
  const Text sea = (*tokenizer)->encode("The sea", {.add_special = true}).value();
  ASSERT_EQ(sea.size(), 4);
  EXPECT_EQ(sea.front(), 2);
  EXPECT_EQ(sea.back(), 3);
  EXPECT_TRUE((*tokenizer)->adds_end());
  const Text pair = (*tokenizer)->encode_pair("the", "sea").value();
  EXPECT_EQ(pair, (Text{2, sea[1], 3, sea[2]}));
}

}  // namespace
}  // namespace hcache::libllama
