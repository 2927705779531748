// hcache eval compression: text predicted, and questions answered, behind a KV cache of which the
// layers keep some rows only, against one that keeps all.

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <iterator>
#include <map>
#include <utility>

#include "base/tokens.h"
#include "commands.h"
#include "engine/engine.h"
#include "eval.h"
#include "eval/questions.h"
#include "model/logits.h"
#include "policy/compression.h"
#include "state/kept_state.h"
#include "state/sample_text.h"
#include "state/second_reading.h"
#include "state/sparsity.h"

namespace hcache::cli {
namespace {

using policy::Compression;
using policy::RowScores;
using policy::ScoreSource;
using Tokens = std::vector<int32_t>;

// What is predicted behind one context, all of it or some of its rows.
using Scores = std::function<Status(size_t index, std::span<const float> logits)>;

// A policy at a budget, and what came of it; a group per piece of the text, or per question.
struct CompressionRow {
  Compression policy = Compression::kNone;
  double budget = 1;
  eval::Group kept;  // shares of the rows
  std::vector<eval::Group> nll{};
  std::vector<eval::Group> more_nll{};  // than with all rows
  std::vector<eval::Group> kl{};
  std::vector<eval::Group> same_top{};
  std::vector<eval::Group> right{};  // answers
};

Result<std::vector<double>> parse_budgets(const std::vector<std::string>& texts) {
  std::vector<double> budgets;
  for (const std::string& text : texts) {
    double budget = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), budget);
    if (error != std::errc() || end != text.data() + text.size() || !(budget > 0 && budget <= 1)) {
      return invalid_argument(fmt::format("--budgets: '{}' is no number in (0, 1]", text));
    }
    budgets.push_back(budget);
  }
  return budgets;
}

// One context at a time on an engine whose layers keep rows of their own.
class Compressed {
 public:
  // density: of the layers, see layer_budgets().
  Compressed(engine::Engine& engine, policy::LayerBudgets budgets, std::vector<double> density,
             uint64_t seed)
      : engine_(engine), budgets_(budgets), density_(std::move(density)), seed_(seed) {}

  // Computes it, and what its policies score rows by.
  Status read(std::span<const int32_t> context, std::span<const Compression> policies) {
    n_ = static_cast<int64_t>(context.size());
    scores_.clear();
    HCACHE_ASSIGN_OR_RETURN(context_, engine_.create_sequence());
    const double begin_s = now_s();
    HCACHE_RETURN_IF_ERROR(engine_.prefill(context_, context));
    plain_s_.push_back(now_s() - begin_s);
    for (const Compression policy : policies) {
      const ScoreSource source = policy::compression_info(policy).source;
      if (!scores_.contains(source)) HCACHE_RETURN_IF_ERROR(score(context, source));
    }
    return {};
  }
  Status forget() { return engine_.release_sequence(context_); }

  // Seconds of prefilling each context, without and with scores of every row; null where no policy
  // wants those.
  [[nodiscard]] Json scoring_json() const {
    if (scored_s_.size() != plain_s_.size()) return {};
    std::vector<double> ratios;
    for (size_t i = 0; i < plain_s_.size(); ++i) ratios.push_back(scored_s_[i] / plain_s_[i]);
    return {{"plain_s", spread(plain_s_, 1)},
            {"scored_s", spread(scored_s_, 1)},
            {"ratio", spread(ratios, 1)}};
  }

  // The logits of `tokens` behind the context, of which the policy keeps rows. Returns their share.
  Result<double> predict(Compression policy, double budget, std::span<const int32_t> tokens,
                         const Scores& on_logits) {
    HCACHE_ASSIGN_OR_RETURN(const engine::SeqId seq, engine_.fork_sequence(context_, n_));
    double kept_share = 1;
    if (policy != Compression::kNone) {
      HCACHE_ASSIGN_OR_RETURN(kept_share, compress(seq, policy, budget));
    }
    const engine::BatchItem item{
        .seq = seq, .tokens = tokens, .output = engine::BatchItem::Output::kAll};
    HCACHE_ASSIGN_OR_RETURN(const engine::Logits logits, engine_.decode({&item, 1}));
    for (size_t i = 0; i < logits.rows.size(); ++i) {
      HCACHE_RETURN_IF_ERROR(on_logits(i, logits.rows[i]));
    }
    HCACHE_RETURN_IF_ERROR(engine_.release_sequence(seq));
    return kept_share;
  }

