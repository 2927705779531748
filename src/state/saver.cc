#include "state/saver.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <thread>
#include <utility>
#include <variant>

#include "base/log.h"
#include "base/pace.h"
#include "base/sync.h"
#include "host_ring.h"
#include "planned_pages.h"
#include "ready_chunk.h"
#include "state/chosen_rows.h"
#include "state/identity.h"
#include "state/snapshot_pages.h"

namespace hcache::state {
namespace {

using engine::CapturedLayer;
using engine::CapturedRows;
using engine::SeqId;

constexpr int64_t kChunk = store::kChunkTokens;

struct OpenChunk {
  int64_t first_pos = 0;
  int64_t n_rows = 0;     // filled
  int64_t n_emitted = 0;  // rows that a tail chunk given to the store holds already
  std::vector<PageBuffer> layers;
};

struct SavedSequence {
  SeqId seq = -1;
  store::ChainFingerprints fingerprints = Fingerprint();
  Salt salt;
  std::vector<int32_t> tokens;
  SavedCut cut;    // rows' positions are less than their tokens' by what it dropped
  ChunkId parent;  // the last full chunk
  OpenChunk open;
  bool broken = false;  // rows were lost: nothing behind them can be saved
};

// A captured step.
struct Captured {
  std::byte* block = nullptr;
  std::vector<CapturedLayer> layers;
  std::vector<CapturedRows> rows;
  ggml_type kv_type = GGML_TYPE_F16;
  size_t kv_row = 0;
};

// What the engine's thread tells stage two, in order.
struct Begin {
  SavedSequence sequence;
  store::ChunkRef tail;
};
struct Tokens {
  SeqId seq = -1;
  int64_t first_pos = 0;
  std::vector<int32_t> tokens;
};
struct Fork {
  SeqId source = -1;
  SeqId seq = -1;
  int64_t n_rows = 0;
};
struct Cut {
  SeqId seq = -1;
  Fingerprint fingerprint;
  SavedCut cut;
};
struct Snapshot {
  SeqId seq = -1;
  int64_t n_tokens = 0;
  std::vector<std::byte> bytes;
  int64_t replaced = 0;
};
struct End {
  SeqId seq = -1;
};
constexpr SeqId kAllSequences = -1;
constexpr uint64_t kTailRingBytes = 8U << 20;
struct Flush {
  uint64_t number = 0;  // 0: no caller waits
  SeqId seq = kAllSequences;
};
using Command = std::variant<Begin, Tokens, Fork, Cut, Captured, ReadyChunk, Snapshot, End, Flush>;

class SaverImpl : public Saver {
 public:
  SaverImpl(Env& env, store::Store& store, std::unique_ptr<HostRing> ring, ggml_type kv_type,
            size_t kv_token_bytes, const SaverOptions& options)
      : env_(env),
        store_(store),
        options_(options),
        kv_token_bytes_(kv_token_bytes),
        ring_(std::move(ring)),
        kv_type_(kv_type) {
    if (!options_.direct) worker_ = std::thread([this] { work(); });
  }
  SaverImpl(const SaverImpl&) = delete;
  SaverImpl& operator=(const SaverImpl&) = delete;
  ~SaverImpl() override {
    flush().ignore("logged when it happened; a destructor has nobody to tell");
    {
      const MutexLock lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    if (worker_.joinable()) worker_.join();
  }

  // --- Engine's thread ---------------------------------------------------------------------
  void begin(SeqId seq, const store::ChainFingerprints& fingerprints, const Salt& salt,
             std::span<const int32_t> tokens, store::ChunkRef tail, SavedCut cut) override {
    SavedSequence sequence;
    sequence.seq = seq;
    sequence.fingerprints = fingerprints;
    sequence.cut = std::move(cut);
    sequence.salt = salt;
    sequence.tokens.assign(tokens.begin(), tokens.end());
    open_durable(seq, static_cast<int64_t>(tokens.size()));
    give(Begin{std::move(sequence), std::move(tail)});
  }
  void set_tokens(SeqId seq, int64_t first_pos, std::span<const int32_t> tokens) override {
    give(Tokens{seq, first_pos, {tokens.begin(), tokens.end()}});
  }
  void fork(SeqId source, SeqId seq, int64_t n_rows) override {
    open_durable(seq, 0);
    give(Fork{source, seq, n_rows});
  }
  void cut(SeqId seq, const Fingerprint& fingerprint, SavedCut cut) override {
    give(Cut{seq, fingerprint, std::move(cut)});
  }
  void keep_page(const store::ChunkInfo& chunk, const Salt& salt, uint16_t layer,
                 std::span<const std::byte> kv) override;
  bool keep_snapshot(SeqId seq, int64_t n_tokens, std::vector<std::byte> snapshot,
                     int64_t replaced) override {
    const size_t waiting = snapshot_bytes_;
    if (waiting > 0 && waiting + snapshot.size() > options_.ring_bytes) return false;
    snapshot_bytes_ += snapshot.size();
    give(Snapshot{seq, n_tokens, std::move(snapshot), replaced});
    return true;
  }
  void end(SeqId seq) override {
    give(End{seq});
    const MutexLock lock(mutex_);
    durable_.erase(seq);
  }
  void request_flush(SeqId seq) override { give(Flush{.number = 0, .seq = seq}); }
  int64_t durable_tokens(SeqId seq) const override {
    const MutexLock lock(mutex_);
    const auto it = durable_.find(seq);
    return it == durable_.end() ? kNotSaved : it->second;
  }
  Status flush() override;

  std::byte* reserve(size_t n_bytes) override {
    const MutexLock lock(mutex_);
    return ring_->take(n_bytes);
  }
  void publish(std::byte* block, const engine::StepCapture& capture) override {
    give(Captured{.block = block,
                  .layers = {capture.layers.begin(), capture.layers.end()},
                  .rows = {capture.rows.begin(), capture.rows.end()},
                  .kv_type = capture.kv_type,
                  .kv_row = capture.kv_row_bytes});
  }
  void drop(std::byte* block) override {
    const MutexLock lock(mutex_);
    ring_->give_back(block);
  }

  // --- Any thread --------------------------------------------------------------------------
  SaverStats stats() const override {
    const MutexLock lock(mutex_);
    SaverStats stats = stats_;
    stats.ring_peak_bytes = ring_->peak();
    stats.backlog_bytes = ring_->used() + ready_bytes_ + snapshot_bytes_;
    return stats;
  }

 private:
  void give(Command command);
  void work();
  bool hurried() const;

  // Stage two: the worker's thread, or the engine's with options_.direct.
  void run(Command& command);
  void open_sequence(Begin& begin);
  void fork_sequence(const Fork& fork);
  void replace_tokens(SavedSequence& sequence, const Tokens& tokens);
  void cut_sequence(SavedSequence& sequence, Cut& cut);
  Status rewind(SavedSequence& sequence, int64_t n_tokens);
  Status read_tail(SavedSequence& sequence, const store::ChunkRef& tail, int64_t n_rows);
  void cut_rows(const Captured& captured);
  void take_rows(SavedSequence& sequence, const Captured& captured, const CapturedRows& rows);
  void emit(SavedSequence& sequence);
  void emit_tail(SavedSequence& sequence) {
    if (!sequence.broken && sequence.open.n_rows > sequence.open.n_emitted) emit(sequence);
  }
  void add_ready(ReadyChunk chunk);
  void add_snapshot(const SavedSequence& sequence, const Snapshot& snapshot);
  void write_ready();
  // False: the store did not take them.
  bool write(std::span<const ReadyChunk> chunks);
  void note_durable(std::span<const ReadyChunk> chunks);
  void lose(SavedSequence& sequence, int64_t n_rows);
  void give_up(SavedSequence& sequence, const Status& why) {
    log::warn("sequence {} is not saved further: {}", sequence.seq, why.to_string());
    lose(sequence, 0);
  }
  // The engine's thread: from now on the sequence has an answer for durable_tokens().
  void open_durable(SeqId seq, int64_t n_tokens) {
    const MutexLock lock(mutex_);
    durable_[seq] = n_tokens;
  }
  // Stage two: unless the sequence has ended meanwhile.
  void set_durable(SeqId seq, int64_t n_tokens) {
    const MutexLock lock(mutex_);
    if (const auto it = durable_.find(seq); it != durable_.end()) it->second = n_tokens;
  }

  Env& env_;
  store::Store& store_;
  const SaverOptions options_;
  const size_t kv_token_bytes_;  // of a layer

  mutable Mutex mutex_;
  CondVar wake_;
  CondVar flushed_;
  const std::unique_ptr<HostRing> ring_ HCACHE_PT_GUARDED_BY(mutex_);
  std::deque<Command> commands_ HCACHE_GUARDED_BY(mutex_);
  // Leading tokens of what is being saved; kNotSaved: given up.
  std::map<SeqId, int64_t> durable_ HCACHE_GUARDED_BY(mutex_);
  SaverStats stats_ HCACHE_GUARDED_BY(mutex_);
  Status flush_error_ HCACHE_GUARDED_BY(mutex_);  // the first since the last flush
  uint64_t flushes_wanted_ HCACHE_GUARDED_BY(mutex_) = 0;
  uint64_t flushes_done_ HCACHE_GUARDED_BY(mutex_) = 0;
  bool stop_ HCACHE_GUARDED_BY(mutex_) = false;

  // Stage two's own.
  std::map<SeqId, SavedSequence> sequences_;
  std::vector<ReadyChunk> ready_;
  std::atomic<size_t> ready_bytes_ = 0;     // stats() reads it
  std::atomic<size_t> snapshot_bytes_ = 0;  // that wait to be added to those
  std::vector<ChunkId> replaced_;           // chunks whose snapshots are of no use any more
  int64_t ready_since_ns_ = 0;
  ggml_type kv_type_;
  KvPacker packer_;

  std::thread worker_;
};

void SaverImpl::keep_page(const store::ChunkInfo& chunk, const Salt& salt, uint16_t layer,
                          std::span<const std::byte> kv) {
  ReadyChunk ready{.seq = -1,
                   .id = chunk.id,
                   .parent = chunk.parent,
                   .fingerprint = chunk.fingerprint,
                   .salt = salt,
                   .first_pos = static_cast<int64_t>(chunk.first_position),
                   .tokens = chunk.tokens,
                   .layers = std::vector<PageBuffer>(layer + size_t{1})};
  ready.layers[layer].kv.assign(kv.begin(), kv.end());
  give(std::move(ready));
}

void SaverImpl::give(Command command) {
  if (options_.direct) {
    run(command);
    if (!ready_.empty()) write_ready();
    return;
  }
  {
    const MutexLock lock(mutex_);
    commands_.push_back(std::move(command));
  }
  wake_.notify_one();
}

Status SaverImpl::flush() {
  uint64_t number = 0;
  {
    const MutexLock lock(mutex_);
    number = ++flushes_wanted_;
  }
  give(Flush{number, kAllSequences});
  const MutexLock lock(mutex_);
  while (flushes_done_ < number) flushed_.wait(mutex_);
  return std::exchange(flush_error_, Status());
}

void SaverImpl::work() {
  const Pace pace(env_, [this] { return hurried(); });
  const int64_t interval_ns = int64_t{options_.flush_interval_ms} * 1'000'000;
  MutexLock lock(mutex_);
  while (true) {
    if (ready_.empty()) {
      while (!stop_ && commands_.empty()) wake_.wait(mutex_);
    } else if (!stop_ && commands_.empty()) {
      wake_.wait_for_ns(mutex_, interval_ns);
    }
    if (commands_.empty() && stop_) return;
    const bool has_command = !commands_.empty();
    Command command = Flush{};
    if (has_command) {
      command = std::move(commands_.front());
      commands_.pop_front();
    }
    lock.unlock();
    if (has_command) run(command);
    const bool old = env_.monotonic_ns() - ready_since_ns_ >= interval_ns;
    if (!ready_.empty() && (ready_bytes_ >= options_.batch_bytes || old)) write_ready();
    lock.lock();
  }
}

void SaverImpl::run(Command& command) {
  if (auto* begin = std::get_if<Begin>(&command)) {
    open_sequence(*begin);
  } else if (auto* tokens = std::get_if<Tokens>(&command)) {
    const auto it = sequences_.find(tokens->seq);
    if (it == sequences_.end()) return;
    replace_tokens(it->second, *tokens);
  } else if (auto* cut = std::get_if<Cut>(&command)) {
    const auto it = sequences_.find(cut->seq);
    if (it == sequences_.end()) return;
    cut_sequence(it->second, *cut);
  } else if (const auto* fork = std::get_if<Fork>(&command)) {
    fork_sequence(*fork);
  } else if (auto* captured = std::get_if<Captured>(&command)) {
    cut_rows(*captured);
    const MutexLock lock(mutex_);
    ring_->give_back(captured->block);
  } else if (auto* chunk = std::get_if<ReadyChunk>(&command)) {
    add_ready(std::move(*chunk));
  } else if (const auto* snapshot = std::get_if<Snapshot>(&command)) {
    const auto it = sequences_.find(snapshot->seq);
    if (it != sequences_.end()) add_snapshot(it->second, *snapshot);
    snapshot_bytes_ -= snapshot->bytes.size();
  } else if (auto* end = std::get_if<End>(&command)) {
    const auto it = sequences_.find(end->seq);
    if (it == sequences_.end()) return;
    emit_tail(it->second);
    sequences_.erase(it);
  } else if (auto* flush = std::get_if<Flush>(&command)) {
    for (auto& [seq, sequence] : sequences_) {
      if (flush->seq == kAllSequences || flush->seq == seq) emit_tail(sequence);
    }
    write_ready();
    if (flush->number == 0) return;
    {
      const MutexLock lock(mutex_);
      flushes_done_ = flush->number;
    }
    flushed_.notify_all();
  }
}

void SaverImpl::open_sequence(Begin& begin) {
  SavedSequence& sequence = begin.sequence;
  const std::span<const int32_t> tokens = sequence.tokens;
  const int64_t n_full = static_cast<int64_t>(tokens.size()) / kChunk;
  const int64_t n_tail = static_cast<int64_t>(tokens.size()) % kChunk;
  for (int64_t i = 0; i < n_full; ++i) {
    sequence.parent = chunk_id(sequence.fingerprints.at(i * kChunk), sequence.salt.id,
                               sequence.parent, tokens.subspan(i * kChunk, kChunk));
  }
  sequence.open.first_pos = n_full * kChunk;
  if (n_tail > 0) {
    const Status status = begin.tail
                              ? read_tail(sequence, begin.tail, n_tail)
                              : failed_precondition("the rows of a partial chunk are not saved");
    if (!status.ok()) give_up(sequence, status);
  }
  const SeqId seq = sequence.seq;
  sequences_[seq] = std::move(sequence);
}

void SaverImpl::fork_sequence(const Fork& fork) {
  const auto it = sequences_.find(fork.source);
  if (it == sequences_.end()) {  // never begun: not to be saved
    set_durable(fork.seq, kNotSaved);
    return;
  }
  SavedSequence copy = it->second;
  copy.seq = fork.seq;
  const int64_t durable = durable_tokens(fork.source);
  if (copy.broken) {
    set_durable(fork.seq, kNotSaved);
  } else if (const Status status = rewind(copy, fork.n_rows + copy.cut.dropped); !status.ok()) {
    give_up(copy, status);
  } else {
    set_durable(fork.seq, std::min(durable, fork.n_rows + copy.cut.dropped));
  }
  sequences_[fork.seq] = std::move(copy);
}

void SaverImpl::replace_tokens(SavedSequence& sequence, const Tokens& tokens) {
  if (sequence.broken) return;
  const int64_t first = tokens.first_pos + sequence.cut.dropped;
  if (const Status status = rewind(sequence, first); !status.ok()) {
    give_up(sequence, status);
    return;
  }
  sequence.tokens.insert(sequence.tokens.end(), tokens.tokens.begin(), tokens.tokens.end());
  set_durable(sequence.seq, std::min(durable_tokens(sequence.seq), first));
}

// All rows up to here have come: the chunk that is open is empty.
void SaverImpl::cut_sequence(SavedSequence& sequence, Cut& cut) {
  sequence.cut = std::move(cut.cut);
  if (sequence.broken) return;
  const auto end = static_cast<int64_t>(sequence.tokens.size());
  if (sequence.open.first_pos != end || sequence.open.n_rows > 0) {
    give_up(sequence, internal_error(fmt::format("{} tokens were cut inside of a chunk", end)));
    return;
  }
  sequence.fingerprints.add(static_cast<uint64_t>(end), cut.fingerprint);
}

// Keeps the first n_tokens. Rows of a chunk that was complete are read back from the store.
Status SaverImpl::rewind(SavedSequence& sequence, int64_t n_tokens) {
  if (n_tokens < 0 || n_tokens > static_cast<int64_t>(sequence.tokens.size())) {
    return out_of_range(
        fmt::format("{} tokens of {} can't be kept", n_tokens, sequence.tokens.size()));
  }
  OpenChunk& open = sequence.open;
  // What was cut before counts as durable when it is written: not after rows were taken back.
  if (n_tokens < open.first_pos + open.n_emitted) write_ready();
  if (n_tokens >= open.first_pos) {
    open.n_rows = std::min(open.n_rows, n_tokens - open.first_pos);
    open.n_emitted = std::min(open.n_emitted, open.n_rows);
    sequence.tokens.resize(n_tokens);
    return {};
  }
  const std::span<const int32_t> tokens = sequence.tokens;
  const auto id_behind = [&](const ChunkId& parent, int64_t chunk) {
    return chunk_id(sequence.fingerprints.at(chunk * kChunk), sequence.salt.id, parent,
                    tokens.subspan(chunk * kChunk, kChunk));
  };
  const int64_t n_full = n_tokens / kChunk;
  ChunkId parent;
  for (int64_t i = 0; i < n_full; ++i) parent = id_behind(parent, i);
  open = {.first_pos = n_full * kChunk, .n_rows = 0, .n_emitted = 0, .layers = {}};
  sequence.parent = parent;
  if (n_tokens % kChunk != 0) {
    HCACHE_ASSIGN_OR_RETURN(const store::ChunkRef cut, store_.find(id_behind(parent, n_full)));
    HCACHE_RETURN_IF_ERROR(read_tail(sequence, cut, n_tokens % kChunk));
    open.n_emitted = 0;  // the shorter tail is not in the store
  }
  sequence.tokens.resize(n_tokens);
  return {};
}

// Reads the rows that exist already back into the chunk that new rows will complete.
Status SaverImpl::read_tail(SavedSequence& sequence, const store::ChunkRef& tail, int64_t n_rows) {
  const store::ChunkInfo& info = tail.info();
  const auto n_in_chunk = static_cast<int64_t>(info.tokens.size());
  std::vector<store::PageInfo> rows;  // what stands for the whole chain stays with its chunk
  std::copy_if(info.pages.begin(), info.pages.end(), std::back_inserter(rows),
               [](const store::PageInfo& page) {
                 return store::is_hidden(page.encoding) || store::is_kv(page.encoding);
               });
  std::vector<store::PageRequest> requests;
  for (const store::PageInfo& page : rows) requests.push_back({tail, page.layer, page.encoding});
  store::ReaderOptions options;
  options.ring_bytes = kTailRingBytes;
  HCACHE_ASSIGN_OR_RETURN(const auto reader, open_reader(&store_, requests, options));
  for (const store::PageInfo& page : rows) {
    Pace::point();
    HCACHE_ASSIGN_OR_RETURN(const store::PageView view, reader->next());
    if (!view.status.ok()) {
      if (view.status.code() == Code::kDataLoss) {
        store_.quarantine(info.id, page.layer, page.encoding)
            .ignore("the damage itself is reported below");
      }
      return view.status;
    }
    std::vector<PageBuffer>& layers = sequence.open.layers;
    if (layers.size() <= page.layer) layers.resize(page.layer + 1U);
    std::span<const std::byte> from = view.bytes;
    std::vector<std::byte> unpacked;
    if (page.encoding == store::Encoding::kKvPacked) {
      unpacked.resize(kv_token_bytes_ * info.tokens.size());
      HCACHE_RETURN_IF_ERROR(packer_.unpack(from, unpacked));
      from = unpacked;
    }
    if (store::is_hidden(page.encoding)) {
      const size_t row = from.size() / n_in_chunk;
      layers[page.layer].hidden_type = *hidden_type(page.encoding);
      layers[page.layer].hidden.resize(row * kChunk);
      std::memcpy(layers[page.layer].hidden.data(), from.data(), row * n_rows);
    } else {
      const size_t row = from.size() / 2 / n_in_chunk;
      std::vector<std::byte>& kv = layers[page.layer].kv;
      kv.resize(2 * row * kChunk);
      std::memcpy(kv.data(), from.data(), row * n_rows);
      std::memcpy(kv.data() + row * kChunk, from.data() + from.size() / 2, row * n_rows);
    }
    reader->release(view.index);
  }
  sequence.open.n_rows = n_rows;
  sequence.open.n_emitted = n_rows;
  return {};
}

// Whether somebody waits for stage two, or what waits for it may soon find no room.
bool SaverImpl::hurried() const {
  const MutexLock lock(mutex_);
  const bool behind = ring_->used() + snapshot_bytes_ > options_.ring_bytes / 4;
  return stop_ || flushes_wanted_ > flushes_done_ || behind;
}

// Cuts a captured step into its sequences' chunks.
void SaverImpl::cut_rows(const Captured& captured) {
  kv_type_ = captured.kv_type;
  for (const CapturedRows& rows : captured.rows) {
    const auto it = sequences_.find(rows.seq);
    if (it == sequences_.end()) continue;  // never begun: not to be saved
    if (it->second.broken) {
      lose(it->second, rows.n_rows);
    } else {
      take_rows(it->second, captured, rows);
    }
  }
}

void SaverImpl::take_rows(SavedSequence& sequence, const Captured& captured,
                          const CapturedRows& rows) {
  const int64_t next = sequence.open.first_pos + sequence.open.n_rows;
  const int64_t first = rows.first_pos + sequence.cut.dropped;
  const int64_t end = first + rows.n_rows;
  if (first > next || end > static_cast<int64_t>(sequence.tokens.size())) {
    lose(sequence, end - next);  // a step in between found the ring full
    return;
  }
  // Rows that were computed again (a recomputed prefix) are saved already.
  int64_t row = std::min<int64_t>(next - first, rows.n_rows);
  while (row < rows.n_rows) {
    OpenChunk& open = sequence.open;
    open.layers.resize(std::max(open.layers.size(), captured.layers.size()));
    const int64_t n = std::min<int64_t>(kChunk - open.n_rows, rows.n_rows - row);
    const auto copy = [&](std::byte* to, int64_t offset, size_t row_bytes) {
      std::memcpy(to + open.n_rows * row_bytes,
                  captured.block + offset + (rows.first_row + row) * row_bytes, n * row_bytes);
    };
    for (size_t i = 0; i < captured.layers.size(); ++i) {
      Pace::point();
      const CapturedLayer& layer = captured.layers[i];
      PageBuffer& page = open.layers[i];
      // A tail from the store may hold other encodings than are captured now: what only some of
      // the chunk's rows have is no page.
      const bool begun = open.n_rows > 0;
      if (layer.hidden_offset < 0 || layer.hidden_type != page.hidden_type) page.hidden.clear();
      if (layer.k_offset < 0) page.kv.clear();
      if (begun && ((layer.hidden_offset >= 0 && page.hidden.empty()) ||
                    (layer.k_offset >= 0 && page.kv.empty()))) {
        lose(sequence, rows.n_rows - row);
        return;
      }
      if (layer.hidden_offset >= 0) {
        page.hidden_type = layer.hidden_type;
        page.hidden.resize(layer.hidden_row_bytes * kChunk);
        copy(page.hidden.data(), layer.hidden_offset, layer.hidden_row_bytes);
      }
      if (layer.k_offset >= 0) {
        page.kv.resize(2 * captured.kv_row * kChunk);
        copy(page.kv.data(), layer.k_offset, captured.kv_row);
        copy(page.kv.data() + captured.kv_row * kChunk, layer.v_offset, captured.kv_row);
      }
    }
    open.n_rows += n;
    row += n;
    if (open.n_rows == kChunk) emit(sequence);
  }
  const MutexLock lock(mutex_);
  stats_.rows_captured += rows.n_rows;
}

// Makes the open chunk ready for the store: a full one leaves, a tail stays open for more rows.
void SaverImpl::emit(SavedSequence& sequence) {
  OpenChunk& open = sequence.open;
  const bool full = open.n_rows == kChunk;
  const auto tokens = std::span(sequence.tokens).subspan(open.first_pos, open.n_rows);
  ReadyChunk chunk{
      .seq = sequence.seq,
      .id = chunk_id(sequence.fingerprints.last(), sequence.salt.id, sequence.parent, tokens),
      .parent = sequence.parent,
      .fingerprint = sequence.fingerprints.last(),
      .salt = sequence.salt,
      .first_pos = open.first_pos,
      .tokens = {tokens.begin(), tokens.end()},
      .layers = {},
  };
  if (open.first_pos == sequence.cut.at && !sequence.cut.chosen.empty()) {
    chunk.chosen = chosen_page(sequence.cut.chosen, tokens.size());
  }
  open.n_emitted = open.n_rows;
  if (full) {
    chunk.layers = std::move(open.layers);
    sequence.parent = chunk.id;
    open = {.first_pos = open.first_pos + kChunk, .n_rows = 0, .n_emitted = 0, .layers = {}};
  } else {
    for (const PageBuffer& page : open.layers) {
      Pace::point();
      PageBuffer& tail = chunk.layers.emplace_back();
      tail.hidden_type = page.hidden_type;
      const auto first_rows = [&](const std::byte* begin, size_t full_bytes,
                                  std::vector<std::byte>& to) {
        to.insert(to.end(), begin, begin + full_bytes / kChunk * open.n_rows);
      };
      first_rows(page.hidden.data(), page.hidden.size(), tail.hidden);
      first_rows(page.kv.data(), page.kv.size() / 2, tail.kv);
      first_rows(page.kv.data() + page.kv.size() / 2, page.kv.size() / 2, tail.kv);
    }
  }
  add_ready(std::move(chunk));
}

void SaverImpl::add_snapshot(const SavedSequence& sequence, const Snapshot& snapshot) {
  const int64_t n = snapshot.n_tokens;
  // Rows of a chunk that is not saved are no use to anybody, nor is what stands for them.
  if (sequence.broken || n < kChunk || n % kChunk != 0 || n > sequence.open.first_pos) return;
  const std::span<const int32_t> tokens = sequence.tokens;
  ReadyChunk chunk;
  chunk.salt = sequence.salt;
  chunk.first_pos = n - kChunk;
  for (int64_t first = 0; first < n; first += kChunk) {
    chunk.parent = chunk.id;
    chunk.fingerprint = sequence.fingerprints.at(first);
    chunk.id =
        chunk_id(chunk.fingerprint, sequence.salt.id, chunk.parent, tokens.subspan(first, kChunk));
    if (first + kChunk == snapshot.replaced && snapshot.replaced < n) {
      replaced_.push_back(chunk.id);
    }
  }
  chunk.tokens.assign(tokens.begin() + (n - kChunk), tokens.begin() + n);
  chunk.snapshot = framed_snapshot(snapshot.bytes, kChunk);
  add_ready(std::move(chunk));
}

void SaverImpl::add_ready(ReadyChunk chunk) {
  if (ready_.empty()) ready_since_ns_ = env_.monotonic_ns();
  for (const PageBuffer& page : chunk.layers) ready_bytes_ += page.hidden.size() + page.kv.size();
  ready_bytes_ += chunk.snapshot.size();
  ready_.push_back(std::move(chunk));
}

// A put for each owner: one whose quota is used up does not keep others from being saved.
void SaverImpl::write_ready() {
  if (options_.pack != policy::PackMode::kOff) {
    pack_pages(ready_, kv_type_, options_.pack, &packer_);
  }
  std::stable_sort(ready_.begin(), ready_.end(), [](const ReadyChunk& a, const ReadyChunk& b) {
    return a.salt.owner < b.salt.owner;
  });
  bool written = true;
  for (auto first = ready_.cbegin(); first != ready_.cend();) {
    const auto end = std::find_if(first, ready_.cend(), [&](const ReadyChunk& chunk) {
      return chunk.salt.owner != first->salt.owner;
    });
    written = write({first, end}) && written;
    first = end;
  }
  ready_.clear();
  ready_bytes_ = 0;
  // Others have come in their place.
  for (const ChunkId& chunk : std::exchange(replaced_, {})) {
    if (!written) break;
    store_.quarantine(chunk, 0, store::Encoding::kSnapshot)
        .ignore("a snapshot too many takes room and does no harm");
  }
}

bool SaverImpl::write(std::span<const ReadyChunk> chunks) {
  const std::vector<store::ChunkWrite> batch = writes_of(chunks, *element_type(kv_type_));
  const int64_t start_ns = env_.monotonic_ns();
  const Result<store::PutReport> report = store_.put(batch);
  const double seconds = static_cast<double>(env_.monotonic_ns() - start_ns) * 1e-9;
  if (!report.ok()) {
    for (const ReadyChunk& chunk : chunks) {
      const auto it = sequences_.find(chunk.seq);
      if (it != sequences_.end()) {
        lose(it->second, static_cast<int64_t>(chunk.tokens.size()));
      }
    }
  } else {
    note_durable(chunks);
  }

  const MutexLock lock(mutex_);
  stats_.write_s += seconds;
  if (report.ok()) {
    stats_.chunks_written += report->chunks_new + report->chunks_extended;
    stats_.bytes_written += report->page_bytes;
    stats_.rows_skipped += uint64_t{report->chunks_without_parent} * kChunk;
    return true;
  }
  // Said once, until another error or a success in between changes the picture.
  if (stats_.last_error.code() != report.status().code()) {
    log::error("conversations are not being saved: {}", report.status().to_string());
  }
  stats_.last_error = report.status();
  if (flush_error_.ok()) flush_error_ = report.status();
  return false;
}

// They are on disk.
void SaverImpl::note_durable(std::span<const ReadyChunk> chunks) {
  const MutexLock lock(mutex_);
  for (const ReadyChunk& chunk : chunks) {
    const auto it = durable_.find(chunk.seq);
    if (it == durable_.end() || it->second == kNotSaved) continue;  // ended, or given up
    it->second = std::max(it->second, chunk.first_pos + static_cast<int64_t>(chunk.tokens.size()));
  }
}

void SaverImpl::lose(SavedSequence& sequence, int64_t n_rows) {
  sequence.broken = true;
  const MutexLock lock(mutex_);
  if (const auto it = durable_.find(sequence.seq); it != durable_.end()) it->second = kNotSaved;
  stats_.rows_skipped += static_cast<uint64_t>(n_rows);
}

}  // namespace

Result<std::unique_ptr<Saver>> Saver::create(Env& env, store::Store& store,
                                             const model::Model& model, ggml_type kv_type,
                                             const SaverOptions& options) {
  HCACHE_ASSIGN_OR_RETURN(
      auto ring, HostRing::create(model.pinning_device().host_buffer_type(), options.ring_bytes));
  const size_t kv_token_bytes = 2 * ggml_row_size(kv_type, model.hparams().n_embd_kv());
  return std::unique_ptr<Saver>(
      std::make_unique<SaverImpl>(env, store, std::move(ring), kv_type, kv_token_bytes, options));
}

}  // namespace hcache::state
