#include <gmock/gmock.h>

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "policy/wanted.h"

namespace hcache::policy {
namespace {

using Ids = std::vector<uint64_t>;

TEST(Wanted, TheFirstInTheQueueCounts) {
  Wanted wanted;
  EXPECT_EQ(wanted.add(20, {1, 2}), (Ids{1, 2, 1, 2}));
  wanted.add(10, {2, 3});
  EXPECT_EQ(wanted.demand(1).first, 20U);
  EXPECT_EQ(wanted.demand(2).first, 10U);
  EXPECT_EQ(wanted.demand(4), Demand());
  EXPECT_THAT(wanted.remove(10), ::testing::Not(::testing::IsEmpty()));
  EXPECT_EQ(wanted.demand(2).first, 20U);
  EXPECT_EQ(wanted.demand(3), Demand());
  EXPECT_TRUE(wanted.remove(10).empty());
  EXPECT_TRUE(wanted.dispatch(10).empty());
}

// CaR §III-B.3: 1 in the window, 2 while it runs, 0 when it is done.
TEST(Wanted, ScoresRiseInTheWindowAndWhenDispatched) {
  Wanted wanted;
  for (uint64_t ticket = 1; ticket <= Wanted::kWindow + 1; ++ticket) wanted.add(ticket, {ticket});
  const uint64_t behind = Wanted::kWindow + 1;
  EXPECT_EQ(wanted.demand(1).score, 1);
  EXPECT_EQ(wanted.demand(behind).score, 0);
  const Ids changed = wanted.dispatch(1);
  EXPECT_NE(std::find(changed.begin(), changed.end(), behind), changed.end());
  EXPECT_EQ(wanted.demand(1), (Demand{.first = {}, .score = 2}));
  EXPECT_EQ(wanted.demand(behind).score, 1);
  wanted.add(0, {2});  // one that overtakes all
  EXPECT_EQ(wanted.demand(behind).score, 0);
  EXPECT_EQ(wanted.demand(2), (Demand{.first = 0, .score = 2}));
  wanted.remove(1);
  EXPECT_EQ(wanted.demand(1), Demand());
}

// Any course of events: demands are what counting all requests anew gives, and whoever listens to
// the changes knows them.
TEST(Wanted, IsWhatCountingGives) {
  std::mt19937_64 random(1);
  const auto below = [&](uint64_t n) { return random() % n; };
  for (int round = 0; round < 20; ++round) {
    Wanted wanted;
    std::map<uint64_t, Ids> waiting;
    std::map<uint64_t, Ids> running;
    std::map<uint64_t, Demand> told;
    for (int event = 0; event < 200; ++event) {
      Ids changed;
      const uint64_t kind = below(4);
      if (kind < 2) {
        const uint64_t ticket = below(1000) * 2;
        if (waiting.contains(ticket) || running.contains(ticket)) continue;
        Ids ids;
        for (uint64_t n = below(4); n-- > 0;) ids.push_back(below(12));
        waiting[ticket] = ids;
        changed = wanted.add(ticket, ids);
      } else if (kind == 2 && !waiting.empty()) {
        const auto one = std::next(waiting.begin(), static_cast<long>(below(waiting.size())));
        changed = wanted.dispatch(one->first);
        running.insert(waiting.extract(one));
      } else {
        auto& from = below(2) == 0 ? waiting : running;
        if (from.empty()) continue;
        const auto one = std::next(from.begin(), static_cast<long>(below(from.size())));
        changed = wanted.remove(one->first);
        from.erase(one);
      }
      for (const uint64_t id : changed) told[id] = wanted.demand(id);
      std::map<uint64_t, Demand> counted;
      size_t rank = 0;
      for (const auto& [ticket, ids] : waiting) {
        for (const uint64_t id : ids) {
          Demand& demand = counted[id];
          if (!demand.first) demand.first = ticket;
          if (rank < Wanted::kWindow) ++demand.score;
        }
        ++rank;
      }
      for (const auto& [ticket, ids] : running) {
        for (const uint64_t id : ids) counted[id].score += 2;
      }
      for (uint64_t id = 0; id < 12; ++id) {
        ASSERT_EQ(wanted.demand(id), counted[id]) << "object " << id << " after event " << event;
        ASSERT_EQ(told[id], counted[id]) << "object " << id << " after event " << event;
      }
    }
  }
}

}  // namespace
}  // namespace hcache::policy
