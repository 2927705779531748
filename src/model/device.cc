#include "model/device.h"

#include <fmt/format.h>
#include <netdb.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <thread>
#include <utility>

#include "base/cpu_target.h"
#include "base/log.h"
#include "base/units.h"
#include "products.h"

namespace hcache::model {
namespace {

constexpr int kRpcTimeoutMs = 5000;
// The RPC server answers clients of this major protocol version only (ggml-rpc.h,
// RPC_PROTO_MAJOR_VERSION); kept here because a ggml without RPC ships no such header.
constexpr int kRpcProtocolMajor = 7;

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

// ggml's own messages, which come in pieces of lines and are details to our users.
void forward_log(ggml_log_level level, const char* text, void* /*user*/) {
  if (level == GGML_LOG_LEVEL_CONT) return;
  std::string_view line(text);
  while (line.ends_with('\n')) line.remove_suffix(1);
  if (level == GGML_LOG_LEVEL_ERROR) {
    log::error("ggml: {}", line);
  } else if (level == GGML_LOG_LEVEL_WARN) {
    log::warn("ggml: {}", line);
  } else {
    log::debug("ggml: {}", line);
  }
}

// A portable program loads the kernels of the CPU's target from a folder beside its own; any other
// ggml that has no backend built in loads what it finds.
void load_cpu_backend() {
#ifdef HCACHE_KERNEL_FOLDER
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  const std::filesystem::path file =
      (self.parent_path() / HCACHE_KERNEL_FOLDER / fmt::format("libggml-cpu-{}.so", cpu_target()))
          .lexically_normal();
  if (ggml_backend_load(file.c_str()) == nullptr) {
    log::error("can't load the CPU's kernels from {}; install the program anew", file.string());
  }
#else
  ggml_backend_load_all();
#endif
}

void load_backends() {
  static std::once_flag once;
  std::call_once(once, [] {
    ggml_log_set(forward_log, nullptr);
    if (ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) == nullptr) load_cpu_backend();
  });
}

struct NamedDevice {
  std::string name;
  ggml_backend_dev_t dev;
};

// "cpu" first, then "<backend>:<index>" for each accelerator with its own memory.
std::vector<NamedDevice> named_devices() {
  load_backends();
  std::vector<NamedDevice> out;
  if (ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU)) {
    out.push_back({"cpu", cpu});
  }
  for (size_t r = 0; r < ggml_backend_reg_count(); r++) {
    ggml_backend_reg_t reg = ggml_backend_reg_get(r);
    if (strcmp(ggml_backend_reg_name(reg), "RPC") == 0) continue;  // has no devices of its own
    int index = 0;
    for (size_t d = 0; d < ggml_backend_reg_dev_count(reg); d++) {
      ggml_backend_dev_t dev = ggml_backend_reg_dev_get(reg, d);
      const auto type = ggml_backend_dev_type(dev);
      if (type != GGML_BACKEND_DEVICE_TYPE_GPU && type != GGML_BACKEND_DEVICE_TYPE_IGPU) continue;
      out.push_back({fmt::format("{}:{}", lower(ggml_backend_reg_name(reg)), index++), dev});
    }
  }
  return out;
}

template <typename Fn>
Fn cpu_proc(ggml_backend_dev_t dev, const char* name) {
  return reinterpret_cast<Fn>(
      ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(dev), name));
}

std::vector<std::string> backend_features(ggml_backend_dev_t dev) {
  std::vector<std::string> out;
  auto get = cpu_proc<ggml_backend_get_features_t>(dev, "ggml_backend_get_features");
  if (get == nullptr) return out;
  for (const ggml_backend_feature* f = get(ggml_backend_dev_backend_reg(dev)); f->name; f++) {
    out.push_back(strcmp(f->value, "1") == 0 ? f->name : fmt::format("{}={}", f->name, f->value));
  }
  return out;
}

bool uses_openmp(ggml_backend_dev_t dev) {
  for (const std::string& feature : backend_features(dev)) {
    if (feature == "OPENMP") return true;
  }
  return false;
}

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

class Socket {
 public:
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  [[nodiscard]] bool connect(const sockaddr* address, socklen_t length) const {
    if (::connect(fd_, address, length) == 0) return true;
    if (errno != EINPROGRESS || !wait(POLLOUT)) return false;
    int error = 0;
    socklen_t size = sizeof(error);
    return getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error == 0;
  }
  [[nodiscard]] bool send_all(const uint8_t* data, size_t size) const {
    while (size > 0) {
      if (!wait(POLLOUT)) return false;
      const ssize_t n = send(fd_, data, size, MSG_NOSIGNAL);
      if (n <= 0) return false;
      data += n;
      size -= static_cast<size_t>(n);
    }
    return true;
  }
  [[nodiscard]] bool receive_all(uint8_t* data, size_t size) const {
    while (size > 0) {
      if (!wait(POLLIN)) return false;
      const ssize_t n = recv(fd_, data, size, 0);
      if (n <= 0) return false;
      data += n;
      size -= static_cast<size_t>(n);
    }
    return true;
  }

