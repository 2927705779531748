#include "step_loop.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace hcache::engine {
namespace {

double seconds(int64_t ns) { return static_cast<double>(ns) * 1e-9; }

// The reads of `all` that are not among `some`; false where `some` has others.
bool subtract_reads(const std::vector<PageLoad>& all, const std::vector<PageLoad>& some,
                    std::vector<PageLoad>* rest) {
  const auto key = [](const PageLoad& load) {
    return std::tuple(load.read.file, load.read.offset, load.read.memory.data(),
                      load.read.memory.size());
  };
  const auto reads_of = [&](const std::vector<PageLoad>& loads) {
    std::vector<PageLoad> reads;
    for (const PageLoad& load : loads) {
      if (load.read.file != nullptr) reads.push_back(load);
    }
    std::sort(reads.begin(), reads.end(),
              [&](const PageLoad& a, const PageLoad& b) { return key(a) < key(b); });
    return reads;
  };
  const std::vector<PageLoad> needed = reads_of(all);
  const std::vector<PageLoad> begun = reads_of(some);
  size_t i = 0;
  for (const PageLoad& load : needed) {
    if (i < begun.size() && key(begun[i]) == key(load)) {
      ++i;
    } else {
      rest->push_back(load);
    }
  }
  return i == begun.size();
}

size_t disk_bytes(const std::vector<PageLoad>& loads) {
  size_t n_bytes = 0;
  for (const PageLoad& load : loads) n_bytes += load.read.memory.size();
  return n_bytes;
}

// Rows that come over the link: from the disk, and where the device is `far`, from host memory.
int64_t link_rows(const std::vector<PageLoad>& loads, bool far, size_t row_bytes) {
  size_t n_bytes = disk_bytes(loads);
  for (const PageLoad& load : loads) {
    if (far && load.host != nullptr) n_bytes += load.n_bytes;
  }
  return row_bytes == 0 ? 0 : static_cast<int64_t>(n_bytes / row_bytes);
}

}  // namespace

StepInput::Tables StepLoop::tables_of(const StepInput& step, const MiniBatch& batch) {
  StepInput::Tables tables;
  for (const StepMember& member : batch.members) tables.push_back(step.tables[member.request]);
  return tables;
}

LayerLoad StepLoop::load_of(const StepInput& step, int64_t task, uint64_t number) {
  const auto n_batches = static_cast<int64_t>(step.plan.batches.size());
  const MiniBatch& batch = step.plan.batches[task % n_batches];
  return p_.buffers.loads(p_.buffers.at(number), static_cast<int>(task / n_batches), batch,
                          tables_of(step, batch));
}

void StepLoop::begin_reads(Loading& loading, const std::vector<PageLoad>& act,
                           const std::vector<PageLoad>& kv) {
  std::vector<PageTransfer> act_reads = BatchBuffers::reads(act);
  std::vector<PageTransfer> kv_reads = BatchBuffers::reads(kv);
  if (act_reads.empty() && kv_reads.empty()) return;
  loading.tickets.push_back(p_.io->load(std::move(act_reads), std::move(kv_reads)));
}

void StepLoop::begin_load(const StepInput& step, int64_t task, uint64_t number) {
  p_.buffers.wait_for_landing(p_.buffers.at(number));
  Loading loading{.load = load_of(step, task, number), .tickets = {}};
  begin_reads(loading, loading.load.act, loading.load.kv);
  loading_.push_back(std::move(loading));
}

bool StepLoop::adopt(Loading& loading, LayerLoad needed) {
  LayerLoad rest;
  const bool fits = subtract_reads(needed.act, loading.load.act, &rest.act) &&
                    subtract_reads(needed.kv, loading.load.kv, &rest.kv);
  if (!fits) return false;
  loading.load = std::move(needed);
  begin_reads(loading, rest.act, rest.kv);
  return true;
}

// Loads that began in the step before serve this one where it is what was expected; blocks that
// have come to the disk since are read besides.
void StepLoop::adopt_loads(const StepInput& step) {
  const auto n_tasks = static_cast<size_t>(p_.layout.n_layer) * step.plan.batches.size();
  bool fits = loading_.size() <= n_tasks;
  for (size_t i = 0; fits && i < loading_.size(); ++i) {
    fits = adopt(loading_[i], load_of(step, static_cast<int64_t>(i), first_number_ + i));
  }
  if (!fits) drop_loads();
}

