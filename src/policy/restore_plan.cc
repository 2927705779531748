// The exact search for the restore plan, and the forced modes beside it.
//
// Both resources work through the layers in order, so what a partial plan leaves behind is a pair
// (link free, compute free), and a smaller pair is never worse: layers are affine over (max, +).
// The search therefore walks the layers once, keeping the Pareto front of such pairs. The front
// covers every RE prefix and every assignment of H and KV to the other layers, in any order.
#include "policy/restore_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>

#include "device_splits.h"
#include "pipeline.h"

namespace hcache::policy {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Sums in another order differ in the last bits; below this fraction two plans are equally fast.
constexpr double kTie = 1e-9;

// Which encoding the cells of one layer use that are saved both ways: bit i is the i-th such run,
// set for KV. Up to kMaxFreeRuns runs every combination is tried, beyond that all or none.
using Picks = uint32_t;
constexpr int kMaxFreeRuns = 4;
constexpr Picks kAllHidden = 0;
constexpr Picks kAllKv = (Picks{1} << kMaxFreeRuns) - 1;

// What a mode lets the search choose.
struct Rules {
  Picks least = kAllHidden;  // picks from least to most are tried
  Picks most = kAllHidden;
  bool choose_recompute = false;  // else the shortest RE prefix that the matrix allows
  bool choose_runs = false;       // else as many runs as can be restored
};

Rules rules_of(Mode mode) {
  switch (mode) {
    case Mode::kPlan: return {kAllHidden, kAllKv, true, true};
    case Mode::kNaiveHybrid: return {kAllKv, kAllKv, true, true};
    case Mode::kKv: return {kAllKv, kAllKv, false, false};
    case Mode::kHidden:
    case Mode::kTokenPartition:
    case Mode::kRecompute: break;
  }
  return {};
}

// Walks over the cells of one layer, giving each its method.
class CellMethods {
 public:
  explicit CellMethods(Picks picks) : picks_(picks) {}
  Method next(Encoding saved) {
    if (saved == kHasHidden) return Method::kHidden;
    if (saved == kHasKv) return Method::kKv;
    if (saved == kNotNeeded) return Method::kNone;
    bool kv = ((picks_ >> std::min(free_++, kMaxFreeRuns - 1)) & 1) != 0;
    return kv ? Method::kKv : Method::kHidden;
  }

 private:
  Picks picks_;
  int free_ = 0;
};

// A plan before it is written out: the first `runs` runs, RE below `recompute`, then picks.
struct Choice {
  double makespan = kInfinity;
  size_t runs = 0;
  int32_t recompute = 0;
  std::vector<Picks> picks;  // n_layer entries; below `recompute` unused
};

class Search {
 public:
  Search(const RestoreCosts& costs, const RestoreRequest& request)
      : costs_(costs), request_(request), n_layer_(costs.n_layer) {
    // min_recompute_[r]: the deepest layer that some run before r lacks must be recomputed.
    min_recompute_.push_back(0);
    rows_.push_back(0);
    for (const AvailableRun& run : request.available.runs) {
      int32_t need = min_recompute_.back();
      for (int32_t l = n_layer_ - 1; l >= need; --l) {
        if (run.layers[static_cast<size_t>(l)] == kNoEncoding) {
          need = l + 1;
          break;
        }
      }
      min_recompute_.push_back(need);
      rows_.push_back(rows_.back() + run.tokens);
    }
  }

  Plan run() {
    Choice best = recompute_everything();
    if (request_.whole) {
      // Layer 0's K and V come from the tokens alone, whatever these see.
      const int32_t most = costs_.re_tail_projects ? 1 : 0;
      const bool can = request_.mode != Mode::kRecompute && min_recompute_.back() <= most;
      Rules rules = rules_of(request_.mode == Mode::kTokenPartition ? Mode::kPlan : request_.mode);
      rules.choose_recompute = false;
      const bool may_be_nothing = request_.or_nothing && request_.mode == Mode::kPlan;
      if (!may_be_nothing) best.makespan = kInfinity;
      if (const size_t all = min_recompute_.size() - 1; can && all > 0) {
        search_runs(all, rules, &best);
      }
    } else if (request_.mode != Mode::kRecompute) {
      Rules rules = rules_of(request_.mode);
      size_t most = restorable_runs();
      if (request_.mode == Mode::kTokenPartition) {
        if (most > 0) return token_partition(most);
      } else if (!rules.choose_runs) {
        best.makespan = kInfinity;
        if (most > 0) search_runs(most, rules, &best);
      } else {
        for (size_t r = most; r > 0; --r) {
          if (prefill_s(r) < best.makespan) search_runs(r, rules, &best);
        }
      }
    }
    return write_out(best);
  }

