#include "text/llama_handle.h"

#include <log.h>

#include <mutex>

namespace hcache::model {
namespace {

thread_local std::string* current_sink = nullptr;

void collect(ggml_log_level level, const char* text, void* /*user_data*/) {
  if (level == GGML_LOG_LEVEL_ERROR && current_sink != nullptr) *current_sink += text;
}

}  // namespace

ErrorLog::ErrorLog() : outer_(current_sink) {
  static std::once_flag once;
  std::call_once(once, [] {
    llama_log_set(collect, nullptr);
    common_log_set_verbosity_thold(-1);
  });
  current_sink = &lines_;
}

ErrorLog::~ErrorLog() { current_sink = outer_; }

std::string ErrorLog::text(const std::string& fallback) const {
  std::string out;
  for (const char c : lines_) out += c == '\n' ? ' ' : c;
  while (!out.empty() && out.back() == ' ') out.pop_back();
  return out.empty() ? fallback : out;
}

}  // namespace hcache::model
