#include "weight_slots.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <memory>

#include "weight_types.h"

namespace hcache::model {
namespace {

// Whether K and V of the layer need the weight that `target` is.
bool makes_kv(const LayerWeights& l, ggml_tensor* const* target) {
  const std::array<ggml_tensor* const*, 9> parts = {
      &l.attn_norm.w,   &l.attn_norm.b, &l.attn_norm_2.w,
      &l.attn_norm_2.b, &l.k_norm.w,    &l.k.w,
      &l.k.b,           &l.v.w,         &l.v.b};
  return std::find(parts.begin(), parts.end(), target) != parts.end();
}

// Whether that weight belongs to the feed-forward block, its norm included.
bool is_feed_forward(const LayerWeights& l, ggml_tensor* const* target) {
  const ExpertWeights& e = l.experts;
  const std::array parts = {&l.ffn_norm, &l.ffn_post_norm};
  const std::array linears = {&l.gate, &l.up,   &l.down,        &e.router,    &e.gate,
                              &e.up,   &e.down, &e.shared_gate, &e.shared_up, &e.shared_down};
  const auto has = [target](const auto* part) { return target == &part->w || target == &part->b; };
  return std::any_of(parts.begin(), parts.end(), has) ||
         std::any_of(linears.begin(), linears.end(), has) || target == &e.shared_weight;
}

}  // namespace

size_t Slot::row_bytes() const {
  return use == Use::kVector ? sizeof(float) : ggml_row_size(source->type, n_columns);
}

size_t Slot::n_bytes() const { return static_cast<size_t>(n_rows) * row_bytes(); }

bool Slot::is_contiguous() const { return use == Use::kVector || n_columns == source->ne[0]; }

std::span<const uint8_t> Slot::bytes() const {
  return source->data.subspan(static_cast<size_t>(first_row) * row_bytes(), n_bytes());
}

void Slot::gather(int64_t row, int64_t n, uint8_t* out) const {
  const size_t n_row = row_bytes();
  const size_t stride = source->row_bytes();
  const uint8_t* from = source->data.data() + static_cast<size_t>(first_row + row) * stride +
                        ggml_row_size(source->type, first_column);
  for (int64_t i = 0; i < n; ++i, from += stride, out += n_row) std::memcpy(out, from, n_row);
}

TensorReader::Range TensorReader::q_part() const {
  const int64_t group_rows = int64_t{h_.n_head / h_.n_head_kv} * h_.head_dim;
  return {share_.first_head_kv * group_rows, share_.n_head_kv * group_rows};
}

TensorReader::Range TensorReader::kv_part() const {
  return {int64_t{share_.first_head_kv} * h_.head_dim, int64_t{share_.n_head_kv} * h_.head_dim};
}

// The tensor with its shape checked; nullptr when it is absent and optional.
Result<const GgufTensor*> TensorReader::claim(const std::string& name, Shape shape, bool required) {
  const GgufTensor* t = file_.tensor(name);
  if (t == nullptr) {
    if (!required) return t;
    return not_found(fmt::format("{}: tensor {} is missing", file_.path(), name));
  }
  claimed_.insert(name);
  if (t->ne[0] != shape.ne0 || t->ne[1] != shape.ne1 || t->ne[2] != shape.ne2 || t->ne[3] != 1) {
    const std::string more = shape.ne2 > 1 ? fmt::format(", {}", shape.ne2) : "";
    return data_loss(fmt::format("{}: tensor {} is {}, expected [{}, {}{}]", file_.path(), name,
                                 t->describe(), shape.ne0, shape.ne1, more));
  }
  return t;
}

Status TensorReader::bad_type(const GgufTensor& t, std::string_view why) const {
  return unimplemented(
      fmt::format("{}: tensor {} is {}: {}", file_.path(), t.name, ggml_type_name(t.type), why));
}

Status TensorReader::check_matrix(const GgufTensor& t) const {
  if (find_weight_type(t.type) == nullptr) return bad_type(t, "no matrix product takes this type");
  if (device_->is_cpu()) return {};
  const std::unique_ptr<ggml_context, decltype(&ggml_free)> ctx(
      ggml_init({ggml_tensor_overhead() * 4, nullptr, true}), &ggml_free);
  ggml_tensor* w = ggml_new_tensor_2d(ctx.get(), t.type, t.ne[0], t.ne[1]);
  ggml_tensor* x = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, t.ne[0], 1);
  if (!ggml_backend_dev_supports_op(device_->dev(), ggml_mul_mat(ctx.get(), w, x))) {
    return bad_type(t, fmt::format("device {} can't multiply it", device_->name()));
  }
  return {};
}

