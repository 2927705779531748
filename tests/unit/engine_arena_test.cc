// The arena's bookkeeping against a reference: every sequence's rows are tagged, the moves that a
// resize asks for are applied in the order given, and afterwards every extent must hold its rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "arena.h"

namespace hcache::engine {
namespace {

// Cells that carry (owner, row) tags, moved as the engine moves rows.
class TaggedArena {
 public:
  explicit TaggedArena(int64_t n_cells) : allocator_(n_cells), cells_(n_cells, kFree) {}

  void add(int32_t id) {
    allocator_.add(id);
    lengths_[id] = 0;
  }
  void remove(int32_t id) {
    allocator_.remove(id);
    lengths_.erase(id);
  }
  Status resize(int32_t id, int64_t length) {
    const int64_t free_before = allocator_.free_cells();
    const std::map<int32_t, int64_t> before = lengths_;
    Result<std::vector<ExtentAllocator::Move>> moves = allocator_.resize(id, length);
    if (!moves.ok()) {
      EXPECT_EQ(allocator_.free_cells(), free_before);
      return moves.status();
    }
    for (const ExtentAllocator::Move& move : *moves) {
      EXPECT_GT(move.n, 0);
      EXPECT_GE(std::min(move.from, move.to), 0);
      EXPECT_LE(std::max(move.from, move.to) + move.n, allocator_.n_cells());
      memmove(move);
      ++n_moves_;
    }
    lengths_[id] = length;
    const ExtentAllocator::Extent extent = allocator_.extent(id);
    for (int64_t row = before.at(id); row < length; ++row)
      cells_[extent.first + row] = tag(id, row);
    return {};
  }

  // Every extent has its length, lies where no other does, and holds its own rows in order.
  void check() const {
    ASSERT_TRUE(allocator_.check_integrity());
    int64_t used = 0;
    for (const auto& [id, length] : lengths_) {
      const ExtentAllocator::Extent extent = allocator_.extent(id);
      ASSERT_EQ(extent.length, length);
      ASSERT_TRUE(length == 0 || extent.first >= 0);
      ASSERT_LE(extent.first + length, allocator_.n_cells());
      for (int64_t row = 0; row < length; ++row) {
        ASSERT_EQ(cells_[extent.first + row], tag(id, row)) << "sequence " << id << " row " << row;
      }
      used += length;
    }
    ASSERT_EQ(allocator_.free_cells(), allocator_.n_cells() - used);
  }

  [[nodiscard]] const std::map<int32_t, int64_t>& lengths() const { return lengths_; }
  [[nodiscard]] ExtentAllocator& allocator() { return allocator_; }
  [[nodiscard]] int64_t n_moves() const { return n_moves_; }

 private:
  static constexpr int64_t kFree = -1;
  static int64_t tag(int32_t id, int64_t row) { return (static_cast<int64_t>(id) << 32) + row; }
  void memmove(const ExtentAllocator::Move& move) {
    const std::vector<int64_t> rows(cells_.begin() + move.from,
                                    cells_.begin() + move.from + move.n);
    std::copy(rows.begin(), rows.end(), cells_.begin() + move.to);
  }

