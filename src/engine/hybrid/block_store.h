// Blocks of 64 tokens of the hybrid cache: where their pages lie, in which kind, and how they get
// to their place.
#pragma once

#include <ggml-backend.h>
#include <ggml.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "block_io.h"
#include "engine/copy_queue.h"
#include "engine/hybrid_engine.h"
#include "host_buffer.h"
#include "model/device.h"
#include "tensor_pool.h"

namespace hcache::engine {

// Which bytes a block has. A KV block has two pages a layer, of K and of V; an ACT block one.
struct BlockLayout {
  int first_layer = 0;  // that is kept; those before it are recomputed from tokens
  int n_layer = 0;
  size_t kv_row_bytes = 0;            // of K, and of V
  std::vector<size_t> act_row_bytes;  // per layer; 0: the layer has no such rows

  [[nodiscard]] static int parts(BlockKind kind) { return kind == BlockKind::kKv ? 2 : 1; }
  [[nodiscard]] size_t row_bytes(BlockKind kind, int layer) const {
    switch (kind) {
      case BlockKind::kKv: return kv_row_bytes;
      case BlockKind::kAct: return act_row_bytes[layer];
      case BlockKind::kTokens: break;
    }
    return 0;
  }
  [[nodiscard]] size_t page_bytes(BlockKind kind, int layer) const {
    return kBlockTokens * row_bytes(kind, layer);
  }
  // Of a page within its block.
  [[nodiscard]] size_t offset(BlockKind kind, int layer, int part) const;
  [[nodiscard]] size_t block_bytes(BlockKind kind) const { return offset(kind, n_layer, 0); }
};

struct BlockStoreOptions {
  BlockLayout layout;
  size_t device_bytes = 0;  // for complete blocks
  size_t host_bytes = 0;
  size_t disk_bytes = 0;
  std::string disk_dir;
};

// A block begins in host memory, where its rows are written as they are computed; once it is
// complete it moves to a place that has room: the device, the host, the disk. Blocks that are not
// complete, or on their way, are beyond host_bytes.
//
// Threading: the engine's thread.
class BlockStore {
 public:
  using Id = int32_t;

  // What is passed must outlive it.
  static Result<std::unique_ptr<BlockStore>> create(Env& env, model::Device& device,
                                                    CopyQueue& queue, BlockIo* io,
                                                    BlockStoreOptions options);
  // Waits for moves that are under way.
  ~BlockStore();
  BlockStore(const BlockStore&) = delete;
  BlockStore& operator=(const BlockStore&) = delete;

  // Complete blocks that all places hold together, whatever their kinds.
  [[nodiscard]] int64_t capacity() const { return capacity_; }

  // A new block, in host memory. kResourceExhausted: there is none.
  Result<Id> add(BlockKind kind);
  // Begins the move of a complete block to its place. `neighbour` (or -1) is the block of the same
  // sequence before it: on disk they should lie side by side.
  Status complete(Id id, Id neighbour);
  // Its room is free at once, or when its move is over.
  void remove(Id id);
  // Moves that are over take effect here and nowhere else. With `all` it waits for every one. The
  // first error of a write: such a block stays in host memory.
  Status settle(bool all);
  [[nodiscard]] size_t n_moving() const { return moving_.size(); }

  [[nodiscard]] BlockKind kind(Id id) const { return blocks_[id].kind; }
  [[nodiscard]] BlockPlace place(Id id) const { return blocks_[id].place; }
  [[nodiscard]] int64_t number(Id id) const { return blocks_[id].number; }

  // A page of a block in host memory.
  [[nodiscard]] std::byte* host_page(Id id, int layer, int part) const;
  // The memory of a block on the device, I8; its pages lie at BlockLayout::offset().
  [[nodiscard]] ggml_tensor* device_block(Id id) const;
  // Where the page of a block on disk lies in its file.
  [[nodiscard]] File* file(BlockKind kind) const { return disk_[index(kind)].file.get(); }
  [[nodiscard]] uint64_t file_offset(Id id, int layer, int part) const;

  [[nodiscard]] HybridCacheUse use() const;

 private:
  struct Block {
    BlockKind kind = BlockKind::kKv;
    BlockPlace place = BlockPlace::kHost;
    int64_t number = -1;  // of the place's pool
    bool used = false;
    bool moving = false;
    bool removed = false;  // while it moves
    BlockPlace to = BlockPlace::kHost;
    int64_t to_number = -1;
  };
  struct Move {
    Id id = -1;
    BlockIo::Ticket write = 0;
    CopyQueue::Ticket upload = 0;
  };
  // Of one kind.
  struct DiskPool {
    std::unique_ptr<File> file;
    std::vector<bool> taken;
    int64_t n_taken = 0;
  };

  BlockStore(Env& env, model::Device& device, CopyQueue& queue, BlockIo* io,
             BlockStoreOptions options);
  static size_t index(BlockKind kind) { return static_cast<size_t>(kind); }
  Status open_files();
  Result<int64_t> take_host(BlockKind kind);
  Result<int64_t> take_device(BlockKind kind);
  // A number next to `neighbour` where it is free, else where most free ones are in a row; -1.
  int64_t take_disk(BlockKind kind, int64_t neighbour);
  void give_back(BlockKind kind, BlockPlace place, int64_t number);
  Status choose_place(Block& block, Id neighbour);
  [[nodiscard]] std::vector<PageTransfer> pages_to_write(const Block& block) const;
  [[nodiscard]] uint64_t file_offset(const Block& block, int64_t number, int layer, int part) const;
  void end_move(Id id, bool moved);

  Env& env_;
  model::Device& device_;
  CopyQueue& queue_;
  BlockIo* io_;
  const BlockStoreOptions options_;
  int64_t capacity_ = 0;
  std::vector<Block> blocks_;
  std::vector<Id> free_ids_;
  std::vector<Move> moving_;

  std::array<std::vector<HostBuffer>, kBlockKinds> host_;     // by kind
  std::array<std::vector<int64_t>, kBlockKinds> idle_host_;   // numbers that have memory
  std::array<std::vector<int64_t>, kBlockKinds> empty_host_;  // and those that have none
  std::array<std::vector<std::unique_ptr<TensorPool>>, kBlockKinds> device_blocks_;
  std::array<std::vector<int64_t>, kBlockKinds> idle_device_;
  std::array<DiskPool, kBlockKinds> disk_;
  size_t settled_host_bytes_ = 0;  // of complete blocks
  size_t device_bytes_ = 0;        // of blocks in use
  size_t disk_bytes_ = 0;
};

}  // namespace hcache::engine
