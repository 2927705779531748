#include "base/base64.h"

#include <fmt/format.h>

#include <array>
#include <cstdint>

namespace hcache {
namespace {

constexpr std::string_view kDigits =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
constexpr uint8_t kNoDigit = 64;

constexpr std::array<uint8_t, 256> digit_values() {
  std::array<uint8_t, 256> values{};
  values.fill(kNoDigit);
  for (size_t i = 0; i < kDigits.size(); ++i) {
    values[static_cast<uint8_t>(kDigits[i])] = static_cast<uint8_t>(i);
  }
  return values;
}
constexpr std::array<uint8_t, 256> kValues = digit_values();

}  // namespace

std::string base64(std::string_view bytes) {
  std::string out;
  out.reserve((bytes.size() + 2) / 3 * 4);
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t three = 0;
    for (size_t k = 0; k < 3; ++k) {
      three = three << 8U | (i + k < bytes.size() ? static_cast<uint8_t>(bytes[i + k]) : 0U);
    }
    for (size_t k = 0; k < 4; ++k) {
      out += i + k <= bytes.size() ? kDigits[three >> (18 - 6 * k) & 63U] : '=';
    }
  }
  return out;
}

Result<std::string> from_base64(std::string_view text) {
  std::string out;
  out.reserve(text.size() / 4 * 3 + 3);
  uint32_t bits = 0;
  int n_bits = 0;
  size_t n_digits = 0;
  bool ended = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '\n' || c == '\r' || c == ' ' || c == '\t') continue;
    ended = ended || c == '=';
    if (c == '=') continue;
    const uint8_t value = kValues[static_cast<uint8_t>(c)];
    if (ended || value == kNoDigit) {
      return invalid_argument(fmt::format("byte {} of {} is no base64", i, text.size()));
    }
    ++n_digits;
    bits = bits << 6U | value;
    n_bits += 6;
    if (n_bits < 8) continue;
    n_bits -= 8;
    out += static_cast<char>(bits >> static_cast<uint32_t>(n_bits) & 0xFFU);
  }
  if (n_digits % 4 == 1) {
    return invalid_argument(fmt::format("base64 of {} digits is cut short", n_digits));
  }
  return out;
}

}  // namespace hcache
