// The restoration planner: which layer of a saved context is projected from hidden states (H),
// loaded as KV, or recomputed from tokens (RE), so that the first token comes as early as possible.
// HCache §3.2 (costs) and §4.1 (bubble-free scheduler); docs/planner.md derives every formula.
//
// Everything here is a pure function of its arguments: no clock, no I/O, no engine.
// Units: seconds, bytes, rows (= tokens of the history). Threading: plain values, no shared state.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace hcache::policy {

// How one layer of one run of chunks is restored.
enum class Method : uint8_t {
  kRecompute,  // RE: run the layer on the history's tokens; only a prefix of the layers can
  kHidden,     // H: read hidden states, multiply by W_k and W_v (rotate K)
  kKv,         // KV: read K and V, copy them into the arena
  kNone,       // nothing: the layer does without these rows
};
[[nodiscard]] std::string_view method_name(Method method);  // "RE", "H", "KV", "-"

// What is saved of one layer of one run: a set of encodings.
enum Encoding : uint8_t {
  kNoEncoding = 0,
  kHasHidden = 1,
  kHasKv = 2,
  kHasBoth = 3,
  // Whatever is: the layer sees a window of later rows, and is restored without these. A request
  // with such runs is `whole`.
  kNotNeeded = 4,
};

// Seconds as a function of rows: piecewise linear through measured points. Between points it
// interpolates, outside it continues the nearest segment (never below 0); at(0) is always 0.
class CostCurve {
 public:
  struct Point {
    int64_t rows;
    double seconds;
  };

  CostCurve() = default;  // costs nothing
  // base_s once per call (kernel launch, weights read) plus per_row_s for every row.
  static CostCurve affine(double base_s, double per_row_s);
  // Points with strictly rising rows >= 1 and finite seconds >= 0; at least one. A single point
  // means proportional cost. Anything else: kInvalidArgument.
  static Result<CostCurve> table(std::vector<Point> points);

  [[nodiscard]] double at(int64_t rows) const;
  // The same curve with every second multiplied by factor (a contended or faster device).
  [[nodiscard]] CostCurve scaled(double factor) const;
  // The same with so much more for each row.
  [[nodiscard]] CostCurve with_row_s(double seconds) const;
  [[nodiscard]] const std::vector<Point>& points() const { return points_; }  // empty if affine
  [[nodiscard]] double base_s() const { return base_s_; }
  [[nodiscard]] double per_row_s() const { return per_row_s_; }

 private:
  std::vector<Point> points_;
  double base_s_ = 0;
  double per_row_s_ = 0;
};

// What one layer costs on this device. Times occupy the compute resource.
struct LayerCosts {
  CostCurve
      project;  // C_H(n): K/V products (and rotation, and the write into the arena) for n rows
  CostCurve
      load_kv;      // C_KV(n): writing n saved rows of K and V into the arena, where that takes the
                    // compute resource (a CPU: the same cores copy); zero where a copy engine does
  CostCurve dense;  // the whole layer for n new rows without attention over keys (projections, FFN)
  CostCurve attn_per_key;  // attention of n rows, per key that each of them sees: n rows at depth h
                           // take attn_per_key(n) * (h + (n + 1) / 2)
  int64_t hidden_bytes = 0;  // of one token in this layer, as stored
  int64_t kv_bytes = 0;      // of one token in this layer, as stored (K and V)
  // LinkCosts', where layers are on devices of different kinds; 0: the link's.
  double upload_bytes_per_s = 0;
};

// The path from the store into the device. Reads are the I/O resource.
struct LinkCosts {
  double bytes_per_s = 0;           // sustained; must be > 0
  double request_s = 0;             // what each request adds that bandwidth does not explain
  int64_t request_bytes = 1 << 20;  // largest single request
  double upload_bytes_per_s = 0;  // host -> device where it is a step of its own that overlaps with
                                  // the next read (a GPU); 0: no such step. The slower of read and
                                  // upload paces the link, the faster one adds one slice of lag.
  double start_s = 0;             // before the first byte moves: open, look up, queue
};

