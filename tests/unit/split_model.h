// Models in several files, as llama.cpp's llama-gguf-split writes them.
#pragma once

#include <ggml.h>
#include <gguf.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

namespace hcache::model::test {

// "NAME-00002-of-00003.gguf" for index 1 of 3.
inline std::string part_path(const std::string& name, int index, int n_parts) {
  char suffix[32];
  (void)std::snprintf(suffix, sizeof(suffix), "-%05d-of-%05d.gguf", index + 1, n_parts);
  return name + suffix;
}

// A model in memory, to be written in parts.
class Splitter {
 public:
  explicit Splitter(const std::string& path) {
    ggml_context* data = nullptr;
    whole_.reset(gguf_init_from_file(path.c_str(), {.no_alloc = false, .ctx = &data}));
    data_.reset(data);
    EXPECT_NE(whole_, nullptr) << path;
  }
  [[nodiscard]] int64_t n_tensors() const { return gguf_get_n_tensors(whole_.get()); }
  // Tensors [begin, end) as part `index` of n_parts; the first has the model's values too.
  std::string write(const std::string& name, int index, int n_parts, int64_t begin, int64_t end) {
    const std::unique_ptr<gguf_context, decltype(&gguf_free)> part(gguf_init_empty(), &gguf_free);
    if (index == 0) gguf_set_kv(part.get(), whole_.get());
    gguf_set_val_u16(part.get(), "split.no", static_cast<uint16_t>(index));
    gguf_set_val_u16(part.get(), "split.count", static_cast<uint16_t>(n_parts));
    gguf_set_val_i32(part.get(), "split.tensors.count", static_cast<int32_t>(n_tensors()));
    for (int64_t t = begin; t < end; ++t) {
      const char* tensor = gguf_get_tensor_name(whole_.get(), t);
      gguf_add_tensor(part.get(), ggml_get_tensor(data_.get(), tensor));
    }
    std::string path = part_path(name, index, n_parts);
    EXPECT_TRUE(gguf_write_to_file(part.get(), path.c_str(), false)) << path;
    return path;
  }

 private:
  std::unique_ptr<gguf_context, decltype(&gguf_free)> whole_{nullptr, &gguf_free};
  std::unique_ptr<ggml_context, decltype(&ggml_free)> data_{nullptr, &ggml_free};
};

// Writes the model in n_parts files and returns their paths.
inline std::vector<std::string> split_model(const std::string& path, const std::string& name,
                                            int n_parts) {
  Splitter splitter(path);
  const int64_t n = splitter.n_tensors();
  std::vector<std::string> paths;
  for (int i = 0; i < n_parts; ++i) {
    paths.push_back(splitter.write(name, i, n_parts, n * i / n_parts, n * (i + 1) / n_parts));
  }
  return paths;
}

}  // namespace hcache::model::test
