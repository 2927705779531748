// Which rows of a saved chain a sequence holds that was cut, and how far they have moved.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "state/chosen_rows.h"
#include "state/held_match.h"

namespace hcache::state {
namespace {

// Of a chain of so many tokens; what is saved of a chunk does not matter here.
store::Match match_of(int64_t tokens) {
  store::Match match;
  for (int64_t at = 0; at < tokens; at += store::kChunkTokens) {
    const auto n = std::min<int64_t>(store::kChunkTokens, tokens - at);
    match.chunks.push_back({.chunk = {}, .usable_rows = static_cast<uint32_t>(n)});
  }
  match.n_tokens = static_cast<uint64_t>(tokens);
  return match;
}

struct Row {
  int64_t position = 0;  // in the chain
  int64_t moved = 0;
  friend bool operator==(const Row&, const Row&) = default;
};

// The chunks of a part tell their rows by what is skipped, if the chain's chunks are in order: a
// chunk that begins with an earlier row than the one before ended with is the next one.
std::vector<Row> rows_of(const store::Match& part, const policy::HeldRows& held) {
  std::vector<Row> rows;
  for (const store::MatchedChunk& chunk : part.chunks) {
    for (uint32_t i = 0; i < chunk.usable_rows; ++i) {
      const auto row = static_cast<int64_t>(rows.size());
      const int64_t position = row < held.kept ? row : row + held.dropped();
      EXPECT_EQ(position % store::kChunkTokens, chunk.first_row + i);
      rows.push_back(
          {position, std::accumulate(chunk.moves.begin(), chunk.moves.end(), int64_t{0})});
    }
  }
  return rows;
}

TEST(HeldMatch, IsTheChainWhereNothingWasCut) {
  const store::Match part = held_match(match_of(200), {}, 150);
  EXPECT_EQ(part.n_tokens, 150U);
  ASSERT_EQ(part.chunks.size(), 3U);
  for (const store::MatchedChunk& chunk : part.chunks) {
    EXPECT_EQ(chunk.first_row, 0U);
    EXPECT_TRUE(chunk.moves.empty());
  }
  EXPECT_EQ(part.chunks[2].usable_rows, 22U);
}

TEST(HeldMatch, LeavesOutWhatWasDroppedAndKnowsWhatMoved) {
  const std::vector<policy::HeldRows> cuts = {{.kept = 4, .resumed = 100, .cut_at = 192},
                                              {.kept = 4, .resumed = 210, .cut_at = 288}};
  const store::Match chain = match_of(350);
  // Up to the first cut all is held.
  EXPECT_EQ(held_match(chain, cuts, 192).n_tokens, 192U);
  // Behind it what came before has moved, and what follows not yet.
  const std::vector<Row> once = rows_of(held_match(chain, cuts, 288), cuts[0]);
  ASSERT_EQ(once.size(), 288U - 96);
  EXPECT_EQ(once[3], (Row{3, 0}));
  EXPECT_EQ(once[4], (Row{100, -96}));
  EXPECT_EQ(once[4 + 91], (Row{191, -96}));
  EXPECT_EQ(once[4 + 92], (Row{192, 0}));
  const std::vector<Row> twice = rows_of(held_match(chain, cuts, 350), cuts[1]);
  ASSERT_EQ(twice.size(), 350U - 206);
  EXPECT_EQ(twice[3], (Row{3, 0}));
  EXPECT_EQ(twice[4], (Row{210, -110}));  // was saved behind the first cut
  EXPECT_EQ(twice.back(), (Row{349, 0}));
}

// However a chain was cut: a row has moved from where it stood when it was computed to where it
// stands now.
TEST(HeldMatch, RowsHaveMovedFromWhereTheyWereComputed) {
  std::mt19937 random(3);
  const auto integer = [&](int64_t lo, int64_t hi) {
    return std::uniform_int_distribution<int64_t>(lo, hi)(random);
  };
  for (int round = 0; round < 100; ++round) {
    const policy::TruncationLimits limits{
        .context = integer(256, 600),
        .share = std::uniform_real_distribution<double>(0.05, 0.95)(random),
        .keep_first = integer(0, 100),
        .important = 0};
    const std::vector<int32_t> tokens(static_cast<size_t>(integer(300, 3000)), 7);
    const std::vector<policy::HeldRows> cuts = policy::cuts_of(tokens, limits, {});
    const auto length = static_cast<int64_t>(tokens.size()) - integer(0, 200);
    const policy::HeldRows held = policy::held_at(cuts, length);
    const store::Match part =
        held_match(match_of(static_cast<int64_t>(tokens.size())), cuts, length);
    const std::vector<Row> rows = rows_of(part, held);
    ASSERT_EQ(static_cast<int64_t>(rows.size()), held.rows(length));
    EXPECT_EQ(part.n_tokens, rows.size());
    for (size_t i = 0; i < rows.size(); ++i) {
      const policy::HeldRows then = policy::held_at(cuts, rows[i].position + 1);
      const bool first = rows[i].position < held.kept;
      const int64_t stood = first ? rows[i].position : rows[i].position - then.dropped();
      EXPECT_EQ(rows[i].moved, static_cast<int64_t>(i) - stood);
    }
  }
}

// The same with rows that are chosen, here at random, and with each move on its own: what a row's
// positions were behind every cut, told by a list of rows that is cut as a sequence is.
TEST(HeldMatch, ChosenRowsTellEachOfTheirMoves) {
  std::mt19937 random(4);
  const auto integer = [&](int64_t lo, int64_t hi) {
    return std::uniform_int_distribution<int64_t>(lo, hi)(random);
  };
  struct Held {
    int64_t position = 0;
    std::vector<int64_t> moves;
  };
  int64_t most_moves = 0;
  for (int round = 0; round < 100; ++round) {
    const policy::TruncationLimits limits{
        .context = integer(256, 900),
        .share = std::uniform_real_distribution<double>(0.05, 0.95)(random),
        .keep_first = integer(0, 100),
        .important = std::uniform_real_distribution<double>(0, 0.9)(random)};
    const std::vector<int32_t> tokens(static_cast<size_t>(integer(2000, 5000)), 7);
    const auto length = static_cast<int64_t>(tokens.size());
    const std::vector<policy::HeldRows> cuts = policy::cuts_of(tokens, limits, {});
    std::vector<Held> rows;
    std::vector<ChosenBlock> blocks;
    int64_t computed = 0;
    const auto compute = [&](int64_t end) {
      for (; computed < end; ++computed) rows.push_back({.position = computed, .moves = {}});
    };
    for (size_t i = 0; i < cuts.size(); ++i) {
      const policy::HeldRows& held = cuts[i];
      compute(held.cut_at);
      const policy::ChoosableBlocks choosable =
          blocks_to_choose_from(std::span(cuts).first(i), held);
      std::vector<int64_t> first = choosable.earlier;
      first.insert(first.end(), choosable.since.begin(), choosable.since.end());
      ASSERT_TRUE(std::is_sorted(first.begin(), first.end()));
      std::shuffle(first.begin(), first.end(), random);
      ASSERT_LE(held.chosen / policy::kChosenBlock, static_cast<int64_t>(first.size()));
      first.resize(static_cast<size_t>(held.chosen / policy::kChosenBlock));
      std::sort(first.begin(), first.end());
      ChosenCut cut = cut_rows(std::span(cuts).first(i), blocks, held, first);
      blocks = std::move(cut.blocks);
      for (auto range = cut.leaving.rbegin(); range != cut.leaving.rend(); ++range) {
        ASSERT_LT(range->from, range->to);
        rows.erase(rows.begin() + range->from, rows.begin() + range->to);
      }
      // Each row that is left stands where its place in the sequence is.
      ASSERT_EQ(static_cast<int64_t>(rows.size()), held.rows(held.cut_at));
      for (size_t row = 0; row < rows.size(); ++row) {
        const policy::HeldRows then = policy::held_at(cuts, rows[row].position + 1);
        int64_t stood = rows[row].position;
        if (stood >= held.kept) stood -= then.dropped();
        for (const int64_t move : rows[row].moves) stood += move;
        if (const int64_t move = static_cast<int64_t>(row) - stood; move != 0) {
          rows[row].moves.push_back(move);
        }
        most_moves = std::max(most_moves, static_cast<int64_t>(rows[row].moves.size()));
      }
      // What the page says is what was chosen.
      const auto read = parse_chosen(chosen_page(blocks, 64), held);
      ASSERT_EQ(read.ok(), true) << read.status().to_string();
      ASSERT_EQ(*read, blocks);
    }
    compute(length);
    const store::Match part = held_match(match_of(length), cuts, length, blocks);
    ASSERT_EQ(part.n_tokens, rows.size());
    size_t row = 0;
    for (const store::MatchedChunk& chunk : part.chunks) {
      for (uint32_t i = 0; i < chunk.usable_rows; ++i, ++row) {
        EXPECT_EQ(rows[row].position % store::kChunkTokens, chunk.first_row + i);
        EXPECT_EQ(rows[row].moves, chunk.moves) << rows[row].position;
      }
    }
  }
  EXPECT_GT(most_moves, 3);
}

TEST(ChosenRows, APageThatDoesNotFitIsRefused) {
  const policy::HeldRows held{.kept = 4, .resumed = 200, .cut_at = 256, .chosen = 32};
  const std::vector<ChosenBlock> blocks = {{.first = 16, .moves = {-12, -7}}, {.first = 176}};
  const std::vector<std::byte> page = chosen_page(blocks, 64);
  EXPECT_EQ(page.size() % 64, 0U);
  ASSERT_TRUE(parse_chosen(page, held).ok());
  const auto refused = [&](std::span<const std::byte> bytes, const policy::HeldRows& other) {
    return parse_chosen(bytes, other).status().code() == Code::kDataLoss;
  };
  for (size_t n = 0; n < 7 * sizeof(int64_t); ++n) {
    EXPECT_TRUE(refused(std::span(page).first(n), held)) << n;
  }
  policy::HeldRows other = held;
  other.chosen = 48;
  EXPECT_TRUE(refused(page, other));
  other = held;
  other.kept = 17;
  EXPECT_TRUE(refused(page, other));
  other = held;
  other.resumed = 191;
  EXPECT_TRUE(refused(page, other));
  for (const int64_t second : {16, 24, 40}) {  // overlaps, or is not aligned
    const std::vector<ChosenBlock> wrong = {{.first = 16}, {.first = second}};
    EXPECT_TRUE(refused(chosen_page(wrong, 64), held)) << second;
  }
}

}  // namespace
}  // namespace hcache::state