 private:
  [[nodiscard]] bool wait(short events) const {
    pollfd p{fd_, events, 0};
    return poll(&p, 1, kRpcTimeoutMs) == 1;
  }
  int fd_;
};

// ggml's RPC client aborts the process when the server is absent or speaks another version, so the
// greeting is tried here first: u8 command 14, u64 size, 24 bytes of capabilities (none: TCP); the
// answer is u64 size, u8 major, minor, patch, padding and 24 bytes of capabilities.
Status probe_rpc_server(const std::string& host, const std::string& port) {
  const std::string where = fmt::format("rpc:{}:{}", host, port);
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int rc = getaddrinfo(host.c_str(), port.c_str(), &hints, &found); rc != 0) {
    return not_found(fmt::format("device {}: {}", where, gai_strerror(rc)));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> list(found, &freeaddrinfo);
  for (const addrinfo* a = list.get(); a != nullptr; a = a->ai_next) {
    const Socket s(socket(a->ai_family, a->ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!s.connect(a->ai_addr, a->ai_addrlen)) continue;
    constexpr size_t kCaps = 24;
    std::array<uint8_t, 1 + 8 + kCaps> request{14, kCaps};
    std::array<uint8_t, 8 + 4 + kCaps> response{};
    if (!s.send_all(request.data(), request.size()) ||
        !s.receive_all(response.data(), response.size())) {
      return unavailable(fmt::format(
          "device {}: something listens there but gives no RPC greeting within {} s (another "
          "protocol, or a server that is busy with another client)",
          where, kRpcTimeoutMs / 1000));
    }
    if (response[0] != 4 + kCaps || response[8] != kRpcProtocolMajor) {
      return failed_precondition(
          fmt::format("device {}: the server speaks RPC protocol {}.{}, this build {}; use the "
                      "rpc-server of the same ggml",
                      where, response[8], response[9], kRpcProtocolMajor));
    }
    return {};
  }
  return unavailable(
      fmt::format("device {}: no server answers there; start ggml's rpc-server", where));
}

Result<ggml_backend_dev_t> rpc_device(const std::string& endpoint) {
  const size_t colon = endpoint.rfind(':');
  int port = 0;
  const char* end = endpoint.data() + endpoint.size();
  if (colon == std::string::npos || colon == 0 ||
      std::from_chars(endpoint.data() + colon + 1, end, port).ptr != end || port < 1 ||
      port > 65535) {
    return invalid_argument(
        fmt::format("device rpc:{}: expected rpc:HOST:PORT with a port in 1..65535", endpoint));
  }
  load_backends();
  ggml_backend_reg_t rpc = ggml_backend_reg_by_name("RPC");
  using AddServer = ggml_backend_reg_t (*)(const char*);
  auto add_server = rpc == nullptr ? nullptr
                                   : reinterpret_cast<AddServer>(ggml_backend_reg_get_proc_address(
                                         rpc, "ggml_backend_rpc_add_server"));
  if (add_server == nullptr) {
    return unimplemented(fmt::format("device rpc:{}: this build of ggml has no RPC", endpoint));
  }
  HCACHE_RETURN_IF_ERROR(probe_rpc_server(endpoint.substr(0, colon), endpoint.substr(colon + 1)));
  ggml_backend_reg_t server = add_server(endpoint.c_str());
  if (server == nullptr || ggml_backend_reg_dev_count(server) == 0) {
    return not_found(fmt::format("device rpc:{}: the server offers no device", endpoint));
  }
  return ggml_backend_reg_dev_get(server, 0);
}

}  // namespace

Result<std::unique_ptr<Device>> Device::open(const std::string& name, int n_threads) {
  if (n_threads < 0) return invalid_argument(fmt::format("threads: {} is negative", n_threads));
  std::unique_ptr<Device> device(new Device);
  device->name_ = name;
  constexpr std::string_view kRpc = "rpc:";
  if (name.starts_with(kRpc)) {
    HCACHE_ASSIGN_OR_RETURN(device->dev_, rpc_device(name.substr(kRpc.size())));
  } else {
    std::string known;
    for (const NamedDevice& d : named_devices()) {
      if (d.name == name) device->dev_ = d.dev;
      known += (known.empty() ? "" : ", ") + d.name;
    }
    if (device->dev_ == nullptr) {
      return not_found(
          fmt::format("device {}: not here; there are: {}, and rpc:HOST:PORT", name, known));
    }
  }
  device->is_cpu_ = ggml_backend_dev_type(device->dev_) == GGML_BACKEND_DEVICE_TYPE_CPU;
  if (device->is_cpu_ && !unusable_product_kernels().empty()) {
    std::string known = "ggml";
    for (const NamedProductKernel& k : usable_kernels()) known += fmt::format(", {}", k.name);
    return invalid_argument(fmt::format("HCACHE_PRODUCTS={}: this processor has {}",
                                        unusable_product_kernels(), known));
  }
  device->compute_ = ggml_backend_dev_init(device->dev_, nullptr);
  if (device->compute_ != nullptr) device->copy_ = ggml_backend_dev_init(device->dev_, nullptr);
  if (device->copy_ == nullptr) {
    return unavailable(fmt::format("device {}: the backend does not start", name));
  }
  device->host_visible_ = ggml_backend_buft_is_host(device->buffer_type());
  if (device->is_cpu_) device->set_n_threads(n_threads > 0 ? n_threads : usable_cores());
  return device;
}

