// AES-256-GCM with one key.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "format.h"

namespace hcache::store {

// By Intel's multi-buffer library where the build and the processor have it, which with VAES takes
// a third of libcrypto 3.0's time, else by libcrypto: the same bytes.
//
// Threading: any thread.
class AesGcm {
 public:
  using Key = std::array<std::uint8_t, 32>;
  enum class Library : std::uint8_t { kFastest, kCrypto };

  explicit AesGcm(const Key& key, Library library = Library::kFastest);
  ~AesGcm();
  AesGcm(AesGcm&&) noexcept;
  AesGcm& operator=(AesGcm&&) noexcept;

  // With a new random nonce. `in` and `out` may be the same; `of` is covered by the tag as well.
  void encrypt(std::string_view of, std::span<const std::byte> in, std::byte* out,
               PageSeal* seal) const;
  // False: not what was encrypted with this key and `of`; the bytes are then worthless.
  [[nodiscard]] bool decrypt(std::string_view of, const PageSeal& seal,
                             std::span<std::byte> in_place) const;

  // Which library it uses, for people: "libcrypto".
  [[nodiscard]] std::string_view library() const;

 private:
  struct Prepared;

  Key key_;
  std::unique_ptr<Prepared> prepared_;  // null: libcrypto
};

}  // namespace hcache::store
