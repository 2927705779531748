// Reads adapters' files and puts their matrices beside those of the model.
#pragma once

#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "gguf_file.h"
#include "model/adapters.h"
#include "model/model.h"
#include "streamed_layers.h"
#include "weight_slots.h"

namespace hcache::model {

// Safe to read from any thread once all have been added.
class Adapters {
 public:
  // Adds one, whose matrices go to the devices of `slots`; those have their tensors by now.
  // Beside read_adapter_info()'s errors: kInvalidArgument for one of another model, kUnimplemented
  // where it changes what can't be changed, kDataLoss where shapes don't fit, kResourceExhausted.
  Status add(const std::string& path, const HParams& hparams, std::span<const Slot> slots,
             Env& env);

  [[nodiscard]] const std::vector<AdapterInfo>& infos() const { return infos_; }
  [[nodiscard]] std::span<const LowRank> of(const ggml_tensor* weight) const;

 private:
  // What an adapter adds to the rows of a matrix that a slot has.
  struct Part {
    const Slot* slot = nullptr;
    const GgufTensor* a = nullptr;
    const GgufTensor* b = nullptr;
    float factor = 1;  // of b
  };
  Status place(int adapter, Device& device, std::span<const Part> parts);

  std::vector<AdapterInfo> infos_;
  std::unordered_map<const ggml_tensor*, std::vector<LowRank>> by_weight_;
  std::vector<ContextPtr> contexts_;
  std::vector<BufferPtr> buffers_;
};

}  // namespace hcache::model