void TensorReader::add_slot(ggml_tensor*& target, const GgufTensor* source, Range rows, Use use) {
  slots_.push_back({.target = &target,
                    .source = source,
                    .first_row = rows.first,
                    .n_rows = rows.n,
                    .n_columns = source->ne[0],
                    .use = use,
                    .device = device_});
}

Status TensorReader::vector(ggml_tensor*& target, const std::string& name, int64_t n, Range part,
                            bool required) {
  HCACHE_ASSIGN_OR_RETURN(const GgufTensor* t, claim(name, {n}, required));
  if (t == nullptr) return {};
  if (t->type != GGML_TYPE_F32) return bad_type(*t, "norms and biases must be F32");
  if (part.n > 0) add_slot(target, t, part, Use::kVector);
  return {};
}

// Rows of numbers, kept one behind the other.
Status TensorReader::table(ggml_tensor*& target, const std::string& name, Shape shape, Range part) {
  HCACHE_ASSIGN_OR_RETURN(const GgufTensor* t, claim(name, shape, false));
  if (t == nullptr) return {};
  if (t->type != GGML_TYPE_F32) return bad_type(*t, "norms and biases must be F32");
  add_slot(target, t, part, Use::kVector);
  return {};
}

Status TensorReader::norm(NormWeights& target, const std::string& name, int64_t n, bool required) {
  HCACHE_RETURN_IF_ERROR(vector(target.w, name + ".weight", n, {0, n}, required));
  const bool has_bias = spec_.norm_biases && file_.tensor(name + ".weight") != nullptr;
  return has_bias ? vector(target.b, name + ".bias", n, {0, n}, true) : Status();
}

// Some outputs of a product, each with its bias.
Status TensorReader::rows_of(Linear& target, const std::string& name, Shape shape, Range rows,
                             Use use) {
  HCACHE_ASSIGN_OR_RETURN(const GgufTensor* t, claim(name + ".weight", shape, true));
  HCACHE_RETURN_IF_ERROR(check_matrix(*t));
  add_slot(target.w, t, rows, use);
  return vector(target.b, name + ".bias", shape.ne1, rows, false);
}

// Some inputs of a product; the bias is added once.
Status TensorReader::columns_of(Linear& target, const std::string& name, Shape shape,
                                Range columns) {
  HCACHE_ASSIGN_OR_RETURN(const GgufTensor* t, claim(name + ".weight", shape, true));
  HCACHE_RETURN_IF_ERROR(check_matrix(*t));
  add_slot(target.w, t, {0, shape.ne1}, Use::kMatrix);
  slots_.back().first_column = columns.first;
  slots_.back().n_columns = columns.n;
  return vector(target.b, name + ".bias", shape.ne1, {0, is_first() ? shape.ne1 : 0}, false);
}

Status TensorReader::fused_qkv(LayerWeights& l, const std::string& name) {
  const int64_t n_q = h_.n_embd_q();
  const int64_t n_kv = h_.n_embd_kv();
  const int64_t n_out = n_q + 2 * n_kv;
  const Range q = q_part();
  const Range kv = kv_part();
  const Range k = {n_q + kv.first, kv.n};
  const Range v = {n_q + n_kv + kv.first, kv.n};
  HCACHE_ASSIGN_OR_RETURN(const GgufTensor* t, claim(name + ".weight", {h_.n_embd, n_out}, true));
  HCACHE_RETURN_IF_ERROR(check_matrix(*t));
  add_slot(l.q.w, t, q, Use::kMatrix);
  add_slot(l.k.w, t, k, Use::kPlainMatrix);
  add_slot(l.v.w, t, v, Use::kPlainMatrix);
  HCACHE_ASSIGN_OR_RETURN(const GgufTensor* b, claim(name + ".bias", {n_out}, false));
  if (b == nullptr) return {};
  if (b->type != GGML_TYPE_F32) return bad_type(*b, "norms and biases must be F32");
  add_slot(l.q.b, b, q, Use::kVector);
  add_slot(l.k.b, b, k, Use::kVector);
  add_slot(l.v.b, b, v, Use::kVector);
  return {};
}

