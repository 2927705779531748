// A reader's ring in device memory: the same bytes in both, verified, whatever reads them.
#include <algorithm>
#include <cstring>
#include <vector>

#include "device_ring.h"
#include "engine/copy_queue.h"
#include "fake_cufile.h"
#include "rpc_server.h"
#include "store_fixture.h"

namespace hcache::state {
namespace {

using hcache::testing::FakeCuFile;
using hcache::testing::RpcServer;
using store::PageOrigin;
using store::testing::Chain;
using store::testing::kModel;
using store::testing::kSalt;
using store::testing::tokens_of;

class DeviceRingTest : public store::testing::StoreTest {
 protected:
  void SetUp() override {
    StoreTest::SetUp();
    auto device = model::Device::open("cpu", 1);
    ASSERT_TRUE(device.ok());
    device_ = std::move(*device);
    auto storage = DirectStorage::open(FakeCuFile::path());
    ASSERT_TRUE(storage.ok()) << storage.status().to_string();
    storage_ = std::move(*storage);
    options_.new_mirror =
        [this](std::span<std::byte> ring) -> Result<std::unique_ptr<store::RingMirror>> {
      HCACHE_ASSIGN_OR_RETURN(auto made, DeviceRing::create(*storage_, *device_, ring));
      return std::unique_ptr<store::RingMirror>(std::move(made));
    };
  }
  void TearDown() override { store_.reset(); }

  // Reads a chain's pages; those that are ok must lie on the device too. The number of failed ones.
  size_t read_all(const Chain& chain) {
    auto match = store_->match(kModel, kSalt, chain.tokens());
    EXPECT_TRUE(match.ok());
    auto reader = store_->new_reader({.ring_bytes = 1 << 20});
    EXPECT_TRUE(reader.ok()) << reader.status().to_string();
    const auto requests = store::testing::requests_of(*match);
    EXPECT_TRUE((*reader)->submit(requests).ok());
    size_t failed = 0;
    for (size_t i = 0; i < requests.size(); ++i) {
      auto view = (*reader)->next();
      EXPECT_TRUE(view.ok());
      if (!view->status.ok()) {
        ++failed;
      } else {
        EXPECT_EQ(view->origin, PageOrigin::kDisk);
        expect_mirrored(view->bytes);
      }
      (*reader)->release(view->index);
    }
    return failed;
  }
  void expect_mirrored(std::span<const std::byte> bytes) {
    const auto place = device_->mirrors().find(bytes.data(), bytes.size());
    ASSERT_TRUE(place.has_value());
    std::vector<std::byte> there(bytes.size());
    ggml_backend_tensor_get(place->tensor, there.data(), place->offset, there.size());
    EXPECT_TRUE(std::equal(there.begin(), there.end(), bytes.begin()));
  }

  FakeCuFile library_;
  std::unique_ptr<model::Device> device_;
  std::unique_ptr<DirectStorage> storage_;
  const Chain chain_{kModel,
                     kSalt,
                     tokens_of(1000),
                     {4, {store::Encoding::kHiddenQ8_1, store::Encoding::kKv}, 640}};
};

TEST_F(DeviceRingTest, PagesComeThroughTheDeviceAndAreVerified) {
  open();
  put(chain_);
  const int before = library_.reads();
  EXPECT_EQ(read_all(chain_), 0U);
  EXPECT_GT(library_.reads(), before);
  EXPECT_EQ(store::testing::read_back(*store_, *store_->match(kModel, kSalt, chain_.tokens()))
                .failed.size(),
            0U);
  EXPECT_GE(library_.buffers(), 1);  // kept for the next reader
  store_.reset();
  EXPECT_EQ(library_.buffers(), 0);
}

TEST_F(DeviceRingTest, WhatArrivesWrongOnTheDeviceIsNotUsed) {
  open();
  put(chain_);
  library_.flip_bits(true);
  EXPECT_GT(read_all(chain_), 0U);
  library_.flip_bits(false);
  EXPECT_EQ(read_all(chain_), 0U);
}

TEST_F(DeviceRingTest, ShortReadsAndFailingOnesAreReadAnotherWay) {
  open();
  put(chain_);
  library_.most_bytes(12288);
  EXPECT_EQ(read_all(chain_), 0U);
  library_.most_bytes(0);
  library_.read_error(5008);  // by the system then, and from host memory to the device
  EXPECT_EQ(read_all(chain_), 0U);
}

TEST_F(DeviceRingTest, ADeviceWithoutRoomSaysSo) {
  AlignedBuffer ring(1 << 20);
  auto first = DeviceRing::create(*storage_, *device_, ring.span());
  ASSERT_TRUE(first.ok());
  EXPECT_TRUE(device_->mirrors().find(ring.data(), ring.size()).has_value());
  EXPECT_FALSE(device_->mirrors().find(ring.data() + 1, ring.size()).has_value());
  EXPECT_FALSE(device_->mirrors().find(ring.data() + ring.size(), 1).has_value());
  (*first).reset();
  EXPECT_FALSE(device_->mirrors().find(ring.data(), 1).has_value());
  EXPECT_EQ(library_.buffers(), 0);
}

// A device with memory of its own: an upload takes the mirror's bytes, and no others.
TEST(DeviceUploads, TakeWhatLiesOnTheDevice) {
  auto server = RpcServer::shared();
  ASSERT_TRUE(server.ok()) << server.status().to_string();
  auto opened = model::Device::open((*server)->device(), 1);
  ASSERT_TRUE(opened.ok()) << opened.status().to_string();
  model::Device& device = **opened;
  ggml_context* context =
      ggml_init({.mem_size = 4 * ggml_tensor_overhead(), .mem_buffer = nullptr, .no_alloc = true});
  ggml_tensor* mirror = ggml_new_tensor_1d(context, GGML_TYPE_I8, 1024);
  ggml_tensor* rows = ggml_new_tensor_1d(context, GGML_TYPE_F32, 256);
  ggml_backend_buffer_t buffer =
      ggml_backend_alloc_ctx_tensors_from_buft(context, device.buffer_type());
  ASSERT_NE(buffer, nullptr);
  std::vector<std::byte> on_device(1024);
  for (size_t i = 0; i < 1024; ++i) on_device[i] = static_cast<std::byte>(i * 7);
  const std::vector<std::byte> host(1024, std::byte{0xAA});
  ggml_backend_tensor_set(mirror, on_device.data(), 0, 1024);
  ggml_backend_tensor_memset(rows, 0, 0, 1024);

  const auto queue = engine::make_device_copy_queue(device);
  device.mirrors().add(host.data(), mirror);
  queue->wait(queue->upload(rows, 128, host.data() + 256, 512));
  device.mirrors().remove(host.data());
  queue->wait(queue->upload(rows, 0, host.data(), 64));

  std::vector<std::byte> got(1024);
  ggml_backend_tensor_get(rows, got.data(), 0, 1024);
  EXPECT_TRUE(
      std::all_of(got.begin(), got.begin() + 64, [](std::byte b) { return b == std::byte{0xAA}; }));
  EXPECT_EQ(std::memcmp(got.data() + 128, on_device.data() + 256, 512), 0);
  EXPECT_EQ(got[127], std::byte{0});
  EXPECT_EQ(got[640], std::byte{0});
  ggml_backend_buffer_free(buffer);
  ggml_free(context);
}

}  // namespace
}  // namespace hcache::state
