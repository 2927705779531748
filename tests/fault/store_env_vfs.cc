#include "store_env_vfs.h"

#include <sqlite3.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>

namespace hcache::store::testing {
namespace {

constexpr int kMaxPath = 512;

std::string dir_of(const std::string& path) { return path.substr(0, path.rfind('/')); }

int code_of(const Status& status, int otherwise) {
  return status.code() == Code::kResourceExhausted ? SQLITE_FULL : otherwise;
}

// SQLite allocates this and calls through its methods.
struct VfsFile {
  sqlite3_file base;
  Env* env;
  File* file;
  bool fresh_name;  // its directory must be synced with its first sync
};

VfsFile* self(sqlite3_file* file) { return reinterpret_cast<VfsFile*>(file); }

int vfs_close(sqlite3_file* file) {
  delete self(file)->file;
  return SQLITE_OK;
}

int vfs_read(sqlite3_file* file, void* out, int amount, sqlite3_int64 offset) {
  const auto size = static_cast<std::size_t>(amount);
  const auto got = self(file)->file->read_at(static_cast<std::uint64_t>(offset),
                                             {static_cast<std::byte*>(out), size});
  if (!got.ok()) return SQLITE_IOERR_READ;
  if (*got == size) return SQLITE_OK;
  std::memset(static_cast<char*>(out) + *got, 0, size - *got);
  return SQLITE_IOERR_SHORT_READ;
}

int vfs_write(sqlite3_file* file, const void* data, int amount, sqlite3_int64 offset) {
  const Status status = self(file)->file->write_at(
      static_cast<std::uint64_t>(offset),
      {static_cast<const std::byte*>(data), static_cast<std::size_t>(amount)});
  return status.ok() ? SQLITE_OK : code_of(status, SQLITE_IOERR_WRITE);
}

int vfs_truncate(sqlite3_file* file, sqlite3_int64 size) {
  return self(file)->file->truncate(static_cast<std::uint64_t>(size)).ok() ? SQLITE_OK
                                                                           : SQLITE_IOERR_TRUNCATE;
}

int vfs_sync(sqlite3_file* file, int /*flags*/) {
  VfsFile* f = self(file);
  if (!f->file->sync().ok()) return SQLITE_IOERR_FSYNC;
  if (f->fresh_name) {
    if (!f->env->sync_dir(dir_of(f->file->path())).ok()) return SQLITE_IOERR_DIR_FSYNC;
    f->fresh_name = false;
  }
  return SQLITE_OK;
}

int vfs_size(sqlite3_file* file, sqlite3_int64* size) {
  const auto got = self(file)->file->size();
  if (!got.ok()) return SQLITE_IOERR_FSTAT;
  *size = static_cast<sqlite3_int64>(*got);
  return SQLITE_OK;
}

int vfs_lock(sqlite3_file* /*file*/, int /*level*/) { return SQLITE_OK; }

int vfs_reserved(sqlite3_file* /*file*/, int* out) {
  *out = 0;
  return SQLITE_OK;
}

int vfs_control(sqlite3_file* /*file*/, int /*op*/, void* /*arg*/) { return SQLITE_NOTFOUND; }
int vfs_sector(sqlite3_file* /*file*/) { return 512; }
int vfs_characteristics(sqlite3_file* /*file*/) { return 0; }

const sqlite3_io_methods* methods() {
  static const sqlite3_io_methods kMethods = [] {
    sqlite3_io_methods m{};
    m.iVersion = 1;
    m.xClose = vfs_close;
    m.xRead = vfs_read;
    m.xWrite = vfs_write;
    m.xTruncate = vfs_truncate;
    m.xSync = vfs_sync;
    m.xFileSize = vfs_size;
    m.xLock = vfs_lock;
    m.xUnlock = vfs_lock;
    m.xCheckReservedLock = vfs_reserved;
    m.xFileControl = vfs_control;
    m.xSectorSize = vfs_sector;
    m.xDeviceCharacteristics = vfs_characteristics;
    return m;
  }();
  return &kMethods;
}

Env& env_of(sqlite3_vfs* vfs) { return *static_cast<Env*>(vfs->pAppData); }

int vfs_open(sqlite3_vfs* vfs, const char* name, sqlite3_file* out, int flags, int* out_flags) {
  out->pMethods = nullptr;
  if (name == nullptr) return SQLITE_CANTOPEN;  // temporary files: kept in memory by the store
  Env& env = env_of(vfs);
  const auto info = env.file_info(name);
  if (!info.ok()) return SQLITE_CANTOPEN;
  OpenOptions options;
  options.write = (flags & SQLITE_OPEN_READWRITE) != 0;
  options.create = (flags & SQLITE_OPEN_CREATE) != 0;
  auto file = env.open_file(name, options);
  if (!file.ok()) return SQLITE_CANTOPEN;
  auto* f = new (out) VfsFile;
  f->base.pMethods = methods();
  f->env = &env;
  f->file = file->release();
  f->fresh_name = !info->exists;
  if (out_flags != nullptr) *out_flags = flags;
  return SQLITE_OK;
}

int vfs_delete(sqlite3_vfs* vfs, const char* name, int sync_dir) {
  Env& env = env_of(vfs);
  const Status status = env.remove_path(name);
  if (status.code() == Code::kNotFound) return SQLITE_IOERR_DELETE_NOENT;
  if (!status.ok()) return SQLITE_IOERR_DELETE;
  if (sync_dir != 0 && !env.sync_dir(dir_of(name)).ok()) return SQLITE_IOERR_DIR_FSYNC;
  return SQLITE_OK;
}

int vfs_access(sqlite3_vfs* vfs, const char* name, int /*flags*/, int* out) {
  const auto info = env_of(vfs).file_info(name);
  if (!info.ok()) return SQLITE_IOERR_ACCESS;
  *out = info->exists ? 1 : 0;
  return SQLITE_OK;
}

int vfs_full_path(sqlite3_vfs* /*vfs*/, const char* name, int size, char* out) {
  if (static_cast<int>(std::strlen(name)) >= size) return SQLITE_CANTOPEN;
  std::memcpy(out, name, std::strlen(name) + 1);
  return SQLITE_OK;
}

int vfs_randomness(sqlite3_vfs* vfs, int size, char* out) {
  for (int i = 0; i < size; ++i) out[i] = static_cast<char>(env_of(vfs).random_u64());
  return size;
}

int vfs_sleep(sqlite3_vfs* vfs, int microseconds) {
  env_of(vfs).sleep_ns(std::int64_t{microseconds} * 1000);
  return microseconds;
}

int vfs_time(sqlite3_vfs* vfs, double* julian_day) {
  *julian_day = 2440587.5 + static_cast<double>(env_of(vfs).wall_ns()) / 86400e9;
  return SQLITE_OK;
}

}  // namespace

struct EnvVfs::Impl {
  std::string name;
  sqlite3_vfs vfs{};
};

EnvVfs::EnvVfs(Env& env) : impl_(std::make_unique<Impl>()) {
  static std::atomic<int> next{0};
  impl_->name = "hcache-env-" + std::to_string(next++);
  sqlite3_vfs& v = impl_->vfs;
  v.iVersion = 1;
  v.szOsFile = sizeof(VfsFile);
  v.mxPathname = kMaxPath;
  v.zName = impl_->name.c_str();
  v.pAppData = &env;
  v.xOpen = vfs_open;
  v.xDelete = vfs_delete;
  v.xAccess = vfs_access;
  v.xFullPathname = vfs_full_path;
  v.xRandomness = vfs_randomness;
  v.xSleep = vfs_sleep;
  v.xCurrentTime = vfs_time;
  sqlite3_vfs_register(&v, 0);
}

EnvVfs::~EnvVfs() { sqlite3_vfs_unregister(&impl_->vfs); }

const std::string& EnvVfs::name() const { return impl_->name; }

}  // namespace hcache::store::testing
