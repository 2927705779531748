#include "eval/questions.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <utility>

namespace hcache::eval {
namespace {

using Json = nlohmann::json;

constexpr size_t kRetrievalChoices = 4;

Result<Question> parse_question(std::string_view line) {
  const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return invalid_argument("is no JSON object");
  const auto field = [&](const char* name) {
    const auto found = json.find(name);
    return found == json.end() ? Json() : *found;
  };
  Question question;
  const Json prompt = field("prompt");
  if (!prompt.is_string()) return invalid_argument("has no \"prompt\" that is a string");
  question.prompt = prompt.get<std::string>();
  if (question.prompt.empty()) return invalid_argument("has an empty \"prompt\"");
  const Json choices = field("choices");
  if (!choices.is_array() || choices.size() < 2) {
    return invalid_argument("has no \"choices\" that are a list of two strings or more");
  }
  for (const Json& choice : choices) {
    if (!choice.is_string() || choice.get_ref<const std::string&>().empty()) {
      return invalid_argument("has a choice that is no string, or empty");
    }
    question.choices.push_back(choice.get<std::string>());
  }
  const Json answer = field("answer");
  if (!answer.is_number_integer() || answer < 0 ||
      answer >= static_cast<int64_t>(question.choices.size())) {
    return invalid_argument(fmt::format("has no \"answer\" from 0 to {}, which counts the choices",
                                        question.choices.size() - 1));
  }
  question.answer = answer.get<int>();
  return question;
}

// Names that no two lines share.
std::vector<std::string> names(int64_t n, std::mt19937_64& random) {
  static constexpr std::array<std::string_view, 24> kFirst = {
      "amber", "brave", "calm",  "dusty", "early", "faint", "green", "heavy",
      "idle",  "jolly", "keen",  "lucky", "mild",  "noble", "oaken", "plain",
      "quiet", "rusty", "sandy", "tidy",  "upper", "vivid", "warm",  "young"};
  static constexpr std::array<std::string_view, 24> kSecond = {
      "anchor", "basket", "candle", "drawer", "engine", "feather", "garden",  "hammer",
      "island", "jacket", "kettle", "ladder", "mirror", "needle",  "orchard", "pencil",
      "quarry", "ribbon", "saddle", "table",  "urn",    "violin",  "window",  "yard"};
  std::set<std::string> taken;
  std::vector<std::string> out;
  while (static_cast<int64_t>(out.size()) < n) {
    std::string name =
        fmt::format("{} {}", kFirst[random() % kFirst.size()], kSecond[random() % kSecond.size()]);
    // There are few hundred pairs; longer texts number them.
    if (taken.contains(name)) name += fmt::format(" {}", out.size());
    if (taken.insert(name).second) out.push_back(std::move(name));
  }
  return out;
}

// Four digits each, no two alike.
std::vector<std::string> numbers(int64_t n, std::mt19937_64& random) {
  std::set<uint64_t> taken;
  std::vector<std::string> out;
  const uint64_t range = std::max<uint64_t>(9000, 4 * static_cast<uint64_t>(n));
  while (static_cast<int64_t>(out.size()) < n) {
    const uint64_t number = 1000 + random() % range;
    if (taken.insert(number).second) out.push_back(std::to_string(number));
  }
  return out;
}

// Sentences that give a number to a thing each.
struct House {
  std::vector<std::string> keys;
  std::vector<std::string> values;
  std::string text;
};

House make_house(int64_t lines, std::mt19937_64& random) {
  House house;
  house.keys = names(lines, random);
  house.values = numbers(lines, random);
  house.text = "Every thing in the house has a number.\n";
  for (size_t i = 0; i < house.keys.size(); ++i) {
    house.text += fmt::format("The number of the {} is {}.\n", house.keys[i], house.values[i]);
  }
  return house;
}

size_t first_quarter(const House& house) { return std::max<size_t>(1, house.keys.size() / 4); }

std::string question_for(const House& house, size_t asked) {
  return fmt::format("Now look it up.\nThe number of the {} is", house.keys[asked]);
}

void add_choices(const House& house, size_t asked, std::mt19937_64& random, Question& question) {
  std::set<size_t> chosen = {asked};
  while (chosen.size() < kRetrievalChoices) chosen.insert(random() % house.keys.size());
  std::vector<size_t> order(chosen.begin(), chosen.end());
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random() % i]);
  for (const size_t at : order) {
    if (at == asked) question.answer = static_cast<int>(question.choices.size());
    question.choices.push_back(" " + house.values[at]);
  }
}

Question retrieval_question(int64_t lines, std::mt19937_64& random) {
  const House house = make_house(lines, random);
  const size_t asked = random() % first_quarter(house);
  Question question;
  question.prompt = house.text + question_for(house, asked);
  add_choices(house, asked, random, question);
  return question;
}

LaterQuestion later_question(int64_t lines, std::mt19937_64& random) {
  const House house = make_house(lines, random);
  const size_t n = first_quarter(house);
  const size_t first = random() % n;
  const size_t asked = (first + 1 + random() % (n - 1)) % n;  // another one
  LaterQuestion question;
  question.context =
      fmt::format("{}{} {}.\n", house.text, question_for(house, first), house.values[first]);
  question.later.prompt = question_for(house, asked);
  add_choices(house, asked, random, question.later);
  return question;
}

}  // namespace

Result<std::vector<Question>> parse_questions(std::string_view text, std::string_view file) {
  std::vector<Question> questions;
  for (size_t line = 1; !text.empty(); ++line) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view here = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (here.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    Result<Question> question = parse_question(here);
    if (!question.ok()) {
      return invalid_argument(
          fmt::format("{}, line {}: {}", file, line, question.status().message()));
    }
    questions.push_back(std::move(*question));
  }
  if (questions.empty()) return invalid_argument(fmt::format("{} has no questions", file));
  return questions;
}

std::vector<Question> retrieval_questions(int64_t lines, int64_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Question> questions;
  for (int64_t i = 0; i < n; ++i) {
    questions.push_back(retrieval_question(std::max<int64_t>(lines, kRetrievalChoices), random));
  }
  return questions;
}

std::vector<LaterQuestion> later_retrieval_questions(int64_t lines, int64_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<LaterQuestion> questions;
  for (int64_t i = 0; i < n; ++i) {
    questions.push_back(later_question(std::max<int64_t>(lines, 2 * kRetrievalChoices), random));
  }
  return questions;
}

double chance(const std::vector<Question>& questions) {
  double sum = 0;
  for (const Question& question : questions)
    sum += 1.0 / static_cast<double>(question.choices.size());
  return questions.empty() ? 0 : sum / static_cast<double>(questions.size());
}

}  // namespace hcache::eval
