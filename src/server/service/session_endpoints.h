// /v1/sessions: what was said before, listed, changed, deleted, and carried to other servers.
//
// Threading: as a Service; add_to() from one thread.
#pragma once

#include "endpoint.h"

namespace hcache::server {

class SessionEndpoints {
 public:
  // `transfers` runs what moves whole sessions, which may take as long as a client likes.
  SessionEndpoints(Service& service, WorkQueue& transfers)
      : service_(service), transfers_(transfers) {}

  void add_to(http::Router* router);

 private:
  Result<api::Json> list(const Call& call) const;
  Result<api::Json> get(const Call& call) const;
  Result<api::Json> change(const Call& call);
  Result<api::Json> remove(const Call& call);
  void export_file(const Call& call);
  Result<api::Json> import_file(const Call& call);

  Service& service_;
  WorkQueue& transfers_;
};

}  // namespace hcache::server
