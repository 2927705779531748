#include <gtest/gtest.h>

#include "base/cpu_target.h"

namespace hcache {
namespace {

TEST(CpuTarget, AcceptsTheMachineThatBuiltIt) {
  EXPECT_TRUE(check_cpu_target().ok()) << check_cpu_target().to_string();
  EXPECT_FALSE(cpu_target().empty());
}

TEST(CpuTarget, NamesEveryMissingFlagAndTheRemedy) {
  const Status status = check_cpu_flags("x86-64-v3", "avx avx2 fma", "sse4_2 avx avx2x");
  EXPECT_EQ(status.code(), Code::kUnimplemented);
  EXPECT_NE(status.message().find("x86-64-v3"), std::string::npos);
  EXPECT_NE(status.message().find("lacks avx2, fma;"), std::string::npos);
  EXPECT_NE(status.message().find("make"), std::string::npos);
}

TEST(CpuTarget, LetsTheProgramRunWhereNothingIsKnown) {
  EXPECT_TRUE(check_cpu_flags("x86-64-v3", "avx2", "").ok());
  EXPECT_TRUE(check_cpu_flags("installed", "", "sse2").ok());
}

}  // namespace
}  // namespace hcache
