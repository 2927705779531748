// The requests of a batch: a file of JSON objects, one a line.
//
// OpenAI's lines have custom_id, method, url and body, Anthropic's custom_id and params; a file may
// mix them. Blank lines count as lines and hold no request.
//
// Threading: a BatchInput is read by one thread at a time; the rest are plain values.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "api/json.h"
#include "base/env.h"
#include "base/status.h"

namespace hcache::server {

struct BatchRequest {
  int64_t line = 0;  // in its file, from 1
  std::string custom_id;
  std::string url;  // one of is_batch_url()
  api::Json body;   // what a client would send there
};

// The endpoints that a batch may name: /v1/chat/completions, /v1/completions, /v1/responses,
// /v1/messages.
[[nodiscard]] bool is_batch_url(std::string_view url);

// One line. kInvalidArgument says what is wrong with it, without its number. `custom_id`, if given,
// is set as soon as it is known, whatever else is wrong.
[[nodiscard]] Result<BatchRequest> parse_batch_line(std::string_view text, int64_t line,
                                                    std::string* custom_id = nullptr);

struct BatchInputLimits {
  uint64_t line_bytes = uint64_t{32} << 20U;  // a longer line is a bad one
  int64_t lines = INT64_MAX;                  // that are not blank; beyond it: out_of_range
};

// One line of the file, blank ones left out.
struct BatchLine {
  int64_t number = 0;  // from 1
  uint64_t offset = 0;
  uint64_t bytes = 0;  // without its end
  std::string custom_id;
  std::string_view url;  // static; empty where it is no request
  Status status;         // not ok: it is no request
};

// A file of requests, looked through once and then read line by line, so that it need not fit in
// memory.
class BatchInput {
 public:
  // Reads the whole file. kInvalidArgument: two lines have the same custom_id (names both), or
  // there is no line at all. kOutOfRange: more lines than allowed. Errors of the file.
  static Result<BatchInput> open(Env& env, const std::string& path,
                                 const BatchInputLimits& limits = {});

  [[nodiscard]] const std::string& path() const { return file_->path(); }
  [[nodiscard]] const std::vector<BatchLine>& lines() const { return lines_; }
  [[nodiscard]] int64_t bad_lines() const;
  // Of the file's content: 32 hex digits.
  [[nodiscard]] const std::string& hash() const { return hash_; }
  // The lines that are requests, as indices: in the order of the file, except that those whose
  // prompts begin alike stand together, where the first of them stands.
  [[nodiscard]] const std::vector<size_t>& order() const { return order_; }
  // kDataLoss: the file is no longer what it was.
  [[nodiscard]] Result<BatchRequest> read(size_t line) const;

 private:
  class Scan;

  std::unique_ptr<File> file_;
  std::vector<BatchLine> lines_;
  std::string hash_;
  std::vector<size_t> order_;
};

}  // namespace hcache::server
