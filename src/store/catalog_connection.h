// SQLite's connection and statements as the catalog uses them. Private to catalog*.cc.
//
// Threading: a Connection's mutex is held while one of its statements is in use.
#pragma once

#include <sqlite3.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <string_view>

#include "base/sync.h"
#include "catalog.h"

namespace hcache::store {

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

// The key of `meta` under which a salt's owner stands.
inline constexpr std::string_view kOwnerPrefix = "owner:";
// Present while a writer has the store open, or since one died.
inline constexpr std::string_view kOpenKey = "open";

// Columns: seq, id, last_used, body.
template <typename Statement>
ChunkRow read_row(const Statement& s, const Seal& seal) {
  ChunkRow row;
  row.seq = s.number(0);
  row.last_used_ns = s.number(2);
  if (!s.id(1, &row.id)) {
    row.record = data_loss("catalog row " + std::to_string(row.seq) + ": no id");
    return row;
  }
  row.id = seal.show(row.id);
  row.record = decode_chunk(row.id, s.bytes(3), seal);
  return row;
}

}  // namespace hcache::store