 private:
  Status score(std::span<const int32_t> context, ScoreSource source) {
    RowScores& scores = scores_[source];
    const model::HParams& hp = engine_.model().hparams();
    scores = {.n_layer = hp.n_layer, .n_head_kv = hp.n_head_kv, .n_rows = n_};
    if (source == ScoreSource::kNobody) return {};
    if (source == ScoreSource::kRepeated) {
      HCACHE_ASSIGN_OR_RETURN(scores, state::SecondReading::all_of(engine_, context_, context));
      return {};
    }
    if (source == ScoreSource::kLastRows) {
      HCACHE_ASSIGN_OR_RETURN(scores, state::score_by_last_rows(engine_, context_, context));
      return {};
    }
    HCACHE_ASSIGN_OR_RETURN(const engine::SeqId seq, engine_.create_sequence());
    engine::AttentionScores told;
    HCACHE_RETURN_IF_ERROR(
        engine_.observe({.seq = seq, .stride = policy::kScoredStride, .n_keys = n_}, &told));
    const double begin_s = now_s();
    const Status ran = engine_.prefill(seq, context);
    scored_s_.push_back(now_s() - begin_s);
    HCACHE_RETURN_IF_ERROR(engine_.observe({}, nullptr));
    HCACHE_RETURN_IF_ERROR(ran);
    for (const engine::AttentionTally& tally : told.tallies) {
      scores.sum.insert(scores.sum.end(), tally.sum.begin(), tally.sum.begin() + n_);
    }
    return engine_.release_sequence(seq);
  }

  Result<double> compress(engine::SeqId seq, Compression policy, double budget) {
    const RowScores& scores = scores_.at(policy::compression_info(policy).source);
    const std::vector<double> budgets = budgets_ == policy::LayerBudgets::kRanked
                                            ? policy::ranked_budgets(policy, scores, budget)
                                            : policy::layer_budgets(budgets_, budget, density_);
    size_t n_kept = 0;
    for (int layer = 0; layer < engine_.n_layer(); ++layer) {
      const std::vector<int32_t> kept =
          policy::choose_rows(policy, scores, layer, budgets[static_cast<size_t>(layer)], seed_);
      n_kept += kept.size();
      HCACHE_RETURN_IF_ERROR(engine_.keep_rows(seq, layer, kept));
    }
    const auto all = static_cast<double>(n_ * engine_.n_layer() * scores.n_head_kv);
    return static_cast<double>(n_kept) / all;
  }

  engine::Engine& engine_;
  const policy::LayerBudgets budgets_;
  const std::vector<double> density_;
  const uint64_t seed_;
  engine::SeqId context_ = -1;
  int64_t n_ = 0;
  std::map<ScoreSource, RowScores> scores_;
  std::vector<double> plain_s_;  // of prefilling each context
  std::vector<double> scored_s_;
};

// A stretch of text behind a context: every row against all rows kept.
Status score_text(Compressed& compressed, const Tokens& piece, int64_t context,
                  std::span<const Compression> policies, std::vector<CompressionRow>& rows) {
  const auto n = static_cast<size_t>(context);
  HCACHE_RETURN_IF_ERROR(compressed.read(std::span(piece).first(n), policies));
  // The last token is only predicted.
  const auto tokens = std::span(piece).subspan(n, piece.size() - n - 1);
  const auto log_p_of = [&](size_t i, std::span<const float> logits) {
    return model::log_prob(logits, piece[n + i + 1]);
  };
  std::vector<std::vector<float>> base;
  std::vector<double> base_log_p;
  HCACHE_RETURN_IF_ERROR(compressed
                             .predict(Compression::kNone, 1, tokens,
                                      [&](size_t i, std::span<const float> logits) -> Status {
                                        base.emplace_back(logits.begin(), logits.end());
                                        base_log_p.push_back(log_p_of(i, logits));
                                        return {};
                                      })
                             .status());
  for (CompressionRow& row : rows) {
    for (auto* groups : {&row.nll, &row.more_nll, &row.kl, &row.same_top}) groups->emplace_back();
    HCACHE_ASSIGN_OR_RETURN(
        const double kept,
        compressed.predict(row.policy, row.budget, tokens,
                           [&](size_t i, std::span<const float> logits) -> Status {
                             const double log_p = log_p_of(i, logits);
                             row.nll.back().add(-log_p);
                             row.more_nll.back().add(base_log_p[i] - log_p);
                             row.kl.back().add(model::kl_divergence(base[i], logits));
                             const bool same = model::argmax(base[i]) == model::argmax(logits);
                             row.same_top.back().add(same ? 1 : 0);
                             return {};
                           }));
    row.kept.add(kept);
  }
  return compressed.forget();
}

// A question in tokens.
struct Asked {
  Tokens context;
  std::vector<Tokens> choices;  // with the question
  size_t n_question = 0;        // tokens before the choices part
  int answer = 0;
};

