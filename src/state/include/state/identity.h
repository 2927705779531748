// What makes saved state usable: the state fingerprint and the encodings of this model and device.
#pragma once

#include <ggml.h>

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "engine/engine.h"
#include "policy/packing.h"
#include "policy/truncation.h"
#include "store/store.h"

namespace hcache::state {

// Covers whatever changes K and V: the weights' digest (Model::content_digest), the RoPE
// parameters in force, the arena's type, to what they are rounded when they are saved, and by which
// products they were made (Model::product_generation(); 0: whichever).
Fingerprint state_fingerprint(const std::string& content_digest, const model::HParams& hparams,
                              ggml_type kv_type, policy::PackMode pack = policy::PackMode::kOff,
                              int products = 0);

// What is computed behind a cut (policy/truncation.h) is another state than what stood before it
// had.
[[nodiscard]] Fingerprint cut_fingerprint(const Fingerprint& before, const policy::HeldRows& held);
// Of a chain that is exact up to its first cut.
[[nodiscard]] store::ChainFingerprints chain_fingerprints(const Fingerprint& exact,
                                                          std::span<const policy::HeldRows> cuts);

// ggml's types and the store's frozen numbers. nullopt: the type can't be stored.
std::optional<store::Encoding> hidden_encoding(ggml_type type);
std::optional<ggml_type> hidden_type(store::Encoding encoding);
std::optional<store::ElementType> element_type(ggml_type type);

// The bytes of a token's row in a page, K and V together; nullopt where this model's state is never
// held so.
std::optional<size_t> row_bytes(const model::HParams& hparams, ggml_type kv_type,
                                store::Encoding encoding);

// Whether a page that is stored in n_bytes can be one that takes plain_bytes in the arena, whose
// type is kv_type. Of a packed one no more is known before it is read.
[[nodiscard]] bool page_fits(store::Encoding encoding, ggml_type kv_type, size_t n_bytes,
                             size_t plain_bytes);

// Per layer, the type that its hidden states are saved in. GGML_TYPE_COUNT: in none, the layer is
// saved as K and V (see Engine::native_hidden_type).
using StateTypes = std::vector<ggml_type>;

// "--state-type": f32, f16, bf16, q8 (the native 8-bit type where there is one, else Q8_0), or
// native. Layers whose K or V an adapter changes are saved as these. kInvalidArgument names the
// choices.
Result<StateTypes> parse_state_type(const std::string& name, engine::Engine& engine);

// "q8_1", or "q8_0:2 q8_1:1" where layers differ (the number of layers of each, in their order).
std::string describe(const StateTypes& types);

}  // namespace hcache::state
