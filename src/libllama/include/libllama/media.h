// Pictures and sounds in prompts, through llama.cpp's libmtmd: a projector, in a file beside the
// model's, makes rows of them that stand where tokens would.
//
// Each such row has a token of its own below 0, made of the projector's digest and the file's
// bytes. So a chain of tokens says all that its state depends on, and everything that handles
// chains – matching, saving, restoring, sharing – handles pictures without knowing of them. A
// projector runs only where such rows are computed, not where they are found or restored.
#pragma once

#include <ggml-backend.h>

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"

namespace hcache::libllama {

struct ProjectorOptions {
  std::string path;       // empty: none
  std::string digest;     // of the file, as model::file_digest() has it
  bool on_device = true;  // where the model has one
  // Of a picture, where its size decides; 0: as the file says.
  int min_image_tokens = 0;
  int max_image_tokens = 0;
};

// The media of a prompt, unpacked for the projector; of use as long as rows are to be computed.
struct MediaChunks;

// The rows of a medium, or of a part that a picture is cut into, within one chain.
struct MediaRun {
  // Of a row: libllama's four sections, or the first alone where the model has one.
  using Position = std::array<int32_t, 4>;

  int64_t first = 0;  // of the chain
  int64_t n_rows = 0;
  int64_t first_position = 0;
  int64_t n_positions = 0;  // what follows is at first_position + n_positions
  // Its rows see each other, later ones, too: they are computed in one step.
  bool whole = false;
  std::vector<Position> positions;  // of every row

  [[nodiscard]] int64_t end() const { return first + n_rows; }
};

// Where a chain of tokens has media. Immutable; any thread.
class MediaRows {
 public:
  // In the order of the chain.
  explicit MediaRows(std::vector<MediaRun> runs) : runs_(std::move(runs)) {}

  [[nodiscard]] std::span<const MediaRun> runs() const { return runs_; }
  // The run that a row is in; nullptr: it is a text's.
  [[nodiscard]] const MediaRun* at(int64_t row) const;
  // The first run that ends behind a row; nullptr: there is none.
  [[nodiscard]] const MediaRun* next(int64_t row) const;
  // Of a row, its sections all alike where it is a text's.
  [[nodiscard]] MediaRun::Position position(int64_t row) const;
  // Whether a row's position is its number.
  [[nodiscard]] bool counts_rows() const;
  // The end of a step that computes rows [from, to): `to`, or, where that is in the middle of rows
  // that are computed at once, their beginning, or their end if there is nothing before them.
  [[nodiscard]] int64_t step_end(int64_t from, int64_t to) const;

 private:
  std::vector<MediaRun> runs_;
};

// A prompt with media, as tokens.
struct MediaPrompt {
  std::vector<int32_t> tokens;
  std::shared_ptr<const MediaRows> rows;
  std::shared_ptr<const MediaChunks> chunks;  // one for each run
};

// What a model with a projector takes. Any thread.
class MediaReader {
 public:
  virtual ~MediaReader() = default;
  [[nodiscard]] virtual bool takes_pictures() const = 0;
  [[nodiscard]] virtual bool takes_sounds() const = 0;
  // Media that the projector has been run for, so far.
  [[nodiscard]] virtual int64_t encoded() const = 0;
  // Tokens of a text in which each model::kMediaMarker stands for the next of `files` (JPEG, PNG,
  // BMP, GIF; WAV, MP3, FLAC), with what the model has around media. `add_special`: BOS where the
  // vocabulary says. kInvalidArgument: another number of markers, or a file that can't be read;
  // named by its place.
  [[nodiscard]] virtual Result<MediaPrompt> tokenise(const std::string& text,
                                                     std::span<const std::string> files,
                                                     bool add_special) const = 0;
};

}  // namespace hcache::libllama
