// The real Env: Linux system calls.
#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <utility>

#include "base/env.h"
#include "posix_io.h"

namespace hcache {
namespace {

constexpr mode_t kFileMode = 0600;
constexpr mode_t kDirMode = 0700;
constexpr std::int64_t kNsPerSecond = 1'000'000'000;

class RealMapping final : public FileMapping {
 public:
  RealMapping(std::span<const std::byte> bytes, const FileIdentity& identity)
      : bytes_(bytes), identity_(identity) {}
  ~RealMapping() override { ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size()); }
  [[nodiscard]] std::span<const std::byte> bytes() const override { return bytes_; }
  [[nodiscard]] const FileIdentity& identity() const override { return identity_; }

 private:
  std::span<const std::byte> bytes_;
  FileIdentity identity_;
};

FileIdentity identity_of(const struct stat& st) {
  return {static_cast<std::uint64_t>(st.st_size),
          st.st_mtim.tv_sec * kNsPerSecond + st.st_mtim.tv_nsec, st.st_dev, st.st_ino};
}

class RealFile final : public PosixFile {
 public:
  RealFile(UniqueFd fd, std::string path, bool direct)
      : fd_(std::move(fd)), path_(std::move(path)), direct_(direct) {}

  Result<std::size_t> read_at(std::uint64_t offset, std::span<std::byte> out) override {
    std::size_t done = 0;
    while (done < out.size()) {
      const ssize_t n = ::pread(fd_.get(), out.data() + done, out.size() - done,
                                static_cast<off_t>(offset + done));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return errno_status("read", path_, errno);
      if (n == 0) break;
      done += static_cast<std::size_t>(n);
      // A direct read that stops between blocks has met the end of the file.
      if (direct_ && done % kDirectAlignment != 0) break;
    }
    return done;
  }

  Status write_at(std::uint64_t offset, std::span<const std::byte> data) override {
    std::size_t done = 0;
    while (done < data.size()) {
      const ssize_t n = ::pwrite(fd_.get(), data.data() + done, data.size() - done,
                                 static_cast<off_t>(offset + done));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return errno_status("write", path_, errno);
      if (n == 0) return errno_status("write", path_, ENOSPC);
      done += static_cast<std::size_t>(n);
    }
    return {};
  }

  Status sync() override {
    if (::fdatasync(fd_.get()) != 0) return errno_status("sync", path_, errno);
    return {};
  }

  Status truncate(std::uint64_t size) override {
    if (::ftruncate(fd_.get(), static_cast<off_t>(size)) != 0) {
      return errno_status("truncate", path_, errno);
    }
    return {};
  }

  Status allocate(std::uint64_t offset, std::uint64_t length) override {
    if (::fallocate(fd_.get(), 0, static_cast<off_t>(offset), static_cast<off_t>(length)) == 0) {
      return {};
    }
    if (errno == EOPNOTSUPP || errno == ENOSYS) return {};
    return errno_status("allocate space in", path_, errno);
  }

  Status punch_hole(std::uint64_t offset, std::uint64_t length) override {
    if (::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                    static_cast<off_t>(offset), static_cast<off_t>(length)) == 0) {
      return {};
    }
    if (errno == EOPNOTSUPP || errno == ENOSYS) return {};
    return errno_status("free space in", path_, errno);
  }

  Result<std::uint64_t> size() override {
    struct stat st {};
    if (::fstat(fd_.get(), &st) != 0) return errno_status("stat", path_, errno);
    return static_cast<std::uint64_t>(st.st_size);
  }

  Result<FileIdentity> identity() override {
    struct stat st {};
    if (::fstat(fd_.get(), &st) != 0) return errno_status("stat", path_, errno);
    return identity_of(st);
  }

  Result<std::uint64_t> allocated_bytes() override {
    struct stat st {};
    if (::fstat(fd_.get(), &st) != 0) return errno_status("stat", path_, errno);
    return static_cast<std::uint64_t>(st.st_blocks) * 512;
  }

