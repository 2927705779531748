// Pictures and sounds in prompts.
#pragma once

#include <string>

#include "options.h"
#include "server/server.h"

namespace hcache::cli {

struct MediaArgs : Options {
  using Options::Options;

  std::string projector =
      text(&projector, "--mmproj", "FILE", "",
           "the model's projector (GGUF), for pictures and sounds in prompts; the model runs on "
           "libllama then");
  bool on_cpu = flag(&on_cpu, "--no-mmproj-offload", "compute the projector on the CPU",
                     {.needs = "--mmproj"});
  int min_tokens = integer(&min_tokens, "--image-min-tokens", "TOKENS", 0, {0, 65536},
                           "of a picture, where the model has no fixed number; 0: as its file says",
                           {.needs = "--mmproj"});
  int max_tokens =
      integer(&max_tokens, "--image-max-tokens", "TOKENS", 0, {0, 65536},
              "likewise, at most; larger pictures are made smaller", {.needs = "--mmproj"});
  std::string folder =
      text(&folder, "--media-path", "DIR", "",
           "requests may name files of this folder as file://NAME; default: they send all media "
           "themselves",
           {.needs = "--mmproj"});

  void apply(server::ServerOptions* options) const {
    libllama::ProjectorOptions& p = options->runtime.projector;
    p.path = projector;
    p.on_device = !on_cpu;
    p.min_image_tokens = min_tokens;
    p.max_image_tokens = max_tokens;
    options->media_dir = folder;
  }
};

}  // namespace hcache::cli
