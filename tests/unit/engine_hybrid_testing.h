// What the batch engine's tests share: a batch of requests, its run on an ordinary engine, and its
// run on the batch engine.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/hybrid_engine.h"
#include "engine_testing.h"
#include "model/logits.h"

namespace hcache::engine::testing {

// Prompts, and how many tokens each one's reply has.
struct BatchOfRequests {
  std::vector<Tokens> prompts;
  int n_new = 0;
};

// The rows that each request's tokens were chosen from.
using Replies = std::vector<std::vector<Row>>;

inline BatchOfRequests mixed_batch(const model::Model& model, int n, int shortest, int longest,
                                   int n_new, unsigned seed = 1) {
  std::mt19937 random(seed);
  BatchOfRequests batch{.prompts = {}, .n_new = n_new};
  for (int i = 0; i < n; ++i) {
    const int length = shortest + static_cast<int>(random() % (longest - shortest + 1));
    batch.prompts.push_back(random_tokens(model, length, 100 * seed + static_cast<unsigned>(i)));
  }
  return batch;
}

// All requests in one step at a time, everything resident.
inline Replies resident_replies(const model::Model& model, const BatchOfRequests& batch) {
  int64_t n_prompt = 0;
  for (const Tokens& prompt : batch.prompts) n_prompt += static_cast<int64_t>(prompt.size());
  const auto n = static_cast<int64_t>(batch.prompts.size());
  const auto engine = make_engine(model, {.arena_tokens = n_prompt + n * (batch.n_new + 64),
                                          .max_batch_rows = static_cast<int>(n_prompt)});
  std::vector<SeqId> seqs;
  std::vector<Tokens> next = batch.prompts;
  for (size_t i = 0; i < batch.prompts.size(); ++i) seqs.push_back(new_sequence(*engine));
  Replies replies(batch.prompts.size());
  for (int step = 0; step < batch.n_new; ++step) {
    std::vector<BatchItem> items;
    for (size_t i = 0; i < seqs.size(); ++i) {
      items.push_back({.seq = seqs[i], .tokens = next[i]});
    }
    const Logits logits = engine->decode(items).value();
    for (size_t i = 0; i < seqs.size(); ++i) {
      replies[i].emplace_back(logits.rows[i].begin(), logits.rows[i].end());
      next[i] = {model::argmax(logits.rows[i])};
    }
  }
  return replies;
}

// Greedy replies of the batch engine; the requests are all there from the start.
inline Replies hybrid_replies(HybridEngine& engine, const BatchOfRequests& batch) {
  Replies replies(batch.prompts.size());
  std::map<RequestId, size_t> index;
  for (size_t i = 0; i < batch.prompts.size(); ++i) {
    const Tokens& prompt = batch.prompts[i];
    const auto id = engine.add(prompt, static_cast<int64_t>(prompt.size()) + batch.n_new);
    if (!id.ok()) {
      ADD_FAILURE() << id.status().to_string();
      return replies;
    }
    index[*id] = i;
  }
  while (!index.empty()) {
    const auto step = engine.step();
    if (!step.ok()) {
      ADD_FAILURE() << step.status().to_string();
      return replies;
    }
    for (const RequestLogits& row : step->rows) {
      std::vector<Row>& reply = replies[index.at(row.id)];
      reply.emplace_back(row.logits.begin(), row.logits.end());
      if (static_cast<int>(reply.size()) == batch.n_new) {
        HCACHE_EXPECT_OK(engine.remove(row.id));
        index.erase(row.id);
      } else {
        HCACHE_EXPECT_OK(engine.append(row.id, model::argmax(row.logits)));
      }
    }
  }
  return replies;
}

inline ::testing::AssertionResult same_replies(const Replies& a, const Replies& b) {
  if (a.size() != b.size()) return ::testing::AssertionFailure() << "other number of replies";
  for (size_t i = 0; i < a.size(); ++i) {
    const auto same = same_rows(a[i], b[i]);
    if (!same) return ::testing::AssertionFailure() << "request " << i << ": " << same.message();
  }
  return ::testing::AssertionSuccess() << "identical";
}

// Decisions that give every sequence so large a share of ACT blocks.
inline HybridDecisions act_share(double share) {
  HybridDecisions decisions;
  decisions.next_kind = [share](const BlockQuestion& asked) {
    const auto n = static_cast<double>(asked.n_act + asked.n_kv + 1);
    return static_cast<double>(asked.n_act) + 0.5 < share * n ? BlockKind::kAct : BlockKind::kKv;
  };
  return decisions;
}

}  // namespace hcache::engine::testing
