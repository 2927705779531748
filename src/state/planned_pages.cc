#include "planned_pages.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "policy/read_order.h"
#include "state/identity.h"

namespace hcache::state {
namespace {

using engine::Engine;
using policy::Method;

// Where a chunk's rows stand in the history.
struct ChunkSpan {
  const store::MatchedChunk* chunk = nullptr;
  int64_t begin = 0;
  int64_t end = 0;
};

std::vector<ChunkSpan> chunk_spans(const store::Match& match, int64_t max_rows) {
  std::vector<ChunkSpan> spans;
  int64_t begin = 0;
  for (const store::MatchedChunk& chunk : match.chunks) {
    if (begin >= max_rows) break;
    const int64_t end = std::min<int64_t>(begin + chunk.usable_rows, max_rows);
    spans.push_back({&chunk, begin, end});
    begin = end;
  }
  return spans;
}

}  // namespace

const store::PageInfo* usable_page(Engine& engine, const store::ChunkInfo& info, int layer,
                                   Method method) {
  for (const store::PageInfo& page : info.pages) {
    if (page.layer != layer) continue;
    const size_t n_tokens = info.tokens.size();
    if (method == Method::kKv && store::is_kv(page.encoding)) {
      const auto type = element_type(engine.options().kv_type);
      const bool fits = page_fits(page.encoding, engine.options().kv_type, page.bytes,
                                  2 * engine.kv_row_bytes() * n_tokens);
      if (info.k_type == type && info.v_type == type && fits) return &page;
    }
    if (method == Method::kHidden && store::is_hidden(page.encoding)) {
      const auto type = hidden_type(page.encoding);
      if (type && page.bytes == engine.hidden_row_bytes(*type) * n_tokens &&
          engine.can_project(*type, layer)) {
        return &page;
      }
    }
  }
  return nullptr;
}

namespace {

// Bytes of K and V: of all usable pages, and of the packed ones as they are and unpacked.
struct KvBytes {
  double all = 0;
  double packed = 0;
  double unpacked = 0;

