// Conversations with a tiny model, and the state that they leave.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "mixture_models.h"
#include "model/logits.h"
#include "model_fixtures.h"
#include "serving/serving.h"
#include "state/adapters.h"
#include "state/kept_state.h"
#include "test_device.h"

namespace hcache::serving::testing {

using model::test::make_mixture;
using model::test::make_tiny;
using model::test::Mixture;
using model::test::TempDir;
using model::test::tiny_options;
using scheduler::CacheUse;
using scheduler::SeqId;
using state::CostProfile;
using state::RuntimeOptions;

inline std::vector<int32_t> random_tokens(int n, uint32_t seed) {
  std::vector<int32_t> tokens(n);
  for (int32_t& token : tokens) {
    seed = seed * 1664525U + 1013904223U;
    token = static_cast<int32_t>((seed >> 8) % 200);
  }
  return tokens;
}

// Costs under which no method is out of the question.
inline CostProfile even_profile() {
  CostProfile profile;
  profile.layer.project = policy::CostCurve::affine(1e-5, 1e-6);
  profile.layer.load_kv = policy::CostCurve::affine(0, 1e-8);
  profile.layer.dense = policy::CostCurve::affine(1e-5, 6e-6);
  profile.layer.attn_per_key = policy::CostCurve::affine(0, 1e-10);
  profile.layer.hidden_bytes = 300;
  profile.layer.kv_bytes = 512;
  profile.read_bytes_per_s = 1e9;
  profile.gemm_flops_per_s = 1e10;
  return profile;
}

inline RuntimeOptions tiny_runtime(const std::string& model, const std::string& state_dir) {
  RuntimeOptions options;
  options.model_path = model;
  options.device = hcache::testing::test_device();
  options.state_dir = state_dir;
  options.n_threads = 1;
  options.engine.arena_tokens = 1024;
  options.engine.max_batch_rows = 96;
  options.saver.ring_bytes = 16U << 20;
  options.save = policy::SaveMode::kAll;
  options.profile = even_profile();
  // The tests that are run once more; see HcacheTest.cmake.
  const bool packs = std::getenv("HCACHE_TEST_PACK") != nullptr;
  options.pack = packs ? policy::PackMode::kOn : policy::PackMode::kOff;
  return options;
}

inline std::unique_ptr<Serving> open(const RuntimeOptions& runtime, Env& env = Env::real(),
                                     const policy::DraftLimits& draft = {}) {
  ServingOptions options;
  options.runtime = runtime;
  options.scheduler.reuse.cheap_tokens = 0;
  options.scheduler.draft = draft;
  auto serving = Serving::open(env, options);
  EXPECT_TRUE(serving.ok()) << serving.status().to_string();
  return serving.ok() ? std::move(serving).value() : nullptr;
}

// How a chain is taken up.
struct How {
  policy::Mode mode = policy::Mode::kPlan;
  bool save = true;
  CacheUse cache = CacheUse::kAll;
  std::string salt = {};
  std::optional<policy::TruncationLimits> truncation = {};
  std::vector<float> adapters = {};  // by how much each counts
  scheduler::MediaRef media = {};    // of the chain
  double kv_budget = 1;
};

// A chain that was computed, and the greedy answer to it, every token of which has its row.
struct Said {
  SeqId seq = scheduler::kNoSeq;  // idle
  std::vector<float> logits;      // of the chain's last token
  std::vector<int32_t> answer;
  scheduler::Outcome outcome;

  [[nodiscard]] policy::RestoreRecord record() const {
    return outcome.restores.empty() ? policy::RestoreRecord() : outcome.restores.back();
  }
};

inline Said say(Serving& serving, const std::vector<int32_t>& tokens, int n_answer,
                const How& how = {}) {
  Said said;
  scheduler::Request request;
  request.tokens = tokens;
  request.max_new_tokens = n_answer + 1;
  request.salt = state::budgeted(
      state::adapted(own_salt(how.salt), serving.runtime().card().adapters, how.adapters),
      how.kv_budget);
  request.save = how.save;
  request.cache = how.cache;
  request.restore.mode = how.mode;
  request.truncation = how.truncation;
  request.media = how.media;
  request.next = [&](std::span<const float> logits) -> Result<scheduler::NextToken> {
    if (said.logits.empty()) said.logits.assign(logits.begin(), logits.end());
    const bool stop = static_cast<int>(said.answer.size()) == n_answer;
    const int32_t token = model::argmax(logits);
    if (!stop) said.answer.push_back(token);
    return scheduler::NextToken{.token = token, .stop = stop, .finish_reason = {}};
  };
  auto outcome = serving.run(std::move(request));
  EXPECT_TRUE(outcome.ok()) << outcome.status().to_string();
  if (!outcome.ok()) return said;
  EXPECT_TRUE(outcome->status.ok()) << outcome->status.to_string();
  said.outcome = *outcome;
  said.seq = outcome->seq;
  return said;
}

// K and V of the first n rows of every layer, as far as it needs them.
inline std::vector<std::byte> read_state(Serving& serving, SeqId seq, int n) {
  std::vector<std::byte> state;
  const Status status = serving.on_engine([&](state::Runtime& runtime) -> Status {
    HCACHE_ASSIGN_OR_RETURN(state, runtime.engine().read_kv(seq, n));
    return {};
  });
  EXPECT_TRUE(status.ok()) << status.to_string();
  return state;
}

inline int64_t saved_tokens(Serving& serving, const std::vector<int32_t>& tokens,
                            const std::string& salt = "") {
  state::Runtime& runtime = serving.runtime();
  const auto match = runtime.store()->match(runtime.fingerprint(), own_salt(salt).id, tokens);
  EXPECT_TRUE(match.ok()) << match.status().to_string();
  return match.ok() ? static_cast<int64_t>(match->n_tokens) : -1;
}

// The uninterrupted run: a prompt, decoded rows, a question, an answer.
struct Reference {
  std::vector<int32_t> history;  // prompt and decoded tokens
  std::vector<int32_t> question;
  std::vector<std::byte> state;  // of the history
  Said said;                     // the question and its answer

