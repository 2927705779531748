// Pictures in prompts on libllama: the rows that libmtmd's own helper computes, in any steps; state
// taken and given back without a projector; tokens that tell pictures apart.
#include <gmock/gmock.h>
#include <llama.h>
#include <mtmd-helper.h>
#include <mtmd.h>

#include <algorithm>
#include <cmath>

#include "libllama/llama_engine.h"
#include "media_testing.h"
#include "model/chat.h"

namespace hcache::libllama {
namespace {

using hcache::testing::kMediaCases;
using hcache::testing::make_media_model;
using hcache::testing::MediaCase;
using hcache::testing::MediaModel;
using hcache::testing::picture;
using ::testing::HasSubstr;

constexpr int kRows = 128;  // of a step

std::string text_with(int n_pictures) {
  std::string text = "A picture of a ship: ";
  for (int i = 0; i < n_pictures; ++i) {
    text += std::string(model::kMediaMarker) + " and its harbour, number " + std::to_string(i);
  }
  return text;
}

class LibllamaMedia : public ::testing::TestWithParam<MediaCase> {
 protected:
  LibllamaMedia() : files_(make_media_model(dir_, GetParam())) {}

  [[nodiscard]] std::unique_ptr<LlamaEngine> load(int max_rows = kRows) const {
    LlamaOptions options;
    options.n_threads = 1;
    options.cells = 1024;
    options.max_batch_rows = max_rows;
    options.max_sequences = 3;
    options.projector.path = files_.projector;
    options.projector.digest = "a digest";
    auto engine = LlamaEngine::load(files_.model, options);
    EXPECT_TRUE(engine.ok()) << engine.status().to_string();
    return engine.ok() ? std::move(*engine) : nullptr;
  }
  static MediaPrompt prompt(const LlamaEngine& engine, const std::vector<std::string>& files) {
    auto prompt = engine.media()->tokenise(text_with(static_cast<int>(files.size())), files, false);
    EXPECT_TRUE(prompt.ok()) << prompt.status().to_string();
    return prompt.value_or({});
  }
  // Computes tokens from where the sequence is, in steps of so many rows at most.
  static std::vector<float> compute(LlamaEngine& engine, int32_t seq, const MediaPrompt& prompt,
                                    int64_t step) {
    std::vector<float> logits;
    const auto n = static_cast<int64_t>(prompt.tokens.size());
    engine.set_media(seq, prompt.rows);
    while (engine.length(seq) < n) {
      const int64_t from = engine.length(seq);
      const int64_t to = prompt.rows->step_end(from, std::min(from + step, n));
      const LlamaItem item = {
          .seq = seq,
          .tokens = std::span(prompt.tokens)
                        .subspan(static_cast<size_t>(from), static_cast<size_t>(to - from)),
          .n_logits = to == n ? 1 : 0,
          .chunks = prompt.chunks.get(),
          .logits = &logits};
      const Status status = engine.compute({&item, 1});
      EXPECT_TRUE(status.ok()) << status.to_string();
      if (!status.ok()) break;
    }
    return logits;
  }

  // What libmtmd's helper and libllama make of the prompt by themselves.
  [[nodiscard]] std::vector<float> by_libmtmd(const std::vector<std::string>& files) const;

