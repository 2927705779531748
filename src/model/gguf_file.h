// A memory-mapped GGUF file whose header has been checked byte by byte. ggml's own reader aborts
// on some malformed files (an empty key, a value read with another type); this one reports.
// Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
#pragma once

#include <ggml.h>
#include <gguf.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/env.h"
#include "base/status.h"

namespace hcache::model {

// One metadata value; the bytes stay in the mapping.
struct GgufValue {
  gguf_type type = GGUF_TYPE_UINT8;       // GGUF_TYPE_ARRAY for arrays
  gguf_type item_type = GGUF_TYPE_UINT8;  // of an array's items, else == type
  uint64_t count = 1;                     // of an array's items, else 1
  std::span<const uint8_t> bytes;         // payload, without the type and count fields
};

struct GgufTensor {
  std::string name;
  ggml_type type = GGML_TYPE_F32;
  int n_dims = 0;
  int64_t ne[GGML_MAX_DIMS] = {1, 1, 1, 1};
  size_t part = 0;  // of the model, where its data are
  std::span<const uint8_t> data;

  [[nodiscard]] int64_t n_elements() const { return ne[0] * ne[1] * ne[2] * ne[3]; }
  [[nodiscard]] size_t row_bytes() const { return ggml_row_size(type, ne[0]); }
  // "Q4_1 [576, 49152]".
  [[nodiscard]] std::string describe() const;
};

// One of the files that a model is split into.
struct GgufPart {
  std::string path;
  std::span<const uint8_t> bytes;
  FileIdentity identity;  // as it was when the file was opened; zero for bytes in memory
};

// Text from a file made fit for a message: at most 80 characters, no control characters.
std::string printable(std::string_view text);

// Immutable after open; safe to read from any thread. Views into it live as long as it does.
class GgufFile {
 public:
  // The first of several parts (NAME-00001-of-0000N.gguf) opens all of them, as one file.
  // kNotFound or kPermissionDenied when a file can't be opened, kDataLoss when it is truncated
  // or malformed, kUnimplemented for a GGUF version or tensor type this build doesn't know,
  // kInvalidArgument for a part that is not the first.
  static Result<std::unique_ptr<GgufFile>> open(const std::string& path, Env& env = Env::real());
  // The same checks on bytes in memory, which must outlive the result (fuzzing, tests).
  static Result<std::unique_ptr<GgufFile>> parse(std::span<const uint8_t> bytes, std::string name);
  GgufFile(const GgufFile&) = delete;
  GgufFile& operator=(const GgufFile&) = delete;

  [[nodiscard]] const std::string& path() const { return parts_.front().path; }
  // At least one.
  [[nodiscard]] const std::vector<GgufPart>& parts() const { return parts_; }
  [[nodiscard]] size_t alignment() const { return alignment_; }

  // Metadata, sorted by key; nullptr when absent.
  [[nodiscard]] const std::map<std::string, GgufValue, std::less<>>& values() const {
    return values_;
  }
  [[nodiscard]] const GgufValue* find(std::string_view key) const;
  // nullopt when absent; kDataLoss when present with another type or out of range.
  [[nodiscard]] Result<std::optional<int64_t>> integer(std::string_view key) const;
  [[nodiscard]] Result<std::optional<double>> number(std::string_view key) const;
  [[nodiscard]] Result<std::optional<bool>> boolean(std::string_view key) const;
  [[nodiscard]] Result<std::optional<std::string>> string(std::string_view key) const;
  // An integer, or an array of `count` equal integers.
  [[nodiscard]] Result<std::optional<int64_t>> uniform_integer(std::string_view key,
                                                               uint64_t count) const;

  // In the file's order.
  [[nodiscard]] const std::vector<GgufTensor>& tensors() const { return tensors_; }
  [[nodiscard]] const GgufTensor* tensor(std::string_view name) const;

 private:
  explicit GgufFile(GgufPart part) : parts_{std::move(part)} {}
  class Cursor;
  static Result<std::unique_ptr<GgufFile>> open_part(const std::string& path, Env& env);
  Status open_others(Env& env);
  Status append(GgufFile& other, int64_t index, int64_t n_parts);
  [[nodiscard]] std::span<const uint8_t> header_bytes() const { return parts_.front().bytes; }
  Status parse_header();
  Status read_value(Cursor& in, uint64_t index);
  Status read_alignment();  // of the data section, once the values are known
  // Gives back the offset that the header states for it.
  Result<uint64_t> read_tensor(Cursor& in, uint64_t index);
  // Tensors follow each other in the data section, each padded to the alignment.
  Status find_data(std::span<const uint64_t> offsets, size_t header_end);

  std::vector<GgufPart> parts_;
  std::vector<std::unique_ptr<FileMapping>> mappings_;  // of the parts; none for bytes in memory
  size_t alignment_ = GGUF_DEFAULT_ALIGNMENT;
  std::map<std::string, GgufValue, std::less<>> values_;
  std::vector<GgufTensor> tensors_;
  std::map<std::string, size_t, std::less<>> tensor_index_;
};

}  // namespace hcache::model
