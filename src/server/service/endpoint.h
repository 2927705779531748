// What the tables of endpoints share: a request on its way through a worker, and its answer.
//
// Threading: any thread.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "api/json.h"
#include "base/ids.h"
#include "base/status.h"
#include "http/message.h"
#include "http/router.h"
#include "service.h"
#include "work_queue.h"

namespace hcache::server {

struct Call {
  http::Request request;
  std::shared_ptr<http::Responder> responder;
  api::Json body;  // null where there was none
};

void send_json(http::Responder& responder, const api::Json& json, int status = 200);
// The error as the path's protocol words it.
void send_status(const http::Request& request, http::Responder& responder, const Status& status);

// A handler that parses the body as JSON, where there is one, and answers with what `answer`
// returns: on the queue, which must outlive the router.
using Answer = std::function<Result<api::Json>(Call&)>;
[[nodiscard]] http::Handler answer_on(WorkQueue& queue, Answer answer);

// The salt of an endpoint without a body of its own: the key's and the query's `cache_salt`.
[[nodiscard]] Salt salt_of(const Service& service, const http::Request& request);

// Of the pages that hold a match's state.
[[nodiscard]] uint64_t page_bytes(const store::Match& match);

// kFailedPrecondition with --no-store.
[[nodiscard]] Result<store::Store*> store_of(Service& service);

}  // namespace hcache::server
