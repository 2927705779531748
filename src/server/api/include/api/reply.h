// From the tokens of a generation to the JSON of four protocols, whole or as a stream.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "api/json.h"
#include "api/request.h"
#include "base/status.h"
#include "model/chat.h"
#include "policy/restore_record.h"

namespace hcache::api {

// Where the state of a reply came from, and what it took. Milliseconds, bytes, tokens.
struct Outcome {
  int64_t prompt_tokens = 0;
  int64_t reply_tokens = 0;
  // The prompt's tokens by the source of their state; together, and with dropped_before,
  // prompt_tokens.
  int64_t resident = 0;        // was still in the arena
  int64_t hidden = 0;          // restored from saved hidden states (in most layers)
  int64_t kv = 0;              // restored from saved KV (in most layers)
  int64_t recomputed = 0;      // saved, but computed again
  int64_t fresh = 0;           // never seen
  int64_t saved = 0;           // of those, how many are now in the store, or on their way to it
  int64_t dropped_before = 0;  // had left the context already
  int64_t dropped = 0;         // of prompt and reply, have left it by now
  int64_t drafted = 0;         // tokens of the reply that were guessed and computed along
  int64_t accepted = 0;        // of those, what came true
  policy::TierBytes bytes;     // read by its restores

  double queue_ms = 0;
  double restore_ms = 0;
  double prompt_ms = 0;           // of computing what was not restored
  double reply_ms = 0;            // from the first token to the last
  double first_ms = 0;            // from the request's arrival to the first token
  policy::RestoreRecord restore;  // the last one; no schedule: nothing was restored
  int64_t preemptions = 0;        // how often it had to make room

  [[nodiscard]] int64_t cached() const { return resident + hidden + kv; }
};

enum class FinishReason {
  kEnd,        // the model ended its reply
  kStop,       // a stop string did
  kLength,     // max_tokens, or no room left
  kCancelled,  // by the client or the server
};

struct Finish {
  FinishReason reason = FinishReason::kEnd;
  std::string stop_string;  // with kStop
  Outcome outcome;
};

// A token and its own bytes, which need not be whole characters.
struct TokenInfo {
  int32_t token = 0;
  std::string bytes;
  float logprob = 0;  // with sampled_probs: the chance, in [0, 1]
};

struct TokenEvent {
  TokenInfo chosen;
  std::vector<TokenInfo> top;  // the likeliest ones, where the request asks for them
  std::string text;            // what StopMatcher let through with it; often empty
  double reply_ms = 0;         // since the reply's first token
};

struct ReplyContext {
  std::string id;         // letters and digits, unique; the dialect puts its own prefix before it
  int64_t created_s = 0;  // since 1970-01-01 UTC
  std::string model_name;
  std::string fingerprint;  // of the server's build and model
  // How the reply is read; null for dialects without a conversation.
  std::shared_ptr<const model::ReplyFormat> format;
  std::vector<std::string> prompts;  // as text, for llama-server's `prompt`; may be empty
};

// What is known before the first token.
struct PromptCounts {
  int64_t tokens = 0;
  int64_t cached = 0;
  int64_t saved = 0;     // see Outcome
  double prompt_ms = 0;  // see Outcome
};

// How far a prompt is.
struct PromptProgress {
  int64_t total = 0;
  int64_t cached = 0;
  int64_t processed = 0;  // the cached ones included
  double ms = 0;          // since the first of it
};

// Builds one answer. Its choices are numbered prompt by prompt: prompt * n + i.
//
// The order of calls: begin(), then for every choice push()... and finish(), choices in any order
// and interleaved, then end(). When the request asked for a stream, each gives the bytes of the
// events that are due (may be empty), framed as stream_type() has them; otherwise they give nothing
// and answer() has it all after end(). One thread at a time.
class ReplyBuilder {
 public:
  static std::unique_ptr<ReplyBuilder> create(const GenerationRequest& request,
                                              ReplyContext context);
  virtual ~ReplyBuilder() = default;
  ReplyBuilder(const ReplyBuilder&) = delete;
  ReplyBuilder& operator=(const ReplyBuilder&) = delete;

  // The content type of a stream.
  [[nodiscard]] virtual std::string_view stream_type() const { return "text/event-stream"; }
  // Before begin(), of a stream that is to tell; may be left out.
  [[nodiscard]] virtual std::string progress(const PromptProgress& progress) = 0;
  [[nodiscard]] virtual std::string begin(const PromptCounts& counts) = 0;
  [[nodiscard]] virtual std::string push(int choice, const TokenEvent& event) = 0;
  // `rest`: text that StopMatcher::flush() gave.
  [[nodiscard]] virtual std::string finish(int choice, std::string_view rest,
                                           const Finish& finish) = 0;
  [[nodiscard]] virtual std::string end() = 0;
  // The last event of a stream that can't go on.
  [[nodiscard]] virtual std::string fail(const Status& status) = 0;

  [[nodiscard]] virtual Json answer() const = 0;
  // The choice as the conversation's next message, for requests that go on from it.
  [[nodiscard]] virtual model::ChatMessage message(int choice) const = 0;

 protected:
  ReplyBuilder() = default;
};

// The `hcache` and `timings` objects of every answer.
[[nodiscard]] Json outcome_json(const Outcome& outcome);
[[nodiscard]] Json timings_json(const Outcome& outcome);
// Sampling options in llama-server's words, those that it has and we do not as they are when off.
[[nodiscard]] Json sampling_json(const model::SamplingOptions& sampling);

}  // namespace hcache::api
