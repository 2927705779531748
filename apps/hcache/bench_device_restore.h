// hcache bench pipeline's other half: the state of a conversation comes back to several devices, to
// all of them at once and to one after another.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bench.h"
#include "state/restorer.h"
#include "state/saver.h"
#include "store/store.h"

namespace hcache::cli {

// Threading: one thread, the engine's.
class DeviceRestoreBench {
 public:
  // Computes a conversation and saves it in a store of its own, by hidden states where a layer's
  // weights have a type for them. args (whose store is this benchmark's alone), engine and
  // graph_ns, what a graph takes longer from then on, must outlive it.
  static Result<std::unique_ptr<DeviceRestoreBench>> open(const PipelineBenchArgs& args,
                                                          engine::Engine& engine,
                                                          std::atomic<int64_t>& graph_ns);

  // Compares what both ways restore with each other and with what was computed, then times them in
  // turns.
  Status run(ProgressLine& line);
  [[nodiscard]] Json results() const;
  [[nodiscard]] std::vector<std::vector<std::string>> table() const;

 private:
  struct Way {
    std::string name;
    bool at_once = true;
    std::vector<double> seconds;
    policy::RestoreRecord record;  // of the last one
  };

  DeviceRestoreBench(const PipelineBenchArgs& args, engine::Engine& engine,
                     std::atomic<int64_t>& graph_ns);
  Status save_conversation();
  Status plan();
  // Gives the restored sequence, which the caller releases.
  Result<engine::SeqId> restore(Way& way, double* seconds);
  [[nodiscard]] std::vector<double> gains() const;

  const PipelineBenchArgs& args_;
  engine::Engine& engine_;
  std::atomic<int64_t>& graph_ns_;
  std::vector<int32_t> tokens_;
  std::vector<policy::Method> methods_;  // per layer
  std::vector<std::byte> computed_;      // K and V of the conversation
  bool kv_identical_ = false;            // what is restored to them
  uint64_t ring_bytes_ = 0;
  std::unique_ptr<store::Store> store_;
  std::unique_ptr<state::Saver> saver_;
  store::Match match_;
  policy::Plan plan_;
  std::vector<Way> ways_;
};

}  // namespace hcache::cli