// The gate's rows, then those of up.
Status TensorReader::fused_gate_up(LayerWeights& l, const std::string& name) {
  HCACHE_ASSIGN_OR_RETURN(
      const GgufTensor* t,
      claim(name + ".weight", {h_.n_embd, 2 * static_cast<int64_t>(h_.n_ff)}, true));
  HCACHE_RETURN_IF_ERROR(check_matrix(*t));
  const Range part = ff_part();
  add_slot(l.gate.w, t, part, Use::kMatrix);
  add_slot(l.up.w, t, {h_.n_ff + part.first, part.n}, Use::kMatrix);
  return {};
}

Status TensorReader::expert_matrices(Linear& target, const std::string& name, Shape shape) {
  shape.ne2 = h_.n_expert;
  HCACHE_ASSIGN_OR_RETURN(const GgufTensor* t, claim(name + ".weight", shape, true));
  HCACHE_RETURN_IF_ERROR(check_matrix(*t));
  add_slot(target.w, t, {0, shape.ne1 * shape.ne2}, Use::kMatrix);
  slots_.back().n_matrices = shape.ne2;
  return table(target.b, name + ".bias", {shape.ne1, shape.ne2}, {0, shape.ne1 * shape.ne2});
}

Status TensorReader::experts(ExpertWeights& e, const std::string& prefix) {
  const int64_t n_embd = h_.n_embd;
  const Range all = {0, h_.n_expert};
  HCACHE_RETURN_IF_ERROR(
      rows_of(e.router, prefix + "ffn_gate_inp", {n_embd, h_.n_expert}, all, Use::kPlainMatrix));
  const Shape in = {n_embd, h_.n_ff_expert};
  HCACHE_RETURN_IF_ERROR(expert_matrices(e.gate, prefix + "ffn_gate_exps", in));
  HCACHE_RETURN_IF_ERROR(expert_matrices(e.up, prefix + "ffn_up_exps", in));
  HCACHE_RETURN_IF_ERROR(
      expert_matrices(e.down, prefix + "ffn_down_exps", {h_.n_ff_expert, n_embd}));
  if (h_.n_ff_shared == 0) return {};
  if (spec_.shared_experts == SharedExperts::kWeighed) {
    HCACHE_RETURN_IF_ERROR(
        vector(e.shared_weight, prefix + "ffn_gate_inp_shexp.weight", n_embd, {0, n_embd}, true));
  }
  const Shape shared = {n_embd, h_.n_ff_shared};
  const Range columns = {0, h_.n_ff_shared};
  HCACHE_RETURN_IF_ERROR(
      rows_of(e.shared_gate, prefix + "ffn_gate_shexp", shared, columns, Use::kMatrix));
  HCACHE_RETURN_IF_ERROR(
      rows_of(e.shared_up, prefix + "ffn_up_shexp", shared, columns, Use::kMatrix));
  return columns_of(e.shared_down, prefix + "ffn_down_shexp", {h_.n_ff_shared, n_embd}, columns);
}

Status TensorReader::dense(LayerWeights& l, const std::string& prefix) {
  const Shape up = {h_.n_embd, h_.n_ff};
  if (spec_.fused_gate_up) {
    HCACHE_RETURN_IF_ERROR(fused_gate_up(l, prefix + "ffn_up"));
  } else {
    if (spec_.gated_ffn) {
      HCACHE_RETURN_IF_ERROR(rows_of(l.gate, prefix + "ffn_gate", up, ff_part(), Use::kMatrix));
    }
    HCACHE_RETURN_IF_ERROR(rows_of(l.up, prefix + "ffn_up", up, ff_part(), Use::kMatrix));
  }
  return columns_of(l.down, prefix + "ffn_down", {h_.n_ff, h_.n_embd}, ff_part());
}