  ExtentAllocator allocator_;
  std::vector<int64_t> cells_;
  std::map<int32_t, int64_t> lengths_;
  int64_t n_moves_ = 0;
};

struct Workload {
  const char* name;
  int64_t n_cells;
  int max_sequences;
  double big_steps;  // share of resizes that go anywhere rather than up by a few
  friend void PrintTo(const Workload& w, std::ostream* os) { *os << w.name; }
};

class ArenaWorkload : public ::testing::TestWithParam<Workload> {};

TEST_P(ArenaWorkload, RowsSurviveRandomResizesAndRemovals) {
  const Workload& w = GetParam();
  int64_t n_moves = 0;
  int64_t n_refused = 0;
  for (unsigned seed = 1; seed <= 40; ++seed) {
    std::mt19937 random(seed);
    TaggedArena arena(w.n_cells);
    int32_t next_id = 0;
    const auto chance = [&](double p) {
      return std::uniform_real_distribution<double>(0, 1)(random) < p;
    };
    for (int i = 0; i < 300; ++i) {
      const auto& lengths = arena.lengths();
      if (lengths.empty() || (static_cast<int>(lengths.size()) < w.max_sequences && chance(0.1))) {
        arena.add(next_id++);
      }
      auto it = arena.lengths().begin();
      std::advance(it, random() % arena.lengths().size());
      const auto [id, length] = *it;
      if (chance(0.03)) {
        arena.remove(id);
      } else {
        const int64_t target =
            chance(w.big_steps)
                ? std::uniform_int_distribution<int64_t>(0, w.n_cells)(random)
                : length + std::uniform_int_distribution<int64_t>(1, w.n_cells / 16 + 1)(random);
        const bool fits = target - length <= arena.allocator().free_cells();
        const Status status = arena.resize(id, target);
        EXPECT_EQ(status.ok(), fits);
        if (!fits) {
          EXPECT_EQ(status.code(), Code::kResourceExhausted);
          ++n_refused;
        }
      }
      ASSERT_NO_FATAL_FAILURE(arena.check()) << "seed " << seed << " operation " << i;
    }
    n_moves += arena.n_moves();
  }
  EXPECT_GT(n_moves, 100) << "the workload must make extents move";
  EXPECT_GT(n_refused, 10) << "the workload must fill the arena";
}

INSTANTIATE_TEST_SUITE_P(All, ArenaWorkload,
                         ::testing::Values(Workload{"Small", 17, 4, 0.3},
                                           Workload{"Growing", 512, 8, 0.02},
                                           Workload{"Mixed", 300, 6, 0.15},
                                           Workload{"Many", 1000, 40, 0.1},
                                           Workload{"Tiny", 5, 3, 0.5}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(Arena, OneSequenceGrowsToTheLastCellOfASharedArena) {
  constexpr int64_t kCells = 240;
  TaggedArena arena(kCells);
  for (int32_t id = 0; id < 6; ++id) {
    arena.add(id);
    ASSERT_TRUE(arena.resize(id, 20).ok());
  }
  // Row by row beside five others, then cell by cell as they leave one by one.
  int64_t length = 20;
  for (int32_t gone = 5; gone >= 0; --gone) {
    const int64_t limit = kCells - 20 * gone;
    for (; length < limit; ++length) {
      ASSERT_TRUE(arena.resize(2, length + 1).ok());
      ASSERT_NO_FATAL_FAILURE(arena.check());
    }
    EXPECT_EQ(arena.allocator().free_cells(), 0);
    EXPECT_EQ(arena.resize(2, length + 1).code(), Code::kResourceExhausted);
    ASSERT_NO_FATAL_FAILURE(arena.check());
    const int32_t leaver = gone == 2 ? 0 : gone;
    if (gone > 0) arena.remove(leaver);
  }
  EXPECT_EQ(length, kCells);
}

TEST(Arena, AShrunkenSequenceStaysAndAnEmptyOneStartsAnew) {
  TaggedArena arena(100);
  arena.add(1);
  arena.add(2);
  ASSERT_TRUE(arena.resize(1, 40).ok());
  ASSERT_TRUE(arena.resize(2, 40).ok());
  const int64_t first = arena.allocator().extent(1).first;
  ASSERT_TRUE(arena.resize(1, 10).ok());
  EXPECT_EQ(arena.allocator().extent(1).first, first);
  ASSERT_TRUE(arena.resize(1, 0).ok());
  EXPECT_EQ(arena.allocator().free_cells(), 60);
  ASSERT_TRUE(arena.resize(2, 100).ok());
  ASSERT_NO_FATAL_FAILURE(arena.check());
  EXPECT_EQ(arena.resize(1, 1).code(), Code::kResourceExhausted);
  ASSERT_TRUE(arena.resize(2, 99).ok());
  ASSERT_TRUE(arena.resize(1, 1).ok());
  ASSERT_NO_FATAL_FAILURE(arena.check());
}

// Decoding sequences must not push each other around: the room that is left is shared.
TEST(Arena, SequencesThatGrowTogetherMoveRarely) {
  TaggedArena arena(4096);
  for (int32_t id = 0; id < 4; ++id) {
    arena.add(id);
    ASSERT_TRUE(arena.resize(id, 100).ok());
  }
  for (int64_t length = 101; length <= 1024; ++length) {
    for (int32_t id = 0; id < 4; ++id) ASSERT_TRUE(arena.resize(id, length).ok());
  }
  ASSERT_NO_FATAL_FAILURE(arena.check());
  EXPECT_LT(arena.n_moves(), 60);
}

}  // namespace
}  // namespace hcache::engine
