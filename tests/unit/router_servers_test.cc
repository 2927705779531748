// The router over servers that are scripts: what they print decides when they are ready, and what
// answers on their ports is the test itself.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "api/json.h"
#include "http_testing.h"
#include "router/model_router.h"

namespace hcache::router {
namespace {

using api::Json;
using http::testing::Client;
using http::testing::Held;
using http::testing::Reply;
using http::testing::Shelf;
using test::eventually;
using ::testing::HasSubstr;

// Until it is told to end.
constexpr const char* kRest = "; trap 'rm -f \"$ONLY\"; exit 0' TERM; while :; do sleep 0.02; done";

class ModelServers : public ::testing::Test {
 protected:
  ModelServers() {
    for (const char* name : {"a", "b", "c"})
      std::ofstream(dir_ / (name + std::string(".gguf"))) << name;
    http::Router routes;
    routes.add("POST", "/v1/chat/completions", shelf_.handler());
    auto started = http::Server::start(Env::real(), {}, std::move(routes));
    EXPECT_OK(started);
    if (started.ok()) answers_ = std::move(*started);
    options_.models_dir = dir_.path();
    options_.command = [this](const ModelFile& file) {
      return ModelCommand{.program = "/bin/sh",
                          .args = {"-c", script_, "server", file.name},
                          .environment = {"PATH=/usr/bin:/bin", "ONLY=" + dir_ / "only",
                                          "PORT=" + std::to_string(answers_->port())}};
    };
    options_.look_at_free_memory = false;
  }
  void start(const std::string& script) {
    script_ = script;
    auto started = ModelRouter::start(Env::real(), options_);
    ASSERT_OK(started);
    router_ = std::move(*started);
  }

