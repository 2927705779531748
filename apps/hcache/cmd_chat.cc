// hcache chat: a conversation, one line per message.

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <optional>
#include <utility>

#include "base/env.h"
#include "commands.h"
#include "draft_args.h"
#include "overflow_args.h"
#include "session.h"

namespace hcache::cli {
namespace {

struct ChatArgs : Options {
  TalkArgs talk{this};
  OverflowArgs overflow{this, "truncate"};
  std::string file = text(&file, "-f,--file", "FILE", "", "first say what this file holds");
  RuntimeArgs runtime{this};
  std::string engine = runtime.offer_engine();
  std::optional<double> kv_budget = runtime.offer_kv_budget();
  DraftArgs draft{this};
  SamplingArgs sampling{this};
  bool json = flag(&json, "--json", "print one JSON object per turn instead of text");
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
  Chat(const ChatArgs& args, model::SamplingOptions sampling, Conversation& conversation)
      : args_(args), sampling_(std::move(sampling)), conversation_(conversation) {}

  // kCancelled when the user interrupted the reply; what there is of it is saved.
  Status exchange(const std::string& message) {
    auto turn = conversation_.say(message, args_.talk.system, sampling_, args_.talk.max_tokens,
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
  const model::SamplingOptions sampling_;
  Conversation& conversation_;
};

Status chat(const ChatArgs& args) {
  if (args.runtime.model.device == "list") return list_devices();
  std::string first;
  if (!args.file.empty()) {
    HCACHE_ASSIGN_OR_RETURN(first, read_whole_file(Env::real(), args.file));
  }
  HCACHE_ASSIGN_OR_RETURN(model::SamplingOptions sampling, args.sampling.resolved());
  ProgressLine line;
  ThrottledEnv env(Env::real());
  HCACHE_ASSIGN_OR_RETURN(const auto serving, open_serving(args.runtime, env, line,
                                                           args.overflow.truncates(), &args.draft));
  HCACHE_ASSIGN_OR_RETURN(const auto conversation,
                          Conversation::open(*serving, args.runtime, args.talk.session));
  if (args.overflow.truncates()) conversation->truncate(args.overflow.limits());
  const bool terminal = isatty(STDIN_FILENO) == 1 && isatty(STDOUT_FILENO) == 1;
  if (terminal) {
    fmt::print(stderr, "{} tokens so far. One line per message; Ctrl-D ends.\n",
               conversation->tokens().size());
  }
  Chat session(args, std::move(sampling), *conversation);
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
  const Status closed = conversation->finish();
  const Status ended = serving->close();
  if (!status.ok()) return status;
  return closed.ok() ? ended : closed;
}

}  // namespace

void add_chat(CLI::App& app, Verb* verb) {
  add_verb<ChatArgs>(app, verb, "chat",
                     "Hold a conversation: one line per message, from the keyboard or a pipe",
                     chat);
}

}  // namespace hcache::cli
