// Pages of K and V without what they repeat: byte planes, each compressed by zstd where that is
// shorter. Lossless. docs/format.md, "Packed pages", has the bytes.
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

  // The page packed, to a multiple of n_rows bytes; empty where it would not be shorter. The page
  // is a multiple of element_bytes, which is packable_bytes() of something.
  [[nodiscard]] std::vector<std::byte> pack(std::span<const std::byte> page, size_t element_bytes,
                                            size_t n_rows);
  // Of a packed page that comes from anywhere. kDataLoss: it is none of a page of page.size()
  // bytes; what is in `page` then has no meaning.
  [[nodiscard]] Status unpack(std::span<const std::byte> packed, std::span<std::byte> page);

 private:
  struct Contexts;
  std::unique_ptr<Contexts> contexts_;
  std::vector<std::byte> plane_;
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
