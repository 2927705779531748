// `hcache serve`: the OpenAI, Anthropic, llama-server and Ollama protocols over one model, whose
// conversations survive eviction, restarts and crashes (docs/operations.md).
//
// Threading: start, stop and the destructor from one thread; port from any.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "http/server.h"
#include "model/pooling.h"
#include "model/sampler.h"
#include "policy/restore_plan.h"
#include "scheduler/scheduler.h"
#include "serving/draft_model.h"
#include "state/runtime.h"

namespace hcache::server {

struct ServerOptions {
  state::RuntimeOptions runtime;
  http::Options http;
  scheduler::SchedulerOptions scheduler;
  std::optional<serving::DraftOptions> draft;  // a model that guesses replies' next tokens
  policy::Mode restore_mode = policy::Mode::kPlan;
  int32_t max_sequences = 64;  // in the arena, idle ones included
  int64_t max_context = 0;     // tokens of one of them; 0: as many as model and arena have
  // The model's names for clients, the first of them in alphabetical order is its id; empty: its
  // file's. And what it is good for, in words of the operator's.
  std::set<std::string> aliases;
  std::set<std::string> tags;
  std::string chat_template;  // Jinja source; empty: the model's own
  std::string media_dir;      // whose files requests may name as file://…; empty: none
  std::vector<std::string> ignored_lines;  // of system prompts: patterns (fnmatch) of whole lines
  std::string template_args;     // a JSON object: of chat templates, unless requests set them
  std::optional<bool> thinking;  // of chat templates, unless requests say; absent: as they have it
  model::SamplingOptions sampling;  // of requests that name none
  std::optional<uint32_t> seed;     // of requests that name none; absent: another one for each
  bool salt_per_key = true;         // false: all API keys share their state
  int64_t ttl_ns = 0;               // of conversations without a name; 0: as long as there is room
  bool slots = true;                // GET /slots tells what is in memory
  bool slot_actions = false;        // /slots/{id}?action=… may save, restore and erase
  bool page = true;                 // at /
  bool verbose_answers = false;     // OpenAI's chats have llama-server's own answer beside theirs
  bool suffix_first = false;        // prompts of /infill begin with what follows the gap
  std::optional<model::Pooling>
      pooling;                     // of embeddings; absent: as the model's file says, or the mean
  int embd_normalize = 2;          // of requests that do not say (api/embeddings.h)
  int intake_threads = 1;          // that parse and tokenise
  bool log_requests = false;       // one line per request that ended, whatever the log's level
  std::string batches_dir;         // of files and batches; empty: this server takes none
  uint64_t batch_quota_bytes = 0;  // of that folder; 0: no limit
  int64_t batch_ttl_ns = 0;        // of ended batches and of files; 0: never
  int batch_parallel = 0;  // most of their requests in flight; 0: as many as a step has sequences
  // Called with the port once it is open, before the model is loaded. May be empty.
  std::function<void(uint16_t port)> on_listening;
  int64_t max_new_tokens = -1;  // of requests that name no limit; -1: as many as fit
  // How what outgrows the context is cut, and whether that is done for requests that do not say.
  policy::TruncationLimits truncation;
  bool truncate = false;
};

class Server {
 public:
  // Listens, loads the model, opens the store. Errors of all of them. Until it returns, every
  // request is answered with 503 and what is being done, as llama-server does while it loads.
  static Result<std::unique_ptr<Server>> start(Env& env, ServerOptions options);
  virtual ~Server() = default;  // as stop(0)

  // /health answers with 503 from now on, so that balancers send requests elsewhere; those that
  // come are still served.
  virtual void drain() = 0;
  // Accepts nothing more, lets what runs end for grace_ns, cuts off the rest; all state is durable
  // when it returns ok.
  virtual Status stop(int64_t grace_ns) = 0;
  [[nodiscard]] virtual uint16_t port() const = 0;
};

}  // namespace hcache::server