Result<Asked> ask(const model::Tokenizer& tokenizer, const eval::LaterQuestion& question) {
  Asked asked;
  HCACHE_ASSIGN_OR_RETURN(asked.context, tokenizer.encode(question.context, {.add_special = true}));
  Tokens common;
  for (const std::string& choice : question.later.choices) {
    HCACHE_ASSIGN_OR_RETURN(Tokens tokens, tokenizer.encode(question.later.prompt + choice));
    if (asked.choices.empty()) common = tokens;
    common.resize(static_cast<size_t>(common_prefix(common, tokens)));
    asked.choices.push_back(std::move(tokens));
  }
  asked.n_question = common.size();
  asked.answer = question.later.answer;
  return asked;
}

// Whether the likeliest choice is the right one.
Result<bool> answers(Compressed& compressed, const Asked& asked, const CompressionRow& row,
                     double* kept) {
  int best = 0;
  double most = 0;
  for (size_t c = 0; c < asked.choices.size(); ++c) {
    const Tokens& tokens = asked.choices[c];
    double log_p = 0;
    const auto add = [&](size_t i, std::span<const float> logits) -> Status {
      if (i + 1 >= asked.n_question) log_p += model::log_prob(logits, tokens[i + 1]);
      return {};
    };
    HCACHE_ASSIGN_OR_RETURN(*kept,
                            compressed.predict(row.policy, row.budget,
                                               std::span(tokens).first(tokens.size() - 1), add));
    if (c == 0 || log_p > most) {
      best = static_cast<int>(c);
      most = log_p;
    }
  }
  return best == asked.answer;
}

Status score_question(Compressed& compressed, const Asked& asked,
                      std::span<const Compression> policies, std::vector<CompressionRow>& rows) {
  HCACHE_RETURN_IF_ERROR(compressed.read(asked.context, policies));
  for (CompressionRow& row : rows) {
    double kept = 1;
    HCACHE_ASSIGN_OR_RETURN(const bool right, answers(compressed, asked, row, &kept));
    row.right.push_back({right ? 1.0 : 0.0, 1});
    row.kept.add(kept);
  }
  return compressed.forget();
}

Json row_json(const CompressionRow& row) {
  Json json = {{"policy", policy::compression_info(row.policy).name},
               {"budget", row.budget},
               {"kept", row.kept.sum / row.kept.n}};
  if (!row.right.empty()) {
    json["accuracy"] = to_json(eval::bootstrap_mean(row.right));
    return json;
  }
  json["perplexity"] = to_json(eval::exponential(eval::bootstrap_mean(row.nll)));
  json["perplexity_ratio"] = to_json(eval::exponential(eval::bootstrap_mean(row.more_nll)));
  json["mean_kl"] = to_json(eval::bootstrap_mean(row.kl));
  json["same_top"] = to_json(eval::bootstrap_mean(row.same_top));
  return json;
}

std::vector<std::string> cells(const Json& row) {
  std::vector<std::string> out = {row["policy"].get<std::string>(),
                                  fmt::format("{:g}", row["budget"].get<double>()),
                                  fmt::format("{:.1f} %", 100 * row["kept"].get<double>())};
  if (row.contains("accuracy")) {
    out.push_back(with_interval(row["accuracy"], "{:.1f} %", 100));
    return out;
  }
  out.push_back(with_interval(row["mean_kl"], "{:.4f}"));
  out.push_back(with_interval(row["same_top"], "{:.1f} %", 100));
  out.push_back(with_interval(row["perplexity_ratio"], "{:.4f}"));
  return out;
}

// What is scored: pieces of a text, or questions.
struct Subject {
  std::vector<Tokens> pieces;
  std::vector<Asked> questions;
  size_t longest = 0;  // tokens of a context with what follows
  Json about;

  [[nodiscard]] size_t size() const { return std::max(pieces.size(), questions.size()); }
};

Result<Subject> text_of(const CompressionArgs& args, const model::Tokenizer& tokenizer) {
  Subject subject;
  HCACHE_ASSIGN_OR_RETURN(const std::string text, read_whole_file(Env::real(), args.file));
  HCACHE_ASSIGN_OR_RETURN(const Tokens tokens, tokenizer.encode(text, {.add_special = true}));
  const int64_t piece = args.context + args.tokens + 1;
  subject.pieces = pieces_of(tokenizer, tokens, piece, args.pieces);
  if (subject.pieces.empty()) {
    return invalid_argument(fmt::format("{} has {} tokens, less than a context of {} and {} more",
                                        args.file, tokens.size(), args.context, args.tokens + 1));
  }
  subject.longest = static_cast<size_t>(piece);
  subject.about = {{"file", args.file},
                   {"context", args.context},
                   {"tokens", args.tokens},
                   {"pieces", subject.pieces.size()}};
  return subject;
}

