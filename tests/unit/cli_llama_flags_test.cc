// llama-server's flags and variables as hcache's own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <set>
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
  EXPECT_EQ(args_of("-np 4 --ctx 4096 -s 7"), "--parallel 4 --ctx 4096 --seed 7");
  EXPECT_EQ(args_of("--ctx-size=4096 -m x"), "--ctx 4096 -m x");
  EXPECT_EQ(args_of("-np -1 -t -1 --parallel=-1"), "");
  EXPECT_EQ(args_of("--ctx_size 7 --chat_template_file=a_b -m c_d"),
            "--ctx 7 --chat-template-file=a_b -m c_d");
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

TEST(LlamaFlags, SlotsDivideLlamaServersContext) {
  EXPECT_EQ(args_of("-np 4 --ctx-size 4096"), "--parallel 4 --ctx 4096 --sequence-ctx 1024");
  EXPECT_EQ(args_of("-np 2", {{"LLAMA_ARG_CTX_SIZE", "512"}}),
            "--parallel 2 --ctx 512 --sequence-ctx 256");
  EXPECT_EQ(args_of("-np 4 -c 4096 -kvu"), "--parallel 4 --ctx 4096");
  EXPECT_EQ(args_of("-np 4 -c 4096 --kv-unified-per-slot 2048"),
            "--parallel 4 --ctx 4096 --sequence-ctx 2048");
  EXPECT_EQ(args_of("-np 1 -c 4096"), "--parallel 1 --ctx 4096");
  EXPECT_EQ(args_of("-c 4096"), "--ctx 4096");
  EXPECT_EQ(args_of("-np 4"), "--parallel 4");
  EXPECT_THAT(translate("-np 4 -c 4096")->notes, ElementsAre(HasSubstr("1024 tokens")));
}

TEST(LlamaFlags, WhatIsOnCanBeSwitchedOff) {
  EXPECT_EQ(args_of("--no-slots --no-webui --slots --ui"), "--hide-slots --no-page");
  EXPECT_EQ(args_of("", {{"LLAMA_ARG_ENDPOINT_SLOTS", "0"}, {"LLAMA_ARG_UI", "off"}}),
            "--no-page --hide-slots");
  EXPECT_EQ(args_of("", {{"LLAMA_ARG_ENDPOINT_SLOTS", "1"}}), "");
}

TEST(LlamaFlags, KAndVHaveOneType) {
  EXPECT_EQ(args_of("-ctk q8_0 --cache-type-v q8_0"), "--kv-type q8_0");
  EXPECT_EQ(args_of("-ctv f16"), "--kv-type f16");
  EXPECT_THAT(error_of("-ctk q8_0"), HasSubstr("-ctv f16"));
  EXPECT_THAT(error_of("-ctk q8_0 -ctv q4_0"), HasSubstr("q4_0"));
}

TEST(LlamaFlags, WhatNeedsNoChoosingIsNoted) {
  const auto flags = translate("--jinja -ngl 99 -fa on -m x --path . -fa --mlock -tb 4");
  ASSERT_TRUE(flags.ok());
  EXPECT_THAT(flags->args, ElementsAre("--gpu-layers", "99", "-m", "x"));
  EXPECT_THAT(flags->notes, ElementsAre(HasSubstr("--jinja is ignored"), HasSubstr("--attention"),
                                        HasSubstr("the page"), HasSubstr("-fa"),
                                        HasSubstr("--mlock"), HasSubstr("--threads")));
  EXPECT_THAT(translate("--cache-ram -1")->notes, ElementsAre(HasSubstr("takes a size")));
}

// ---- All that the pinned llama-server takes
// ------------------------------------------------------

struct Flag {
  std::vector<std::string> spellings;
  int values = 0;
  std::string variable;
};

std::vector<Flag> llama_server_flags() {
  std::ifstream file(HCACHE_TEST_DATA "/unit/llama_server_flags.txt");
  std::string line;
  std::getline(file, line);  // the version
  std::vector<Flag> flags;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    Flag flag;
    std::string spellings;
    words >> spellings >> flag.values >> flag.variable;
    std::istringstream list(spellings);
    for (std::string s; std::getline(list, s, ',');) flag.spellings.push_back(s);
    if (flag.variable == "-") flag.variable.clear();
    flags.push_back(flag);
  }
  return flags;
}

// The options of `hcache serve`, from its section of the reference page.
std::set<std::string> serve_options() {
  std::ifstream file(HCACHE_TEST_DATA "/../docs/cli.md");
  std::set<std::string> options;
  bool serve = false;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("## ")) serve = line == "## hcache serve";
    if (!serve || !line.starts_with("  -")) continue;
    std::istringstream list(line.substr(2, line.find(' ', 2) - 2));
    for (std::string s; std::getline(list, s, ',');) options.insert(s);
  }
  return options;
}

// That a translation is one of the three: our options, a note that says why, or a refusal that
// names the flag.
void expect_treated(const Result<LlamaFlags>& flags, const std::string& name,
                    const std::set<std::string>& ours) {
  if (!flags.ok()) {
    EXPECT_EQ(flags.code(), Code::kInvalidArgument) << name;
    EXPECT_THAT(flags.status().message(), HasSubstr(name));
    return;
  }
  for (const std::string& note : flags->notes) EXPECT_THAT(note, HasSubstr(name + " "));
  for (const std::string& arg : flags->args) {
    if (!arg.starts_with("-") || arg == "-1") continue;
    EXPECT_TRUE(ours.contains(arg)) << name << ": " << arg;
  }
}

