#include "store/session_name.h"

namespace hcache::store {
namespace {

constexpr size_t kSaltDigits = 16;

std::string prefix_of(const SaltId& salt) { return to_hex(salt).substr(0, kSaltDigits) + ':'; }

bool looks_prefixed(std::string_view name) {
  return name.size() > kSaltDigits && name[kSaltDigits] == ':' &&
         name.substr(0, kSaltDigits).find_first_not_of("0123456789abcdef") ==
             std::string_view::npos;
}

}  // namespace

std::string stored_name(const SaltId& salt, std::string_view name) {
  if (salt == salt_id("") && !looks_prefixed(name)) return std::string(name);
  return prefix_of(salt).append(name);
}

std::string client_name(const SaltId& salt, std::string_view stored) {
  const std::string prefix = prefix_of(salt);
  if (stored.starts_with(prefix)) stored.remove_prefix(prefix.size());
  return std::string(stored);
}

}  // namespace hcache::store
