// hcache eval truncation: text predicted behind tokens that were dropped from the KV cache
// (AttentionStore §3.4), against what truncating tokens would hold, as many, computed anew.

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "commands.h"
#include "eval.h"
#include "model/logits.h"
#include "policy/truncation.h"

namespace hcache::cli {
namespace {

// So many in a row, behind each of which text is predicted.
struct Overflows {
  int64_t first = 0;
  int64_t last = 0;
  [[nodiscard]] bool has(int64_t n) const { return first <= n && n <= last; }
};

// "4", "1-16".
Result<std::vector<Overflows>> parse_overflows(const std::vector<std::string>& texts) {
  std::vector<Overflows> all;
  for (const std::string& text : texts) {
    const char* end = text.data() + text.size();
    Overflows one;
    auto parsed = std::from_chars(text.data(), end, one.first);
    one.last = one.first;
    if (parsed.ec == std::errc() && parsed.ptr != end && *parsed.ptr == '-') {
      parsed = std::from_chars(parsed.ptr + 1, end, one.last);
    }
    if (parsed.ec != std::errc() || parsed.ptr != end || one.first < 1 || one.last < one.first ||
        one.last > 1000) {
      return invalid_argument(fmt::format(
          "--overflows: '{}' is no number between 1 and 1000, nor two like 1-16", text));
    }
    all.push_back(one);
  }
  return all;
}

// What is predicted between a cut and the next one.
struct Stretch {
  int64_t overflows = 0;  // cuts so far
  policy::HeldRows held;  // as many as with rows that were chosen: the last ones
  int64_t end = 0;  // of the tokens that are seen; the one behind the last of them is predicted
};

// Those of a text in its order, as long as more(i, at) says of the i-th cut, at token `at`, that it
// is wanted.
template <typename More>
std::vector<Stretch> stretches_of(policy::TruncationLimits limits, const More& more) {
  limits.important = 0;
  std::vector<Stretch> stretches;
  policy::HeldRows held;
  for (int64_t i = 1, end = policy::next_cut(held, limits); more(i, end); ++i) {
    // Without messages only the length counts.
    const std::vector<int32_t> chain(static_cast<size_t>(end));
    held = policy::cut(held, chain, limits, {});
    end = policy::next_cut(held, limits);
    stretches.push_back({i, held, end});
  }
  return stretches;
}

// Those behind which something is predicted.
std::vector<Stretch> wanted_stretches(const policy::TruncationLimits& limits,
                                      std::span<const Overflows> wanted) {
  int64_t most = 0;
  for (const Overflows& each : wanted) most = std::max(most, each.last);
  auto stretches = stretches_of(limits, [most](int64_t i, int64_t) { return i <= most; });
  std::erase_if(stretches, [&](const Stretch& stretch) {
    return std::none_of(wanted.begin(), wanted.end(),
                        [&](const Overflows& each) { return each.has(stretch.overflows); });
  });
  return stretches;
}

// What is computed anew for the tokens of these: what is held where `share` of what may leave does
// so at once.
std::vector<Stretch> anew_stretches(policy::TruncationLimits limits, double share,
                                    const std::vector<Stretch>& wanted) {
  limits.share = share;
  const int64_t last = wanted.back().end;
  auto stretches = stretches_of(limits, [last](int64_t, int64_t end) { return end < last; });
  for (Stretch& stretch : stretches) stretch.end = std::min(stretch.end, last);
  std::erase_if(stretches, [&](const Stretch& stretch) {
    return std::none_of(wanted.begin(), wanted.end(), [&](const Stretch& each) {
      return stretch.held.cut_at < each.end && each.held.cut_at < stretch.end;
    });
  });
  return stretches;
}

// Of these overflows; a group per piece of the text.
struct TruncationRow {
  Overflows overflows;
  std::vector<eval::Group> cut;  // -log p of the text's tokens
  std::vector<eval::Group> anew;
  std::vector<eval::Group> more;  // of cut over anew
  // Empty where they are not wanted.
  std::vector<eval::Group> last;   // with the last rows alone, whatever attention fell on
  std::vector<eval::Group> naive;  // with K left as it was rotated
  std::vector<eval::Group> whole;  // with nothing dropped
};

class TruncationEval {
 public:
  TruncationEval(const policy::TruncationLimits& limits, double anew_share,
                 std::span<const Overflows> wanted)
      : limits_(limits),
        stretches_(wanted_stretches(limits, wanted)),
        anew_(anew_stretches(limits, anew_share, stretches_)) {
    for (const Overflows& each : wanted) rows_.emplace_back().overflows = each;
  }

