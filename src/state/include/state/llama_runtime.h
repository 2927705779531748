// Which forward pass runs a model, what any of them tells of it, and the one on libllama with its
// saver.
//
// Threading: plain values; open_llama() and what it opens: the engine's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/ids.h"
#include "base/status.h"
#include "libllama/llama_engine.h"
#include "model/model.h"
#include "model/offload.h"
#include "state/adapters.h"
#include "state/llama_saver.h"

namespace hcache::state {

enum class EngineChoice : uint8_t {
  kAuto,   // ours where it runs the model, else libllama's
  kOwn,    // ours
  kLlama,  // libllama's
};
// "auto", "own", "llama".
[[nodiscard]] Result<EngineChoice> parse_engine_choice(const std::string& name);

// What there is to say of a model, whatever runs it.
struct ModelCard {
  std::string path;
  std::string architecture;
  std::string engine;        // "own", or "libllama: rows of 24 tensors"
  std::string places;        // of the weights, as Model::describe_places()
  std::string weight_types;  // "Q4_1"
  bool streamed = false;     // some are brought to the device for each step
  int32_t n_vocab = 0;
  int32_t n_layer = 0;
  int32_t n_embd = 0;
  int32_t n_ctx_train = 0;
  int64_t n_params = 0;
  int64_t n_bytes = 0;
  std::vector<Adapter> adapters;
};
[[nodiscard]] ModelCard model_card(const model::Model& model);
[[nodiscard]] ModelCard model_card(const std::string& path, const libllama::LlamaEngine& engine);

struct OpenLlama {
  std::unique_ptr<libllama::LlamaEngine> engine;
  std::unique_ptr<LlamaSaver> saver;  // null: nothing is saved
};

// The devices and the split of `devices`, which open_devices() has opened by `offload`, in
// libllama's terms. kUnimplemented: placement that only our engine knows.
[[nodiscard]] Result<libllama::LlamaOptions> llama_placement(const model::OpenDevices& devices,
                                                             const model::Offload& offload);

// Of a model whose file has this digest (model::file_digest()).
[[nodiscard]] Fingerprint llama_fingerprint(const std::string& digest,
                                            const libllama::LlamaEngine& engine);

}  // namespace hcache::state
