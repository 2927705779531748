#include "state_rows.h"

// clang-format off
#include <llama-io.h>
#include <llama-kv-cache-dsa.h>
#include <llama-kv-cache-iswa.h>
#include <llama-kv-cache-msa.h>
#include <llama-kv-cache.h>
#include <llama-memory-hybrid-idx.h>
#include <llama-memory-hybrid-iswa.h>
#include <llama-memory-hybrid.h>
#include <llama-memory.h>
// clang-format on

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

namespace hcache::libllama {
namespace {

// What precedes a tensor's rows in libllama's stream.
struct RowTensor {
  ggml_tensor* tensor = nullptr;
  int32_t type = 0;
  uint64_t row_bytes = 0;
};

// What a full cache of cells consists of.
struct Cache {
  llama_kv_cache* cells = nullptr;
  uint32_t n_layers = 0;
  std::vector<RowTensor> tensors;  // K of all layers, then V of those that have one
};

template <typename T>
T at_end(std::string_view bytes, size_t before_end) {
  T value;
  std::memcpy(&value, bytes.data() + bytes.size() - before_end, sizeof(T));
  return value;
}

// Takes down which tensors a cache that holds one token writes.
class TensorList final : public llama_io_write_i {
 public:
  void write(const void* src, size_t size) override {
    plain_.append(static_cast<const char*>(src), size);
  }
  void write_tensor(ggml_tensor* tensor, size_t /*offset*/, size_t size) override {
    const std::string_view head(plain_);
    constexpr size_t kType = sizeof(int32_t);
    constexpr size_t kSize = sizeof(uint64_t);
    if (tensors_.empty()) counts_end_ = plain_.size() - kType - kSize;
    tensors_.push_back(
        {tensor, at_end<int32_t>(head, kType + kSize), at_end<uint64_t>(head, kSize)});
    whole_ = whole_ && tensors_.back().row_bytes == size;
  }
  size_t n_bytes() override { return plain_.size(); }

  // The cache as it was written; one that has no rows of its own (it shares another's cells, or V
  // is kept by columns) is none.
  [[nodiscard]] std::optional<Cache> cache(llama_kv_cache* cells) const {
    const std::string_view head =
        std::string_view(plain_).substr(0, tensors_.empty() ? plain_.size() : counts_end_);
    constexpr size_t kCounts = 2 * sizeof(uint32_t);
    if (head.size() < 3 * kCounts || !whole_) return std::nullopt;
    const bool by_columns = at_end<uint32_t>(head, kCounts) != 0;
    const auto n_layers = at_end<uint32_t>(head, sizeof(uint32_t));
    if (by_columns || tensors_.size() < n_layers) return std::nullopt;
    return Cache{cells, n_layers, tensors_};
  }

 private:
  std::string plain_;  // all but the rows
  std::vector<RowTensor> tensors_;
  size_t counts_end_ = 0;
  bool whole_ = true;
};

MediaRun::Position position_of(Positions positions, int64_t row) {
  if (positions != nullptr) return positions->position(row);
  const auto p = static_cast<int32_t>(row);
  return {p, p, p, p};
}

// Gives a cache what it reads of a sequence, but no rows.
class CellsAlone final : public llama_io_read_i {
 public:
  CellsAlone(const Cache& cache, llama_seq_id seq, Positions positions,
             std::span<const int32_t> tokens) {
    put<uint32_t>(1);  // streams
    put(static_cast<uint32_t>(tokens.size()));
    for (size_t i = 0; i < tokens.size(); ++i) {
      const MediaRun::Position position = position_of(positions, static_cast<int64_t>(i));
      put<llama_pos>(position[0]);
      put<uint32_t>(1);  // sequences
      if (cache.cells->has_cell_ext()) {
        put(llama_kv_cell_ext{
            .x = position[2], .y = position[1], .tok = std::max(tokens[i], LLAMA_TOKEN_NULL)});
      }
      put(seq);
    }
    put<uint32_t>(0);  // V is not kept by columns
    put(cache.n_layers);
    for (const RowTensor& tensor : cache.tensors) {
      put(tensor.type);
      put(tensor.row_bytes);
    }
  }
  void read(void* dst, size_t size) override {
    if (size > bytes_.size() - at_) throw std::runtime_error("a cache reads more than was written");
    std::memcpy(dst, bytes_.data() + at_, size);
    at_ += size;
  }
  void read_tensor(ggml_tensor* /*tensor*/, size_t /*offset*/, size_t /*size*/) override {}
  size_t n_bytes() override { return at_; }

