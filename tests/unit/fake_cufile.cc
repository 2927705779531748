// What a machine without a GPU has for libcufile: "device memory" is the process's own. Tests load
// it under that library's name and turn its faults on and off.
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace {

constexpr size_t kAlignment = 4096;

// Of C, as the functions' own.
struct Error {
  int error;
  int cuda_error;
};
constexpr Error kNone = {0, 0};
struct Description {
  int type = 0;
  union {
    int fd;
    void* handle;
  } file;
  const void* operations = nullptr;
};
struct Handle {
  int fd = -1;
};

std::mutex memory_mutex;
std::map<const void*, size_t> memory;  // registered
std::atomic<int> n_handles{0};
std::atomic<int> n_opened{0};
std::atomic<int> n_reads{0};
std::atomic<int> driver_error{0};
std::atomic<int> read_error{0};
std::atomic<size_t> most_bytes{0};
std::atomic<bool> flips{false};

}  // namespace

extern "C" {

// ---- What tests see and set
int fake_handles() { return n_handles; }
int fake_drivers() { return n_opened; }
int fake_reads() { return n_reads; }
int fake_buffers() {
  const std::lock_guard lock(memory_mutex);
  return static_cast<int>(memory.size());
}
void fake_driver_error(int error) { driver_error = error; }
void fake_read_error(int error) { read_error = error; }         // 0: none
void fake_most_bytes(size_t n_bytes) { most_bytes = n_bytes; }  // of one read; 0: all
void fake_flip_bits(bool on) { flips = on; }

// ---- The library
Error cuFileDriverOpen() {
  if (driver_error != 0) return {driver_error, 0};
  ++n_opened;
  return kNone;
}
Error cuFileDriverClose_v2() {
  --n_opened;
  return kNone;
}
Error cuFileHandleRegister(void** handle, Description* description) {
  if (description->type != 1 || description->file.fd < 0) return {5022, 0};
  *handle = new Handle{description->file.fd};
  ++n_handles;
  return kNone;
}
void cuFileHandleDeregister(void* handle) {
  delete static_cast<Handle*>(handle);
  --n_handles;
}
Error cuFileBufRegister(const void* base, size_t length, int /*flags*/) {
  const std::lock_guard lock(memory_mutex);
  return memory.emplace(base, length).second ? kNone : Error{5023, 0};
}
Error cuFileBufDeregister(const void* base) {
  const std::lock_guard lock(memory_mutex);
  return memory.erase(base) == 1 ? kNone : Error{5024, 0};
}
ssize_t cuFileRead(void* handle, void* base, size_t size, off_t file_offset, off_t base_offset) {
  {
    const std::lock_guard lock(memory_mutex);
    const auto found = memory.find(base);
    if (found == memory.end()) return -5024;
    if (static_cast<size_t>(base_offset) + size > found->second) return -5014;
  }
  if (read_error != 0) return -read_error;
  if (most_bytes > 0) size = std::min<size_t>(size, most_bytes);
  auto* to = static_cast<char*>(base) + base_offset;
  // The GPU's memory has any alignment, a file with O_DIRECT wants one.
  void* bounce = nullptr;
  if (posix_memalign(&bounce, kAlignment, size) != 0) return -1;
  const ssize_t got = pread(static_cast<Handle*>(handle)->fd, bounce, size, file_offset);
  if (got > 0) std::memcpy(to, bounce, static_cast<size_t>(got));
  std::free(bounce);
  if (got >= 0) ++n_reads;
  if (flips && got > 0) to[got / 2] = static_cast<char>(to[got / 2] ^ 1);
  return got;
}

}  // extern "C"
