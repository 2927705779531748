// Ends a reply at its stop strings.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace hcache::api {

// Takes the bytes of a reply as they come and lets text through that is valid UTF-8 and can't be a
// part of a stop string any more: the beginning of one is held back until it is clear what it
// becomes. Of several strings, the one that is complete first ends the reply (the longest, when
// they end at the same byte), so that the result does not depend on how the bytes are cut.
// One reply, one thread.
class StopMatcher {
 public:
  // Empty strings are left out.
  explicit StopMatcher(std::vector<std::string> stops);

  // The text that has become safe with `bytes`. Nothing after stopped().
  [[nodiscard]] std::string push(std::string_view bytes);
  // The rest of a reply that has ended by itself; U+FFFD for a character that never became whole.
  [[nodiscard]] std::string flush();

  [[nodiscard]] bool stopped() const { return !stop_string_.empty(); }
  // Which one ended it; empty: none yet.
  [[nodiscard]] const std::string& stop_string() const { return stop_string_; }

 private:
  // What of `held_` may go out, having looked for stop strings.
  std::string release();

  std::vector<std::string> stops_;
  std::string bytes_;  // of a character that is not complete
  std::string held_;   // whole characters that may belong to a stop string
  std::string stop_string_;
};

}  // namespace hcache::api
