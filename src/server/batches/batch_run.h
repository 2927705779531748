// Batches under way: which requests are still to be answered, who answers them, and where the
// answers go.
//
// A BatchRun is one batch. A BatchDriver keeps a number of requests of its runs in flight, takes
// from the runs in turn, and has every answer written, durably, as it comes. What is not written
// has not been done: a run that is opened again goes on there.
//
// Threading: a driver and its runs belong to one thread. An Answerer's functions say their own
// rule.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "base/sync.h"
#include "batch_input.h"
#include "batch_result.h"
#include "result_log.h"

namespace hcache::server {

// What runs requests. The server's requests take the way of every other one
// (service/batch_answerer.h); an engine for batches alone would be another.
class Answerer {
 public:
  Answerer() = default;
  Answerer(const Answerer&) = delete;
  Answerer& operator=(const Answerer&) = delete;
  virtual ~Answerer() = default;

  using Done = std::function<void(BatchAnswer)>;
  using Cancel = std::function<void()>;
  // Starts a request. `done` is called exactly once, from any thread, perhaps before this returns.
  // What is returned ends the request early, if it is still running, from any thread.
  [[nodiscard]] virtual Cancel submit(BatchRequest request, Done done) = 0;
};

class BatchRun {
 public:
  struct Counts {
    int64_t total = 0;
    int64_t completed = 0;  // answered well
    int64_t failed = 0;     // answered with an error, or no request at all
    int64_t cancelled = 0;  // these and the next: given up by finish_rest()
    int64_t expired = 0;
    [[nodiscard]] int64_t done() const { return completed + failed + cancelled + expired; }
  };

  // Takes up what the logs have. `errors` gets what did not go well, and may be the same log as
  // `output`. The logs and the answerer must outlive it. kFailedPrecondition: the logs hold results
  // of another input.
  static Result<std::unique_ptr<BatchRun>> open(BatchInput input, ResultLog& output,
                                                ResultLog& errors, Answerer& answerer);

  [[nodiscard]] const BatchInput& input() const { return input_; }
  [[nodiscard]] const Counts& counts() const { return counts_; }
  // Everything is written.
  [[nodiscard]] bool finished() const { return counts_.done() == counts_.total; }
  // Of counts(): what the logs had when it was opened.
  [[nodiscard]] int64_t found() const { return found_; }
  [[nodiscard]] int64_t in_flight() const { return static_cast<int64_t>(in_flight_.size()); }
  // Why it does not go on; ok again after resume().
  [[nodiscard]] const Status& status() const { return status_; }
  void resume() { status_ = {}; }

  // Starts nothing more and ends what is in flight; what was not answered then is still to be done.
  void cancel();
  // Gives everything that has no answer this error instead. Nothing may be in flight.
  Status finish_rest(const BatchError& error);

 private:
  friend class BatchDriver;

  BatchRun(BatchInput input, ResultLog& output, ResultLog& errors, Answerer& answerer)
      : input_(std::move(input)), output_(output), errors_(errors), answerer_(answerer) {}
  Status take_logs();
  void note(const std::unordered_map<std::string, BatchResult>& found);
  // The next request to start; false: there is none now.
  [[nodiscard]] bool next(int64_t now_ns, size_t* line);
  struct Arrived {
    size_t line = 0;
    BatchAnswer answer;
  };
  // Writes them; after an error they are still to be done.
  Status record(std::vector<Arrived> answers, int64_t now_ns);
  Status write(std::string_view good, std::string_view bad, const std::vector<size_t>& lines);

  enum class State : uint8_t { kOpen, kCompleted, kFailed, kCancelled, kExpired };
  [[nodiscard]] int64_t& count_of(State state);

  BatchInput input_;
  ResultLog& output_;
  ResultLog& errors_;
  Answerer& answerer_;
  std::vector<std::string> ids_;  // of the lines
  std::vector<State> states_;
  std::deque<size_t> open_;  // requests in the order to start them
  std::map<size_t, Answerer::Cancel> in_flight_;
  int64_t not_before_ns_ = 0;  // after a refusal
  bool cancelled_ = false;
  Counts counts_;
  int64_t found_ = 0;
  Status status_;
};

class BatchDriver {
 public:
  // So many requests are in flight at most.
  BatchDriver(Env& env, int64_t most_in_flight) : env_(env), most_in_flight_(most_in_flight) {}
  // As stop().
  ~BatchDriver() { stop(); }
  BatchDriver(const BatchDriver&) = delete;
  BatchDriver& operator=(const BatchDriver&) = delete;

  void add(BatchRun* run) { runs_.push_back(run); }
  // Nothing of it may be in flight.
  void remove(BatchRun* run) { std::erase(runs_, run); }

  // Starts what there is room for, waits up to wait_ns for an answer unless some have come, and
  // writes those that have. What can't be written stops its run: see BatchRun::status().
  void turn(int64_t wait_ns);
  // Ends a turn() that waits. Any thread.
  void wake();
  // Cancels all runs, waits until nothing is in flight, and writes the answers that came whole.
  void stop();

  // Of the answers so far, whole runs that were opened again not included.
  struct Tokens {
    int64_t prompt = 0;
    int64_t cached = 0;
    int64_t reply = 0;
  };
  [[nodiscard]] const Tokens& tokens() const { return tokens_; }
  [[nodiscard]] int64_t in_flight() const;

 private:
  struct Inbox {
    Mutex mutex;
    CondVar changed;
    bool woken HCACHE_GUARDED_BY(mutex) = false;
    std::vector<std::pair<BatchRun*, BatchRun::Arrived>> arrived HCACHE_GUARDED_BY(mutex);
  };

  void fill();
  [[nodiscard]] bool start_one(BatchRun& run);
  void deliver(std::vector<std::pair<BatchRun*, BatchRun::Arrived>> arrived);

  Env& env_;
  const int64_t most_in_flight_;
  const std::shared_ptr<Inbox> inbox_ = std::make_shared<Inbox>();
  std::vector<BatchRun*> runs_;
  size_t next_run_ = 0;
  Tokens tokens_;
};

}  // namespace hcache::server
