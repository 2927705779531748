// Requests of batches on the way of every other request: parsed, rendered, submitted, worded as
// those that come over HTTP.
//
// Threading: any thread.
#pragma once

#include "batch_run.h"
#include "service.h"

namespace hcache::server {

class ServiceAnswerer final : public Answerer {
 public:
  // The service must outlive it, and everything that was submitted.
  explicit ServiceAnswerer(Service& service) : service_(service) {}

  [[nodiscard]] Cancel submit(BatchRequest request, Done done) override;

 private:
  Service& service_;
};

}  // namespace hcache::server