 private:
  // One way to restore a layer, and what it does to the pipeline (its prefill included).
  struct Option {
    Picks picks;
    Step step;
    std::vector<SliceGroup> slices;
    double prefill;
  };

  // A point of the front: the state after some layer, and how it came about.
  struct Node {
    PipelineState state;
    int32_t parent;  // index in the previous level; -1: layers below are all RE
    Picks picks;     // of the layer that led here
  };

  [[nodiscard]] int64_t total_rows() const { return rows_.back(); }
  [[nodiscard]] int64_t prefill_rows(int64_t restored) const {
    return total_rows() - restored + request_.new_tokens;
  }

  // Runs that can be restored at all: at least one layer must come from pages.
  [[nodiscard]] size_t restorable_runs() const {
    size_t r = min_recompute_.size() - 1;
    while (r > 0 && min_recompute_[r] >= n_layer_) --r;
    return r;
  }

  // Sums f(l) over the layers, calling it once where all layers cost the same.
  template <typename F>
  [[nodiscard]] double sum_layers(F f) const {
    if (costs_.layers.size() == 1) return f(0) * n_layer_;
    double sum = 0;
    for (int32_t l = 0; l < n_layer_; ++l) sum += f(l);
    return sum;
  }

  // Compute that every plan which restores r runs needs.
  [[nodiscard]] double prefill_s(size_t r) const {
    return sum_layers([&](int32_t l) {
             return prefill_layer_s(costs_.layer(l), prefill_rows(rows_[r]), rows_[r],
                                    costs_.batch_rows);
           }) +
           (request_.new_tokens > 0 ? costs_.finish_s : 0);
  }

  [[nodiscard]] Choice recompute_everything() const {
    Choice c;
    c.makespan = prefill_s(0);
    return c;
  }

  // options_[option_of_layer_[l]] for restoring r runs. Equal layers share an entry.
  void build_options(size_t r, const Rules& rules) {
    options_.clear();
    option_of_layer_.assign(static_cast<size_t>(n_layer_), -1);
    std::vector<int32_t> first_layer;  // of each entry
    const auto& runs = request_.available.runs;
    std::vector<Segment> segments(r);
    for (int32_t l = min_recompute_[r]; l < n_layer_; ++l) {
      auto same_as = [&](int32_t other) {
        if (costs_.layers.size() != 1) return false;
        for (size_t k = 0; k < r; ++k) {
          if (runs[k].layers[static_cast<size_t>(l)] !=
                  runs[k].layers[static_cast<size_t>(other)] ||
              slowness_of(runs[k].slowness, l) != slowness_of(runs[k].slowness, other)) {
            return false;
          }
        }
        return true;
      };
      auto known = std::find_if(first_layer.begin(), first_layer.end(), same_as);
      option_of_layer_[static_cast<size_t>(l)] = static_cast<int32_t>(known - first_layer.begin());
      if (known != first_layer.end()) continue;

      first_layer.push_back(l);
      std::vector<Option>& entry = options_.emplace_back();
      const LayerCosts& layer = costs_.layer(l);
      Step prefill =
          Step::compute_only(following_prefill_s(costs_, layer, prefill_rows(rows_[r]), rows_[r]));
      int free = 0;
      for (size_t k = 0; k < r; ++k) {
        if (runs[k].layers[static_cast<size_t>(l)] == kHasBoth) ++free;
      }
      const Picks used = (Picks{1} << std::min(free, kMaxFreeRuns)) - 1;
      const Picks least = rules.least & used;
      const Picks most = rules.most & used;
      // A step does not know the ring, nor other devices, so there dominance says nothing: only the
      // extremes are kept.
      const bool bounded = costs_.ring_bytes > 0 || costs_.device_layers.size() > 1;
      for (Picks picks = least; picks <= most; ++picks) {
        if ((bounded || r > kMaxFreeRuns) && picks != least && picks != most) continue;
        CellMethods cells(picks);
        for (size_t k = 0; k < r; ++k) {
          segments[k] = {cells.next(runs[k].layers[static_cast<size_t>(l)]), runs[k].tokens,
                         slowness_of(runs[k].slowness, l)};
        }
        std::vector<SliceGroup> slices = cut_slices(costs_, layer, segments);
        Step step = steps(slices);
        if (!bounded) {
          auto no_worse = [](const Step& a, const Step& b) {
            return a.io <= b.io && a.work <= b.work && a.through <= b.through;
          };
          if (std::any_of(entry.begin(), entry.end(),
                          [&](const Option& o) { return no_worse(o.step, step); })) {
            continue;
          }
          std::erase_if(entry, [&](const Option& o) { return no_worse(step, o.step); });
        }
        entry.push_back({picks, step, std::move(slices), prefill.work});
      }
      for (Option& o : entry) o.step = o.step.then(prefill);
    }
  }

