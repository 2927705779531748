// The line that a server's log has of an exchange.
#pragma once

#include "http/server.h"

namespace hcache::http {

// For Options::access_log: at the level of information.
void log_access(const AccessRecord& record);

}  // namespace hcache::http
