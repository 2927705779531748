// A decoder model: what its GGUF file says (HParams), how its architecture is wired (DecoderSpec)
// and where its weights live.
#pragma once

#include <ggml.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "model/adapters.h"
#include "model/device.h"
#include "model/placement.h"
#include "model/rope.h"
#include "model/shares.h"
#include "model/streamed_weights.h"

namespace hcache::model {

enum class Norm { kRms, kLayer };
enum class Activation {
  kSilu,
  kGelu,
  kRelu,
  kSquaredRelu,
  kClampedSwiglu,  // of experts: gate and up are clamped, the gate's sigmoid is steeper (gpt-oss)
};

// Normalisation of Q and K before RoPE.
enum class HeadNorm {
  kNone,
  kHead,      // RMS over each head, one weight for all heads (Qwen3)
  kEachHead,  // of the row's kind over each head, with a weight for each; where the file has it
  kRow,       // RMS over all heads together (OLMo 2)
};

// Whether x + attention(norm(x)) + ffn(norm(x)), not the feed-forward block behind attention.
enum class Parallel {
  kNever,
  kAlways,         // one norm for both, or attn_norm_2 for attention (Falcon)
  kByKey,          // use_parallel_residual; each has a norm of its own (GPT-NeoX)
  kWithoutFfnNorm  // where the file has no norm for the feed-forward block (StableLM 2 12B)
};

// What a layer with experts has beside those that are chosen.
enum class SharedExperts {
  kNone,
  kByLength,  // as wide as expert_shared_feed_forward_length says; 0: none (Granite)
  kByCount,   // expert_shared_count times an expert's width (DeepSeek)
  kWeighed,   // kByLength, times the sigmoid of a product of their own (Qwen)
};

// RoPE of layers with a window.
enum class WindowRope {
  kSame,
  kOwnBase,    // a base of its own (10,000 unless the file says otherwise), no scaling (Gemma 3)
  kUnscaled,   // OLMo 3
  kOnlyThere,  // the layers without a window have none (Cohere 2, EXAONE 4)
};

// One row per architecture (spec.cc): everything in which architectures differ. A bias or an
// optional weight is used when the file has it and the row allows it.
struct DecoderSpec {
  const char* arch;        // general.architecture
  Norm norm = Norm::kRms;  // of every normalisation but those of HeadNorm that say otherwise
  bool norm_biases = false;
  bool pre_norm = true;                   // of the input of attention and of the feed-forward block
  bool post_norm = false;                 // of what they give, before it is added
  const char* ffn_norm = "ffn_norm";      // the tensor's name
  int rope_mode = GGML_ROPE_TYPE_NORMAL;  // or GGML_ROPE_TYPE_NEOX, or -1: none
  bool rope_freqs = false;  // the file may have factors of RoPE's frequencies (Llama 3)
  bool long_rope = false;   // the file may have LongRoPE's, whatever it says of scaling (Phi-3)
  int no_rope_step = 0;     // every so many layers the last one has no RoPE (SmolLM3); 0: all have
  Activation activation = Activation::kSilu;  // of the feed-forward block
  bool gated_ffn = true;       // down(act(gate(x)) * up(x)); otherwise down(act(up(x)))
  bool fused_gate_up = false;  // the file's ffn_up has the gate's rows, then those of up
  Parallel parallel = Parallel::kNever;
  bool learned_positions = false;  // x0 = embedding + position embedding (OPT)
  HeadNorm head_norm = HeadNorm::kNone;
  bool fused_qkv = false;  // the file holds one attn_qkv matrix: Q rows, then K, then V
  // Of embeddings, residuals and logits, by the file's keys; see HParams.
  bool scales = false;
  bool divides_logits = false;      // by the key's scale, instead of multiplying
  bool embedding_by_width = false;  // embeddings times the square root of the width (Gemma)
  bool normalised_experts = false;  // the weights of those that are chosen sum to one
  bool softmax_of_chosen = false;   // of the chosen experts' logits alone, not of all
  SharedExperts shared_experts = SharedExperts::kNone;
  // Where the file says how long it is, layers see a window of the last rows only, but for the last
  // of every so many; 0: no model has a window.
  int window_period = 0;
  WindowRope window_rope = WindowRope::kSame;
  int least_window_layers = 0;  // models with fewer layers have none, whatever the file says
  bool soft_caps = false;       // of scores and of logits, by the file's keys (Gemma 2)
  bool logit_soft_cap = false;  // of logits alone
  int width_scaled_layers = 0;  // with so many layers scores are scaled by width over heads
  bool sinks = false;           // each head has a score that takes weight and gives nothing
  // Q grows with the position, and YaRN's borders and magnitude are the file's (Ministral 3).
  bool temperature = false;
};

// The table of supported architectures.
std::span<const DecoderSpec> decoder_specs();
// nullptr for an unknown architecture.
const DecoderSpec* find_decoder_spec(std::string_view arch);

// The file's numbers. Heads and widths are uniform over the layers.
struct HParams {
  std::string arch;
  std::string name;  // general.name, may be empty
  int64_t n_vocab = 0;
  int n_layer = 0;
  int n_embd = 0;
  int n_head = 0;
  int n_head_kv = 0;
  int head_dim = 0;  // of Q, K and V alike
  int n_rot = 0;     // dimensions of a head that RoPE turns
  int n_ff = 0;
  int n_ctx_train = 0;
  float norm_eps = 0;
  float attention_scale = 0;  // what Q.K is multiplied by
  int position_offset = 0;    // added to a position before the learned table is read (OPT: 2)
  bool parallel = false;      // see Parallel
  float embedding_scale = 1;  // of a token's row
  float residual_scale = 1;   // of what attention and feed-forward add
  float logit_scale = 1;
  float attention_soft_cap = 0;  // of scores, before the softmax; 0: none
  float logit_soft_cap = 0;
  // Q is multiplied by 1 + this · ln(1 + ⌊position / rope_n_ctx_orig⌋); 0: it is not.
  float attention_temperature = 0;
  int n_window = 0;                 // rows that a layer with a window sees, its own included
  std::vector<uint8_t> windowed{};  // per layer; empty: none

