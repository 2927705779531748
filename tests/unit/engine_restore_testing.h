// What the tests of capture and restoration share: a sink that checks the tap's contract, host
// memory that is poisoned once it may be, and restoring a sequence from what was captured of
// another.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "engine_testing.h"

namespace hcache::engine::testing {

// Saved rows of one sequence: per layer and position.
struct SavedRows {
  struct Layer {
    std::map<int64_t, Bytes> hidden, k, v;
  };
  std::vector<Layer> layers;
};

// A sink with room for a number of blocks that checks the tap's contract and keeps all rows.
class RecordingSink : public CaptureSink {
 public:
  explicit RecordingSink(size_t capacity = 1000) : capacity_(capacity) {}
  ~RecordingSink() override {
    EXPECT_TRUE(reserved_.empty()) << "blocks were never given back";
    for (const Block& b : dropped_) {
      EXPECT_TRUE(std::all_of(b.block->begin(), b.block->end(), [](std::byte x) {
        return x == std::byte{0xD0};
      })) << "written after it was dropped";
    }
  }

  std::byte* reserve(size_t n_bytes) override {
    if (reserved_.size() >= capacity_) {
      ++n_refused;
      return nullptr;
    }
    auto block = std::make_unique<Bytes>(n_bytes + 64, std::byte{0x5C});
    std::byte* data = block->data();
    reserved_[data] = {std::move(block), n_bytes};
    return data;
  }
  void publish(std::byte* data, const StepCapture& capture) override {
    const auto it = reserved_.find(data);
    ASSERT_NE(it, reserved_.end()) << "a block that is not reserved";
    EXPECT_EQ(it->second.n_bytes, capture.n_bytes);
    for (size_t i = it->second.n_bytes; i < it->second.block->size(); ++i) {
      ASSERT_EQ((*it->second.block)[i], std::byte{0x5C}) << "written behind the block";
    }
    check_layout(capture);
    for (const CapturedRows& rows : capture.rows) keep(data, capture, rows);
    reserved_.erase(it);
    ++n_published;
    hidden_type = capture.layers.back().hidden_type;
  }
  void drop(std::byte* data) override {
    const auto it = reserved_.find(data);
    ASSERT_NE(it, reserved_.end()) << "a block that is not reserved";
    std::fill(it->second.block->begin(), it->second.block->end(), std::byte{0xD0});
    dropped_.push_back(std::move(it->second));
    reserved_.erase(it);
    ++n_dropped;
  }
  [[nodiscard]] size_t n_reserved() const { return reserved_.size(); }

  std::map<SeqId, SavedRows> saved;
  ggml_type hidden_type = GGML_TYPE_COUNT;
  int n_published = 0;
  int n_dropped = 0;
  int n_refused = 0;

 private:
  struct Block {
    std::unique_ptr<Bytes> block;
    size_t n_bytes = 0;
  };

  // Parts are aligned, inside the block, and apart; every row of the step belongs to one sequence.
  static void check_layout(const StepCapture& c) {
    std::map<int64_t, int64_t> parts;
    const auto part = [&](int64_t offset, size_t row_bytes) {
      if (offset < 0) return;
      EXPECT_EQ(offset % 64, 0);
      EXPECT_TRUE(
          parts.emplace(offset, offset + static_cast<int64_t>(row_bytes) * c.n_rows).second);
    };
    for (const CapturedLayer& layer : c.layers) {
      EXPECT_EQ(layer.k_offset < 0, layer.v_offset < 0);
      part(layer.hidden_offset, layer.hidden_row_bytes);
      part(layer.k_offset, c.kv_row_bytes);
      part(layer.v_offset, c.kv_row_bytes);
    }
    int64_t end = 0;
    for (const auto& [first, last] : parts) {
      EXPECT_GE(first, end);
      end = last;
    }
    EXPECT_LE(end, static_cast<int64_t>(c.n_bytes));
    int next = 0;
    for (const CapturedRows& rows : c.rows) {
      EXPECT_EQ(rows.first_row, next);
      next += rows.n_rows;
    }
    EXPECT_EQ(next, c.n_rows);
  }
  void keep(const std::byte* data, const StepCapture& c, const CapturedRows& rows) {
    SavedRows& to = saved[rows.seq];
    to.layers.resize(c.layers.size());
    for (size_t i = 0; i < c.layers.size(); ++i) {
      for (int r = 0; r < rows.n_rows; ++r) {
        const auto take = [&](int64_t offset, size_t row_bytes, std::map<int64_t, Bytes>& into) {
          if (offset < 0) return;
          const std::byte* from = data + offset + (rows.first_row + r) * row_bytes;
          into[rows.first_pos + r] = Bytes(from, from + row_bytes);
        };
        take(c.layers[i].hidden_offset, c.layers[i].hidden_row_bytes, to.layers[i].hidden);
        take(c.layers[i].k_offset, c.kv_row_bytes, to.layers[i].k);
        take(c.layers[i].v_offset, c.kv_row_bytes, to.layers[i].v);
      }
    }
  }

  size_t capacity_;
  std::map<std::byte*, Block> reserved_;
  std::vector<Block> dropped_;
};

// Host memory that the engine may read until its ticket is done; poisoned then, as a ring would
// reuse it.
class UploadRing {
 public:
  explicit UploadRing(Engine& engine) : engine_(engine) {}
  ~UploadRing() {
    if (!held_.empty()) HCACHE_EXPECT_OK(engine_.wait(held_.back().ticket));
  }
  UploadRing(const UploadRing&) = delete;
  UploadRing& operator=(const UploadRing&) = delete;

