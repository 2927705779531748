#include "session.h"

#include <fmt/format.h>

#include <cstdlib>

#include "base/env.h"
#include "base/log.h"
#include "base/names.h"
#include "base/units.h"

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

void add_engine_options(CLI::App& app, RuntimeArgs* out) {
  add_option(app, "ctx", &out->ctx);
  add_option(app, "batch", &out->batch);
  add_option(app, "kv-type", &out->kv_type);
  add_option(app, "attention", &out->attention);
}

void add_bench_options(CLI::App& app, RuntimeArgs* out) {
  add_model_options(app, &out->model);
  add_option(app, "batch", &out->batch);
  add_option(app, "kv-type", &out->kv_type);
  add_option(app, "attention", &out->attention);
  add_state_options(app, &out->state);
  add_option(app, "state-type", &out->state_type);
  add_option(app, "saver", &out->saver);
}

void add_runtime_options(CLI::App& app, RuntimeArgs* out) {
  add_model_options(app, &out->model);
  add_engine_options(app, out);
  add_state_options(app, &out->state);
  add_option(app, "save", &out->save);
  add_option(app, "state-type", &out->state_type);
  add_option(app, "saver", &out->saver);
  add_option(app, "salt", &out->salt);
  add_option(app, "remote", &out->remote);
  app.get_option("--remote")->envname("HCACHE_REMOTE");  // it may hold a password
  add_option(app, "remote-ttl", &out->remote_ttl_ns);
  add_option(app, "remote-write", &out->remote_write);
  add_option(app, "remote-timeout", &out->remote_timeout_ns);
  add_option(app, "no-store", &out->no_store);
  add_option(app, "no-save", &out->no_save);
}

void add_restore_options(CLI::App& app, RuntimeArgs* out) {
  add_option(app, "restore-method", &out->restore_method);
  add_option(app, "token-rounding", &out->token_rounding);
  add_option(app, "link", &out->link);
}

Result<state::RuntimeOptions> runtime_options(const RuntimeArgs& args) {
  state::RuntimeOptions o;
  HCACHE_ASSIGN_OR_RETURN(o.model_path, resolve_model(args.model.path));
  o.device = args.model.device;
  o.n_threads = args.model.threads;
  o.engine.arena_tokens = args.ctx;
  o.engine.max_batch_rows = args.batch;
  if (args.kv_type == "f32") o.engine.kv_type = GGML_TYPE_F32;
  if (args.kv_type == "f16") o.engine.kv_type = GGML_TYPE_F16;
  if (args.kv_type == "bf16") o.engine.kv_type = GGML_TYPE_BF16;
  if (args.kv_type == "q8_0") o.engine.kv_type = GGML_TYPE_Q8_0;
  if (args.attention == "ours") o.engine.attention = engine::AttentionKind::kOurs;
  if (args.attention == "ggml") o.engine.attention = engine::AttentionKind::kGgml;
  o.state_dir = args.state.state_dir;
  o.store_dirs = args.state.stores;
  o.store_quota_bytes = args.state.quota_bytes;
  o.remote.url = args.remote;
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  o.remote.access_key = variable("AWS_ACCESS_KEY_ID");
  o.remote.secret_key = variable("AWS_SECRET_ACCESS_KEY");
  o.remote.session_token = variable("AWS_SESSION_TOKEN");
  o.remote.ttl_s = static_cast<double>(args.remote_ttl_ns) / kNsPerSecond;
  if (!args.remote_write.empty()) {
    HCACHE_ASSIGN_OR_RETURN(o.remote.write,
                            parse_name(kRemoteWrites, "way to write", args.remote_write));
  }
  if (args.remote_timeout_ns > 0) {
    o.remote.timeout_s = static_cast<double>(args.remote_timeout_ns) / kNsPerSecond;
  }
  o.use_store = !args.no_store;
  o.read_only_store = args.no_save;
  if (!args.save.empty()) {
    HCACHE_ASSIGN_OR_RETURN(o.save, policy::parse_save_mode(args.save));
  }
  if (!args.state_type.empty()) o.state_type = args.state_type;
  o.saver.direct = args.saver == "direct";
  o.salt = args.salt;
  return o;
}

