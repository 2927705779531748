// A conversation on the command line: opens what runs requests as the options say, keeps the chain
// of tokens, and saves it under a name.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/throttled_env.h"
#include "common_options.h"
#include "model/chat.h"
#include "model/offload.h"
#include "model/sampler.h"
#include "model/tokenizer.h"
#include "policy/truncation.h"
#include "serving/serving.h"
#include "state/runtime.h"
#include "terminal.h"

namespace hcache::cli {

struct DraftArgs;

// Rotary positions other than the file's, by llama-server's options.
struct RopeArgs : Options {
  using Options::Options;

  std::string scaling =
      choice(&scaling, "--rope-scaling", "file",
             {{"file", "as the model's file says"},
              {"none", "positions as they are"},
              {"linear", "all closer together"},
              {"yarn", "closer together where the model can't tell (YaRN)"}},
             "how a longer context than the model was trained for is made of its positions");
  double scale = number(&scale, "--rope-scale", "X", 0, {0, 1e6},
                        "positions are so many times closer together; 0: as the file says");
  double freq_base = number(&freq_base, "--rope-freq-base", "X", 0, {0, 1e12},
                            "base of the rotation's frequencies; 0: as the file says");
  double freq_scale = number(&freq_scale, "--rope-freq-scale", "X", 0, {0, 1e6},
                             "what positions are multiplied by: 1 / --rope-scale");
  int orig_ctx = integer(&orig_ctx, "--yarn-orig-ctx", "TOKENS", 0, {0},
                         "context that the model was trained for; 0: as the file says");
  double ext_factor = number(&ext_factor, "--yarn-ext-factor", "X", -1, {-1, 1e3},
                             "share of extrapolation; -1: 1 with yarn");
  double attn_factor = number(&attn_factor, "--yarn-attn-factor", "X", -1, {-1, 1e3},
                              "what Q and K are multiplied by without yarn; -1: 1");
  double beta_slow = number(&beta_slow, "--yarn-beta-slow", "X", -1, {-1, 1e6},
                            "turns below which positions are interpolated; -1: as the file says");
  double beta_fast = number(&beta_fast, "--yarn-beta-fast", "X", -1, {-1, 1e6},
                            "turns above which they are not; -1: as the file says");

  // kInvalidArgument: options that contradict each other.
  [[nodiscard]] Result<model::RopeOverride> resolved() const;
};

// The options of every verb that runs a model with its store.
struct RuntimeArgs : Options {
  explicit RuntimeArgs(Options* parent);
  // Adds --engine and adapters, in verbs that either engine serves; gives back the engine's
  // default.
  std::string offer_engine();
  // Adds --kv-budget, --kv-quality and --kv-policy, in verbs whose conversations may do with some
  // of their rows.
  std::optional<double> offer_kv_budget();

