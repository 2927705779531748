// What happens to sequences as a whole: rows are reserved, moved, copied and given up in all stages
// at once, as the bookkeeping in Sequences decides.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "base/status.h"
#include "engine/engine.h"
#include "model/model.h"
#include "sequences.h"
#include "stage.h"

namespace hcache::engine {

// Threading: the engine's thread.
class ArenaRows {
 public:
  ArenaRows(const model::Model& model, const EngineOptions& options, Sequences& sequences,
            const Stages& stages)
      : model_(model), options_(options), sequences_(sequences), stages_(stages) {}

  // See Engine.
  Result<SeqId> fork(SeqId src, int64_t n_tokens);
  Status trim(SeqId seq, int64_t n_tokens);
  Status erase_range(SeqId seq, int64_t from, int64_t to);
  Status erase_ranges(SeqId seq, std::span<const ErasedRows> ranges);
  Status move_positions(SeqId seq, int layer, int64_t first_pos, int64_t n_rows, int64_t moved);
  Status release(SeqId seq);
  Status reserve(SeqId seq, int64_t n_tokens);

  // Room for n_tokens; the sequence's length stays.
  Status resize(SeqId seq, int64_t n_tokens);

 private:
  Status move_rows(int group, const ExtentAllocator::Move& move);
  Status erase_from(SeqId seq, int group, int64_t from, int64_t to);
  // The same where layers see a window: what is left has the cells that it would have if it had
  // never been longer.
  struct ErasedWindow {
    int64_t first_pos = 0;   // held then
    int64_t valid_from = 0;  // likewise
    int64_t missing = 0;     // cells, of those that are held now
  };
  [[nodiscard]] ErasedWindow erased_window(SeqId seq, int group, int64_t from, int64_t to) const;
  // The most cells that groups with a window miss for it. kFailedPrecondition where less than the
  // window would be left.
  [[nodiscard]] Result<int64_t> missing_cells(SeqId seq, int64_t from, int64_t to) const;
  Status erase_from_window(SeqId seq, int group, int64_t from, int64_t to);
  // Of a group without a window: what stays behind the first range moves down and is rotated.
  Status erase_from(SeqId seq, int group, std::span<const ErasedRows> ranges);
  // Rows in consecutive cells, each by so many positions.
  Status rotate_erased(int group, int64_t cell, std::span<const int32_t> deltas);
  [[nodiscard]] Status check_positions_move() const;
  // The same of the layers that are wanted.
  Status shift_k(const std::function<bool(int layer)>& wants, int64_t cell,
                 std::span<const int32_t> deltas);
  void fence_copies();

  const model::Model& model_;
  const EngineOptions& options_;
  Sequences& sequences_;
  const Stages& stages_;
};

}  // namespace hcache::engine
