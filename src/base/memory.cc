#include "base/memory.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <optional>
#include <string_view>
#include <vector>

namespace hcache {
namespace {

constexpr std::uint64_t kNoLimit = std::numeric_limits<std::uint64_t>::max();

// Files of /proc and /sys have no size beforehand.
std::string read_system_file(Env& env, const std::string& path) {
  constexpr std::size_t kMostBytes = 64 << 10;
  auto file = env.open_file(path, {});
  if (!file.ok()) return {};
  std::string text(kMostBytes, '\0');
  const auto got = (*file)->read_at(0, std::as_writable_bytes(std::span<char>(text)));
  text.resize(got.ok() ? *got : 0);
  return text;
}

std::optional<std::uint64_t> number_of(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc()) return std::nullopt;  // "max", or no such file
  return value;
}

std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    lines.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

// Of "name value" lines.
std::optional<std::uint64_t> member(const std::string& text, std::string_view name) {
  for (const std::string_view line : lines_of(text)) {
    if (line.starts_with(name)) return number_of(line.substr(name.size()));
  }
  return std::nullopt;
}

// The files of a version of control groups.
struct GroupFiles {
  const char* mount;
  std::vector<const char*> limits;
  const char* usage;
  const char* droppable;  // in memory.stat: page cache that nobody has used lately
};

std::uint64_t left_of_group(Env& env, const std::string& folder, const GroupFiles& files) {
  std::uint64_t limit = kNoLimit;
  for (const char* name : files.limits) {
    limit = std::min(limit, number_of(read_system_file(env, folder + name)).value_or(kNoLimit));
  }
  if (limit == kNoLimit) return kNoLimit;
  const std::uint64_t used = number_of(read_system_file(env, folder + files.usage)).value_or(0);
  const std::uint64_t cached =
      member(read_system_file(env, folder + "/memory.stat"), files.droppable).value_or(0);
  const std::uint64_t taken = used - std::min(used, cached);
  return limit - std::min(limit, taken);
}

// Of the group and all that hold it. In a container the path may not be there; its own group is
// then what stands at the mount.
std::uint64_t left_of_groups(Env& env, const std::string& root, std::string path,
                             const GroupFiles& files) {
  std::uint64_t left = kNoLimit;
  while (true) {
    if (path == "/") path.clear();
    left = std::min(left, left_of_group(env, root + files.mount + path, files));
    if (path.empty()) return left;
    path.erase(path.rfind('/'));
  }
}

}  // namespace

Result<std::uint64_t> free_memory(Env& env, const std::string& root) {
  const GroupFiles v2 = {
      "/sys/fs/cgroup", {"/memory.max", "/memory.high"}, "/memory.current", "inactive_file "};
  const GroupFiles v1 = {"/sys/fs/cgroup/memory",
                         {"/memory.limit_in_bytes"},
                         "/memory.usage_in_bytes",
                         "total_inactive_file "};
  const auto available = member(read_system_file(env, root + "/proc/meminfo"), "MemAvailable:");
  if (!available) return unavailable("/proc/meminfo does not say how much memory is available");
  std::uint64_t left = *available * 1024;
  const std::string groups = read_system_file(env, root + "/proc/self/cgroup");
  for (const std::string_view line :
       lines_of(groups)) {  // "4:memory:/user.slice", "0::/user.slice"
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (second == std::string_view::npos) continue;
    const std::string_view controllers = line.substr(first + 1, second - first - 1);
    const std::string path(line.substr(second + 1));
    if (!path.starts_with('/')) continue;
    if (controllers == "memory") left = std::min(left, left_of_groups(env, root, path, v1));
    if (controllers.empty()) left = std::min(left, left_of_groups(env, root, path, v2));
  }
  return left;
}

}  // namespace hcache