  // A client with a request under way.
  [[nodiscard]] std::unique_ptr<Client> send(const std::string& method, const std::string& target,
                                             const std::string& body = "",
                                             const std::string& headers = "") const {
    auto client = std::make_unique<Client>(router_->port());
    client->send(method + " " + target + " HTTP/1.1\r\nHost: localhost\r\n" + headers +
                 "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body);
    return client;
  }
  [[nodiscard]] Reply ask(const std::string& method, const std::string& target,
                          const std::string& body = "") const {
    return send(method, target, body)->read();
  }
  [[nodiscard]] std::unique_ptr<Client> chat(const std::string& model,
                                             const std::string& headers = "") const {
    return send("POST", "/v1/chat/completions", R"({"model": ")" + model + R"("})", headers);
  }
  [[nodiscard]] std::string status(const std::string& model) const {
    const Json body = Json::parse(ask("GET", "/v1/models/" + model).body);
    return body["status"]["value"];
  }
  [[nodiscard]] bool becomes(const std::string& model, const std::string& wanted) const {
    return eventually([&] { return status(model) == wanted; });
  }

  testing::TempDir dir_;
  Shelf shelf_;
  std::unique_ptr<http::Server> answers_;
  std::string script_;
  ModelRouterOptions options_;
  std::unique_ptr<ModelRouter> router_;
};

TEST_F(ModelServers, WhatLacksRoomGetsItFromOthers) {
  start(std::string("[ -e \"$ONLY\" ] && exit 5; touch \"$ONLY\"; "
                    "echo serving on http://127.0.0.1:$PORT") +
        kRest);
  EXPECT_EQ(ask("POST", "/models/load", R"({"model": "a"})").status, 200);
  EXPECT_TRUE(becomes("a", "loaded"));
  EXPECT_EQ(ask("POST", "/models/load", R"({"model": "b"})").status, 200);
  EXPECT_TRUE(becomes("b", "loaded"));
  EXPECT_EQ(status("a"), "unloaded");
}

TEST_F(ModelServers, WhatLacksRoomThoughItIsAloneFails) {
  start("echo out of memory >&2; exit 5");
  const Reply reply = ask("POST", "/v1/chat/completions", R"({"model": "a"})");
  EXPECT_EQ(reply.status, 503);
  EXPECT_THAT(reply.body, HasSubstr("exit code 5: out of memory"));
}

TEST_F(ModelServers, MessagesPassThroughAsTheyAre) {
  start(std::string("echo serving on http://127.0.0.1:$PORT") + kRest);
  auto client = chat("a", "Authorization: Bearer key\r\nX-More: 1\r\nConnection: keep-alive\r\n");
  Held held = shelf_.take();
  ASSERT_NE(held.responder, nullptr);
  EXPECT_EQ(held.request.body, R"({"model": "a"})");
  EXPECT_EQ(*held.request.header("authorization"), "Bearer key");
  EXPECT_EQ(*held.request.header("x-more"), "1");
  EXPECT_EQ(*held.request.header("connection"), "close");
  held.responder->send(418, {{"Content-Type", "text/plain"}, {"X-Back", "2"}}, "short");
  Reply reply = client->read();
  EXPECT_EQ(reply.status, 418);
  EXPECT_EQ(reply.body, "short");
  EXPECT_EQ(reply.header("x-back"), "2");
  EXPECT_EQ(reply.header("content-length"), "5");
  EXPECT_EQ(reply.headers.count("date"), 1U);

  client = chat("a");
  held = shelf_.take();
  ASSERT_NE(held.responder, nullptr);
  held.responder->start_stream(200, http::stream_headers());
  for (const char* piece : {"data: one\n\n", "data: two\n\n"}) {
    held.responder->write(piece);
    EXPECT_TRUE(client->take_until(piece).has_value());  // before there is any more
  }
  held.responder->finish();
  EXPECT_TRUE(client->take_until("0\r\n\r\n").has_value());
}

TEST_F(ModelServers, AnAnswerThatBreaksOffStaysTorn) {
  start(std::string("echo serving on http://127.0.0.1:$PORT") + kRest);
  const auto client = chat("a");
  Held held = shelf_.take();
  ASSERT_NE(held.responder, nullptr);
  held.responder->start_stream(200, {});
  held.responder->write("half");
  EXPECT_TRUE(client->take_until("half\r\n").has_value());
  held.responder = nullptr;  // without an end
  EXPECT_FALSE(client->take_until("0\r\n\r\n").has_value());
}

TEST_F(ModelServers, AClientThatLeavesIsLeft) {
  start(std::string("echo serving on http://127.0.0.1:$PORT") + kRest);
  const auto client = chat("a");
  const Held held = shelf_.take();
  ASSERT_NE(held.responder, nullptr);
  std::atomic<bool> gone = false;
  held.responder->on_disconnect([&gone] { gone = true; });
  client->close();
  EXPECT_TRUE(eventually([&] { return gone.load(); }));
}

TEST_F(ModelServers, SlowClientsHoldTheirAnswerUp) {
  options_.http.max_unsent_bytes = 64 << 10;
  start(std::string("echo serving on http://127.0.0.1:$PORT") + kRest);
  const auto client = chat("a");
  const Held held = shelf_.take();
  ASSERT_NE(held.responder, nullptr);
  held.responder->start_stream(200, {});
  // Many times what the sockets between hold, given as fast as it is taken.
  const std::string piece(32 << 10, 'x');
  constexpr std::size_t kPieces = 1000;
  std::thread writer([&] {
    for (std::size_t i = 0; i < kPieces; ++i) {
      test::Patience patience("room for another piece");
      while (!held.responder->writable() && patience.lasts()) {
      }
      held.responder->write(piece);
    }
    held.responder->finish();
  });
  const Reply reply = client->read();
  writer.join();
  EXPECT_TRUE(reply.whole);
  EXPECT_EQ(reply.body.size(), kPieces * piece.size());
}

TEST_F(ModelServers, ABusyModelMakesRoomWhenPatienceEnds) {
  options_.max_loaded = 1;
  options_.patience_ns = 1;
  start(std::string("echo serving on http://127.0.0.1:$PORT") + kRest);
  const auto first = chat("a");
  const Held busy = shelf_.take();
  ASSERT_NE(busy.responder, nullptr);
  const auto second = chat("b");
  ASSERT_TRUE(becomes("b", "loading"));
  // It is asked again while it answers, but b has waited long enough by now.
  const auto third = chat("a");
  const auto waiting = [&](const std::string& model) {
    const std::string text = ask("GET", "/metrics").body;
    return text.find("requests_waiting{model=\"" + model + "\"} 1") != std::string::npos;
  };
  EXPECT_TRUE(eventually([&] { return waiting("a") && waiting("b"); }));
  EXPECT_EQ(shelf_.size(), 0U);
  busy.responder->send(200, {}, "first");
  EXPECT_EQ(first->read().body, "first");
  for (const auto& [client, model] : {std::pair(second.get(), "b"), std::pair(third.get(), "a")}) {
    const Held held = shelf_.take();
    ASSERT_NE(held.responder, nullptr);
    EXPECT_THAT(held.request.body, HasSubstr(model));
    held.responder->send(200, {}, model);
    EXPECT_EQ(client->read().body, model);
  }
}

TEST_F(ModelServers, RequestsThatWaitTooLongAreTold) {
  options_.wait_ns = 1;
  start("exec sleep 1000");
  const Reply reply = ask("POST", "/v1/chat/completions", R"({"model": "a"})");
  EXPECT_EQ(reply.status, 503);
  EXPECT_THAT(reply.body, HasSubstr("not ready"));
  EXPECT_EQ(reply.header("retry-after"), "1");
}

TEST_F(ModelServers, TheEndRefusesWhatWaits) {
  start("trap 'exit 0' TERM; while :; do sleep 0.02; done");  // never ready
  const auto client = chat("a");
  ASSERT_TRUE(becomes("a", "loading"));
  router_->stop(0);
  const Reply reply = client->read();
  EXPECT_TRUE(reply.status == 503 || reply.status == 0) << reply.status;
}

TEST_F(ModelServers, KeysAreAskedForBeforeAnythingIsLoaded) {
  options_.http.api_keys = {{.name = "k", .hash = http::hash_api_key("key")}};
  start(std::string("echo serving on http://127.0.0.1:$PORT") + kRest);
  EXPECT_EQ(chat("a")->read().status, 401);
  EXPECT_EQ(ask("POST", "/models/load", R"({"model": "a"})").status, 401);
  EXPECT_EQ(ask("GET", "/upstream/a/v1/models").status, 401);
  EXPECT_EQ(status("a"), "unloaded");
  const auto client = chat("a", "x-api-key: key\r\n");
  Held held = shelf_.take();
  ASSERT_NE(held.responder, nullptr);
  EXPECT_EQ(*held.request.header("x-api-key"), "key");
  held.responder->send(200, {}, "ok");
  EXPECT_EQ(client->read().body, "ok");
}

TEST_F(ModelServers, ProgramsThatCantBeRun) {
  options_.command = [](const ModelFile&) {
    return ModelCommand{.program = "/no/such", .args = {}, .environment = {}};
  };
  start("");
  const Reply reply = ask("POST", "/v1/chat/completions", R"({"model": "a"})");
  EXPECT_EQ(reply.status, 503);
  EXPECT_THAT(reply.body, HasSubstr("/no/such"));
}

}  // namespace
}  // namespace hcache::router
