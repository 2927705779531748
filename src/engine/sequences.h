// Which sequences there are, how long they are, and which cells of the arena hold their rows.
//
// Layers are of one or more row groups: the layers of a group hold the same rows of a sequence, in
// the same cells. A group may hold fewer rows than the sequence has tokens: then the first ones are
// missing. Where layers see a window of the last rows, they hold little more than that (windows.h);
// what was restored may begin behind the first cell, see shortest(). Everything that reads or
// writes rows asks held() where they lie.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "arena.h"
#include "base/status.h"
#include "engine/engine.h"

namespace hcache::engine {

// A group holds the rows of positions [first_pos, first_pos + n_rows) in cells from first_cell on.
struct HeldRows {
  int64_t first_pos = 0;
  int64_t n_rows = 0;  // reserved ones of a step under way included
  int64_t first_cell = 0;

  [[nodiscard]] int64_t end_pos() const { return first_pos + n_rows; }
  [[nodiscard]] int64_t cell(int64_t pos) const { return first_cell + (pos - first_pos); }
};

// Pure bookkeeping: it decides, the engine moves rows. Threading: none of its own.
class Sequences {
 public:
  // Rows of a group's layers that have to move, in the order given.
  struct GroupMoves {
    int group = 0;
    std::vector<ExtentAllocator::Move> moves;
  };

  struct GroupOptions {
    int64_t n_cells = 0;
    int64_t window = 0;      // that its layers see; 0: all rows
    int64_t most_cells = 0;  // that one sequence needs at a time, of a group with a window
  };
  // groups[layer]: 0, 1, ... without gaps. `n_tokens`: cells that sequences share.
  Sequences(std::vector<int> groups, int64_t n_tokens, const std::vector<GroupOptions>& options);
  // None has a window.
  Sequences(std::vector<int> groups, int64_t n_cells);

  SeqId add();
  void remove(SeqId seq);
  // Each has the other's rows.
  void swap(SeqId a, SeqId b);
  [[nodiscard]] bool contains(SeqId seq) const { return lengths_.contains(seq); }
  // kInvalidArgument when there is no such sequence.
  [[nodiscard]] Status check(SeqId seq) const;
  // In tokens; -1 where there is no such sequence.
  [[nodiscard]] int64_t length(SeqId seq) const;
  void set_length(SeqId seq, int64_t n_tokens) { lengths_.at(seq) = n_tokens; }

  // By how much each adapter of the model counts; empty: none does.
  void set_adapters(SeqId seq, std::vector<float> scales) { adapters_[seq] = std::move(scales); }
  [[nodiscard]] std::span<const float> adapters(SeqId seq) const;

  // The first so many tokens are compacted: some layer holds fewer rows of theirs, so that they
  // can't be taken apart any more. 0 unless set.
  void set_compacted(SeqId seq, int64_t n_tokens);
  [[nodiscard]] int64_t compacted(SeqId seq) const;
  // kFailedPrecondition where what is done from position `pos` on would touch them.
  [[nodiscard]] Status check_compacted(SeqId seq, int64_t pos) const;

  // To how few tokens, but for none, a sequence can be cut back: what is compacted stays, and
  // behind that groups with a window hold what is seen. 0 unless some rows are missing.
  [[nodiscard]] int64_t shortest(SeqId seq) const;
  // kFailedPrecondition where `n_tokens` is fewer, and more than none.
  [[nodiscard]] Status check_shortest(SeqId seq, int64_t n_tokens) const;
  // kFailedPrecondition where a row at `pos` would see rows that are missing.
  [[nodiscard]] Status check_window(SeqId seq, int64_t pos) const;
  // An empty sequence that is to be filled up to n_tokens does without rows that nothing will see.
  void skip_unseen(SeqId seq, int64_t n_tokens);
  // Rows that nothing will see any more are gone.
  void drop_unseen(SeqId seq);
  // An empty sequence holds rows from where another one's begin.
  void begin_like(SeqId seq, SeqId other);
  // Of a group with a window, whose rows the caller has moved: the cells from the first on hold
  // positions from first_pos on, of which those from valid_from on are there.
  void set_begin(SeqId seq, int group, int64_t first_pos, int64_t valid_from);
  // The first row that is there, of those that are held.
  [[nodiscard]] int64_t valid_from(SeqId seq, int group) const;

  // Room for the rows up to n_tokens in every group; the length stays. Growing may move rows, of
  // other sequences too. kResourceExhausted, with nothing changed, when the arena is full.
  Result<std::vector<GroupMoves>> resize(SeqId seq, int64_t n_tokens);
  // The group's layers hold rows from `pos` on only; the cells before are free.
  void drop_before(SeqId seq, int group, int64_t pos);
  // Positions [from, to) are gone and later ones count from `from`: where a group's held rows begin
  // then. The cells are the caller's to move and resize().
  void erase_positions(SeqId seq, int group, int64_t from, int64_t to);

  [[nodiscard]] int n_groups() const { return static_cast<int>(groups_.size()); }
  [[nodiscard]] int group_of(int layer) const { return group_of_layer_[layer]; }
  [[nodiscard]] HeldRows held(SeqId seq, int group) const;

  [[nodiscard]] int64_t window(int group) const { return groups_[group].options.window; }
  [[nodiscard]] int64_t n_cells() const { return n_tokens_; }
  // By how many rows sequences can grow; those of groups with a window count where they may not
  // suffice for one.
  [[nodiscard]] int64_t free_cells() const;
  // Changes whenever rows that exist get other cells.
  [[nodiscard]] uint64_t epoch() const { return epoch_; }

 private:
  struct Group {
    GroupOptions options;
    ExtentAllocator extents;
    std::map<SeqId, int64_t> first_pos;   // of the held rows, where it is not 0
    std::map<SeqId, int64_t> valid_from;  // where it is behind that
    [[nodiscard]] int64_t first(SeqId seq) const {
      const auto it = first_pos.find(seq);
      return it == first_pos.end() ? 0 : it->second;
    }
  };

  std::vector<int> group_of_layer_;
  std::vector<Group> groups_;
  int64_t n_tokens_;
  std::map<SeqId, int64_t> lengths_;
  std::map<SeqId, int64_t> compacted_;            // where it is not 0
  std::map<SeqId, std::vector<float>> adapters_;  // where some count
  SeqId next_ = 0;
  uint64_t epoch_ = 0;
};

}  // namespace hcache::engine
