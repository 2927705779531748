#include "model_choice.h"

#include <algorithm>
#include <array>
#include <utility>

#include "api/json.h"

namespace hcache::router {
namespace {

using api::Json;

constexpr std::string_view kPrefix = "/upstream/";
constexpr std::size_t kLargestKeepAlive = 64 * 1024;  // bytes of a body that is looked into for it

// Takes the library's events and stops at the name. The deepest nesting is not its concern: it
// keeps a number alone.
class NameFinder {
 public:
  [[nodiscard]] std::optional<std::string> take() {
    return model_ ? std::move(model_) : std::move(name_);
  }

  bool null() { return true; }
  bool boolean(bool /*value*/) { return true; }
  bool number_integer(Json::number_integer_t /*value*/) { return true; }
  bool number_unsigned(Json::number_unsigned_t /*value*/) { return true; }
  bool number_float(Json::number_float_t /*value*/, const std::string& /*text*/) { return true; }
  bool binary(Json::binary_t& /*value*/) { return false; }
  bool string(std::string& value) {
    if (depth_ != 1 || !in_object_) return depth_ > 0;
    if (key_ == Key::kModel) {
      model_ = std::move(value);
      return false;
    }
    if (key_ == Key::kName && !name_) name_ = std::move(value);
    return true;
  }
  bool start_object(std::size_t /*size*/) {
    if (depth_++ == 0) in_object_ = true;
    return true;
  }
  bool start_array(std::size_t /*size*/) { return depth_++ > 0; }
  bool end_object() {
    --depth_;
    return true;
  }
  bool end_array() {
    --depth_;
    return true;
  }
  bool key(std::string& value) {
    if (depth_ != 1) return true;
    key_ = value == "model" ? Key::kModel : value == "name" ? Key::kName : Key::kOther;
    return true;
  }
  static bool parse_error(std::size_t /*position*/, const std::string& /*token*/,
                          const nlohmann::detail::exception& /*error*/) {
    return false;
  }

 private:
  enum class Key { kOther, kModel, kName };

  std::size_t depth_ = 0;
  bool in_object_ = false;
  Key key_ = Key::kOther;
  std::optional<std::string> model_;
  std::optional<std::string> name_;
};

}  // namespace

std::optional<std::string> model_in_body(std::string_view body) {
  if (body.empty()) return std::nullopt;
  NameFinder finder;
  static_cast<void>(
      Json::sax_parse(body.begin(), body.end(), &finder));  // false when it was stopped
  return finder.take();
}

std::optional<std::string> model_of(const http::Request& request) {
  if (auto name = model_in_body(request.body)) return name;
  const std::string* name = request.query_value("model");
  return name == nullptr ? std::nullopt : std::optional(*name);
}

bool page_observes(std::string_view method, std::string_view path) {
  constexpr std::array<std::string_view, 3> kMore = {"/v1/models", "/v1/sessions", "/v1/store"};
  return only_observes(method, path) ||
         (method == "GET" && std::ranges::find(kMore, path) != kMore.end());
}

bool only_observes(std::string_view method, std::string_view path) {
  constexpr std::array<std::string_view, 5> kPaths = {"/metrics", "/slots", "/events", "/health",
                                                      "/v1/health"};
  return (method == "GET" || method == "HEAD") && std::ranges::find(kPaths, path) != kPaths.end();
}

std::string behind_prefix(std::string_view target) {
  if (!target.starts_with(kPrefix)) return {};
  const std::size_t end = target.find_first_of("/?", kPrefix.size());
  if (end == std::string_view::npos) return "/";
  return (target[end] == '?' ? "/" : "") + std::string(target.substr(end));
}

bool asks_to_unload(const http::Request& request) {
  const bool chat = request.path == "/api/chat";
  if ((!chat && request.path != "/api/generate") || request.body.size() > kLargestKeepAlive) {
    return false;
  }
  const Result<Json> body = api::parse_body(request.body);
  if (!body.ok() || !body->is_object() || !body->contains("keep_alive")) return false;
  const Json& keep = (*body)["keep_alive"];
  const bool none = (keep.is_number() && keep == 0) ||
                    (keep.is_string() && (keep == "0" || keep == "0s" || keep == "0m"));
  const char* const content = chat ? "messages" : "prompt";
  return none && (!body->contains(content) || (*body)[content].empty() || (*body)[content] == "");
}

}  // namespace hcache::router
