// Takes chunks out of an S3 store, and nothing else: their indexes, then their pages. Objects that
// hold only those are deleted; of others the pages are overwritten with zeros.
//
// Threading: erase() on one thread, which it keeps waiting; stop() from any.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/sync.h"
#include "s3/s3_client.h"
#include "s3/s3_format.h"

namespace hcache::store {

class S3Eraser {
 public:
  S3Eraser(Env& env, const Seal& seal, S3Client& client)
      : env_(env), seal_(seal), client_(client) {}

  // The first thing that failed; what could be erased is. A chunk that is not there is erased.
  [[nodiscard]] Status erase(std::span<const ChunkId> ids) HCACHE_EXCLUDES(waits_->mutex);
  // Ends an erase() that waits, and those to come: cancelled.
  void stop() HCACHE_EXCLUDES(waits_->mutex);

 private:
  struct Waits {
    Mutex mutex;
    CondVar come;
    bool stop HCACHE_GUARDED_BY(mutex) = false;
  };
  // What is erased of one object.
  struct Victims {
    bool alone = false;           // nothing else can lie in it
    std::vector<ChunkId> chunks;  // hidden
    std::vector<S3Hole> holes;
  };

  // The answers, in order; all cancelled when stop() comes first.
  [[nodiscard]] std::vector<Result<std::string>> ask(std::vector<S3Call> calls)
      HCACHE_EXCLUDES(waits_->mutex);
  [[nodiscard]] Result<std::string> ask(S3Call call) HCACHE_EXCLUDES(waits_->mutex);
  // Takes the chunks out of objects that hold something else too, and appends to `removals` those
  // that turn out to be empty then.
  [[nodiscard]] Status take_out(const std::map<ObjectName, Victims>& objects,
                                std::vector<S3Call>* removals);
  [[nodiscard]] Status overwrite(const ObjectName& name, const Victims& victims,
                                 std::vector<S3Call>* removals);

  Env& env_;
  const Seal seal_;
  S3Client& client_;
  const std::shared_ptr<Waits> waits_ = std::make_shared<Waits>();
};

}  // namespace hcache::store
