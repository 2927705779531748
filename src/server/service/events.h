// The stream behind /events: what the server is doing, once a second, to everybody who listens.
//
// Threading: any thread.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/sync.h"
#include "http/message.h"

namespace hcache::server {

class Events {
 public:
  // `snapshot` gives the JSON text of an event; it is called on a thread of its own, and only while
  // somebody listens.
  explicit Events(std::function<std::string()> snapshot);
  ~Events();
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;

  // Ends every stream; later ones are refused.
  void stop();
  // Starts the stream. Refused with 503 when too many listen already, and when stopped.
  void subscribe(std::shared_ptr<http::Responder> responder);

 private:
  void run();
  void publish();

  const std::function<std::string()> snapshot_;
  Mutex mutex_;
  CondVar wake_;
  std::vector<std::shared_ptr<http::Responder>> listeners_ HCACHE_GUARDED_BY(mutex_);
  bool stop_ HCACHE_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace hcache::server
