// Which rows of a sequence that was cut were chosen to stay (policy/truncation.h), and how its
// saved chain tells of them: in a page of the first chunk behind the cut (Encoding::kChosen,
// docs/format.md).
//
// K of a row that moves is rotated, and rounded, each time. So it is told how a block has moved
// since it was computed: what is restored is moved likewise, and has the same bits.
//
// Threading: any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "engine/engine.h"
#include "policy/truncation.h"
#include "store/store.h"

namespace hcache::state {

// policy::kChosenBlock rows.
struct ChosenBlock {
  int64_t first = 0;                // position of its first token, a multiple of its size
  std::vector<int64_t> moves = {};  // by how many positions, one after the other; none is 0
  friend bool operator==(const ChosenBlock&, const ChosenBlock&) = default;
};

// How the row of a position has moved that was among the last ones at all of these cuts that came
// after it.
[[nodiscard]] std::vector<int64_t> moves_since(std::span<const policy::HeldRows> cuts,
                                               int64_t position);

// The blocks of a full sequence of which `held` is to be left: those that were chosen at the last
// of the cuts before, and what would leave behind them.
[[nodiscard]] policy::ChoosableBlocks blocks_to_choose_from(std::span<const policy::HeldRows> cuts,
                                                            const policy::HeldRows& held);

// What a cut leaves of it.
struct ChosenCut {
  std::vector<ChosenBlock> blocks;          // that stay, in ascending order
  std::vector<engine::ErasedRows> leaving;  // rows as they were before it
};
// cuts: those before it; blocks: what was chosen at the last of them. rows: what is chosen now, of
// blocks_to_choose_from().
[[nodiscard]] ChosenCut cut_rows(std::span<const policy::HeldRows> cuts,
                                 std::span<const ChosenBlock> blocks, const policy::HeldRows& held,
                                 std::span<const int64_t> rows);

// A page of a chunk of so many tokens.
[[nodiscard]] std::vector<std::byte> chosen_page(std::span<const ChosenBlock> blocks,
                                                 size_t n_tokens);
// What such a page says; kDataLoss where it does not fit what is held.
[[nodiscard]] Result<std::vector<ChosenBlock>> parse_chosen(std::span<const std::byte> page,
                                                            const policy::HeldRows& held);
// What the match of a chain says of the rows that are held of it; waits for it. A page that is
// damaged is dropped from the store. kNotFound: there is none.
[[nodiscard]] Result<std::vector<ChosenBlock>> read_chosen(store::Store& store,
                                                           const store::Match& chain,
                                                           const policy::HeldRows& held);

}  // namespace hcache::state
