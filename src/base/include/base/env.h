// Env: the one door to files, clocks, randomness and asynchronous I/O.
//
// Code in store, policy and state reaches the operating system only through an injected Env, so
// that tests can put a fault-injecting one (base/fault_env.h) in its place, and experiments one
// that slows reads (base/throttled_env.h). Threading: an Env may be used from any thread. File:
// concurrent read_at and write_at of disjoint ranges are safe; everything else needs the caller's
// order. IoQueue: one thread. Errors: ENOENT is not_found, EEXIST already_exists, EACCES/EPERM
// permission_denied, ENOSPC/EDQUOT/EFBIG resource_exhausted, EIO data_loss, anything else
// unavailable; messages name the path.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"

namespace hcache {

// Offsets, lengths and memory addresses of direct I/O are multiples of this.
inline constexpr std::size_t kDirectAlignment = 4096;

struct OpenOptions {
  bool write = false;     // read and write; otherwise read only
  bool create = false;    // create with mode 0600 when missing (needs write)
  bool truncate = false;  // start empty (needs write)
  // Ask for O_DIRECT. Where the file system has none, the file opens without; see File::direct().
  bool direct = false;
};

// Tells one version of a file from another.
struct FileIdentity {
  std::uint64_t size = 0;
  std::int64_t mtime_ns = 0;
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  bool operator==(const FileIdentity&) const = default;
};

// A whole file in memory, for reading, while the object lives.
class FileMapping {
 public:
  FileMapping() = default;
  FileMapping(const FileMapping&) = delete;
  FileMapping& operator=(const FileMapping&) = delete;
  virtual ~FileMapping() = default;
  [[nodiscard]] virtual std::span<const std::byte> bytes() const = 0;
  // Of the file when it was mapped.
  [[nodiscard]] virtual const FileIdentity& identity() const = 0;
};

// An open regular file; closes itself.
class File {
 public:
  File() = default;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  virtual ~File() = default;

  // Reads until `out` is full or the file ends; the count is short only at the end of the file.
  [[nodiscard]] virtual Result<std::size_t> read_at(std::uint64_t offset,
                                                    std::span<std::byte> out) = 0;
  // Writes all of `data`, growing the file as needed. Not durable before sync().
  [[nodiscard]] virtual Status write_at(std::uint64_t offset, std::span<const std::byte> data) = 0;
  // Data and size are on stable storage when it returns (fdatasync). The directory entry of a new
  // file needs Env::sync_dir as well.
  [[nodiscard]] virtual Status sync() = 0;
  [[nodiscard]] virtual Status truncate(std::uint64_t size) = 0;
  // Reserves disk blocks and grows the file; resource_exhausted when they are not to be had. Where
  // the file system can't, this does nothing.
  [[nodiscard]] virtual Status allocate(std::uint64_t offset, std::uint64_t length) = 0;
  // Gives the blocks of a range back; it reads as zeros. Where the file system can't, nothing.
  [[nodiscard]] virtual Status punch_hole(std::uint64_t offset, std::uint64_t length) = 0;
  [[nodiscard]] virtual Result<std::uint64_t> size() = 0;
  // Of the file as it is now.
  [[nodiscard]] virtual Result<FileIdentity> identity() = 0;
  // Bytes of disk blocks in use (not the size: a file may have holes).
  [[nodiscard]] virtual Result<std::uint64_t> allocated_bytes() = 0;
  // The file as it is now, not empty (invalid_argument). Pages are read when they are touched,
  // where a disk's error ends the process (SIGBUS); what is written to the file meanwhile may show.
  // resource_exhausted where there are no addresses for it.
  [[nodiscard]] virtual Result<std::unique_ptr<FileMapping>> map() = 0;
  // Whether transfers must be aligned to kDirectAlignment (and bypass the page cache).
  [[nodiscard]] virtual bool direct() const = 0;
  [[nodiscard]] virtual const std::string& path() const = 0;
};

// A lock on a file, held while the object lives; the kernel drops it when the process dies.
class FileLock {
 public:
  FileLock() = default;
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;
  virtual ~FileLock() = default;
};

struct FileInfo {
  bool exists = false;
  bool directory = false;
  std::uint64_t size = 0;             // bytes
  std::uint64_t allocated_bytes = 0;  // bytes of disk blocks
};

struct SpaceInfo {
  std::uint64_t free_bytes = 0;  // for an unprivileged user
  std::uint64_t total_bytes = 0;
};

enum class IoOp { kRead, kWrite };

struct IoRequest {
  IoOp op = IoOp::kRead;
  File* file = nullptr;  // of the same Env; outlives the request
  std::uint64_t offset = 0;
  std::span<std::byte> buffer;  // valid until completion; aligned if the file is direct()
  std::uint64_t tag = 0;        // handed back
};

struct IoCompletion {
  std::uint64_t tag = 0;
  Status status;
  // Bytes transferred; may be fewer than asked for (the caller asks again for the rest; zero bytes
  // of a read is the end of the file).
  std::size_t bytes = 0;
  // A read that goes on: `bytes` of its beginning have come so far, and its last completion is
  // still to follow. Only queues over a slow link report this.
  bool partial = false;
};

// A queue of asynchronous transfers; completions come in any order. Used by one thread, but for
// cancel(). Its destruction waits for what is in flight.
class IoQueue {
 public:
  IoQueue() = default;
  IoQueue(const IoQueue&) = delete;
  IoQueue& operator=(const IoQueue&) = delete;
  virtual ~IoQueue() = default;

