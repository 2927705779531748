#include <fmt/format.h>

#include "projector.h"

namespace hcache::libllama {

Result<std::unique_ptr<Projector>> Projector::load(const llama_model& /*model*/,
                                                   const Options& options) {
  return unimplemented(fmt::format(
      "{}: this build takes no pictures: configure it with HCACHE_SERVER", options.projector.path));
}

}  // namespace hcache::libllama
