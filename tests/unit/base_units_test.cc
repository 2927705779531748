#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "base/units.h"

namespace hcache {
namespace {

TEST(Units, BytesParse) {
  const std::vector<std::pair<const char*, std::uint64_t>> cases = {{"0", 0},
                                                                    {"4096", 4096},
                                                                    {"64MiB", 64ULL << 20},
                                                                    {"64 mib", 64ULL << 20},
                                                                    {"1.5GB", 1500000000},
                                                                    {"2k", 2048},
                                                                    {"3g", 3ULL << 30},
                                                                    {"1TiB", 1ULL << 40},
                                                                    {"10 B", 10},
                                                                    {"7kB", 7000}};
  for (const auto& [text, bytes] : cases) {
    const auto parsed = parse_bytes(text);
    ASSERT_TRUE(parsed.ok()) << text;
    EXPECT_EQ(*parsed, bytes) << text;
  }
  for (const char* bad : {"", "MiB", "-1", "1xB", "1 2", "1e30", "nan", "12MiB/s", "99999999TiB"}) {
    EXPECT_EQ(parse_bytes(bad).code(), Code::kInvalidArgument) << bad;
  }
}

TEST(Units, RatesParse) {
  EXPECT_DOUBLE_EQ(*parse_rate("19MB/s"), 19e6);
  EXPECT_DOUBLE_EQ(*parse_rate("1.7 GB/s"), 1.7e9);
  EXPECT_DOUBLE_EQ(*parse_rate("1MiB"), 1048576.0);
  EXPECT_EQ(parse_rate("fast").code(), Code::kInvalidArgument);
}

TEST(Units, DurationsParse) {
  const std::vector<std::pair<const char*, std::int64_t>> cases = {{"250ms", 250'000'000},
                                                                   {"30", 30'000'000'000},
                                                                   {"2m30s", 150'000'000'000},
                                                                   {"1.5h", 5'400'000'000'000},
                                                                   {"7d", 604'800'000'000'000},
                                                                   {"5us", 5000},
                                                                   {"8ns", 8}};
  for (const auto& [text, ns] : cases) {
    const auto parsed = parse_duration(text);
    ASSERT_TRUE(parsed.ok()) << text;
    EXPECT_EQ(*parsed, ns) << text;
  }
  for (const char* bad : {"", "ms", "1x", "-3s", "1m-2s"}) {
    EXPECT_EQ(parse_duration(bad).code(), Code::kInvalidArgument) << bad;
  }
}

TEST(Units, Print) {
  EXPECT_EQ(format_bytes(900), "900 B");
  EXPECT_EQ(format_bytes(64ULL << 20), "64 MiB");
  EXPECT_EQ(format_bytes(1536), "1.50 KiB");
  EXPECT_EQ(format_bytes(3ULL << 40), "3 TiB");
  EXPECT_EQ(format_rate(19e6), "19.0 MB/s");
  EXPECT_EQ(format_rate(12), "12.0 B/s");
  EXPECT_EQ(format_duration(812), "812 ns");
  EXPECT_EQ(format_duration(3'200'000), "3.2 ms");
  EXPECT_EQ(format_duration(1'500'000'000), "1.50 s");
  EXPECT_EQ(format_duration(150'000'000'000), "2m 30s");
  EXPECT_EQ(format_duration(7'260'000'000'000), "2h 1m");
  EXPECT_EQ(format_duration(-812), "-812 ns");
}

}  // namespace
}  // namespace hcache
