// What works on top of any Env.
#include "base/env.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

namespace hcache {
namespace {

constexpr std::size_t kHugePage = 2 << 20;  // x86-64

}  // namespace

std::string join_path(const std::string& dir, const std::string& name) {
  if (dir.empty() || dir.back() == '/') return dir + name;
  return dir + "/" + name;
}

Result<std::string> read_whole_file(Env& env, const std::string& path) {
  HCACHE_ASSIGN_OR_RETURN(auto file, env.open_file(path, {}));
  HCACHE_ASSIGN_OR_RETURN(const std::uint64_t size, file->size());
  std::string content(size, '\0');
  HCACHE_ASSIGN_OR_RETURN(const std::size_t got,
                          file->read_at(0, std::as_writable_bytes(std::span<char>(content))));
  content.resize(got);
  return content;
}

Status write_whole_file(Env& env, const std::string& path, const std::string& content) {
  // A name that no other process writes at the same time.
  const std::string temporary = path + "." + std::to_string(::getpid()) + ".tmp";
  const auto put = [&]() -> Status {
    OpenOptions options;
    options.write = true;
    options.create = true;
    options.truncate = true;
    HCACHE_ASSIGN_OR_RETURN(auto file, env.open_file(temporary, options));
    HCACHE_RETURN_IF_ERROR(file->write_at(0, std::as_bytes(std::span<const char>(content))));
    HCACHE_RETURN_IF_ERROR(file->sync());
    return env.rename_file(temporary, path);
  };
  if (Status status = put(); !status.ok()) {
    (void)env.remove_path(temporary);  // it may not be there; what failed is said below
    return status;
  }
  const std::size_t slash = path.rfind('/');
  return env.sync_dir(slash == std::string::npos ? "." : path.substr(0, slash));
}

void prefer_huge_pages(std::span<std::byte> memory) {
  const auto begin = reinterpret_cast<std::uintptr_t>(memory.data());
  const std::uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const std::uintptr_t last = (begin + memory.size()) / kHugePage * kHugePage;
  if (first >= last) return;
  // Refused where the kernel has none: then pages stay small.
  (void)madvise(memory.data() + (first - begin), last - first, MADV_HUGEPAGE);
}

AlignedBuffer::AlignedBuffer(std::size_t size) : size_(size) {
  const std::size_t alignment = size < 2 * kHugePage ? kDirectAlignment : kHugePage;
  const std::size_t rounded = (size + alignment - 1) / alignment * alignment;
  if (rounded == 0) return;
  data_ = {static_cast<std::byte*>(std::aligned_alloc(alignment, rounded)),
           [](std::byte* p) { std::free(p); }};
  if (data_ == nullptr) throw std::bad_alloc();
  if (alignment == kHugePage) prefer_huge_pages({data_.get(), rounded});
}

AlignedBuffer::AlignedBuffer(std::span<std::byte> memory, std::function<void()> free)
    : data_(memory.data(), [free = std::move(free)](std::byte*) { free(); }),
      size_(memory.size()) {}

}  // namespace hcache
