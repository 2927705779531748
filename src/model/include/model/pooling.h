// How the rows of a text become one vector (llama.cpp's --pooling).
//
// Threading: plain values and pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace hcache::model {

enum class Pooling : uint8_t {
  kNone,  // every row for itself
  kMean,
  kFirst,  // "cls"
  kLast,
};

// "none", "mean", "cls" or "last".
[[nodiscard]] Result<Pooling> pooling_named(std::string_view name);

// What a model's file asks for, by its key <architecture>.pooling_type; nullopt: nothing.
// Errors of opening the file; kUnimplemented: it makes ranks, not vectors.
[[nodiscard]] Result<std::optional<Pooling>> pooling_of_file(const std::string& path);

// Takes a text's rows one by one, in order.
class Pooler {
 public:
  Pooler(Pooling pooling, int64_t n_rows) : pooling_(pooling), n_rows_(n_rows) {}

  // The first row that counts; the ones before need not be taken.
  [[nodiscard]] int64_t first_row() const { return pooling_ == Pooling::kLast ? n_rows_ - 1 : 0; }
  void take(int64_t row, std::span<const float> values);
  // When all rows are taken: one vector; with kNone as many as there are rows.
  [[nodiscard]] std::vector<std::vector<float>> vectors() &&;

 private:
  const Pooling pooling_;
  const int64_t n_rows_;
  std::vector<double> sum_;
  std::vector<std::vector<float>> rows_;
};

}  // namespace hcache::model
