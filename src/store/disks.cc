#include "disks.h"

#include <fmt/format.h>

#include <optional>

#include "base/log.h"
#include "record_file.h"

namespace hcache::store {
namespace {

// Which disk of which store a directory is, by its disk file or, without an intact one, by the
// header of any of its other files. `*status`: what the disk file says of itself.
std::optional<DiskFile> identify(Env& env, const std::string& dir, Status* status) {
  const std::string path = join_path(dir, kDiskFileName);
  const auto text = read_whole_file(env, path);
  *status = text.status();
  if (text.ok()) {
    const auto file = decode_disk_file(*text);
    if (file.ok()) return *file;
    *status = file.status();
    if (file.code() != Code::kDataLoss) return std::nullopt;
  }
  const auto names = env.list_dir(dir);
  if (!names.ok()) return std::nullopt;
  for (const std::string& name : *names) {
    std::uint32_t number = 0;
    if (!parse_segment_name(name, &number) && !parse_record_file_name(name, &number)) continue;
    const auto file = env.open_file(join_path(dir, name), {});
    if (!file.ok()) continue;
    AlignedBuffer header(kSegmentHeaderBytes);
    const auto got = (*file)->read_at(0, header.span());
    if (!got.ok()) continue;
    const auto found = decode_file_header(header.span().first(*got));
    if (found.ok()) return DiskFile{found->store, found->disk, found->sealed};
  }
  return std::nullopt;
}

// Nobody else writes disk files here: the store's lock is held.
void remove_leftovers(Env& env, const std::string& dir) {
  const auto names = env.list_dir(dir);
  if (!names.ok()) return;
  for (const std::string& name : *names) {
    if (!name.starts_with(std::string(kDiskFileName) + ".") || !name.ends_with(".tmp")) continue;
    const Status status = env.remove_path(join_path(dir, name));
    if (!status.ok()) log::warn("{}", status.to_string());
  }
}

class DiskTable {
 public:
  DiskTable(Env& env, Catalog& catalog, const StoreOptions& options)
      : env_(env), catalog_(catalog), options_(options) {}

  Result<std::vector<std::string>> resolve() {
    HCACHE_ASSIGN_OR_RETURN(known_, catalog_.disks());
    for (std::size_t disk = 0; disk < known_.size(); ++disk) {
      if (known_[disk] != disk) {
        return data_loss(
            fmt::format("catalog {}: its disks are not numbered in order", catalog_.path()));
      }
    }
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
    if (!options_.read_only) remove_leftovers(env_, dir);
    Status status;
    const std::optional<DiskFile> file = identify(env_, dir, &status);
    if (!status.ok() && status.code() != Code::kNotFound && status.code() != Code::kDataLoss) {
      return status.with_context(path);
    }
    // A lost disk file of another store's directory: it becomes a new disk.
    const bool ours = file.has_value() && file->store == catalog_.store_id();
    if (!file.has_value() || (!ours && !status.ok())) {
      (status.code() == Code::kNotFound ? unmarked_ : damaged_).push_back(dir);
      return {};
    }
    if (!ours) {
      return failed_precondition(
          fmt::format("{} belongs to store {}, the catalog in {} to store {}", dir,
                      to_hex(file->store), options_.catalog_dir, to_hex(catalog_.store_id())));
    }
    HCACHE_RETURN_IF_ERROR(set(file->disk, dir));
    return status.ok() ? Status() : write_disk_file(file->disk, dir, status);
  }

  Status write_disk_file(std::uint32_t disk, const std::string& dir, const Status& why) {
    log::warn("{}: {}; taking {} as disk {}", join_path(dir, kDiskFileName), why.message(), dir,
              disk);
    if (options_.read_only) return {};
    return write_whole_file(env_, join_path(dir, kDiskFileName),
                            encode_disk_file({catalog_.store_id(), disk, catalog_.seal().on()}));
  }

  Status mend() {
    std::vector<std::uint32_t> missing;
    for (const std::uint32_t disk : known_) {
      if (disk >= dirs_.size() || dirs_[disk].empty()) missing.push_back(disk);
    }
    if (missing.size() == 1 && damaged_.size() == 1) {
      // It can only be this one. Pages have checksums of their own, so a wrong guess shows.
      HCACHE_RETURN_IF_ERROR(set(missing[0], damaged_[0]));
      return write_disk_file(missing[0], damaged_[0], data_loss("it is damaged"));
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
      HCACHE_RETURN_IF_ERROR(
          write_whole_file(env_, join_path(dir, kDiskFileName),
                           encode_disk_file({catalog_.store_id(), disk, catalog_.seal().on()})));
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

Result<DiskSet> find_disks(Env& env, const std::vector<std::string>& dirs) {
  DiskSet out;
  for (const std::string& dir : dirs) {
    Status status;
    const std::optional<DiskFile> file = identify(env, dir, &status);
    if (!file.has_value()) continue;
    if (out.store.is_zero()) {
      out.store = file->store;
      out.sealed = file->sealed;
    }
    if (file->store != out.store) {
      return failed_precondition(fmt::format("{} belongs to store {}, another directory to {}", dir,
                                             to_hex(file->store), to_hex(out.store)));
    }
    if (file->disk >= kMaxDisks) continue;
    if (out.dirs.size() <= file->disk) out.dirs.resize(file->disk + std::size_t{1});
    if (!out.dirs[file->disk].empty()) {
      return failed_precondition(fmt::format("{} and {} both say they are disk {} of the store",
                                             out.dirs[file->disk], dir, file->disk));
    }
    out.dirs[file->disk] = dir;
  }
  if (out.dirs.empty()) return data_loss("nothing in the directories says which store they are of");
  for (std::size_t disk = 0; disk < out.dirs.size(); ++disk) {
    if (!out.dirs[disk].empty()) continue;
    return failed_precondition(fmt::format(
        "disk {} of the store is not among the given directories (not mounted?)", disk));
  }
  return out;
}

bool have_records(Env& env, const std::vector<std::string>& dirs) {
  for (const std::string& dir : dirs) {
    const auto names = env.list_dir(dir);
    if (!names.ok()) continue;
    std::uint32_t number = 0;
    for (const std::string& name : *names) {
      if (parse_record_file_name(name, &number)) return true;
    }
  }
  return false;
}

Result<std::vector<std::string>> resolve_disks(Env& env, Catalog& catalog,
                                               const StoreOptions& options) {
  return DiskTable(env, catalog, options).resolve();
}

}  // namespace hcache::store
