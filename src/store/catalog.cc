#include "catalog.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/log.h"
#include "bytes.h"
#include "catalog_connection.h"

namespace hcache::store {
namespace {

constexpr int kBusyTimeoutMs = 10'000;
constexpr int kScanRows = 256;
constexpr const char* kSchema = R"sql(
CREATE TABLE meta(key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE disk(disk INTEGER PRIMARY KEY, created_ns INTEGER NOT NULL);
CREATE TABLE chunk(
  seq INTEGER PRIMARY KEY,
  id BLOB NOT NULL,
  parent BLOB NOT NULL,
  first_token INTEGER NOT NULL,
  position INTEGER NOT NULL,
  last_used INTEGER NOT NULL,
  body BLOB NOT NULL,
  record INTEGER NOT NULL DEFAULT 0);
CREATE UNIQUE INDEX chunk_by_id ON chunk(id);
CREATE INDEX chunk_by_parent ON chunk(parent, first_token);
CREATE INDEX chunk_by_use ON chunk(last_used, position DESC);
CREATE TABLE session(
  name TEXT PRIMARY KEY,
  body BLOB NOT NULL,
  record INTEGER NOT NULL DEFAULT 0);
)sql";
// From format 1, which has no records.
constexpr const char* kAddRecords = R"sql(
ALTER TABLE chunk ADD COLUMN record INTEGER NOT NULL DEFAULT 0;
ALTER TABLE session ADD COLUMN record INTEGER NOT NULL DEFAULT 0;
)sql";

// `meta`'s second account of the format and the store's id: SQLite's own header has no check.
std::string encode_header(std::uint32_t format, const StoreId& store) {
  Writer w;
  w.number(format).id(store);
  const std::uint64_t check = checksum(std::as_bytes(std::span<const char>(w.out())));
  w.number(check);
  return std::move(w.out());
}

Code code_of(int rc) {
  switch (rc & 0xff) {
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
    case SQLITE_FORMAT:
    case SQLITE_SCHEMA:
    case SQLITE_ERROR:  // our SQL is fixed: it fails only on a schema that is not ours
    case SQLITE_MISMATCH:
    case SQLITE_TOOBIG: return Code::kDataLoss;
    case SQLITE_FULL: return Code::kResourceExhausted;
    case SQLITE_READONLY:
    case SQLITE_PERM: return Code::kPermissionDenied;
    case SQLITE_NOMEM:
    case SQLITE_MISUSE:
    case SQLITE_INTERNAL:
    case SQLITE_CONSTRAINT: return Code::kInternal;
    default: return Code::kUnavailable;
  }
}

}  // namespace

Catalog::~Catalog() = default;

Status Catalog::error(const Connection& c, const char* what) const {
  c.mutex.assert_held();
  const int rc = sqlite3_extended_errcode(c.db);
  return {code_of(rc), fmt::format("catalog {}: cannot {}: {}", path_, what, sqlite3_errmsg(c.db))};
}

Result<std::unique_ptr<Catalog::Connection>> Catalog::connect(const CatalogOptions& options,
                                                              bool read_only) const {
  auto c = std::make_unique<Connection>();
  const MutexLock lock(c->mutex);
  const int flags =
      (read_only ? SQLITE_OPEN_READONLY : SQLITE_OPEN_READWRITE) | SQLITE_OPEN_NOMUTEX;
  const int rc = sqlite3_open_v2(path_.c_str(), &c->db, flags,
                                 options.vfs.empty() ? nullptr : options.vfs.c_str());
  if (c->db == nullptr) return internal_error("out of memory for the catalog");
  if (rc != SQLITE_OK) return error(*c, "open it");
  sqlite3_extended_result_codes(c->db, 1);
  sqlite3_busy_timeout(c->db, kBusyTimeoutMs);
  sqlite3_db_config(c->db, SQLITE_DBCONFIG_DEFENSIVE, 1, nullptr);
  sqlite3_db_config(c->db, SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0, nullptr);
  if (!options.vfs.empty() && c->exec("PRAGMA locking_mode=EXCLUSIVE") != SQLITE_OK) {
    return error(*c, "lock it");
  }
  if (c->exec("PRAGMA cell_size_check=ON") != SQLITE_OK) return error(*c, "configure it");
  if (!read_only) {
    // A small log: it counts as disk use, and every commit syncs it anyway.
    if (c->exec("PRAGMA journal_mode=WAL") != SQLITE_OK ||
        c->exec("PRAGMA synchronous=FULL") != SQLITE_OK ||
        c->exec("PRAGMA wal_autocheckpoint=128") != SQLITE_OK ||
        c->exec("PRAGMA journal_size_limit=524288") != SQLITE_OK) {
      return error(*c, "configure it");
    }
  }
  return c;
}

