#include "model/pooling.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "gguf_file.h"

namespace hcache::model {
namespace {

// The numbers that llama.cpp's files have for them.
constexpr int64_t kFileNone = 0;
constexpr int64_t kFileMean = 1;
constexpr int64_t kFileCls = 2;
constexpr int64_t kFileLast = 3;
constexpr int64_t kFileRank = 4;

// Architectures of llama.cpp's that know no order of tokens in which one follows from those before.
constexpr std::string_view kEncoders[] = {
    "bert",         "modern-bert", "nomic-bert",      "nomic-bert-moe", "neo-bert", "jina-bert-v2",
    "jina-bert-v3", "eurobert",    "gemma-embedding", "llama-embed",    "t5encoder"};

Result<std::optional<Pooling>> pooling_in(const GgufFile& file, const std::string& architecture) {
  const std::string key = architecture + ".pooling_type";
  HCACHE_ASSIGN_OR_RETURN(const auto number, file.integer(key));
  if (!number) return std::optional<Pooling>();
  switch (*number) {
    case kFileNone: return std::optional(Pooling::kNone);
    case kFileMean: return std::optional(Pooling::kMean);
    case kFileCls: return std::optional(Pooling::kFirst);
    case kFileLast: return std::optional(Pooling::kLast);
    case kFileRank: return std::optional(Pooling::kRank);
    default: return data_loss(fmt::format("{}: {} is {}, not 0 to 4", file.path(), key, *number));
  }
}

}  // namespace

Result<Pooling> pooling_named(std::string_view name) {
  if (name == "none") return Pooling::kNone;
  if (name == "mean") return Pooling::kMean;
  if (name == "cls") return Pooling::kFirst;
  if (name == "last") return Pooling::kLast;
  if (name == "rank") return Pooling::kRank;
  return invalid_argument(fmt::format("'{}' is none of none, mean, cls, last, rank", name));
}

Result<std::optional<Pooling>> pooling_of_file(const std::string& path) {
  HCACHE_ASSIGN_OR_RETURN(const EncoderFacts facts, encoder_facts(path));
  return facts.pooling;
}

Result<EncoderFacts> encoder_facts(const std::string& path) {
  HCACHE_ASSIGN_OR_RETURN(const auto file, GgufFile::open(path));
  HCACHE_ASSIGN_OR_RETURN(const auto named, file->string("general.architecture"));
  const std::string architecture = named.value_or("");
  EncoderFacts facts;
  HCACHE_ASSIGN_OR_RETURN(facts.pooling, pooling_in(*file, architecture));
  HCACHE_ASSIGN_OR_RETURN(const auto causal, file->boolean(architecture + ".attention.causal"));
  // Models of diffusion are not causal either, but say nothing of pooling.
  facts.encodes = std::ranges::find(kEncoders, architecture) != std::end(kEncoders) ||
                  (!causal.value_or(true) && facts.pooling);
  facts.has_head =
      file->tensor("cls.weight") != nullptr || file->tensor("cls.output.weight") != nullptr;
  return facts;
}

void Pooler::take(int64_t row, std::span<const float> values) {
  switch (pooling_) {
    case Pooling::kNone: rows_.emplace_back(values.begin(), values.end()); break;
    case Pooling::kMean:
      sum_.resize(values.size());
      for (size_t i = 0; i < values.size(); ++i) sum_[i] += values[i];
      break;
    case Pooling::kFirst:
      if (row == 0) rows_.emplace_back(values.begin(), values.end());
      break;
    case Pooling::kLast:
      if (row == n_rows_ - 1) rows_.emplace_back(values.begin(), values.end());
      break;
    case Pooling::kRank: break;
  }
}

std::vector<std::vector<float>> Pooler::vectors() && {
  if (pooling_ == Pooling::kMean) {
    std::vector<float> mean(sum_.size());
    for (size_t i = 0; i < sum_.size(); ++i) {
      mean[i] = static_cast<float>(sum_[i] / static_cast<double>(n_rows_));
    }
    rows_.push_back(std::move(mean));
  }
  return std::move(rows_);
}

}  // namespace hcache::model