  // Tokens of a piece; the last one is only predicted.
  [[nodiscard]] int64_t piece_tokens() const { return stretches_.back().end + 1; }
  [[nodiscard]] std::span<const TruncationRow> rows() const { return rows_; }

  // naive: null where it is not wanted.
  Status score(Evaluation& evaluation, Evaluation* naive, const std::vector<int32_t>& tokens,
               bool with_last, bool with_whole) {
    std::vector<double> nll(tokens.size());
    HCACHE_RETURN_IF_ERROR(predict(evaluation, tokens, limits_, &nll));
    add(nll, &TruncationRow::cut);
    std::vector<double> anew(tokens.size());
    for (const Stretch& stretch : anew_) {
      HCACHE_RETURN_IF_ERROR(predict_anew(evaluation, tokens, stretch, &anew));
    }
    add(anew, &TruncationRow::anew);
    for (size_t i = 0; i < nll.size(); ++i) nll[i] -= anew[i];
    add(nll, &TruncationRow::more);
    policy::TruncationLimits last = limits_;
    last.important = 0;
    if (with_last) {
      if (last != limits_) HCACHE_RETURN_IF_ERROR(predict(evaluation, tokens, last, &nll));
      add(nll, &TruncationRow::last);
    }
    if (naive != nullptr) {
      HCACHE_RETURN_IF_ERROR(predict(*naive, tokens, last, &nll));
      add(nll, &TruncationRow::naive);
    }
    if (with_whole) {
      HCACHE_RETURN_IF_ERROR(predict(evaluation, tokens, {}, &nll));
      add(nll, &TruncationRow::whole);
    }
    return {};
  }

 private:
  // -log p of what follows each token from the first cut on.
  Status predict(Evaluation& evaluation, const std::vector<int32_t>& tokens,
                 const std::optional<policy::TruncationLimits>& limits,
                 std::vector<double>* nll) const {
    EvalPrompt prompt{.tokens = {tokens.begin(), tokens.end() - 1},
                      .from = stretches_.front().held.cut_at,
                      .truncation = limits};
    return evaluation.score_base(prompt, [&](int64_t position, std::span<const float> logits) {
      const auto at = static_cast<size_t>(position);
      (*nll)[at] = -model::log_prob(logits, tokens[at + 1]);
    });
  }

  // Of a piece's tokens, those that are predicted in each row.
  void add(const std::vector<double>& nll, std::vector<eval::Group> TruncationRow::*groups) {
    for (TruncationRow& row : rows_) {
      eval::Group& group = (row.*groups).emplace_back();
      for (const Stretch& stretch : stretches_) {
        if (!row.overflows.has(stretch.overflows)) continue;
        for (int64_t at = stretch.held.cut_at; at < stretch.end; ++at) {
          group.add(nll[static_cast<size_t>(at)]);
        }
      }
    }
  }

  // The same in a stretch, behind the first tokens and the last ones that it holds, computed anew.
  static Status predict_anew(Evaluation& evaluation, const std::vector<int32_t>& tokens,
                             const Stretch& stretch, std::vector<double>* nll) {
    const policy::HeldRows& held = stretch.held;
    EvalPrompt prompt{.tokens = {tokens.begin(), tokens.begin() + held.kept},
                      .from = held.rows(held.cut_at),
                      .truncation = {}};
    prompt.tokens.insert(prompt.tokens.end(), tokens.begin() + held.resumed,
                         tokens.begin() + stretch.end);
    return evaluation.score_base(prompt, [&](int64_t position, std::span<const float> logits) {
      const auto at = static_cast<size_t>(position + held.dropped());
      (*nll)[at] = -model::log_prob(logits, tokens[at + 1]);
    });
  }

