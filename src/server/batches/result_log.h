// A file of results that grows line by line and survives whatever happens.
//
// Threading: one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>

#include "base/env.h"
#include "base/status.h"
#include "batch_result.h"

namespace hcache::server {

class ResultLog {
 public:
  // Opens the file, or makes an empty one. From the first line on that is damaged (the last one is
  // torn when the process was killed in the middle of it), the rest is cut off: those results are
  // made again. kDataLoss: already the first line is no result, so this is some other file.
  static Result<std::unique_ptr<ResultLog>> open(Env& env, const std::string& path);

  // Adds whole lines; durable when it returns. After an error none of them is there.
  Status append(std::string_view lines);

  // What was there when it was opened, by id.
  [[nodiscard]] const std::unordered_map<std::string, BatchResult>& found() const { return found_; }
  [[nodiscard]] uint64_t bytes() const { return end_; }
  [[nodiscard]] const std::string& path() const { return file_->path(); }

 private:
  ResultLog() = default;
  Status recover();
  // Takes in the whole lines of `text`; how many bytes of it are good.
  Result<size_t> take_lines(std::string_view text);

  std::unique_ptr<File> file_;
  std::unordered_map<std::string, BatchResult> found_;
  uint64_t end_ = 0;
};

}  // namespace hcache::server
