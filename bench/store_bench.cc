// Writes a store, drops nothing from memory but reads with O_DIRECT, and prints both speeds as
// JSON.
//
//   store_bench DIR [MEGABYTES] [PAGE_BYTES_PER_TOKEN] [LAYERS]
//
// Before it times anything it reads everything back and compares. The pages have the shape of a
// restore: layer by layer, all chunks of a layer in order.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <thread>
#include <vector>

#include "base/units.h"
#include "store/store.h"

namespace hcache::store {
namespace {

struct Options {
  std::string dir;
  std::uint64_t bytes = 1ULL << 30;
  std::size_t row_bytes = 648;  // hidden in Q8_1, 576 wide
  std::uint16_t layers = 30;
};

constexpr std::size_t kBatchChunks = 16;

std::vector<std::byte> noise(std::size_t n, std::uint64_t seed) {
  std::vector<std::byte> out(n);
  std::uint64_t x = seed * 0x9e3779b97f4a7c15ULL + 1;
  for (std::size_t i = 0; i + 8 <= n; i += 8) {
    x = x * 6364136223846793005ULL + 1442695040888963407ULL;
    std::memcpy(out.data() + i, &x, 8);
  }
  return out;
}

struct Reading {
  double bytes_per_s = 0;
  ReaderStats stats;
};

Result<Reading> read_all(Env& env, Store& store, const std::vector<PageRequest>& requests,
                         const std::vector<std::vector<std::byte>>* expected) {
  HCACHE_ASSIGN_OR_RETURN(const auto reader, store.new_reader({}));
  const std::int64_t start = env.monotonic_ns();
  HCACHE_RETURN_IF_ERROR(reader->submit(requests));
  for (std::size_t i = 0; i < requests.size(); ++i) {
    HCACHE_ASSIGN_OR_RETURN(const PageView view, reader->next());
    HCACHE_RETURN_IF_ERROR(view.status);
    if (expected != nullptr) {
      const std::size_t chunk = requests[i].chunk.info().first_position / kChunkTokens;
      const auto& bytes = (*expected)[(chunk + requests[i].layer) % expected->size()];
      if (bytes.size() != view.bytes.size() ||
          std::memcmp(bytes.data(), view.bytes.data(), bytes.size()) != 0) {
        return internal_error("read back other bytes than were written");
      }
    }
    reader->release(view.index);
  }
  Reading out;
  out.stats = reader->stats();
  out.bytes_per_s = static_cast<double>(out.stats.page_bytes) * 1e9 /
                    static_cast<double>(env.monotonic_ns() - start);
  return out;
}

Status run(const Options& options) {
#ifndef NDEBUG
  std::fprintf(stderr, "store_bench: warning: not a release build\n");
#endif
  Env& env = Env::real();
  StoreOptions store_options;
  store_options.dirs = {join_path(options.dir, "store-bench")};
  HCACHE_RETURN_IF_ERROR(Store::destroy(env, store_options));
  HCACHE_ASSIGN_OR_RETURN(auto store, Store::open(env, store_options));

  const std::size_t page = options.row_bytes * kChunkTokens;
  const std::size_t chunks = std::max<std::size_t>(1, options.bytes / (page * options.layers));
  // A few dozen different pages are enough: nothing compresses or deduplicates below us.
  std::vector<std::vector<std::byte>> pages;
  for (std::uint64_t i = 0; i < 61; ++i) pages.push_back(noise(page, i));
  std::vector<std::int32_t> tokens(chunks * kChunkTokens);
  for (std::size_t i = 0; i < tokens.size(); ++i)
    tokens[i] = static_cast<std::int32_t>(i * 7 % 32000);

  const Fingerprint fingerprint = Hasher("store_bench").finish<Fingerprint>();
  const SaltId salt = salt_id("");
  ChunkId parent;
  std::vector<ChunkWrite> batch;
  std::uint64_t written = 0;
  std::int64_t write_ns = 0;
  for (std::size_t c = 0; c < chunks; ++c) {
    ChunkWrite& write = batch.emplace_back();
    write.tokens = std::span<const std::int32_t>(tokens).subspan(c * kChunkTokens, kChunkTokens);
    write.fingerprint = fingerprint;
    write.salt = salt;
    write.parent = parent;
    write.first_position = c * kChunkTokens;
    write.id = parent = chunk_id(fingerprint, salt, parent, write.tokens);
    for (std::uint16_t layer = 0; layer < options.layers; ++layer) {
      write.pages.push_back({layer, Encoding::kHiddenQ8_1, pages[(c + layer) % pages.size()]});
    }
    if (batch.size() < kBatchChunks && c + 1 < chunks) continue;
    const std::int64_t start = env.monotonic_ns();
    HCACHE_ASSIGN_OR_RETURN(const PutReport report, store->put(batch));
    write_ns += env.monotonic_ns() - start;
    written += report.page_bytes;
    batch.clear();
  }
  std::int64_t start = env.monotonic_ns();
  HCACHE_ASSIGN_OR_RETURN(Match match, store->match(fingerprint, salt, tokens));
  const std::int64_t match_ns = env.monotonic_ns() - start;
  if (match.n_tokens != tokens.size()) return internal_error("the chain does not match whole");
  std::vector<PageRequest> requests;
  for (std::uint16_t layer = 0; layer < options.layers; ++layer) {
    for (const MatchedChunk& chunk : match.chunks) {
      requests.push_back({chunk.chunk, layer, Encoding::kHiddenQ8_1});
    }
  }
  HCACHE_RETURN_IF_ERROR(read_all(env, *store, requests, &pages).status());
  std::vector<Reading> readings;
  for (int rep = 0; rep < 3; ++rep) {
    HCACHE_ASSIGN_OR_RETURN(Reading reading, read_all(env, *store, requests, nullptr));
    readings.push_back(reading);
  }
  std::sort(readings.begin(), readings.end(),
            [](const Reading& a, const Reading& b) { return a.bytes_per_s < b.bytes_per_s; });
  const ReaderStats& stats = readings[1].stats;
  HCACHE_ASSIGN_OR_RETURN(const double raw, measure_read_speed(env, options.dir));
  HCACHE_ASSIGN_OR_RETURN(const StoreStat stat, store->stat());
  fmt::print(
      "{{\"machine\":{{\"cpus\":{}}},\"bytes\":{},\"page_bytes\":{},\"layers\":{},\n"
      " \"write_bytes_per_s\":{:.0f},\"match_ms\":{:.3f},\n"
      " \"read_bytes_per_s\":{{\"min\":{:.0f},\"median\":{:.0f},\"max\":{:.0f}}},\n"
      " \"requests\":{},\"bytes_per_request\":{:.0f},\"disk_bytes_per_page_byte\":{:.4f},\n"
      " \"raw_read_bytes_per_s\":{:.0f},\n"
      " \"allocated_per_page_byte\":{:.4f},\"catalog_bytes\":{}}}\n",
      std::thread::hardware_concurrency(), written, page, options.layers,
      static_cast<double>(written) * 1e9 / static_cast<double>(write_ns),
      static_cast<double>(match_ns) / 1e6, readings[0].bytes_per_s, readings[1].bytes_per_s,
      readings[2].bytes_per_s, stats.requests,
      static_cast<double>(stats.disk_bytes) / static_cast<double>(stats.requests),
      static_cast<double>(stats.disk_bytes) / static_cast<double>(stats.page_bytes), raw,
      static_cast<double>(stat.allocated_bytes + stat.catalog_bytes + stat.record_bytes) /
          static_cast<double>(stat.page_bytes),
      stat.catalog_bytes);
  match = Match{};
  requests.clear();
  store.reset();
  return Store::destroy(env, store_options);
}

}  // namespace
}  // namespace hcache::store

int main(int argc, char** argv) {
  hcache::store::Options options;
  if (argc < 2 || argc > 5) {
    std::fprintf(stderr, "usage: store_bench DIR [MEGABYTES] [PAGE_BYTES_PER_TOKEN] [LAYERS]\n");
    return 2;
  }
  options.dir = argv[1];
  if (argc > 2) options.bytes = std::strtoull(argv[2], nullptr, 10) << 20;
  if (argc > 3) options.row_bytes = std::strtoull(argv[3], nullptr, 10);
  if (argc > 4) options.layers = static_cast<std::uint16_t>(std::strtoul(argv[4], nullptr, 10));
  if (options.row_bytes == 0 || options.layers == 0) return 2;
  const hcache::Status status = hcache::store::run(options);
  if (!status.ok()) std::fprintf(stderr, "store_bench: %s\n", status.to_string().c_str());
  return hcache::exit_code(status.code());
}
