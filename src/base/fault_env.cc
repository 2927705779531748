#include "base/fault_env.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace hcache {
namespace {

constexpr std::uint64_t kBlockBytes = 4096;
constexpr std::uint64_t kSectorBytes = 512;
constexpr std::int64_t kEpochNs = 1'700'000'000'000'000'000;

std::string parent_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

bool below(const std::string& path, const std::string& dir) {
  return path == dir || (path.starts_with(dir) && path.size() > dir.size() &&
                         (dir.ends_with('/') || path[dir.size()] == '/'));
}

}  // namespace

// A file's content, apart from its name.
struct FaultEnv::Node {
  // What happened since the last sync, in order.
  struct Pending {
    enum Kind { kWrite, kResize } kind = kWrite;
    std::uint64_t offset = 0;  // of kResize: the size
    std::vector<std::byte> bytes;
  };
  std::vector<std::byte> now;
  std::vector<std::byte> durable;
  std::vector<Pending> pending;
  std::set<std::uint64_t> blocks;  // that take space
  std::int64_t version = 0;        // changes of the content, in place of a time of change
  std::weak_ptr<char> open;        // as long as any File of it lives

  static void apply(std::vector<std::byte>* content, std::uint64_t offset,
                    std::span<const std::byte> bytes) {
    if (bytes.empty()) return;
    if (content->size() < offset + bytes.size()) content->resize(offset + bytes.size());
    std::memcpy(content->data() + offset, bytes.data(), bytes.size());
  }
  void write(std::uint64_t offset, std::span<const std::byte> bytes) {
    apply(&now, offset, bytes);
    ++version;
    pending.push_back({Pending::kWrite, offset, {bytes.begin(), bytes.end()}});
  }
  void resize(std::uint64_t size) {
    now.resize(size);
    ++version;
    pending.push_back({Pending::kResize, size, {}});
    blocks.erase(blocks.lower_bound((size + kBlockBytes - 1) / kBlockBytes), blocks.end());
  }
  void sync() {
    durable = now;
    pending.clear();
  }
};

// A copy: what happens to the file later does not show.
class FaultEnv::FaultMapping final : public FileMapping {
 public:
  FaultMapping(std::span<const std::byte> bytes, const FileIdentity& identity)
      : bytes_(bytes.size()), identity_(identity) {
    std::memcpy(bytes_.data(), bytes.data(), bytes.size());
  }
  [[nodiscard]] std::span<const std::byte> bytes() const override {
    return {bytes_.data(), bytes_.size()};
  }
  [[nodiscard]] const FileIdentity& identity() const override { return identity_; }

 private:
  AlignedBuffer bytes_;
  FileIdentity identity_;
};

class FaultEnv::FaultFile final : public File {
 public:
  FaultFile(FaultEnv& env, std::shared_ptr<Node> node, std::string path, bool direct, bool writable,
            std::uint64_t generation)
      : env_(env),
        node_(std::move(node)),
        path_(std::move(path)),
        direct_(direct),
        writable_(writable),
        generation_(generation),
        open_(node_->open.lock()) {
    if (open_ == nullptr) node_->open = open_ = std::make_shared<char>();
  }

  Result<std::size_t> read_at(std::uint64_t offset, std::span<std::byte> out) override {
    MutexLock lock(env_.mutex_);
    HCACHE_RETURN_IF_ERROR(usable());
    HCACHE_RETURN_IF_ERROR(aligned(offset, out));
    HCACHE_RETURN_IF_ERROR(readable());
    if (offset >= node_->now.size()) return std::size_t{0};
    const std::size_t n = std::min<std::size_t>(out.size(), node_->now.size() - offset);
    if (n > 0) std::memcpy(out.data(), node_->now.data() + offset, n);
    return n;
  }

  Status write_at(std::uint64_t offset, std::span<const std::byte> data) override {
    MutexLock lock(env_.mutex_);
    HCACHE_RETURN_IF_ERROR(usable());
    HCACHE_RETURN_IF_ERROR(aligned(offset, data));
    if (!writable_) return permission_denied(path_ + " is open for reading only");
    bool torn = false;
    const Status status = env_.change(&torn);
    if (torn) {
      // Some leading sectors may have made it.
      const std::uint64_t sectors = data.size() / kSectorBytes;
      const std::uint64_t kept = env_.next_random() % (sectors + 1) * kSectorBytes;
      node_->write(offset, data.first(kept));
    }
    HCACHE_RETURN_IF_ERROR(status);
    HCACHE_RETURN_IF_ERROR(env_.take_blocks(*node_, offset, data.size(), path_));
    node_->write(offset, data);
    return {};
  }

