// Prompts with pictures and sounds, as the engine on libllama takes them.
#pragma once

#include <memory>

#include "libllama/media.h"
#include "scheduler/executor.h"

namespace hcache::serving {

// What a projector has made of a prompt's media, for its request.
class MediaParts : public scheduler::Media {
 public:
  explicit MediaParts(const libllama::MediaPrompt& prompt)
      : rows_(prompt.rows), chunks_(prompt.chunks) {}

  [[nodiscard]] int64_t step_end(int64_t from, int64_t to) const override {
    return rows_->step_end(from, to);
  }
  [[nodiscard]] const std::shared_ptr<const libllama::MediaRows>& rows() const { return rows_; }
  [[nodiscard]] const libllama::MediaChunks* chunks() const { return chunks_.get(); }

 private:
  std::shared_ptr<const libllama::MediaRows> rows_;
  std::shared_ptr<const libllama::MediaChunks> chunks_;
};

}  // namespace hcache::serving