Result<std::unique_ptr<Catalog>> Catalog::open(Env& env, const CatalogOptions& options) {
  std::unique_ptr<Catalog> catalog(new Catalog);
  catalog->path_ = join_path(options.dir, options.file);
  catalog->seal_ = options.seal;
  HCACHE_ASSIGN_OR_RETURN(const FileInfo info, env.file_info(catalog->path_));
  if (options.read_only) {
    if (!info.exists || info.size == 0) {
      return not_found(fmt::format("there is no store in {}", options.dir));
    }
    HCACHE_ASSIGN_OR_RETURN(catalog->reader_, catalog->connect(options, true));
    HCACHE_RETURN_IF_ERROR(catalog->read_header());
    return catalog;
  }
  if (!info.exists) {  // made here so that its mode, which SQLite's other files take over, is 0600
    OpenOptions create;
    create.write = true;
    create.create = true;
    HCACHE_ASSIGN_OR_RETURN(const auto file, env.open_file(catalog->path_, create));
    HCACHE_RETURN_IF_ERROR(env.sync_dir(options.dir));
  }
  HCACHE_ASSIGN_OR_RETURN(catalog->writer_, catalog->connect(options, false));
  HCACHE_RETURN_IF_ERROR(catalog->create(env, options));
  HCACHE_RETURN_IF_ERROR(catalog->read_header());
  HCACHE_RETURN_IF_ERROR(catalog->upgrade());
  if (options.vfs.empty()) {
    HCACHE_ASSIGN_OR_RETURN(catalog->reader_, catalog->connect(options, true));
  }
  return catalog;
}

Result<std::unique_ptr<Catalog>> Catalog::open_damaged(const CatalogOptions& options) {
  std::unique_ptr<Catalog> catalog(new Catalog);
  catalog->path_ = join_path(options.dir, options.file);
  catalog->seal_ = options.seal;
  HCACHE_ASSIGN_OR_RETURN(catalog->writer_, catalog->connect(options, false));
  const MutexLock lock(catalog->writer_->mutex);
  // What is set aside stays as it was found.
  sqlite3_db_config(catalog->writer_->db, SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1, nullptr);
  return catalog;
}

// Makes the schema unless there is one. A crash leaves all of it or none.
Status Catalog::create(Env& env, const CatalogOptions& options) {
  Connection& c = *writer_;
  MutexLock lock(c.mutex);
  std::int64_t version = 0;
  std::int64_t tables = 0;
  {
    Statement get_version(c, "PRAGMA user_version");
    if (!get_version.step()) return error(c, "read its version");
    version = get_version.number(0);
  }
  {
    Statement get_tables(c, "SELECT count(*) FROM sqlite_master");
    if (!get_tables.step()) return error(c, "read its schema");
    tables = get_tables.number(0);
  }
  if (version != 0 || tables != 0) return {};
  if (!options.create) return data_loss(fmt::format("catalog {} is empty", path_));
  StoreId id = options.store_id;
  for (std::size_t i = 0; options.store_id.is_zero() && i < id.bytes.size(); i += 8) {
    const std::uint64_t random = env.random_u64();
    std::memcpy(&id.bytes[i], &random, 8);
  }
  id = seal_.new_store_id(id);
  format_ = seal_.on() ? kSealedFormatVersion : kFormatVersion;
  lock.unlock();
  return change_schema(kSchema, [&] {
    c.mutex.assert_held();
    Statement put(c, "INSERT INTO meta(key, value) VALUES('store', ?1)");
    if (!put.bind_id(id).run()) return false;
    store_id_ = id;
    return write_open_mark(c);
  });
}

