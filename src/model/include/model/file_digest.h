// A name for a model file's content, whatever its architecture.
#pragma once

#include <string>

#include "base/env.h"
#include "base/status.h"
#include "model/model.h"

namespace hcache::model {

// 32 hex digits over the metadata, the vocabulary and the chat template aside, and over every
// tensor's name, type, shape and bytes. The file is read once; the digest is kept in `cache_dir`
// keyed by (path, size, mtime, inode), an empty one keeps nothing. Errors of reading the file, and
// kCancelled.
// Threading: any thread.
Result<std::string> file_digest(Env& env, const std::string& path, const std::string& cache_dir,
                                const Progress& progress);

}  // namespace hcache::model