 private:
  template <typename T>
  void put(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(T));
  }

  std::string bytes_;
  size_t at_ = 0;
};

// The caches of a memory that hold all tokens, and what is beside them. A cache that leaves tokens
// out of what it writes (it has a window) is not among them.
struct FullCaches {
  std::vector<llama_kv_cache*> caches;
  Remainder remainder = Remainder::kWhole;
  bool windows_alone = false;
};

FullCaches full_caches(llama_memory_i* memory, bool has_window) {
  // Before its base: the index of keys mirrors the cells of another cache.
  if (dynamic_cast<llama_memory_hybrid_idx*>(memory) != nullptr) return {};
  if (auto* m = dynamic_cast<llama_memory_hybrid_iswa*>(memory)) {
    return {{m->get_mem_attn()->get_base()}, Remainder::kPartial};
  }
  if (auto* m = dynamic_cast<llama_kv_cache_iswa*>(memory)) {
    return {{m->get_base()}, Remainder::kPartial, true};
  }
  if (has_window) return {{}, Remainder::kWhole, dynamic_cast<llama_kv_cache*>(memory) != nullptr};
  if (auto* m = dynamic_cast<llama_memory_hybrid*>(memory)) {
    return {{m->get_mem_attn()}, Remainder::kPartial};
  }
  if (auto* m = dynamic_cast<llama_kv_cache_dsa*>(memory)) {
    return {{m->get_mla(), m->get_lid()}, Remainder::kNone};
  }
  if (auto* m = dynamic_cast<llama_kv_cache_msa*>(memory)) {
    return {{m->get_base(), m->get_idx()}, Remainder::kNone};
  }
  if (auto* m = dynamic_cast<llama_kv_cache*>(memory)) return {{m}, Remainder::kNone};
  return {};
}

class StateRowsImpl final : public StateRows {
 public:
  StateRowsImpl(llama_context* context, llama_seq_id seq) {
    llama_memory_i* memory = llama_get_memory(context);
    const FullCaches full = full_caches(memory, llama_model_n_swa(llama_get_model(context)) > 0);
    windows_alone_ = full.windows_alone;
    for (llama_kv_cache* cells : full.caches) {
      TensorList list;
      cells->state_write(list, seq, 0);
      std::optional<Cache> cache = list.cache(cells);
      if (cells->get_n_stream() != 1 || !cache) return;
      caches_.push_back(std::move(*cache));
    }
    remainder_ = full.remainder;
    for (const Cache& cache : caches_) {
      for (const RowTensor& tensor : cache.tensors) row_bytes_.push_back(tensor.row_bytes);
    }
  }

  Remainder remainder() const override { return remainder_; }
  bool windows_alone() const override { return windows_alone_; }
  const std::vector<size_t>& row_bytes() const override { return row_bytes_; }

  Status read(llama_seq_id seq, Positions positions, int64_t from, int64_t to,
              std::span<std::byte> out) override;
  Status make(llama_seq_id seq, Positions positions, std::span<const int32_t> tokens) override;
  Status write(llama_seq_id seq, Positions positions, size_t tensor, int64_t first,
               std::span<const std::byte> rows) override;

 private:
  // Rows whose cells follow each other.
  struct Run {
    uint32_t cell = 0;
    size_t row = 0;  // of those asked for
    size_t n = 0;
  };
  static Result<std::vector<Run>> runs_of(const Cache& cache, llama_seq_id seq, Positions positions,
                                          int64_t from, int64_t to);

