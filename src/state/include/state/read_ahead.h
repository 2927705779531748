// Brings what restores will read into the store's host memory (AttentionStore §3.3.1),
// on a thread of its own: the disks do not rest while the engine computes.
//
// Threading: any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/status.h"
#include "engine/engine.h"
#include "policy/restore_plan.h"
#include "store/store.h"

namespace hcache::state {

struct ReadAheadOptions {
  // Small, so that a restore that can't wait does not queue behind much of what can.
  uint64_t ring_bytes = 8U << 20;
};

class ReadAhead {
 public:
  // The store must outlive it.
  static std::unique_ptr<ReadAhead> begin(store::Store& store, const ReadAheadOptions& options);
  // Stops reading.
  virtual ~ReadAhead() = default;

  // Reads what restoring by the plan would, after everything added before; the match's chunks stay
  // pinned until then. The id is unique. A page that can't be read is left to the restore.
  // remote_timeout_s: see store::ReaderOptions. The engine's thread; never waits.
  virtual Status add(uint64_t id, engine::Engine& engine, const store::Match& match,
                     const policy::Plan& plan, double remote_timeout_s) = 0;
  // What is not read yet of this is not read any more. An id that is not there is no error.
  virtual void drop(uint64_t id) = 0;
  // How many of those added are not read to their end.
  [[nodiscard]] virtual size_t pending() const = 0;
  // For what was read to its end or dropped; not from host memory.
  [[nodiscard]] virtual uint64_t bytes_read() const = 0;
};

}  // namespace hcache::state
