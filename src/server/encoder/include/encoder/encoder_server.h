// `hcache serve` with a model that makes vectors or ranks and no text: llama-server's, OpenAI's and
// Ollama's endpoints for them, over one thread that computes.
//
// Threading: start, stop and the destructor from one thread; drain and port from any.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>

#include "base/env.h"
#include "base/status.h"
#include "http/server.h"
#include "libllama/llama_encoder.h"

namespace hcache::encoder {

struct EncoderServerOptions {
  std::string model_path;
  libllama::EncoderOptions encoder;
  http::Options http;
  // The model's names for clients, the first of them in alphabetical order is its id; empty: its
  // file's. And what it is good for, in words of the operator's.
  std::set<std::string> aliases;
  std::set<std::string> tags;
  int embd_normalize = 2;    // of requests that do not say (api/embeddings.h)
  int64_t max_queued = 256;  // requests that wait or are computed; beyond it 429
  bool log_requests = false;
  std::string version;  // of this program
  // Called with the port once it is open, before the model is loaded. May be empty.
  std::function<void(uint16_t port)> on_listening;
};

class EncoderServer {
 public:
  // Listens and loads the model. Errors of both. Until it returns, every request is answered with
  // 503.
  [[nodiscard]] static Result<std::unique_ptr<EncoderServer>> start(Env& env,
                                                                    EncoderServerOptions options);
  virtual ~EncoderServer() = default;  // as stop(0)

  // /health answers with 503 from now on; requests that come are still served.
  virtual void drain() = 0;
  // Accepts nothing more, lets what runs end for grace_ns, and cuts off the rest.
  virtual void stop(int64_t grace_ns) = 0;
  [[nodiscard]] virtual uint16_t port() const = 0;
};

}  // namespace hcache::encoder