void StepLoop::drop_loads() {
  for (const Loading& loading : loading_) {
    for (const BlockIo::Ticket ticket : loading.tickets) {
      p_.io->wait_kv(ticket, nullptr).ignore("nobody needs what was read");
    }
  }
  loading_.clear();
}

Status StepLoop::run(const StepInput& step, const StepInput& next, std::vector<float>* logits,
                     std::vector<int>* logits_of, StepTimes* times) {
  const auto n_vocab = static_cast<size_t>(p_.model.hparams().n_vocab);
  logits->resize(static_cast<size_t>(step.n_wanted) * n_vocab);
  logits_of->clear();
  p_.graphs.new_step();
  act_inputs_of_ = -1;
  wanted_.clear();
  const int64_t busy_ns = p_.io == nullptr ? 0 : p_.io->read_busy_ns();
  const int64_t begin_ns = now_ns();
  const Status status = run_tasks({step, logits, logits_of, times}, next);
  if (status.ok()) {
    p_.ring.flush();
  } else {
    drop_loads();
    p_.ring.drop();
  }
  p_.stage.graphs().synchronize();
  times->total_s = seconds(now_ns() - begin_ns);
  if (p_.io != nullptr) {
    times->link_busy_s = seconds(p_.io->read_busy_ns() - busy_ns);
    const uint64_t before = std::exchange(counted_bytes_, p_.io->bytes_read());
    times->link_bytes = counted_bytes_ - before;
  }
  return status;
}

Status StepLoop::run_tasks(const Run& run, const StepInput& next) {
  const auto n_batches = static_cast<int64_t>(run.step.plan.batches.size());
  const int64_t n_tasks = p_.layout.n_layer * n_batches;
  const int64_t n_next = p_.layout.n_layer * static_cast<int64_t>(next.plan.batches.size());
  const auto n_buffers = static_cast<int64_t>(p_.buffers.size());
  HCACHE_RETURN_IF_ERROR(p_.graphs.set_rows(run.step.x));
  adopt_loads(run.step);
  for (auto task = static_cast<int64_t>(loading_.size()); task < std::min(n_buffers, n_tasks);
       ++task) {
    begin_load(run.step, task, first_number_ + static_cast<uint64_t>(task));
  }
  for (int64_t task = 0; task < n_tasks; ++task) {
    const auto layer = static_cast<int>(task / n_batches);
    const bool halves = p_.weights.in_halves(layer);
    const bool ends_layer = task % n_batches == n_batches - 1;
    if (task % n_batches == 0) {
      products_s_.assign(static_cast<size_t>(n_batches), 0);
      HCACHE_RETURN_IF_ERROR(
          acquire(run, layer, halves ? model::LayerPart::kAttention : model::LayerPart::kAll));
    }
    const Status status = run_task(run, task);
    if (ends_layer || !status.ok()) p_.weights.release(layer);
    HCACHE_RETURN_IF_ERROR(status);
    // Its buffer is the one of the task that comes after those which are being loaded.
    const int64_t then = task + n_buffers;
    const uint64_t number = first_number_ + static_cast<uint64_t>(then);
    if (then < n_tasks) {
      begin_load(run.step, then, number);
    } else if (p_.io != nullptr && then - n_tasks < n_next) {
      begin_load(next, then - n_tasks, number);
    }
    if (!ends_layer) continue;
    if (halves) HCACHE_RETURN_IF_ERROR(second_half(run, layer));
    const auto samples = std::span(run.times->samples).last(static_cast<size_t>(n_batches));
    for (size_t i = 0; i < samples.size(); ++i) samples[i].forward_s += products_s_[i];
  }
  first_number_ += static_cast<uint64_t>(n_tasks);
  return {};
}

Status StepLoop::acquire(const Run& run, int layer, model::LayerPart part) {
  const int64_t asked_ns = now_ns();
  const Status status = p_.weights.acquire(layer, part);
  run.times->weights_s += seconds(now_ns() - asked_ns);
  return status;
}

Status StepLoop::second_half(const Run& run, int layer) {
  if (is_last(layer) && wanted_.empty()) return {};
  HCACHE_RETURN_IF_ERROR(acquire(run, layer, model::LayerPart::kFeedForward));
  const int64_t begin_ns = now_ns();
  const Status status = is_last(layer) ? finish(run) : feed_forward(run, layer);
  settle();
  p_.weights.release(layer);
  HCACHE_RETURN_IF_ERROR(status);
  if (!p_.times_graphs) return {};
  const double half_s = seconds(now_ns() - begin_ns);
  const auto samples = std::span(run.times->samples).last(products_s_.size());
  for (size_t i = 0; i < samples.size(); ++i) {
    products_s_[i] +=
        half_s * static_cast<double>(samples[i].rows) / static_cast<double>(run.times->rows);
  }
  return {};
}