Status Catalog::upgrade() {
  const std::uint32_t wanted = seal_.on() ? kSealedFormatVersion : kFormatVersion;
  const std::uint32_t found = std::exchange(format_, wanted);
  if (found == wanted) return {};
  if (found >= kFirstFormatWithRecords) return change_schema("", [] { return true; });
  // As after a crash: every row lacks its record.
  return change_schema(kAddRecords, [this] { return write_open_mark(*writer_); });
}

// Runs the statements and writes the headers, all or nothing.
Status Catalog::change_schema(const char* sql, const std::function<bool()>& more) {
  Connection& c = *writer_;
  const std::string header =
      fmt::format("PRAGMA application_id={}; PRAGMA user_version={};", kApplicationId, format_);
  MutexLock lock(c.mutex);
  if (c.exec("BEGIN IMMEDIATE") != SQLITE_OK) return error(c, "create its schema");
  bool ok = c.exec(sql) == SQLITE_OK && c.exec(header.c_str()) == SQLITE_OK && more();
  if (ok) {
    Statement put(c, "INSERT OR REPLACE INTO meta(key, value) VALUES('header', ?1)");
    const std::string text = encode_header(format_, store_id_);
    ok = put.bind_blob(text).run();
  }
  if (ok) ok = c.exec("COMMIT") == SQLITE_OK;
  if (ok) {
    lock.unlock();
    return checkpoint();  // what it is must not be lost with a log
  }
  const Status status = error(c, "create its schema");
  c.exec("ROLLBACK");
  return status;
}

Status Catalog::read_header() {
  Connection& c = reader();
  const MutexLock lock(c.mutex);
  std::int64_t application = 0;
  std::int64_t version = 0;
  {
    Statement s(c, "PRAGMA application_id");
    if (!s.step()) return error(c, "read its header");
    application = s.number(0);
  }
  {
    Statement s(c, "PRAGMA user_version");
    if (!s.step()) return error(c, "read its header");
    version = s.number(0);
  }
  if (application != kApplicationId) {
    return data_loss(fmt::format("{} is not the catalog of a store (or is damaged)", path_));
  }
  Statement s(c, "SELECT value FROM meta WHERE key = 'store'");
  const bool row = s.step();
  if (s.failed()) return error(c, "read the store's id");
  const bool has_id = row && s.id(0, &store_id_);
  Statement h(c, "SELECT value FROM meta WHERE key = 'header'");
  const std::string header(h.step() ? h.bytes(0) : std::string_view());
  if (h.failed()) return error(c, "read its header");
  format_ = static_cast<std::uint32_t>(version);
  // The first format has no such row; in any other the two accounts agree.
  const bool agrees = version == 1 ? header.empty() : header == encode_header(format_, store_id_);
  if (!has_id || !agrees || version == 0) {
    return data_loss(fmt::format("the header of catalog {} is damaged", path_));
  }
  if (version > kSealedFormatVersion) {
    return unimplemented(fmt::format("the store of {} has format {}; this program knows {}", path_,
                                     version, kSealedFormatVersion));
  }
  return seal_.fits(store_id_, is_sealed_format(format_), path_);
}

// The row that a writer leaves behind if it dies.
bool Catalog::write_open_mark(Connection& c) {
  c.mutex.assert_held();
  Statement s(c, "INSERT OR REPLACE INTO meta(key, value) VALUES(?1, x'01')");
  return s.bind_text(kOpenKey).run();
}

