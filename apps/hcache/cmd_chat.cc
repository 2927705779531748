// hcache chat: a conversation, one line per message.

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <memory>
#include <optional>

#include "base/env.h"
#include "commands.h"
#include "session.h"

namespace hcache::cli {
namespace {

struct ChatArgs {
  RuntimeArgs runtime;
  model::SamplingOptions sampling;
  std::string session;
  std::string system;
  std::string file;
  bool json = false;
  int64_t max_tokens = 0;
};

// Lines from stdin. Its own buffer over read(): the C++ streams would sleep through Ctrl-C.
class LineReader {
 public:
  // nullopt at the end of input or after an interrupt.
  std::optional<std::string> next() {
    for (;;) {
      const size_t end = buffer_.find('\n');
      if (end != std::string::npos) return take(end, end + 1);
      char piece[4096];
      const ssize_t n = ::read(STDIN_FILENO, piece, sizeof(piece));
      if (n > 0) {
        buffer_.append(piece, static_cast<size_t>(n));
        continue;
      }
      if (n < 0 && errno == EINTR && !interrupted()) continue;
      if (n < 0 || buffer_.empty()) return std::nullopt;
      return take(buffer_.size(), buffer_.size());
    }
  }

 private:
  std::string take(size_t length, size_t consumed) {
    std::string line = buffer_.substr(0, length);
    buffer_.erase(0, consumed);
    if (!line.empty() && line.back() == '\r') line.pop_back();
    return line;
  }
  std::string buffer_;
};

class Chat {
 public:
  Chat(const ChatArgs& args, Conversation& conversation)
      : args_(args), conversation_(conversation) {}

  // kCancelled when the user interrupted the reply; what there is of it is saved.
  Status exchange(const std::string& message) {
    auto turn = conversation_.say(message, args_.system, args_.sampling, args_.max_tokens,
                                  [&](const std::string& piece) {
                                    if (args_.json) return;
                                    fmt::print("{}", piece);
                                    std::fflush(stdout);
                                  });
    HCACHE_RETURN_IF_ERROR(turn.status());
    if (args_.json) {
      fmt::print("{}\n", to_json(*turn).dump(-1, ' ', false, Json::error_handler_t::replace));
    } else {
      fmt::print("\n");
    }
    std::fflush(stdout);
    if (!args_.json) print_stats(summary(*turn));
    HCACHE_RETURN_IF_ERROR(conversation_.save());
    return turn->finish == "interrupted" ? cancelled("interrupted") : Status();
  }

 private:
  const ChatArgs& args_;
  Conversation& conversation_;
};

Status chat(const ChatArgs& args) {
  if (args.runtime.model.device == "list") return list_devices();
  std::string first;
  if (!args.file.empty()) {
    HCACHE_ASSIGN_OR_RETURN(first, read_whole_file(Env::real(), args.file));
  }
  ProgressLine line;
  ThrottledEnv env(Env::real());
  HCACHE_ASSIGN_OR_RETURN(const auto serving, open_serving(args.runtime, env, line));
  HCACHE_ASSIGN_OR_RETURN(const auto conversation,
                          Conversation::open(*serving, args.runtime, args.session));
  const bool terminal = isatty(STDIN_FILENO) == 1 && isatty(STDOUT_FILENO) == 1;
  if (terminal) {
    fmt::print(stderr, "{} tokens so far. One line per message; Ctrl-D ends.\n",
               conversation->tokens().size());
  }
  Chat session(args, *conversation);
  LineReader lines;
  Status status;
  if (!first.empty()) status = session.exchange(first);
  while (status.ok()) {
    if (terminal) {
      fmt::print("> ");
      std::fflush(stdout);
    }
    const std::optional<std::string> message = lines.next();
    if (!message.has_value()) break;
    if (!message->empty()) status = session.exchange(*message);
  }
  if (status.ok() && interrupted()) status = cancelled("interrupted");
  if (terminal) fmt::print("\n");
  // Whatever ended it, what was said is kept.
  const Status closed = conversation->save();
  const Status ended = serving->close();
  if (!status.ok()) return status;
  return closed.ok() ? ended : closed;
}

}  // namespace

void add_chat(CLI::App& app, Verb* verb) {
  CLI::App* sub = app.add_subcommand(
      "chat", "Hold a conversation: one line per message, from the keyboard or a pipe");
  const auto args = std::make_shared<ChatArgs>();
  add_option(*sub, "session", &args->session);
  add_option(*sub, "system", &args->system);
  add_option(*sub, "chat-file", &args->file);
  add_option(*sub, "max-tokens", &args->max_tokens);
  add_runtime_options(*sub, &args->runtime);
  add_restore_options(*sub, &args->runtime);
  add_sampling_options(*sub, &args->sampling);
  add_option(*sub, "json-lines", &args->json);
  sub->callback([args, verb] { *verb = [args] { return chat(*args); }; });
}

}  // namespace hcache::cli
