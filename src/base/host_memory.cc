#include "base/host_memory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/magic.h>
#include <numa.h>
#include <numaif.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <fstream>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "base/env.h"
#include "base/log.h"
#include "base/units.h"
#include "posix_io.h"

namespace hcache {
namespace {

constexpr std::string_view kNode = "node:";

std::size_t round_to(std::size_t bytes, std::size_t granule) {
  return (bytes + granule - 1) / granule * granule;
}

Result<std::span<std::byte>> map_memory(std::size_t bytes, int fd, const std::string& what) {
  const int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
  void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (at == MAP_FAILED) {
    return errno_status("map", fmt::format("{} of {}", format_bytes(bytes), what), errno);
  }
  return std::span<std::byte>(static_cast<std::byte*>(at), bytes);
}

Status bind_to_node(std::span<std::byte> memory, const std::string& place) {
  int node = -1;
  const char* const end = place.data() + place.size();
  const auto [rest, error] = std::from_chars(place.data() + kNode.size(), end, node);
  if (error != std::errc() || rest != end || node < 0) {
    return invalid_argument(
        fmt::format("'{}' is no place for host memory: node: takes the number of a NUMA node "
                    "(numactl --hardware lists them)",
                    place));
  }
  if (::numa_available() < 0) {
    return invalid_argument(fmt::format("{}: this system has no NUMA policies", place));
  }
  // Nodes that have memory and that this process may use.
  if (node > ::numa_max_node() ||
      ::numa_bitmask_isbitset(::numa_all_nodes_ptr, static_cast<unsigned>(node)) == 0) {
    return invalid_argument(
        fmt::format("{}: no NUMA node with memory has this number here (numactl --hardware lists "
                    "them)",
                    place));
  }
  const long long node_bytes = ::numa_node_size64(node, nullptr);
  if (node_bytes >= 0 && static_cast<std::uint64_t>(node_bytes) < memory.size()) {
    return resource_exhausted(fmt::format("{} has {} of memory, {} are asked for", place,
                                          format_bytes(static_cast<std::uint64_t>(node_bytes)),
                                          format_bytes(memory.size())));
  }
  const std::unique_ptr<bitmask, void (*)(bitmask*)> nodes(::numa_allocate_nodemask(),
                                                           ::numa_bitmask_free);
  ::numa_bitmask_setbit(nodes.get(), static_cast<unsigned>(node));
  // The kernel reads one bit less than it is told.
  if (::mbind(memory.data(), memory.size(), MPOL_BIND, nodes->maskp, nodes->size + 1, 0) != 0) {
    return errno_status("bind memory to", place, errno);
  }
  return {};
}

// What the kernel says of a device: a number in a file.
std::optional<std::size_t> device_number(dev_t device, const char* name) {
  std::ifstream file(fmt::format("/sys/dev/char/{}:{}/{}", ::major(device), ::minor(device), name));
  std::size_t out = 0;
  if (!(file >> out)) return std::nullopt;
  return out;
}

Result<std::span<std::byte>> map_device(std::size_t bytes, dev_t device, const std::string& path) {
  const auto size = device_number(device, "size");
  if (!size) return invalid_argument(path + " is no DAX device");
  // 2 MiB where old kernels don't say.
  const std::size_t rounded = round_to(bytes, device_number(device, "align").value_or(2U << 20));
  if (rounded > *size) {
    return resource_exhausted(fmt::format("{} has {}, {} are asked for", path, format_bytes(*size),
                                          format_bytes(rounded)));
  }
  const UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd.ok()) return errno_status("open", path, errno);
  return map_memory(rounded, fd.get(), path);
}

Result<std::span<std::byte>> map_unnamed_file(std::size_t bytes, const std::string& dir) {
  struct statfs system {};
  if (::statfs(dir.c_str(), &system) != 0) return errno_status("stat", dir, errno);
  const UniqueFd fd(::open(dir.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (!fd.ok()) return errno_status("make an unnamed file in", dir, errno);
  // On hugetlbfs a block is a huge page.
  const std::size_t rounded =
      round_to(bytes, std::max<std::size_t>(static_cast<std::size_t>(system.f_bsize), 4096));
  // Without it, a full file system would be a signal in the middle of a copy.
  if (const int error = ::posix_fallocate(fd.get(), 0, static_cast<off_t>(rounded)); error != 0) {
    return errno_status("allocate", fmt::format("{} in {}", format_bytes(rounded), dir), error);
  }
  struct statx file {};
  const bool dax = ::statx(fd.get(), "", AT_EMPTY_PATH, 0, &file) == 0 &&
                   (file.stx_attributes & STATX_ATTR_DAX) != 0;
  const auto type = static_cast<std::uint32_t>(system.f_type);
  if (!dax && type != TMPFS_MAGIC && type != HUGETLBFS_MAGIC) {
    log::warn(
        "{} is neither a DAX file system nor tmpfs nor hugetlbfs: what host memory holds "
        "will be written to its disk",
        dir);
  }
  return map_memory(rounded, fd.get(), dir);
}

}  // namespace

Result<HostMemory> HostMemory::map(std::size_t bytes, const std::string& place) {
  if (bytes == 0) return HostMemory();
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  if (place.empty() || place.starts_with(kNode)) {
    HCACHE_ASSIGN_OR_RETURN(const auto memory,
                            map_memory(round_to(bytes, page), -1, "host memory"));
    HostMemory out(memory);
    if (!place.empty()) HCACHE_RETURN_IF_ERROR(bind_to_node(memory, place));
    prefer_huge_pages(memory);
    return out;
  }
  struct stat there {};
  if (::stat(place.c_str(), &there) != 0) return errno_status("stat", place, errno);
  if (S_ISCHR(there.st_mode)) {
    HCACHE_ASSIGN_OR_RETURN(const auto memory, map_device(bytes, there.st_rdev, place));
    return HostMemory(memory);
  }
  if (S_ISDIR(there.st_mode)) {
    HCACHE_ASSIGN_OR_RETURN(const auto memory, map_unnamed_file(bytes, place));
    return HostMemory(memory);
  }
  return invalid_argument(place + " is neither a DAX device nor a directory on a DAX file system");
}

HostMemory::HostMemory(HostMemory&& other) noexcept : memory_(std::exchange(other.memory_, {})) {}

HostMemory& HostMemory::operator=(HostMemory&& other) noexcept {
  std::swap(memory_, other.memory_);
  return *this;
}

HostMemory::~HostMemory() {
  if (!memory_.empty()) ::munmap(memory_.data(), memory_.size());
}

}  // namespace hcache
