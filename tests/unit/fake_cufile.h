// Sees and sets what the library of fake_cufile.cc does.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <stdexcept>
#include <string>

namespace hcache::testing {

class FakeCuFile {
 public:
  FakeCuFile() : library_(::dlopen(path(), RTLD_NOW | RTLD_LOCAL)) {
    if (library_ == nullptr) throw std::runtime_error(::dlerror());
    reset();
  }
  FakeCuFile(const FakeCuFile&) = delete;
  FakeCuFile& operator=(const FakeCuFile&) = delete;
  ~FakeCuFile() {
    reset();
    ::dlclose(library_);
  }

  static const char* path() { return HCACHE_FAKE_CUFILE; }
  [[nodiscard]] int handles() const { return call<int()>("fake_handles")(); }
  [[nodiscard]] int drivers() const { return call<int()>("fake_drivers")(); }
  [[nodiscard]] int reads() const { return call<int()>("fake_reads")(); }
  [[nodiscard]] int buffers() const { return call<int()>("fake_buffers")(); }
  void driver_error(int error) { call<void(int)>("fake_driver_error")(error); }
  void read_error(int error) { call<void(int)>("fake_read_error")(error); }
  void most_bytes(size_t n_bytes) { call<void(size_t)>("fake_most_bytes")(n_bytes); }
  void flip_bits(bool on) { call<void(bool)>("fake_flip_bits")(on); }

 private:
  void reset() {
    driver_error(0);
    read_error(0);
    most_bytes(0);
    flip_bits(false);
  }
  template <typename F>
  F* call(const char* name) const {
    return reinterpret_cast<F*>(::dlsym(library_, name));
  }
  void* library_;
};

}  // namespace hcache::testing