  [[nodiscard]] const std::vector<Option>& options(int32_t l) const {
    return options_[static_cast<size_t>(option_of_layer_[static_cast<size_t>(l)])];
  }

  // chain[a]: the state when layers [0, a) have been recomputed and prefilled.
  [[nodiscard]] std::vector<PipelineState> recompute_chain(size_t r, int32_t last) const {
    std::vector<PipelineState> chain;
    double below = 0;    // layers [0, a - 1), recomputed in full
    double full = 0;     // layer a - 1, if it were
    double prefill = 0;  // layers [0, a)
    double layer_full = 0;
    double layer_prefill = 0;
    for (int32_t a = 0; a <= last; ++a) {
      double tail = a > 0 ? recompute_layer_s(costs_, a - 1, a, rows_[r]) : 0;
      chain.push_back({costs_.link.start_s, below + tail + prefill});
      if (a == last) break;
      if (a == 0 || costs_.layers.size() != 1) {
        layer_prefill =
            following_prefill_s(costs_, costs_.layer(a), prefill_rows(rows_[r]), rows_[r]);
        layer_full = recompute_whole_layer_s(costs_, a, rows_[r]);
      }
      below += full;
      full = layer_full;
      prefill += layer_prefill;
    }
    return chain;
  }

  // Improves *best with the fastest plan that restores exactly r runs.
  void search_runs(size_t r, const Rules& rules, Choice* best) {
    build_options(r, rules);
    if (costs_.device_layers.size() > 1) {
      const int32_t least = min_recompute_[r];
      search_devices(r, least, rules.choose_recompute ? n_layer_ - 1 : least, best);
      return;
    }
    after_s_ =
        prefill_s(r) - sum_layers([&](int32_t l) {
          return following_prefill_s(costs_, costs_.layer(l), prefill_rows(rows_[r]), rows_[r]);
        });
    int32_t lo = min_recompute_[r];
    int32_t hi = rules.choose_recompute ? n_layer_ - 1 : lo;
    std::vector<PipelineState> chain = recompute_chain(r, hi);

    const Bounds bounds = rest_bounds(lo);
    if (costs_.ring_bytes > 0) {
      search_with_ring(r, lo, hi, chain, bounds, best);
      return;
    }
    // A thinned walk finds a plan so good that the full one hardly branches.
    for (size_t limit : {kCoarseFront, kFullFront}) {
      Choice found = walk(lo, hi, chain, bounds, best->makespan - after_s_, limit);
      if (found.makespan >= best->makespan) continue;
      found.runs = r;
      tidy(chain, &found);
      *best = std::move(found);
    }
  }

  // bounds[l][k]: the least that layers [l, L) add to (k/8 io + (8-k)/8 compute), for every plan.
  // Neither resource is free before the end, so any such mix bounds the makespan from below.
  static constexpr int kMixes = 9;
  using Bounds = std::vector<std::array<double, kMixes>>;
  static constexpr double mix(int k, double io, double compute) {
    const double share = static_cast<double>(k) / (kMixes - 1);
    return share * io + (1 - share) * compute;
  }