// Of Q or K, of so many heads, before RoPE.
Status TensorReader::head_norm(ggml_tensor*& target, const std::string& name, int64_t n_head,
                               Range part) {
  switch (spec_.head_norm) {
    case HeadNorm::kNone: return {};
    case HeadNorm::kHead: return vector(target, name, h_.head_dim, {0, h_.head_dim}, true);
    case HeadNorm::kRow: {
      const int64_t n = n_head * h_.head_dim;
      return vector(target, name, n, {0, n}, true);
    }
    case HeadNorm::kEachHead: return table(target, name, {h_.head_dim, n_head}, part);
  }
  return {};
}

// The embedding tables: rows are looked up on the host.
Status TensorReader::tables(const GgufTensor*& token_embd, const GgufTensor*& position_embd) {
  token_embd = file_.tensor("token_embd.weight");
  if (token_embd == nullptr) {
    return not_found(fmt::format("{}: tensor token_embd.weight is missing", file_.path()));
  }
  h_.n_vocab = token_embd->ne[1];
  if (h_.n_vocab > std::numeric_limits<int32_t>::max()) {
    return data_loss(
        fmt::format("{}: tensor token_embd.weight has {} rows", file_.path(), h_.n_vocab));
  }
  HCACHE_RETURN_IF_ERROR(claim("token_embd.weight", {h_.n_embd, h_.n_vocab}, true).status());
  if (find_weight_type(token_embd->type) == nullptr) {
    return bad_type(*token_embd, "rows of this type can't be looked up");
  }
  if (const GgufValue* tokens = file_.find("tokenizer.ggml.tokens");
      tokens != nullptr && static_cast<int64_t>(tokens->count) != h_.n_vocab) {
    return data_loss(fmt::format("{}: the vocabulary has {} tokens, token_embd.weight {} rows",
                                 file_.path(), tokens->count, h_.n_vocab));
  }
  if (!spec_.learned_positions) return {};
  const int64_t n_rows = int64_t{h_.n_ctx_train} + h_.position_offset;
  HCACHE_ASSIGN_OR_RETURN(position_embd, claim("position_embd.weight", {h_.n_embd, n_rows}, true));
  if (find_weight_type(position_embd->type) == nullptr) {
    return bad_type(*position_embd, "rows of this type can't be looked up");
  }
  return {};
}

Status TensorReader::layer(LayerWeights& l, int index) {
  const std::string p = fmt::format("blk.{}.", index);
  device_ = devices_[static_cast<size_t>(index)];
  const int64_t n_embd = h_.n_embd;
  if (spec_.pre_norm) {
    HCACHE_RETURN_IF_ERROR(norm(l.attn_norm, p + "attn_norm", n_embd, true));
    if (spec_.parallel == Parallel::kAlways) {
      HCACHE_RETURN_IF_ERROR(norm(l.attn_norm_2, p + "attn_norm_2", n_embd, false));
    } else if (!h_.parallel || spec_.parallel == Parallel::kByKey) {
      HCACHE_RETURN_IF_ERROR(norm(l.ffn_norm, p + spec_.ffn_norm, n_embd, true));
    }
  }
  if (spec_.post_norm) {
    HCACHE_RETURN_IF_ERROR(norm(l.attn_post_norm, p + "post_attention_norm", n_embd, true));
    HCACHE_RETURN_IF_ERROR(norm(l.ffn_post_norm, p + "post_ffw_norm", n_embd, true));
  }
  if (spec_.fused_qkv || file_.tensor(p + "attn_qkv.weight") != nullptr) {
    HCACHE_RETURN_IF_ERROR(fused_qkv(l, p + "attn_qkv"));
  } else {
    const Shape kv = {n_embd, h_.n_embd_kv()};
    HCACHE_RETURN_IF_ERROR(
        rows_of(l.q, p + "attn_q", {n_embd, h_.n_embd_q()}, q_part(), Use::kMatrix));
    HCACHE_RETURN_IF_ERROR(rows_of(l.k, p + "attn_k", kv, kv_part(), Use::kPlainMatrix));
    HCACHE_RETURN_IF_ERROR(rows_of(l.v, p + "attn_v", kv, kv_part(), Use::kPlainMatrix));
  }
  HCACHE_RETURN_IF_ERROR(head_norm(l.q_norm.w, p + "attn_q_norm.weight", h_.n_head, q_part()));
  HCACHE_RETURN_IF_ERROR(head_norm(l.k_norm.w, p + "attn_k_norm.weight", h_.n_head_kv, kv_part()));
  if (spec_.sinks) {
    const int group = h_.n_head / h_.n_head_kv;
    HCACHE_RETURN_IF_ERROR(
        vector(l.sinks, p + "attn_sinks.weight", h_.n_head,
               {int64_t{share_.first_head_kv} * group, int64_t{share_.n_head_kv} * group}, true));
  }
  HCACHE_RETURN_IF_ERROR(columns_of(l.o, p + "attn_output", {h_.n_embd_q(), n_embd}, q_part()));
  return h_.has_experts(index) ? experts(l.experts, p) : dense(l, p);
}

