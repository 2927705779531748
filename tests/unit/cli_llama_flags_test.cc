// llama-server's flags and variables as hcache's own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <sstream>

#include "llama_flags.h"

namespace hcache::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Variables = std::map<std::string, std::string>;

Result<LlamaFlags> translate(const std::string& line, const Variables& variables = {}) {
  std::istringstream words(line);
  std::vector<std::string> args;
  for (std::string word; words >> word;) args.push_back(word);
  return translate_llama_flags(args, [&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

// What is left, as a line.
std::string args_of(const std::string& line, const Variables& variables = {}) {
  const auto flags = translate(line, variables);
  EXPECT_TRUE(flags.ok()) << flags.status().to_string();
  std::string out;
  if (!flags.ok()) return out;
  for (const std::string& arg : flags->args) out += (out.empty() ? "" : " ") + arg;
  return out;
}

std::string error_of(const std::string& line, const Variables& variables = {}) {
  const auto flags = translate(line, variables);
  EXPECT_EQ(flags.code(), Code::kInvalidArgument) << line;
  return flags.status().message();
}

TEST(LlamaFlags, OwnOptionsStayAsTheyAre) {
  const std::string line = "-m x.gguf --ctx 4096 --dram=1GiB -v --nonsense -np2 --api-key a";
  EXPECT_EQ(args_of(line), line);
  EXPECT_THAT(translate(line)->notes, IsEmpty());
}

TEST(LlamaFlags, OtherSpellingsOfTheSame) {
  EXPECT_EQ(args_of("-np 4 --ctx-size 4096 -s 7"), "--parallel 4 --ctx 4096 --seed 7");
  EXPECT_EQ(args_of("--ctx-size=4096 -m x"), "--ctx 4096 -m x");
  EXPECT_EQ(args_of("-np -1 -t -1 --parallel=-1"), "");
  EXPECT_EQ(args_of("-cram 512"), "--dram 512MiB");
  EXPECT_EQ(args_of("--cors-origins https://a.example"), "--cors https://a.example");
}

TEST(LlamaFlags, AStepIsAPhysicalBatch) {
  EXPECT_EQ(args_of("-b 2048 -ub 512"), "--batch 512 --step-tokens 512");
  EXPECT_EQ(args_of("-ub 1024 -m x"), "-m x --batch 1024 --step-tokens 1024");
  EXPECT_EQ(args_of("-b 128"), "--batch 128");
  EXPECT_EQ(args_of("--batch 128"), "--batch 128");
  EXPECT_THAT(error_of("-ub many"), HasSubstr("-ub"));
  EXPECT_THAT(error_of("-b 0"), HasSubstr("-b"));
}

TEST(LlamaFlags, KAndVHaveOneType) {
  EXPECT_EQ(args_of("-ctk q8_0 --cache-type-v q8_0"), "--kv-type q8_0");
  EXPECT_EQ(args_of("-ctv f16"), "--kv-type f16");
  EXPECT_THAT(error_of("-ctk q8_0"), HasSubstr("-ctv f16"));
  EXPECT_THAT(error_of("-ctk q8_0 -ctv q4_0"), HasSubstr("q4_0"));
}

TEST(LlamaFlags, WhatNeedsNoChoosingIsNoted) {
  const auto flags = translate("--jinja -ngl 99 -fa on -m x --no-webui -fa --mlock -tb 4");
  ASSERT_TRUE(flags.ok());
  EXPECT_THAT(flags->args, ElementsAre("-m", "x"));
  EXPECT_THAT(flags->notes,
              ElementsAre(HasSubstr("--jinja is ignored"), HasSubstr("--device"),
                          HasSubstr("--attention"), HasSubstr("the page"), HasSubstr("-fa"),
                          HasSubstr("--mlock"), HasSubstr("--threads")));
  EXPECT_THAT(translate("--cache-ram -1")->notes, ElementsAre(HasSubstr("takes a size")));
}

TEST(LlamaFlags, ValuesAreWanted) {
  EXPECT_THAT(error_of("-m x -np"), HasSubstr("-np wants a value"));
  EXPECT_THAT(error_of("-ngl"), HasSubstr("-ngl wants a value"));
}

TEST(LlamaFlags, VariablesComeAfterFlags) {
  const Variables variables = {{"LLAMA_ARG_CACHE_RAM", "256"},
                               {"LLAMA_ARG_UBATCH", "64"},
                               {"LLAMA_ARG_CACHE_TYPE_K", "q8_0"},
                               {"LLAMA_ARG_CACHE_TYPE_V", "q8_0"},
                               {"LLAMA_ARG_BATCH", ""}};
  EXPECT_EQ(args_of("", variables), "--dram 256MiB --batch 64 --step-tokens 64 --kv-type q8_0");
  EXPECT_EQ(args_of("--dram 1GiB --step-tokens=32 --kv-type f16", variables),
            "--dram 1GiB --step-tokens=32 --kv-type f16");
  EXPECT_EQ(args_of("-cram 8 -ub 32 -ctk bf16 -ctv bf16", variables),
            "--dram 8MiB --batch 32 --step-tokens 32 --kv-type bf16");
}

}  // namespace
}  // namespace hcache::cli
