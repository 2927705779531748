// Numbers and ids as bytes and as text: what every format of the store is made of.
//
// Threading: plain values.
#pragma once

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <system_error>

#include "base/ids.h"

namespace hcache::store {

// Little-endian, sizeof(T) bytes. The caller has made sure that they are there.
template <typename T>
[[nodiscard]] T number_at(std::string_view in, std::size_t at) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i) {
    value |= static_cast<std::uint64_t>(static_cast<unsigned char>(in[at + i])) << (8 * i);
  }
  return static_cast<T>(value);
}

// Builds bytes: little-endian numbers, ids and text, one behind the other.
class Writer {
 public:
  template <typename T>
  Writer& number(T value) {
    for (std::size_t i = 0; i < sizeof(T); ++i) {
      out_.push_back(static_cast<char>((static_cast<std::uint64_t>(value) >> (8 * i)) & 0xff));
    }
    return *this;
  }
  template <typename Tag>
  Writer& id(const Id128<Tag>& id) {
    out_.append(reinterpret_cast<const char*>(id.bytes.data()), id.bytes.size());
    return *this;
  }
  Writer& text(std::string_view text) {
    out_.append(text);
    return *this;
  }
  std::string& out() { return out_; }

 private:
  std::string out_;
};

// Reads what Writer wrote. The caller checks lengths first.
class Parser {
 public:
  explicit Parser(std::string_view in) : in_(in) {}
  template <typename T>
  T number() {
    at_ += sizeof(T);
    return number_at<T>(in_, at_ - sizeof(T));
  }
  template <typename Id>
  Id id() {
    Id id;
    std::memcpy(id.bytes.data(), in_.data() + at_, id.bytes.size());
    at_ += id.bytes.size();
    return id;
  }
  std::string_view text(std::size_t n) {
    const std::string_view out = in_.substr(at_, n);
    at_ += n;
    return out;
  }

 private:
  std::string_view in_;
  std::size_t at_ = 0;
};

// Whether all of the text is a number, and which.
template <typename T>
[[nodiscard]] bool parse_number(std::string_view text, int base, T* out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out, base);
  return error == std::errc() && end == text.data() + text.size() && !text.empty();
}

}  // namespace hcache::store
