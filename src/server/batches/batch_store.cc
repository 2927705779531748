#include "batch_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <concepts>
#include <set>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>

#include "base/log.h"
#include "base/names.h"

namespace hcache::server {
namespace {

using api::Json;

constexpr NameTable<BatchStatus, kBatchStatuses> kStatuses = {{
    {BatchStatus::kValidating, "validating"},
    {BatchStatus::kFailed, "failed"},
    {BatchStatus::kInProgress, "in_progress"},
    {BatchStatus::kFinalizing, "finalizing"},
    {BatchStatus::kCompleted, "completed"},
    {BatchStatus::kExpired, "expired"},
    {BatchStatus::kCancelling, "cancelling"},
    {BatchStatus::kCancelled, "cancelled"},
}};
constexpr const char* kFiles = "files";
constexpr const char* kBatches = "batches";
constexpr std::string_view kJson = ".json";

// Reads the members of an object that this process or an earlier one wrote.
class Members {
 public:
  explicit Members(const Json& json) : json_(json) {}
  void get(const char* name, std::string* out) {
    if (const Json* value = find(name, &Json::is_string)) *out = value->get<std::string>();
  }
  void get(const char* name, int64_t* out) {
    if (const Json* value = find(name, &Json::is_number_integer)) *out = value->get<int64_t>();
  }
  void get(const char* name, uint64_t* out) {
    if (const Json* value = find(name, &Json::is_number_unsigned)) *out = value->get<uint64_t>();
  }
  void get(const char* name, bool* out) {
    if (const Json* value = find(name, &Json::is_boolean)) *out = value->get<bool>();
  }
  void get(const char* name, Json* out) {
    if (const auto value = json_.find(name); value != json_.end()) *out = *value;
  }
  void get(const char* name, BatchStatus* out) {
    std::string text;
    get(name, &text);
    const auto status = parse_name(kStatuses, "status", text);
    if (status.ok()) {
      *out = *status;
    } else {
      whole_ = false;
    }
  }
  [[nodiscard]] bool whole() const { return whole_; }

 private:
  const Json* find(const char* name, bool (Json::*is)() const noexcept) {
    const auto value = json_.find(name);
    if (value != json_.end() && ((*value).*is)()) return &*value;
    whole_ = false;
    return nullptr;
  }

