#include "libllama/llama_engine.h"

#include <fmt/format.h>
#include <ggml-backend.h>
#include <llama.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "loaded_model.h"
#include "model/llama_log.h"
#include "projector.h"
#include "state_rows.h"

namespace hcache::libllama {
namespace {

constexpr float kFreqBase = 10000;  // of files that don't name one
constexpr int32_t kMostStates = 16;
constexpr int32_t kMostSequences = 256;  // libllama's limit
// What llama_decode() answers where no cells are left.
constexpr int32_t kNoCells = 1;

llama_rope_scaling_type scaling_type(model::RopeOverride::Scaling scaling) {
  switch (scaling) {
    case model::RopeOverride::Scaling::kNone: return LLAMA_ROPE_SCALING_TYPE_NONE;
    case model::RopeOverride::Scaling::kLinear: return LLAMA_ROPE_SCALING_TYPE_LINEAR;
    case model::RopeOverride::Scaling::kYarn: return LLAMA_ROPE_SCALING_TYPE_YARN;
    case model::RopeOverride::Scaling::kFile: break;
  }
  return LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED;
}

class LlamaEngineImpl final : public LlamaEngine {
 public:
  explicit LlamaEngineImpl(LlamaOptions options) : options_(std::move(options)) {}

  Status open(const std::string& path);

  const LlamaModelInfo& info() const override { return info_; }
  const LlamaOptions& options() const override { return options_; }
  const StateLayout& layout() const override { return layout_; }
  const MediaReader* media() const override { return projector_.get(); }
  int32_t max_sequences() const override { return static_cast<int32_t>(sequences_.size()); }
  int64_t length(int32_t seq) const override { return at(seq).length; }
  int64_t shortest(int32_t seq) const override;
  Status trim(int32_t seq, int64_t n) override;
  Status set_adapters(int32_t seq, std::span<const float> scales) override;
  void set_media(int32_t seq, std::shared_ptr<const MediaRows> media) override {
    at(seq).media = std::move(media);
  }
  Status copy(int32_t from, int32_t to, int64_t n) override;
  Status compute(std::span<const LlamaItem> items) override;
  Status read_rows(int32_t seq, int64_t from, int64_t to, std::span<std::byte> out) override;
  Status make_rows(int32_t seq, std::span<const int32_t> tokens) override;
  Status write_rows(int32_t seq, size_t tensor, int64_t first,
                    std::span<const std::byte> rows) override {
    return rows_->write(seq, at(seq).media.get(), tensor, first, rows);
  }
  Result<std::vector<std::byte>> snapshot(int32_t seq) override;
  Status load_snapshot(int32_t seq, int64_t n, std::span<const std::byte> snapshot) override;

 private:
  struct Sequence {
    int64_t length = 0;
    std::vector<float> scales;  // of the adapters; empty: none counts
    std::shared_ptr<const MediaRows> media;
  };
  // A part of an item that libllama takes at once: tokens of a text, or rows of one medium.
  struct Piece {
    const LlamaItem* item = nullptr;
    int64_t first = 0;  // row of the sequence
    std::span<const int32_t> tokens;
    int64_t n_logits = 0;           // of the last so many
    const MediaRun* run = nullptr;  // null: text
  };
  // The arrays of a llama_batch.
  struct Batch {
    std::vector<llama_token> tokens;
    std::vector<float> embeddings;  // or these
    std::vector<llama_pos> positions;
    std::vector<int32_t> n_seqs;
    std::vector<llama_seq_id> seqs;
    std::vector<llama_seq_id*> seq_lists;
    std::vector<int8_t> wanted;
  };

