// The models in a folder, a name each.
//
// Threading: any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "router/model_router.h"

namespace hcache::router {

// Every GGUF file of the folder is a model, and every folder in it that holds one; of a model in
// several files (NAME-00001-of-00003.gguf) the first stands for all. Names are those of the files
// without the ending, or the folder's. A file with "mmproj" in its name is the projector of the
// model that has the folder with it to itself, elsewhere it is left out, as is what begins with a
// dot. Sorted by name. Errors as Env::list_dir.
[[nodiscard]] Result<std::vector<ModelFile>> find_models(Env& env, const std::string& folder);

}  // namespace hcache::router
