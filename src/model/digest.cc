#include "digest.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>

#include "base/xxh3.h"

namespace hcache::model {
namespace {

constexpr size_t kHashChunk = size_t{16} << 20;
// Raised when the digest's definition changes.
constexpr int kDigestVersion = 1;

std::string hex(XXH128_hash_t h) { return fmt::format("{:016x}{:016x}", h.high64, h.low64); }

struct StateFree {
  void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
};

// What a cached digest is valid for.
std::string identity_line(const GgufFile& file) {
  const FileIdentity& id = file.identity();
  return fmt::format("hcache-digest {} {} {} {} {}", kDigestVersion, id.size, id.mtime_ns,
                     id.device, id.inode);
}

}  // namespace

Result<std::string> digest_content(const GgufFile& file, const HParams& h,
                                   const Progress& progress) {
  const std::unique_ptr<XXH3_state_t, StateFree> state(XXH3_createState());
  if (state == nullptr || XXH3_128bits_reset(state.get()) == XXH_ERROR) {
    return resource_exhausted("no memory for a hash state");
  }
  const auto text = [&](const std::string& s) {
    XXH3_128bits_update(state.get(), s.data(), s.size());
  };
  text(fmt::format("hcache-model {}\n{} {} {} {} {} {} {} {} {} {} {:a} {:a} {}\n", kDigestVersion,
                   h.arch, h.n_vocab, h.n_layer, h.n_embd, h.n_head, h.n_head_kv, h.head_dim,
                   h.n_rot, h.n_ff, h.n_ctx_train, h.norm_eps, h.attention_scale,
                   h.position_offset));
  text(fmt::format("rope {:a} {:a} {} {:a} {:a} {:a} {:a}\n", h.rope_freq_base, h.rope_freq_scale,
                   h.rope_n_ctx_orig, h.rope_ext_factor, h.rope_attn_factor, h.rope_beta_fast,
                   h.rope_beta_slow));
  size_t total = 0;
  for (const GgufTensor& t : file.tensors()) total += t.data.size();
  size_t done = 0;
  for (const GgufTensor& t : file.tensors()) {
    text(fmt::format("{} {}\n", t.name, t.describe()));
    for (size_t at = 0; at < t.data.size(); at += kHashChunk) {
      const size_t size = std::min(kHashChunk, t.data.size() - at);
      XXH3_128bits_update(state.get(), t.data.data() + at, size);
      done += size;
      if (progress && !progress(static_cast<float>(done) / static_cast<float>(total))) {
        return cancelled(fmt::format("{}: hashing was cancelled", file.path()));
      }
    }
  }
  return hex(XXH3_128bits_digest(state.get()));
}

Result<std::string> cached_digest(const GgufFile& file, const HParams& hparams,
                                  const std::string& cache_dir, const Progress& progress) {
  if (cache_dir.empty()) return digest_content(file, hparams, progress);
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::path absolute = fs::absolute(file.path(), error);
  const std::string key = absolute.string();
  const fs::path entry =
      fs::path(cache_dir) / ("digest-" + hex(XXH3_128bits(key.data(), key.size())));
  {
    std::ifstream in(entry);
    std::string identity;
    std::string path;
    std::string digest;
    if (std::getline(in, identity) && std::getline(in, path) && std::getline(in, digest) &&
        identity == identity_line(file) && path == key && digest.size() == 32) {
      return digest;
    }
  }
  HCACHE_ASSIGN_OR_RETURN(std::string digest, digest_content(file, hparams, progress));
  if (!fs::exists(cache_dir, error) && fs::create_directories(cache_dir, error)) {
    fs::permissions(cache_dir, fs::perms::owner_all, error);
  }
  const fs::path temporary = entry.string() + fmt::format(".{}.tmp", getpid());
  {
    std::ofstream out(temporary, std::ios::trunc);
    fs::permissions(temporary, fs::perms::owner_read | fs::perms::owner_write, error);
    out << identity_line(file) << '\n' << key << '\n' << digest << '\n';
    if (!out.flush()) {
      fs::remove(temporary, error);
      return digest;
    }
  }
  fs::rename(temporary, entry, error);
  return digest;
}

}  // namespace hcache::model