// No row depends on others here.
Status StepLoop::feed_forward(const Run& run, int layer) {
  const StepPlan& plan = run.step.plan;
  int64_t first = recomputes(layer) && !ends_context(layer) ? 0 : plan.n_context_rows;
  while (first < plan.n_rows) {
    int64_t n = std::min<int64_t>(plan.n_rows - first, p_.options.max_batch_rows);
    // Too few for the kernel that takes many are not left over.
    if (plan.n_rows - first - n < p_.least_rows) n = plan.n_rows - first;
    HCACHE_RETURN_IF_ERROR(p_.graphs.feed_forward(layer, first, n));
    first += n;
  }
  return {};
}

Status StepLoop::finish(const Run& run) {
  const auto n_vocab = static_cast<size_t>(p_.model.hparams().n_vocab);
  const auto most = static_cast<size_t>(p_.options.max_batch_rows);
  for (size_t first = 0; first < wanted_.size(); first += most) {
    const size_t n = std::min(most, wanted_.size() - first);
    const auto begin = wanted_.begin() + static_cast<std::ptrdiff_t>(first);
    std::vector<int32_t> rows(begin, begin + static_cast<std::ptrdiff_t>(n));
    rows.resize(std::max(n, static_cast<size_t>(p_.least_rows)), rows.back());
    HCACHE_ASSIGN_OR_RETURN(const ggml_tensor* logits, p_.graphs.finish(rows));
    p_.stage.graphs().get(logits, run.logits->data() + first * n_vocab,
                          n * n_vocab * sizeof(float));
  }
  return {};
}

Status StepLoop::wait(const Run& run, Loading& loading, bool all, BatchSample* sample) {
  if (loading.tickets.empty()) return {};
  const int64_t begin_ns = now_ns();
  Status first;
  for (const BlockIo::Ticket ticket : loading.tickets) {
    LoadTimes load;
    const Status status = all ? p_.io->wait_kv(ticket, &load) : p_.io->wait_act(ticket);
    if (first.ok()) first = status;
    sample->load_act_s += load.act_s;
    sample->load_kv_s += load.kv_s;
  }
  if (all) loading.tickets.clear();
  const double waited_s = seconds(now_ns() - begin_ns);
  sample->wait_s += waited_s;
  run.times->wait_s += waited_s;
  return first;
}

void StepLoop::upload(BatchBuffer& buffer, const std::vector<PageLoad>& loads, double* seconds_of) {
  const int64_t begin_ns = now_ns();
  p_.buffers.upload(buffer, loads);
  if (!p_.far || !p_.times_graphs) return;
  if (p_.waits) p_.buffers.wait_for_landing(buffer);
  *seconds_of += seconds(now_ns() - begin_ns);
}

Status StepLoop::run_task(const Run& run, int64_t task) {
  const auto n_batches = static_cast<int64_t>(run.step.plan.batches.size());
  const auto layer = static_cast<int>(task / n_batches);
  const auto index = static_cast<int>(task % n_batches);
  const MiniBatch& batch = run.step.plan.batches[index];
  BatchBuffer& buffer = p_.buffers.at(first_number_ + static_cast<uint64_t>(task));
  Loading& loading = loading_.front();
  BatchSample& sample =
      run.times->samples.emplace_back(BatchSample{.layer = layer, .batch = index});
  sample.read_act_tokens =
      link_rows(loading.load.act, p_.far, p_.layout.row_bytes(BlockKind::kAct, layer));
  sample.read_kv_tokens = link_rows(loading.load.kv, p_.far, 2 * p_.layout.kv_row_bytes);
  run.times->read_bytes += disk_bytes(loading.load.act) + disk_bytes(loading.load.kv);

  HCACHE_RETURN_IF_ERROR(wait(run, loading, false, &sample));
  upload(buffer, loading.load.act, &sample.load_act_s);
  p_.buffers.before_compute(buffer);
  HCACHE_RETURN_IF_ERROR(generate(run, layer, index, buffer, loading.load, &sample));
  HCACHE_RETURN_IF_ERROR(wait(run, loading, true, &sample));
  upload(buffer, loading.load.kv, &sample.load_kv_s);
  p_.ring.send();  // behind the uploads, which must not wait for the graphs before
  p_.buffers.before_compute(buffer);
  loading_.pop_front();

  HCACHE_RETURN_IF_ERROR(forward(run, layer, batch, buffer));
  p_.buffers.used(buffer);
  for (const StepMember& member : batch.members) {
    sample.rows += member.n_new;
    sample.cells += member.n_past + member.n_new;
    if (keeps(layer)) sample.kv_tokens += member.n_past - member.n_act - member.n_tokens;
  }
  return {};
}

