// What the server tells its operators: metrics and the line of a request.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "metrics.h"
#include "request_log.h"

namespace hcache::server {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

scheduler::Outcome restored_twice() {
  scheduler::Outcome o;
  o.id = 5;
  o.phase = scheduler::Phase::kDone;
  o.finish_reason = "length";
  o.prompt_tokens = 400;
  o.generated_tokens = 9;
  o.hidden_tokens = 300;
  o.new_tokens = 100;
  o.bytes.disk = 8192;
  o.queue_s = 0.001;
  o.restore_s = 0.5;
  o.ttft_s = 0.75;
  o.total_s = 2;
  o.preempted_at_s = {1.5};
  policy::RestoreRecord first;
  first.restore_s = 0.2;
  first.predicted_restore_s = 0.19;
  first.hidden_tokens = 300;
  first.hidden_pages = {.disk = 5000};
  first.kv_pages = {.disk = 700};
  first.devices = {{.device = "RPC0", .n_layers = 2, .pages = {.disk = 2850}},
                   {.device = "RPC1", .n_layers = 2, .pages = {.disk = 2850}}};
  policy::RestoreRecord second;
  second.schedule = "H:26 KV:4";
  second.restore_s = 0.3;
  second.predicted_restore_s = 0.06;
  second.alone = false;
  second.kv_tokens = 310;
  second.kv_pages = {.dram = 900, .disk = 100};
  second.devices = {{.device = "RPC0", .n_layers = 2, .pages = {.dram = 400, .disk = 100}},
                    {.device = "RPC1", .n_layers = 2, .pages = {.dram = 500}}};
  o.restores = {first, second};
  return o;
}

TEST(MetricsTest, RestoresAreCountedByTierAndMethod) {
  Metrics metrics;
  metrics.observe(restored_twice());
  const std::string text = metrics.text({});
  for (const char* line : {
           "hcache_restored_bytes_total{method=\"hidden\",tier=\"disk\"} 5000",
           "hcache_restored_bytes_total{method=\"hidden\",tier=\"dram\"} 0",
           "hcache_restored_bytes_total{method=\"kv\",tier=\"disk\"} 800",
           "hcache_restored_bytes_total{method=\"kv\",tier=\"dram\"} 900",
           "hcache_restored_device_bytes_total{device=\"RPC0\"} 3350",
           "hcache_restored_device_bytes_total{device=\"RPC1\"} 3350",
           "hcache_restore_seconds_count{method=\"hidden\",tier=\"disk\"} 1",
           "hcache_restore_seconds_count{method=\"kv\",tier=\"dram\"} 1",
           "hcache_restore_seconds_sum{method=\"kv\",tier=\"dram\"} 0.3",
       }) {
    EXPECT_THAT(text, HasSubstr(std::string(line) + "\n"));
  }
}

TEST(MetricsTest, ThePlannersErrorIsAShareOfWhatWasMeasured) {
  Metrics metrics;
  metrics.observe(restored_twice());
  const std::string text = metrics.text({});
  for (const char* line : {
           // |0.19 - 0.2| / 0.2 = 0.05, |0.06 - 0.3| / 0.3 = 0.8
           "hcache_planner_error_ratio_bucket{alone=\"yes\",le=\"0.02\"} 0",
           "hcache_planner_error_ratio_bucket{alone=\"yes\",le=\"0.1\"} 1",
           "hcache_planner_error_ratio_bucket{alone=\"no\",le=\"0.75\"} 0",
           "hcache_planner_error_ratio_bucket{alone=\"no\",le=\"1\"} 1",
       }) {
    EXPECT_THAT(text, HasSubstr(std::string(line) + "\n"));
  }
}

TEST(MetricsTest, ARestoreOfNothingIsNone) {
  Metrics metrics;
  scheduler::Outcome o;
  o.phase = scheduler::Phase::kDone;
  o.restores.emplace_back().restore_s = 0.1;
  metrics.observe(o);
  EXPECT_THAT(metrics.text({}), Not(HasSubstr("hcache_restore_seconds_count")));
}

TEST(MetricsTest, ReadsSaverAndStoreOff) {
  Metrics metrics;
  MetricsSnapshot snapshot;
  snapshot.saver.backlog_bytes = 12345;
  snapshot.store.checksum_failures = 3;
  const std::string text = metrics.text(snapshot);
  EXPECT_THAT(text, HasSubstr("hcache_saver_backlog_bytes 12345\n"));
  EXPECT_THAT(text, HasSubstr("hcache_checksum_failures 3\n"));
}

TEST(MetricsTest, ShowsBatchesWhereTheServerTakesThem) {
  Metrics metrics;
  EXPECT_THAT(metrics.text({}), Not(HasSubstr("hcache_batches{")));
  MetricsSnapshot snapshot;
  BatchesStat& batches = snapshot.batches.emplace();
  batches.tally.by_status.at(static_cast<size_t>(BatchStatus::kInProgress)) = 2;
  batches.tally.counts = {.total = 20, .completed = 7, .failed = 1};
  batches.in_flight = 4;
  batches.completed = 3;
  batches.bytes = 4096;
  const std::string text = metrics.text(snapshot);
  for (const char* line :
       {"hcache_batches{status=\"in_progress\"} 2", "hcache_batches{status=\"failed\"} 0",
        "hcache_batch_requests{state=\"waiting\"} 8",
        "hcache_batch_requests{state=\"in-flight\"} 4",
        "hcache_batch_answers{result=\"completed\"} 3", "hcache_batch_bytes 4096"}) {
    EXPECT_THAT(text, HasSubstr(std::string(line) + "\n"));
  }
}

TEST(RequestLineTest, HoldsTheWholeStoryInOneLine) {
  EXPECT_EQ(
      request_line("abc123", 1, "key-1a2b3c4d", restored_twice()),
      "request id=abc123 choice=1 key=key-1a2b3c4d result=done finish=length "
      "prompt_tokens=400 reply_tokens=9 resident=0 hidden=300 kv=0 recomputed=0 new=100 dropped=0 "
      "dram_bytes=0 disk_bytes=8192 remote_bytes=0 queue_ms=1.0 restore_ms=500.0 "
      "predicted_ms=250.0 "
      "ttft_ms=750.0 total_ms=2000.0 preemptions=1 plan=\"H:26 KV:4\"");
}

TEST(RequestLineTest, NamesAFailureByItsCodeAlone) {
  scheduler::Outcome o;
  o.phase = scheduler::Phase::kFailed;
  o.status = internal_error("the text 'secret' can't be computed");
  const std::string line = request_line("abc", 0, "", o);
  EXPECT_THAT(line, StartsWith("request id=abc choice=0 key=- result=failed finish=internal "));
  EXPECT_THAT(line, EndsWith("plan=\"\""));
  EXPECT_THAT(line, Not(HasSubstr("secret")));
}

}  // namespace
}  // namespace hcache::server
