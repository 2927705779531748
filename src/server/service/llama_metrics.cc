#include "llama_metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>

#include <algorithm>
#include <string>

namespace hcache::server {
namespace {

// Counts of the scheduler's, which has the sums.
void raise_to(prometheus::Counter& counter, uint64_t total) {
  counter.Increment(std::max(0.0, static_cast<double>(total) - counter.Value()));
}

double rate(const prometheus::Counter& tokens, const prometheus::Counter& seconds) {
  return seconds.Value() > 0 ? tokens.Value() / seconds.Value() : 0;
}

}  // namespace

struct LlamaMetrics::Impl {
  explicit Impl(prometheus::Registry& all) : registry(all) {}
  prometheus::Registry& registry;

  prometheus::Counter& counter(const std::string& name, const char* help) {
    return prometheus::BuildCounter()
        .Name("llamacpp:" + name)
        .Help(help)
        .Register(registry)
        .Add({});
  }
  prometheus::Gauge& gauge(const std::string& name, const char* help) {
    return prometheus::BuildGauge().Name("llamacpp:" + name).Help(help).Register(registry).Add({});
  }

  prometheus::Counter& prompt_tokens =
      counter("prompt_tokens_total", "Prompt tokens that were computed");
  prometheus::Counter& cached_tokens =
      counter("prompt_tokens_cached_total", "Prompt tokens whose state was there or was restored");
  prometheus::Counter& prompt_s = counter("prompt_seconds_total", "Time of computing prompts");
  prometheus::Counter& reply_tokens = counter("tokens_predicted_total", "Tokens generated");
  prometheus::Counter& reply_s =
      counter("tokens_predicted_seconds_total", "Time from first to last tokens of replies");
  prometheus::Counter& steps = counter("n_decode_total", "Steps");
  prometheus::Counter& longest = counter("n_tokens_max", "Most tokens that a request ended with");
  prometheus::Counter& drafted =
      counter("spec_decode_num_draft_tokens_total", "Tokens that were guessed");
  prometheus::Counter& accepted =
      counter("spec_decode_num_accepted_tokens_total", "Of those, what came true");
  prometheus::Counter& drafts = counter("spec_decode_num_drafts_total", "Steps with guesses");
  prometheus::Gauge& prompt_rate =
      gauge("prompt_tokens_seconds", "Prompt tokens a second, over all requests so far");
  prometheus::Gauge& reply_rate =
      gauge("predicted_tokens_seconds", "Generated tokens a second, over all requests so far");
  prometheus::Gauge& processing = gauge("requests_processing", "Requests that run");
  prometheus::Gauge& deferred = gauge("requests_deferred", "Requests that wait");
  prometheus::Gauge& busy = gauge("n_busy_slots_per_decode", "Generated tokens over steps, so far");
};

LlamaMetrics::LlamaMetrics(prometheus::Registry& registry)
    : impl_(std::make_unique<Impl>(registry)) {}
LlamaMetrics::~LlamaMetrics() = default;

void LlamaMetrics::observe(const scheduler::Outcome& o) {
  const int64_t cached = o.resident_tokens + o.hidden_tokens + o.kv_tokens;
  impl_->cached_tokens.Increment(static_cast<double>(cached));
  impl_->prompt_tokens.Increment(static_cast<double>(o.recomputed_tokens + o.new_tokens));
  impl_->prompt_s.Increment(std::max(0.0, o.ttft_s - o.queue_s - o.restore_s));
  impl_->reply_tokens.Increment(static_cast<double>(o.generated_tokens));
  if (o.ttft_s > 0) impl_->reply_s.Increment(std::max(0.0, o.total_s - o.ttft_s));
  raise_to(impl_->longest, static_cast<uint64_t>(o.prompt_tokens + o.generated_tokens));
}

void LlamaMetrics::set(const scheduler::Snapshot& s) {
  const uint64_t steps = s.steps + s.restore_steps;
  raise_to(impl_->steps, steps);
  raise_to(impl_->drafted, s.drafted_tokens);
  raise_to(impl_->accepted, s.accepted_tokens);
  raise_to(impl_->drafts, s.drafts);
  impl_->prompt_rate.Set(rate(impl_->prompt_tokens, impl_->prompt_s));
  impl_->reply_rate.Set(rate(impl_->reply_tokens, impl_->reply_s));
  impl_->processing.Set(static_cast<double>(s.restoring + s.prefill + s.decoding));
  impl_->deferred.Set(static_cast<double>(s.queued + s.fetching));
  impl_->busy.Set(steps == 0 ? 0 : static_cast<double>(s.decode_rows) / static_cast<double>(steps));
}

}  // namespace hcache::server
