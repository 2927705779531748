// Fuzz target for packed pages of K and V: whatever is unpacked ends in an error or in a page.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "fuzz.h"
#include "packed_kv.h"

namespace {

constexpr size_t kPageBytes = 4096;

using hcache::policy::PackMode;

std::string packed_seed(ggml_type type, PackMode mode) {
  std::vector<std::byte> page(kPageBytes);
  for (size_t i = 0; i < page.size(); ++i) page[i] = static_cast<std::byte>(i * i % 7 + i % 3);
  const std::vector<std::byte> packed = hcache::state::KvPacker().pack(page, type, mode, 64);
  return {reinterpret_cast<const char*>(packed.data()), packed.size()};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static hcache::state::KvPacker packer;
  // A copy of its own, so that a read behind its end is one behind an allocation's.
  const std::vector<std::byte> packed(reinterpret_cast<const std::byte*>(data),
                                      reinterpret_cast<const std::byte*>(data) + size);
  std::vector<std::byte> page(kPageBytes);
  packer.unpack(packed, page).ignore("no crash");
  return 0;
}

std::vector<std::string> hcache::fuzz::seeds() {
  return {packed_seed(GGML_TYPE_F16, PackMode::kOn), packed_seed(GGML_TYPE_F32, PackMode::kOn),
          packed_seed(GGML_TYPE_F16, PackMode::kQ8_0),
          packed_seed(GGML_TYPE_BF16, PackMode::kQ4_0)};
}
