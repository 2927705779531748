// Every path that the server answers, as a table.
#pragma once

#include <memory>

#include "http/router.h"
#include "service.h"

namespace hcache::server {

// The handlers refer to the service and to what is returned: both must outlive the router.
std::shared_ptr<void> add_endpoints(Service& service, http::Router* router);

}  // namespace hcache::server