  Status sync() override {
    MutexLock lock(env_.mutex_);
    HCACHE_RETURN_IF_ERROR(usable());
    HCACHE_RETURN_IF_ERROR(env_.change());
    if (env_.failing_syncs_) return data_loss("cannot sync " + path_ + ": injected");
    node_->sync();
    return {};
  }

  Status truncate(std::uint64_t size) override {
    MutexLock lock(env_.mutex_);
    HCACHE_RETURN_IF_ERROR(usable());
    HCACHE_RETURN_IF_ERROR(env_.change());
    node_->resize(size);
    return {};
  }

  Status allocate(std::uint64_t offset, std::uint64_t length) override {
    MutexLock lock(env_.mutex_);
    HCACHE_RETURN_IF_ERROR(usable());
    HCACHE_RETURN_IF_ERROR(env_.change());
    HCACHE_RETURN_IF_ERROR(env_.take_blocks(*node_, offset, length, path_));
    if (node_->now.size() < offset + length) node_->resize(offset + length);
    return {};
  }

  Status punch_hole(std::uint64_t offset, std::uint64_t length) override {
    MutexLock lock(env_.mutex_);
    HCACHE_RETURN_IF_ERROR(usable());
    HCACHE_RETURN_IF_ERROR(env_.change());
    if (offset >= node_->now.size()) return {};
    length = std::min<std::uint64_t>(length, node_->now.size() - offset);
    node_->write(offset, std::vector<std::byte>(length));
    for (std::uint64_t b = (offset + kBlockBytes - 1) / kBlockBytes;
         b < (offset + length) / kBlockBytes; ++b) {
      node_->blocks.erase(b);
    }
    return {};
  }

  Result<std::uint64_t> size() override {
    MutexLock lock(env_.mutex_);
    HCACHE_RETURN_IF_ERROR(usable());
    return std::uint64_t{node_->now.size()};
  }

  Result<FileIdentity> identity() override {
    MutexLock lock(env_.mutex_);
    HCACHE_RETURN_IF_ERROR(usable());
    return present_identity();
  }

  Result<std::uint64_t> allocated_bytes() override {
    MutexLock lock(env_.mutex_);
    HCACHE_RETURN_IF_ERROR(usable());
    return node_->blocks.size() * kBlockBytes;
  }

  Result<std::unique_ptr<FileMapping>> map() override {
    MutexLock lock(env_.mutex_);
    HCACHE_RETURN_IF_ERROR(usable());
    HCACHE_RETURN_IF_ERROR(readable());
    if (node_->now.empty()) return invalid_argument(path_ + " is empty");
    return std::unique_ptr<FileMapping>(
        std::make_unique<FaultMapping>(node_->now, present_identity()));
  }

  [[nodiscard]] bool direct() const override { return direct_; }
  [[nodiscard]] const std::string& path() const override { return path_; }

 private:
  [[nodiscard]] Status readable() const HCACHE_REQUIRES(env_.mutex_) {
    if (env_.failing_reads_.empty() || path_.find(env_.failing_reads_) == std::string::npos) {
      return {};
    }
    return data_loss("cannot read " + path_ + ": injected");
  }
  [[nodiscard]] FileIdentity present_identity() const HCACHE_REQUIRES(env_.mutex_) {
    return {node_->now.size(), node_->version, 0, reinterpret_cast<std::uintptr_t>(node_.get())};
  }
  [[nodiscard]] Status usable() const HCACHE_REQUIRES(env_.mutex_) {
    HCACHE_RETURN_IF_ERROR(env_.alive(generation_));
    if (env_.vanished(path_)) return data_loss(path_ + " has vanished");
    return {};
  }
  [[nodiscard]] Status aligned(std::uint64_t offset, std::span<const std::byte> memory) const {
    if (!direct_) return {};
    if (offset % kDirectAlignment != 0 || memory.size() % kDirectAlignment != 0 ||
        reinterpret_cast<std::uintptr_t>(memory.data()) % kDirectAlignment != 0) {
      return invalid_argument("misaligned direct transfer on " + path_);
    }
    return {};
  }

  FaultEnv& env_;
  const std::shared_ptr<Node> node_;
  const std::string path_;
  const bool direct_;
  const bool writable_;
  const std::uint64_t generation_;
  std::shared_ptr<char> open_;
};

