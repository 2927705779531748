#include "batch_input.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <span>
#include <unordered_map>
#include <utility>

#include "base/ids.h"
#include "base/xxh3.h"

namespace hcache::server {
namespace {

using api::Json;

constexpr std::array<std::string_view, 4> kUrls = {"/v1/chat/completions", "/v1/completions",
                                                   "/v1/responses", "/v1/messages"};
constexpr std::string_view kMessagesUrl = "/v1/messages";
constexpr size_t kMaxCustomId = 512;  // bytes
constexpr size_t kPieceBytes = size_t{1} << 20U;
constexpr std::string_view kBlanks = " \t\r\v\f";

// Prompts are compared by so many bytes of their beginning, and by twice, four times, ... as many.
constexpr size_t kFirstPrefixBytes = 256;
constexpr size_t kPrefixes = 9;
using PrefixHashes = std::array<uint64_t, kPrefixes>;

// What a prompt is made of, in about the order in which templates render it.
constexpr std::array<const char*, 9> kPromptFields = {
    "previous_response_id", "conversation", "tools",  "system",
    "instructions",         "messages",     "prompt", "input",
    "response_format"};

PrefixHashes prefix_hashes(const Json& body) {
  std::string text;
  for (const char* field : kPromptFields) {
    if (const auto value = body.find(field); value != body.end()) text += api::to_text(*value);
  }
  PrefixHashes hashes{};
  size_t bytes = kFirstPrefixBytes;
  for (uint64_t& hash : hashes) {
    hash = XXH3_64bits(text.data(), std::min(bytes, text.size()));
    bytes *= 2;
  }
  return hashes;
}

std::string_view trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(kBlanks);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlanks) - begin + 1);
}

Status expect_text(const Json& line, const char* field, std::string* out) {
  const auto value = line.find(field);
  if (value == line.end()) return invalid_argument(fmt::format("{} is missing", field));
  if (!value->is_string() || value->get_ref<const std::string&>().empty()) {
    return invalid_argument(fmt::format("{}: expected a text that is not empty", field));
  }
  *out = value->get<std::string>();
  return {};
}

}  // namespace

bool is_batch_url(std::string_view url) {
  return std::find(kUrls.begin(), kUrls.end(), url) != kUrls.end();
}

Result<BatchRequest> parse_batch_line(std::string_view text, int64_t number,
                                      std::string* custom_id) {
  HCACHE_ASSIGN_OR_RETURN(Json line, api::parse_body(text));
  if (!line.is_object()) return invalid_argument("expected a JSON object");
  BatchRequest request;
  request.line = number;
  HCACHE_RETURN_IF_ERROR(expect_text(line, "custom_id", &request.custom_id));
  if (request.custom_id.size() > kMaxCustomId) {
    return invalid_argument(fmt::format("custom_id: it has {} bytes, at most {} are allowed",
                                        request.custom_id.size(), kMaxCustomId));
  }
  if (custom_id != nullptr) *custom_id = request.custom_id;
  const bool anthropic = line.contains("params");
  if (anthropic) {
    request.url = kMessagesUrl;
  } else {
    std::string method;
    HCACHE_RETURN_IF_ERROR(expect_text(line, "method", &method));
    if (method != "POST") {
      return invalid_argument(fmt::format("method: expected POST, got '{}'", method));
    }
    HCACHE_RETURN_IF_ERROR(expect_text(line, "url", &request.url));
    if (!is_batch_url(request.url)) {
      return invalid_argument(fmt::format("url: '{}' can't be in a batch; there are {}",
                                          request.url, fmt::join(kUrls, ", ")));
    }
  }
  const char* field = anthropic ? "params" : "body";
  const auto body = line.find(field);
  if (body == line.end()) return invalid_argument(fmt::format("{} is missing", field));
  if (!body->is_object()) return invalid_argument(fmt::format("{}: expected an object", field));
  request.body = std::move(*body);
  return request;
}

// Goes through the file once: cuts it into lines, hashes it, and notes how prompts begin.
class BatchInput::Scan {
 public:
  Scan(BatchInput& input, const BatchInputLimits& limits) : input_(input), limits_(limits) {}

  Status run() {
    HCACHE_ASSIGN_OR_RETURN(const uint64_t size, input_.file_->size());
    Hasher hasher("hcache batch input");
    hasher.add_u64(size);
    std::vector<std::byte> piece(kPieceBytes);
    for (uint64_t at = 0; at < size;) {
      HCACHE_ASSIGN_OR_RETURN(const size_t got, input_.file_->read_at(at, piece));
      if (got == 0) break;
      hasher.add_raw(piece.data(), got);
      HCACHE_RETURN_IF_ERROR(take({reinterpret_cast<const char*>(piece.data()), got}));
      at += got;
    }
    HCACHE_RETURN_IF_ERROR(end_line());
    input_.hash_ = to_hex(hasher.finish<Id128<struct BatchInputTag>>());
    if (input_.lines_.empty()) {
      return invalid_argument(
          fmt::format("{} holds no request; put one JSON object on each line", input_.path()));
    }
    set_order();
    return {};
  }

