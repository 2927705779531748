// Which weights a model has, by the tensors of its file: each is checked, and noted with the part
// of it that is wanted and the device that it goes to.
#pragma once

#include <ggml.h>

#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "gguf_file.h"
#include "model/device.h"
#include "model/model.h"
#include "model/shares.h"

namespace hcache::model {

// Where a weight wants to live.
enum class Use {
  kVector,       // F32, added or multiplied element by element
  kMatrix,       // left-hand side of a product: may be repacked
  kPlainMatrix,  // k and v: also multiply saved hidden states, so never repacked
};

// One weight on its way from the file to the device.
struct Slot {
  ggml_tensor** target = nullptr;
  const GgufTensor* source = nullptr;
  int64_t first_row = 0;  // a part of a matrix in rows, of a vector in elements
  int64_t n_rows = 0;
  int64_t first_column = 0;  // of each row; 0 and all of them unless devices share the layer
  int64_t n_columns = 0;
  int64_t n_matrices = 1;  // that the rows belong to, as many to each: one for each expert
  Use use = Use::kVector;
  Device* device = nullptr;
  int layer = -1;                // -1: none's
  bool is_kv = false;            // see LayerPart::kKv
  bool is_feed_forward = false;  // see LayerPart::kFeedForward

  // Bytes of one row, and of all.
  [[nodiscard]] size_t row_bytes() const;
  [[nodiscard]] size_t n_bytes() const;
  // Whether the bytes lie one behind the other in the file.
  [[nodiscard]] bool is_contiguous() const;
  // Those bytes.
  [[nodiscard]] std::span<const uint8_t> bytes() const;
  // Copies rows [row, row + n) of the slot, one behind the other.
  void gather(int64_t row, int64_t n, uint8_t* out) const;
};

// Finds each tensor the architecture has, checks it, and notes where it goes. A tensor of the file
// that nobody asked for is an error: it would change the result if it were ignored.
class TensorReader {
 public:
  // `h`: of the whole model; n_vocab is filled in. `devices`: each layer's. What is passed must
  // outlive the reader.
  TensorReader(const GgufFile& file, const DecoderSpec& spec, HParams& h, const Share& share,
               const std::vector<Device*>& devices)
      : file_(file),
        spec_(spec),
        h_(h),
        share_(share),
        devices_(devices),
        device_(devices.back()) {}

  Status read(Weights& w, const GgufTensor*& token_embd, const GgufTensor*& position_embd);
  [[nodiscard]] const std::vector<Slot>& slots() const { return slots_; }

 private:
  struct Shape {
    int64_t ne0;
    int64_t ne1 = 1;
    int64_t ne2 = 1;
  };
  struct Range {
    int64_t first = 0;
    int64_t n = 0;
  };

  Result<const GgufTensor*> claim(const std::string& name, Shape shape, bool required);
  [[nodiscard]] Status bad_type(const GgufTensor& t, std::string_view why) const;
  [[nodiscard]] Status check_matrix(const GgufTensor& t) const;
  Status vector(ggml_tensor*& target, const std::string& name, int64_t n, Range part,
                bool required);
  Status norm(NormWeights& target, const std::string& name, int64_t n, bool required);
  Status rows_of(Linear& target, const std::string& name, Shape shape, Range rows, Use use);
  Status columns_of(Linear& target, const std::string& name, Shape shape, Range columns);
  Status fused_qkv(LayerWeights& l, const std::string& name);
  Status fused_gate_up(LayerWeights& l, const std::string& name);
  Status dense(LayerWeights& l, const std::string& prefix);
  Status experts(ExpertWeights& e, const std::string& prefix);
  // A matrix for each expert.
  Status table(ggml_tensor*& target, const std::string& name, Shape shape, Range part);
  Status expert_matrices(Linear& target, const std::string& name, Shape shape);
  Status head_norm(ggml_tensor*& target, const std::string& name, int64_t n_head, Range part);
  Status layer(LayerWeights& l, int index);
  Status output(Weights& w, const GgufTensor& token_embd);
  Status rope_factors(Weights& w);
  Status tables(const GgufTensor*& token_embd, const GgufTensor*& position_embd);
  void add_slot(ggml_tensor*& target, const GgufTensor* source, Range rows, Use use);

  // Of the share: query heads and KV heads in rows of W_q and of W_k, columns of the feed-forward.
  [[nodiscard]] Range q_part() const;
  [[nodiscard]] Range kv_part() const;
  [[nodiscard]] Range ff_part() const { return {share_.first_ff, share_.n_ff}; }
  [[nodiscard]] bool is_first() const { return share_.index == 0; }

  const GgufFile& file_;
  const DecoderSpec& spec_;
  HParams& h_;
  const Share share_;
  const std::vector<Device*>& devices_;
  Device* device_;  // of what is being read
  std::set<std::string, std::less<>> claimed_;
  std::vector<Slot> slots_;
};

}  // namespace hcache::model
