#include <gtest/gtest.h>

#include <array>
#include <span>

#include "base/cpu_target.h"

namespace hcache {
namespace {

constexpr std::array kNative{CpuTarget{"x86-64-v3", "avx avx2 fma"}};
constexpr std::array kPortable{CpuTarget{"x86-64-v4", "sse4_2 avx2 avx512f"},
                               CpuTarget{"x86-64-v3", "sse4_2 avx2"},
                               CpuTarget{"x86-64-v2", "sse4_2"}};

TEST(CpuTarget, AcceptsTheMachineThatBuiltIt) {
  EXPECT_TRUE(check_cpu_target().ok()) << check_cpu_target().to_string();
  EXPECT_EQ(cpu_targets().size(), 1U);
  EXPECT_EQ(cpu_target(), cpu_targets().front().name);
  EXPECT_FALSE(cpu_target().empty());
}

TEST(CpuTarget, NamesEveryMissingFlagAndTheRemedy) {
  const Status status = choose_cpu_target(kNative, "sse4_2 avx avx2x").status();
  EXPECT_EQ(status.code(), Code::kUnimplemented);
  EXPECT_NE(status.message().find("x86-64-v3"), std::string::npos);
  EXPECT_NE(status.message().find("lacks avx2, fma;"), std::string::npos);
  EXPECT_NE(status.message().find("make"), std::string::npos);
}

TEST(CpuTarget, LetsTheProgramRunWhereNothingIsKnown) {
  EXPECT_EQ(choose_cpu_target(kNative, "").value(), "x86-64-v3");
  EXPECT_EQ(choose_cpu_target(kPortable, "").value(), "x86-64-v2");
  constexpr std::array kInstalled{CpuTarget{"installed", ""}};
  EXPECT_EQ(choose_cpu_target(kInstalled, "sse2").value(), "installed");
}

TEST(CpuTarget, ChoosesTheBestThatTheCpuCanRun) {
  EXPECT_EQ(choose_cpu_target(kPortable, "avx512f sse4_2 avx2 fma").value(), "x86-64-v4");
  EXPECT_EQ(choose_cpu_target(kPortable, "avx2 sse4_2").value(), "x86-64-v3");
  EXPECT_EQ(choose_cpu_target(kPortable, "avx512f sse4_2").value(), "x86-64-v2");
}

TEST(CpuTarget, NamesWhatTheLeastTargetMisses) {
  const Status status = choose_cpu_target(kPortable, "sse2 avx2").status();
  EXPECT_EQ(status.code(), Code::kUnimplemented);
  EXPECT_NE(status.message().find("lacks sse4_2"), std::string::npos);
  EXPECT_NE(status.message().find("x86-64-v2"), std::string::npos);
}

}  // namespace
}  // namespace hcache
