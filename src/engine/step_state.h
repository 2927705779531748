// What a step is made of between prepare() and finish().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/attention.h"
#include "engine/copy_queue.h"
#include "engine/engine.h"

namespace hcache::engine {

class StepRunner;

// What one of the devices that share the layers captures of a step: K and V of its own heads, and
// on the first one the hidden rows.
struct CapturedShare {
  std::vector<CapturedLayer> layers;
  std::vector<size_t> ends;  // where each layer's part ends
  std::unique_ptr<std::byte[]> host;
};

struct StepState {
  struct Segment {
    SeqId seq = -1;
    int64_t first_pos = 0;
    int first_row = 0;
    int n_rows = 0;
    bool captured = true;
  };
  // Where the step's rows go, and what they attend, in the layers of one row group.
  struct Placed {
    std::vector<int64_t> cells;  // per row
    std::vector<AttentionSegment> attention;
  };

  StepState() = default;
  StepState(const StepState&) = delete;
  StepState& operator=(const StepState&) = delete;
  ~StepState();  // an abandoned step gives back the room that was reserved for it

  StepRunner* runner = nullptr;  // set once the step has room
  std::vector<Segment> segments;
  // Rows whose logits are wanted, then those of which the final norm is.
  std::vector<int32_t> output_rows;
  size_t n_logits = 0;
  std::vector<bool> hidden_outputs;  // in the order in which the items want them: is it the norm?
  std::vector<int32_t> tokens;
  std::vector<float> x;  // the rows before next_layer, as of when they last left the device
  std::vector<int32_t> positions;
  std::vector<Placed> placed;  // per row group
  uint64_t placed_epoch = 0;   // Sequences' when `placed` was made
  int n_rows = 0;
  int next_layer = 0;
  bool finished = false;
  std::vector<float> logits;
  std::vector<float> hidden;

  // Of each of the model's adapters one after the other, by how much it counts for each row; empty:
  // none counts for any. And which of them count for some.
  std::vector<float> adapter_scales;
  std::vector<bool> adapters;

  // Which row of the token table is a row's, where layer 0's K and V come from there; x then holds
  // the rows that the table lacks. Empty: each row has its own.
  std::vector<int32_t> token_rows;
  std::vector<int64_t> table_rows;  // of the table, for the rows of x
  std::vector<int32_t> new_tokens;  // theirs

  // How the step's rows lie in the captured block; empty when the tap is off or gave the block up.
  std::vector<CapturedLayer> capture;
  std::vector<size_t> capture_ends;  // where each layer's part of the block ends
  std::byte* capture_host = nullptr;
  std::vector<CapturedShare> capture_shares;       // per stage, where these share the layers
  std::vector<int> captured_to;                    // per stage: its layers before are on their way
  std::vector<CopyQueue::Ticket> capture_tickets;  // per stage: the last such copy
};

}  // namespace hcache::engine