  [[nodiscard]] Bounds rest_bounds(int32_t lo) const {
    Bounds bounds(static_cast<size_t>(n_layer_) + 1, {0});
    for (int32_t l = n_layer_ - 1; l >= lo; --l) {
      for (int k = 0; k < kMixes; ++k) {
        double least = kInfinity;
        for (const Option& o : options(l)) least = std::min(least, mix(k, o.step.io, o.step.work));
        bounds[static_cast<size_t>(l)][static_cast<size_t>(k)] =
            bounds[static_cast<size_t>(l) + 1][static_cast<size_t>(k)] + least;
      }
    }
    return bounds;
  }

  // Nodes per level: the thinned walk's, and the limit of the full one. Only mixtures of many
  // different layers reach the latter; they lose less than a thousandth of the makespan to it.
  static constexpr size_t kCoarseFront = 32;
  static constexpr size_t kFullFront = 512;

  // The fastest way through the layers that takes less than `budget`; an infinite makespan if none.
  [[nodiscard]] Choice walk(int32_t lo, int32_t hi, const std::vector<PipelineState>& chain,
                            const Bounds& bounds, double budget, size_t limit) const {
    std::vector<std::vector<Node>> levels(static_cast<size_t>(n_layer_) + 1);
    for (int32_t l = lo; l <= n_layer_; ++l) {
      std::vector<Node>& grown = levels[static_cast<size_t>(l)];
      const std::array<double, kMixes>& rest = bounds[static_cast<size_t>(l)];
      auto grow = [&](const Node& node) {
        for (int k = 0; k < kMixes; ++k) {
          if (mix(k, node.state.io, node.state.compute) + rest[static_cast<size_t>(k)] >= budget) {
            return;
          }
        }
        grown.push_back(node);
      };
      if (l > lo) {
        const std::vector<Node>& before = levels[static_cast<size_t>(l) - 1];
        for (const Option& o : options(l - 1)) {
          for (size_t i = 0; i < before.size(); ++i) {
            grow({o.step.apply(before[i].state), static_cast<int32_t>(i), o.picks});
          }
        }
      }
      if (l <= hi) grow({chain[static_cast<size_t>(l)], -1, kAllHidden});
      keep_front(&grown, limit);
    }
    Choice found;
    const std::vector<Node>& last = levels.back();
    if (last.empty()) return found;
    // Rising io, falling compute: the last node is the fastest.
    found.makespan = last.back().state.compute + after_s_;
    found.picks.assign(static_cast<size_t>(n_layer_), kAllHidden);
    for (size_t l = levels.size() - 1, i = last.size() - 1;; --l) {
      const Node& node = levels[l][i];
      if (node.parent < 0) {
        found.recompute = static_cast<int32_t>(l);
        break;
      }
      found.picks[l - 1] = node.picks;
      i = static_cast<size_t>(node.parent);
    }
    return found;
  }

  // Drops what another node dominates; beyond `limit`, nodes of nearly the same io are represented
  // by the one among them with the least compute.
  static void keep_front(std::vector<Node>* nodes, size_t limit) {
    std::sort(nodes->begin(), nodes->end(), [](const Node& a, const Node& b) {
      if (a.state.io != b.state.io) return a.state.io < b.state.io;
      return a.state.compute < b.state.compute;
    });
    size_t kept = 0;
    double least = kInfinity;
    for (const Node& node : *nodes) {
      if (node.state.compute >= least) continue;
      least = node.state.compute;
      (*nodes)[kept++] = node;
    }
    nodes->resize(kept);
    if (kept <= limit) return;
    const double first = nodes->front().state.io;
    const double width = (nodes->back().state.io - first) / static_cast<double>(limit);
    size_t thinned = 0;
    for (size_t i = 0; i < kept; ++i) {
      auto bucket = [&](size_t n) { return std::floor(((*nodes)[n].state.io - first) / width); };
      if (i + 1 < kept && bucket(i) == bucket(i + 1)) continue;
      (*nodes)[thinned++] = (*nodes)[i];
    }
    nodes->resize(thinned);
  }