  Status open_adapters();
  Status open_projector();
  Status open_context();
  // How many tokens the model takes, with its positions as they are now.
  void find_context();
  // Whether the model can be served so at all.
  [[nodiscard]] Status check_kind(const std::string& path) const;
  // Computes one token, so that the caches show how they are laid out.
  Status probe();
  [[nodiscard]] Sequence& at(int32_t seq) { return sequences_.at(static_cast<size_t>(seq)); }
  [[nodiscard]] const Sequence& at(int32_t seq) const {
    return sequences_.at(static_cast<size_t>(seq));
  }
  // Where libllama has a row of a sequence; in a medium several may be at one place.
  [[nodiscard]] llama_pos position(int32_t seq, int64_t row) const {
    const MediaRows* media = at(seq).media.get();
    return static_cast<llama_pos>(media == nullptr ? row : media->position(row)[0]);
  }
  [[nodiscard]] Status check(const LlamaItem& item) const;
  // Of an item, what comes first of the tokens from `done` on.
  [[nodiscard]] Piece piece_of(const LlamaItem& item, int64_t done) const;
  void fill_batch(std::span<const Piece> pieces);
  Status add_rows(const Piece& piece);
  // Computes pieces whose sequences have the same adapters, of texts or one of a medium; their
  // lengths stay as they are.
  Status compute_alike(std::span<const Piece> pieces);
  Status compute_pieces(std::span<const LlamaItem> items);
  void roll_back(std::span<const LlamaItem> items);
  // Takes back what is behind the first n tokens, which is at least one; false: it can't be.
  bool cut_back(int32_t seq, int64_t n);
  void clear(int32_t seq);
  [[nodiscard]] llama_memory_t memory() const { return llama_get_memory(context_.get()); }
  [[nodiscard]] llama_state_seq_flags snapshot_flags() const {
    return rows_->remainder() == Remainder::kPartial ? LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
                                                     : LLAMA_STATE_SEQ_FLAGS_NONE;
  }

