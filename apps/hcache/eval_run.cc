#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/env.h"
#include "eval.h"

namespace hcache::cli {
namespace {

constexpr std::string_view kComputed = "computed";

Result<EvalMethod> parse_method(const std::string& name) {
  EvalMethod method{.name = name, .restores = name != kComputed};
  if (method.restores) {
    HCACHE_ASSIGN_OR_RETURN(method.mode, policy::parse_mode(name));
  }
  return method;
}

}  // namespace

EvalArgs::EvalArgs() {
  withhold({&reps, &text_file, &paced, &runtime.saver});
  offer(runtime,
        {&runtime.weights, &runtime.device_memory, &runtime.token_rounding, &runtime.link});
  save_all();
}

void EvalArgs::offer_methods(std::string_view fallback) {
  methods =
      texts(&methods, "--methods", "METHOD,...", fallback,
            "computed|plan|hidden|kv|recompute|naive-hybrid|token-partition",
            "where the state before what is scored comes from: computed on the spot, or saved "
            "and restored by a new process");
}

Evaluation::Evaluation(EvalArgs& args, ProgressLine& line)
    : args_(args), line_(line), env_(Env::real()), base_env_(Env::real()), scratch_(args.runtime) {}

Evaluation::~Evaluation() = default;

Result<std::unique_ptr<Evaluation>> Evaluation::open(EvalArgs& args, int64_t longest,
                                                     ProgressLine& line) {
  // One prompt at a time.
  args.runtime.ctx = std::max<int64_t>(longest, 64);
  std::unique_ptr<Evaluation> evaluation(new Evaluation(args, line));
  for (const std::string& name : args.methods) {
    HCACHE_ASSIGN_OR_RETURN(EvalMethod method, parse_method(name));
    evaluation->methods_.push_back(std::move(method));
  }
  HCACHE_RETURN_IF_ERROR(evaluation->open_serving());
  if (!args.base_model.empty() || args.base_kv_type != "same") {
    RuntimeArgs base = args.runtime;
    if (!args.base_model.empty()) base.model.path = args.base_model;
    if (args.base_kv_type != "same") base.kv_type = args.base_kv_type;
    base.no_store = true;
    base.link = "none";
    HCACHE_ASSIGN_OR_RETURN(evaluation->base_,
                            cli::open_serving(base, evaluation->base_env_, line));
  }
  return evaluation;
}

Status Evaluation::open_serving() {
  HCACHE_ASSIGN_OR_RETURN(serving_, cli::open_serving(args_.runtime, env_, line_));
  return {};
}

Status Evaluation::check_base(const model::Tokenizer& tokenizer, const std::string& text) const {
  if (args_.base_model.empty()) return {};
  HCACHE_ASSIGN_OR_RETURN(const auto base_tokenizer, model::Tokenizer::load(base_path()));
  HCACHE_ASSIGN_OR_RETURN(const std::vector<int32_t> theirs, base_tokenizer->encode(text));
  HCACHE_ASSIGN_OR_RETURN(const std::vector<int32_t> ours, tokenizer.encode(text));
  const int64_t n_vocab = base().runtime().model().hparams().n_vocab;
  if (theirs == ours && n_vocab == model().hparams().n_vocab) return {};
  return invalid_argument(
      fmt::format("{} has another vocabulary than {}, so that their predictions can't be compared; "
                  "give --base-model a file made from the same model",
                  base_path(), model().path()));
}

Status Evaluation::tell(const std::string& what, double fraction) {
  return line_.update(what, fraction) ? Status() : cancelled("interrupted");
}

Result<scheduler::Outcome> Evaluation::run(serving::Serving& serving, scheduler::Request request) {
  request.max_new_tokens = 0;
  request.salt = own_salt(args_.runtime.salt);
  HCACHE_ASSIGN_OR_RETURN(scheduler::Outcome outcome,
                          serving.run(std::move(request), [] { return !interrupted(); }));
  HCACHE_RETURN_IF_ERROR(outcome.status);
  HCACHE_RETURN_IF_ERROR(release_idle(serving, outcome.seq));
  return outcome;
}

Status Evaluation::save(std::span<const EvalPrompt> prompts) {
  if (std::none_of(methods_.begin(), methods_.end(),
                   [](const EvalMethod& method) { return method.restores; })) {
    return {};
  }
  for (size_t i = 0; i < prompts.size(); ++i) {
    HCACHE_RETURN_IF_ERROR(tell(fmt::format("saving {} of {}", i + 1, prompts.size()),
                                static_cast<double>(i) / static_cast<double>(prompts.size())));
    const auto end = prompts[i].tokens.begin() + prompts[i].from;
    scheduler::Request request;
    request.tokens.assign(prompts[i].tokens.begin(), end);
    request.cache = scheduler::CacheUse::kNone;
    HCACHE_RETURN_IF_ERROR(run(*serving_, std::move(request)).status());
    HCACHE_RETURN_IF_ERROR(serving_->flush());
  }
  HCACHE_RETURN_IF_ERROR(serving_->close());
  serving_.reset();
  return open_serving();
}

Result<scheduler::Outcome> Evaluation::score_on(serving::Serving& serving, const EvalPrompt& prompt,
                                                const EvalMethod& method,
                                                const OnLogits& on_logits) {
  scheduler::Request request;
  request.tokens = prompt.tokens;
  request.cache = method.restores ? scheduler::CacheUse::kSaved : scheduler::CacheUse::kNone;
  request.restore = {.mode = method.mode, .token_rounding = args_.runtime.token_rounding};
  request.save = false;
  request.on_prompt_logits = on_logits;
  request.logits_from = prompt.from;
  request.truncation = prompt.truncation;
  return run(serving, std::move(request));
}

Status Evaluation::score(const EvalPrompt& prompt, const EvalMethod& method,
                         const OnLogits& on_logits, EvalSource* source) {
  HCACHE_ASSIGN_OR_RETURN(const scheduler::Outcome outcome,
                          score_on(*serving_, prompt, method, on_logits));
  const int64_t restored = outcome.hidden_tokens + outcome.kv_tokens + outcome.recomputed_tokens;
  source->computed += prompt.from - std::min(prompt.from, restored);
  source->hidden += outcome.hidden_tokens;
  source->kv += outcome.kv_tokens;
  source->recomputed += outcome.recomputed_tokens;
  source->bytes_read += outcome.bytes.total();
  return {};
}

Status Evaluation::score_base(const EvalPrompt& prompt, const OnLogits& on_logits) {
  return score_on(base(), prompt, {}, on_logits).status();
}

Status Evaluation::close() {
  line_.finish();
  if (base_) HCACHE_RETURN_IF_ERROR(base_->close());
  return serving_->close();
}

std::vector<std::vector<int32_t>> pieces_of(const model::Tokenizer& tokenizer,
                                            std::span<const int32_t> tokens, int64_t size,
                                            int64_t most) {
  std::vector<std::vector<int32_t>> pieces;
  const int64_t n = std::min(static_cast<int64_t>(tokens.size()) / size, most);
  for (int64_t i = 0; i < n; ++i) {
    std::vector<int32_t>& piece =
        pieces.emplace_back(tokens.begin() + i * size, tokens.begin() + (i + 1) * size);
    if (tokenizer.adds_bos()) piece[0] = tokenizer.bos();
  }
  return pieces;
}

Result<std::unique_ptr<model::Tokenizer>> load_tokenizer(const EvalArgs& args) {
  HCACHE_ASSIGN_OR_RETURN(const std::string path, resolve_model(args.runtime.model.path));
  return model::Tokenizer::load(path);
}

Json to_json(const eval::Estimate& estimate) {
  return {{"value", estimate.value}, {"low", estimate.low}, {"high", estimate.high}};
}

Json to_json(const EvalSource& source) {
  return {{"computed", source.computed},
          {"hidden", source.hidden},
          {"kv", source.kv},
          {"recomputed", source.recomputed},
          {"bytes_read", source.bytes_read}};
}

std::string with_interval(const Json& estimate, std::string_view format, double factor) {
  const auto figure = [&](const char* name) {
    return fmt::format(fmt::runtime(format), factor * estimate[name].get<double>());
  };
  return fmt::format("{} ({} to {})", figure("value"), figure("low"), figure("high"));
}

Json eval_json(const Evaluation& evaluation) {
  return {{"machine", machine_json(evaluation.model())},
          {"model", evaluation.model().path()},
          {"type", evaluation.model().type_name()},
          {"base", evaluation.base_path()}};
}

}  // namespace hcache::cli