  // Among plans that are as fast, a contiguous one reads better and stripes better.
  void tidy(const std::vector<PipelineState>& chain, Choice* choice) const {
    // Only layers with the same options can trade places.
    const auto first = static_cast<size_t>(choice->recompute);
    for (size_t l = first; l < option_of_layer_.size(); ++l) {
      if (option_of_layer_[l] != option_of_layer_[first]) return;
    }
    for (bool hidden_first : {true, false}) {
      Choice tidy = *choice;
      std::sort(tidy.picks.begin() + choice->recompute, tidy.picks.end(),
                [&](Picks a, Picks b) { return hidden_first ? a < b : b < a; });
      PipelineState s = chain[first];
      for (int32_t l = tidy.recompute; l < n_layer_; ++l) {
        s = option(l, tidy.picks[static_cast<size_t>(l)]).step.apply(s);
      }
      tidy.makespan = s.compute + after_s_;
      if (tidy.makespan <= choice->makespan * (1 + kTie)) {
        *choice = std::move(tidy);
        return;
      }
    }
  }

  // The layer's option with these picks; where they were dominated, the nearest by first fit.
  [[nodiscard]] const Option& option(int32_t l, Picks picks) const {
    const std::vector<Option>& all = options(l);
    for (const Option& o : all) {
      if (o.picks == picks) return o;
    }
    return picks == kAllHidden ? all.front() : all.back();
  }

  // With a bounded ring a read waits for compute, and the state is no longer a pair. Contiguous
  // splits in both orders are simulated, most promising first, until the bound without a ring says
  // that none can be faster.
  void search_with_ring(size_t r, int32_t lo, int32_t hi, const std::vector<PipelineState>& chain,
                        const Bounds& bounds, Choice* best) const {
    struct Candidate {
      double bound;
      int32_t recompute;
      int32_t first_layers;
      bool hidden_first;
    };
    // Options stand in the order of their picks: the first has the most hidden, the last the most
    // KV.
    auto pick = [&](int32_t l, bool hidden) -> const Option& {
      return hidden ? options(l).front() : options(l).back();
    };
    bool choice = false;
    for (int32_t l = lo; l < n_layer_; ++l) choice = choice || options(l).size() > 1;
    std::vector<Candidate> candidates;
    for (bool hidden_first : {true, false}) {
      // tail[l]: layers [l, L) by the second method.
      std::vector<Step> tail(static_cast<size_t>(n_layer_) + 1);
      for (int32_t l = n_layer_ - 1; l >= lo; --l) {
        tail[static_cast<size_t>(l)] =
            pick(l, !hidden_first).step.then(tail[static_cast<size_t>(l) + 1]);
      }
      for (int32_t a = lo; a <= hi; ++a) {
        PipelineState s = chain[static_cast<size_t>(a)];
        for (int32_t l = a; l <= n_layer_; ++l) {
          candidates.push_back(
              {tail[static_cast<size_t>(l)].apply(s).compute + after_s_, a, l - a, hidden_first});
          if (!choice || l == n_layer_) break;
          s = pick(l, hidden_first).step.apply(s);
        }
      }
      if (!choice) break;
    }
    std::sort(candidates.begin(), candidates.end(),
              [](const Candidate& a, const Candidate& b) { return a.bound < b.bound; });
    for (const Candidate& c : candidates) {
      if (c.bound >= best->makespan) break;
      Choice found;
      found.runs = r;
      found.recompute = c.recompute;
      found.picks.assign(static_cast<size_t>(n_layer_), kAllHidden);
      for (int32_t l = c.recompute; l < n_layer_; ++l) {
        const bool hidden = (l < c.recompute + c.first_layers) == c.hidden_first;
        found.picks[static_cast<size_t>(l)] = pick(l, hidden).picks;
      }
      found.makespan = with_ring(found, chain, bounds, best->makespan);
      if (found.makespan < best->makespan) *best = std::move(found);
    }
  }

  // The makespan of a choice with the ring, or infinity once it cannot be below `budget`.
  [[nodiscard]] double with_ring(const Choice& choice, const std::vector<PipelineState>& chain,
                                 const Bounds& bounds, double budget) const {
    double io = chain[static_cast<size_t>(choice.recompute)].io;
    DeviceState device{.compute = chain[static_cast<size_t>(choice.recompute)].compute};
    Ring ring(costs_.ring_bytes);
    for (int32_t l = choice.recompute; l < n_layer_; ++l) {
      const Option& o = option(l, choice.picks[static_cast<size_t>(l)]);
      for (const SliceGroup& g : o.slices) {
        for (int64_t i = 0; i < g.count; ++i) read_and_compute(g, &ring, &io, &device);
      }
      device.compute += o.prefill;
      for (int k = 0; k < kMixes; ++k) {
        if (mix(k, io, device.compute) +
                bounds[static_cast<size_t>(l) + 1][static_cast<size_t>(k)] + after_s_ >=
            budget) {
          return kInfinity;
        }
      }
    }
    return device.compute + after_s_;
  }

