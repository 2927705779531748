// Which layers go where: --gpu-layers, --tensor-split and --override-tensor as values.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "model/model.h"
#include "model/offload.h"
#include "model/placement.h"
#include "model_fixtures.h"

namespace hcache::model {
namespace {

using ::testing::HasSubstr;

std::vector<std::string> tensor_names(int n_layer) {
  std::vector<std::string> names = {"token_embd.weight", "output_norm.weight", "output.weight"};
  for (int i = 0; i < n_layer; ++i) {
    for (const char* part : {"attn_q", "attn_k", "ffn_up", "ffn_down"}) {
      names.push_back("blk." + std::to_string(i) + "." + part + ".weight");
    }
  }
  return names;
}

class PlacementTest : public ::testing::Test {
 protected:
  // "a" the rest's, "b", "c", ... those of the devices.
  std::string place(const Placement& placement, int n_layer) {
    const Result<std::vector<Device*>> layers =
        place_layers(placement, n_layer, tensor_names(n_layer));
    if (!layers.ok()) return layers.status().to_string();
    std::string out;
    for (const Device* device : *layers) {
      for (const auto& [letter, known] :
           {std::pair('a', rest_.get()), std::pair('b', b_.get()), std::pair('c', c_.get())}) {
        if (known == device) out += letter;
      }
    }
    return out;
  }
  Placement with(int n_layers, std::vector<double> split = {}) {
    Placement p;
    p.devices = {b_.get(), c_.get()};
    p.rest = rest_.get();
    p.n_layers = n_layers;
    p.split = std::move(split);
    return p;
  }

