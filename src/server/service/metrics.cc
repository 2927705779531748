#include "metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <sstream>

#include "base/sync.h"
#include "llama_metrics.h"

namespace hcache::server {
namespace {

using prometheus::Labels;

// Seconds: from a resident conversation's answer to a long prompt computed from nothing.
const prometheus::Histogram::BucketBoundaries kFirstToken = {
    0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 20, 40, 80};
const prometheus::Histogram::BucketBoundaries kBetweenTokens = {
    0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1, 2};
// Shares of the measured time.
const prometheus::Histogram::BucketBoundaries kPlannerError = {0.02, 0.05, 0.1, 0.15, 0.2, 0.3,
                                                               0.5,  0.75, 1,   2,    5};

// What most of a restore's rows were restored by, and where most of its bytes came from.
const char* main_method(const policy::RestoreRecord& r) {
  if (r.kept_rows > 0) return "kept";
  if (r.recomputed_tokens > std::max(r.hidden_tokens, r.kv_tokens)) return "recompute";
  return r.hidden_tokens >= r.kv_tokens ? "hidden" : "kv";
}
const char* main_tier(const policy::RestoreRecord& r) {
  const uint64_t dram = r.hidden_pages.dram + r.kv_pages.dram;
  const uint64_t disk = r.hidden_pages.disk + r.kv_pages.disk;
  const uint64_t remote = r.hidden_pages.remote + r.kv_pages.remote;
  if (dram + disk + remote == 0) return "none";
  if (remote > std::max(dram, disk)) return "remote";
  return dram > disk ? "dram" : "disk";
}

}  // namespace

struct Metrics::Impl {
  prometheus::Registry registry;

  prometheus::Family<prometheus::Histogram>& histogram(const char* name, const char* help) {
    return prometheus::BuildHistogram().Name(name).Help(help).Register(registry);
  }
  prometheus::Family<prometheus::Counter>& counter(const char* name, const char* help) {
    return prometheus::BuildCounter().Name(name).Help(help).Register(registry);
  }
  prometheus::Family<prometheus::Gauge>& gauge(const char* name, const char* help) {
    return prometheus::BuildGauge().Name(name).Help(help).Register(registry);
  }

  prometheus::Histogram& first_token =
      histogram("hcache_ttft_seconds", "From a request's arrival to its first token")
          .Add({}, kFirstToken);
  prometheus::Histogram& between_tokens =
      histogram("hcache_tbt_seconds", "Between two tokens of a reply").Add({}, kBetweenTokens);
  prometheus::Family<prometheus::Histogram>& restore_seconds =
      histogram("hcache_restore_seconds",
                "Restoring a conversation, from begin to end, by where most of its bytes came from "
                "and how most of its tokens were restored");
  prometheus::Family<prometheus::Histogram>& planner_error =
      histogram("hcache_planner_error_ratio",
                "Of each restore: |predicted - measured| / measured, both from its begin until its "
                "last rows are in the arena; alone=no: other requests were computed or restored "
                "meanwhile, which the plan does not know of");
  prometheus::Family<prometheus::Counter>& requests =
      counter("hcache_requests_total", "Requests that ended, by how");
  prometheus::Family<prometheus::Counter>& prompt_tokens =
      counter("hcache_prompt_tokens_total", "Prompt tokens, by where their state came from");
  prometheus::Counter& reply_tokens =
      counter("hcache_reply_tokens_total", "Tokens generated").Add({});
  prometheus::Family<prometheus::Counter>& drafted_tokens =
      counter("hcache_drafted_tokens_total",
              "Tokens that were guessed and computed along with others, by whether they came true");
  prometheus::Family<prometheus::Counter>& restored_bytes = counter(
      "hcache_restored_bytes_total", "Saved state that restores used, by tier and by method");
  prometheus::Family<prometheus::Counter>& device_bytes =
      counter("hcache_restored_device_bytes_total",
              "Saved state that restores used, by the device that has its layers");
  prometheus::Counter& preemptions =
      counter("hcache_preemptions_total", "Running requests that had to make room").Add({});