  Remainder remainder_ = Remainder::kWhole;
  bool windows_alone_ = false;
  std::vector<Cache> caches_;
  std::vector<size_t> row_bytes_;
};

Result<std::vector<StateRowsImpl::Run>> StateRowsImpl::runs_of(const Cache& cache, llama_seq_id seq,
                                                               Positions positions, int64_t from,
                                                               int64_t to) {
  std::vector<Run> runs;
  const llama_kv_cells& cells = cache.cells->get_cells(seq);
  const auto& by_position = cells.seq_pos_get(seq);
  auto at = by_position.end();
  for (int64_t row = from; row < to; ++row) {
    const MediaRun::Position position = position_of(positions, row);
    const llama_pos t = position[0];
    // Rows of one picture may have the same first position: then the others tell them apart.
    const bool follows =
        at != by_position.end() && std::next(at) != by_position.end() && std::next(at)->first == t;
    at = follows ? std::next(at) : by_position.lower_bound({t, 0});
    const auto is_its = [&](uint32_t cell) {
      if (positions == nullptr || !cache.cells->has_cell_ext()) return true;
      const llama_kv_cell_ext& place = cells.ext_get(cell);
      return place.y == position[1] && place.x == position[2];
    };
    if (at == by_position.end() || at->first != t || !is_its(at->second)) {
      at = by_position.lower_bound({t, 0});
      while (at != by_position.end() && at->first == t && !is_its(at->second)) ++at;
    }
    if (at == by_position.end() || at->first != t) {
      return internal_error(fmt::format("sequence {} has no cell for token {}", seq, row));
    }
    const auto number = static_cast<size_t>(row - from);
    if (!runs.empty() && runs.back().cell + runs.back().n == at->second) {
      ++runs.back().n;
    } else {
      runs.push_back({at->second, number, 1});
    }
  }
  return runs;
}

Status StateRowsImpl::read(llama_seq_id seq, Positions positions, int64_t from, int64_t to,
                           std::span<std::byte> out) {
  const auto n = static_cast<size_t>(to - from);
  for (const Cache& cache : caches_) {
    HCACHE_ASSIGN_OR_RETURN(const std::vector<Run> runs, runs_of(cache, seq, positions, from, to));
    for (const RowTensor& t : cache.tensors) {
      for (const Run& run : runs) {
        ggml_backend_tensor_get(t.tensor, out.data() + run.row * t.row_bytes,
                                run.cell * t.row_bytes, run.n * t.row_bytes);
      }
      out = out.subspan(n * t.row_bytes);
    }
  }
  return {};
}

Status StateRowsImpl::make(llama_seq_id seq, Positions positions, std::span<const int32_t> tokens) {
  for (const Cache& cache : caches_) {
    CellsAlone io(cache, seq, positions, tokens);
    try {
      cache.cells->state_read(io, seq, 0);
    } catch (const std::exception& e) {
      for (const Cache& made : caches_) made.cells->seq_rm(seq, -1, -1);
      return resource_exhausted(
          fmt::format("no cells for {} tokens that are restored: {}", tokens.size(), e.what()));
    }
  }
  return {};
}

Status StateRowsImpl::write(llama_seq_id seq, Positions positions, size_t tensor, int64_t first,
                            std::span<const std::byte> rows) {
  size_t i = tensor;
  for (const Cache& cache : caches_) {
    if (i >= cache.tensors.size()) {
      i -= cache.tensors.size();
      continue;
    }
    const RowTensor& t = cache.tensors[i];
    const auto n = static_cast<int64_t>(rows.size() / t.row_bytes);
    HCACHE_ASSIGN_OR_RETURN(const std::vector<Run> runs,
                            runs_of(cache, seq, positions, first, first + n));
    for (const Run& run : runs) {
      ggml_backend_tensor_set(t.tensor, rows.data() + run.row * t.row_bytes, run.cell * t.row_bytes,
                              run.n * t.row_bytes);
    }
    return {};
  }
  return out_of_range(fmt::format("there is no tensor {} of rows", tensor));
}

}  // namespace

std::unique_ptr<StateRows> StateRows::probe(llama_context* context, llama_seq_id seq) {
  return std::make_unique<StateRowsImpl>(context, seq);
}

}  // namespace hcache::libllama
