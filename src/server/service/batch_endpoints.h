// /v1/files, /v1/batches and /v1/messages/batches: requests that nobody waits for.
//
// Threading: as a Service; add_to() from one thread.
#pragma once

#include <string>

#include "batches.h"
#include "endpoint.h"

namespace hcache::server {

class BatchEndpoints {
 public:
  // `transfers` runs what moves whole files, which may take as long as a client likes.
  BatchEndpoints(Service& service, WorkQueue& transfers)
      : service_(service), transfers_(transfers) {}

  void add_to(http::Router* router);

 private:
  // kUnavailable: this server has none.
  [[nodiscard]] Result<Batches*> batches() const;
  [[nodiscard]] Result<StoredBatch> find(const Call& call, bool anthropic) const;

  Result<api::Json> upload(const Call& call);
  Result<api::Json> list_files(const Call& call) const;
  Result<api::Json> get_file(const Call& call) const;
  Result<api::Json> remove_file(const Call& call);
  Status send_content(const Call& call);

  Result<api::Json> create(const Call& call);
  Result<api::Json> create_messages(const Call& call);
  Result<api::Json> list(const Call& call, bool anthropic) const;
  Result<api::Json> get(const Call& call, bool anthropic) const;
  Result<api::Json> cancel(const Call& call, bool anthropic);
  Result<api::Json> remove_messages(const Call& call);
  Status send_results(const Call& call);

  Service& service_;
  WorkQueue& transfers_;
};

}  // namespace hcache::server
