// Two-stage saving (HCache §4.2.2): the engine snapshots a step's rows into a host ring
// (stage one, in the step); a background thread cuts them into pages, fills chunks and writes them
// (stage two). Decoding never waits for storage: when the ring is full, rows are skipped and
// counted, and their sequence is saved no further.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/env.h"
#include "base/ids.h"
#include "base/status.h"
#include "engine/engine.h"
#include "policy/packing.h"
#include "state/chosen_rows.h"
#include "store/store.h"

namespace hcache::state {

struct SaverOptions {
  size_t ring_bytes = 256U << 20;    // stage one's memory
  size_t batch_bytes = 64U << 20;    // stage two writes at most so much at once
  int64_t flush_interval_ms = 1000;  // full chunks are written at the latest after this
  bool direct = false;               // write in the step's path (the paper's Fig. 14)
  // Pages of K and V, where that makes them shorter: kOff, or as it says.
  policy::PackMode pack = policy::PackMode::kOff;
};

struct SaverStats {
  uint64_t rows_captured = 0;
  uint64_t rows_skipped = 0;  // no room in the ring, or the store refused
  uint64_t chunks_written = 0;
  uint64_t bytes_written = 0;  // pages
  uint64_t ring_peak_bytes = 0;
  // Captured and not yet in the store: what the ring holds, and chunks that wait for their batch.
  // Rows of a chunk that is not full yet wait for the chunk, not for the disk: they don't count.
  uint64_t backlog_bytes = 0;
  double write_s = 0;  // stage two's time in the store
  Status last_error;   // of the store; said once, serving goes on
};

// A cut of a sequence (policy/truncation.h), as what follows it is saved.
struct SavedCut {
  int64_t at = 0;       // tokens
  int64_t dropped = 0;  // of them, that the sequence has no rows of; its positions are less by that
  std::vector<ChosenBlock> chosen = {};  // saved with the first chunk behind the cut
};

// Threading: begin, fork, set_tokens, keep_page, keep_snapshot, end, flush and the CaptureSink
// calls belong to the engine's thread; stats() may be called from any.
class Saver : public engine::CaptureSink {
 public:
  // Of rows that this model's engine computes, with K and V of this type. `store` and `env` must
  // outlive the saver.
  static Result<std::unique_ptr<Saver>> create(Env& env, store::Store& store,
                                               const model::Model& model, ggml_type kv_type,
                                               const SaverOptions& options);
  ~Saver() override = default;

  // Starts saving a sequence whose first tokens.size() rows exist already. Rows up to the last
  // multiple of 64 are in the store (or are not to be saved: then it is saved no further). Rows of
  // a partial last chunk are read back from `tail`, whose first rows they are; its pages must hold
  // every encoding the tap captures. Without a usable tail the caller restores to the multiple of
  // 64 only and computes the rest again.
  // `cut`: the last one that was made of it.
  virtual void begin(engine::SeqId seq, const store::ChainFingerprints& fingerprints,
                     const Salt& salt, std::span<const int32_t> tokens, store::ChunkRef tail,
                     SavedCut cut = {}) = 0;
  // The sequence was cut at its end, which is that of a whole chunk: what follows has this
  // fingerprint.
  virtual void cut(engine::SeqId seq, const Fingerprint& fingerprint, SavedCut cut) = 0;
  // `seq` begins with the first n_rows rows of `source`, which is being saved.
  virtual void fork(engine::SeqId source, engine::SeqId seq, int64_t n_rows) = 0;
  // The tokens of the rows about to be computed from first_pos on. Given for a position that has
  // tokens already (a step that failed, a sequence that was trimmed), they replace what was there.
  virtual void set_tokens(engine::SeqId seq, int64_t first_pos,
                          std::span<const int32_t> tokens) = 0;
  // Writes everything captured so far, tail chunks included, and waits until it is durable.
  virtual Status flush() = 0;
  // Asks for the same of one sequence and returns at once; durable_tokens() tells when it is done.
  virtual void request_flush(engine::SeqId seq) = 0;
  // How many leading tokens of a sequence are durable. kNotSaved: it was never begun, or is saved
  // no further. Any thread.
  static constexpr int64_t kNotSaved = -1;
  [[nodiscard]] virtual int64_t durable_tokens(engine::SeqId seq) const = 0;
  // K and V of one layer of a chunk that the store has without this page, as the arena holds them
  // (K rows, then V rows): they become durable like captured rows.
  virtual void keep_page(const store::ChunkInfo& chunk, const Salt& salt, uint16_t layer,
                         std::span<const std::byte> kv) = 0;
  // What stands for the sequence's first n_tokens, whole chunks whose rows were captured before, is
  // saved as a snapshot of theirs (snapshot_pages.h), and that of its first `replaced` tokens goes;
  // 0: there is none. False, and nothing happens, where too much waits already.
  virtual bool keep_snapshot(engine::SeqId seq, int64_t n_tokens, std::vector<std::byte> snapshot,
                             int64_t replaced) = 0;
  // No more rows will come; what was captured is written. Does not wait.
  virtual void end(engine::SeqId seq) = 0;
  [[nodiscard]] virtual SaverStats stats() const = 0;
};

}  // namespace hcache::state
