#include "libllama/llama_engine.h"

#include <fmt/format.h>
#include <ggml-backend.h>
#include <llama.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "loaded_model.h"
#include "model/llama_log.h"
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
  int32_t max_sequences() const override { return static_cast<int32_t>(lengths_.size()); }
  int64_t length(int32_t seq) const override { return lengths_.at(static_cast<size_t>(seq)); }
  int64_t shortest(int32_t seq) const override;
  Status trim(int32_t seq, int64_t n) override;
  Status set_adapters(int32_t seq, std::span<const float> scales) override;
  Status copy(int32_t from, int32_t to, int64_t n) override;
  Status compute(std::span<const LlamaItem> items) override;
  Status read_rows(int32_t seq, int64_t from, int64_t to, std::span<std::byte> out) override;
  Status make_rows(int32_t seq, std::span<const int32_t> tokens) override;
  Status write_rows(int32_t seq, size_t tensor, int64_t first,
                    std::span<const std::byte> rows) override {
    return rows_->write(seq, tensor, first, rows);
  }
  Result<std::vector<std::byte>> snapshot(int32_t seq) override;
  Status load_snapshot(int32_t seq, int64_t n, std::span<const std::byte> snapshot) override;

 private:
  // The arrays of a llama_batch.
  struct Batch {
    std::vector<llama_token> tokens;
    std::vector<llama_pos> positions;
    std::vector<int32_t> n_seqs;
    std::vector<llama_seq_id> seqs;
    std::vector<llama_seq_id*> seq_lists;
    std::vector<int8_t> wanted;
  };

  Status open_adapters();
  Status open_context();
  // How many tokens the model takes, with its positions as they are now.
  void find_context();
  // Whether the model can be served so at all.
  [[nodiscard]] Status check_kind(const std::string& path) const;
  // Computes one token, so that the caches show how they are laid out.
  Status probe();
  void fill_batch(std::span<const LlamaItem> items);
  // Computes items whose sequences have the same adapters; their lengths stay as they are.
  Status compute_alike(std::span<const LlamaItem> items);
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
  std::vector<int64_t> lengths_;
  std::vector<std::vector<float>> scales_;  // of the adapters, by sequence; empty: none counts
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
  return open_context().with_context(path);
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
  lengths_.assign(params.n_seq_max, 0);
  scales_.resize(params.n_seq_max);
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
  lengths_[static_cast<size_t>(seq)] = 0;
}

Status LlamaEngineImpl::set_adapters(int32_t seq, std::span<const float> scales) {
  if (!scales.empty() && scales.size() != adapters_.size()) {
    return invalid_argument(
        fmt::format("{} scales for the model's {} adapters", scales.size(), adapters_.size()));
  }
  scales_[static_cast<size_t>(seq)].assign(scales.begin(), scales.end());
  return {};
}

bool LlamaEngineImpl::cut_back(int32_t seq, int64_t n) {
  return llama_memory_seq_rm(memory(), seq, static_cast<llama_pos>(n), -1) &&
         llama_memory_seq_pos_max(memory(), seq) == n - 1;
}

int64_t LlamaEngineImpl::shortest(int32_t seq) const {
  if (rows_->remainder() == Remainder::kNone) return 0;
  const int64_t all = length(seq);
  if (!rows_->windows_alone()) return all;
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
  lengths_[static_cast<size_t>(seq)] = n;
  return {};
}

Status LlamaEngineImpl::copy(int32_t from, int32_t to, int64_t n) {
  if (n < shortest(from) || n > length(from)) {
    return failed_precondition(
        fmt::format("a sequence of this model has no beginning of {} tokens to copy", n));
  }
  const auto end = n == length(from) ? -1 : static_cast<llama_pos>(n);
  llama_memory_seq_cp(memory(), from, to, -1, end);
  scales_[static_cast<size_t>(to)] = scales_[static_cast<size_t>(from)];
  lengths_[static_cast<size_t>(to)] = n;
  return {};
}

// ---- Steps

