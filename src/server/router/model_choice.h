// Which model a request is for.
//
// Threading: pure functions.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "http/message.h"

namespace hcache::router {

// What stands under "model" in a JSON object (or, where there is none, under "name", as Ollama's
// clients have it), without building anything of the rest. Absent: there is none, or the text is no
// object. The first of two counts.
[[nodiscard]] std::optional<std::string> model_in_body(std::string_view body);

// The request's model: of its body, else of its query (?model=NAME).
[[nodiscard]] std::optional<std::string> model_of(const http::Request& request);

// Whether a request only observes a model, so that it loads none and keeps none loaded.
[[nodiscard]] bool only_observes(std::string_view method, std::string_view path);
// The same of what a model's own page asks for again and again while it is open.
[[nodiscard]] bool page_observes(std::string_view method, std::string_view path);

// What stands behind "/upstream/NAME" in a target as it was sent: "/v1/models?x=y". Empty: the
// target begins with something else.
[[nodiscard]] std::string behind_prefix(std::string_view target);

// Whether an Ollama client asks with it that the model leaves memory: "keep_alive": 0 without
// anything to answer.
[[nodiscard]] bool asks_to_unload(const http::Request& request);

}  // namespace hcache::router
