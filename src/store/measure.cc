// How fast a disk reads, for the planner's cost profile.
#include <algorithm>
#include <cstring>

#include "base/env.h"
#include "format.h"
#include "seal.h"
#include "store/store.h"

namespace hcache::store {
namespace {

constexpr std::size_t kRequestBytes = 1 << 20;
constexpr std::size_t kDepth = 8;

// Removes the scratch file however the measurement ends.
class Scratch {
 public:
  Scratch(Env& env, std::string path) : env_(env), path_(std::move(path)) {}
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { env_.remove_path(path_).ignore("best effort: a leftover is overwritten next time"); }

 private:
  Env& env_;
  std::string path_;
};

}  // namespace

Result<double> measure_read_speed(Env& env, const std::string& dir, std::uint64_t bytes) {
  bytes = std::max<std::uint64_t>(round_up(bytes, kRequestBytes), kDepth * kRequestBytes);
  HCACHE_RETURN_IF_ERROR(env.make_dirs(dir));
  const std::string path = join_path(dir, "hcache-speed.tmp");
  const Scratch scratch(env, path);
  OpenOptions options;
  options.write = true;
  options.create = true;
  options.truncate = true;
  options.direct = true;
  HCACHE_ASSIGN_OR_RETURN(const auto file, env.open_file(path, options));
  AlignedBuffer buffer(kDepth * kRequestBytes);
  for (std::size_t i = 0; i < buffer.size(); i += 8) {
    const std::uint64_t noise = (i + 1) * 0x9e3779b97f4a7c15ULL;  // no zeros for clever disks
    std::memcpy(buffer.data() + i, &noise, 8);
  }
  HCACHE_RETURN_IF_ERROR(file->allocate(0, bytes));
  for (std::uint64_t at = 0; at < bytes; at += kRequestBytes) {
    HCACHE_RETURN_IF_ERROR(file->write_at(at, buffer.span().first(kRequestBytes)));
  }
  HCACHE_RETURN_IF_ERROR(file->sync());

  HCACHE_ASSIGN_OR_RETURN(const auto queue, env.new_io_queue(kDepth));
  const std::int64_t start = env.monotonic_ns();
  std::uint64_t next = 0;
  auto submit = [&](std::uint64_t slot) {
    IoRequest io;
    io.file = file.get();
    io.offset = next;
    io.buffer = buffer.span().subspan(slot * kRequestBytes, kRequestBytes);
    io.tag = slot;
    next += kRequestBytes;
    return queue->submit(io);
  };
  for (std::uint64_t slot = 0; slot < kDepth && next < bytes; ++slot) {
    HCACHE_RETURN_IF_ERROR(submit(slot));
  }
  std::vector<IoCompletion> done;
  Status status;
  while (queue->in_flight() > 0) {
    done.clear();
    HCACHE_RETURN_IF_ERROR(queue->reap(true, &done));
    for (const IoCompletion& c : done) {
      if (c.partial) continue;
      if (status.ok()) status = c.status;
      if (status.ok() && next < bytes) status = submit(c.tag);
    }
  }
  HCACHE_RETURN_IF_ERROR(status);
  const std::int64_t elapsed = std::max<std::int64_t>(1, env.monotonic_ns() - start);
  return static_cast<double>(bytes) * 1e9 / static_cast<double>(elapsed);
}

double measure_decryption(Env& env, const StoreKey& key) {
  constexpr std::uint32_t kPage = 32 << 10;
  constexpr int kPages = 128;
  const Seal seal(key);
  const PageName name{{}, {}, {0, Encoding::kKv, kPage}};
  AlignedBuffer page(kPage);
  PageSeal sealed;
  std::memset(page.data(), 0, kPage);
  seal.seal_page(name, page.span(), page.data(), &sealed);
  const std::int64_t start = env.monotonic_ns();
  // From the second time on it does not pass its check, which takes as long.
  for (int i = 0; i < kPages; ++i) (void)seal.open_page(name, sealed, page.span());
  const std::int64_t elapsed = std::max<std::int64_t>(1, env.monotonic_ns() - start);
  return double{kPage} * kPages * 1e9 / static_cast<double>(elapsed);
}

}  // namespace hcache::store
