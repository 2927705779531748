// Logging to stderr. Quiet by default: only warnings and errors appear.
//
// Lines are for people; programs read metrics and JSON instead. Libraries log what a status can't
// say: something that went wrong and was survived. Threading: any thread.
#pragma once

#include <fmt/format.h>

#include <string_view>
#include <utility>

namespace hcache::log {

enum class Level { kDebug, kInfo, kWarn, kError, kOff };

// Everything below `level` is dropped. Default: kWarn.
void set_level(Level level);
[[nodiscard]] bool enabled(Level level);
void write(Level level, std::string_view line);

template <typename... Args>
void debug(fmt::format_string<Args...> format, Args&&... args) {
  if (enabled(Level::kDebug))
    write(Level::kDebug, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void info(fmt::format_string<Args...> format, Args&&... args) {
  if (enabled(Level::kInfo)) write(Level::kInfo, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void warn(fmt::format_string<Args...> format, Args&&... args) {
  if (enabled(Level::kWarn)) write(Level::kWarn, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void error(fmt::format_string<Args...> format, Args&&... args) {
  if (enabled(Level::kError))
    write(Level::kError, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace hcache::log