void LlamaEngineImpl::fill_batch(std::span<const LlamaItem> items) {
  batch_ = {};
  for (const LlamaItem& item : items) {
    const auto n = static_cast<int64_t>(item.tokens.size());
    for (int64_t i = 0; i < n; ++i) {
      batch_.tokens.push_back(item.tokens[static_cast<size_t>(i)]);
      batch_.positions.push_back(static_cast<llama_pos>(length(item.seq) + i));
      batch_.n_seqs.push_back(1);
      batch_.seqs.push_back(item.seq);
      // With hidden rows libllama gives those of all tokens.
      batch_.wanted.push_back(item.hidden || i >= n - item.n_logits ? 1 : 0);
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
  for (const LlamaItem& item : items) {
    for (const int32_t token : item.tokens) {
      if (token < 0 || token >= info_.n_vocab) {
        return invalid_argument(fmt::format("the vocabulary has no token {}", token));
      }
    }
  }
  // A step of libllama's has the same adapters for all, and gives logits alone or hidden rows.
  std::vector<std::vector<LlamaItem>> groups;
  for (const LlamaItem& item : items) {
    const auto& scales = scales_[static_cast<size_t>(item.seq)];
    const auto like = std::find_if(groups.begin(), groups.end(), [&](const auto& group) {
      return scales_[static_cast<size_t>(group.front().seq)] == scales &&
             group.front().hidden == item.hidden;
    });
    if (like != groups.end()) {
      like->push_back(item);
    } else {
      groups.push_back({item});
    }
  }
  for (const auto& group : groups) {
    if (Status status = compute_alike(group); !status.ok()) {
      roll_back(items);
      return status;
    }
  }
  for (const LlamaItem& item : items) {
    lengths_[static_cast<size_t>(item.seq)] += static_cast<int64_t>(item.tokens.size());
  }
  return {};
}

Status LlamaEngineImpl::compute_alike(std::span<const LlamaItem> items) {
  const model::ErrorLog log;
  std::vector<float> scales = scales_[static_cast<size_t>(items.front().seq)];
  scales.resize(adapters_.size());
  if (llama_set_adapters_lora(context_.get(), adapters_.data(), adapters_.size(), scales.data()) !=
      0) {
    return internal_error(
        fmt::format("libllama can't apply the adapters: {}", log.text("no reason")));
  }
  fill_batch(items);
  const llama_batch batch = {.n_tokens = static_cast<int32_t>(batch_.tokens.size()),
                             .token = batch_.tokens.data(),
                             .embd = nullptr,
                             .pos = batch_.positions.data(),
                             .n_seq_id = batch_.n_seqs.data(),
                             .seq_id = batch_.seq_lists.data(),
                             .logits = batch_.wanted.data()};
  const bool hidden = items.front().hidden;
  llama_set_embeddings(context_.get(), hidden);
  const int32_t code = llama_decode(context_.get(), batch);
  if (code != 0) {
    if (code == kNoCells) return resource_exhausted("the cache has no cells for this step");
    return internal_error(fmt::format("libllama can't compute a step of {} tokens (code {}): {}",
                                      batch.n_tokens, code, log.text("no reason")));
  }
  int64_t end = 0;  // of the item's tokens in the batch
  for (const LlamaItem& item : items) {
    end += static_cast<int64_t>(item.tokens.size());
    for (int64_t i = end - item.n_logits; i < end; ++i) {
      const auto at = static_cast<int32_t>(i);
      const float* row = hidden ? llama_get_embeddings_ith(context_.get(), at)
                                : llama_get_logits_ith(context_.get(), at);
      if (row == nullptr) return internal_error("libllama gives no rows of the step");
      item.logits->insert(item.logits->end(), row,
                          row + (hidden ? info_.n_embd_out : info_.n_vocab));
    }
  }
  return {};
}

// ---- State

Status LlamaEngineImpl::read_rows(int32_t seq, int64_t from, int64_t to, std::span<std::byte> out) {
  llama_synchronize(context_.get());
  return rows_->read(seq, from, to, out);
}

Status LlamaEngineImpl::make_rows(int32_t seq, std::span<const int32_t> tokens) {
  if (rows_->remainder() == Remainder::kWhole) return {};
  const model::ErrorLog log;
  llama_synchronize(context_.get());
  HCACHE_RETURN_IF_ERROR(rows_->make(seq, tokens));
  lengths_[static_cast<size_t>(seq)] = static_cast<int64_t>(tokens.size());
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
  if (taken != snapshot.size() || llama_memory_seq_pos_max(memory(), seq) != n - 1) {
    clear(seq);
    return data_loss(fmt::format("a snapshot of {} bytes does not fit a sequence of {} tokens: {}",
                                 snapshot.size(), n, log.text("it is of another length")));
  }
  lengths_[static_cast<size_t>(seq)] = n;
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