TEST(LlamaFlags, EveryFlagOfLlamaServerIsHonouredNotedOrRefused) {
  const std::set<std::string> ours = serve_options();
  ASSERT_TRUE(ours.contains("--ctx"));
  const std::vector<Flag> all = llama_server_flags();
  ASSERT_GT(all.size(), 200U);
  for (const Flag& flag : all) {
    // K's and V's types must be alike, and f16 is what the other one is.
    const bool is_type = flag.variable.starts_with("LLAMA_ARG_CACHE_TYPE");
    const std::string value = is_type ? "f16" : "1";
    for (const std::string& spelling : flag.spellings) {
      std::string line = spelling;
      for (int i = 0; i < flag.values; i++) line += " " + value;
      expect_treated(translate(line), spelling, ours);
      // No flag is left over for somebody else to stumble upon.
      if (flag.values == 1) {
        EXPECT_FALSE(translate(spelling).ok() && translate(spelling)->notes.empty() &&
                     !ours.contains(spelling))
            << spelling;
      }
    }
    if (!flag.variable.empty()) {
      expect_treated(translate("", {{flag.variable, value}}), flag.variable, ours);
    }
  }
}

TEST(LlamaFlags, EveryVariableOfLlamaServerIsRead) {
  for (const Flag& flag : llama_server_flags()) {
    if (!flag.variable.starts_with("LLAMA_")) continue;
    bool asked = false;
    ASSERT_TRUE(translate_llama_flags({}, [&](const char* name) -> const char* {
                  asked = asked || flag.variable == name;
                  return nullptr;
                }).ok());
    EXPECT_TRUE(asked) << flag.variable;
  }
}

TEST(LlamaFlags, WhatWouldChangeAnswersIsRefusedUnlessItIsOff) {
  EXPECT_THAT(error_of("--control-vector x.gguf"), HasSubstr("--control-vector"));
  EXPECT_THAT(error_of("--mirostat 2"), HasSubstr("sampler"));
  EXPECT_THAT(error_of("-hf ggml-org/x"), HasSubstr("-m"));
  EXPECT_EQ(args_of("--mirostat 0 --typical 1.00 --top-nsigma -1.0"), "");
  EXPECT_EQ(args_of("", {{"LLAMA_ARG_SKIP_CHAT_PARSING", "0"}}), "");
}

TEST(LlamaFlags, SwitchesThatAreNotOursStartTheServer) {
  const auto flags = translate("-m x --no-slots --no-jinja --no-warmup -nocb --spec-type none");
  ASSERT_TRUE(flags.ok());
  EXPECT_THAT(flags->args, ElementsAre("-m", "x", "--hide-slots"));
  EXPECT_EQ(flags->notes.size(), 4U);
}

TEST(LlamaFlags, OthersAreOptionsOfOurs) {
  EXPECT_EQ(args_of("--rpc 10.0.0.1:50052 --list-devices"),
            "--device rpc:10.0.0.1:50052 --device list");
  EXPECT_EQ(args_of("--rpc a:1,b:2 -ngl all -sm layer -ts 3,1 -ot blk\\.0\\.=CPU -mg 0"),
            "--device rpc:a:1,rpc:b:2 --split-mode layer --tensor-split 3,1 "
            "--override-tensor blk\\.0\\.=CPU --main-gpu 0");
  EXPECT_EQ(args_of("-sm tensor"), "--split-mode tensor");
  EXPECT_EQ(args_of("-ngl 12"), "--gpu-layers 12");
  EXPECT_EQ(args_of("-jf schema.json --log-verbose"), "--json-schema-file schema.json --verbose");
  EXPECT_EQ(args_of("-c 0 -s -1"), "");
  EXPECT_EQ(args_of("", {{"LLAMA_ARG_MODEL", "x.gguf"}, {"LLAMA_ARG_PORT", "1"}}),
            "--model x.gguf --port 1");
  EXPECT_EQ(args_of("-m a.gguf --n-predict 3",
                    {{"LLAMA_ARG_MODEL", "x.gguf"}, {"LLAMA_ARG_N_PREDICT", "9"}}),
            "-m a.gguf --n-predict 3");
}

TEST(LlamaFlags, SeveralModels) {
  EXPECT_EQ(args_of("--models-dir d --models-max 2 --no-models-autoload --sleep-idle-seconds 60"),
            "--models-dir d --models-max 2 --no-models-autoload --models-idle 60");
  EXPECT_EQ(args_of("--models-autoload --sleep-idle-seconds -1"), "");
  EXPECT_EQ(args_of("", {{"LLAMA_ARG_MODELS_DIR", "d"}, {"LLAMA_ARG_MODELS_AUTOLOAD", "0"}}),
            "--models-dir d --no-models-autoload");
  EXPECT_THAT(error_of("--models-preset x.ini"), HasSubstr("command line"));
}

TEST(LlamaFlags, ValuesThatLookLikeFlagsStayValues) {
  EXPECT_EQ(args_of("-m -np --alias --jinja"), "-m -np --alias --jinja");
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
