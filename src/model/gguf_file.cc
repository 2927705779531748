#include "gguf_file.h"

#include <fmt/format.h>

#include <cstring>
#include <limits>

namespace hcache::model {
namespace {

constexpr const char* kSplitCount = "split.count";
constexpr const char* kSplitNumber = "split.no";
constexpr int64_t kMaxParts = 99999;  // their names have five digits

std::string part_suffix(int64_t index, int64_t n_parts) {
  return fmt::format("-{:05}-of-{:05}.gguf", index + 1, n_parts);
}

// Bytes of a scalar; 0 for strings, arrays and unknown types.
size_t scalar_size(gguf_type type) {
  switch (type) {
    case GGUF_TYPE_UINT8:
    case GGUF_TYPE_INT8:
    case GGUF_TYPE_BOOL: return 1;
    case GGUF_TYPE_UINT16:
    case GGUF_TYPE_INT16: return 2;
    case GGUF_TYPE_UINT32:
    case GGUF_TYPE_INT32:
    case GGUF_TYPE_FLOAT32: return 4;
    case GGUF_TYPE_UINT64:
    case GGUF_TYPE_INT64:
    case GGUF_TYPE_FLOAT64: return 8;
    default: return 0;
  }
}

template <typename T>
T load(const uint8_t* p) {
  T value;
  memcpy(&value, p, sizeof(T));
  return value;
}

std::optional<int64_t> scalar_integer(gguf_type type, const uint8_t* p) {
  switch (type) {
    case GGUF_TYPE_UINT8: return load<uint8_t>(p);
    case GGUF_TYPE_INT8: return load<int8_t>(p);
    case GGUF_TYPE_UINT16: return load<uint16_t>(p);
    case GGUF_TYPE_INT16: return load<int16_t>(p);
    case GGUF_TYPE_UINT32: return load<uint32_t>(p);
    case GGUF_TYPE_INT32: return load<int32_t>(p);
    case GGUF_TYPE_INT64: return load<int64_t>(p);
    case GGUF_TYPE_UINT64: {
      const auto value = load<uint64_t>(p);
      if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
      return static_cast<int64_t>(value);
    }
    default: return std::nullopt;
  }
}

}  // namespace

// Reads little-endian scalars within bounds.
class GgufFile::Cursor {
 public:
  explicit Cursor(std::span<const uint8_t> bytes) : bytes_(bytes) {}

  [[nodiscard]] size_t offset() const { return offset_; }
  [[nodiscard]] size_t left() const { return bytes_.size() - offset_; }

  template <typename T>
  [[nodiscard]] bool read(T& out) {
    if (left() < sizeof(T)) return false;
    memcpy(&out, bytes_.data() + offset_, sizeof(T));
    offset_ += sizeof(T);
    return true;
  }
  [[nodiscard]] bool take(uint64_t size, std::span<const uint8_t>& out) {
    if (size > left()) return false;
    out = bytes_.subspan(offset_, size);
    offset_ += size;
    return true;
  }
  [[nodiscard]] bool read_string(std::string& out) {
    uint64_t size = 0;
    std::span<const uint8_t> data;
    if (!read(size) || !take(size, data)) return false;
    out.assign(reinterpret_cast<const char*>(data.data()), data.size());
    return true;
  }

  [[nodiscard]] Status truncated(std::string_view what) const {
    return data_loss(
        fmt::format("the file ends (or a length lies) in {} at byte {}", what, offset_));
  }