  Result<std::unique_ptr<FileMapping>> map() override {
    struct stat st {};
    if (::fstat(fd_.get(), &st) != 0) return errno_status("stat", path_, errno);
    if (st.st_size == 0) return invalid_argument(path_ + " is empty");
    const auto size = static_cast<std::size_t>(st.st_size);
    void* data = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd_.get(), 0);
    if (data == MAP_FAILED) {
      return resource_exhausted(
          fmt::format("cannot map {} ({} bytes): {}", path_, size, std::strerror(errno)));
    }
    return std::unique_ptr<FileMapping>(std::make_unique<RealMapping>(
        std::span(static_cast<const std::byte*>(data), size), identity_of(st)));
  }

  [[nodiscard]] bool direct() const override { return direct_; }
  [[nodiscard]] const std::string& path() const override { return path_; }
  [[nodiscard]] int fd() const override { return fd_.get(); }

 private:
  UniqueFd fd_;
  std::string path_;
  bool direct_;
};

class RealLock final : public FileLock {
 public:
  explicit RealLock(UniqueFd fd) : fd_(std::move(fd)) {}

 private:
  UniqueFd fd_;
};

class RealEnv final : public Env {
 public:
  Result<std::unique_ptr<File>> open_file(const std::string& path,
                                          const OpenOptions& options) override {
    int flags = O_CLOEXEC | (options.write ? O_RDWR : O_RDONLY);
    if (options.create) flags |= O_CREAT;
    if (options.truncate) flags |= O_TRUNC;
    if (options.direct) {
      UniqueFd fd(::open(path.c_str(), flags | O_DIRECT, kFileMode));
      if (fd.ok()) return finish_open(std::move(fd), path, true);
      if (errno != EINVAL) return errno_status("open", path, errno);
    }
    UniqueFd fd(::open(path.c_str(), flags, kFileMode));
    if (!fd.ok()) return errno_status("open", path, errno);
    return finish_open(std::move(fd), path, false);
  }

  Status make_dirs(const std::string& path) override {
    for (std::size_t end = 1; end <= path.size(); ++end) {
      if (end < path.size() && path[end] != '/') continue;
      const std::string prefix = path.substr(0, end);
      if (::mkdir(prefix.c_str(), kDirMode) == 0 || errno == EEXIST) continue;
      const int error = errno;
      struct stat st {};
      if (::stat(prefix.c_str(), &st) == 0 && S_ISDIR(st.st_mode)) continue;  // read-only parent
      return errno_status("create directory", prefix, error);
    }
    struct stat st {};
    if (::stat(path.c_str(), &st) != 0) return errno_status("create directory", path, errno);
    if (!S_ISDIR(st.st_mode)) return failed_precondition(path + " is not a directory");
    return {};
  }

  Result<std::vector<std::string>> list_dir(const std::string& path) override {
    DIR* dir = ::opendir(path.c_str());
    if (dir == nullptr) return errno_status("list", path, errno);
    std::vector<std::string> names;
    while (const dirent* entry = ::readdir(dir)) {
      const std::string name = entry->d_name;
      if (name != "." && name != "..") names.push_back(name);
    }
    ::closedir(dir);
    std::sort(names.begin(), names.end());
    return names;
  }

  Result<FileInfo> file_info(const std::string& path) override {
    struct stat st {};
    if (::stat(path.c_str(), &st) != 0) {
      if (errno == ENOENT || errno == ENOTDIR) return FileInfo{};
      return errno_status("stat", path, errno);
    }
    return FileInfo{true, S_ISDIR(st.st_mode), static_cast<std::uint64_t>(st.st_size),
                    static_cast<std::uint64_t>(st.st_blocks) * 512};
  }

  Status rename_file(const std::string& from, const std::string& to) override {
    if (::rename(from.c_str(), to.c_str()) != 0) return errno_status("rename", from, errno);
    return {};
  }

  Status remove_path(const std::string& path) override {
    if (::remove(path.c_str()) != 0) return errno_status("remove", path, errno);
    return {};
  }

