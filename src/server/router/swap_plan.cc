#include "swap_plan.h"

#include <algorithm>

namespace hcache::router {
namespace {

// The plan while it is made.
class Swap {
 public:
  Swap(const SwapSnapshot& snapshot, const SwapLimits& limits)
      : models_(snapshot.models), now_ns_(snapshot.now_ns), limits_(limits) {
    for (const ModelView& m : models_) {
      if (m.state == ModelState::kUnloaded) continue;
      ++in_memory_;
      bytes_in_memory_ += m.bytes;
      if (m.state == ModelState::kLoading) bytes_to_come_ += m.bytes;
      if (m.state == ModelState::kUnloading) leaving_ = true;
    }
    if (snapshot.free_bytes) {
      limited_by_free_ = true;
      free_bytes_ = *snapshot.free_bytes;
    }
  }

  SwapPlan run() {
    for (std::size_t i = 0; i < models_.size(); ++i) {
      if (is_idle(i) && (models_[i].unload_asked || has_expired(models_[i]))) unload(i);
    }
    for (const std::size_t next : queue()) {
      if (!has_room(next)) {
        make_room(models_[next]);
        break;
      }
      load(next);
    }
    return plan_;
  }

 private:
  // In the order in which their first requests came.
  [[nodiscard]] std::vector<std::size_t> queue() const {
    std::vector<std::size_t> out;
    for (std::size_t i = 0; i < models_.size(); ++i) {
      if (models_[i].state == ModelState::kUnloaded && models_[i].waiting > 0) out.push_back(i);
    }
    std::ranges::stable_sort(out, {}, [&](std::size_t i) { return models_[i].waits_since_ns; });
    return out;
  }

  [[nodiscard]] bool is_idle(std::size_t i) const {
    const ModelView& m = models_[i];
    return m.state == ModelState::kLoaded && m.running == 0 && (m.waiting == 0 || m.unload_asked);
  }
  [[nodiscard]] bool has_expired(const ModelView& m) const {
    return limits_.idle_ns > 0 && now_ns_ - m.used_ns >= limits_.idle_ns;
  }

  [[nodiscard]] bool has_room(std::size_t i) const {
    if (limits_.max_loaded > 0 && in_memory_ >= limits_.max_loaded) return false;
    // Alone it may have what there is: whether that is enough it finds out itself.
    if (in_memory_ == 0) return true;
    if (in_memory_ > models_[i].most_beside) return false;
    const std::uint64_t bytes = models_[i].bytes;
    if (limits_.memory_bytes > 0 && bytes_in_memory_ + bytes > limits_.memory_bytes) return false;
    return !limited_by_free_ || bytes_to_come_ + bytes + limits_.reserve_bytes <= free_bytes_;
  }

  void load(std::size_t i) {
    plan_.load.push_back(i);
    ++in_memory_;
    bytes_in_memory_ += models_[i].bytes;
    bytes_to_come_ += models_[i].bytes;
  }

  void unload(std::size_t i) {
    plan_.unload.push_back(i);
    leaving_ = true;
  }

  // Of the loaded models that `fits` takes, the one with the smallest key.
  template <typename Fits, typename Key>
  [[nodiscard]] std::optional<std::size_t> first_loaded(Fits fits, Key key) const {
    std::optional<std::size_t> best;
    for (std::size_t i = 0; i < models_.size(); ++i) {
      if (models_[i].state != ModelState::kLoaded || !fits(i)) continue;
      if (!best || key(models_[i]) < key(models_[*best])) best = i;
    }
    return best;
  }

  void make_room(const ModelView& waiting) {
    if (leaving_) return;  // that may be enough: it shows when it is gone
    if (const auto idle = first_loaded([&](std::size_t i) { return is_idle(i); },
                                       [](const ModelView& m) { return m.used_ns; })) {
      return unload(*idle);
    }
    if (now_ns_ - waiting.waits_since_ns < limits_.patience_ns) return;
    const auto oldest = first_loaded([](std::size_t) { return true; },
                                     [](const ModelView& m) { return m.loaded_ns; });
    if (!oldest) return;
    plan_.hold = oldest;
    if (models_[*oldest].running == 0) unload(*oldest);
  }

  const std::vector<ModelView>& models_;
  const std::int64_t now_ns_;
  const SwapLimits& limits_;
  std::int64_t in_memory_ = 0;
  std::uint64_t bytes_in_memory_ = 0;
  std::uint64_t bytes_to_come_ = 0;  // of models that have not taken their memory yet
  bool limited_by_free_ = false;
  std::uint64_t free_bytes_ = 0;
  bool leaving_ = false;
  SwapPlan plan_;
};

}  // namespace

SwapPlan plan_swap(const SwapSnapshot& snapshot, const SwapLimits& limits) {
  return Swap(snapshot, limits).run();
}

}  // namespace hcache::router
