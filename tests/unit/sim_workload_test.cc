// Conversations of different sizes, and documents that they share. What both `hcache sim` and
// `hcache bench serve` draw is load_schedule_test.cc's.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

#include "sim/workload.h"

namespace hcache::sim {
namespace {

double tokens_of(const Session& session) {
  double n = 0;
  for (const Round& round : session.rounds) {
    n += static_cast<double>(round.input_tokens + round.output_tokens);
  }
  return n;
}

LoadOptions many() {
  LoadOptions options;
  options.sessions = 20000;
  options.seed = 1;
  options.rate = 1;
  options.rounds = 3;
  return options;
}

// AttentionStore's section 2.3: 27 % of one round, 5.75 on average, none above 40 in its figure.
TEST(Workload, NumbersOfRoundsAreLogNormalUpToTheMost) {
  LoadOptions options = many();
  options.mean_rounds = 7.4;
  options.rounds_sigma = 1.28;
  options.most_rounds = 40;
  double rounds = 0;
  double single = 0;
  size_t most = 0;
  for (const Session& session : draw_conversations(options).sessions) {
    rounds += static_cast<double>(session.rounds.size());
    if (session.rounds.size() == 1) single += 1;
    most = std::max(most, session.rounds.size());
  }
  EXPECT_NEAR(rounds / 20000, 5.75, 0.12);
  EXPECT_NEAR(single / 20000, 0.275, 0.01);
  EXPECT_EQ(most, 40U);
}

TEST(Workload, AConversationIsLongerOrShorterAsAWhole) {
  LoadOptions options = many();
  options.input_sigma = 0;
  options.output_sigma = 0;
  options.conversation_sigma = 0.9;
  double tokens = 0;
  double squares_of_logs = 0;
  for (const Session& session : draw_conversations(options).sessions) {
    tokens += tokens_of(session);
    const double ratio = tokens_of(session) / (3 * (options.mean_input + options.mean_output));
    squares_of_logs += std::pow(std::log(ratio) + 0.405, 2);
    EXPECT_EQ(session.rounds[0].output_tokens, session.rounds[2].output_tokens);
  }
  EXPECT_NEAR(tokens / 20000 / 3 / (options.mean_input + options.mean_output), 1, 0.03);
  EXPECT_NEAR(std::sqrt(squares_of_logs / 20000), 0.9, 0.02);
}

TEST(Workload, TheTemplateAddsToEveryMessage) {
  LoadOptions options = many();
  options.sessions = 50;
  options.document = 100;
  const Schedule plain = draw_conversations(options);
  options.system_tokens = 20;
  options.message_tokens = 7;
  const Schedule with = draw_conversations(options);
  for (size_t s = 0; s < with.sessions.size(); ++s) {
    int64_t added = 0;  // before this round
    for (size_t i = 0; i < with.sessions[s].rounds.size(); ++i) {
      const Round& round = with.sessions[s].rounds[i];
      const Round& before = plain.sessions[s].rounds[i];
      EXPECT_EQ(round.known_tokens, before.known_tokens + added);
      EXPECT_EQ(round.input_tokens, before.input_tokens + (i == 0 ? 27 : 7));
      EXPECT_EQ(round.output_tokens, before.output_tokens);
      int64_t tokens = 0;
      for (const Piece& piece : round.message) tokens += piece.tokens;
      EXPECT_EQ(tokens, round.input_tokens);
      added += i == 0 ? 27 : 7;
    }
    // All begin alike, and go on with documents of their own.
    EXPECT_EQ(with.sessions[s].rounds[0].message[0].key, with.sessions[0].rounds[0].message[0].key);
    EXPECT_EQ(with.sessions[s].rounds[0].message[1].key,
              plain.sessions[s].rounds[0].message[0].key);
  }
}

TEST(Workload, SharedDocumentsAreChosenByRank) {
  LoadOptions options = many();
  options.document = 5000;
  options.documents = 40;
  const auto shares = [&](double skew) {
    options.document_skew = skew;
    std::map<uint64_t, double> counts;
    for (const Session& session : draw_conversations(options).sessions) {
      const Round& first = session.rounds.front();
      EXPECT_EQ(first.message.front().tokens, 5000);
      const bool known = counts.contains(first.message.front().key);
      EXPECT_EQ(first.known_tokens, known ? 5000 : 0);
      counts[first.message.front().key] += 1.0 / 20000;
    }
    std::vector<double> sorted;
    for (const auto& [key, share] : counts) sorted.push_back(share);
    std::sort(sorted.rbegin(), sorted.rend());
    return sorted;
  };
  const std::vector<double> uniform = shares(0);
  ASSERT_EQ(uniform.size(), 40U);
  EXPECT_NEAR(uniform.front(), 1.0 / 40, 0.005);
  EXPECT_NEAR(uniform.back(), 1.0 / 40, 0.005);
  const std::vector<double> skewed = shares(2);
  EXPECT_NEAR(skewed[0], 0.617, 0.02);  // 1 / (1 + 1/4 + 1/9 + …)
  EXPECT_NEAR(skewed[0] / skewed[1], 4, 0.3);
}

}  // namespace
}  // namespace hcache::sim