// Factors of RoPE's frequencies: one tensor for all layers of a device, the first of which has it.
// LongRoPE's are those for contexts beyond the original one where the model has such.
Status TensorReader::rope_factors(Weights& w) {
  const int64_t n = h_.n_rot / 2;
  const bool longer = h_.n_ctx_train > h_.rope_n_ctx_orig;
  std::string used = "rope_freqs.weight";
  if (spec_.long_rope || h_.long_rope) {
    used = longer ? "rope_factors_long.weight" : "rope_factors_short.weight";
    const std::string other = longer ? "rope_factors_short.weight" : "rope_factors_long.weight";
    HCACHE_RETURN_IF_ERROR(claim(other, {n}, false).status());
  }
  for (auto at = devices_.begin(); at != devices_.end(); ++at) {
    if (std::find(devices_.begin(), at, *at) != at) continue;
    device_ = *at;
    ggml_tensor*& target = w.layers[static_cast<size_t>(at - devices_.begin())].rope_factors;
    HCACHE_RETURN_IF_ERROR(vector(target, used, n, {0, n}, h_.long_rope));
  }
  return {};
}

// The final norm and the output matrix, which the first share has.
Status TensorReader::output(Weights& w, const GgufTensor& token_embd) {
  const size_t begin = slots_.size();
  HCACHE_RETURN_IF_ERROR(norm(w.output_norm, "output_norm", h_.n_embd, true));
  const Range rows = {0, h_.n_vocab};
  if (file_.tensor("output.weight") != nullptr) {
    HCACHE_RETURN_IF_ERROR(
        rows_of(w.output, "output", {h_.n_embd, h_.n_vocab}, rows, Use::kMatrix));
  } else {
    HCACHE_RETURN_IF_ERROR(check_matrix(token_embd));
    add_slot(w.output.w, &token_embd, rows, Use::kMatrix);
  }
  if (!is_first()) slots_.resize(begin);
  return {};
}

Status TensorReader::read(Weights& w, const GgufTensor*& token_embd,
                          const GgufTensor*& position_embd) {
  HCACHE_RETURN_IF_ERROR(tables(token_embd, position_embd));
  HCACHE_RETURN_IF_ERROR(output(w, *token_embd));
  w.layers.resize(static_cast<size_t>(h_.n_layer));
  for (int i = 0; i < h_.n_layer; i++) {
    const size_t begin = slots_.size();
    LayerWeights& l = w.layers[static_cast<size_t>(i)];
    HCACHE_RETURN_IF_ERROR(layer(l, i));
    for (size_t s = begin; s < slots_.size(); ++s) {
      slots_[s].layer = i;
      slots_[s].is_kv = makes_kv(l, slots_[s].target);
      slots_[s].is_feed_forward = is_feed_forward(l, slots_[s].target);
    }
  }
  if (spec_.rope_freqs || spec_.long_rope || h_.long_rope) {
    HCACHE_RETURN_IF_ERROR(rope_factors(w));
  }
  for (const GgufTensor& t : file_.tensors()) {
    if (!claimed_.contains(t.name)) {
      return unimplemented(
          fmt::format("{}: tensor {} is no part of a {} decoder as this build knows it",
                      file_.path(), t.name, spec_.arch));
    }
  }
  return {};
}

}  // namespace hcache::model
