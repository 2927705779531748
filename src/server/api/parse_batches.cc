// OpenAI's /v1/batches and Anthropic's /v1/messages/batches.
#include <fmt/format.h>

#include <string>
#include <utility>
#include <vector>

#include "base/units.h"
#include "request_fields.h"

namespace hcache::api {
namespace {

constexpr int64_t kNsPerSecond = 1'000'000'000;
const std::vector<std::string> kWindows = {"1h", "6h", "24h", "7d", "30d"};
constexpr double kMinFileTtlS = 3600;
constexpr double kMaxFileTtlS = 30 * 24 * 3600.0;

Status read_requests(const Json& value, const std::string& path, std::string* lines) {
  if (!value.is_array() || value.empty()) {
    return invalid_argument(fmt::format("{}: expected an array that is not empty", path));
  }
  for (size_t i = 0; i < value.size(); ++i) {
    const Json& one = value[i];
    if (!one.is_object()) return wrong_kind(fmt::format("{}[{}]", path, i), "an object", one);
    Json line = Json::object();
    for (const char* field : {"custom_id", "params"}) {
      const auto found = one.find(field);
      if (found == one.end()) {
        return invalid_argument(fmt::format("{}[{}].{}: it is missing", path, i, field));
      }
      line[field] = *found;
    }
    *lines += to_text(line) + "\n";
  }
  return {};
}

}  // namespace

void create_batch_fields(Fields& f, CreateBatch* batch) {
  f.required().text("input_file_id", &batch->input_file_id,
                    "An uploaded file of the purpose batch: a request a line.");
  f.required().text("endpoint", &batch->endpoint,
                    "Where its requests go: /v1/chat/completions, /v1/completions, "
                    "/v1/responses or /v1/messages.");
  f.one_of("completion_window", &batch->window, kWindows,
           "After so long, what has no answer expires.");
  metadata_field(f, &batch->metadata, "Kept with the batch.");
  f.object("output_expires_after", "When its results' files go.", [&](Fields& expiry) {
    std::string anchor = "created_at";
    int64_t seconds = 0;
    expiry.one_of("anchor", &anchor, {"created_at"}, {});
    expiry.required().integer("seconds", &seconds, {kMinFileTtlS, kMaxFileTtlS}, {});
    batch->output_ttl_ns = seconds * kNsPerSecond;
  });
}

void message_batch_fields(Fields& f, std::string* lines) {
  const Json schema = {
      {"type", "array"},
      {"minItems", 1},
      {"items",
       {{"type", "object"},
        {"properties",
         {{"custom_id", {{"type", "string"}}},
          {"params", {{"type", "object"}, {"description", "A MessagesRequest."}}}}},
        {"required", {"custom_id", "params"}}}}};
  f.required().value("requests", schema, "Each with an id of its own and the body of a request.",
                     [&](const Json& value, const std::string& path) {
                       return read_requests(value, path, lines);
                     });
}

Result<CreateBatch> parse_create_batch(const Json& body) {
  CreateBatch batch;
  HCACHE_RETURN_IF_ERROR(read_fields(body, [&](Fields& f) { create_batch_fields(f, &batch); }));
  HCACHE_ASSIGN_OR_RETURN(batch.window_ns, parse_duration(batch.window));
  return batch;
}

Result<std::string> parse_message_batch(const Json& body) {
  std::string lines;
  HCACHE_RETURN_IF_ERROR(read_fields(body, [&](Fields& f) { message_batch_fields(f, &lines); }));
  return lines;
}

}  // namespace hcache::api
