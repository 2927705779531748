// Tiny models whose weights are of several types, as llama.cpp's own quantiser assigns them.
#pragma once

#include <gtest/gtest.h>
#include <llama.h>

#include <string>

#include "model_fixtures.h"

namespace hcache::model::test {

// A mixture that llama.cpp's quantiser knows by name ("Q4_K_M"), of an F16 model whose rows are
// 64 x n_head wide: widths that no block of 256 divides make it fall back to other types. `v_type`
// overrides V's (llama-quantize --tensor-type); COUNT: as the mixture says.
struct Mixture {
  const char* name = "";
  llama_ftype ftype = LLAMA_FTYPE_ALL_F32;
  ggml_type v_type = GGML_TYPE_COUNT;
};

// Writes the model and returns its path.
inline std::string make_mixture(const TempDir& dir, const Mixture& mixture, int n_head,
                                int n_head_kv) {
  SynthOptions options = tiny_options("llama", n_head_kv, GGML_TYPE_F16);
  options.shape.n_head = n_head;
  options.shape.n_embd = 64 * n_head;
  options.shape.n_ff = 128 * n_head;
  const std::string source = make_tiny(dir, options);
  std::string path = dir.file(std::string(mixture.name) + ".gguf");
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  llama_model_quantize_params params = llama_model_quantize_default_params();
  params.ftype = mixture.ftype;
  params.nthread = 1;
  const llama_model_tensor_override v[] = {{"attn_v", mixture.v_type}, {nullptr, GGML_TYPE_COUNT}};
  if (mixture.v_type != GGML_TYPE_COUNT) params.tt_overrides = v;
  EXPECT_EQ(llama_model_quantize(source.c_str(), path.c_str(), &params), 0U) << mixture.name;
  return path;
}

}  // namespace hcache::model::test
