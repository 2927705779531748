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
  kRank,  // scores that the model's own head makes of them, no vector
};

// "none", "mean", "cls", "last" or "rank".
[[nodiscard]] Result<Pooling> pooling_named(std::string_view name);

// What a model's file asks for, by its key <architecture>.pooling_type; nullopt: nothing.
// Errors of opening the file.
[[nodiscard]] Result<std::optional<Pooling>> pooling_of_file(const std::string& path);

// What a file says of a model that makes vectors or ranks.
struct EncoderFacts {
  bool encodes = false;  // all of a text at once, and writes none
  std::optional<Pooling> pooling;
  bool has_head = false;  // the matrix that makes ranks
};
// Errors of opening the file.
[[nodiscard]] Result<EncoderFacts> encoder_facts(const std::string& path);

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