struct RestoreCosts {
  int32_t n_layer = 0;
  std::vector<LayerCosts> layers;  // one entry for all layers, or n_layer entries
  LinkCosts link;
  int64_t slice_rows = 512;  // rows of one read -> project step inside a layer; > 0
  int64_t batch_rows = 512;  // rows of one prefill step (recompute and new tokens); > 0
  int64_t ring_bytes = 0;    // read-ahead limit: bytes read but not yet consumed; 0: unlimited.
                             // A slice larger than the ring is still read, alone.
  // Of the compute resource, for the history's rows, while other requests use the rest; what is
  // prefilled behind them has all of it. In (0, 1].
  double compute_share = 1;
  double finish_s = 0;  // after the last layer: final norm, output head, sampling
  // How many consecutive layers each of several devices has that compute at once; empty, or one
  // entry: one device has all. Their reads share the link, and uploads to each have a link of their
  // own.
  std::vector<int32_t> device_layers = {};
  // The restorer stops recomputing history rows after projecting K and V in the last RE layer
  // (nothing reads that layer's output for them), so that layer costs C_H instead of C_RE.
  bool re_tail_projects = false;

  [[nodiscard]] const LayerCosts& layer(int32_t l) const {
    return layers.size() == 1 ? layers[0] : layers[static_cast<size_t>(l)];
  }
};

// kInvalidArgument naming the field when costs cannot be planned with.
[[nodiscard]] Status validate(const RestoreCosts& costs);

// C_RE(n, history): one layer's full computation for `rows` tokens behind `history` ones, in steps
// of batch_rows; quadratic in rows through attention (§3.2, T_rec).
[[nodiscard]] double prefill_layer_s(const LayerCosts& layer, int64_t rows, int64_t history,
                                     int64_t batch_rows);
// Sum of `curve` over rows cut into slices.
[[nodiscard]] double sliced_s(const CostCurve& curve, int64_t rows, int64_t slice_rows);
// Time on the link for `bytes` in one slice: the slower of read and upload.
[[nodiscard]] double link_s(const LinkCosts& link, int64_t bytes);

// Consecutive chunks of the history that have the same pages. The last chunk may be partial.
struct AvailableRun {
  int64_t tokens = 0;
  std::vector<Encoding> layers;  // n_layer entries
  // Per layer the seconds per byte of the tier that has its pages, over the link's: 0 for host
  // memory, whose pages need no reading. n_layer entries, or none: all come over the link.
  std::vector<double> slowness = {};
};

// Layers x runs, in the order of the history.
struct Availability {
  std::vector<AvailableRun> runs;
  // One run with the same encodings in every layer.
  static Availability uniform(int64_t tokens, int32_t n_layer, Encoding encodings);
  [[nodiscard]] int64_t tokens() const;
};

// kPlan is the product; the rest are baselines of §6.3. A forced mode names a preference: where its
// encoding was not saved the other one is used, and layers saved in no encoding are recomputed.
enum class Mode : uint8_t {
  kPlan,            // exact search
  kHidden,          // every layer H (HCache-O)
  kKv,              // every layer KV (KV offload)
  kRecompute,       // prefill everything
  kNaiveHybrid,     // best RE prefix, KV for the rest; no hidden states (§6.3.1)
  kTokenPartition,  // H for the first t tokens, KV or RE for the rest, in every layer (§6.3.2)
};
[[nodiscard]] std::string_view mode_name(Mode mode);  // "plan", "naive-hybrid", ...
[[nodiscard]] Result<Mode> parse_mode(std::string_view name);