Result<bool> Catalog::mark_open() {
  Connection& c = *writer_;
  const MutexLock lock(c.mutex);
  {
    Statement s(c, "SELECT 1 FROM meta WHERE key = ?1");
    const bool marked = s.bind_text(kOpenKey).step();
    if (s.failed()) return error(c, "read whether it is open");
    if (marked) return true;
  }
  if (!write_open_mark(c)) return error(c, "mark it as open");
  // In the database itself: the log may be lost with what it says.
  const int rc =
      sqlite3_wal_checkpoint_v2(c.db, nullptr, SQLITE_CHECKPOINT_PASSIVE, nullptr, nullptr);
  if (rc != SQLITE_OK && (rc & 0xff) != SQLITE_BUSY) return error(c, "mark it as open");
  return false;
}

Result<std::optional<ChunkRecord>> Catalog::find(const ChunkId& id) {
  Connection& c = reader();
  const MutexLock lock(c.mutex);
  Statement s(c, "SELECT seq, id, last_used, body FROM chunk WHERE id = ?1");
  const ChunkId hidden = seal_.hide(id);
  if (!s.bind_id(hidden).step()) {
    if (s.failed()) return error(c, "look a chunk up");
    return std::optional<ChunkRecord>();
  }
  ChunkId stored;
  if (!s.id(1, &stored) || stored != hidden) {
    return data_loss(fmt::format("catalog row of chunk {}: index and row differ", to_hex(id)));
  }
  HCACHE_ASSIGN_OR_RETURN(ChunkRecord record, decode_chunk(id, s.bytes(3), seal_));
  return std::optional<ChunkRecord>(std::move(record));
}

Result<std::vector<ChunkRecord>> Catalog::children(const ChunkId& sibling_key,
                                                   std::int32_t first_token) {
  Connection& c = reader();
  const MutexLock lock(c.mutex);
  std::vector<ChunkRecord> out;
  Statement s(c,
              "SELECT seq, id, last_used, body FROM chunk WHERE parent = ?1 AND first_token = ?2"
              " ORDER BY seq");
  s.bind_id(seal_.hide(sibling_key)).bind(seal_.hide_first_token(sibling_key, first_token));
  while (s.step()) {
    ChunkRow row = read_row(s, seal_);
    if (row.record.ok()) out.push_back(std::move(*row.record));
  }
  if (s.failed()) return error(c, "look chunks up");
  return out;
}

Result<std::optional<Session>> Catalog::find_session(std::string_view name) {
  Connection& c = reader();
  const MutexLock lock(c.mutex);
  Statement s(c, "SELECT body FROM session WHERE name = ?1");
  const std::string stored = seal_.hide_name(name);
  if (!s.bind_text(stored).step()) {
    if (s.failed()) return error(c, "look a session up");
    return std::optional<Session>();
  }
  HCACHE_ASSIGN_OR_RETURN(Session session, decode_session(stored, s.bytes(0), seal_));
  return std::optional<Session>(std::move(session));
}

Result<std::vector<std::string>> Catalog::session_names() {
  Connection& c = reader();
  const MutexLock lock(c.mutex);
  std::vector<std::string> out;
  Statement s(
      c, seal_.on() ? "SELECT name, body FROM session" : "SELECT name FROM session ORDER BY name");
  while (s.step()) {
    if (!seal_.on()) {
      out.emplace_back(s.bytes(0));
    } else if (auto session = decode_session(s.bytes(0), s.bytes(1), seal_); session.ok()) {
      out.push_back(std::move(session->name));
    } else {
      log::warn("{}", session.status().to_string());
    }
  }
  if (s.failed()) return error(c, "list sessions");
  if (seal_.on()) std::sort(out.begin(), out.end());
  return out;
}

