#include <fmt/format.h>

#include <cmath>
#include <memory>

#include "gguf_file.h"
#include "gguf_writer.h"
#include "model/tools.h"
#include "random_rows.h"

namespace hcache::model {
namespace {

// Whether an adapter may change the products with this tensor.
bool is_adaptable(const GgufTensor& t) {
  const bool is_matrix = t.n_dims >= 2 && t.name.ends_with(".weight");
  const bool is_table = t.name.find("norm") != std::string::npos ||
                        t.name.starts_with("token_embd.") || t.name.starts_with("position_embd.");
  return is_matrix && !is_table;
}

}  // namespace

Status synthesise_adapter(const AdapterOptions& options, const std::string& out) {
  HCACHE_ASSIGN_OR_RETURN(const auto file, GgufFile::open(options.model));
  HCACHE_ASSIGN_OR_RETURN(const auto arch, file->string("general.architecture"));
  if (options.rank < 1) return invalid_argument("an adapter's rank is at least 1");
  GgufWriter writer;
  writer.set_string("general.type", "adapter");
  writer.set_string("general.architecture", arch.value_or(""));
  writer.set_string("general.name", "random adapter");
  writer.set_string("adapter.type", "lora");
  writer.set_f32("adapter.lora.alpha", options.alpha);
  std::vector<Init> inits;
  for (const GgufTensor& t : file->tensors()) {
    if (!is_adaptable(t) ||
        (!options.only.empty() && t.name.find(options.only) == std::string::npos)) {
      continue;
    }
    const int64_t n_matrices = t.ne[2] > 1 ? t.ne[2] : 0;
    writer.add_tensor(t.name + ".lora_a", GGML_TYPE_F32, t.ne[0], options.rank, n_matrices);
    inits.push_back(standard_deviation(1 / std::sqrt(static_cast<float>(t.ne[0]))));
    writer.add_tensor(t.name + ".lora_b", GGML_TYPE_F32, options.rank, t.ne[1], n_matrices);
    inits.push_back(standard_deviation(options.size / std::sqrt(static_cast<float>(options.rank))));
  }
  if (inits.empty()) {
    return not_found(fmt::format("{}: no matrix {}", options.model,
                                 options.only.empty() ? "that an adapter could change"
                                                      : "whose name holds '" + options.only + "'"));
  }
  return write_random(writer, inits, options.seed, out);
}

}  // namespace hcache::model
