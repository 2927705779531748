// A name for a model's content: what the state fingerprint starts from.
#pragma once

#include <string>

#include "gguf_file.h"
#include "model/model.h"

namespace hcache::model {

// XXH3-128 (32 hex digits) over the numbers and every tensor's name, type, shape and bytes. The
// vocabulary and the chat template don't shape K and V and are left out, so that editing them
// keeps the saved state. Not a defence against a model file made to collide: who writes the
// model decides what it says anyway.
// release_pages: the file's pages are not wanted in memory afterwards.
Result<std::string> digest_content(const GgufFile& file, const HParams& hparams, bool release_pages,
                                   const Progress& progress);

// The same through a cache of small files in `cache_dir` (created 0700), one per path, each valid
// for one (size, mtime, inode). A cache that can't be read or written is no error.
Result<std::string> cached_digest(Env& env, const GgufFile& file, const HParams& hparams,
                                  const std::string& cache_dir, bool release_pages,
                                  const Progress& progress);

}  // namespace hcache::model
