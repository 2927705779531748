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
#include "record_file.h"
#include "seal.h"

namespace hcache::store {

inline constexpr const char* kCatalogFileName = "catalog.db";

struct CatalogOptions {
  std::string dir;
  std::string file = kCatalogFileName;
  StoreId store_id;    // of a new catalog; zero: one made at random
  bool create = true;  // false: there must be one
  std::string vfs;     // empty: SQLite's own
  bool read_only = false;
  Seal seal;  // of the rows; a store has one from the beginning, or never
};

// A row of the chunk table. `record` failed its check if it is not ok.
struct ChunkRow {
  ChunkId id;
  std::int64_t seq = 0;
  std::int64_t last_used_ns = 0;
  Result<ChunkRecord> record = internal_error("not read");
  RecordRef record_ref;  // its place is none where there is none; filled by scan()
};

struct SessionRow {
  std::string name;  // of a damaged one: under which it stands there
  Status status;     // not ok: it fails its check
  RecordRef record_ref;
};

class Catalog {
 public:
  // Opens or (unless read_only) creates it. not_found when there is none and read_only.
  // failed_precondition: it was made with another key, or with none.
  [[nodiscard]] static Result<std::unique_ptr<Catalog>> open(Env& env,
                                                             const CatalogOptions& options);
  // A catalog of which as much as possible is to be read: only the functions below that say so.
  [[nodiscard]] static Result<std::unique_ptr<Catalog>> open_damaged(const CatalogOptions& options);
  ~Catalog();
  Catalog(const Catalog&) = delete;
  Catalog& operator=(const Catalog&) = delete;

  [[nodiscard]] const StoreId& store_id() const { return store_id_; }
  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] const Seal& seal() const { return seal_; }
  // Of the store: kFormatVersion or kSealedFormatVersion; only a reader sees an older one.
  [[nodiscard]] std::uint32_t format() const { return format_; }

  // ---- Reads

  // nullopt: no such row. data_loss: the row fails its check.
  [[nodiscard]] Result<std::optional<ChunkRecord>> find(const ChunkId& id);
  // Chunks with this sibling key whose first token is `first_token`; damaged rows are left out.
  [[nodiscard]] Result<std::vector<ChunkRecord>> children(const ChunkId& sibling_key,
                                                          std::int32_t first_token);
  [[nodiscard]] Result<std::optional<Session>> find_session(std::string_view name);
  // In an encrypted store those of intact rows alone: the others' can't be read.
  [[nodiscard]] Result<std::vector<std::string>> session_names();
  [[nodiscard]] Result<std::vector<std::uint32_t>> disks();
  // Salts whose chunks another one's quota counts.
  [[nodiscard]] Result<std::unordered_map<SaltId, SaltId>> owners();
  [[nodiscard]] Result<std::uint64_t> count_sessions();
  // Rows in order of seq, without a lock held between pages of rows. `visit` returns false to stop.
  [[nodiscard]] Status scan(const std::function<bool(ChunkRow&&)>& visit);
  // Where the record of a chunk lies; nullopt: no such chunk.
  [[nodiscard]] Result<std::optional<RecordPlace>> record_of(const ChunkId& id);
  [[nodiscard]] Result<std::vector<SessionRow>> session_records();
  // Rows, the most recently used first. `visit` returns false to stop and must not use the catalog.
  [[nodiscard]] Status by_use(const std::function<bool(ChunkRow&&)>& visit);
  // Intact rows, as many as can be read; some may come twice. Also of a damaged catalog. The status
  // says what ended it.
  [[nodiscard]] Status salvage_chunks(const std::function<bool(ChunkRow&&)>& visit);
  [[nodiscard]] Status salvage_sessions(const std::function<bool(Session&&)>& visit);
  // SQLite's own check; one line per finding, none if all is well.
  [[nodiscard]] Result<std::vector<std::string>> sqlite_check();
  [[nodiscard]] std::uint64_t allocated_bytes(Env& env) const;

