// /api: what Ollama's clients ask for, of the one model that this server has.
//
// Threading: as a Service; add_to() from one thread.
#pragma once

#include <string>

#include "api/ollama.h"
#include "endpoint.h"

namespace hcache::server {

class OllamaEndpoints {
 public:
  explicit OllamaEndpoints(Service& service) : service_(service) {}

  void add_to(http::Router* router);

 private:
  Result<api::GenerationRequest> generate(const api::Json& body) const;
  Result<api::Json> show(const Call& call) const;
  [[nodiscard]] api::OllamaModel model() const;

  Service& service_;
};

}  // namespace hcache::server
