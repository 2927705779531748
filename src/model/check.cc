#include "model/check.h"

#include <vector>

#include "gguf_file.h"
#include "hparams.h"
#include "weight_slots.h"

namespace hcache::model {

Status check_model(const std::string& path, Device& device, Env& env) {
  HCACHE_ASSIGN_OR_RETURN(const auto file, GgufFile::open(path, env));
  HCACHE_ASSIGN_OR_RETURN(const DecoderSpec* spec, read_architecture(*file));
  HCACHE_ASSIGN_OR_RETURN(HParams hparams, read_hparams(*file, *spec));
  const Share whole = {.n_head_kv = hparams.n_head_kv, .n_ff = hparams.n_ff};
  const std::vector<Device*> devices(static_cast<size_t>(hparams.n_layer), &device);
  TensorReader reader(*file, *spec, hparams, whole, devices);
  Weights weights;
  const GgufTensor* token_embd = nullptr;
  const GgufTensor* position_embd = nullptr;
  return reader.read(weights, token_embd, position_embd);
}

}  // namespace hcache::model
