// Layers that several devices share: where they are cut, and that each device has its rows and
// columns of every matrix.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "model/offload.h"
#include "model/shares.h"
#include "model_fixtures.h"

namespace hcache::model {
namespace {

using test::make_tiny;
using test::TempDir;
using test::tiny_options;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// --- Cutting ----------------------------------------------------------------------------------

std::vector<int64_t> cut(int64_t n, int64_t unit, std::vector<double> parts) {
  return cut_by_proportions({.n = n, .unit = unit, .what = "it", .remedy = {}}, parts).value();
}

TEST(Shares, FollowTheProportions) {
  EXPECT_THAT(cut(8, 1, {1, 1}), ElementsAre(4, 8));
  EXPECT_THAT(cut(8, 1, {3, 1}), ElementsAre(6, 8));
  EXPECT_THAT(cut(3, 1, {1, 1}), ElementsAre(2, 3));
  EXPECT_THAT(cut(1024, 256, {1, 1, 2}), ElementsAre(256, 512, 1024));
  EXPECT_THAT(cut(1000, 256, {1, 1}), ElementsAre(512, 1000));  // the last unit is a part of one
  EXPECT_THAT(cut(7, 7, {5}), ElementsAre(7));
}

TEST(Shares, GiveEveryDeviceSomething) {
  EXPECT_THAT(cut(4, 1, {1000, 1, 1}), ElementsAre(2, 3, 4));
  EXPECT_THAT(cut(4, 1, {1, 1000}), ElementsAre(1, 4));
  EXPECT_THAT(cut(3, 1, {1, 1, 1000}), ElementsAre(1, 2, 3));
}

TEST(Shares, NameWhatCantBeCut) {
  const std::vector<double> two = {1, 1};
  const Divisible head = {.n = 1, .unit = 1, .what = "m: the KV heads (1)", .remedy = {}};
  const Status one = cut_by_proportions(head, two).status();
  EXPECT_EQ(one.code(), Code::kUnimplemented);
  EXPECT_THAT(one.message(), HasSubstr("m: the KV heads (1) can be cut into 1 at most"));
  EXPECT_THAT(one.message(), HasSubstr("--split-mode layer"));
}

// --- Loading ----------------------------------------------------------------------------------

struct Loaded {
  std::vector<std::unique_ptr<Device>> devices;
  Result<std::unique_ptr<Model>> model = internal_error("not loaded");
};

// On as many CPU devices as the split has parts; whole without one.
Loaded load(const std::string& path, std::vector<double> split = {}, LoadOptions options = {}) {
  Loaded out;
  options.use_extra_buffers = false;  // so that the bytes can be compared
  options.placement.share_layers = !split.empty();
  for (size_t i = 0; i < std::max<size_t>(split.size(), 1); ++i) {
    out.devices.push_back(Device::open("cpu", 1).value());
    if (!split.empty()) options.placement.devices.push_back(out.devices.back().get());
  }
  options.placement.split = std::move(split);
  out.model = Model::load(path, *out.devices.front(), options);
  return out;
}

SynthOptions wide(const char* arch, int n_head_kv, ggml_type type) {
  SynthOptions options = tiny_options(arch, n_head_kv, type);
  options.shape.n_embd = 512;
  options.shape.n_head = 8;
  options.shape.n_ff = 1024;
  return options;
}

using Bytes = std::vector<uint8_t>;

// Columns [first, first + n) of rows [row, row + n_rows) of a matrix, or elements of a vector.
Bytes part_of(const ggml_tensor* t, int64_t row, int64_t n_rows, int64_t first, int64_t n) {
  Bytes out;
  const auto* data = static_cast<const uint8_t*>(t->data);
  if (t->ne[1] == 1 && ggml_n_dims(t) == 1) {
    return {data + row * 4, data + (row + n_rows) * 4};
  }
  for (int64_t r = row; r < row + n_rows; ++r) {
    const uint8_t* from = data + static_cast<size_t>(r) * t->nb[1] + ggml_row_size(t->type, first);
    out.insert(out.end(), from, from + ggml_row_size(t->type, n));
  }
  return out;
}
Bytes all_of(const ggml_tensor* t) {
  const auto* data = static_cast<const uint8_t*>(t->data);
  return {data, data + ggml_nbytes(t)};
}

void expect_rows(const Linear& part, const Linear& whole, int64_t row, int64_t n) {
  ASSERT_EQ(part.w->ne[1], n);
  EXPECT_EQ(all_of(part.w), part_of(whole.w, row, n, 0, whole.w->ne[0]));
  ASSERT_EQ(part.b == nullptr, whole.b == nullptr);
  if (part.b == nullptr) return;
  EXPECT_EQ(all_of(part.b), part_of(whole.b, row, n, 0, 0));
}
// The bias is added once.
void expect_columns(const Linear& part, const Linear& whole, int64_t column, int64_t n,
                    bool is_first) {
  ASSERT_EQ(part.w->ne[0], n);
  EXPECT_EQ(all_of(part.w), part_of(whole.w, 0, whole.w->ne[1], column, n));
  ASSERT_EQ(part.b != nullptr, whole.b != nullptr && is_first);
  if (part.b == nullptr) return;
  EXPECT_EQ(all_of(part.b), all_of(whole.b));
}

void expect_parts(const Model& whole, const Model& shared) {
  const HParams& h = whole.hparams();
  int64_t head = 0;
  int64_t column = 0;
  for (const auto& part : shared.parts()) {
    const HParams& own = part->hparams();
    const Share& share = part->share();
    EXPECT_EQ(share.first_head_kv, head);
    EXPECT_EQ(share.first_ff, column);
    EXPECT_EQ(own.n_head * h.n_head_kv, own.n_head_kv * h.n_head);
    EXPECT_EQ(part->weights().output.w != nullptr, share.index == 0);
    const int64_t kv = head * h.head_dim;
    const int64_t q = kv * (h.n_head / h.n_head_kv);
    for (size_t i = 0; i < whole.weights().layers.size(); ++i) {
      SCOPED_TRACE("layer " + std::to_string(i));
      const LayerWeights& w = whole.weights().layers[i];
      const LayerWeights& p = part->weights().layers[i];
      EXPECT_EQ(all_of(p.attn_norm.w), all_of(w.attn_norm.w));
      expect_rows(p.q, w.q, q, own.n_embd_q());
      expect_rows(p.k, w.k, kv, own.n_embd_kv());
      expect_rows(p.v, w.v, kv, own.n_embd_kv());
      expect_columns(p.o, w.o, q, own.n_embd_q(), share.index == 0);
      if (w.gate.w != nullptr) expect_rows(p.gate, w.gate, column, own.n_ff);
      expect_rows(p.up, w.up, column, own.n_ff);
      expect_columns(p.down, w.down, column, own.n_ff, share.index == 0);
    }
    head += own.n_head_kv;
    column += own.n_ff;
  }
  EXPECT_EQ(head, h.n_head_kv);
  EXPECT_EQ(column, h.n_ff);
}

TEST(SharedModel, EachDeviceHasItsRowsAndColumns) {
  const TempDir dir;
  for (const DecoderSpec& spec : decoder_specs()) {
    for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K}) {
      SCOPED_TRACE(std::string(spec.arch) + " " + ggml_type_name(type));
      const std::string path = make_tiny(dir, wide(spec.arch, 8, type));
      const Loaded whole = load(path);
      ASSERT_TRUE(whole.model.ok()) << whole.model.status().to_string();
      EXPECT_TRUE((*whole.model)->parts().empty());
      for (const std::vector<double>& split : {std::vector<double>{1, 1}, {3, 0, 1}}) {
        const Loaded shared = load(path, split);
        const bool sums = spec.post_norm || spec.head_norm == HeadNorm::kRow;
        if (sums || (*whole.model)->hparams().n_expert > 0) {  // that no device has
          EXPECT_EQ(shared.model.code(), Code::kUnimplemented);
          EXPECT_THAT(shared.model.status().message(), HasSubstr("--split-mode layer"));
          continue;
        }
        ASSERT_TRUE(shared.model.ok()) << shared.model.status().to_string();
        ASSERT_EQ((*shared.model)->parts().size(), 2U);
        EXPECT_EQ((*shared.model)->devices().size(), 2U);
        EXPECT_EQ((*shared.model)->hparams().n_head, 8);
        EXPECT_THAT((*shared.model)->describe_places(), HasSubstr("shared by cpu, cpu"));
        expect_parts(**whole.model, **shared.model);
      }
    }
  }
}