  std::byte* put(const std::map<int64_t, Bytes>& rows, int64_t first, int n) {
    Bytes& bytes = fresh_.emplace_back();
    for (int64_t pos = first; pos < first + n; ++pos) {
      const Bytes& row = rows.at(pos);
      bytes.insert(bytes.end(), row.begin(), row.end());
    }
    return bytes.data();
  }
  void hold(const Result<Engine::Ticket>& ticket) {
    ASSERT_TRUE(ticket.ok()) << ticket.status().to_string();
    for (Bytes& bytes : fresh_) held_.push_back({*ticket, std::move(bytes)});
    fresh_.clear();
    while (!held_.empty() && engine_.done(held_.front().ticket)) {
      std::fill(held_.front().bytes.begin(), held_.front().bytes.end(), std::byte{0xEE});
      held_.pop_front();
    }
  }

 private:
  struct Held {
    Engine::Ticket ticket = 0;
    Bytes bytes;
  };
  Engine& engine_;
  std::deque<Bytes> fresh_;
  std::deque<Held> held_;
};

// Rebuilds rows [first, first + n) of a layer from hidden states, in slices staged in pieces of a
// few rows, as pages come.
inline void restore_hidden(Engine& engine, UploadRing& ring, const SavedRows& saved, ggml_type type,
                           SeqId seq, int layer, int64_t first, int64_t n, int slice,
                           int piece = 6) {
  for (int64_t done = 0; done < n; done += slice) {
    const int rows = static_cast<int>(std::min<int64_t>(slice, n - done));
    for (int r = 0; r < rows; r += piece) {
      const int k = std::min(piece, rows - r);
      ring.hold(engine.stage_hidden(seq, layer, r, k, type,
                                    ring.put(saved.layers[layer].hidden, first + done + r, k)));
    }
    HCACHE_EXPECT_OK(engine.project_staged(seq, layer, first + done, rows, type));
  }
}

inline void restore_kv(Engine& engine, UploadRing& ring, const SavedRows& saved, SeqId seq,
                       int layer, int64_t first, int64_t n, int piece = 16) {
  for (int64_t done = 0; done < n; done += piece) {
    const int rows = static_cast<int>(std::min<int64_t>(piece, n - done));
    const std::byte* k = ring.put(saved.layers[layer].k, first + done, rows);
    const std::byte* v = ring.put(saved.layers[layer].v, first + done, rows);
    ring.hold(engine.load_kv(seq, layer, first + done, rows, k, v));
  }
}

inline CaptureOptions tap(const Engine& engine, uint8_t mask, ggml_type type = GGML_TYPE_COUNT) {
  return {.layers = std::vector<uint8_t>(engine.n_layer(), mask),
          .hidden_types = std::vector<ggml_type>(engine.n_layer(), type)};
}

// A conversation of prompts in odd pieces and decoded rows, beside another one in the same steps.
struct Conversation {
  SeqId seq = -1;
  SeqId other = -1;
  int64_t n = 0;
};
inline Conversation converse(Engine& engine, const Tokens& tokens) {
  Conversation c{.seq = new_sequence(engine), .other = new_sequence(engine)};
  const Tokens stream = random_tokens(engine.model(), 200, 77);
  int turn = 0;
  for (size_t done = 0; done < tokens.size(); ++turn) {
    const size_t left = tokens.size() - done;
    const size_t k = std::min<size_t>(turn == 0 ? 19 : turn == 5 ? 11 : 1, left);
    std::vector<BatchItem> items;
    const BatchItem ours{
        .seq = c.seq, .tokens = std::span(tokens).subspan(done, k), .output = Output::kLast};
    const BatchItem others{.seq = c.other,
                           .tokens = std::span(stream).subspan(turn, turn % 3 + 1),
                           .output = turn % 4 == 0 ? Output::kLast : Output::kNone};
    if (turn % 2 == 0) items.push_back(others);
    items.push_back(ours);
    if (turn % 2 == 1 && turn % 5 != 0) items.push_back(others);
    const Result<Logits> logits = engine.decode(items);
    EXPECT_TRUE(logits.ok()) << logits.status().to_string();
    done += k;
  }
  c.n = static_cast<int64_t>(tokens.size());
  return c;
}

// What a run computed, saved and restored.
struct Outcome {
  std::vector<Row> logits;
  std::vector<Bytes> kv;
  SavedRows saved;
  std::vector<Bytes> restored_kv;
  std::vector<Row> restored_logits;
};

inline void expect_same(const Outcome& run, const Outcome& reference) {
  EXPECT_TRUE(same_rows(run.logits, reference.logits));
  EXPECT_TRUE(same_kv(run.kv, reference.kv));
  EXPECT_TRUE(same_kv(run.restored_kv, reference.restored_kv));
  EXPECT_TRUE(same_rows(run.restored_logits, reference.restored_logits));
  ASSERT_EQ(run.saved.layers.size(), reference.saved.layers.size());
  for (size_t i = 0; i < reference.saved.layers.size(); ++i) {
    EXPECT_EQ(run.saved.layers[i].hidden, reference.saved.layers[i].hidden) << "layer " << i;
    EXPECT_EQ(run.saved.layers[i].k, reference.saved.layers[i].k) << "layer " << i;
    EXPECT_EQ(run.saved.layers[i].v, reference.saved.layers[i].v) << "layer " << i;
  }
}

}  // namespace hcache::engine::testing