std::vector<DeviceInfo> Device::list() {
  std::vector<DeviceInfo> out;
  for (const NamedDevice& d : named_devices()) {
    DeviceInfo info;
    info.name = d.name;
    info.description = ggml_backend_dev_description(d.dev);
    ggml_backend_dev_memory(d.dev, &info.memory_free, &info.memory_total);
    out.push_back(std::move(info));
  }
  return out;
}

Device::~Device() {
  if (copy_ != nullptr) ggml_backend_free(copy_);
  if (compute_ != nullptr) ggml_backend_free(compute_);
  if (threadpool_ != nullptr) {
    cpu_proc<void (*)(ggml_threadpool_t)>(dev_, "ggml_threadpool_free")(threadpool_);
  }
}

std::string Device::description() const { return ggml_backend_dev_description(dev_); }

void Device::set_n_threads(int n_threads) {
  if (!is_cpu_ || n_threads < 1) return;
  auto set = cpu_proc<ggml_backend_set_n_threads_t>(dev_, "ggml_backend_set_n_threads");
  if (set == nullptr) return;
  set(compute_, n_threads);
  set(copy_, n_threads);
  n_threads_ = n_threads;
  if (uses_openmp(dev_)) return;  // keeps its own threads

  auto create =
      cpu_proc<ggml_threadpool_t (*)(ggml_threadpool_params*)>(dev_, "ggml_threadpool_new");
  auto release = cpu_proc<void (*)(ggml_threadpool_t)>(dev_, "ggml_threadpool_free");
  auto use = cpu_proc<void (*)(ggml_backend_t, ggml_threadpool_t)>(
      dev_, "ggml_backend_cpu_set_threadpool");
  if (create == nullptr || release == nullptr || use == nullptr) return;
  ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
  ggml_threadpool_t next = create(&params);
  if (next == nullptr) return;
  use(compute_, next);
  if (threadpool_ != nullptr) release(threadpool_);
  threadpool_ = next;
}

bool Device::takes_every_core() const { return is_cpu_ && n_threads_ >= usable_cores(); }

bool Device::is_of(const char* backend) const {
  return strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev_)), backend) == 0;
}

bool Device::may_use_cpu_kernels() const { return is_cpu_ || is_of("RPC"); }

// Vulkan binds what a shader reads at aligned offsets, and ggml's attention shader takes no rest.
size_t Device::read_alignment() const {
  return is_of("Vulkan") ? ggml_backend_buft_get_alignment(buffer_type()) : 1;
}

ggml_backend_buffer_type_t Device::buffer_type() const {
  return ggml_backend_dev_buffer_type(dev_);
}

ggml_backend_buffer_type_t Device::host_buffer_type() const {
  ggml_backend_buffer_type_t pinned = ggml_backend_dev_host_buffer_type(dev_);
  return pinned != nullptr ? pinned : ggml_backend_cpu_buffer_type();
}

ggml_backend_buffer_t Device::alloc_host(size_t n_bytes) const {
  ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(host_buffer_type(), n_bytes);
  static std::once_flag told;
  if (buffer != nullptr && ggml_backend_buffer_get_type(buffer) != host_buffer_type()) {
    std::call_once(told, [&] {
      log::warn("{}: host memory can't be pinned (at {} it was refused); copies from it are slower",
                name(), format_bytes(n_bytes));
    });
  }
  return buffer;
}

bool Device::pins_host_memory() const { return ggml_backend_dev_host_buffer_type(dev_) != nullptr; }

std::string Device::kernel_identity() const {
  std::string out =
      fmt::format("{}; {}; ggml {} {}", ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev_)),
                  description(), ggml_version(), ggml_commit());
  for (const std::string& feature : backend_features(dev_)) out += " " + feature;
  if (is_cpu_ && !product_kernels().empty()) {
    out += fmt::format("; products {} {}", kProductGeneration, product_kernels());
  }
  return out;
}

}  // namespace hcache::model
