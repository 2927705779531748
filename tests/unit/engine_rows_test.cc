// Layers that hold fewer rows of a sequence than it has tokens: the bookkeeping, and steps over it.
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "engine_parts.h"
#include "engine_testing.h"
#include "tensor_pool.h"

namespace hcache::engine {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

TEST(HeldRows, FollowEveryChangeOfASequence) {
  Sequences s({0, 1, 0}, 100);
  EXPECT_EQ(s.n_groups(), 2);
  EXPECT_EQ(s.group_of(1), 1);
  const SeqId seq = s.add();
  const auto resize = [&](int64_t n) {
    ASSERT_TRUE(s.resize(seq, n).ok());
    s.set_length(seq, n);
  };
  const auto expect = [&](int64_t first_pos, int64_t n) {
    const HeldRows all = s.held(seq, 0);
    EXPECT_EQ(all.first_pos, 0);
    EXPECT_EQ(all.n_rows, s.length(seq));
    const HeldRows some = s.held(seq, 1);
    EXPECT_EQ(some.first_pos, first_pos);
    EXPECT_EQ(some.n_rows, n);
    EXPECT_EQ(some.end_pos(), s.length(seq));
    EXPECT_EQ(some.cell(first_pos), some.first_cell);
  };
  resize(40);
  expect(0, 40);
  const uint64_t before = s.epoch();
  s.drop_before(seq, 1, 30);
  EXPECT_NE(s.epoch(), before) << "steps look up their cells again";
  expect(30, 10);
  s.drop_before(seq, 1, 20);  // they are gone already
  expect(30, 10);
  EXPECT_EQ(s.free_cells(), 60) << "of the group that holds all";
  resize(60);
  expect(30, 30);

  // A sequence that fills the whole arena has room for the group that holds less.
  EXPECT_EQ(s.resize(seq, 101).status().code(), Code::kResourceExhausted);
  expect(30, 30);

  const auto erase = [&](int64_t from, int64_t to) {
    for (const int group : {0, 1}) s.erase_positions(seq, group, from, to);
  };
  erase(5, 15);  // before the held rows
  resize(50);
  expect(20, 30);
  erase(30, 40);  // among them
  resize(40);
  expect(20, 20);
  erase(10, 25);  // from before to among them
  resize(25);
  expect(10, 15);
  resize(4);  // nothing is left of them
  expect(4, 0);
  resize(6);
  expect(4, 2);
}

// A model whose middle layer holds the rows from a position on, in two ways to get there.
class FewerRows : public ::testing::Test {
 protected:
  static constexpr int kLayer = 1;  // the one that holds fewer