  const Json& json_;
  bool whole_ = true;
};

// Each record's members, once for both ways.
template <typename File, typename Visit>
requires std::same_as<std::remove_const_t<File>, StoredFile>
void visit_members(File& f, const Visit& visit) {
  visit("id", f.id);
  visit("owner", f.owner);
  visit("filename", f.filename);
  visit("purpose", f.purpose);
  visit("bytes", f.bytes);
  visit("created_ns", f.created_ns);
  visit("expires_ns", f.expires_ns);
}

template <typename Batch, typename Visit>
requires std::same_as<std::remove_const_t<Batch>, StoredBatch>
void visit_members(Batch& b, const Visit& visit) {
  visit("id", b.id);
  visit("owner", b.owner);
  visit("anthropic", b.anthropic);
  visit("input_file_id", b.input_file_id);
  visit("output_file_id", b.output_file_id);
  visit("error_file_id", b.error_file_id);
  visit("endpoint", b.endpoint);
  visit("window", b.window);
  visit("status", b.status);
  visit("ending", b.ending);
  visit("total", b.counts.total);
  visit("completed", b.counts.completed);
  visit("failed", b.counts.failed);
  visit("cancelled", b.counts.cancelled);
  visit("expired", b.counts.expired);
  visit("created_ns", b.created_ns);
  visit("in_progress_ns", b.in_progress_ns);
  visit("cancelling_ns", b.cancelling_ns);
  visit("finalizing_ns", b.finalizing_ns);
  visit("ended_ns", b.ended_ns);
  visit("expires_ns", b.expires_ns);
  visit("output_ttl_ns", b.output_ttl_ns);
  visit("output_bytes", b.output_bytes);
  visit("error_bytes", b.error_bytes);
  visit("metadata", b.metadata);
  visit("errors", b.errors);
}

template <typename Record>
Status read_members(const Json& json, Record* record) {
  Members members(json);
  visit_members(*record, [&](const char* name, auto& value) { members.get(name, &value); });
  return members.whole() ? Status() : data_loss("a member is missing or of another type");
}

// Puts a member of a record into a JSON object.
struct Writer {
  Json& json;
  template <typename T>
  void operator()(const char* name, const T& value) const {
    json[name] = value;
  }
  void operator()(const char* name, const BatchStatus& value) const {
    json[name] = batch_status_name(value);
  }
};

Status not_there(const char* what, std::string_view id) {
  return not_found(fmt::format("there is no {} '{}'", what, id));
}

template <typename T>
void newest_first(std::vector<T>* records) {
  std::sort(records->begin(), records->end(), [](const T& a, const T& b) {
    return std::tie(b.created_ns, b.id) < std::tie(a.created_ns, a.id);
  });
}

}  // namespace

std::string_view batch_status_name(BatchStatus status) {
  for (const auto& [value, name] : kStatuses) {
    if (value == status) return name;
  }
  return "unknown";
}

bool has_ended(BatchStatus status) {
  return status == BatchStatus::kFailed || status == BatchStatus::kCompleted ||
         status == BatchStatus::kExpired || status == BatchStatus::kCancelled;
}

Result<std::unique_ptr<BatchStore>> BatchStore::open(Env& env, const std::string& dir,
                                                     uint64_t quota_bytes) {
  std::unique_ptr<BatchStore> store(new BatchStore(env, dir, quota_bytes));
  HCACHE_RETURN_IF_ERROR(store->load());
  return store;
}

Status BatchStore::load() {
  HCACHE_RETURN_IF_ERROR(env_.make_dirs(folder(kFiles)));
  HCACHE_RETURN_IF_ERROR(env_.make_dirs(folder(kBatches)));
  HCACHE_ASSIGN_OR_RETURN(lock_, env_.lock_file(join_path(dir_, "lock")));
  MutexLock lock(mutex_);
  HCACHE_RETURN_IF_ERROR(load_folder(folder(kFiles), &files_));
  HCACHE_RETURN_IF_ERROR(load_folder(folder(kBatches), &batches_));
  return remove_orphans();
}

template <typename Record>
Status BatchStore::load_folder(const std::string& folder, std::map<std::string, Record>* records) {
  HCACHE_ASSIGN_OR_RETURN(const std::vector<std::string> names, env_.list_dir(folder));
  for (const std::string& name : names) {
    if (!name.ends_with(kJson)) continue;
    const std::string path = join_path(folder, name);
    HCACHE_ASSIGN_OR_RETURN(const std::string text, read_whole_file(env_, path));
    const Result<Json> json = api::parse_body(text);
    Status status = json.status();
    const std::string id = name.substr(0, name.size() - kJson.size());
    Record record;
    if (status.ok()) {
      status = json->is_object() ? read_members(*json, &record) : data_loss("it is no object");
    }
    if (status.ok() && record.id != id) status = data_loss("it is that of another id");
    if (status.ok()) {
      (*records)[id] = std::move(record);
    } else {
      log::warn("{} is left alone: {}", path, status.message());
    }
  }
  return {};
}

// What writes left behind that were cut off, and results of a batch whose record is gone.
Status BatchStore::remove_orphans() {
  for (const char* in : {kFiles, kBatches}) {
    HCACHE_ASSIGN_OR_RETURN(const std::vector<std::string> names, env_.list_dir(folder(in)));
    const std::set<std::string> present(names.begin(), names.end());
    for (const std::string& name : names) {
      const bool named = name.ends_with(kJson) || present.contains(name + std::string(kJson));
      if (named || needed(name)) continue;
      HCACHE_RETURN_IF_ERROR(env_.remove_path(join_path(folder(in), name)));
    }
  }
  std::vector<std::string> unused;  // requests whose batch was not made any more
  for (const auto& [id, file] : files_) {
    const bool used = std::any_of(batches_.begin(), batches_.end(), [&id = id](const auto& entry) {
      const StoredBatch& b = entry.second;
      return b.input_file_id == id || b.output_file_id == id || b.error_file_id == id;
    });
    if (file.purpose == kMessagesPurpose && !used) unused.push_back(id);
  }
  for (const std::string& id : unused) HCACHE_RETURN_IF_ERROR(erase_file(id));
  return {};
}

std::string BatchStore::new_id(std::string_view prefix) {
  return fmt::format("{}{:016x}{:016x}", prefix, env_.random_u64(), env_.random_u64());
}

std::string BatchStore::content_path(const std::string& file_id) const {
  return join_path(folder(kFiles), file_id);
}

Result<uint64_t> BatchStore::used_bytes() const {
  uint64_t bytes = 0;
  for (const char* in : {kFiles, kBatches}) {
    HCACHE_ASSIGN_OR_RETURN(const std::vector<std::string> names, env_.list_dir(folder(in)));
    for (const std::string& name : names) {
      HCACHE_ASSIGN_OR_RETURN(const FileInfo info, env_.file_info(join_path(folder(in), name)));
      bytes += info.size;
    }
  }
  return bytes;
}

Status BatchStore::check_quota(uint64_t more) const {
  if (quota_bytes_ == 0) return {};
  HCACHE_ASSIGN_OR_RETURN(const uint64_t used, used_bytes());
  if (used + more <= quota_bytes_) return {};
  return resource_exhausted(
      fmt::format("{} bytes more are beyond --batch-quota ({} of {} are used); delete files or "
                  "batches that are no longer needed",
                  more, used, quota_bytes_));
}

Status BatchStore::write(const StoredFile& file) const {
  Json json;
  visit_members(file, Writer{json});
  return write_whole_file(env_, content_path(file.id) + std::string(kJson), api::to_text(json));
}

Status BatchStore::write(const StoredBatch& batch) const {
  Json json;
  visit_members(batch, Writer{json});
  return write_whole_file(env_, join_path(folder(kBatches), batch.id + std::string(kJson)),
                          api::to_text(json));
}

// ---- Files --------------------------------------------------------------------------------------

// Under its own name: nothing names it before it is whole.
Status BatchStore::write_content(const std::string& id, std::string_view content) const {
  const std::string path = content_path(id);
  const auto put = [&]() -> Status {
    HCACHE_ASSIGN_OR_RETURN(const auto file, env_.open_file(path, {.write = true, .create = true}));
    HCACHE_RETURN_IF_ERROR(
        file->write_at(0, std::as_bytes(std::span(content.data(), content.size()))));
    HCACHE_RETURN_IF_ERROR(file->sync());
    return env_.sync_dir(folder(kFiles));
  };
  Status status = put();
  if (!status.ok()) env_.remove_path(path).ignore("the next start removes it");
  return status;
}

Result<StoredFile> BatchStore::add_file(StoredFile file, std::string_view content) {
  MutexLock upload(upload_mutex_);
  HCACHE_RETURN_IF_ERROR(check_quota(content.size()));
  file.id = new_id("file-");
  file.bytes = content.size();
  file.created_ns = env_.wall_ns();
  HCACHE_RETURN_IF_ERROR(write_content(file.id, content));
  HCACHE_RETURN_IF_ERROR(publish(file));
  return file;
}

Status BatchStore::publish(StoredFile file) {
  MutexLock lock(mutex_);
  HCACHE_RETURN_IF_ERROR(write(file));
  std::string id = file.id;
  files_[std::move(id)] = std::move(file);
  return {};
}

Result<StoredFile> BatchStore::file(std::string_view owner, const std::string& id) const {
  MutexLock lock(mutex_);
  const auto file = files_.find(id);
  if (file == files_.end() || file->second.owner != owner) return not_there("file", id);
  return file->second;
}

std::vector<StoredFile> BatchStore::files(std::string_view owner) const {
  MutexLock lock(mutex_);
  std::vector<StoredFile> out;
  for (const auto& [id, file] : files_) {
    if (file.owner == owner) out.push_back(file);
  }
  newest_first(&out);
  return out;
}

bool BatchStore::needed(const std::string& file_id) const {
  return std::any_of(batches_.begin(), batches_.end(), [&](const auto& entry) {
    const StoredBatch& b = entry.second;
    return !has_ended(b.status) && (b.input_file_id == file_id || b.output_file_id == file_id ||
                                    b.error_file_id == file_id);
  });
}

Status BatchStore::erase_file(const std::string& id) {
  // First the name: content without one is removed at the next start.
  for (const std::string& path : {content_path(id) + std::string(kJson), content_path(id)}) {
    const Status removed = env_.remove_path(path);
    if (!removed.ok() && removed.code() != Code::kNotFound) return removed;
  }
  files_.erase(id);
  return env_.sync_dir(folder(kFiles));
}

Status BatchStore::remove_file(std::string_view owner, const std::string& id) {
  MutexLock lock(mutex_);
  const auto file = files_.find(id);
  if (file == files_.end() || file->second.owner != owner) return not_there("file", id);
  if (needed(id)) {
    return failed_precondition(
        fmt::format("file '{}' belongs to a batch that has not ended; cancel the batch first", id));
  }
  return erase_file(id);
}

// ---- Batches ------------------------------------------------------------------------------------

Status BatchStore::add_batch(const StoredBatch& batch) {
  MutexLock lock(mutex_);
  HCACHE_RETURN_IF_ERROR(check_quota(0));
  HCACHE_RETURN_IF_ERROR(write(batch));
  batches_[batch.id] = batch;
  return {};
}

void BatchStore::set_counts(const std::string& id, const BatchRun::Counts& counts) {
  MutexLock lock(mutex_);
  if (const auto batch = batches_.find(id); batch != batches_.end()) batch->second.counts = counts;
}

Result<StoredBatch> BatchStore::change(const std::string& id, const Change& change) {
  MutexLock lock(mutex_);
  const auto found = batches_.find(id);
  if (found == batches_.end()) return not_there("batch", id);
  StoredBatch changed = found->second;
  HCACHE_RETURN_IF_ERROR(change(changed));
  HCACHE_RETURN_IF_ERROR(write(changed));
  found->second = changed;
  return changed;
}

Result<StoredBatch> BatchStore::batch(std::string_view owner, const std::string& id) const {
  MutexLock lock(mutex_);
  const auto batch = batches_.find(id);
  if (batch == batches_.end() || batch->second.owner != owner) return not_there("batch", id);
  return batch->second;
}

Result<StoredBatch> BatchStore::batch(const std::string& id) const {
  MutexLock lock(mutex_);
  const auto batch = batches_.find(id);
  if (batch == batches_.end()) return not_there("batch", id);
  return batch->second;
}

std::vector<StoredBatch> BatchStore::batches(std::string_view owner, bool anthropic) const {
  MutexLock lock(mutex_);
  std::vector<StoredBatch> out;
  for (const auto& [id, batch] : batches_) {
    if (batch.owner == owner && batch.anthropic == anthropic) out.push_back(batch);
  }
  newest_first(&out);
  return out;
}

std::vector<StoredBatch> BatchStore::unended() const {
  MutexLock lock(mutex_);
  std::vector<StoredBatch> out;
  for (const auto& [id, batch] : batches_) {
    if (!has_ended(batch.status)) out.push_back(batch);
  }
  newest_first(&out);
  std::reverse(out.begin(), out.end());
  return out;
}

BatchTally BatchStore::tally() const {
  MutexLock lock(mutex_);
  BatchTally tally;
  for (const auto& [id, batch] : batches_) {
    ++tally.by_status.at(static_cast<size_t>(batch.status));
    if (has_ended(batch.status)) continue;
    tally.counts.total += batch.counts.total;
    tally.counts.completed += batch.counts.completed;
    tally.counts.failed += batch.counts.failed;
    tally.counts.cancelled += batch.counts.cancelled;
    tally.counts.expired += batch.counts.expired;
  }
  return tally;
}

Status BatchStore::erase_batch(const std::string& id) {
  const StoredBatch batch = batches_.at(id);
  const std::string path = join_path(folder(kBatches), id + std::string(kJson));
  const Status removed = env_.remove_path(path);
  if (!removed.ok() && removed.code() != Code::kNotFound) return removed;
  HCACHE_RETURN_IF_ERROR(env_.sync_dir(folder(kBatches)));
  batches_.erase(id);
  // An uploaded file is its client's.
  if (batch.anthropic) HCACHE_RETURN_IF_ERROR(erase_file(batch.input_file_id));
  HCACHE_RETURN_IF_ERROR(erase_file(batch.output_file_id));
  return erase_file(batch.error_file_id);
}

Status BatchStore::remove_batch(std::string_view owner, const std::string& id) {
  MutexLock lock(mutex_);
  const auto batch = batches_.find(id);
  if (batch == batches_.end() || batch->second.owner != owner) return not_there("batch", id);
  if (!has_ended(batch->second.status)) {
    return failed_precondition(fmt::format("batch '{}' has not ended; cancel it first", id));
  }
  return erase_batch(id);
}

Status BatchStore::expire(int64_t before_ns) {
  MutexLock lock(mutex_);
  const int64_t now_ns = env_.wall_ns();
  std::vector<std::string> batches;
  for (const auto& [id, batch] : batches_) {
    if (has_ended(batch.status) && batch.ended_ns < before_ns) batches.push_back(id);
  }
  for (const std::string& id : batches) HCACHE_RETURN_IF_ERROR(erase_batch(id));
  std::vector<std::string> files;
  for (const auto& [id, file] : files_) {
    const bool expired = file.expires_ns > 0 && file.expires_ns <= now_ns;
    if ((expired || file.created_ns < before_ns) && !needed(id)) files.push_back(id);
  }
  for (const std::string& id : files) HCACHE_RETURN_IF_ERROR(erase_file(id));
  return {};
}

}  // namespace hcache::server
