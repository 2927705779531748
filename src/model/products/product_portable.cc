// The product in plain C++, one value after the other: what the vector versions are held against,
// and for processors that have none of their instructions.
#include <math.h>
#include <string.h>

#include "product_kernel.h"

namespace hcache::model {
namespace {

float half_to_float(const uint8_t* p) {
  uint16_t bits;
  memcpy(&bits, p, sizeof bits);
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000U) << 16U;
  const uint32_t exponent = (bits >> 10U) & 0x1FU;
  const uint32_t fraction = bits & 0x3FFU;
  if (exponent == 0) {
    const float x = ldexpf(static_cast<float>(fraction), -24);
    return sign != 0 ? -x : x;
  }
  const uint32_t wide =
      sign | (exponent == 31 ? 0x7F800000U : (exponent + 112) << 23U) | fraction << 13U;
  float x;
  memcpy(&x, &wide, sizeof x);
  return x;
}

constexpr int kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                1,    13,   25,  38,  53,  69,  89,  113};
constexpr int kMxfp4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

int as_signed(uint8_t byte) { return byte < 128 ? byte : byte - 256; }

// A group of one output's weights.
struct Group {
  int quants[kGroup];
  float scale[2];  // of its halves
  float min;
};

float power_half(uint8_t code) {
  const uint32_t bits = code < 2 ? 0x00200000U << code : static_cast<uint32_t>(code - 1) << 23U;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

void set_scale(Group* out, float scale) { out->scale[0] = out->scale[1] = scale; }

// Group g of the row: of the kinds with blocks of 32.
void unpack_block(BlockKind kind, const uint8_t* row, int64_t g, Group* out) {
  const bool minima = kind == BlockKind::kQ4_1 || kind == BlockKind::kQ5_1;
  const bool five = kind == BlockKind::kQ5_0 || kind == BlockKind::kQ5_1;
  const int head = kind == BlockKind::kMxfp4 ? 1 : minima ? 4 : 2;
  const int bytes = kind == BlockKind::kQ8_0 ? 34 : head + (five ? 4 : 0) + kGroup / 2;
  const uint8_t* block = row + g * bytes;
  set_scale(out, kind == BlockKind::kMxfp4 ? power_half(*block) : half_to_float(block));
  out->min = minima ? half_to_float(block + 2) : 0.0F;
  const uint8_t* quants = block + head;
  uint32_t fifth = 0;
  if (five) {
    memcpy(&fifth, quants, sizeof fifth);
    quants += 4;
  }
  for (int i = 0; i < kGroup; ++i) {
    if (kind == BlockKind::kQ8_0) {
      out->quants[i] = as_signed(quants[i]);
      continue;
    }
    int q = i < kGroup / 2 ? quants[i] & 0xF : quants[i - kGroup / 2] >> 4;
    if (five) q |= static_cast<int>((fifth >> i) & 1U) << 4;
    if (kind == BlockKind::kQ4_0) q -= 8;
    if (kind == BlockKind::kQ5_0) q -= 16;
    if (kind == BlockKind::kIq4Nl) q = kIq4Values[q];
    if (kind == BlockKind::kMxfp4) q = kMxfp4Values[q];
    out->quants[i] = q;
  }
}

// Group g (0 to 7) of a block of 256.
void unpack_k(BlockKind kind, const uint8_t* block, int g, Group* out) {
  out->min = 0;
  if (kind == BlockKind::kQ6K) {
    const float d = half_to_float(block + 208);
    const uint8_t* low = block + g / 4 * 64 + g % 2 * 32;
    const uint8_t* high = block + 128 + g / 4 * 32;
    for (int i = 0; i < kGroup; ++i) {
      const int nibble = g % 4 < 2 ? low[i] & 0xF : low[i] >> 4;
      out->quants[i] = (nibble | ((high[i] >> (2 * (g % 4))) & 3) << 4) - 32;
    }
    for (int half = 0; half < 2; ++half) {
      out->scale[half] = d * static_cast<float>(as_signed(block[192 + 2 * g + half]));
    }
    return;
  }
  if (kind == BlockKind::kIq4Xs) {
    const int high = block[2] | block[3] << 8;
    const int scale = ((block[4 + g / 2] >> (4 * (g % 2))) & 0xF) | ((high >> (2 * g)) & 3) << 4;
    set_scale(out, half_to_float(block) * static_cast<float>(scale - 32));
    for (int i = 0; i < kGroup; ++i) {
      const uint8_t pair = block[8 + g * 16 + i % 16];
      out->quants[i] = kIq4Values[i < kGroup / 2 ? pair & 0xF : pair >> 4];
    }
    return;
  }
  const bool five = kind == BlockKind::kQ5K;
  const uint8_t* s = block + 4;
  const int scale = g < 4 ? s[g] & 63 : (s[g + 4] & 0xF) | (s[g - 4] >> 6) << 4;
  const int min = g < 4 ? s[g + 4] & 63 : (s[g + 4] >> 4) | (s[g] >> 6) << 4;
  set_scale(out, half_to_float(block) * static_cast<float>(scale));
  out->min = -half_to_float(block + 2) * static_cast<float>(min);
  const uint8_t* quants = block + (five ? 48 : 16) + g / 2 * 32;
  for (int i = 0; i < kGroup; ++i) {
    int q = g % 2 == 0 ? quants[i] & 0xF : quants[i] >> 4;
    if (five) q |= ((block[16 + i] >> g) & 1) << 4;
    out->quants[i] = q;
  }
}

int block_bytes_of_256(BlockKind kind) {
  switch (kind) {
    case BlockKind::kQ4K: return 144;
    case BlockKind::kQ5K: return 176;
    case BlockKind::kQ6K: return 210;
    case BlockKind::kIq4Xs: return 136;
    default: return 0;
  }
}

int dot(const int* w, const int8_t* x, int n) {
  int sum = 0;
  for (int i = 0; i < n; ++i) sum += w[i] * x[i];
  return sum;
}

// To the sum of an output's groups so far; `wide`: of a block of 256, whose rows are scaled later.
float add_group(BlockKind kind, const Group& w, const RowChunk& x, int g, bool wide, float acc) {
  const int8_t* quants = x.quants + g * kGroup;
  if (kind == BlockKind::kQ6K) {
    for (int half = 0; half < 2; ++half) {
      const int sum = dot(w.quants + half * 16, quants + half * 16, 16);
      acc = fmaf(w.scale[half], static_cast<float>(sum), acc);
    }
    return acc;
  }
  const float scale = wide ? w.scale[0] : w.scale[0] * x.scale[g];
  acc = fmaf(scale, static_cast<float>(dot(w.quants, quants, kGroup)), acc);
  const bool minima = kind == BlockKind::kQ4_1 || kind == BlockKind::kQ5_1 ||
                      kind == BlockKind::kQ4K || kind == BlockKind::kQ5K;
  return minima ? fmaf(w.min, x.sum[g], acc) : acc;
}

size_t scratch_bytes(int64_t n_rows) { return 2 * static_cast<size_t>(n_rows) * sizeof(float); }

void multiply(const ProductTask& task, void* scratch) {
  auto* acc = static_cast<float*>(scratch);  // [n_rows], then of a block of 256
  float* in_block = acc + task.n_rows;
  const int bytes = block_bytes_of_256(task.kind);
  const int64_t n_groups = task.n_in / kGroup;
  for (int64_t out = task.first_out; out < task.end_out; ++out) {
    const uint8_t* row = task.weight + static_cast<size_t>(out) * task.weight_stride;
    memset(acc, 0, scratch_bytes(task.n_rows));
    for (int64_t g = 0; g < n_groups; ++g) {
      Group w;
      const auto in_chunk = static_cast<int>(g % kChunkGroups);
      if (bytes == 0) {
        unpack_block(task.kind, row, g, &w);
      } else {
        unpack_k(task.kind, row + g / kChunkGroups * bytes, in_chunk, &w);
      }
      for (int64_t r = 0; r < task.n_rows; ++r) {
        const RowChunk& x = task.rows[g / kChunkGroups * task.n_rows + r];
        float& sum = bytes == 0 ? acc[r] : in_block[r];
        sum = add_group(task.kind, w, x, in_chunk, bytes != 0, sum);
        if (bytes == 0 || in_chunk + 1 < kChunkGroups) continue;
        acc[r] = fmaf(x.scale[0], in_block[r], acc[r]);
        in_block[r] = 0;
      }
    }
    for (int64_t r = 0; r < task.n_rows; ++r) {
      const int64_t row = task.out_rows == nullptr ? r : task.out_rows[r];
      task.out[static_cast<size_t>(row) * task.out_stride + out] = acc[r];
    }
  }
}

void set_group(RowChunk* out, int g, const uint8_t* quants, float scale) {
  memcpy(out->quants + g * kGroup, quants, kGroup);
  out->scale[g] = scale;
  int32_t sums[2] = {0, 0};
  for (int i = 0; i < kGroup; ++i) sums[i / 16] += as_signed(quants[i]);
  out->sum[g] = static_cast<float>(sums[0] + sums[1]);
  out->offset[g] = -128 * (sums[0] + sums[1]);
  for (int half = 0; half < 2; ++half) out->half_offset[g][half] = -128 * sums[half];
}

void prepare(RowKind kind, const uint8_t* values, int64_t n, RowChunk* out) {
  const int head = kind == RowKind::kQ8_1 ? 4 : 2;
  for (int g = 0; g < n / kGroup; ++g) {
    if (kind == RowKind::kQ8K) {
      float d;
      memcpy(&d, values, sizeof d);
      set_group(out, g, values + sizeof d + g * kGroup, d);
      continue;
    }
    const uint8_t* block = values + g * (head + kGroup);
    set_group(out, g, block + head, half_to_float(block));
    if (kind == RowKind::kQ8_1) out->sum[g] = half_to_float(block + 2);
  }
}

}  // namespace

const ProductKernel kProductPortable = {
    .prepare = prepare, .scratch_bytes = scratch_bytes, .multiply = multiply};

}  // namespace hcache::model