class FaultEnv::FaultLock final : public FileLock {
 public:
  FaultLock(FaultEnv& env, std::string path, std::uint64_t generation)
      : env_(env), path_(std::move(path)), generation_(generation) {}
  ~FaultLock() override {
    MutexLock lock(env_.mutex_);
    if (generation_ == env_.generation_) env_.locks_.erase(path_);
  }

 private:
  FaultEnv& env_;
  const std::string path_;
  const std::uint64_t generation_;
};

// Transfers happen when they are submitted; completions come back last one first.
class FaultEnv::FaultQueue final : public IoQueue {
 public:
  FaultQueue(FaultEnv& env, std::size_t depth) : env_(env), depth_(depth) {}

  Status submit(const IoRequest& request) override {
    if (done_.size() == depth_) return resource_exhausted("the I/O queue is full");
    std::size_t size = request.buffer.size();
    {
      MutexLock lock(env_.mutex_);
      if (env_.short_transfers_ && size > 1 && env_.next_random() % 2 == 0) {
        size = 1 + env_.next_random() % (size - 1);
        // A direct transfer stops between blocks, except at the end of a file; nothing at all would
        // be that end.
        if (request.file->direct()) {
          size = std::max(size / kDirectAlignment, std::size_t{1}) * kDirectAlignment;
        }
      }
    }
    IoCompletion done;
    done.tag = request.tag;
    if (request.op == IoOp::kRead) {
      const auto got = request.file->read_at(request.offset, request.buffer.first(size));
      done.status = got.status();
      if (got.ok()) done.bytes = *got;
    } else {
      done.status = request.file->write_at(request.offset, request.buffer.first(size));
      if (done.status.ok()) done.bytes = size;
    }
    done_.push_back(std::move(done));
    return {};
  }

  Status reap(bool /*block*/, std::vector<IoCompletion>* out) override {
    std::move(done_.rbegin(), done_.rend(), std::back_inserter(*out));
    done_.clear();
    return {};
  }

  [[nodiscard]] std::size_t in_flight() const override { return done_.size(); }
  [[nodiscard]] std::size_t depth() const override { return depth_; }
  [[nodiscard]] const char* name() const override { return "faulty"; }

 private:
  FaultEnv& env_;
  const std::size_t depth_;
  std::vector<IoCompletion> done_;
};

FaultEnv::FaultEnv(std::uint64_t seed) : random_(seed), dirs_{"/", "."} {}
FaultEnv::~FaultEnv() = default;