  // The first `recompute` layers are recomputed; of each device's layers behind them some are
  // restored by their first option (the most hidden), the others by their last (the most KV).
  [[nodiscard]] Choice choice_of(const DeviceSplits& splits, size_t r) const {
    Choice choice{.makespan = kInfinity, .runs = r, .recompute = splits.recompute, .picks = {}};
    choice.picks.assign(static_cast<size_t>(n_layer_), kAllHidden);
    const auto ranges = device_ranges(costs_);
    for (size_t d = 0; d < ranges.size(); ++d) {
      const auto [begin, end] = ranges[d];
      for (int32_t l = std::max(begin, splits.recompute); l < end; ++l) {
        const bool hidden = (l - begin < splits.first[d]) == splits.hidden_first;
        choice.picks[static_cast<size_t>(l)] =
            (hidden ? options(l).front() : options(l).back()).picks;
      }
    }
    return choice;
  }

  // With several devices the state between two layers is no pair either.
  void search_devices(size_t r, int32_t lo, int32_t hi, Choice* best) const {
    bool choice = false;
    for (int32_t l = lo; l < n_layer_; ++l) choice = choice || options(l).size() > 1;
    const SplitsFound found = best_splits(
        costs_.device_layers, {.least_recompute = lo, .most_recompute = hi, .choice = choice},
        [&](const DeviceSplits& splits) {
          return simulate(costs_, lay_out(choice_of(splits, r))).value().total.makespan_s;
        });
    if (found.makespan >= best->makespan) return;
    *best = choice_of(found.splits, r);
    best->makespan = found.makespan;
  }

  // H for the first t rows, KV or RE (prefill behind them) for the rest, in every layer.
  Plan token_partition(size_t runs) {
    const int64_t rows = rows_[runs];
    const int64_t step = std::max<int64_t>(1, request_.token_rounding);
    Plan best;
    best.predicted.makespan_s = kInfinity;
    auto consider = [&](int64_t t) {
      for (bool kv : {true, false}) {
        Plan plan = partitioned(runs, t, kv);
        if (plan.predicted.makespan_s < best.predicted.makespan_s) best = std::move(plan);
      }
    };
    // The makespan has one valley up to the steps of slices: narrow in on it.
    int64_t around = 0;
    int64_t from = 0;
    int64_t to = rows;
    for (int64_t stride = std::max<int64_t>(1, rows / step / 32) * step;;
         stride = std::max<int64_t>(1, stride / step / 8) * step) {
      for (int64_t t = from; t <= to; t += stride) {
        const double before = best.predicted.makespan_s;
        consider(t);
        if (best.predicted.makespan_s < before) around = t;
      }
      if (stride == step) break;
      from = std::max<int64_t>(0, around - stride);
      to = std::min(rows, around + stride);
    }
    return best;
  }

  Plan partitioned(size_t runs, int64_t t, bool kv) const {
    Choice c;
    c.runs = runs;
    c.recompute = min_recompute_[runs];
    c.picks.assign(static_cast<size_t>(n_layer_), kAllHidden);
    Plan plan = lay_out(c);
    std::vector<PlanRun> cut;
    for (size_t k = 0; k < plan.runs.size(); ++k) {
      PlanRun& run = plan.runs[k];
      int64_t before = std::clamp<int64_t>(t - run.begin, 0, run.tokens);
      if (before > 0) {
        cut.push_back(run);
        cut.back().tokens = before;
      }
      if (kv && before < run.tokens) {
        cut.push_back(run);
        cut.back().begin += before;
        cut.back().tokens -= before;
        const AvailableRun& saved = request_.available.runs[k];
        for (int32_t l = c.recompute; l < n_layer_; ++l) {
          cut.back().layers[static_cast<size_t>(l)] =
              CellMethods(kAllKv).next(saved.layers[static_cast<size_t>(l)]);
        }
      }
    }
    plan.runs = std::move(cut);
    if (!kv) {
      plan.restored_tokens = std::min(t, plan.restored_tokens);
      plan.prefill_tokens = prefill_rows(plan.restored_tokens);
    }
    return predicted(std::move(plan));
  }

