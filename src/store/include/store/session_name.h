// How sessions of several salts share the store's one table of names: the empty salt's are there
// under their own names, others behind the first digits of their salt's id. A name of the empty
// salt's that looks as if it had such digits gets its own salt's, so that no name reaches another
// salt's row.
//
// Threading: plain functions.
#pragma once

#include <string>
#include <string_view>

#include "base/ids.h"

namespace hcache::store {

// The name in the store of a session that its clients call `name`.
[[nodiscard]] std::string stored_name(const SaltId& salt, std::string_view name);
// And back.
[[nodiscard]] std::string client_name(const SaltId& salt, std::string_view stored);

}  // namespace hcache::store
