// The server's batches and their files, on disk below one folder:
//
//   lock             held by the process that has the folder
//   files/ID         a file's content; files/ID.json: what is known of it
//   batches/ID.json  a batch
//
// Content is durable before its .json names it, and .json files are replaced as a whole, so a crash
// leaves a file or batch there or not, and nothing in between. Files are 0600, folders 0700. What
// belongs to one owner is not found by another.
//
// Threading: any thread.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "api/json.h"
#include "base/env.h"
#include "base/status.h"
#include "base/sync.h"
#include "batch_run.h"

namespace hcache::server {

inline constexpr std::string_view kBatchPurpose = "batch";  // uploaded, to be one's input
inline constexpr std::string_view kOutputPurpose = "batch_output";
inline constexpr std::string_view kMessagesPurpose =
    "messages";  // Anthropic's, which show no files

struct StoredFile {
  std::string id;     // "file-" and 32 hex digits
  std::string owner;  // whose key: opaque
  std::string filename;
  std::string purpose;  // one of the above
  uint64_t bytes = 0;
  int64_t created_ns = 0;  // wall clock, as all of these
  int64_t expires_ns = 0;  // 0: never
};

// Of OpenAI's batches, as they name it. Anthropic's are worded from the same.
enum class BatchStatus : uint8_t {
  kValidating,
  kFailed,  // its input is no batch
  kInProgress,
  kFinalizing,
  kCompleted,
  kExpired,
  kCancelling,
  kCancelled,
};
inline constexpr size_t kBatchStatuses = 8;
[[nodiscard]] std::string_view batch_status_name(BatchStatus status);  // "in_progress", …
[[nodiscard]] bool has_ended(BatchStatus status);

struct StoredBatch {
  std::string id;  // "batch_" or "msgbatch_", and 32 hex digits
  std::string owner;
  bool anthropic = false;
  std::string input_file_id;
  std::string output_file_id;  // these two name files once it has ended
  std::string error_file_id;
  std::string endpoint;
  std::string window;  // as asked for
  BatchStatus status = BatchStatus::kValidating;
  // What it will be once everything is written; of kFinalizing and kCancelling.
  BatchStatus ending = BatchStatus::kCompleted;
  BatchRun::Counts counts;
  // When each status was reached; 0: it was not.
  int64_t created_ns = 0;
  int64_t in_progress_ns = 0;
  int64_t cancelling_ns = 0;
  int64_t finalizing_ns = 0;
  int64_t ended_ns = 0;
  int64_t expires_ns = 0;  // its window ends
  int64_t output_ttl_ns = 0;
  uint64_t output_bytes = 0;  // once it has ended
  uint64_t error_bytes = 0;
  api::Json metadata;                     // an object of texts, or null
  api::Json errors = api::Json::array();  // of kFailed: {code, message, line}
};

// How many batches there are.
struct BatchTally {
  std::array<int64_t, kBatchStatuses> by_status{};
  BatchRun::Counts counts;  // requests of those that have not ended
};

class BatchStore {
 public:
  // Takes the folder, and makes it where it is missing. Files that nothing names go away.
  // kFailedPrecondition: another process has it. What can't be read is left alone, with a warning.
  static Result<std::unique_ptr<BatchStore>> open(Env& env, const std::string& dir,
                                                  uint64_t quota_bytes);

  [[nodiscard]] std::string new_id(std::string_view prefix);
  [[nodiscard]] std::string content_path(const std::string& file_id) const;
  // Of everything on disk, results that are being written included.
  [[nodiscard]] Result<uint64_t> used_bytes() const;

