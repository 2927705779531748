#include "kept_rows.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

namespace hcache::engine {

Status KeptRows::check_layer(SeqId seq, int layer) const {
  HCACHE_RETURN_IF_ERROR(sequences_.check(seq));
  const model::HParams& hp = model_.hparams();
  if (layer < 0 || layer >= hp.n_layer) {
    return out_of_range(fmt::format("no layer {} in a model of {}", layer, hp.n_layer));
  }
  if (!options_.separate_layers || stages_.shares_layers()) {
    return failed_precondition(
        "all layers hold the same rows; an engine whose layers hold different ones has "
        "separate_layers, and no layer on several devices");
  }
  if (hp.window_of(layer) > 0) {
    return unimplemented(
        fmt::format("layer {} sees a window of {} rows already; rows of it can't be chosen", layer,
                    hp.window_of(layer)));
  }
  if (hp.head_dim % ggml_blck_size(options_.kv_type) != 0) {
    return unimplemented(fmt::format("a head's {} values are no whole number of blocks of {}",
                                     hp.head_dim, ggml_type_name(options_.kv_type)));
  }
  if (sequences_.held(seq, sequences_.group_of(layer)).first_pos > 0) {
    return failed_precondition(
        fmt::format("layer {} of sequence {} does without rows already", layer, seq));
  }
  return {};
}

Status KeptRows::check(SeqId seq, int layer, std::span<const int32_t> kept) const {
  HCACHE_RETURN_IF_ERROR(check_layer(seq, layer));
  const int64_t length = sequences_.length(seq);
  const auto heads = static_cast<size_t>(model_.hparams().n_head_kv);
  const size_t n = kept.size() / heads;
  if (n == 0 || n * heads != kept.size() || n > static_cast<size_t>(length)) {
    return invalid_argument(fmt::format(
        "{} kept rows for {} KV heads of a sequence of {}; each head keeps as many, at least one",
        kept.size(), heads, length));
  }
  for (size_t i = 0; i < kept.size(); ++i) {
    const bool follows = i % n == 0 ? kept[i] >= 0 : kept[i] > kept[i - 1];
    if (!follows || kept[i] >= length) {
      return invalid_argument(
          fmt::format("kept row {} of KV head {} is position {}; positions ascend below {}", i % n,
                      i / n, kept[i], length));
    }
  }
  return {};
}

Status KeptRows::read(SeqId seq, int layer, std::span<const int32_t> kept, std::byte* k,
                      std::byte* v) const {
  HCACHE_RETURN_IF_ERROR(check(seq, layer, kept));
  const model::HParams& hp = model_.hparams();
  const auto heads = static_cast<size_t>(hp.n_head_kv);
  const size_t n = kept.size() / heads;
  // Of all heads, what lies before the last of them is read.
  const auto length = static_cast<size_t>(*std::max_element(kept.begin(), kept.end())) + 1;
  const size_t head_bytes = ggml_row_size(options_.kv_type, hp.head_dim);
  const size_t row_bytes = heads * head_bytes;
  std::vector<std::byte> all(2 * length * row_bytes);
  HCACHE_RETURN_IF_ERROR(restore_.read_kv(seq, layer, 0, static_cast<int>(length), all.data(),
                                          all.data() + length * row_bytes));
  const std::byte* from = all.data();
  for (std::byte* to : {k, v}) {
    for (size_t head = 0; head < heads; ++head) {
      for (size_t i = 0; i < n; ++i) {
        const auto pos = static_cast<size_t>(kept[head * n + i]);
        std::memcpy(to + i * row_bytes + head * head_bytes,
                    from + pos * row_bytes + head * head_bytes, head_bytes);
      }
    }
    from += length * row_bytes;
  }
  return {};
}

Status KeptRows::load(SeqId seq, int layer, int64_t n, const std::byte* k, const std::byte* v) {
  HCACHE_RETURN_IF_ERROR(check_layer(seq, layer));
  const int64_t length = sequences_.length(seq);
  if (n < 1 || n > length) {
    return invalid_argument(fmt::format("{} kept rows of a sequence of {}", n, length));
  }
  HCACHE_ASSIGN_OR_RETURN(const RestoreOps::Ticket ticket,
                          restore_.load_kv(seq, layer, length - n, static_cast<int>(n), k, v));
  restore_.wait(ticket);
  if (n == length) return {};
  sequences_.drop_before(seq, sequences_.group_of(layer), length - n);
  sequences_.set_compacted(seq, length);
  return {};
}

Status KeptRows::keep(SeqId seq, int layer, std::span<const int32_t> kept) {
  HCACHE_RETURN_IF_ERROR(check(seq, layer, kept));
  const model::HParams& hp = model_.hparams();
  const size_t n = kept.size() / static_cast<size_t>(hp.n_head_kv);
  if (n == static_cast<size_t>(sequences_.length(seq))) return {};
  const size_t half = n * ggml_row_size(options_.kv_type, hp.n_embd_kv());
  std::vector<std::byte> some(2 * half);
  HCACHE_RETURN_IF_ERROR(read(seq, layer, kept, some.data(), some.data() + half));
  return load(seq, layer, static_cast<int64_t>(n), some.data(), some.data() + half);
}

}  // namespace hcache::engine
