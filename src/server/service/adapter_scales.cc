#include "adapter_scales.h"

#include <fmt/format.h>

#include <utility>

namespace hcache::server {

std::vector<float> AdapterScales::current() const {
  MutexLock lock(mutex_);
  return scales_;
}

Result<std::vector<float>> AdapterScales::of(std::span<const api::AdapterScale> list) const {
  std::vector<float> scales(adapters_.size());
  for (const api::AdapterScale& wanted : list) {
    if (static_cast<size_t>(wanted.id) >= scales.size()) {
      const std::string known = scales.empty()
                                    ? "none (--lora FILE)"
                                    : fmt::format("{}, numbered from 0", adapters_.size());
      return invalid_argument(
          fmt::format("lora: there is no adapter {}; this server has {}", wanted.id, known));
    }
    scales[static_cast<size_t>(wanted.id)] = wanted.scale;
  }
  return scales;
}

Status AdapterScales::set(std::span<const api::AdapterScale> list) {
  HCACHE_ASSIGN_OR_RETURN(std::vector<float> scales, of(list));
  MutexLock lock(mutex_);
  scales_ = std::move(scales);
  return {};
}

api::Json AdapterScales::answer() const {
  const std::vector<float> scales = current();
  api::Json list = api::Json::array();
  for (size_t i = 0; i < scales.size(); ++i) {
    const model::AdapterInfo& info = adapters_[i].info;
    list.push_back({{"id", i},
                    {"path", info.path},
                    {"scale", scales[i]},
                    {"task_name", info.task},
                    {"prompt_prefix", info.prompt_prefix}});
  }
  return list;
}

}  // namespace hcache::server
