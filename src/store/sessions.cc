#include "sessions.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_set>

#include "base/log.h"
#include "base/tokens.h"
#include "recovery.h"

namespace hcache::store {

Status Sessions::put(const Session& session) {
  if (session.name.empty()) return invalid_argument("a session needs a name");
  Session saved = session;
  saved.updated_ns = env_.wall_ns();
  saved.created_ns = saved.updated_ns;
  const auto before = catalog_.find_session(session.name);
  if (before.ok() && before->has_value()) saved.created_ns = (*before)->created_ns;
  std::vector<Records::Draft> draft;
  draft.push_back(session_record_draft(saved, catalog_.seal()));
  const auto written = records_.write(std::move(draft));
  // The catalog has it all: a session without a record is a session.
  if (!written.ok()) {
    log::warn("session '{}' has no record: {}", saved.name, written.status().message());
  }
  const auto commit = [&]() -> Status {
    HCACHE_ASSIGN_OR_RETURN(auto transaction, catalog_.begin());
    HCACHE_RETURN_IF_ERROR(
        transaction.put_session(saved, written.ok() ? written->front().place : RecordPlace()));
    return commit_with_records(&transaction, &records_);
  };
  Status status = commit();
  if (!status.ok() && written.ok()) records_.erase(*written, false);
  records_.sync(false).ignore("the next change or close() tries again");
  return status;
}

Result<Session> Sessions::get(std::string_view name) {
  HCACHE_ASSIGN_OR_RETURN(auto session, catalog_.find_session(name));
  if (!session.has_value()) return not_found(fmt::format("there is no session '{}'", name));
  return std::move(*session);
}

Result<std::vector<SessionSummary>> Sessions::list() {
  HCACHE_ASSIGN_OR_RETURN(const auto names, catalog_.session_names());
  std::vector<SessionSummary> out;
  for (const std::string& name : names) {
    const auto session = catalog_.find_session(name);
    if (!session.ok()) {
      if (session.code() != Code::kDataLoss) return session.status();
      log::warn("{}", session.status().to_string());
      continue;
    }
    if (!session->has_value()) continue;
    const Session& s = **session;
    out.push_back({s.name, s.fingerprint, s.tokens.size(), s.created_ns, s.updated_ns});
  }
  return out;
}

Result<std::uint64_t> Sessions::shared_tokens(const Session& session) {
  std::uint64_t shared = 0;
  HCACHE_ASSIGN_OR_RETURN(const auto names, catalog_.session_names());
  for (const std::string& other_name : names) {
    if (other_name == session.name) continue;
    const auto other = catalog_.find_session(other_name);
    if (!other.ok() || !other->has_value()) continue;
    const Session& o = **other;
    if (o.fingerprint != session.fingerprint || o.salt != session.salt) continue;
    auto common = static_cast<std::uint64_t>(common_prefix(session.tokens, o.tokens));
    // One that ends inside of a chunk has its state there.
    if (common == o.tokens.size()) common = round_up(common, kChunkTokens);
    shared = std::max(shared, common);
  }
  return shared;
}

Result<std::vector<ChunkRecord>> Sessions::cut_parts(const Session& session, const Chain& chain,
                                                     std::uint64_t shared) {
  const auto tokens = std::span<const std::int32_t>(session.tokens);
  struct Place {
    ChunkId parent;
    std::uint64_t begin = 0;
  };
  std::vector<Place> places;
  std::uint64_t at = 0;
  for (const ChunkRecord& record : chain.chunks) {
    at += record.info.tokens.size();
    places.push_back({record.info.id, at});
  }
  std::vector<ChunkRecord> out;
  while (!places.empty()) {
    const Place place = places.back();
    places.pop_back();
    if (place.begin >= tokens.size()) continue;
    HCACHE_ASSIGN_OR_RETURN(auto children, catalog_.children(place.parent, tokens[place.begin]));
    for (ChunkRecord& child : children) {
      const bool same = child.info.fingerprint == session.fingerprint;
      const auto n = child.info.tokens.size();
      const bool matches = static_cast<std::uint64_t>(
                               common_prefix(child.info.tokens, tokens.subspan(place.begin))) == n;
      if (same || !matches || child.info.salt != session.salt) continue;
      places.push_back({child.info.id, place.begin + n});
      if (round_up(place.begin + n, kChunkTokens) > shared) out.push_back(std::move(child));
    }
  }
  return out;
}

Result<Sessions::OwnPart> Sessions::own_part(const Session& session) {
  OwnPart out;
  HCACHE_ASSIGN_OR_RETURN(
      Chain chain, chains_.walk(session.fingerprint, session.salt, session.tokens, Where::kDisks));
  HCACHE_ASSIGN_OR_RETURN(const std::uint64_t shared, shared_tokens(session));
  HCACHE_ASSIGN_OR_RETURN(std::vector<ChunkRecord> cut, cut_parts(session, chain, shared));
  std::unordered_set<ChunkId> on_disk;
  for (const ChunkRecord& record : chain.chunks) on_disk.insert(record.info.id);
  out.chunks = std::move(chain.chunks);
  // A last chunk that goes on differently is another chain's.
  if (!out.chunks.empty() && chain.rows.back() < out.chunks.back().info.tokens.size()) {
    out.chunks.pop_back();
  }
  std::uint64_t end = 0;
  std::size_t keep = 0;
  for (const ChunkRecord& record : out.chunks) {
    end += record.info.tokens.size();
    if (round_up(end, kChunkTokens) > shared) break;
    ++keep;
  }
  out.chunks.erase(out.chunks.begin(), out.chunks.begin() + static_cast<std::ptrdiff_t>(keep));
  for (ChunkRecord& record : cut) {
    out.ids.push_back(record.info.id);
    on_disk.insert(record.info.id);
    out.chunks.push_back(std::move(record));
  }
  ChunkId parent;
  auto left = std::span<const std::int32_t>(session.tokens);
  const auto id_of = [&](std::size_t n) {
    return chunk_id(session.fingerprint, session.salt, parent, left.first(n));
  };
  std::uint64_t at = 0;
  for (; left.size() >= kChunkTokens; at += kChunkTokens) {
    parent = id_of(kChunkTokens);
    if (at >= shared) out.ids.push_back(parent);
    left = left.subspan(kChunkTokens);
  }
  // The last token is never computed, and an answer may have been saved as it grew.
  for (std::size_t n = 1; n <= left.size() && at >= shared; ++n) out.ids.push_back(id_of(n));
  for (const ChunkId& id : out.ids) {
    if (!on_disk.contains(id)) out.remote_only.push_back(id);
  }
  return out;
}

Result<std::uint64_t> Sessions::erase(std::string_view name) {
  auto found = catalog_.find_session(name);
  if (!found.ok() && found.code() != Code::kDataLoss) return found.status();
  if (found.ok() && !found->has_value()) {
    return not_found(fmt::format("there is no session '{}'", name));
  }
  OwnPart own;
  if (found.ok()) {  // of a damaged session only the row goes
    HCACHE_ASSIGN_OR_RETURN(own, own_part(**found));
  }
  // From the end on, as long as no other chain goes through it and it is not in use.
  std::vector<ChunkRecord> victims;
  HCACHE_ASSIGN_OR_RETURN(auto transaction, catalog_.begin());
  bool existed = false;
  HCACHE_RETURN_IF_ERROR(transaction.erase_session(name, &existed));
  Status status;
  while (!own.chunks.empty() && status.ok()) {
    const auto followed = transaction.has_children(own.chunks.back().info.id);
    if (!followed.ok()) status = followed.status();
    if (!followed.ok()) break;
    if (*followed) {
      // Another chain goes through it, named by a session or not: the remote tier keeps it as well.
      std::erase(own.ids, own.chunks.back().info.id);
      own.chunks.pop_back();
      continue;
    }
    std::vector<ChunkRecord> one;
    one.push_back(std::move(own.chunks.back()));
    own.chunks.pop_back();
    pins_.mark_dying(&one);
    if (one.empty()) break;
    status = transaction.erase(one[0].info.id);
    victims.push_back(std::move(one[0]));
  }
  // Durably: what a user has deleted must not come back from its records.
  if (status.ok()) status = commit_with_records(&transaction, &records_, true);
  removal_.finish(victims, status.ok());
  HCACHE_RETURN_IF_ERROR(status);
  removal_.forget(ids_of(victims));
  if (remote_ != nullptr) {
    removal_.forget(own.remote_only);
    remote_->erase(own.ids);
  }
  return static_cast<std::uint64_t>(victims.size());
}

}  // namespace hcache::store
