#include "packed_kv.h"

#include <zstd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "rounded_f16.h"

namespace hcache::state {
namespace {

constexpr std::byte kPlanes{1};
constexpr std::byte kRounded{2};
constexpr size_t kHeadBytes = 8;  // before the planes' lengths
constexpr size_t kMaxElementBytes = 4;
constexpr int kLevel = 1;  // higher ones find no more in noise

uint32_t read_u32(const std::byte* from) {
  uint32_t value = 0;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

void write_u32(std::byte* to, size_t value) {
  const auto narrow = static_cast<uint32_t>(value);
  std::memcpy(to, &narrow, sizeof(narrow));
}

// Byte `index` of every element.
template <size_t kElementBytes>
void take_plane(const std::byte* page, size_t n, size_t index, std::byte* plane) {
  for (size_t i = 0; i < n; ++i) plane[i] = page[i * kElementBytes + index];
}

void take_plane(std::span<const std::byte> page, size_t element_bytes, size_t index,
                std::byte* plane) {
  const size_t n = page.size() / element_bytes;
  element_bytes == 2 ? take_plane<2>(page.data(), n, index, plane)
                     : take_plane<4>(page.data(), n, index, plane);
}

// All planes, one behind the other, back into elements.
template <size_t kElementBytes>
void put_planes(const std::array<const std::byte*, kMaxElementBytes>& planes, size_t n,
                std::byte* page) {
  for (size_t i = 0; i < n; ++i) {
    for (size_t b = 0; b < kElementBytes; ++b) page[i * kElementBytes + b] = planes[b][i];
  }
}

// The numbers of types in rounded pages.
struct RoundedType {
  ggml_type type;
  std::byte number;
};
constexpr std::array kElements = {RoundedType{GGML_TYPE_F32, std::byte{1}},
                                  RoundedType{GGML_TYPE_F16, std::byte{2}},
                                  RoundedType{GGML_TYPE_BF16, std::byte{3}}};
constexpr std::array kRoundedTo = {RoundedType{GGML_TYPE_Q8_0, std::byte{8}},
                                   RoundedType{GGML_TYPE_Q4_0, std::byte{4}}};

template <size_t kTypes>
std::byte number_of(const std::array<RoundedType, kTypes>& types, ggml_type type) {
  return std::find_if(types.begin(), types.end(),
                      [&](const RoundedType& t) { return t.type == type; })
      ->number;
}
// COUNT: there is none.
template <size_t kTypes>
ggml_type type_of(const std::array<RoundedType, kTypes>& types, std::byte number) {
  const auto at = std::find_if(types.begin(), types.end(),
                               [&](const RoundedType& t) { return t.number == number; });
  return at == types.end() ? GGML_TYPE_COUNT : at->type;
}

void to_floats(std::span<const std::byte> page, ggml_type type, std::span<float> values) {
  const auto n = static_cast<int64_t>(values.size());
  if (type == GGML_TYPE_F32) {
    std::memcpy(values.data(), page.data(), page.size());
  } else {
    ggml_get_type_traits(type)->to_float(page.data(), values.data(), n);
  }
}

void from_floats(std::span<const float> values, ggml_type type, std::span<std::byte> page) {
  const auto n = static_cast<int64_t>(values.size());
  if (type == GGML_TYPE_F32) {
    std::memcpy(page.data(), values.data(), page.size());
  } else {
    ggml_get_type_traits(type)->from_float_ref(values.data(), page.data(), n);
  }
}

Status damaged(const char* what) {
  return data_loss(std::string("a packed page is damaged: ") + what);
}

}  // namespace

size_t packable_bytes(ggml_type type) {
  switch (type) {
    case GGML_TYPE_F16:
    case GGML_TYPE_BF16: return 2;
    case GGML_TYPE_F32: return 4;
    default: return 0;
  }
}

struct KvPacker::Contexts {
  struct Free {
    void operator()(ZSTD_CCtx* context) const { ZSTD_freeCCtx(context); }
    void operator()(ZSTD_DCtx* context) const { ZSTD_freeDCtx(context); }
  };
  std::unique_ptr<ZSTD_CCtx, Free> compress;
  std::unique_ptr<ZSTD_DCtx, Free> decompress;
};

KvPacker::KvPacker() : contexts_(std::make_unique<Contexts>()) {}
KvPacker::~KvPacker() = default;

std::vector<std::byte> KvPacker::pack(std::span<const std::byte> page, ggml_type type,
                                      policy::PackMode mode, size_t n_rows) {
  if (mode == policy::PackMode::kQ8_0) return round(page, type, GGML_TYPE_Q8_0, n_rows);
  if (mode == policy::PackMode::kQ4_0) return round(page, type, GGML_TYPE_Q4_0, n_rows);
  return pack_planes(page, packable_bytes(type), n_rows);
}

Status KvPacker::unpack(std::span<const std::byte> packed, std::span<std::byte> page) {
  if (packed.size() < kHeadBytes || read_u32(&packed[4]) != page.size()) {
    return damaged("its length");
  }
  if (packed[0] == kPlanes) return unpack_planes(packed, page);
  if (packed[0] == kRounded) return unpack_rounded(packed, page);
  return damaged("its head");
}

std::vector<std::byte> KvPacker::round(std::span<const std::byte> page, ggml_type type,
                                       ggml_type to, size_t n_rows) {
  const size_t n = page.size() / packable_bytes(type);
  if (n % static_cast<size_t>(ggml_blck_size(to)) != 0) return {};
  const size_t end = kHeadBytes + ggml_row_size(to, static_cast<int64_t>(n));
  const size_t padded = (end + n_rows - 1) / n_rows * n_rows;
  if (padded >= page.size()) return {};
  values_.resize(n);
  to_floats(page, type, values_);
  std::vector<std::byte> packed(padded);
  packed[0] = kRounded;
  packed[1] = number_of(kElements, type);
  packed[2] = number_of(kRoundedTo, to);
  write_u32(&packed[4], page.size());
  ggml_get_type_traits(to)->from_float_ref(values_.data(), &packed[kHeadBytes],
                                           static_cast<int64_t>(n));
  return packed;
}

Status KvPacker::unpack_rounded(std::span<const std::byte> packed, std::span<std::byte> page) {
  const ggml_type type = type_of(kElements, packed[1]);
  const ggml_type from = type_of(kRoundedTo, packed[2]);
  if (type == GGML_TYPE_COUNT || from == GGML_TYPE_COUNT) return damaged("its types");
  const size_t n = page.size() / packable_bytes(type);
  if (page.size() % packable_bytes(type) != 0 ||
      n % static_cast<size_t>(ggml_blck_size(from)) != 0 ||
      packed.size() < kHeadBytes + ggml_row_size(from, static_cast<int64_t>(n))) {
    return damaged("its length");
  }
  const auto blocks = packed.subspan(kHeadBytes);
  if (type == GGML_TYPE_F16 && rounded_to_f16(from, blocks, page)) return {};
  values_.resize(n);
  ggml_get_type_traits(from)->to_float(blocks.data(), values_.data(), static_cast<int64_t>(n));
  from_floats(values_, type, page);
  return {};
}

std::vector<std::byte> KvPacker::pack_planes(std::span<const std::byte> page, size_t element_bytes,
                                             size_t n_rows) {
  const size_t plane_bytes = page.size() / element_bytes;
  size_t end = kHeadBytes + 4 * element_bytes;
  plane_.resize(plane_bytes);
  if (!contexts_->compress) contexts_->compress.reset(ZSTD_createCCtx());
  std::vector<std::byte> packed(end + element_bytes * ZSTD_compressBound(plane_bytes));
  packed[0] = kPlanes;
  packed[1] = static_cast<std::byte>(element_bytes);
  write_u32(&packed[4], page.size());
  for (size_t i = 0; i < element_bytes; ++i) {
    take_plane(page, element_bytes, i, plane_.data());
    size_t n = ZSTD_compressCCtx(contexts_->compress.get(), &packed[end], packed.size() - end,
                                 plane_.data(), plane_bytes, kLevel);
    if (ZSTD_isError(n) != 0 || n >= plane_bytes) {
      n = plane_bytes;  // as it is
      std::memcpy(&packed[end], plane_.data(), n);
    }
    write_u32(&packed[kHeadBytes + 4 * i], n);
    end += n;
  }
  const size_t padded = (end + n_rows - 1) / n_rows * n_rows;
  if (padded >= page.size()) return {};
  packed.resize(end);
  packed.resize(padded);  // with zeros
  return packed;
}

Status KvPacker::unpack_planes(std::span<const std::byte> packed, std::span<std::byte> page) {
  const auto element_bytes = static_cast<size_t>(packed[1]);
  if (element_bytes != 2 && element_bytes != 4) return damaged("its elements");
  size_t begin = kHeadBytes + 4 * element_bytes;
  if (packed.size() < begin || page.size() % element_bytes != 0) return damaged("its length");
  const size_t plane_bytes = page.size() / element_bytes;
  plane_.resize(plane_bytes * element_bytes);
  if (!contexts_->decompress) contexts_->decompress.reset(ZSTD_createDCtx());
  std::array<const std::byte*, kMaxElementBytes> planes{};
  for (size_t i = 0; i < element_bytes; ++i) {
    const size_t n = read_u32(&packed[kHeadBytes + 4 * i]);
    if (n > packed.size() - begin) return damaged("the length of a plane");
    if (n == plane_bytes) {
      planes[i] = packed.data() + begin;
    } else {
      std::byte* plane = plane_.data() + i * plane_bytes;
      const size_t got = ZSTD_decompressDCtx(contexts_->decompress.get(), plane, plane_bytes,
                                             packed.data() + begin, n);
      if (ZSTD_isError(got) != 0 || got != plane_bytes) return damaged("a plane");
      planes[i] = plane;
    }
    begin += n;
  }
  element_bytes == 2 ? put_planes<2>(planes, plane_bytes, page.data())
                     : put_planes<4>(planes, plane_bytes, page.data());
  return {};
}

}  // namespace hcache::state
