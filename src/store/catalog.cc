#include "catalog.h"

#include <fmt/format.h>

#include <cstring>
#include <map>

#include "base/sync.h"

namespace hcache::store {
namespace {

constexpr const char* kFileName = "catalog.db";
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
  body BLOB NOT NULL);
CREATE UNIQUE INDEX chunk_by_id ON chunk(id);
CREATE INDEX chunk_by_parent ON chunk(parent, first_token);
CREATE INDEX chunk_by_use ON chunk(last_used, position DESC);
CREATE TABLE session(name TEXT PRIMARY KEY, body BLOB NOT NULL);
)sql";

// The key of `meta` under which a salt's owner stands.
constexpr std::string_view kOwnerPrefix = "owner:";
std::string owner_key(const SaltId& salt) { return std::string(kOwnerPrefix) + to_hex(salt); }

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

struct Catalog::Connection {
  Mutex mutex;
  sqlite3* db HCACHE_GUARDED_BY(mutex) = nullptr;
  // By the address of a literal.
  std::map<const char*, sqlite3_stmt*> statements HCACHE_GUARDED_BY(mutex);

  Connection() = default;
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  ~Connection() {
    for (const auto& [unused, statement] : statements) sqlite3_finalize(statement);
    sqlite3_close(db);
  }

  int exec(const char* sql) const HCACHE_REQUIRES(mutex) {
    return sqlite3_exec(db, sql, nullptr, nullptr, nullptr);
  }
};

// A prepared statement in use; it is reset when it goes, with the lock still held.
class Catalog::Statement {
 public:
  Statement(Connection& connection, const char* sql) HCACHE_REQUIRES(connection.mutex) {
    sqlite3_stmt*& cached = connection.statements[sql];
    if (cached == nullptr) {
      rc_ = sqlite3_prepare_v3(connection.db, sql, -1, SQLITE_PREPARE_PERSISTENT, &cached, nullptr);
    }
    statement_ = cached;
  }
  Statement(const Statement&) = delete;
  Statement& operator=(const Statement&) = delete;
  ~Statement() {
    if (statement_ == nullptr) return;
    sqlite3_reset(statement_);
    sqlite3_clear_bindings(statement_);
  }

  Statement& bind(std::int64_t value) {
    if (rc_ == SQLITE_OK) rc_ = sqlite3_bind_int64(statement_, ++bound_, value);
    return *this;
  }
  Statement& bind_text(std::string_view text) {
    if (rc_ == SQLITE_OK) {
      rc_ = sqlite3_bind_text(statement_, ++bound_, text.data(), static_cast<int>(text.size()),
                              SQLITE_TRANSIENT);
    }
    return *this;
  }
  Statement& bind_blob(std::string_view bytes) {
    if (rc_ == SQLITE_OK) {
      rc_ = sqlite3_bind_blob64(statement_, ++bound_, bytes.data(), bytes.size(), SQLITE_TRANSIENT);
    }
    return *this;
  }
  template <typename Tag>
  Statement& bind_id(const Id128<Tag>& id) {
    return bind_blob({reinterpret_cast<const char*>(id.bytes.data()), id.bytes.size()});
  }

  // True for a row, false at the end or on an error (then rc() is neither SQLITE_OK nor _DONE).
  bool step() {
    if (rc_ != SQLITE_OK && rc_ != SQLITE_ROW) return false;
    rc_ = sqlite3_step(statement_);
    return rc_ == SQLITE_ROW;
  }
  [[nodiscard]] bool failed() const {
    return rc_ != SQLITE_OK && rc_ != SQLITE_ROW && rc_ != SQLITE_DONE;
  }
  // For statements without rows.
  bool run() {
    step();
    return !failed();
  }

  [[nodiscard]] std::int64_t number(int column) const {
    return sqlite3_column_int64(statement_, column);
  }
  [[nodiscard]] std::string_view bytes(int column) const {
    const void* data = sqlite3_column_blob(statement_, column);
    const int size = sqlite3_column_bytes(statement_, column);
    if (data == nullptr || size <= 0) return {};
    return {static_cast<const char*>(data), static_cast<std::size_t>(size)};
  }
  // False unless the column has exactly an id's size.
  template <typename Id>
  bool id(int column, Id* out) const {
    const std::string_view text = bytes(column);
    if (text.size() != out->bytes.size()) return false;
    std::memcpy(out->bytes.data(), text.data(), text.size());
    return true;
  }

 private:
  sqlite3_stmt* statement_ = nullptr;
  int rc_ = SQLITE_OK;
  int bound_ = 0;
};

