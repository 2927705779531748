// Options that several verbs share.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "model/sampler.h"
#include "options.h"
#include "store/key.h"

namespace hcache::cli {

struct ModelOptions : Options {
  using Options::Options;

  // As given; resolve_model() finds the default.
  std::string path = text(&path, "-m,--model", "FILE", "",
                          "GGUF model; default: $HCACHE_MODEL, else the one that `make` fetched");
  std::string device = text(
      &device, "--device", "NAME", "cpu",
      "where to compute: cpu, cuda:N, vulkan:N, rpc:HOST:PORT, or several with commas, which share "
      "the "
      "layers in this order; none: the CPU; auto: every accelerator, else the CPU; `list` prints "
      "what there is");
  int gpu_layers = integer(&gpu_layers, "--gpu-layers", "N", -1, {-1, 1 << 20},
                           "the last N layers go to the devices of --device, those before to the "
                           "CPU; -1: all");
  std::string tensor_split =
      text(&tensor_split, "--tensor-split", "N,...", "",
           "proportions in which the devices share the layers, in their order, or each layer with "
           "--split-mode tensor; default: equal");
  std::vector<std::string> override_tensors =
      texts(&override_tensors, "--override-tensor", "PATTERN=DEVICE,...", "", "",
            "layers whose tensors' names match the regular expression go to the device, whole "
            "layers alone: 'blk\\.(0|1)\\.=cpu'");
  std::string split_mode = choice(
      &split_mode, "--split-mode", "layer", "layer|none|row|tensor",
      "layer: the devices share the layers; none: one has all; tensor: each layer's heads and "
      "feed-forward columns are shared by all devices, which compute at once; row: the same");
  int main_gpu = integer(&main_gpu, "--main-gpu", "N", 0, {0, 4096},
                         "with --split-mode none: which of --device, from 0 on");
  int threads =
      integer(&threads, "-t,--threads", "N", 0, {0, 4096}, "CPU threads; 0: one per core");
};
// The path given, else $HCACHE_MODEL, else the model in the cache folder that `make` fills.
// kNotFound says how to get one.
[[nodiscard]] Result<std::string> resolve_model(const std::string& given);

// Where profiles and the store lie.
struct StoreOptions : Options {
  explicit StoreOptions(Options* parent = nullptr);

  std::string state_dir =
      text(&state_dir, "--state-dir", "DIR", "",
           "where profiles and the store live; default: $XDG_STATE_HOME/hcache, else "
           "~/.local/state/hcache");  // never empty after parsing
  std::vector<std::string> stores =
      texts(&stores, "--store", "DIR", "", "",
            "store folder, once per disk; default: STATE_DIR/store");  // at least one after parsing
  std::string key_file =
      text(&key_file, "--encrypt-key-file", "FILE", "",
           "encrypt what is stored, here and in --remote, with the key in this file (`hcache store "
           "new-key` makes one); for a store that is new or was made with that key",
           {.variable = "HCACHE_ENCRYPT_KEY_FILE"});

  // Of --encrypt-key-file; none without it.
  [[nodiscard]] Result<std::optional<store::StoreKey>> key() const;
};

// And how much of it there may be, for verbs that write.
struct StateOptions : StoreOptions {
  using StoreOptions::StoreOptions;

  uint64_t quota_bytes =
      bytes(&quota_bytes, "--quota", 0,
            "most disk space of the store; the least recently used goes first; 0: no limit");
  std::optional<uint64_t> snapshot_quota_bytes = bytes(
      &snapshot_quota_bytes, "--snapshot-quota",
      "most disk space of snapshots, of models on libllama whose state is not kept token by "
      "token (recurrent, windows); those whose loss costs the least computing go first; "
      "default: half of --quota, nine tenths for a model that keeps nothing else; 0: no limit");
};

struct SamplingArgs : Options, model::SamplingOptions {
  explicit SamplingArgs(Options* parent);
  // Fills in what other files and texts hold: --grammar-file, --json-schema-file, --logit-bias.
  // kNotFound, kInvalidArgument.
  [[nodiscard]] Result<model::SamplingOptions> resolved() const;

 private:
  std::string grammar_file_;
  std::string json_schema_file_;
  std::vector<std::string> biases_;
};

}  // namespace hcache::cli
