#include "kept_header.h"

#include <algorithm>
#include <cstring>

#include "ggml.h"
#include "state/snapshot_pages.h"

namespace hcache::state {
namespace {

size_t n_heads(const engine::Engine& engine) {
  return static_cast<size_t>(engine.n_layer()) *
         static_cast<size_t>(engine.model().hparams().n_head_kv);
}

template <typename T>
void put(std::vector<std::byte>& bytes, const T* values, size_t n) {
  const auto* from = reinterpret_cast<const std::byte*>(values);
  bytes.insert(bytes.end(), from, from + n * sizeof(T));
}

}  // namespace

std::vector<std::byte> kept_head(const engine::Engine& engine, int64_t n_tokens,
                                 std::span<const int64_t> rows, const policy::RowScores& scores) {
  size_t n_rows = 0;
  for (const int64_t n : rows) n_rows += static_cast<size_t>(n);
  std::vector<ggml_fp16_t> top(scores.top.size());
  ggml_fp32_to_fp16_row(scores.top.data(), top.data(), static_cast<int64_t>(top.size()));
  const KeptHeader header{.n_layer = static_cast<uint32_t>(rows.size()),
                          .n_tokens = static_cast<uint64_t>(n_tokens),
                          .row_bytes = engine.kv_row_bytes(),
                          .n_scored = top.empty() ? 0 : static_cast<uint64_t>(scores.n_rows)};
  std::vector<std::byte> bytes;
  bytes.reserve(sizeof(header) + rows.size_bytes() + top.size() * sizeof(top[0]) +
                2 * n_rows * engine.kv_row_bytes());
  put(bytes, &header, 1);
  put(bytes, rows.data(), rows.size());
  put(bytes, top.data(), top.size());
  return bytes;
}

Result<std::optional<KeptHead>> read_kept_head(const engine::Engine& engine,
                                               std::span<const std::byte> bytes, size_t n_bytes,
                                               int64_t n_tokens) {
  const auto n_layer = static_cast<size_t>(engine.n_layer());
  const size_t counted = kSnapshotFrame + sizeof(KeptHeader) + n_layer * sizeof(uint64_t);
  if (bytes.size() < counted) {
    if (bytes.size() == n_bytes) return data_loss("a snapshot of kept rows without its header");
    return std::optional<KeptHead>();
  }
  HCACHE_ASSIGN_OR_RETURN(const size_t length, snapshot_length(bytes, n_bytes));
  KeptHeader header;
  std::memcpy(&header, bytes.data() + kSnapshotFrame, sizeof(header));
  std::vector<uint64_t> rows(n_layer);
  std::memcpy(rows.data(), bytes.data() + counted - rows.size() * sizeof(rows[0]),
              rows.size() * sizeof(rows[0]));
  uint64_t all = 0;
  bool fits = header.magic == KeptHeader::kMagic && header.n_layer == n_layer &&
              header.n_tokens == static_cast<uint64_t>(n_tokens) &&
              header.row_bytes == engine.kv_row_bytes() && header.n_scored <= header.n_tokens;
  for (const uint64_t n : rows) {
    fits = fits && n > 0 && n <= header.n_tokens;
    all += fits ? n : 0;
  }
  const size_t n_scores = fits ? n_heads(engine) * header.n_scored : 0;
  KeptHead head{.n_bytes = counted + n_scores * sizeof(ggml_fp16_t)};
  if (!fits || head.n_bytes - kSnapshotFrame + 2 * all * header.row_bytes != length) {
    return data_loss("a snapshot of kept rows is not this conversation's");
  }
  if (bytes.size() < head.n_bytes) return std::optional<KeptHead>();
  head.rows.assign(rows.begin(), rows.end());
  std::vector<ggml_fp16_t> top(n_scores);
  const auto saved = bytes.subspan(counted, n_scores * sizeof(ggml_fp16_t));
  std::ranges::copy(saved, reinterpret_cast<std::byte*>(top.data()));
  head.scores = {.n_layer = engine.n_layer(),
                 .n_head_kv = engine.model().hparams().n_head_kv,
                 .n_rows = static_cast<int64_t>(header.n_scored)};
  head.scores.top.resize(n_scores);
  ggml_fp16_to_fp32_row(top.data(), head.scores.top.data(), static_cast<int64_t>(n_scores));
  return std::optional(std::move(head));
}

}  // namespace hcache::state
