#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <set>

#include "gguf_file.h"
#include "gguf_writer.h"
#include "hparams.h"
#include "model/tools.h"
#include "quantise.h"
#include "weight_types.h"

namespace hcache::model {
namespace {

// For each index of the new axis the index of the old one, or -1 for zeros. Empty: unchanged.
using AxisMap = std::vector<int64_t>;

// One tensor of the new file. Vectors have columns only.
struct Rewrite {
  const GgufTensor* source = nullptr;
  ggml_type type = GGML_TYPE_F32;
  AxisMap rows;
  AxisMap columns;
  float scale = 1.0F;
};

// Whether whole rows can be copied as they are.
bool copies_rows(const Rewrite& r) {
  return r.type == r.source->type && r.columns.empty() && r.scale == 1.0F;
}

Status rewrite_rows(const Rewrite& r, const GgufTensor& target, int64_t first_row, int64_t n_rows,
                    uint8_t* out) {
  const GgufTensor& source = *r.source;
  std::vector<float> wide(static_cast<size_t>(source.ne[0]));
  std::vector<float> row(static_cast<size_t>(target.ne[0]));
  for (int64_t i = 0; i < n_rows; i++, out += target.row_bytes()) {
    const int64_t from =
        r.rows.empty() ? first_row + i : r.rows[static_cast<size_t>(first_row + i)];
    const uint8_t* old =
        source.data.data() + static_cast<size_t>(std::max<int64_t>(0, from)) * source.row_bytes();
    if (copies_rows(r) && from >= 0) {
      memcpy(out, old, target.row_bytes());
      continue;
    }
    std::fill(row.begin(), row.end(), 0.0F);
    if (from >= 0) {
      if (source.type == GGML_TYPE_F32) {
        memcpy(wide.data(), old, source.row_bytes());
      } else {
        ggml_get_type_traits(source.type)->to_float(old, wide.data(), source.ne[0]);
      }
      for (size_t c = 0; c < row.size(); c++) {
        const int64_t column = r.columns.empty() ? static_cast<int64_t>(c) : r.columns[c];
        if (column >= 0) row[c] = wide[static_cast<size_t>(column)] * r.scale;
      }
    }
    quantise_rows(r.type, row.data(), 1, target.ne[0], out);
  }
  return {};
}

// A file opened as a model: whatever passes here has sane numbers; shapes are checked by use.
struct Source {
  std::unique_ptr<GgufFile> file;
  const DecoderSpec* spec = nullptr;
  HParams h;