std::uint64_t FaultEnv::next_random() {  // splitmix64
  random_ += 0x9e3779b97f4a7c15ULL;
  std::uint64_t x = random_;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

Status FaultEnv::alive(std::uint64_t generation) const {
  if (power_cut_) return unavailable("the power is cut");
  if (generation != generation_) return unavailable("opened before the power was cut");
  return {};
}

Status FaultEnv::change(bool* torn) {
  HCACHE_RETURN_IF_ERROR(alive(generation_));
  ++changes_;
  if (cut_at_ != 0 && changes_ >= cut_at_) {
    power_cut_ = true;
    if (torn != nullptr) *torn = true;
    return unavailable("the power is cut");
  }
  return {};
}

bool FaultEnv::vanished(const std::string& path) const {
  return std::any_of(vanished_.begin(), vanished_.end(),
                     [&](const std::string& dir) { return below(path, dir); });
}

std::uint64_t FaultEnv::used_bytes() const {
  std::uint64_t sum = 0;
  for (const auto& [path, node] : names_) sum += node->blocks.size() * kBlockBytes;
  // Files that have lost their names take space as long as they are open.
  for (const auto& node : nameless_) {
    if (!node->open.expired()) sum += node->blocks.size() * kBlockBytes;
  }
  return sum;
}

Status FaultEnv::take_blocks(Node& node, std::uint64_t offset, std::uint64_t length,
                             const std::string& path) {
  if (length == 0) return {};
  std::vector<std::uint64_t> fresh;
  for (std::uint64_t b = offset / kBlockBytes; b <= (offset + length - 1) / kBlockBytes; ++b) {
    if (!node.blocks.contains(b)) fresh.push_back(b);
  }
  if (used_bytes() + fresh.size() * kBlockBytes > capacity_) {
    return resource_exhausted("cannot write " + path + ": no space left");
  }
  node.blocks.insert(fresh.begin(), fresh.end());
  return {};
}

void FaultEnv::cut_power_at(std::uint64_t n) {
  MutexLock lock(mutex_);
  cut_at_ = n == 0 ? 0 : changes_ + n;
}

bool FaultEnv::power_is_cut() const {
  MutexLock lock(mutex_);
  return power_cut_;
}

std::uint64_t FaultEnv::changes() const {
  MutexLock lock(mutex_);
  return changes_;
}

void FaultEnv::restart(Survivors survivors) {
  MutexLock lock(mutex_);
  auto survives = [&]() HCACHE_REQUIRES(mutex_) {
    if (survivors == Survivors::kSome) return next_random() % 2 == 0;
    return survivors == Survivors::kAll;
  };
  // Names first: those that changed since their directory was synced.
  Names names = durable_names_;
  for (const auto& [path, node] : durable_names_) {
    if (!names_.contains(path) && survives()) names.erase(path);
  }
  for (const auto& [path, node] : names_) {
    const auto before = durable_names_.find(path);
    if ((before == durable_names_.end() || before->second != node) && survives()) {
      names[path] = node;
    }
  }
  std::set<Node*> nodes;
  for (const auto& [path, node] : names) nodes.insert(node.get());
  for (Node* node : nodes) {
    std::vector<std::byte> content = node->durable;
    for (const Node::Pending& change : node->pending) {
      if (change.kind == Node::Pending::kResize) {
        if (survives()) content.resize(change.offset);
        continue;
      }
      for (std::uint64_t at = 0; at < change.bytes.size(); at += kSectorBytes) {
        const std::uint64_t n = std::min<std::uint64_t>(kSectorBytes, change.bytes.size() - at);
        if (survives()) {
          Node::apply(&content, change.offset + at, std::span(change.bytes).subspan(at, n));
        }
      }
    }
    node->now = std::move(content);
    node->blocks.clear();
    for (std::uint64_t b = 0; b * kBlockBytes < node->now.size(); ++b) node->blocks.insert(b);
    node->sync();
  }
  names_ = names;
  durable_names_ = std::move(names);
  locks_.clear();
  ++generation_;
  power_cut_ = false;
  cut_at_ = 0;
}

void FaultEnv::set_capacity(std::uint64_t bytes) {
  MutexLock lock(mutex_);
  capacity_ = bytes;
}

void FaultEnv::set_vanished(const std::string& dir, bool vanished) {
  MutexLock lock(mutex_);
  if (vanished) {
    vanished_.insert(dir);
  } else {
    vanished_.erase(dir);
  }
}

void FaultEnv::set_short_transfers(bool on) {
  MutexLock lock(mutex_);
  short_transfers_ = on;
}

void FaultEnv::set_failing_reads(const std::string& text) {
  MutexLock lock(mutex_);
  failing_reads_ = text;
}

void FaultEnv::set_failing_syncs(bool on) {
  MutexLock lock(mutex_);
  failing_syncs_ = on;
}

void FaultEnv::flip_bit(const std::string& path, std::uint64_t byte, unsigned bit) {
  MutexLock lock(mutex_);
  const auto at = names_.find(path);
  if (at == names_.end() || byte >= at->second->now.size()) die("flip_bit outside of " + path);
  at->second->now[byte] ^= static_cast<std::byte>(1U << bit);
  if (byte < at->second->durable.size()) {
    at->second->durable[byte] ^= static_cast<std::byte>(1U << bit);
  }
}

std::vector<std::string> FaultEnv::files() const {
  MutexLock lock(mutex_);
  std::vector<std::string> out;
  for (const auto& [path, node] : names_) out.push_back(path);
  return out;
}

Result<std::unique_ptr<File>> FaultEnv::open_file(const std::string& path,
                                                  const OpenOptions& options) {
  MutexLock lock(mutex_);
  HCACHE_RETURN_IF_ERROR(alive(generation_));
  auto at = names_.find(path);
  if (vanished(path) || (at == names_.end() && !options.create) ||
      (at == names_.end() && !dirs_.contains(parent_of(path)))) {
    return not_found("cannot open " + path + ": no such file");
  }
  if (at == names_.end()) {
    HCACHE_RETURN_IF_ERROR(change());
    at = names_.emplace(path, std::make_shared<Node>()).first;
  } else if (options.truncate) {
    HCACHE_RETURN_IF_ERROR(change());
    at->second->resize(0);
  }
  return std::unique_ptr<File>(std::make_unique<FaultFile>(*this, at->second, path, options.direct,
                                                           options.write, generation_));
}

Status FaultEnv::make_dirs(const std::string& path) {
  MutexLock lock(mutex_);
  HCACHE_RETURN_IF_ERROR(alive(generation_));
  if (vanished(path)) return not_found("cannot create " + path);
  for (std::string p = path; !dirs_.contains(p); p = parent_of(p)) {
    HCACHE_RETURN_IF_ERROR(change());
    dirs_.insert(p);
  }
  return {};
}

Result<std::vector<std::string>> FaultEnv::list_dir(const std::string& path) {
  MutexLock lock(mutex_);
  HCACHE_RETURN_IF_ERROR(alive(generation_));
  if (!dirs_.contains(path) || vanished(path)) return not_found("cannot list " + path);
  std::vector<std::string> out;
  for (const auto& [name, node] : names_) {
    if (parent_of(name) == path) out.push_back(name.substr(name.rfind('/') + 1));
  }
  return out;
}

Result<FileInfo> FaultEnv::file_info(const std::string& path) {
  MutexLock lock(mutex_);
  HCACHE_RETURN_IF_ERROR(alive(generation_));
  if (vanished(path)) return FileInfo{};
  if (dirs_.contains(path)) return FileInfo{true, true, 0, 0};
  const auto at = names_.find(path);
  if (at == names_.end()) return FileInfo{};
  return FileInfo{true, false, at->second->now.size(), at->second->blocks.size() * kBlockBytes};
}

Status FaultEnv::rename_file(const std::string& from, const std::string& to) {
  MutexLock lock(mutex_);
  HCACHE_RETURN_IF_ERROR(alive(generation_));
  const auto at = names_.find(from);
  if (at == names_.end() || vanished(from) || vanished(to)) {
    return not_found("cannot rename " + from);
  }
  HCACHE_RETURN_IF_ERROR(change());
  names_[to] = at->second;
  names_.erase(from);
  return {};
}

Status FaultEnv::remove_path(const std::string& path) {
  MutexLock lock(mutex_);
  HCACHE_RETURN_IF_ERROR(alive(generation_));
  if (vanished(path) || (!names_.contains(path) && !dirs_.contains(path))) {
    return not_found("cannot remove " + path);
  }
  HCACHE_RETURN_IF_ERROR(change());
  std::erase_if(nameless_, [](const auto& node) { return node->open.expired(); });
  if (const auto named = names_.find(path); named != names_.end()) {
    nameless_.push_back(named->second);
    names_.erase(named);
  }
  dirs_.erase(path);
  return {};
}

Status FaultEnv::sync_dir(const std::string& path) {
  MutexLock lock(mutex_);
  HCACHE_RETURN_IF_ERROR(alive(generation_));
  if (!dirs_.contains(path) || vanished(path)) return not_found("cannot sync " + path);
  HCACHE_RETURN_IF_ERROR(change());
  if (failing_syncs_) return data_loss("cannot sync " + path + ": injected");
  std::erase_if(durable_names_, [&](const auto& entry) { return parent_of(entry.first) == path; });
  for (const auto& [name, node] : names_) {
    if (parent_of(name) == path) durable_names_[name] = node;
  }
  return {};
}

Result<SpaceInfo> FaultEnv::space(const std::string& path) {
  MutexLock lock(mutex_);
  HCACHE_RETURN_IF_ERROR(alive(generation_));
  if (vanished(path)) return not_found("cannot stat " + path);
  const std::uint64_t used = used_bytes();
  return SpaceInfo{capacity_ > used ? capacity_ - used : 0, capacity_};
}

Result<std::unique_ptr<FileLock>> FaultEnv::lock_file(const std::string& path) {
  MutexLock lock(mutex_);
  HCACHE_RETURN_IF_ERROR(alive(generation_));
  if (vanished(path) || !dirs_.contains(parent_of(path))) return not_found("cannot open " + path);
  if (!locks_.insert(path).second) {
    return failed_precondition(fmt::format("{} is locked by process 1", path));
  }
  return std::unique_ptr<FileLock>(std::make_unique<FaultLock>(*this, path, generation_));
}

std::int64_t FaultEnv::monotonic_ns() {
  MutexLock lock(mutex_);
  return now_ns_ += 1000;
}

std::int64_t FaultEnv::wall_ns() { return kEpochNs + monotonic_ns(); }

void FaultEnv::sleep_ns(std::int64_t duration_ns) {
  MutexLock lock(mutex_);
  now_ns_ += std::max<std::int64_t>(0, duration_ns);
}

std::uint64_t FaultEnv::random_u64() {
  MutexLock lock(mutex_);
  return next_random();
}

Result<std::unique_ptr<IoQueue>> FaultEnv::new_io_queue(std::size_t depth) {
  return std::unique_ptr<IoQueue>(
      std::make_unique<FaultQueue>(*this, std::max<std::size_t>(depth, 1)));
}

}  // namespace hcache
