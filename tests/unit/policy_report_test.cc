#include <gtest/gtest.h>

#include "policy/plan_report.h"
#include "policy_testing.h"

namespace hcache::policy {
namespace {

TEST(Report, ComparesModesInTheOrderGiven) {
  RestoreRequest request;
  request.available = Availability::uniform(1024, 32, kHasBoth);
  request.new_tokens = 50;
  auto rows = compare_modes(testing::multi_head(32, 0.7), request,
                            {Mode::kPlan, Mode::kHidden, Mode::kKv, Mode::kRecompute})
                  .value();
  ASSERT_EQ(rows.size(), 4u);
  EXPECT_EQ(rows[0].method, "plan");
  EXPECT_EQ(rows[3].method, "recompute");
  EXPECT_EQ(rows[3].prefill_tokens, 1074);
  const std::string table = format_table(rows);
  EXPECT_NE(table.find("H:32"), std::string::npos);
  EXPECT_NE(table.find("RE:32"), std::string::npos);
  // Every line starts its schedule in the same column.
  EXPECT_EQ(table.find("plan       "), table.find('\n') + 1);
}

TEST(Report, TimelineGroupsLayersByMethod) {
  RestoreCosts costs = testing::multi_head(32, 1.5);
  RestoreRequest request;
  request.available = Availability::uniform(1024, 32, kHasBoth);
  Plan plan = plan_restore(costs, request).value();
  const std::string text = format_timeline(plan, simulate(costs, plan).value());
  EXPECT_NE(text.find("0-24"), std::string::npos) << text;
  EXPECT_NE(text.find("25-31"), std::string::npos) << text;
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 3);

  request.mode = Mode::kRecompute;
  plan = plan_restore(costs, request).value();
  EXPECT_NE(format_timeline(plan, simulate(costs, plan).value()).find("prefill"),
            std::string::npos);
}

TEST(Report, SavePlanSaysWhatItSaves) {
  SaveRequest request;
  request.mode = SaveMode::kHidden;
  const std::string text =
      format_save_plan(plan_save(testing::multi_head(32, 1), request, nullptr).value());
  EXPECT_NE(text.find("save hidden: H:32"), std::string::npos) << text;
  EXPECT_NE(text.find("0.50 of the KV cache"), std::string::npos) << text;
}

TEST(Report, HardwareShowsThePaperBesideTheSearch) {
  HardwareSetup setup;
  setup.device = find_device("a100").value();
  setup.model = find_model("llama2-7b").value();
  setup.n_ssd = 4;
  const std::string text = format_hardware(setup, plan_for_hardware(setup).value());
  EXPECT_NE(text.find("31H+1KV"), std::string::npos) << text;
  EXPECT_NE(text.find("closed form (paper)"), std::string::npos) << text;
  EXPECT_NE(text.find("exact search"), std::string::npos) << text;
  setup.model = find_model("llama2-70b").value();
  EXPECT_NE(format_hardware(setup, plan_for_hardware(setup).value()).find("no smaller"),
            std::string::npos);
}

}  // namespace
}  // namespace hcache::policy