  static Result<Source> open(const std::string& path) {
    Source s;
    HCACHE_ASSIGN_OR_RETURN(s.file, GgufFile::open(path));
    HCACHE_ASSIGN_OR_RETURN(s.spec, read_architecture(*s.file));
    HCACHE_ASSIGN_OR_RETURN(s.h, read_hparams(*s.file, *s.spec));
    return s;
  }
};

// "blk.7.attn_k.weight" -> "attn_k.weight"; other names unchanged.
std::string_view within_layer(std::string_view name) {
  if (!name.starts_with("blk.")) return name;
  const size_t dot = name.find('.', 4);
  return dot == std::string_view::npos ? name : name.substr(dot + 1);
}

// A map must cover its axis exactly, and only types that can be widened are recoded.
Status check_rewrite(const Rewrite& r) {
  const auto covers = [](const AxisMap& map, int64_t length) {
    return map.empty() || *std::max_element(map.begin(), map.end()) + 1 == length;
  };
  if (!covers(r.rows, r.source->ne[1]) || !covers(r.columns, r.source->ne[0])) {
    return data_loss(fmt::format("tensor {} is {}, which contradicts the metadata", r.source->name,
                                 r.source->describe()));
  }
  if (!copies_rows(r) && find_weight_type(r.source->type) == nullptr) {
    return unimplemented(
        fmt::format("tensor {} can't be rewritten from {}", r.source->name, r.source->describe()));
  }
  if (r.source->n_dims > 3 || (r.source->n_dims == 3 && !(r.rows.empty() && r.columns.empty()))) {
    return unimplemented(
        fmt::format("tensor {} has {} dimensions", r.source->name, r.source->n_dims));
  }
  return {};
}

// Copies the metadata but for the keys that the caller writes anew.
void copy_metadata(const GgufFile& file, const std::set<std::string, std::less<>>& replaced,
                   GgufWriter& writer) {
  for (const auto& [key, value] : file.values()) {
    // What is written is one file, aligned as usual.
    if (key == "general.alignment" || key.starts_with("split.")) continue;
    if (!replaced.contains(key)) writer.copy(key, value);
  }
}

Status write_all(GgufWriter& writer, const std::vector<Rewrite>& plan, const std::string& out,
                 int n_threads, const Progress& progress) {
  for (const Rewrite& r : plan) {
    HCACHE_RETURN_IF_ERROR(check_rewrite(r));
    const auto size = [](const AxisMap& map, int64_t old) {
      return map.empty() ? old : static_cast<int64_t>(map.size());
    };
    const int64_t ne0 = size(r.columns, r.source->ne[0]);
    const int64_t ne1 = r.source->n_dims > 1 ? size(r.rows, r.source->ne[1]) : 0;
    const int64_t ne2 = r.source->n_dims > 2 ? r.source->ne[2] : 0;
    if (!row_fits(r.type, ne0)) {
      return invalid_argument(
          fmt::format("tensor {}: rows of {} are no multiple of {}'s block of {}", r.source->name,
                      ne0, ggml_type_name(r.type), ggml_blck_size(r.type)));
    }
    writer.add_tensor(r.source->name, r.type, ne0, ne1, ne2);
  }
  const auto fill = [&](size_t index, int64_t first_row, int64_t n_rows, uint8_t* data) {
    return rewrite_rows(plan[index], writer.tensors()[index], first_row, n_rows, data);
  };
  return writer.write(out, fill, n_threads, progress);
}

// ---- requantise --------------------------------------------------------------------------------

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// 0, 1, ..., n - 1, then zeros up to `padded`; empty when nothing is added.
AxisMap pad_axis(int64_t n, int64_t padded) {
  AxisMap map;
  if (padded == n) return map;
  for (int64_t i = 0; i < padded; i++) map.push_back(i < n ? i : -1);
  return map;
}

// Q's axis when every K/V head gets `group` query heads of which the first old_group are real.
AxisMap pad_groups(const HParams& h, int64_t old_group, int64_t group) {
  AxisMap map;
  if (group == old_group) return map;
  for (int64_t kv = 0; kv < h.n_head_kv; kv++) {
    for (int64_t g = 0; g < group; g++) {
      for (int64_t d = 0; d < h.head_dim; d++) {
        map.push_back(g < old_group ? (kv * old_group + g) * h.head_dim + d : -1);
      }
    }
  }
  return map;
}

// Zero-padded widths under which every matrix row divides into the type's blocks. An RMS norm's
// mean runs over the padded width, so its weight takes sqrt(old / new) and epsilon old / new.
struct Padding {
  AxisMap embd, q, ff;
  int64_t n_embd = 0, n_head = 0, n_ff = 0;
  float norm_scale = 1.0F;

  static Padding plan(const HParams& h, int64_t block) {
    Padding p;
    p.n_embd = round_up(h.n_embd, block);
    p.n_ff = round_up(h.n_ff, block);
    const int64_t old_group = h.n_head / h.n_head_kv;
    int64_t group = old_group;
    while (group * h.n_head_kv * h.head_dim % block != 0) group++;
    p.n_head = group * h.n_head_kv;
    p.embd = pad_axis(h.n_embd, p.n_embd);
    p.ff = pad_axis(h.n_ff, p.n_ff);
    p.q = pad_groups(h, old_group, group);
    p.norm_scale = std::sqrt(static_cast<float>(h.n_embd) / static_cast<float>(p.n_embd));
    return p;
  }
  [[nodiscard]] bool any() const { return !embd.empty() || !q.empty() || !ff.empty(); }

