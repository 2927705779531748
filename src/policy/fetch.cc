#include "policy/fetch.h"

#include <algorithm>
#include <utility>

#include "base/names.h"

namespace hcache::policy {
namespace {

constexpr NameTable<FetchPolicy, 3> kPolicies = {{
    {FetchPolicy::kOnDemand, "on-demand"},
    {FetchPolicy::kSchedulerAware, "scheduler-aware"},
    {FetchPolicy::kCarTimer, "car-timer"},
}};

// Of the newest sample in a mean.
constexpr double kNewest = 0.1;

}  // namespace

std::string_view fetch_policy_name(FetchPolicy policy) {
  return kPolicies.at(static_cast<size_t>(policy)).second;
}

Result<FetchPolicy> parse_fetch_policy(std::string_view name) {
  return parse_name(kPolicies, "fetch policy", name);
}

void FetchWindow::add(uint64_t ticket, double bytes) {
  if (policy_ == FetchPolicy::kSchedulerAware) entries_[ticket] = {bytes, false};
}

void FetchWindow::remove(uint64_t ticket) { entries_.erase(ticket); }

std::optional<uint64_t> FetchWindow::next() {
  double bytes = 0;
  for (auto& [ticket, entry] : entries_) {
    bytes += entry.bytes;
    if (capacity_bytes_ > 0 && bytes > capacity_bytes_) break;
    if (!std::exchange(entry.named, true)) return ticket;
  }
  return std::nullopt;
}

void LoadTimer::Mean::add(double sample) {
  value = known ? value + kNewest * (sample - value) : sample;
  known = true;
}

void LoadTimer::replied(const std::string& key, int64_t tokens) {
  reply_tokens_[key].add(static_cast<double>(tokens));
  everybodys_reply_tokens_.add(static_cast<double>(tokens));
}

void LoadTimer::stepped(double seconds) { token_s_.add(seconds); }

void LoadTimer::loaded(int64_t tokens, double seconds) {
  if (tokens > 0) load_token_s_.add(seconds / static_cast<double>(tokens));
}

double LoadTimer::remaining_s(const std::string& key, int64_t generated, int64_t most) const {
  const auto found = reply_tokens_.find(key);
  const Mean& mean = found != reply_tokens_.end() ? found->second : everybodys_reply_tokens_;
  const auto last = static_cast<double>(most);
  const double end = mean.known ? std::min(mean.value, last) : last;
  return std::max(end - static_cast<double>(generated), 0.0) * token_s_.value;
}

double LoadTimer::load_s(int64_t tokens) const {
  return static_cast<double>(tokens) * load_token_s_.value;
}

}  // namespace hcache::policy
