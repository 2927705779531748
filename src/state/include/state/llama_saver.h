// Saves what a model on libllama computes: chunks of rows, and snapshots at their ends. What the
// engine's thread has copied is written by a thread of the saver's own; when too much waits, a
// sequence is saved no further, so that computing never waits for a disk.
//
// Pages: Encoding::kRows, one for each tensor of StateLayout::row_bytes, with the tensor's number
// as its layer; Encoding::kSnapshot, the parts of a snapshot, numbered alike (docs/format.md).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "libllama/llama_engine.h"
#include "state/saver.h"
#include "store/store.h"

namespace hcache::state {

// How far a sequence is saved. A sequence that is trimmed goes on with another one.
struct SavedLength {
  std::atomic<int64_t> durable = 0;
  std::atomic<bool> failed = false;  // it is saved no further
};

// One chunk with its state.
struct LlamaChunk {
  std::shared_ptr<SavedLength> length;
  Salt salt;
  ChunkId id;
  ChunkId parent;
  uint64_t first_position = 0;
  std::vector<int32_t> tokens;
  std::vector<std::byte> rows;      // tensor after tensor
  std::vector<std::byte> snapshot;  // behind its last token; empty: none
};

// Threading: any thread, but for the destructor.
class LlamaSaver {
 public:
  // `store` must outlive it. At most `backlog_bytes` wait.
  static std::unique_ptr<LlamaSaver> create(store::Store& store, const Fingerprint& fingerprint,
                                            const libllama::StateLayout& layout,
                                            size_t backlog_bytes);
  LlamaSaver() = default;
  LlamaSaver(const LlamaSaver&) = delete;
  LlamaSaver& operator=(const LlamaSaver&) = delete;
  virtual ~LlamaSaver() = default;  // writes what waits

  // Takes a chunk, whose parent was added before or is in the store. False: too much waits, or what
  // its chain needs could not be written; the chain's length has failed.
  virtual bool add(LlamaChunk chunk) = 0;
  // Waits until everything that was added is written. The first error since the last flush.
  virtual Status flush() = 0;
  [[nodiscard]] virtual SaverStats stats() const = 0;
};

// Whether a chunk has rows of all tensors.
[[nodiscard]] bool has_rows(const store::ChunkInfo& chunk, const libllama::StateLayout& layout);

}  // namespace hcache::state
