// The low-rank adapters (LoRA) that a model was opened with, and what tells state that was computed
// with them from other state: its salt, within a process and its store, and the fingerprint of
// files that leave it.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/ids.h"
#include "base/status.h"
#include "model/adapters.h"
#include "model/model.h"

namespace hcache::state {

struct AdapterFile {
  std::string path;
  float scale = 1;  // by how much it counts where nothing else is said
};

struct Adapter {
  model::AdapterInfo info;
  std::string digest;  // of its file
  float scale = 1;     // as AdapterFile's
};

// Reads headers and digests, which are kept in `cache_dir`. Errors of read_adapter_info() and of
// file_digest().
[[nodiscard]] Result<std::vector<Adapter>> describe_adapters(Env& env,
                                                             std::span<const AdapterFile> files,
                                                             const std::string& cache_dir,
                                                             const model::Progress& progress);

// By how much each counts where nothing is said.
[[nodiscard]] std::vector<float> default_scales(std::span<const Adapter> adapters);

// What is computed with the adapters counting so much is `base`'s alone as before where none does,
// and else kept apart by an id of its own. As many scales as adapters.
[[nodiscard]] Salt adapted(const Salt& base, std::span<const Adapter> adapters,
                           std::vector<float> scales);
// The same for fingerprints; `scales` may be empty where none counts.
[[nodiscard]] Fingerprint adapted(const Fingerprint& base, std::span<const Adapter> adapters,
                                  std::span<const float> scales);

}  // namespace hcache::state
