#include "state/adapters.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "model/file_digest.h"

namespace hcache::state {
namespace {

bool none_counts(std::span<const float> scales) {
  return std::all_of(scales.begin(), scales.end(), [](float scale) { return scale == 0; });
}

template <typename Id>
Id with_adapters(const Id& base, std::span<const Adapter> adapters, std::span<const float> scales) {
  Hasher hasher("hcache.adapters.1");
  hasher.add(base);
  for (size_t i = 0; i < scales.size(); ++i) {
    if (scales[i] == 0) continue;
    hasher.add(adapters[i].digest);
    hasher.add_u64(std::bit_cast<uint32_t>(scales[i]));
  }
  return hasher.finish<Id>();
}

}  // namespace

Result<std::vector<Adapter>> describe_adapters(Env& env, std::span<const AdapterFile> files,
                                               const std::string& cache_dir,
                                               const model::Progress& progress) {
  std::vector<Adapter> adapters;
  for (const AdapterFile& file : files) {
    Adapter& adapter = adapters.emplace_back();
    adapter.scale = file.scale;
    HCACHE_ASSIGN_OR_RETURN(adapter.info, model::read_adapter_info(file.path, env));
    HCACHE_ASSIGN_OR_RETURN(adapter.digest,
                            model::file_digest(env, file.path, cache_dir, progress));
  }
  return adapters;
}

std::vector<float> default_scales(std::span<const Adapter> adapters) {
  std::vector<float> scales;
  for (const Adapter& adapter : adapters) scales.push_back(adapter.scale);
  return scales;
}

Salt adapted(const Salt& base, std::span<const Adapter> adapters, std::vector<float> scales) {
  if (none_counts(scales)) return base;
  const SaltId id = with_adapters(base.id, adapters, scales);
  return {.id = id, .owner = base.owner, .adapters = std::move(scales)};
}

Fingerprint adapted(const Fingerprint& base, std::span<const Adapter> adapters,
                    std::span<const float> scales) {
  return none_counts(scales) ? base : with_adapters(base, adapters, scales);
}

}  // namespace hcache::state
