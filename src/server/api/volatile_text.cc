#include "volatile_text.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

namespace hcache::api {
namespace {

constexpr std::array<const char*, 2> kTurns = {"messages", "input"};
// Where a turn has its parts: `output` of a tool's result in the input of responses.
constexpr std::array<const char*, 2> kContents = {"content", "output"};

// Null where there is no such member.
template <typename J>
J* member(J& object, const char* name) {
  const auto found = object.find(name);
  return found == object.end() ? nullptr : &*found;
}

bool is_text(const Json& object, const char* name, std::string_view text) {
  const Json* value = member(object, name);
  return value != nullptr && value->is_string() && value->get_ref<const std::string&>() == text;
}

bool has_text(const Json& part) {
  const Json* text = member(part, "text");
  return text != nullptr && text->is_string();
}

bool is_volatile(const Json& part) {
  const Json* control = member(part, "cache_control");
  const bool is_plain = is_text(part, "type", "text") || is_text(part, "type", "input_text");
  return control != nullptr && is_text(*control, "type", "volatile") && is_plain && has_text(part);
}

bool is_assistants(const Json& turn) {
  return is_text(turn, "role", "assistant") || is_text(turn, "type", "function_call") ||
         is_text(turn, "type", "reasoning");
}

bool is_systems(const Json& turn) {
  return is_text(turn, "role", "system") || is_text(turn, "role", "developer");
}

// Calls `visit` with every array of parts of a turn, those in a tool's result before the turn's
// own.
template <typename J, typename Visit>
void visit_parts(J& turn, const Visit& visit) {
  for (const char* name : kContents) {
    J* parts = member(turn, name);
    if (parts == nullptr || !parts->is_array()) continue;
    for (J& part : *parts) {
      if (!is_text(part, "type", "tool_result")) continue;
      J* inner = member(part, "content");
      if (inner != nullptr && inner->is_array()) visit(*inner);
    }
    visit(*parts);
  }
}

bool marks_any(const Json& body) {
  bool found = false;
  const auto look = [&](const Json& parts) {
    found = found || std::any_of(parts.begin(), parts.end(), is_volatile);
  };
  if (const Json* system = member(body, "system"); system != nullptr && system->is_array()) {
    look(*system);
  }
  for (const char* name : kTurns) {
    const Json* turns = member(body, name);
    if (turns == nullptr || !turns->is_array()) continue;
    for (const Json& turn : *turns) {
      if (!is_assistants(turn)) visit_parts(turn, look);
    }
  }
  return found;
}

void take_from(Json* parts, std::vector<Json>* taken) {
  if (!parts->is_array()) return;
  for (auto at = parts->begin(); at != parts->end();) {
    if (is_volatile(*at)) {
      taken->push_back(std::move(*at));
      at = parts->erase(at);
    } else {
      ++at;
    }
  }
}

void take_from_turns(Json* turns, std::vector<Json>* taken) {
  for (auto at = turns->begin(); at != turns->end();) {
    const size_t before = taken->size();
    if (!is_assistants(*at)) visit_parts(*at, [&](Json& parts) { take_from(&parts, taken); });
    const Json* left = member(*at, "content");
    const bool is_gone =
        taken->size() > before && is_systems(*at) && left != nullptr && left->empty();
    at = is_gone ? turns->erase(at) : at + 1;
  }
}

// Where the moved texts go; null: there is no such turn.
Json* last_content(Json* body) {
  for (const char* name : kTurns) {
    Json* turns = member(*body, name);
    if (turns == nullptr || !turns->is_array()) continue;
    for (auto turn = turns->rbegin(); turn != turns->rend(); ++turn) {
      if (is_assistants(*turn) || is_systems(*turn)) continue;
      for (const char* content : kContents) {
        Json* text = member(*turn, content);
        if (text != nullptr && (text->is_string() || text->is_array())) return text;
      }
    }
  }
  return nullptr;
}

void append(const Json& part, Json* content) {
  std::string text = part["text"].get<std::string>();
  if (content->is_string()) {
    *content = content->get<std::string>() + "\n\n" + text;
  } else if (content->is_array() && !content->empty() && has_text(content->back())) {
    Json& last = content->back()["text"];
    last = last.get<std::string>() + "\n\n" + text;
  } else {
    content->push_back({{"type", part["type"]}, {"text", std::move(text)}});
  }
}

}  // namespace

std::optional<Json> with_volatile_text_last(const Json& body) {
  if (!marks_any(body)) return std::nullopt;
  Json moved = body;
  if (last_content(&moved) == nullptr) return std::nullopt;
  std::vector<Json> taken;
  if (Json* system = member(moved, "system")) take_from(system, &taken);
  for (const char* name : kTurns) {
    Json* turns = member(moved, name);
    if (turns != nullptr && turns->is_array()) take_from_turns(turns, &taken);
  }
  for (const Json& part : taken) append(part, last_content(&moved));
  return moved;
}

}  // namespace hcache::api