  [[nodiscard]] std::vector<int32_t> all() const {
    std::vector<int32_t> tokens = history;
    tokens.insert(tokens.end(), question.begin(), question.end());
    return tokens;
  }
};

inline Reference hold_conversation(Serving& serving, int n_prompt, int n_decoded,
                                   const std::string& salt = "") {
  Reference ref;
  // Not the first sequence of the engine: a sequence's number must not pass for a position.
  say(serving, random_tokens(7, 3), 0);
  ref.history = random_tokens(n_prompt, 1);
  ref.question = random_tokens(20, 2);
  const Said begun = say(serving, ref.history, n_decoded, {.salt = salt});
  ref.history.insert(ref.history.end(), begun.answer.begin(), begun.answer.end());
  EXPECT_TRUE(serving.flush().ok());
  ref.state = read_state(serving, begun.seq, static_cast<int>(ref.history.size()));
  ref.said = say(serving, ref.all(), 8, {.salt = salt});
  EXPECT_EQ(ref.said.outcome.resident_tokens, static_cast<int64_t>(ref.history.size()));
  return ref;
}

struct Restored {
  Said said;
  policy::RestoreRecord record;
  std::vector<std::byte> state;
};

// In a process of its own.
inline Restored restore(const RuntimeOptions& options, const Reference& ref, const How& how) {
  Restored result;
  const auto serving = open(options);
  if (!serving) return result;
  result.said = say(*serving, ref.all(), 8, how);
  result.record = result.said.record();
  result.state = read_state(*serving, result.said.seq, static_cast<int>(ref.history.size()));
  EXPECT_TRUE(serving->close().ok());
  return result;
}

// Flips a bit of one page on disk, found by its bytes. Gives back the page's size.
inline size_t damage_page(const RuntimeOptions& options, const SaltId& salt,
                          const std::vector<int32_t>& tokens, size_t chunk,
                          const std::function<bool(const store::PageInfo&)>& which) {
  std::vector<std::byte> page;
  {
    const auto serving = open(options);
    state::Runtime& runtime = serving->runtime();
    const auto match = runtime.store()->match(runtime.fingerprint(), salt, tokens);
    const store::ChunkRef& ref = match->chunks.at(chunk).chunk;
    for (const store::PageInfo& info : ref.info().pages) {
      if (!which(info)) continue;
      auto reader = runtime.store()->new_reader({});
      const store::PageRequest request{ref, info.layer, info.encoding};
      EXPECT_TRUE((*reader)->submit({&request, 1}).ok());
      const auto view = (*reader)->next();
      page.assign(view->bytes.begin(), view->bytes.end());
      (*reader)->release(view->index);
    }
  }
  EXPECT_FALSE(page.empty());
  int found = 0;
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(options.state_dir + "/store")) {
    if (!entry.is_regular_file()) continue;
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    std::vector<char> bytes(std::filesystem::file_size(entry.path()));
    file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    const char* wanted = reinterpret_cast<const char*>(page.data());
    const auto at = std::search(bytes.begin(), bytes.end(), wanted, wanted + page.size());
    if (at == bytes.end()) continue;
    ++found;
    file.clear();
    file.seekp(at - bytes.begin() + static_cast<std::ptrdiff_t>(page.size() / 2));
    file.put(static_cast<char>(at[static_cast<std::ptrdiff_t>(page.size() / 2)] ^ 0x10));
  }
  EXPECT_EQ(found, 1);
  return page.size();
}
// Of hidden states, or of K and V, without a salt.
inline size_t damage_page(const RuntimeOptions& options, const std::vector<int32_t>& tokens,
                          size_t chunk, uint16_t layer, bool hidden) {
  return damage_page(options, own_salt("").id, tokens, chunk, [&](const store::PageInfo& page) {
    return page.layer == layer && store::is_hidden(page.encoding) == hidden;
  });
}

}  // namespace hcache::serving::testing
