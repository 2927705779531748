// Which pages of the store a restore could read, which of them a plan does read, and a reader for
// these: what planning, restoring and reading ahead have in common.
//
// Threading: the engine's thread; open_reader() any.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "engine/engine.h"
#include "policy/packing.h"
#include "policy/restore_plan.h"
#include "policy/restore_record.h"
#include "store/store.h"

namespace hcache::state {

// Seconds per byte of a tier, over those of the disks.
struct TierSlowness {
  const store::Store* store = nullptr;  // knows where a page would come from; null: the disks
  double memory = 0;
  double remote = 1;

  [[nodiscard]] double of(store::PageOrigin origin) const {
    if (origin == store::PageOrigin::kMemory) return memory;
    return origin == store::PageOrigin::kRemote ? remote : 1;
  }
};

// What the store offers of a match to this engine, as the planner wants it.
struct Offer {
  // Runs of chunks with equal encodings, layers x {hidden, kv}; encodings that this engine can't
  // use are left out. Pages in host memory or in the remote tier are marked so.
  policy::Availability available;
  // Layers do without some of the rows.
  bool windowed = false;
  // How much of the K and V in it is packed, and how far.
  policy::PackedShare packed;
};
// `max_rows` cuts it (the last token is always computed). Of layers that see a window, what comes
// before is not needed.
[[nodiscard]] Offer offer_of(engine::Engine& engine, const store::Match& match, int64_t max_rows,
                             const TierSlowness& slowness);

// How many of the leading rows can be restored where layers see a window: each layer must have what
// it needs of so many. Elsewhere the planner knows what to do with rows that miss layers: max_rows.
[[nodiscard]] int64_t restorable_rows(engine::Engine& engine, const store::Match& match,
                                      int64_t max_rows);

// Whether a chunk has every page that is captured of its layers (masks of kTapHidden and kTapKv,
// types of hidden states), so that the saver can complete it.
[[nodiscard]] bool holds_all(const store::ChunkInfo& chunk, std::span<const uint8_t> captured,
                             std::span<const ggml_type> hidden_types);

// One page of the schedule and the rows of it that are used.
struct PlannedPage {
  const store::PageInfo* info = nullptr;
  const store::ChunkRef* chunk = nullptr;
  int64_t begin = 0;  // position of the first used row
  int64_t n_rows = 0;
  int64_t row = 0;                      // of the page
  std::span<const int64_t> moves = {};  // by which their positions have changed since, in order
};

// The pages of one layer in one run, in order, and what is done with them.
struct Segment {
  policy::Method method = policy::Method::kKv;
  std::vector<PlannedPage> pages;
};

// The chunk's page for a method, or nullptr where this engine can't use what is stored.
[[nodiscard]] const store::PageInfo* usable_page(engine::Engine& engine,
                                                 const store::ChunkInfo& info, int layer,
                                                 policy::Method method);

// Layers [begin, end).
struct LaneLayers {
  int begin = 0;
  int end = 0;
};

// So many pages are read of one lane before those of another.
struct Turn {
  size_t lane = 0;
  size_t n_pages = 0;
};

// What a plan reads. The pages point into the match.
struct PlannedPages {
  std::vector<std::vector<Segment>> layers;
  // All layers, in parts that are restored at once, each by layer, then by row.
  std::vector<LaneLayers> lanes;
  std::vector<Turn> turns;  // the order of the reads, as ReadOrder has it
};

// One lane for each device where these can compute at once and may (`devices_at_once`); else one.
[[nodiscard]] Result<PlannedPages> planned_pages(engine::Engine& engine, const store::Match* match,
                                                 const policy::Plan& plan, bool devices_at_once);
// The devices that layers are restored to, nothing read for them yet; and each layer's, by its
// index.
[[nodiscard]] std::vector<policy::RestoredDevice> restored_devices(const engine::Engine& engine,
                                                                   std::vector<size_t>* of_layers);
// In the order of the reads.
[[nodiscard]] std::vector<store::PageRequest> requests_of(const PlannedPages& pages);

// A reader that has been asked for the pages; null when there are none. The ring is larger than
// asked for where pages are large.
[[nodiscard]] Result<std::unique_ptr<store::PageReader>> open_reader(
    store::Store* store, std::span<const store::PageRequest> pages, store::ReaderOptions options);

// What checks the pages of a restore, ReaderOptions::check_with: the engine's threads where these
// have every core; null, for the reader's own, where not.
[[nodiscard]] store::Share checks_of(engine::Engine& engine);

}  // namespace hcache::state
