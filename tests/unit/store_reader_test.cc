// Reading pages: runs of them, the ring, host memory, slow links, readers in the background.
#include <algorithm>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "patience.h"
#include "store_fixture.h"

namespace hcache::store {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using hcache::test::eventually;
using hcache::test::Patience;

TEST_F(StoreTest, AdjacentPagesAreReadTogether) {
  open();
  // 16 chunks of 40 KiB pages: a layer is 640 KiB.
  const Chain chain(kModel, kSalt, tokens_of(1024), {8, {Encoding::kHiddenQ8_1}, 640});
  put(chain);
  auto match = store_->match(kModel, kSalt, chain.tokens());
  ASSERT_OK(match);
  ReaderOptions options;
  options.ring_bytes = 32 << 20;
  auto reader = store_->new_reader(options);
  ASSERT_OK(reader);
  const auto requests = requests_of(*match);
  ASSERT_OK((*reader)->submit(requests));
  for (std::size_t i = 0; i < requests.size(); ++i) {
    auto view = (*reader)->next();
    ASSERT_OK(view);
    ASSERT_OK(view->status);
    (*reader)->release(i);
  }
  const ReaderStats stats = (*reader)->stats();
  EXPECT_EQ(stats.pages, 128U);
  EXPECT_EQ(stats.page_bytes, chain.bytes());
  EXPECT_LE(stats.requests, 8U);
  EXPECT_LE(stats.disk_bytes, chain.bytes() + stats.requests * 8192);
  EXPECT_GT(stats.busy_s, 0);
}

TEST_F(StoreTest, HostMemoryServesWhatWasWrittenAndWhatWasRead) {
  const auto read = [&](const Chain& chain) {
    auto match = store_->match(kModel, kSalt, chain.tokens());
    EXPECT_OK(match);
    EXPECT_EQ(match->n_tokens, chain.tokens().size());
    auto reader = store_->new_reader({});
    EXPECT_OK(reader);
    const auto requests = requests_of(*match);
    EXPECT_OK((*reader)->submit(requests));
    for (std::size_t i = 0; i < requests.size(); ++i) {
      auto view = (*reader)->next();
      EXPECT_OK(view);
      EXPECT_OK(view->status);
      (*reader)->release(i);
    }
    EXPECT_EQ(read_back(*store_, *match).good, requests.size());  // with the right bytes
    return (*reader)->stats();
  };
  const Shape shape{4, {Encoding::kHiddenQ8_1}, 640};
  const Chain first(kModel, kSalt, tokens_of(512, 1), shape);
  const Chain second(kModel, kSalt, tokens_of(512, 2), shape);
  options_.dram_bytes = first.bytes() * 3 / 2;
  open();
  put(first);
  const ReaderStats written = read(first);
  EXPECT_EQ(written.dram_bytes, first.bytes());
  EXPECT_EQ(written.disk_bytes, 0U);
  EXPECT_EQ(written.page_bytes, first.bytes());

  open();  // another process: nothing is in memory
  const ReaderStats cold = read(first);
  EXPECT_EQ(cold.dram_bytes, 0U);
  EXPECT_GE(cold.disk_bytes, first.bytes());
  EXPECT_EQ(read(first).dram_bytes, first.bytes());

  put(second);  // more than fits: what was used longest ago goes
  EXPECT_EQ(read(second).dram_bytes, second.bytes());
  const ReaderStats pushed_out = read(first);
  EXPECT_LT(pushed_out.dram_bytes, first.bytes());
  EXPECT_GT(pushed_out.disk_bytes, 0U);
  auto stat = store_->stat();
  ASSERT_OK(stat);
  EXPECT_LE(stat->dram_bytes, options_.dram_bytes);
  EXPECT_GT(stat->dram_hits, 0U);
  EXPECT_GT(stat->dram_misses, 0U);

  ASSERT_OK(store_->remove({}));
  stat = store_->stat();
  ASSERT_OK(stat);
  EXPECT_EQ(stat->dram_bytes, 0U);
}

TEST_F(StoreTest, RingsLieWhereTheOwnerOfTheStoreSays) {
  struct Ring {
    AlignedBuffer memory;
    bool freed = false;
  };
  std::vector<std::shared_ptr<Ring>> rings;
  options_.new_ring = [&rings](std::size_t bytes) {
    auto ring = std::make_shared<Ring>();
    ring->memory = AlignedBuffer(bytes);
    rings.push_back(ring);
    return AlignedBuffer(ring->memory.span(), [ring] { ring->freed = true; });
  };
  open();
  const Chain chain(kModel, kSalt, tokens_of(256), {4, {Encoding::kHiddenQ8_1}, 640});
  put(chain);
  for (int round = 0; round < 3; ++round) {
    auto match = store_->match(kModel, kSalt, chain.tokens());
    ASSERT_OK(match);
    const auto requests = requests_of(*match);
    auto reader = store_->new_reader({.ring_bytes = 1 << 20});
    ASSERT_OK(reader);
    ASSERT_OK((*reader)->submit(requests));
    for (std::size_t i = 0; i < requests.size(); ++i) {
      auto view = (*reader)->next();
      ASSERT_OK(view);
      ASSERT_OK(view->status);
      const std::span<const std::byte> ring = rings.back()->memory.span();
      EXPECT_GE(view->bytes.data(), ring.data());
      EXPECT_LE(view->bytes.data() + view->bytes.size(), ring.data() + ring.size());
      (*reader)->release(i);
    }
  }
  ASSERT_EQ(rings.size(), 1U);  // the next reader gets the last one's
  EXPECT_FALSE(rings[0]->freed);
  store_.reset();
  EXPECT_TRUE(rings[0]->freed);
}

// Readers of several kinds take turns: to fault a ring in takes as long as to read it full.
TEST_F(StoreTest, RingsOfEverySizeAreKeptForTheNextReaders) {
  int made = 0;
  options_.new_ring = [&made](std::size_t bytes) {
    ++made;
    return AlignedBuffer(bytes);
  };
  open();
  for (int round = 0; round < 3; ++round) {
    std::vector<std::unique_ptr<PageReader>> readers;  // at the same time
    for (const std::uint64_t ring_bytes : {4 << 20, 4 << 20, 4 << 20, 2 << 20, 1 << 20, 1 << 20}) {
      auto reader = store_->new_reader({.ring_bytes = ring_bytes});
      ASSERT_OK(reader);
      readers.push_back(std::move(*reader));
    }
  }
  EXPECT_EQ(made, 6);
  auto reader = store_->new_reader({.ring_bytes = 512U << 20});
  ASSERT_OK(reader);
  reader->reset();
  ASSERT_OK(store_->new_reader({.ring_bytes = 512U << 20}));
  EXPECT_EQ(made, 8) << "so much memory does not lie idle";
}

// What a fast disk brings has to be checked: beside others no more of it than is soon wanted.
TEST_F(StoreTest, AReaderStaysAsFarAheadAsItIsTold) {
  open();
  // 8 layers of 640 KiB.
  const Chain chain(kModel, kSalt, tokens_of(1024), {8, {Encoding::kHiddenQ8_1}, 640});
  put(chain);
  auto match = store_->match(kModel, kSalt, chain.tokens());
  ASSERT_OK(match);
  constexpr std::uint64_t kAhead = 512 << 10;
  constexpr std::uint64_t kRequest = 128 << 10;
  auto reader = store_->new_reader(
      {.ring_bytes = 32 << 20, .request_bytes = kRequest, .ahead_bytes = kAhead});
  ASSERT_OK(reader);
  const auto requests = requests_of(*match);
  ASSERT_OK((*reader)->submit(requests));
  const auto take = [&](std::size_t i) {
    auto view = (*reader)->next();
    ASSERT_OK(view);
    ASSERT_OK(view->status);
    (*reader)->release(i);
  };
  std::size_t taken = 0;
  for (; taken < requests.size() / 2; ++taken) {
    take(taken);
    const ReaderStats stats = (*reader)->stats();
    const std::uint64_t unused = stats.requests * 8192;  // of the first and last blocks
    EXPECT_LE(stats.disk_bytes, stats.page_bytes + kAhead + kRequest + unused);
  }
  // Told that nobody else is there, it reads all of it though nobody takes any.
  (*reader)->set_ahead(UINT64_MAX);
  EXPECT_TRUE(eventually([&] { return (*reader)->stats().disk_bytes >= chain.bytes(); }));
  for (; taken < requests.size(); ++taken) take(taken);
  EXPECT_EQ((*reader)->stats().page_bytes, chain.bytes());
}

// Three threads that take turns, as an engine's do; counts what it was given.
class ThreeThreads {
 public:
  Share share() {
    return [this](std::size_t n, const std::function<void(std::size_t)>& each) {
      ++n_calls_;
      n_pages_ += n;
      std::vector<std::thread> threads;
      for (std::size_t t = 0; t < 3; ++t) {
        threads.emplace_back([&, t] {
          for (std::size_t i = t; i < n; i += 3) each(i);
        });
      }
      for (std::thread& thread : threads) thread.join();
    };
  }
  std::size_t n_calls() const { return n_calls_; }
  std::size_t n_pages() const { return n_pages_; }

