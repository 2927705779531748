#include "block_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace hcache::engine {
namespace {

constexpr std::array kKinds = {BlockKind::kKv, BlockKind::kAct};  // that hold anything

const char* kind_name(BlockKind kind) { return kind == BlockKind::kKv ? "kv" : "act"; }

}  // namespace

size_t BlockLayout::offset(BlockKind kind, int layer, int part) const {
  size_t n = 0;
  for (int l = first_layer; l < layer; ++l) n += parts(kind) * page_bytes(kind, l);
  return n + (part == 0 ? 0 : part * page_bytes(kind, layer));
}

Result<std::unique_ptr<BlockStore>> BlockStore::create(Env& env, model::Device& device,
                                                       CopyQueue& queue, BlockIo* io,
                                                       BlockStoreOptions options) {
  std::unique_ptr<BlockStore> store(new BlockStore(env, device, queue, io, std::move(options)));
  if (store->options_.disk_bytes > 0) HCACHE_RETURN_IF_ERROR(store->open_files());
  return store;
}

BlockStore::BlockStore(Env& env, model::Device& device, CopyQueue& queue, BlockIo* io,
                       BlockStoreOptions options)
    : env_(env), device_(device), queue_(queue), io_(io), options_(std::move(options)) {
  const BlockLayout& layout = options_.layout;
  const size_t largest =
      std::max(layout.block_bytes(BlockKind::kKv), layout.block_bytes(BlockKind::kAct));
  // With every layer recomputed nothing is kept, and there is always room.
  if (largest == 0) {
    capacity_ = INT64_MAX;
    return;
  }
  for (const size_t bytes : {options_.device_bytes, options_.host_bytes, options_.disk_bytes}) {
    capacity_ += static_cast<int64_t>(bytes / largest);
  }
}

BlockStore::~BlockStore() { settle(true).ignore("nobody will read the blocks again"); }

// The files lose their names at once: whatever ends the process, nothing is left behind.
Status BlockStore::open_files() {
  HCACHE_RETURN_IF_ERROR(env_.make_dirs(options_.disk_dir));
  HCACHE_ASSIGN_OR_RETURN(const SpaceInfo space, env_.space(options_.disk_dir));
  if (space.free_bytes < options_.disk_bytes) {
    return resource_exhausted(
        fmt::format("{} has {} MiB free, the blocks on disk may take {}; give them less, or "
                    "another directory",
                    options_.disk_dir, space.free_bytes >> 20, options_.disk_bytes >> 20));
  }
  const BlockLayout& layout = options_.layout;
  for (const BlockKind kind : kKinds) {
    const size_t block_bytes = layout.block_bytes(kind);
    if (block_bytes == 0) continue;
    // Pages that are no multiple of a disk's blocks go through the page cache.
    bool direct = true;
    for (int layer = layout.first_layer; layer < layout.n_layer; ++layer) {
      direct = direct && layout.page_bytes(kind, layer) % kDirectAlignment == 0;
    }
    const std::string path = join_path(
        options_.disk_dir, fmt::format("batch-{}-{:016x}", kind_name(kind), env_.random_u64()));
    DiskPool& pool = disk_[index(kind)];
    HCACHE_ASSIGN_OR_RETURN(
        pool.file,
        env_.open_file(path, {.write = true, .create = true, .truncate = true, .direct = direct}));
    HCACHE_RETURN_IF_ERROR(env_.remove_path(path));
    pool.taken.assign(options_.disk_bytes / block_bytes, false);
  }
  return {};
}

Result<int64_t> BlockStore::take_host(BlockKind kind) {
  if (options_.layout.block_bytes(kind) == 0) return int64_t{0};
  std::vector<int64_t>& idle = idle_host_[index(kind)];
  std::vector<HostBuffer>& blocks = host_[index(kind)];
  if (!idle.empty()) {
    const int64_t number = idle.back();
    idle.pop_back();
    return number;
  }
  // Memory that blocks of the other kind have left goes back first.
  const size_t other = index(kind == BlockKind::kKv ? BlockKind::kAct : BlockKind::kKv);
  if (!idle_host_[other].empty()) {
    host_[other][idle_host_[other].back()] = HostBuffer();
    empty_host_[other].push_back(idle_host_[other].back());
    idle_host_[other].pop_back();
  }
  HCACHE_ASSIGN_OR_RETURN(
      HostBuffer buffer,
      HostBuffer::make(device_, options_.layout.block_bytes(kind), "another block of 64 tokens"));
  std::vector<int64_t>& empty = empty_host_[index(kind)];
  if (empty.empty()) {
    empty.push_back(static_cast<int64_t>(blocks.size()));
    blocks.emplace_back();
  }
  const int64_t number = empty.back();
  empty.pop_back();
  blocks[number] = std::move(buffer);
  return number;
}

