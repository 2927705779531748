#include "api/list_page.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace hcache::api {

Result<Json> page_json(std::span<const std::string_view> ids, const ListPage& page,
                       const std::function<Result<Json>(size_t)>& word) {
  if (!page.after.empty() && !page.before.empty()) {
    return invalid_argument("two cursors were given; leave one of them out");
  }
  const auto place_of = [&](const std::string& id) -> Result<size_t> {
    const auto found = std::ranges::find(ids, id);
    if (found == ids.end()) {
      return invalid_argument(fmt::format("the cursor '{}' is no entry of this list", id));
    }
    return static_cast<size_t>(found - ids.begin());
  };
  size_t begin = 0;
  size_t end = ids.size();
  bool more = false;
  if (!page.before.empty()) {
    HCACHE_ASSIGN_OR_RETURN(end, place_of(page.before));
    begin = end - std::min(end, page.limit);
    more = begin > 0;
  } else {
    if (!page.after.empty()) {
      HCACHE_ASSIGN_OR_RETURN(const size_t after, place_of(page.after));
      begin = after + 1;
    }
    end = std::min(end, begin + page.limit);
    more = end < ids.size();
  }
  Json data = Json::array();
  for (size_t i = begin; i < end; ++i) {
    HCACHE_ASSIGN_OR_RETURN(Json json, word(i));
    data.push_back(std::move(json));
  }
  Json first = data.empty() ? Json(nullptr) : Json(ids[begin]);
  Json last = data.empty() ? Json(nullptr) : Json(ids[end - 1]);
  return Json{{"object", "list"},
              {"data", std::move(data)},
              {"first_id", std::move(first)},
              {"last_id", std::move(last)},
              {"has_more", more}};
}

}  // namespace hcache::api