Result<std::vector<std::uint32_t>> Catalog::disks() {
  Connection& c = reader();
  const MutexLock lock(c.mutex);
  std::vector<std::uint32_t> out;
  Statement s(c, "SELECT disk FROM disk ORDER BY disk");
  while (s.step()) {
    const std::int64_t disk = s.number(0);
    if (disk < 0 || disk >= kMaxDisks) {
      return data_loss(fmt::format("catalog {} is damaged: it names disk {}", path_, disk));
    }
    out.push_back(static_cast<std::uint32_t>(disk));
  }
  if (s.failed()) return error(c, "list disks");
  return out;
}

Result<std::unordered_map<SaltId, SaltId>> Catalog::owners() {
  Connection& c = reader();
  const MutexLock lock(c.mutex);
  std::unordered_map<SaltId, SaltId> out;
  Statement s(c, "SELECT key, value FROM meta WHERE key > 'owner:' AND key < 'owner;'");
  while (s.step()) {
    SaltId salt;
    SaltId owner;
    if (parse_id(s.bytes(0).substr(kOwnerPrefix.size()), &salt).ok() && s.id(1, &owner)) {
      out.emplace(seal_.show(salt), seal_.show(owner));
    }
  }
  if (s.failed()) return error(c, "list owners");
  return out;
}

Result<std::uint64_t> Catalog::count_sessions() {
  Connection& c = reader();
  const MutexLock lock(c.mutex);
  Statement s(c, "SELECT count(*) FROM session");
  if (!s.step()) return error(c, "count sessions");
  return static_cast<std::uint64_t>(s.number(0));
}

namespace {
RecordRef read_ref(const auto& s, int column, std::size_t body, const ChunkId& stored) {
  return {record_key(stored), RecordPlace::unpack(s.number(column)), record_bytes(0, body)};
}
}  // namespace

Status Catalog::scan(const std::function<bool(ChunkRow&&)>& visit) {
  Connection& c = reader();
  std::int64_t last = INT64_MIN;
  while (true) {
    std::vector<ChunkRow> rows;
    {
      const MutexLock lock(c.mutex);
      const bool with_records = format_ >= kFirstFormatWithRecords;
      Statement s(c, with_records ? "SELECT seq, id, last_used, body, record FROM chunk"
                                    " WHERE seq > ?1 ORDER BY seq LIMIT ?2"
                                  : "SELECT seq, id, last_used, body FROM chunk"
                                    " WHERE seq > ?1 ORDER BY seq LIMIT ?2");
      s.bind(last).bind(kScanRows);
      while (s.step()) {
        ChunkRow& row = rows.emplace_back(read_row(s, seal_));
        if (with_records) row.record_ref = read_ref(s, 4, s.bytes(3).size(), seal_.hide(row.id));
        // A damaged tree may give keys in any order; a scan must end all the same.
        if (rows.back().seq <= last) return data_loss("catalog " + path_ + ": rows out of order");
        last = rows.back().seq;
      }
      if (s.failed()) return error(c, "read chunks");
    }
    if (rows.empty()) return {};
    for (ChunkRow& row : rows) {
      if (!visit(std::move(row))) return {};
    }
  }
}

Result<std::vector<SessionRow>> Catalog::session_records() {
  Connection& c = reader();
  const MutexLock lock(c.mutex);
  std::vector<SessionRow> out;
  const bool with_records = format_ >= kFirstFormatWithRecords;
  Statement s(c, with_records ? "SELECT name, body, record FROM session ORDER BY name"
                              : "SELECT name, body FROM session ORDER BY name");
  while (s.step()) {
    SessionRow& row = out.emplace_back();
    row.name = s.bytes(0);
    if (with_records) {
      row.record_ref = {record_key(row.name), RecordPlace::unpack(s.number(2)),
                        record_bytes(row.name.size(), s.bytes(1).size())};
    }
    auto session = decode_session(row.name, s.bytes(1), seal_);
    row.status = session.status();
    if (session.ok()) row.name = std::move(session->name);
  }
  if (seal_.on()) {
    std::sort(out.begin(), out.end(),
              [](const SessionRow& a, const SessionRow& b) { return a.name < b.name; });
  }
  if (s.failed()) return error(c, "list sessions");
  return out;
}

