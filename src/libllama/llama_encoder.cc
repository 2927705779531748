#include "libllama/llama_encoder.h"

#include <fmt/format.h>
#include <llama.h>

#include <algorithm>
#include <utility>

#include "loaded_model.h"
#include "model/llama_log.h"

namespace hcache::libllama {
namespace {

constexpr int32_t kMostTexts = 256;  // libllama's limit of sequences
// Flash attention rounds K and V to F16; up to so many tokens attention is computed without.
constexpr uint32_t kExactTokens = 2048;

enum llama_pooling_type pooling_type(model::Pooling pooling) {
  switch (pooling) {
    case model::Pooling::kNone: return LLAMA_POOLING_TYPE_NONE;
    case model::Pooling::kMean: return LLAMA_POOLING_TYPE_MEAN;
    case model::Pooling::kFirst: return LLAMA_POOLING_TYPE_CLS;
    case model::Pooling::kLast: return LLAMA_POOLING_TYPE_LAST;
    case model::Pooling::kRank: return LLAMA_POOLING_TYPE_RANK;
  }
  return LLAMA_POOLING_TYPE_UNSPECIFIED;
}

class LlamaEncoderImpl final : public LlamaEncoder {
 public:
  explicit LlamaEncoderImpl(EncoderOptions options) : options_(std::move(options)) {}

  Status open(const std::string& path);

  const LlamaModelInfo& info() const override { return info_; }
  const EncoderOptions& options() const override { return options_; }
  int32_t width() const override { return width_; }
  Result<std::vector<EncodedText>> encode(std::span<const std::vector<int32_t>> texts) override;

 private:
  using Texts = std::span<const std::vector<int32_t>>;

  Status choose_pooling(const std::string& path);
  Status open_context();
  [[nodiscard]] Status check(const std::vector<int32_t>& text) const;
  // How many of these texts one batch takes; at least one.
  [[nodiscard]] size_t fitting(Texts texts) const;
  Status encode_batch(Texts texts, std::vector<EncodedText>* out);
  // The rows of sequence `text`, whose first token is number `first` of the batch.
  Result<EncodedText> rows_of(int32_t text, int32_t first, size_t n_tokens) const;

