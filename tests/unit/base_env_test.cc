// The real Env, the fault-injecting one and the throttled one keep the same contract.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>

#include "../../src/base/posix_io.h"
#include "base/env.h"
#include "base/fault_env.h"
#include "base/throttled_env.h"
#include "base_testing.h"
#include "patience.h"

namespace hcache {
namespace {

using test::Patience;
using testing::TempDir;

std::vector<std::byte> bytes_of(std::size_t n, unsigned seed) {
  std::vector<std::byte> out(n);
  for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<std::byte>(i * 31 + seed + i / 255);
  return out;
}

OpenOptions for_writing(bool direct = false) {
  OpenOptions options;
  options.write = true;
  options.create = true;
  options.direct = direct;
  return options;
}

class EnvTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (std::string(GetParam()) == "real") {
      env_ = &Env::real();
      dir_ = temp_ / "x";
    } else if (std::string(GetParam()) == "throttled") {
      env_ = &throttled_;
      dir_ = temp_ / "x";
    } else {
      env_ = &fault_;
      dir_ = "/some/dir";
    }
    ASSERT_OK(env_->make_dirs(dir_));
  }
  TempDir temp_;
  FaultEnv fault_;
  ThrottledEnv throttled_{Env::real(), 100e6};
  Env* env_ = nullptr;
  std::string dir_;
};

TEST_P(EnvTest, FilesReadWhatWasWritten) {
  const std::string path = join_path(dir_, "file");
  EXPECT_EQ(env_->open_file(path, {}).code(), Code::kNotFound);
  auto file = env_->open_file(path, for_writing());
  ASSERT_OK(file);
  const auto data = bytes_of(10000, 3);
  ASSERT_OK((*file)->write_at(500, data));
  ASSERT_OK((*file)->sync());
  ASSERT_OK(env_->sync_dir(dir_));
  EXPECT_EQ(*(*file)->size(), 10500U);
  std::vector<std::byte> back(20000);
  auto got = (*file)->read_at(0, back);
  ASSERT_OK(got);
  EXPECT_EQ(*got, 10500U);
  EXPECT_EQ(back[0], std::byte{0});
  EXPECT_TRUE(std::equal(data.begin(), data.end(), back.begin() + 500));
  EXPECT_EQ(*(*file)->read_at(10500, back), 0U);
  ASSERT_OK((*file)->truncate(600));
  EXPECT_EQ(env_->file_info(path)->size, 600U);
  ASSERT_OK((*file)->allocate(0, 1 << 20));
  EXPECT_EQ(*(*file)->size(), 1U << 20);
  const std::uint64_t full = *(*file)->allocated_bytes();
  ASSERT_OK((*file)->punch_hole(4096, 65536));
  EXPECT_LE(*(*file)->allocated_bytes(), full);
  ASSERT_OK((*file)->read_at(4096, std::span(back).first(4096)));
  EXPECT_TRUE(std::all_of(back.begin(), back.begin() + 4096,
                          [](std::byte b) { return b == std::byte{0}; }));
}

TEST_P(EnvTest, MappingsShowTheWholeFile) {
  const std::string path = join_path(dir_, "file");
  auto file = env_->open_file(path, for_writing());
  ASSERT_OK(file);
  EXPECT_EQ((*file)->map().code(), Code::kInvalidArgument) << "it is empty";
  const auto data = bytes_of(10000, 3);
  ASSERT_OK((*file)->write_at(0, data));
  auto mapping = (*file)->map();
  ASSERT_OK(mapping);
  file->reset();  // the mapping needs no open file
  EXPECT_TRUE(std::ranges::equal((*mapping)->bytes(), data));
  const FileIdentity identity = (*mapping)->identity();
  EXPECT_EQ(identity.size, 10000U);

  // Another file of that name and size is another version.
  ASSERT_OK(write_whole_file(*env_, path, std::string(10000, 'x')));
  auto again = env_->open_file(path, {});
  ASSERT_OK(again);
  auto replaced = (*again)->map();
  ASSERT_OK(replaced);
  EXPECT_TRUE((*replaced)->identity().inode != identity.inode ||
              (*replaced)->identity().mtime_ns != identity.mtime_ns);
  EXPECT_TRUE(std::ranges::equal((*mapping)->bytes(), data)) << "of the file that was mapped";
}