  [[nodiscard]] Plan lay_out(const Choice& choice) const {
    Plan plan;
    plan.mode = request_.mode;
    plan.n_layer = n_layer_;
    plan.new_tokens = request_.new_tokens;
    plan.restored_tokens = rows_[choice.runs];
    plan.prefill_tokens = prefill_rows(plan.restored_tokens);
    plan.recompute_layers = choice.recompute;
    for (size_t k = 0; k < choice.runs; ++k) {
      const AvailableRun& saved = request_.available.runs[k];
      PlanRun run{rows_[k], saved.tokens, {}, saved.slowness};
      run.layers.assign(static_cast<size_t>(n_layer_), Method::kRecompute);
      plan.runs.push_back(std::move(run));
    }
    for (auto l = static_cast<size_t>(choice.recompute); l < choice.picks.size(); ++l) {
      CellMethods cells(choice.picks[l]);
      for (size_t k = 0; k < choice.runs; ++k) {
        plan.runs[k].layers[l] = cells.next(request_.available.runs[k].layers[l]);
      }
    }
    return plan;
  }

  // Merges equal neighbours, predicts and names the plan.
  [[nodiscard]] Plan predicted(Plan plan) const {
    if (plan.runs.empty()) plan.recompute_layers = 0;
    std::vector<PlanRun> merged;
    for (PlanRun& run : plan.runs) {
      if (!merged.empty() && merged.back().layers == run.layers &&
          merged.back().slowness == run.slowness) {
        merged.back().tokens += run.tokens;
      } else {
        merged.push_back(std::move(run));
      }
    }
    plan.runs = std::move(merged);
    plan.predicted = simulate(costs_, plan).value().total;
    plan.schedule = name_of(plan);
    return plan;
  }

  // Where pages come from is no part of it.
  [[nodiscard]] std::string name_of(const Plan& plan) const {
    if (plan.runs.empty()) return fmt::format("RE:{}", n_layer_);
    std::string name;
    for (size_t k = 0; k < plan.runs.size();) {
      const size_t first = k;
      int64_t tokens = 0;
      for (; k < plan.runs.size() && plan.runs[k].layers == plan.runs[first].layers; ++k) {
        tokens += plan.runs[k].tokens;
      }
      const std::string methods = schedule_string(plan.runs[first].layers);
      if (first == 0 && k == plan.runs.size()) return methods;
      name += fmt::format("{}{}t {}", first == 0 ? "" : " | ", tokens, methods);
    }
    return name;
  }

  [[nodiscard]] Plan write_out(const Choice& choice) const { return predicted(lay_out(choice)); }

  const RestoreCosts& costs_;
  const RestoreRequest& request_;
  const int32_t n_layer_;
  std::vector<int64_t> rows_;           // rows_[r]: rows of the first r runs
  std::vector<int32_t> min_recompute_;  // RE prefix that the first r runs need
  std::vector<std::vector<Option>> options_;
  std::vector<int32_t> option_of_layer_;
  double after_s_ = 0;  // behind the last layer: the prefill's other batches, and finish_s
};

}  // namespace

Availability Availability::uniform(int64_t tokens, int32_t n_layer, Encoding encodings) {
  Availability a;
  if (tokens > 0) {
    a.runs.push_back({tokens, std::vector<Encoding>(static_cast<size_t>(n_layer), encodings)});
  }
  return a;
}

int64_t Availability::tokens() const {
  int64_t sum = 0;
  for (const AvailableRun& run : runs) sum += run.tokens;
  return sum;
}

Result<Plan> plan_restore(const RestoreCosts& costs, const RestoreRequest& request) {
  HCACHE_RETURN_IF_ERROR(validate(costs));
  HCACHE_RETURN_IF_ERROR(validate(request, costs.n_layer));
  return Search(costs, request).run();
}

}  // namespace hcache::policy
