// Low-rank adapters (LoRA): files that change a model by adding scale · B (A x) to some of its
// products W x. A model has those that it was loaded with; by how much each of them counts, every
// sequence has its own say.
#pragma once

#include <ggml.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/status.h"

namespace hcache::model {

// What an adapter's file says of it.
struct AdapterInfo {
  std::string path;
  std::string architecture;  // of the model that it is for
  double alpha = 0;          // 0: the products count as they are, else times alpha / rank
  std::string task;          // may be empty
  std::string prompt_prefix;
};

// Reads the header alone. kNotFound, kDataLoss; kInvalidArgument where the file is no adapter,
// kUnimplemented for a kind that nothing here applies.
// Threading: any thread.
Result<AdapterInfo> read_adapter_info(const std::string& path, Env& env = Env::real());

// An adapter's part in the products of one matrix, on the matrix's device.
struct LowRank {
  int adapter = 0;           // its place among the model's
  ggml_tensor* a = nullptr;  // F32 [n_in, rank], or as many for each expert
  ggml_tensor* b = nullptr;  // F32 [rank, n_out], alpha / rank included
};

// By how much each of the model's adapters counts for each row of a graph: F32 [1, n], or null for
// one that counts for no row. Empty: none does.
using AdapterScales = std::span<ggml_tensor* const>;

}  // namespace hcache::model