Result<Subject> questions_of(const CompressionArgs& args, const model::Tokenizer& tokenizer) {
  Subject subject;
  std::vector<eval::Question> all;
  for (const eval::LaterQuestion& question : eval::later_retrieval_questions(
           args.lines, args.questions, static_cast<uint64_t>(args.seed))) {
    all.push_back(question.later);
    HCACHE_ASSIGN_OR_RETURN(Asked asked, ask(tokenizer, question));
    for (const Tokens& choice : asked.choices) {
      subject.longest = std::max(subject.longest, asked.context.size() + choice.size());
    }
    subject.questions.push_back(std::move(asked));
  }
  subject.about = {{"lines", args.lines},
                   {"questions", subject.questions.size()},
                   {"chance", eval::chance(all)},
                   {"longest", subject.longest}};
  return subject;
}

}  // namespace

CompressionArgs::CompressionArgs() {
  withhold({&reps, &text_file, &paced, &runtime.kv_type, &runtime.attention, &runtime.weights,
            &runtime.state.key_file, &runtime.state.stores, &runtime.state_type, &runtime.pack,
            &runtime.quality, &runtime.saver});
}

Status eval_compression(CompressionArgs args) {
  if (args.runtime.model.device == "list") return list_devices();
  HCACHE_ASSIGN_OR_RETURN(const std::vector<double> budgets, parse_budgets(args.budgets));
  HCACHE_ASSIGN_OR_RETURN(const policy::LayerBudgets layers,
                          policy::parse_layer_budgets(args.layers));
  std::vector<CompressionRow> rows = {{}};
  std::vector<Compression> policies;
  for (const std::string& name : args.policies) {
    HCACHE_ASSIGN_OR_RETURN(policies.emplace_back(), policy::parse_compression(name));
    for (const double budget : budgets) {
      if (policies.back() != Compression::kNone) {
        rows.push_back({.policy = policies.back(), .budget = budget, .kept = {}});
      }
    }
  }
  HCACHE_ASSIGN_OR_RETURN(const std::string path, resolve_model(args.runtime.model.path));
  HCACHE_ASSIGN_OR_RETURN(const auto tokenizer, model::Tokenizer::load(path));
  HCACHE_ASSIGN_OR_RETURN(const Subject subject, args.file.empty() ? questions_of(args, *tokenizer)
                                                                   : text_of(args, *tokenizer));
  HCACHE_ASSIGN_OR_RETURN(const auto devices,
                          model::open_devices(args.runtime.model.device, args.runtime.model.threads,
                                              offload_options(args.runtime.model)));
  model::LoadOptions load;
  load.placement = devices.placement;
  HCACHE_ASSIGN_OR_RETURN(const auto model,
                          model::Model::load(path, *devices.devices.front(), load));
  // The context, what repeats a part of it, and a copy of it with what follows.
  const auto cells_wanted = static_cast<int64_t>(2 * subject.longest) + state::SecondReading::kRows;
  HCACHE_ASSIGN_OR_RETURN(
      const auto engine,
      engine::Engine::create(
          *model, {.arena_tokens = std::max(cells_wanted, state::kSparsityCells),
                   .max_batch_rows = std::max({args.runtime.batch, static_cast<int>(args.tokens),
                                               static_cast<int>(state::SecondReading::kRows)}),
                   .separate_layers = true}));
  ProgressLine line;
  HCACHE_ASSIGN_OR_RETURN(const Tokens sample,
                          tokenizer->encode(state::sample_text(), {.add_special = true}));
  HCACHE_ASSIGN_OR_RETURN(const state::SparsityProfile sparsity,
                          state::measure_sparsity(*engine, sample));
  Compressed compressed(*engine, layers, sparsity.density(), static_cast<uint64_t>(args.seed));
  for (size_t i = 0; i < subject.size(); ++i) {
    if (!line.update(fmt::format("{} {} of {}", subject.pieces.empty() ? "question" : "piece",
                                 i + 1, subject.size()),
                     static_cast<double>(i) / static_cast<double>(subject.size()))) {
      return cancelled("interrupted");
    }
    HCACHE_RETURN_IF_ERROR(
        subject.pieces.empty()
            ? score_question(compressed, subject.questions[i], policies, rows)
            : score_text(compressed, subject.pieces[i], args.context, policies, rows));
  }
  line.finish();
  Json results = {{"machine", machine_json(*model)},
                  {"model", path},
                  {"type", model->type_name()},
                  {"layers", args.layers},
                  {"scoring", compressed.scoring_json()},
                  {subject.pieces.empty() ? "questions" : "text", subject.about}};
  std::vector<std::vector<std::string>> table = {{"policy", "budget", "rows kept"}};
  if (subject.pieces.empty()) {
    table[0].emplace_back("right (95 %)");
  } else {
    table[0].insert(table[0].end(),
                    {"mean KL (95 %)", "same first choice", "perplexity / all rows' (95 %)"});
  }
  for (const CompressionRow& row : rows) {
    results["rows"].push_back(row_json(row));
    table.push_back(cells(results["rows"].back()));
  }
  return report(args, results, table);
}

}  // namespace hcache::cli