  // Sets the axes of the tensor called `name` (within its layer).
  void apply(std::string_view name, Rewrite& r) const {
    struct Axes {
      std::string_view name;
      AxisMap Padding::*columns;
      AxisMap Padding::*rows = nullptr;
    };
    constexpr std::array kAxes = {
        Axes{"token_embd.weight", &Padding::embd},
        Axes{"output.weight", &Padding::embd},
        Axes{"output_norm.weight", &Padding::embd},
        Axes{"attn_norm.weight", &Padding::embd},
        Axes{"ffn_norm.weight", &Padding::embd},
        Axes{"attn_q.weight", &Padding::embd, &Padding::q},
        Axes{"attn_q.bias", &Padding::q},
        Axes{"attn_k.weight", &Padding::embd},
        Axes{"attn_v.weight", &Padding::embd},
        Axes{"attn_output.weight", &Padding::q, &Padding::embd},
        Axes{"attn_output.bias", &Padding::embd},
        Axes{"ffn_gate.weight", &Padding::embd, &Padding::ff},
        Axes{"ffn_gate.bias", &Padding::ff},
        Axes{"ffn_up.weight", &Padding::embd, &Padding::ff},
        Axes{"ffn_up.bias", &Padding::ff},
        Axes{"ffn_down.weight", &Padding::ff, &Padding::embd},
        Axes{"ffn_down.bias", &Padding::embd},
    };
    for (const Axes& axes : kAxes) {
      if (name != axes.name) continue;
      r.columns = this->*axes.columns;
      if (axes.rows != nullptr) r.rows = this->*axes.rows;
      if (name.ends_with("_norm.weight")) r.scale = norm_scale;
    }
  }
};

// Layer norms' means and fused matrices' parts don't outlive it, nor what the maps don't name.
bool can_pad(const DecoderSpec& spec) {
  return spec.norm == Norm::kRms && spec.pre_norm && !spec.post_norm && !spec.fused_qkv &&
         !spec.fused_gate_up && spec.head_norm != HeadNorm::kRow && !spec.embedding_by_width &&
         spec.ffn_norm == std::string_view("ffn_norm");
}

}  // namespace

Status expand_kv(const std::string& in, const std::string& out, int n_threads,
                 const Progress& progress) {
  HCACHE_ASSIGN_OR_RETURN(const Source source, Source::open(in));
  const GgufFile& file = *source.file;
  const HParams& h = source.h;
  const std::string heads_key = h.arch + ".attention.head_count_kv";
  GgufWriter writer;
  copy_metadata(file, {heads_key}, writer);
  writer.set_u32(heads_key, static_cast<uint32_t>(h.n_head));

  // Head i of the twin is the head that query head i reads.
  const int64_t group = h.n_head / h.n_head_kv;
  AxisMap kv;
  for (int64_t head = 0; head < h.n_head; head++) {
    for (int64_t d = 0; d < h.head_dim; d++) kv.push_back(head / group * h.head_dim + d);
  }
  AxisMap heads;
  for (int64_t head = 0; head < h.n_head; head++) heads.push_back(head / group);
  AxisMap fused;
  for (int64_t i = 0; i < h.n_embd_q(); i++) fused.push_back(i);
  for (int64_t part = 0; part < 2; part++) {
    for (const int64_t i : kv) fused.push_back(h.n_embd_q() + part * h.n_embd_kv() + i);
  }

  std::vector<Rewrite> plan;
  for (const GgufTensor& t : file.tensors()) {
    Rewrite r{&t, t.type, {}, {}, 1.0F};
    const std::string_view name = within_layer(t.name);
    AxisMap& axis = name.ends_with(".weight") ? r.rows : r.columns;
    if (name.starts_with("attn_k.") || name.starts_with("attn_v.")) axis = kv;
    if (name.starts_with("attn_qkv.")) axis = fused;
    if (name == "attn_k_norm.weight") {
      if (source.spec->head_norm == HeadNorm::kRow) r.columns = kv;
      if (source.spec->head_norm == HeadNorm::kEachHead) r.rows = heads;
    }
    plan.push_back(std::move(r));
  }
  return write_all(writer, plan, out, n_threads, progress);
}

Status requantise(const std::string& in, const std::string& out, ggml_type type, int n_threads,
                  const Progress& progress) {
  HCACHE_ASSIGN_OR_RETURN(const Source source, Source::open(in));
  const GgufFile& file = *source.file;
  const HParams& h = source.h;
  if (find_weight_type(type) == nullptr) {
    return invalid_argument(fmt::format("{} is no weight type", ggml_type_name(type)));
  }
  const Padding padding = Padding::plan(h, ggml_blck_size(type));
  if (padding.any() && (!can_pad(*source.spec) || h.n_expert > 0)) {
    return unimplemented(
        fmt::format("{}: rows must be padded for {}, which {} models do not bear; take another "
                    "type",
                    in, ggml_type_name(type), source.spec->arch));
  }
  GgufWriter writer;
  const auto key = [&](const char* name) { return fmt::format("{}.{}", h.arch, name); };
  std::set<std::string, std::less<>> replaced = {"general.file_type"};
  if (padding.any()) {
    const std::pair<std::string, int64_t> numbers[] = {
        {key("embedding_length"), padding.n_embd},
        {key("feed_forward_length"), padding.n_ff},
        {key("attention.head_count"), padding.n_head},
        {key("attention.head_count_kv"), h.n_head_kv},
        {key("attention.key_length"), h.head_dim},
        {key("attention.value_length"), h.head_dim},
    };
    for (const auto& [name, value] : numbers) {
      replaced.insert(name);
      writer.set_u32(name, static_cast<uint32_t>(value));
    }
    const std::string eps = key("attention.layer_norm_rms_epsilon");
    replaced.insert(eps);
    writer.set_f32(eps,
                   h.norm_eps * static_cast<float>(h.n_embd) / static_cast<float>(padding.n_embd));
  }
  copy_metadata(file, replaced, writer);

  std::vector<Rewrite> plan;
  for (const GgufTensor& t : file.tensors()) {
    const bool is_matrix = t.n_dims >= 2 && find_weight_type(t.type) != nullptr;
    Rewrite r{&t, is_matrix ? type : t.type, {}, {}, 1.0F};
    padding.apply(within_layer(t.name), r);
    plan.push_back(std::move(r));
  }
  return write_all(writer, plan, out, n_threads, progress);
}

}  // namespace hcache::model