Result<std::unique_ptr<state::Runtime>> open_runtime(const RuntimeArgs& args, ThrottledEnv& env,
                                                     ProgressLine& line) {
  HCACHE_ASSIGN_OR_RETURN(const Link link, parse_link(args.link));
  HCACHE_ASSIGN_OR_RETURN(state::RuntimeOptions options, runtime_options(args));
  options.progress = [&line](const std::string& what, double fraction) {
    return line.update(what, fraction);
  };
  slow_to(link, env, &options);
  auto runtime = state::Runtime::open(env, options);
  line.finish();
  return runtime;
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

Json to_json(const state::RestoreReport& r) {
  return {{"schedule", r.schedule},
          {"restored_tokens", r.restored_tokens},
          {"prefilled_tokens", r.prefilled_tokens},
          {"bytes_read", r.bytes_read},
          {"bytes_remote", r.bytes_remote},
          {"restore_ms", r.restore_s * 1e3},
          {"first_logits_ms", r.ttft_s * 1e3},
          {"predicted_ms", r.predicted_s * 1e3},
          {"io_busy_ms", r.io_busy_s * 1e3},
          {"compute_busy_ms", r.compute_busy_s * 1e3},
          {"damaged_pages", r.damaged_pages}};
}

Json to_json(const Turn& turn) {
  Json json = {{"history_tokens", turn.history_tokens},
               {"prompt_tokens", turn.prompt_tokens},
               {"resident", turn.resident},
               {"ttft_ms", turn.ttft_s * 1e3},
               {"decode_tps", turn.decode_tokens_per_s()},
               {"finish", turn.finish},
               {"reply", turn.reply},
               {"reply_tokens", turn.reply_tokens}};
  if (!turn.resident) json["restore"] = to_json(turn.report);
  return json;
}

std::string summary(const Turn& turn) {
  std::string out;
  if (turn.resident) {
    out = fmt::format("{} tokens resident, {} computed", turn.history_tokens, turn.prompt_tokens);
  } else {
    const state::RestoreReport& r = turn.report;
    if (r.restored_tokens > 0) {
      out = fmt::format("{} tokens restored ({}, {}), ", r.restored_tokens, r.schedule,
                        format_bytes(r.bytes_read));
    }
    out += fmt::format("{} computed", r.prefilled_tokens);
  }
  out += fmt::format("; first token after {:.2f} s", turn.ttft_s);
  if (turn.decode_tokens_per_s() > 0) {
    out += fmt::format("; {:.1f} tokens/s", turn.decode_tokens_per_s());
  }
  return out;
}

Result<std::unique_ptr<Conversation>> Conversation::open(state::Runtime& runtime,
                                                         const RuntimeArgs& args,
                                                         const std::string& name) {
  std::unique_ptr<Conversation> c(new Conversation(runtime, args, name));
  HCACHE_ASSIGN_OR_RETURN(c->tokenizer_, model::Tokenizer::load(runtime.model().path()));
  HCACHE_ASSIGN_OR_RETURN(c->chat_, model::ChatTemplate::create(*c->tokenizer_));
  if (c->chat_->is_fallback()) {
    log::warn("{} has no chat template; using chatml", runtime.model().path());
  }
  if (!name.empty()) HCACHE_RETURN_IF_ERROR(c->load());
  return c;
}

Status Conversation::load() {
  if (runtime_.store() == nullptr) {
    return invalid_argument("--session needs the store: leave out --no-store");
  }
  auto stored = runtime_.store()->get_session(name_);
  if (stored.code() == Code::kNotFound) return {};
  HCACHE_RETURN_IF_ERROR(stored.status());
  if (stored->salt != runtime_.salt()) {
    return permission_denied(fmt::format("session {} belongs to another salt", name_));
  }
  if (stored->fingerprint != runtime_.fingerprint()) {
    return failed_precondition(fmt::format(
        "session {} was held with another model or KV type; choose another name, or remove it "
        "with `hcache store rm --session {}`",
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

Result<Turn> Conversation::take_turn(const std::vector<int32_t>& added,
                                     const model::SamplingOptions& sampling, int64_t max_tokens,
                                     const OnText& on_text, int64_t started_ns) {
  HCACHE_ASSIGN_OR_RETURN(const auto sampler, model::Sampler::create(*tokenizer_, sampling));
  Turn turn;
  turn.history_tokens = static_cast<int64_t>(tokens_.size());
  turn.prompt_tokens = static_cast<int64_t>(added.size());
  turn.resident = seq_ >= 0;
  turn.finish = "length";
  std::vector<int32_t> chain = tokens_;
  chain.insert(chain.end(), added.begin(), added.end());
  if (chain.empty()) return invalid_argument("there is nothing to say");

  std::vector<float> logits;
  if (seq_ >= 0) {
    const auto held = static_cast<size_t>(runtime_.engine().length(seq_));
    auto next = runtime_.append(seq_, std::span<const int32_t>(chain).subspan(held));
    if (!next.ok()) {
      // The cache may hold a part of what was said: the next turn begins from the store.
      runtime_.finish(seq_).ignore("the append's error is the one to report");
      seq_ = -1;
      return next.status();
    }
    logits = std::move(next).value();
  } else {
    state::StartOptions start;
    HCACHE_ASSIGN_OR_RETURN(start.mode, policy::parse_mode(args_.restore_method));
    start.token_rounding = args_.token_rounding;
    start.save = !args_.no_store && !args_.no_save;
    ProgressLine line;
    start.progress = [&line](double fraction) { return line.update("reading", fraction); };
    HCACHE_ASSIGN_OR_RETURN(state::Started started, runtime_.start(chain, start));
    seq_ = started.seq;
    logits = std::move(started.logits);
    turn.report = std::move(started.report);
  }
  tokens_ = std::move(chain);
  reply_ended_ = false;
  sampler->remember(tokens_);

  model::TextDecoder decoder(*tokenizer_);
  const auto emit = [&](const std::string& text) {
    turn.reply += text;
    if (on_text && !text.empty()) on_text(text);
  };
  int64_t first_ns = 0;
  for (int64_t n = 0; n < max_tokens; n++) {
    HCACHE_ASSIGN_OR_RETURN(const int32_t token, sampler->sample(logits));
    if (n == 0) {
      first_ns = Env::real().monotonic_ns();
      turn.ttft_s = static_cast<double>(first_ns - started_ns) / kNsPerSecond;
    }
    HCACHE_RETURN_IF_ERROR(sampler->accept(token));
    tokens_.push_back(token);
    turn.reply_tokens.push_back(token);
    turn.decode_s = seconds_since(first_ns);
    if (tokenizer_->is_eog(token)) {
      turn.finish = "stop";
      reply_ended_ = true;
      break;
    }
    emit(decoder.push(token));
    if (interrupted()) {
      turn.finish = "interrupted";
      break;
    }
    if (n + 1 < max_tokens) {
      auto next = runtime_.append(seq_, std::span(&token, 1));
      // The context is full: the reply ends here, and what there is of it counts.
      if (next.code() == Code::kOutOfRange || next.code() == Code::kResourceExhausted) {
        log::warn("the reply ends early: {}", next.status().message());
        break;
      }
      HCACHE_RETURN_IF_ERROR(next.status());
      logits = std::move(next).value();
    }
  }
  emit(decoder.flush());
  return turn;
}

Status Conversation::save() {
  if (args_.no_store || args_.no_save) return {};
  HCACHE_RETURN_IF_ERROR(runtime_.flush());
  if (name_.empty() || tokens_.empty()) return {};
  store::Session session;
  session.name = name_;
  session.fingerprint = runtime_.fingerprint();
  session.salt = runtime_.salt();
  session.tokens = tokens_;
  session.metadata_json = "{}";
  return runtime_.store()->put_session(session);
}

Status Conversation::close() {
  const Status saved = save();
  if (seq_ >= 0) {
    const Status finished = runtime_.finish(seq_);
    seq_ = -1;
    if (saved.ok()) return finished;
  }
  return saved;
}

}  // namespace hcache::cli
