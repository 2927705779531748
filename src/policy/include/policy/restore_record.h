// What a restore did and what it took: the one record of it, from where it is measured to the API,
// the metrics and the page.
//
// Units: tokens, bytes, seconds.
// Threading: plain values.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "policy/restore_plan.h"

namespace hcache::policy {

// Bytes of saved state, by the tier that they came from.
struct TierBytes {
  uint64_t dram = 0;
  uint64_t disk = 0;
  uint64_t remote = 0;

  [[nodiscard]] uint64_t total() const { return dram + disk + remote; }
  TierBytes& operator+=(const TierBytes& other);
};

// When a layer was read and computed, in seconds from the restore's begin.
struct RestoredLayer {
  Method method = Method::kRecompute;  // of its first rows that are restored
  double io_begin_s = 0;               // both 0: nothing was read
  double io_end_s = 0;
  double compute_begin_s = 0;
  double compute_end_s = 0;
};

// A device's part of a restore.
struct RestoredDevice {
  std::string device;
  int32_t n_layers = 0;
  TierBytes pages;  // that were used in its layers
};

struct RestoreRecord {
  std::string schedule;         // "RE:4 H:26 KV:2"
  int64_t restored_tokens = 0;  // the sum of the next three
  int64_t hidden_tokens = 0;    // restored rows, by what most of their layers used
  int64_t kv_tokens = 0;
  int64_t recomputed_tokens = 0;
  int64_t kept_rows = 0;  // of those, that a layer has (mean) where they do without others; 0: all
  int64_t prefilled_tokens = 0;  // behind the restored ones: they followed layer by layer
  TierBytes read;                // alignment and gaps of the disks included
  TierBytes hidden_pages;        // pages that were used, by method
  TierBytes kv_pages;
  double restore_s = 0;            // until the last layer's restored rows were in the arena
  double predicted_restore_s = 0;  // the plan's for restore_s; 0: nothing was planned
  double predicted_first_s = 0;    // the plan's for the first token
  double io_busy_s = 0;
  double compute_busy_s = 0;       // prefilled_tokens included
  double project_busy_s = 0;       // of it, as Prediction::project_busy_s
  double predicted_project_s = 0;  // the plan's for project_busy_s
  double overlap = 0;              // share of the I/O time during which was computed too, 0 … 1
  bool alone = true;               // nothing else was computed or restored meanwhile
  // Pages that could not be used, and what replaced them: another encoding of the same rows, or
  // computing these rows again, counted once for every layer that they went through.
  uint64_t damaged_pages = 0;
  uint64_t replaced_pages = 0;
  int64_t repaired_layer_rows = 0;
  std::vector<RestoredLayer> layers;
  std::vector<RestoredDevice> devices;  // in the order of their first layers
};

// What a record begins with: what its plan says of a model of n_layer layers.
[[nodiscard]] RestoreRecord planned_record(const Plan& plan, int32_t n_layer);

// Share of the I/O time during which was computed too, of a restore of restore_s seconds.
[[nodiscard]] double overlap(double io_busy_s, double compute_busy_s, double restore_s);

}  // namespace hcache::policy
