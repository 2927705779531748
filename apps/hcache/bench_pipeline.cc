// hcache bench pipeline: what sequences decode together over several devices, with steps in flight
// on all of them and with the same steps one after another; and restoring to all of them at once.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <utility>

#include "bench.h"
#include "bench_device_restore.h"
#include "commands.h"
#include "engine/pipeline.h"
#include "model/logits.h"
#include "model/placement.h"
#include "session.h"
#include "slow_queue.h"

namespace hcache::cli {
namespace {

constexpr int kPromptTokens = 32;
constexpr int kCpuStages = 2;
constexpr double kBar = 1.6;  // of the pipeline over one step after another

// A way to decode all sequences.
struct Way {
  std::string name;
  int steps = 1;      // that the sequences are cut in
  int in_flight = 1;  // of those, at a time
  std::vector<double> tokens_per_s;
};

using Replies = std::vector<std::vector<int32_t>>;

class PipelineBench {
 public:
  PipelineBench(const PipelineBenchArgs& args, engine::Engine& engine,
                std::atomic<int64_t>& graph_ns)
      : args_(args), engine_(engine), graph_ns_(graph_ns) {
    const auto stages = static_cast<int>(engine.stage_ranges().size());
    ways_ = {{.name = "in flight", .steps = stages, .in_flight = stages, .tokens_per_s = {}},
             {.name = "one after another", .steps = stages, .in_flight = 1, .tokens_per_s = {}},
             {.name = "all in one", .steps = 1, .in_flight = 1, .tokens_per_s = {}}};
  }

  Status run(ProgressLine& line) {
    HCACHE_ASSIGN_OR_RETURN(const Replies expected, decode(ways_.back(), nullptr));
    for (const Way& way : ways_) {
      if (!line.update(fmt::format("{}: comparing tokens", way.name), 0)) return stopped();
      HCACHE_ASSIGN_OR_RETURN(const Replies replies, decode(way, nullptr));
      if (replies != expected) {
        return internal_error(fmt::format("{} gave other tokens than {}; nothing was timed",
                                          way.name, ways_.back().name));
      }
    }
    for (int64_t rep = 0; rep < args_.reps; ++rep) {
      wait_for_turn(args_);
      for (size_t i = 0; i < ways_.size(); ++i) {
        // Every other time in the reverse order.
        Way& way = ways_[rep % 2 == 0 ? i : ways_.size() - 1 - i];
        if (!line.update(fmt::format("{}: run {} of {}", way.name, rep + 1, args_.reps),
                         static_cast<double>(rep) / static_cast<double>(args_.reps))) {
          return stopped();
        }
        double seconds = 0;
        HCACHE_RETURN_IF_ERROR(decode(way, &seconds).status());
        way.tokens_per_s.push_back(static_cast<double>(args_.sequences * args_.gen) / seconds);
      }
    }
    return {};
  }

  [[nodiscard]] Json results() const {
    Json rows = Json::array();
    for (const Way& way : ways_) {
      rows.push_back({{"way", way.name},
                      {"steps", way.steps},
                      {"in_flight", way.in_flight},
                      {"tokens_per_s", spread(way.tokens_per_s, 1)},
                      {"samples", way.tokens_per_s}});
    }
    const std::vector<double> gains = this->gains(ways_[1]);
    return {{"stages", engine_.stage_ranges().size()},
            {"sequences", args_.sequences},
            {"gen", args_.gen},
            {"slow_row_ms", args_.row_ms},
            {"tokens_equal", true},
            {"gain", spread(gains, 1)},
            {"gain_samples", gains},
            {"gain_over_all_in_one", spread(this->gains(ways_[2]), 1)},
            {"bar", {{"least_gain", kBar}, {"met", median(gains) >= kBar}}},
            {"rows", std::move(rows)}};
  }

  [[nodiscard]] std::vector<std::vector<std::string>> table() const {
    std::vector<std::vector<std::string>> table = {
        {"steps", "a round", "in flight", "tokens/s", "min", "max", "gain of in flight"}};
    for (const Way& way : ways_) {
      const auto [least, most] =
          std::minmax_element(way.tokens_per_s.begin(), way.tokens_per_s.end());
      table.push_back({way.name, fmt::format("{}", way.steps), fmt::format("{}", way.in_flight),
                       fmt::format("{:.1f}", median(way.tokens_per_s)),
                       fmt::format("{:.1f}", *least), fmt::format("{:.1f}", *most),
                       fmt::format("{:.2f}", median(gains(way)))});
    }
    return table;
  }

 private:
  static Status stopped() { return cancelled("interrupted"); }

  // Of the pipeline over another way, pair by pair.
  [[nodiscard]] std::vector<double> gains(const Way& over) const {
    std::vector<double> gains;
    for (size_t i = 0; i < over.tokens_per_s.size(); ++i) {
      gains.push_back(ways_[0].tokens_per_s[i] / over.tokens_per_s[i]);
    }
    return gains;
  }

  struct Chains {
    std::vector<engine::SeqId> sequences;
    Replies replies;
  };

  // New sequences with their prompts and the first token of each reply.
  Result<Chains> prefill() {
    Chains chains;
    graph_ns_ = 0;
    const int32_t n_vocab = engine_.model().hparams().n_vocab;
    for (int64_t i = 0; i < args_.sequences; ++i) {
      HCACHE_ASSIGN_OR_RETURN(const engine::SeqId seq, engine_.create_sequence());
      chains.sequences.push_back(seq);
      std::vector<int32_t> prompt;
      for (int32_t t = 0; t < kPromptTokens; ++t) {
        prompt.push_back(static_cast<int32_t>(37 * t + 101 * i + 11) % n_vocab);
      }
      const engine::BatchItem item{.seq = seq, .tokens = prompt};
      HCACHE_ASSIGN_OR_RETURN(const engine::Logits logits, engine_.decode({&item, 1}));
      chains.replies.push_back({model::argmax(logits.rows[0])});
    }
    return chains;
  }

