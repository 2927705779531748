#include <fmt/format.h>

#include <array>
#include <cmath>
#include <memory>
#include <vector>

#include "gguf_file.h"
#include "gguf_writer.h"
#include "model/tools.h"
#include "random_rows.h"

namespace hcache::model {
namespace {

constexpr int kWidth = 64;
constexpr int kHeads = 2;
constexpr int kFeedForward = 128;
constexpr int kLayers = 2;
constexpr int kPatch = 14;
constexpr int kChannels = 3;
// Patches that qwen2vl_merger makes one row of, and of a side that gemma3 does.
constexpr int kMerged = 4;
constexpr int kPooledSide = 2;

class ProjectorSynth {
 public:
  ProjectorSynth(const ProjectorShape& shape, int64_t n_embd) : s_(shape), n_embd_(n_embd) {}

  Status build();
  [[nodiscard]] Status write(const std::string& out) const {
    return write_random(writer_, inits_, s_.seed, out);
  }

 private:
  void metadata();
  void encoder(bool learned_positions);
  void matrix(const std::string& name, int64_t n_in, int64_t n_out, bool bias = true) {
    writer_.add_tensor(name + ".weight", GGML_TYPE_F32, n_in, n_out);
    inits_.push_back(standard_deviation(1 / std::sqrt(static_cast<float>(n_in))));
    if (!bias) return;
    writer_.add_tensor(name + ".bias", GGML_TYPE_F32, n_out);
    inits_.push_back({0.0F, 0.1F});
  }
  void norm(const std::string& name) {
    vector(name + ".weight", kWidth, {1.0F, 0.1F});
    vector(name + ".bias", kWidth, {0.0F, 0.1F});
  }
  void vector(const std::string& name, int64_t n, Init init) {
    writer_.add_tensor(name, GGML_TYPE_F32, n);
    inits_.push_back(init);
  }
  void patches(const std::string& name) {
    writer_.add_tensor(name, GGML_TYPE_F32, kPatch, kPatch, kChannels, kWidth);
    inits_.push_back(standard_deviation(1 / static_cast<float>(kPatch)));
  }

  const ProjectorShape& s_;
  const int64_t n_embd_;  // of the model
  GgufWriter writer_;
  std::vector<Init> inits_;
};

void ProjectorSynth::metadata() {
  const auto u32 = [&](const char* key, int64_t value) {
    writer_.set_u32(fmt::format("clip.vision.{}", key), static_cast<uint32_t>(value));
  };
  const auto f32s = [&](const char* key, const std::array<float, kChannels>& values) {
    writer_.copy(fmt::format("clip.vision.{}", key),
                 {GGUF_TYPE_ARRAY,
                  GGUF_TYPE_FLOAT32,
                  values.size(),
                  {reinterpret_cast<const uint8_t*>(values.data()), sizeof values}});
  };
  writer_.set_string("general.architecture", "clip");
  writer_.set_string("general.type", "mmproj");
  writer_.set_string("general.name", fmt::format("random {} projector", s_.kind));
  writer_.set_bool("clip.has_vision_encoder", true);
  writer_.set_string("clip.projector_type", s_.kind);
  writer_.set_bool("clip.use_gelu", true);
  u32("image_size", s_.image_size);
  u32("patch_size", kPatch);
  u32("embedding_length", kWidth);
  u32("feed_forward_length", kFeedForward);
  u32("block_count", kLayers);
  u32("projection_dim", n_embd_);
  u32("attention.head_count", kHeads);
  writer_.set_f32("clip.vision.attention.layer_norm_epsilon", 1e-6F);
  f32s("image_mean", {0.5F, 0.5F, 0.5F});
  f32s("image_std", {0.5F, 0.5F, 0.5F});
  if (s_.kind == "gemma3") u32("projector.scale_factor", kPooledSide);
}

void ProjectorSynth::encoder(bool learned_positions) {
  patches("v.patch_embd.weight");
  if (!learned_positions) patches("v.patch_embd.weight.1");
  if (learned_positions) {
    const int64_t side = s_.image_size / kPatch;
    writer_.add_tensor("v.position_embd.weight", GGML_TYPE_F32, kWidth, side * side);
    inits_.push_back(standard_deviation(1.0F));
  }
  for (int layer = 0; layer < kLayers; ++layer) {
    const std::string prefix = fmt::format("v.blk.{}.", layer);
    for (const char* name : {"attn_q", "attn_k", "attn_v", "attn_out"}) {
      matrix(prefix + name, kWidth, kWidth);
    }
    norm(prefix + "ln1");
    norm(prefix + "ln2");
    matrix(prefix + "ffn_up", kWidth, kFeedForward);
    matrix(prefix + "ffn_down", kFeedForward, kWidth);
  }
}

Status ProjectorSynth::build() {
  if (s_.image_size < 2 * kPatch || s_.image_size % (2 * kPatch) != 0) {
    return invalid_argument(fmt::format("pictures of {} pixels: a side takes a multiple of {}",
                                        s_.image_size, 2 * kPatch));
  }
  metadata();
  if (s_.kind == "mlp") {
    encoder(true);
    matrix("mm.0", kWidth, n_embd_);
    matrix("mm.2", n_embd_, n_embd_);
  } else if (s_.kind == "gemma3") {
    encoder(true);
    norm("v.post_ln");
    vector("mm.soft_emb_norm.weight", kWidth, {1.0F, 0.1F});
    // Written with rows and columns the other way round.
    writer_.add_tensor("mm.input_projection.weight", GGML_TYPE_F32, n_embd_, kWidth);
    inits_.push_back(standard_deviation(1 / std::sqrt(static_cast<float>(kWidth))));
  } else if (s_.kind == "qwen2vl_merger") {
    encoder(false);
    norm("v.post_ln");
    matrix("mm.0", int64_t{kMerged} * kWidth, int64_t{kMerged} * kWidth);
    matrix("mm.2", int64_t{kMerged} * kWidth, n_embd_);
  } else {
    return invalid_argument(fmt::format(
        "no projector '{}' can be made; those that can: mlp, gemma3, qwen2vl_merger", s_.kind));
  }
  return {};
}

}  // namespace

Status synthesise_projector(const ProjectorShape& shape, const std::string& out) {
  HCACHE_ASSIGN_OR_RETURN(const auto file, GgufFile::open(shape.model));
  HCACHE_ASSIGN_OR_RETURN(const auto arch, file->string("general.architecture"));
  HCACHE_ASSIGN_OR_RETURN(const auto n_embd,
                          file->integer(arch.value_or("") + ".embedding_length"));
  if (!n_embd) return data_loss(fmt::format("{}: it does not say how wide it is", shape.model));
  ProjectorSynth synth(shape, *n_embd);
  HCACHE_RETURN_IF_ERROR(synth.build());
  return synth.write(out);
}

}  // namespace hcache::model