Status StepLoop::generate(const Run& run, int layer, int index, BatchBuffer& buffer,
                          const LayerLoad& load, BatchSample* sample) {
  if (!keeps(layer)) return {};
  const MiniBatch& batch = run.step.plan.batches[index];
  const std::vector<ActRun> runs = p_.buffers.act_runs(batch, tables_of(run.step, batch));
  const int64_t n_rows = runs.empty() ? 0 : runs.back().first_row + runs.back().n_rows;
  if (n_rows > 0 && act_inputs_of_ != index) {
    std::vector<int32_t> positions;
    std::vector<int64_t> cells;
    for (const ActRun& r : runs) {
      for (int64_t i = 0; i < r.n_rows; ++i) {
        positions.push_back(static_cast<int32_t>(r.first_pos + i));
        cells.push_back(r.first_cell + i);
      }
    }
    // Rows that are taken along for the kernel's choice.
    positions.resize(positions.size() + static_cast<size_t>(p_.least_rows), 0);
    p_.graphs.set_act_rows(positions, cells);
    act_inputs_of_ = index;
  }
  const int64_t begin_ns = now_ns();
  HCACHE_RETURN_IF_ERROR(p_.graphs.generate(layer, buffer, n_rows, load.act, load.kv));
  sample->act_tokens = n_rows;
  settle();
  if (p_.times_graphs) sample->generate_s = seconds(now_ns() - begin_ns);
  return {};
}

Status StepLoop::forward(const Run& run, int layer, const MiniBatch& batch, BatchBuffer& buffer) {
  // What is recomputed of the context goes through the first layers, or through all of them.
  if (recomputes(layer)) {
    for (const int piece : batch.context) {
      HCACHE_RETURN_IF_ERROR(forward(run, layer, piece, buffer));
    }
  }
  for (const int piece : batch.fresh) HCACHE_RETURN_IF_ERROR(forward(run, layer, piece, buffer));
  return {};
}

Status StepLoop::forward(const Run& run, int layer, int index, BatchBuffer& buffer) {
  const StepPlan& plan = run.step.plan;
  const RowGroup& group = plan.groups[plan.pieces[index].group];
  if (index == group.pieces.front()) HCACHE_RETURN_IF_ERROR(project(run, layer, group));
  const int64_t begin_ns = now_ns();
  HCACHE_RETURN_IF_ERROR(p_.graphs.attend(plan, index, kv_only(layer, group), buffer));
  settle();
  if (p_.times_graphs) run.times->samples.back().forward_s += seconds(now_ns() - begin_ns);
  return index == group.pieces.back() ? output(run, layer, group) : Status();
}

void StepLoop::count(const Run& run, const RowGroup& group, int64_t begin_ns) {
  settle();
  if (!p_.times_graphs) return;
  const double row_s = seconds(now_ns() - begin_ns) / group.n_rows;
  for (const int index : group.pieces) {
    const Piece& piece = run.step.plan.pieces[index];
    products_s_[piece.batch] += row_s * piece.n_rows;
  }
}

std::vector<int32_t> StepLoop::wanted_rows(const Run& run, const RowGroup& group) {
  std::vector<int32_t> rows;
  for (const int index : group.pieces) {
    const Piece& piece = run.step.plan.pieces[index];
    for (const RowRange& range : piece.ranges) {
      const StepMember& member = run.step.plan.batches[piece.batch].members[range.member];
      if (!member.wants_logits || range.first_pos + range.n_rows != member.n_past + member.n_new) {
        continue;
      }
      rows.push_back(piece.first_row + range.first_row + range.n_rows - 1);
      run.logits_of->push_back(member.request);
    }
  }
  return rows;
}

