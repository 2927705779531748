#include "model/compute_threads.h"

#include <ggml-backend.h>

#include <atomic>

namespace hcache::model {

struct ComputeThreads::Work {
  const std::function<void(size_t)>& each;
  const size_t n;
  std::atomic<size_t> next = 0;

  void take_part() {
    for (size_t i = next++; i < n; i = next++) each(i);
  }
};

ComputeThreads::ComputeThreads(const Device& device) : device_(device) {
  ctx_ = ggml_init({.mem_size = 2 * ggml_tensor_overhead() + ggml_graph_overhead_custom(1, false),
                    .mem_buffer = nullptr,
                    .no_alloc = true});
  // A graph of one node which is no tensor operation: it only lends us ggml's threads.
  const auto take_part = [](ggml_tensor* /*dst*/, int /*ith*/, int /*nth*/, void* userdata) {
    static_cast<ComputeThreads*>(userdata)->work_->take_part();
  };
  ggml_tensor* node =
      ggml_custom_4d(ctx_, GGML_TYPE_I8, 1, 1, 1, 1, nullptr, 0, take_part, GGML_N_TASKS_MAX, this);
  node->data = &unused_;
  graph_ = ggml_new_graph_custom(ctx_, 1, false);
  ggml_build_forward_expand(graph_, node);
}

ComputeThreads::~ComputeThreads() { ggml_free(ctx_); }

void ComputeThreads::run(size_t n, const std::function<void(size_t)>& each) {
  Work work{each, n};
  work_ = &work;
  if (n > 1 && device_.n_threads() > 1) ggml_backend_graph_compute(device_.compute(), graph_);
  work.take_part();  // all of it, unless others have
  work_ = nullptr;
}

}  // namespace hcache::model