Result<int64_t> BlockStore::take_device(BlockKind kind) {
  std::vector<int64_t>& idle = idle_device_[index(kind)];
  if (!idle.empty()) {
    const int64_t number = idle.back();
    idle.pop_back();
    return number;
  }
  auto pool = std::make_unique<TensorPool>();
  pool->open(1);
  ggml_new_tensor_1d(pool->ctx(), GGML_TYPE_I8,
                     static_cast<int64_t>(options_.layout.block_bytes(kind)));
  HCACHE_RETURN_IF_ERROR(pool->allocate(device_.buffer_type(), "a block of a batch's cache"));
  device_blocks_[index(kind)].push_back(std::move(pool));
  return static_cast<int64_t>(device_blocks_[index(kind)].size()) - 1;
}

int64_t BlockStore::take_disk(BlockKind kind, int64_t neighbour) {
  DiskPool& pool = disk_[index(kind)];
  const auto n = static_cast<int64_t>(pool.taken.size());
  int64_t chosen = -1;
  if (neighbour >= 0 && neighbour + 1 < n && !pool.taken[neighbour + 1]) {
    chosen = neighbour + 1;
  } else {
    int64_t longest = 0;
    int64_t run = 0;
    for (int64_t i = 0; i < n; ++i) {
      run = pool.taken[i] ? 0 : run + 1;
      if (run > longest) {
        longest = run;
        chosen = i + 1 - run;
      }
    }
  }
  if (chosen >= 0) pool.taken[chosen] = true;
  return chosen;
}

void BlockStore::give_back(BlockKind kind, BlockPlace place, int64_t number) {
  if (options_.layout.block_bytes(kind) == 0) return;
  switch (place) {
    case BlockPlace::kHost: idle_host_[index(kind)].push_back(number); break;
    case BlockPlace::kDevice:
      idle_device_[index(kind)].push_back(number);
      device_bytes_ -= options_.layout.block_bytes(kind);
      break;
    case BlockPlace::kDisk:
      disk_[index(kind)].taken[number] = false;
      disk_bytes_ -= options_.layout.block_bytes(kind);
      break;
  }
}

Result<BlockStore::Id> BlockStore::add(BlockKind kind) {
  HCACHE_ASSIGN_OR_RETURN(const int64_t number, take_host(kind));
  if (free_ids_.empty()) {
    free_ids_.push_back(static_cast<Id>(blocks_.size()));
    blocks_.emplace_back();
  }
  const Id id = free_ids_.back();
  free_ids_.pop_back();
  blocks_[id] = {};
  blocks_[id].kind = kind;
  blocks_[id].number = number;
  blocks_[id].used = true;
  return id;
}

Status BlockStore::choose_place(Block& block, Id neighbour) {
  const size_t bytes = options_.layout.block_bytes(block.kind);
  if (device_bytes_ + bytes <= options_.device_bytes) {
    block.to = BlockPlace::kDevice;
    HCACHE_ASSIGN_OR_RETURN(block.to_number, take_device(block.kind));
    device_bytes_ += bytes;
    return {};
  }
  if (settled_host_bytes_ + bytes <= options_.host_bytes) {
    block.to = BlockPlace::kHost;
    settled_host_bytes_ += bytes;
    return {};
  }
  if (disk_bytes_ + bytes <= options_.disk_bytes) {
    int64_t beside = -1;
    if (neighbour >= 0 && blocks_[neighbour].kind == block.kind) {
      const Block& before = blocks_[neighbour];
      if (before.place == BlockPlace::kDisk) beside = before.number;
      if (before.moving && before.to == BlockPlace::kDisk) beside = before.to_number;
    }
    block.to_number = take_disk(block.kind, beside);
    if (block.to_number >= 0) {
      block.to = BlockPlace::kDisk;
      disk_bytes_ += bytes;
      return {};
    }
  }
  return resource_exhausted(fmt::format(
      "the cache of a batch is full: {} MiB on the device, {} in host memory, {} on "
      "disk; give it more of one, or batch fewer requests",
      options_.device_bytes >> 20, options_.host_bytes >> 20, options_.disk_bytes >> 20));
}