// Where the rows that a graph captured of a layer go.
std::vector<StoreRing::Target> StepLoop::targets(const StepInput& step, int layer,
                                                 const RowGroup& group,
                                                 const CaptureLayout& layout) const {
  std::vector<StoreRing::Target> targets;
  const auto add_rows = [&](const Piece& piece, const RowRange& range) {
    const MiniBatch& batch = step.plan.batches[piece.batch];
    const auto& table = *step.tables[batch.members[range.member].request];
    for (int64_t r = 0; r < range.n_rows;) {
      const int64_t pos = range.first_pos + r;
      const int64_t n = std::min<int64_t>(kBlockTokens - pos % kBlockTokens, range.n_rows - r);
      const int64_t row = piece.first_row + range.first_row + r;
      const BlockStore::Id id = table[pos / kBlockTokens];
      const size_t row_bytes = p_.layout.row_bytes(p_.store.kind(id), layer);
      const auto add = [&](int part, int64_t offset) {
        targets.push_back(
            {.offset = static_cast<size_t>(offset) + static_cast<size_t>(row) * row_bytes,
             .n_bytes = static_cast<size_t>(n) * row_bytes,
             .page = p_.store.host_page(id, layer, part) +
                     static_cast<size_t>(pos % kBlockTokens) * row_bytes});
      };
      if (p_.store.kind(id) == BlockKind::kAct) {
        add(0, layout.act_offset);
      } else if (p_.store.kind(id) == BlockKind::kKv) {
        add(0, layout.k_offset);
        add(1, layout.v_offset);
      }
      r += n;
    }
  };
  for (const int index : group.pieces) {
    const Piece& piece = step.plan.pieces[index];
    for (const RowRange& range : piece.ranges) add_rows(piece, range);
  }
  return targets;
}

CaptureLayout StepLoop::capture_layout(const StepInput& step, int layer,
                                       const RowGroup& group) const {
  bool act = false;
  bool kv = false;
  for (const int index : group.pieces) {
    const Piece& piece = step.plan.pieces[index];
    for (const RowRange& range : piece.ranges) {
      const auto& table =
          *step.tables[step.plan.batches[piece.batch].members[range.member].request];
      const int64_t last = (range.first_pos + range.n_rows - 1) / kBlockTokens;
      for (int64_t block = range.first_pos / kBlockTokens; block <= last; ++block) {
        act = act || p_.store.kind(table[block]) == BlockKind::kAct;
        kv = kv || p_.store.kind(table[block]) == BlockKind::kKv;
      }
    }
  }
  return p_.graphs.capture_layout(layer, group.n_padded, act, kv);
}

Status StepLoop::project(const Run& run, int layer, const RowGroup& group) {
  const int64_t begin_ns = now_ns();
  LayerGraphs::Projection projection;
  projection.layer = layer;
  projection.kv_only = kv_only(layer, group);
  if (!group.is_context && keeps(layer)) {
    projection.layout = capture_layout(run.step, layer, group);
    if (projection.layout.n_bytes > 0) projection.capture = p_.ring.next();
  }
  HCACHE_RETURN_IF_ERROR(p_.graphs.project(run.step.plan, group, projection));
  if (projection.capture != nullptr) {
    p_.ring.captured(projection.layout.n_bytes, targets(run.step, layer, group, projection.layout));
  }
  count(run, group, begin_ns);
  return {};
}

Status StepLoop::output(const Run& run, int layer, const RowGroup& group) {
  if (kv_only(layer, group)) return {};
  const int64_t begin_ns = now_ns();
  LayerGraphs::Output output;
  output.layer = layer;
  output.attention_only = p_.weights.in_halves(layer);
  const size_t n_before = run.logits_of->size();
  if (is_last(layer) && !group.is_context) output.wanted = wanted_rows(run, group);
  const size_t n_wanted = output.wanted.size();
  for (size_t i = 0; output.attention_only && i < n_wanted; ++i) {
    wanted_.push_back(static_cast<int32_t>(group.first_row + static_cast<int64_t>(i)));
  }
  while (n_wanted > 0 && output.wanted.size() < static_cast<size_t>(p_.least_rows)) {
    output.wanted.push_back(output.wanted.back());
  }
  HCACHE_ASSIGN_OR_RETURN(const ggml_tensor* logits, p_.graphs.output(group, output));
  if (logits != nullptr) {
    const auto n_vocab = static_cast<size_t>(p_.model.hparams().n_vocab);
    p_.stage.graphs().get(logits, run.logits->data() + n_before * n_vocab,
                          n_wanted * n_vocab * sizeof(float));
  }
  count(run, group, begin_ns);
  return {};
}

}  // namespace hcache::engine
