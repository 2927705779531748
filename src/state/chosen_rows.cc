#include "state/chosen_rows.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "planned_pages.h"

namespace hcache::state {
namespace {

using policy::HeldRows;
using policy::kChosenBlock;

static_assert(std::endian::native == std::endian::little);

// Of a page of a few KiB.
constexpr uint64_t kRingBytes = 1U << 20;
// For a page that only the remote tier has: what computing the conversation again takes is longer.
constexpr double kPatienceS = 1;

}  // namespace

std::vector<int64_t> moves_since(std::span<const HeldRows> cuts, int64_t position) {
  std::vector<int64_t> moves;
  int64_t dropped = 0;
  for (const HeldRows& cut : cuts) {
    if (cut.cut_at > position) moves.push_back(dropped - cut.dropped());
    dropped = cut.dropped();
  }
  return moves;
}

policy::ChoosableBlocks blocks_to_choose_from(std::span<const HeldRows> cuts,
                                              const HeldRows& held) {
  const HeldRows before = cuts.empty() ? HeldRows() : cuts.back();
  policy::ChoosableBlocks blocks;
  for (int64_t i = 0; i < before.chosen; i += kChosenBlock) blocks.earlier.push_back(held.kept + i);
  // So aligned, no block has rows of both sides of a cut or of two chunks.
  static_assert(policy::kCutTokens % kChosenBlock == 0);
  const int64_t from = std::max(held.kept, before.resumed) + kChosenBlock - 1;
  for (int64_t at = from / kChosenBlock * kChosenBlock; at + kChosenBlock <= held.resumed;
       at += kChosenBlock) {
    blocks.since.push_back(at - before.dropped());
  }
  return blocks;
}

ChosenCut cut_rows(std::span<const HeldRows> cuts, std::span<const ChosenBlock> blocks,
                   const HeldRows& held, std::span<const int64_t> rows) {
  const HeldRows before = cuts.empty() ? HeldRows() : cuts.back();
  const int64_t resumed = held.resumed - before.dropped();
  ChosenCut out;
  int64_t begin = held.kept;  // of rows that leave
  int64_t target = held.kept;
  for (const int64_t row : rows) {
    ChosenBlock block;
    if (row < held.kept + before.chosen) {
      block = blocks[static_cast<size_t>((row - held.kept) / kChosenBlock)];
    } else {
      block.first = row + before.dropped();
      block.moves = moves_since(cuts, block.first);
    }
    if (row != target) block.moves.push_back(target - row);
    out.blocks.push_back(std::move(block));
    if (begin < row) out.leaving.push_back({.from = begin, .to = row});
    begin = row + kChosenBlock;
    target += kChosenBlock;
  }
  if (begin < resumed) out.leaving.push_back({.from = begin, .to = resumed});
  return out;
}

std::vector<std::byte> chosen_page(std::span<const ChosenBlock> blocks, size_t n_tokens) {
  std::vector<int64_t> numbers = {static_cast<int64_t>(blocks.size())};
  for (const ChosenBlock& block : blocks) {
    numbers.push_back(block.first);
    numbers.push_back(static_cast<int64_t>(block.moves.size()));
    numbers.insert(numbers.end(), block.moves.begin(), block.moves.end());
  }
  const size_t n_bytes = numbers.size() * sizeof(int64_t);
  std::vector<std::byte> page((n_bytes + n_tokens - 1) / n_tokens * n_tokens);
  std::memcpy(page.data(), numbers.data(), n_bytes);
  return page;
}

Result<std::vector<ChosenBlock>> parse_chosen(std::span<const std::byte> page,
                                              const HeldRows& held) {
  const auto damaged = [](const auto& what) {
    return data_loss(fmt::format("what is saved of chosen rows {}", what));
  };
  const auto next = [&]() -> Result<int64_t> {
    int64_t number = 0;
    if (page.size() < sizeof(number)) return damaged("ends too early");
    std::memcpy(&number, page.data(), sizeof(number));
    page = page.subspan(sizeof(number));
    return number;
  };
  HCACHE_ASSIGN_OR_RETURN(const int64_t n, next());
  if (n != held.chosen / kChosenBlock) {
    return damaged(fmt::format("is of {} blocks where {} are held", n, held.chosen / kChosenBlock));
  }
  std::vector<ChosenBlock> blocks;
  int64_t end = held.kept;
  for (int64_t i = 0; i < n; ++i) {
    ChosenBlock block;
    HCACHE_ASSIGN_OR_RETURN(block.first, next());
    if (block.first < end || block.first > held.resumed - kChosenBlock ||
        block.first % kChosenBlock != 0) {
      return damaged(fmt::format("has a block at {}, not at a multiple of {} between {} and {}",
                                 block.first, kChosenBlock, end, held.resumed));
    }
    end = block.first + kChosenBlock;
    HCACHE_ASSIGN_OR_RETURN(const int64_t n_moves, next());
    for (int64_t j = 0; j < n_moves; ++j) {
      HCACHE_ASSIGN_OR_RETURN(const int64_t move, next());
      block.moves.push_back(move);
    }
    blocks.push_back(std::move(block));
  }
  return blocks;
}

Result<std::vector<ChosenBlock>> read_chosen(store::Store& store, const store::Match& chain,
                                             const HeldRows& held) {
  const auto at =
      std::find_if(chain.chunks.begin(), chain.chunks.end(), [&](const store::MatchedChunk& chunk) {
        return chunk.chunk.info().first_position == static_cast<uint64_t>(held.cut_at);
      });
  if (at == chain.chunks.end() ||
      at->chunk.info().find_page(0, store::Encoding::kChosen) == nullptr) {
    return not_found(
        fmt::format("the rows that were chosen at {} tokens are not saved", held.cut_at));
  }
  const store::PageRequest page{at->chunk, 0, store::Encoding::kChosen};
  HCACHE_ASSIGN_OR_RETURN(
      const auto reader,
      open_reader(&store, {&page, 1}, {.ring_bytes = kRingBytes, .remote_timeout_s = kPatienceS}));
  HCACHE_ASSIGN_OR_RETURN(const store::PageView view, reader->next());
  Result<std::vector<ChosenBlock>> blocks =
      view.status.ok() ? parse_chosen(view.bytes, held) : view.status;
  if (blocks.status().code() == Code::kDataLoss) {
    store.quarantine(at->chunk.info().id, 0, store::Encoding::kChosen)
        .ignore("the damage itself is reported");
  }
  return blocks;
}

}  // namespace hcache::state