  const policy::TruncationLimits limits_;
  const std::vector<Stretch> stretches_;
  const std::vector<Stretch> anew_;
  std::vector<TruncationRow> rows_;
};

Json truncation_json(const TruncationRow& row) {
  const eval::Estimate anew = eval::exponential(eval::bootstrap_mean(row.anew));
  const eval::Estimate ratio = eval::exponential(eval::bootstrap_mean(row.more));
  const auto over_anew = [&](double quotient) { return anew.value * (quotient - 1); };
  double n = 0;
  for (const eval::Group& group : row.cut) n += group.n;
  Json json = {{"first_overflow", row.overflows.first},
               {"overflows", row.overflows.last},
               {"scored", n},
               {"perplexity_anew", to_json(anew)},
               // Paired: the interval is of the quotient, at the perplexity computed anew.
               {"difference", to_json(eval::Estimate{.value = over_anew(ratio.value),
                                                     .low = over_anew(ratio.low),
                                                     .high = over_anew(ratio.high)})}};
  for (const auto& [key, groups] : {std::pair("perplexity", &row.cut),
                                    {"perplexity_last_rows", &row.last},
                                    {"perplexity_not_rotated", &row.naive},
                                    {"perplexity_whole", &row.whole}}) {
    if (!groups->empty()) json[key] = to_json(eval::exponential(eval::bootstrap_mean(*groups)));
  }
  return json;
}

std::vector<std::string> truncation_cells(const Json& row) {
  const auto perplexity = [&](const char* key, int digits) -> std::string {
    if (!row.contains(key)) return "–";
    return fmt::format("{:.{}f}", row[key]["value"].get<double>(), digits);
  };
  const auto first = row["first_overflow"].get<int64_t>();
  const auto last = row["overflows"].get<int64_t>();
  return {first == last ? fmt::format("{}", last) : fmt::format("{}-{}", first, last),
          fmt::format("{:.0f}", row["scored"].get<double>()),
          perplexity("perplexity", 4),
          perplexity("perplexity_anew", 4),
          with_interval(row["difference"], "{:+.4f}"),
          perplexity("perplexity_last_rows", 4),
          perplexity("perplexity_not_rotated", 1),
          perplexity("perplexity_whole", 4)};
}

}  // namespace

TruncationArgs::TruncationArgs() { withhold({&base_model, &base_kv_type}); }

Status eval_truncation(TruncationArgs args) {
  if (args.runtime.model.device == "list") return list_devices();
  const policy::TruncationLimits limits = args.cuts.limits(args.context);
  HCACHE_RETURN_IF_ERROR(policy::validate(limits));
  HCACHE_ASSIGN_OR_RETURN(const std::vector<Overflows> overflows, parse_overflows(args.overflows));
  const double anew_share = args.anew_share > 0 ? args.anew_share : limits.share;
  TruncationEval scoring(limits, anew_share, overflows);
  const int64_t piece = scoring.piece_tokens();
  HCACHE_ASSIGN_OR_RETURN(const std::string text, read_whole_file(Env::real(), args.file));
  HCACHE_ASSIGN_OR_RETURN(const auto tokenizer, load_tokenizer(args));
  HCACHE_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens,
                          tokenizer->encode(text, {.add_special = true}));
  const auto pieces = pieces_of(*tokenizer, tokens, piece, args.pieces);
  const size_t n = pieces.size();
  if (n == 0) {
    return invalid_argument(
        fmt::format("{} has {} tokens, and so many overflows of this context take {}", args.file,
                    tokens.size(), piece));
  }
  ProgressLine line;
  const auto wanted = [&](std::string_view name) {
    return std::find(args.compare.begin(), args.compare.end(), name) != args.compare.end();
  };
  HCACHE_ASSIGN_OR_RETURN(const auto evaluation, Evaluation::open(args, piece, line));
  TruncationArgs naive_args = args;
  naive_args.runtime.rotate_moved = false;
  std::unique_ptr<Evaluation> naive;
  if (wanted("unrotated")) {
    HCACHE_ASSIGN_OR_RETURN(naive, Evaluation::open(naive_args, piece, line));
  }
  const bool with_whole = wanted("whole") && piece <= evaluation->model().hparams().n_ctx_train;
  for (size_t i = 0; i < n; ++i) {
    HCACHE_RETURN_IF_ERROR(evaluation->tell(fmt::format("piece {} of {}", i + 1, n),
                                            static_cast<double>(i) / static_cast<double>(n)));
    HCACHE_RETURN_IF_ERROR(
        scoring.score(*evaluation, naive.get(), pieces[i], wanted("last"), with_whole));
  }
  Json results = eval_json(*evaluation);
  results["text"] = {{"file", args.file}, {"tokens", tokens.size()}, {"pieces", n}};
  results["context"] = limits.context;
  results["share"] = limits.share;
  results["anew_share"] = anew_share;
  results["keep_first"] = limits.keep_first;
  results["important"] = limits.important;
  std::vector<std::vector<std::string>> table = {
      {"overflows", "tokens", "perplexity", "computed anew", "difference (95 %)", "last rows alone",
       "not rotated", "nothing dropped"}};
  for (const TruncationRow& row : scoring.rows()) {
    results["rows"].push_back(truncation_json(row));
    table.push_back(truncation_cells(results["rows"].back()));
  }
  if (naive) HCACHE_RETURN_IF_ERROR(naive->close());
  HCACHE_RETURN_IF_ERROR(evaluation->close());
  return report(args, results, table);
}

}  // namespace hcache::cli
