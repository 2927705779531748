// The rows of libllama's caches, through its private headers: the one place that knows them.
//
// llama.cpp keeps K and V of its tokens in cells, which any sequence may share. A cache that holds
// every token of a sequence ("full") is read and written row by row here; libllama's own functions
// write all of it, every time. Which of a model's caches are full depends on its kind of memory.
//
// Threading: one thread.
#pragma once

#include <llama.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "libllama/media.h"

namespace hcache::libllama {

// Beside the rows:
enum class Remainder : uint8_t {
  kNone,     // nothing: the rows are the state
  kPartial,  // what LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY gives: windows, recurrent state
  kWhole,    // everything: no cache is known to be full
};

// Of each row of a sequence; null: as its number is.
using Positions = const MediaRows*;

class StateRows {
 public:
  // Of a context whose sequence `seq` holds one token, at position 0.
  static std::unique_ptr<StateRows> probe(llama_context* context, llama_seq_id seq);
  virtual ~StateRows() = default;

  [[nodiscard]] virtual Remainder remainder() const = 0;
  // Whether the state beside the rows is K and V of a window alone, which can be trimmed as long as
  // the window is whole.
  [[nodiscard]] virtual bool windows_alone() const = 0;
  // Of each tensor; in the order in which libllama writes them.
  [[nodiscard]] virtual const std::vector<size_t>& row_bytes() const = 0;
  // Rows [from, to) of every tensor, one tensor after the other.
  virtual Status read(llama_seq_id seq, Positions positions, int64_t from, int64_t to,
                      std::span<std::byte> out) = 0;
  // Cells for these tokens, for a sequence that is empty. kResourceExhausted.
  virtual Status make(llama_seq_id seq, Positions positions, std::span<const int32_t> tokens) = 0;
  virtual Status write(llama_seq_id seq, Positions positions, size_t tensor, int64_t first,
                       std::span<const std::byte> rows) = 0;
};

}  // namespace hcache::libllama