  void add(const store::PageInfo& page, double plain_bytes) {
    all += plain_bytes;
    if (page.encoding != store::Encoding::kKvPacked) return;
    packed += page.bytes;
    unpacked += plain_bytes;
  }
  [[nodiscard]] policy::PackedShare share() const {
    if (unpacked == 0) return {};
    return {.share = unpacked / all, .ratio = packed / unpacked};
  }
};

// Whether some layer does without some of the first n_rows.
bool sees_window(const Engine& engine, int64_t n_rows) {
  for (int layer = 0; layer < engine.n_layer(); ++layer) {
    if (engine.first_row_needed(layer, n_rows) > 0) return true;
  }
  return false;
}

// Whether a layer needs rows of a chunk, where the first n_rows are restored.
bool is_needed(const Engine& engine, const ChunkSpan& span, int layer, int64_t n_rows) {
  return span.end > engine.first_row_needed(layer, n_rows);
}

policy::AvailableRun offered_run(Engine& engine, const ChunkSpan& span, int64_t n_rows,
                                 const TierSlowness& slowness, KvBytes* kv) {
  policy::AvailableRun run{.tokens = span.end - span.begin, .layers = {}, .slowness = {}};
  const store::ChunkInfo& info = span.chunk->chunk.info();
  const auto kv_bytes = static_cast<double>(2 * engine.kv_row_bytes() * info.tokens.size());
  std::vector<store::PageOrigin> origins;
  if (slowness.store != nullptr) origins = slowness.store->origins(span.chunk->chunk);
  bool all_disk = true;
  for (int layer = 0; layer < engine.n_layer(); ++layer) {
    if (!is_needed(engine, span, layer, n_rows)) {
      run.layers.push_back(policy::kNotNeeded);
      run.slowness.push_back(1);
      continue;
    }
    int mask = policy::kNoEncoding;
    double slowest = -1;  // of its pages, where one is here and another one there
    const auto add = [&](const store::PageInfo* page, policy::Encoding encoding) {
      if (page == nullptr) return;
      mask |= encoding;
      double factor = 1;
      if (!origins.empty()) {
        factor = slowness.of(origins[static_cast<size_t>(page - info.pages.data())]);
      }
      slowest = std::max(slowest, factor);
    };
    add(usable_page(engine, info, layer, Method::kHidden), policy::kHasHidden);
    const store::PageInfo* kv_page = usable_page(engine, info, layer, Method::kKv);
    add(kv_page, policy::kHasKv);
    if (kv_page != nullptr) kv->add(*kv_page, kv_bytes);
    run.layers.push_back(static_cast<policy::Encoding>(mask));
    run.slowness.push_back(slowest < 0 ? 1 : slowest);
    all_disk = all_disk && run.slowness.back() == 1;
  }
  if (all_disk) run.slowness.clear();
  return run;
}

}  // namespace

Offer offer_of(Engine& engine, const store::Match& match, int64_t max_rows,
               const TierSlowness& slowness) {
  Offer offer;
  std::vector<policy::AvailableRun>& runs = offer.available.runs;
  KvBytes kv;
  const std::vector<ChunkSpan> spans = chunk_spans(match, max_rows);
  const int64_t n_rows = spans.empty() ? 0 : spans.back().end;
  offer.windowed = sees_window(engine, n_rows);
  for (const ChunkSpan& span : spans) {
    policy::AvailableRun run = offered_run(engine, span, n_rows, slowness, &kv);
    if (!runs.empty() && runs.back().layers == run.layers && runs.back().slowness == run.slowness) {
      runs.back().tokens += run.tokens;
    } else {
      runs.push_back(std::move(run));
    }
  }
  offer.packed = kv.share();
  return offer;
}

bool holds_all(const store::ChunkInfo& chunk, std::span<const uint8_t> captured,
               std::span<const ggml_type> hidden_types) {
  for (size_t i = 0; i < captured.size(); ++i) {
    const auto layer = static_cast<uint16_t>(i);
    if ((captured[i] & engine::kTapHidden) != 0 &&
        chunk.find_page(layer, *hidden_encoding(hidden_types[i])) == nullptr) {
      return false;
    }
    if ((captured[i] & engine::kTapKv) != 0 &&
        chunk.find_state(layer, store::Encoding::kKv) == nullptr) {
      return false;
    }
  }
  return true;
}

int64_t restorable_rows(Engine& engine, const store::Match& match, int64_t max_rows) {
  const std::vector<ChunkSpan> spans = chunk_spans(match, max_rows);
  // Layer 0 can be had without its pages.
  const auto misses = [&](const ChunkSpan& span, int64_t n_rows) {
    const store::ChunkInfo& info = span.chunk->chunk.info();
    for (int layer = 1; layer < engine.n_layer(); ++layer) {
      if (is_needed(engine, span, layer, n_rows) &&
          usable_page(engine, info, layer, Method::kKv) == nullptr &&
          usable_page(engine, info, layer, Method::kHidden) == nullptr) {
        return true;
      }
    }
    return false;
  };
  int64_t n_rows = max_rows;
  // What fewer rows need is other rows.
  for (auto span = spans.begin(); span != spans.end() && sees_window(engine, n_rows);) {
    if (span->begin < n_rows && misses(*span, n_rows)) {
      n_rows = span->begin;
      span = spans.begin();
    } else {
      ++span;
    }
  }
  return n_rows;
}

namespace {

Result<std::vector<std::vector<Segment>>> pages_by_layer(Engine& engine, const store::Match* match,
                                                         const policy::Plan& plan) {
  const int n_layer = engine.n_layer();
  std::vector<std::vector<Segment>> layers(n_layer);
  if (plan.runs.empty()) return layers;
  const std::vector<ChunkSpan> spans = chunk_spans(*match, plan.restored_tokens);
  for (int layer = plan.recompute_layers; layer < n_layer; ++layer) {
    for (const policy::PlanRun& run : plan.runs) {
      if (run.layers[layer] == Method::kNone) continue;
      Segment segment{.method = run.layers[layer], .pages = {}};
      for (const ChunkSpan& span : spans) {
        const int64_t begin = std::max(span.begin, run.begin);
        const int64_t end = std::min(span.end, run.begin + run.tokens);
        if (begin >= end) continue;
        const store::ChunkInfo& info = span.chunk->chunk.info();
        const store::PageInfo* page = usable_page(engine, info, layer, segment.method);
        if (page == nullptr) {
          return internal_error(
              fmt::format("the plan wants {} of layer {} of chunk {}, which has none",
                          policy::method_name(segment.method), layer, to_hex(info.id)));
        }
        segment.pages.push_back({.info = page,
                                 .chunk = &span.chunk->chunk,
                                 .begin = begin,
                                 .n_rows = end - begin,
                                 .row = span.chunk->first_row + begin - span.begin,
                                 .moves = span.chunk->moves});
      }
      if (!segment.pages.empty()) layers[layer].push_back(std::move(segment));
    }
  }
  return layers;
}

// A device's layers are one after the other, since stages_overlap() wants one stage of each.
std::vector<LaneLayers> lanes_of(const Engine& engine, bool devices_at_once) {
  if (!devices_at_once || !engine.stages_overlap()) return {{0, engine.n_layer()}};
  std::vector<LaneLayers> lanes;
  for (const auto& [begin, end] : engine.stage_ranges()) lanes.push_back({begin, end});
  return lanes;
}

// Pages of a lane that are read together: what one projection takes.
struct Piece {
  size_t n_pages = 0;
  int64_t bytes = 0;
};

std::vector<Piece> pieces_of(const PlannedPages& pages, const LaneLayers& lane, int64_t rows) {
  std::vector<Piece> pieces;
  for (int layer = lane.begin; layer < lane.end; ++layer) {
    for (const Segment& segment : pages.layers[static_cast<size_t>(layer)]) {
      int64_t left = 0;  // rows that the last piece has room for
      for (const PlannedPage& page : segment.pages) {
        if (left <= 0) {
          pieces.emplace_back();
          left = rows;
        }
        ++pieces.back().n_pages;
        pieces.back().bytes += page.info->bytes;
        left -= page.n_rows;
      }
    }
  }
  return pieces;
}

std::vector<Turn> turns_of(const PlannedPages& pages, int64_t rows) {
  std::vector<std::vector<Piece>> pieces;
  std::vector<policy::ReadOrder::Lane> wanted;
  for (const LaneLayers& lane : pages.lanes) {
    pieces.push_back(pieces_of(pages, lane, rows));
    policy::ReadOrder::Lane& sum = wanted.emplace_back();
    sum.pieces = static_cast<int64_t>(pieces.back().size());
    for (const Piece& piece : pieces.back()) sum.bytes += piece.bytes;
  }
  policy::ReadOrder order(std::move(wanted));
  std::vector<size_t> next(pages.lanes.size(), 0);
  std::vector<Turn> turns;
  for (int32_t i = order.next(); i >= 0; i = order.next()) {
    const auto lane = static_cast<size_t>(i);
    const Piece& piece = pieces[lane][next[lane]++];
    order.advance(i, piece.bytes);
    if (turns.empty() || turns.back().lane != lane) turns.push_back({lane, 0});
    turns.back().n_pages += piece.n_pages;
  }
  return turns;
}

}  // namespace

Result<PlannedPages> planned_pages(Engine& engine, const store::Match* match,
                                   const policy::Plan& plan, bool devices_at_once) {
  PlannedPages pages;
  HCACHE_ASSIGN_OR_RETURN(pages.layers, pages_by_layer(engine, match, plan));
  pages.lanes = lanes_of(engine, devices_at_once);
  pages.turns = turns_of(pages, engine.options().max_batch_rows);
  return pages;
}

std::vector<policy::RestoredDevice> restored_devices(const Engine& engine,
                                                     std::vector<size_t>* of_layers) {
  std::vector<policy::RestoredDevice> devices;
  std::vector<const model::Device*> known;
  for (const auto& [begin, end] : engine.stage_ranges()) {
    const model::Device& device = engine.model().device(begin);
    const auto at = std::find(known.begin(), known.end(), &device);
    const auto i = static_cast<size_t>(at - known.begin());
    if (at == known.end()) {
      known.push_back(&device);
      devices.push_back({.device = device.name(), .n_layers = 0, .pages = {}});
    }
    devices[i].n_layers += end - begin;
    of_layers->insert(of_layers->end(), static_cast<size_t>(end - begin), i);
  }
  return devices;
}

std::vector<store::PageRequest> requests_of(const PlannedPages& pages) {
  std::vector<std::vector<store::PageRequest>> of_lanes(pages.lanes.size());
  for (size_t i = 0; i < pages.lanes.size(); ++i) {
    for (int layer = pages.lanes[i].begin; layer < pages.lanes[i].end; ++layer) {
      for (const Segment& segment : pages.layers[static_cast<size_t>(layer)]) {
        for (const PlannedPage& page : segment.pages) {
          of_lanes[i].push_back({*page.chunk, page.info->layer, page.info->encoding});
        }
      }
    }
  }
  if (of_lanes.size() == 1) return std::move(of_lanes.front());
  std::vector<store::PageRequest> requests;
  std::vector<size_t> next(of_lanes.size(), 0);
  for (const Turn& turn : pages.turns) {
    const auto from = of_lanes[turn.lane].begin() + static_cast<std::ptrdiff_t>(next[turn.lane]);
    requests.insert(requests.end(), from, from + static_cast<std::ptrdiff_t>(turn.n_pages));
    next[turn.lane] += turn.n_pages;
  }
  return requests;
}

Result<std::unique_ptr<store::PageReader>> open_reader(store::Store* store,
                                                       std::span<const store::PageRequest> pages,
                                                       store::ReaderOptions options) {
  std::unique_ptr<store::PageReader> reader;
  if (pages.empty()) return reader;
  size_t largest = 0;
  for (const store::PageRequest& page : pages) {
    largest =
        std::max<size_t>(largest, page.chunk.info().find_page(page.layer, page.encoding)->bytes);
  }
  // Of few sizes, so that the next reader can have it.
  const auto needed = std::bit_ceil<uint64_t>(8 * (largest + kDirectAlignment));
  options.ring_bytes = std::max(options.ring_bytes, needed);
  HCACHE_ASSIGN_OR_RETURN(reader, store->new_reader(options));
  HCACHE_RETURN_IF_ERROR(reader->submit(pages));
  return reader;
}

store::Share checks_of(engine::Engine& engine) {
  model::ComputeThreads* threads = engine.threads_of_every_core();
  if (threads == nullptr) return nullptr;
  return [threads](size_t n, const auto& each) { threads->run(n, each); };
}

}  // namespace hcache::state
