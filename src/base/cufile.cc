// DirectStorage over NVIDIA's cuFile. Its functions are looked up at run time, so neither CUDA nor
// the library is needed to build; their types are those of cufile.h, version 1 of its interface.
#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/types.h>

#include <cerrno>
#include <list>
#include <memory>
#include <utility>

#include "base/direct_storage.h"
#include "base/sync.h"
#include "posix_io.h"

namespace hcache {
namespace {

// Of cufile.h.
struct CuFileError {
  int error = 0;  // 0: success
  int cuda_error = 0;
};
using CuFileHandle = void*;
struct CuFileDescription {
  int type = 1;  // a file descriptor of Linux
  union {
    int fd;
    void* handle;
  } file{.handle = nullptr};
  const void* operations = nullptr;
};

// Files whose descriptor stays registered; registering takes longer than a read.
constexpr std::size_t kMaxFiles = 64;

struct CuFileFunctions {
  CuFileError (*driver_open)() = nullptr;
  CuFileError (*driver_close)() = nullptr;
  CuFileError (*handle_register)(CuFileHandle*, CuFileDescription*) = nullptr;
  void (*handle_deregister)(CuFileHandle) = nullptr;
  CuFileError (*buffer_register)(const void*, std::size_t, int) = nullptr;
  CuFileError (*buffer_deregister)(const void*) = nullptr;
  ssize_t (*read)(CuFileHandle, void*, std::size_t, off_t, off_t) = nullptr;
};

constexpr const char* kRemedy =
    "; install NVIDIA GPUDirect Storage (nvidia-gds) or leave --gpu-direct out";

std::string reason(const CuFileError& error) {
  if (error.cuda_error != 0) {
    return fmt::format("cuFile error {}, CUDA error {}", error.error, error.cuda_error);
  }
  return fmt::format("cuFile error {}", error.error);
}

class Library {
 public:
  Library() = default;
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;
  ~Library() {
    if (handle_ != nullptr) ::dlclose(handle_);
  }
  Status open(const std::string& name) {
    handle_ = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_ != nullptr) return {};
    const char* why = ::dlerror();
    return failed_precondition(fmt::format("{} can't be loaded ({}){}", name,
                                           why != nullptr ? why : "no reason given", kRemedy));
  }
  template <typename F>
  Status find(const char* name, F*& function) {
    function = reinterpret_cast<F*>(::dlsym(handle_, name));
    if (function != nullptr) return {};
    return failed_precondition(fmt::format("cuFile's library has no {}{}", name, kRemedy));
  }

 private:
  void* handle_ = nullptr;
};

class CuFile final : public DirectStorage {
 public:
  Status init(const std::string& library) {
    HCACHE_RETURN_IF_ERROR(library_.open(library));
    HCACHE_RETURN_IF_ERROR(library_.find("cuFileDriverOpen", call_.driver_open));
    // The first version closes what the second counts; old libraries have the first alone.
    if (!library_.find("cuFileDriverClose_v2", call_.driver_close).ok()) {
      HCACHE_RETURN_IF_ERROR(library_.find("cuFileDriverClose", call_.driver_close));
    }
    HCACHE_RETURN_IF_ERROR(library_.find("cuFileHandleRegister", call_.handle_register));
    HCACHE_RETURN_IF_ERROR(library_.find("cuFileHandleDeregister", call_.handle_deregister));
    HCACHE_RETURN_IF_ERROR(library_.find("cuFileBufRegister", call_.buffer_register));
    HCACHE_RETURN_IF_ERROR(library_.find("cuFileBufDeregister", call_.buffer_deregister));
    HCACHE_RETURN_IF_ERROR(library_.find("cuFileRead", call_.read));
    const CuFileError opened = call_.driver_open();
    if (opened.error != 0) {
      return failed_precondition(
          fmt::format("cuFile's driver can't be opened: {}{}", reason(opened), kRemedy));
    }
    open_ = true;
    return {};
  }
  ~CuFile() override {
    files_.clear();
    if (open_) call_.driver_close();
  }

