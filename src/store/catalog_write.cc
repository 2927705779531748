// The catalog's transactions.
#include <fmt/format.h>

#include "catalog_connection.h"

namespace hcache::store {
namespace {
std::string owner_key(const SaltId& salt) { return std::string(kOwnerPrefix) + to_hex(salt); }
}  // namespace

// The lock goes with the transaction, which gives it back in commit() or its destructor.
Result<Catalog::Transaction> Catalog::begin() HCACHE_NO_THREAD_SAFETY_ANALYSIS {
  if (writer_ == nullptr) return failed_precondition("the store is open for reading only");
  writer_->mutex.lock();
  if (writer_->exec("BEGIN IMMEDIATE") != SQLITE_OK) {
    const Status status = error(*writer_, "begin a transaction");
    writer_->mutex.unlock();
    return status;
  }
  return Transaction(*this);
}

Catalog::Transaction::Transaction(Catalog& catalog) : catalog_(&catalog) {}

Catalog::Transaction::Transaction(Transaction&& other) noexcept
    : catalog_(other.catalog_), open_(other.open_), erased_(std::move(other.erased_)) {
  other.open_ = false;
}

Catalog::Transaction::~Transaction() HCACHE_NO_THREAD_SAFETY_ANALYSIS {
  if (!open_) return;
  catalog_->writer_->exec("ROLLBACK");
  catalog_->writer_->mutex.unlock();
}

void Catalog::Transaction::drop_record(const RecordKey& key, std::int64_t place,
                                       std::uint64_t bytes) {
  if (place != 0) erased_.push_back({key, RecordPlace::unpack(place), bytes});
}

Status Catalog::Transaction::drop_record_of(const ChunkId& id) {
  Connection& c = *catalog_->writer_;
  c.mutex.assert_held();
  const ChunkId stored = catalog_->seal_.hide(id);
  Statement s(c, "SELECT record, length(body) FROM chunk WHERE id = ?1");
  if (s.bind_id(stored).step()) {
    drop_record(record_key(stored), s.number(0),
                record_bytes(0, static_cast<std::uint64_t>(s.number(1))));
  }
  return s.failed() ? catalog_->error(c, "look a chunk up") : Status();
}

Status Catalog::Transaction::drop_record_of(std::string_view session) {
  Connection& c = *catalog_->writer_;
  c.mutex.assert_held();
  const std::string stored = catalog_->seal_.hide_name(session);
  Statement s(c, "SELECT record, length(body) FROM session WHERE name = ?1");
  if (s.bind_text(stored).step()) {
    drop_record(record_key(stored), s.number(0),
                record_bytes(stored.size(), static_cast<std::uint64_t>(s.number(1))));
  }
  return s.failed() ? catalog_->error(c, "look a session up") : Status();
}

Status Catalog::Transaction::insert(const ChunkRecord& record, std::int64_t last_used_ns,
                                    const RecordPlace& place) {
  Connection& c = *catalog_->writer_;
  c.mutex.assert_held();
  const ChunkInfo& info = record.info;
  Statement s(c,
              "INSERT INTO chunk(id, parent, first_token, position, last_used, body, record)"
              " VALUES(?1, ?2, ?3, ?4, ?5, ?6, ?7)");
  const Seal& seal = catalog_->seal_;
  const ChunkId siblings = sibling_key(info.fingerprint, info.salt, info.parent);
  s.bind_id(seal.hide(info.id)).bind_id(seal.hide(siblings));
  s.bind(seal.hide_first_token(siblings, info.tokens.front()));
  s.bind(static_cast<std::int64_t>(info.first_position));
  if (!s.bind(last_used_ns).bind_blob(encode_chunk(record, seal)).bind(place.pack()).run()) {
    return catalog_->error(c, "add a chunk");
  }
  return {};
}

Status Catalog::Transaction::update(const ChunkRecord& record, const RecordPlace& place) {
  HCACHE_RETURN_IF_ERROR(drop_record_of(record.info.id));
  Connection& c = *catalog_->writer_;
  c.mutex.assert_held();
  Statement s(c, "UPDATE chunk SET body = ?2, record = ?3 WHERE id = ?1");
  const Seal& seal = catalog_->seal_;
  s.bind_id(seal.hide(record.info.id)).bind_blob(encode_chunk(record, seal));
  if (!s.bind(place.pack()).run()) {
    return catalog_->error(c, "change a chunk");
  }
  return {};
}

Status Catalog::Transaction::set_record(const ChunkId& id, const RecordPlace& place) {
  Connection& c = *catalog_->writer_;
  c.mutex.assert_held();
  Statement s(c, "UPDATE chunk SET record = ?2 WHERE id = ?1");
  if (!s.bind_id(catalog_->seal_.hide(id)).bind(place.pack()).run())
    return catalog_->error(c, "note a record");
  return {};
}

Status Catalog::Transaction::set_record(std::string_view session, const RecordPlace& place) {
  Connection& c = *catalog_->writer_;
  c.mutex.assert_held();
  Statement s(c, "UPDATE session SET record = ?2 WHERE name = ?1");
  if (!s.bind_text(catalog_->seal_.hide_name(session)).bind(place.pack()).run())
    return catalog_->error(c, "note a record");
  return {};
}

Status Catalog::Transaction::erase(const ChunkId& id) {
  HCACHE_RETURN_IF_ERROR(drop_record_of(id));
  Connection& c = *catalog_->writer_;
  c.mutex.assert_held();
  Statement s(c, "DELETE FROM chunk WHERE id = ?1");
  if (!s.bind_id(catalog_->seal_.hide(id)).run()) return catalog_->error(c, "remove a chunk");
  return {};
}

Status Catalog::Transaction::erase_row(std::int64_t seq) {
  Connection& c = *catalog_->writer_;
  c.mutex.assert_held();
  {
    Statement s(c, "SELECT id, record, length(body) FROM chunk WHERE seq = ?1");
    ChunkId id;
    if (s.bind(seq).step() && s.id(0, &id)) {
      drop_record(record_key(id), s.number(1),
                  record_bytes(0, static_cast<std::uint64_t>(s.number(2))));
    }
  }
  Statement s(c, "DELETE FROM chunk WHERE seq = ?1");
  if (!s.bind(seq).run()) return catalog_->error(c, "remove a damaged row");
  return {};
}

Status Catalog::Transaction::touch(const ChunkId& id, std::int64_t last_used_ns) {
  Connection& c = *catalog_->writer_;
  c.mutex.assert_held();
  Statement s(c, "UPDATE chunk SET last_used = ?2 WHERE id = ?1");
  if (!s.bind_id(catalog_->seal_.hide(id)).bind(last_used_ns).run())
    return catalog_->error(c, "mark a chunk as used");
  return {};
}

Status Catalog::Transaction::put_session(const Session& session, const RecordPlace& place) {
  HCACHE_RETURN_IF_ERROR(drop_record_of(session.name));
  Connection& c = *catalog_->writer_;
  c.mutex.assert_held();
  Statement s(c, "INSERT OR REPLACE INTO session(name, body, record) VALUES(?1, ?2, ?3)");
  const Seal& seal = catalog_->seal_;
  s.bind_text(seal.hide_name(session.name)).bind_blob(encode_session(session, seal));
  if (!s.bind(place.pack()).run()) {
    return catalog_->error(c, "save a session");
  }
  return {};
}

Status Catalog::Transaction::erase_session(std::string_view name, bool* found) {
  HCACHE_RETURN_IF_ERROR(drop_record_of(name));
  Connection& c = *catalog_->writer_;
  c.mutex.assert_held();
  Statement s(c, "DELETE FROM session WHERE name = ?1");
  if (!s.bind_text(catalog_->seal_.hide_name(name)).run())
    return catalog_->error(c, "delete a session");
  *found = sqlite3_changes(c.db) > 0;
  return {};
}

Status Catalog::Transaction::mark_closed() {
  Connection& c = *catalog_->writer_;
  c.mutex.assert_held();
  Statement s(c, "DELETE FROM meta WHERE key = ?1");
  if (!s.bind_text(kOpenKey).run()) return catalog_->error(c, "mark it as closed");
  return {};
}

Status Catalog::Transaction::put_owner(const SaltId& salt, const SaltId& owner) {
  Connection& c = *catalog_->writer_;
  c.mutex.assert_held();
  Statement s(c, "INSERT OR REPLACE INTO meta(key, value) VALUES(?1, ?2)");
  const Seal& seal = catalog_->seal_;
  if (!s.bind_text(owner_key(seal.hide(salt))).bind_id(seal.hide(owner)).run()) {
    return catalog_->error(c, "name an owner");
  }
  return {};
}

Status Catalog::Transaction::erase_owner(const SaltId& salt) {
  Connection& c = *catalog_->writer_;
  c.mutex.assert_held();
  Statement s(c, "DELETE FROM meta WHERE key = ?1");
  if (!s.bind_text(owner_key(catalog_->seal_.hide(salt))).run())
    return catalog_->error(c, "forget an owner");
  return {};
}

Status Catalog::Transaction::add_disk(std::uint32_t disk, std::int64_t created_ns) {
  Connection& c = *catalog_->writer_;
  c.mutex.assert_held();
  Statement s(c, "INSERT OR IGNORE INTO disk(disk, created_ns) VALUES(?1, ?2)");
  if (!s.bind(disk).bind(created_ns).run()) return catalog_->error(c, "add a disk");
  return {};
}

Result<std::optional<ChunkRow>> Catalog::Transaction::find(const ChunkId& id) {
  Connection& c = *catalog_->writer_;
  c.mutex.assert_held();
  Statement s(c, "SELECT seq, id, last_used, body, record FROM chunk WHERE id = ?1");
  const ChunkId stored = catalog_->seal_.hide(id);
  if (s.bind_id(stored).step()) {
    ChunkRow row = read_row(s, catalog_->seal_);
    row.record_ref = {record_key(stored), RecordPlace::unpack(s.number(4)),
                      record_bytes(0, s.bytes(3).size())};
    return std::optional(std::move(row));
  }
  if (s.failed()) return catalog_->error(c, "look a chunk up");
  return std::optional<ChunkRow>();
}

Result<std::optional<Session>> Catalog::Transaction::find_session(std::string_view name,
                                                                  RecordPlace* place) {
  Connection& c = *catalog_->writer_;
  c.mutex.assert_held();
  Statement s(c, "SELECT body, record FROM session WHERE name = ?1");
  const std::string stored = catalog_->seal_.hide_name(name);
  if (!s.bind_text(stored).step()) {
    if (s.failed()) return catalog_->error(c, "look a session up");
    return std::optional<Session>();
  }
  *place = RecordPlace::unpack(s.number(1));
  HCACHE_ASSIGN_OR_RETURN(Session session, decode_session(stored, s.bytes(0), catalog_->seal_));
  return std::optional<Session>(std::move(session));
}

Result<bool> Catalog::Transaction::has_children(const ChunkId& id) {
  Connection& c = *catalog_->writer_;
  c.mutex.assert_held();
  Statement s(c, "SELECT 1 FROM chunk WHERE parent = ?1 LIMIT 1");
  const bool found = s.bind_id(catalog_->seal_.hide(id)).step();
  if (s.failed()) return catalog_->error(c, "look for followers");
  return found;
}

Status Catalog::Transaction::commit() HCACHE_NO_THREAD_SAFETY_ANALYSIS {
  Connection& c = *catalog_->writer_;
  Status status;
  if (c.exec("COMMIT") != SQLITE_OK) {
    status = catalog_->error(c, "commit");
    c.exec("ROLLBACK");
  }
  open_ = false;
  c.mutex.unlock();
  return status;
}

}  // namespace hcache::store
