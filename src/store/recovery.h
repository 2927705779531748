// Making the catalog whole again: from its own rows where it can be read, from the records where
// not.
//
// Two cases. A catalog that is damaged or missing is made anew and the old file set aside. A
// catalog whose last writer died may lack what its lost log said: then the records are compared
// with it, and puts that it does not know of are taken in where every page of theirs is intact.
// Threading: one thread (the store's writer, while it opens).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/env.h"
#include "catalog.h"
#include "disks.h"
#include "owners.h"
#include "records.h"
#include "segments.h"

namespace hcache::store {

inline constexpr const char* kDamagedCatalogName = "catalog.db.damaged";
inline constexpr const char* kNewCatalogName = "catalog.db.new";

// Reports to StoreOptions::recovery_progress, or to the log.
class RecoveryProgress {
 public:
  RecoveryProgress(Env& env, const StoreOptions& options) : env_(env), options_(options) {}
  // False: stop.
  [[nodiscard]] bool update(std::string_view what, std::uint64_t done, std::uint64_t all);

 private:
  Env& env_;
  const StoreOptions& options_;
  std::int64_t last_ns_ = 0;
};

// Makes the catalog of a store anew. data_loss: nothing says which store the directories are of.
// failed_precondition: a disk is missing, or the seal is not the store's. The old catalog stays
// until the new one is complete.
[[nodiscard]] Status rebuild_catalog(Env& env, const StoreOptions& options, const Seal& seal,
                                     RecoveryProgress* progress, RepairReport* report);

// Compares the records with the catalog, in this order: take_in() before anything is counted or
// written, then tidy().
class Reconciliation {
 public:
  Reconciliation(Env& env, Catalog& catalog, Segments& segments, std::vector<std::string> dirs)
      : env_(env), catalog_(catalog), segments_(segments), dirs_(std::move(dirs)) {}

  // Reads all records, and takes in puts and sessions that the catalog lacks.
  [[nodiscard]] Status take_in(RecoveryProgress* progress, RepairReport* report);
  // Whether an intact record of the catalog lies there.
  [[nodiscard]] bool seen(const RecordPlace& place) const;
  // Erases the records that the catalog does not name, and writes those that it misses.
  [[nodiscard]] Status tidy(Records* records, const Owners& owners, RepairReport* report);

 private:
  struct Unknown {
    RecordHead head;
    RecordRef ref;
  };
  [[nodiscard]] Status sort_in(const FoundRecord& record);
  // True: it is in the catalog now.
  [[nodiscard]] Result<bool> take_in_chunks(std::span<const Unknown> batch);
  [[nodiscard]] Result<bool> take_in_session(const Unknown& unknown);
  // Whether all pages are on the disks as the record says.
  [[nodiscard]] bool intact(const ChunkRecord& chunk);
  [[nodiscard]] Status write_missing_chunks(Records* records, const Owners& owners,
                                            RepairReport* report);
  [[nodiscard]] Status write_missing_sessions(Records* records, RepairReport* report);
  Env& env_;
  Catalog& catalog_;
  Segments& segments_;
  const std::vector<std::string> dirs_;
  std::vector<std::int64_t> seen_;  // packed places that the catalog names; sorted after the scan
  std::vector<Unknown> unknown_;
  std::vector<RecordRef> stale_;
};

// The record of a chunk or a session, to be written.
[[nodiscard]] Records::Draft chunk_record_draft(const ChunkRecord& chunk, const Owners& owners,
                                                const Seal& seal);
[[nodiscard]] Records::Draft session_record_draft(const Session& session, const Seal& seal);
// Erases the records that the transaction replaces or removes, and commits. `durably`: they are
// gone even if the power goes out right after.
[[nodiscard]] Status commit_with_records(Catalog::Transaction* transaction, Records* records,
                                         bool durably = false);

}  // namespace hcache::store