  std::unique_ptr<Device> rest_ = test::open_cpu();
  std::unique_ptr<Device> b_ = test::open_cpu();
  std::unique_ptr<Device> c_ = test::open_cpu();
};

TEST_F(PlacementTest, TheLastLayersGoToTheDevices) {
  Placement none;
  none.rest = rest_.get();
  EXPECT_EQ(place(none, 3), "aaa");
  EXPECT_EQ(place(with(-1), 8), "bbbbcccc");
  EXPECT_EQ(place(with(99), 8), "bbbbcccc");
  EXPECT_EQ(place(with(4), 8), "aaaabbcc");
  EXPECT_EQ(place(with(1), 8), "aaaaaaab");
  EXPECT_EQ(place(with(0), 8), "aaaaaaaa");
}

TEST_F(PlacementTest, ASplitGivesProportions) {
  EXPECT_EQ(place(with(-1, {3, 1}), 8), "bbbbbbcc");
  EXPECT_EQ(place(with(4, {1, 3}), 8), "aaaabccc");
  EXPECT_EQ(place(with(-1, {0, 1}), 4), "cccc");
  EXPECT_EQ(place(with(-1, {1, 0}), 4), "bbbb");
  EXPECT_EQ(place(with(-1, {1, 1}), 3), "bbc");
  EXPECT_THAT(place(with(-1, {1, 1, 1}), 8), HasSubstr("3 parts for 2 devices"));
  EXPECT_THAT(place(with(-1, {0, 0}), 8), HasSubstr("without a part above 0"));
}

TEST_F(PlacementTest, OverridesMoveWholeLayers) {
  Placement p = with(-1);
  p.overrides = {{"blk\\.[01]\\.", rest_.get()}};
  EXPECT_EQ(place(p, 8), "aabbcccc");
  // The first that matches counts.
  p.overrides = {{"blk\\.7\\.", b_.get()}, {"blk\\.[67]\\.", rest_.get()}};
  EXPECT_EQ(place(p, 8), "bbbbccab");
  // Everything, the output with it.
  p.overrides = {{".*", rest_.get()}};
  EXPECT_EQ(place(p, 4), "aaaa");
  // Part of a layer where the rest of it is anyway moves nothing apart.
  p.overrides = {{"blk\\.0\\.ffn", b_.get()}};
  EXPECT_EQ(place(p, 4), "bbcc");
}

TEST_F(PlacementTest, OverridesThatDivideALayerAreRefused) {
  Placement p = with(-1);
  p.overrides = {{"ffn_", rest_.get()}};
  const auto divided = place_layers(p, 4, tensor_names(4));
  EXPECT_EQ(divided.status().code(), Code::kUnimplemented);
  EXPECT_THAT(divided.status().message(), HasSubstr("a layer is computed on one device"));
  EXPECT_THAT(divided.status().message(), HasSubstr("blk\\.0\\."));
  p.overrides = {{"^output", rest_.get()}};
  EXPECT_THAT(place(p, 4), HasSubstr("where the last layer is"));
  p.overrides = {{"blk\\.9\\.", rest_.get()}};
  EXPECT_THAT(place(p, 4), HasSubstr("moves nothing"));
  p.overrides = {{"token_embd", rest_.get()}};
  EXPECT_THAT(place(p, 4), HasSubstr("looked up on the host"));
  p.overrides = {{"blk\\.(", rest_.get()}};
  EXPECT_EQ(place_layers(p, 4, tensor_names(4)).status().code(), Code::kInvalidArgument);
}

TEST(OpenDevices, TheCpuIsOpenedOnce) {
  for (const char* names : {"cpu", "none"}) {
    const OpenDevices one = open_devices(names, 1).value();
    ASSERT_EQ(one.devices.size(), 1U);
    EXPECT_EQ(one.devices[0]->name(), "cpu");
    EXPECT_EQ(one.placement.devices, (std::vector<Device*>{one.devices[0].get()}));
    EXPECT_EQ(one.placement.rest, one.devices[0].get());
  }
  // No device but the CPU: it has the last layers as well as those before them.
  Offload offload;
  offload.n_layers = 99;
  const OpenDevices partial = open_devices("cpu", 1, offload).value();
  ASSERT_EQ(partial.devices.size(), 1U);
  EXPECT_TRUE(partial.placement.devices.empty());
  EXPECT_EQ(partial.placement.rest, partial.devices[0].get());
  EXPECT_FALSE(open_devices("auto", 1).value().devices.empty());
}

TEST(OpenDevices, OverridesNameThem) {
  Offload offload;
  offload.override_tensors = {"blk\\.0\\.=CPU,blk\\.1\\.=cpu", "a=b=cpu"};
  const OpenDevices open = open_devices("cpu", 1, offload).value();
  ASSERT_EQ(open.placement.overrides.size(), 3U);
  EXPECT_EQ(open.placement.overrides[0].pattern, "blk\\.0\\.");
  EXPECT_EQ(open.placement.overrides[0].device, open.devices[0].get());
  EXPECT_EQ(open.placement.overrides[2].pattern, "a=b");
  for (const char* wrong : {"", "x", "=cpu", "x=", "x=CUDA7"}) {
    offload.override_tensors = {wrong};
    EXPECT_EQ(open_devices("cpu", 1, offload).code(), Code::kInvalidArgument) << wrong;
  }
  EXPECT_THAT(open_devices("cpu", 1, offload).status().message(), HasSubstr("cuda:7"));
}

TEST(OpenDevices, FlagsThatWouldDoNothingAreRefused) {
  EXPECT_THAT(open_devices("cpu,cpu", 1).status().message(), HasSubstr("twice"));
  EXPECT_EQ(open_devices("cpu,,cpu", 1).code(), Code::kInvalidArgument);
  Offload offload;
  offload.main_device = 1;
  EXPECT_THAT(open_devices("cpu", 1, offload).status().message(), HasSubstr("--split-mode none"));
  offload.one_device = true;
  EXPECT_THAT(open_devices("cpu", 1, offload).status().message(), HasSubstr("names 1 devices"));
  offload.main_device = 0;
  EXPECT_TRUE(open_devices("cpu", 1, offload).ok());
  offload.tensor_split = "1";
  EXPECT_EQ(open_devices("cpu", 1, offload).code(), Code::kInvalidArgument);
  offload.one_device = false;
  EXPECT_TRUE(open_devices("cpu", 1, offload).ok());
  offload.tensor_split = "1,2";
  EXPECT_THAT(open_devices("cpu", 1, offload).status().message(), HasSubstr("2 parts for 1"));
}

TEST(TensorSplit, IsParsed) {
  EXPECT_EQ(parse_split("3,1").value(), (std::vector<double>{3, 1}));
  EXPECT_EQ(parse_split("0.5").value(), (std::vector<double>{0.5}));
  for (const char* wrong : {"", "a", "1,", ",1", "1,-1", "0,0", "1;2", "inf,1"}) {
    EXPECT_EQ(parse_split(wrong).status().code(), Code::kInvalidArgument) << wrong;
  }
}

// The weights lie where their layer is computed; the output with the last layer.
TEST(Placed, EveryWeightIsOnItsLayersDevice) {
  const test::TempDir dir;
  for (const char* arch : {"llama", "falcon", "opt"}) {
    const std::string path =
        test::make_tiny(dir, test::tiny_options(arch, arch[0] == 'f' ? 1 : 4, GGML_TYPE_F16));
    const auto a = test::open_cpu();
    const auto b = test::open_cpu();
    LoadOptions options;
    options.placement.devices = {b.get()};
    options.placement.n_layers = 1;
    const auto model = Model::load(path, *a, options).value();
    const int last = model->hparams().n_layer - 1;
    EXPECT_EQ(&model->device(), a.get());
    EXPECT_EQ(&model->device(last), b.get());
    EXPECT_EQ(model->devices(), (std::vector<Device*>{a.get(), b.get()}));
    const Weights& w = model->weights();
    // Each device has buffers of its own.
    EXPECT_NE(w.layers[0].k.w->buffer, w.layers[static_cast<size_t>(last)].k.w->buffer) << arch;
    EXPECT_EQ(w.output_norm.w->buffer, w.layers[static_cast<size_t>(last)].attn_norm.w->buffer);
  }
}

}  // namespace
}  // namespace hcache::model
