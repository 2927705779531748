#include "disks.h"

#include <fmt/format.h>

#include "base/log.h"

namespace hcache::store {
namespace {

class DiskTable {
 public:
  DiskTable(Env& env, Catalog& catalog, const StoreOptions& options)
      : env_(env), catalog_(catalog), options_(options) {}

  Result<std::vector<std::string>> resolve() {
    HCACHE_ASSIGN_OR_RETURN(known_, catalog_.disks());
    for (const std::string& dir : options_.dirs) HCACHE_RETURN_IF_ERROR(read(dir));
    HCACHE_RETURN_IF_ERROR(mend());
    if (options_.read_only) {
      if (dirs_.empty()) {
        return not_found(fmt::format("the store in {} has no disks", options_.dirs[0]));
      }
      return std::move(dirs_);
    }
    HCACHE_RETURN_IF_ERROR(add_new());
    return std::move(dirs_);
  }

 private:
  Status set(std::uint32_t disk, const std::string& dir) {
    if (disk >= kMaxDisks) return data_loss(fmt::format("{}: disk {} is too high", dir, disk));
    if (dirs_.size() <= disk) dirs_.resize(disk + std::size_t{1});
    if (!dirs_[disk].empty()) {
      return failed_precondition(
          fmt::format("{} and {} both say they are disk {} of the store", dirs_[disk], dir, disk));
    }
    dirs_[disk] = dir;
    return {};
  }

  Status read(const std::string& dir) {
    const std::string path = join_path(dir, kDiskFileName);
    HCACHE_ASSIGN_OR_RETURN(const FileInfo info, env_.file_info(path));
    if (!info.exists) {
      unmarked_.push_back(dir);
      return {};
    }
    HCACHE_ASSIGN_OR_RETURN(const std::string text, read_whole_file(env_, path));
    const auto file = decode_disk_file(text);
    if (!file.ok()) {
      if (file.code() != Code::kDataLoss) return file.status().with_context(path);
      damaged_.push_back(dir);
      return {};
    }
    if (file->store != catalog_.store_id()) {
      return failed_precondition(
          fmt::format("{} belongs to store {}, the catalog in {} to store {}", dir,
                      to_hex(file->store), options_.catalog_dir, to_hex(catalog_.store_id())));
    }
    return set(file->disk, dir);
  }

  Status mend() {
    std::vector<std::uint32_t> missing;
    for (const std::uint32_t disk : known_) {
      if (disk >= dirs_.size() || dirs_[disk].empty()) missing.push_back(disk);
    }
    if (missing.size() == 1 && damaged_.size() == 1) {
      // It can only be this one. Pages have checksums of their own, so a wrong guess shows.
      log::warn("{} is damaged; taking {} as disk {}", join_path(damaged_[0], kDiskFileName),
                damaged_[0], missing[0]);
      HCACHE_RETURN_IF_ERROR(set(missing[0], damaged_[0]));
      if (options_.read_only) return {};
      return write_whole_file(env_, join_path(damaged_[0], kDiskFileName),
                              encode_disk_file({catalog_.store_id(), missing[0]}));
    }
    if (!damaged_.empty()) {
      return data_loss(fmt::format("{} is damaged", join_path(damaged_[0], kDiskFileName)));
    }
    if (missing.empty()) return {};
    return failed_precondition(
        fmt::format("disk {} of the store in {} is not among the given directories (not mounted?)",
                    missing[0], options_.catalog_dir));
  }

  Status add_new() {
    for (const std::string& dir : unmarked_) {
      const auto disk = static_cast<std::uint32_t>(dirs_.size());
      HCACHE_RETURN_IF_ERROR(env_.make_dirs(dir));
      HCACHE_RETURN_IF_ERROR(write_whole_file(env_, join_path(dir, kDiskFileName),
                                              encode_disk_file({catalog_.store_id(), disk})));
      HCACHE_RETURN_IF_ERROR(set(disk, dir));
    }
    if (dirs_.size() <= known_.size()) return {};
    HCACHE_ASSIGN_OR_RETURN(auto transaction, catalog_.begin());
    for (std::uint32_t disk = 0; disk < dirs_.size(); ++disk) {
      HCACHE_RETURN_IF_ERROR(transaction.add_disk(disk, env_.wall_ns()));
    }
    return transaction.commit();
  }

  Env& env_;
  Catalog& catalog_;
  const StoreOptions& options_;
  std::vector<std::uint32_t> known_;   // to the catalog
  std::vector<std::string> dirs_;      // by disk
  std::vector<std::string> unmarked_;  // no disk file
  std::vector<std::string> damaged_;   // an unreadable one
};

}  // namespace

Result<std::vector<std::string>> resolve_disks(Env& env, Catalog& catalog,
                                               const StoreOptions& options) {
  return DiskTable(env, catalog, options).resolve();
}

}  // namespace hcache::store
