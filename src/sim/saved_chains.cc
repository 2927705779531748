#include "saved_chains.h"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "sim/random.h"

namespace hcache::sim {
namespace {

constexpr uint64_t kSeed = kSplitMixStep;

// Of a chain, token by token.
uint64_t extended(uint64_t hash, int32_t token) {
  return mixed(hash + kSplitMixStep + static_cast<uint32_t>(token));
}

// Of every piece of a chunk that begins where the chain before it ends.
using Ends = std::array<uint64_t, kChunk>;

// The last of them.
uint64_t ends_of(uint64_t hash, std::span<const int32_t> chunk, Ends* ends) {
  for (size_t i = 0; i < chunk.size(); ++i) (*ends)[i] = hash = extended(hash, chunk[i]);
  return hash;
}

bool in(uint8_t tiers, size_t tier) { return (tiers >> tier & 1U) != 0; }
uint8_t bit(size_t tier) { return static_cast<uint8_t>(1U << tier); }

}  // namespace

SavedChains::SavedChains(std::vector<SavedTier> tiers, double bytes_per_token, MissCost miss_s)
    : bytes_per_token_(bytes_per_token), miss_s_(std::move(miss_s)) {
  for (const SavedTier& tier : tiers) {
    tiers_.push_back({.setup = tier, .order = policy::ChainOrder(tier.policy)});
  }
}

std::vector<SavedChains::Link> SavedChains::walk(std::span<const int32_t> tokens) const {
  std::vector<Link> links;
  Ends ends;
  Id hash = kSeed;
  for (size_t begin = 0; begin < tokens.size(); begin += kChunk) {
    const auto chunk = tokens.subspan(begin, std::min<size_t>(kChunk, tokens.size() - begin));
    hash = ends_of(hash, chunk, &ends);
    size_t n = chunk.size();
    while (n > 0 && !objects_.contains(ends[n - 1])) --n;
    if (n > 0) links.push_back({ends[n - 1], static_cast<int32_t>(n)});
    if (n < kChunk) break;  // this chunk is not there as a whole
  }
  return links;
}

SavedChains::Chunk SavedChains::chunk_of(const Link& link) const {
  return {link.tokens, static_cast<size_t>(std::countr_zero(objects_.at(link.id).tiers))};
}

std::vector<SavedChains::Chunk> SavedChains::chunks(std::span<const int32_t> tokens) const {
  std::vector<Chunk> chunks;
  for (const Link& link : walk(tokens)) chunks.push_back(chunk_of(link));
  return chunks;
}

SavedChains::Found SavedChains::describe(const std::vector<Link>& links) const {
  Found found;
  found.by_tier.resize(tiers_.size());
  for (const Link& link : links) {
    const Chunk chunk = chunk_of(link);
    found.tokens += chunk.tokens;
    found.by_tier[chunk.tier] += chunk.tokens;
  }
  return found;
}

SavedChains::Found SavedChains::find(std::span<const int32_t> tokens) const {
  return describe(walk(tokens));
}

SavedChains::Found SavedChains::use(std::span<const int32_t> tokens, double now_s) {
  const std::vector<Link> links = walk(tokens);
  Found before = describe(links);
  for (const Link& link : links) {
    const auto found = objects_.find(link.id);
    if (found == objects_.end()) break;  // the ones before it pushed it out
    const uint8_t tiers = found->second.tiers;
    for (size_t t = 0; t < tiers_.size(); ++t) {
      if (in(tiers, t) && limited(tiers_[t])) tiers_[t].order.use(link.id, now_s);
    }
    if (!in(tiers, 0)) enter(0, link.id, now_s);
  }
  return before;
}

void SavedChains::put(std::span<const int32_t> tokens, double now_s) {
  if (tiers_.empty()) return;
  Ends ends;
  Id hash = kSeed;
  Id parent = 0;
  bool room = true;  // where there was none for a chunk there is none for what follows
  for (size_t begin = 0; begin < tokens.size(); begin += kChunk) {
    const size_t n = std::min<size_t>(kChunk, tokens.size() - begin);
    hash = ends_of(hash, tokens.subspan(begin, n), &ends);
    const bool known = objects_.contains(hash);
    if (!room && !known) {
      for (Tier& tier : tiers_) tier.order.miss(hash, now_s);
      continue;
    }
    if (!known) {
      create(hash, parent, static_cast<int64_t>(begin), static_cast<int32_t>(n));
      for (const Id id : std::span(ends).first(n - 1)) {  // it takes the place of shorter ones
        if (objects_.contains(id)) leave_all(id, now_s);
      }
    }
    for (size_t t = tiers_.size(); t-- > 0;) {
      const auto found = objects_.find(hash);
      if (found != objects_.end() && !in(found->second.tiers, t)) enter(t, hash, now_s);
    }
    room = objects_.contains(hash);
    parent = hash;
  }
}

void SavedChains::lift(std::span<const int32_t> tokens, int64_t upto, double now_s) {
  int64_t end = 0;
  for (const Link& link : walk(tokens)) {
    end += link.tokens;
    if (end > upto) return;
    const auto found = objects_.find(link.id);
    if (found == objects_.end()) return;  // the ones before it pushed it out
    if (!in(found->second.tiers, 0)) enter(0, link.id, now_s);
  }
}

void SavedChains::cut_front(std::span<const int32_t> tokens, int64_t drop, double now_s) {
  struct Piece {
    int64_t begin = 0;
    Link link;
    uint8_t tiers = 0;
  };
  std::vector<Piece> pieces;
  int64_t end = 0;
  for (const Link& link : walk(tokens)) {
    pieces.push_back({end, link, objects_.at(link.id).tiers});
    end += link.tokens;
  }
  for (auto piece = pieces.rbegin(); piece != pieces.rend(); ++piece) {
    if (objects_.at(piece->link.id).children > 0) break;  // other chains continue it
    leave_all(piece->link.id, now_s);
  }
  uint64_t hash = kSeed;
  Id parent = 0;
  for (const Piece& piece : pieces) {
    if (piece.begin < drop) continue;
    for (int32_t i = 0; i < piece.link.tokens; ++i) {
      hash = extended(hash, tokens[static_cast<size_t>(piece.begin + i)]);
    }
    if (!objects_.contains(hash)) create(hash, parent, piece.begin - drop, piece.link.tokens);
    for (size_t t = tiers_.size(); t-- > 0;) {
      const auto found = objects_.find(hash);
      if (found == objects_.end()) return;  // no room, nor for what follows
      if (in(piece.tiers, t) && !in(found->second.tiers, t)) enter(t, hash, now_s);
    }
    parent = hash;
  }
}

void SavedChains::want(uint64_t ticket, std::span<const int32_t> tokens) {
  if (std::none_of(tiers_.begin(), tiers_.end(), [&](const Tier& t) { return limited(t); })) return;
  std::vector<Id> ids;
  for (const Link& link : walk(tokens)) ids.push_back(link.id);
  mark(wanted_.add(ticket, std::move(ids)));
}

void SavedChains::dispatch(uint64_t ticket) { mark(wanted_.dispatch(ticket)); }

void SavedChains::unwant(uint64_t ticket) { mark(wanted_.remove(ticket)); }

void SavedChains::mark(std::span<const Id> changed) {
  for (Tier& tier : tiers_) tier.order.set_demands(changed, wanted_);
}

void SavedChains::create(Id id, Id parent, int64_t first, int32_t tokens) {
  objects_[id] = {.parent = parent, .tokens = tokens, .first = first};
  if (const auto found = objects_.find(parent); found != objects_.end()) ++found->second.children;
}

double SavedChains::room(const Tier& tier, const Object& object) const {
  const int64_t whole = tier.setup.chain_tokens;
  if (whole == 0) return bytes_per_token_ * object.tokens;
  return object.parent == 0 ? bytes_per_token_ * static_cast<double>(whole) : 0;
}

void SavedChains::enter(size_t tier, Id id, double now_s) {
  Tier& t = tiers_[tier];
  Object& object = objects_.at(id);
  object.tiers |= bit(tier);
  const double before = t.used;
  t.used += room(t, object);
  if (!limited(t)) return;
  const std::optional<Id> parent = object.parent == 0 ? std::nullopt : std::optional(object.parent);
  t.order.insert(id, parent, now_s,
                 {.bytes = bytes_per_token_ * object.tokens,
                  .miss_s = miss_s_(tier, object.first, object.tokens)});
  const Id entered[] = {id};
  t.order.set_demands(entered, wanted_);
  const double leaving =
      policy::bytes_to_evict(t.setup.policy, before, room(t, object), t.setup.capacity_bytes);
  for (const double goal = t.used - leaving; t.used > goal;) {
    const std::vector<Id> victims = t.order.victims(now_s);
    if (victims.empty()) return;  // one chain fills the tier
    for (const Id victim : victims) {
      leave(tier, victim, now_s);
      ++t.evictions;
    }
    if (!t.order.contains(id)) return;
  }
}

void SavedChains::leave(size_t tier, Id id, double now_s) {
  Tier& t = tiers_[tier];
  const auto found = objects_.find(id);
  Object& object = found->second;
  t.order.erase(id, now_s);
  t.used -= room(t, object);
  object.tiers &= static_cast<uint8_t>(~bit(tier));
  if (object.tiers != 0) return;
  if (const auto parent = objects_.find(object.parent); parent != objects_.end()) {
    --parent->second.children;
  }
  objects_.erase(found);
}

void SavedChains::leave_all(Id id, double now_s) {
  const uint8_t tiers = objects_.at(id).tiers;
  for (size_t t = 0; t < tiers_.size(); ++t) {
    if (in(tiers, t)) leave(t, id, now_s);
  }
}

}  // namespace hcache::sim