  static std::unique_ptr<EngineParts> parts() {
    const model::Model& model = tiny_model("llama", 2, GGML_TYPE_Q8_0);
    return EngineParts::create(model, {.arena_tokens = 200, .max_batch_rows = 64}, nullptr,
                               {0, 1, 0})
        .value();
  }
  static std::vector<Row> step(EngineParts& parts, SeqId seq, std::span<const int32_t> tokens) {
    StepState state;
    const BatchItem item{.seq = seq, .tokens = tokens, .output = Output::kAll};
    HCACHE_EXPECT_OK(parts.steps.prepare({&item, 1}, state));
    HCACHE_EXPECT_OK(parts.steps.run_layers(state, parts.model.hparams().n_layer));
    return copy(parts.steps.finish(state).value());
  }
  static Bytes rows(EngineParts& parts, SeqId seq, int layer, int64_t first, int64_t n) {
    const size_t half = static_cast<size_t>(n) * parts.stages.front().arena().row_bytes();
    Bytes bytes(2 * half);
    HCACHE_EXPECT_OK(parts.restore.read_kv(seq, layer, first, static_cast<int>(n), bytes.data(),
                                           bytes.data() + half));
    return bytes;
  }
};

TEST_F(FewerRows, StepsAttendWhatALayerHolds) {
  constexpr int64_t kFrom = 25;
  const std::unique_ptr<EngineParts> p = parts();
  const Tokens tokens = random_tokens(p->model, 40, 1);
  const Tokens more = random_tokens(p->model, 6, 2);
  const SeqId seq = p->sequences.add();
  step(*p, seq, tokens);
  std::vector<Bytes> kv;
  for (int layer = 0; layer < p->model.hparams().n_layer; ++layer) {
    const int64_t from = layer == kLayer ? kFrom : 0;
    kv.push_back(rows(*p, seq, layer, from, 40 - from));
  }
  const SeqId whole = p->rows.fork(seq, 40).value();
  const std::vector<Row> all_rows = step(*p, whole, more);
  HCACHE_EXPECT_OK(p->rows.release(whole));

  p->sequences.drop_before(seq, p->sequences.group_of(kLayer), kFrom);
  // Another sequence takes the cells that became free.
  const SeqId other = p->sequences.add();
  step(*p, other, std::span(tokens).first(40));
  const SeqId forked = p->rows.fork(seq, 40).value();
  const std::vector<Row> fewer = step(*p, seq, more);
  EXPECT_FALSE(same_rows(fewer, all_rows)) << "the layer attends the rows it has given up";
  EXPECT_TRUE(same_rows(step(*p, forked, more), fewer)) << "a copy holds the same rows";

  // The same rows, loaded.
  const SeqId loaded = p->sequences.add();
  HCACHE_EXPECT_OK(p->rows.reserve(loaded, 40));
  p->sequences.drop_before(loaded, p->sequences.group_of(kLayer), kFrom);
  for (int layer = 0; layer < p->model.hparams().n_layer; ++layer) {
    const int64_t from = layer == kLayer ? kFrom : 0;
    const Bytes& bytes = kv[layer];
    const auto ticket = p->restore.load_kv(loaded, layer, from, static_cast<int>(40 - from),
                                           bytes.data(), bytes.data() + bytes.size() / 2);
    ASSERT_TRUE(ticket.ok()) << ticket.status().to_string();
    p->restore.wait(*ticket);
  }
  EXPECT_TRUE(same_rows(step(*p, loaded, more), fewer));
  EXPECT_EQ(
      p->restore.load_kv(loaded, kLayer, kFrom - 1, 1, kv[0].data(), kv[0].data()).status().code(),
      Code::kOutOfRange)
      << "rows that the layer does not hold";
}

// With one row left of the past, a layer attends that and the new ones alone: then the tokens of
// the rows that are gone have no say in it.
TEST_F(FewerRows, RowsThatAreGoneHaveNoSay) {
  const std::unique_ptr<EngineParts> p = parts();
  const Tokens tokens = random_tokens(p->model, 40, 1);
  const Tokens more = random_tokens(p->model, 3, 2);
  const SeqId seq = p->sequences.add();
  step(*p, seq, tokens);
  p->sequences.drop_before(seq, p->sequences.group_of(kLayer), 39);
  const SeqId scribbled = p->rows.fork(seq, 40).value();
  const std::vector<Row> expected = step(*p, seq, more);
  // Whatever the cells before hold.
  const HeldRows held = p->sequences.held(scribbled, p->sequences.group_of(kLayer));
  for (ggml_tensor* arena :
       {p->stages.front().arena().k(kLayer), p->stages.front().arena().v(kLayer)}) {
    std::memset(arena->data, 0x7B, static_cast<size_t>(held.first_cell) * arena->nb[1]);
  }
  EXPECT_TRUE(same_rows(step(*p, scribbled, more), expected));
}

TEST_F(FewerRows, PositionsAreErasedFromWhatIsHeld) {
  const std::unique_ptr<EngineParts> p = parts();
  const Tokens tokens = random_tokens(p->model, 40, 1);
  const SeqId seq = p->sequences.add();
  step(*p, seq, tokens);
  const SeqId reference = p->rows.fork(seq, 40).value();
  p->sequences.drop_before(seq, p->sequences.group_of(kLayer), 20);
  HCACHE_EXPECT_OK(p->rows.erase_range(seq, 10, 30));
  HCACHE_EXPECT_OK(p->rows.erase_range(reference, 10, 30));
  const HeldRows held = p->sequences.held(seq, p->sequences.group_of(kLayer));
  EXPECT_EQ(held.first_pos, 10);
  EXPECT_EQ(held.n_rows, 10);
  EXPECT_EQ(rows(*p, seq, kLayer, 10, 10), rows(*p, reference, kLayer, 10, 10));
  EXPECT_EQ(rows(*p, seq, 0, 0, 20), rows(*p, reference, 0, 0, 20));
}

class KeptRowsTest : public ::testing::Test {
 protected:
  static std::unique_ptr<Engine> engine(ggml_type kv_type = GGML_TYPE_F16) {
    return Engine::create(tiny_model("llama", 2, GGML_TYPE_Q8_0), {.arena_tokens = 400,
                                                                   .kv_type = kv_type,
                                                                   .max_batch_rows = 64,
                                                                   .separate_layers = true})
        .value();
  }
  static std::vector<Row> step(Engine& engine, SeqId seq, std::span<const int32_t> tokens) {
    const BatchItem item{.seq = seq, .tokens = tokens, .output = Output::kAll};
    return copy(engine.decode({&item, 1}).value());
  }
  static std::pair<Bytes, Bytes> rows(Engine& engine, SeqId seq, int layer, int64_t first,
                                      int64_t n) {
    Bytes k(static_cast<size_t>(n) * engine.kv_row_bytes());
    Bytes v(k.size());
    HCACHE_EXPECT_OK(engine.read_kv(seq, layer, first, static_cast<int>(n), k.data(), v.data()));
    return {std::move(k), std::move(v)};
  }
  // The same rows for all heads.
  static std::vector<int32_t> for_heads(const Engine& engine, const std::vector<int32_t>& rows) {
    std::vector<int32_t> kept;
    for (int i = 0; i < engine.model().hparams().n_head_kv; ++i) {
      kept.insert(kept.end(), rows.begin(), rows.end());
    }
    return kept;
  }
  static std::vector<int32_t> range(int32_t from, int32_t to) {
    std::vector<int32_t> all(static_cast<size_t>(to - from));
    std::iota(all.begin(), all.end(), from);
    return all;
  }
};

TEST_F(KeptRowsTest, LayersOfTheirOwnComputeTheSame) {
  const auto apart = engine();
  const auto together = Engine::create(tiny_model("llama", 2, GGML_TYPE_Q8_0),
                                       {.arena_tokens = 400, .max_batch_rows = 64})
                            .value();
  const Tokens tokens = random_tokens(apart->model(), 40, 1);
  const SeqId a = apart->create_sequence().value();
  const SeqId b = together->create_sequence().value();
  EXPECT_TRUE(same_rows(step(*apart, a, tokens), step(*together, b, tokens)));
  EXPECT_EQ(together->keep_rows(b, 0, for_heads(*together, range(0, 8))).code(),
            Code::kFailedPrecondition);
}

TEST_F(KeptRowsTest, EachHeadHasTheRowsThatWereChosenForIt) {
  for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_Q8_0}) {
    const auto e = engine(type);
    const int heads = e->model().hparams().n_head_kv;
    ASSERT_GT(heads, 1);
    const Tokens tokens = random_tokens(e->model(), 40, 1);
    const SeqId seq = e->create_sequence().value();
    step(*e, seq, tokens);
    const auto [k, v] = rows(*e, seq, 1, 0, 40);
    std::vector<int32_t> kept;
    for (int head = 0; head < heads; ++head) {
      for (int i = 0; i < 9; ++i) kept.push_back(head + 3 * i);
    }
    HCACHE_EXPECT_OK(e->keep_rows(seq, 1, kept));
    const auto [few_k, few_v] = rows(*e, seq, 1, 31, 9);
    const size_t width = e->kv_row_bytes() / static_cast<size_t>(heads);
    for (size_t i = 0; i < kept.size(); ++i) {
      const size_t to = (i % 9) * e->kv_row_bytes() + i / 9 * width;
      const size_t from = static_cast<size_t>(kept[i]) * e->kv_row_bytes() + i / 9 * width;
      EXPECT_EQ(std::memcmp(few_k.data() + to, k.data() + from, width), 0) << i;
      EXPECT_EQ(std::memcmp(few_v.data() + to, v.data() + from, width), 0) << i;
    }
    const auto [other_k, other_v] = rows(*e, seq, 0, 0, 40);
    EXPECT_EQ(other_k.size(), 40 * e->kv_row_bytes()) << "the other layers hold all";
  }
}

