// A conversation on the command line: opens the runtime as the options say, keeps the chain of
// tokens, and saves it under a name.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/throttled_env.h"
#include "model/chat.h"
#include "model/sampler.h"
#include "model/tokenizer.h"
#include "options.h"
#include "state/runtime.h"
#include "terminal.h"

namespace hcache::cli {

// The options of every verb that runs a model with its store.
struct RuntimeArgs {
  ModelOptions model;
  StateOptions state;
  int64_t ctx = 0;
  std::string kv_type;
  std::string attention;
  int batch = 0;
  std::string save;
  std::string state_type;
  std::string saver;
  std::string salt;
  std::string restore_method;
  int64_t token_rounding = 1;
  std::string link;
  std::string remote;
  int64_t remote_ttl_ns = 0;
  std::string remote_write;
  int64_t remote_timeout_ns = 0;
  bool no_store = false;
  bool no_save = false;
};
// --ctx, --kv-type, --attention, --batch.
void add_engine_options(CLI::App& app, RuntimeArgs* out);
// What a benchmark takes: model, device and engine (--ctx follows from what it measures), folders,
// state type and saver.
void add_bench_options(CLI::App& app, RuntimeArgs* out);
// Everything but the restore method and the link.
void add_runtime_options(CLI::App& app, RuntimeArgs* out);
// --restore-method, --token-rounding, --link.
void add_restore_options(CLI::App& app, RuntimeArgs* out);

// RuntimeOptions as the arguments say, with the default model found. kNotFound, kInvalidArgument.
[[nodiscard]] Result<state::RuntimeOptions> runtime_options(const RuntimeArgs& args);
// Opens the runtime in `env`, slowed to --link, with progress lines; env and line must outlive it.
[[nodiscard]] Result<std::unique_ptr<state::Runtime>> open_runtime(const RuntimeArgs& args,
                                                                   ThrottledEnv& env,
                                                                   ProgressLine& line);
// --link.
struct Link {
  bool paper = false;
  double rate = 0;  // bytes/s unless `paper`; 0: none
  [[nodiscard]] double bytes_per_s(const state::CostProfile& profile) const;
};
[[nodiscard]] Result<Link> parse_link(const std::string& text);
// The runtime that is opened with these options slows `env`, which must outlive it, to the link.
void slow_to(const Link& link, ThrottledEnv& env, state::RuntimeOptions* options);

// One exchange.
struct Turn {
  std::string reply;
  std::vector<int32_t> reply_tokens;
  std::string finish;           // "stop", "length" or "interrupted"
  int64_t history_tokens = 0;   // of the conversation before this turn
  int64_t prompt_tokens = 0;    // that this turn added before the reply
  bool resident = false;        // the history was still in the KV cache: nothing to restore
  state::RestoreReport report;  // of the restore; zeros when resident
  double ttft_s = 0;            // from the message to the first token, tokenisation included
  double decode_s = 0;          // from the first token to the last
  [[nodiscard]] double decode_tokens_per_s() const;
};
[[nodiscard]] Json to_json(const Turn& turn);
[[nodiscard]] Json to_json(const state::RestoreReport& report);
// "3,401 tokens restored (RE:2 KV:28) and 31 computed; first token after 0.31 s; 54.1 tokens/s".
[[nodiscard]] std::string summary(const Turn& turn);

// Threading: one thread. The runtime must outlive it.
class Conversation {
 public:
  // A new conversation, or with a name the stored one of that name (a new one where there is
  // none). kFailedPrecondition when it was held with another model, or is named without a store.
  static Result<std::unique_ptr<Conversation>> open(state::Runtime& runtime,
                                                    const RuntimeArgs& args,
                                                    const std::string& name);

  [[nodiscard]] const std::vector<int32_t>& tokens() const { return tokens_; }
  [[nodiscard]] const model::Tokenizer& tokenizer() const { return *tokenizer_; }

  using OnText = std::function<void(const std::string&)>;
  // Says `message` as the user and gives the model's reply, piece by piece to on_text as well.
  // `system` (may be empty) opens a new conversation. An interrupt ends the reply after the token
  // in hand; before the first one it is kCancelled.
  Result<Turn> say(const std::string& message, const std::string& system,
                   const model::SamplingOptions& sampling, int64_t max_tokens,
                   const OnText& on_text);
  // Appends `text` without the chat template and goes on from there.
  Result<Turn> complete(const std::string& text, const model::SamplingOptions& sampling,
                        int64_t max_tokens, const OnText& on_text);

  // Saves the chain under the name, if it has one and the store may be written; then everything
  // captured is durable.
  Status save();
  // save(), and ends the sequence.
  Status close();

 private:
  Conversation(state::Runtime& runtime, const RuntimeArgs& args, std::string name)
      : runtime_(runtime), args_(args), name_(std::move(name)) {}
  Status load();
  Result<Turn> take_turn(const std::vector<int32_t>& added, const model::SamplingOptions& sampling,
                         int64_t max_tokens, const OnText& on_text, int64_t started_ns);

  state::Runtime& runtime_;
  const RuntimeArgs args_;
  std::string name_;
  std::unique_ptr<model::Tokenizer> tokenizer_;
  std::unique_ptr<model::ChatTemplate> chat_;
  engine::SeqId seq_ = -1;       // -1: not in the KV cache
  std::vector<int32_t> tokens_;  // the whole chain; the engine may lack the last ones
  bool reply_ended_ = false;     // the last token ends a turn
};

}  // namespace hcache::cli
