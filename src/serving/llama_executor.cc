#include "llama_executor.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "state/snapshot_pages.h"

namespace hcache::serving {
namespace {

using libllama::StateLayout;
using scheduler::RestoreStatus;
using scheduler::SeqId;
using store::Encoding;

constexpr auto kChunk = static_cast<int64_t>(store::kChunkTokens);
// A snapshot is due after so many tokens of a prompt.
constexpr int64_t kSnapshotTokens = 2048;
// Holds several parts of a snapshot.
constexpr uint64_t kRingBytes = 64U << 20;
// Each attempt beyond the first drops a damaged page.
constexpr int kMostAttempts = 16;

// Every chain's media come from the one projector that there is.
std::shared_ptr<const libllama::MediaRows> rows_of(const scheduler::Media* media) {
  return media == nullptr ? nullptr : static_cast<const MediaParts*>(media)->rows();
}

double seconds_since(Env& env, int64_t begin_ns) {
  return static_cast<double>(env.monotonic_ns() - begin_ns) * 1e-9;
}

}  // namespace

struct LlamaExecutor::Prefix : scheduler::SavedPrefix {
  Prefix(store::Match found, int64_t tokens) : SavedPrefix(tokens), match(std::move(found)) {}
  const store::Match match;
};

// A restore in flight: pages come by tensor, then by chunk; then the parts of the snapshot.
struct LlamaExecutor::Restore {
  struct Page {
    size_t chunk = 0;  // of the match
    store::PageRequest request;
  };
  std::vector<int32_t> tokens;  // of the whole request
  scheduler::MediaRef media;    // of it
  int64_t upto = 0;             // most that may be restored
  std::shared_ptr<const Prefix> prefix;
  int64_t n_tokens = 0;        // that are restored
  std::vector<int64_t> first;  // of each chunk, its first token
  std::vector<Page> pages;
  bool from_remote = false;                   // the last page came from there
  size_t next = 0;                            // page
  std::unique_ptr<store::PageReader> reader;  // null: nothing is restored
  std::vector<std::byte> snapshot;            // its parts
  int attempts = 0;
  int64_t begin_ns = 0;
  double compute_s = 0;
  policy::RestoreRecord record;
};

LlamaExecutor::Sequence::Sequence() = default;
LlamaExecutor::Sequence::~Sequence() = default;

LlamaExecutor::LlamaExecutor(Env& env, state::Runtime& runtime, int64_t max_context)
    : env_(env),
      runtime_(runtime),
      engine_(*runtime.llama()->engine),
      saver_(runtime.llama()->saver.get()) {
  const libllama::LlamaOptions& options = engine_.options();
  limits_.arena_cells = options.cells;
  limits_.context = std::min<int64_t>(engine_.info().n_ctx_train, options.cells);
  if (max_context > 0) limits_.context = std::min(limits_.context, max_context);
  limits_.max_step_rows = options.max_batch_rows;
  limits_.max_sequences = engine_.max_sequences();
  limits_.media = engine_.media() != nullptr;
  limits_.why_no_cuts = "the model runs on libllama, whose rows stay where they are";
  for (SeqId seq = limits_.max_sequences; seq-- > 0;) free_.push_back(seq);
}

LlamaExecutor::~LlamaExecutor() {
  while (!sequences_.empty()) release(sequences_.begin()->first);
}

Result<LlamaExecutor::Sequence*> LlamaExecutor::find(SeqId seq) {
  const auto it = sequences_.find(seq);
  if (it == sequences_.end()) return not_found(fmt::format("there is no sequence {}", seq));
  return &it->second;
}

int64_t LlamaExecutor::cells_of(SeqId seq, const Sequence& sequence) const {
  return sequence.restore ? sequence.restore->n_tokens : engine_.length(seq);
}

int64_t LlamaExecutor::free_cells() const {
  int64_t used = 0;
  for (const auto& [seq, sequence] : sequences_) used += cells_of(seq, sequence);
  return std::max<int64_t>(0, limits_.arena_cells - used);
}

// ---- Sequences

Result<SeqId> LlamaExecutor::create(const Salt& salt, bool save) {
  if (free_.empty()) return resource_exhausted("there are as many sequences as there can be");
  const SeqId seq = free_.back();
  HCACHE_RETURN_IF_ERROR(engine_.set_adapters(seq, salt.adapters));
  free_.pop_back();
  Sequence& sequence = sequences_[seq];
  sequence.salt = salt;
  sequence.save = save && saver_ != nullptr;
  return seq;
}

Result<SeqId> LlamaExecutor::fork(SeqId src, int64_t n_tokens, bool save) {
  HCACHE_ASSIGN_OR_RETURN(const Sequence* source, find(src));
  const Salt salt = source->salt;
  HCACHE_ASSIGN_OR_RETURN(const SeqId seq, create(salt, save && source->save));
  if (Status copied = engine_.copy(src, seq, n_tokens); !copied.ok()) {
    release(seq);
    return copied;
  }
  Sequence& sequence = sequences_[seq];
  sequence.tokens.assign(source->tokens.begin(), source->tokens.begin() + n_tokens);
  const auto n_chunks = std::min(source->chunks.size(), static_cast<size_t>(n_tokens / kChunk));
  sequence.chunks.assign(source->chunks.begin(),
                         source->chunks.begin() + static_cast<std::ptrdiff_t>(n_chunks));
  sequence.saved->durable = std::min(source->saved->durable.load(), n_tokens);
  return seq;
}

Status LlamaExecutor::trim(SeqId seq, int64_t n_tokens) {
  HCACHE_ASSIGN_OR_RETURN(Sequence * sequence, find(seq));
  HCACHE_RETURN_IF_ERROR(engine_.trim(seq, n_tokens));
  sequence->tokens.resize(static_cast<size_t>(n_tokens));
  const auto n_chunks = static_cast<size_t>(n_tokens / kChunk);
  sequence->chunks.resize(std::min(sequence->chunks.size(), n_chunks));
  // What the saver still writes of the part that is gone counts for the old one.
  auto saved = std::make_shared<state::SavedLength>();
  saved->durable = std::min(sequence->saved->durable.load(), n_tokens);
  saved->failed = sequence->saved->failed.load();
  sequence->saved = std::move(saved);
  sequence->flushed = -1;
  sequence->snapshot.clear();
  return {};
}

int64_t LlamaExecutor::shortest(SeqId seq) const { return engine_.shortest(seq); }

Status LlamaExecutor::cut(SeqId /*seq*/, std::span<const int32_t> /*chain*/,
                          const policy::HeldRows& /*held*/) {
  return unimplemented(limits_.why_no_cuts);
}

void LlamaExecutor::release(SeqId seq) {
  request_flush(seq);  // what ends in the middle of a reply is saved as far as it came
  if (sequences_.erase(seq) == 0) return;
  engine_.trim(seq, 0).ignore("a sequence can always be emptied");
  free_.push_back(seq);
}

// ---- What is saved

int64_t LlamaExecutor::restorable(const store::Match& match, int64_t most) const {
  const StateLayout& layout = engine_.layout();
  int64_t rows = 0;
  int64_t snapshot = 0;  // where the last usable one is
  for (const store::MatchedChunk& matched : match.chunks) {
    const store::ChunkInfo& chunk = matched.chunk.info();
    if (!state::has_rows(chunk, layout) || rows >= most) break;
    rows += matched.usable_rows;
    const bool whole = matched.usable_rows == chunk.tokens.size();
    if (whole && rows <= most && state::snapshot_parts(chunk) > 0) snapshot = rows;
  }
  return layout.snapshots ? snapshot : std::min(rows, most);
}

Result<scheduler::SavedPrefixRef> LlamaExecutor::saved_prefix(
    const Salt& salt, std::span<const int32_t> tokens, std::span<const policy::HeldRows> cuts,
    const scheduler::SavedPrefixRef& known) {
  if (!cuts.empty()) return scheduler::SavedPrefixRef();
  store::Match match = runtime_.match(tokens, salt.id);
  // The last token is always computed.
  const int64_t n = restorable(match, static_cast<int64_t>(tokens.size()) - 1);
  if (n <= (known ? known->tokens() : 0)) return known;
  return scheduler::SavedPrefixRef(std::make_shared<Prefix>(std::move(match), n));
}

void LlamaExecutor::give_up(Sequence& sequence, const Status& status) {
  log::warn("a conversation is not saved any more: {}", status.to_string());
  sequence.saved->failed = true;
}

void LlamaExecutor::save_chunk(SeqId seq, Sequence& sequence, int64_t begin, int64_t end,
                               bool with_snapshot) {
  state::LlamaChunk chunk;
  chunk.length = sequence.saved;
  chunk.salt = sequence.salt;
  if (begin > 0) chunk.parent = sequence.chunks[static_cast<size_t>(begin / kChunk) - 1];
  chunk.first_position = static_cast<uint64_t>(begin);
  chunk.tokens.assign(sequence.tokens.begin() + begin, sequence.tokens.begin() + end);
  chunk.id = chunk_id(runtime_.fingerprint(), sequence.salt.id, chunk.parent, chunk.tokens);
  if (end - begin == kChunk) sequence.chunks.push_back(chunk.id);
  chunk.rows.resize(engine_.layout().token_bytes() * static_cast<size_t>(end - begin));
  if (const Status read = engine_.read_rows(seq, begin, end, chunk.rows); !read.ok()) {
    return give_up(sequence, read);
  }
  if (with_snapshot) {
    Result<std::vector<std::byte>> snapshot = engine_.snapshot(seq);
    if (!snapshot.ok()) return give_up(sequence, snapshot.status());
    chunk.snapshot = std::move(*snapshot);
  }
  saver_->add(std::move(chunk));
}

void LlamaExecutor::save_chunks(SeqId seq, Sequence& sequence) {
  if (!sequence.save || sequence.saved->failed) return;
  const int64_t length = engine_.length(seq);
  while (static_cast<int64_t>(sequence.chunks.size() + 1) * kChunk <= length) {
    const auto begin = static_cast<int64_t>(sequence.chunks.size()) * kChunk;
    save_chunk(seq, sequence, begin, begin + kChunk, false);
    if (sequence.saved->failed) return;
    sequence.snapshot.clear();
  }
  if (!engine_.layout().snapshots || length % kChunk != 0) return;
  Result<std::vector<std::byte>> snapshot = engine_.snapshot(seq);
  if (!snapshot.ok()) return give_up(sequence, snapshot.status());
  sequence.snapshot = std::move(*snapshot);
  if (length % kSnapshotTokens == 0) save_snapshot(sequence);
}

void LlamaExecutor::save_snapshot(Sequence& sequence) {
  if (sequence.snapshot.empty() || sequence.saved->failed) return;
  const size_t last = sequence.chunks.size() - 1;
  const auto begin = static_cast<int64_t>(last) * kChunk;
  state::LlamaChunk chunk;
  chunk.length = sequence.saved;
  chunk.salt = sequence.salt;
  chunk.id = sequence.chunks[last];
  if (last > 0) chunk.parent = sequence.chunks[last - 1];
  chunk.first_position = static_cast<uint64_t>(begin);
  chunk.tokens.assign(sequence.tokens.begin() + begin, sequence.tokens.begin() + begin + kChunk);
  chunk.snapshot = std::exchange(sequence.snapshot, {});
  saver_->add(std::move(chunk));
}

void LlamaExecutor::request_flush(SeqId seq) {
  const auto it = sequences_.find(seq);
  if (it == sequences_.end() || !it->second.save || it->second.restore) return;
  Sequence& sequence = it->second;
  const int64_t length = engine_.length(seq);
  if (length == 0 || sequence.saved->failed || sequence.flushed == length) return;
  sequence.flushed = length;
  save_snapshot(sequence);
  const auto whole = static_cast<int64_t>(sequence.chunks.size()) * kChunk;
  if (whole < length) save_chunk(seq, sequence, whole, length, engine_.layout().snapshots);
}

int64_t LlamaExecutor::durable_tokens(SeqId seq) {
  const auto it = sequences_.find(seq);
  if (it == sequences_.end() || !it->second.save || it->second.saved->failed) {
    return scheduler::kNotSaving;
  }
  return it->second.saved->durable;
}

// ---- The queue

void LlamaExecutor::enqueued(const scheduler::Waiting& request) {
  if (request.restore == 0 || runtime_.store() == nullptr) return;
  runtime_.store()->want(request.ticket,
                         std::static_pointer_cast<const Prefix>(request.prefix)->match);
}

void LlamaExecutor::dequeued(uint64_t ticket, bool admitted) {
  if (runtime_.store() == nullptr) return;
  admitted ? runtime_.store()->dispatch(ticket) : runtime_.store()->unwant(ticket);
}

void LlamaExecutor::completed(uint64_t ticket) {
  if (runtime_.store() != nullptr) runtime_.store()->unwant(ticket);
}

// ---- Restores

Status LlamaExecutor::begin_restore(SeqId seq, const scheduler::RestoreJob& job) {
  HCACHE_ASSIGN_OR_RETURN(Sequence * sequence, find(seq));
  const auto n_tokens = static_cast<int64_t>(job.tokens.size());
  if (job.upto < 1 || job.upto > n_tokens || !job.prefix) {
    return out_of_range(fmt::format("can't restore {} tokens of {}", job.upto, n_tokens));
  }
  auto restore = std::make_unique<Restore>();
  restore->tokens.assign(job.tokens.begin(), job.tokens.end());
  restore->media = job.media;
  restore->upto = job.upto;
  restore->prefix = std::static_pointer_cast<const Prefix>(job.prefix);
  restore->begin_ns = env_.monotonic_ns();
  sequence->restore = std::move(restore);
  const Status status = open_restore(seq, *sequence);
  if (!status.ok()) sequence->restore.reset();
  return status;
}

Status LlamaExecutor::open_restore(SeqId seq, Sequence& sequence) {
  Restore& restore = *sequence.restore;
  const store::Match& match = restore.prefix->match;
  restore.n_tokens = restore.attempts < kMostAttempts ? restorable(match, restore.upto) : 0;
  restore.pages.clear();
  restore.first.clear();
  restore.snapshot.clear();
  restore.next = 0;
  restore.reader.reset();
  if (restore.n_tokens == 0) return {};
  size_t n_chunks = 0;
  for (int64_t end = 0; end < restore.n_tokens; ++n_chunks) {
    restore.first.push_back(end);
    end += match.chunks[n_chunks].usable_rows;
  }
  for (size_t tensor = 0; tensor < engine_.layout().row_bytes.size(); ++tensor) {
    for (size_t i = 0; i < n_chunks; ++i) {
      restore.pages.push_back(
          {i, {match.chunks[i].chunk, static_cast<uint16_t>(tensor), Encoding::kRows}});
    }
  }
  if (engine_.layout().snapshots) {
    const store::ChunkRef& last = match.chunks[n_chunks - 1].chunk;
    for (size_t part = 0; part < state::snapshot_parts(last.info()); ++part) {
      restore.pages.push_back(
          {n_chunks - 1, {last, static_cast<uint16_t>(part), Encoding::kSnapshot}});
    }
  }
  engine_.set_media(seq, rows_of(restore.media.get()));
  HCACHE_RETURN_IF_ERROR(engine_.make_rows(
      seq, std::span(restore.tokens).first(static_cast<size_t>(restore.n_tokens))));
  store::ReaderOptions reading;
  reading.ring_bytes = kRingBytes;
  if (step_pace_.known()) {
    const auto rows = static_cast<double>(limits_.max_step_rows);
    reading.remote_timeout_s =
        static_cast<double>(restore.n_tokens) * step_pace_.at(limits_.max_step_rows) / rows;
  }
  auto reader = runtime_.store()->new_reader(reading);
  Status status = reader.status();
  if (status.ok()) {
    std::vector<store::PageRequest> requests;
    for (const Restore::Page& page : restore.pages) requests.push_back(page.request);
    status = (*reader)->submit(requests);
  }
  if (!status.ok()) {
    engine_.trim(seq, 0).ignore("the first error is the one to report");
    return status;
  }
  restore.reader = std::move(*reader);
  return {};
}

Result<bool> LlamaExecutor::take_page(SeqId seq, Restore& restore, bool wait) {
  std::optional<store::PageView> view;
  if (wait) {
    HCACHE_ASSIGN_OR_RETURN(view, restore.reader->next());
  } else {
    HCACHE_ASSIGN_OR_RETURN(view, restore.reader->try_next());
  }
  if (!view) return false;
  const Restore::Page& page = restore.pages[restore.next];
  Status status = view->status;
  if (status.ok() && page.request.encoding == Encoding::kSnapshot) {
    restore.snapshot.insert(restore.snapshot.end(), view->bytes.begin(), view->bytes.end());
  } else if (status.ok()) {
    const int64_t first = restore.first[page.chunk];
    const size_t row = engine_.layout().row_bytes[page.request.layer];
    const auto n = static_cast<size_t>(std::min<int64_t>(
        restore.n_tokens - first, restore.prefix->match.chunks[page.chunk].usable_rows));
    const int64_t begin_ns = env_.monotonic_ns();
    status = engine_.write_rows(seq, page.request.layer, first, view->bytes.first(n * row));
    restore.compute_s += seconds_since(env_, begin_ns);
  }
  restore.from_remote = view->origin == store::PageOrigin::kRemote;
  restore.record.kv_pages += state::tier_bytes(*view);
  restore.reader->release(view->index);
  HCACHE_RETURN_IF_ERROR(status);
  ++restore.next;
  return true;
}

Status LlamaExecutor::restart(SeqId seq, Sequence& sequence, const state::PageFailure& failure) {
  Restore& restore = *sequence.restore;
  ++restore.record.damaged_pages;
  const bool dropped = runtime_.discard(failure);
  restore.attempts = dropped ? restore.attempts + 1 : kMostAttempts;
  restore.reader.reset();
  HCACHE_RETURN_IF_ERROR(engine_.trim(seq, 0));
  const std::span<const int32_t> tokens =
      std::span(restore.tokens).first(static_cast<size_t>(restore.upto));
  store::Match match = runtime_.match(tokens, sequence.salt.id);
  const int64_t n = restorable(match, restore.upto);
  restore.prefix = std::make_shared<Prefix>(std::move(match), n);
  return open_restore(seq, sequence);
}

Result<RestoreStatus> LlamaExecutor::advance_restore(SeqId seq,
                                                     const scheduler::RestoreTurn& turn) {
  HCACHE_ASSIGN_OR_RETURN(Sequence * sequence, find(seq));
  if (!sequence->restore)
    return failed_precondition(fmt::format("sequence {} restores nothing", seq));
  Restore& restore = *sequence->restore;
  const int64_t begin_ns = env_.monotonic_ns();
  const auto taken_s = [&] { return seconds_since(env_, begin_ns); };
  const auto fraction = [&] {
    const size_t n = restore.pages.size();
    return n == 0 ? 1.0 : static_cast<double>(restore.next) / static_cast<double>(n);
  };
  const auto fail = [&](Status status) {
    sequence->restore.reset();
    engine_.trim(seq, 0).ignore("a sequence can always be emptied");
    return status;
  };
  RestoreStatus status;
  while (restore.reader && restore.next < restore.pages.size()) {
    const Result<bool> taken = take_page(seq, restore, static_cast<bool>(turn.proceed));
    if (!taken.ok()) {
      const store::PageRequest& page = restore.pages[restore.next].request;
      const state::PageFailure failure = {.chunk = page.chunk.info().id,
                                          .layer = page.layer,
                                          .encoding = page.encoding,
                                          .status = taken.status(),
                                          .remote = restore.from_remote};
      if (Status again = restart(seq, *sequence, failure); !again.ok()) return fail(again);
      continue;
    }
    const bool stop = turn.proceed ? !turn.proceed(fraction()) : taken_s() >= turn.budget_s;
    if (!*taken || stop) {
      status.phase = *taken ? RestoreStatus::Phase::kWorking : RestoreStatus::Phase::kWaitingForIo;
      status.seconds = taken_s();
      status.fraction = fraction();
      status.reserved = restore.n_tokens;
      return status;
    }
  }
  auto ended = end_restore(seq, *sequence);
  if (!ended.ok()) return fail(ended.status());
  ended->seconds = taken_s();
  return ended;
}

Result<RestoreStatus> LlamaExecutor::end_restore(SeqId seq, Sequence& sequence) {
  Restore& restore = *sequence.restore;
  if (restore.n_tokens > 0 && engine_.layout().snapshots) {
    const int64_t begin_ns = env_.monotonic_ns();
    Result<std::vector<std::byte>> snapshot = state::join_snapshot(std::move(restore.snapshot));
    Status loaded = snapshot.status();
    if (loaded.ok()) loaded = engine_.load_snapshot(seq, restore.n_tokens, *snapshot);
    restore.compute_s += seconds_since(env_, begin_ns);
    if (!loaded.ok()) {
      log::warn("saved state is not used, it is computed again: {}", loaded.to_string());
      HCACHE_RETURN_IF_ERROR(engine_.trim(seq, 0));
      restore.n_tokens = 0;
    }
  }
  const int64_t n = restore.n_tokens;
  sequence.tokens.assign(restore.tokens.begin(), restore.tokens.begin() + n);
  for (const store::MatchedChunk& matched : restore.prefix->match.chunks) {
    const store::ChunkInfo& chunk = matched.chunk.info();
    const int64_t end = static_cast<int64_t>(chunk.first_position) + kChunk;
    if (end > n || static_cast<int64_t>(chunk.tokens.size()) < kChunk) break;
    sequence.chunks.push_back(chunk.id);
  }
  sequence.saved->durable = n;
  sequence.flushed = n;
  RestoreStatus status;
  status.phase = RestoreStatus::Phase::kDone;
  status.fraction = 1;
  status.tokens = n;
  policy::RestoreRecord& record = restore.record;
  record.schedule = n == 0 ? "" : fmt::format("KV:{}", engine_.info().n_layer);
  record.restored_tokens = record.kv_tokens = n;
  if (restore.reader) {
    const store::ReaderStats read = restore.reader->stats();
    record.read = {.dram = read.dram_bytes, .disk = read.disk_bytes, .remote = read.remote_bytes};
    record.io_busy_s = read.busy_s;
  }
  record.restore_s = seconds_since(env_, restore.begin_ns);
  record.compute_busy_s = restore.compute_s;
  record.overlap = policy::overlap(record.io_busy_s, record.compute_busy_s, record.restore_s);
  status.record = std::move(record);
  sequence.restore.reset();
  return status;
}

// ---- Steps

int64_t LlamaExecutor::until_snapshot(const Part& part) const {
  const auto n = static_cast<int64_t>(part.tokens.size());
  if (!engine_.layout().snapshots || !sequences_.at(part.seq).save) return n;
  const int64_t begin = engine_.length(part.seq);
  const int64_t regular = (begin / kSnapshotTokens + 1) * kSnapshotTokens;
  const int64_t last = (begin + n) / kChunk * kChunk;  // whole chunk
  int64_t until = std::min(regular, last);
  if (part.media != nullptr && until > begin && part.media->step_end(begin, until) != until) {
    // Rows of a picture are computed at once: the last chunk before it, if there is one.
    const libllama::MediaRun* picture = part.media->rows()->at(until);
    until = picture->first / kChunk * kChunk;
    if (until <= begin) return std::min(n, picture->end() - begin);
  }
  return until > begin ? until - begin : n;
}

Status LlamaExecutor::compute(std::vector<Part>* parts) {
  std::vector<libllama::LlamaItem> items;
  for (const Part& part : *parts) {
    const auto n = static_cast<size_t>(until_snapshot(part));
    // Of parts before the last one, logits are wanted where more than the last row's are.
    const auto behind = static_cast<int64_t>(part.tokens.size() - n);
    items.push_back({.seq = part.seq,
                     .tokens = part.tokens.first(n),
                     .n_logits = std::max<int64_t>(0, part.n_logits - behind),
                     .hidden = part.hidden,
                     .chunks = part.media == nullptr ? nullptr : part.media->chunks(),
                     .logits = &logits_[part.item]});
  }
  HCACHE_RETURN_IF_ERROR(engine_.compute(items));
  std::vector<Part> left;
  for (size_t i = 0; i < items.size(); ++i) {
    Part& part = (*parts)[i];
    Sequence& sequence = sequences_.at(part.seq);
    sequence.tokens.insert(sequence.tokens.end(), items[i].tokens.begin(), items[i].tokens.end());
    save_chunks(part.seq, sequence);
    part.tokens = part.tokens.subspan(items[i].tokens.size());
    part.n_logits -= items[i].n_logits;
    if (!part.tokens.empty()) {
      left.push_back(part);
    } else if (part.of_prompt && items[i].n_logits > 0) {
      save_snapshot(sequence);  // a reply begins
    }
  }
  *parts = std::move(left);
  return {};
}

void LlamaExecutor::take_back(std::span<const scheduler::StepItem> items,
                              std::span<const int64_t> lengths) {
  for (size_t i = 0; i < items.size(); ++i) {
    const SeqId seq = items[i].seq;
    if (engine_.length(seq) == 0) sequences_.at(seq).tokens.clear();
    if (engine_.length(seq) > lengths[i]) trim(seq, lengths[i]).ignore("the step's error counts");
  }
}

Result<scheduler::StepOutput> LlamaExecutor::step(std::span<const scheduler::StepItem> items) {
  const int64_t start_ns = env_.monotonic_ns();
  std::vector<Part> parts;
  std::vector<int64_t> lengths;
  int64_t n_rows = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    HCACHE_RETURN_IF_ERROR(find(items[i].seq).status());
    engine_.set_media(items[i].seq, rows_of(items[i].media));
    const auto n = static_cast<int64_t>(items[i].tokens.size());
    n_rows += n;
    lengths.push_back(engine_.length(items[i].seq));
    parts.push_back({i, items[i].seq, items[i].tokens, scheduler::logits_count(items[i].logits, n),
                     items[i].hidden, n > 1, static_cast<const MediaParts*>(items[i].media)});
  }
  if (n_rows > free_cells()) return resource_exhausted("the cache has no cells for this step");
  logits_.assign(items.size(), {});
  while (!parts.empty()) {
    const Status computed = compute(&parts);
    if (computed.ok()) continue;
    take_back(items, lengths);
    return computed;
  }
  scheduler::StepOutput output;
  for (size_t i = 0; i < items.size(); ++i) {
    const libllama::LlamaModelInfo& info = engine_.info();
    const auto width = static_cast<size_t>(items[i].hidden ? info.n_embd_out : info.n_vocab);
    for (size_t at = 0; at < logits_[i].size(); at += width) {
      output.logits.push_back(std::span(logits_[i]).subspan(at, width));
    }
  }
  output.seconds = seconds_since(env_, start_ns);
  step_pace_.note(n_rows, output.seconds);
  return output;
}

}  // namespace hcache::serving