  model::test::TempDir dir_;
  MediaModel files_;
};

std::vector<float> LibllamaMedia::by_libmtmd(const std::vector<std::string>& files) const {
  llama_model* model =
      llama_model_load_from_file(files_.model.c_str(), llama_model_default_params());
  llama_context_params params = llama_context_default_params();
  params.n_ctx = 1024;
  params.n_batch = params.n_ubatch = kRows;
  params.n_threads = params.n_threads_batch = 1;
  params.kv_unified = true;
  llama_context* context = llama_init_from_model(model, params);
  mtmd_context_params media = mtmd_context_params_default();
  media.use_gpu = false;
  media.print_timings = false;
  media.n_threads = 1;
  media.media_marker = model::kMediaMarker.data();
  mtmd_context* projector = mtmd_init_from_file(files_.projector.c_str(), model, media);
  std::vector<mtmd::bitmap_ptr> bitmaps;
  std::vector<const mtmd_bitmap*> pointers;
  for (const std::string& file : files) {
    bitmaps.emplace_back(mtmd_helper_bitmap_init_from_buf(
                             projector, reinterpret_cast<const unsigned char*>(file.data()),
                             file.size(), false, mtmd_helper_init_opt_default())
                             .bitmap);
    pointers.push_back(bitmaps.back().get());
  }
  const std::string text = text_with(static_cast<int>(files.size()));
  const mtmd_input_text input = {text.data(), text.size(), false, true};
  mtmd::input_chunks chunks(mtmd_input_chunks_init());
  EXPECT_EQ(mtmd_tokenize(projector, chunks.ptr.get(), &input, pointers.data(), pointers.size()),
            0);
  llama_pos end = 0;
  EXPECT_EQ(mtmd_helper_eval_chunks(projector, context, chunks.ptr.get(), 0, 0, kRows, true, &end),
            0);
  const float* row = llama_get_logits_ith(context, -1);
  std::vector<float> logits(row, row + llama_vocab_n_tokens(llama_model_get_vocab(model)));
  mtmd_free(projector);
  llama_free(context);
  llama_model_free(model);
  return logits;
}

void expect_near(const std::vector<float>& a, const std::vector<float>& b) {
  ASSERT_EQ(a.size(), b.size());
  float scale = 1;
  for (const float x : b) scale = std::max(scale, std::abs(x));
  for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 2e-3F * scale) << i;
}

TEST_P(LibllamaMedia, ComputesWhatLibmtmdComputes) {
  const std::vector<std::string> files = {picture(90, 60, 1), picture(40, 100, 2)};
  const std::vector<float> expected = by_libmtmd(files);
  const auto engine = load();
  ASSERT_NE(engine, nullptr);
  EXPECT_EQ(engine->layout().snapshots, GetParam().snapshots);
  const MediaPrompt whole = prompt(*engine, files);
  ASSERT_EQ(whole.rows->runs().size(), 2U);
  EXPECT_EQ(whole.rows->runs()[0].whole, GetParam().whole);
  expect_near(compute(*engine, 0, whole, kRows), expected);
  EXPECT_EQ(engine->media()->encoded(), 2);
  // In steps that end within pictures where they may.
  for (const int64_t step : {1, 7, 19}) {
    ASSERT_TRUE(engine->trim(1, 0).ok());
    expect_near(compute(*engine, 1, whole, step), expected);
  }
  // The pictures decide about it.
  ASSERT_TRUE(engine->trim(1, 0).ok());
  const MediaPrompt other = prompt(*engine, {picture(90, 60, 3), files[1]});
  const std::vector<float> otherwise = compute(*engine, 1, other, kRows);
  float most = 0;
  for (size_t i = 0; i < otherwise.size(); ++i) {
    most = std::max(most, std::abs(otherwise[i] - expected[i]));
  }
  EXPECT_GT(most, 1e-2F);
}

// Two pictures beside a text, each a sequence of its own in the same steps.
TEST_P(LibllamaMedia, SequencesShareSteps) {
  const auto engine = load();
  ASSERT_NE(engine, nullptr);
  const MediaPrompt a = prompt(*engine, {picture(90, 60, 1)});
  const MediaPrompt b = prompt(*engine, {picture(50, 50, 2)});
  const std::vector<float> alone_a = compute(*engine, 0, a, kRows);
  const std::vector<float> alone_b = compute(*engine, 1, b, kRows);
  for (const int32_t seq : {0, 1}) ASSERT_TRUE(engine->trim(seq, 0).ok());
  std::vector<float> logits_a, logits_b, logits_c;
  engine->set_media(0, a.rows);
  engine->set_media(1, b.rows);
  const std::vector<int32_t> text(20, 7);
  const LlamaItem items[] = {
      {.seq = 0, .tokens = a.tokens, .n_logits = 1, .chunks = a.chunks.get(), .logits = &logits_a},
      {.seq = 2, .tokens = text, .n_logits = 20, .logits = &logits_c},
      {.seq = 1, .tokens = b.tokens, .n_logits = 1, .chunks = b.chunks.get(), .logits = &logits_b}};
  const Status status = engine->compute(items);
  ASSERT_TRUE(status.ok()) << status.to_string();
  expect_near(logits_a, alone_a);
  expect_near(logits_b, alone_b);
  EXPECT_EQ(logits_c.size(), 20 * logits_a.size());
}

// Rows, and a snapshot where there is one, go to another sequence, which has no pictures to compute
// and goes on with the same bits.
TEST_P(LibllamaMedia, StateComesBackWithoutAProjector) {
  const auto engine = load();
  ASSERT_NE(engine, nullptr);
  const MediaPrompt prompt =
      LibllamaMedia::prompt(*engine, {picture(90, 60, 1), picture(80, 80, 2)});
  compute(*engine, 0, prompt, 19);
  const auto n = static_cast<int64_t>(prompt.tokens.size());
  const StateLayout& layout = engine->layout();
  std::vector<std::byte> rows(layout.token_bytes() * static_cast<size_t>(n));
  ASSERT_TRUE(engine->read_rows(0, 0, n, rows).ok());
  engine->set_media(2, prompt.rows);
  ASSERT_TRUE(engine->make_rows(2, prompt.tokens).ok());
  size_t at = 0;
  for (size_t tensor = 0; tensor < layout.row_bytes.size(); ++tensor) {
    // Not all at once: rows of a picture come in pages.
    const size_t row = layout.row_bytes[tensor];
    for (int64_t first = 0; first < n; first += 10) {
      const auto some = static_cast<size_t>(std::min<int64_t>(10, n - first)) * row;
      ASSERT_TRUE(engine->write_rows(2, tensor, first, std::span(rows).subspan(at, some)).ok());
      at += some;
    }
  }
  if (layout.snapshots) {
    const auto snapshot = engine->snapshot(0);
    ASSERT_TRUE(snapshot.ok());
    const Status loaded = engine->load_snapshot(2, n, *snapshot);
    ASSERT_TRUE(loaded.ok()) << loaded.to_string();
  }
  std::vector<std::byte> again(rows.size());
  ASSERT_TRUE(engine->read_rows(2, 0, n, again).ok());
  EXPECT_EQ(rows, again);
  const int64_t encoded = engine->media()->encoded();
  const std::vector<int32_t> next = {11, 12, 13};
  std::vector<float> before, behind;
  for (const auto& [seq, logits] : {std::pair{0, &before}, std::pair{2, &behind}}) {
    const LlamaItem item = {.seq = seq, .tokens = next, .n_logits = 3, .logits = logits};
    ASSERT_TRUE(engine->compute({&item, 1}).ok());
  }
  EXPECT_EQ(before, behind);
  EXPECT_EQ(engine->media()->encoded(), encoded);
}

TEST_P(LibllamaMedia, SequencesAreCutBesidePictures) {
  const auto engine = load();
  ASSERT_NE(engine, nullptr);
  const MediaPrompt prompt =
      LibllamaMedia::prompt(*engine, {picture(90, 60, 1), picture(80, 80, 2)});
  const std::vector<float> expected = compute(*engine, 0, prompt, kRows);
  const MediaRun& last = prompt.rows->runs().back();
  // Behind the second picture, and once more from there.
  if (engine->shortest(0) <= last.end()) {
    ASSERT_TRUE(engine->copy(0, 1, last.end()).ok());
    expect_near(compute(*engine, 1, prompt, kRows), expected);
    ASSERT_TRUE(engine->trim(0, last.first).ok());
    EXPECT_EQ(engine->length(0), last.first);
    expect_near(compute(*engine, 0, prompt, kRows), expected);
  }
  // In the middle of one: that works, or leaves nothing.
  const Status cut = engine->trim(0, last.first + 2);
  EXPECT_EQ(engine->length(0), cut.ok() ? last.first + 2 : 0);
  if (!GetParam().whole) expect_near(compute(*engine, 0, prompt, kRows), expected);
}

TEST_P(LibllamaMedia, TokensTellPicturesApart) {
  const auto engine = load();
  ASSERT_NE(engine, nullptr);
  const std::string a = picture(90, 60, 1);
  const std::string b = picture(90, 60, 2);
  const MediaPrompt one = prompt(*engine, {a});
  const MediaPrompt again = prompt(*engine, {a, b});
  const MediaPrompt other = prompt(*engine, {b, a});
  const MediaPrompt twice = prompt(*engine, {a, a});
  const auto first = [](const MediaPrompt& p, size_t run) {
    const MediaRun& r = p.rows->runs()[run];
    return std::vector<int32_t>(p.tokens.begin() + r.first, p.tokens.begin() + r.end());
  };
  EXPECT_TRUE(std::ranges::all_of(first(one, 0), [](int32_t token) { return token < 0; }));
  EXPECT_EQ(first(one, 0), first(again, 0));
  EXPECT_NE(first(one, 0), first(other, 0));
  EXPECT_NE(first(twice, 0), first(twice, 1));
  EXPECT_EQ(first(twice, 0), first(one, 0));
  EXPECT_TRUE(std::equal(one.tokens.begin(), one.tokens.begin() + one.rows->runs()[0].end(),
                         again.tokens.begin()));
}

TEST_P(LibllamaMedia, WhatCantBeTakenIsNamed) {
  const auto engine = load();
  ASSERT_NE(engine, nullptr);
  const MediaReader& media = *engine->media();
  EXPECT_TRUE(media.takes_pictures());
  EXPECT_FALSE(media.takes_sounds());
  const std::vector<std::string> good = {picture(30, 30, 1)};
  const auto none = media.tokenise("no place for it", good, false);
  EXPECT_EQ(none.code(), Code::kInvalidArgument);
  EXPECT_THAT(none.status().to_string(), HasSubstr("1 media"));
  for (const std::string& bad : {std::string("no picture"), std::string(), good[0].substr(0, 20)}) {
    const std::vector<std::string> files = {bad};
    const auto refused = media.tokenise(text_with(1), files, false);
    EXPECT_EQ(refused.code(), Code::kInvalidArgument);
    EXPECT_THAT(refused.status().to_string(), HasSubstr("medium 1"));
  }
  // Rows that nobody can make.
  const MediaPrompt some = prompt(*engine, good);
  engine->set_media(0, some.rows);
  std::vector<float> logits;
  const LlamaItem item = {.seq = 0, .tokens = some.tokens, .n_logits = 1, .logits = &logits};
  EXPECT_EQ(engine->compute({&item, 1}).code(), Code::kFailedPrecondition);
  EXPECT_EQ(engine->length(0), 0);
  engine->set_media(0, nullptr);
  EXPECT_EQ(engine->compute({&item, 1}).code(), Code::kInvalidArgument);
  if (!GetParam().whole) return;
  // A step that is too small for a picture.
  const auto small = load(/*max_rows=*/8);
  ASSERT_NE(small, nullptr);
  const auto too_large = small->media()->tokenise(text_with(1), good, false);
  EXPECT_EQ(too_large.code(), Code::kInvalidArgument);
  EXPECT_THAT(too_large.status().to_string(), HasSubstr("--batch 16"));
}

// Whatever a client sends is taken or refused.
TEST_P(LibllamaMedia, PicturesOfAnyShape) {
  const auto engine = load();
  ASSERT_NE(engine, nullptr);
  for (const auto& [width, height] : {std::pair{1, 1}, {1, 3000}, {3000, 1}, {7, 13}, {800, 600}}) {
    const std::vector<std::string> files = {picture(width, height, 4)};
    const auto taken = engine->media()->tokenise(text_with(1), files, false);
    if (!taken.ok()) {
      EXPECT_EQ(taken.code(), Code::kInvalidArgument) << taken.status().to_string();
      continue;
    }
    ASSERT_TRUE(engine->trim(0, 0).ok());
    EXPECT_FALSE(compute(*engine, 0, *taken, kRows).empty()) << width << " x " << height;
  }
  // Bytes that were changed at random.
  const std::string good = picture(30, 30, 1);
  uint32_t seed = 1;
  for (int round = 0; round < 300; ++round) {
    std::vector<std::string> files = {good};
    for (int k = 0; k < 4; ++k) {
      seed = seed * 1664525U + 1013904223U;
      files[0][(seed >> 8U) % 60] = static_cast<char>(seed >> 24U);
    }
    const auto taken = engine->media()->tokenise(text_with(1), files, false);
    EXPECT_TRUE(taken.ok() || taken.code() == Code::kInvalidArgument);
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, LibllamaMedia, ::testing::ValuesIn(kMediaCases),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(LibllamaProjector, OfAnotherModelIsRefused) {
  const model::test::TempDir dir;
  const MediaModel files = make_media_model(dir, kMediaCases[0]);
  LlamaOptions options;
  options.n_threads = 1;
  options.projector.path = files.model;
  const auto refused = LlamaEngine::load(files.model, options);
  EXPECT_EQ(refused.code(), Code::kDataLoss);
  EXPECT_THAT(refused.status().to_string(), HasSubstr("projector"));
  options.projector.path = dir.file("absent.gguf");
  EXPECT_EQ(LlamaEngine::load(files.model, options).code(), Code::kNotFound);
}

}  // namespace
}  // namespace hcache::libllama
