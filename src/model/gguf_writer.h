// Writes GGUF files whose tensors are produced block by block on several threads.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "gguf_file.h"
#include "model/model.h"

namespace hcache::model {

class GgufWriter {
 public:
  // Fills `out` with rows [first_row, first_row + n_rows) of tensor number `index`. Called
  // concurrently for different rows.
  using FillRows =
      std::function<Status(size_t index, int64_t first_row, int64_t n_rows, uint8_t* out)>;

  void set_u32(std::string_view key, uint32_t value);
  void set_f32(std::string_view key, float value);
  void set_bool(std::string_view key, bool value);
  void set_string(std::string_view key, std::string_view value);
  // A value of another file, as it is.
  void copy(std::string_view key, const GgufValue& value);

  // Tensors are written in this order; the result's `data` is empty.
  void add_tensor(std::string name, ggml_type type, int64_t ne0, int64_t ne1 = 0, int64_t ne2 = 0,
                  int64_t ne3 = 0);
  [[nodiscard]] const std::vector<GgufTensor>& tensors() const { return tensors_; }

  // Writes to a temporary file beside `path` and renames it when it is whole. kResourceExhausted
  // when the disk is full.
  Status write(const std::string& path, const FillRows& fill, int n_threads,
               const Progress& progress) const;

 private:
  void begin_value(std::string_view key, gguf_type type);

  std::string values_;  // serialised
  uint64_t n_values_ = 0;
  std::vector<GgufTensor> tensors_;
};

}  // namespace hcache::model
