// What fills rows of the arena other than a step: saved K and V are copied there, saved hidden
// states are staged on the device and projected to K and V.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "base/status.h"
#include "engine/copy_queue.h"
#include "engine/engine.h"
#include "engine/weight_stream.h"
#include "hidden_types.h"
#include "model/model.h"
#include "sequences.h"
#include "stage.h"
#include "tensor_pool.h"

namespace hcache::engine {

// Threading: the engine's thread.
class RestoreOps {
 public:
  using Ticket = Engine::Ticket;

  RestoreOps(const model::Model& model, const EngineOptions& options, const Sequences& sequences,
             const Stages& stages, HiddenTypes& types, WeightStream& weights);

  // See Engine.
  Result<Ticket> load_kv(SeqId seq, int layer, int64_t first_pos, int n_rows, const std::byte* k,
                         const std::byte* v);
  Result<Ticket> stage_hidden(SeqId seq, int layer, int row_in_slice, int n_rows, ggml_type type,
                              const std::byte* rows);
  Status project_staged(SeqId seq, int layer, int64_t first_pos, int n_rows, ggml_type type);
  Status read_kv(SeqId seq, int layer, int64_t first_pos, int n_rows, std::byte* k, std::byte* v);
  void wait(Ticket ticket);
  bool done(Ticket ticket);
  // Waits for all tickets.
  void wait_for_all() { wait(last_ticket_); }
  // Drops what is staged for the sequence and was not projected.
  void drop_staged(SeqId seq);

  [[nodiscard]] size_t n_bytes() const;

 private:
  // Device memory for one slice of hidden rows.
  struct Slot {
    TensorPool pool;
    ggml_tensor* rows = nullptr;   // I8 [max_batch_rows * widest row]
    SeqId owner = -1;              // whose open slice it is; -1: none's
    CopyQueue::Ticket ticket = 0;  // the last copy into it since it was taken; 0: none
    CopyQueue::Mark mark = 0;      // behind the last product that read it
  };
  // A ticket given out, and what it stands for.
  struct Issued {
    Ticket ticket = 0;
    Stage* stage = nullptr;
    CopyQueue::Ticket copy = 0;
    std::unique_ptr<std::byte[]> held;  // what is copied, where it is the engine's; or null
  };

  Ticket issue(Stage& stage, CopyQueue::Ticket copy, std::unique_ptr<std::byte[]> held = nullptr);
  // load_kv() and stage_hidden() where devices share the layers.
  Ticket load_shares(int layer, int64_t cell, int n_rows, const std::byte* k, const std::byte* v);
  Ticket stage_shares(SeqId seq, int layer, int row_in_slice, int n_rows, size_t row_bytes,
                      const std::byte* rows);
  // Brings the staged rows that other devices were sent to each.
  void gather_staged(SeqId seq, int layer, int n_rows, size_t row_bytes);
  Status open_slots(SeqId seq, int layer);
  // The slice was projected; the slot is the last to be taken again.
  void close_slot(const Stage& stage, Slot* slot);
  [[nodiscard]] Status check_rows(SeqId seq, int layer, int64_t first_pos, int64_t n_rows) const;
  [[nodiscard]] Status check_writable(SeqId seq, int layer, int64_t first_pos,
                                      int64_t n_rows) const;
  [[nodiscard]] Status check_slice(int layer, int first_row, int n_rows) const;
  [[nodiscard]] Slot* open_slot(const Stage& stage, SeqId seq);
  Result<Slot*> take_slot(Stage& stage, SeqId seq);
  Status project(Stage& stage, ggml_tensor* rows, SeqId seq, int layer, int64_t first_pos,
                 int n_rows);

  const model::Model& model_;
  const EngineOptions& options_;
  const Sequences& sequences_;
  const Stages& stages_;
  HiddenTypes& types_;
  WeightStream& weights_;
  // Per stage; the first is the one to take next.
  std::vector<std::deque<std::unique_ptr<Slot>>> slots_;
  std::deque<Issued> issued_;  // oldest first, not known to be done
  Ticket last_ticket_ = 0;
};

}  // namespace hcache::engine