Result<std::optional<RecordPlace>> Catalog::record_of(const ChunkId& id) {
  Connection& c = reader();
  const MutexLock lock(c.mutex);
  Statement s(c, "SELECT record FROM chunk WHERE id = ?1");
  if (s.bind_id(seal_.hide(id)).step()) return std::optional(RecordPlace::unpack(s.number(0)));
  if (s.failed()) return error(c, "look a chunk up");
  return std::optional<RecordPlace>();
}

Status Catalog::by_use(const std::function<bool(ChunkRow&&)>& visit) {
  Connection& c = reader();
  const MutexLock lock(c.mutex);
  Statement s(c, "SELECT seq, id, last_used, body FROM chunk ORDER BY last_used DESC");
  while (s.step()) {
    if (!visit(read_row(s, seal_))) return {};
  }
  if (s.failed()) return error(c, "read chunks by their use");
  return {};
}

Status Catalog::salvage_chunks(const std::function<bool(ChunkRow&&)>& visit) {
  Connection& c = reader();
  const MutexLock lock(c.mutex);
  // From both ends: what is damaged in between ends each of them.
  for (const char* sql : {"SELECT seq, id, last_used, body FROM chunk ORDER BY seq",
                          "SELECT seq, id, last_used, body FROM chunk ORDER BY seq DESC"}) {
    Statement s(c, sql);
    while (s.step()) {
      ChunkRow row = read_row(s, seal_);
      if (row.record.ok() && !visit(std::move(row))) return {};
    }
    if (!s.failed()) return {};
  }
  return error(c, "read chunks");
}

Status Catalog::salvage_sessions(const std::function<bool(Session&&)>& visit) {
  Connection& c = reader();
  const MutexLock lock(c.mutex);
  for (const char* sql : {"SELECT name, body FROM session ORDER BY rowid",
                          "SELECT name, body FROM session ORDER BY rowid DESC"}) {
    Statement s(c, sql);
    while (s.step()) {
      auto session = decode_session(s.bytes(0), s.bytes(1), seal_);
      if (session.ok() && !visit(std::move(*session))) return {};
    }
    if (!s.failed()) return {};
  }
  return error(c, "read sessions");
}

Result<std::vector<std::string>> Catalog::sqlite_check() {
  Connection& c = reader();
  const MutexLock lock(c.mutex);
  std::vector<std::string> out;
  Statement s(c, "PRAGMA integrity_check(20)");
  while (s.step()) {
    const std::string_view line = s.bytes(0);
    if (line != "ok") out.emplace_back(line);
  }
  if (s.failed()) return error(c, "check it");
  return out;
}

std::uint64_t Catalog::allocated_bytes(Env& env) const {
  std::uint64_t sum = 0;
  for (const char* suffix : {"", "-wal", "-shm"}) {
    const auto info = env.file_info(path_ + suffix);
    if (info.ok() && info->exists) sum += info->allocated_bytes;
  }
  return sum;
}

Status Catalog::checkpoint() {
  if (writer_ == nullptr) return {};
  const MutexLock lock(writer_->mutex);
  const int rc =
      sqlite3_wal_checkpoint_v2(writer_->db, nullptr, SQLITE_CHECKPOINT_TRUNCATE, nullptr, nullptr);
  // Another process may be reading from the log: then it stays for now.
  if (rc != SQLITE_OK && (rc & 0xff) != SQLITE_BUSY) return error(*writer_, "shrink its log");
  return {};
}

Status Catalog::vacuum() {
  if (writer_ == nullptr) return failed_precondition("the store is open for reading only");
  const MutexLock lock(writer_->mutex);
  if (writer_->exec("VACUUM") != SQLITE_OK) return error(*writer_, "compact it");
  return {};
}

}  // namespace hcache::store
