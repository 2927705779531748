// Pages of K and V in fewer bytes. docs/format.md, "Packed pages", has the bytes.
//
// Without loss: without what they repeat, as byte planes, each compressed by zstd where that is
// shorter.
//
// Of floats the upper byte, sign and exponent, takes few of its values; the lower ones are noise.
// So the bytes of equal weight of all elements stand together, and a compressor for bytes does the
// rest.
#pragma once

#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/status.h"
#include "policy/packing.h"

namespace hcache::state {

// Bytes of one element of a type whose pages can be packed; 0: they can't.
[[nodiscard]] size_t packable_bytes(ggml_type type);

// Makes what it works with when it is first asked to. Threading: one thread at a time.
class KvPacker {
 public:
  KvPacker();
  ~KvPacker();
  KvPacker(const KvPacker&) = delete;
  KvPacker& operator=(const KvPacker&) = delete;

  // The page packed, to a multiple of n_rows bytes; empty where it would not be shorter, or can't
  // be rounded: a number of values that 32 does not divide. It holds values of `type`, which is one
  // of packable_bytes(). `mode`: kQ8_0 or kQ4_0, else without loss.
  [[nodiscard]] std::vector<std::byte> pack(std::span<const std::byte> page, ggml_type type,
                                            policy::PackMode mode, size_t n_rows);
  // Of a packed page that comes from anywhere. kDataLoss: it is none of a page of page.size()
  // bytes; what is in `page` then has no meaning.
  [[nodiscard]] Status unpack(std::span<const std::byte> packed, std::span<std::byte> page);

 private:
  std::vector<std::byte> pack_planes(std::span<const std::byte> page, size_t element_bytes,
                                     size_t n_rows);
  std::vector<std::byte> round(std::span<const std::byte> page, ggml_type type, ggml_type to,
                               size_t n_rows);
  Status unpack_planes(std::span<const std::byte> packed, std::span<std::byte> page);
  Status unpack_rounded(std::span<const std::byte> packed, std::span<std::byte> page);

  struct Contexts;
  std::unique_ptr<Contexts> contexts_;
  std::vector<std::byte> plane_;
  std::vector<float> values_;
};

// Memory for unpacked pages that is not asked for anew each time. Threading: one thread at a time.
class SpareBuffers {
 public:
  [[nodiscard]] std::vector<std::byte> take(size_t n_bytes) {
    std::vector<std::byte> buffer;
    if (!spare_.empty()) {
      buffer = std::move(spare_.back());
      spare_.pop_back();
    }
    buffer.resize(n_bytes);
    return buffer;
  }
  void give_back(std::vector<std::byte> buffer) {
    if (buffer.capacity() > 0) spare_.push_back(std::move(buffer));
  }

 private:
  std::vector<std::vector<std::byte>> spare_;
};

}  // namespace hcache::state
