#include "base/ids.h"

#include <blake2.h>

#include <algorithm>

namespace hcache {
namespace {

constexpr std::size_t kDigestBytes = 16;

blake2b_state* state_of(std::byte* storage) { return reinterpret_cast<blake2b_state*>(storage); }

int hex_value(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

std::array<std::byte, 8> little_endian(std::uint64_t value) {
  std::array<std::byte, 8> out{};
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<std::byte>((value >> (8 * i)) & 0xff);
  }
  return out;
}

}  // namespace

std::string to_hex(std::span<const std::uint8_t> bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  out.reserve(bytes.size() * 2);
  for (std::uint8_t b : bytes) {
    out.push_back(kDigits[b >> 4]);
    out.push_back(kDigits[b & 15]);
  }
  return out;
}

Status from_hex(std::string_view text, std::span<std::uint8_t> out) {
  auto bad = [&] {
    return invalid_argument("'" + std::string(text) + "' is not an id of " +
                            std::to_string(out.size() * 2) + " hex digits");
  };
  if (text.size() != out.size() * 2) return bad();
  for (std::size_t i = 0; i < out.size(); ++i) {
    const int high = hex_value(text[2 * i]);
    const int low = hex_value(text[2 * i + 1]);
    if (high < 0 || low < 0) return bad();
    out[i] = static_cast<std::uint8_t>(high * 16 + low);
  }
  return {};
}

Hasher::Hasher(std::string_view domain) {
  static_assert(sizeof(blake2b_state) <= sizeof state_, "room for libb2's state");
  static_assert(alignof(blake2b_state) <= 64, "alignment of libb2's state");
  if (blake2b_init(state_of(state_.data()), kDigestBytes) != 0) die("blake2b_init failed");
  add(domain);
}

Hasher& Hasher::add(std::span<const std::byte> bytes) {
  add_u64(bytes.size());
  return add_raw(bytes.data(), bytes.size());
}

Hasher& Hasher::add(std::string_view text) {
  add_u64(text.size());
  return add_raw(text.data(), text.size());
}

Hasher& Hasher::add_u64(std::uint64_t value) {
  const auto bytes = little_endian(value);
  return add_raw(bytes.data(), bytes.size());
}

Hasher& Hasher::add_raw(const void* data, std::size_t size) {
  if (size > 0) {
    blake2b_update(state_of(state_.data()), static_cast<const std::uint8_t*>(data), size);
  }
  return *this;
}

void Hasher::finish_into(std::uint8_t* out16) {
  blake2b_final(state_of(state_.data()), out16, kDigestBytes);
}

SaltId salt_id(std::string_view salt) { return Hasher("hcache salt 1").add(salt).finish<SaltId>(); }

ChunkId chunk_id(const Fingerprint& fingerprint, const SaltId& salt, const ChunkId& parent,
                 std::span<const std::int32_t> tokens) {
  Hasher hasher("hcache chunk 1");
  hasher.add(fingerprint).add(salt).add(parent).add_u64(tokens.size());
  std::array<std::uint8_t, 4 * 64> block;
  for (std::size_t i = 0; i < tokens.size();) {
    const std::size_t n = std::min<std::size_t>(tokens.size() - i, 64);
    for (std::size_t j = 0; j < n; ++j) {
      const auto token = static_cast<std::uint32_t>(tokens[i + j]);
      for (std::size_t b = 0; b < 4; ++b) {
        block[4 * j + b] = static_cast<std::uint8_t>(token >> (8 * b));
      }
    }
    hasher.add_raw(block.data(), 4 * n);
    i += n;
  }
  return hasher.finish<ChunkId>();
}

}  // namespace hcache
