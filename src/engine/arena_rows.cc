#include "arena_rows.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "windows.h"

namespace hcache::engine {
namespace {

// Of n rows that move alike.
std::vector<int32_t> of_equal(int64_t n, int64_t delta) {
  return std::vector<int32_t>(static_cast<size_t>(std::max<int64_t>(n, 0)),
                              static_cast<int32_t>(delta));
}

}  // namespace

Status ArenaRows::move_rows(int group, const ExtentAllocator::Move& move) {
  for (int layer = 0; layer < model_.hparams().n_layer; ++layer) {
    if (sequences_.group_of(layer) != group) continue;
    for (Stage* stage : stages_.members(layer)) {
      HCACHE_RETURN_IF_ERROR(stage->arena().move_rows(layer, move));
    }
  }
  return {};
}

// Later copies start behind the moves.
void ArenaRows::fence_copies() {
  for (const auto& stage : stages_) stage->queue().after_compute();
}

Status ArenaRows::resize(SeqId seq, int64_t n_tokens) {
  HCACHE_ASSIGN_OR_RETURN(const auto all, sequences_.resize(seq, n_tokens));
  if (all.empty()) return {};
  // Restored rows may still be on their way to where they were.
  stages_.wait_for_uploads();
  for (const Sequences::GroupMoves& moves : all) {
    for (const ExtentAllocator::Move& move : moves.moves) {
      HCACHE_RETURN_IF_ERROR(move_rows(moves.group, move));
    }
  }
  fence_copies();
  return {};
}

Result<SeqId> ArenaRows::fork(SeqId src, int64_t n_tokens) {
  HCACHE_RETURN_IF_ERROR(sequences_.check(src));
  const int64_t length = sequences_.length(src);
  if (n_tokens < 0 || n_tokens > length) {
    return out_of_range(
        fmt::format("can't fork {} tokens of sequence {}, which has {}", n_tokens, src, length));
  }
  HCACHE_RETURN_IF_ERROR(sequences_.check_compacted(src, n_tokens));
  HCACHE_RETURN_IF_ERROR(sequences_.check_shortest(src, n_tokens));
  const SeqId seq = sequences_.add();
  const auto copy = [&]() -> Status {
    sequences_.begin_like(seq, src);
    HCACHE_RETURN_IF_ERROR(resize(seq, n_tokens));
    sequences_.set_length(seq, n_tokens);
    stages_.wait_for_uploads();
    for (int group = 0; group < sequences_.n_groups(); ++group) {
      const HeldRows from = sequences_.held(src, group);
      const HeldRows to = sequences_.held(seq, group);
      HCACHE_RETURN_IF_ERROR(move_rows(group, {from.first_cell, to.first_cell, to.n_rows}));
    }
    return {};
  };
  if (Status status = copy(); !status.ok()) {
    release(seq).ignore("it exists: it was created above");
    return status;
  }
  if (const int64_t compacted = sequences_.compacted(src); compacted > 0) {
    sequences_.set_compacted(seq, compacted);
  }
  fence_copies();
  return seq;
}

Status ArenaRows::trim(SeqId seq, int64_t n_tokens) {
  HCACHE_RETURN_IF_ERROR(sequences_.check(seq));
  const int64_t length = sequences_.length(seq);
  if (n_tokens < 0 || n_tokens > length) {
    return out_of_range(
        fmt::format("can't keep {} tokens of sequence {}, which has {}", n_tokens, seq, length));
  }
  if (n_tokens > 0) HCACHE_RETURN_IF_ERROR(sequences_.check_compacted(seq, n_tokens));
  HCACHE_RETURN_IF_ERROR(sequences_.check_shortest(seq, n_tokens));
  if (n_tokens == 0) sequences_.set_compacted(seq, 0);
  // Copies still under way into rows that go must not land in their next owner's.
  stages_.wait_for_uploads();
  sequences_.set_length(seq, n_tokens);
  return resize(seq, n_tokens);
}

Status ArenaRows::erase_range(SeqId seq, int64_t from, int64_t to) {
  HCACHE_RETURN_IF_ERROR(sequences_.check(seq));
  const int64_t length = sequences_.length(seq);
  if (from < 0 || from > to || to > length) {
    return out_of_range(fmt::format("can't erase [{}, {}) of sequence {}, which has {} tokens",
                                    from, to, seq, length));
  }
  if (to == length || from == to) return trim(seq, length - (to - from));
  HCACHE_RETURN_IF_ERROR(check_positions_move());
  HCACHE_RETURN_IF_ERROR(sequences_.check_compacted(seq, from));
  HCACHE_ASSIGN_OR_RETURN(const int64_t missing, missing_cells(seq, from, to));
  if (missing > 0) HCACHE_RETURN_IF_ERROR(resize(seq, length + missing));
  const int64_t left = length - (to - from);
  stages_.wait_for_uploads();
  for (int group = 0; group < sequences_.n_groups(); ++group) {
    const bool windowed = sequences_.window(group) > 0;
    HCACHE_RETURN_IF_ERROR(windowed ? erase_from_window(seq, group, from, to)
                                    : erase_from(seq, group, from, to));
  }
  fence_copies();
  sequences_.set_length(seq, left);
  return resize(seq, left);
}

Status ArenaRows::erase_ranges(SeqId seq, std::span<const ErasedRows> ranges) {
  if (ranges.size() == 1) return erase_range(seq, ranges[0].from, ranges[0].to);
  HCACHE_RETURN_IF_ERROR(sequences_.check(seq));
  const int64_t length = sequences_.length(seq);
  int64_t end = 0;
  int64_t left = length;
  for (const ErasedRows& range : ranges) {
    if (range.from < end || range.from >= range.to || range.to > length) {
      return out_of_range(fmt::format("can't erase [{}, {}) behind {} of sequence {}, which has {}",
                                      range.from, range.to, end, seq, length));
    }
    end = range.to;
    left -= range.to - range.from;
  }
  if (ranges.empty()) return {};
  HCACHE_RETURN_IF_ERROR(check_positions_move());
  HCACHE_RETURN_IF_ERROR(sequences_.check_compacted(seq, ranges.front().from));
  for (int group = 0; group < sequences_.n_groups(); ++group) {
    if (sequences_.window(group) == 0) continue;
    return unimplemented("of layers that see a window one range of rows can go at a time");
  }
  stages_.wait_for_uploads();
  for (int group = 0; group < sequences_.n_groups(); ++group) {
    HCACHE_RETURN_IF_ERROR(erase_from(seq, group, ranges));
  }
  fence_copies();
  sequences_.set_length(seq, left);
  return resize(seq, left);
}

Status ArenaRows::erase_from(SeqId seq, int group, std::span<const ErasedRows> ranges) {
  const HeldRows held = sequences_.held(seq, group);
  const int64_t length = sequences_.length(seq);
  const int64_t target = held.cell(std::max(ranges.front().from, held.first_pos));
  std::vector<int32_t> deltas;  // of the rows that move
  int64_t erased = 0;
  for (size_t i = 0; i < ranges.size(); ++i) {
    erased += ranges[i].to - ranges[i].from;
    const int64_t from = std::max(ranges[i].to, held.first_pos);
    const int64_t n = (i + 1 < ranges.size() ? ranges[i + 1].from : length) - from;
    if (n <= 0) continue;
    const int64_t to = target + static_cast<int64_t>(deltas.size());
    HCACHE_RETURN_IF_ERROR(move_rows(group, {held.cell(from), to, n}));
    deltas.insert(deltas.end(), static_cast<size_t>(n), static_cast<int32_t>(-erased));
  }
  // From the last one on, so that those before it stay where they are.
  for (auto range = ranges.rbegin(); range != ranges.rend(); ++range) {
    sequences_.erase_positions(seq, group, range->from, range->to);
  }
  return rotate_erased(group, target, deltas);
}

Status ArenaRows::erase_from(SeqId seq, int group, int64_t from, int64_t to) {
  const ErasedRows range{from, to};
  return erase_from(seq, group, {&range, 1});
}

Result<int64_t> ArenaRows::missing_cells(SeqId seq, int64_t from, int64_t to) const {
  int64_t missing = 0;
  const int64_t left = sequences_.length(seq) - (to - from);
  for (int group = 0; group < sequences_.n_groups(); ++group) {
    const int64_t window = sequences_.window(group);
    if (window == 0) continue;
    const ErasedWindow then = erased_window(seq, group, from, to);
    const int64_t valid = then.valid_from;
    missing = std::max(missing, then.missing);
    if (valid == 0 || valid + window - 1 <= left) continue;
    return failed_precondition(fmt::format(
        "rows [{}, {}) of sequence {} can't go: of the {} that stay, layers that see {} "
        "hold those from {} on",
        from, to, seq, left, window, valid));
  }
  return missing;
}

ArenaRows::ErasedWindow ArenaRows::erased_window(SeqId seq, int group, int64_t from,
                                                 int64_t to) const {
  const HeldRows held = sequences_.held(seq, group);
  const int64_t window = sequences_.window(group);
  const int64_t valid = sequences_.valid_from(seq, group);
  const int64_t left = sequences_.length(seq) - (to - from);
  // With as many cells as there are, if that is early enough.
  const int64_t of_cells = whole_partitions(left - held.n_rows + kAttentionPartition - 1);
  const int64_t first =
      std::min(std::max(held_from(window, left), of_cells), attended_from(window, left));
  return {.first_pos = first,
          .valid_from = valid <= from ? valid : std::max(valid, to) - (to - from),
          .missing = left - first - held.n_rows};
}

Status ArenaRows::erase_from_window(SeqId seq, int group, int64_t from, int64_t to) {
  const ErasedWindow then = erased_window(seq, group, from, to);
  const HeldRows held = sequences_.held(seq, group);
  const int64_t erased = to - from;
  const int64_t length = sequences_.length(seq);
  // Rows before the erased ones, and those behind them.
  const int64_t front = std::max(held.first_pos, then.first_pos);
  const int64_t back = std::max({to, held.first_pos, then.first_pos + erased});
  const ExtentAllocator::Move keep = {.from = held.cell(front),
                                      .to = held.first_cell + front - then.first_pos,
                                      .n = std::max<int64_t>(0, from - front)};
  const ExtentAllocator::Move move = {.from = held.cell(back),
                                      .to = held.first_cell + back - erased - then.first_pos,
                                      .n = length - back};
  const bool keep_first = keep.to + keep.n <= move.from;
  if (keep_first) HCACHE_RETURN_IF_ERROR(move_rows(group, keep));
  HCACHE_RETURN_IF_ERROR(move_rows(group, move));
  if (!keep_first) HCACHE_RETURN_IF_ERROR(move_rows(group, keep));
  sequences_.set_begin(seq, group, then.first_pos, then.valid_from);
  return rotate_erased(group, move.to, of_equal(move.n, -erased));
}

Status ArenaRows::rotate_erased(int group, int64_t cell, std::span<const int32_t> deltas) {
  if (!options_.rotate_moved) return {};
  return shift_k([&](int layer) { return sequences_.group_of(layer) == group; }, cell, deltas);
}

Status ArenaRows::check_positions_move() const {
  if (!model_.spec().learned_positions) return {};
  return unimplemented("positions can't be shifted in a model with learned positions");
}

Status ArenaRows::move_positions(SeqId seq, int layer, int64_t first_pos, int64_t n_rows,
                                 int64_t moved) {
  HCACHE_RETURN_IF_ERROR(sequences_.check(seq));
  if (layer < 0 || layer >= model_.hparams().n_layer || first_pos < 0 || n_rows < 0 ||
      first_pos + n_rows > sequences_.length(seq)) {
    return out_of_range(fmt::format("can't move rows [{}, {}) of layer {} of sequence {}",
                                    first_pos, first_pos + n_rows, layer, seq));
  }
  if (moved == 0 || n_rows == 0) return {};
  HCACHE_RETURN_IF_ERROR(check_positions_move());
  HCACHE_RETURN_IF_ERROR(sequences_.check_compacted(seq, first_pos));
  const HeldRows held = sequences_.held(seq, sequences_.group_of(layer));
  if (first_pos < held.first_pos) {
    return out_of_range(fmt::format("layer {} holds rows of sequence {} from {} on, not from {}",
                                    layer, seq, held.first_pos, first_pos));
  }
  stages_.wait_for_uploads();
  const int64_t cell = held.cell(first_pos);
  HCACHE_RETURN_IF_ERROR(
      shift_k([&](int each) { return each == layer; }, cell, of_equal(n_rows, moved)));
  fence_copies();
  return {};
}

Status ArenaRows::shift_k(const std::function<bool(int layer)>& wants, int64_t cell,
                          std::span<const int32_t> deltas) {
  const auto block = static_cast<size_t>(options_.max_batch_rows);
  for (size_t done = 0; done < deltas.size(); done += block) {
    const auto part = deltas.subspan(done, std::min(block, deltas.size() - done));
    const std::vector<int32_t> padded = [&] {
      std::vector<int32_t> all(part.begin(), part.end());
      all.resize(block);
      return all;
    }();
    for (const auto& stage : stages_) {
      bool set = false;
      for (int layer = stage->begin(); layer < stage->end(); ++layer) {
        if (!wants(layer)) continue;
        if (!std::exchange(set, true)) {
          stage->inputs_overwritten();
          stage->graphs().set(stage->positions(), padded);
        }
        HCACHE_RETURN_IF_ERROR(stage->arena().shift_k(layer, cell + static_cast<int64_t>(done),
                                                      static_cast<int64_t>(part.size()),
                                                      stage->positions()));
      }
    }
  }
  return {};
}

Status ArenaRows::release(SeqId seq) {
  HCACHE_RETURN_IF_ERROR(sequences_.check(seq));
  // Copies still under way into the extent must not land in its next owner's rows.
  stages_.wait_for_uploads();
  sequences_.remove(seq);
  return {};
}

Status ArenaRows::reserve(SeqId seq, int64_t n_tokens) {
  HCACHE_RETURN_IF_ERROR(sequences_.check(seq));
  if (n_tokens <= sequences_.length(seq)) return {};
  if (n_tokens > model_.hparams().n_ctx_train) {
    return out_of_range(fmt::format("{} tokens are more than the model's context of {}", n_tokens,
                                    model_.hparams().n_ctx_train));
  }
  const bool empty = sequences_.length(seq) == 0;
  if (empty) sequences_.skip_unseen(seq, n_tokens);
  if (Status status = resize(seq, n_tokens); !status.ok()) {
    if (empty) sequences_.skip_unseen(seq, 0);
    return status;
  }
  fence_copies();
  sequences_.set_length(seq, n_tokens);
  return {};
}

}  // namespace hcache::engine
