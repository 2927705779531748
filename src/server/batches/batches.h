// The server's batches: taken in, run in the background one request after the other, kept on disk.
//
// One thread validates inputs, keeps a few requests in flight – batches take turns – and writes
// each answer as it comes, so that a restart goes on by itself and computes no finished request
// again. docs/batches.md says what clients see.
//
// Threading: any thread, but open, start, stop and the destructor from one.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "api/request.h"
#include "base/env.h"
#include "base/status.h"
#include "batch_run.h"
#include "batch_store.h"

namespace hcache::server {

struct BatchesOptions {
  std::string dir;
  uint64_t quota_bytes = 0;  // of all files; 0: no limit
  int64_t ttl_ns = 0;        // ended batches and files go so long after; 0: never
  int64_t in_flight = 1;     // requests of all batches together
};

struct BatchesStat {
  BatchTally tally;
  int64_t in_flight = 0;  // requests
  uint64_t bytes = 0;     // on disk
  // Requests answered since the process began.
  uint64_t completed = 0;
  uint64_t failed = 0;
};

class Batches {
 public:
  // What answers an owner's requests; null: its API key is not known any more.
  using MakeAnswerer = std::function<std::unique_ptr<Answerer>(const std::string& owner)>;

  // Errors of BatchStore::open().
  static Result<std::unique_ptr<Batches>> open(Env& env, const BatchesOptions& options,
                                               MakeAnswerer make_answerer);
  ~Batches() { stop(); }
  Batches(const Batches&) = delete;
  Batches& operator=(const Batches&) = delete;

  // Goes on with what has not ended.
  void start();
  // Starts nothing more, ends what is in flight, and writes what was answered. Batches can still be
  // looked at and taken in; they run after the next start.
  void stop();

  // Files, and looking at batches.
  [[nodiscard]] BatchStore& store() { return *store_; }
  [[nodiscard]] BatchesStat stat() const;

  // OpenAI's. kNotFound: no such file. kInvalidArgument: it is not for batches, or no batch runs at
  // that endpoint.
  Result<StoredBatch> create(const std::string& owner, const api::CreateBatch& asked);
  // Anthropic's: `lines` is a request a line, with custom_id and params. kInvalidArgument names the
  // first that is wrong.
  Result<StoredBatch> create_messages(const std::string& owner, std::string_view lines);
  // kNotFound, also for the other kind. kFailedPrecondition: it has ended.
  Result<StoredBatch> cancel(std::string_view owner, const std::string& id, bool anthropic);

 private:
  // One that is under way. The manager thread's.
  struct Active {
    std::unique_ptr<Answerer> answerer;
    std::unique_ptr<ResultLog> output;
    std::unique_ptr<ResultLog> errors;
    std::unique_ptr<BatchRun> run;
    std::string owner;
    int64_t retry_ns = 0;   // after an error of the disk; 0: there was none
    BatchRun::Counts told;  // as stat() counts them
  };

  Batches(Env& env, const BatchesOptions& options, MakeAnswerer make_answerer)
      : env_(env),
        options_(options),
        make_answerer_(std::move(make_answerer)),
        driver_(env, options.in_flight) {}

  // One that is not kept yet.
  [[nodiscard]] StoredBatch new_batch(std::string_view id_prefix, const std::string& owner,
                                      const api::CreateBatch& asked) const;
  void work();
  // Takes up batches that are not active yet, of each owner so many at a time.
  void take_up();
  void give_up_if_late(const StoredBatch& batch, const Status& why);
  Status open_batch(const StoredBatch& batch);
  // Whether the batch was refused.
  Result<bool> validate(const StoredBatch& batch, const BatchInput& input);
  Status fail(const std::string& id, api::Json errors);
  void look_at(const std::string& id, Active& active);
  Status advance(const std::string& id, Active& active);
  // Its status will be `ending` once everything is written.
  Status finish(const StoredBatch& batch, Active& active, BatchStatus ending);
  Status publish(const StoredBatch& batch, const ResultLog& log, const char* what);
  void expire();

  Env& env_;
  const BatchesOptions options_;
  const MakeAnswerer make_answerer_;
  std::unique_ptr<BatchStore> store_;
  BatchDriver driver_;
  std::map<std::string, Active> active_;     // the thread's, as what follows
  std::map<std::string, int64_t> retry_ns_;  // when to try again those that could not be opened
  int64_t next_expiry_ns_ = 0;
  std::atomic<bool> stop_ = false;
  std::atomic<int64_t> in_flight_ = 0;
  std::atomic<uint64_t> completed_ = 0;
  std::atomic<uint64_t> failed_ = 0;
  std::thread thread_;
};

}  // namespace hcache::server