  // RoPE (ggml_rope_ext's parameters; YaRN and linear scaling included).
  float rope_freq_base = 10000.0F;
  float window_freq_base = 10000.0F;  // of WindowRope::kOwnBase
  float rope_freq_scale = 1.0F;
  int rope_n_ctx_orig = 0;
  float rope_ext_factor = 0.0F;
  float rope_attn_factor = 1.0F;
  float rope_beta_fast = 32.0F;
  float rope_beta_slow = 1.0F;
  bool long_rope = false;  // factors of the frequencies for long or for short contexts

  // A mixture of experts in place of the feed-forward block of layers from n_dense_layers on.
  int n_expert = 0;  // 0: there is none
  int n_expert_used = 0;
  int n_ff_expert = 0;  // an expert's width
  int n_ff_shared = 0;  // of the shared ones together; 0: none
  int n_dense_layers = 0;
  float expert_scale = 1;  // of the chosen experts' weights

  // Rows that the layer sees at most; 0: all.
  [[nodiscard]] int64_t window_of(int layer) const {
    return !windowed.empty() && windowed[static_cast<size_t>(layer)] != 0 ? n_window : 0;
  }
  [[nodiscard]] bool has_experts(int layer) const {
    return n_expert > 0 && layer >= n_dense_layers;
  }
  [[nodiscard]] int n_embd_q() const { return n_head * head_dim; }
  [[nodiscard]] int n_embd_kv() const { return n_head_kv * head_dim; }
};

// y = w x + b. w is ggml's [n_in, n_out]; b (F32) may be null.
struct Linear {
  ggml_tensor* w = nullptr;
  ggml_tensor* b = nullptr;
};
struct NormWeights {
  ggml_tensor* w = nullptr;
  ggml_tensor* b = nullptr;
};

// In place of gate, up and down.
struct ExpertWeights {
  Linear router;                               // [n_embd, n_expert]; null: the layer has no experts
  Linear gate, up, down;                       // w: ggml's [n_in, n_out, n_expert]; b: a row each
  Linear shared_gate, shared_up, shared_down;  // null: there are none
  ggml_tensor* shared_weight = nullptr;        // F32 [n_embd], of SharedExperts::kWeighed
};

struct LayerWeights {
  // Its output is the layer's `hidden`, unless attn_norm_2 exists (Falcon-40B): that one then
  // normalises attention's input, and attn_norm feeds the feed-forward block. Null without
  // pre_norm: `hidden` is the layer's input.
  NormWeights attn_norm, attn_norm_2;
  NormWeights ffn_norm;  // null where a parallel block shares attention's
  NormWeights attn_post_norm, ffn_post_norm;
  NormWeights q_norm, k_norm;
  ggml_tensor* sinks = nullptr;  // F32 [n_head]: scores beside those of the keys; null: none
  Linear q, k, v, o;  // k and v are always in plain buffers (never repacked): they also multiply
                      // saved hidden states in the native activation type
  Linear gate, up, down;
  ExpertWeights experts;
  ggml_tensor* rope_factors = nullptr;  // F32 [n_rot/2], of RoPE's frequencies
};

struct Weights {
  NormWeights output_norm;
  Linear output;  // shares token_embd's data in tied models
  std::vector<LayerWeights> layers;
};

// Progress of a long step in [0, 1]; returning false cancels.
using Progress = std::function<bool(float)>;

struct LoadOptions {
  bool use_mmap = true;  // map the file where the device can use host memory
  // Repacked or tiled weight layouts where they win (as libllama). Not where layers are streamed:
  // what is computed must not depend on how many of them are.
  bool use_extra_buffers = true;
  // Where the layers go; without devices, and before those of them, to the device that load() is
  // given. The output matrix is on the last layer's device, or the first of those that share all.
  Placement placement{};
  // Others than resident take one device: kUnimplemented.
  WeightPlace weights = WeightPlace::kResident;
  uint64_t device_memory = 0;  // bytes of the device's memory to use; 0: what is free
  // What else will be taken of the device's memory, in bytes; null: nothing.
  std::function<uint64_t(const HParams&)> other_bytes{};
  Progress progress{};
  Env* env = &Env::real();  // where files are; outlives the model
  RopeOverride rope{};
  // Files of low-rank adapters. kUnimplemented where devices share layers.
  std::vector<std::string> adapters{};
};

// Immutable after load; safe to read from any thread. The devices must outlive it.
class Model {
 public:
  // Reads, validates and places a GGUF file. Every size, offset, type and shape is checked before
  // use: kDataLoss for a truncated or lying file, kUnimplemented for an unknown architecture or an
  // unsupported feature, kNotFound for a missing file or tensor; the
  // message names the file and the key or tensor. Where the weights go is plan_weights()'s answer,
  // errors included.
  static Result<std::unique_ptr<Model>> load(const std::string& path, Device& device,
                                             const LoadOptions& options = {});
  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  [[nodiscard]] const std::string& path() const;
  [[nodiscard]] const HParams& hparams() const;
  [[nodiscard]] const DecoderSpec& spec() const;
  [[nodiscard]] const Weights& weights() const;
  [[nodiscard]] Device& device(int layer) const;
  // The first layer's; of a shared layer, the first part's.
  [[nodiscard]] Device& device() const { return device(0); }
  // Each that has a layer, in the order of the first one.
  [[nodiscard]] const std::vector<Device*>& devices() const;
  // The first that pins host memory, for what is copied from and to all of them; else the first.
  [[nodiscard]] const Device& pinning_device() const;
  // Where devices share every layer (Placement::share_layers): one model per device, with the whole
  // model's layers and width, its own share of heads and columns, and hparams() that count these.
  // hparams() of the whole count all; its weights() are the first part's. Empty: no layer is
  // shared.
  [[nodiscard]] const std::vector<std::unique_ptr<Model>>& parts() const;
  // What a part has of each layer; of a model that is no part: all.
  [[nodiscard]] const Share& share() const;
  // The layers whose weights are not on the device; null: all are.
  [[nodiscard]] const StreamedWeights* streamed() const;
  // The adapters that it was loaded with, in their order.
  [[nodiscard]] const std::vector<AdapterInfo>& adapters() const;
  // What they add to the products of a weight; empty for most.
  [[nodiscard]] std::span<const LowRank> low_rank(const ggml_tensor* weight) const;
  // Whether some adapter changes the layer's K or V.
  [[nodiscard]] bool adapts_kv(int layer) const;
  // Of our own products of quantised weights, where a layer takes them; 0: none does. Another
  // generation's sums differ by rounding.
  [[nodiscard]] int product_generation() const;
  // Where the weights are, in a line: "4 of 32 layers on cpu, 28 streamed from disk, ...".
  [[nodiscard]] std::string describe_places() const;