// Attention has no order: which rows a layer keeps decides, not where they lie.
TEST_F(KeptRowsTest, StepsAttendWhatWasKept) {
  const auto e = engine();
  const Tokens tokens = random_tokens(e->model(), 40, 1);
  const Tokens more = random_tokens(e->model(), 6, 2);
  const SeqId seq = e->create_sequence().value();
  step(*e, seq, tokens);
  const SeqId all = e->fork_sequence(seq, 40).value();
  const SeqId kept_all = e->fork_sequence(seq, 40).value();
  for (int layer = 0; layer < e->n_layer(); ++layer) {
    HCACHE_EXPECT_OK(e->keep_rows(kept_all, layer, for_heads(*e, range(0, 40))));
  }
  const std::vector<Row> whole = step(*e, all, more);
  EXPECT_TRUE(same_rows(step(*e, kept_all, more), whole));
  HCACHE_EXPECT_OK(e->release_sequence(kept_all));

  // The kept rows, loaded into a sequence that never had others: at other positions, since nothing
  // but their number and content counts.
  std::vector<std::pair<Bytes, Bytes>> kv;
  for (int layer = 0; layer < e->n_layer(); ++layer) {
    std::vector<int32_t> kept = range(0, 5);
    for (const int32_t pos : range(20 + layer, 40)) kept.push_back(pos);
    HCACHE_EXPECT_OK(e->keep_rows(seq, layer, for_heads(*e, kept)));
    const auto n = static_cast<int64_t>(kept.size());
    kv.push_back(rows(*e, seq, layer, 40 - n, n));
  }
  const SeqId forked = e->fork_sequence(seq, 40).value();
  const std::vector<Row> fewer = step(*e, seq, more);
  EXPECT_FALSE(same_rows(fewer, whole));
  EXPECT_TRUE(same_rows(step(*e, forked, more), fewer)) << "a copy holds the same rows";
  const SeqId loaded = e->create_sequence().value();
  HCACHE_EXPECT_OK(e->reserve_rows(loaded, 40));
  for (int layer = 0; layer < e->n_layer(); ++layer) {
    const auto& [k, v] = kv[static_cast<size_t>(layer)];
    const auto n = static_cast<int>(k.size() / e->kv_row_bytes());
    const auto ticket = e->load_kv(loaded, layer, 0, n, k.data(), v.data());
    ASSERT_TRUE(ticket.ok());
    HCACHE_EXPECT_OK(e->wait(*ticket));
    HCACHE_EXPECT_OK(e->keep_rows(loaded, layer, for_heads(*e, range(0, n))));
  }
  EXPECT_TRUE(same_rows(step(*e, loaded, more), fewer));
}