TEST(SharedModel, OneDeviceWithASharesNothing) {
  const TempDir dir;
  const Loaded one = load(make_tiny(dir, tiny_options("llama", 2, GGML_TYPE_Q8_0)), {0, 1});
  ASSERT_TRUE(one.model.ok()) << one.model.status().to_string();
  EXPECT_TRUE((*one.model)->parts().empty());
  EXPECT_EQ(&(*one.model)->device(), one.devices[1].get());
}

TEST(SharedModel, WhatCantBeCutIsNamed) {
  const TempDir dir;
  const std::string one_head = make_tiny(dir, tiny_options("falcon", 1, GGML_TYPE_Q8_0));
  const Status heads = load(one_head, {1, 1}).model.status();
  EXPECT_EQ(heads.code(), Code::kUnimplemented);
  EXPECT_THAT(heads.message(), HasSubstr("the model's KV heads (1) can be cut into 1 at most"));
  // Four heads of 64 are one block of 256 columns.
  const std::string one_block = make_tiny(dir, tiny_options("llama", 4, GGML_TYPE_Q4_K));
  const Status block = load(one_block, {1, 1}).model.status();
  EXPECT_EQ(block.code(), Code::kUnimplemented);
  EXPECT_THAT(block.message(), HasSubstr("tensor blk.0.attn_output.weight (q4_K in blocks of 256"));
  EXPECT_THAT(block.message(), HasSubstr("such as Q8_0"));
}

