// Reads from a file straight into a device's memory, without a copy in the host's
// (HCache §5, GPUDirect Storage).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/env.h"
#include "base/status.h"

namespace hcache {

// NVIDIA's library, as the dynamic linker finds it.
inline constexpr const char* kCuFileLibrary = "libcufile.so.0";

// Threading: read() from any thread, also while memory is added or removed that it does not fill.
class DirectStorage {
 public:
  DirectStorage() = default;
  DirectStorage(const DirectStorage&) = delete;
  DirectStorage& operator=(const DirectStorage&) = delete;
  virtual ~DirectStorage() = default;  // nothing is being read, and all memory was removed

  // Loads NVIDIA's cuFile and opens its driver; the library is needed at run time alone.
  // failed_precondition, with what to install, where there is no such library or it finds no
  // driver.
  static Result<std::unique_ptr<DirectStorage>> open(const std::string& library = kCuFileLibrary);

  // Device memory that read() may fill.
  [[nodiscard]] virtual Status add_memory(std::byte* base, std::size_t n_bytes) = 0;
  virtual void remove_memory(std::byte* base) = 0;
  // As File::read_at, into device memory that begins `at` bytes behind a base that was added.
  // unimplemented: the file has no descriptor (it is no file of the system's Env).
  [[nodiscard]] virtual Result<std::size_t> read(File& file, std::uint64_t offset, std::byte* base,
                                                 std::size_t at, std::size_t n_bytes) = 0;
};

}  // namespace hcache
