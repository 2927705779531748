#include "batch_endpoints.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "api/request.h"
#include "base/log.h"
#include "batch_json.h"
#include "http/multipart.h"

namespace hcache::server {
namespace {

using api::Json;

constexpr size_t kMostBatches = 100;    // of a page, as OpenAI limits it
constexpr size_t kMostMessages = 1000;  // as Anthropic does
constexpr size_t kMostFiles = 10'000;
constexpr size_t kMaxFilename = 512;  // bytes
constexpr size_t kPieceBytes = size_t{256} << 10U;
constexpr uint64_t kMessagesBodyBytes = uint64_t{64} << 20U;
constexpr int64_t kNsPerSecond = 1'000'000'000;
// Many small requests in one body.
constexpr api::BodyLimits kMessagesLimits = {.max_values = size_t{1} << 22U};

// Whose a client's files and batches are: the key's, whatever salts its requests add.
std::string owner_of(const Service& service, const http::Request& request) {
  return to_hex(service.salt_of(request, "").owner);
}

// The name alone, without a client's folders.
std::string base_name(std::string name) {
  const size_t slash = name.find_last_of("/\\");
  if (slash != std::string::npos) name.erase(0, slash + 1);
  return name.empty() ? "upload.jsonl" : name;
}

// What an upload's form says.
struct Upload {
  StoredFile file;  // name, purpose, and as long as it is kept: expires_ns
  std::string_view content;
};

Result<Upload> read_upload(const http::Request& request, int64_t now_ns) {
  const std::string* type = request.header("content-type");
  HCACHE_ASSIGN_OR_RETURN(
      const std::vector<http::FormPart> parts,
      http::parse_form(type == nullptr ? std::string_view() : *type, request.body));
  const auto find = [&](std::string_view name) {
    const auto part = std::find_if(parts.begin(), parts.end(),
                                   [&](const http::FormPart& p) { return p.name == name; });
    return part == parts.end() ? nullptr : &*part;
  };
  Upload upload;
  const http::FormPart* purpose = find("purpose");
  if (purpose == nullptr || purpose->content != kBatchPurpose) {
    return invalid_argument("purpose: expected batch; this server keeps no other files");
  }
  upload.file.purpose = kBatchPurpose;
  const http::FormPart* file = find("file");
  if (file == nullptr) return invalid_argument("file: it is missing");
  upload.file.filename = base_name(file->filename);
  if (upload.file.filename.size() > kMaxFilename) {
    return invalid_argument(fmt::format("file: its name has more than {} bytes", kMaxFilename));
  }
  upload.content = file->content;
  if (const http::FormPart* anchor = find("expires_after[anchor]");
      anchor != nullptr && anchor->content != "created_at") {
    return invalid_argument("expires_after[anchor]: expected created_at");
  }
  if (const http::FormPart* ttl = find("expires_after[seconds]")) {
    HCACHE_ASSIGN_OR_RETURN(
        const int64_t seconds,
        parse_number("expires_after[seconds]", ttl->content, 3600, 30LL * 24 * 3600));
    upload.file.expires_ns = now_ns + seconds * kNsPerSecond;
  }
  return upload;
}

// Reads a file in pieces.
Status read_pieces(Env& env, const std::string& path,
                   const std::function<Status(std::string_view)>& take) {
  HCACHE_ASSIGN_OR_RETURN(const auto file, env.open_file(path, {}));
  std::vector<std::byte> piece(kPieceBytes);
  for (uint64_t at = 0;;) {
    HCACHE_ASSIGN_OR_RETURN(const size_t got, file->read_at(at, piece));
    if (got == 0) return {};
    at += got;
    HCACHE_RETURN_IF_ERROR(take({reinterpret_cast<const char*>(piece.data()), got}));
  }
}

// Results as Anthropic words them, line by line.
Status send_as_anthropic(Env& env, const std::string& path, PacedStream& to) {
  std::string line;
  return read_pieces(env, path, [&](std::string_view piece) -> Status {
    while (true) {
      const size_t end = piece.find('\n');
      line += piece.substr(0, end);
      if (end == std::string_view::npos) return {};
      HCACHE_ASSIGN_OR_RETURN(const std::string words, anthropic_result_line(line));
      HCACHE_RETURN_IF_ERROR(to.write(words));
      line.clear();
      piece.remove_prefix(end + 1);
    }
  });
}

}  // namespace

Result<Batches*> BatchEndpoints::batches() const {
  if (service_.batches() == nullptr) {
    return unavailable("this server takes no batches; its log says why");
  }
  return service_.batches();
}

Result<StoredBatch> BatchEndpoints::find(const Call& call, bool anthropic) const {
  HCACHE_ASSIGN_OR_RETURN(Batches * batches, this->batches());
  const std::string& id = *call.request.param("id");
  HCACHE_ASSIGN_OR_RETURN(StoredBatch batch,
                          batches->store().batch(owner_of(service_, call.request), id));
  if (batch.anthropic != anthropic) return not_found(fmt::format("there is no batch '{}'", id));
  return batch;
}

// ---- Files --------------------------------------------------------------------------------------

Result<Json> BatchEndpoints::upload(const Call& call) {
  HCACHE_ASSIGN_OR_RETURN(Batches * batches, this->batches());
  HCACHE_ASSIGN_OR_RETURN(Upload upload, read_upload(call.request, service_.env().wall_ns()));
  upload.file.owner = owner_of(service_, call.request);
  HCACHE_ASSIGN_OR_RETURN(const StoredFile file,
                          batches->store().add_file(std::move(upload.file), upload.content));
  return file_json(file);
}

Result<Json> BatchEndpoints::list_files(const Call& call) const {
  HCACHE_ASSIGN_OR_RETURN(Batches * batches, this->batches());
  HCACHE_ASSIGN_OR_RETURN(const api::ListPage page,
                          page_of(call.request, kMostFiles, kMostFiles, "after", nullptr));
  std::vector<StoredFile> files = batches->store().files(owner_of(service_, call.request));
  const std::string* purpose = call.request.query_value("purpose");
  std::erase_if(files, [&](const StoredFile& file) {
    return file.purpose == kMessagesPurpose || (purpose != nullptr && file.purpose != *purpose);
  });
  HCACHE_ASSIGN_OR_RETURN(const bool oldest_first, is_ascending(call.request));
  if (oldest_first) std::reverse(files.begin(), files.end());
  return page_json(files, page, file_json);
}

Result<Json> BatchEndpoints::get_file(const Call& call) const {
  HCACHE_ASSIGN_OR_RETURN(Batches * batches, this->batches());
  HCACHE_ASSIGN_OR_RETURN(
      const StoredFile file,
      batches->store().file(owner_of(service_, call.request), *call.request.param("id")));
  return file_json(file);
}

Result<Json> BatchEndpoints::remove_file(const Call& call) {
  HCACHE_ASSIGN_OR_RETURN(Batches * batches, this->batches());
  const std::string& id = *call.request.param("id");
  HCACHE_RETURN_IF_ERROR(batches->store().remove_file(owner_of(service_, call.request), id));
  return deleted_file_json(id);
}

Status BatchEndpoints::send_content(const Call& call) {
  HCACHE_ASSIGN_OR_RETURN(Batches * batches, this->batches());
  HCACHE_ASSIGN_OR_RETURN(
      const StoredFile file,
      batches->store().file(owner_of(service_, call.request), *call.request.param("id")));
  PacedStream to(service_, *call.responder);
  to.start("application/octet-stream");
  to.finish(read_pieces(service_.env(), batches->store().content_path(file.id),
                        [&](std::string_view piece) { return to.write(piece); }));
  return {};
}

// ---- Batches ------------------------------------------------------------------------------------

Result<Json> BatchEndpoints::create(const Call& call) {
  HCACHE_ASSIGN_OR_RETURN(Batches * batches, this->batches());
  HCACHE_ASSIGN_OR_RETURN(const api::CreateBatch asked, api::parse_create_batch(call.body));
  HCACHE_ASSIGN_OR_RETURN(const StoredBatch created,
                          batches->create(owner_of(service_, call.request), asked));
  return batch_json(created);
}

Result<Json> BatchEndpoints::create_messages(const Call& call) {
  HCACHE_ASSIGN_OR_RETURN(Batches * batches, this->batches());
  std::string lines;
  {
    HCACHE_ASSIGN_OR_RETURN(const Json body, api::parse_body(call.request.body, kMessagesLimits));
    HCACHE_ASSIGN_OR_RETURN(lines, api::parse_message_batch(body));
  }
  HCACHE_ASSIGN_OR_RETURN(const StoredBatch created,
                          batches->create_messages(owner_of(service_, call.request), lines));
  return message_batch_json(created);
}

Result<Json> BatchEndpoints::list(const Call& call, bool anthropic) const {
  HCACHE_ASSIGN_OR_RETURN(Batches * batches, this->batches());
  constexpr size_t kUsual = 20;
  HCACHE_ASSIGN_OR_RETURN(
      const api::ListPage page,
      anthropic ? page_of(call.request, kUsual, kMostMessages, "after_id", "before_id")
                : page_of(call.request, kUsual, kMostBatches, "after", nullptr));
  HCACHE_ASSIGN_OR_RETURN(
      Json list, page_json(batches->store().batches(owner_of(service_, call.request), anthropic),
                           page, anthropic ? message_batch_json : batch_json));
  if (anthropic) list.erase("object");
  return list;
}

Result<Json> BatchEndpoints::get(const Call& call, bool anthropic) const {
  HCACHE_ASSIGN_OR_RETURN(const StoredBatch batch, find(call, anthropic));
  return anthropic ? message_batch_json(batch) : batch_json(batch);
}

Result<Json> BatchEndpoints::cancel(const Call& call, bool anthropic) {
  HCACHE_ASSIGN_OR_RETURN(Batches * batches, this->batches());
  HCACHE_ASSIGN_OR_RETURN(
      const StoredBatch batch,
      batches->cancel(owner_of(service_, call.request), *call.request.param("id"), anthropic));
  return anthropic ? message_batch_json(batch) : batch_json(batch);
}

Result<Json> BatchEndpoints::remove_messages(const Call& call) {
  HCACHE_ASSIGN_OR_RETURN(Batches * batches, this->batches());
  HCACHE_ASSIGN_OR_RETURN(const StoredBatch batch, find(call, /*anthropic=*/true));
  HCACHE_RETURN_IF_ERROR(batches->store().remove_batch(batch.owner, batch.id));
  return deleted_message_batch_json(batch.id);
}

Status BatchEndpoints::send_results(const Call& call) {
  HCACHE_ASSIGN_OR_RETURN(Batches * batches, this->batches());
  HCACHE_ASSIGN_OR_RETURN(const StoredBatch batch, find(call, /*anthropic=*/true));
  if (!has_ended(batch.status)) {
    return failed_precondition(
        fmt::format("batch '{}' has not ended; its results are there once it has", batch.id));
  }
  PacedStream to(service_, *call.responder);
  to.start("application/x-jsonl");
  Status sent;
  for (const auto& [id, bytes] : {std::pair(batch.output_file_id, batch.output_bytes),
                                  std::pair(batch.error_file_id, batch.error_bytes)}) {
    if (!sent.ok() || bytes == 0) continue;
    sent = send_as_anthropic(service_.env(), batches->store().content_path(id), to);
  }
  to.finish(sent);
  return {};
}

// ---- The table ----------------------------------------------------------------------------------

void BatchEndpoints::add_to(http::Router* router) {
  const auto slow = [this](Answer answer) {
    return answer_on(service_.keeper(), std::move(answer));
  };
  const auto answers = [](auto answer) {
    return [answer](const Call& call) {
      const Result<Json> json = answer(call);
      if (!json.ok()) return send_status(call.request, *call.responder, json.status());
      send_json(*call.responder, *json);
    };
  };
  const auto streams = [](auto send) {
    return [send](const Call& call) {
      const Status status = send(call);
      if (!status.ok()) send_status(call.request, *call.responder, status);
    };
  };
  const uint64_t large = service_.options().http.max_bodies_bytes / 2;
  router->add("POST", "/v1/files",
              transfer_on(transfers_, answers([this](const Call& call) { return upload(call); })),
              {.max_body_bytes = large});
  router->add("GET", "/v1/files", slow([this](Call& call) { return list_files(call); }));
  router->add("GET", "/v1/files/{id}", slow([this](Call& call) { return get_file(call); }));
  router->add("DELETE", "/v1/files/{id}", slow([this](Call& call) { return remove_file(call); }));
  router->add(
      "GET", "/v1/files/{id}/content",
      transfer_on(transfers_, streams([this](const Call& call) { return send_content(call); })));

  router->add("POST", "/v1/batches", slow([this](Call& call) { return create(call); }));
  router->add(
      "POST", "/v1/messages/batches",
      transfer_on(transfers_, answers([this](const Call& call) { return create_messages(call); })),
      {.max_body_bytes = std::min(large, kMessagesBodyBytes)});
  for (const bool anthropic : {false, true}) {
    const std::string path = anthropic ? "/v1/messages/batches" : "/v1/batches";
    router->add("GET", path, slow([this, anthropic](Call& call) { return list(call, anthropic); }));
    router->add("GET", path + "/{id}",
                slow([this, anthropic](Call& call) { return get(call, anthropic); }));
    router->add("POST", path + "/{id}/cancel",
                slow([this, anthropic](Call& call) { return cancel(call, anthropic); }));
  }
  router->add("DELETE", "/v1/messages/batches/{id}",
              slow([this](Call& call) { return remove_messages(call); }));
  router->add(
      "GET", "/v1/messages/batches/{id}/results",
      transfer_on(transfers_, streams([this](const Call& call) { return send_results(call); })));
}

}  // namespace hcache::server