TEST(SharedModel, WhatItExcludesIsRefused) {
  const TempDir dir;
  const std::string path = make_tiny(dir, tiny_options("llama", 2, GGML_TYPE_Q8_0));
  const auto refused = [&](const LoadOptions& options) {
    const Status status = load(path, {1, 1}, options).model.status();
    EXPECT_EQ(status.code(), Code::kUnimplemented);
    return status.message();
  };
  LoadOptions options;
  options.weights = WeightPlace::kDisk;
  EXPECT_THAT(refused(options), HasSubstr("--weights resident"));
  options.weights = WeightPlace::kResident;
  options.placement.n_layers = 2;
  EXPECT_THAT(refused(options), HasSubstr("--gpu-layers 2"));
  options.placement.n_layers = 3;
  EXPECT_TRUE(load(path, {1, 1}, options).model.ok());
  const auto device = Device::open("cpu", 1).value();
  options.placement.overrides = {{"blk\\.0\\.", device.get()}};
  EXPECT_THAT(refused(options), HasSubstr("--override-tensor"));
}

TEST(SharedModel, LoadingReportsAllParts) {
  const TempDir dir;
  const std::string path = make_tiny(dir, tiny_options("llama", 2, GGML_TYPE_Q8_0));
  std::vector<float> seen;
  LoadOptions options;
  options.progress = [&](float done) {
    seen.push_back(done);
    return true;
  };
  ASSERT_TRUE(load(path, {1, 1}, options).model.ok());
  EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
  EXPECT_EQ(seen.back(), 1.0F);
  options.progress = [](float done) { return done < 0.6F; };
  EXPECT_EQ(load(path, {1, 1}, options).model.status().code(), Code::kCancelled);
}

TEST(OpenDevices, SharedLayersNeedTwo) {
  Offload offload;
  offload.share_layers = true;
  EXPECT_THAT(open_devices("cpu", 1, offload).status().message(), HasSubstr("name two or more"));
  offload.n_layers = 99;
  EXPECT_THAT(open_devices("cpu", 1, offload).status().message(), HasSubstr("beside the CPU"));
}

}  // namespace
}  // namespace hcache::model
