// What every endpoint shares: the model with its store behind a scheduler, the conversations, and
// the threads that work beside the HTTP side.
//
//   intake      parses bodies, renders templates, tokenises, submits
//   engine's    steps, restores, samples (serving/serving.h)
//   writer      turns tokens into answers, in order
//   keeper      what waits for the disk: remembering conversations, expiry, administration
//   batches'    has the requests of batches answered (batches/batches.h)
//
// Threading: any thread unless it says otherwise.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "adapter_scales.h"
#include "api/answers.h"
#include "api/request.h"
#include "base/env.h"
#include "base/work_queue.h"
#include "batches.h"
#include "conversations.h"
#include "events.h"
#include "http/message.h"
#include "http/server.h"
#include "ignored_lines.h"
#include "metrics.h"
#include "model/chat.h"
#include "model/pooling.h"
#include "model/tokenizer.h"
#include "policy/truncation.h"
#include "scheduler/scheduler.h"
#include "server/server.h"
#include "serving/serving.h"

namespace hcache::server {

class Service {
 public:
  static Result<std::unique_ptr<Service>> open(Env& env, const ServerOptions& options);
  // stop() first.
  ~Service();
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  // From now on /health says that requests are better sent elsewhere.
  void drain() { draining_.store(true, std::memory_order_relaxed); }
  [[nodiscard]] bool is_draining() const { return draining_.load(std::memory_order_relaxed); }
  // Accepts nothing more, waits up to grace_ns for what runs, cuts off the rest, and makes all
  // state durable.
  Status stop(int64_t grace_ns);

  [[nodiscard]] Env& env() { return env_; }
  [[nodiscard]] const ServerOptions& options() const { return options_; }
  [[nodiscard]] const std::string& model_name() const { return model_name_; }
  [[nodiscard]] const model::Tokenizer& tokenizer() const { return *tokenizer_; }
  [[nodiscard]] const model::ChatTemplate& chat_template() const { return *chat_template_; }
  // A conversation in the model's words, with the variables that the server was started with and
  // without the lines that are no part of a prompt.
  [[nodiscard]] Result<model::ChatPrompt> render(model::ChatInput chat) const;
  // A text in which markers stand for media, which are there, as tokens. kInvalidArgument: the
  // model takes none, or not these.
  [[nodiscard]] Result<libllama::MediaPrompt> tokenise(const std::string& text,
                                                       std::span<const model::Medium> media,
                                                       bool add_special);
  [[nodiscard]] bool takes_pictures() const {
    return serving_->media() != nullptr && serving_->media()->takes_pictures();
  }
  [[nodiscard]] bool takes_sounds() const {
    return serving_->media() != nullptr && serving_->media()->takes_sounds();
  }
  // The media of a conversation, in the order of their markers.
  [[nodiscard]] static std::vector<model::Medium> media_of(const model::ChatInput& chat);
  [[nodiscard]] scheduler::Scheduler& scheduler() { return serving_->scheduler(); }
  [[nodiscard]] Conversations& conversations() { return *conversations_; }
  [[nodiscard]] store::Store* store() { return runtime().store(); }
  [[nodiscard]] state::Runtime& runtime() { return serving_->runtime(); }
  [[nodiscard]] std::optional<serving::BatchReport> batch_report() const {
    return serving_->batch_report();
  }
  [[nodiscard]] int64_t context() const { return serving_->context(); }
  // How the rows of a text become its vector; why they can't.
  [[nodiscard]] const Result<model::Pooling>& pooling() const { return pooling_; }
  // Where the messages of a truncated conversation begin.
  [[nodiscard]] policy::NextMessage next_message() const;
  // What is held behind each cut of a truncated conversation; empty: nothing of it is, or can be,
  // cut.
  [[nodiscard]] std::vector<policy::HeldRows> cuts_of(std::span<const int32_t> tokens) const;
  [[nodiscard]] int64_t started_s() const { return started_s_; }

