// hcache eval tasks: questions with several answers, of which the likeliest counts as given.

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/tokens.h"
#include "commands.h"
#include "eval.h"
#include "eval/questions.h"
#include "model/logits.h"

namespace hcache::cli {
namespace {

// A question in tokens.
struct Asked {
  const eval::Question* question = nullptr;
  EvalPrompt shared;                          // what all choices begin with, as it is saved
  std::vector<std::vector<int32_t>> choices;  // each with its prompt
};

Result<std::vector<int32_t>> encode(const model::Tokenizer& tokenizer, const std::string& text) {
  return tokenizer.encode(text, {.add_special = true});
}

// What a choice is scored by begins where its tokens leave the prompt's.
Result<Asked> ask(const model::Tokenizer& tokenizer, const eval::Question& question) {
  Asked asked;
  asked.question = &question;
  HCACHE_ASSIGN_OR_RETURN(std::vector<int32_t> common, encode(tokenizer, question.prompt));
  for (const std::string& choice : question.choices) {
    HCACHE_ASSIGN_OR_RETURN(std::vector<int32_t> tokens,
                            encode(tokenizer, question.prompt + choice));
    common.resize(static_cast<size_t>(common_prefix(common, tokens)));
    asked.choices.push_back(std::move(tokens));
  }
  // The last common token predicts the first one that differs.
  const auto from = static_cast<int64_t>(common.size()) - 1;
  if (from < 1) {
    return invalid_argument(
        fmt::format("the question '{}' is shorter than two tokens", question.prompt));
  }
  asked.shared = {std::move(common), from};
  return asked;
}

// Of one way to answer all questions.
struct Answers {
  std::vector<int> chosen;
  std::vector<int> chosen_by_length;  // the likeliest byte for byte
  std::vector<eval::Group> right;
  std::vector<eval::Group> right_by_length;
  EvalSource source;
};

using Score = std::function<Status(const EvalPrompt&, const Evaluation::OnLogits&)>;

Status answer(const Asked& asked, const Score& score, Answers& answers) {
  std::vector<double> log_p;
  std::vector<double> per_byte;
  const int64_t from = asked.shared.from;
  for (size_t c = 0; c < asked.choices.size(); ++c) {
    const std::vector<int32_t>& tokens = asked.choices[c];
    double sum = 0;
    const auto on_logits = [&](int64_t position, std::span<const float> logits) {
      sum += model::log_prob(logits, tokens[static_cast<size_t>(position) + 1]);
    };
    HCACHE_RETURN_IF_ERROR(score({{tokens.begin(), tokens.end() - 1}, from}, on_logits));
    log_p.push_back(sum);
    per_byte.push_back(sum / static_cast<double>(asked.question->choices[c].size()));
  }
  const auto best = [](const std::vector<double>& v) {
    return static_cast<int>(std::max_element(v.begin(), v.end()) - v.begin());
  };
  const auto is_right = [&](int choice) {
    return eval::Group{choice == asked.question->answer ? 1.0 : 0.0, 1};
  };
  answers.chosen.push_back(best(log_p));
  answers.chosen_by_length.push_back(best(per_byte));
  answers.right.push_back(is_right(answers.chosen.back()));
  answers.right_by_length.push_back(is_right(answers.chosen_by_length.back()));
  return {};
}

std::vector<eval::Group> differences(const std::vector<eval::Group>& a,
                                     const std::vector<eval::Group>& b) {
  std::vector<eval::Group> out;
  for (size_t i = 0; i < a.size(); ++i) out.push_back({a[i].sum - b[i].sum, 1});
  return out;
}

Json answers_json(const std::string& name, const Answers& answers, const Answers& base) {
  std::vector<eval::Group> same;
  for (size_t i = 0; i < base.chosen.size(); ++i) {
    same.push_back({answers.chosen[i] == base.chosen[i] ? 1.0 : 0.0, 1});
  }
  return {{"method", name},
          {"accuracy", to_json(eval::bootstrap_mean(answers.right))},
          {"accuracy_by_length", to_json(eval::bootstrap_mean(answers.right_by_length))},
          {"same_as_base", to_json(eval::bootstrap_mean(same))},
          {"accuracy_minus_base",
           to_json(eval::bootstrap_mean(differences(answers.right, base.right)))},
          {"source", to_json(answers.source)}};
}

Result<std::vector<eval::Question>> questions_of(const TasksArgs& args) {
  if (args.file.empty()) {
    return eval::retrieval_questions(args.lines, args.questions, static_cast<uint64_t>(args.seed));
  }
  HCACHE_ASSIGN_OR_RETURN(const std::string text, read_whole_file(Env::real(), args.file));
  HCACHE_ASSIGN_OR_RETURN(auto questions, eval::parse_questions(text, args.file));
  questions.resize(std::min(questions.size(), static_cast<size_t>(args.questions)));
  return questions;
}

std::string percent(const Json& estimate) { return with_interval(estimate, "{:.1f} %", 100); }

}  // namespace

TasksArgs::TasksArgs() { offer_methods("plan"); }

Status eval_tasks(TasksArgs args) {
  if (args.runtime.model.device == "list") return list_devices();
  ProgressLine line;
  HCACHE_ASSIGN_OR_RETURN(const std::vector<eval::Question> questions, questions_of(args));
  HCACHE_ASSIGN_OR_RETURN(const auto tokenizer, load_tokenizer(args));
  std::vector<Asked> all;
  std::vector<EvalPrompt> prompts;
  size_t longest = 0;
  for (const eval::Question& question : questions) {
    HCACHE_ASSIGN_OR_RETURN(Asked asked, ask(*tokenizer, question));
    for (const auto& choice : asked.choices) longest = std::max(longest, choice.size());
    prompts.push_back(asked.shared);
    all.push_back(std::move(asked));
  }
  HCACHE_ASSIGN_OR_RETURN(const auto evaluation,
                          Evaluation::open(args, static_cast<int64_t>(longest), line));
  HCACHE_RETURN_IF_ERROR(evaluation->check_base(*tokenizer, questions[0].prompt));
  HCACHE_RETURN_IF_ERROR(evaluation->save(prompts));
  Answers base;
  std::vector<Answers> answers(evaluation->methods().size());
  for (size_t i = 0; i < all.size(); ++i) {
    HCACHE_RETURN_IF_ERROR(
        evaluation->tell(fmt::format("question {} of {}", i + 1, all.size()),
                         static_cast<double>(i) / static_cast<double>(all.size())));
    HCACHE_RETURN_IF_ERROR(answer(
        all[i],
        [&](const EvalPrompt& prompt, const Evaluation::OnLogits& on_logits) {
          return evaluation->score_base(prompt, on_logits);
        },
        base));
    for (size_t m = 0; m < answers.size(); ++m) {
      HCACHE_RETURN_IF_ERROR(answer(
          all[i],
          [&](const EvalPrompt& prompt, const Evaluation::OnLogits& on_logits) {
            return evaluation->score(prompt, evaluation->methods()[m], on_logits,
                                     &answers[m].source);
          },
          answers[m]));
    }
  }
  Json results = eval_json(*evaluation);
  results["questions"] = questions.size();
  results["chance"] = eval::chance(questions);
  results["longest"] = longest;
  results["rows"].push_back(answers_json("base", base, base));
  for (size_t m = 0; m < answers.size(); ++m) {
    results["rows"].push_back(answers_json(evaluation->methods()[m].name, answers[m], base));
  }
  std::vector<std::vector<std::string>> table = {
      {"method", "right (95 %)", "right, by length", "as the base", "more than the base"}};
  for (const Json& row : results["rows"]) {
    table.push_back({row["method"].get<std::string>(), percent(row["accuracy"]),
                     percent(row["accuracy_by_length"]), percent(row["same_as_base"]),
                     percent(row["accuracy_minus_base"])});
  }
  HCACHE_RETURN_IF_ERROR(evaluation->close());
  if (args.json_file != "-") {
    fmt::print("{} questions of at most {} tokens; {:.1f} % are right by chance\n",
               questions.size(), longest, 100 * eval::chance(questions));
  }
  return report(args, results, table);
}

}  // namespace hcache::cli
