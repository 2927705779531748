// A part of a list, as the lists of OpenAI and Anthropic are cut into pages.
//
// Threading: pure functions.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "api/json.h"
#include "base/status.h"

namespace hcache::api {

struct ListPage {
  size_t limit = 20;
  std::string after = {};   // an id: what comes behind it
  std::string before = {};  // an id: what comes before it, next to it; not together with `after`
};

// `ids` are those of the whole list, in its order; `word` gives the JSON of the one at an index.
// kInvalidArgument: a cursor is none of them, or both are given.
[[nodiscard]] Result<Json> page_json(std::span<const std::string_view> ids, const ListPage& page,
                                     const std::function<Result<Json>(size_t)>& word);

}  // namespace hcache::api