// What would be kept, read without a change and loaded elsewhere, is what keep_rows() leaves.
TEST_F(KeptRowsTest, KeptRowsMoveToAnotherSequence) {
  const auto e = engine();
  const auto heads = static_cast<size_t>(e->model().hparams().n_head_kv);
  const Tokens tokens = random_tokens(e->model(), 40, 1);
  const Tokens more = random_tokens(e->model(), 6, 2);
  const SeqId seq = e->create_sequence().value();
  step(*e, seq, tokens);
  const SeqId loaded = e->create_sequence().value();
  HCACHE_EXPECT_OK(e->reserve_rows(loaded, 40));
  const SeqId whole = e->fork_sequence(seq, 40).value();
  const std::vector<Row> expected_whole = step(*e, whole, more);
  for (int layer = 0; layer < e->n_layer(); ++layer) {
    std::vector<int32_t> kept;
    for (size_t head = 0; head < heads; ++head) {
      for (int i = 0; i < 9; ++i) kept.push_back(static_cast<int32_t>(head) + layer + 3 * i);
    }
    Bytes k(9 * e->kv_row_bytes());
    Bytes v(k.size());
    HCACHE_EXPECT_OK(e->read_kept(seq, layer, kept, k.data(), v.data()));
    EXPECT_EQ(e->held_rows(seq, layer), 40);
    HCACHE_EXPECT_OK(e->load_kept(loaded, layer, 9, k.data(), v.data()));
    EXPECT_EQ(e->held_rows(loaded, layer), 9);
    EXPECT_EQ(e->load_kept(loaded, layer, 9, k.data(), v.data()).code(), Code::kFailedPrecondition);
    HCACHE_EXPECT_OK(e->keep_rows(seq, layer, kept));
  }
  EXPECT_EQ(e->shortest(loaded), 40);
  EXPECT_EQ(e->shortest(whole), 0);
  EXPECT_FALSE(same_rows(expected_whole, step(*e, seq, more)));
  EXPECT_TRUE(same_rows(step(*e, loaded, more), step(*e, e->fork_sequence(seq, 40).value(), more)));

  // It can be emptied, and is then as good as new.
  HCACHE_EXPECT_OK(e->trim_sequence(loaded, 0));
  EXPECT_EQ(e->shortest(loaded), 0);
  step(*e, loaded, tokens);
  EXPECT_TRUE(same_rows(step(*e, loaded, more), expected_whole));
}

