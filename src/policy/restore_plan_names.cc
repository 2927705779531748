// How methods, modes and schedules are written.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "policy/restore_plan.h"

namespace hcache::policy {
namespace {

constexpr std::array<std::string_view, 6> kModeNames = {
    "plan", "hidden", "kv", "recompute", "naive-hybrid", "token-partition"};

}  // namespace

std::string_view method_name(Method method) {
  switch (method) {
    case Method::kRecompute: return "RE";
    case Method::kHidden: return "H";
    case Method::kKv: return "KV";
    case Method::kNone: return "-";
  }
  return "?";
}

std::string_view mode_name(Mode mode) { return kModeNames.at(static_cast<size_t>(mode)); }

Result<Mode> parse_mode(std::string_view name) {
  for (size_t i = 0; i < kModeNames.size(); ++i) {
    if (kModeNames[i] == name) return static_cast<Mode>(i);
  }
  return invalid_argument(
      fmt::format("unknown method '{}' ({})", name, fmt::join(kModeNames, ", ")));
}

std::string schedule_string(const std::vector<Method>& layers) {
  std::string text;
  for (Method method : {Method::kRecompute, Method::kHidden, Method::kKv}) {
    auto n = std::count(layers.begin(), layers.end(), method);
    if (n == 0) continue;
    if (!text.empty()) text += ' ';
    text += fmt::format("{}:{}", method_name(method), n);
  }
  return text;
}

std::string paper_schedule_string(int32_t hidden, int32_t kv, int32_t recompute) {
  std::string text;
  auto add = [&](int32_t n, std::string_view name) {
    if (n == 0) return;
    if (!text.empty()) text += '+';
    text += fmt::format("{}{}", n, name);
  };
  add(hidden, "H");
  add(kv, "KV");
  add(recompute, "RE");
  return text;
}

}  // namespace hcache::policy
