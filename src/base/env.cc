// What works on top of any Env.
#include "base/env.h"

#include <cstdlib>
#include <new>

namespace hcache {

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
  const std::string temporary = path + ".tmp";
  {
    OpenOptions options;
    options.write = true;
    options.create = true;
    options.truncate = true;
    HCACHE_ASSIGN_OR_RETURN(auto file, env.open_file(temporary, options));
    HCACHE_RETURN_IF_ERROR(file->write_at(0, std::as_bytes(std::span<const char>(content))));
    HCACHE_RETURN_IF_ERROR(file->sync());
  }
  HCACHE_RETURN_IF_ERROR(env.rename_file(temporary, path));
  const std::size_t slash = path.rfind('/');
  return env.sync_dir(slash == std::string::npos ? "." : path.substr(0, slash));
}

AlignedBuffer::AlignedBuffer(std::size_t size) : size_(size) {
  const std::size_t rounded = (size + kDirectAlignment - 1) / kDirectAlignment * kDirectAlignment;
  if (rounded == 0) return;
  data_.reset(static_cast<std::byte*>(std::aligned_alloc(kDirectAlignment, rounded)));
  if (data_ == nullptr) throw std::bad_alloc();
}

void AlignedBuffer::Free::operator()(std::byte* p) const { std::free(p); }

}  // namespace hcache
