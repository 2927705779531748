#include <gtest/gtest.h>

#include <unordered_set>
#include <vector>

#include "base/ids.h"

namespace hcache {
namespace {

TEST(Id128, PrintsAndParses) {
  ChunkId id;
  for (std::size_t i = 0; i < 16; ++i) id.bytes[i] = static_cast<std::uint8_t>(i * 17);
  EXPECT_EQ(to_hex(id), "00112233445566778899aabbccddeeff");
  ChunkId back;
  ASSERT_TRUE(parse_id("00112233445566778899AABBccddeeff", &back).ok());
  EXPECT_EQ(back, id);
  for (const char* bad :
       {"", "0011", "00112233445566778899aabbccddeefg", "00112233445566778899aabbccddeeff0"}) {
    EXPECT_EQ(parse_id(bad, &back).code(), Code::kInvalidArgument) << bad;
  }
  EXPECT_TRUE(ChunkId().is_zero());
  EXPECT_FALSE(id.is_zero());
}

TEST(Hasher, IsBlake2bWithSixteenBytes) {
  // The reference's answer for the 8-byte length of an empty domain.
  const auto id = Hasher("").finish<ChunkId>();
  EXPECT_EQ(to_hex(id), "c804ce198ec337e3dc762bdd1a09aece");
}

TEST(Hasher, PartsDoNotRunTogether) {
  const auto a = Hasher("d").add(std::string_view("ab")).add(std::string_view("c"));
  auto ab_c = a;
  auto a_bc = Hasher("d").add(std::string_view("a")).add(std::string_view("bc"));
  EXPECT_NE(ab_c.finish<ChunkId>(), a_bc.finish<ChunkId>());
  EXPECT_NE(Hasher("d").finish<ChunkId>(), Hasher("e").finish<ChunkId>());
}

TEST(ChunkIds, DependOnEverything) {
  const std::vector<std::int32_t> tokens = {1, 2, 3};
  const Fingerprint f;
  Fingerprint g;
  g.bytes[0] = 1;
  ChunkId parent;
  parent.bytes[0] = 1;
  std::unordered_set<ChunkId> ids;
  ids.insert(chunk_id(f, "", {}, tokens));
  ids.insert(chunk_id(g, "", {}, tokens));
  ids.insert(chunk_id(f, "salt", {}, tokens));
  ids.insert(chunk_id(f, "", parent, tokens));
  ids.insert(chunk_id(f, "", {}, std::span(tokens).first(2)));
  ids.insert(chunk_id(f, "", {}, std::vector<std::int32_t>{1, 2, -3}));
  ids.insert(chunk_id(f, "", {}, std::vector<std::int32_t>(64, 1)));
  ids.insert(chunk_id(f, "", {}, std::vector<std::int32_t>(65, 1)));
  EXPECT_EQ(ids.size(), 8U);
  EXPECT_EQ(chunk_id(f, "salt", {}, tokens), chunk_id(f, salt_id("salt"), {}, tokens));
}

}  // namespace
}  // namespace hcache
