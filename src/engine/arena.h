// Where each sequence's rows lie in the KV arena: one contiguous extent per sequence, so that
// attention runs on plain views. Extents grow in place while the cells behind them are free;
// otherwise neighbours are moved aside, in place, so that one sequence can fill the whole arena.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "base/status.h"

namespace hcache::engine {

// Pure bookkeeping: it decides, the engine copies. Threading: none of its own.
class ExtentAllocator {
 public:
  struct Extent {
    int64_t first = 0;
    int64_t length = 0;
  };
  // Rows [from, from + n) become rows [to, to + n). Moves are to be applied in the order given;
  // source and target of one move may overlap.
  struct Move {
    int64_t from = 0;
    int64_t to = 0;
    int64_t n = 0;
  };

  explicit ExtentAllocator(int64_t n_cells) : n_cells_(n_cells) {}

  // Adds an empty extent for `id`.
  void add(int32_t id);
  void remove(int32_t id);
  // Changes the extent's length; growing may move this and other extents. kResourceExhausted, with
  // nothing changed, when the free cells do not suffice.
  Result<std::vector<Move>> resize(int32_t id, int64_t length);
  // Each has what was the other's.
  void swap(int32_t a, int32_t b) { std::swap(extents_.at(a), extents_.at(b)); }
  // Frees the extent's first n cells; nothing moves.
  void drop_front(int32_t id, int64_t n);

  [[nodiscard]] Extent extent(int32_t id) const { return extents_.at(id); }
  [[nodiscard]] bool contains(int32_t id) const { return extents_.count(id) != 0; }
  [[nodiscard]] int64_t free_cells() const;
  [[nodiscard]] int64_t n_cells() const { return n_cells_; }
  // Extents lie inside the arena and do not overlap (for tests).
  [[nodiscard]] bool check_integrity() const;

 private:
  struct Gap {
    int64_t first = 0;
    int64_t length = 0;
    bool behind_extent = false;  // an extent ends where the gap begins
  };
  // The ids of non-empty extents by position.
  [[nodiscard]] std::vector<int32_t> by_position() const;
  [[nodiscard]] std::vector<Gap> gaps(int32_t ignored_id) const;
  std::vector<Move> compact(int32_t id, int64_t length);

  int64_t n_cells_;
  std::map<int32_t, Extent> extents_;
};

}  // namespace hcache::engine
