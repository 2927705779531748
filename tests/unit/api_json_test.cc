#include <gtest/gtest.h>

#include <random>

#include "api/embeddings.h"
#include "api/json.h"
#include "api/request.h"
#include "api/rerank.h"

namespace hcache::api {
namespace {

void refused(const std::string& body, const std::string& words, const BodyLimits& limits = {}) {
  const auto json = parse_body(body, limits);
  EXPECT_EQ(json.code(), Code::kInvalidArgument) << body.substr(0, 100);
  EXPECT_NE(json.status().message().find(words), std::string::npos) << json.status().message();
}

TEST(ParseBody, KeepsTheOrderOfKeys) {
  const auto json =
      parse_body(R"( {"z": 1, "a": {"y": [true, null, -2.5e3, "\u00e9"]}, "b": []} )");
  ASSERT_TRUE(json.ok()) << json.status().to_string();
  EXPECT_EQ(to_text(*json), "{\"z\":1,\"a\":{\"y\":[true,null,-2500.0,\"é\"]},\"b\":[]}");
}

TEST(ParseBody, TheFirstOfTwoKeysCounts) {
  const auto json = parse_body(R"({"a": 1, "a": 2})");
  ASSERT_TRUE(json.ok());
  EXPECT_EQ(json.value()["a"], 1);
}

TEST(ParseBody, ErrorsNameTheByte) {
  refused("", "at byte 1");
  refused("{\"a\": nope}", "at byte 8");
  refused("{\"a\": 1} x", "at byte 10");
  refused("{\"a\": \"\xFF\"}", "ill-formed UTF-8 byte at byte 8");
  refused("\"\xED\xA0\x80\"", "ill-formed UTF-8 byte at byte 3");  // a surrogate
  refused("[NaN]", "at byte 2");
  refused("[Infinity]", "at byte 2");
  refused("[1e999]", "1e999");
  refused("\"\\ud800\"", "surrogate");
  refused("{\"a\": 1", "end of input");
  refused("{'a': 1}", "at byte 2");
}

TEST(ParseBody, DepthIsLimited) {
  const auto nested = [](size_t depth) {
    return std::string(depth, '[') + std::string(depth, ']');
  };
  EXPECT_TRUE(parse_body(nested(64)).ok());
  refused(nested(65), "64 levels");
  refused(nested(1000000), "64 levels");
  refused(R"({"a":{"b":{}}})", "2 levels", {.max_depth = 2});
}

TEST(ParseBody, ValuesAreLimited) {
  EXPECT_TRUE(parse_body("[1,2,3]", {.max_values = 4}).ok());
  refused("[1,2,3,4]", "4 values", {.max_values = 4});
}

TEST(ToText, ReplacesWhatIsNoUtf8) { EXPECT_EQ(to_text("a\xFF"), "\"a\uFFFD\""); }

// Random bytes, and random damage to valid bodies, through every parser: an error or a request.
TEST(ParseBody, SurvivesAnything) {
  const std::string seeds[] = {
      R"({"messages":[{"role":"user","content":[{"type":"text","text":"Hi"}]},{"role":"assistant",)"
      R"("tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{}"}}]},)"
      R"({"role":"tool","tool_call_id":"1","content":"3"}],"tools":[{"type":"function","function":)"
      R"({"name":"f","parameters":{"type":"object"}}}],"tool_choice":"auto","n":2,"seed":-7,)"
      R"("logit_bias":{"1":-1.5,"2":false},"stop":["a","b"],"stream":true,"max_tokens":5})",
      R"({"prompt":[[1,2],"a",[3]],"n_predict":-1,"temperature":0.5,"logprobs":3})",
      R"({"input":[{"role":"user","content":"x"},{"type":"function_call","call_id":"1","name":"f",)"
      R"("arguments":"{}"},{"type":"function_call_output","call_id":"1","output":"y"}],)"
      R"("text":{"format":{"type":"json_schema","schema":{"type":"object"}}}})",
      R"({"system":[{"type":"text","text":"s"}],"messages":[{"role":"user","content":[{"type":)"
      R"("tool_result","tool_use_id":"1","content":"r"},{"type":"text","text":"t"}]}],)"
      R"("tool_choice":{"type":"any"},"thinking":{"type":"enabled"},"content":"c","tokens":[1]})"};
  const std::string pieces[] = {"null",  "[]",   "{}",    "\"\"", "-1",
                                "1e300", "true", "\"a\"", ",",    ":"};
  std::mt19937 rng(3);
  int parsed = 0;
  for (int round = 0; round < 20000; round++) {
    std::string body = seeds[rng() % std::size(seeds)];
    for (int hits = 1 + static_cast<int>(rng() % 3); hits > 0; hits--) {
      const size_t at = rng() % body.size();
      if (rng() % 2 == 0) {
        body[at] = static_cast<char>(rng());
        continue;
      }
      // Replace a value by another one, so that most bodies stay JSON.
      const size_t end = body.find_first_of(",}]", at);
      const size_t begin = body.find_last_of(":[,", at);
      if (begin == std::string::npos || end == std::string::npos || end <= begin) continue;
      body.replace(begin + 1, end - begin - 1, pieces[rng() % std::size(pieces)]);
    }
    const auto json = parse_body(body);
    if (!json.ok()) continue;
    parsed++;
    const auto check = [&](const Status& status) {
      EXPECT_TRUE(status.ok() || status.code() == Code::kInvalidArgument) << status.to_string();
    };
    check(parse_chat_completion(*json).status());
    check(parse_completion(*json).status());
    check(parse_response(*json).status());
    check(parse_messages(*json).status());
    check(parse_count_tokens(*json).status());
    check(parse_llama_completion(*json).status());
    check(parse_apply_template(*json).status());
    check(parse_embedding(*json).status());
    check(parse_rerank(*json).status());
    check(parse_tokenize(*json).status());
    check(parse_detokenize(*json).status());
  }
  EXPECT_GT(parsed, 2000) << "most rounds should reach the parsers";
}

}  // namespace
}  // namespace hcache::api