  ModelOptions model{this};
  RopeArgs rope{this};
  int64_t ctx = integer(&ctx, "-c,--ctx", "TOKENS", engine::EngineOptions().arena_tokens, {64},
                        "room for the KV cache, shared by all sequences");
  int batch = integer(&batch, "-b,--batch", "TOKENS", engine::EngineOptions().max_batch_rows,
                      {1, 65536}, "most tokens of one step");
  std::string weights =
      choice(&weights, "--weights", "auto",
             {{"auto", "on the device where they fit, else in host memory, else on disk"},
              {"resident", "all on the device"},
              {"host", "in host memory, brought layer by layer while the one before computes"},
              {"disk", "in the model's file, read layer by layer while the one before computes"}},
             "where the layers' weights are");
  uint64_t device_memory =
      bytes(&device_memory, "--device-memory", 0,
            "of the device, for weights, KV cache and buffers; as many layers stay as fit, with "
            "--weights host or disk too; 0: what is free");
  std::string kv_type =
      choice(&kv_type, "--kv-type", "f16", "f32|f16|bf16|q8_0", "type of the KV cache");
  std::string attention =
      choice(&attention, "--attention", "auto", "auto|ours|ggml",
             "attention kernel; auto: ours on the CPU with an f16 cache, else ggml's");
  StateOptions state{this};
  std::string save = choice(&save, "--save", "plan", "plan|hidden|kv|all",
                            "what is saved of each layer; plan: what restoring will want");
  std::string state_type = choice(&state_type, "--state-type", "native", "native|f32|f16|bf16|q8",
                                  "type of saved hidden states; native loses nothing");
  std::string pack = choice(&pack, "--pack", "auto",
                            {{"auto", "where restores come earlier by it, by the disks' speed"},
                             {"on", "wherever it makes them smaller"},
                             {"off", "as the KV cache has them"},
                             {"q8_0",
                              "rounded to eight bits: about half of the bytes, and answers "
                              "behind a restore may differ (hcache eval kl says how much)"},
                             {"q4_0", "to four bits"}},
                            "whether saved K and V are packed; without loss but for q8_0 and q4_0");
  double quality =
      number(&quality, "--quality", "KL", 0, {0, 10},
             "with --pack auto K and V may be rounded, where restores come earlier by it and the "
             "mean KL divergence of predictions (nats), measured once, is no more; 0: never");
  std::string state_kernels =
      choice(&state_kernels, "--state-kernels", "any",
             {{"any",
               "whichever products of quantised weights made it, an earlier version's or a GPU's "
               "too: they differ by rounding"},
              {"same", "made by this version's on a CPU; other state is computed again"}},
             "which saved state is used");
  std::string saver = choice(&saver, "--saver", "background", "background|direct",
                             "write behind the computation, or in its path (for comparison)");
  std::string salt =
      text(&salt, "--salt", "TEXT", "", "cache salt: nothing is shared between different salts");
  std::string restore_method = choice(&restore_method, "--restore-method", "plan",
                                      "plan|hidden|kv|recompute|naive-hybrid|token-partition",
                                      "how saved state is restored; plan: the fastest mix");
  int64_t token_rounding = integer(&token_rounding, "--token-rounding", "TOKENS", 1, {1, 65536},
                                   "token-partition splits at multiples of this");
  std::string link =
      text(&link, "--link", "RATE|paper|none", "none",
           "slow real reads down to this (19MB/s); paper: the paper's ratio of compute to link");
  store::RemoteOptions remote;  // bound in the constructor, its keys aside
  std::string remote_write =
      choice(&remote_write, "--remote-write", "through", "through|back|off",
             "what goes to --remote: all that is saved, what --quota evicts from the disks, "
             "nothing",
             {.needs = "--remote"});
  bool gpu_direct =
      flag(&gpu_direct, "--gpu-direct",
           "read saved state from the disks straight into the GPU's memory (NVIDIA GPUDirect "
           "Storage, one CUDA device)");
  bool rotate_moved = true;     // EngineOptions'
  std::string forward = "own";  // offer_engine()'s, where a verb has it
  std::optional<double> kv_budget;
  std::optional<double> kv_quality;
  std::string kv_policy;
  std::vector<std::string> adapters;
  std::vector<std::string> scaled_adapters;
  bool no_store = flag(&no_store, "--no-store",
                       "neither save nor restore; the conversation ends with the process");
  bool no_save = flag(&no_save, "--no-save",
                      "restore, but write nothing: the stored conversation stays as it is");
};

// A conversation and its replies.
struct TalkArgs : Options {
  using Options::Options;

