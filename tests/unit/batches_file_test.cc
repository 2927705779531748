// A batch from file to file: lines good and bad, order, results, and going on after anything.
#include <gmock/gmock.h>

#include "base/fault_env.h"
#include "base_testing.h"
#include "batch_file.h"
#include "batches_testing.h"

namespace hcache::server {
namespace {

using testing::answered;
using testing::chat_line;
using testing::chat_lines;
using testing::EchoAnswerer;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

const BatchFileOptions kOptions = {.input = "/d/in.jsonl", .output = "/d/out.jsonl"};

class BatchFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK(env_.make_dirs("/d"));
    ASSERT_OK(env_.sync_dir("/"));
  }
  void input(const std::string& text) { ASSERT_OK(write_whole_file(env_, kOptions.input, text)); }
  Status run(const BatchFileOptions& options = kOptions, const std::string& model = "m") {
    HCACHE_ASSIGN_OR_RETURN(const auto file, BatchFile::open(env_, options));
    return file->run(answerer_, model, goes_on_, &last_);
  }
  std::vector<std::string> results() {
    return testing::lines_of(read_whole_file(env_, kOptions.output).value_or(""));
  }

  FaultEnv env_;
  EchoAnswerer answerer_;
  std::function<bool(const BatchFileProgress&)> goes_on_;
  BatchFileProgress last_;
};

TEST_F(BatchFileTest, EveryRequestIsAnsweredOnceAndTheNoteGoes) {
  input(chat_lines(20) + chat_line("bad-20") + "\n");
  ASSERT_OK(run());
  EXPECT_EQ(last_.counts.completed, 20);
  EXPECT_EQ(last_.counts.failed, 1);
  EXPECT_EQ(last_.tokens.prompt, 210);
  EXPECT_EQ(last_.tokens.cached, 84);
  for (const auto& [id, n] : answered(env_, kOptions.output)) EXPECT_EQ(n, 1) << id;
  EXPECT_THAT(results(), SizeIs(21));
  EXPECT_THAT(env_.files(), ElementsAre("/d/in.jsonl", "/d/out.jsonl"));
  // A batch that has ended is not overwritten.
  const Status again = run();
  EXPECT_EQ(again.code(), Code::kAlreadyExists);
  EXPECT_THAT(again.message(), HasSubstr("--restart"));
  BatchFileOptions restart = kOptions;
  restart.restart = true;
  EXPECT_OK(run(restart));
  EXPECT_THAT(results(), SizeIs(21));
}

