// libllama's own forward pass as the oracle, and ways to compare logits.
#pragma once

#include <gtest/gtest.h>
#include <llama.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model/logits.h"

namespace hcache::test {

using Row = std::vector<float>;
using Tokens = std::vector<int32_t>;

struct LlamaFree {
  void operator()(llama_model* m) const { llama_model_free(m); }
  void operator()(llama_context* c) const { llama_free(c); }
};

// One sequence in libllama, on the CPU with one thread.
class Oracle {
 public:
  using Change = std::function<void(llama_context_params*)>;
  Oracle(const std::string& path, ggml_type kv_type, bool flash_attention,
         const Change& change = {}) {
    llama_backend_init();
    llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
    llama_model_params mp = llama_model_default_params();
    mp.n_gpu_layers = 0;
    ggml_backend_dev_t none =
        nullptr;  // the list's end: nothing is offloaded to a GPU of this build
    mp.devices = &none;
    model_.reset(llama_model_load_from_file(path.c_str(), mp));
    EXPECT_NE(model_, nullptr) << path;
    if (model_ == nullptr) return;
    llama_context_params cp = llama_context_default_params();
    cp.n_ctx = 1024;
    cp.n_batch = cp.n_ubatch = 512;
    cp.n_threads = cp.n_threads_batch = 1;
    cp.type_k = cp.type_v = kv_type;
    cp.flash_attn_type =
        flash_attention ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    if (change) change(&cp);
    context_.reset(llama_init_from_model(model_.get(), cp));
    EXPECT_NE(context_, nullptr) << path;
  }

  // An adapter that counts so much from now on; before the first tokens.
  void add_adapter(const std::string& path, float scale) {
    llama_adapter_lora* adapter = llama_adapter_lora_init(model_.get(), path.c_str());
    ASSERT_NE(adapter, nullptr) << path;
    ASSERT_EQ(llama_set_adapters_lora(context_.get(), &adapter, 1, &scale), 0);
  }

  [[nodiscard]] Tokens tokenize(const std::string& text) const {
    Tokens out(text.size() + 1);
    const llama_vocab* vocab = llama_model_get_vocab(model_.get());
    const int n = llama_tokenize(vocab, text.data(), static_cast<int32_t>(text.size()), out.data(),
                                 static_cast<int32_t>(out.size()), false, false);
    EXPECT_GT(n, 0);
    out.resize(static_cast<size_t>(std::max(0, n)));
    return out;
  }

  // append() gives the rows behind the final norm, with pooling_type none.
  void give_hidden() {
    hidden_ = true;
    llama_set_embeddings(context_.get(), true);
  }

  // Logits of each token, appended in one batch.
  std::vector<Row> append(std::span<const int32_t> tokens) {
    std::vector<Row> out;
    if (context_ == nullptr) return out;
    llama_batch batch = llama_batch_init(static_cast<int32_t>(tokens.size()), 0, 1);
    batch.n_tokens = static_cast<int32_t>(tokens.size());
    for (int32_t i = 0; i < batch.n_tokens; i++) {
      batch.token[i] = tokens[static_cast<size_t>(i)];
      batch.pos[i] = length_ + i;
      batch.n_seq_id[i] = 1;
      batch.seq_id[i][0] = 0;
      batch.logits[i] = 1;
    }
    EXPECT_EQ(llama_decode(context_.get(), batch), 0);
    const int width = hidden_ ? llama_model_n_embd_out(model_.get())
                              : llama_vocab_n_tokens(llama_model_get_vocab(model_.get()));
    for (int32_t i = 0; i < batch.n_tokens; i++) {
      const float* row = hidden_ ? llama_get_embeddings_ith(context_.get(), i)
                                 : llama_get_logits_ith(context_.get(), i);
      EXPECT_NE(row, nullptr);
      if (row != nullptr) out.emplace_back(row, row + width);
    }
    length_ += batch.n_tokens;
    llama_batch_free(batch);
    return out;
  }

 private:
  std::unique_ptr<llama_model, LlamaFree> model_;
  std::unique_ptr<llama_context, LlamaFree> context_;
  int32_t length_ = 0;
  bool hidden_ = false;
};

struct Difference {
  double max_logit = 0;  // largest absolute difference of a logit
  double mean_kl = 0;
  size_t n_rows = 0;
  bool finite = true;
};

inline Difference compare(const std::vector<Row>& expected, const std::vector<Row>& actual) {
  EXPECT_EQ(expected.size(), actual.size());
  Difference d;
  d.n_rows = std::min(expected.size(), actual.size());
  for (size_t i = 0; i < d.n_rows; i++) {
    EXPECT_EQ(expected[i].size(), actual[i].size());
    for (size_t j = 0; j < std::min(expected[i].size(), actual[i].size()); j++) {
      d.finite = d.finite && std::isfinite(actual[i][j]);
      d.max_logit = std::max(d.max_logit, std::abs(double{expected[i][j]} - actual[i][j]));
    }
    d.mean_kl += model::kl_divergence(expected[i], actual[i]) / static_cast<double>(d.n_rows);
  }
  return d;
}

}  // namespace hcache::test