  // ---- Files. Names the file and sets its size; durable when it returns. kResourceExhausted: the
  // quota is used up.
  Result<StoredFile> add_file(StoredFile file, std::string_view content)
      HCACHE_EXCLUDES(upload_mutex_, mutex_);
  // Of content that is there; none: it is empty.
  Status publish(StoredFile file) HCACHE_EXCLUDES(mutex_);
  // kNotFound, also for another owner's.
  [[nodiscard]] Result<StoredFile> file(std::string_view owner, const std::string& id) const
      HCACHE_EXCLUDES(mutex_);
  // Newest first.
  [[nodiscard]] std::vector<StoredFile> files(std::string_view owner) const HCACHE_EXCLUDES(mutex_);
  // kFailedPrecondition: a batch that has not ended needs it.
  Status remove_file(std::string_view owner, const std::string& id) HCACHE_EXCLUDES(mutex_);

  // ---- Batches
  // A new one; durable when it returns. kResourceExhausted: the quota is used up.
  Status add_batch(const StoredBatch& batch) HCACHE_EXCLUDES(mutex_);
  // Without the disk: for counts, which follow from the results.
  void set_counts(const std::string& id, const BatchRun::Counts& counts) HCACHE_EXCLUDES(mutex_);
  // Changes a batch, in memory and on disk, as one step; `change` must not call the store.
  using Change = std::function<Status(StoredBatch&)>;
  Result<StoredBatch> change(const std::string& id, const Change& change) HCACHE_EXCLUDES(mutex_);
  [[nodiscard]] Result<StoredBatch> batch(std::string_view owner, const std::string& id) const
      HCACHE_EXCLUDES(mutex_);
  // Whoever's it is.
  [[nodiscard]] Result<StoredBatch> batch(const std::string& id) const HCACHE_EXCLUDES(mutex_);
  // Of one owner and kind, newest first.
  [[nodiscard]] std::vector<StoredBatch> batches(std::string_view owner, bool anthropic) const
      HCACHE_EXCLUDES(mutex_);
  // Those that have not ended, whoever's they are, oldest first.
  [[nodiscard]] std::vector<StoredBatch> unended() const HCACHE_EXCLUDES(mutex_);
  [[nodiscard]] BatchTally tally() const HCACHE_EXCLUDES(mutex_);
  // With its files. kFailedPrecondition: it has not ended.
  Status remove_batch(std::string_view owner, const std::string& id) HCACHE_EXCLUDES(mutex_);
  // Removes files that have expired, and whatever is of before `before_ns`: batches by their end,
  // files that no batch needs by their upload.
  Status expire(int64_t before_ns) HCACHE_EXCLUDES(mutex_);

 private:
  BatchStore(Env& env, std::string dir, uint64_t quota_bytes)
      : env_(env), dir_(std::move(dir)), quota_bytes_(quota_bytes) {}
  Status load() HCACHE_EXCLUDES(mutex_);
  // Reads a folder's records, by the ids that their files' names say.
  template <typename Record>
  Status load_folder(const std::string& folder, std::map<std::string, Record>* records)
      HCACHE_REQUIRES(mutex_);
  Status remove_orphans() HCACHE_REQUIRES(mutex_);
  [[nodiscard]] Status check_quota(uint64_t more) const;
  Status write_content(const std::string& id, std::string_view content) const;
  [[nodiscard]] std::string folder(const char* name) const { return join_path(dir_, name); }
  [[nodiscard]] bool needed(const std::string& file_id) const HCACHE_REQUIRES(mutex_);
  Status erase_file(const std::string& id) HCACHE_REQUIRES(mutex_);
  Status erase_batch(const std::string& id) HCACHE_REQUIRES(mutex_);
  Status write(const StoredFile& file) const;
  Status write(const StoredBatch& batch) const;

  Env& env_;
  const std::string dir_;
  const uint64_t quota_bytes_;
  std::unique_ptr<FileLock> lock_;
  Mutex upload_mutex_;  // before mutex_; one upload at a time keeps to the quota
  mutable Mutex mutex_;
  std::map<std::string, StoredFile> files_ HCACHE_GUARDED_BY(mutex_);
  std::map<std::string, StoredBatch> batches_ HCACHE_GUARDED_BY(mutex_);
};

}  // namespace hcache::server
