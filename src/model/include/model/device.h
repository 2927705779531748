// A compute device behind ggml's backend interface: cpu, cuda:N, vulkan:N, rpc:HOST:PORT.
#pragma once

#include <ggml-backend.h>

#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "model/host_mirrors.h"

namespace hcache::model {

struct DeviceInfo {
  std::string name;         // as --device takes it: "cpu", "cuda:0", "rpc:127.0.0.1:50052"
  std::string description;  // as the backend describes itself
  size_t memory_free = 0;   // bytes; 0 where unknown
  size_t memory_total = 0;  // bytes; 0 where unknown
};

// Owns two backend instances of one device: two queues (CUDA streams; Vulkan's two share one queue
// of the driver). On the CPU, whose queue is synchronous, calls complete before they return.
//
// Threading: compute() belongs to one thread (the engine's); copy() may be used by one other
// thread at a time where the backend is thread safe (CUDA); on CPU it is not used by others.
class Device {
 public:
  // Opens the device `name`. n_threads applies to the CPU only; 0 means every core the process may
  // run on. kNotFound names the devices that exist. An RPC server is greeted first, so that an
  // absent, busy or foreign one is an error here; one that goes away later ends the process, since
  // ggml's client aborts then.
  static Result<std::unique_ptr<Device>> open(const std::string& name, int n_threads);
  // Every device this build can see (rpc servers are not discovered).
  static std::vector<DeviceInfo> list();

  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] std::string description() const;
  [[nodiscard]] int n_threads() const { return n_threads_; }
  // Applies to graphs computed from now on; CPU only, ignored elsewhere.
  void set_n_threads(int n_threads);

  [[nodiscard]] bool is_cpu() const { return is_cpu_; }
  // Whether computing takes every core that the process may use, so that there is none for others'
  // work.
  [[nodiscard]] bool takes_every_core() const;
  // Whether its products may be those of ggml's CPU kernels, whose bits depend on how many rows
  // they are given: on the CPU, and on RPC servers, which may be one.
  [[nodiscard]] bool may_use_cpu_kernels() const;
  // True when tensor->data of this device's buffers may be read and written by the host directly.
  [[nodiscard]] bool host_visible() const { return host_visible_; }

  [[nodiscard]] ggml_backend_dev_t dev() const { return dev_; }
  [[nodiscard]] ggml_backend_t compute() const { return compute_; }
  [[nodiscard]] ggml_backend_t copy() const { return copy_; }
  // On a multiple of how many bytes of a buffer what an attention kernel reads must begin: 1 where
  // it may begin anywhere.
  [[nodiscard]] size_t read_alignment() const;
  // The device's own memory.
  [[nodiscard]] ggml_backend_buffer_type_t buffer_type() const;
  // Host memory the device copies from and to fastest (pinned where the backend has it).
  [[nodiscard]] ggml_backend_buffer_type_t host_buffer_type() const;
  // Memory of that type, to be freed by ggml_backend_buffer_free(); nullptr: there is none. A
  // backend that can't pin so much gives ordinary memory instead, which is logged once.
  [[nodiscard]] ggml_backend_buffer_t alloc_host(size_t n_bytes) const;
  // Whether that is another kind of memory than the system's own.
  [[nodiscard]] bool pins_host_memory() const;
  // Host memory that this device has a copy of: uploads take that.
  [[nodiscard]] HostMirrors& mirrors() const { return mirrors_; }
  // What the kernels of this device depend on, for the cost profile: backend, device description,
  // ggml version, CPU features, which products of ours.
  [[nodiscard]] std::string kernel_identity() const;

 private:
  Device() = default;
  [[nodiscard]] bool is_of(const char* backend) const;

  std::string name_;
  int n_threads_ = 1;
  bool is_cpu_ = false;
  bool host_visible_ = false;
  ggml_backend_dev_t dev_ = nullptr;
  ggml_backend_t compute_ = nullptr;
  ggml_backend_t copy_ = nullptr;
  // Kept between graphs where ggml has no OpenMP and would start its threads for every graph.
  ggml_threadpool_t threadpool_ = nullptr;
  mutable HostMirrors mirrors_;
};

}  // namespace hcache::model
