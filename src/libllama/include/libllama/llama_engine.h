// A model on libllama's own forward pass: any architecture that llama.cpp knows, for those that the
// engine has no row for. Sequences share one cache of cells; their state goes out and in by rows
// where every token has its own, else as snapshots of the whole.
//
// What a row's result is may depend on the other rows of its step: libllama's kernels promise no
// more. Flash attention is on wherever the model allows it.
//
// Threading: one thread; it is the one that loaded it (OpenMP keeps a team for each).
#pragma once

#include <ggml-backend.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "libllama/media.h"
#include "model/rope.h"

namespace hcache::libllama {

struct LlamaOptions {
  // Where layers are computed beside the CPU, by ggml's devices; none: the CPU alone.
  std::vector<ggml_backend_dev_t> devices;
  int gpu_layers = -1;              // as llama.cpp's -ngl; -1: all, with devices
  std::vector<float> device_parts;  // of the layers, one for each device; empty: by free memory
  int n_threads = 0;                // 0: as many as ggml thinks fit
  int64_t cells = 4096;             // of the cache, for all sequences together
  int32_t max_batch_rows = 512;
  int32_t max_sequences = 16;  // at most; of models whose sequences take much memory, fewer
  ggml_type kv_type = GGML_TYPE_F16;
  model::RopeOverride rope;
  std::vector<std::string> adapters;    // files of low-rank adapters
  ProjectorOptions projector;           // for pictures and sounds
  std::function<bool(float)> progress;  // of loading; false cancels
};

struct LlamaModelInfo {
  std::string description;  // "qwen3next 80B Q4_K - Medium"
  std::string architecture;
  int32_t n_vocab = 0;
  int32_t n_layer = 0;
  int32_t n_embd = 0;
  int32_t n_embd_out = 0;  // of the rows behind the final norm, where that is another number
  int32_t n_ctx_train = 0;
  int64_t n_params = 0;
  int64_t n_bytes = 0;
};

// How a sequence's state can be taken and given back.
struct StateLayout {
  // Of each tensor with a row for every token (K or V of a layer, by cache): a row's bytes. Empty:
  // no state is kept by rows.
  std::vector<size_t> row_bytes;
  // There is state that has no rows (recurrent), or not all of them (a window): it is known at the
  // sequence's end alone, by a snapshot.
  bool snapshots = false;
  std::string description;  // "rows of 24 layers and snapshots"

  // Of a token, over all tensors.
  [[nodiscard]] size_t token_bytes() const;
};

// Tokens that are appended to a sequence, and which of them give logits. Those below 0 are of the
// sequence's media, whose runs that are whole end a step with their end alone.
struct LlamaItem {
  int32_t seq = -1;
  std::span<const int32_t> tokens;
  int64_t n_logits = 0;  // of the last so many
  // The rows behind the final norm instead of logits. Such items are a step of their own.
  bool hidden = false;
  const MediaChunks* chunks = nullptr;  // of the sequence's media, where some is among the tokens
  // Gets the rows behind what it has, n_vocab numbers each, n_embd_out of hidden ones.
  std::vector<float>* logits = nullptr;
};

class LlamaEngine {
 public:
  // kNotFound, kDataLoss (unreadable, with what libllama says; adapters, too), kUnimplemented (no
  // such architecture, no decoder, a model without a cache), kResourceExhausted, kCancelled.
  static Result<std::unique_ptr<LlamaEngine>> load(const std::string& path,
                                                   const LlamaOptions& options);
  LlamaEngine() = default;
  LlamaEngine(const LlamaEngine&) = delete;
  LlamaEngine& operator=(const LlamaEngine&) = delete;
  virtual ~LlamaEngine() = default;

  [[nodiscard]] virtual const LlamaModelInfo& info() const = 0;
  [[nodiscard]] virtual const LlamaOptions& options() const = 0;
  [[nodiscard]] virtual const StateLayout& layout() const = 0;

  // What its prompts may have beside text; nullptr: nothing. Any thread.
  [[nodiscard]] virtual const MediaReader* media() const = 0;

  // Sequences have the numbers 0 … max_sequences() - 1, and are empty at first.
  [[nodiscard]] virtual int32_t max_sequences() const = 0;
  // How many tokens:
  [[nodiscard]] virtual int64_t length(int32_t seq) const = 0;
  // How few tokens, but for none, trim() can leave: more than none where state is not kept by rows.
  [[nodiscard]] virtual int64_t shortest(int32_t seq) const = 0;
  // Keeps the first n tokens. kFailedPrecondition: fewer than shortest(); the sequence is empty.
  virtual Status trim(int32_t seq, int64_t n) = 0;
  // By how much each adapter counts in what the sequence computes from now on; none where nothing
  // was set. kInvalidArgument: not as many as there are adapters, or none of them.
  virtual Status set_adapters(int32_t seq, std::span<const float> scales) = 0;
  // Where the sequence has tokens below 0, and will have: of a chain that begins with what it has.
  // Null, as in an empty sequence: it has none of them.
  virtual void set_media(int32_t seq, std::shared_ptr<const MediaRows> media) = 0;
  // `to`, which is empty, becomes the first n tokens of `from`, at least its shortest(), and has
  // its adapters and media.
  virtual Status copy(int32_t from, int32_t to, int64_t n) = 0;

  // Appends the items' tokens, at most max_batch_rows of them, each sequence once. After an error
  // every sequence of a snapshot's kind that was in it is empty, the others are as before.
  // kResourceExhausted: the cache is full.
  virtual Status compute(std::span<const LlamaItem> items) = 0;

  // ---- State

  // Rows [from, to) of every tensor, one tensor after the other: token_bytes() for each token.
  virtual Status read_rows(int32_t seq, int64_t from, int64_t to, std::span<std::byte> out) = 0;
  // Gives an empty sequence, whose media are set, cells for these tokens, whose rows write_rows()
  // fills. Until then, and
  // until load_snapshot() where there are snapshots, it may be trimmed to nothing alone.
  virtual Status make_rows(int32_t seq, std::span<const int32_t> tokens) = 0;
  virtual Status write_rows(int32_t seq, size_t tensor, int64_t first,
                            std::span<const std::byte> rows) = 0;
  // What has no rows, of the sequence as it is.
  virtual Result<std::vector<std::byte>> snapshot(int32_t seq) = 0;
  // Of a sequence of n tokens, whose rows have been made. kDataLoss: it does not fit; the sequence
  // is empty.
  virtual Status load_snapshot(int32_t seq, int64_t n, std::span<const std::byte> snapshot) = 0;
};

// What of libllama decides about the bits of a state, for fingerprints.
[[nodiscard]] std::string libllama_identity();

}  // namespace hcache::libllama
