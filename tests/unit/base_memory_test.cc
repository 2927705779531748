// Free memory as a made-up /proc and /sys tell it.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "base/memory.h"

namespace hcache {
namespace {

constexpr uint64_t kMiB = 1 << 20;

class FreeMemory : public ::testing::Test {
 protected:
  FreeMemory() {
    write("/proc/meminfo", "MemTotal:       8388608 kB\nMemAvailable:   4194304 kB\n");
  }
  ~FreeMemory() override { std::filesystem::remove_all(root_); }

  void write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }
  uint64_t free_mib() {
    const auto bytes = free_memory(Env::real(), root_);
    EXPECT_TRUE(bytes.ok()) << bytes.status().to_string();
    return bytes.value_or(0) / kMiB;
  }

  const std::string root_ =
      ::testing::TempDir() + "memory-" + std::to_string(Env::real().random_u64());
};

TEST_F(FreeMemory, WithoutGroupsItIsTheMachines) {
  EXPECT_EQ(free_mib(), 4096U);
  write("/proc/self/cgroup", "0::/user.slice\n");  // a group without a limit
  write("/sys/fs/cgroup/user.slice/memory.max", "max\n");
  EXPECT_EQ(free_mib(), 4096U);
}

TEST_F(FreeMemory, TheSecondVersionsLimitsCountUpToTheTop) {
  write("/proc/self/cgroup", "0::/a/b\n");
  write("/sys/fs/cgroup/a/b/memory.max", "max\n");
  write("/sys/fs/cgroup/a/memory.max", std::to_string(1024 * kMiB));
  write("/sys/fs/cgroup/a/memory.current", std::to_string(600 * kMiB));
  EXPECT_EQ(free_mib(), 424U);
  write("/sys/fs/cgroup/a/memory.stat",
        "anon 1\ninactive_file " + std::to_string(100 * kMiB) + "\nactive_file 5\n");
  EXPECT_EQ(free_mib(), 524U);
  write("/sys/fs/cgroup/a/b/memory.high", std::to_string(64 * kMiB));
  EXPECT_EQ(free_mib(), 64U);
}

TEST_F(FreeMemory, TheFirstVersionsLimitsCountToo) {
  write("/proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/jobs/one\n0::/\n");
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  write("/sys/fs/cgroup/memory/jobs/one/memory.limit_in_bytes", std::to_string(512 * kMiB));
  write("/sys/fs/cgroup/memory/jobs/one/memory.usage_in_bytes", std::to_string(400 * kMiB));
  write("/sys/fs/cgroup/memory/jobs/one/memory.stat",
        "inactive_file 1\ntotal_inactive_file " + std::to_string(144 * kMiB) + "\n");
  EXPECT_EQ(free_mib(), 256U);
}

TEST_F(FreeMemory, AContainerSeesItsOwnGroupAtTheMount) {
  write("/proc/self/cgroup", "4:memory:/docker/0123\n");
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", std::to_string(100 * kMiB));
  write("/sys/fs/cgroup/memory/memory.usage_in_bytes", std::to_string(130 * kMiB));
  EXPECT_EQ(free_mib(), 0U);
}

TEST(FreeMemoryHere, TheRealSystemSays) {
  const auto bytes = free_memory(Env::real());
  ASSERT_TRUE(bytes.ok()) << bytes.status().to_string();
}

}  // namespace
}  // namespace hcache
