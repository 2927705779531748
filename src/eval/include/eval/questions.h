// Questions with several answers to choose from, of which the likeliest counts as given.
//
// Threading: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace hcache::eval {

struct Question {
  std::string prompt;                // all that stands before the answer
  std::vector<std::string> choices;  // at least two
  int answer = 0;                    // the right one's index
};

// A line of JSON for each: {"prompt": "…", "choices": ["…", "…"], "answer": 0}. Empty lines are
// passed over. kInvalidArgument names `file`, the line and what is wrong with it; a file without
// questions is one as well.
[[nodiscard]] Result<std::vector<Question>> parse_questions(std::string_view text,
                                                            std::string_view file);

// Retrieval, in the manner of LongEval's lines: each question's prompt has `lines` sentences that
// give a number each, and ends by asking for one of the first quarter's. The choices are four
// numbers of its own sentences, so that knowing the text's form alone answers one in four.
// The same seed gives the same questions. `lines` is at least 4.
[[nodiscard]] std::vector<Question> retrieval_questions(int64_t lines, int64_t n, uint64_t seed);

// One that comes behind another: what the first one needed is no longer what is asked for.
struct LaterQuestion {
  std::string context;  // the sentences, and the first question with its answer
  Question later;       // its prompt is what stands behind the context
};
// As retrieval_questions(), of which two are asked; `lines` is at least 8.
[[nodiscard]] std::vector<LaterQuestion> later_retrieval_questions(int64_t lines, int64_t n,
                                                                   uint64_t seed);

// What an answer by chance alone would get right, on average.
[[nodiscard]] double chance(const std::vector<Question>& questions);

}  // namespace hcache::eval