namespace {

// Columns: seq, id, last_used, body.
template <typename Statement>
ChunkRow read_row(const Statement& s) {
  ChunkId id;
  if (!s.id(1, &id)) {
    return {id, s.number(0), s.number(2),
            data_loss(fmt::format("catalog row {}: no id", s.number(0)))};
  }
  return {id, s.number(0), s.number(2), decode_chunk(id, s.bytes(3))};
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
  catalog->path_ = join_path(options.dir, kFileName);
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
  HCACHE_RETURN_IF_ERROR(catalog->create(env));
  HCACHE_RETURN_IF_ERROR(catalog->read_header());
  if (options.vfs.empty()) {
    HCACHE_ASSIGN_OR_RETURN(catalog->reader_, catalog->connect(options, true));
  }
  return catalog;
}

// Makes the schema unless there is one. A crash leaves all of it or none.
Status Catalog::create(Env& env) {
  Connection& c = *writer_;
  const MutexLock lock(c.mutex);
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
  StoreId id;
  for (std::size_t i = 0; i < id.bytes.size(); i += 8) {
    const std::uint64_t random = env.random_u64();
    std::memcpy(&id.bytes[i], &random, 8);
  }
  const std::string header = fmt::format("PRAGMA application_id={}; PRAGMA user_version={};",
                                         kApplicationId, kFormatVersion);
  if (c.exec("BEGIN IMMEDIATE") != SQLITE_OK) return error(c, "create its schema");
  bool ok = c.exec(kSchema) == SQLITE_OK && c.exec(header.c_str()) == SQLITE_OK;
  if (ok) {
    Statement put(c, "INSERT INTO meta(key, value) VALUES('store', ?1)");
    ok = put.bind_id(id).run();
  }
  if (ok) ok = c.exec("COMMIT") == SQLITE_OK;
  if (ok) return {};
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
  if (version != kFormatVersion) {
    return unimplemented(fmt::format("the store of {} has format {}; this program knows {}", path_,
                                     version, kFormatVersion));
  }
  Statement s(c, "SELECT value FROM meta WHERE key = 'store'");
  const bool row = s.step();
  if (s.failed()) return error(c, "read the store's id");
  if (!row || !s.id(0, &store_id_)) {
    return data_loss(fmt::format("catalog {} is damaged: it has no store id", path_));
  }
  return {};
}

Result<std::optional<ChunkRecord>> Catalog::find(const ChunkId& id) {
  Connection& c = reader();
  const MutexLock lock(c.mutex);
  Statement s(c, "SELECT seq, id, last_used, body FROM chunk WHERE id = ?1");
  if (!s.bind_id(id).step()) {
    if (s.failed()) return error(c, "look a chunk up");
    return std::optional<ChunkRecord>();
  }
  ChunkId stored;
  if (!s.id(1, &stored) || stored != id) {
    return data_loss(fmt::format("catalog row of chunk {}: index and row differ", to_hex(id)));
  }
  HCACHE_ASSIGN_OR_RETURN(ChunkRecord record, decode_chunk(id, s.bytes(3)));
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
  s.bind_id(sibling_key).bind(first_token);
  while (s.step()) {
    ChunkRow row = read_row(s);
    if (row.record.ok()) out.push_back(std::move(*row.record));
  }
  if (s.failed()) return error(c, "look chunks up");
  return out;
}

Result<std::optional<Session>> Catalog::find_session(std::string_view name) {
  Connection& c = reader();
  const MutexLock lock(c.mutex);
  Statement s(c, "SELECT body FROM session WHERE name = ?1");
  if (!s.bind_text(name).step()) {
    if (s.failed()) return error(c, "look a session up");
    return std::optional<Session>();
  }
  HCACHE_ASSIGN_OR_RETURN(Session session, decode_session(name, s.bytes(0)));
  return std::optional<Session>(std::move(session));
}

Result<std::vector<std::string>> Catalog::session_names() {
  Connection& c = reader();
  const MutexLock lock(c.mutex);
  std::vector<std::string> out;
  Statement s(c, "SELECT name FROM session ORDER BY name");
  while (s.step()) out.emplace_back(s.bytes(0));
  if (s.failed()) return error(c, "list sessions");
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
      out.emplace(salt, owner);
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

Status Catalog::scan(const std::function<bool(ChunkRow&&)>& visit) {
  Connection& c = reader();
  std::int64_t last = INT64_MIN;
  while (true) {
    std::vector<ChunkRow> rows;
    {
      const MutexLock lock(c.mutex);
      Statement s(
          c, "SELECT seq, id, last_used, body FROM chunk WHERE seq > ?1 ORDER BY seq LIMIT ?2");
      s.bind(last).bind(kScanRows);
      while (s.step()) {
        rows.push_back(read_row(s));
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
    : catalog_(other.catalog_), open_(other.open_) {
  other.open_ = false;
}

Catalog::Transaction::~Transaction() HCACHE_NO_THREAD_SAFETY_ANALYSIS {
  if (!open_) return;
  catalog_->writer_->exec("ROLLBACK");
  catalog_->writer_->mutex.unlock();
}

Status Catalog::Transaction::insert(const ChunkRecord& record, std::int64_t last_used_ns) {
  Connection& c = *catalog_->writer_;
  c.mutex.assert_held();
  const ChunkInfo& info = record.info;
  Statement s(c,
              "INSERT INTO chunk(id, parent, first_token, position, last_used, body)"
              " VALUES(?1, ?2, ?3, ?4, ?5, ?6)");
  s.bind_id(info.id).bind_id(sibling_key(info.fingerprint, info.salt, info.parent));
  s.bind(info.tokens.front()).bind(static_cast<std::int64_t>(info.first_position));
  if (!s.bind(last_used_ns).bind_blob(encode_chunk(record)).run()) {
    return catalog_->error(c, "add a chunk");
  }
  return {};
}

Status Catalog::Transaction::update(const ChunkRecord& record) {
  Connection& c = *catalog_->writer_;
  c.mutex.assert_held();
  Statement s(c, "UPDATE chunk SET body = ?2 WHERE id = ?1");
  if (!s.bind_id(record.info.id).bind_blob(encode_chunk(record)).run()) {
    return catalog_->error(c, "change a chunk");
  }
  return {};
}

Status Catalog::Transaction::erase(const ChunkId& id) {
  Connection& c = *catalog_->writer_;
  c.mutex.assert_held();
  Statement s(c, "DELETE FROM chunk WHERE id = ?1");
  if (!s.bind_id(id).run()) return catalog_->error(c, "remove a chunk");
  return {};
}

Status Catalog::Transaction::erase_row(std::int64_t seq) {
  Connection& c = *catalog_->writer_;
  c.mutex.assert_held();
  Statement s(c, "DELETE FROM chunk WHERE seq = ?1");
  if (!s.bind(seq).run()) return catalog_->error(c, "remove a damaged row");
  return {};
}

Status Catalog::Transaction::touch(const ChunkId& id, std::int64_t last_used_ns) {
  Connection& c = *catalog_->writer_;
  c.mutex.assert_held();
  Statement s(c, "UPDATE chunk SET last_used = ?2 WHERE id = ?1");
  if (!s.bind_id(id).bind(last_used_ns).run()) return catalog_->error(c, "mark a chunk as used");
  return {};
}

Status Catalog::Transaction::put_session(const Session& session) {
  Connection& c = *catalog_->writer_;
  c.mutex.assert_held();
  Statement s(c, "INSERT OR REPLACE INTO session(name, body) VALUES(?1, ?2)");
  if (!s.bind_text(session.name).bind_blob(encode_session(session)).run()) {
    return catalog_->error(c, "save a session");
  }
  return {};
}

Status Catalog::Transaction::erase_session(std::string_view name, bool* found) {
  Connection& c = *catalog_->writer_;
  c.mutex.assert_held();
  Statement s(c, "DELETE FROM session WHERE name = ?1");
  if (!s.bind_text(name).run()) return catalog_->error(c, "delete a session");
  *found = sqlite3_changes(c.db) > 0;
  return {};
}

Status Catalog::Transaction::put_owner(const SaltId& salt, const SaltId& owner) {
  Connection& c = *catalog_->writer_;
  c.mutex.assert_held();
  Statement s(c, "INSERT OR REPLACE INTO meta(key, value) VALUES(?1, ?2)");
  if (!s.bind_text(owner_key(salt)).bind_id(owner).run())
    return catalog_->error(c, "name an owner");
  return {};
}

Status Catalog::Transaction::erase_owner(const SaltId& salt) {
  Connection& c = *catalog_->writer_;
  c.mutex.assert_held();
  Statement s(c, "DELETE FROM meta WHERE key = ?1");
  if (!s.bind_text(owner_key(salt)).run()) return catalog_->error(c, "forget an owner");
  return {};
}

Status Catalog::Transaction::add_disk(std::uint32_t disk, std::int64_t created_ns) {
  Connection& c = *catalog_->writer_;
  c.mutex.assert_held();
  Statement s(c, "INSERT OR IGNORE INTO disk(disk, created_ns) VALUES(?1, ?2)");
  if (!s.bind(disk).bind(created_ns).run()) return catalog_->error(c, "add a disk");
  return {};
}

Status Catalog::Transaction::leaves_by_use(const std::function<bool(ChunkRow&&)>& visit) {
  Connection& c = *catalog_->writer_;
  c.mutex.assert_held();
  Statement s(c,
              "SELECT seq, id, last_used, body FROM chunk AS c"
              " WHERE NOT EXISTS (SELECT 1 FROM chunk AS d WHERE d.parent = c.id)"
              " ORDER BY last_used, position DESC");
  while (s.step()) {
    if (!visit(read_row(s))) return {};
  }
  if (s.failed()) return catalog_->error(c, "find unused chunks");
  return {};
}

Result<std::optional<ChunkRow>> Catalog::Transaction::followed_by(const ChunkId& id,
                                                                  std::int64_t n) {
  Connection& c = *catalog_->writer_;
  c.mutex.assert_held();
  Statement s(c,
              "SELECT seq, id, last_used, body FROM chunk AS c WHERE id = ?1"
              " AND (SELECT count(*) FROM chunk AS d WHERE d.parent = c.id) = ?2");
  if (s.bind_id(id).bind(n).step()) return std::optional<ChunkRow>(read_row(s));
  if (s.failed()) return catalog_->error(c, "count followers");
  return std::optional<ChunkRow>();
}

Result<bool> Catalog::Transaction::has_children(const ChunkId& id) {
  Connection& c = *catalog_->writer_;
  c.mutex.assert_held();
  Statement s(c, "SELECT 1 FROM chunk WHERE parent = ?1 LIMIT 1");
  const bool found = s.bind_id(id).step();
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