struct RestoreRequest {
  Availability available;
  int64_t new_tokens = 0;  // prefilled behind the history, layer by layer; 0: restore only
  Mode mode = Mode::kPlan;
  // kTokenPartition: t is a multiple of this (1: plain; 64, 128, 256: sizes the GEMM likes).
  int64_t token_rounding = 1;
  // All of what is available or nothing, and none of it computed again: rows of a sequence that was
  // cut, which have seen others that are not there any more, or of layers that are restored without
  // some of them. But for layer 0 where it is not saved and RestoreCosts::re_tail_projects holds:
  // there rows see nothing.
  bool whole = false;
  // With `whole` and kPlan: nothing where computing everything is faster.
  bool or_nothing = false;
};

// One run of the plan: rows [begin, begin + tokens) of the history.
struct PlanRun {
  int64_t begin = 0;
  int64_t tokens = 0;
  // n_layer entries; kRecompute exactly for l < Plan::recompute_layers, kNone where not needed.
  std::vector<Method> layers;
  std::vector<double> slowness = {};  // the AvailableRun's
};

struct Prediction {
  double makespan_s = 0;      // until the first token (restore, prefill of new tokens, finish)
  double restored_s = 0;      // until the last layer's history rows are in the arena
  double io_busy_s = 0;       // time the link moves bytes
  double compute_busy_s = 0;  // time the compute resource works, prefill included; all devices'
  // Of it, history rows that are projected, or recomputed through at least one whole layer: what
  // layer 0's tail takes depends on how often its tokens repeat, which no plan knows.
  double project_busy_s = 0;
  int64_t bytes_read = 0;
};

struct Plan {
  Mode mode = Mode::kPlan;
  int64_t restored_tokens = 0;  // rows that `runs` covers, from the start of the history
  int64_t prefill_tokens = 0;   // rows behind them: history that is not restored, and new tokens
  int64_t new_tokens = 0;       // of prefill_tokens
  int32_t n_layer = 0;
  int32_t recompute_layers = 0;  // layers [0, n) recompute all restored rows from tokens
  std::vector<PlanRun> runs;     // empty: everything is prefilled
  Prediction predicted;
  std::string schedule;  // "RE:4 H:26 KV:2"; "512t H:32 | 230t KV:32" if runs differ
};

// The plan with the earliest first token. For kPlan it is the minimum of simulate() over: the
// number of leading runs to restore (the rest is prefilled, 0 = all), the RE prefix, and H or KV
// for every other cell of the matrix (beyond four runs, those runs of a layer that are saved both
// ways share the choice). With ring_bytes set the search compares the contiguous splits instead.
// Where several devices compute at once it climbs over the contiguous splits of each device's
// layers: near the minimum, not always at it.
//
// Errors: kInvalidArgument (costs, matrix shape, negative counts).
[[nodiscard]] Result<Plan> plan_restore(const RestoreCosts& costs, const RestoreRequest& request);

// When each layer's work happens, from the start of the restore. Times are 0 where nothing happens.
struct LayerTimes {
  double io_begin = 0, io_end = 0;            // first read starts, last byte is usable
  double compute_begin = 0, compute_end = 0;  // history rows of this layer
  double prefill_end = 0;                     // this layer of the prefill's first batch
};
struct Timeline {
  std::vector<LayerTimes> layers;
  Prediction total;
};

// Runs the plan through the pipeline, slice by slice: reads in layer order, one at a time, as early
// as the ring allows; compute in layer order, each slice after its bytes. The first batch of the
// prefill follows layer by layer, each layer behind its history; other batches come at the end.
// Several devices' layers are read in turns (policy/read_order.h) and computed at once; what is
// recomputed and prefilled goes through them in the layers' order.
// Uses only the plan's shape (runs, methods, token counts), not its prediction.
[[nodiscard]] Result<Timeline> simulate(const RestoreCosts& costs, const Plan& plan);

// "RE:4 H:26 KV:2" of per-layer methods; zero counts are left out.
[[nodiscard]] std::string schedule_string(const std::vector<Method>& layers);
// The paper's notation, "31H+1KV" or "40H+8RE".
[[nodiscard]] std::string paper_schedule_string(int32_t hidden, int32_t kv, int32_t recompute);

}  // namespace hcache::policy
