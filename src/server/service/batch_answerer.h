// Requests of batches on the way of every other request: parsed, rendered, submitted, worded as
// those that come over HTTP.
//
// Threading: any thread.
#pragma once

#include <string>
#include <utility>

#include "batch_run.h"
#include "service.h"

namespace hcache::server {

// Whose requests they are.
struct BatchClient {
  int key_index = -1;       // of the API keys; -1: there are none, or all share their state
  std::string key_name;     // for limits and logs
  bool background = false;  // all other requests go before them
};

class ServiceAnswerer final : public Answerer {
 public:
  // The service must outlive it, and everything that was submitted.
  explicit ServiceAnswerer(Service& service, BatchClient client = {})
      : service_(service), client_(std::move(client)) {}

  [[nodiscard]] Cancel submit(BatchRequest request, Done done) override;

 private:
  Service& service_;
  const BatchClient client_;
};

}  // namespace hcache::server
