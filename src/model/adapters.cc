#include "adapters.h"

#include <fmt/format.h>
#include <ggml-alloc.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <utility>

namespace hcache::model {
namespace {

constexpr std::string_view kSuffixA = ".lora_a";
constexpr std::string_view kSuffixB = ".lora_b";

Result<std::string> text_of(const GgufFile& file, std::string_view key) {
  HCACHE_ASSIGN_OR_RETURN(std::optional<std::string> text, file.string(key));
  return std::move(text).value_or("");
}

Result<AdapterInfo> info_of(const GgufFile& file) {
  AdapterInfo info;
  info.path = file.path();
  HCACHE_ASSIGN_OR_RETURN(const std::string type, text_of(file, "general.type"));
  if (type != "adapter") {
    return invalid_argument(
        fmt::format("{}: it is no adapter: general.type is '{}'", file.path(), printable(type)));
  }
  HCACHE_ASSIGN_OR_RETURN(const std::string kind, text_of(file, "adapter.type"));
  if (kind != "lora") {
    return unimplemented(
        fmt::format("{}: adapters of type '{}' can't be applied, those of type "
                    "'lora' can",
                    file.path(), printable(kind)));
  }
  if (file.find("adapter.alora.invocation_tokens") != nullptr) {
    return unimplemented(
        fmt::format("{}: an adapter that tokens of the prompt switch on (aLoRA) can't be applied",
                    file.path()));
  }
  HCACHE_ASSIGN_OR_RETURN(info.architecture, text_of(file, "general.architecture"));
  HCACHE_ASSIGN_OR_RETURN(const auto alpha, file.number("adapter.lora.alpha"));
  info.alpha = alpha.value_or(0);
  HCACHE_ASSIGN_OR_RETURN(info.task, text_of(file, "adapter.lora.task_name"));
  HCACHE_ASSIGN_OR_RETURN(info.prompt_prefix, text_of(file, "adapter.lora.prompt_prefix"));
  return info;
}

Status check_shapes(const GgufFile& file, const GgufTensor& weight, const GgufTensor& a,
                    const GgufTensor& b) {
  const bool fits = a.ne[0] == weight.ne[0] && b.ne[1] == weight.ne[1] && a.ne[1] == b.ne[0] &&
                    a.ne[2] == weight.ne[2] && b.ne[2] == weight.ne[2] && a.ne[3] == 1 &&
                    b.ne[3] == 1;
  if (fits) return {};
  return data_loss(fmt::format("{}: {} is {} and {} is {}, which don't fit the model's {}",
                               file.path(), a.name, a.describe(), b.name, b.describe(),
                               weight.describe()));
}

Status check_type(const GgufFile& file, const GgufTensor& t) {
  if (t.type == GGML_TYPE_F32 || ggml_get_type_traits(t.type)->to_float != nullptr) return {};
  return unimplemented(fmt::format("{}: tensor {} is {}, which can't be read as numbers",
                                   file.path(), t.name, ggml_type_name(t.type)));
}

// Rows [first, first + n) of each matrix, times `factor`.
std::vector<float> widened(const GgufTensor& t, int64_t first, int64_t n, float factor) {
  std::vector<float> out(static_cast<size_t>(n * t.ne[0] * t.ne[2]));
  float* to = out.data();
  for (int64_t matrix = 0; matrix < t.ne[2]; ++matrix) {
    const size_t row = static_cast<size_t>(matrix * t.ne[1] + first);
    const uint8_t* from = t.data.data() + row * t.row_bytes();
    if (t.type == GGML_TYPE_F32) {
      std::memcpy(to, from, static_cast<size_t>(n) * t.row_bytes());
    } else {
      ggml_get_type_traits(t.type)->to_float(from, to, n * t.ne[0]);
    }
    to += n * t.ne[0];
  }
  for (float& value : out) value *= factor;
  return out;
}

}  // namespace

Result<AdapterInfo> read_adapter_info(const std::string& path, Env& env) {
  HCACHE_ASSIGN_OR_RETURN(const auto file, GgufFile::open(path, env));
  return info_of(*file);
}

std::span<const LowRank> Adapters::of(const ggml_tensor* weight) const {
  const auto found = by_weight_.find(weight);
  return found == by_weight_.end() ? std::span<const LowRank>() : found->second;
}

Status Adapters::add(const std::string& path, const HParams& hparams, std::span<const Slot> slots,
                     Env& env) {
  HCACHE_ASSIGN_OR_RETURN(const auto file, GgufFile::open(path, env));
  HCACHE_ASSIGN_OR_RETURN(AdapterInfo info, info_of(*file));
  if (info.architecture != hparams.arch) {
    return invalid_argument(
        fmt::format("{}: the adapter is for models of kind '{}', this one is "
                    "'{}'",
                    path, printable(info.architecture), hparams.arch));
  }
  std::map<Device*, std::vector<Part>> parts;
  std::set<const GgufTensor*> taken;
  for (const GgufTensor& a : file->tensors()) {
    if (!a.name.ends_with(kSuffixA)) continue;
    const std::string name = a.name.substr(0, a.name.size() - kSuffixA.size());
    const GgufTensor* b = file->tensor(name + std::string(kSuffixB));
    if (b == nullptr) continue;
    for (const Slot& slot : slots) {
      // Embeddings are looked up, not multiplied.
      const bool is_it = slot.use != Use::kVector && slot.source->name == name;
      if (!is_it || name.starts_with("token_embd.")) continue;
      HCACHE_RETURN_IF_ERROR(check_shapes(*file, *slot.source, a, *b));
      HCACHE_RETURN_IF_ERROR(check_type(*file, a));
      HCACHE_RETURN_IF_ERROR(check_type(*file, *b));
      const auto rank = static_cast<double>(b->ne[0]);
      const double factor = info.alpha == 0 ? 1 : info.alpha / rank;
      parts[slot.device].push_back({&slot, &a, b, static_cast<float>(factor)});
      taken.insert({&a, b});
    }
  }
  const auto& tensors = file->tensors();
  const auto odd = std::find_if(tensors.begin(), tensors.end(),
                                [&](const GgufTensor& t) { return !taken.contains(&t); });
  if (odd != tensors.end() || taken.empty()) {
    return unimplemented(
        fmt::format("{}: the adapter changes {}, which our engine can't change in this model; try "
                    "--engine llama",
                    path, odd == tensors.end() ? "nothing" : odd->name));
  }
  const int adapter = static_cast<int>(infos_.size());
  infos_.push_back(std::move(info));
  for (const auto& [device, own] : parts) HCACHE_RETURN_IF_ERROR(place(adapter, *device, own));
  return {};
}

Status Adapters::place(int adapter, Device& device, std::span<const Part> parts) {
  contexts_.emplace_back(ggml_init({ggml_tensor_overhead() * parts.size() * 2, nullptr, true}));
  ggml_context* ctx = contexts_.back().get();
  std::vector<LowRank> made;
  for (const Part& part : parts) {
    const int64_t n_matrices = part.slot->n_matrices;
    const int64_t n_rows = part.slot->n_rows / n_matrices;
    const int64_t rank = part.b->ne[0];
    made.push_back({.adapter = adapter,
                    .a = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, part.a->ne[0], rank, n_matrices),
                    .b = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, rank, n_rows, n_matrices)});
  }
  buffers_.emplace_back(ggml_backend_alloc_ctx_tensors_from_buft(ctx, device.buffer_type()));
  if (buffers_.back() == nullptr) {
    return resource_exhausted(fmt::format("{}: device {} has no room for the adapter",
                                          infos_.back().path, device.name()));
  }
  ggml_backend_buffer_set_usage(buffers_.back().get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
  for (size_t i = 0; i < parts.size(); ++i) {
    const Part& part = parts[i];
    const bool whole = part.slot->n_matrices > 1;  // of experts every row is taken
    const std::vector<float> a = widened(*part.a, 0, part.a->ne[1], 1);
    const std::vector<float> b = widened(*part.b, whole ? 0 : part.slot->first_row,
                                         whole ? part.b->ne[1] : part.slot->n_rows, part.factor);
    ggml_backend_tensor_set(made[i].a, a.data(), 0, ggml_nbytes(made[i].a));
    ggml_backend_tensor_set(made[i].b, b.data(), 0, ggml_nbytes(made[i].b));
    by_weight_[*part.slot->target].push_back(made[i]);
  }
  return {};
}

}  // namespace hcache::model
