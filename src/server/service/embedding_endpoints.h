// /v1/embeddings, llama-server's /embedding, Ollama's /api/embed: vectors for texts, made of the
// rows behind the model's final norm. They run as requests among all others; nothing of them is
// saved.
//
// Threading: as a Service; add_to() from one thread.
#pragma once

#include "endpoint.h"

namespace hcache::server {

class EmbeddingEndpoints {
 public:
  explicit EmbeddingEndpoints(Service& service) : service_(service) {}

  void add_to(http::Router* router);

 private:
  Service& service_;
};

}  // namespace hcache::server
