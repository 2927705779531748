// An answerer that echoes, and files of requests for it.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/env.h"
#include "base/sync.h"
#include "batch_run.h"

namespace hcache::server::testing {

// One line of OpenAI's.
inline std::string chat_line(const std::string& id, const std::string& prompt = "hello") {
  return fmt::format(R"({{"custom_id":"{}","method":"POST","url":"/v1/chat/completions","body":)"
                     R"({{"messages":[{{"role":"user","content":"{}"}}]}}}})",
                     id, prompt);
}

inline std::string chat_lines(int n) {
  std::string text;
  for (int i = 0; i < n; ++i) text += chat_line(fmt::format("c{}", i)) + "\n";
  return text;
}

// Answers at once, or, when it holds, only when it is told to.
class EchoAnswerer final : public Answerer {
 public:
  Cancel submit(BatchRequest request, Done done) override {
    const std::string id = request.custom_id;
    BatchAnswer answer;
    answer.kind = BatchAnswer::Kind::kAnswered;
    answer.http_status = id.starts_with("bad") ? 400 : 200;
    answer.request_id = "r-" + id;
    answer.body = {{"id", "r-" + id}, {"echo", request.body}};
    answer.prompt_tokens = 10;
    answer.cached_tokens = 4;
    answer.reply_tokens = 3;
    bool held = false;
    {
      MutexLock lock(mutex_);
      submitted_.push_back(id);
      if (refusals_ > 0) {
        --refusals_;
        answer.kind = BatchAnswer::Kind::kRefused;
      } else {
        held = holds_ || held_ids_.contains(id);
      }
      if (held) held_[id] = {answer, done};
    }
    if (!held) done(std::move(answer));
    return [this, id] { finish(id, BatchAnswer::Kind::kCancelled); };
  }

  void hold(bool on) {
    MutexLock lock(mutex_);
    holds_ = on;
  }
  void hold_one(const std::string& id) {
    MutexLock lock(mutex_);
    held_ids_.insert(id);
  }
  void refuse(int n) {
    MutexLock lock(mutex_);
    refusals_ = n;
  }
  void finish(const std::string& id, BatchAnswer::Kind kind = BatchAnswer::Kind::kAnswered) {
    std::pair<BatchAnswer, Done> held;
    {
      MutexLock lock(mutex_);
      const auto found = held_.find(id);
      if (found == held_.end()) return;
      held = std::move(found->second);
      held_.erase(found);
    }
    held.first.kind = kind;
    held.second(std::move(held.first));
  }
  [[nodiscard]] std::vector<std::string> submitted() const {
    MutexLock lock(mutex_);
    return submitted_;
  }

 private:
  mutable Mutex mutex_;
  std::vector<std::string> submitted_ HCACHE_GUARDED_BY(mutex_);
  std::map<std::string, std::pair<BatchAnswer, Done>> held_ HCACHE_GUARDED_BY(mutex_);
  std::set<std::string> held_ids_ HCACHE_GUARDED_BY(mutex_);
  bool holds_ HCACHE_GUARDED_BY(mutex_) = false;
  int refusals_ HCACHE_GUARDED_BY(mutex_) = 0;
};

inline std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  size_t at = 0;
  for (size_t end = text.find('\n'); end != std::string::npos; end = text.find('\n', at)) {
    lines.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  if (at < text.size()) lines.push_back(text.substr(at));
  return lines;
}

// Of a file of results: how often each custom_id is there.
inline std::map<std::string, int> answered(Env& env, const std::string& path) {
  std::map<std::string, int> out;
  for (const std::string& line : lines_of(read_whole_file(env, path).value_or(""))) {
    const Result<BatchResult> result = parse_result_line(line);
    EXPECT_TRUE(result.ok()) << line;
    if (result.ok()) ++out[result->custom_id];
  }
  return out;
}

}  // namespace hcache::server::testing
