#include "batch_json.h"

#include <fmt/format.h>

#include <string_view>
#include <utility>

namespace hcache::server {
namespace {

using api::Json;

constexpr int64_t kNsPerSecond = 1'000'000'000;

// Seconds since 1970; null: not yet, or never.
Json seconds(int64_t ns) { return ns > 0 ? Json(ns / kNsPerSecond) : Json(nullptr); }

// Null as there.
Json moment(int64_t ns) { return ns > 0 ? Json(api::moment_text(ns)) : Json(nullptr); }

Json ended_as(const StoredBatch& batch, BatchStatus status) {
  return batch.status == status ? seconds(batch.ended_ns) : Json(nullptr);
}

// "output_file_id": a file that is empty is none.
Json file_id(const StoredBatch& batch, const std::string& id, uint64_t bytes) {
  return has_ended(batch.status) && bytes > 0 ? Json(id) : Json(nullptr);
}

}  // namespace

Json file_json(const StoredFile& file) {
  return {{"id", file.id},
          {"object", "file"},
          {"bytes", file.bytes},
          {"created_at", seconds(file.created_ns)},
          {"expires_at", seconds(file.expires_ns)},
          {"filename", file.filename},
          {"purpose", file.purpose},
          {"status", "processed"}};
}

Json deleted_file_json(const std::string& id) {
  return {{"id", id}, {"object", "file"}, {"deleted", true}};
}

Json batch_json(const StoredBatch& batch) {
  Json errors;
  if (!batch.errors.empty()) errors = {{"object", "list"}, {"data", batch.errors}};
  const BatchRun::Counts& counts = batch.counts;
  return {{"id", batch.id},
          {"object", "batch"},
          {"endpoint", batch.endpoint},
          {"errors", std::move(errors)},
          {"input_file_id", batch.input_file_id},
          {"completion_window", batch.window},
          {"status", batch_status_name(batch.status)},
          {"output_file_id", file_id(batch, batch.output_file_id, batch.output_bytes)},
          {"error_file_id", file_id(batch, batch.error_file_id, batch.error_bytes)},
          {"created_at", seconds(batch.created_ns)},
          {"in_progress_at", seconds(batch.in_progress_ns)},
          {"expires_at", seconds(batch.expires_ns)},
          {"finalizing_at", seconds(batch.finalizing_ns)},
          {"completed_at", ended_as(batch, BatchStatus::kCompleted)},
          {"failed_at", ended_as(batch, BatchStatus::kFailed)},
          {"expired_at", ended_as(batch, BatchStatus::kExpired)},
          {"cancelling_at", seconds(batch.cancelling_ns)},
          {"cancelled_at", ended_as(batch, BatchStatus::kCancelled)},
          {"request_counts",
           {{"total", counts.total},
            {"completed", counts.completed},
            {"failed", counts.failed + counts.cancelled + counts.expired}}},
          {"metadata", batch.metadata}};
}

Json message_batch_json(const StoredBatch& batch) {
  const BatchRun::Counts& counts = batch.counts;
  const bool ended = has_ended(batch.status);
  const bool failed = batch.status == BatchStatus::kFailed;
  Json results_url;
  if (ended && !failed) results_url = "/v1/messages/batches/" + batch.id + "/results";
  return {{"id", batch.id},
          {"type", "message_batch"},
          {"processing_status", ended                                      ? "ended"
                                : batch.status == BatchStatus::kCancelling ? "canceling"
                                                                           : "in_progress"},
          {"request_counts",
           {{"processing", failed ? 0 : counts.total - counts.done()},
            {"succeeded", counts.completed},
            {"errored", failed ? counts.total - counts.completed : counts.failed},
            {"canceled", counts.cancelled},
            {"expired", counts.expired}}},
          {"ended_at", moment(batch.ended_ns)},
          {"created_at", moment(batch.created_ns)},
          {"expires_at", moment(batch.expires_ns)},
          {"archived_at", nullptr},
          {"cancel_initiated_at", moment(batch.cancelling_ns)},
          {"results_url", std::move(results_url)}};
}

Json deleted_message_batch_json(const std::string& id) {
  return {{"id", id}, {"type", "message_batch_deleted"}};
}

template <typename Record>
Result<Json> page_json(const std::vector<Record>& records, const api::ListPage& page,
                       Json (*word)(const Record&)) {
  std::vector<std::string_view> ids;
  ids.reserve(records.size());
  for (const Record& record : records) ids.push_back(record.id);
  return api::page_json(ids, page, [&](size_t i) { return word(records[i]); });
}

template Result<Json> page_json(const std::vector<StoredFile>&, const api::ListPage&,
                                Json (*)(const StoredFile&));
template Result<Json> page_json(const std::vector<StoredBatch>&, const api::ListPage&,
                                Json (*)(const StoredBatch&));

}  // namespace hcache::server