 private:
  std::span<const uint8_t> bytes_;
  size_t offset_ = 0;
};

std::string printable(std::string_view text) {
  constexpr size_t kMax = 80;
  std::string out;
  for (const char c : text.substr(0, kMax)) {
    const auto u = static_cast<unsigned char>(c);
    out += u < 0x20 || u >= 0x7f ? '?' : c;
  }
  return text.size() > kMax ? out + "..." : out;
}

std::string GgufTensor::describe() const {
  std::string out = fmt::format("{} [{}", ggml_type_name(type), ne[0]);
  for (int i = 1; i < std::max(1, n_dims); i++) out += fmt::format(", {}", ne[i]);
  return out + "]";
}

Result<std::unique_ptr<GgufFile>> GgufFile::open_part(const std::string& path, Env& env) {
  Result<std::unique_ptr<File>> opened = env.open_file(path, {});
  switch (opened.code()) {
    case Code::kOk: break;
    case Code::kFailedPrecondition:  // a folder or a device
      return invalid_argument(opened.status().message());
    case Code::kUnavailable:  // no path to a file
      return not_found(opened.status().message());
    default: return opened.status();
  }
  HCACHE_ASSIGN_OR_RETURN(const uint64_t size, (*opened)->size());
  if (size == 0) return data_loss(fmt::format("{}: the file is empty", path));
  HCACHE_ASSIGN_OR_RETURN(std::unique_ptr<FileMapping> mapping, (*opened)->map());
  const std::span<const std::byte> bytes = mapping->bytes();
  std::unique_ptr<GgufFile> file(
      new GgufFile({.path = path,
                    .bytes = {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()},
                    .identity = mapping->identity()}));
  file->mappings_.push_back(std::move(mapping));
  HCACHE_RETURN_IF_ERROR(file->parse_header().with_context(path));
  return file;
}

Result<std::unique_ptr<GgufFile>> GgufFile::open(const std::string& path, Env& env) {
  HCACHE_ASSIGN_OR_RETURN(std::unique_ptr<GgufFile> file, open_part(path, env));
  HCACHE_RETURN_IF_ERROR(file->open_others(env));
  return file;
}

// The other parts of a model that is split, as llama.cpp's llama-gguf-split names and numbers them.
Status GgufFile::open_others(Env& env) {
  HCACHE_ASSIGN_OR_RETURN(const auto count, integer(kSplitCount));
  const int64_t n_parts = count.value_or(1);
  if (n_parts <= 1) return {};
  HCACHE_ASSIGN_OR_RETURN(const auto number, integer(kSplitNumber));
  const int64_t index = number.value_or(-1);
  if (n_parts > kMaxParts || index < 0 || index >= n_parts) {
    return data_loss(fmt::format("{}: part {} of {} of a model", path(), index, n_parts));
  }
  const std::string suffix = part_suffix(index, n_parts);
  if (!path().ends_with(suffix)) {
    return invalid_argument(fmt::format(
        "{} is part {} of {} of a model, and the others are found by their names: it must end with "
        "{}",
        path(), index + 1, n_parts, suffix));
  }
  const std::string prefix = path().substr(0, path().size() - suffix.size());
  if (index > 0) {
    return invalid_argument(fmt::format("{} is part {} of {} of a model; name the first, {}",
                                        path(), index + 1, n_parts,
                                        prefix + part_suffix(0, n_parts)));
  }
  for (int64_t i = 1; i < n_parts; ++i) {
    Result<std::unique_ptr<GgufFile>> other = open_part(prefix + part_suffix(i, n_parts), env);
    if (!other.ok()) {
      return other.status().with_context(fmt::format("{}: part {} of {}", path(), i + 1, n_parts));
    }
    HCACHE_RETURN_IF_ERROR(append(**other, i, n_parts));
  }
  HCACHE_ASSIGN_OR_RETURN(const auto n_tensors, integer("split.tensors.count"));
  if (n_tensors.has_value() && *n_tensors != static_cast<int64_t>(tensors_.size())) {
    return data_loss(fmt::format("{}: its parts hold {} tensors, and it promises {}", path(),
                                 tensors_.size(), *n_tensors));
  }
  return {};
}

// Takes over what another part holds.
Status GgufFile::append(GgufFile& other, int64_t index, int64_t n_parts) {
  HCACHE_ASSIGN_OR_RETURN(const auto number, other.integer(kSplitNumber));
  HCACHE_ASSIGN_OR_RETURN(const auto count, other.integer(kSplitCount));
  if (number != index || count != n_parts) {
    return data_loss(fmt::format("{} is part {} of {}, by its name it is part {} of {}",
                                 other.path(), number.value_or(-1) + 1, count.value_or(-1),
                                 index + 1, n_parts));
  }
  if (other.alignment_ != alignment_) {
    return unimplemented(fmt::format("{} is aligned to {} bytes, {} to {}", other.path(),
                                     other.alignment_, path(), alignment_));
  }
  for (GgufTensor& t : other.tensors_) {
    if (!tensor_index_.emplace(t.name, tensors_.size()).second) {
      return data_loss(
          fmt::format("{}: tensor \"{}\" is in another part too", other.path(), printable(t.name)));
    }
    t.part = parts_.size();
    tensors_.push_back(std::move(t));
  }
  parts_.push_back(std::move(other.parts_.front()));
  mappings_.push_back(std::move(other.mappings_.front()));
  return {};
}

Result<std::unique_ptr<GgufFile>> GgufFile::parse(std::span<const uint8_t> bytes,
                                                  std::string name) {
  std::unique_ptr<GgufFile> file(
      new GgufFile({.path = std::move(name), .bytes = bytes, .identity = {}}));
  HCACHE_RETURN_IF_ERROR(file->parse_header().with_context(file->path()));
  return file;
}

Status GgufFile::parse_header() {
  Cursor in(header_bytes());
  uint32_t magic = 0;
  uint32_t version = 0;
  uint64_t n_tensors = 0;
  uint64_t n_values = 0;
  if (!in.read(magic)) return in.truncated("the magic number");
  if (memcmp(&magic, GGUF_MAGIC, 4) != 0) return data_loss("not a GGUF file (no GGUF magic)");
  if (!in.read(version)) return in.truncated("the version");
  if (version < 2 || version > GGUF_VERSION) {
    return unimplemented(
        fmt::format("GGUF version {} (this build reads 2 and 3, little-endian)", version));
  }
  if (!in.read(n_tensors) || !in.read(n_values)) return in.truncated("the counts");
  // The smallest value takes 13 bytes, the smallest tensor 24: counts beyond that lie.
  if (n_values > in.left() / 13 || n_tensors > in.left() / 24) {
    return data_loss(
        fmt::format("the header promises {} values and {} tensors, more than {} bytes can hold",
                    n_values, n_tensors, header_bytes().size()));
  }
  for (uint64_t i = 0; i < n_values; i++) HCACHE_RETURN_IF_ERROR(read_value(in, i));
  HCACHE_RETURN_IF_ERROR(read_alignment());
  std::vector<uint64_t> offsets;
  for (uint64_t i = 0; i < n_tensors; i++) {
    HCACHE_ASSIGN_OR_RETURN(const uint64_t offset, read_tensor(in, i));
    offsets.push_back(offset);
  }
  return find_data(offsets, in.offset());
}

Status GgufFile::read_value(Cursor& in, uint64_t index) {
  std::string key;
  uint32_t type = 0;
  if (!in.read_string(key)) return in.truncated(fmt::format("the key of value {}", index));
  if (key.empty()) return data_loss(fmt::format("value {} has an empty key", index));
  const std::string what = fmt::format("value \"{}\"", printable(key));
  if (!in.read(type)) return in.truncated(what);
  GgufValue value;
  const bool is_array = type == GGUF_TYPE_ARRAY;
  if (is_array && (!in.read(type) || !in.read(value.count))) return in.truncated(what);
  if (type >= GGUF_TYPE_COUNT || type == GGUF_TYPE_ARRAY) {
    return data_loss(fmt::format("{} has the unknown type {}", what, type));
  }
  value.item_type = static_cast<gguf_type>(type);
  value.type = is_array ? GGUF_TYPE_ARRAY : value.item_type;
  const size_t size = scalar_size(value.item_type);
  const size_t start = in.offset();
  if (size > 0) {
    if (value.count > in.left() / size) return in.truncated(what);
    if (!in.take(value.count * size, value.bytes)) return in.truncated(what);
  } else {
    for (uint64_t s = 0; s < value.count; s++) {
      uint64_t length = 0;
      std::span<const uint8_t> skipped;
      if (!in.read(length) || !in.take(length, skipped)) return in.truncated(what);
    }
    value.bytes = header_bytes().subspan(start, in.offset() - start);
  }
  if (!values_.emplace(key, value).second) return data_loss(what + " occurs twice");
  return {};
}

Status GgufFile::read_alignment() {
  HCACHE_ASSIGN_OR_RETURN(const auto alignment, integer(GGUF_KEY_GENERAL_ALIGNMENT));
  if (!alignment.has_value()) return {};
  constexpr int64_t kMaxAlignment = 1 << 20;
  const int64_t a = *alignment;
  if (a <= 0 || a > kMaxAlignment || (a & (a - 1)) != 0) {
    return data_loss(fmt::format("general.alignment is {}, not a power of two up to 2^20", a));
  }
  alignment_ = static_cast<size_t>(a);
  return {};
}

Result<uint64_t> GgufFile::read_tensor(Cursor& in, uint64_t index) {
  GgufTensor t;
  if (!in.read_string(t.name)) return in.truncated(fmt::format("the name of tensor {}", index));
  if (t.name.empty() || t.name.size() >= GGML_MAX_NAME) {
    return data_loss(fmt::format("tensor {} has a name of {} bytes (1 to {} are allowed)", index,
                                 t.name.size(), GGML_MAX_NAME - 1));
  }
  const std::string what = fmt::format("tensor \"{}\"", printable(t.name));
  uint32_t n_dims = 0;
  if (!in.read(n_dims)) return in.truncated(what);
  if (n_dims < 1 || n_dims > GGML_MAX_DIMS) {
    return data_loss(fmt::format("{} has {} dimensions", what, n_dims));
  }
  t.n_dims = static_cast<int>(n_dims);
  int64_t n_elements = 1;
  for (int d = 0; d < t.n_dims; d++) {
    if (!in.read(t.ne[d])) return in.truncated(what);
    if (t.ne[d] <= 0 || t.ne[d] > std::numeric_limits<int64_t>::max() / n_elements) {
      return data_loss(fmt::format("{}: dimension {} is {}", what, d, t.ne[d]));
    }
    n_elements *= t.ne[d];
  }
  int32_t type = 0;
  uint64_t offset = 0;
  if (!in.read(type) || !in.read(offset)) return in.truncated(what);
  if (type < 0 || type >= GGML_TYPE_COUNT || ggml_blck_size(static_cast<ggml_type>(type)) == 0) {
    return unimplemented(
        fmt::format("{} has the type {}, which this build of ggml doesn't know", what, type));
  }
  t.type = static_cast<ggml_type>(type);
  const int64_t block = ggml_blck_size(t.type);
  if (t.ne[0] % block != 0) {
    return data_loss(fmt::format("{}: rows of {} are no multiple of {}'s block of {}", what,
                                 t.ne[0], ggml_type_name(t.type), block));
  }
  if (static_cast<uint64_t>(n_elements / block) > header_bytes().size() / ggml_type_size(t.type)) {
    return data_loss(fmt::format("{} ({}) is larger than the file: truncated, or its shape lies",
                                 what, t.describe()));
  }
  if (!tensor_index_.emplace(t.name, tensors_.size()).second)
    return data_loss(what + " occurs twice");
  tensors_.push_back(std::move(t));
  return offset;
}

Status GgufFile::find_data(std::span<const uint64_t> offsets, size_t header_end) {
  const auto pad = [this](uint64_t n) { return (n + alignment_ - 1) / alignment_ * alignment_; };
  const uint64_t data_start = pad(header_end);
  uint64_t expected = 0;
  for (size_t i = 0; i < tensors_.size(); i++) {
    GgufTensor& t = tensors_[i];
    if (offsets[i] != expected) {
      return data_loss(fmt::format("tensor \"{}\" has the offset {}, expected {}",
                                   printable(t.name), offsets[i], expected));
    }
    const size_t size = t.row_bytes() * static_cast<size_t>(t.n_elements() / t.ne[0]);
    // Neither sum overflows: `expected` and `size` are at most the file's size here.
    if (data_start + expected + size > header_bytes().size()) {
      return data_loss(fmt::format(
          "the file ends within tensor \"{}\": truncated ({} bytes, at least {} needed)",
          printable(t.name), header_bytes().size(), data_start + expected + size));
    }
    t.data = header_bytes().subspan(data_start + expected, size);
    expected += pad(size);
  }
  return {};
}

const GgufValue* GgufFile::find(std::string_view key) const {
  const auto it = values_.find(key);
  return it == values_.end() ? nullptr : &it->second;
}

const GgufTensor* GgufFile::tensor(std::string_view name) const {
  const auto it = tensor_index_.find(name);
  return it == tensor_index_.end() ? nullptr : &tensors_[it->second];
}

Result<std::optional<int64_t>> GgufFile::integer(std::string_view key) const {
  return uniform_integer(key, 0);
}

Result<std::optional<int64_t>> GgufFile::uniform_integer(std::string_view key,
                                                         uint64_t count) const {
  const GgufValue* value = find(key);
  if (value == nullptr) return std::optional<int64_t>();
  const size_t size = scalar_size(value->item_type);
  const bool array = value->type == GGUF_TYPE_ARRAY;
  if (array && (count == 0 || value->count != count)) {
    return data_loss(fmt::format("{}: key {} is an array of {} items, expected {}", path(), key,
                                 value->count,
                                 count == 0 ? "one integer" : fmt::format("{}", count)));
  }
  std::optional<int64_t> first;
  for (uint64_t i = 0; i < value->count; i++) {
    const auto item = scalar_integer(value->item_type, value->bytes.data() + i * size);
    if (!item.has_value()) {
      return data_loss(fmt::format("{}: key {} is not an integer within 63 bits", path(), key));
    }
    if (first.has_value() && *first != *item) {
      return unimplemented(
          fmt::format("{}: key {} differs between the layers ({} and {}); only uniform "
                      "layers are supported",
                      path(), key, *first, *item));
    }
    first = item;
  }
  return first;
}

Result<std::optional<double>> GgufFile::number(std::string_view key) const {
  const GgufValue* value = find(key);
  if (value == nullptr) return std::optional<double>();
  const uint8_t* p = value->bytes.data();
  if (value->type == GGUF_TYPE_FLOAT32) return std::optional<double>(load<float>(p));
  if (value->type == GGUF_TYPE_FLOAT64) return std::optional<double>(load<double>(p));
  if (value->type != GGUF_TYPE_ARRAY) {
    if (const auto i = scalar_integer(value->type, p)) {
      return std::optional<double>(static_cast<double>(*i));
    }
  }
  return data_loss(fmt::format("{}: key {} is not a number", path(), key));
}

Result<std::optional<bool>> GgufFile::boolean(std::string_view key) const {
  const GgufValue* value = find(key);
  if (value == nullptr) return std::optional<bool>();
  if (value->type != GGUF_TYPE_BOOL) {
    return data_loss(fmt::format("{}: key {} is not a boolean", path(), key));
  }
  return std::optional<bool>(value->bytes[0] != 0);
}

Result<std::optional<std::string>> GgufFile::string(std::string_view key) const {
  const GgufValue* value = find(key);
  if (value == nullptr) return std::optional<std::string>();
  if (value->type != GGUF_TYPE_STRING) {
    return data_loss(fmt::format("{}: key {} is not a string", path(), key));
  }
  const auto text = value->bytes.subspan(sizeof(uint64_t));
  return std::optional<std::string>(std::string(text.begin(), text.end()));
}

}  // namespace hcache::model