std::vector<PageTransfer> BlockStore::pages_to_write(const Block& block) const {
  const BlockLayout& layout = options_.layout;
  std::byte* data = host_[index(block.kind)][block.number].data();
  std::vector<PageTransfer> pages;
  for (int layer = layout.first_layer; layer < layout.n_layer; ++layer) {
    for (int part = 0; part < BlockLayout::parts(block.kind); ++part) {
      pages.push_back(
          {disk_[index(block.kind)].file.get(),
           file_offset(block, block.to_number, layer, part),
           {data + layout.offset(block.kind, layer, part), layout.page_bytes(block.kind, layer)}});
    }
  }
  return pages;
}

Status BlockStore::complete(Id id, Id neighbour) {
  Block& block = blocks_[id];
  if (options_.layout.block_bytes(block.kind) == 0) return {};
  HCACHE_RETURN_IF_ERROR(choose_place(block, neighbour));
  if (block.to == BlockPlace::kHost) {
    block.to_number = block.number;  // marks it as one that counts for host_bytes
    return {};
  }
  block.moving = true;
  Move move{.id = id};
  if (block.to == BlockPlace::kDisk) {
    move.write = io_->write(pages_to_write(block));
  } else {
    ggml_tensor* target =
        ggml_get_first_tensor(device_blocks_[index(block.kind)][block.to_number]->ctx());
    queue_.after_compute();
    move.upload = queue_.upload(target, 0, host_[index(block.kind)][block.number].data(),
                                ggml_nbytes(target));
  }
  moving_.push_back(move);
  return {};
}

void BlockStore::remove(Id id) {
  Block& block = blocks_[id];
  if (block.moving) {
    block.removed = true;
    return;
  }
  if (block.place == BlockPlace::kHost && block.to_number >= 0) {
    settled_host_bytes_ -= options_.layout.block_bytes(block.kind);
  }
  give_back(block.kind, block.place, block.number);
  block.used = false;
  free_ids_.push_back(id);
}

void BlockStore::end_move(Id id, bool moved) {
  Block& block = blocks_[id];
  block.moving = false;
  if (moved) {
    give_back(block.kind, BlockPlace::kHost, block.number);
    block.place = block.to;
    block.number = block.to_number;
  } else {
    give_back(block.kind, block.to, block.to_number);
  }
  block.to_number = -1;
  if (block.removed) remove(id);
}

Status BlockStore::settle(bool all) {
  std::map<BlockIo::Ticket, Status> written;
  if (io_ != nullptr) {
    for (BlockIo::Written& w : io_->take_written(all)) {
      written.emplace(w.ticket, std::move(w.status));
    }
  }
  Status first;
  std::erase_if(moving_, [&](const Move& move) {
    bool moved = true;
    if (move.write != 0) {
      const auto found = written.find(move.write);
      if (found == written.end()) return false;
      moved = found->second.ok();
      if (!moved && first.ok()) first = found->second;
    } else {
      queue_.wait(move.upload);
    }
    end_move(move.id, moved);
    return true;
  });
  if (first.code() == Code::kResourceExhausted) {
    return {first.code(), first.message() +
                              "; give the blocks on disk less room, or another "
                              "directory"};
  }
  return first;
}

std::byte* BlockStore::host_page(Id id, int layer, int part) const {
  const Block& block = blocks_[id];
  return host_[index(block.kind)][block.number].data() +
         options_.layout.offset(block.kind, layer, part);
}

ggml_tensor* BlockStore::device_block(Id id) const {
  const Block& block = blocks_[id];
  return ggml_get_first_tensor(device_blocks_[index(block.kind)][block.number]->ctx());
}

uint64_t BlockStore::file_offset(const Block& block, int64_t number, int layer, int part) const {
  const BlockLayout& layout = options_.layout;
  // The pages of a layer lie side by side, so that those of a sequence are read in one request.
  const uint64_t n_blocks = disk_[index(block.kind)].taken.size();
  return layout.offset(block.kind, layer, part) * n_blocks +
         static_cast<uint64_t>(number) * layout.page_bytes(block.kind, layer);
}

uint64_t BlockStore::file_offset(Id id, int layer, int part) const {
  return file_offset(blocks_[id], blocks_[id].number, layer, part);
}

HybridCacheUse BlockStore::use() const {
  HybridCacheUse use{.device_bytes = device_bytes_, .host_bytes = 0, .disk_bytes = disk_bytes_};
  for (const Block& block : blocks_) {
    if (block.used && block.place == BlockPlace::kHost) {
      use.host_bytes += options_.layout.block_bytes(block.kind);
    }
  }
  return use;
}

}  // namespace hcache::engine