  // Starts a transfer. resource_exhausted when depth() requests are in flight.
  [[nodiscard]] virtual Status submit(const IoRequest& request) = 0;
  // Appends the finished transfers to `out`; with `block`, waits for at least one unless nothing is
  // in flight.
  [[nodiscard]] virtual Status reap(bool block, std::vector<IoCompletion>* out) = 0;
  // What is in flight is not needed any more: a queue on which it could take long completes it
  // early, with kCancelled. Any thread.
  virtual void cancel() {}
  [[nodiscard]] virtual std::size_t in_flight() const = 0;
  [[nodiscard]] virtual std::size_t depth() const = 0;
  // "io_uring", "threads", … for logs.
  [[nodiscard]] virtual const char* name() const = 0;
};

class Env {
 public:
  Env() = default;
  Env(const Env&) = delete;
  Env& operator=(const Env&) = delete;
  virtual ~Env() = default;

  // The operating system. Lives as long as the process.
  static Env& real();

  [[nodiscard]] virtual Result<std::unique_ptr<File>> open_file(const std::string& path,
                                                                const OpenOptions& options) = 0;
  // Creates the directory and its missing parents, mode 0700. An existing one is left alone.
  [[nodiscard]] virtual Status make_dirs(const std::string& path) = 0;
  // Names (without the path) in a directory, sorted; "." and ".." left out.
  [[nodiscard]] virtual Result<std::vector<std::string>> list_dir(const std::string& path) = 0;
  // exists = false where nothing is; an error only when that can't be told.
  [[nodiscard]] virtual Result<FileInfo> file_info(const std::string& path) = 0;
  [[nodiscard]] virtual Status rename_file(const std::string& from, const std::string& to) = 0;
  // A file or an empty directory.
  [[nodiscard]] virtual Status remove_path(const std::string& path) = 0;
  // Makes creations, renames and removals in a directory durable.
  [[nodiscard]] virtual Status sync_dir(const std::string& path) = 0;
  [[nodiscard]] virtual Result<SpaceInfo> space(const std::string& path) = 0;
  // Takes an exclusive lock (flock) on a file, created when missing, and writes this process's id
  // into it. When another process holds it: failed_precondition naming the file and that process.
  [[nodiscard]] virtual Result<std::unique_ptr<FileLock>> lock_file(const std::string& path) = 0;

  // Nanoseconds of a clock that never goes back; its origin means nothing.
  [[nodiscard]] virtual std::int64_t monotonic_ns() = 0;
  // Nanoseconds since 1970-01-01 UTC.
  [[nodiscard]] virtual std::int64_t wall_ns() = 0;
  virtual void sleep_ns(std::int64_t duration_ns) = 0;
  // Unpredictable in the real Env, reproducible in the others.
  [[nodiscard]] virtual std::uint64_t random_u64() = 0;

  // io_uring where the kernel has it, else a few threads with pread and pwrite.
  [[nodiscard]] virtual Result<std::unique_ptr<IoQueue>> new_io_queue(std::size_t depth) = 0;
  // What all reads of its queues together are limited to, in bytes/s; 0: not known, measure it.
  [[nodiscard]] virtual double nominal_read_bytes_per_s() const { return 0; }
};

// Helpers on top of an Env.

[[nodiscard]] std::string join_path(const std::string& dir, const std::string& name);
// A whole small file.
[[nodiscard]] Result<std::string> read_whole_file(Env& env, const std::string& path);
// Replaces a file durably: a temporary neighbour is written, synced and renamed over it. If
// that fails the file is as it was and the neighbour is removed; only when the directory can't be
// synced after it, the new content is there and may not survive a power cut.
[[nodiscard]] Status write_whole_file(Env& env, const std::string& path,
                                      const std::string& content);

// Asks the system to back a large piece of memory with huge pages, where whole ones lie in it:
// fewer faults and less work per request of direct I/O. A hint; call it before the memory is
// touched.
void prefer_huge_pages(std::span<std::byte> memory);

// How a queue's threads read, in place of File::read_at; any thread.
using ReadFunction = std::function<Result<std::size_t>(const IoRequest& request)>;
// A queue over a few threads with blocking transfers. `read` empty: File::read_at.
[[nodiscard]] std::unique_ptr<IoQueue> new_thread_queue(std::size_t depth, ReadFunction read = {});

// Memory for direct I/O, aligned to kDirectAlignment. Its content starts undefined.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(std::size_t size);
  // Takes over memory that lies at an aligned address (pinned by a device, say); `free` ends it.
  AlignedBuffer(std::span<std::byte> memory, std::function<void()> free);
  [[nodiscard]] std::byte* data() { return data_.get(); }
  [[nodiscard]] const std::byte* data() const { return data_.get(); }
  [[nodiscard]] std::size_t size() const { return size_; }
  [[nodiscard]] std::span<std::byte> span() { return {data_.get(), size_}; }

 private:
  std::unique_ptr<std::byte, std::function<void(std::byte*)>> data_;
  std::size_t size_ = 0;
};

}  // namespace hcache
