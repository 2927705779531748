#include <gtest/gtest.h>

#include <random>

#include "model/tokenizer.h"
#include "text_gguf.h"

namespace hcache::model {
namespace {

using test::Gguf;
using test::TempFile;
using test::tiny_vocab;

std::unique_ptr<Tokenizer> load(const std::string& path) {
  auto tokenizer = Tokenizer::load(path);
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status().to_string();
  return tokenizer.ok() ? std::move(tokenizer).value() : nullptr;
}

TEST(Tokenizer, DefaultModelRoundTrips) {
  const auto t = load(HCACHE_TEST_MODEL);
  ASSERT_NE(t, nullptr);
  EXPECT_EQ(t->n_vocab(), 49152);
  EXPECT_TRUE(t->is_eog(t->eos()));
  EXPECT_FALSE(t->is_eog(-1));
  EXPECT_FALSE(t->is_eog(t->n_vocab()));
  EXPECT_FALSE(t->chat_template().empty());
  for (const std::string text :
       {"", "Hello, world!", "  two  spaces\n\n\ttab ", "naïve café — 東京 🗼 \xF0\x9F\x91\xA9",
        "int main() { return 0; }", "<|im_start|>"}) {
    const auto tokens = t->encode(text);
    ASSERT_TRUE(tokens.ok()) << tokens.status().to_string();
    const auto back = t->decode(*tokens);
    ASSERT_TRUE(back.ok());
    EXPECT_EQ(*back, text);
  }
}

TEST(Tokenizer, SpecialTokensOnlyWhereAsked) {
  const auto t = load(HCACHE_TEST_MODEL);
  ASSERT_NE(t, nullptr);
  const auto letters = t->encode("<|im_end|>").value();
  EXPECT_GT(letters.size(), 1U);
  const auto token = t->encode("<|im_end|>", {.parse_special = true}).value();
  ASSERT_EQ(token.size(), 1U);
  EXPECT_TRUE(t->is_eog(token[0]));
  EXPECT_EQ(t->piece(token[0]), "");
  EXPECT_EQ(t->piece(token[0], true), "<|im_end|>");
  EXPECT_EQ(t->piece(-1), "");
  EXPECT_EQ(t->piece(t->n_vocab()), "");
}

TEST(Tokenizer, DecodeNamesAForeignToken) {
  const auto t = load(HCACHE_TEST_MODEL);
  ASSERT_NE(t, nullptr);
  const int32_t tokens[] = {1, 49152};
  const auto text = t->decode(tokens);
  EXPECT_EQ(text.code(), Code::kInvalidArgument);
  EXPECT_NE(text.status().message().find("49152"), std::string::npos);
}

// llama.cpp knows no architecture `opt`; its vocabulary is a plain gpt2 one.
TEST(Tokenizer, ArchitectureDoesNotMatter) {
  const Gguf ctx = tiny_vocab();
  gguf_set_val_str(ctx.get(), "general.architecture", "opt");
  const TempFile file(ctx);
  const auto t = load(file.path());
  ASSERT_NE(t, nullptr);
  EXPECT_EQ(t->n_vocab(), 258);
  EXPECT_EQ(t->encode("he he").value(), (std::vector<int32_t>{256, ' ', 256}));
  EXPECT_EQ(t->chat_template(), "");
}

TEST(Tokenizer, SentencePieceVocabulary) {
  const Gguf ctx(gguf_init_empty());
  gguf_set_val_str(ctx.get(), "general.architecture", "llama");
  gguf_set_val_str(ctx.get(), "tokenizer.ggml.model", "llama");
  std::vector<std::string> tokens = {"<unk>", "<s>", "</s>"};
  std::vector<int32_t> types = {2, 3, 3};
  for (int byte = 0; byte < 256; byte++) {
    char name[8];
    std::snprintf(name, sizeof(name), "<0x%02X>", byte);
    tokens.emplace_back(name);
    types.push_back(6);
  }
  for (const char* word : {"\u2581", "a", "b", "\u2581a", "ab", "\u2581ab"}) {
    tokens.emplace_back(word);
    types.push_back(1);
  }
  std::vector<float> scores(tokens.size(), 0);
  for (size_t i = 259; i < scores.size(); i++) scores[i] = static_cast<float>(i) - 300;
  std::vector<const char*> pointers;
  for (const std::string& s : tokens) pointers.push_back(s.c_str());
  gguf_set_arr_str(ctx.get(), "tokenizer.ggml.tokens", pointers.data(), pointers.size());
  gguf_set_arr_data(ctx.get(), "tokenizer.ggml.token_type", GGUF_TYPE_INT32, types.data(),
                    types.size());
  gguf_set_arr_data(ctx.get(), "tokenizer.ggml.scores", GGUF_TYPE_FLOAT32, scores.data(),
                    scores.size());
  const TempFile file(ctx);
  const auto t = load(file.path());
  ASSERT_NE(t, nullptr);
  EXPECT_TRUE(t->adds_bos());
  const auto encoded = t->encode("ab\u00e9", {.add_special = true}).value();
  // BOS, "_ab", and the two bytes of é.
  EXPECT_EQ(encoded, (std::vector<int32_t>{1, 264, 3 + 0xC3, 3 + 0xA9}));
  EXPECT_EQ(t->decode(encoded).value(), " ab\u00e9");
}

// RWKV's: the longest token wins, texts are escaped.
TEST(Tokenizer, VocabulariesAreCompared) {
  const auto real = load(HCACHE_TEST_MODEL);
  const auto tiny = load(TempFile(tiny_vocab()).path());
  ASSERT_TRUE(real && tiny);
  EXPECT_EQ(common_vocabulary(*real, *real).value_or(-1), real->n_vocab());
  const auto other = common_vocabulary(*real, *tiny);
  EXPECT_EQ(other.code(), Code::kInvalidArgument);
  EXPECT_NE(other.status().message().find("49152"), std::string::npos);

  const Gguf renamed = tiny_vocab();
  const int64_t key = gguf_find_key(renamed.get(), "tokenizer.ggml.tokens");
  std::vector<std::string> names;
  for (size_t i = 0; i < gguf_get_arr_n(renamed.get(), key); ++i) {
    names.emplace_back(gguf_get_arr_str(renamed.get(), key, i));
  }
  names[257] = "<|another|>";
  std::vector<const char*> pointers;
  for (const std::string& name : names) pointers.push_back(name.c_str());
  gguf_set_arr_str(renamed.get(), "tokenizer.ggml.tokens", pointers.data(), pointers.size());
  const auto differs = common_vocabulary(*tiny, *load(TempFile(renamed).path()));
  EXPECT_EQ(differs.code(), Code::kInvalidArgument);
  EXPECT_NE(differs.status().message().find("token 257"), std::string::npos)
      << differs.status().to_string();
}

TEST(Tokenizer, ReadsEscapedTokens) {
  const Gguf ctx(gguf_init_empty());
  gguf_set_val_str(ctx.get(), "general.architecture", "rwkv6");
  gguf_set_val_str(ctx.get(), "tokenizer.ggml.model", "rwkv");
  const char* tokens[] = {"<s>", "\\n", "a", "ab", "b"};
  gguf_set_arr_str(ctx.get(), "tokenizer.ggml.tokens", tokens, std::size(tokens));
  const TempFile file(ctx);
  const auto t = load(file.path());
  ASSERT_NE(t, nullptr);
  const std::vector<int32_t> expected = {3, 2, 2, 1, 4};
  EXPECT_EQ(t->encode("abaa\nb").value(), expected);
  EXPECT_EQ(t->decode(expected).value(), "abaa\nb");
}

TEST(Tokenizer, ErrorsSayWhatIsWrong) {
  EXPECT_EQ(Tokenizer::load("/nonexistent/model.gguf").code(), Code::kNotFound);
  {
    const TempFile file;
    file.write("this is no model");
    EXPECT_EQ(Tokenizer::load(file.path()).code(), Code::kDataLoss);
    file.write("");
    EXPECT_EQ(Tokenizer::load(file.path()).code(), Code::kDataLoss);
  }
  {
    const Gguf ctx(gguf_init_empty());
    gguf_set_val_str(ctx.get(), "general.architecture", "llama");
    const TempFile file(ctx);
    const auto t = Tokenizer::load(file.path());
    EXPECT_EQ(t.code(), Code::kFailedPrecondition);
    EXPECT_NE(t.status().message().find("no vocabulary"), std::string::npos);
  }
  {
    const Gguf ctx = tiny_vocab();
    gguf_set_val_str(ctx.get(), "tokenizer.ggml.model", "unheard-of");
    EXPECT_EQ(Tokenizer::load(TempFile(ctx).path()).code(), Code::kUnimplemented);
  }
  {
    // llama.cpp would end the process: BERT's texts end with a token that is not there, 102 where
    // the file names none.
    const Gguf ctx = tiny_vocab();
    const char* few[] = {"a", "b", "c"};
    gguf_set_val_str(ctx.get(), "tokenizer.ggml.model", "bert");
    gguf_set_arr_str(ctx.get(), "tokenizer.ggml.tokens", few, 3);
    EXPECT_EQ(Tokenizer::load(TempFile(ctx).path()).code(), Code::kDataLoss);
  }
  {
    // llama.cpp would end the process.
    const Gguf ctx = tiny_vocab();
    gguf_set_val_str(ctx.get(), "tokenizer.ggml.model", "rwkv");
    const auto t = Tokenizer::load(TempFile(ctx).path());
    EXPECT_EQ(t.code(), Code::kDataLoss);
    EXPECT_NE(t.status().message().find("end of a line"), std::string::npos);
  }
  {
    const Gguf ctx = tiny_vocab();
    const char* twice[] = {"a", "b", "a"};
    gguf_set_arr_str(ctx.get(), "tokenizer.ggml.tokens", twice, 3);
    EXPECT_EQ(Tokenizer::load(TempFile(ctx).path()).code(), Code::kDataLoss);
  }
  {
    const Gguf ctx = tiny_vocab();
    gguf_set_val_str(ctx.get(), "tokenizer.ggml.pre", "of-the-future");
    const auto t = Tokenizer::load(TempFile(ctx).path());
    EXPECT_EQ(t.code(), Code::kDataLoss);
    EXPECT_NE(t.status().message().find("of-the-future"), std::string::npos);
  }
  {
    const Gguf ctx = tiny_vocab();
    gguf_set_val_str(ctx.get(), "tokenizer.ggml.tokens", "not a list");
    EXPECT_EQ(Tokenizer::load(TempFile(ctx).path()).code(), Code::kDataLoss);
  }
}

// Every prefix and random damage: an error or a usable vocabulary, never a crash.
TEST(Tokenizer, SurvivesDamagedFiles) {
  const TempFile file(tiny_vocab());
  const std::string good = file.read();
  ASSERT_GT(good.size(), 1000U);
  for (size_t n = 0; n < good.size(); n += n < 400 ? 1 : 37) {
    file.write(good.substr(0, n));
    EXPECT_FALSE(Tokenizer::load(file.path()).ok()) << "cut at " << n;
  }
  std::mt19937 rng(7);
  for (int round = 0; round < 1500; round++) {
    std::string bad = good;
    const int hits = 1 + static_cast<int>(rng() % 4);
    for (int i = 0; i < hits; i++) bad[rng() % bad.size()] = static_cast<char>(rng());
    file.write(bad);
    const auto t = Tokenizer::load(file.path());
    if (!t.ok()) continue;
    const auto tokens = t.value()->encode("he said: \u00fc!", {true, true});
    if (tokens.ok()) t.value()->decode(*tokens, true).status().ignore("damaged on purpose");
  }
}

TEST(Utf8, TakesWholeCharactersOnly) {
  const auto take = [](std::string bytes) {
    std::string out = take_valid_utf8(bytes);
    return std::pair(out, bytes);
  };
  using P = std::pair<std::string, std::string>;
  EXPECT_EQ(take("abc"), P("abc", ""));
  EXPECT_EQ(take("a\xF0\x9F\x97"), P("a", "\xF0\x9F\x97"));
  EXPECT_EQ(take("a\xF0\x9F\x97\xBC"), P("a\xF0\x9F\x97\xBC", ""));
  EXPECT_EQ(take("\xC3"), P("", "\xC3"));
  EXPECT_EQ(take("\xC3("), P("\uFFFD(", ""));
  EXPECT_EQ(take("\x80\xBF"), P("\uFFFD\uFFFD", ""));
  EXPECT_EQ(take("\xC0\xAF"), P("\uFFFD\uFFFD", ""));                      // overlong
  EXPECT_EQ(take("\xED\xA0\x80"), P("\uFFFD\uFFFD\uFFFD", ""));            // surrogate
  EXPECT_EQ(take("\xF4\x90\x80\x80"), P("\uFFFD\uFFFD\uFFFD\uFFFD", ""));  // above U+10FFFF
  EXPECT_EQ(take("\xE2\x82 x"), P("\uFFFD x", ""));
}

TEST(TextDecoder, HoldsBackUnfinishedCharacters) {
  const auto t = load(HCACHE_TEST_MODEL);
  ASSERT_NE(t, nullptr);
  const std::string text = "🗼🦜";
  const auto tokens = t->encode(text).value();
  ASSERT_GT(tokens.size(), 2U) << "the characters should need several tokens";
  TextDecoder decoder(*t);
  std::string out;
  for (const int32_t token : tokens) {
    const std::string delta = decoder.push(token);
    out += delta;
    std::string copy = delta;
    EXPECT_EQ(take_valid_utf8(copy), delta) << "a fragment came through";
    EXPECT_EQ(copy, "") << "a fragment came through";
  }
  EXPECT_EQ(out, text);
  EXPECT_EQ(decoder.flush(), "");

  TextDecoder cut(*t);
  EXPECT_EQ(cut.push(tokens[0]), "");
  EXPECT_EQ(cut.flush(), "\uFFFD");
  EXPECT_EQ(cut.flush(), "");
}

}  // namespace
}  // namespace hcache::model