TEST_F(BatchFileTest, BadLinesAreAnsweredWithTheirNumber) {
  input("\n" + chat_line("a") + "\r\nnonsense\n{\"custom_id\":\"x\",\"method\":\"GET\"}\n" +
        R"({"custom_id":"y","method":"POST","url":"/v1/embeddings","body":{}})" + "\n" +
        R"({"custom_id":"z","params":[]})" + "\n[1]\n" +
        R"({"custom_id":"n","params":{"max_tokens":1}})");
  ASSERT_OK(run());
  EXPECT_EQ(last_.counts.completed, 2);
  EXPECT_EQ(last_.counts.failed, 5);
  const std::string text = read_whole_file(env_, kOptions.output).value_or("");
  for (const char* part : {"line 3: ", "line 4: method", "line 5: url: '/v1/embeddings'",
                           "line 6: params", "line 7: expected a JSON object"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
  EXPECT_EQ(answerer_.submitted().size(), 2U);
}

TEST_F(BatchFileTest, RefusesDuplicatesAndEmptyFilesBeforeAnythingRuns) {
  input(chat_line("a") + "\n\n" + chat_line("b") + "\n" + chat_line("a") + "\n");
  const Status status = run();
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("lines 1 and 4"));
  input("\n \n");
  EXPECT_EQ(run().code(), Code::kInvalidArgument);
  EXPECT_TRUE(answerer_.submitted().empty());
  EXPECT_THAT(env_.files(), ElementsAre("/d/in.jsonl"));
}

TEST_F(BatchFileTest, LinesThatAreTooLongAreBadOnes) {
  input(chat_line("a") + "\n" + chat_line("long", std::string(5000, 'x')) + "\n" + chat_line("b"));
  const auto limited = BatchInput::open(env_, kOptions.input, {.line_bytes = 1000});
  ASSERT_OK(limited);
  EXPECT_EQ(limited->bad_lines(), 1);
  EXPECT_EQ(limited->read(2)->custom_id, "b");
  EXPECT_EQ(BatchInput::open(env_, kOptions.input, {.lines = 2}).code(), Code::kOutOfRange);
}

TEST_F(BatchFileTest, PromptsThatBeginAlikeStandTogether) {
  const std::string one(300, 'p');
  const std::string other(300, 'q');
  input(chat_line("0", one + "1") + "\n" + chat_line("1", other) + "\n" + chat_line("2", "short") +
        "\n" + chat_line("3", one + "2") + "\n" + chat_line("4", other + "x") + "\n");
  const auto read = BatchInput::open(env_, kOptions.input);
  ASSERT_OK(read);
  EXPECT_THAT(read->order(), ElementsAre(0, 3, 1, 4, 2));
}

TEST_F(BatchFileTest, AnotherInputOrModelIsRefusedWithARemedy) {
  input(chat_lines(4));
  answerer_.hold_one("c3");
  goes_on_ = [](const BatchFileProgress& now) { return now.counts.done() < 3; };
  EXPECT_EQ(run().code(), Code::kCancelled);
  EXPECT_EQ(last_.counts.done(), 3);
  const Status model = run(kOptions, "other");
  EXPECT_EQ(model.code(), Code::kFailedPrecondition);
  EXPECT_THAT(model.message(), HasSubstr("--restart"));
  input(chat_lines(5));
  const Status changed = run();
  EXPECT_EQ(changed.code(), Code::kFailedPrecondition);
  EXPECT_THAT(changed.message(), HasSubstr("--restart"));
  EXPECT_THAT(results(), SizeIs(3));
}

TEST_F(BatchFileTest, GoesOnBehindATornLine) {
  input(chat_lines(6));
  answerer_.hold_one("c5");
  goes_on_ = [](const BatchFileProgress& now) { return now.counts.done() < 5; };
  ASSERT_EQ(run().code(), Code::kCancelled);
  const std::string text = read_whole_file(env_, kOptions.output).value_or("");
  ASSERT_OK(write_whole_file(env_, kOptions.output, text.substr(0, text.size() - 20)));
  goes_on_ = {};
  EchoAnswerer after;
  const auto file = BatchFile::open(env_, kOptions);
  ASSERT_OK(file);
  EXPECT_TRUE((*file)->resumes());
  ASSERT_OK((*file)->run(after, "m", {}, &last_));
  EXPECT_EQ(last_.found, 4);
  EXPECT_EQ(after.submitted().size(), 2U);
  EXPECT_EQ(answered(env_, kOptions.output).size(), 6U);
  EXPECT_THAT(results(), SizeIs(6));
}

TEST_F(BatchFileTest, LeavesFilesAloneThatAreNoResults) {
  input(chat_lines(2));
  ASSERT_OK(write_whole_file(env_, "/d/out.jsonl.batch",
                             R"({"format":1,"input":")" +
                                 BatchInput::open(env_, kOptions.input)->hash() +
                                 R"(","model":"m"})"));
  ASSERT_OK(write_whole_file(env_, kOptions.output, "my novel\n"));
  EXPECT_EQ(run().code(), Code::kDataLoss);
  EXPECT_EQ(read_whole_file(env_, kOptions.output).value_or(""), "my novel\n");
}

