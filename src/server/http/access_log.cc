#include "http/access_log.h"

#include "base/log.h"

namespace hcache::http {

void log_access(const AccessRecord& r) {
  log::info("http {} {} {} {} B {:.3f} s key={} peer={}", r.method, r.path, r.status, r.bytes,
            r.seconds, r.key_name, r.peer);
}

}  // namespace hcache::http
