#include "api/stop_matcher.h"

#include <algorithm>
#include <utility>

#include "model/tokenizer.h"

namespace hcache::api {
namespace {

// The length of the longest end of `text` that `stop` begins with, itself not included.
size_t begun(std::string_view text, std::string_view stop) {
  for (size_t n = std::min(text.size(), stop.size() - 1); n > 0; n--) {
    if (text.substr(text.size() - n) == stop.substr(0, n)) return n;
  }
  return 0;
}

}  // namespace

StopMatcher::StopMatcher(std::vector<std::string> stops) : stops_(std::move(stops)) {
  stops_.erase(std::remove(stops_.begin(), stops_.end(), std::string()), stops_.end());
}

std::string StopMatcher::push(std::string_view bytes) {
  if (stopped()) return {};
  bytes_ += bytes;
  held_ += model::take_valid_utf8(bytes_);
  return release();
}

std::string StopMatcher::flush() {
  if (stopped()) return {};
  if (!std::exchange(bytes_, {}).empty()) held_ += "\uFFFD";
  std::string out = release();
  return out + std::exchange(held_, {});
}

std::string StopMatcher::release() {
  size_t first_end = std::string::npos;
  size_t begin = 0;
  for (const std::string& stop : stops_) {
    const size_t at = held_.find(stop);
    if (at == std::string::npos) continue;
    const size_t end = at + stop.size();
    if (end < first_end || (end == first_end && at < begin)) {
      first_end = end;
      begin = at;
      stop_string_ = stop;
    }
  }
  if (stopped()) {
    held_.resize(begin);
    return std::exchange(held_, {});
  }
  size_t keep = 0;
  for (const std::string& stop : stops_) keep = std::max(keep, begun(held_, stop));
  std::string out = held_.substr(0, held_.size() - keep);
  held_.erase(0, held_.size() - keep);
  return out;
}

}  // namespace hcache::api
