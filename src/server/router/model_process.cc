#include "model_process.h"

#include <boost/asio/buffer.hpp>
#include <charconv>
#include <string_view>

namespace hcache::router {
namespace {

constexpr std::size_t kReadBytes = 4096;
constexpr std::size_t kLongestLine = 16 * 1024;
// A process that has ended may have left its pipes to another one; they are not waited for longer.
constexpr int kMostPolls = 20;

// The port of "hcache: serving on http://127.0.0.1:41234"; 0: the line says something else.
std::uint16_t port_of(std::string_view line) {
  constexpr std::string_view kReady = "serving on http://";
  const std::size_t at = line.find(kReady);
  const std::size_t colon = line.rfind(':');
  if (at == std::string_view::npos || colon < at + kReady.size()) return 0;
  std::uint16_t port = 0;
  const auto [end, error] =
      std::from_chars(line.data() + colon + 1, line.data() + line.size(), port);
  return error == std::errc() && end == line.data() + line.size() ? port : 0;
}

}  // namespace

Result<std::unique_ptr<ModelProcess>> ModelProcess::start(boost::asio::io_context& context,
                                                          const ModelCommand& command,
                                                          ModelProcessHandler handler) {
  HCACHE_ASSIGN_OR_RETURN(auto process, Subprocess::start({.program = command.program,
                                                           .args = command.args,
                                                           .environment = command.environment}));
  std::unique_ptr<ModelProcess> out(new ModelProcess(std::move(process), std::move(handler)));
  out->output_ = std::make_shared<Lines>(context, out->process_->take_output());
  out->errors_ = std::make_shared<Lines>(context, out->process_->take_errors());
  out->output_->on_line = [self = out.get()](const std::string& line) { self->on_output(line); };
  out->errors_->on_line = [self = out.get()](std::string line) {
    if (self->handler_.on_line) self->handler_.on_line(line);
    self->last_line_ = std::move(line);
  };
  for (const auto& lines : {out->output_, out->errors_}) {
    lines->on_end = [self = out.get()] {
      const bool both = self->output_->ended && self->errors_->ended;
      if (both && self->handler_.on_closed) self->handler_.on_closed();
    };
    read(lines);
  }
  return out;
}

ModelProcess::~ModelProcess() {
  // What is read from now on concerns nobody.
  output_->on_line = errors_->on_line = nullptr;
  output_->on_end = errors_->on_end = nullptr;
  boost::system::error_code ignored;
  output_->stream.close(ignored);
  errors_->stream.close(ignored);
}

void ModelProcess::read(const std::shared_ptr<Lines>& lines) {
  lines->buffer.resize(kReadBytes);
  lines->stream.async_read_some(boost::asio::buffer(lines->buffer),
                                [lines](boost::system::error_code error, std::size_t n) {
                                  take(*lines, n);
                                  if (!error) return read(lines);
                                  if (!lines->text.empty() && lines->on_line)
                                    lines->on_line(std::move(lines->text));
                                  lines->ended = true;
                                  if (lines->on_end) lines->on_end();
                                });
}

void ModelProcess::take(Lines& lines, std::size_t n) {
  for (const char c : std::string_view(lines.buffer).substr(0, n)) {
    if (c != '\n' && lines.text.size() < kLongestLine) {
      lines.text.push_back(c);
    } else if (c == '\n' && lines.on_line) {
      lines.on_line(std::exchange(lines.text, {}));
    }
  }
}

void ModelProcess::on_output(const std::string& line) {
  const std::uint16_t port = port_of(line);
  if (port != 0 && handler_.on_ready) std::exchange(handler_.on_ready, nullptr)(port);
}

std::optional<ExitStatus> ModelProcess::poll() {
  if (!ended_) ended_ = process_->poll();
  if (!ended_) return std::nullopt;
  const bool heard = (output_->ended && errors_->ended) || ++polls_since_end_ > kMostPolls;
  return heard ? ended_ : std::nullopt;
}

}  // namespace hcache::router
