// The server of one model: a process, what it says, and when it is ready.
//
// Threading: everything on the thread that runs the context.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/process.h"
#include "router/model_router.h"

namespace hcache::router {

struct ModelProcessHandler {
  std::function<void(std::uint16_t port)> on_ready;      // at most once
  std::function<void(const std::string& line)> on_line;  // of its stderr
  // Once: it has closed its stdout and stderr, as it does when it ends.
  std::function<void()> on_closed;
};

class ModelProcess {
 public:
  // Errors of Subprocess::start.
  [[nodiscard]] static Result<std::unique_ptr<ModelProcess>> start(boost::asio::io_context& context,
                                                                   const ModelCommand& command,
                                                                   ModelProcessHandler handler);
  ~ModelProcess();  // kills it if it still runs
  ModelProcess(const ModelProcess&) = delete;
  ModelProcess& operator=(const ModelProcess&) = delete;

  // How it ended, once it has and all that it wrote was handed on.
  [[nodiscard]] std::optional<ExitStatus> poll();
  void send_signal(int signal) { process_->send_signal(signal); }
  // The last line that it wrote to stderr; empty where there was none.
  [[nodiscard]] const std::string& last_line() const { return last_line_; }

 private:
  using Stream = boost::asio::posix::stream_descriptor;
  // One of the two pipes, in lines. Read operations share it, so that it outlives the process.
  struct Lines {
    Lines(boost::asio::io_context& context, int fd) : stream(context, fd) {}
    Stream stream;
    std::string text;    // of a line that is not whole yet
    std::string buffer;  // what is read into
    std::function<void(std::string line)> on_line;
    std::function<void()> on_end;
    bool ended = false;
  };

  ModelProcess(std::unique_ptr<Subprocess> process, ModelProcessHandler handler)
      : process_(std::move(process)), handler_(std::move(handler)) {}
  static void read(const std::shared_ptr<Lines>& lines);
  static void take(Lines& lines, std::size_t n);
  void on_output(const std::string& line);

  std::unique_ptr<Subprocess> process_;
  ModelProcessHandler handler_;
  std::shared_ptr<Lines> output_;
  std::shared_ptr<Lines> errors_;
  std::string last_line_;
  std::optional<ExitStatus> ended_;
  int polls_since_end_ = 0;
};

}  // namespace hcache::router
