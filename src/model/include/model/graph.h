// The pieces every decoder layer is made of, built from DecoderSpec and HParams. The engine puts
// the attention between them; the projector uses attention_input's result (`hidden`) and
// project_k / project_v alone. Pure graph construction: nothing is computed here.
//
// Shapes are ggml's (fastest dimension first); n = rows of the batch.
#pragma once

#include <ggml.h>

#include <functional>

#include "model/model.h"

namespace hcache::model {

// weight [n_in, n_out] times x [n_in, n]: F32 [n_out, n].
using Product = std::function<ggml_tensor*(ggml_context* ctx, ggml_tensor* weight, ggml_tensor* x)>;

// By our own kernels where the weight is in the CPU's memory and they take its type, else by
// ggml's. x: F32 or the native activation type of the weight.
ggml_tensor* build_product(ggml_context* ctx, ggml_tensor* weight, ggml_tensor* x);
// Each row times the experts chosen for it, as ggml_mul_mat_id().
ggml_tensor* build_expert_product(ggml_context* ctx, ggml_tensor* weights, ggml_tensor* x,
                                  ggml_tensor* chosen);

// Normed input of the attention block: [n_embd, n]. This is the `hidden` that is saved: the very
// tensor W_q, W_k and W_v multiply, free of positions in rotary models.
ggml_tensor* build_hidden(ggml_context* ctx, const Model& model, int layer, ggml_tensor* x);

// Q, K as [head_dim, heads, n] after bias, head norm and RoPE; V as [head_dim, n_head_kv, n] after
// bias. `hidden` is [n_embd, n], F32 or the native activation type of the weight.
// positions: I32 [n]; unused (may be null) in models without RoPE.
// adapters: of the rows, here and below; where they count, hidden is F32.
ggml_tensor* build_q(ggml_context* ctx, const Model& model, int layer, ggml_tensor* hidden,
                     ggml_tensor* positions, AdapterScales adapters = {});
ggml_tensor* build_k(ggml_context* ctx, const Model& model, int layer, ggml_tensor* hidden,
                     ggml_tensor* positions, const Product& product = build_product,
                     AdapterScales adapters = {});
ggml_tensor* build_v(ggml_context* ctx, const Model& model, int layer, ggml_tensor* hidden,
                     const Product& product = build_product, AdapterScales adapters = {});

// Re-rotates cached K by `deltas` (I32 [n]) positions: k is F32 [head_dim, n_head_kv, n].
ggml_tensor* build_k_shift(ggml_context* ctx, const Model& model, int layer, ggml_tensor* k,
                           ggml_tensor* deltas);

// Everything after attention: output projection, residual, feed-forward. x is the layer's input
// [n_embd, n], hidden as above (parallel architectures reuse it), attn [n_embd_q, n].
ggml_tensor* build_layer_output(ggml_context* ctx, const Model& model, int layer, ggml_tensor* x,
                                ggml_tensor* hidden, ggml_tensor* attn,
                                AdapterScales adapters = {});

// The same in two graphs: the rows behind the attention block, and the layer's output from those.
// In parallel architectures the first is the whole layer's output. Of a part of a model (see
// Model::parts()) each is what it adds to a shared layer, [n_embd, n], and the parts' sum goes on;
// the residual x is the first part's to add. Parallel architectures alone read `hidden`.
ggml_tensor* build_attention_output(ggml_context* ctx, const Model& part, int layer, ggml_tensor* x,
                                    ggml_tensor* hidden, ggml_tensor* attn,
                                    AdapterScales adapters = {});
ggml_tensor* build_feed_forward(ggml_context* ctx, const Model& part, int layer, ggml_tensor* x,
                                AdapterScales adapters = {});

// The final norm, F32 [n_embd, n]: what the output matrix sees, and what stands for the tokens
// where vectors are wanted of a text.
ggml_tensor* build_output_norm(ggml_context* ctx, const Model& model, ggml_tensor* x);
// Final norm and output matrix: logits F32 [n_vocab, n].
ggml_tensor* build_logits(ggml_context* ctx, const Model& model, ggml_tensor* x,
                          AdapterScales adapters = {});

}  // namespace hcache::model
