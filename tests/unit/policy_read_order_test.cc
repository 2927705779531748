// Several devices' parts of a restore are read in turns.
#include <gtest/gtest.h>

#include <vector>

#include "policy/read_order.h"

namespace hcache::policy {
namespace {

// Reads everything in pieces of one size per lane.
std::vector<int32_t> order_of(const std::vector<ReadOrder::Lane>& lanes) {
  ReadOrder order(lanes);
  std::vector<int32_t> taken;
  for (int32_t lane = order.next(); lane >= 0; lane = order.next()) {
    const ReadOrder::Lane& all = lanes[static_cast<size_t>(lane)];
    order.advance(lane, all.bytes / all.pieces);
    taken.push_back(lane);
  }
  return taken;
}

TEST(ReadOrder, OneLaneIsReadAsItStands) {
  EXPECT_EQ(order_of({{.pieces = 3, .bytes = 30}}), (std::vector<int32_t>{0, 0, 0}));
  EXPECT_TRUE(order_of({}).empty());
  EXPECT_TRUE(order_of({{.pieces = 0, .bytes = 0}}).empty());
}

TEST(ReadOrder, EqualLanesTakeTurns) {
  EXPECT_EQ(order_of({{.pieces = 3, .bytes = 30}, {.pieces = 3, .bytes = 30}}),
            (std::vector<int32_t>{0, 1, 0, 1, 0, 1}));
}

// Whoever has more to read gets more of the link, so that all are through at the same time.
TEST(ReadOrder, LanesAreReadAtThePaceOfTheirBytes) {
  EXPECT_EQ(order_of({{.pieces = 6, .bytes = 60}, {.pieces = 2, .bytes = 20}}),
            (std::vector<int32_t>{0, 1, 0, 0, 0, 1, 0, 0}));
  // The same number of pieces, but three times the bytes: the same pace.
  EXPECT_EQ(order_of({{.pieces = 2, .bytes = 60}, {.pieces = 2, .bytes = 20}}),
            (std::vector<int32_t>{0, 1, 0, 1}));
}

TEST(ReadOrder, PiecesOfNoBytesAreNotForgotten) {
  EXPECT_EQ(order_of({{.pieces = 1, .bytes = 10}, {.pieces = 2, .bytes = 0}}),
            (std::vector<int32_t>{0, 1, 1}));
}

}  // namespace
}  // namespace hcache::policy
