#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "shared_link.h"

namespace hcache::sim {
namespace {

std::vector<double> pieces(size_t n, double bytes) { return std::vector<double>(n, bytes); }

TEST(SharedLink, OneStreamHasAllOfIt) {
  SharedLink link(100e6);
  const auto id = link.open(2, pieces(3, 50e6));
  EXPECT_EQ(link.arrived(id, 2.49), 0U);
  EXPECT_EQ(link.arrived(id, 2.5), 1U);
  EXPECT_DOUBLE_EQ(*link.next_arrival_s(2.75), 3.0);
  EXPECT_EQ(link.arrived(id, 10), 3U);
  EXPECT_EQ(link.next_arrival_s(10), std::nullopt);
  EXPECT_DOUBLE_EQ(link.busy_s(), 1.5);
}

TEST(SharedLink, StreamsShareEvenly) {
  SharedLink link(100e6);
  const auto a = link.open(0, pieces(2, 100e6));
  const auto b = link.open(1, pieces(1, 50e6));  // a has moved one piece
  // Both move at 50: b ends at 2, a has 50 of its second piece left then, alone.
  EXPECT_EQ(link.arrived(a, 1), 1U);
  EXPECT_DOUBLE_EQ(*link.next_arrival_s(1), 2.0);
  EXPECT_EQ(link.arrived(b, 2), 1U);
  EXPECT_DOUBLE_EQ(*link.next_arrival_s(2), 2.5);
  EXPECT_EQ(link.arrived(a, 2.5), 2U);
}

TEST(SharedLink, TheBackgroundMovesWhileNothingElseDoes) {
  SharedLink link(100e6);
  const auto ahead = link.open(0, pieces(1, 100e6), /*background=*/true);
  const auto a = link.open(0.5, pieces(1, 100e6));
  const auto b = link.open(0.5, pieces(1, 50e6));
  EXPECT_DOUBLE_EQ(*link.next_arrival_s(0.5), 1.5);  // two share
  EXPECT_EQ(link.arrived(b, 1.5), 1U);
  EXPECT_EQ(link.arrived(a, 2), 1U);
  EXPECT_EQ(link.arrived(ahead, 2), 0U);
  EXPECT_DOUBLE_EQ(*link.next_arrival_s(2), 2.5);  // what was left at 0.5
  EXPECT_EQ(link.arrived(ahead, 2.5), 1U);
}

TEST(SharedLink, ClosingGivesTheRestToOthers) {
  SharedLink link(100e6);
  const auto a = link.open(0, pieces(1, 100e6));
  const auto b = link.open(0, pieces(1, 100e6));
  link.close(a, 1);  // 50 of each have moved
  EXPECT_DOUBLE_EQ(*link.next_arrival_s(1), 1.5);
  EXPECT_EQ(link.arrived(b, 1.5), 1U);
  EXPECT_EQ(link.arrived(a, 1.5), 0U);
}

// Late on the clock, where seconds are coarse, waiting for the next arrival still brings it.
TEST(SharedLink, ArrivalsComeWhenTheyAreDue) {
  SharedLink link(27.6e9);
  double now_s = 123456.789;
  std::vector<SharedLink::Id> ids;
  for (const double bytes : {3.1e6, 4.7e6, 8.3e6})
    ids.push_back(link.open(now_s, pieces(40, bytes)));
  int waits = 0;
  while (const auto next = link.next_arrival_s(now_s)) {
    now_s = std::max(now_s, *next);
    ASSERT_LE(++waits, 3 * 40);
  }
  for (const auto id : ids) EXPECT_EQ(link.arrived(id, now_s), 40U);
}

TEST(SharedLink, EmptyPiecesArriveWithWhatIsBeforeThem) {
  SharedLink link(100e6);
  const auto id = link.open(1, std::vector<double>{0, 100e6, 0, 0, 50e6});
  EXPECT_EQ(link.arrived(id, 1), 1U);
  EXPECT_EQ(link.arrived(id, 2), 4U);
  const auto none = link.open(2, std::vector<double>{0, 0});
  EXPECT_EQ(link.arrived(none, 2), 2U);
  const auto nothing = link.open(2, {});
  EXPECT_EQ(link.arrived(nothing, 2), 0U);
  EXPECT_EQ(link.arrived(id, 2.5), 5U);
}

}  // namespace
}  // namespace hcache::sim
