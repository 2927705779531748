// Offline tools on model files: describe, synthesise, and rewrite. Nothing here needs a device or
// keeps a model in memory: tensors stream from file to file, block by block, on several threads.
//
// Threading: every function may run on any thread; Progress is called by one thread at a time, not
// always the caller's. Output appears under its name only when it is whole.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "model/model.h"

namespace hcache::model {

// ---- Describe ----------------------------------------------------------------------------------

struct TensorInfo {
  std::string name;
  std::string type;            // "Q4_1"
  std::vector<int64_t> shape;  // ggml's order: fastest dimension first
  uint64_t bytes = 0;
};

struct ModelInfo {
  std::string path;
  bool supported = false;   // whether our engine knows the architecture and its features
  std::string unsupported;  // why not
  HParams hparams;          // meaningful when supported
  std::string types;        // "Q4_1 (211 tensors), F32 (61)"
  uint64_t n_params = 0;
  uint64_t n_bytes = 0;
  // Scalar metadata as text, in the file's key order; arrays as "[49152 x str]".
  std::vector<std::pair<std::string, std::string>> metadata;
  std::vector<TensorInfo> tensors;

  // Bytes of F16 K and V per token, over all layers.
  [[nodiscard]] uint64_t kv_bytes_per_token() const;
};

// Reads the header only. kDataLoss and kNotFound as Model::load; an architecture or a feature this
// build doesn't run is described, not refused.
Result<ModelInfo> describe_model(const std::string& path);
// One JSON object; `tensors` on request only, it is long.
std::string to_json(const ModelInfo& info, bool with_tensors);

// ---- Synthesise --------------------------------------------------------------------------------

// The dimensions of a published model.
struct ModelShape {
  std::string name;  // "llama2-7b"
  std::string arch;  // a row of decoder_specs()
  int n_layer = 0;
  int n_embd = 0;
  int n_head = 0;
  int n_head_kv = 0;
  int head_dim = 0;
  int n_ff = 0;
  int n_vocab = 0;
  int n_ctx = 0;
  float rope_freq_base = 10000.0F;
  float norm_eps = 1e-5F;
  bool tied_output = false;
  bool qkv_bias = false;
  bool block_biases = false;  // of the other matrices of a layer
  bool output_bias = false;
  bool two_blocks = true;  // feed-forward behind attention, where the file decides
  bool two_norms = false;  // Falcon-40B: attention and feed-forward have a norm each
  int n_rot = 0;           // dimensions of a head that RoPE turns; 0: all
  // HParams' of the same names; 0: no experts.
  int n_expert = 0;
  int n_expert_used = 0;
  int n_ff_expert = 0;
  int n_ff_shared = 0;
  int n_dense_layers = 0;
  bool expert_biases = false;
  int n_window = 0;       // 0: no layer has a window
  int window_period = 0;  // 0: the architecture's
};

std::span<const ModelShape> published_shapes();
// kNotFound names the known ones.
Result<ModelShape> find_shape(std::string_view name);
// Two or three layers, width 256 (so that every weight type fits), heads of 64: for tests.
// n_head_kv: 4 multi-head, 2 grouped, 1 multi-query.
ModelShape tiny_shape(const DecoderSpec& spec, int n_head_kv);

// "q4_k", "Q4_K", "f16": any type a weight may have; kInvalidArgument names them.
Result<ggml_type> parse_weight_type(std::string_view name);

struct SynthOptions {
  ModelShape shape;
  int n_layer = 0;                 // 0: the shape's
  ggml_type type = GGML_TYPE_F16;  // of every matrix and embedding; norms and biases are F32
  uint64_t seed = 1;
  // A GGUF file whose tokenizer is copied in (its vocabulary then sets n_vocab); empty: no
  // vocabulary.
  std::string vocab_from;
  // Extra metadata, "<arch>." prefixed by the caller: RoPE scaling in tests.
  std::vector<std::pair<std::string, float>> extra_numbers;
  std::vector<std::pair<std::string, std::string>> extra_strings;
  std::vector<std::pair<std::string, uint32_t>> extra_integers;
  bool rope_factors = false;  // adds Llama 3's rope_freqs.weight
  bool long_rope = false;     // adds LongRoPE's factors
  bool head_norms = false;    // of each head, where the architecture may have them
  // The file says that it is of this architecture, which differs from the shape's by rotating in
  // four sections (M-RoPE) alone; empty: the shape's.
  std::string sectioned_arch;
  // A head for so many labels, by which the model ranks texts, as Qwen3-Reranker's files have it
  // (with what a query and a document are written into, where there is a vocabulary); 0: none.
  int ranking_labels = 0;
  int n_threads = 0;  // 0: every core
  Progress progress;
};

// Writes a model with random weights, scaled so that activations and logits stay sane. The same
// options give the same bytes, whatever the number of threads.
Status synthesise_model(const SynthOptions& options, const std::string& out);

struct AdapterOptions {
  std::string model;  // whose matrices it changes
  std::string only;   // those whose names hold this; empty: all but embeddings
  int rank = 8;
  float alpha = 16;
  float size = 0.1F;  // standard deviation of B (A x), for x of one, before alpha / rank
  uint64_t seed = 1;
};

// Writes a low-rank adapter (LoRA) with random weights, in F32. kNotFound: there is no such matrix.
Status synthesise_adapter(const AdapterOptions& options, const std::string& out);

struct ProjectorShape {
  std::string model;         // whose rows it makes
  std::string kind = "mlp";  // libmtmd's name of it: mlp, gemma3 or qwen2vl_merger
  int image_size = 112;      // pixels of a side, where pictures have a fixed size
  uint64_t seed = 1;
};

// Writes a projector for pictures (libmtmd's mmproj) with random weights, in F32: two layers of
// width 64 over patches of 14 x 14 pixels. kInvalidArgument: another kind.
Status synthesise_projector(const ProjectorShape& shape, const std::string& out);

// ---- Rewrite -----------------------------------------------------------------------------------

// The multi-head twin of a grouped-query model: every K and V head is repeated for each query head
// that reads it. Gives the same answers; K and V take n_head / n_head_kv times the room.
Status expand_kv(const std::string& in, const std::string& out, int n_threads,
                 const Progress& progress);

// The same model with every matrix in `type`. Where rows don't divide by the type's block, widths
// and query heads are padded with zeros such that the function stays the same (RMS-norm models
// only: kUnimplemented otherwise).
Status requantise(const std::string& in, const std::string& out, ggml_type type, int n_threads,
                  const Progress& progress);

}  // namespace hcache::model
