// Questions: what a file may hold, and what is made up.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "eval/questions.h"

namespace hcache::eval {
namespace {

TEST(EvalQuestions, ReadsALineEach) {
  const auto questions = parse_questions(
      "{\"prompt\": \"2 + 2 =\", \"choices\": [\" 4\", \" 5\"], \"answer\": 0}\n\n"
      "{\"prompt\": \"One\", \"choices\": [\" a\", \" b\", \" c\"], \"answer\": 2, \"id\": 7}\r\n",
      "q.jsonl");
  ASSERT_TRUE(questions.ok()) << questions.status().to_string();
  ASSERT_EQ(questions->size(), 2U);
  EXPECT_EQ((*questions)[0].prompt, "2 + 2 =");
  EXPECT_EQ((*questions)[1].choices.size(), 3U);
  EXPECT_EQ((*questions)[1].answer, 2);
  EXPECT_DOUBLE_EQ(chance(*questions), (1.0 / 2 + 1.0 / 3) / 2);
}

TEST(EvalQuestions, NamesTheLineThatIsWrong) {
  const std::string good = "{\"prompt\": \"p\", \"choices\": [\"a\", \"b\"], \"answer\": 1}\n";
  for (const std::string bad : {
           "{\"prompt\": \"p\"",
           "[1]",
           "{\"choices\": [\"a\", \"b\"], \"answer\": 0}",
           "{\"prompt\": \"\", \"choices\": [\"a\", \"b\"], \"answer\": 0}",
           "{\"prompt\": 3, \"choices\": [\"a\", \"b\"], \"answer\": 0}",
           "{\"prompt\": \"p\", \"choices\": [\"a\"], \"answer\": 0}",
           "{\"prompt\": \"p\", \"choices\": \"ab\", \"answer\": 0}",
           "{\"prompt\": \"p\", \"choices\": [\"a\", 2], \"answer\": 0}",
           "{\"prompt\": \"p\", \"choices\": [\"a\", \"\"], \"answer\": 0}",
           "{\"prompt\": \"p\", \"choices\": [\"a\", \"b\"]}",
           "{\"prompt\": \"p\", \"choices\": [\"a\", \"b\"], \"answer\": 2}",
           "{\"prompt\": \"p\", \"choices\": [\"a\", \"b\"], \"answer\": -1}",
           "{\"prompt\": \"p\", \"choices\": [\"a\", \"b\"], \"answer\": \"a\"}",
       }) {
    const auto questions = parse_questions(good + bad, "q.jsonl");
    ASSERT_EQ(questions.code(), Code::kInvalidArgument) << bad;
    EXPECT_NE(questions.status().message().find("q.jsonl, line 2: "), std::string::npos) << bad;
  }
  EXPECT_EQ(parse_questions("\n \n", "q.jsonl").code(), Code::kInvalidArgument);
}

// The prompt gives every choice, the right one to the asked name alone.
TEST(EvalQuestions, RetrievalAsksForWhatAnEarlySentenceSays) {
  for (const int64_t lines : {4, 30, 700}) {
    const std::vector<Question> questions = retrieval_questions(lines, 5, 11);
    ASSERT_EQ(questions.size(), 5U);
    std::set<int> answers;
    for (const Question& question : questions) {
      const std::string& text = question.prompt;
      const size_t asked_at = text.rfind("The number of the ");
      const std::string asked = text.substr(asked_at);
      const size_t first = text.find(asked + " ");  // the sentence itself
      ASSERT_NE(first, std::string::npos);
      EXPECT_LT(first, asked_at);
      EXPECT_LT(first, text.size() * 2 / 5);
      const std::string& right = question.choices.at(static_cast<size_t>(question.answer));
      EXPECT_EQ(text.substr(first + asked.size(), right.size() + 1), right + ".");
      EXPECT_EQ(std::set(question.choices.begin(), question.choices.end()).size(), 4U);
      for (const std::string& choice : question.choices) {
        EXPECT_NE(text.find(choice + ".\n"), std::string::npos);
      }
      answers.insert(question.answer);
    }
    EXPECT_GT(answers.size(), 1U) << "the right one always stands at one place";
  }
}

TEST(EvalQuestions, RetrievalRepeatsItself) {
  EXPECT_EQ(retrieval_questions(20, 3, 5)[2].prompt, retrieval_questions(20, 3, 5)[2].prompt);
  EXPECT_NE(retrieval_questions(20, 3, 5)[2].prompt, retrieval_questions(20, 3, 6)[2].prompt);
}

// What answers the first question does not answer the second.
TEST(EvalQuestions, ALaterOneAsksForSomethingElse) {
  for (const int64_t lines : {8, 40}) {
    const std::vector<LaterQuestion> questions = later_retrieval_questions(lines, 20, 11);
    ASSERT_EQ(questions.size(), 20U);
    for (const LaterQuestion& question : questions) {
      const std::string& text = question.context;
      const std::string& later = question.later.prompt;
      const std::string asked = later.substr(later.find("The number of the "));
      const size_t sentence = text.find(asked + " ");
      ASSERT_NE(sentence, std::string::npos);
      EXPECT_EQ(text.rfind(asked + " "), sentence) << "the first question is another";
      const std::string& right = question.later.choices[question.later.answer];
      EXPECT_EQ(text.substr(sentence, asked.size() + right.size() + 1), asked + right + ".");
      EXPECT_EQ(text.back(), '\n');
      for (const std::string& choice : question.later.choices) {
        EXPECT_NE(text.find(" is" + choice + "."), std::string::npos);
      }
    }
  }
  EXPECT_EQ(later_retrieval_questions(8, 3, 5)[2].context,
            later_retrieval_questions(8, 3, 5)[2].context);
}

}  // namespace
}  // namespace hcache::eval
