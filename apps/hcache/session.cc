#include "session.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include "base/env.h"
#include "base/log.h"
#include "base/names.h"
#include "base/units.h"
#include "draft_args.h"
#include "policy/compression.h"
#include "state/kept_state.h"
#include "state/sample_text.h"

namespace hcache::cli {
namespace {

constexpr double kNsPerSecond = 1e9;

constexpr NameTable<store::RemoteWrite, 3> kRemoteWrites = {{
    {store::RemoteWrite::kThrough, "through"},
    {store::RemoteWrite::kBack, "back"},
    {store::RemoteWrite::kOff, "off"},
}};

double seconds_since(int64_t start_ns) {
  return static_cast<double>(Env::real().monotonic_ns() - start_ns) / kNsPerSecond;
}

}  // namespace

RuntimeArgs::RuntimeArgs(Options* parent) : Options(parent) {
  // Its URL may hold a password, which the environment hides from other users.
  text(&remote.url, "--remote", "URL", "",
       "a store that several processes share: "
       "redis://[[user]:password@]host[:port][,host…][/number], "
       "a server or a cluster; rediss:// with TLS; or "
       "s3://bucket[/prefix][?endpoint=URL&region=NAME] "
       "with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment",
       {.variable = "HCACHE_REMOTE"});
  duration(&remote.ttl_s, "--remote-ttl", remote.ttl_s,
           "state in --remote that nobody uses for so long goes; 0: never", {.needs = "--remote"});
  duration(&remote.timeout_s, "--remote-timeout", remote.timeout_s,
           "how long a request waits for the answer whether --remote has its conversation, and for "
           "its pages if computing them would take less",
           {.needs = "--remote"});
}

model::Offload offload_options(const ModelOptions& model) {
  return {.n_layers = model.gpu_layers,
          .tensor_split = model.tensor_split,
          .override_tensors = model.override_tensors,
          .one_device = model.split_mode == "none",
          .share_layers = model.split_mode == "tensor" || model.split_mode == "row",
          .main_device = model.main_gpu};
}

std::string RuntimeArgs::offer_engine() {
  forward = choice(&forward, "--engine", "auto",
                   {{"auto", "ours where it runs the model, else llama"},
                    {"own", "ours: bit-exact whatever else runs, hidden states, every option"},
                    {"llama",
                     "libllama's, for any model that llama.cpp knows: state is saved as K "
                     "and V or as snapshots"}},
                   "what computes");
  adapters = texts(&adapters, "--lora", "FILE,...", "", "",
                   "low-rank adapters (GGUF) that change the model; state that was computed with "
                   "one is kept apart from what was computed without");
  scaled_adapters = texts(&scaled_adapters, "--lora-scaled", "FILE:SCALE,...", "", "",
                          "the same, each counting so much");
  return forward;
}

std::optional<double> RuntimeArgs::offer_kv_budget() {
  kv_policy =
      choice(&kv_policy, "--kv-policy", "self",
             {{"self", "what reading the conversation once more, while nothing else runs, needs"},
              {"snap", "at once, what its last rows' attention falls on; more is lost"}},
             "which rows --kv-budget keeps");
  kv_budget = number(&kv_budget, "--kv-budget", "SHARE", {policy::kLeastKvBudget, 1},
                     "conversations are restored from this share of their KV cache, the rows that "
                     "attention falls on, where that comes earlier: answers behind it may differ "
                     "(hcache eval compression says how much). Such state is kept apart. 1: from "
                     "all of it, unless a request asks for less; default: no request may");
  kv_quality = number(&kv_quality, "--kv-quality", "KL", {0, 10},
                      "instead of --kv-budget: the smallest share whose predictions diverge by so "
                      "much (mean KL, nats), measured once with each model on a sample text",
                      {.excludes = "--kv-budget"});
  return kv_budget;
}

Result<model::RopeOverride> RopeArgs::resolved() const {
  using Scaling = model::RopeOverride::Scaling;
  if (scale > 0 && freq_scale > 0) {
    return invalid_argument("--rope-scale and --rope-freq-scale say the same; leave one out");
  }
  model::RopeOverride out;
  if (scaling == "none") out.scaling = Scaling::kNone;
  if (scaling == "linear") out.scaling = Scaling::kLinear;
  if (scaling == "yarn") out.scaling = Scaling::kYarn;
  out.freq_base = static_cast<float>(freq_base);
  out.freq_scale = static_cast<float>(scale > 0 ? 1 / scale : freq_scale);
  out.orig_ctx = orig_ctx;
  out.ext_factor = static_cast<float>(ext_factor);
  out.attn_factor = static_cast<float>(attn_factor);
  out.beta_fast = static_cast<float>(beta_fast);
  out.beta_slow = static_cast<float>(beta_slow);
  return out;
}

Result<std::vector<state::AdapterFile>> adapter_files(const RuntimeArgs& args) {
  std::vector<state::AdapterFile> files;
  for (const std::string& path : args.adapters) files.push_back({path});
  for (const std::string& text : args.scaled_adapters) {
    const size_t colon = text.rfind(':');
    state::AdapterFile& file = files.emplace_back();
    file.path = text.substr(0, colon);
    const char* begin = text.data() + (colon == std::string::npos ? text.size() : colon + 1);
    const char* end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(begin, end, file.scale);
    if (file.path.empty() || error != std::errc() || rest != end || !std::isfinite(file.scale)) {
      return invalid_argument(
          fmt::format("--lora-scaled {}: expected FILE:SCALE, such as style.gguf:0.5", text));
    }
  }
  return files;
}

Result<state::RuntimeOptions> runtime_options(const RuntimeArgs& args) {
  state::RuntimeOptions o;
  HCACHE_ASSIGN_OR_RETURN(o.model_path, resolve_model(args.model.path));
  o.device = args.model.device;
  o.offload = offload_options(args.model);
  o.n_threads = args.model.threads;
  HCACHE_ASSIGN_OR_RETURN(o.forward, state::parse_engine_choice(args.forward));
  HCACHE_ASSIGN_OR_RETURN(o.rope, args.rope.resolved());
  HCACHE_ASSIGN_OR_RETURN(o.adapters, adapter_files(args));
  o.engine.arena_tokens = args.ctx;
  o.engine.max_batch_rows = args.batch;
  o.engine.rotate_moved = args.rotate_moved;
  if (args.kv_type == "f32") o.engine.kv_type = GGML_TYPE_F32;
  if (args.kv_type == "f16") o.engine.kv_type = GGML_TYPE_F16;
  if (args.kv_type == "bf16") o.engine.kv_type = GGML_TYPE_BF16;
  if (args.kv_type == "q8_0") o.engine.kv_type = GGML_TYPE_Q8_0;
  HCACHE_ASSIGN_OR_RETURN(o.weights, model::parse_weight_place(args.weights));
  o.device_memory = args.device_memory;
  o.gpu_direct = args.gpu_direct;
  if (args.attention == "ours") o.engine.attention = engine::AttentionKind::kOurs;
  if (args.attention == "ggml") o.engine.attention = engine::AttentionKind::kGgml;
  o.state_dir = args.state.state_dir;
  o.store_dirs = args.state.stores;
  o.store_quota_bytes = args.state.quota_bytes;
  o.snapshot_quota_bytes = args.state.snapshot_quota_bytes;
  HCACHE_ASSIGN_OR_RETURN(o.store_key, args.state.key());
  o.remote = args.remote;
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  o.remote.access_key = variable("AWS_ACCESS_KEY_ID");
  o.remote.secret_key = variable("AWS_SECRET_ACCESS_KEY");
  o.remote.session_token = variable("AWS_SESSION_TOKEN");
  HCACHE_ASSIGN_OR_RETURN(o.remote.write,
                          parse_name(kRemoteWrites, "way to write", args.remote_write));
  o.use_store = !args.no_store;
  o.read_only_store = args.no_save;
  HCACHE_ASSIGN_OR_RETURN(o.save, policy::parse_save_mode(args.save));
  o.state_type = args.state_type;
  HCACHE_ASSIGN_OR_RETURN(o.pack, policy::parse_pack_mode(args.pack));
  o.quality = args.quality;
  if (o.quality > 0 && o.pack != policy::PackMode::kAuto) {
    return invalid_argument(fmt::format(
        "--quality decides what K and V are rounded to, and --pack {} did; leave one of them out",
        args.pack));
  }
  o.same_products = args.state_kernels == "same";
  o.sample = [path = o.model_path]() -> Result<std::vector<int32_t>> {
    HCACHE_ASSIGN_OR_RETURN(const auto tokenizer, model::Tokenizer::load(path));
    return tokenizer->encode(state::sample_text(), {.add_special = true});
  };
  o.saver.direct = args.saver == "direct";
  o.salt = args.salt;
  o.kv_budget = args.kv_budget;
  o.kv_quality = args.kv_quality;
  if (args.kv_policy == "snap") o.kv_policy = policy::Compression::kSnap;
  return o;
}

namespace {

// The options of a runtime that tells its progress and slows `env` to --link.
Result<state::RuntimeOptions> opened_options(const RuntimeArgs& args, ThrottledEnv& env,
                                             ProgressLine& line) {
  HCACHE_ASSIGN_OR_RETURN(const Link link, parse_link(args.link));
  if (args.gpu_direct && args.no_store) {
    return invalid_argument("--gpu-direct reads saved state, and with --no-store there is none");
  }
  if (args.gpu_direct && (link.paper || link.rate > 0)) {
    return invalid_argument("--link slows reads by the system, and --gpu-direct has none of these");
  }
  HCACHE_ASSIGN_OR_RETURN(state::RuntimeOptions options, runtime_options(args));
  options.progress = [&line](const std::string& what, double fraction) {
    return line.update(what, fraction);
  };
  tell_places(line, &options);
  slow_to(link, env, &options);
  return options;
}

}  // namespace

Result<std::unique_ptr<state::Runtime>> open_runtime(const RuntimeArgs& args, ThrottledEnv& env,
                                                     ProgressLine& line) {
  HCACHE_ASSIGN_OR_RETURN(const state::RuntimeOptions options, opened_options(args, env, line));
  auto runtime = state::Runtime::open(env, options);
  line.finish();
  return runtime;
}

namespace {

Status share_vocabulary(const state::RuntimeOptions& answering, serving::DraftOptions* draft) {
  const std::string& path = draft->runtime.model_path;
  HCACHE_ASSIGN_OR_RETURN(const auto tokenizer, model::Tokenizer::load(answering.model_path));
  const auto common = model::common_vocabulary(*tokenizer, path);
  if (!common.ok()) return common.status().with_context("--model-draft " + path);
  draft->n_vocab = *common;
  return {};
}

}  // namespace

Result<std::unique_ptr<serving::Serving>> open_serving(const RuntimeArgs& args, ThrottledEnv& env,
                                                       ProgressLine& line, bool truncates,
                                                       const DraftArgs* draft) {
  serving::ServingOptions options;
  HCACHE_ASSIGN_OR_RETURN(options.runtime, opened_options(args, env, line));
  options.runtime.truncates = truncates;
  // A single conversation: the plan weighs what restoring little of it is worth.
  options.scheduler.reuse.cheap_tokens = 0;
  if (draft != nullptr) {
    options.scheduler.draft = draft->limits();
    options.draft = draft->drafter(args, options.runtime);
    if (options.draft) HCACHE_RETURN_IF_ERROR(share_vocabulary(options.runtime, &*options.draft));
  }
  auto serving = serving::Serving::open(env, options);
  line.finish();
  return serving;
}

double Link::bytes_per_s(const state::CostProfile& profile) const {
  return paper ? state::paper_link_bytes_per_s(profile) : rate;
}

Result<Link> parse_link(const std::string& text) {
  Link link;
  link.paper = text == "paper";
  if (!link.paper && !text.empty() && text != "none") {
    HCACHE_ASSIGN_OR_RETURN(link.rate, parse_rate(text));
  }
  return link;
}

void tell_places(ProgressLine& line, state::RuntimeOptions* options) {
  options->on_model = [&line](const state::ModelCard& card) {
    if (card.engine != "own") {
      line.finish();
      fmt::print(stderr, "hcache: engine: {}\n", card.engine);
    }
    if (!card.streamed) return;
    line.finish();
    fmt::print(stderr, "hcache: weights: {}\n", card.places);
  };
}

void slow_to(const Link& link, ThrottledEnv& env, state::RuntimeOptions* options) {
  options->on_profile = [link, &env](const state::CostProfile& profile) {
    env.set_read_bytes_per_s(link.bytes_per_s(profile));
  };
}

double Turn::decode_tokens_per_s() const {
  return reply_tokens.size() < 2 || decode_s <= 0
             ? 0
             : static_cast<double>(reply_tokens.size() - 1) / decode_s;
}

Json devices_json(const policy::RestoreRecord& record) {
  Json parts = Json::array();
  for (const policy::RestoredDevice& part : record.devices) {
    parts.push_back(
        {{"device", part.device}, {"layers", part.n_layers}, {"bytes", part.pages.total()}});
  }
  return parts;
}

Json to_json(const Turn& turn) {
  Json json = {{"history_tokens", turn.history_tokens},
               {"prompt_tokens", turn.prompt_tokens},
               {"resident", turn.resident},
               {"dropped_tokens", turn.dropped_tokens},
               {"drafted_tokens", turn.drafted_tokens},
               {"accepted_tokens", turn.accepted_tokens},
               {"ttft_ms", turn.ttft_s * 1e3},
               {"decode_tps", turn.decode_tokens_per_s()},
               {"finish", turn.finish},
               {"reply", turn.reply},
               {"reply_tokens", turn.reply_tokens}};
  const policy::RestoreRecord& r = turn.record;
  if (turn.resident) return json;
  json["restore"] = {{"schedule", r.schedule},
                     {"restored_tokens", r.restored_tokens},
                     {"prefilled_tokens", turn.computed_tokens},
                     {"bytes_read", r.read.disk},
                     {"bytes_remote", r.read.remote},
                     {"devices", devices_json(r)},
                     {"restore_ms", r.restore_s * 1e3},
                     {"first_logits_ms", turn.first_logits_s * 1e3},
                     {"predicted_ms", r.predicted_first_s * 1e3},
                     {"io_busy_ms", r.io_busy_s * 1e3},
                     {"compute_busy_ms", (r.compute_busy_s + turn.prefill_s) * 1e3},
                     {"damaged_pages", r.damaged_pages}};
  return json;
}

std::string summary(const Turn& turn) {
  std::string out;
  if (turn.resident) {
    out = fmt::format("{} tokens resident, {} computed", turn.history_tokens, turn.prompt_tokens);
  } else {
    const policy::RestoreRecord& r = turn.record;
    if (r.restored_tokens > 0) {
      out = fmt::format("{} tokens restored ({}, {}), ", r.restored_tokens, r.schedule,
                        format_bytes(r.read.disk));
    }
    out += fmt::format("{} computed", turn.computed_tokens);
  }
  out += fmt::format("; first token after {:.2f} s", turn.ttft_s);
  if (turn.decode_tokens_per_s() > 0) {
    out += fmt::format("; {:.1f} tokens/s", turn.decode_tokens_per_s());
  }
  if (turn.drafted_tokens > 0) {
    out += fmt::format("; {} of {} guesses came true", turn.accepted_tokens, turn.drafted_tokens);
  }
  if (turn.dropped_tokens > 0) {
    out += fmt::format("; the oldest {} tokens have left the context", turn.dropped_tokens);
  }
  return out;
}

Result<std::unique_ptr<Conversation>> Conversation::open(serving::Serving& serving,
                                                         const RuntimeArgs& args,
                                                         const std::string& name) {
  std::unique_ptr<Conversation> c(new Conversation(serving, args, name));
  const std::string& model = serving.runtime().card().path;
  HCACHE_ASSIGN_OR_RETURN(c->tokenizer_, model::Tokenizer::load(model));
  HCACHE_ASSIGN_OR_RETURN(c->chat_, model::ChatTemplate::create(*c->tokenizer_));
  if (c->chat_->is_fallback()) {
    log::warn("{} has no chat template; using chatml", model);
  }
  if (!name.empty()) HCACHE_RETURN_IF_ERROR(c->load());
  return c;
}

Status Conversation::load() {
  const state::Runtime& runtime = serving_.runtime();
  if (serving_.runtime().store() == nullptr) {
    return invalid_argument("--session needs the store: leave out --no-store");
  }
  auto stored = serving_.runtime().store()->get_session(name_);
  if (stored.code() == Code::kNotFound) return {};
  HCACHE_RETURN_IF_ERROR(stored.status());
  if (stored->salt != runtime.salt().id) {
    return permission_denied(
        fmt::format("session {} belongs to another salt, to other adapters (--lora) or to another "
                    "--kv-budget",
                    name_));
  }
  if (stored->fingerprint != runtime.fingerprint()) {
    return failed_precondition(
        fmt::format("session {} was held with another model, KV type, --pack or --state-kernels; "
                    "choose another name, or remove it with `hcache store rm --session {}`",
                    name_, name_));
  }
  tokens_ = std::move(stored->tokens);
  reply_ended_ = !tokens_.empty() && tokenizer_->is_eog(tokens_.back());
  return {};
}

Result<Turn> Conversation::say(const std::string& message, const std::string& system,
                               const model::SamplingOptions& sampling, int64_t max_tokens,
                               const OnText& on_text) {
  const int64_t started_ns = Env::real().monotonic_ns();
  model::EncodeOptions encode;
  encode.parse_special = true;
  std::string text;
  if (tokens_.empty()) {
    std::vector<model::ChatMessage> messages;
    if (!system.empty()) messages.push_back({"system", system});
    messages.push_back({"user", message});
    HCACHE_ASSIGN_OR_RETURN(text, chat_->render(messages, true));
    encode.add_special = chat_->add_special(text);
  } else {
    HCACHE_ASSIGN_OR_RETURN(text, chat_->render_next({"user", message}, reply_ended_));
  }
  HCACHE_ASSIGN_OR_RETURN(const std::vector<int32_t> added, tokenizer_->encode(text, encode));
  return take_turn(added, sampling, max_tokens, on_text, started_ns);
}

Result<Turn> Conversation::complete(const std::string& text, const model::SamplingOptions& sampling,
                                    int64_t max_tokens, const OnText& on_text) {
  const int64_t started_ns = Env::real().monotonic_ns();
  model::EncodeOptions encode;
  encode.add_special = tokens_.empty();
  HCACHE_ASSIGN_OR_RETURN(const std::vector<int32_t> added, tokenizer_->encode(text, encode));
  return take_turn(added, sampling, max_tokens, on_text, started_ns);
}

Result<scheduler::Request> Conversation::request(std::vector<int32_t> chain,
                                                 int64_t max_tokens) const {
  scheduler::Request request;
  request.tokens = std::move(chain);
  request.max_new_tokens = std::max<int64_t>(max_tokens, 0);
  request.truncation = truncation_;
  request.next_message = std::bind_front(model::next_message, std::cref(*tokenizer_));
  request.salt = serving_.runtime().salt();
  request.save = saves();
  HCACHE_ASSIGN_OR_RETURN(request.restore.mode, policy::parse_mode(args_.restore_method));
  request.restore.token_rounding = args_.token_rounding;
  return request;
}

Result<Turn> Conversation::take_turn(const std::vector<int32_t>& added,
                                     const model::SamplingOptions& sampling, int64_t max_tokens,
                                     const OnText& on_text, int64_t started_ns) {
  HCACHE_ASSIGN_OR_RETURN(const auto sampler, model::Sampler::create(*tokenizer_, sampling));
  Turn turn;
  turn.history_tokens = static_cast<int64_t>(tokens_.size());
  turn.prompt_tokens = static_cast<int64_t>(added.size());
  std::vector<int32_t> chain = tokens_;
  chain.insert(chain.end(), added.begin(), added.end());
  if (chain.empty()) return invalid_argument("there is nothing to say");
  sampler->remember(chain);
  HCACHE_ASSIGN_OR_RETURN(scheduler::Request request, this->request(chain, max_tokens));

  ProgressLine line;
  model::TextDecoder decoder(*tokenizer_);
  const auto emit = [&](const std::string& text) {
    turn.reply += text;
    if (on_text && !text.empty()) on_text(text);
  };
  // The engine's thread from here on, while this one waits.
  int64_t first_ns = 0;
  bool ended = false;
  std::atomic<bool> begun = false;
  const int64_t submitted_ns = Env::real().monotonic_ns();
  request.next = [&](std::span<const float> logits) -> Result<scheduler::NextToken> {
    if (!begun) {
      turn.first_logits_s = seconds_since(submitted_ns);
      line.finish();
    }
    HCACHE_ASSIGN_OR_RETURN(const int32_t token, sampler->sample(logits));
    if (!begun) {
      first_ns = Env::real().monotonic_ns();
      turn.ttft_s = static_cast<double>(first_ns - started_ns) / kNsPerSecond;
      begun = true;
    }
    HCACHE_RETURN_IF_ERROR(sampler->accept(token));
    turn.reply_tokens.push_back(token);
    turn.decode_s = seconds_since(first_ns);
    ended = tokenizer_->is_eog(token);
    if (ended) return scheduler::NextToken{.token = token, .stop = true, .finish_reason = "stop"};
    emit(decoder.push(token));
    return scheduler::NextToken{
        .token = token, .stop = interrupted(), .finish_reason = "interrupted"};
  };
  request.on_state = [&](scheduler::Phase phase, double fraction) {
    if (phase == scheduler::Phase::kRestoring) line.update("reading", fraction);
    if (phase == scheduler::Phase::kPrefill) line.update("computing", fraction);
  };
  HCACHE_ASSIGN_OR_RETURN(
      const scheduler::Outcome outcome,
      serving_.run(std::move(request), [&begun] { return begun || !interrupted(); }));
  HCACHE_RETURN_IF_ERROR(outcome.status);

  tokens_ = std::move(chain);
  tokens_.insert(tokens_.end(), turn.reply_tokens.begin(), turn.reply_tokens.end());
  reply_ended_ = ended;
  turn.finish = outcome.finish_reason;
  turn.resident = turn.history_tokens > 0 && outcome.resident_tokens > 0;
  turn.computed_tokens = outcome.new_tokens;
  turn.dropped_tokens = outcome.dropped_tokens;
  turn.drafted_tokens = outcome.drafted_tokens;
  turn.accepted_tokens = outcome.accepted_tokens;
  turn.prefill_s = outcome.prefill_s;
  if (!outcome.restores.empty()) turn.record = outcome.restores.back();
  emit(decoder.flush());
  return turn;
}

Status Conversation::save() {
  if (!saves()) return {};
  HCACHE_RETURN_IF_ERROR(serving_.flush());
  if (name_.empty() || tokens_.empty()) return {};
  store::Session session;
  session.name = name_;
  session.fingerprint = serving_.runtime().fingerprint();
  session.salt = serving_.runtime().salt().id;
  session.tokens = tokens_;
  const bool adapted = state::differs(serving_.runtime().salt());
  session.metadata_json = Json{{store::kAdapted, adapted}}.dump();
  return serving_.runtime().store()->put_session(session);
}

Status Conversation::finish() {
  HCACHE_RETURN_IF_ERROR(save());
  if (!saves() || serving_.runtime().salt().kv_budget >= 1) return {};
  ProgressLine line;
  const Status done = serving_.finish_chores(
      [&line](double fraction) { return line.update("choosing rows to keep", fraction); });
  line.finish();
  return done;
}

}  // namespace hcache::cli