 private:
  std::size_t n_calls_ = 0;
  std::size_t n_pages_ = 0;
};

TEST_F(StoreTest, WhoTakesPagesMayCheckThemWithThreadsOfTheirOwn) {
  open();
  // 4 layers of 16 pages of 40 KiB.
  const Chain chain(kModel, kSalt, tokens_of(1024), {4, {Encoding::kHiddenQ8_1}, 640});
  put(chain);
  constexpr std::size_t kPage = 64 * 640;
  damage(5 * kPage + 100);
  auto match = store_->match(kModel, kSalt, chain.tokens());
  ASSERT_OK(match);
  const auto requests = requests_of(*match);
  for (const bool waits : {true, false}) {
    ThreeThreads threads;
    ReaderOptions options;
    options.check_with = threads.share();
    auto reader = store_->new_reader(options);
    ASSERT_OK(reader);
    ASSERT_OK((*reader)->submit(requests));
    ASSERT_TRUE(eventually([&] { return (*reader)->stats().disk_bytes >= chain.bytes(); }));
    EXPECT_EQ(threads.n_calls(), 0U) << "nobody has taken a page";
    for (std::size_t i = 0; i < requests.size(); ++i) {
      std::optional<PageView> view;
      Patience patience("page " + std::to_string(i));
      while (!view && patience.lasts()) {
        auto got = waits ? (*reader)->next_within(1'000'000) : (*reader)->try_next();
        ASSERT_OK(got);
        view = std::move(*got);
      }
      ASSERT_TRUE(view);
      EXPECT_EQ(view->index, i);
      EXPECT_EQ(view->status.code(), i == 5 ? Code::kDataLoss : Code::kOk) << i;
      EXPECT_EQ(view->bytes.size(), i == 5 ? 0 : kPage);
      (*reader)->release(i);
    }
    EXPECT_EQ(threads.n_pages(), requests.size());
    EXPECT_LE(threads.n_calls(), 16U) << "several at a time";
  }
  ThreeThreads threads;
  ReaderOptions options;
  options.check_with = threads.share();
  const ReadBack back = read_back(*store_, *match, options);  // with the right bytes
  EXPECT_EQ(back.good, requests.size() - 1);
  EXPECT_EQ(back.failed.size(), 1U);
  EXPECT_EQ(threads.n_pages(), requests.size());
}

TEST_F(StoreTest, PreparedReadersHaveTheirRings) {
  int made = 0;
  options_.new_ring = [&made](std::size_t bytes) {
    ++made;
    return AlignedBuffer(bytes);
  };
  open();
  const ReaderOptions options{.ring_bytes = 2 << 20};
  store_->prepare_readers(3, options);
  EXPECT_EQ(made, 3);
  store_->prepare_readers(3, options);
  EXPECT_EQ(made, 3) << "they are there";
  std::vector<std::unique_ptr<PageReader>> readers;
  for (int i = 0; i < 4; ++i) {
    auto reader = store_->new_reader(options);
    ASSERT_OK(reader);
    readers.push_back(std::move(*reader));
    EXPECT_EQ(made, i < 3 ? 3 : 4);
  }
  store_->prepare_readers(1000, options);
  EXPECT_LE(made, 12) << "as many as are kept";
}

TEST_F(StoreTest, ASmallRingStillDeliversEverythingInAnyOrderOfLayers) {
  options_.dirs = {dir_ / "a", dir_ / "b", dir_ / "c"};
  open();
  const Chain chain(kModel, kSalt, tokens_of(1000),
                    {5, {Encoding::kHiddenQ8_1, Encoding::kKv}, 700});
  put(chain);
  auto match = store_->match(kModel, kSalt, chain.tokens());
  ASSERT_OK(match);
  auto requests = requests_of(*match);
  std::mt19937 random(1);
  for (int round = 0; round < 4; ++round) {
    ReaderOptions options;
    options.ring_bytes = 256 << 10;
    options.queue_depth = 1 + static_cast<std::uint32_t>(round) * 3;
    if (round % 2 == 1) options.ahead_bytes = 1;  // less than a page
    auto reader = store_->new_reader(options);
    ASSERT_OK(reader);
    ASSERT_OK((*reader)->submit(requests));
    std::vector<std::size_t> held;
    for (std::size_t i = 0; i < requests.size(); ++i) {
      auto view = (*reader)->next();
      ASSERT_OK(view);
      ASSERT_OK(view->status);
      EXPECT_EQ(view->bytes.size(), requests[i].chunk.info().tokens.size() * 700);
      held.push_back(i);
      if (held.size() == 2) {  // out of order
        (*reader)->release(held[1]);
        (*reader)->release(held[0]);
        held.clear();
      }
    }
    std::shuffle(requests.begin(), requests.end(), random);
  }
}

TEST_F(StoreTest, TheReaderReportsBadRequestsAndCanBeCancelled) {
  open();
  put(Chain(kModel, kSalt, tokens_of(100), {}));
  auto match = store_->match(kModel, kSalt, tokens_of(100));
  ASSERT_OK(match);
  auto reader = store_->new_reader({});
  ASSERT_OK(reader);
  std::vector<PageRequest> requests = {{match->chunks[0].chunk, 99, Encoding::kKv},
                                       {match->chunks[1].chunk, 1, Encoding::kHiddenQ8_1}};
  ASSERT_OK((*reader)->submit(requests));
  auto missing = (*reader)->next();
  ASSERT_OK(missing);
  EXPECT_EQ(missing->status.code(), Code::kNotFound);
  auto good = (*reader)->next();
  ASSERT_OK(good);
  EXPECT_OK(good->status);
  EXPECT_EQ((*reader)->next().code(), Code::kOutOfRange);
  const std::vector<PageRequest> none = {PageRequest{}};
  EXPECT_EQ((*reader)->submit(none).code(), Code::kInvalidArgument);
  (*reader)->cancel();
  EXPECT_EQ((*reader)->next().code(), Code::kCancelled);
  (*reader)->release(0);
  (*reader)->release(1);
}

TEST_F(StoreTest, TheSimulatedLinkIsNoFasterThanSaid) {
  open();
  const Chain chain(kModel, kSalt, tokens_of(512), {4, {Encoding::kHiddenQ8_1}, 512});
  put(chain);
  auto match = store_->match(kModel, kSalt, chain.tokens());
  ASSERT_OK(match);
  const auto requests = requests_of(*match);
  constexpr double kRate = 10e6;
  env_.set_read_bytes_per_s(kRate);
  auto reader = store_->new_reader({});
  ASSERT_OK(reader);
  const std::int64_t start = Env::real().monotonic_ns();
  ASSERT_OK((*reader)->submit(requests));
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    auto view = (*reader)->next();
    ASSERT_OK(view);
    ASSERT_OK(view->status);
    bytes += view->bytes.size();
    const double elapsed = static_cast<double>(Env::real().monotonic_ns() - start) / 1e9;
    EXPECT_GE(elapsed, static_cast<double>(bytes) / kRate - 1e-4);
    (*reader)->release(i);
  }
  EXPECT_GE((*reader)->stats().busy_s, static_cast<double>(bytes) / kRate - 1e-4);
}

