// Which model a request is for.
#include <gtest/gtest.h>

#include "forwarding.h"
#include "model_choice.h"

namespace hcache::router {
namespace {

TEST(ModelInBody, IsFoundWhereverItStands) {
  EXPECT_EQ(model_in_body(R"({"model": "a", "messages": []})"), "a");
  EXPECT_EQ(model_in_body(R"({"messages": [{"model": "x"}], "o": {"model": "y"}, "model": "a"})"),
            "a");
  EXPECT_EQ(model_in_body(R"({"model": "a", "model": "b"})"), "a");
  EXPECT_EQ(model_in_body(R"({"name": "a"})"), "a");
  EXPECT_EQ(model_in_body(R"({"name": "a", "model": "b"})"), "b");
  EXPECT_EQ(model_in_body(R"({"model": "\u00e4/b:Q8_0"})"), "ä/b:Q8_0");
  EXPECT_EQ(model_in_body(R"({"model": "a", broken)"), "a");
}

TEST(ModelInBody, IsAbsent) {
  for (const char* body : {"", "{}", "[]", R"([{"model": "a"}])", R"("model")", R"({"model": 7})",
                           R"({"model": {}})", R"({"model": ["a"]})", R"({"x": {"model": "a"}})",
                           "no JSON", R"({"x": , "model": "a"})", "--boundary\r\n"}) {
    EXPECT_EQ(model_in_body(body), std::nullopt) << body;
  }
  // Deep nesting takes no room.
  EXPECT_EQ(model_in_body(R"({"x": )" + std::string(1 << 20, '[')), std::nullopt);
}

TEST(ModelOf, TheBodyGoesBeforeTheQuery) {
  http::Request request;
  request.query = {{"x", "1"}, {"model", "b"}};
  EXPECT_EQ(model_of(request), "b");
  request.body = R"({"model": "a"})";
  EXPECT_EQ(model_of(request), "a");
  request.query.clear();
  request.body.clear();
  EXPECT_EQ(model_of(request), std::nullopt);
}

TEST(OnlyObserves, WhatMonitoringAsksFor) {
  EXPECT_TRUE(only_observes("GET", "/metrics"));
  EXPECT_TRUE(only_observes("HEAD", "/slots"));
  EXPECT_FALSE(only_observes("POST", "/slots"));
  EXPECT_FALSE(only_observes("GET", "/props"));
  // A page that stays open must not bring its model back.
  EXPECT_FALSE(only_observes("GET", "/v1/sessions"));
  EXPECT_TRUE(page_observes("GET", "/v1/sessions"));
  EXPECT_FALSE(page_observes("DELETE", "/v1/sessions"));
  EXPECT_TRUE(page_observes("GET", "/events"));
}

TEST(BehindPrefix, KeepsWhatWasSent) {
  EXPECT_EQ(behind_prefix("/upstream/a%20b/v1/models?x=%2F"), "/v1/models?x=%2F");
  EXPECT_EQ(behind_prefix("/upstream/a"), "/");
  EXPECT_EQ(behind_prefix("/upstream/a?x=1"), "/?x=1");
  EXPECT_EQ(behind_prefix("//upstream/a/b"), "");
  EXPECT_EQ(behind_prefix("http://host/upstream/a/b"), "");
}

TEST(AsksToUnload, WithoutAnythingToAnswer) {
  http::Request request;
  request.path = "/api/generate";
  request.body = R"({"model": "a", "keep_alive": 0})";
  EXPECT_TRUE(asks_to_unload(request));
  request.body = R"({"model": "a", "keep_alive": 0, "prompt": "Hi"})";
  EXPECT_FALSE(asks_to_unload(request));
  request.body = R"({"model": "a", "keep_alive": "5m"})";
  EXPECT_FALSE(asks_to_unload(request));
  request.path = "/api/chat";
  request.body = R"({"model": "a", "keep_alive": "0", "messages": []})";
  EXPECT_TRUE(asks_to_unload(request));
  request.path = "/v1/chat/completions";
  EXPECT_FALSE(asks_to_unload(request));
}

TEST(Forwardable, NotWhatBelongsToTheConnection) {
  for (const char* name : {"Connection", "content-length", "TRANSFER-ENCODING", "Host", "origin"}) {
    EXPECT_FALSE(forwardable(name)) << name;
  }
  for (const char* name : {"Authorization", "x-api-key", "Content-Type", "anthropic-version"}) {
    EXPECT_TRUE(forwardable(name)) << name;
  }
}

}  // namespace
}  // namespace hcache::router
