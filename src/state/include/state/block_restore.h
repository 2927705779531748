// Saved state brought back into the batch engine: a chunk of the store is a block of its cache, so
// rows go from pages to blocks as they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "base/env.h"
#include "base/status.h"
#include "engine/hybrid_engine.h"
#include "policy/restore_record.h"
#include "state/restorer.h"
#include "store/store.h"

namespace hcache::state {

// How many leading rows of a match blocks can take: whole chunks, each of which has every layer as
// K and V in the engine's type, or every layer as the activation rows that the engine keeps.
[[nodiscard]] int64_t restorable_rows(const engine::HybridEngine& engine,
                                      const store::Match& match);

struct BlockRestoreRun {
  engine::RequestId id = -1;            // an empty sequence
  std::span<const int32_t> tokens;      // of the chain
  const store::Match* match = nullptr;  // of them, pinned
  int64_t upto = 0;                     // rows at most
  // A page could not be used: drop it from the store.
  std::function<void(const PageFailure&)> on_damage;
};

// Rows up to the first damaged chunk are restored; the rest is left to the prefill.
// Threading: the engine's thread. What is passed, and what the run points to, must outlive it.
class BlockRestore {
 public:
  // Begins to read. Nothing of the run can be restored: it is done at once.
  static Result<std::unique_ptr<BlockRestore>> begin(Env& env, engine::HybridEngine& engine,
                                                     store::Store& store,
                                                     const BlockRestoreRun& run);
  // An unfinished one is cancelled; rows of its blocks that are not the sequence's yet are dropped.
  virtual ~BlockRestore() = default;

  // Takes what has been read; with `wait`, waits for the next page of what has not. True when it is
  // done. After an error the sequence holds what it held before the call.
  virtual Result<bool> advance(bool wait) = 0;
  [[nodiscard]] virtual double fraction() const = 0;
  [[nodiscard]] virtual int64_t rows() const = 0;  // that the sequence has from it
  [[nodiscard]] virtual const policy::RestoreRecord& record() const = 0;  // complete when done
};

}  // namespace hcache::state