  std::string session =
      text(&session, "--session", "NAME", "",
           "name of a conversation to continue or begin; default: one that is not kept");
  std::string system = text(&system, "--system", "TEXT", "",
                            "system message of a new conversation; default: the model's own");
  int64_t max_tokens =
      integer(&max_tokens, "-n,--max-tokens", "TOKENS", 512, {0}, "end a reply after this many");
};

// Which layers go where.
[[nodiscard]] model::Offload offload_options(const ModelOptions& model);
// The adapters' files. kInvalidArgument.
[[nodiscard]] Result<std::vector<state::AdapterFile>> adapter_files(const RuntimeArgs& args);
// RuntimeOptions as the arguments say, with the default model found. kNotFound, kInvalidArgument.
[[nodiscard]] Result<state::RuntimeOptions> runtime_options(const RuntimeArgs& args);
// Opens the runtime in `env`, slowed to --link, with progress lines; env and line must outlive it.
[[nodiscard]] Result<std::unique_ptr<state::Runtime>> open_runtime(const RuntimeArgs& args,
                                                                   ThrottledEnv& env,
                                                                   ProgressLine& line);
// The same with what runs requests on it, which truncates conversations or not, and guesses tokens
// or not (null).
[[nodiscard]] Result<std::unique_ptr<serving::Serving>> open_serving(
    const RuntimeArgs& args, ThrottledEnv& env, ProgressLine& line, bool truncates = false,
    const DraftArgs* draft = nullptr);
// --link.
struct Link {
  bool paper = false;
  double rate = 0;  // bytes/s unless `paper`; 0: none
  [[nodiscard]] double bytes_per_s(const state::CostProfile& profile) const;
};
[[nodiscard]] Result<Link> parse_link(const std::string& text);
// The runtime that is opened with these options says where its model's weights are, if they are not
// all on the device; `line` must outlive it.
void tell_places(ProgressLine& line, state::RuntimeOptions* options);
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
  int64_t computed_tokens = 0;  // of history and prompt: neither resident nor restored
  int64_t drafted_tokens = 0;   // guesses, and how many of them came true
  int64_t accepted_tokens = 0;
  int64_t dropped_tokens = 0;    // that have left the context by the end of the turn
  policy::RestoreRecord record;  // of the restore; zeros when there was none
  double prefill_s = 0;          // compute behind the restore
  double first_logits_s = 0;     // from the request to the first token's logits
  double ttft_s = 0;             // from the message to the first token, tokenisation included
  double decode_s = 0;           // from the first token to the last
  [[nodiscard]] double decode_tokens_per_s() const;
};
[[nodiscard]] Json to_json(const Turn& turn);
// The bytes that each device's layers took: [{"device", "layers", "bytes"}].
[[nodiscard]] Json devices_json(const policy::RestoreRecord& record);
// "3,401 tokens restored (RE:2 KV:28) and 31 computed; first token after 0.31 s; 54.1 tokens/s".
[[nodiscard]] std::string summary(const Turn& turn);

// Threading: one thread. What it runs on must outlive it.
class Conversation {
 public:
  // A new conversation, or with a name the stored one of that name (a new one where there is
  // none). kFailedPrecondition when it was held with another model, or is named without a store.
  static Result<std::unique_ptr<Conversation>> open(serving::Serving& serving,
                                                    const RuntimeArgs& args,
                                                    const std::string& name);

  [[nodiscard]] const std::vector<int32_t>& tokens() const { return tokens_; }
  [[nodiscard]] const model::Tokenizer& tokenizer() const { return *tokenizer_; }

  // When the conversation outgrows the context, what is oldest leaves it from now on.
  void truncate(const policy::TruncationLimits& limits) { truncation_ = limits; }

  using OnText = std::function<void(const std::string&)>;
  // Says `message` as the user and gives the model's reply, piece by piece to on_text as well (on
  // the engine's thread).
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
  // Saves it for the last time: the rows that a budget keeps are chosen, which is told on stderr.
  Status finish();

 private:
  Conversation(serving::Serving& serving, const RuntimeArgs& args, std::string name)
      : serving_(serving), args_(args), name_(std::move(name)) {}
  Status load();
  [[nodiscard]] bool saves() const { return !args_.no_store && !args_.no_save; }
  Result<scheduler::Request> request(std::vector<int32_t> chain, int64_t max_tokens) const;
  Result<Turn> take_turn(const std::vector<int32_t>& added, const model::SamplingOptions& sampling,
                         int64_t max_tokens, const OnText& on_text, int64_t started_ns);

  serving::Serving& serving_;
  const RuntimeArgs args_;
  std::string name_;
  std::unique_ptr<model::Tokenizer> tokenizer_;
  std::unique_ptr<model::ChatTemplate> chat_;
  std::optional<policy::TruncationLimits> truncation_;
  std::vector<int32_t> tokens_;  // the whole chain
  bool reply_ended_ = false;     // the last token ends a turn
};

}  // namespace hcache::cli