  // ---- Writes

  // Marks the catalog as open, durably, and returns whether it was: then its last writer died, or
  // the catalog is new. Transaction::mark_closed() ends it.
  [[nodiscard]] Result<bool> mark_open();

  // Everything between begin and commit happens, or nothing. Rolls back when destroyed before.
  class Transaction {
   public:
    Transaction(Transaction&&) noexcept;
    Transaction& operator=(Transaction&&) = delete;
    ~Transaction();

    [[nodiscard]] Status insert(const ChunkRecord& record, std::int64_t last_used_ns,
                                const RecordPlace& place);
    // Replaces the body of an existing chunk and says where its record lies now.
    [[nodiscard]] Status update(const ChunkRecord& record, const RecordPlace& place);
    // The same of the record alone, which erased() does not get then.
    [[nodiscard]] Status set_record(const ChunkId& id, const RecordPlace& place);
    [[nodiscard]] Status set_record(std::string_view session, const RecordPlace& place);
    [[nodiscard]] Status erase(const ChunkId& id);
    // A damaged row, whose id may be nonsense.
    [[nodiscard]] Status erase_row(std::int64_t seq);
    [[nodiscard]] Status touch(const ChunkId& id, std::int64_t last_used_ns);
    [[nodiscard]] Status put_session(const Session& session, const RecordPlace& place);
    // *found tells whether it was there.
    [[nodiscard]] Status erase_session(std::string_view name, bool* found);
    [[nodiscard]] Status put_owner(const SaltId& salt, const SaltId& owner);
    [[nodiscard]] Status erase_owner(const SaltId& salt);
    [[nodiscard]] Status add_disk(std::uint32_t disk, std::int64_t created_ns);
    // A row, with its record_ref, as this transaction sees it.
    [[nodiscard]] Result<std::optional<ChunkRow>> find(const ChunkId& id);
    [[nodiscard]] Result<std::optional<Session>> find_session(std::string_view name,
                                                              RecordPlace* place);
    // Whether a chunk with this parent exists, as this transaction sees it.
    [[nodiscard]] Result<bool> has_children(const ChunkId& id);
    // Removes the mark of mark_open().
    [[nodiscard]] Status mark_closed();
    // Records of rows that this transaction has removed or replaced.
    [[nodiscard]] const std::vector<RecordRef>& erased() const { return erased_; }
    [[nodiscard]] Status commit();

   private:
    friend class Catalog;
    explicit Transaction(Catalog& catalog);
    // Keeps the record of a row for erased().
    void drop_record(const RecordKey& key, std::int64_t place, std::uint64_t bytes);
    // The same for the row of a chunk that is about to be changed.
    [[nodiscard]] Status drop_record_of(const ChunkId& id);
    [[nodiscard]] Status drop_record_of(std::string_view session);
    Catalog* catalog_;
    bool open_ = true;
    std::vector<RecordRef> erased_;
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
  [[nodiscard]] Status create(Env& env, const CatalogOptions& options);
  [[nodiscard]] Status upgrade();
  // The connection's mutex is held.
  [[nodiscard]] static bool write_open_mark(Connection& c);
  [[nodiscard]] Status change_schema(const char* sql, const std::function<bool()>& more);
  [[nodiscard]] Status read_header();
  [[nodiscard]] Status error(const Connection& c, const char* what) const;
  [[nodiscard]] Result<std::unique_ptr<Connection>> connect(const CatalogOptions& options,
                                                            bool read_only) const;
  Connection& reader() { return reader_ ? *reader_ : *writer_; }

  std::string path_;
  StoreId store_id_;
  Seal seal_;
  std::uint32_t format_ = kFormatVersion;
  std::unique_ptr<Connection> writer_;  // the only connection of a read-only catalog is reader_
  std::unique_ptr<Connection> reader_;
};

}  // namespace hcache::store