  const LlamaOptions options_;
  LlamaModelInfo info_;
  StateLayout layout_;
  ModelPtr model_;
  ContextPtr context_;
  std::unique_ptr<StateRows> rows_;
  std::vector<llama_adapter_lora*> adapters_;  // the model's, which frees them
  std::unique_ptr<Projector> projector_;       // null: there is none
  std::vector<Sequence> sequences_;
  Batch batch_;
};

Status LlamaEngineImpl::open(const std::string& path) {
  HCACHE_ASSIGN_OR_RETURN(model_, load_model(path, {.devices = options_.devices,
                                                    .gpu_layers = options_.gpu_layers,
                                                    .device_parts = options_.device_parts,
                                                    .progress = options_.progress}));
  HCACHE_RETURN_IF_ERROR(check_kind(path));
  info_ = describe(*model_);
  HCACHE_RETURN_IF_ERROR(open_adapters());
  HCACHE_RETURN_IF_ERROR(open_projector());
  return open_context().with_context(path);
}

Status LlamaEngineImpl::open_projector() {
  if (options_.projector.path.empty()) return {};
  Projector::Options options;
  options.projector = options_.projector;
  options.n_threads = options_.n_threads;
  options.most_whole_rows = options_.max_batch_rows;
  if (options_.projector.on_device && !options_.devices.empty()) {
    options.device = options_.devices.front();
  }
  HCACHE_ASSIGN_OR_RETURN(projector_, Projector::load(*model_, options));
  return {};
}

Status LlamaEngineImpl::open_adapters() {
  for (const std::string& path : options_.adapters) {
    const model::ErrorLog log;
    llama_adapter_lora* adapter = llama_adapter_lora_init(model_.get(), path.c_str());
    if (adapter == nullptr) {
      return data_loss(fmt::format("{}: llama.cpp can't take it for an adapter of this model: {}",
                                   path, log.text("no reason")));
    }
    adapters_.push_back(adapter);
  }
  return {};
}

Status LlamaEngineImpl::check_kind(const std::string& path) const {
  const auto not_served = [&](std::string_view why) {
    return unimplemented(
        fmt::format("{}: {}, which can't be served: give a model that writes text "
                    "token by token",
                    path, why));
  };
  if (llama_model_is_diffusion(model_.get())) return not_served("it is a diffusion model");
  if (llama_model_has_encoder(model_.get())) return not_served("it has an encoder");
  if (!llama_model_has_decoder(model_.get())) return not_served("it has no decoder");
  return {};
}

Status LlamaEngineImpl::open_context() {
  const model::ErrorLog log;
  llama_context_params params = llama_context_default_params();
  params.n_ctx = static_cast<uint32_t>(options_.cells);
  params.n_batch = static_cast<uint32_t>(options_.max_batch_rows);
  params.n_ubatch = params.n_batch;
  // Recurrent state is allocated for all of them.
  const bool has_states =
      llama_model_is_recurrent(model_.get()) || llama_model_is_hybrid(model_.get());
  params.n_seq_max = static_cast<uint32_t>(
      std::min(options_.max_sequences, has_states ? kMostStates : kMostSequences));
  if (options_.n_threads > 0) params.n_threads = params.n_threads_batch = options_.n_threads;
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_AUTO;
  params.rope_scaling_type = scaling_type(options_.rope.scaling);
  params.rope_freq_base = options_.rope.freq_base;
  params.rope_freq_scale = options_.rope.freq_scale;
  params.yarn_orig_ctx = static_cast<uint32_t>(options_.rope.orig_ctx);
  params.yarn_ext_factor = options_.rope.ext_factor;
  params.yarn_attn_factor = options_.rope.attn_factor;
  params.yarn_beta_fast = options_.rope.beta_fast;
  params.yarn_beta_slow = options_.rope.beta_slow;
  params.pooling_type = LLAMA_POOLING_TYPE_NONE;  // whatever the file says: rows are given out
  params.type_k = params.type_v = options_.kv_type;
  params.kv_unified = true;
  params.no_perf = true;
  context_.reset(llama_init_from_model(model_.get(), params));
  if (!context_) {
    return resource_exhausted(fmt::format("no context of {} tokens for {} sequences: {}",
                                          options_.cells, params.n_seq_max, log.text("no reason")));
  }
  if (memory() == nullptr) {
    return unimplemented(
        "the model keeps no state between tokens, so it can't write text; an encoder gives "
        "vectors: "
        "`hcache serve -m FILE`");
  }
  find_context();
  sequences_.resize(params.n_seq_max);
  return probe();
}

void LlamaEngineImpl::find_context() {
  const llama_model* model = model_.get();
  const int32_t n_ctx = llama_model_n_ctx_train(model);  // as libllama corrects it for YaRN
  if (n_ctx != info_.n_ctx_train) {
    info_.n_ctx_train = n_ctx;
    return;
  }
  const auto number = [&](const char* key, float otherwise) {
    const std::string text = written([&](char* to, size_t size) {
      return llama_model_meta_val_str(model, (info_.architecture + key).c_str(), to, size);
    });
    return text.empty() ? otherwise : std::strtof(text.c_str(), nullptr);
  };
  const int32_t head_dim = info_.n_embd / std::max(llama_model_n_head(model), 1);
  const auto n_rot =
      static_cast<int>(number(".rope.dimension_count", static_cast<float>(head_dim)));
  info_.n_ctx_train = static_cast<int32_t>(
      model::extended_context(options_.rope, n_ctx, n_rot, number(".rope.freq_base", kFreqBase),
                              llama_model_rope_freq_scale_train(model)));
}

Status LlamaEngineImpl::probe() {
  const llama_token bos = llama_vocab_bos(llama_model_get_vocab(model_.get()));
  const int32_t token = bos >= 0 && bos < info_.n_vocab ? bos : 0;
  std::vector<float> logits;
  const LlamaItem item = {.seq = 0, .tokens = {&token, 1}, .n_logits = 1, .logits = &logits};
  HCACHE_RETURN_IF_ERROR(compute({&item, 1}));
  rows_ = StateRows::probe(context_.get(), 0);
  clear(0);
  const bool by_rows = rows_->remainder() != Remainder::kWhole;
  if (by_rows) layout_.row_bytes = rows_->row_bytes();
  layout_.snapshots = rows_->remainder() != Remainder::kNone;
  if (!by_rows) {
    layout_.description = "snapshots of the whole";
  } else {
    layout_.description = fmt::format("rows of {} tensors{}", layout_.row_bytes.size(),
                                      layout_.snapshots ? " and snapshots of the rest" : "");
  }
  return {};
}

// ---- Sequences

void LlamaEngineImpl::clear(int32_t seq) {
  llama_memory_seq_rm(memory(), seq, -1, -1);
  at(seq).length = 0;
  at(seq).media.reset();
}

Status LlamaEngineImpl::set_adapters(int32_t seq, std::span<const float> scales) {
  if (!scales.empty() && scales.size() != adapters_.size()) {
    return invalid_argument(
        fmt::format("{} scales for the model's {} adapters", scales.size(), adapters_.size()));
  }
  at(seq).scales.assign(scales.begin(), scales.end());
  return {};
}

bool LlamaEngineImpl::cut_back(int32_t seq, int64_t n) {
  const llama_pos end = position(seq, n);
  const llama_pos last = position(seq, n - 1);
  return last < end && llama_memory_seq_rm(memory(), seq, end, -1) &&
         llama_memory_seq_pos_max(memory(), seq) == last;
}

int64_t LlamaEngineImpl::shortest(int32_t seq) const {
  if (rows_->remainder() == Remainder::kNone) return 0;
  const int64_t all = length(seq);
  // Places of media are not counted in rows.
  if (!rows_->windows_alone() || (at(seq).media && !at(seq).media->counts_rows())) return all;
  const int64_t oldest = llama_memory_seq_pos_min(memory(), seq);
  if (oldest == 0) return 0;
  return oldest < 0 ? all : std::min(all, oldest + llama_model_n_swa(model_.get()));
}

Status LlamaEngineImpl::trim(int32_t seq, int64_t n) {
  if (n == length(seq)) return {};
  if (n == 0) {
    clear(seq);
    return {};
  }
  if (n < shortest(seq) || n > length(seq) || !cut_back(seq, n)) {
    clear(seq);
    return failed_precondition(
        fmt::format("a sequence of this model can't be cut back to {} tokens", n));
  }
  at(seq).length = n;
  return {};
}

Status LlamaEngineImpl::copy(int32_t from, int32_t to, int64_t n) {
  const bool all = n == length(from);
  const bool between = all || n == 0 || position(from, n - 1) < position(from, n);
  if (n < shortest(from) || n > length(from) || !between) {
    return failed_precondition(
        fmt::format("a sequence of this model has no beginning of {} tokens to copy", n));
  }
  llama_memory_seq_cp(memory(), from, to, -1, all ? -1 : position(from, n));
  at(to) = at(from);
  at(to).length = n;
  return {};
}

// ---- Steps

Status LlamaEngineImpl::check(const LlamaItem& item) const {
  const MediaRows* media = at(item.seq).media.get();
  int64_t row = length(item.seq);
  const int64_t end = row + static_cast<int64_t>(item.tokens.size());
  for (const int32_t token : item.tokens) {
    const bool of_medium = media != nullptr && media->at(row++) != nullptr;
    if (token >= info_.n_vocab || (token < 0) != of_medium) {
      return invalid_argument(fmt::format("the vocabulary has no token {}", token));
    }
  }
  if (media != nullptr && media->step_end(length(item.seq), end) != end) {
    return invalid_argument(
        fmt::format("a step ends with row {}, in the middle of a picture", end));
  }
  return {};
}

LlamaEngineImpl::Piece LlamaEngineImpl::piece_of(const LlamaItem& item, int64_t done) const {
  Piece piece;
  piece.item = &item;
  piece.first = length(item.seq) + done;
  auto n = static_cast<int64_t>(item.tokens.size()) - done;
  if (const MediaRows* media = at(item.seq).media.get(); media != nullptr) {
    piece.run = media->at(piece.first);
    const MediaRun* next = media->next(piece.first);
    if (piece.run != nullptr) {
      n = std::min({n, piece.run->end() - piece.first, int64_t{options_.max_batch_rows}});
    } else if (next != nullptr) {
      n = std::min(n, next->first - piece.first);
    }
  }
  piece.tokens = item.tokens.subspan(static_cast<size_t>(done), static_cast<size_t>(n));
  const auto behind = static_cast<int64_t>(item.tokens.size()) - done - n;
  piece.n_logits = std::clamp<int64_t>(item.n_logits - behind, 0, n);
  return piece;
}

Status LlamaEngineImpl::add_rows(const Piece& piece) {
  const std::span<const MediaRun> runs = at(piece.item->seq).media->runs();
  if (projector_ == nullptr || piece.item->chunks == nullptr) {
    return failed_precondition("rows of a picture are to be computed, and there is none");
  }
  HCACHE_ASSIGN_OR_RETURN(
      const std::span<const float> rows,
      projector_->encode(*piece.item->chunks, static_cast<size_t>(piece.run - runs.data())));
  const auto width = static_cast<size_t>(llama_model_n_embd_inp(model_.get()));
  const auto from = static_cast<size_t>(piece.first - piece.run->first);
  const std::span<const float> taken = rows.subspan(from * width, piece.tokens.size() * width);
  batch_.embeddings.assign(taken.begin(), taken.end());
  // Section by section.
  const llama_rope_type kind = llama_model_rope_type(model_.get());
  const bool sections = kind == LLAMA_ROPE_TYPE_MROPE || kind == LLAMA_ROPE_TYPE_IMROPE;
  for (size_t section = 0; section < (sections ? MediaRun::Position().size() : 1); ++section) {
    for (size_t i = 0; i < piece.tokens.size(); ++i) {
      batch_.positions.push_back(piece.run->positions[from + i][section]);
    }
  }
  return {};
}

void LlamaEngineImpl::fill_batch(std::span<const Piece> pieces) {
  for (const Piece& piece : pieces) {
    const auto n = static_cast<int64_t>(piece.tokens.size());
    for (int64_t i = 0; i < n; ++i) {
      if (piece.run == nullptr) {
        batch_.tokens.push_back(piece.tokens[static_cast<size_t>(i)]);
        batch_.positions.push_back(position(piece.item->seq, piece.first + i));
      }
      batch_.n_seqs.push_back(1);
      batch_.seqs.push_back(piece.item->seq);
      // With hidden rows libllama gives those of all tokens.
      batch_.wanted.push_back(piece.item->hidden || i >= n - piece.n_logits ? 1 : 0);
    }
  }
  for (llama_seq_id& seq : batch_.seqs) batch_.seq_lists.push_back(&seq);
}

void LlamaEngineImpl::roll_back(std::span<const LlamaItem> items) {
  for (const LlamaItem& item : items) {
    const int64_t before = length(item.seq);
    if (before == 0 || !cut_back(item.seq, before)) clear(item.seq);
  }
}

Status LlamaEngineImpl::compute(std::span<const LlamaItem> items) {
  for (const LlamaItem& item : items) HCACHE_RETURN_IF_ERROR(check(item));
  if (Status status = compute_pieces(items); !status.ok()) {
    roll_back(items);
    return status;
  }
  for (const LlamaItem& item : items) {
    at(item.seq).length += static_cast<int64_t>(item.tokens.size());
  }
  return {};
}

// A step of libllama's has tokens or rows, the same adapters for all, and gives logits alone or
// hidden rows.
Status LlamaEngineImpl::compute_pieces(std::span<const LlamaItem> items) {
  std::vector<int64_t> done(items.size(), 0);
  for (;;) {
    std::vector<std::vector<Piece>> groups;
    for (size_t i = 0; i < items.size(); ++i) {
      if (done[i] == static_cast<int64_t>(items[i].tokens.size())) continue;
      const Piece piece = piece_of(items[i], done[i]);
      done[i] += static_cast<int64_t>(piece.tokens.size());
      const auto like = std::find_if(groups.begin(), groups.end(), [&](const auto& group) {
        const Piece& first = group.front();
        return first.run == nullptr && piece.run == nullptr &&
               at(first.item->seq).scales == at(piece.item->seq).scales &&
               first.item->hidden == piece.item->hidden;
      });
      if (like != groups.end()) {
        like->push_back(piece);
      } else {
        groups.push_back({piece});
      }
    }
    if (groups.empty()) return {};
    for (const auto& group : groups) HCACHE_RETURN_IF_ERROR(compute_alike(group));
  }
}

Status LlamaEngineImpl::compute_alike(std::span<const Piece> pieces) {
  const model::ErrorLog log;
  const Piece& first = pieces.front();
  std::vector<float> scales = at(first.item->seq).scales;
  scales.resize(adapters_.size());
  if (llama_set_adapters_lora(context_.get(), adapters_.data(), adapters_.size(), scales.data()) !=
      0) {
    return internal_error(
        fmt::format("libllama can't apply the adapters: {}", log.text("no reason")));
  }
  batch_ = {};
  if (first.run != nullptr) HCACHE_RETURN_IF_ERROR(add_rows(first));
  fill_batch(pieces);
  const llama_batch batch = {.n_tokens = static_cast<int32_t>(batch_.seqs.size()),
                             .token = batch_.tokens.empty() ? nullptr : batch_.tokens.data(),
                             .embd = batch_.embeddings.empty() ? nullptr : batch_.embeddings.data(),
                             .pos = batch_.positions.data(),
                             .n_seq_id = batch_.n_seqs.data(),
                             .seq_id = batch_.seq_lists.data(),
                             .logits = batch_.wanted.data()};
  const bool hidden = first.item->hidden;
  const bool whole = first.run != nullptr && first.run->whole;
  llama_set_embeddings(context_.get(), hidden);
  if (whole) llama_set_causal_attn(context_.get(), false);
  const int32_t code = llama_decode(context_.get(), batch);
  if (whole) llama_set_causal_attn(context_.get(), true);
  if (code != 0) {
    if (code == kNoCells) return resource_exhausted("the cache has no cells for this step");
    return internal_error(fmt::format("libllama can't compute a step of {} tokens (code {}): {}",
                                      batch.n_tokens, code, log.text("no reason")));
  }
  int64_t end = 0;  // of the piece's tokens in the batch
  for (const Piece& piece : pieces) {
    end += static_cast<int64_t>(piece.tokens.size());
    for (int64_t i = end - piece.n_logits; i < end; ++i) {
      const auto at = static_cast<int32_t>(i);
      const float* row = hidden ? llama_get_embeddings_ith(context_.get(), at)
                                : llama_get_logits_ith(context_.get(), at);
      if (row == nullptr) return internal_error("libllama gives no rows of the step");
      std::vector<float>& logits = *piece.item->logits;
      logits.insert(logits.end(), row, row + (hidden ? info_.n_embd_out : info_.n_vocab));
    }
  }
  return {};
}

// ---- State

Status LlamaEngineImpl::read_rows(int32_t seq, int64_t from, int64_t to, std::span<std::byte> out) {
  llama_synchronize(context_.get());
  return rows_->read(seq, at(seq).media.get(), from, to, out);
}

Status LlamaEngineImpl::make_rows(int32_t seq, std::span<const int32_t> tokens) {
  if (rows_->remainder() == Remainder::kWhole) return {};
  const model::ErrorLog log;
  llama_synchronize(context_.get());
  HCACHE_RETURN_IF_ERROR(rows_->make(seq, at(seq).media.get(), tokens));
  at(seq).length = static_cast<int64_t>(tokens.size());
  return {};
}

Result<std::vector<std::byte>> LlamaEngineImpl::snapshot(int32_t seq) {
  const model::ErrorLog log;
  std::vector<std::byte> bytes(llama_state_seq_get_size_ext(context_.get(), seq, snapshot_flags()));
  const size_t n =
      llama_state_seq_get_data_ext(context_.get(), reinterpret_cast<uint8_t*>(bytes.data()),
                                   bytes.size(), seq, snapshot_flags());
  if (n == 0 || n != bytes.size()) {
    return internal_error(fmt::format("libllama gives no state: {}", log.text("no reason")));
  }
  return bytes;
}

Status LlamaEngineImpl::load_snapshot(int32_t seq, int64_t n, std::span<const std::byte> snapshot) {
  const model::ErrorLog log;
  const size_t taken = llama_state_seq_set_data_ext(
      context_.get(), reinterpret_cast<const uint8_t*>(snapshot.data()), snapshot.size(), seq,
      snapshot_flags());
  if (taken != snapshot.size() || llama_memory_seq_pos_max(memory(), seq) != position(seq, n - 1)) {
    clear(seq);
    return data_loss(fmt::format("a snapshot of {} bytes does not fit a sequence of {} tokens: {}",
                                 snapshot.size(), n, log.text("it is of another length")));
  }
  at(seq).length = n;
  return {};
}

}  // namespace

size_t StateLayout::token_bytes() const {
  return std::accumulate(row_bytes.begin(), row_bytes.end(), size_t{0});
}

Result<std::unique_ptr<LlamaEngine>> LlamaEngine::load(const std::string& path,
                                                       const LlamaOptions& options) {
  auto engine = std::make_unique<LlamaEngineImpl>(options);
  HCACHE_RETURN_IF_ERROR(engine->open(path));
  return std::unique_ptr<LlamaEngine>(std::move(engine));
}

std::string libllama_identity() {
  return fmt::format("libllama {} {}", ggml_version(), ggml_commit());
}

}  // namespace hcache::libllama
