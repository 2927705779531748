// Layers that hold fewer rows of a sequence than it has tokens: the bookkeeping, and steps over it.
#include <memory>
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

  s.erase_positions(seq, 5, 15);  // before the held rows
  resize(50);
  expect(20, 30);
  s.erase_positions(seq, 30, 40);  // among them
  resize(40);
  expect(20, 20);
  s.erase_positions(seq, 10, 25);  // from before to among them
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
