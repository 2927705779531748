// FaultEnv: a file system in memory that breaks on request. A peer of Env::real() for tests.
//
// It forgets what was not synced when the power is cut (data: File::sync; names: Env::sync_dir),
// runs full, loses directories, reads short, fails reads and flips bits. Time passes only in steps:
// a microsecond per question and what sleep_ns asks for. Everything follows from the seed.
// Files opened with `direct` insist on aligned transfers.
// Threading: any thread; one lock around everything.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/sync.h"

namespace hcache {

class FaultEnv final : public Env {
 public:
  explicit FaultEnv(std::uint64_t seed = 1);
  ~FaultEnv() override;

  // ---- Power

  // The n-th change from now on (1: the next) does not happen, and neither does anything after it:
  // every call fails with unavailable until restart(). A change is any call that alters files or
  // names, and any sync. 0: never.
  void cut_power_at(std::uint64_t n);
  [[nodiscard]] bool power_is_cut() const;
  [[nodiscard]] std::uint64_t changes() const;  // so far
  // Which of the changes that were not synced survive a power cut.
  enum class Survivors {
    kNone,
    kAll,
    kSome,  // any subset in units of 512 bytes, by the seed; the change that was cut may be torn
  };
  // The power comes back. Files and locks of the time before are dead.
  void restart(Survivors survivors);

  // ---- Other faults

  // Bytes of blocks that all files together may have; more is resource_exhausted. Default: 2^40.
  void set_capacity(std::uint64_t bytes);
  // Everything below the directory is not there (and open files fail with data_loss) while set.
  void set_vanished(const std::string& dir, bool vanished);
  // Transfers of an IoQueue move fewer bytes than asked, about every other time.
  void set_short_transfers(bool on);
  // Reads of files whose path contains the text fail with data_loss. Empty: none.
  void set_failing_reads(const std::string& text);
  // Syncs fail with data_loss while set; what they would have saved stays unsynced.
  void set_failing_syncs(bool on);
  void flip_bit(const std::string& path, std::uint64_t byte, unsigned bit);

  // Every file's path, sorted.
  [[nodiscard]] std::vector<std::string> files() const;

  // ---- Env

  [[nodiscard]] Result<std::unique_ptr<File>> open_file(const std::string& path,
                                                        const OpenOptions& options) override;
  [[nodiscard]] Status make_dirs(const std::string& path) override;
  [[nodiscard]] Result<std::vector<std::string>> list_dir(const std::string& path) override;
  [[nodiscard]] Result<FileInfo> file_info(const std::string& path) override;
  [[nodiscard]] Status rename_file(const std::string& from, const std::string& to) override;
  [[nodiscard]] Status remove_path(const std::string& path) override;
  [[nodiscard]] Status sync_dir(const std::string& path) override;
  [[nodiscard]] Result<SpaceInfo> space(const std::string& path) override;
  [[nodiscard]] Result<std::unique_ptr<FileLock>> lock_file(const std::string& path) override;
  [[nodiscard]] std::int64_t monotonic_ns() override;
  [[nodiscard]] std::int64_t wall_ns() override;
  void sleep_ns(std::int64_t duration_ns) override;
  [[nodiscard]] std::uint64_t random_u64() override;
  [[nodiscard]] Result<std::unique_ptr<IoQueue>> new_io_queue(std::size_t depth) override;

 private:
  struct Node;
  class FaultFile;
  class FaultMapping;
  class FaultLock;
  class FaultQueue;
  using Names = std::map<std::string, std::shared_ptr<Node>>;

  // Counts a change. Not ok once the power is cut; `torn` tells whether this very one was cut.
  [[nodiscard]] Status change(bool* torn = nullptr) HCACHE_REQUIRES(mutex_);
  [[nodiscard]] Status alive(std::uint64_t generation) const HCACHE_REQUIRES(mutex_);
  [[nodiscard]] bool vanished(const std::string& path) const HCACHE_REQUIRES(mutex_);
  [[nodiscard]] std::uint64_t used_bytes() const HCACHE_REQUIRES(mutex_);
  [[nodiscard]] Status take_blocks(Node& node, std::uint64_t offset, std::uint64_t length,
                                   const std::string& path) HCACHE_REQUIRES(mutex_);
  [[nodiscard]] std::uint64_t next_random() HCACHE_REQUIRES(mutex_);

  mutable Mutex mutex_;
  std::uint64_t random_ HCACHE_GUARDED_BY(mutex_);
  std::uint64_t generation_ HCACHE_GUARDED_BY(mutex_) = 0;
  std::uint64_t changes_ HCACHE_GUARDED_BY(mutex_) = 0;
  std::uint64_t cut_at_ HCACHE_GUARDED_BY(mutex_) = 0;
  bool power_cut_ HCACHE_GUARDED_BY(mutex_) = false;
  std::uint64_t capacity_ HCACHE_GUARDED_BY(mutex_) = std::uint64_t{1} << 40;
  bool short_transfers_ HCACHE_GUARDED_BY(mutex_) = false;
  bool failing_syncs_ HCACHE_GUARDED_BY(mutex_) = false;
  std::string failing_reads_ HCACHE_GUARDED_BY(mutex_);
  std::set<std::string> vanished_ HCACHE_GUARDED_BY(mutex_);
  std::set<std::string> dirs_ HCACHE_GUARDED_BY(mutex_);                   // durable at once
  Names names_ HCACHE_GUARDED_BY(mutex_);                                  // as programs see them
  std::vector<std::shared_ptr<Node>> nameless_ HCACHE_GUARDED_BY(mutex_);  // removed while open
  Names durable_names_ HCACHE_GUARDED_BY(mutex_);  // as a power cut leaves them
  std::set<std::string> locks_ HCACHE_GUARDED_BY(mutex_);
  std::int64_t now_ns_ HCACHE_GUARDED_BY(mutex_) = 1'000'000'000;
};

}  // namespace hcache
