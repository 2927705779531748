// Integer products of 9 to 16 rows at once by AMX tiles; what is left by AVX-512 VNNI. A group's
// exact sums go from a tile through memory into vector registers, which is what binds it: scaling
// 16 rows' sums takes three times as long as their products.
#include "product_avx512.h"

namespace hcache::model {
namespace {

struct Amx : Avx512Vnni {
  // More go through tiles, with which one panel at a time was not measured.
  static constexpr int64_t kFewRows = 12;
  static constexpr int64_t kSinglePanelRows = kFewRows;
  static constexpr int kPairRows = 0;  // of the few rows that tiles leave: not measured either

  // By so many bytes, which a core's second-level cache holds for all panels, in multiples of every
  // tile's: tiles take rows four times as fast as vectors. More were not measured.
  static constexpr int64_t kMaxRows = 480;
  static int64_t rows_at_once(int64_t /*n_rows*/, int64_t n_in) {
    constexpr int64_t kBytes = int64_t{1} << 20;
    constexpr int64_t kUnit = 48;
    const int64_t row_bytes = (n_in + kChunk - 1) / kChunk * static_cast<int64_t>(sizeof(RowChunk));
    const int64_t units = kBytes / row_bytes / kUnit;
    return units < 1 ? kUnit : units * kUnit < kMaxRows ? units * kUnit : kMaxRows;
  }

  static constexpr int kTileRows = 16;
  static constexpr int kLeastTileRows = 9;  // fewer are as fast by vectors

  static int64_t rows_of_tiles(int64_t n_rows) {
    return n_rows < kLeastTileRows ? 0 : n_rows < kTileRows ? n_rows : kTileRows;
  }

  // Tiles multiply signed weights.
  template <BlockKind kKind>
  static I stored(I x) {
    return layout_of(kKind).offset ? xor_(x, bytes(0x80)) : x;
  }
  template <BlockKind kKind>
  static I weights(const uint8_t (*p)[4]) {
    return stored<kKind>(_mm512_load_si512(p));
  }

  // ---- Tiles: 0 and 1 are rows, 2 and 3 weights, 4 and 5 sums; a group or its half at a time.

  struct alignas(64) TileConfig {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t n_rows[16] = {};
  };

  template <BlockKind kKind>
  static void begin_tiles(int64_t n_rows) {
    constexpr int kValues = layout_of(kKind).halves ? kGroup / 2 : kGroup;
    TileConfig config;
    for (int i = 0; i < 2; ++i) {
      config.n_rows[i] = static_cast<uint8_t>(n_rows);
      config.row_bytes[i] = kValues;
      config.n_rows[i + 2] = kValues / 4;
      config.row_bytes[i + 2] = 4 * kPanel;
      config.n_rows[i + 4] = static_cast<uint8_t>(n_rows);
      config.row_bytes[i + 4] = 4 * kPanel;
    }
    // The intrinsic tells GCC 12 of its first bytes alone.
    asm volatile("" ::"m"(config) : "memory");
    _tile_loadconfig(&config);
  }
  static void end_tiles() { _tile_release(); }

  using Sums = int32_t[kTileRows][kPanel];

  static void multiply_step(int odd, const WeightChunk& w, int g, int first_dword,
                            const RowChunk* rows, Sums& sums) {
    const int8_t* x = rows->quants + g * kGroup + 4 * first_dword;
    constexpr size_t kRowBytes = sizeof(RowChunk);
    if (odd == 0) {
      _tile_zero(4);
      _tile_loadd(0, x, kRowBytes);
      _tile_loadd(2, w.quants[g][first_dword], 4 * kPanel);
      _tile_dpbssd(4, 0, 2);
      _tile_stored(4, sums, 4 * kPanel);
    } else {
      _tile_zero(5);
      _tile_loadd(1, x, kRowBytes);
      _tile_loadd(3, w.quants[g][first_dword], 4 * kPanel);
      _tile_dpbssd(5, 1, 3);
      _tile_stored(5, sums, 4 * kPanel);
    }
  }

  // acc[n_rows][kPanel] += the chunk's products with as many rows, those of begin_tiles().
  template <BlockKind kKind, int kTileOf = kTileRows>
  static void multiply_tiles(int64_t n_rows, const WeightChunk& w, int n_groups,
                             const RowChunk* rows, float* acc) {
    if constexpr (kTileOf >= kLeastTileRows) {
      if (n_rows == kTileOf) {
        return multiply_tile_of<kKind, kTileOf>(w, n_groups, rows, acc);
      }
      multiply_tiles<kKind, kTileOf - 1>(n_rows, w, n_groups, rows, acc);
    }
  }

  // The sums of a step are scaled while the next one's are made.
  template <BlockKind kKind, int kTileOf>
  static void multiply_tile_of(const WeightChunk& w, int n_groups, const RowChunk* rows,
                               float* acc_rows) {
    constexpr Layout kLayout = layout_of(kKind);
    constexpr int kHalves = kLayout.halves ? 2 : 1;
    constexpr int kDwords = step_dwords(kLayout);
    alignas(64) Sums sums[2];
    F acc[kTileOf];
    begin_rows<Amx, kKind, kTileOf>(acc_rows, acc);
    const int n_steps = n_groups * kHalves;
    multiply_step(0, w, 0, 0, rows, sums[0]);
    for (int i = 0; i < n_steps; ++i) {
      const int next = i + 1;
      if (next < n_steps) {
        multiply_step(next % 2, w, next / kHalves, next % kHalves * kDwords, rows, sums[next % 2]);
      }
      const int g = i / kHalves;
      const F scale = load(w.scale[g][i % kHalves]);
      for (int r = 0; r < kTileOf; ++r) {
        const F sum = to_float(_mm512_load_si512(sums[i % 2][r]));
        acc[r] = fma(scale_of<Amx, kKind>(scale, rows[r], g), sum, acc[r]);
      }
      if (i % kHalves == kHalves - 1) {
        add_minima<Amx, kKind, kTileOf>(load(w.min[g]), g, rows, acc);
      }
    }
    end_rows<Amx, kKind, kTileOf>(rows, acc, acc_rows);
  }
};

}  // namespace

const ProductKernel kProductAmx = {
    .prepare = prepare<Amx>, .scratch_bytes = scratch_bytes<Amx>, .multiply = multiply<Amx>};

}  // namespace hcache::model
