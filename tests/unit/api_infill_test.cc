// /infill: what stands before, behind and in a gap, in the tokens of a vocabulary that has marks
// for it, and what is left out where there is no room.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "api_testing.h"
#include "text_gguf.h"

namespace hcache::api {
namespace {

using ::testing::HasSubstr;

constexpr int32_t kPrefix = 200;
constexpr int32_t kSuffix = 201;
constexpr int32_t kMiddle = 202;
constexpr int32_t kRepository = 203;
constexpr int32_t kFile = 204;

enum class Marks { kNone, kGap, kAll };

std::unique_ptr<model::Tokenizer> vocabulary(Marks marks) {
  const auto gguf = model::test::tiny_vocab();
  const auto set = [&](const char* name, int32_t token) {
    gguf_set_val_u32(gguf.get(), name, static_cast<uint32_t>(token));
  };
  if (marks != Marks::kNone) {
    set("tokenizer.ggml.fim_pre_token_id", kPrefix);
    set("tokenizer.ggml.fim_suf_token_id", kSuffix);
    set("tokenizer.ggml.fim_mid_token_id", kMiddle);
  }
  if (marks == Marks::kAll) {
    set("tokenizer.ggml.fim_rep_token_id", kRepository);
    set("tokenizer.ggml.fim_sep_token_id", kFile);
  }
  const model::test::TempFile file(gguf);
  auto tokenizer = model::Tokenizer::load(file.path());
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status().to_string();
  return std::move(*tokenizer);
}

// A byte is its own token; marks are written <P>, <S>, <M>, <R> and <F>.
std::string shown(const std::vector<int32_t>& tokens) {
  std::string out;
  for (const int32_t token : tokens) {
    switch (token) {
      case kPrefix: out += "<P>"; break;
      case kSuffix: out += "<S>"; break;
      case kMiddle: out += "<M>"; break;
      case kRepository: out += "<R>"; break;
      case kFile: out += "<F>"; break;
      default: out += static_cast<char>(token);
    }
  }
  return out;
}

std::string prompt(const InfillRequest& request, int64_t room, Marks marks = Marks::kGap,
                   bool suffix_first = false) {
  const auto tokens = infill_prompt(*vocabulary(marks), request, room, suffix_first);
  EXPECT_TRUE(tokens.ok()) << tokens.status().to_string();
  if (!tokens.ok()) return {};
  EXPECT_LE(tokens->size(), static_cast<size_t>(room));
  return shown(*tokens);
}

InfillRequest gap(const std::string& prefix, const std::string& begun, const std::string& suffix) {
  InfillRequest r;
  r.prefix = prefix;
  r.prompt = begun;
  r.suffix = suffix;
  return r;
}

TEST(Infill, MarksStandAroundTheParts) {
  EXPECT_EQ(prompt(gap("ab", "c", "xy"), 100), "<P>abc<S>xy<M>");
  EXPECT_EQ(prompt(gap("ab", "", "xy"), 100, Marks::kGap, true), "<S>xy<P>ab<M>");
  EXPECT_EQ(prompt(gap("", "", ""), 100), "<P><S><M>");
}

TEST(Infill, FurtherTextsComeFirst) {
  InfillRequest r = gap("ab", "", "xy");
  r.extra = {{"f.h", "12"}, {"g.h", "34"}};
  EXPECT_EQ(prompt(r, 100, Marks::kAll), "<R>project\n<F>f.h\n12<F>g.h\n34<P>ab<S>xy<M>");
  EXPECT_EQ(prompt(r, 100), "\n\n--- f.h ---\n\n12\n\n--- g.h ---\n\n34<P>ab<S>xy<M>");
  // The first ones go first, all marks with the last.
  EXPECT_EQ(prompt(r, 26, Marks::kAll), "<R>project\n<F>g.h\n34<P>ab<S>xy<M>");
  EXPECT_EQ(prompt(r, 12, Marks::kAll), "<P>ab<S>xy<M>");
}

TEST(Infill, WhatDoesNotFitIsLeftOut) {
  const std::string many(1000, 'p');
  const std::string behind(1000, 's');
  // A quarter is the suffix's; either has what the other leaves.
  EXPECT_EQ(prompt(gap(many, "", behind), 83),
            "<P>" + std::string(60, 'p') + "<S>" + std::string(20, 's') + "<M>");
  EXPECT_EQ(prompt(gap("ab", "", behind), 83), "<P>ab<S>" + std::string(78, 's') + "<M>");
  EXPECT_EQ(prompt(gap(many, "", "xy"), 83), "<P>" + std::string(70, 'p') + "<S>xy<M>");
  EXPECT_EQ(prompt(gap(many, "", behind), 3), "<P><S><M>");
}

TEST(Infill, AGrowingPrefixKeepsItsBeginning) {
  std::string text;
  std::set<std::string> beginnings;
  for (int i = 0; i < 200; ++i) {
    text += static_cast<char>('a' + i % 26);
    const std::string shown_prompt = prompt(gap(text, "", ""), 83);
    beginnings.insert(shown_prompt.substr(3, 4));
    EXPECT_THAT(shown_prompt,
                HasSubstr(text.substr(text.size() - std::min<size_t>(text.size(), 20))));
  }
  // It grows to 80 tokens and then loses ten at a time.
  EXPECT_LE(beginnings.size(), 20U);
}

TEST(Infill, NeedsTheMarks) {
  const auto tokens = infill_prompt(*vocabulary(Marks::kNone), gap("a", "", "b"), 100, false);
  EXPECT_EQ(tokens.code(), Code::kUnimplemented);
  EXPECT_THAT(tokens.status().message(), HasSubstr("not supported by this model"));
}

TEST(Infill, FieldsAreChecked) {
  const auto read = [](const char* text) { return parse_infill(Json::parse(text)); };
  const auto good = read(R"({"input_prefix": "a", "input_suffix": "b", "prompt": "c",
                             "input_extra": [{"text": "t"}, {"filename": "f", "text": "u"}],
                             "n_predict": 7, "temperature": 0})");
  ASSERT_TRUE(good.ok()) << good.status().to_string();
  EXPECT_EQ(good->extra[0].name, "file");
  EXPECT_EQ(good->extra[1].name, "f");
  EXPECT_EQ(good->generation.max_tokens, 7);
  EXPECT_EQ(good->generation.dialect, Dialect::kLlama);
  for (const char* bad : {R"({"input_prefix": "a"})", R"({"input_suffix": "a"})",
                          R"({"input_prefix": "a", "input_suffix": "b", "prompt": 1})",
                          R"({"input_prefix": "a", "input_suffix": "b", "input_extra": [{}]})",
                          R"({"input_prefix": "a", "input_suffix": "b",
                              "input_extra": [{"filename": 1, "text": "t"}]})"}) {
    EXPECT_EQ(read(bad).code(), Code::kInvalidArgument) << bad;
  }
}

}  // namespace
}  // namespace hcache::api
