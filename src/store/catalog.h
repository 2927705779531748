// The catalog: which chunks and sessions exist, in one SQLite file (docs/format.md).
//
// The catalog knows nothing of files with pages, pins or quotas.
// Threading: any thread. Reads (find, children, sessions) use a connection of their own, so they do
// not wait for a writer's sync; a Transaction holds the writing connection from begin to end. With
// a foreign VFS both share one connection.
#pragma once

#include <sqlite3.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "base/sync.h"
#include "format.h"

namespace hcache::store {

struct CatalogOptions {
  std::string dir;
  std::string vfs;  // empty: SQLite's own
  bool read_only = false;
};

// A row of the chunk table. `record` failed its check if it is not ok.
struct ChunkRow {
  ChunkId id;
  std::int64_t seq = 0;
  std::int64_t last_used_ns = 0;
  Result<ChunkRecord> record;
};

class Catalog {
 public:
  // Opens or (unless read_only) creates it. not_found when there is none and read_only.
  [[nodiscard]] static Result<std::unique_ptr<Catalog>> open(Env& env,
                                                             const CatalogOptions& options);
  ~Catalog();
  Catalog(const Catalog&) = delete;
  Catalog& operator=(const Catalog&) = delete;

  [[nodiscard]] const StoreId& store_id() const { return store_id_; }
  [[nodiscard]] const std::string& path() const { return path_; }

  // ---- Reads

  // nullopt: no such row. data_loss: the row fails its check.
  [[nodiscard]] Result<std::optional<ChunkRecord>> find(const ChunkId& id);
  // Chunks with this sibling key whose first token is `first_token`; damaged rows are left out.
  [[nodiscard]] Result<std::vector<ChunkRecord>> children(const ChunkId& sibling_key,
                                                          std::int32_t first_token);
  [[nodiscard]] Result<std::optional<Session>> find_session(std::string_view name);
  [[nodiscard]] Result<std::vector<std::string>> session_names();
  [[nodiscard]] Result<std::vector<std::uint32_t>> disks();
  // Salts whose chunks another one's quota counts.
  [[nodiscard]] Result<std::unordered_map<SaltId, SaltId>> owners();
  [[nodiscard]] Result<std::uint64_t> count_sessions();
  // Rows in order of seq, without a lock held between pages of rows. `visit` returns false to stop.
  [[nodiscard]] Status scan(const std::function<bool(ChunkRow&&)>& visit);
  // SQLite's own check; one line per finding, none if all is well.
  [[nodiscard]] Result<std::vector<std::string>> sqlite_check();
  [[nodiscard]] std::uint64_t allocated_bytes(Env& env) const;

  // ---- Writes

  // Everything between begin and commit happens, or nothing. Rolls back when destroyed before.
  class Transaction {
   public:
    Transaction(Transaction&&) noexcept;
    Transaction& operator=(Transaction&&) = delete;
    ~Transaction();

    [[nodiscard]] Status insert(const ChunkRecord& record, std::int64_t last_used_ns);
    // Replaces the body of an existing chunk.
    [[nodiscard]] Status update(const ChunkRecord& record);
    [[nodiscard]] Status erase(const ChunkId& id);
    // A damaged row, whose id may be nonsense.
    [[nodiscard]] Status erase_row(std::int64_t seq);
    [[nodiscard]] Status touch(const ChunkId& id, std::int64_t last_used_ns);
    [[nodiscard]] Status put_session(const Session& session);
    // *found tells whether it was there.
    [[nodiscard]] Status erase_session(std::string_view name, bool* found);
    [[nodiscard]] Status put_owner(const SaltId& salt, const SaltId& owner);
    [[nodiscard]] Status erase_owner(const SaltId& salt);
    [[nodiscard]] Status add_disk(std::uint32_t disk, std::int64_t created_ns);
    // Chunks without followers, least recently used first (deepest first among equals), as this
    // transaction sees them. Damaged rows come with a failed record. `visit` returns false to stop
    // and must not write.
    [[nodiscard]] Status leaves_by_use(const std::function<bool(ChunkRow&&)>& visit);
    // The chunk, if just so many follow it, as this transaction sees it. Also during a visit.
    [[nodiscard]] Result<std::optional<ChunkRow>> followed_by(const ChunkId& id, std::int64_t n);
    // Whether a chunk with this parent exists, as this transaction sees it.
    [[nodiscard]] Result<bool> has_children(const ChunkId& id);
    [[nodiscard]] Status commit();

   private:
    friend class Catalog;
    explicit Transaction(Catalog& catalog);
    Catalog* catalog_;
    bool open_ = true;
  };
  // Waits for a running transaction of another thread.
  [[nodiscard]] Result<Transaction> begin();

  // Moves the log into the database and empties it.
  [[nodiscard]] Status checkpoint();
  // Rewrites the file without free pages.
  [[nodiscard]] Status vacuum();

 private:
  // A connection with its prepared statements, which are found by the address of their SQL.
  struct Connection;
  class Statement;

  Catalog() = default;
  [[nodiscard]] Status create(Env& env);
  [[nodiscard]] Status read_header();
  [[nodiscard]] Status error(const Connection& c, const char* what) const;
  [[nodiscard]] Result<std::unique_ptr<Connection>> connect(const CatalogOptions& options,
                                                            bool read_only) const;
  Connection& reader() { return reader_ ? *reader_ : *writer_; }

  std::string path_;
  StoreId store_id_;
  std::unique_ptr<Connection> writer_;  // the only connection of a read-only catalog is reader_
  std::unique_ptr<Connection> reader_;
};

}  // namespace hcache::store
