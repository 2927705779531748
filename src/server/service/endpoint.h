// What the tables of endpoints share: a request on its way through a worker, and its answer.
//
// Threading: any thread.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "api/answers.h"
#include "api/json.h"
#include "api/list_page.h"
#include "base/ids.h"
#include "base/status.h"
#include "base/work_queue.h"
#include "http/message.h"
#include "http/router.h"
#include "service.h"

namespace hcache::server {

struct Call {
  http::Request request;
  std::shared_ptr<http::Responder> responder;
  api::Json body;  // null where there was none
};

void send_json(http::Responder& responder, const api::Json& json, int status = 200);
// Where there are too many requests, it says when to come again.
void send_error(http::Responder& responder, const api::ErrorAnswer& answer);
// The error as the path's protocol words it.
void send_status(const http::Request& request, http::Responder& responder, const Status& status);

// A handler that parses the body as JSON, where there is one, and answers with what `answer`
// returns: on the queue, which must outlive the router.
using Answer = std::function<Result<api::Json>(Call&)>;
[[nodiscard]] http::Handler answer_on(WorkQueue& queue, Answer answer);

// A handler that runs on a queue of transfers, with the body as it came; 503 where too many wait
// there already. The queue must outlive the router.
[[nodiscard]] http::Handler transfer_on(WorkQueue& transfers, std::function<void(const Call&)> run);

// A stream of bytes that waits for its client. The service and the responder must outlive it.
class PacedStream {
 public:
  PacedStream(Service& service, http::Responder& responder);
  void start(const char* content_type, const http::Headers& more = {});
  // kCancelled: the client has gone.
  Status write(std::string_view piece);
  // Ends it after `written`; without an end the client knows that it has not got everything.
  void finish(const Status& written);
  [[nodiscard]] const std::atomic<bool>& gone() const { return *gone_; }

 private:
  Service& service_;
  http::Responder& responder_;
  const std::shared_ptr<std::atomic<bool>> gone_ = std::make_shared<std::atomic<bool>>(false);
};

// The salt of an endpoint without a body of its own: the key's and the query's `cache_salt`.
[[nodiscard]] Salt salt_of(const Service& service, const http::Request& request);

// A number in a query or a form. kInvalidArgument names it.
[[nodiscard]] Result<int64_t> parse_number(std::string_view name, std::string_view text,
                                           int64_t least, int64_t most);

// The part of a list that the query asks for: `limit`, and cursors by these names (`before` may be
// null).
[[nodiscard]] Result<api::ListPage> page_of(const http::Request& request, size_t usual, size_t most,
                                            const char* after, const char* before);
// The query's `order`: asc, or desc (the default).
[[nodiscard]] Result<bool> is_ascending(const http::Request& request);

// Of the pages that hold a match's state.
[[nodiscard]] uint64_t page_bytes(const store::Match& match);

[[nodiscard]] api::ModelCard model_card(Service& service);

// kFailedPrecondition with --no-store.
[[nodiscard]] Result<store::Store*> store_of(Service& service);

}  // namespace hcache::server