TEST_P(EnvTest, NamesAreListedRenamedAndRemoved) {
  for (const char* name : {"b", "a"})
    ASSERT_OK(env_->open_file(join_path(dir_, name), for_writing()));
  EXPECT_EQ(*env_->list_dir(dir_), (std::vector<std::string>{"a", "b"}));
  ASSERT_OK(env_->rename_file(join_path(dir_, "a"), join_path(dir_, "c")));
  EXPECT_EQ(*env_->list_dir(dir_), (std::vector<std::string>{"b", "c"}));
  ASSERT_OK(env_->remove_path(join_path(dir_, "b")));
  EXPECT_EQ(env_->remove_path(join_path(dir_, "b")).code(), Code::kNotFound);
  EXPECT_FALSE(env_->file_info(join_path(dir_, "b"))->exists);
  EXPECT_TRUE(env_->file_info(dir_)->directory);
  EXPECT_EQ(env_->list_dir(dir_ + "/nothing").code(), Code::kNotFound);
  ASSERT_OK(write_whole_file(*env_, join_path(dir_, "text"), "hello\n"));
  EXPECT_EQ(*read_whole_file(*env_, join_path(dir_, "text")), "hello\n");
  EXPECT_GT(env_->space(dir_)->free_bytes, 0U);
}

TEST_P(EnvTest, LocksExclude) {
  const std::string path = join_path(dir_, "lock");
  auto first = env_->lock_file(path);
  ASSERT_OK(first);
  const auto second = env_->lock_file(path);
  EXPECT_EQ(second.code(), Code::kFailedPrecondition);
  EXPECT_NE(second.status().message().find(path), std::string::npos);
  first->reset();
  EXPECT_OK(env_->lock_file(path));
}

TEST_P(EnvTest, QueuesTransferBothWays) {
  auto file = env_->open_file(join_path(dir_, "queued"), for_writing(true));
  ASSERT_OK(file);
  auto queue = env_->new_io_queue(4);
  ASSERT_OK(queue);
  constexpr std::size_t kPiece = 8192;
  AlignedBuffer data(kPiece * 4);
  const auto pattern = bytes_of(data.size(), 9);
  std::copy(pattern.begin(), pattern.end(), data.data());
  for (const IoOp op : {IoOp::kWrite, IoOp::kRead}) {
    for (std::size_t i = 0; i < 4; ++i) {
      ASSERT_OK((*queue)->submit(
          {op, file->get(), i * kPiece, data.span().subspan(i * kPiece, kPiece), i}));
    }
    EXPECT_EQ((*queue)->in_flight(), 4U);
    EXPECT_EQ((*queue)->submit({op, file->get(), 0, data.span().first(kPiece), 9}).code(),
              Code::kResourceExhausted);
    std::vector<IoCompletion> done;
    // A call that waits brings at least one.
    for (int n = 0; n < 4 && done.size() < 4; ++n) ASSERT_OK((*queue)->reap(true, &done));
    ASSERT_EQ(done.size(), 4U);
    std::array<bool, 4> seen{};
    for (const IoCompletion& c : done) {
      EXPECT_OK(c.status);
      EXPECT_EQ(c.bytes, kPiece);
      seen.at(c.tag) = true;
    }
    EXPECT_EQ(seen, (std::array<bool, 4>{true, true, true, true}));
    if (op == IoOp::kWrite) std::fill(data.span().begin(), data.span().end(), std::byte{0});
  }
  EXPECT_TRUE(std::equal(pattern.begin(), pattern.end(), data.data()));
  ASSERT_OK((*queue)->reap(true, std::make_unique<std::vector<IoCompletion>>().get()));
  // Beyond the end there is nothing.
  ASSERT_OK((*queue)->submit({IoOp::kRead, file->get(), 1 << 20, data.span().first(kPiece), 1}));
  std::vector<IoCompletion> done;
  ASSERT_OK((*queue)->reap(true, &done));
  ASSERT_EQ(done.size(), 1U);
  EXPECT_OK(done[0].status);
  EXPECT_EQ(done[0].bytes, 0U);
}

TEST_P(EnvTest, ClocksGoForward) {
  const std::int64_t before = env_->monotonic_ns();
  env_->sleep_ns(2'000'000);
  EXPECT_GE(env_->monotonic_ns() - before, 2'000'000);
  EXPECT_GT(env_->wall_ns(), 1'600'000'000'000'000'000);
  EXPECT_NE(env_->random_u64(), env_->random_u64());
}

INSTANTIATE_TEST_SUITE_P(Peers, EnvTest, ::testing::Values("real", "fault", "throttled"),
                         [](const auto& info) { return std::string(info.param); });

