#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "policy/hardware_plan.h"

namespace hcache::policy {
namespace {

HardwareSetup setup_of(std::string_view device, std::string_view model, int32_t gpus,
                       int32_t ssds) {
  HardwareSetup setup;
  setup.device = find_device(device).value();
  setup.model = find_model(model).value();
  setup.n_gpu = gpus;
  setup.n_ssd = ssds;
  return setup;
}

HardwarePlan plan_of(const HardwareSetup& setup) { return plan_for_hardware(setup).value(); }

int64_t layers_by(const Plan& plan, Method method) {
  const std::vector<Method>& layers = plan.runs.at(0).layers;
  return std::count(layers.begin(), layers.end(), method);
}

TEST(PaperCosts, AreTheFormulasOfSection32) {
  HardwareSetup setup = setup_of("a100", "opt-30b", 4, 4);
  const double n = 1024;
  const double d = 7168;
  const double flops = 4 * 312e12 * 0.70;
  PaperCosts c = plan_of(setup).layer;
  EXPECT_NEAR(c.io_hidden, n * d * 2 / 27.6e9, 1e-12);
  EXPECT_NEAR(c.io_kv, 2 * c.io_hidden, 1e-12);
  EXPECT_NEAR(c.c_hidden, 4 * n * d * d / flops, 1e-12);
  EXPECT_NEAR(c.c_token, (24 * n * d * d + n * n * d) / flops, 1e-12);
  EXPECT_NEAR(c.c_token / c.c_hidden, 6 + n / (4 * d), 1e-9);
}

TEST(ClosedForm, ReproducesTable3) {
  EXPECT_EQ(plan_of(setup_of("a100", "llama2-7b", 1, 4)).paper.schedule, "31H+1KV");
  EXPECT_EQ(plan_of(setup_of("a100", "llama2-13b", 1, 4)).paper.schedule, "36H+4KV");
  EXPECT_EQ(plan_of(setup_of("a100", "opt-30b", 4, 4)).paper.schedule, "40H+8RE");
}

TEST(ClosedForm, Section632IsOneLayerOff) {
  // 13B, one SSD, 1,024 tokens: the paper has 31H+9RE; with Table 3's efficiency it is 30 + 10.
  EXPECT_EQ(plan_of(setup_of("a100", "llama2-13b", 1, 1)).paper.schedule, "30H+10RE");
  HardwareSetup slower = setup_of("a100", "llama2-13b", 1, 1);
  slower.model.gemm_efficiency = 0.65;
  EXPECT_EQ(plan_of(slower).paper.schedule, "31H+9RE");
}

TEST(ClosedForm, StorageRatiosFollowFromTheSchedules) {
  auto ratio = [](const HardwarePlan& p) {
    return static_cast<double>(p.kv_bytes_per_token) / static_cast<double>(p.paper_bytes_per_token);
  };
  EXPECT_NEAR(ratio(plan_of(setup_of("a100", "llama2-7b", 1, 4))), 256.0 / 132, 0.01);
  EXPECT_NEAR(ratio(plan_of(setup_of("a100", "llama2-13b", 1, 4))), 800.0 / 440, 0.01);
  EXPECT_NEAR(ratio(plan_of(setup_of("a100", "opt-30b", 4, 4))), 672.0 / 280, 0.01);
}

TEST(ClosedForm, SolvesItsOwnMinMax) {
  // No other split is faster by more than what one layer weighs (their ceiling is not the optimum).
  for (double compute = 0.05; compute < 8; compute *= 1.3) {
    PaperCosts c{1.0, 2.0, compute, 6.2 * compute};
    ClosedForm form = closed_form(c, 40);
    double best = 1e9;
    for (int h = 0; h <= 40; ++h) {
      const int other = 40 - h;
      best = std::min(best, compute > 1 ? std::max(h * compute, h * 1.0 + other * 2.0)
                                        : std::max(h * compute + other * c.c_token, h * 1.0));
    }
    EXPECT_LE(form.makespan_s, best + std::max(1.0, compute)) << compute;
    EXPECT_GE(form.makespan_s, best - 1e-9) << compute;
    EXPECT_EQ(form.hidden + form.kv + form.recompute, 40);
  }
}

TEST(ClosedForm, BalancedHardwareNeedsNoHelp) {
  EXPECT_EQ(closed_form({1, 2, 1, 6}, 32).schedule, "32H");
}

TEST(ClosedForm, GroupedQueryModelsBalanceRecomputationAndKv) {
  ClosedForm form = closed_form({4, 2, 1, 6}, 32);
  EXPECT_EQ(form.hidden, 0);
  EXPECT_EQ(form.kv, 24);
  EXPECT_EQ(form.recompute, 8);
}

TEST(ExactSearch, IsWithinOneLayerOfTheClosedForms) {
  for (std::string_view device : {"a100", "a30", "rtx4090", "l20", "h800"}) {
    for (std::string_view model : {"llama2-7b", "llama2-13b", "opt-30b"}) {
      for (int32_t ssds : {0, 1, 2, 4}) {
        for (int64_t history : {1024, 4096, 16384}) {
          const int32_t gpus = model == "opt-30b" ? 4 : 1;
          HardwareSetup setup = setup_of(device, model, gpus, ssds);
          setup.history = history;
          HardwarePlan plan = plan_of(setup);
          const std::string what =
              fmt::format("{} {}, {} SSD, history {}: {} against {}", device, model, ssds, history,
                          plan.exact.schedule, plan.paper.schedule);
          // What the paper chooses from: H with RE where the link is slow, else H with KV.
          const bool io_bound = plan.layer.io_hidden >= plan.layer.c_hidden;
          RestoreRequest request;
          request.available =
              Availability::uniform(history, setup.model.n_layer, io_bound ? kHasHidden : kHasBoth);
          Plan two = plan_restore(hardware_costs(setup).value(), request).value();
          EXPECT_NEAR(layers_by(two, Method::kHidden), plan.paper.hidden, 1) << what;
          // A mix of all three uses what integer layers leave over, and is never slower.
          EXPECT_NEAR(layers_by(plan.exact, Method::kRecompute), plan.paper.recompute, 1) << what;
          EXPECT_NEAR(layers_by(plan.exact, Method::kHidden), plan.paper.hidden, 2) << what;
          EXPECT_LE(plan.exact.predicted.makespan_s, two.predicted.makespan_s * (1 + 1e-9)) << what;
          // Fill and drain are at most a layer of either resource.
          EXPECT_LE(plan.exact.predicted.makespan_s,
                    plan.paper.makespan_s + std::max(plan.layer.c_hidden, plan.layer.io_kv))
              << what;
        }
      }
    }
  }
}

TEST(ExactSearch, IsWithinOneLayerOfTable3) {
  struct Row {
    std::string_view model;
    int32_t gpus;
    int32_t hidden;
    int32_t kv;
    int32_t recompute;
  };
  for (const Row& row : {Row{"llama2-7b", 1, 31, 1, 0}, Row{"llama2-13b", 1, 36, 4, 0},
                         Row{"opt-30b", 4, 40, 0, 8}}) {
    const Plan exact = plan_of(setup_of("a100", row.model, row.gpus, 4)).exact;
    EXPECT_NEAR(layers_by(exact, Method::kHidden), row.hidden, 1) << exact.schedule;
    EXPECT_NEAR(layers_by(exact, Method::kKv), row.kv, 1) << exact.schedule;
    EXPECT_NEAR(layers_by(exact, Method::kRecompute), row.recompute, 1) << exact.schedule;
  }
}

TEST(ExactSearch, BeatsEveryBaselineOnThePapersMachines) {
  for (const DeviceSpec& device : device_table()) {
    for (const ModelShape& model : model_table()) {
      HardwareSetup setup;
      setup.device = device;
      setup.model = model;
      HardwarePlan plan = plan_of(setup);
      for (const ModePrediction& m : plan.modes) {
        // Tokens can be divided more finely than layers, and GEMMs of odd sizes cost nothing extra
        // in these models.
        const double slack = m.mode == Mode::kTokenPartition ? 0.02 : 1e-9;
        EXPECT_LE(plan.exact.predicted.makespan_s, m.plan.predicted.makespan_s * (1 + slack))
            << device.name << " " << model.name << " " << mode_name(m.mode);
      }
    }
  }
}

TEST(ExactSearch, SpeedupsLieWhereThePaperMeasuredThem) {
  // §6.2: 1.33-2.66 times faster than KV offload, 2.3-9.05 than recomputation.
  for (std::string_view model : {"llama2-7b", "llama2-13b"}) {
    for (int32_t ssds : {1, 2, 4}) {
      HardwarePlan plan = plan_of(setup_of("a100", model, 1, ssds));
      const double kv = plan.modes[1].plan.predicted.makespan_s / plan.exact.predicted.makespan_s;
      const double re = plan.modes[2].plan.predicted.makespan_s / plan.exact.predicted.makespan_s;
      EXPECT_GT(kv, 1.33) << model << ssds;
      EXPECT_LT(kv, 2.8) << model << ssds;
      EXPECT_GT(re, 2.2) << model << ssds;
      EXPECT_LT(re, 9.1) << model << ssds;
    }
  }
}

TEST(Balance, IsTheBandwidthOfSection613) {
  // About 24 and 21 GB/s; 30B needs 61 by these formulas where the paper says 37.
  EXPECT_NEAR(plan_of(setup_of("a100", "llama2-7b", 1, 4)).balanced_bytes_per_s, 24e9, 1.5e9);
  EXPECT_NEAR(plan_of(setup_of("a100", "llama2-13b", 1, 4)).balanced_bytes_per_s, 21e9, 1.5e9);
  EXPECT_NEAR(plan_of(setup_of("a100", "opt-30b", 4, 4)).balanced_bytes_per_s, 61e9, 1e9);
  EXPECT_EQ(plan_of(setup_of("a100", "llama2-70b", 1, 4)).balanced_bytes_per_s, 0);
}

TEST(Link, IsBoundedByDisksAndByPcie) {
  EXPECT_NEAR(plan_of(setup_of("a100", "llama2-7b", 1, 1)).link_bytes_per_s, 6.9e9, 1);
  EXPECT_NEAR(plan_of(setup_of("a100", "llama2-7b", 1, 8)).link_bytes_per_s, 32e9, 1);
  EXPECT_NEAR(plan_of(setup_of("h800", "llama2-7b", 2, 0)).link_bytes_per_s, 128e9, 1);
}

TEST(Tables, AreSound) {
  EXPECT_EQ(device_table().size(), 6u);
  for (const ModelShape& m : model_table()) {
    EXPECT_GE(m.n_layer, 1) << m.name;
    EXPECT_EQ(m.n_head % m.n_head_kv, 0) << m.name;
    EXPECT_GT(m.gemm_efficiency, 0.5) << m.name;
    EXPECT_LT(m.gemm_efficiency, 1) << m.name;
    EXPECT_EQ(find_model(m.name).value().n_layer, m.n_layer);
  }
  EXPECT_EQ(find_device("tpu").code(), Code::kNotFound);
  EXPECT_NE(find_model("gpt").status().message().find("llama2-7b"), std::string::npos);
}

TEST(PlanForHardware, RejectsBadSetups) {
  HardwareSetup setup = setup_of("a100", "llama2-7b", 1, 4);
  setup.n_gpu = 0;
  EXPECT_EQ(plan_for_hardware(setup).code(), Code::kInvalidArgument);
  setup = setup_of("a100", "llama2-7b", 1, 4);
  setup.history = 0;
  EXPECT_EQ(plan_for_hardware(setup).code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace hcache::policy
