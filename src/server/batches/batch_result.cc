#include "batch_result.h"

#include <fmt/format.h>

#include <utility>

#include "base/ids.h"

namespace hcache::server {
namespace {

using api::Json;

// A line of ours is not hostile, only perhaps long.
constexpr api::BodyLimits kLineLimits = {.max_depth = 128, .max_values = size_t{1} << 24U};

Json id_json(std::string_view custom_id) {
  return custom_id.empty() ? Json(nullptr) : Json(custom_id);
}

Result<Json> parse_line(std::string_view line) {
  Result<Json> json = api::parse_body(line, kLineLimits);
  const auto is_result = [&] {
    return json->is_object() && json->contains("id") && (*json)["id"].is_string() &&
           json->contains("custom_id") && json->contains("response") && json->contains("error") &&
           ((*json)["response"].is_object() || (*json)["error"].is_object());
  };
  if (!json.ok() || !is_result()) return data_loss("it is no line of a batch's results");
  return json;
}

std::string text_of(const Json& object, const char* field) {
  const auto value = object.find(field);
  return value != object.end() && value->is_string() ? value->get<std::string>() : std::string();
}

int status_of(const Json& line) {
  const Json& response = line["response"];
  if (!response.is_object()) return 0;
  const auto status = response.find("status_code");
  return status != response.end() && status->is_number_integer() ? status->get<int>() : 0;
}

}  // namespace

std::string result_id(std::string_view input_hash, int64_t line) {
  Hasher hasher("hcache batch request");
  hasher.add(input_hash).add_u64(static_cast<uint64_t>(line));
  return "batch_req_" + to_hex(hasher.finish<Id128<struct BatchRequestTag>>());
}

std::string answer_line(std::string_view id, std::string_view custom_id,
                        const BatchAnswer& answer) {
  const Json line = {{"id", id},
                     {"custom_id", id_json(custom_id)},
                     {"response",
                      {{"status_code", answer.http_status},
                       {"request_id", answer.request_id},
                       {"body", answer.body}}},
                     {"error", nullptr}};
  return api::to_text(line) + "\n";
}

std::string error_line(std::string_view id, std::string_view custom_id, const BatchError& error) {
  const Json line = {{"id", id},
                     {"custom_id", id_json(custom_id)},
                     {"response", nullptr},
                     {"error", {{"code", error.code}, {"message", error.message}}}};
  return api::to_text(line) + "\n";
}

Result<BatchResult> parse_result_line(std::string_view line) {
  HCACHE_ASSIGN_OR_RETURN(const Json json, parse_line(line));
  BatchResult result;
  result.id = text_of(json, "id");
  result.custom_id = text_of(json, "custom_id");
  result.http_status = status_of(json);
  if (json["error"].is_object()) result.error_code = text_of(json["error"], "code");
  return result;
}

Result<std::string> anthropic_result_line(std::string_view line) {
  HCACHE_ASSIGN_OR_RETURN(Json json, parse_line(line));
  Json result;
  const int status = status_of(json);
  const std::string code = json["error"].is_object() ? text_of(json["error"], "code") : "";
  if (status >= 200 && status < 300) {
    result = {{"type", "succeeded"}, {"message", std::move(json["response"]["body"])}};
  } else if (status != 0) {
    result = {{"type", "errored"}, {"error", std::move(json["response"]["body"])}};
  } else if (code == kExpiredCode) {
    result = {{"type", "expired"}};
  } else if (code == kCancelledCode) {
    result = {{"type", "canceled"}};
  } else {
    result = {
        {"type", "errored"},
        {"error",
         {{"type", "error"},
          {"error",
           {{"type", "invalid_request_error"}, {"message", text_of(json["error"], "message")}}}}}};
  }
  return api::to_text({{"custom_id", json["custom_id"]}, {"result", std::move(result)}}) + "\n";
}

}  // namespace hcache::server