  // The scaled token embeddings (plus nothing: positions are added by add_learned_positions) of
  // `tokens` as F32 rows of n_embd, looked up on the host: out[i * n_embd + j].
  // kInvalidArgument names a token outside the vocabulary.
  Status embed_tokens(std::span<const int32_t> tokens, float* out) const;
  // Adds the learned position row of positions[i] to out[i]; no-op where the architecture has none.
  // kOutOfRange when a position lies beyond the table.
  Status add_learned_positions(std::span<const int32_t> positions, float* out) const;

  // "Q4_1", or "mixed: Q4_K, Q6_K": the weight types of the layers' matrices.
  [[nodiscard]] std::string type_name() const;
  // Bytes of all weights.
  [[nodiscard]] size_t n_bytes() const;
  // Parameter count.
  [[nodiscard]] uint64_t n_params() const;
  // 128-bit digest over the metadata that shapes K and V and over the weights' content, as hex.
  // The whole file is hashed once; the digest is kept in `cache_dir` keyed by (path, size, mtime,
  // inode). An empty cache_dir hashes every time.
  Result<std::string> content_digest(const std::string& cache_dir, const Progress& progress) const;

 private:
  struct Impl;
  explicit Model(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// The type in which this backend's matrix product consumes its right-hand side for weights of
// type `weight` ("native activation type"): F32, F16, BF16, Q8_0, Q8_1 or Q8_K on the CPU.
ggml_type native_activation_type(const Device& device, ggml_type weight);

// From how many rows on this backend's matrix product with weights of type `weight` takes the
// kernel that it takes for many rows, so that a row's result does not depend on the others: at
// least 1.
int64_t least_product_rows(const Device& device, ggml_type weight);

}  // namespace hcache::model
