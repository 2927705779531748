// Layers that hold some of a sequence's rows only, chosen head by head.
//
// A layer's kept rows move together at the end of the sequence's extent, before the first row that
// is still to come: to everything else they are the last rows of a layer whose first ones are
// missing (see Sequences). Keys are rotated to the positions that they had, so nothing but their
// number shows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "engine/engine.h"
#include "model/model.h"
#include "restore_ops.h"
#include "sequences.h"
#include "stage.h"

namespace hcache::engine {

// Threading: the engine's thread.
class KeptRows {
 public:
  KeptRows(const model::Model& model, const EngineOptions& options, Sequences& sequences,
           const Stages& stages, RestoreOps& restore)
      : model_(model),
        options_(options),
        sequences_(sequences),
        stages_(stages),
        restore_(restore) {}

  // See Engine's methods of these names; nothing may be computed or copied meanwhile.
  Status keep(SeqId seq, int layer, std::span<const int32_t> kept);
  Status read(SeqId seq, int layer, std::span<const int32_t> kept, std::byte* k,
              std::byte* v) const;
  Status load(SeqId seq, int layer, int64_t n, const std::byte* k, const std::byte* v);

 private:
  // That each layer of the engine may keep rows of its own.
  Status check_layer(SeqId seq, int layer) const;
  Status check(SeqId seq, int layer, std::span<const int32_t> kept) const;

  const model::Model& model_;
  const EngineOptions& options_;
  Sequences& sequences_;
  const Stages& stages_;
  RestoreOps& restore_;
};

}  // namespace hcache::engine
