// ThrottledEnv: another Env, whose queued reads come over a link of a given speed. A peer of
// base/fault_env.h for experiments: real reads with the balance of compute and link of another
// machine.
//
// All its queues share the one link, and reads cross it in the order of their submission. The base
// Env transfers a read meanwhile; it completes when the base has it and its last byte has crossed,
// and partial completions (IoCompletion::partial) report every two milliseconds how far it is.
// A read that is cancelled gives up what it has not used of the link.
// Writes, and reads that go through a File, are not slowed.
// Threading: as Env. The base Env must outlive it, and it its queues.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/env.h"

namespace hcache {

class ThrottledEnv final : public Env {
 public:
  // bytes_per_s 0: not slowed.
  explicit ThrottledEnv(Env& base, double bytes_per_s = 0);
  ~ThrottledEnv() override;

  // For what is under way, too.
  void set_read_bytes_per_s(double bytes_per_s);

  [[nodiscard]] Result<std::unique_ptr<File>> open_file(const std::string& path,
                                                        const OpenOptions& options) override;
  [[nodiscard]] Status make_dirs(const std::string& path) override;
  [[nodiscard]] Result<std::vector<std::string>> list_dir(const std::string& path) override;
  [[nodiscard]] Result<FileInfo> file_info(const std::string& path) override;
  [[nodiscard]] Status rename_file(const std::string& from, const std::string& to) override;
  [[nodiscard]] Status remove_path(const std::string& path) override;
  [[nodiscard]] Status sync_dir(const std::string& path) override;
  [[nodiscard]] Result<SpaceInfo> space(const std::string& path) override;
  [[nodiscard]] Result<std::unique_ptr<FileLock>> lock_file(const std::string& path) override;
  [[nodiscard]] std::int64_t monotonic_ns() override;
  [[nodiscard]] std::int64_t wall_ns() override;
  void sleep_ns(std::int64_t duration_ns) override;
  [[nodiscard]] std::uint64_t random_u64() override;
  [[nodiscard]] Result<std::unique_ptr<IoQueue>> new_io_queue(std::size_t depth) override;
  [[nodiscard]] double nominal_read_bytes_per_s() const override;

 private:
  struct Transfer;
  struct Link;
  class ThrottledQueue;

  Env& base_;
  const std::unique_ptr<Link> link_;
};

}  // namespace hcache
