// Every path that the server answers, as a table.
#pragma once

#include <memory>

#include "http/router.h"
#include "service.h"

namespace hcache::server {

// What the handlers need beside the service. Threading: stop() and the destructor from one thread.
class Endpoints {
 public:
  Endpoints() = default;
  Endpoints(const Endpoints&) = delete;
  Endpoints& operator=(const Endpoints&) = delete;
  virtual ~Endpoints() = default;

  // Ends what is still being done for clients that have gone. After the last request, before the
  // service stops.
  virtual void stop() = 0;
};

// The handlers refer to the service and to what is returned: both must outlive the router.
std::unique_ptr<Endpoints> add_endpoints(Service& service, http::Router* router);

}  // namespace hcache::server
