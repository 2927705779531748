#include "result_log.h"

#include <fmt/format.h>

#include <span>
#include <utility>
#include <vector>

namespace hcache::server {
namespace {

constexpr size_t kPieceBytes = size_t{1} << 20U;

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

}  // namespace

Result<std::unique_ptr<ResultLog>> ResultLog::open(Env& env, const std::string& path) {
  std::unique_ptr<ResultLog> log(new ResultLog());
  HCACHE_ASSIGN_OR_RETURN(const FileInfo info, env.file_info(path));
  HCACHE_ASSIGN_OR_RETURN(log->file_, env.open_file(path, {.write = true, .create = true}));
  if (!info.exists) HCACHE_RETURN_IF_ERROR(env.sync_dir(folder_of(path)));
  HCACHE_RETURN_IF_ERROR(log->recover());
  return log;
}

Status ResultLog::recover() {
  HCACHE_ASSIGN_OR_RETURN(const uint64_t size, file_->size());
  std::string held;  // from end_ on
  std::vector<std::byte> piece(kPieceBytes);
  for (uint64_t at = 0; at < size;) {
    HCACHE_ASSIGN_OR_RETURN(const size_t got, file_->read_at(at, piece));
    if (got == 0) break;
    at += got;
    held.append(reinterpret_cast<const char*>(piece.data()), got);
    HCACHE_ASSIGN_OR_RETURN(const size_t good, take_lines(held));
    end_ += good;
    held.erase(0, good);
    if (held.find('\n') != std::string::npos) break;  // a damaged line
  }
  if (end_ == size) return {};
  HCACHE_RETURN_IF_ERROR(file_->truncate(end_));
  return file_->sync();
}

Result<size_t> ResultLog::take_lines(std::string_view text) {
  size_t good = 0;
  for (size_t end = text.find('\n'); end != std::string_view::npos; end = text.find('\n', good)) {
    Result<BatchResult> result = parse_result_line(text.substr(good, end - good));
    if (!result.ok()) {
      if (end_ + good > 0) break;
      return data_loss(
          fmt::format("{} holds something else than a batch's results; name another "
                      "file, or remove this one",
                      path()));
    }
    std::string id = result->id;
    found_.insert_or_assign(std::move(id), std::move(*result));
    good = end + 1;
  }
  return good;
}

Status ResultLog::append(std::string_view lines) {
  Status status = file_->write_at(end_, std::as_bytes(std::span(lines.data(), lines.size())));
  if (status.ok()) status = file_->sync();
  if (!status.ok()) {
    file_->truncate(end_).ignore("the next lines are written over what is left");
    return status;
  }
  end_ += lines.size();
  return {};
}

}  // namespace hcache::server
