// A large piece of host memory, and where it lies: wherever the system puts it, on one NUMA node,
// or in a file that a memory device backs.
//
// Threading: any thread; who writes which byte is its users' agreement.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "base/status.h"

namespace hcache {

class HostMemory {
 public:
  HostMemory() = default;
  // At least `bytes` at `place`, which is one of
  //   ""       the system's own memory, taken as it is touched
  //   node:N   the same, on NUMA node N alone; a CXL expander is a node without processors
  //   a path   a DAX device (/dev/dax0.0), or a directory on a DAX file system, tmpfs or hugetlbfs,
  //            where an unnamed file is made; all of it is taken at once
  // What it holds is undefined, and gone with the process. invalid_argument: no node or path that
  // memory can be had from; not_found: no such path; resource_exhausted: it has less than `bytes`.
  [[nodiscard]] static Result<HostMemory> map(std::size_t bytes, const std::string& place);
  HostMemory(HostMemory&& other) noexcept;
  HostMemory& operator=(HostMemory&& other) noexcept;
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;
  ~HostMemory();

  [[nodiscard]] std::span<std::byte> span() const { return memory_; }

 private:
  explicit HostMemory(std::span<std::byte> memory) : memory_(memory) {}

  std::span<std::byte> memory_;
};

}  // namespace hcache
