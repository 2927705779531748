#include "api/json.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <ctime>
#include <utility>
#include <vector>

namespace hcache::api {
namespace {

// Builds the tree from the library's events: unlike its own builder it counts, and it appends keys
// without looking whether they are there, which would take quadratic time.
class Builder {
 public:
  Builder(Json* root, const BodyLimits& limits) : root_(root), limits_(limits) {}
  [[nodiscard]] const Status& status() const { return status_; }

  bool null() { return add(nullptr) != nullptr; }
  bool boolean(bool value) { return add(value) != nullptr; }
  bool number_integer(Json::number_integer_t value) { return add(value) != nullptr; }
  bool number_unsigned(Json::number_unsigned_t value) { return add(value) != nullptr; }
  bool number_float(Json::number_float_t value, const std::string& /*text*/) {
    return add(value) != nullptr;
  }
  bool string(std::string& value) { return add(std::move(value)) != nullptr; }
  bool binary(Json::binary_t& /*value*/) { return fail("the body is binary"); }
  bool start_object(size_t /*size*/) { return open(Json::object()); }
  bool start_array(size_t /*size*/) { return open(Json::array()); }
  bool end_object() { return close(); }
  bool end_array() { return close(); }
  bool key(std::string& value) {
    key_ = std::move(value);
    return true;
  }
  bool parse_error(size_t position, const std::string& /*token*/,
                   const nlohmann::detail::exception& error) {
    // "[json.exception...] parse error at line 1, column 2: syntax error while ... - reason; ..."
    std::string_view reason = error.what();
    if (const size_t at = reason.find("] "); at != std::string_view::npos) {
      reason.remove_prefix(at + 2);
    }
    if (const size_t at = reason.find(" - "); at != std::string_view::npos) {
      reason.remove_prefix(at + 3);
    }
    reason = reason.substr(0, reason.find("; last read"));
    return fail(fmt::format("the body is no JSON: {} at byte {}", reason, position));
  }

 private:
  bool fail(std::string message) {
    status_ = invalid_argument(std::move(message));
    return false;
  }

  // Null when a limit is exceeded.
  Json* add(Json value) {
    if (++values_ > limits_.max_values) {
      fail(fmt::format("the body holds more than {} values", limits_.max_values));
      return nullptr;
    }
    if (open_.empty()) {
      *root_ = std::move(value);
      return root_;
    }
    Json& parent = *open_.back();
    if (parent.is_array()) {
      parent.push_back(std::move(value));
      return &parent.back();
    }
    auto& members = parent.get_ref<Json::object_t&>();
    return &members.emplace_back(std::move(key_), std::move(value)).second;
  }

  bool open(Json container) {
    if (open_.size() >= limits_.max_depth) {
      return fail(fmt::format("the body is nested deeper than {} levels", limits_.max_depth));
    }
    Json* place = add(std::move(container));
    if (place != nullptr) open_.push_back(place);
    return place != nullptr;
  }

  bool close() {
    open_.pop_back();
    return true;
  }

  Json* root_;
  BodyLimits limits_;
  std::vector<Json*> open_;  // a container does not move while another one in it is open
  std::string key_;
  size_t values_ = 0;
  Status status_;
};

}  // namespace

Result<Json> parse_body(std::string_view body, const BodyLimits& limits) {
  Json root;
  Builder builder(&root, limits);
  if (!Json::sax_parse(body.begin(), body.end(), &builder)) return builder.status();
  return root;
}

std::string to_text(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string moment_text(int64_t wall_ns) {
  constexpr int64_t kNsPerSecond = 1'000'000'000;
  const auto since_1970 = static_cast<std::time_t>(wall_ns / kNsPerSecond);
  std::tm utc = {};
  gmtime_r(&since_1970, &utc);
  return fmt::format("{:%Y-%m-%dT%H:%M:%S}.{:06}Z", utc, wall_ns % kNsPerSecond / 1000);
}

}  // namespace hcache::api
