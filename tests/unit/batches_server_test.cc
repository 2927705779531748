// The server's batches: from upload to results, apart by owner, and going on after a restart.
#include <gmock/gmock.h>

#include "base/fault_env.h"
#include "base_testing.h"
#include "batch_json.h"
#include "batches.h"
#include "batches_testing.h"
#include "patience.h"

namespace hcache::server {
namespace {

using hcache::test::Patience;
using testing::answered;
using testing::chat_line;
using testing::chat_lines;
using testing::EchoAnswerer;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int64_t kHourNs = 3600LL * 1'000'000'000;

// Owners share what answers; it is told apart from the one of the process before.
class Forwarder final : public Answerer {
 public:
  explicit Forwarder(EchoAnswerer& to) : to_(to) {}
  Cancel submit(BatchRequest request, Done done) override {
    return to_.submit(std::move(request), std::move(done));
  }

 private:
  EchoAnswerer& to_;
};

// One life of a server.
struct Life {
  Life(FaultEnv& env, EchoAnswerer& answerer,
       BatchesOptions options = {.dir = "/s/batches", .in_flight = 2}) {
    auto opened = Batches::open(env, options, [&answerer](const std::string& owner) {
      return owner == "gone" ? nullptr : std::make_unique<Forwarder>(answerer);
    });
    status = opened.status();
    if (opened.ok()) batches = std::move(*opened);
  }
  Status status;
  std::unique_ptr<Batches> batches;
};

Result<StoredFile> upload(Batches& batches, const std::string& content,
                          const std::string& owner = "o", const std::string& purpose = "batch") {
  StoredFile file;
  file.owner = owner;
  file.filename = "in.jsonl";
  file.purpose = purpose;
  return batches.store().add_file(std::move(file), content);
}

Result<StoredBatch> create(Batches& batches, const std::string& file_id,
                           const std::string& owner = "o") {
  api::CreateBatch batch;
  batch.input_file_id = file_id;
  batch.endpoint = "/v1/chat/completions";
  return batches.create(owner, batch);
}

StoredBatch wait_for_end(Batches& batches, const std::string& id, const std::string& owner = "o") {
  StoredBatch batch;
  Patience patience("the end of " + id);
  do {
    batch = batches.store().batch(owner, id).value_or({});
  } while (!has_ended(batch.status) && patience.lasts());
  return batch;
}

class BatchesServerTest : public ::testing::Test {
 protected:
  FaultEnv env_;
  EchoAnswerer answerer_;
};

TEST_F(BatchesServerTest, RunsABatchAndSplitsItsResults) {
  Life life(env_, answerer_);
  ASSERT_OK(life.status);
  Batches& batches = *life.batches;
  batches.start();
  const auto file = upload(batches, chat_lines(5) + chat_line("bad-one") + "\n");
  ASSERT_OK(file);
  const auto batch = create(batches, file->id);
  ASSERT_OK(batch);
  const StoredBatch ended = wait_for_end(batches, batch->id);
  EXPECT_EQ(ended.status, BatchStatus::kCompleted);
  EXPECT_EQ(ended.counts.completed, 5);
  EXPECT_EQ(ended.counts.failed, 1);
  EXPECT_EQ(answered(env_, batches.store().content_path(ended.output_file_id)).size(), 5U);
  EXPECT_EQ(answered(env_, batches.store().content_path(ended.error_file_id)).count("bad-one"), 1U);
  const auto output = batches.store().file("o", ended.output_file_id);
  ASSERT_OK(output);
  EXPECT_EQ(output->purpose, "batch_output");
  EXPECT_EQ(output->bytes, ended.output_bytes);
  EXPECT_EQ(batches.stat().completed, 5U);
  EXPECT_EQ(batches.cancel("o", batch->id, false).code(), Code::kFailedPrecondition);
}

TEST_F(BatchesServerTest, AnotherOwnerFindsNothing) {
  Life life(env_, answerer_);
  Batches& batches = *life.batches;
  const auto file = upload(batches, chat_lines(1));
  const auto batch = create(batches, file->id);
  ASSERT_OK(batch);
  EXPECT_EQ(batches.store().file("p", file->id).code(), Code::kNotFound);
  EXPECT_EQ(batches.store().remove_file("p", file->id).code(), Code::kNotFound);
  EXPECT_EQ(batches.store().batch("p", batch->id).code(), Code::kNotFound);
  EXPECT_EQ(batches.cancel("p", batch->id, false).code(), Code::kNotFound);
  EXPECT_EQ(batches.cancel("o", batch->id, true).code(), Code::kNotFound);
  EXPECT_EQ(create(batches, file->id, "p").code(), Code::kNotFound);
  EXPECT_THAT(batches.store().files("p"), IsEmpty());
  EXPECT_THAT(batches.store().batches("p", false), IsEmpty());
  EXPECT_THAT(batches.store().batches("o", true), IsEmpty());
  EXPECT_THAT(batches.store().batches("o", false), SizeIs(1));
}

TEST_F(BatchesServerTest, RefusesInputThatIsNone) {
  Life life(env_, answerer_);
  Batches& batches = *life.batches;
  batches.start();
  const auto refused = [&](const std::string& content) {
    const auto file = upload(batches, content);
    const auto batch = create(batches, file->id);
    const StoredBatch ended = wait_for_end(batches, batch->id);
    EXPECT_EQ(ended.status, BatchStatus::kFailed);
    return api::to_text(ended.errors);
  };
  EXPECT_THAT(refused(""), HasSubstr("no request"));
  EXPECT_THAT(refused(chat_line("a") + "\nnonsense\n"), HasSubstr("\"line\":2"));
  EXPECT_THAT(refused(chat_line("a") + "\n" + chat_line("a")), HasSubstr("same custom_id"));
  EXPECT_THAT(refused(R"({"custom_id":"m","params":{}})"), HasSubstr("mismatched_url"));
  EXPECT_EQ(refused(chat_line("a") + "\nx").find("/s/"), std::string::npos);
  const auto other = upload(batches, "x", "o", "vision");
  EXPECT_EQ(create(batches, other->id).code(), Code::kInvalidArgument);
  EXPECT_TRUE(answerer_.submitted().empty());
}

TEST_F(BatchesServerTest, CancelsWhatRunsAndSaysWhatDidNot) {
  Life life(env_, answerer_);
  Batches& batches = *life.batches;
  batches.start();
  answerer_.hold(true);
  const auto file = upload(batches, chat_lines(4));
  const auto batch = create(batches, file->id);
  Patience patience("requests in flight");
  while (answerer_.submitted().size() < 2 && patience.lasts()) {
  }
  answerer_.finish("c0");
  Patience first("the first result");
  while (batches.store().batch("o", batch->id)->counts.completed < 1 && first.lasts()) {
  }
  EXPECT_EQ(batches.store().remove_file("o", file->id).code(), Code::kFailedPrecondition);
  EXPECT_EQ(batches.store().remove_batch("o", batch->id).code(), Code::kFailedPrecondition);
  ASSERT_OK(batches.cancel("o", batch->id, false));
  const StoredBatch ended = wait_for_end(batches, batch->id);
  EXPECT_EQ(ended.status, BatchStatus::kCancelled);
  EXPECT_EQ(ended.counts.completed, 1);
  EXPECT_EQ(ended.counts.cancelled, 3);
  EXPECT_GT(ended.cancelling_ns, 0);
  EXPECT_OK(batches.store().remove_file("o", file->id));
}

TEST_F(BatchesServerTest, ExpiresAndIsForgotten) {
  Life life(env_, answerer_, {.dir = "/s/batches", .ttl_ns = 72 * kHourNs, .in_flight = 2});
  Batches& batches = *life.batches;
  batches.start();
  answerer_.hold(true);
  const auto file = upload(batches, chat_lines(3));
  const auto batch = create(batches, file->id);
  Patience patience("requests in flight");
  while (answerer_.submitted().size() < 2 && patience.lasts()) {
  }
  env_.sleep_ns(25 * kHourNs);
  const StoredBatch ended = wait_for_end(batches, batch->id);
  EXPECT_EQ(ended.status, BatchStatus::kExpired);
  EXPECT_EQ(ended.counts.expired, 3);
  env_.sleep_ns(100 * kHourNs);
  Patience gone("the batch to be forgotten");
  while (!batches.store().batches("o", false).empty() && gone.lasts()) {
  }
  EXPECT_THAT(batches.store().files("o"), IsEmpty());
  EXPECT_EQ(batches.store().used_bytes().value_or(1), 0U);
}

TEST_F(BatchesServerTest, MessagesAreCheckedAtOnceAndDeletedWhole) {
  Life life(env_, answerer_);
  Batches& batches = *life.batches;
  batches.start();
  const auto wrong = batches.create_messages("o", "{\"custom_id\":\"a\",\"params\":{}}\n{}\n");
  EXPECT_EQ(wrong.code(), Code::kInvalidArgument);
  EXPECT_THAT(wrong.status().message(), HasSubstr("requests[1]"));
  EXPECT_THAT(batches.store().files("o"), IsEmpty());
  const auto batch = batches.create_messages("o", "{\"custom_id\":\"a\",\"params\":{}}\n");
  ASSERT_OK(batch);
  EXPECT_EQ(batch->counts.total, 1);
  EXPECT_EQ(wait_for_end(batches, batch->id).counts.completed, 1);
  ASSERT_OK(batches.store().remove_batch("o", batch->id));
  EXPECT_EQ(batches.store().used_bytes().value_or(1), 0U);
}

TEST_F(BatchesServerTest, TheQuotaRefusesUploads) {
  Life life(env_, answerer_, {.dir = "/s/batches", .quota_bytes = 4000, .in_flight = 1});
  ASSERT_OK(upload(*life.batches, std::string(2000, 'x')));
  const auto refused = upload(*life.batches, std::string(2000, 'x'));
  EXPECT_EQ(refused.code(), Code::kResourceExhausted);
  EXPECT_THAT(refused.status().message(), HasSubstr("--batch-quota"));
}

TEST_F(BatchesServerTest, OneProcessHasTheFolder) {
  Life life(env_, answerer_);
  ASSERT_OK(life.status);
  EXPECT_EQ(Life(env_, answerer_).status.code(), Code::kFailedPrecondition);
}

TEST_F(BatchesServerTest, StoppingKeepsWhatIsDone) {
  std::string id;
  {
    Life life(env_, answerer_);
    life.batches->start();
    answerer_.hold_one("c3");
    const auto file = upload(*life.batches, chat_lines(6));
    id = create(*life.batches, file->id)->id;
    Patience patience("five results");
    while (life.batches->store().batch("o", id)->counts.completed < 5 && patience.lasts()) {
    }
    life.batches->stop();
    EXPECT_EQ(life.batches->store().batch("o", id)->status, BatchStatus::kInProgress);
  }
  EchoAnswerer after;
  Life life(env_, after);
  ASSERT_OK(life.status);
  life.batches->start();
  const StoredBatch ended = wait_for_end(*life.batches, id);
  EXPECT_EQ(ended.counts.completed, 6);
  EXPECT_THAT(after.submitted(), ::testing::ElementsAre("c3"));
}

// The power goes at every single change of a file or name; whatever survives, a batch that was
// taken in ends with every request answered once after the next start, and nothing else is left.
TEST(BatchesPowerCut, EveryAnswerIsThereExactlyOnce) {
  for (const auto survivors :
       {FaultEnv::Survivors::kNone, FaultEnv::Survivors::kAll, FaultEnv::Survivors::kSome}) {
    bool whole = false;
    for (uint64_t cut = 1; !whole; ++cut) {
      ASSERT_LT(cut, 300U);
      FaultEnv env(cut);
      EchoAnswerer answerer;
      std::string id;
      {
        Life life(env, answerer);
        ASSERT_OK(life.status);
        env.cut_power_at(env.changes() + cut);
        life.batches->start();
        const auto file = upload(*life.batches, chat_lines(7) + chat_line("bad-one"));
        if (file.ok()) id = create(*life.batches, file->id).value_or({}).id;
        Patience patience("the end or a power cut");
        while (!id.empty() && !env.power_is_cut() &&
               !has_ended(life.batches->store().batch("o", id).value_or({}).status) &&
               patience.lasts()) {
        }
        whole = !env.power_is_cut();
      }
      env.restart(survivors);
      EchoAnswerer after;
      Life life(env, after);
      ASSERT_OK(life.status);
      life.batches->start();
      if (id.empty()) {
        ASSERT_LE(life.batches->store().batches("o", false).size(), 1U) << cut;
        continue;
      }
      const StoredBatch ended = wait_for_end(*life.batches, id);
      ASSERT_EQ(ended.status, BatchStatus::kCompleted) << cut;
      const auto good = answered(env, life.batches->store().content_path(ended.output_file_id));
      const auto bad = answered(env, life.batches->store().content_path(ended.error_file_id));
      ASSERT_EQ(good.size(), 7U) << cut;
      ASSERT_EQ(bad.size(), 1U) << cut;
      for (const auto& [name, n] : good) ASSERT_EQ(n, 1) << cut << " " << name;
      ASSERT_EQ(life.batches->store().files("o").size(), 3U) << cut;
    }
  }
}

TEST_F(BatchesServerTest, WhatNothingNamesGoesAndWhatIsDamagedStays) {
  {
    Life life(env_, answerer_);
    ASSERT_OK(upload(*life.batches, "x", "o", "messages"));  // and then no batch was made of it
    ASSERT_OK(upload(*life.batches, "kept"));
    ASSERT_OK(write_whole_file(env_, "/s/batches/files/file-torn", "half"));
    ASSERT_OK(write_whole_file(env_, "/s/batches/batches/b.json.7.tmp", "half"));
    ASSERT_OK(write_whole_file(env_, "/s/batches/batches/b.json", "{\"id\":\"b\"}"));
    ASSERT_OK(write_whole_file(env_, "/s/batches/files/c.json", "nonsense"));
  }
  Life life(env_, answerer_);
  ASSERT_OK(life.status);
  ASSERT_THAT(life.batches->store().files("o"), SizeIs(1));
  const std::string kept = life.batches->store().files("o")[0].id;
  EXPECT_THAT(env_.files(), ::testing::UnorderedElementsAre(
                                "/s/batches/batches/b.json", "/s/batches/files/c.json",
                                "/s/batches/files/" + kept, "/s/batches/files/" + kept + ".json"));
}

TEST_F(BatchesServerTest, AFullDiskHoldsABatchUpUntilThereIsRoom) {
  Life life(env_, answerer_);
  Batches& batches = *life.batches;
  const auto file = upload(batches, chat_lines(30));
  const auto batch = create(batches, file->id);
  ASSERT_OK(batch);
  env_.set_capacity(4 * 4096);  // the results' second block has no room
  batches.start();
  const auto ended_at_once = [&] {
    return has_ended(batches.store().batch("o", batch->id)->status);
  };
  Patience patience("requests to be asked again");
  while (answerer_.submitted().size() <= 30 && !ended_at_once() && patience.lasts()) {
    env_.sleep_ns(1'000'000'000);
  }
  EXPECT_FALSE(ended_at_once());
  env_.set_capacity(uint64_t{1} << 30U);
  Patience end("the end of the batch");
  while (!has_ended(batches.store().batch("o", batch->id)->status) && end.lasts()) {
    env_.sleep_ns(1'000'000'000);
  }
  const StoredBatch ended = *batches.store().batch("o", batch->id);
  EXPECT_EQ(ended.status, BatchStatus::kCompleted);
  const auto ids = answered(env_, batches.store().content_path(ended.output_file_id));
  EXPECT_EQ(ids.size(), 30U);
  for (const auto& [id, n] : ids) EXPECT_EQ(n, 1) << id;
}

TEST_F(BatchesServerTest, AKeyThatIsGoneHoldsItsBatchesUp) {
  Life life(env_, answerer_);
  Batches& batches = *life.batches;
  const auto file = upload(batches, chat_lines(2), "gone");
  const auto batch = create(batches, file->id, "gone");
  const auto other_file = upload(batches, chat_lines(2));
  const auto other = create(batches, other_file->id);
  batches.start();
  EXPECT_EQ(wait_for_end(batches, other->id).status, BatchStatus::kCompleted);
  EXPECT_FALSE(has_ended(batches.store().batch("gone", batch->id)->status));
  env_.sleep_ns(25 * kHourNs);
  EXPECT_EQ(wait_for_end(batches, batch->id, "gone").status, BatchStatus::kFailed);
}

TEST_F(BatchesServerTest, NoOwnerTakesThePlacesOfOthers) {
  Life life(env_, answerer_, {.dir = "/s/batches", .in_flight = 100});
  Batches& batches = *life.batches;
  answerer_.hold(true);
  for (int i = 0; i < 9; ++i) {
    ASSERT_OK(create(batches, upload(batches, chat_line("c" + std::to_string(i)))->id));
  }
  const auto file = upload(batches, chat_line("p"), "p");
  const auto other = create(batches, file->id, "p");
  batches.start();
  Patience patience("the other owner's request");
  while (answerer_.submitted().size() < 5 && patience.lasts()) {
  }
  EXPECT_THAT(answerer_.submitted(), ::testing::Contains("p"));
  answerer_.hold(false);
  answerer_.finish("p");
  EXPECT_EQ(wait_for_end(batches, other->id, "p").counts.completed, 1);
  for (int i = 0; i < 9; ++i) answerer_.finish("c" + std::to_string(i));
  for (const StoredBatch& batch : batches.store().batches("o", false)) {
    EXPECT_EQ(wait_for_end(batches, batch.id).counts.completed, 1);
  }
}

TEST(BatchJson, PagesFollowTheirCursors) {
  std::vector<StoredFile> files(5);
  for (size_t i = 0; i < files.size(); ++i)
    files[i].id = std::string(1, static_cast<char>('e' - i));
  const auto ids = [&](const api::ListPage& page) {
    const auto json = page_json(files, page, file_json);
    std::string text;
    if (!json.ok()) return std::string(code_name(json.code()));
    for (const api::Json& file : (*json)["data"]) text += file["id"].get<std::string>();
    return text + ((*json)["has_more"].get<bool>() ? "+" : "");
  };
  EXPECT_EQ(ids({}), "edcba");
  EXPECT_EQ(ids({.limit = 2}), "ed+");
  EXPECT_EQ(ids({.limit = 2, .after = "d"}), "cb+");
  EXPECT_EQ(ids({.limit = 2, .after = "b"}), "a");
  EXPECT_EQ(ids({.limit = 2, .after = "a"}), "");
  EXPECT_EQ(ids({.limit = 2, .before = "b"}), "dc+");
  EXPECT_EQ(ids({.limit = 4, .before = "b"}), "edc");
  EXPECT_EQ(ids({.after = "x"}), "invalid-argument");
  EXPECT_EQ(ids({.after = "a", .before = "b"}), "invalid-argument");
}

TEST(BatchJson, WordsAreTheProtocols) {
  StoredBatch batch;
  batch.id = "b";
  batch.output_file_id = "file-o";
  batch.error_file_id = "file-e";
  batch.status = BatchStatus::kCancelled;
  batch.created_ns = 1'700'000'000'123'456'789;
  batch.ended_ns = 1'700'000'060'000'000'000;
  batch.counts = {.total = 9, .completed = 4, .failed = 2, .cancelled = 3};
  batch.output_bytes = 10;
  const api::Json openai = batch_json(batch);
  EXPECT_EQ(openai["status"], "cancelled");
  EXPECT_EQ(openai["cancelled_at"], 1'700'000'060);
  EXPECT_EQ(openai["completed_at"], nullptr);
  EXPECT_EQ(openai["output_file_id"], "file-o");
  EXPECT_EQ(openai["error_file_id"], nullptr);
  EXPECT_EQ(api::to_text(openai["request_counts"]), R"({"total":9,"completed":4,"failed":5})");
  const api::Json anthropic = message_batch_json(batch);
  EXPECT_EQ(anthropic["processing_status"], "ended");
  EXPECT_EQ(anthropic["created_at"], "2023-11-14T22:13:20.123456Z");
  EXPECT_EQ(anthropic["results_url"], "/v1/messages/batches/b/results");
  EXPECT_EQ(api::to_text(anthropic["request_counts"]),
            R"({"processing":0,"succeeded":4,"errored":2,"canceled":3,"expired":0})");
}

}  // namespace
}  // namespace hcache::server
