// The batch engine on devices that complete late, on disks that fail, and with requests that come
// and go.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/fault_env.h"
#include "engine_hybrid_testing.h"
#include "late_compute_queue.h"
#include "late_copy_queue.h"

namespace hcache::engine::testing {
namespace {

constexpr size_t kPlenty = size_t{1} << 30;

const model::Model& multi_head() { return tiny_model("llama", 4, GGML_TYPE_F16); }

HybridOptions small_buffers(double share) {
  HybridOptions options;
  options.buffer_tokens = 512;
  options.max_batch_rows = 64;
  options.max_step_rows = 300;
  options.decisions = act_share(share);
  return options;
}

HybridOptions on_disk(double share, Env& env) {
  HybridOptions options = small_buffers(share);
  options.host_bytes = 0;
  options.disk_bytes = 16 << 20;
  options.disk_dir = "/blocks";
  options.env = &env;
  return options;
}

std::unique_ptr<HybridEngine> make(const model::Model& model, const HybridOptions& options,
                                   const MakeQueues& make_queues = nullptr) {
  return HybridEngine::create(model, options, make_queues).value();
}

// Adds the batch's requests; each one's index by its id.
std::map<RequestId, size_t> add_all(HybridEngine& engine, const BatchOfRequests& batch) {
  std::map<RequestId, size_t> index;
  for (size_t i = 0; i < batch.prompts.size(); ++i) {
    const auto n = static_cast<int64_t>(batch.prompts[i].size()) + batch.n_new;
    index[engine.add(batch.prompts[i], n).value()] = i;
  }
  return index;
}

// Keeps a step's rows, and lets every request that has any go on.
void take_rows(HybridEngine& engine, const HybridStep& step, int n_new,
               std::map<RequestId, size_t>& index, Replies& replies) {
  for (const RequestLogits& row : step.rows) {
    std::vector<Row>& reply = replies[index.at(row.id)];
    reply.emplace_back(row.logits.begin(), row.logits.end());
    if (static_cast<int>(reply.size()) == n_new) {
      HCACHE_EXPECT_OK(engine.remove(row.id));
      index.erase(row.id);
    } else {
      HCACHE_EXPECT_OK(engine.append(row.id, model::argmax(row.logits)));
    }
  }
}

class LateQueues : public ::testing::TestWithParam<bool> {};

// Whatever is not fenced or waited for shows as other bits.
TEST_P(LateQueues, GiveTheSameBits) {
  const BatchOfRequests batch = mixed_batch(multi_head(), 8, 2, 200, 4);
  const Replies expected = resident_replies(multi_head(), batch);
  const TempDir dir;
  for (unsigned seed = 1; seed <= 3; ++seed) {
    HybridOptions options = small_buffers(0.5);
    options.device_bytes = 1 << 20;
    options.host_bytes = 1 << 20;
    options.disk_bytes = kPlenty;
    options.disk_dir = dir.path().string();
    LateCopyQueue::Stats copies;
    LateComputeQueue::Stats graphs;
    const auto engine = make(multi_head(), options, [&](model::Device& device) {
      DeviceQueues queues = make_device_queues(device);
      if (GetParam()) {
        auto compute = std::make_unique<LateComputeQueue>(device, &graphs);
        queues.copy = std::make_unique<LateCopyQueue>(seed, &copies, compute.get());
        queues.compute = std::move(compute);
      } else {
        queues.copy = std::make_unique<LateCopyQueue>(seed, &copies);
      }
      return queues;
    });
    EXPECT_TRUE(same_replies(expected, hybrid_replies(*engine, batch))) << "seed " << seed;
    EXPECT_GT(copies.uploads, 0);
    EXPECT_GT(copies.downloads, 0);
    EXPECT_GT(copies.early_reads, 0);
    EXPECT_EQ(graphs.most_waiting > 1, GetParam());
  }
}

// Costs are measured so: on a device that computes asynchronously nothing else says what a graph
// took.
TEST_P(LateQueues, SampleTimesWhereTheyAreWaitedFor) {
  const BatchOfRequests batch = mixed_batch(multi_head(), 3, 150, 200, 3);
  for (const bool waits : {false, true}) {
    HybridOptions options = small_buffers(0.5);
    options.host_bytes = kPlenty;
    options.max_step_rows = 1000;
    options.waits_for_graphs = waits;
    LateCopyQueue::Stats copies;
    LateComputeQueue::Stats graphs;
    const auto engine = make(multi_head(), options, [&](model::Device& device) {
      DeviceQueues queues = make_device_queues(device);
      if (!GetParam()) return queues;
      auto compute = std::make_unique<LateComputeQueue>(device, &graphs);
      queues.copy = std::make_unique<LateCopyQueue>(7, &copies, compute.get());
      queues.compute = std::move(compute);
      return queues;
    });
    for (const Tokens& prompt : batch.prompts) {
      HCACHE_EXPECT_OK(engine->add(prompt, 300).status());
    }
    HCACHE_EXPECT_OK(engine->step().status());
    HCACHE_EXPECT_OK(engine->flush());
    for (RequestId id = 1; id <= 3; ++id) HCACHE_EXPECT_OK(engine->append(id, 5));
    const auto step = engine->step();
    ASSERT_TRUE(step.ok()) << step.status().to_string();
    ASSERT_FALSE(step->times.samples.empty());
    for (const BatchSample& s : step->times.samples) {
      ASSERT_GT(s.act_tokens, 0);
      const bool known = waits || !GetParam();
      EXPECT_EQ(s.generate_s > 0, known);
      EXPECT_EQ(s.forward_s > 0, known);
      // Host memory is behind a link where the device has its own.
      EXPECT_EQ(s.read_act_tokens > 0, GetParam());
      EXPECT_EQ(s.read_kv_tokens > 0, GetParam());
      EXPECT_EQ(s.load_act_s > 0 && s.load_kv_s > 0, GetParam() && waits);
    }
    EXPECT_EQ(step->times.read_bytes, 0U) << "of the disk";
  }
}

INSTANTIATE_TEST_SUITE_P(Copies, LateQueues, ::testing::Values(false, true),
                         [](const auto& tested) {
                           return std::string(tested.param ? "CopiesAndGraphs" : "CopiesAlone");
                         });

TEST(HybridFaults, ShortTransfersAreContinued) {
  FaultEnv env;
  env.set_short_transfers(true);
  const BatchOfRequests batch = mixed_batch(multi_head(), 8, 2, 200, 4);
  const auto engine = make(multi_head(), on_disk(0.5, env));
  EXPECT_TRUE(same_replies(resident_replies(multi_head(), batch), hybrid_replies(*engine, batch)));
}

TEST(HybridFaults, AFailedReadLeavesTheStepToBeTriedAgain) {
  FaultEnv env;
  const BatchOfRequests batch = mixed_batch(multi_head(), 6, 100, 200, 6);
  const auto engine = make(multi_head(), on_disk(0.5, env));
  auto index = add_all(*engine, batch);
  Replies replies(batch.prompts.size());
  int failed = 0;
  for (int step = 0; !index.empty(); ++step) {
    HCACHE_EXPECT_OK(engine->flush());
    if (step % 3 == 2) {
      env.set_failing_reads("batch-");
      // What has been read ahead before may serve one layer, not all of them.
      const auto broken = engine->step();
      EXPECT_EQ(broken.code(), Code::kDataLoss) << broken.status().to_string();
      EXPECT_NE(broken.status().message().find("/blocks/batch-"), std::string::npos);
      env.set_failing_reads("");
      ++failed;
    }
    const auto done = engine->step();
    ASSERT_TRUE(done.ok()) << done.status().to_string();
    take_rows(*engine, *done, batch.n_new, index, replies);
  }
  EXPECT_GE(failed, 2);
  EXPECT_TRUE(same_replies(resident_replies(multi_head(), batch), replies));
}

TEST(HybridFaults, AFullDiskIsSaidAndTheBlocksStay) {
  FaultEnv env;
  env.set_capacity(8 << 20);
  HybridOptions options = on_disk(0.5, env);
  options.disk_bytes = 8 << 20;
  const BatchOfRequests batch = mixed_batch(multi_head(), 4, 150, 200, 5);
  const auto engine = make(multi_head(), options);
  env.set_capacity(256 << 10);
  auto index = add_all(*engine, batch);
  Replies replies(batch.prompts.size());
  int refused = 0;
  for (int step = 0; step < 50 && !index.empty(); ++step) {
    const Status settled = engine->flush();
    if (!settled.ok()) {
      ++refused;
      EXPECT_EQ(settled.code(), Code::kResourceExhausted) << settled.to_string();
      EXPECT_NE(settled.message().find("/blocks/batch-"), std::string::npos) << settled.message();
      EXPECT_NE(settled.message().find("another directory"), std::string::npos);
    }
    const auto done = engine->step();
    ASSERT_TRUE(done.ok()) << done.status().to_string();
    take_rows(*engine, *done, batch.n_new, index, replies);
  }
  EXPECT_GE(refused, 1);
  EXPECT_TRUE(same_replies(resident_replies(multi_head(), batch), replies));
}

TEST(HybridFaults, ADiskTooSmallIsRefusedAtTheStart) {
  FaultEnv env;
  env.set_capacity(1 << 20);
  const auto engine = HybridEngine::create(multi_head(), on_disk(0.5, env));
  ASSERT_EQ(engine.code(), Code::kResourceExhausted) << engine.status().to_string();
  EXPECT_NE(engine.status().message().find("/blocks"), std::string::npos);
}

TEST(HybridFaults, NothingIsLeftOnTheDisk) {
  FaultEnv env;
  const auto engine = make(multi_head(), on_disk(0.5, env));
  hybrid_replies(*engine, mixed_batch(multi_head(), 2, 100, 150, 3));
  EXPECT_TRUE(env.files().empty());
}

TEST(HybridRequests, ComeAndGoInTheMiddle) {
  FaultEnv env;
  const BatchOfRequests batch = mixed_batch(multi_head(), 12, 2, 200, 5);
  const auto engine = make(multi_head(), on_disk(0.5, env));
  std::map<RequestId, size_t> index;
  Replies replies(batch.prompts.size());
  size_t next = 0;
  std::vector<RequestId> given_up;
  for (int step = 0; step < 200 && (next < batch.prompts.size() || !index.empty()); ++step) {
    // A new one in every step; now and then one that is given up half-way.
    if (next < batch.prompts.size()) {
      const auto n = static_cast<int64_t>(batch.prompts[next].size());
      index[engine->add(batch.prompts[next], n + batch.n_new).value()] = next;
      ++next;
    }
    if (step % 3 == 0) {
      given_up.push_back(
          engine->add(random_tokens(multi_head(), 130, 7 + static_cast<unsigned>(step)), 140)
              .value());
    }
    const auto done = engine->step();
    ASSERT_TRUE(done.ok()) << done.status().to_string();
    HybridStep rows = *done;
    std::erase_if(rows.rows, [&](const RequestLogits& row) { return !index.contains(row.id); });
    take_rows(*engine, rows, batch.n_new, index, replies);
    if (step % 3 == 1) {
      HCACHE_EXPECT_OK(engine->remove(given_up.back()));
      given_up.pop_back();
    }
  }
  for (const RequestId id : given_up) HCACHE_EXPECT_OK(engine->remove(id));
  EXPECT_TRUE(same_replies(resident_replies(multi_head(), batch), replies));
  HCACHE_EXPECT_OK(engine->flush());
  const HybridCacheUse use = engine->cache_use();
  EXPECT_EQ(use.host_bytes + use.disk_bytes + use.device_bytes, 0U);
}

TEST(HybridRequests, BlocksFollowTheDecisionsAndTheRoom) {
  HybridOptions options = small_buffers(0);
  const size_t block = 2 * 3 * 64 * 256 * 2;  // K and V, layers, tokens, width, F16
  options.device_bytes = block;
  options.host_bytes = 2 * block;
  options.disk_bytes = 4 * block;
  FaultEnv env;
  options.env = &env;
  options.disk_dir = "/blocks";
  const auto engine = make(multi_head(), options);
  const RequestId id = engine->add(random_tokens(multi_head(), 300, 1), 448).value();
  while (engine->computed(id) < 300) ASSERT_TRUE(engine->step().ok());
  HCACHE_EXPECT_OK(engine->flush());
  const std::vector<BlockEntry> table = engine->blocks(id);
  ASSERT_EQ(table.size(), 5U);
  EXPECT_EQ(table[0].place, BlockPlace::kDevice);
  EXPECT_EQ(table[1].place, BlockPlace::kHost);
  EXPECT_EQ(table[2].place, BlockPlace::kHost);
  EXPECT_EQ(table[3].place, BlockPlace::kDisk);
  EXPECT_EQ(table[4].place, BlockPlace::kHost);  // not complete
  EXPECT_EQ(table[4].n_rows, 300 - 4 * 64);
  EXPECT_EQ(engine->cache_use().device_bytes, block);
  EXPECT_EQ(engine->cache_use().disk_bytes, block);
  // Seven blocks are reserved of seven.
  const auto more = engine->add(random_tokens(multi_head(), 10, 1), 64);
  EXPECT_EQ(more.code(), Code::kResourceExhausted) << more.status().to_string();
  HCACHE_EXPECT_OK(engine->remove(id));
  EXPECT_TRUE(engine->add(random_tokens(multi_head(), 10, 1), 64).ok());
}

TEST(HybridRequests, AreRefusedWithAReason) {
  const auto engine = make(multi_head(), small_buffers(0.5));
  const Tokens prompt = random_tokens(multi_head(), 10, 1);
  EXPECT_EQ(engine->step().code(), Code::kFailedPrecondition);
  EXPECT_EQ(engine->add({}, 10).code(), Code::kInvalidArgument);
  EXPECT_EQ(engine->add(prompt, 9).code(), Code::kInvalidArgument);
  EXPECT_EQ(engine->add(Tokens{1, 2, -1}, 9).code(), Code::kInvalidArgument);
  const auto longer = engine->add(prompt, 513);
  EXPECT_EQ(longer.code(), Code::kOutOfRange);
  EXPECT_NE(longer.status().message().find("512"), std::string::npos);
  const RequestId id = engine->add(prompt, 11).value();
  HCACHE_EXPECT_OK(engine->append(id, 1));
  EXPECT_EQ(engine->append(id, 1).code(), Code::kOutOfRange);
  EXPECT_EQ(engine->append(id + 1, 1).code(), Code::kNotFound);
  EXPECT_EQ(engine->remove(id + 1).code(), Code::kNotFound);
}

TEST(HybridRequests, WrongMiniBatchesAreNotRun) {
  HybridOptions options = small_buffers(0.5);
  std::vector<std::vector<int>> formed;
  options.decisions.form_batches = [&](std::span<const BatchMember>, int64_t) { return formed; };
  const auto engine = make(multi_head(), options);
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(engine->add(random_tokens(multi_head(), 100, 1), 110).ok());
  }
  for (const auto& wrong : std::vector<std::vector<std::vector<int>>>{
           {{0}}, {{0, 1}, {1}}, {{0, 2}}, {{0}, {}, {1}}, {}}) {
    formed = wrong;
    EXPECT_EQ(engine->step().code(), Code::kInternal);
  }
  formed = {{1}, {0}};
  EXPECT_TRUE(engine->step().ok());
}

// Every page is read once a step: what was read ahead for the next step is used in it.
TEST(HybridLink, ReadsEachPageOnceAStep) {
  FaultEnv env;
  const BatchOfRequests batch = mixed_batch(multi_head(), 8, 100, 200, 39);
  const auto engine = make(multi_head(), on_disk(0.5, env));
  add_all(*engine, batch);
  uint64_t needed = 0;
  uint64_t read = 0;
  int n_rows = 0;
  const int n_wanted = static_cast<int>(batch.prompts.size()) * (batch.n_new + 1);
  while (n_rows < n_wanted) {
    const auto done = engine->step();
    ASSERT_TRUE(done.ok()) << done.status().to_string();
    needed += done->times.read_bytes;
    read += done->times.link_bytes;
    for (const RequestLogits& row : done->rows) {
      ++n_rows;
      // The last token of each is refused: the request is as long as it may be.
      engine->append(row.id, model::argmax(row.logits)).ignore("none has room at the end");
    }
  }
  EXPECT_GT(needed, 0U);
  EXPECT_EQ(read, needed);
}

TEST(HybridLink, SamplesAddUpToTheStep) {
  FaultEnv env;
  const BatchOfRequests batch = mixed_batch(multi_head(), 6, 128, 200, 8);
  const auto engine = make(multi_head(), on_disk(0.5, env));
  add_all(*engine, batch);
  while (true) {
    const auto done = engine->step();
    ASSERT_TRUE(done.ok()) << done.status().to_string();
    HCACHE_EXPECT_OK(engine->flush());
    if (done->times.decode_only) {
      const StepTimes& times = done->times;
      int64_t context = 0;
      uint64_t bytes = 0;
      for (const BatchSample& sample : times.samples) {
        context += sample.act_tokens + sample.kv_tokens;
        bytes += static_cast<uint64_t>(sample.read_act_tokens * 2 * 256 +
                                       sample.read_kv_tokens * 4 * 256);
        EXPECT_LE(sample.read_act_tokens, sample.act_tokens);
        EXPECT_LE(sample.read_kv_tokens, sample.kv_tokens);
      }
      EXPECT_EQ(context, 3 * times.context_tokens);
      EXPECT_EQ(bytes, times.read_bytes);
      EXPECT_EQ(static_cast<int>(times.samples.size()), 3 * times.n_batches);
      return;
    }
    for (const RequestLogits& row : done->rows) {
      HCACHE_EXPECT_OK(engine->append(row.id, model::argmax(row.logits)));
    }
  }
}

}  // namespace
}  // namespace hcache::engine::testing
