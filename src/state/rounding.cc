#include "state/rounding.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "packed_kv.h"
#include "predictions.h"

namespace hcache::state {
namespace {

constexpr int64_t kPredicted = 64;  // tokens behind the rounded ones
constexpr int64_t kLeastContext = 64;

// K and V of the first n rows of every layer, as a restore would bring them back.
Status round_rows(engine::Engine& engine, engine::SeqId seq, int64_t n, policy::PackMode mode) {
  KvPacker packer;
  for (int layer = 0; layer < engine.n_layer(); ++layer) {
    const int64_t first = engine.first_row_needed(layer, n);
    const auto rows = static_cast<int>(n - first);
    const size_t half = engine.kv_row_bytes() * static_cast<size_t>(rows);
    std::vector<std::byte> page(2 * half);
    HCACHE_RETURN_IF_ERROR(
        engine.read_kv(seq, layer, first, rows, page.data(), page.data() + half));
    const std::vector<std::byte> packed =
        packer.pack(page, engine.options().kv_type, mode, static_cast<size_t>(rows));
    if (packed.empty()) continue;  // saved as it is
    HCACHE_RETURN_IF_ERROR(packer.unpack(packed, page));
    HCACHE_ASSIGN_OR_RETURN(
        const engine::Engine::Ticket ticket,
        engine.load_kv(seq, layer, first, rows, page.data(), page.data() + half));
    HCACHE_RETURN_IF_ERROR(engine.wait(ticket));
  }
  return {};
}

Result<double> kl_of(engine::Engine& engine, engine::SeqId exact, int64_t n_context,
                     std::span<const int32_t> behind, const Predictions& expected,
                     policy::PackMode mode) {
  HCACHE_ASSIGN_OR_RETURN(const engine::SeqId seq, engine.fork_sequence(exact, n_context));
  const auto measure = [&]() -> Result<double> {
    HCACHE_RETURN_IF_ERROR(round_rows(engine, seq, n_context, mode));
    HCACHE_ASSIGN_OR_RETURN(const Predictions predicted, predict(engine, seq, behind));
    return mean_kl(expected, predicted);
  };
  const Result<double> kl = measure();
  HCACHE_RETURN_IF_ERROR(engine.release_sequence(seq));
  return kl;
}

}  // namespace

Result<policy::RoundingKl> measure_rounding(engine::Engine& engine,
                                            std::span<const int32_t> tokens) {
  if (packable_bytes(engine.options().kv_type) == 0) {
    return invalid_argument(fmt::format("K and V in {} are saved as they are, never rounded",
                                        ggml_type_name(engine.options().kv_type)));
  }
  const auto n =
      std::min<int64_t>(static_cast<int64_t>(tokens.size()), engine.arena_free_cells() / 2);
  if (n < kLeastContext + kPredicted) {
    return resource_exhausted(
        fmt::format("measuring what rounding costs takes room for {} tokens of the KV cache, {} "
                    "are free",
                    2 * (kLeastContext + kPredicted), engine.arena_free_cells()));
  }
  const int64_t n_context = n - kPredicted;
  const auto context = tokens.first(static_cast<size_t>(n_context));
  const auto behind = tokens.subspan(static_cast<size_t>(n_context), kPredicted);
  HCACHE_ASSIGN_OR_RETURN(const engine::SeqId exact, engine.create_sequence());
  const auto measure = [&]() -> Result<policy::RoundingKl> {
    HCACHE_RETURN_IF_ERROR(engine.prefill(exact, context));
    HCACHE_ASSIGN_OR_RETURN(const Predictions expected, predict(engine, exact, behind));
    policy::RoundingKl kl;
    HCACHE_ASSIGN_OR_RETURN(
        kl.q8_0, kl_of(engine, exact, n_context, behind, expected, policy::PackMode::kQ8_0));
    HCACHE_ASSIGN_OR_RETURN(
        kl.q4_0, kl_of(engine, exact, n_context, behind, expected, policy::PackMode::kQ4_0));
    return kl;
  };
  const Result<policy::RoundingKl> kl = measure();
  HCACHE_RETURN_IF_ERROR(engine.release_sequence(exact));
  return kl;
}

Result<policy::RoundingKl> rounding_kl(
    Env& env, engine::Engine& engine, const std::string& path,
    const std::function<Result<std::vector<int32_t>>()>& sample) {
  if (const auto text = read_whole_file(env, path); text.ok()) {
    const auto json = nlohmann::json::parse(*text, nullptr, false);
    const auto figure = [&](const char* name) {
      const bool there = json.is_object() && json.contains(name) && json[name].is_number();
      return there ? json[name].get<double>() : -1.0;
    };
    const policy::RoundingKl kl{.q8_0 = figure("q8_0"), .q4_0 = figure("q4_0")};
    if (kl.q8_0 >= 0 && kl.q4_0 >= 0) return kl;
  }
  HCACHE_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens, sample());
  HCACHE_ASSIGN_OR_RETURN(const policy::RoundingKl kl, measure_rounding(engine, tokens));
  const nlohmann::json json = {{"q8_0", kl.q8_0}, {"q4_0", kl.q4_0}};
  HCACHE_RETURN_IF_ERROR(write_whole_file(env, path, json.dump()));
  return kl;
}

}  // namespace hcache::state