TEST_F(StoreTest, NobodyWaitsForABackgroundReader) {
  open();
  const Chain chain(kModel, kSalt, tokens_of(256, 1), Shape{4, {Encoding::kHiddenQ8_1}, 512});
  put(chain);
  const auto match = store_->match(kModel, kSalt, chain.tokens());
  ASSERT_OK(match);
  const std::vector<PageRequest> pages = requests_of(*match);
  env_.set_read_bytes_per_s(1024);  // half a minute for a page
  auto urgent = store_->new_reader({});
  ASSERT_OK(urgent);
  ASSERT_OK((*urgent)->submit({pages.data(), 1}));
  // Until the urgent reader has asked, the other one may read.
  Patience patience("the urgent reader's first request");
  while ((*urgent)->stats().requests == 0 && patience.lasts()) {
  }
  ReaderOptions ahead;
  ahead.background = true;
  auto background = store_->new_reader(ahead);
  ASSERT_OK(background);
  ASSERT_OK((*background)->submit(pages));
  Env::real().sleep_ns(50'000'000);
  EXPECT_EQ((*background)->stats().requests, 0U);
  EXPECT_FALSE((*background)->try_next()->has_value());
}

TEST_F(StoreTest, ABackgroundReaderDeliversEverything) {
  options_.dirs = {dir_ / "a", dir_ / "b"};
  open();
  const Chain chain(kModel, kSalt, tokens_of(640, 1), Shape{4, {Encoding::kHiddenQ8_1}, 512});
  put(chain);
  const auto match = store_->match(kModel, kSalt, chain.tokens());
  ASSERT_OK(match);
  ReaderOptions ahead;
  ahead.background = true;
  ahead.request_bytes = 64 << 10;
  EXPECT_EQ(read_back(*store_, *match, ahead).good, 40U);
  env_.set_read_bytes_per_s(64e6);
  EXPECT_EQ(read_back(*store_, *match, ahead).good, 40U);
}

}  // namespace
}  // namespace hcache::store
