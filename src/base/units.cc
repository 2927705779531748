#include "base/units.h"

#include <fmt/format.h>

#include <array>
#include <cctype>
#include <charconv>
#include <cmath>

namespace hcache {
namespace {

struct Unit {
  std::string_view name;  // lower case
  double factor;
};

constexpr double kKi = 1024.0;

constexpr std::array<Unit, 18> kByteUnits = {{
    {"", 1},
    {"b", 1},
    {"kb", 1e3},
    {"mb", 1e6},
    {"gb", 1e9},
    {"tb", 1e12},
    {"kib", kKi},
    {"mib", kKi* kKi},
    {"gib", 1 << 30},
    {"tib", kKi* kKi* kKi* kKi},
    {"k", kKi},
    {"m", kKi* kKi},
    {"g", 1 << 30},
    {"t", kKi* kKi* kKi* kKi},
    {"byte", 1},
    {"bytes", 1},
    {"ki", kKi},
    {"mi", kKi* kKi},
}};

constexpr std::array<Unit, 9> kTimeUnits = {{
    {"", 1e9},
    {"ns", 1},
    {"us", 1e3},
    {"ms", 1e6},
    {"s", 1e9},
    {"m", 60e9},
    {"min", 60e9},
    {"h", 3600e9},
    {"d", 86400e9},
}};

// Lower case, and without spaces except between digits, where they are a mistake.
std::string normalised(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    const bool next_is_digit =
        i + 1 < text.size() && std::isdigit(static_cast<unsigned char>(text[i + 1])) != 0;
    const bool after_digit =
        !out.empty() && std::isdigit(static_cast<unsigned char>(out.back())) != 0;
    if (std::isspace(c) != 0 && !(after_digit && next_is_digit)) continue;
    out.push_back(static_cast<char>(std::tolower(c)));
  }
  return out;
}

// Takes "<number><unit>" off the front of `rest`; false when there is none. The scaled value.
template <std::size_t N>
bool take_quantity(std::string_view* rest, const std::array<Unit, N>& units, double* out) {
  double number = 0;
  const auto [end, error] =
      std::from_chars(rest->data(), rest->data() + rest->size(), number, std::chars_format::fixed);
  if (error != std::errc() || !std::isfinite(number) || number < 0) return false;
  rest->remove_prefix(static_cast<std::size_t>(end - rest->data()));
  std::size_t n = 0;
  while (n < rest->size() && std::isalpha(static_cast<unsigned char>((*rest)[n])) != 0) ++n;
  const std::string_view name = rest->substr(0, n);
  for (const Unit& unit : units) {
    if (unit.name == name) {
      *out = number * unit.factor;
      rest->remove_prefix(n);
      return true;
    }
  }
  return false;
}

Result<double> parse_size(std::string_view text, bool rate) {
  std::string clean = normalised(text);
  std::string_view rest = clean;
  if (rate && rest.ends_with("/s")) rest.remove_suffix(2);
  double value = 0;
  if (!take_quantity(&rest, kByteUnits, &value) || !rest.empty()) {
    return invalid_argument(fmt::format("'{}' is no {} (examples: {})", text,
                                        rate ? "rate" : "number of bytes",
                                        rate ? "19MB/s, 1.7GB/s" : "64MiB, 1.5GB, 4096"));
  }
  return value;
}

}  // namespace

Result<std::uint64_t> parse_bytes(std::string_view text) {
  HCACHE_ASSIGN_OR_RETURN(const double value, parse_size(text, false));
  if (value >= 9.2e18) return invalid_argument(fmt::format("'{}' is too large", text));
  return static_cast<std::uint64_t>(std::llround(value));
}

Result<double> parse_rate(std::string_view text) { return parse_size(text, true); }

Result<std::int64_t> parse_duration(std::string_view text) {
  const std::string clean = normalised(text);
  std::string_view rest = clean;
  double total = 0;
  do {
    double part = 0;
    if (!take_quantity(&rest, kTimeUnits, &part)) {
      return invalid_argument(
          fmt::format("'{}' is no duration (examples: 250ms, 30s, 2m30s, 7d)", text));
    }
    total += part;
  } while (!rest.empty());
  if (total >= 9.2e18) return invalid_argument(fmt::format("'{}' is too long", text));
  return std::llround(total);
}

std::string format_bytes(std::uint64_t bytes) {
  static constexpr std::array<const char*, 4> kNames = {"KiB", "MiB", "GiB", "TiB"};
  if (bytes < 1024) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes) / kKi;
  std::size_t i = 0;
  while (value >= kKi && i + 1 < kNames.size()) {
    value /= kKi;
    ++i;
  }
  if (value == std::floor(value)) return fmt::format("{:.0f} {}", value, kNames[i]);
  return fmt::format("{:.2f} {}", value, kNames[i]);
}

std::string format_rate(double bytes_per_s) {
  static constexpr std::array<const char*, 5> kNames = {"B/s", "kB/s", "MB/s", "GB/s", "TB/s"};
  std::size_t i = 0;
  while (bytes_per_s >= 1000 && i + 1 < kNames.size()) {
    bytes_per_s /= 1000;
    ++i;
  }
  return fmt::format("{:.1f} {}", bytes_per_s, kNames[i]);
}

std::string format_duration(std::int64_t ns) {
  const auto value = static_cast<double>(ns);
  if (ns < 0) return "-" + format_duration(-ns);
  if (ns < 1000) return fmt::format("{} ns", ns);
  if (value < 1e6) return fmt::format("{:.1f} us", value / 1e3);
  if (value < 1e9) return fmt::format("{:.1f} ms", value / 1e6);
  if (value < 60e9) return fmt::format("{:.2f} s", value / 1e9);
  const std::int64_t seconds = ns / 1'000'000'000;
  if (seconds < 3600) return fmt::format("{}m {}s", seconds / 60, seconds % 60);
  return fmt::format("{}h {}m", seconds / 3600, seconds / 60 % 60);
}

}  // namespace hcache
