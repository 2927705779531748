#include "libllama/media.h"

#include <algorithm>

namespace hcache::libllama {

const MediaRun* MediaRows::next(int64_t row) const {
  const auto run = std::upper_bound(runs_.begin(), runs_.end(), row,
                                    [](int64_t at, const MediaRun& r) { return at < r.end(); });
  return run == runs_.end() ? nullptr : &*run;
}

const MediaRun* MediaRows::at(int64_t row) const {
  const MediaRun* run = next(row);
  return run != nullptr && run->first <= row ? run : nullptr;
}

MediaRun::Position MediaRows::position(int64_t row) const {
  const MediaRun* run = next(row);
  if (run != nullptr && run->first <= row) {
    return run->positions[static_cast<size_t>(row - run->first)];
  }
  int64_t position = row;
  if (run != nullptr) {
    position = run->first_position - (run->first - row);
  } else if (!runs_.empty()) {
    const MediaRun& last = runs_.back();
    position = last.first_position + last.n_positions + (row - last.end());
  }
  const auto p = static_cast<int32_t>(position);
  return {p, p, p, p};
}

bool MediaRows::counts_rows() const {
  return std::all_of(runs_.begin(), runs_.end(), [](const MediaRun& run) {
    return run.n_positions == run.n_rows && run.first_position == run.first;
  });
}

int64_t MediaRows::step_end(int64_t from, int64_t to) const {
  const MediaRun* run = at(to);
  if (run == nullptr || !run->whole || run->first == to) return to;
  return run->first > from ? run->first : run->end();
}

}  // namespace hcache::libllama
