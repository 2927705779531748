// Cuts a step into items of work and hands them to threads; the arithmetic is in the kernels.
#include "engine/attention.h"

#ifdef HCACHE_ATTENTION_X86
#include <cpuid.h>
#endif

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cmath>
#include <limits>
#include <new>
#include <tuple>
#include <vector>

#include "attention_kernel.h"

namespace hcache::engine {
namespace {

constexpr size_t kCacheLine = 64;
constexpr int32_t kMaxDim = 1024;
constexpr float kLog2E = 1.44269504F;
constexpr int32_t kWhole = -1;
static_assert(kTile == kAttentionTile && kAttentionPartition % kTile == 0);

// Room for one float per row, and for a vector's overhang.
constexpr size_t kRowArray = kMaxBlockRows + kDimAlign;

// Items per thread to aim for, so that the last ones to finish finish together.
constexpr double kItemsPerThread = 8;
// Blocks are not made smaller than this to gain items: each packs its tiles of K again.
constexpr int kMinBlockRows = 24;
// A whole number of register tiles, whichever the kernel.
constexpr int64_t kBlockRowsMultiple = 12;
// Packed rows whose weights of all keys are at hand at once: enough that packing K costs little.
constexpr int32_t kObservedRows = 48;

template <typename T>
constexpr T round_up(T value, T multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Cache-aligned floats, zero when made. Growing drops the contents.
class FloatBuffer {
 public:
  FloatBuffer() = default;
  ~FloatBuffer() { release(); }
  FloatBuffer(const FloatBuffer&) = delete;
  FloatBuffer& operator=(const FloatBuffer&) = delete;

  void reserve(size_t count) {
    if (count <= count_) return;
    release();
    data_ = static_cast<float*>(
        ::operator new(count * sizeof(float), static_cast<std::align_val_t>(kCacheLine)));
    std::fill_n(data_, count, 0.0F);
    count_ = count;
  }
  [[nodiscard]] float* data() const { return data_; }
  [[nodiscard]] size_t bytes() const { return count_ * sizeof(float); }

 private:
  void release() {
    ::operator delete(data_, static_cast<std::align_val_t>(kCacheLine));
    data_ = nullptr;
    count_ = 0;
  }

  float* data_ = nullptr;
  size_t count_ = 0;
};

// A block whose partitions are computed by different threads. The one that finishes last merges
// them in order.
struct Split {
  size_t first_state;  // offset in the plan's states, in floats
  int32_t first_partition;
  int32_t n_partitions;
};

// Packed rows [first_row, first_row + n_rows) of one KV head of one segment.
struct Item {
  int32_t segment;
  int32_t kv_head;
  int32_t first_row;
  int32_t n_rows;
  int32_t split;      // kWhole, or an index into the splits
  int32_t partition;  // of a split
  int64_t cost;       // rows times keys
};

struct alignas(kCacheLine) PaddedCounter {
  std::atomic<int32_t> value{0};
};

// Offsets, in floats, of one thread's scratch.
struct Workspace {
  size_t k_half, k_wide, v_wide, scores, rows, q, starts, limits, running, partial, size;
};

int dim_padded(int dim) { return round_up(dim, kDimAlign); }

// max and sum, then acc.
size_t state_floats(int n_rows, int dim_v) {
  return round_up<size_t>(2 * static_cast<size_t>(n_rows), kDimAlign) +
         static_cast<size_t>(n_rows) * dim_padded(dim_v);
}

AttentionState state_at(float* base, int n_rows) {
  const auto rows = static_cast<size_t>(n_rows);
  return {base, base + rows, base + round_up<size_t>(2 * rows, kDimAlign)};
}

Workspace lay_out(const AttentionShape& shape) {
  Workspace w{};
  const auto take = [&w](size_t floats) {
    const size_t offset = w.size;
    w.size += round_up<size_t>(floats, kDimAlign);
    return offset;
  };
  const auto dim_k = static_cast<size_t>(shape.head_dim_k);
  const auto dim_v = static_cast<size_t>(dim_padded(shape.head_dim_v));
  const size_t state = state_floats(kMaxBlockRows, shape.head_dim_v);
  w.k_half = take(dim_k * kAttentionTile / 2);
  w.k_wide = take(dim_k * kAttentionTile);
  w.v_wide = take(dim_v * kAttentionTile);
  w.scores = take(static_cast<size_t>(kMaxBlockRows) * kAttentionTile);
  w.rows = take(5 * kRowArray);
  w.q = take(kMaxBlockRows * dim_k);
  w.starts = take(kMaxBlockRows * sizeof(int64_t) / sizeof(float));
  w.limits = take(kMaxBlockRows * sizeof(int64_t) / sizeof(float));
  w.running = take(state);
  w.partial = take(state);
  return w;
}

const AttentionKernel& kernel_for(AttentionIsa isa) {
  if (isa == AttentionIsa::kBest) isa = attention_best_isa();
#ifdef HCACHE_ATTENTION_X86
  if (isa == AttentionIsa::kAvx512) return kAttentionAvx512;
  if (isa == AttentionIsa::kAvx2) return kAttentionAvx2;
#endif
  return kAttentionPortable;
}

#ifdef HCACHE_ATTENTION_X86
// By hand, because some compilers' __builtin_cpu_supports do not know the name.
bool has_f16c() {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

// What the accumulator of a row is multiplied by, where a sink of a base-2 score has its part too.
float inverse_with_sink(float max, float sum, float sink) {
  if (sink <= max) return 1.0F / (sum + std::exp2(sink - max));
  const float rest = std::exp2(max - sink);
  return rest / (sum * rest + 1.0F);
}

int64_t partitions_of(int64_t n_keys) {
  return (n_keys + kAttentionPartition - 1) / kAttentionPartition;
}

}  // namespace

bool attention_isa_available(AttentionIsa isa) {
  switch (isa) {
    case AttentionIsa::kBest:
    case AttentionIsa::kPortable: return true;
#ifdef HCACHE_ATTENTION_X86
    case AttentionIsa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    case AttentionIsa::kAvx512:
      return attention_isa_available(AttentionIsa::kAvx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl");
#endif
    default: return false;
  }
}

AttentionIsa attention_best_isa() {
  for (const AttentionIsa isa : {AttentionIsa::kAvx512, AttentionIsa::kAvx2}) {
    if (attention_isa_available(isa)) return isa;
  }
  return AttentionIsa::kPortable;
}

const char* attention_isa_name(AttentionIsa isa) {
  switch (isa) {
    case AttentionIsa::kBest: return "best";
    case AttentionIsa::kPortable: return "portable";
    case AttentionIsa::kAvx2: return "avx2";
    case AttentionIsa::kAvx512: return "avx512";
  }
  return "unknown";
}

bool attention_supports(const AttentionShape& shape) {
  return shape.n_head > 0 && shape.n_head_kv > 0 && shape.n_head % shape.n_head_kv == 0 &&
         shape.head_dim_k > 0 && shape.head_dim_k <= kMaxDim && shape.head_dim_v > 0 &&
         shape.head_dim_v <= kMaxDim && std::isfinite(shape.scale) && shape.window >= 0 &&
         shape.soft_cap >= 0;
}

struct AttentionPlan::Impl {
  AttentionShape shape;
  int group;  // query heads per KV head
  int max_threads;
  const AttentionKernel& kernel;
  Workspace layout;
  FloatBuffer scratch;                               // one Workspace per thread
  std::vector<std::vector<float>> observed_weights;  // per thread, see observe()

  std::vector<AttentionSegment> segments;
  std::vector<Item> items;
  std::vector<Split> splits;
  std::unique_ptr<std::atomic<int32_t>[]> missing;  // per split: partitions not yet computed
  size_t missing_capacity = 0;
  size_t states_size = 0;
  FloatBuffer states;  // of splits, one per partition

  // Both are back at zero whenever no run is in progress.
  PaddedCounter next;      // items taken
  PaddedCounter departed;  // threads that found no item left

  Impl(const AttentionShape& s, int threads, AttentionIsa isa)
      : shape(s),
        group(s.n_head / s.n_head_kv),
        max_threads(threads),
        kernel(kernel_for(isa)),
        layout(lay_out(s)) {
    scratch.reserve(layout.size * static_cast<size_t>(threads));
    observed_weights.resize(static_cast<size_t>(threads));
  }

  void add_items(int32_t segment, double target);
  // One query row, scaled.
  void gather_row(const AttentionSegment& s, int32_t kv_head, int64_t packed_row,
                  const AttentionTensors& t, float* q) const;
  void process(const Item& item, const AttentionTensors& t, float* base);
  void observe(int32_t kv_head, const AttentionObservation& observed, const AttentionTensors& t,
               int ith);
  // One KV head's keys and values of a segment; without rows.
  [[nodiscard]] AttentionBlock block_of(const AttentionSegment& s, int32_t kv_head,
                                        const AttentionTensors& t) const;
  [[nodiscard]] AttentionTiles tiles_of(float* base) const;
  void finish(const Item& item, const AttentionState& state, const AttentionTensors& t) const;

  // Keys that a packed row of a segment attends.
  [[nodiscard]] int64_t limit(const AttentionSegment& s, int64_t packed_row) const {
    return s.n_past + packed_row / group + 1;
  }
  // The first of them.
  [[nodiscard]] int64_t start(const AttentionSegment& s, int64_t packed_row) const {
    return shape.window > 0 ? std::max<int64_t>(0, limit(s, packed_row) - shape.window) : 0;
  }
  // Of the longest row.
  [[nodiscard]] int64_t most_keys(const AttentionSegment& s) const {
    const int64_t n = s.n_past + s.n_rows;
    return shape.window > 0 ? std::min(n, shape.window) : n;
  }
};

// Cuts a segment into items of about `target` row-keys. This decides who computes what, never a
// bit of the result.
void AttentionPlan::Impl::add_items(int32_t segment, double target) {
  const AttentionSegment& s = segments[static_cast<size_t>(segment)];
  const int64_t packed = static_cast<int64_t>(s.n_rows) * group;
  if (packed == 0) return;
  const int64_t n_keys = most_keys(s);
  const int64_t item_keys = std::min<int64_t>(n_keys, kAttentionPartition);

  const int64_t n_blocks = (packed + kMaxBlockRows - 1) / kMaxBlockRows;
  int64_t rows = round_up<int64_t>((packed + n_blocks - 1) / n_blocks, kBlockRowsMultiple);
  const bool split =
      n_keys > item_keys && static_cast<double>(rows) * static_cast<double>(n_keys) > 2 * target;
  if ((split || n_keys == item_keys) && rows > kMinBlockRows) {
    const double wanted = 2 * target / static_cast<double>(item_keys);
    if (wanted < static_cast<double>(rows)) {
      rows = round_up<int64_t>(std::max<int64_t>(static_cast<int64_t>(wanted), kMinBlockRows),
                               kBlockRowsMultiple);
    }
  }

  for (int32_t head = 0; head < shape.n_head_kv; ++head) {
    for (int64_t first = 0; first < packed; first += rows) {
      const auto n = static_cast<int32_t>(std::min(rows, packed - first));
      const int64_t begin = start(s, first);
      const int64_t end = limit(s, first + n - 1);
      Item item{segment, head, static_cast<int32_t>(first), n, kWhole, 0, n * (end - begin)};
      const int64_t first_partition = begin / kAttentionPartition;
      const int64_t n_partitions = partitions_of(end) - first_partition;
      if (!split || n_partitions == 1) {
        items.push_back(item);
        continue;
      }
      item.split = static_cast<int32_t>(splits.size());
      splits.push_back(
          {states_size, static_cast<int32_t>(first_partition), static_cast<int32_t>(n_partitions)});
      states_size += state_floats(n, shape.head_dim_v) * static_cast<size_t>(n_partitions);
      for (int64_t p = first_partition; p < first_partition + n_partitions; ++p) {
        item.partition = static_cast<int32_t>(p);
        item.cost = n * std::min<int64_t>(end - p * kAttentionPartition, kAttentionPartition);
        items.push_back(item);
      }
    }
  }
}

void AttentionPlan::Impl::gather_row(const AttentionSegment& s, int32_t kv_head, int64_t packed_row,
                                     const AttentionTensors& t, float* q) const {
  const auto dim_k = static_cast<size_t>(shape.head_dim_k);
  // Scores come out in base 2, which spares the exponential a product.
  const float scale = shape.scale * kLog2E;
  const auto row = static_cast<size_t>(s.first_row) + static_cast<size_t>(packed_row / group);
  const auto q_head = static_cast<size_t>(kv_head) * static_cast<size_t>(group) +
                      static_cast<size_t>(packed_row % group);
  const float* from =
      reinterpret_cast<const float*>(reinterpret_cast<const char*>(t.q) + row * t.q_stride) +
      q_head * dim_k;
  for (size_t d = 0; d < dim_k; ++d) q[d] = from[d] * scale;
}

AttentionBlock AttentionPlan::Impl::block_of(const AttentionSegment& s, int32_t kv_head,
                                             const AttentionTensors& t) const {
  const auto dim_k = static_cast<size_t>(shape.head_dim_k);
  const auto dim_v = static_cast<size_t>(shape.head_dim_v);
  const auto head = static_cast<size_t>(kv_head);
  const auto cell = static_cast<size_t>(s.first_cell);
  AttentionBlock block{};
  block.soft_cap = shape.soft_cap * kLog2E;
  block.k = static_cast<const uint8_t*>(t.k) + cell * t.k_stride + head * dim_k * sizeof(uint16_t);
  block.v = static_cast<const uint8_t*>(t.v) + cell * t.v_stride + head * dim_v * sizeof(uint16_t);
  block.k_stride = t.k_stride;
  block.v_stride = t.v_stride;
  block.dim_k = shape.head_dim_k;
  block.dim_v = shape.head_dim_v;
  block.dim_v_padded = dim_padded(shape.head_dim_v);
  return block;
}

AttentionTiles AttentionPlan::Impl::tiles_of(float* base) const {
  float* rows = base + layout.rows;
  return {reinterpret_cast<uint16_t*>(base + layout.k_half),
          base + layout.k_wide,
          base + layout.v_wide,
          base + layout.scores,
          rows,
          rows + kRowArray,
          rows + 2 * kRowArray,
          rows + 3 * kRowArray,
          rows + 4 * kRowArray};
}

// The tally of a KV head is one thread's from the first row to the last, so that its sums do not
// depend on the number of threads.
void AttentionPlan::Impl::observe(int32_t kv_head, const AttentionObservation& observed,
                                  const AttentionTensors& t, int ith) {
  const AttentionSegment& s = segments[static_cast<size_t>(observed.segment)];
  AttentionTally& tally = observed.tallies[kv_head];
  float* base = scratch.data() + static_cast<size_t>(ith) * layout.size;
  float* q = base + layout.q;
  auto* limits = reinterpret_cast<int64_t*>(base + layout.limits);
  const auto stride =
      static_cast<size_t>(round_up<int64_t>(s.n_past + observed.end_row, kAttentionTile));
  std::vector<float>& weights = observed_weights[static_cast<size_t>(ith)];
  weights.resize(std::max(weights.size(), static_cast<size_t>(kObservedRows) * stride));

  AttentionBlock block = block_of(s, kv_head, t);
  block.q = q;
  block.limits = limits;
  AttentionSums sums{tally.sum.data(), tally.top.data(), tally.n_keys, 0, 0, 0};
  const auto flush = [&] {
    if (block.n_rows > 0) kernel.observe(block, weights.data(), stride, &sums, tiles_of(base));
    tally.n_rows += block.n_rows;
    block.n_rows = 0;
  };
  for (int32_t row = observed.first_row; row < observed.end_row; row += observed.stride) {
    for (int32_t i = 0; i < group; ++i) {
      const int64_t packed = static_cast<int64_t>(row) * group + i;
      gather_row(s, kv_head, packed, t,
                 q + static_cast<size_t>(block.n_rows) * static_cast<size_t>(shape.head_dim_k));
      limits[block.n_rows] = limit(s, packed);
      if (++block.n_rows == kObservedRows) flush();
    }
  }
  flush();
  tally.small += sums.small;
  tally.seen += sums.seen;
  tally.spread += sums.spread;
}

void AttentionPlan::Impl::process(const Item& item, const AttentionTensors& t, float* base) {
  const AttentionSegment& s = segments[static_cast<size_t>(item.segment)];
  float* q = base + layout.q;
  auto* starts = reinterpret_cast<int64_t*>(base + layout.starts);
  auto* limits = reinterpret_cast<int64_t*>(base + layout.limits);
  for (int32_t i = 0; i < item.n_rows; ++i) {
    const int64_t packed = static_cast<int64_t>(item.first_row) + i;
    gather_row(s, item.kv_head, packed, t,
               q + static_cast<size_t>(i) * static_cast<size_t>(shape.head_dim_k));
    starts[i] = start(s, packed);
    limits[i] = limit(s, packed);
  }
  AttentionBlock block = block_of(s, item.kv_head, t);
  block.n_rows = item.n_rows;
  block.starts = starts[item.n_rows - 1] > 0 ? starts : nullptr;
  block.limits = limits;
  block.q = q;
  const AttentionTiles tiles = tiles_of(base);

  const int64_t n_keys = limits[item.n_rows - 1];
  const auto attend = [&](int64_t partition, const AttentionState& state) {
    const int64_t first = partition * kAttentionPartition;
    // Tiles that no row attends any more are not looked at.
    const int64_t attended = starts[0] / kAttentionTile * kAttentionTile;
    kernel.attend(block, std::max(first, attended), std::min(first + kAttentionPartition, n_keys),
                  state, tiles);
  };

  const AttentionState running = state_at(base + layout.running, item.n_rows);
  const auto merge_all = [&](int64_t first, int64_t n_partitions, const auto& partition_state) {
    std::fill_n(running.max, item.n_rows, std::numeric_limits<float>::lowest());
    std::fill_n(running.sum, item.n_rows, 0.0F);
    std::fill_n(running.acc,
                static_cast<size_t>(item.n_rows) * static_cast<size_t>(block.dim_v_padded), 0.0F);
    for (int64_t p = first; p < first + n_partitions; ++p) {
      kernel.merge(running, partition_state(p), item.n_rows, block.dim_v_padded);
    }
    finish(item, running, t);
  };

  if (item.split == kWhole) {
    const int64_t first = starts[0] / kAttentionPartition;
    merge_all(first, partitions_of(n_keys) - first, [&](int64_t p) {
      const AttentionState partial = state_at(base + layout.partial, item.n_rows);
      attend(p, partial);
      return partial;
    });
    return;
  }
  const Split& split = splits[static_cast<size_t>(item.split)];
  const size_t state_size = state_floats(item.n_rows, shape.head_dim_v);
  const auto partition_state = [&](int64_t p) {
    const auto index = static_cast<size_t>(p - split.first_partition);
    return state_at(states.data() + split.first_state + index * state_size, item.n_rows);
  };
  attend(item.partition, partition_state(item.partition));
  std::atomic<int32_t>& left = missing[static_cast<size_t>(item.split)];
  if (left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    left.store(split.n_partitions, std::memory_order_relaxed);  // for the next layer
    merge_all(split.first_partition, split.n_partitions, partition_state);
  }
}

void AttentionPlan::Impl::finish(const Item& item, const AttentionState& state,
                                 const AttentionTensors& t) const {
  const AttentionSegment& s = segments[static_cast<size_t>(item.segment)];
  const auto dim_v = static_cast<size_t>(shape.head_dim_v);
  for (int32_t i = 0; i < item.n_rows; ++i) {
    const int32_t packed = item.first_row + i;
    const auto row = static_cast<size_t>(s.first_row) + static_cast<size_t>(packed / group);
    const int32_t q_head = item.kv_head * group + packed % group;
    float* to = reinterpret_cast<float*>(reinterpret_cast<char*>(t.out) + row * t.out_stride) +
                static_cast<size_t>(q_head) * dim_v;
    const float* from = state.acc + static_cast<size_t>(i) * dim_padded(shape.head_dim_v);
    const float inverse = t.sinks == nullptr ? 1.0F / state.sum[i]
                                             : inverse_with_sink(state.max[i], state.sum[i],
                                                                 t.sinks[q_head] * kLog2E);
    for (size_t d = 0; d < dim_v; ++d) to[d] = from[d] * inverse;
  }
}

AttentionPlan::AttentionPlan(const AttentionShape& shape, int max_threads, AttentionIsa isa) {
  assert(attention_supports(shape) && max_threads >= 1 && attention_isa_available(isa));
  impl_ = std::make_unique<Impl>(shape, max_threads, isa);
}

AttentionPlan::~AttentionPlan() = default;

void AttentionPlan::set_batch(std::span<const AttentionSegment> segments) {
  Impl& p = *impl_;
  p.segments.assign(segments.begin(), segments.end());
  p.items.clear();
  p.splits.clear();
  p.states_size = 0;

  double total = 0;  // row-keys
  for (const AttentionSegment& s : segments) {
    assert(s.n_rows >= 0 && s.n_past >= 0 && s.first_row >= 0 && s.first_cell >= 0);
    total += static_cast<double>(s.n_rows) * p.shape.n_head * static_cast<double>(p.most_keys(s));
  }
  const double target = p.max_threads == 1 ? std::numeric_limits<double>::infinity()
                                           : total / (kItemsPerThread * p.max_threads);
  for (size_t i = 0; i < segments.size(); ++i) p.add_items(static_cast<int32_t>(i), target);

  // Big items first. Among equals, neighbours in the arena stay together.
  std::sort(p.items.begin(), p.items.end(), [](const Item& a, const Item& b) {
    return std::tie(b.cost, a.segment, a.partition, a.kv_head, a.first_row) <
           std::tie(a.cost, b.segment, b.partition, b.kv_head, b.first_row);
  });

  if (p.splits.size() > p.missing_capacity) {
    p.missing_capacity = p.splits.size();
    p.missing = std::make_unique<std::atomic<int32_t>[]>(p.missing_capacity);
  }
  for (size_t i = 0; i < p.splits.size(); ++i) {
    p.missing[i].store(p.splits[i].n_partitions, std::memory_order_relaxed);
  }
  p.states.reserve(p.states_size);
}

void AttentionPlan::run(const AttentionTensors& tensors, int ith, int nth,
                        const AttentionObservation& observed) {
  Impl& p = *impl_;
  assert(0 <= ith && ith < nth && nth <= p.max_threads);
  float* base = p.scratch.data() + static_cast<size_t>(ith) * p.layout.size;
  const auto n_items = static_cast<int32_t>(p.items.size());
  // First the heads that are observed, which take longest.
  const int32_t n_observed = observed.any() ? p.shape.n_head_kv : 0;
  for (;;) {
    const int32_t i = p.next.value.fetch_add(1, std::memory_order_relaxed);
    if (i >= n_observed + n_items) break;
    if (i < n_observed) {
      p.observe(i, observed, tensors, ith);
    } else {
      p.process(p.items[static_cast<size_t>(i - n_observed)], tensors, base);
    }
  }
  // The last thread to leave makes the plan ready for the next op.
  if (p.departed.value.fetch_add(1, std::memory_order_acq_rel) == nth - 1) {
    p.next.value.store(0, std::memory_order_relaxed);
    p.departed.value.store(0, std::memory_order_relaxed);
  }
}

void AttentionTally::reset(int64_t n) {
  *this = {};
  n_keys = n;
  sum.assign(round_up<size_t>(static_cast<size_t>(n), kAttentionTile), 0.0F);
  top.assign(sum.size(), 0.0F);
}

size_t AttentionPlan::scratch_bytes() const {
  const Impl& p = *impl_;
  size_t observed = 0;
  for (const std::vector<float>& weights : p.observed_weights) observed += weights.capacity();
  return observed * sizeof(float) + p.scratch.bytes() + p.states.bytes() +
         p.items.capacity() * sizeof(Item) + p.splits.capacity() * sizeof(Split) +
         p.missing_capacity * sizeof(int32_t);
}

}  // namespace hcache::engine