  Status sync_dir(const std::string& path) override {
    const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!fd.ok()) return errno_status("open", path, errno);
    if (::fsync(fd.get()) != 0 && errno != EINVAL) return errno_status("sync", path, errno);
    return {};
  }

  Result<SpaceInfo> space(const std::string& path) override {
    struct statvfs st {};
    if (::statvfs(path.c_str(), &st) != 0) return errno_status("stat", path, errno);
    const std::uint64_t block = st.f_frsize;
    return SpaceInfo{block * st.f_bavail, block * st.f_blocks};
  }

  Result<std::unique_ptr<FileLock>> lock_file(const std::string& path) override {
    while (true) {
      UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, kFileMode));
      if (!fd.ok()) return errno_status("open", path, errno);
      if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
        if (errno != EWOULDBLOCK) return errno_status("lock", path, errno);
        return failed_precondition(
            fmt::format("{} is locked by process {}", path, read_pid(fd.get())));
      }
      // The file may have been removed between open and lock: such a lock excludes no one.
      struct stat locked {};
      struct stat named {};
      if (::fstat(fd.get(), &locked) != 0) return errno_status("stat", path, errno);
      if (::stat(path.c_str(), &named) != 0 || locked.st_ino != named.st_ino ||
          locked.st_dev != named.st_dev) {
        continue;
      }
      const std::string pid = fmt::format("{}\n", ::getpid());
      if (::ftruncate(fd.get(), 0) != 0 ||
          ::pwrite(fd.get(), pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size())) {
        return errno_status("write", path, errno);
      }
      return std::unique_ptr<FileLock>(std::make_unique<RealLock>(std::move(fd)));
    }
  }

  std::int64_t monotonic_ns() override { return clock_ns(CLOCK_MONOTONIC); }
  std::int64_t wall_ns() override { return clock_ns(CLOCK_REALTIME); }

  void sleep_ns(std::int64_t duration_ns) override {
    if (duration_ns <= 0) return;
    timespec rest{duration_ns / kNsPerSecond, duration_ns % kNsPerSecond};
    while (::nanosleep(&rest, &rest) != 0 && errno == EINTR) {
    }
  }

  std::uint64_t random_u64() override {
    std::uint64_t value = 0;
    if (::getrandom(&value, sizeof value, 0) != sizeof value) die("getrandom failed");
    return value;
  }

  Result<std::unique_ptr<IoQueue>> new_io_queue(std::size_t depth) override {
    if (auto queue = new_uring_queue(depth)) return queue;
    return new_thread_queue(depth);
  }

 private:
  static Result<std::unique_ptr<File>> finish_open(UniqueFd fd, const std::string& path,
                                                   bool direct) {
    struct stat st {};
    if (::fstat(fd.get(), &st) != 0) return errno_status("stat", path, errno);
    if (!S_ISREG(st.st_mode)) return failed_precondition(path + " is not a regular file");
    return std::unique_ptr<File>(std::make_unique<RealFile>(std::move(fd), path, direct));
  }

  static std::string read_pid(int fd) {
    char text[32] = {};
    const ssize_t n = ::pread(fd, text, sizeof text - 1, 0);
    std::string pid(text, n > 0 ? static_cast<std::size_t>(n) : 0);
    std::erase_if(pid, [](char c) { return c < '0' || c > '9'; });
    return pid.empty() ? "unknown" : pid;
  }

  static std::int64_t clock_ns(clockid_t clock) {
    timespec ts{};
    ::clock_gettime(clock, &ts);
    return ts.tv_sec * kNsPerSecond + ts.tv_nsec;
  }
};

}  // namespace

Status errno_status(const char* action, const std::string& path, int error) {
  std::string message = fmt::format("cannot {} {}: {}", action, path, std::strerror(error));
  switch (error) {
    case ENOENT:
    case ENOTDIR: return not_found(std::move(message));
    case EEXIST: return already_exists(std::move(message));
    case EACCES:
    case EPERM:
    case EROFS: return permission_denied(std::move(message));
    case ENOSPC:
    case EDQUOT:
    case EFBIG: return resource_exhausted(std::move(message));
    case EIO: return data_loss(std::move(message));
    default: return unavailable(std::move(message));
  }
}

Env& Env::real() {
  static RealEnv env;
  return env;
}

}  // namespace hcache
