// 128-bit identities: chunks, state fingerprints and salts, all made with BLAKE2b.
//
// An identity is content: two processes that see the same weights, salt and tokens compute the same
// ids, which is how prefixes are shared without anyone naming them (docs/architecture.md, "Terms").
// Threading: plain values; a Hasher belongs to one thread at a time.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace hcache {

// 16 bytes, printed as 32 lower-case hex digits. Tag keeps the kinds of ids apart.
template <typename Tag>
struct Id128 {
  std::array<std::uint8_t, 16> bytes{};

  [[nodiscard]] bool is_zero() const { return *this == Id128{}; }
  friend bool operator==(const Id128&, const Id128&) = default;
  friend auto operator<=>(const Id128&, const Id128&) = default;  // NOLINT(modernize-use-nullptr)
};

// One chunk of a chain. The zero id is no chunk: it is the parent of a chain's first chunk.
using ChunkId = Id128<struct ChunkIdTag>;
// Everything that changes K and V: weights, adapters, RoPE overrides, the arena's type.
using Fingerprint = Id128<struct FingerprintTag>;
// The hash of a cache salt; the salt itself is never stored.
using SaltId = Id128<struct SaltIdTag>;

// 32 hex digits and back. from_hex fails with invalid_argument unless it gets exactly 32 hex
// digits.
[[nodiscard]] std::string to_hex(std::span<const std::uint8_t> bytes);
[[nodiscard]] Status from_hex(std::string_view text, std::span<std::uint8_t> out);

template <typename Tag>
[[nodiscard]] std::string to_hex(const Id128<Tag>& id) {
  return to_hex(std::span<const std::uint8_t>(id.bytes));
}

template <typename Tag>
[[nodiscard]] Status parse_id(std::string_view text, Id128<Tag>* out) {
  return from_hex(text, out->bytes);
}

// BLAKE2b with a 128-bit digest. Every variable-length part is length-prefixed by add(), so no two
// different sequences of parts give the same input. `domain` keeps the uses apart.
class Hasher {
 public:
  explicit Hasher(std::string_view domain);
  Hasher(const Hasher&) = default;
  Hasher& operator=(const Hasher&) = default;

  // A length-prefixed part.
  Hasher& add(std::span<const std::byte> bytes);
  Hasher& add(std::string_view text);
  // A little-endian 64-bit number, without a prefix.
  Hasher& add_u64(std::uint64_t value);
  template <typename Tag>
  Hasher& add(const Id128<Tag>& id) {
    return add_raw(id.bytes.data(), id.bytes.size());
  }
  // Bytes without a prefix: pieces of one long part (a weight file, say) whose total length is
  // added by the caller.
  Hasher& add_raw(const void* data, std::size_t size);

  // The digest of all that was added; the hasher may not be used afterwards.
  template <typename Id>
  [[nodiscard]] Id finish() {
    Id id;
    finish_into(id.bytes.data());
    return id;
  }

 private:
  void finish_into(std::uint8_t* out16);
  // Room for libb2's state, whose type stays out of this header.
  alignas(64) std::array<std::byte, 512> state_;
};

// The hash under which a cache salt is stored. The empty salt has an id like any other.
[[nodiscard]] SaltId salt_id(std::string_view salt);

// Whose state it is.
struct Salt {
  SaltId id;     // nothing is shared between different ones
  SaltId owner;  // whose quota counts it: that of several salts, or of this one alone
  // By how much each of the model's adapters counts; the id tells them apart. Empty: none does.
  std::vector<float> adapters{};
  // Restores may do without all but this share of a layer's rows, in (0, 1]; the id tells such
  // state from what is exact (state/kept_state.h).
  double kv_budget = 1;

  friend bool operator==(const Salt&, const Salt&) = default;
};
// One that is its own owner.
[[nodiscard]] inline Salt own_salt(std::string_view salt) {
  const SaltId id = salt_id(salt);
  return {id, id};
}

// The id of the chunk that follows `parent` (zero: the first of its chain) and holds `tokens`:
// BLAKE2b-128 of (fingerprint, salt_id(salt), parent, tokens).
[[nodiscard]] ChunkId chunk_id(const Fingerprint& fingerprint, const SaltId& salt,
                               const ChunkId& parent, std::span<const std::int32_t> tokens);
[[nodiscard]] inline ChunkId chunk_id(const Fingerprint& fingerprint, std::string_view salt,
                                      const ChunkId& parent, std::span<const std::int32_t> tokens) {
  return chunk_id(fingerprint, salt_id(salt), parent, tokens);
}

}  // namespace hcache

template <typename Tag>
struct std::hash<hcache::Id128<Tag>> {
  // The bytes are a cryptographic hash already.
  std::size_t operator()(const hcache::Id128<Tag>& id) const noexcept {
    std::size_t h = 0;
    std::memcpy(&h, id.bytes.data(), sizeof h);
    return h;
  }
};