  Status add_memory(std::byte* base, std::size_t n_bytes) override {
    const CuFileError added = call_.buffer_register(base, n_bytes, 0);
    if (added.error == 0) return {};
    return resource_exhausted(fmt::format("cuFile can't register {} MiB of device memory: {}",
                                          n_bytes >> 20, reason(added)));
  }
  void remove_memory(std::byte* base) override { call_.buffer_deregister(base); }

  Result<std::size_t> read(File& file, std::uint64_t offset, std::byte* base, std::size_t at,
                           std::size_t n_bytes) override {
    HCACHE_ASSIGN_OR_RETURN(const std::shared_ptr<Registered> registered, registered_file(file));
    std::size_t done = 0;
    while (done < n_bytes) {
      const ssize_t got =
          call_.read(registered->handle, base, n_bytes - done, static_cast<off_t>(offset + done),
                     static_cast<off_t>(at + done));
      if (got == 0) break;
      if (got == -1) return errno_status("read", file.path(), errno);
      if (got < 0) {
        return unavailable(fmt::format("cuFile can't read {} at offset {}: error {}", file.path(),
                                       offset + done, -got));
      }
      done += static_cast<std::size_t>(got);
    }
    return done;
  }

 private:
  // A descriptor of our own: as long as it is open, nothing else has the file's inode.
  struct Registered {
    Registered(const CuFileFunctions& functions, const FileIdentity& file, int descriptor)
        : call(functions), identity(file), fd(descriptor) {}
    Registered(const Registered&) = delete;
    Registered& operator=(const Registered&) = delete;
    ~Registered() {
      if (handle != nullptr) call.handle_deregister(handle);
    }
    const CuFileFunctions& call;
    const FileIdentity identity;
    const UniqueFd fd;
    CuFileHandle handle = nullptr;
  };

  Result<std::shared_ptr<Registered>> registered_file(File& file) HCACHE_EXCLUDES(mutex_) {
    auto* posix = dynamic_cast<PosixFile*>(&file);
    if (posix == nullptr) {
      return unimplemented(fmt::format("{} has no descriptor to read from directly", file.path()));
    }
    HCACHE_ASSIGN_OR_RETURN(const FileIdentity identity, file.identity());
    MutexLock lock(mutex_);
    for (auto it = files_.begin(); it != files_.end(); ++it) {
      const FileIdentity& known = (*it)->identity;
      if (known.device != identity.device || known.inode != identity.inode) continue;
      files_.splice(files_.begin(), files_, it);
      return files_.front();
    }
    auto added =
        std::make_shared<Registered>(call_, identity, ::fcntl(posix->fd(), F_DUPFD_CLOEXEC, 0));
    if (!added->fd.ok()) return errno_status("open", file.path(), errno);
    CuFileDescription description;
    description.file.fd = added->fd.get();
    const CuFileError error = call_.handle_register(&added->handle, &description);
    if (error.error != 0) {
      added->handle = nullptr;
      return unavailable(fmt::format("cuFile can't register {}: {}", file.path(), reason(error)));
    }
    files_.push_front(added);
    if (files_.size() > kMaxFiles) files_.pop_back();
    return added;
  }

  Library library_;
  CuFileFunctions call_;
  bool open_ = false;
  Mutex mutex_;
  // The last used first; one that is being read outlives its place here.
  std::list<std::shared_ptr<Registered>> files_ HCACHE_GUARDED_BY(mutex_);
};

}  // namespace

Result<std::unique_ptr<DirectStorage>> DirectStorage::open(const std::string& library) {
  auto opened = std::make_unique<CuFile>();
  HCACHE_RETURN_IF_ERROR(opened->init(library));
  return std::unique_ptr<DirectStorage>(std::move(opened));
}

}  // namespace hcache