 private:
  Status take(std::string_view bytes) {
    while (!bytes.empty()) {
      const size_t end = bytes.find('\n');
      const std::string_view part = bytes.substr(0, end);
      length_ += part.size();
      if (length_ <= limits_.line_bytes) text_ += part;
      if (end == std::string_view::npos) return {};
      HCACHE_RETURN_IF_ERROR(end_line());
      bytes.remove_prefix(end + 1);
    }
    return {};
  }

  Status end_line() {
    ++number_;
    const uint64_t offset = std::exchange(offset_, offset_ + length_ + 1);
    const uint64_t length = std::exchange(length_, 0);
    const std::string text = std::exchange(text_, {});
    if (length <= limits_.line_bytes && trimmed(text).empty()) return {};
    if (static_cast<int64_t>(input_.lines_.size()) >= limits_.lines) {
      return out_of_range(
          fmt::format("{} holds more than {} requests; split it", input_.path(), limits_.lines));
    }
    BatchLine line;
    line.number = number_;
    line.offset = offset;
    line.bytes = length;
    PrefixHashes hashes{};
    if (length > limits_.line_bytes) {
      line.status = invalid_argument(
          fmt::format("the line has {} bytes, at most {} are allowed", length, limits_.line_bytes));
    } else {
      const Result<BatchRequest> request = parse_batch_line(text, number_, &line.custom_id);
      line.status = request.status();
      if (request.ok()) {
        line.url = *std::find(kUrls.begin(), kUrls.end(), request->url);
        hashes = prefix_hashes(request->body);
      }
    }
    HCACHE_RETURN_IF_ERROR(note_id(line));
    input_.lines_.push_back(std::move(line));
    hashes_.push_back(hashes);
    return {};
  }

  Status note_id(const BatchLine& line) {
    if (line.custom_id.empty()) return {};
    const auto [first, is_new] = line_of_.emplace(line.custom_id, line.number);
    if (is_new) return {};
    return invalid_argument(
        fmt::format("{}: lines {} and {} have the same custom_id '{}'; each needs its own",
                    input_.path(), first->second, line.number, line.custom_id));
  }

  // Each prefix is ranked by the first line that begins with it.
  void set_order() {
    using Ranks = std::array<uint32_t, kPrefixes>;
    std::vector<Ranks> ranks(hashes_.size());
    for (size_t k = 0; k < kPrefixes; ++k) {
      std::unordered_map<uint64_t, uint32_t> first;
      for (size_t i = 0; i < hashes_.size(); ++i) {
        if (!input_.lines_[i].status.ok()) continue;
        ranks[i].at(k) = first.emplace(hashes_[i].at(k), static_cast<uint32_t>(i)).first->second;
      }
    }
    for (size_t i = 0; i < hashes_.size(); ++i) {
      if (input_.lines_[i].status.ok()) input_.order_.push_back(i);
    }
    std::stable_sort(input_.order_.begin(), input_.order_.end(),
                     [&](size_t a, size_t b) { return ranks[a] < ranks[b]; });
  }

  BatchInput& input_;
  const BatchInputLimits limits_;
  int64_t number_ = 0;
  uint64_t offset_ = 0;  // of the line in hand
  uint64_t length_ = 0;
  std::string text_;  // its beginning, where it is too long
  std::vector<PrefixHashes> hashes_;
  std::unordered_map<std::string, int64_t> line_of_;  // by custom_id
};

Result<BatchInput> BatchInput::open(Env& env, const std::string& path,
                                    const BatchInputLimits& limits) {
  BatchInput input;
  HCACHE_ASSIGN_OR_RETURN(input.file_, env.open_file(path, {}));
  HCACHE_RETURN_IF_ERROR(Scan(input, limits).run());
  return input;
}

int64_t BatchInput::bad_lines() const {
  return std::count_if(lines_.begin(), lines_.end(),
                       [](const BatchLine& line) { return !line.status.ok(); });
}

Result<BatchRequest> BatchInput::read(size_t index) const {
  const BatchLine& line = lines_.at(index);
  std::string text(line.bytes, '\0');
  HCACHE_ASSIGN_OR_RETURN(const size_t got,
                          file_->read_at(line.offset, std::as_writable_bytes(std::span(text))));
  text.resize(got);
  Result<BatchRequest> request = parse_batch_line(text, line.number);
  if (!request.ok() || request->custom_id != line.custom_id) {
    return data_loss(
        fmt::format("{}, line {}: it was changed while the batch ran", path(), line.number));
  }
  return request;
}

}  // namespace hcache::server
