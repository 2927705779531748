#include "digest.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>

#include "base/env.h"
#include "base/xxh3.h"
#include "model/file_digest.h"

namespace hcache::model {
namespace {

constexpr size_t kHashChunk = size_t{16} << 20;
// Raised when the digest's definition changes.
constexpr int kDigestVersion = 1;
constexpr size_t kHexDigits = 32;
constexpr uintptr_t kPageBytes = 4096;

std::string hex(XXH128_hash_t h) { return fmt::format("{:016x}{:016x}", h.high64, h.low64); }

struct StateFree {
  void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
};

// Memory that is short takes these pages back first.
void mark_cold(std::span<const uint8_t> bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(bytes.data()) / kPageBytes * kPageBytes;
  const auto end = reinterpret_cast<uintptr_t>(bytes.data() + bytes.size());
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_COLD);
}

// What a cached digest is valid for.
std::string identity_line(const GgufFile& file) {
  std::string line = fmt::format("hcache-digest {}", kDigestVersion);
  for (const GgufPart& part : file.parts()) {
    const FileIdentity& id = part.identity;
    line += fmt::format(" {} {} {} {}", id.size, id.mtime_ns, id.device, id.inode);
  }
  return line;
}

using HashState = std::unique_ptr<XXH3_state_t, StateFree>;

Result<HashState> new_hash() {
  HashState state(XXH3_createState());
  if (state == nullptr || XXH3_128bits_reset(state.get()) == XXH_ERROR) {
    return resource_exhausted("no memory for a hash state");
  }
  return state;
}

void hash_text(const std::string& text, XXH3_state_t* state) {
  XXH3_128bits_update(state, text.data(), text.size());
}

// Every tensor's name, type, shape and bytes.
Status hash_tensors(const GgufFile& file, bool release_pages, const Progress& progress,
                    XXH3_state_t* state) {
  size_t total = 0;
  for (const GgufTensor& t : file.tensors()) total += t.data.size();
  size_t done = 0;
  for (const GgufTensor& t : file.tensors()) {
    hash_text(fmt::format("{} {}\n", t.name, t.describe()), state);
    for (size_t at = 0; at < t.data.size(); at += kHashChunk) {
      const size_t size = std::min(kHashChunk, t.data.size() - at);
      XXH3_128bits_update(state, t.data.data() + at, size);
      if (release_pages) mark_cold(t.data.subspan(at, size));
      done += size;
      if (progress && !progress(static_cast<float>(done) / static_cast<float>(total))) {
        return cancelled(fmt::format("{}: hashing was cancelled", file.path()));
      }
    }
  }
  return {};
}

// The digest that a small file in `cache_dir` keeps for this one, else what `compute` gives.
Result<std::string> through_cache(Env& env, const GgufFile& file, const std::string& cache_dir,
                                  std::string_view prefix,
                                  const std::function<Result<std::string>()>& compute) {
  if (cache_dir.empty()) return compute();
  std::error_code error;
  const std::string key = std::filesystem::absolute(file.path(), error).string();
  const std::string entry =
      join_path(cache_dir, std::string(prefix) + hex(XXH3_128bits(key.data(), key.size())));
  const std::string head = identity_line(file) + "\n" + key + "\n";
  if (const Result<std::string> known = read_whole_file(env, entry);
      known.ok() && known->starts_with(head) && known->size() == head.size() + kHexDigits + 1) {
    return known->substr(head.size(), kHexDigits);
  }
  HCACHE_ASSIGN_OR_RETURN(std::string digest, compute());
  Status kept = env.make_dirs(cache_dir);
  if (kept.ok()) kept = write_whole_file(env, entry, head + digest + "\n");
  kept.ignore("the digest is computed again next time");
  return digest;
}

}  // namespace

Result<std::string> digest_content(const GgufFile& file, const HParams& h, bool release_pages,
                                   const Progress& progress) {
  HCACHE_ASSIGN_OR_RETURN(const HashState state, new_hash());
  const auto text = [&](const std::string& s) { hash_text(s, state.get()); };
  text(fmt::format("hcache-model {}\n{} {} {} {} {} {} {} {} {} {} {:a} {:a} {}\n", kDigestVersion,
                   h.arch, h.n_vocab, h.n_layer, h.n_embd, h.n_head, h.n_head_kv, h.head_dim,
                   h.n_rot, h.n_ff, h.n_ctx_train, h.norm_eps, h.attention_scale,
                   h.position_offset));
  text(fmt::format("rope {:a} {:a} {} {:a} {:a} {:a} {:a}\n", h.rope_freq_base, h.rope_freq_scale,
                   h.rope_n_ctx_orig, h.rope_ext_factor, h.rope_attn_factor, h.rope_beta_fast,
                   h.rope_beta_slow));
  // What came later, where a model has it: digests of others stay what they were.
  if (h.embedding_scale != 1 || h.residual_scale != 1) {
    text(fmt::format("scales {:a} {:a}\n", h.embedding_scale, h.residual_scale));
  }
  if (const DecoderSpec* spec = find_decoder_spec(h.arch);
      spec != nullptr && spec->parallel == Parallel::kByKey) {
    text(fmt::format("parallel {}\n", h.parallel));
  }
  if (h.attention_soft_cap > 0) text(fmt::format("soft cap {:a}\n", h.attention_soft_cap));
  if (h.n_window > 0) {
    text(fmt::format("window {} {:a} ", h.n_window, h.window_freq_base));
    for (const uint8_t windowed : h.windowed) text(windowed != 0 ? "1" : "0");
    text("\n");
  }
  if (h.attention_temperature != 0) {
    text(fmt::format("temperature {:a}\n", h.attention_temperature));
  }
  if (h.n_expert > 0) {
    text(fmt::format("experts {} {} {} {:a}\n", h.n_expert_used, h.n_ff_shared, h.n_dense_layers,
                     h.expert_scale));
  }
  HCACHE_RETURN_IF_ERROR(hash_tensors(file, release_pages, progress, state.get()));
  return hex(XXH3_128bits_digest(state.get()));
}

Result<std::string> cached_digest(Env& env, const GgufFile& file, const HParams& hparams,
                                  const std::string& cache_dir, bool release_pages,
                                  const Progress& progress) {
  return through_cache(env, file, cache_dir, "digest-",
                       [&] { return digest_content(file, hparams, release_pages, progress); });
}

Result<std::string> file_digest(Env& env, const std::string& path, const std::string& cache_dir,
                                const Progress& progress) {
  HCACHE_ASSIGN_OR_RETURN(const auto file, GgufFile::open(path, env));
  return through_cache(env, *file, cache_dir, "file-digest-", [&]() -> Result<std::string> {
    HCACHE_ASSIGN_OR_RETURN(const HashState state, new_hash());
    hash_text(fmt::format("hcache-file {}\n", kDigestVersion), state.get());
    for (const auto& [key, value] : file->values()) {
      const bool of_text = key.starts_with("tokenizer.") || key.starts_with("general.");
      if (of_text && key != "general.architecture") continue;
      hash_text(fmt::format("{} {} {} {}\n", key, static_cast<int>(value.type),
                            static_cast<int>(value.item_type), value.count),
                state.get());
      XXH3_128bits_update(state.get(), value.bytes.data(), value.bytes.size());
    }
    HCACHE_RETURN_IF_ERROR(hash_tensors(*file, /*release_pages=*/true, progress, state.get()));
    return hex(XXH3_128bits_digest(state.get()));
  });
}

}  // namespace hcache::model
