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
  offer(runtime,
        {&runtime.model.path, &runtime.model.device, &runtime.model.gpu_layers,
         &runtime.model.tensor_split, &runtime.model.override_tensors, &runtime.model.split_mode,
         &runtime.model.main_gpu, &runtime.model.threads, &runtime.batch, &runtime.weights,
         &runtime.device_memory, &runtime.kv_type, &runtime.attention, &runtime.state.state_dir,
         &runtime.state.stores, &runtime.state_type, &runtime.token_rounding, &runtime.link});
  runtime.save = choice(&runtime.save, "--save", "all", "plan|hidden|kv|all",
                        "what is saved: with all, every method finds what it wants to read");
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
  HCACHE_ASSIGN_OR_RETURN(evaluation->tokenizer_,
                          model::Tokenizer::load(evaluation->model().path()));
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

const std::string& Evaluation::base_path() const {
  return (base_ ? *base_ : *serving_).runtime().model().path();
}

Status Evaluation::check_base(const std::string& text) const {
  if (!base_ || args_.base_model.empty()) return {};
  HCACHE_ASSIGN_OR_RETURN(const auto tokenizer, model::Tokenizer::load(base_path()));
  HCACHE_ASSIGN_OR_RETURN(const std::vector<int32_t> theirs, tokenizer->encode(text));
  HCACHE_ASSIGN_OR_RETURN(const std::vector<int32_t> ours, tokenizer_->encode(text));
  const int64_t n_vocab = base_->runtime().model().hparams().n_vocab;
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

Status Evaluation::score(const EvalPrompt& prompt, const EvalMethod& method,
                         const OnLogits& on_logits, EvalSource* source) {
  scheduler::Request request;
  request.tokens = prompt.tokens;
  request.cache = method.restores ? scheduler::CacheUse::kSaved : scheduler::CacheUse::kNone;
  request.restore = {.mode = method.mode, .token_rounding = args_.runtime.token_rounding};
  request.save = false;
  request.on_prompt_logits = on_logits;
  request.logits_from = prompt.from;
  HCACHE_ASSIGN_OR_RETURN(const scheduler::Outcome outcome, run(*serving_, std::move(request)));
  if (source == nullptr) return {};
  source->hidden += outcome.hidden_tokens;
  source->kv += outcome.kv_tokens;
  source->recomputed += outcome.recomputed_tokens;
  source->computed +=
      prompt.from -
      std::min(prompt.from, outcome.hidden_tokens + outcome.kv_tokens + outcome.recomputed_tokens);
  source->bytes_read += outcome.bytes.total();
  return {};
}

Status Evaluation::score_base(const EvalPrompt& prompt, const OnLogits& on_logits) {
  scheduler::Request request;
  request.tokens = prompt.tokens;
  request.cache = scheduler::CacheUse::kNone;
  request.save = false;
  request.on_prompt_logits = on_logits;
  request.logits_from = prompt.from;
  return run(base_ ? *base_ : *serving_, std::move(request)).status();
}

Status Evaluation::close() {
  line_.finish();
  if (base_) HCACHE_RETURN_IF_ERROR(base_->close());
  return serving_->close();
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

std::string with_interval(const eval::Estimate& estimate, int digits) {
  return fmt::format("{:.{}f} ({:.{}f} to {:.{}f})", estimate.value, digits, estimate.low, digits,
                     estimate.high, digits);
}

Json eval_json(const Evaluation& evaluation) {
  return {{"machine", machine_json(evaluation.model())},
          {"model", evaluation.model().path()},
          {"type", evaluation.model().type_name()},
          {"base", evaluation.base_path()}};
}

Status report_eval(const EvalArgs& args, const Json& results,
                   const std::vector<std::vector<std::string>>& table) {
  if (args.json_file != "-") fmt::print("{}", format_columns(table));
  return args.json_file.empty() ? Status() : write_json(results, args.json_file);
}

}  // namespace hcache::cli
