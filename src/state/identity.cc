#include "state/identity.h"

#include <fmt/format.h>

#include <array>
#include <bit>

#include "packed_kv.h"

namespace hcache::state {
namespace {

struct TypeRow {
  ggml_type type;
  store::Encoding hidden;
  store::ElementType element;
};

constexpr std::array kTypes = {
    TypeRow{GGML_TYPE_F32, store::Encoding::kHiddenF32, store::ElementType::kF32},
    TypeRow{GGML_TYPE_F16, store::Encoding::kHiddenF16, store::ElementType::kF16},
    TypeRow{GGML_TYPE_BF16, store::Encoding::kHiddenBf16, store::ElementType::kBf16},
    TypeRow{GGML_TYPE_Q8_0, store::Encoding::kHiddenQ8_0, store::ElementType::kQ8_0},
    TypeRow{GGML_TYPE_Q8_1, store::Encoding::kHiddenQ8_1, store::ElementType::kQ8_1},
    TypeRow{GGML_TYPE_Q8_K, store::Encoding::kHiddenQ8_K, store::ElementType::kQ8_K},
};

const TypeRow* find_row(ggml_type type) {
  for (const TypeRow& row : kTypes) {
    if (row.type == type) return &row;
  }
  return nullptr;
}

}  // namespace

Fingerprint state_fingerprint(const std::string& content_digest, const model::HParams& hparams,
                              ggml_type kv_type, policy::PackMode pack, int products) {
  Hasher hasher("hcache.state.1");
  hasher.add(content_digest);
  hasher.add_u64(static_cast<uint64_t>(hparams.n_rot));
  hasher.add_u64(static_cast<uint64_t>(hparams.rope_n_ctx_orig));
  for (const float value :
       {hparams.rope_freq_base, hparams.rope_freq_scale, hparams.rope_ext_factor,
        hparams.rope_attn_factor, hparams.rope_beta_fast, hparams.rope_beta_slow}) {
    hasher.add_u64(std::bit_cast<uint32_t>(value));
  }
  // The store's number, which is frozen; ggml's is not ours to rely on.
  hasher.add_u64(static_cast<uint64_t>(element_type(kv_type).value_or(store::ElementType::kNone)));
  // What follows a restore of rounded rows is computed from those.
  if (policy::loses(pack) && packable_bytes(kv_type) > 0) {
    hasher.add(policy::pack_mode_name(pack));
  }
  if (products > 0) {
    hasher.add("products");
    hasher.add_u64(static_cast<uint64_t>(products));
  }
  return hasher.finish<Fingerprint>();
}

Fingerprint cut_fingerprint(const Fingerprint& before, const policy::HeldRows& held) {
  Hasher hasher("hcache.cut.1");
  hasher.add(before);
  for (const int64_t n : {held.kept, held.resumed, held.cut_at}) {
    hasher.add_u64(static_cast<uint64_t>(n));
  }
  if (held.chosen > 0) {
    hasher.add("chosen");
    hasher.add_u64(static_cast<uint64_t>(held.chosen));
  }
  return hasher.finish<Fingerprint>();
}

store::ChainFingerprints chain_fingerprints(const Fingerprint& exact,
                                            std::span<const policy::HeldRows> cuts) {
  store::ChainFingerprints chain(exact);
  for (const policy::HeldRows& held : cuts) {
    chain.add(static_cast<uint64_t>(held.cut_at), cut_fingerprint(chain.last(), held));
  }
  return chain;
}

std::optional<store::Encoding> hidden_encoding(ggml_type type) {
  const TypeRow* row = find_row(type);
  return row != nullptr ? std::optional(row->hidden) : std::nullopt;
}

std::optional<ggml_type> hidden_type(store::Encoding encoding) {
  for (const TypeRow& row : kTypes) {
    if (row.hidden == encoding) return row.type;
  }
  return std::nullopt;
}

std::optional<store::ElementType> element_type(ggml_type type) {
  const TypeRow* row = find_row(type);
  return row != nullptr ? std::optional(row->element) : std::nullopt;
}

std::optional<size_t> row_bytes(const model::HParams& hparams, ggml_type kv_type,
                                store::Encoding encoding) {
  if (store::is_kv(encoding)) return 2 * ggml_row_size(kv_type, hparams.n_embd_kv());
  const std::optional<ggml_type> type = hidden_type(encoding);
  if (!type || hparams.n_embd % ggml_blck_size(*type) != 0) return std::nullopt;
  return ggml_row_size(*type, hparams.n_embd);
}

bool page_fits(store::Encoding encoding, ggml_type kv_type, size_t n_bytes, size_t plain_bytes) {
  if (encoding != store::Encoding::kKvPacked) return n_bytes == plain_bytes;
  return packable_bytes(kv_type) > 0 && n_bytes < plain_bytes;
}

Result<StateTypes> parse_state_type(const std::string& name, engine::Engine& engine) {
  const auto type_of = [&](ggml_type native) {
    if (name == "f32") return GGML_TYPE_F32;
    if (name == "f16") return GGML_TYPE_F16;
    if (name == "bf16") return GGML_TYPE_BF16;
    if (name == "native") return native;
    const bool native_8_bit =
        native == GGML_TYPE_Q8_0 || native == GGML_TYPE_Q8_1 || native == GGML_TYPE_Q8_K;
    return native_8_bit ? native : GGML_TYPE_Q8_0;
  };
  if (name != "f32" && name != "f16" && name != "bf16" && name != "native" && name != "q8") {
    return invalid_argument(
        fmt::format("state type '{}' is none of native, f32, f16, bf16, q8", name));
  }
  StateTypes types;
  for (int layer = 0; layer < engine.n_layer(); ++layer) {
    types.push_back(engine.model().adapts_kv(layer) ? GGML_TYPE_COUNT
                                                    : type_of(engine.native_hidden_type(layer)));
    if (types.back() != GGML_TYPE_COUNT && !engine.can_project(types.back(), layer)) {
      return unimplemented(
          fmt::format("device {} can't project hidden states saved as {} with {} weights; choose "
                      "another --state-type",
                      engine.model().device(layer).name(), ggml_type_name(types.back()),
                      engine.model().type_name()));
    }
  }
  return types;
}

std::string describe(const StateTypes& types) {
  const auto name = [](ggml_type type) {
    return type == GGML_TYPE_COUNT ? "none" : ggml_type_name(type);
  };
  std::string out;
  for (size_t i = 0; i < types.size();) {
    size_t end = i;
    while (end < types.size() && types[end] == types[i]) ++end;
    if (end - i == types.size()) return name(types[i]);
    out += fmt::format("{}{}:{}", out.empty() ? "" : " ", name(types[i]), end - i);
    i = end;
  }
  return out;
}

}  // namespace hcache::state
