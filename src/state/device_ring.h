// A reader's ring in device memory, which the disk's bytes reach without the host's.
#pragma once

#include <ggml-backend.h>

#include <cstddef>
#include <memory>
#include <span>

#include "base/direct_storage.h"
#include "base/status.h"
#include "model/device.h"
#include "store/store.h"

namespace hcache::state {

// Reads fill the device's memory; from there the bytes are copied to the ring, since every page's
// checksum is compared before it is used, against the direction in which restores move data. The
// engine's uploads from the ring become copies on the device (HostMirrors).
class DeviceRing : public store::RingMirror {
 public:
  // storage and device outlive it. resource_exhausted: no memory on the device.
  static Result<std::unique_ptr<DeviceRing>> create(DirectStorage& storage,
                                                    const model::Device& device,
                                                    std::span<std::byte> ring);
  ~DeviceRing() override;

  Result<std::size_t> read(File& file, std::uint64_t offset, std::span<std::byte> part) override;
  Status update(std::span<const std::byte> part) override;

 private:
  DeviceRing(DirectStorage& storage, const model::Device& device, std::span<std::byte> ring)
      : storage_(storage), device_(device), ring_(ring) {}
  Status init();
  [[nodiscard]] std::byte* base() const { return static_cast<std::byte*>(rows_->data); }

  DirectStorage& storage_;
  const model::Device& device_;
  const std::span<std::byte> ring_;
  ggml_context* context_ = nullptr;
  ggml_backend_buffer_t buffer_ = nullptr;
  ggml_tensor* rows_ = nullptr;  // I8 [ring bytes]
  bool added_ = false;           // to storage and mirrors
};

}  // namespace hcache::state