TEST_F(BatchFileTest, AFullDiskStopsItAndItGoesOnLater) {
  input(chat_lines(40));
  env_.set_capacity(4 * 4096);
  const Status full = run();
  EXPECT_EQ(full.code(), Code::kResourceExhausted) << full.to_string();
  env_.set_capacity(uint64_t{1} << 30U);
  ASSERT_OK(run());
  const auto ids = answered(env_, kOptions.output);
  EXPECT_EQ(ids.size(), 40U);
  for (const auto& [id, n] : ids) EXPECT_EQ(n, 1) << id;
}

TEST_F(BatchFileTest, RefusalsAreAskedAgain) {
  input(chat_lines(5));
  answerer_.refuse(3);
  goes_on_ = [this](const BatchFileProgress&) {
    env_.sleep_ns(1'000'000'000);
    return true;
  };
  ASSERT_OK(run());
  EXPECT_EQ(last_.counts.completed, 5);
  EXPECT_EQ(answerer_.submitted().size(), 8U);
}

// Power goes at every single change of a file or name; whatever survives, the next run ends with
// every request answered once.
TEST(BatchFilePowerCut, EveryAnswerIsThereExactlyOnce) {
  for (const auto survivors :
       {FaultEnv::Survivors::kNone, FaultEnv::Survivors::kAll, FaultEnv::Survivors::kSome}) {
    bool whole = false;
    for (uint64_t cut = 1; !whole; ++cut) {
      ASSERT_LT(cut, 200U);
      FaultEnv env(cut);
      ASSERT_OK(env.make_dirs("/d"));
      ASSERT_OK(env.sync_dir("/"));
      ASSERT_OK(write_whole_file(env, kOptions.input, chat_lines(9) + "nonsense\n"));
      BatchFileOptions options = kOptions;
      options.in_flight = 2;  // several writes
      EchoAnswerer answerer;
      const auto run = [&]() -> Status {
        HCACHE_ASSIGN_OR_RETURN(const auto file, BatchFile::open(env, options));
        return file->run(answerer, "m", {});
      };
      env.cut_power_at(cut);
      whole = run().ok();
      env.restart(survivors);
      const Status again = run();
      const bool ended = again.code() == Code::kAlreadyExists;  // only the note was still to go
      ASSERT_TRUE(again.ok() || ended) << cut << ": " << again.to_string();
      const auto ids = answered(env, kOptions.output);
      ASSERT_EQ(ids.size(), 10U) << cut;  // the empty id is the bad line's
      for (const auto& [id, n] : ids) ASSERT_EQ(n, 1) << cut << " " << id;
    }
  }
}

TEST(BatchResult, AnthropicsWordsForEveryEnd) {
  BatchAnswer answer;
  answer.http_status = 200;
  answer.body = {{"type", "message"}};
  EXPECT_EQ(*anthropic_result_line(answer_line("i", "a", answer)),
            R"({"custom_id":"a","result":{"type":"succeeded","message":{"type":"message"}}})"
            "\n");
  answer.http_status = 400;
  answer.body = {{"type", "error"}};
  EXPECT_EQ(*anthropic_result_line(answer_line("i", "a", answer)),
            R"({"custom_id":"a","result":{"type":"errored","error":{"type":"error"}}})"
            "\n");
  EXPECT_EQ(*anthropic_result_line(error_line("i", "a", {std::string(kExpiredCode), "m"})),
            R"({"custom_id":"a","result":{"type":"expired"}})"
            "\n");
  EXPECT_EQ(*anthropic_result_line(error_line("i", "a", {std::string(kCancelledCode), "m"})),
            R"({"custom_id":"a","result":{"type":"canceled"}})"
            "\n");
  EXPECT_EQ(anthropic_result_line("{}").code(), Code::kDataLoss);
  EXPECT_EQ(anthropic_result_line("nonsense").code(), Code::kDataLoss);
}

}  // namespace
}  // namespace hcache::server