TEST(RealEnvTest, FilesAndDirectoriesAreForTheirOwnerOnly) {
  const TempDir temp;
  ASSERT_OK(Env::real().make_dirs(temp / "a/b/c"));
  ASSERT_OK(Env::real().open_file(temp / "a/b/f", for_writing()));
  struct stat st {};
  ASSERT_EQ(::stat((temp / "a/b").c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 0777, 0700U);
  ASSERT_EQ(::stat((temp / "a/b/f").c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 0777, 0600U);
  EXPECT_EQ(Env::real().open_file(temp / "a/b", {}).code(), Code::kFailedPrecondition);
  EXPECT_FALSE(Env::real().make_dirs(temp / "a/b/f/d").ok());
}

TEST(RealEnvTest, TheThreadQueueIsAsGoodAsIoUring) {
  const TempDir temp;
  auto file = Env::real().open_file(temp / "f", for_writing());
  ASSERT_OK(file);
  const auto data = bytes_of(100'000, 1);
  ASSERT_OK((*file)->write_at(0, data));
  auto queue = new_thread_queue(8);
  std::vector<std::vector<std::byte>> out(100, std::vector<std::byte>(1000));
  std::vector<IoCompletion> done;
  Patience patience("the reads' completions");
  for (std::size_t i = 0; i < 100; ++i) {
    while (queue->in_flight() == queue->depth()) {
      ASSERT_TRUE(patience.lasts());
      ASSERT_OK(queue->reap(true, &done));
    }
    ASSERT_OK(queue->submit({IoOp::kRead, file->get(), i * 1000, out[i], i}));
  }
  while (queue->in_flight() > 0) {
    ASSERT_TRUE(patience.lasts());
    ASSERT_OK(queue->reap(true, &done));
  }
  EXPECT_EQ(done.size(), 100U);
  for (std::size_t i = 0; i < 100; ++i) {
    EXPECT_TRUE(std::equal(out[i].begin(), out[i].end(),
                           data.begin() + static_cast<std::ptrdiff_t>(i * 1000)));
  }
}

TEST(FaultEnvTest, APowerCutForgetsWhatWasNotSynced) {
  FaultEnv env;
  ASSERT_OK(env.make_dirs("/d"));
  auto write = [&](const char* path, std::string_view text) -> Status {
    HCACHE_ASSIGN_OR_RETURN(auto file, env.open_file(path, for_writing()));
    return file->write_at(0, std::as_bytes(std::span(text)));
  };
  auto sync = [&](const char* path) -> Status {
    HCACHE_ASSIGN_OR_RETURN(auto file, env.open_file(path, for_writing()));
    return file->sync();
  };
  ASSERT_OK(write("/d/synced", "one"));
  ASSERT_OK(sync("/d/synced"));
  ASSERT_OK(env.sync_dir("/d"));
  ASSERT_OK(write("/d/synced", "two"));
  ASSERT_OK(write("/d/no-name", "x"));
  ASSERT_OK(sync("/d/no-name"));
  auto old = env.open_file("/d/synced", for_writing());
  ASSERT_OK(old);
  env.cut_power_at(1);
  EXPECT_EQ(write("/d/synced", "three").code(), Code::kUnavailable);
  EXPECT_TRUE(env.power_is_cut());
  EXPECT_EQ(env.open_file("/d/synced", {}).code(), Code::kUnavailable);
  env.restart(FaultEnv::Survivors::kNone);
  EXPECT_EQ(*read_whole_file(env, "/d/synced"), "one");
  EXPECT_EQ(env.files(), std::vector<std::string>{"/d/synced"});
  EXPECT_EQ((*old)->size().code(), Code::kUnavailable);
  ASSERT_OK(write("/d/synced", "two"));
  env.restart(FaultEnv::Survivors::kAll);
  EXPECT_EQ(*read_whole_file(env, "/d/synced"), "two");
}

TEST(FaultEnvTest, CapacityCountsBlocks) {
  FaultEnv env;
  env.set_capacity(8192);
  auto file = env.open_file("/f", for_writing());
  ASSERT_OK(file);
  ASSERT_OK((*file)->write_at(0, bytes_of(8192, 0)));
  EXPECT_EQ((*file)->write_at(8192, bytes_of(1, 0)).code(), Code::kResourceExhausted);
  ASSERT_OK((*file)->punch_hole(0, 4096));
  ASSERT_OK((*file)->write_at(8192, bytes_of(1, 0)));
}

TEST(FaultEnvTest, AFileThatCannotBeReplacedStaysAsItWas) {
  FaultEnv env;
  ASSERT_OK(env.make_dirs("/d"));
  ASSERT_OK(write_whole_file(env, "/d/text", "old"));
  env.set_capacity(8192);
  EXPECT_EQ(write_whole_file(env, "/d/text", std::string(8192, 'x')).code(),
            Code::kResourceExhausted);
  env.set_failing_syncs(true);
  EXPECT_EQ(write_whole_file(env, "/d/text", "new").code(), Code::kDataLoss);
  EXPECT_EQ(*env.list_dir("/d"), std::vector<std::string>{"text"});
  EXPECT_EQ(*read_whole_file(env, "/d/text"), "old");
}

}  // namespace
}  // namespace hcache
