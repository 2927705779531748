// Session files: one session with its saved state, to be read by another store of the same format
// (docs/format.md, "Session file").
//
// A file holds no salt and no chunk ids, since ids are hashes of the salt too: both are made anew
// where it is read. Of its bytes each is covered by a checksum, and nothing in it is believed
// before that holds. Checksums find damage, not forgery: the author of a file could have put any
// state into it.
// Threading: plain functions; any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "store/store.h"

namespace hcache::store {

struct ArchiveHead {
  Fingerprint fingerprint;
  std::string model;  // the model's name, for people
  std::string name;   // the session's, without anything of its salt
  std::vector<std::int32_t> tokens;
  std::string metadata_json;
};

// A chunk of a file that was read. Its tokens are the session's from first_token on.
struct ArchiveChunk {
  std::uint64_t first_token = 0;
  std::uint32_t n_tokens = 0;
  ElementType k_type = ElementType::kNone;
  ElementType v_type = ElementType::kNone;
  std::vector<PageWrite> pages;  // spans of the file
};

struct Archive {
  ArchiveHead head;
  std::vector<ArchiveChunk>
      chunks;  // from the first token on, without a hole; the last may be short
};

// Takes a file's bytes in order, in pieces of at most a MiB; an error ends the writing with it.
using ArchiveSink = std::function<Status(std::string_view)>;

// The chunks of a match that a session's file may hold: those whose tokens are all the session's.
// A last chunk of which only the first rows fit also holds what another session said.
[[nodiscard]] std::span<const MatchedChunk> archived_chunks(const Match& match);

// Writes the session and the match of its tokens. A page that fails its check is dropped from the
// store and ends the writing with data_loss: the next file is written without it.
[[nodiscard]] Status write_archive(Store& store, const ArchiveHead& head, const Match& match,
                                   const ArchiveSink& sink);

// Reads a whole file and checks all of it. invalid_argument says what is wrong and at which byte.
// The result refers to `file`.
[[nodiscard]] Result<Archive> read_archive(std::string_view file);

// Puts a file's chunks under a salt, all or nothing; Store::put's errors.
[[nodiscard]] Result<PutReport> put_archive(Store& store, const Archive& archive, const Salt& salt);

}  // namespace hcache::store
