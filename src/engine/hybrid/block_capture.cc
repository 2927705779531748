#include "block_capture.h"

#include <cstring>

namespace hcache::engine {

void BlockCapture::give(RequestId id, BlockStore::Id block, int64_t first_pos, int n_rows) const {
  const BlockKind kind = store_.kind(block);
  const size_t n_bytes = layout_.block_bytes(kind);
  if (sink_ == nullptr || n_bytes == 0) return;
  std::byte* memory = sink_->reserve(n_bytes);
  if (memory == nullptr) return;
  std::memcpy(memory, store_.host_page(block, layout_.first_layer, 0), n_bytes);
  std::vector<CapturedLayer> layers(static_cast<size_t>(layout_.n_layer));
  for (int i = layout_.first_layer; i < layout_.n_layer; ++i) {
    CapturedLayer& layer = layers[static_cast<size_t>(i)];
    if (kind == BlockKind::kAct) {
      layer.hidden_offset = static_cast<int64_t>(layout_.offset(kind, i, 0));
      layer.hidden_type = act_type(i);
      layer.hidden_row_bytes = layout_.row_bytes(kind, i);
    } else {
      layer.k_offset = static_cast<int64_t>(layout_.offset(kind, i, 0));
      layer.v_offset = static_cast<int64_t>(layout_.offset(kind, i, 1));
    }
  }
  const CapturedRows rows{
      .seq = static_cast<SeqId>(id), .first_pos = first_pos, .first_row = 0, .n_rows = n_rows};
  sink_->publish(memory, {.layers = layers,
                          .rows = {&rows, 1},
                          .n_rows = n_rows,
                          .kv_type = kv_type_,
                          .kv_row_bytes = layout_.kv_row_bytes,
                          .n_bytes = n_bytes});
}

}  // namespace hcache::engine
