#include "engine/compute_queue.h"

namespace hcache::engine {
namespace {

class DeviceComputeQueue : public ComputeQueue {
 public:
  explicit DeviceComputeQueue(model::Device& device) : backend_(device.compute()) {
    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(device.dev(), &props);
    is_async_ = props.caps.async;
  }

  ggml_status run(ggml_cgraph* graph) override {
    return ggml_backend_graph_compute_async(backend_, graph);
  }
  void upload(ggml_tensor* dst, const void* src, size_t n_bytes) override {
    ggml_backend_tensor_set_async(backend_, dst, src, 0, n_bytes);
  }
  void download(const ggml_tensor* src, void* dst, size_t n_bytes) override {
    ggml_backend_tensor_get_async(backend_, src, dst, 0, n_bytes);
  }
  void copy(ggml_tensor* src, ComputeQueue& to, ggml_tensor* dst) override {
    ggml_backend_tensor_copy_async(backend_, to.backend(), src, dst);
  }
  void synchronize() override { ggml_backend_synchronize(backend_); }
  bool is_async() const override { return is_async_; }
  ggml_backend_t backend() const override { return backend_; }

 private:
  ggml_backend_t backend_;
  bool is_async_ = false;
};

}  // namespace

DeviceQueues make_device_queues(model::Device& device) {
  return {std::make_unique<DeviceComputeQueue>(device), make_device_copy_queue(device)};
}

}  // namespace hcache::engine