  // Totals that others count are set when they are read, and so are gauges.
  prometheus::Family<prometheus::Gauge>& running =
      gauge("hcache_requests", "Requests now, by state");
  prometheus::Family<prometheus::Gauge>& arena =
      gauge("hcache_arena_cells", "Cells of the KV arena, by use");
  prometheus::Family<prometheus::Gauge>& evictions =
      gauge("hcache_evictions", "Sequences evicted from the arena so far, by reason");
  prometheus::Family<prometheus::Gauge>& steps =
      gauge("hcache_steps", "Steps so far, by whether a restore was in flight");
  prometheus::Family<prometheus::Gauge>& step_seconds =
      gauge("hcache_step_seconds", "Time of steps so far, by whether a restore was in flight");
  prometheus::Gauge& step_stretch =
      gauge("hcache_step_stretch_max",
            "Longest step of replies beside a restore, over that without")
          .Add({});
  prometheus::Gauge& step_stretch_own =
      gauge("hcache_step_stretch_own_max",
            "The same without what of the restore's slices the machine ran something else in")
          .Add({});
  prometheus::Family<prometheus::Gauge>& saver =
      gauge("hcache_saver_rows", "Rows of state so far, by what became of them");
  prometheus::Gauge& saver_bytes =
      gauge("hcache_saver_written_bytes", "State written to the store so far").Add({});
  prometheus::Gauge& saver_backlog =
      gauge("hcache_saver_backlog_bytes", "State that waits to be written to the store").Add({});
  prometheus::Family<prometheus::Gauge>& tier_bytes =
      gauge("hcache_store_bytes", "Saved state, by tier");
  prometheus::Gauge& snapshot_bytes =
      gauge("hcache_store_snapshot_bytes",
            "Of saved state on the disks, snapshots: state that is not kept by tokens")
          .Add({});
  prometheus::Gauge& snapshots_dropped =
      gauge("hcache_store_snapshots_dropped",
            "Snapshots dropped so far, to stay within their quota")
          .Add({});
  prometheus::Family<prometheus::Gauge>& lookups =
      gauge("hcache_dram_lookups", "Pages looked for in host memory so far, by result");
  prometheus::Family<prometheus::Gauge>& remote_up =
      gauge("hcache_remote_up", "Whether the remote store is thought to answer");
  prometheus::Family<prometheus::Gauge>& remote_bytes =
      gauge("hcache_remote_bytes", "State to and from the remote store so far, and on its way");
  prometheus::Family<prometheus::Gauge>& remote_events =
      gauge("hcache_remote_events", "What happened with the remote store so far");
  prometheus::Gauge& read_ahead =
      gauge("hcache_read_ahead_bytes", "Read from disks for requests that waited, so far").Add({});
  prometheus::Gauge& media_encoded =
      gauge("hcache_media_encoded", "Pictures and sounds that the projector has run for, so far")
          .Add({});
  prometheus::Gauge& weights_streamed =
      gauge("hcache_weights_streamed_bytes",
            "Weights of layers that are not on the device brought there, so far")
          .Add({});
  prometheus::Gauge& weights_wait =
      gauge("hcache_weights_wait_seconds", "Steps waited for weights to be read, so far").Add({});
  prometheus::Gauge& weights_errors =
      gauge("hcache_weights_read_errors", "Reads of weights that failed, so far").Add({});
  prometheus::Gauge& checksum_failures =
      gauge("hcache_checksum_failures", "Saved pages that failed their check when read, so far")
          .Add({});
  prometheus::Family<prometheus::Gauge>& batches =
      gauge("hcache_batches", "Batches on this server, by status");
  prometheus::Family<prometheus::Gauge>& batch_requests =
      gauge("hcache_batch_requests", "Requests of batches that have not ended, by state");
  prometheus::Family<prometheus::Gauge>& batch_answers =
      gauge("hcache_batch_answers", "Requests of batches answered so far, by result");
  prometheus::Family<prometheus::Gauge>& batch_bytes =
      gauge("hcache_batch_bytes", "Files and batches on disk");
  prometheus::Gauge& sessions = gauge("hcache_sessions", "Conversations remembered").Add({});
  prometheus::Family<prometheus::Gauge>& connections =
      gauge("hcache_http_connections", "HTTP connections, by state");
  LlamaMetrics llama{registry};
};

Metrics::Metrics() : impl_(std::make_unique<Impl>()) {
  // Series that exist from the start, so that a first event shows in rate().
  for (const char* alone : {"yes", "no"}) {
    impl_->planner_error.Add({{"alone", alone}}, kPlannerError);
  }
  observe_bytes("hidden", {});
  observe_bytes("kv", {});
}
Metrics::~Metrics() = default;

void Metrics::observe(const scheduler::Outcome& o) {
  impl_->requests.Add({{"result", std::string(scheduler::phase_name(o.phase))}}).Increment();
  impl_->llama.observe(o);
  if (o.ttft_s > 0) impl_->first_token.Observe(o.ttft_s);
  for (const policy::RestoreRecord& restore : o.restores) observe_restore(restore);
  const std::array<std::pair<const char*, int64_t>, 5> sources = {
      {{"resident", o.resident_tokens},
       {"hidden", o.hidden_tokens},
       {"kv", o.kv_tokens},
       {"recomputed", o.recomputed_tokens},
       {"new", o.new_tokens}}};
  for (const auto& [source, tokens] : sources) {
    impl_->prompt_tokens.Add({{"source", source}}).Increment(static_cast<double>(tokens));
  }
  impl_->reply_tokens.Increment(static_cast<double>(o.generated_tokens));
  impl_->preemptions.Increment(static_cast<double>(o.preempted_at_s.size()));
  if (o.drafted_tokens == 0) return;
  const auto drafted = [&](const char* accepted, int64_t n) {
    impl_->drafted_tokens.Add({{"accepted", accepted}}).Increment(static_cast<double>(n));
  };
  drafted("yes", o.accepted_tokens);
  drafted("no", o.drafted_tokens - o.accepted_tokens);
}

void Metrics::observe_restore(const policy::RestoreRecord& restore) {
  if (restore.hidden_tokens + restore.kv_tokens + restore.recomputed_tokens == 0) return;
  impl_->restore_seconds
      .Add({{"tier", main_tier(restore)}, {"method", main_method(restore)}}, kFirstToken)
      .Observe(restore.restore_s);
  observe_bytes("hidden", restore.hidden_pages);
  observe_bytes("kv", restore.kv_pages);
  for (const policy::RestoredDevice& part : restore.devices) {
    impl_->device_bytes.Add({{"device", part.device}})
        .Increment(static_cast<double>(part.pages.total()));
  }
  const double predicted_s = restore.predicted_restore_s;
  if (predicted_s <= 0 || restore.restore_s <= 0) return;
  impl_->planner_error.Add({{"alone", restore.alone ? "yes" : "no"}}, kPlannerError)
      .Observe(std::abs(predicted_s - restore.restore_s) / restore.restore_s);
}

void Metrics::observe_bytes(const char* method, const policy::TierBytes& bytes) {
  const std::array<std::pair<const char*, uint64_t>, 3> tiers = {
      {{"dram", bytes.dram}, {"disk", bytes.disk}, {"remote", bytes.remote}}};
  for (const auto& [tier, n] : tiers) {
    impl_->restored_bytes.Add({{"tier", tier}, {"method", method}})
        .Increment(static_cast<double>(n));
  }
}

void Metrics::observe_gap(double seconds) { impl_->between_tokens.Observe(seconds); }

std::string Metrics::text(const MetricsSnapshot& snapshot) {
  const auto set = [](prometheus::Family<prometheus::Gauge>& family, const Labels& labels,
                      auto value) { family.Add(labels).Set(static_cast<double>(value)); };
  const scheduler::Snapshot& s = snapshot.scheduler;
  impl_->llama.set(s);
  set(impl_->running, {{"state", "queued"}}, s.queued);
  set(impl_->running, {{"state", "fetching"}}, s.fetching);
  set(impl_->running, {{"state", "restoring"}}, s.restoring);
  set(impl_->running, {{"state", "prefill"}}, s.prefill);
  set(impl_->running, {{"state", "decoding"}}, s.decoding);
  set(impl_->arena, {{"use", "active"}}, s.active_cells);
  set(impl_->arena, {{"use", "idle"}}, s.idle_cells);
  set(impl_->arena, {{"use", "free"}}, s.arena_cells - s.active_cells - s.idle_cells);
  for (size_t i = 0; i < scheduler::kEvictionReasons; ++i) {
    const auto reason = static_cast<scheduler::EvictionReason>(i);
    set(impl_->evictions, {{"reason", std::string(scheduler::eviction_reason_name(reason))}},
        s.evictions.at(i));
  }
  set(impl_->steps, {{"restoring", "no"}}, s.steps);
  set(impl_->steps, {{"restoring", "yes"}}, s.restore_steps);
  set(impl_->step_seconds, {{"restoring", "no"}}, s.step_s);
  set(impl_->step_seconds, {{"restoring", "yes"}}, s.restore_step_s);
  impl_->step_stretch.Set(s.restore_stretch_max);
  impl_->step_stretch_own.Set(s.restore_stretch_own_max);
  set(impl_->saver, {{"result", "captured"}}, snapshot.saver.rows_captured);
  set(impl_->saver, {{"result", "skipped"}}, snapshot.saver.rows_skipped);
  impl_->saver_bytes.Set(static_cast<double>(snapshot.saver.bytes_written));
  impl_->saver_backlog.Set(static_cast<double>(snapshot.saver.backlog_bytes));
  set(impl_->tier_bytes, {{"tier", "disk"}}, snapshot.store.allocated_bytes);
  set(impl_->tier_bytes, {{"tier", "dram"}}, snapshot.store.dram_bytes);
  impl_->snapshot_bytes.Set(static_cast<double>(snapshot.store.snapshot_bytes));
  impl_->snapshots_dropped.Set(static_cast<double>(snapshot.store.snapshots_dropped));
  set(impl_->lookups, {{"result", "hit"}}, snapshot.store.dram_hits);
  set(impl_->lookups, {{"result", "miss"}}, snapshot.store.dram_misses);
  if (const auto& remote = snapshot.store.remote) {
    set(impl_->remote_up, {}, remote->available ? 1 : 0);
    set(impl_->remote_bytes, {{"result", "read"}}, remote->bytes_read);
    set(impl_->remote_bytes, {{"result", "written"}}, remote->bytes_written);
    set(impl_->remote_bytes, {{"result", "waiting"}}, remote->backlog_bytes);
    set(impl_->remote_events, {{"event", "chunk-found"}}, remote->chunks_found);
    set(impl_->remote_events, {{"event", "page-promoted"}}, remote->pages_promoted);
    set(impl_->remote_events, {{"event", "page-skipped"}}, remote->pages_skipped);
    set(impl_->remote_events, {{"event", "failure"}}, remote->failures);
  }
  if (const auto& batches = snapshot.batches) {
    for (size_t i = 0; i < kBatchStatuses; ++i) {
      set(impl_->batches, {{"status", std::string(batch_status_name(static_cast<BatchStatus>(i)))}},
          batches->tally.by_status.at(i));
    }
    const BatchRun::Counts& counts = batches->tally.counts;
    set(impl_->batch_requests, {{"state", "waiting"}},
        std::max<int64_t>(0, counts.total - counts.done() - batches->in_flight));
    set(impl_->batch_requests, {{"state", "in-flight"}}, batches->in_flight);
    set(impl_->batch_answers, {{"result", "completed"}}, batches->completed);
    set(impl_->batch_answers, {{"result", "failed"}}, batches->failed);
    set(impl_->batch_bytes, {}, batches->bytes);
  }
  impl_->read_ahead.Set(static_cast<double>(snapshot.bytes_read_ahead));
  impl_->media_encoded.Set(static_cast<double>(snapshot.media_encoded));
  impl_->weights_streamed.Set(static_cast<double>(snapshot.weights.bytes));
  impl_->weights_wait.Set(snapshot.weights.wait_s);
  impl_->weights_errors.Set(static_cast<double>(snapshot.weights.read_errors));
  impl_->checksum_failures.Set(static_cast<double>(snapshot.store.checksum_failures));
  impl_->sessions.Set(static_cast<double>(snapshot.store.sessions));
  set(impl_->connections, {{"state", "open"}}, snapshot.http.connections_open);
  set(impl_->connections, {{"state", "idle"}}, snapshot.http.connections_idle);
  return prometheus::TextSerializer().Serialize(impl_->registry.Collect());
}

}  // namespace hcache::server