TEST_F(KeptRowsTest, WhatLacksRowsStaysInOnePiece) {
  const auto e = engine();
  const Tokens tokens = random_tokens(e->model(), 40, 1);
  const SeqId seq = e->create_sequence().value();
  step(*e, seq, tokens);
  const std::vector<int32_t> kept = for_heads(*e, range(4, 20));
  HCACHE_EXPECT_OK(e->keep_rows(seq, 0, kept));
  EXPECT_EQ(e->keep_rows(seq, 0, kept).code(), Code::kFailedPrecondition);
  EXPECT_EQ(e->trim_sequence(seq, 39).code(), Code::kFailedPrecondition);
  EXPECT_EQ(e->fork_sequence(seq, 12).status().code(), Code::kFailedPrecondition);
  EXPECT_EQ(e->erase_range(seq, 5, 7).code(), Code::kFailedPrecondition);
  EXPECT_EQ(e->move_positions(seq, 0, 30, 2, 1).code(), Code::kFailedPrecondition);
  const BatchItem again{.seq = seq, .tokens = std::span(tokens).first(2), .first_pos = 38};
  EXPECT_EQ(e->prepare({&again, 1}).status().code(), Code::kFailedPrecondition);
  AttentionScores scores;
  EXPECT_EQ(e->observe({.seq = seq, .n_keys = 4}, &scores).code(), Code::kFailedPrecondition);
  const auto [k, v] = rows(*e, seq, 0, 38, 1);
  EXPECT_EQ(e->load_kv(seq, 0, 30, 1, k.data(), v.data()).status().code(),
            Code::kFailedPrecondition);
  HCACHE_EXPECT_OK(e->load_kv(seq, 1, 30, 1, k.data(), v.data()).status());
  // What comes behind is as free as ever.
  step(*e, seq, std::span(tokens).first(5));
  HCACHE_EXPECT_OK(e->trim_sequence(seq, 42));
  HCACHE_EXPECT_OK(e->trim_sequence(seq, 40));
}

TEST_F(KeptRowsTest, WrongRowsAreRefused) {
  const auto e = engine();
  const Tokens tokens = random_tokens(e->model(), 10, 1);
  const SeqId seq = e->create_sequence().value();
  step(*e, seq, tokens);
  const auto heads = static_cast<size_t>(e->model().hparams().n_head_kv);
  EXPECT_EQ(e->keep_rows(seq, 0, {}).code(), Code::kInvalidArgument);
  EXPECT_EQ(e->keep_rows(seq, 0, std::vector<int32_t>(heads + 1)).code(), Code::kInvalidArgument);
  EXPECT_EQ(e->keep_rows(seq, 0, for_heads(*e, {3, 3})).code(), Code::kInvalidArgument);
  EXPECT_EQ(e->keep_rows(seq, 0, for_heads(*e, {-1, 3})).code(), Code::kInvalidArgument);
  EXPECT_EQ(e->keep_rows(seq, 0, for_heads(*e, {3, 10})).code(), Code::kInvalidArgument);
  EXPECT_EQ(e->keep_rows(seq, 99, for_heads(*e, {3, 4})).code(), Code::kOutOfRange);
  EXPECT_EQ(e->keep_rows(seq + 1, 0, for_heads(*e, {3, 4})).code(), Code::kInvalidArgument);
  HCACHE_EXPECT_OK(e->trim_sequence(seq, 5));
}

