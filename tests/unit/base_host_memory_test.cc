// Where host memory lies.

#include <gtest/gtest.h>
#include <numa.h>
#include <numaif.h>
#include <sys/statvfs.h>

#include <cstddef>
#include <filesystem>
#include <string>
#include <utility>

#include "base/host_memory.h"
#include "base_testing.h"

namespace hcache {
namespace {

constexpr std::size_t kBytes = 5 << 20;

void write_and_read(const HostMemory& memory) {
  ASSERT_GE(memory.span().size(), kBytes);
  for (std::size_t i = 0; i < kBytes; i += 4096) memory.span()[i] = std::byte(i / 4096 % 251);
  for (std::size_t i = 0; i < kBytes; i += 4096) {
    ASSERT_EQ(memory.span()[i], std::byte(i / 4096 % 251));
  }
}

TEST(HostMemory, OfTheSystem) {
  auto memory = HostMemory::map(kBytes, "");
  ASSERT_OK(memory);
  write_and_read(*memory);
  HostMemory moved = *std::move(memory);
  write_and_read(moved);
  EXPECT_TRUE(HostMemory::map(0, "")->span().empty());
}

TEST(HostMemory, OnANode) {
  if (numa_available() < 0) GTEST_SKIP() << "no NUMA policies here";
  for (int node = 0; node <= numa_max_node(); ++node) {
    if (numa_bitmask_isbitset(numa_all_nodes_ptr, static_cast<unsigned>(node)) == 0) continue;
    auto memory = HostMemory::map(kBytes, "node:" + std::to_string(node));
    ASSERT_OK(memory);
    write_and_read(*memory);
    int lies_on = -1;
    ASSERT_EQ(get_mempolicy(&lies_on, nullptr, 0, memory->span().data(), MPOL_F_NODE | MPOL_F_ADDR),
              0);
    EXPECT_EQ(lies_on, node);
    int mode = -1;
    ASSERT_EQ(get_mempolicy(&mode, nullptr, 0, memory->span().data(), MPOL_F_ADDR), 0);
    EXPECT_EQ(mode, MPOL_BIND);
    const auto node_bytes = static_cast<std::size_t>(numa_node_size64(node, nullptr));
    const auto larger = HostMemory::map(node_bytes + kBytes, "node:" + std::to_string(node));
    EXPECT_EQ(larger.code(), Code::kResourceExhausted);
  }
  const std::string missing = "node:" + std::to_string(numa_max_node() + 1);
  const auto none = HostMemory::map(kBytes, missing);
  EXPECT_EQ(none.code(), Code::kInvalidArgument);
  EXPECT_NE(none.status().message().find(missing), std::string::npos);
  for (const char* wrong : {"node:", "node:x", "node:-1", "node:0x", "node: 0"}) {
    EXPECT_EQ(HostMemory::map(kBytes, wrong).code(), Code::kInvalidArgument) << wrong;
  }
}

TEST(HostMemory, InAnUnnamedFile) {
  const testing::TempDir dir;
  auto memory = HostMemory::map(kBytes, dir.path());
  ASSERT_OK(memory);
  write_and_read(*memory);
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
  struct statvfs system {};
  ASSERT_EQ(statvfs(dir.path().c_str(), &system), 0);
  const auto all = static_cast<std::size_t>(system.f_blocks) * system.f_frsize;
  EXPECT_EQ(HostMemory::map(all + kBytes, dir.path()).code(), Code::kResourceExhausted);
}

TEST(HostMemory, NotFromWhatHasNoMemory) {
  const testing::TempDir dir;
  EXPECT_EQ(HostMemory::map(kBytes, dir.path() + "/none").code(), Code::kNotFound);
  const auto device = HostMemory::map(kBytes, "/dev/null");
  EXPECT_EQ(device.code(), Code::kInvalidArgument);
  EXPECT_EQ(device.status().message(), "/dev/null is no DAX device");
  EXPECT_EQ(HostMemory::map(kBytes, "/proc/self/exe").code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace hcache
