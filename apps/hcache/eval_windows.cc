// hcache eval ppl|kl: a text in windows, of which the second part is scored.
//
// The windows and what is counted of them are llama-perplexity's, so that figures can be compared.

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "commands.h"
#include "eval.h"
#include "model/logits.h"

namespace hcache::cli {
namespace {

struct Windows {
  std::vector<std::vector<int32_t>> tokens;  // of each, `window` of them
  std::vector<EvalPrompt> prompts;           // without the last token, which is only predicted
  int64_t text_tokens = 0;
  int64_t from = 0;
};

Result<std::string> read_text(const std::string& file) {
  HCACHE_ASSIGN_OR_RETURN(std::string text, read_whole_file(Env::real(), file));
  if (text.empty()) return invalid_argument(fmt::format("{} is empty", file));
  return text;
}

Result<Windows> cut(const WindowArgs& args, const model::Tokenizer& tokenizer,
                    const std::string& text) {
  Windows windows;
  windows.from = args.from == 0 ? args.window / 2 : args.from;
  if (windows.from > args.window - 2) {
    return invalid_argument(fmt::format(
        "--from {} leaves nothing to score of a window of {} tokens", args.from, args.window));
  }
  HCACHE_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens,
                          tokenizer.encode(text, {.add_special = true}));
  windows.text_tokens = static_cast<int64_t>(tokens.size());
  const int64_t most = args.windows > 0 ? args.windows : windows.text_tokens;
  windows.tokens = pieces_of(tokenizer, tokens, args.window, most);
  if (windows.tokens.empty()) {
    return invalid_argument(fmt::format("{} has {} tokens, less than a window (--window {})",
                                        args.file, tokens.size(), args.window));
  }
  for (const std::vector<int32_t>& window : windows.tokens) {
    windows.prompts.push_back({.tokens = {window.begin(), window.end() - 1}, .from = windows.from});
  }
  return windows;
}

Json text_json(const WindowArgs& args, const Windows& windows) {
  return {{"file", args.file},
          {"tokens", windows.text_tokens},
          {"window", args.window},
          {"from", windows.from},
          {"windows", windows.prompts.size()}};
}

// One method's predictions of all windows.
struct Row {
  EvalMethod method;
  EvalSource source;
  std::vector<eval::Group> nll;  // -log p of the text's tokens
  // Against the base's, where there is one.
  std::vector<eval::Group> more_nll;
  std::vector<eval::Group> kl;
  std::vector<eval::Group> same_top;
  std::vector<double> all_kl;
};

std::vector<Row> make_rows(const Evaluation& evaluation, size_t n) {
  std::vector<Row> rows;
  for (const EvalMethod& method : evaluation.methods()) {
    Row row;
    row.method = method;
    for (std::vector<eval::Group>* groups : {&row.nll, &row.more_nll, &row.kl, &row.same_top}) {
      groups->resize(n);
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

// The windows, what scores them, and a row for each method.
struct Scored {
  Windows windows;
  std::unique_ptr<Evaluation> evaluation;
  std::vector<Row> rows;
};

Result<Scored> open_windows(WindowArgs& args, ProgressLine& line) {
  Scored scored;
  HCACHE_ASSIGN_OR_RETURN(const std::string text, read_text(args.file));
  HCACHE_ASSIGN_OR_RETURN(const auto tokenizer, load_tokenizer(args));
  HCACHE_ASSIGN_OR_RETURN(scored.windows, cut(args, *tokenizer, text));
  HCACHE_ASSIGN_OR_RETURN(scored.evaluation, Evaluation::open(args, args.window, line));
  HCACHE_RETURN_IF_ERROR(scored.evaluation->check_base(*tokenizer, text));
  HCACHE_RETURN_IF_ERROR(scored.evaluation->save(scored.windows.prompts));
  scored.rows = make_rows(*scored.evaluation, scored.windows.prompts.size());
  return scored;
}

Status for_each_window(Evaluation& evaluation, const Windows& windows,
                       const std::function<Status(size_t)>& score) {
  const size_t n = windows.prompts.size();
  for (size_t i = 0; i < n; ++i) {
    HCACHE_RETURN_IF_ERROR(evaluation.tell(fmt::format("window {} of {}", i + 1, n),
                                           static_cast<double>(i) / static_cast<double>(n)));
    HCACHE_RETURN_IF_ERROR(score(i));
  }
  return {};
}

Json results_json(const WindowArgs& args, const Scored& scored) {
  Json results = eval_json(*scored.evaluation);
  results["text"] = text_json(args, scored.windows);
  return results;
}

}  // namespace

PplArgs::PplArgs() {
  offer_methods("computed");
  withhold({&base_model, &base_kv_type});
}

KlArgs::KlArgs() { offer_methods("plan"); }

Status eval_ppl(PplArgs args) {
  if (args.runtime.model.device == "list") return list_devices();
  ProgressLine line;
  HCACHE_ASSIGN_OR_RETURN(Scored scored, open_windows(args, line));
  Evaluation& evaluation = *scored.evaluation;
  const Windows& windows = scored.windows;
  const auto score_window = [&](size_t i) -> Status {
    for (Row& row : scored.rows) {
      const auto on_logits = [&](int64_t position, std::span<const float> logits) {
        const int32_t next = windows.tokens[i][static_cast<size_t>(position) + 1];
        row.nll[i].add(-model::log_prob(logits, next));
      };
      HCACHE_RETURN_IF_ERROR(
          evaluation.score(windows.prompts[i], row.method, on_logits, &row.source));
    }
    return {};
  };
  HCACHE_RETURN_IF_ERROR(for_each_window(evaluation, windows, score_window));
  Json results = results_json(args, scored);
  std::vector<std::vector<std::string>> table = {
      {"method", "windows", "tokens", "perplexity (95 %)", "restored"}};
  for (const Row& row : scored.rows) {
    const Json ppl = to_json(eval::exponential(eval::bootstrap_mean(row.nll)));
    double n_scored = 0;
    for (const eval::Group& group : row.nll) n_scored += group.n;
    results["rows"].push_back({{"method", row.method.name},
                               {"perplexity", ppl},
                               {"scored", n_scored},
                               {"source", to_json(row.source)}});
    table.push_back({row.method.name, fmt::format("{}", windows.prompts.size()),
                     fmt::format("{:.0f}", n_scored), with_interval(ppl, "{:.4f}"),
                     fmt::format("{}", row.source.restored())});
  }
  HCACHE_RETURN_IF_ERROR(evaluation.close());
  return report(args, results, table);
}

namespace {

// What the base says of one window: a row of logits per scored token.
struct BaseWindow {
  std::vector<std::vector<float>> logits;
  std::vector<double> log_p;  // of the text's tokens
  eval::Group nll;
};

Result<BaseWindow> score_base(Evaluation& evaluation, const EvalPrompt& prompt,
                              const std::vector<int32_t>& tokens) {
  BaseWindow base;
  HCACHE_RETURN_IF_ERROR(
      evaluation.score_base(prompt, [&](int64_t position, std::span<const float> logits) {
        base.logits.emplace_back(logits.begin(), logits.end());
        base.log_p.push_back(model::log_prob(logits, tokens[static_cast<size_t>(position) + 1]));
        base.nll.add(-base.log_p.back());
      }));
  return base;
}

Status compare_window(Evaluation& evaluation, const EvalPrompt& prompt,
                      const std::vector<int32_t>& tokens, const BaseWindow& base, size_t i,
                      Row& row) {
  const auto on_logits = [&](int64_t position, std::span<const float> logits) {
    const auto at = static_cast<size_t>(position - prompt.from);
    const double log_p = model::log_prob(logits, tokens[static_cast<size_t>(position) + 1]);
    const double kl = model::kl_divergence(base.logits[at], logits);
    row.nll[i].add(-log_p);
    row.more_nll[i].add(base.log_p[at] - log_p);
    row.kl[i].add(kl);
    row.all_kl.push_back(kl);
    const bool same = model::argmax(base.logits[at]) == model::argmax(logits);
    row.same_top[i].add(same ? 1 : 0);
  };
  return evaluation.score(prompt, row.method, on_logits, &row.source);
}

Json kl_json(const Row& row) {
  const auto quantile = [&](double q) { return eval::quantile(row.all_kl, q); };
  return {{"method", row.method.name},
          {"perplexity", to_json(eval::exponential(eval::bootstrap_mean(row.nll)))},
          // Over the base's.
          {"perplexity_ratio", to_json(eval::exponential(eval::bootstrap_mean(row.more_nll)))},
          {"mean_kl", to_json(eval::bootstrap_mean(row.kl))},
          {"kl_quantiles",
           {{"p50", quantile(0.5)},
            {"p90", quantile(0.9)},
            {"p99", quantile(0.99)},
            {"max", quantile(1)}}},
          {"same_top", to_json(eval::bootstrap_mean(row.same_top))},
          {"scored", row.all_kl.size()},
          {"source", to_json(row.source)}};
}

std::vector<std::string> kl_cells(const Json& row, const EvalSource& source) {
  return {row["method"].get<std::string>(),
          fmt::format("{}", row["scored"].get<size_t>()),
          with_interval(row["mean_kl"], "{:.1e}"),
          fmt::format("{:.1e}", row["kl_quantiles"]["p99"].get<double>()),
          fmt::format("{:.1e}", row["kl_quantiles"]["max"].get<double>()),
          fmt::format("{:.2f} %", 100 * row["same_top"]["value"].get<double>()),
          with_interval(row["perplexity_ratio"], "{:.5f}"),
          fmt::format("{}", source.restored())};
}

}  // namespace

Status eval_kl(KlArgs args) {
  if (args.runtime.model.device == "list") return list_devices();
  ProgressLine line;
  HCACHE_ASSIGN_OR_RETURN(Scored scored, open_windows(args, line));
  Evaluation& evaluation = *scored.evaluation;
  const Windows& windows = scored.windows;
  std::vector<eval::Group> base_nll;
  const auto score_window = [&](size_t i) -> Status {
    const EvalPrompt& prompt = windows.prompts[i];
    HCACHE_ASSIGN_OR_RETURN(const BaseWindow base,
                            score_base(evaluation, prompt, windows.tokens[i]));
    base_nll.push_back(base.nll);
    for (Row& row : scored.rows) {
      HCACHE_RETURN_IF_ERROR(compare_window(evaluation, prompt, windows.tokens[i], base, i, row));
    }
    return {};
  };
  HCACHE_RETURN_IF_ERROR(for_each_window(evaluation, windows, score_window));
  Json results = results_json(args, scored);
  results["base_perplexity"] = to_json(eval::exponential(eval::bootstrap_mean(base_nll)));
  std::vector<std::vector<std::string>> table = {{"method", "tokens", "mean KL (95 %)", "p99",
                                                  "max", "same first choice",
                                                  "perplexity / base's (95 %)", "restored"}};
  for (const Row& row : scored.rows) {
    results["rows"].push_back(kl_json(row));
    table.push_back(kl_cells(results["rows"].back(), row.source));
  }
  HCACHE_RETURN_IF_ERROR(evaluation.close());
  return report(args, results, table);
}

}  // namespace hcache::cli