  [[nodiscard]] Metrics& metrics() { return metrics_; }
  // As Prometheus wants it.
  [[nodiscard]] std::string metrics_text();
  [[nodiscard]] Events& events() { return *events_; }
  // Takes up the batches that the options name, where there are any. What keeps it from that is
  // logged, and the server goes on without them. Once.
  void open_batches();
  // Null: there are none.
  [[nodiscard]] Batches* batches() { return batches_.get(); }
  // Ends what of them is in flight; the rest waits for the next start.
  void stop_batches();
  // Ends every stream of events and refuses new ones.
  void stop_events() { events_->stop(); }
  // The HTTP side to report on; null: there is none (any more).
  void watch(const http::Server* http) { http_.store(http, std::memory_order_release); }

  [[nodiscard]] WorkQueue& intake() { return *intake_; }
  [[nodiscard]] WorkQueue& writer() { return *writer_; }
  [[nodiscard]] WorkQueue& keeper() { return *keeper_; }

  // The cache salt of a request: its API key's own unless the server is told otherwise, and what
  // the request adds. What the key has in all belongs to one owner.
  // The model's adapters count as the server is set.
  [[nodiscard]] Salt salt_of(const http::Request& request, const std::string& cache_salt) const;
  // They count as `asked` says, if it does. kInvalidArgument: there is no such adapter.
  [[nodiscard]] Result<Salt> salt_of(const http::Request& request,
                                     const api::GenerationRequest& asked) const;
  [[nodiscard]] AdapterScales& adapters() { return *adapters_; }
  // What files say of state under this salt.
  [[nodiscard]] Fingerprint file_fingerprint(const Salt& salt);
  // Removes a conversation, the saved state that only it uses, and its rows in the arena.
  Status remove_session(const SaltId& id, const std::string& name);
  // A name for an answer: letters and digits, never twice.
  [[nodiscard]] std::string new_id();

 private:
  Service(Env& env, const ServerOptions& options) : env_(env), options_(options) {}
  Status init();
  [[nodiscard]] Salt key_salt(const http::Request& request, const std::string& cache_salt) const;
  [[nodiscard]] Status check_cuts() const;
  // A file of the folder of media. kInvalidArgument.
  [[nodiscard]] Result<std::string> read_medium(const std::string& name) const;
  // With the vocabulary that the model which drafts shares with this one; nullopt: none drafts.
  // Errors name its file, and where the vocabularies differ.
  [[nodiscard]] policy::TruncationLimits truncation_limits() const;
  // What the store has of a conversation, whether it was truncated or not.
  [[nodiscard]] Result<store::Match> saved(std::span<const int32_t> tokens, const SaltId& salt);
  // What answers the batches of an owner; null: none of the API keys is its.
  [[nodiscard]] std::unique_ptr<Answerer> answerer_for(const std::string& owner);
  // Now and then has sessions expired; the engine's thread.
  void tick();
  [[nodiscard]] std::string event_text();
  [[nodiscard]] store::StoreStat store_stat() HCACHE_EXCLUDES(stat_mutex_);

  Env& env_;
  const ServerOptions options_;
  std::string model_name_;
  int64_t started_s_ = 0;
  Metrics metrics_;
  Mutex stat_mutex_;
  store::StoreStat stat_ HCACHE_GUARDED_BY(stat_mutex_);
  int64_t stat_ns_ HCACHE_GUARDED_BY(stat_mutex_) = 0;
  std::atomic<const http::Server*> http_ = nullptr;
  std::atomic<bool> draining_ = false;
  std::unique_ptr<model::Tokenizer> tokenizer_;
  std::unique_ptr<model::ChatTemplate> chat_template_;
  model::ChatInput template_defaults_;
  const IgnoredLines ignored_lines_{options_.ignored_lines};
  Result<model::Pooling> pooling_ = model::Pooling::kMean;
  std::unique_ptr<serving::Serving> serving_;
  std::unique_ptr<AdapterScales> adapters_;
  std::unique_ptr<Conversations> conversations_;
  std::atomic<int64_t> next_expiry_ns_ = std::numeric_limits<int64_t>::max();
  std::unique_ptr<Events> events_;
  std::unique_ptr<Batches> batches_;
  std::unique_ptr<WorkQueue> keeper_;
  std::unique_ptr<WorkQueue> writer_;
  std::unique_ptr<WorkQueue> intake_;
};

}  // namespace hcache::server
