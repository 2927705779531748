#include "request_log.h"

#include <fmt/format.h>

#include <iterator>

namespace hcache::server {
namespace {

constexpr double kMsPerSecond = 1e3;

}  // namespace

std::string request_line(std::string_view answer_id, size_t choice, std::string_view key_name,
                         const scheduler::Outcome& o) {
  // Of a status only the code: its text may quote the request.
  const std::string_view finish =
      o.status.ok() ? std::string_view(o.finish_reason) : code_name(o.status.code());
  double predicted_s = 0;
  for (const policy::RestoreRecord& r : o.restores) predicted_s += r.predicted_restore_s;
  std::string line = "request";
  const auto add = [&line](const char* name, auto value) {
    fmt::format_to(std::back_inserter(line), " {}={}", name, value);
  };
  const auto add_ms = [&line](const char* name, double seconds) {
    fmt::format_to(std::back_inserter(line), " {}={:.1f}", name, seconds * kMsPerSecond);
  };
  add("id", answer_id);
  add("choice", choice);
  add("key", key_name.empty() ? std::string_view("-") : key_name);
  add("result", scheduler::phase_name(o.phase));
  add("finish", finish);
  add("prompt_tokens", o.prompt_tokens);
  add("reply_tokens", o.generated_tokens);
  add("resident", o.resident_tokens);
  add("hidden", o.hidden_tokens);
  add("kv", o.kv_tokens);
  add("recomputed", o.recomputed_tokens);
  add("new", o.new_tokens);
  add("dropped", o.dropped_tokens);
  add("dram_bytes", o.bytes.dram);
  add("disk_bytes", o.bytes.disk);
  add("remote_bytes", o.bytes.remote);
  add_ms("queue_ms", o.queue_s);
  add_ms("restore_ms", o.restore_s);
  add_ms("predicted_ms", predicted_s);
  add_ms("ttft_ms", o.ttft_s);
  add_ms("total_ms", o.total_s);
  add("preemptions", o.preempted_at_s.size());
  fmt::format_to(std::back_inserter(line), " plan=\"{}\"",
                 o.restores.empty() ? std::string_view() : o.restores.back().schedule);
  return line;
}

}  // namespace hcache::server
