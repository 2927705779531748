#include "gguf_writer.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>

#include "base/sync.h"

namespace hcache::model {
namespace {

constexpr size_t kAlignment = GGUF_DEFAULT_ALIGNMENT;
constexpr size_t kBlockBytes = size_t{2} << 20;

template <typename T>
void append(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void append_string(std::string& out, std::string_view text) {
  append<uint64_t>(out, text.size());
  out += text;
}

size_t padded(size_t n) { return (n + kAlignment - 1) / kAlignment * kAlignment; }

size_t tensor_bytes(const GgufTensor& t) {
  return t.row_bytes() * static_cast<size_t>(t.n_elements() / t.ne[0]);
}

class OutputFile {
 public:
  explicit OutputFile(std::string path)
      : path_(std::move(path)), temporary_(path_ + fmt::format(".{}.tmp", getpid())) {}
  ~OutputFile() {
    if (fd_ < 0) return;
    close(fd_);
    unlink(temporary_.c_str());
  }
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  Status create(size_t size) {
    constexpr mode_t kMode = 0644;
    fd_ = open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, kMode);
    if (fd_ < 0) return failure("can't be created", errno);
    if (ftruncate(fd_, static_cast<off_t>(size)) != 0) return failure("can't be sized", errno);
    return {};
  }
  [[nodiscard]] Status write(const void* data, size_t size, size_t offset) const {
    const auto* p = static_cast<const uint8_t*>(data);
    while (size > 0) {
      const ssize_t n = pwrite(fd_, p, size, static_cast<off_t>(offset));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return failure("can't be written", errno);
      p += n;
      offset += static_cast<size_t>(n);
      size -= static_cast<size_t>(n);
    }
    return {};
  }
  Status commit() {
    if (fsync(fd_) != 0) return failure("can't be synced", errno);
    if (rename(temporary_.c_str(), path_.c_str()) != 0) return failure("can't be renamed", errno);
    close(fd_);
    fd_ = -1;
    return {};
  }

 private:
  [[nodiscard]] Status failure(std::string_view what, int error) const {
    const std::string message = fmt::format("{}: {}: {}", path_, what, strerror(error));
    if (error == ENOSPC || error == EDQUOT) return resource_exhausted(message);
    if (error == EACCES || error == EPERM) return permission_denied(message);
    return error == ENOENT ? not_found(message) : internal_error(message);
  }
  std::string path_;
  std::string temporary_;
  int fd_ = -1;
};

// Some rows of one tensor.
struct Block {
  size_t tensor;
  int64_t first_row;
  int64_t n_rows;
};

}  // namespace

void GgufWriter::begin_value(std::string_view key, gguf_type type) {
  append_string(values_, key);
  append<uint32_t>(values_, type);
  n_values_++;
}

void GgufWriter::set_u32(std::string_view key, uint32_t value) {
  begin_value(key, GGUF_TYPE_UINT32);
  append(values_, value);
}

void GgufWriter::set_f32(std::string_view key, float value) {
  begin_value(key, GGUF_TYPE_FLOAT32);
  append(values_, value);
}

void GgufWriter::set_bool(std::string_view key, bool value) {
  begin_value(key, GGUF_TYPE_BOOL);
  append<uint8_t>(values_, value ? 1 : 0);
}

void GgufWriter::set_string(std::string_view key, std::string_view value) {
  begin_value(key, GGUF_TYPE_STRING);
  append_string(values_, value);
}

void GgufWriter::copy(std::string_view key, const GgufValue& value) {
  begin_value(key, value.type);
  if (value.type == GGUF_TYPE_ARRAY) {
    append<uint32_t>(values_, value.item_type);
    append<uint64_t>(values_, value.count);
  }
  values_.append(reinterpret_cast<const char*>(value.bytes.data()), value.bytes.size());
}

void GgufWriter::add_tensor(std::string name, ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2,
                            int64_t ne3) {
  GgufTensor t;
  t.name = std::move(name);
  t.type = type;
  t.n_dims = ne3 > 0 ? 4 : ne2 > 0 ? 3 : ne1 > 0 ? 2 : 1;
  t.ne[0] = ne0;
  t.ne[1] = std::max<int64_t>(1, ne1);
  t.ne[2] = std::max<int64_t>(1, ne2);
  t.ne[3] = std::max<int64_t>(1, ne3);
  tensors_.push_back(std::move(t));
}

Status GgufWriter::write(const std::string& path, const FillRows& fill, int n_threads,
                         const Progress& progress) const {
  std::string header(GGUF_MAGIC);
  append<uint32_t>(header, GGUF_VERSION);
  append<uint64_t>(header, tensors_.size());
  append<uint64_t>(header, n_values_);
  header += values_;
  std::vector<size_t> offsets;
  std::vector<Block> blocks;
  size_t data_size = 0;
  for (size_t i = 0; i < tensors_.size(); i++) {
    const GgufTensor& t = tensors_[i];
    append_string(header, t.name);
    append<uint32_t>(header, static_cast<uint32_t>(t.n_dims));
    for (int d = 0; d < t.n_dims; d++) append<int64_t>(header, t.ne[d]);
    append<int32_t>(header, t.type);
    append<uint64_t>(header, data_size);
    offsets.push_back(data_size);
    data_size += padded(tensor_bytes(t));
    const auto rows_per_block =
        static_cast<int64_t>(std::max<size_t>(1, kBlockBytes / t.row_bytes()));
    const int64_t n_rows = t.n_elements() / t.ne[0];
    for (int64_t row = 0; row < n_rows; row += rows_per_block) {
      blocks.push_back({i, row, std::min(rows_per_block, n_rows - row)});
    }
  }
  header.resize(padded(header.size()));

  OutputFile out(path);
  HCACHE_RETURN_IF_ERROR(out.create(header.size() + data_size));
  HCACHE_RETURN_IF_ERROR(out.write(header.data(), header.size(), 0));

  std::atomic<size_t> next = 0;
  // What the threads share.
  struct Outcome {
    Mutex mutex;
    size_t done HCACHE_GUARDED_BY(mutex) = 0;
    Status first_error HCACHE_GUARDED_BY(mutex);
    bool stop HCACHE_GUARDED_BY(mutex) = false;
  };
  Outcome outcome;
  const auto work = [&] {
    std::vector<uint8_t> buffer;
    for (size_t b = next++; b < blocks.size(); b = next++) {
      const Block& block = blocks[b];
      const size_t row_bytes = tensors_[block.tensor].row_bytes();
      buffer.resize(row_bytes * static_cast<size_t>(block.n_rows));
      Status status = fill(block.tensor, block.first_row, block.n_rows, buffer.data());
      if (status.ok()) {
        const size_t at = header.size() + offsets[block.tensor] +
                          row_bytes * static_cast<size_t>(block.first_row);
        status = out.write(buffer.data(), buffer.size(), at);
      }
      const MutexLock lock(outcome.mutex);
      outcome.done++;
      if (status.ok() && !outcome.stop && progress &&
          !progress(static_cast<float>(outcome.done) / static_cast<float>(blocks.size()))) {
        status = cancelled(fmt::format("{}: writing was cancelled", path));
      }
      if (!status.ok() && outcome.first_error.ok()) outcome.first_error = std::move(status);
      outcome.stop = !outcome.first_error.ok();
      if (outcome.stop) return;
    }
  };
  const auto limit = static_cast<unsigned>(std::max<size_t>(1, blocks.size()));
  const unsigned wanted =
      n_threads > 0 ? static_cast<unsigned>(n_threads) : std::thread::hardware_concurrency();
  std::vector<std::thread> helpers;
  for (unsigned i = 1; i < std::min(std::max(1U, wanted), limit); i++) helpers.emplace_back(work);
  work();
  for (std::thread& t : helpers) t.join();
  const MutexLock lock(outcome.mutex);
  HCACHE_RETURN_IF_ERROR(outcome.first_error);
  return out.commit();
}

}  // namespace hcache::model