  EncoderOptions options_;
  LlamaModelInfo info_;
  int32_t width_ = 0;
  bool encoder_alone_ = false;  // of a kind of model that usually has a decoder as well
  ModelPtr model_;
  ContextPtr context_;
};

Status LlamaEncoderImpl::choose_pooling(const std::string& path) {
  HCACHE_ASSIGN_OR_RETURN(const model::EncoderFacts facts, model::encoder_facts(path));
  if (!options_.pooling) options_.pooling = facts.pooling.value_or(model::Pooling::kMean);
  if (options_.pooling == model::Pooling::kRank && !facts.has_head) {
    return failed_precondition(
        fmt::format("{}: the file has no head that ranks (cls.weight or cls.output.weight): give "
                    "one of a reranker",
                    path));
  }
  return {};
}

Status LlamaEncoderImpl::open(const std::string& path) {
  HCACHE_RETURN_IF_ERROR(choose_pooling(path));
  HCACHE_ASSIGN_OR_RETURN(model_, load_model(path, {.devices = options_.devices,
                                                    .gpu_layers = options_.gpu_layers,
                                                    .device_parts = options_.device_parts,
                                                    .progress = options_.progress}));
  info_ = describe(*model_);
  encoder_alone_ = llama_model_has_encoder(model_.get()) && !llama_model_has_decoder(model_.get());
  width_ = options_.pooling == model::Pooling::kRank
               ? static_cast<int32_t>(llama_model_n_cls_out(model_.get()))
               : info_.n_embd_out;
  const int64_t trained = std::max(info_.n_ctx_train, 1);
  options_.max_text_tokens =
      options_.max_text_tokens > 0 ? std::min(options_.max_text_tokens, trained) : trained;
  options_.max_batch_texts = std::clamp(options_.max_batch_texts, 1, kMostTexts);
  options_.max_batch_tokens = std::max<int64_t>(options_.max_batch_tokens, 1);
  return open_context().with_context(path);
}

Status LlamaEncoderImpl::open_context() {
  const model::ErrorLog log;
  llama_context_params params = llama_context_default_params();
  params.n_seq_max = static_cast<uint32_t>(options_.max_batch_texts);
  // A text is computed at once: its tokens see those behind them as well. libllama sizes its
  // buffers by an equal share for each sequence.
  const auto most =
      static_cast<uint32_t>(std::max(options_.max_text_tokens, options_.max_batch_tokens));
  params.n_ctx = (most + params.n_seq_max - 1) / params.n_seq_max * params.n_seq_max;
  params.n_batch = params.n_ubatch = params.n_ctx;
  if (options_.n_threads > 0) params.n_threads = params.n_threads_batch = options_.n_threads;
  params.flash_attn_type =
      params.n_ubatch > kExactTokens ? LLAMA_FLASH_ATTN_TYPE_AUTO : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  params.embeddings = true;
  params.pooling_type = pooling_type(*options_.pooling);
  params.kv_unified = true;
  params.no_perf = true;
  context_.reset(llama_init_from_model(model_.get(), params));
  if (!context_) {
    return resource_exhausted(
        fmt::format("no context of {} tokens: {}", params.n_ctx, log.text("no reason")));
  }
  return {};
}

Status LlamaEncoderImpl::check(const std::vector<int32_t>& text) const {
  if (text.empty()) return invalid_argument("a text has no tokens");
  if (static_cast<int64_t>(text.size()) > options_.max_text_tokens) {
    return out_of_range(fmt::format("a text has {} tokens, and the model takes {} at most",
                                    text.size(), options_.max_text_tokens));
  }
  for (const int32_t token : text) {
    if (token < 0 || token >= info_.n_vocab) {
      return invalid_argument(fmt::format("the vocabulary has no token {}", token));
    }
  }
  return {};
}

size_t LlamaEncoderImpl::fitting(Texts texts) const {
  const size_t most = std::min(texts.size(), static_cast<size_t>(options_.max_batch_texts));
  auto tokens = static_cast<int64_t>(texts.front().size());
  size_t n = 1;
  for (; n < most; ++n) {
    tokens += static_cast<int64_t>(texts[n].size());
    if (tokens > options_.max_batch_tokens) break;
  }
  return n;
}

Result<std::vector<EncodedText>> LlamaEncoderImpl::encode(Texts texts) {
  for (const std::vector<int32_t>& text : texts) HCACHE_RETURN_IF_ERROR(check(text));
  std::vector<EncodedText> out;
  while (!texts.empty()) {
    const size_t n = fitting(texts);
    HCACHE_RETURN_IF_ERROR(encode_batch(texts.first(n), &out));
    texts = texts.subspan(n);
  }
  return out;
}

Status LlamaEncoderImpl::encode_batch(Texts texts, std::vector<EncodedText>* out) {
  const model::ErrorLog log;
  std::vector<llama_token> tokens;
  std::vector<llama_pos> positions;
  std::vector<llama_seq_id> seqs;
  for (size_t i = 0; i < texts.size(); ++i) {
    tokens.insert(tokens.end(), texts[i].begin(), texts[i].end());
    for (size_t at = 0; at < texts[i].size(); ++at) positions.push_back(static_cast<int>(at));
    seqs.resize(tokens.size(), static_cast<llama_seq_id>(i));
  }
  std::vector<int32_t> n_seqs(tokens.size(), 1);
  std::vector<llama_seq_id*> seq_lists;
  for (llama_seq_id& seq : seqs) seq_lists.push_back(&seq);
  std::vector<int8_t> wanted(tokens.size(), 1);
  const llama_batch batch = {.n_tokens = static_cast<int32_t>(tokens.size()),
                             .token = tokens.data(),
                             .embd = nullptr,
                             .pos = positions.data(),
                             .n_seq_id = n_seqs.data(),
                             .seq_id = seq_lists.data(),
                             .logits = wanted.data()};
  if (llama_memory_t memory = llama_get_memory(context_.get()); memory != nullptr) {
    llama_memory_clear(memory, false);
  }
  const int32_t code =
      encoder_alone_ ? llama_encode(context_.get(), batch) : llama_decode(context_.get(), batch);
  if (code != 0) {
    return internal_error(fmt::format("libllama can't compute {} texts of {} tokens (code {}): {}",
                                      texts.size(), batch.n_tokens, code, log.text("no reason")));
  }
  int32_t first = 0;
  for (size_t i = 0; i < texts.size(); ++i) {
    HCACHE_ASSIGN_OR_RETURN(EncodedText rows,
                            rows_of(static_cast<int32_t>(i), first, texts[i].size()));
    out->push_back(std::move(rows));
    first += static_cast<int32_t>(texts[i].size());
  }
  return {};
}

Result<EncodedText> LlamaEncoderImpl::rows_of(int32_t text, int32_t first, size_t n_tokens) const {
  const bool each = options_.pooling == model::Pooling::kNone;
  EncodedText rows;
  for (size_t i = 0; i < (each ? n_tokens : 1); ++i) {
    const float* row =
        each ? llama_get_embeddings_ith(context_.get(), first + static_cast<int32_t>(i))
             : llama_get_embeddings_seq(context_.get(), text);
    if (row == nullptr) return internal_error("libllama gives no rows of a text");
    rows.emplace_back(row, row + width_);
  }
  return rows;
}

}  // namespace

Result<std::unique_ptr<LlamaEncoder>> LlamaEncoder::load(const std::string& path,
                                                         const EncoderOptions& options) {
  auto encoder = std::make_unique<LlamaEncoderImpl>(options);
  HCACHE_RETURN_IF_ERROR(encoder->open(path));
  return std::unique_ptr<LlamaEncoder>(std::move(encoder));
}

}  // namespace hcache::libllama