  Status finish(engine::Pipeline& pipeline, const std::vector<size_t>& members, Chains& chains) {
    HCACHE_ASSIGN_OR_RETURN(const engine::Logits logits, pipeline.finish());
    for (size_t i = 0; i < members.size(); ++i) {
      chains.replies[members[i]].push_back(model::argmax(logits.rows[i]));
    }
    return {};
  }

  // args_.gen greedy tokens of every sequence.
  Result<Replies> decode(const Way& way, double* seconds) {
    HCACHE_ASSIGN_OR_RETURN(Chains chains, prefill());
    std::vector<std::vector<size_t>> steps(static_cast<size_t>(way.steps));
    for (size_t i = 0; i < chains.sequences.size(); ++i) steps[i % steps.size()].push_back(i);
    std::erase_if(steps, [](const auto& members) { return members.empty(); });
    engine::Pipeline pipeline(engine_);
    std::deque<size_t> in_flight;
    const auto finish_oldest = [&] {
      const size_t step = in_flight.front();
      in_flight.pop_front();
      return finish(pipeline, steps[step], chains);
    };
    const double begin_s = now_s();
    for (int64_t round = 0; round < args_.gen; ++round) {
      for (size_t step = 0; step < steps.size(); ++step) {
        const auto most = std::min(static_cast<size_t>(way.in_flight), steps.size());
        if (in_flight.size() == most) HCACHE_RETURN_IF_ERROR(finish_oldest());
        std::vector<engine::BatchItem> items;
        for (const size_t i : steps[step]) {
          items.push_back(
              {.seq = chains.sequences[i], .tokens = std::span(chains.replies[i]).last(1)});
        }
        graph_ns_ = static_cast<int64_t>(args_.row_ms * 1e6 * static_cast<double>(items.size()));
        HCACHE_RETURN_IF_ERROR(pipeline.begin(items));
        in_flight.push_back(step);
      }
    }
    while (!in_flight.empty()) HCACHE_RETURN_IF_ERROR(finish_oldest());
    if (seconds != nullptr) *seconds = now_s() - begin_s;
    for (const engine::SeqId seq : chains.sequences) {
      HCACHE_RETURN_IF_ERROR(engine_.release_sequence(seq));
    }
    return std::move(chains.replies);
  }

  const PipelineBenchArgs& args_;
  engine::Engine& engine_;
  std::atomic<int64_t>& graph_ns_;
  std::vector<Way> ways_;
};

// The devices that are named, or as many of the CPU as there are to be stages.
Result<model::OpenDevices> open_stages(const PipelineBenchArgs& args) {
  const ModelOptions& options = args.runtime.model;
  if (options.device != "cpu") {
    return model::open_devices(options.device, options.threads, offload_options(options));
  }
  model::OpenDevices opened;
  for (int i = 0; i < kCpuStages; ++i) {
    HCACHE_ASSIGN_OR_RETURN(auto device, model::Device::open("cpu", 1));
    opened.placement.devices.push_back(device.get());
    opened.devices.push_back(std::move(device));
  }
  return opened;
}

}  // namespace

Status bench_pipeline(PipelineBenchArgs args) {
  if (args.runtime.model.device == "list") return list_devices();
  warn_of_debug_build();
  if (args.quick) {
    args.reps = 1;
    args.gen = std::min<int64_t>(args.gen, 4);
    args.history = std::min<int64_t>(args.history, 128);
  }
  HCACHE_ASSIGN_OR_RETURN(const std::string path, resolve_model(args.runtime.model.path));
  HCACHE_ASSIGN_OR_RETURN(const model::OpenDevices devices, open_stages(args));
  model::LoadOptions load;
  load.placement = devices.placement;
  HCACHE_ASSIGN_OR_RETURN(const auto model,
                          model::Model::load(path, *devices.devices.front(), load));
  std::atomic<int64_t> graph_ns{0};
  const int64_t decoding_tokens = args.sequences * (kPromptTokens + args.gen + 2);
  HCACHE_ASSIGN_OR_RETURN(
      const auto engine,
      engine::Engine::create(
          *model,
          {.arena_tokens = std::max(decoding_tokens, args.history),
           .max_batch_rows = std::max<int>(args.runtime.batch, kPromptTokens)},
          [&](model::Device& device) { return slow_queues(Env::real(), device, graph_ns); }));
  if (!engine->stages_overlap()) {
    return invalid_argument(
        "the layers are on one device, so no two steps can be computed at once; name several, as "
        "--device rpc:HOST:PORT,rpc:HOST:PORT");
  }
  ProgressLine line;
  PipelineBench bench(args, *engine, graph_ns);
  HCACHE_RETURN_IF_ERROR(bench.run(line));
  const Scratch scratch(args.runtime);
  HCACHE_ASSIGN_OR_RETURN(const auto restores, DeviceRestoreBench::open(args, *engine, graph_ns));
  HCACHE_RETURN_IF_ERROR(restores->run(line));
  line.finish();
  Json results = {{"machine", machine_json(*model)}};
  results.update(bench.results());
  results["restore"] = restores->results();
  HCACHE_RETURN_IF_ERROR(report(args, results, bench.table()));
  if (args.json_file != "-") fmt::print("\n{}", format_columns(restores->table()));
  return {};
}

}  // namespace hcache::cli