TEST_F(KeptRowsTest, AttentionIsToldOfTheRowsThatAreAskedFor) {
  const auto e = engine();
  const Tokens tokens = random_tokens(e->model(), 60, 1);
  const SeqId seq = e->create_sequence().value();
  const SeqId other = e->create_sequence().value();
  AttentionScores scores;
  HCACHE_EXPECT_OK(
      e->observe({.seq = seq, .first_pos = 10, .end_pos = 50, .stride = 4, .n_keys = 30}, &scores));
  const SeqId plain = e->create_sequence().value();
  const std::vector<Row> expected = step(*e, plain, tokens);
  std::vector<Row> got;
  for (const auto& [from, n] : {std::pair{0, 5}, {5, 20}, {25, 1}, {26, 34}}) {
    const BatchItem items[] = {
        {.seq = other, .tokens = std::span(tokens).first(3), .output = Output::kLast},
        {.seq = seq, .tokens = std::span(tokens).subspan(from, n), .output = Output::kAll}};
    std::vector<Row> all = copy(e->decode(items).value());
    got.insert(got.end(), all.begin() + 1, all.end());
  }
  EXPECT_TRUE(same_rows(got, expected)) << "looking changes nothing";
  const model::HParams& hp = e->model().hparams();
  ASSERT_EQ(scores.tallies.size(), static_cast<size_t>(hp.n_layer * hp.n_head_kv));
  for (int layer = 0; layer < hp.n_layer; ++layer) {
    for (int head = 0; head < hp.n_head_kv; ++head) {
      const AttentionTally& tally = scores.at(layer, head);
      EXPECT_EQ(tally.n_rows, 10 * hp.n_head / hp.n_head_kv) << "rows 10, 14, ... 46";
      double seen = 0;
      for (int pos = 10; pos < 50; pos += 4) {
        seen += static_cast<double>(pos + 1) * (static_cast<double>(hp.n_head) / hp.n_head_kv);
      }
      EXPECT_EQ(tally.seen, seen);
      double weight = 0;
      for (int key = 0; key < 30; ++key) weight += static_cast<double>(tally.sum[key]);
      EXPECT_GT(weight, 0);
      EXPECT_LT(weight, static_cast<double>(tally.n_rows));
    }
  }
  const double before = scores.at(0, 0).seen;
  HCACHE_EXPECT_OK(e->observe({}, nullptr));
  step(*e, seq, std::span(tokens).first(5));
  EXPECT_EQ(scores.at(0, 0).seen, before);
  EXPECT_EQ(e->observe({.seq = 99, .n_keys = 4}, &scores).code(), Code::kInvalidArgument);
  EXPECT_EQ(e->observe({.seq = seq, .stride = 0, .n_keys = 4}, &scores).code(),
            Code::kInvalidArgument);
  const auto quantised = engine(GGML_TYPE_Q8_0);
  const SeqId there = quantised->create_sequence().value();
  EXPECT_EQ(quantised->observe({.seq = there, .n_keys = 4}, &scores).code(), Code::kUnimplemented);
}

// Behind a quantised tensor of its own a backend may take room for padding and clear it, beside its
// queues (CUDA does): here other rows lie there.
TEST(TensorInBlock, IsAViewOfTheBlock) {
  const auto device = open_device("cpu");
  TensorPool pool;
  pool.open(1);
  ggml_tensor* block = ggml_new_tensor_1d(pool.ctx(), GGML_TYPE_I8, 4096);
  HCACHE_EXPECT_OK(pool.allocate(device->buffer_type(), "a block"));
  ggml_context* ctx =
      ggml_init({.mem_size = 2 * ggml_tensor_overhead(), .mem_buffer = nullptr, .no_alloc = true});
  const ggml_tensor* t = tensor_in_block(ctx, block, 128, GGML_TYPE_Q8_0, 96, 3);
  EXPECT_EQ(t->view_src, block);
  EXPECT_EQ(t->buffer, block->buffer);
  EXPECT_EQ(static_cast<const std::byte*>(t->data),
            static_cast<const std::byte*>(block->data) + 128);
  EXPECT_EQ(t->ne[1], 3);
  ggml_free(ctx);
}

}  // namespace
}  // namespace hcache::engine
