#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>

#include "base/env.h"
#include "base/units.h"
#include "bench.h"
#include "commands.h"
#include "model/logits.h"

namespace hcache::cli {
namespace {

// Appends tokens straight on the engine; the last token's logits.
Result<std::vector<float>> forward(engine::Engine& engine, engine::SeqId seq,
                                   std::span<const int32_t> tokens) {
  const auto step = static_cast<size_t>(engine.options().max_batch_rows);
  std::vector<float> logits;
  for (size_t i = 0; i < tokens.size(); i += step) {
    engine::BatchItem item;
    item.seq = seq;
    item.tokens = tokens.subspan(i, std::min(step, tokens.size() - i));
    const bool last = i + step >= tokens.size();
    item.output = last ? engine::BatchItem::Output::kLast : engine::BatchItem::Output::kNone;
    HCACHE_ASSIGN_OR_RETURN(const engine::Logits out, engine.decode(std::span(&item, 1)));
    if (last) logits.assign(out.rows.at(0).begin(), out.rows.at(0).end());
  }
  return logits;
}

std::vector<double> milliseconds(std::vector<double> seconds) {
  for (double& s : seconds) s *= 1e3;
  return seconds;
}

// What the uninterrupted run had and said.
struct Reference {
  engine::SeqId seq = -1;  // holds the history
  std::vector<std::byte> kv;
  std::vector<std::vector<float>> logits;  // after the new tokens, then after each greedy one
  std::vector<int32_t> reply;
};

struct Fidelity {
  bool kv_identical = false;
  int64_t greedy_agree = 0;
  int64_t greedy_total = 0;
  double max_logit_diff = 0;
  double mean_kl = 0;
  // Where the greedy choice first differs: by how much the uninterrupted run preferred its own.
  double margin = 0;
};

struct RestoreRow {
  std::string method;
  policy::Mode mode = policy::Mode::kPlan;  // unless resident
  int64_t token_rounding = 1;
  bool resident = false;
  std::string link;
  double link_bytes_per_s = 0;
  state::RestoreReport report;
  std::vector<double> ttft_s;
  std::vector<double> predicted_s;  // every restore corrects what the next one is predicted from
  std::vector<double> restore_s;
  std::vector<double> io_busy;
  std::vector<double> compute_busy;
  Fidelity fidelity;
};

class RestoreBench {
 public:
  RestoreBench(const BenchArgs& args, ThrottledEnv& env, state::Runtime& runtime,
               TokenSource source)
      : args_(args),
        env_(env),
        runtime_(runtime),
        engine_(runtime.engine()),
        source_(std::move(source)) {}

  Status measure(int64_t history, int64_t conversation, ProgressLine& line) {
    history_ = history;
    conversation_ = conversation;
    const auto seed = static_cast<uint32_t>(history + 100003 * conversation + 1);
    HCACHE_ASSIGN_OR_RETURN(tokens_, source_.take(history + args_.new_tokens, seed));
    HCACHE_RETURN_IF_ERROR(make_reference(line));
    HCACHE_ASSIGN_OR_RETURN(std::vector<RestoreRow> rows, make_rows());
    // Rep -1 verifies and warms up.
    const int64_t runs = (args_.reps + 1) * static_cast<int64_t>(rows.size());
    int64_t done = 0;
    for (int64_t rep = -1; rep < args_.reps; rep++) {
      wait_for_turn(args_);
      for (size_t i = 0; i < rows.size(); i++) {
        // Every other time in the reverse order: a run that follows another program finds cold
        // caches.
        RestoreRow& row = rows[rep % 2 == 0 ? i : rows.size() - 1 - i];
        // One line for all of them: a restore that takes long shows how far it is itself.
        const auto progress = [&, first = done++](double of_this) {
          return line.update(fmt::format("history {}: restoring", history),
                             (static_cast<double>(first) + of_this) / static_cast<double>(runs));
        };
        if (!progress(0)) return cancelled("interrupted");
        HCACHE_RETURN_IF_ERROR(run(row, rep < 0, progress));
      }
    }
    for (const RestoreRow& row : rows) add_row(row);
    return runtime_.finish(reference_.seq);
  }

  [[nodiscard]] const Json& json() const { return json_; }
  [[nodiscard]] const std::vector<std::vector<std::string>>& table() const { return table_; }

 private:
  Result<std::vector<RestoreRow>> make_rows() const {
    std::vector<RestoreRow> rows;
    for (const std::string& link : args_.links) {
      HCACHE_ASSIGN_OR_RETURN(const Link parsed, parse_link(link));
      const double rate = parsed.bytes_per_s(runtime_.profile());
      for (const std::string& method : args_.methods) {
        RestoreRow row;
        row.method = method;
        row.resident = method == "resident";
        if (method == "token-partition-rounded") {
          row.mode = policy::Mode::kTokenPartition;
          row.token_rounding = std::max(args_.runtime.token_rounding, kRounding);
        } else if (!row.resident) {
          HCACHE_ASSIGN_OR_RETURN(row.mode, policy::parse_mode(method));
        }
        row.link = link;
        row.link_bytes_per_s = rate;
        rows.push_back(std::move(row));
      }
    }
    return rows;
  }

  // Prefill, then decode, as a conversation does; saved on the way.
  Status make_reference(ProgressLine& line) {
    reference_ = {};
    const int64_t decoded = std::min(args_.decoded, history_ - 1);
    state::StartOptions start;
    start.mode = policy::Mode::kRecompute;
    start.progress = [&](double f) {
      return line.update(fmt::format("history {}: uninterrupted run", history_), f);
    };
    HCACHE_ASSIGN_OR_RETURN(const state::Started started,
                            runtime_.start(part(tokens_, 0, history_ - decoded), start));
    reference_.seq = started.seq;
    for (int64_t i = history_ - decoded; i < history_; i++) {
      if (interrupted()) return cancelled("interrupted");
      HCACHE_RETURN_IF_ERROR(runtime_.append(started.seq, part(tokens_, i, i + 1)).status());
    }
    HCACHE_RETURN_IF_ERROR(runtime_.flush());
    HCACHE_ASSIGN_OR_RETURN(reference_.kv, read_kv(reference_.seq));

    HCACHE_ASSIGN_OR_RETURN(const engine::SeqId fork,
                            engine_.fork_sequence(reference_.seq, history_));
    HCACHE_ASSIGN_OR_RETURN(std::vector<float> logits, forward(engine_, fork, new_tokens()));
    for (int64_t i = 0; i < args_.greedy; i++) {
      reference_.reply.push_back(model::argmax(logits));
      reference_.logits.push_back(std::move(logits));
      if (i + 1 == args_.greedy) break;
      HCACHE_ASSIGN_OR_RETURN(logits,
                              forward(engine_, fork, std::span(&reference_.reply.back(), 1)));
    }
    return engine_.release_sequence(fork);
  }

  [[nodiscard]] std::span<const int32_t> new_tokens() const {
    return part(tokens_, history_, history_ + args_.new_tokens);
  }

  Result<std::vector<std::byte>> read_kv(engine::SeqId seq) {
    const size_t row = engine_.kv_row_bytes();
    const size_t half = row * static_cast<size_t>(history_);
    std::vector<std::byte> kv(2 * half * static_cast<size_t>(engine_.n_layer()));
    for (int layer = 0; layer < engine_.n_layer(); layer++) {
      std::byte* k = kv.data() + 2 * half * static_cast<size_t>(layer);
      HCACHE_RETURN_IF_ERROR(
          engine_.read_kv(seq, layer, 0, static_cast<int>(history_), k, k + half));
    }
    return kv;
  }

  Status run(RestoreRow& row, bool verify, const std::function<bool(double)>& progress) {
    engine::SeqId seq = -1;
    std::vector<float> logits;
    state::RestoreReport report;
    double ttft = 0;
    if (row.resident) {
      HCACHE_ASSIGN_OR_RETURN(seq, engine_.fork_sequence(reference_.seq, history_));
      HCACHE_RETURN_IF_ERROR(engine_.synchronize());
      const double begin = now_s();
      HCACHE_ASSIGN_OR_RETURN(logits, forward(engine_, seq, new_tokens()));
      ttft = now_s() - begin;
      report.prefilled_tokens = args_.new_tokens;
      report.schedule = "-";
      report.compute_busy_s = ttft;
    } else {
      state::StartOptions start;
      start.mode = row.mode;
      start.token_rounding = row.token_rounding;
      start.save = false;
      start.progress = progress;
      engine_.forget_tokens();  // a new process knows none
      env_.set_read_bytes_per_s(row.link_bytes_per_s);
      const double begin = now_s();
      HCACHE_ASSIGN_OR_RETURN(state::Started started, runtime_.start(tokens_, start));
      ttft = now_s() - begin;
      seq = started.seq;
      logits = std::move(started.logits);
      report = std::move(started.report);
    }
    if (verify) {
      HCACHE_ASSIGN_OR_RETURN(row.fidelity, compare(seq, std::move(logits)));
    } else {
      row.report = report;
      row.ttft_s.push_back(ttft);
      row.predicted_s.push_back(report.predicted_s);
      row.restore_s.push_back(report.restore_s);
      row.io_busy.push_back(report.io_busy_s / ttft);
      row.compute_busy.push_back(report.compute_busy_s / ttft);
    }
    return row.resident ? engine_.release_sequence(seq) : runtime_.finish(seq);
  }

  // The continuation is forced along the reference's, so that every position is comparable.
  Result<Fidelity> compare(engine::SeqId seq, std::vector<float> logits) {
    Fidelity f;
    HCACHE_ASSIGN_OR_RETURN(const std::vector<std::byte> kv, read_kv(seq));
    f.kv_identical = kv == reference_.kv;
    for (size_t i = 0; i < reference_.reply.size(); i++) {
      const std::vector<float>& expected = reference_.logits[i];
      f.greedy_total++;
      const int32_t choice = model::argmax(logits);
      if (choice == reference_.reply[i]) {
        f.greedy_agree++;
      } else if (f.margin == 0) {
        f.margin = static_cast<double>(expected[static_cast<size_t>(reference_.reply[i])]) -
                   static_cast<double>(expected[static_cast<size_t>(choice)]);
      }
      for (size_t j = 0; j < expected.size(); j++) {
        f.max_logit_diff = std::max(f.max_logit_diff, std::abs(static_cast<double>(expected[j]) -
                                                               static_cast<double>(logits[j])));
      }
      f.mean_kl += model::kl_divergence(expected, logits);
      if (i + 1 == reference_.reply.size()) break;
      HCACHE_ASSIGN_OR_RETURN(logits, forward(engine_, seq, std::span(&reference_.reply[i], 1)));
    }
    f.mean_kl /= static_cast<double>(f.greedy_total);
    return f;
  }

  void add_row(const RestoreRow& row) {
    const model::Model& model = runtime_.model();
    const double per_token =
        static_cast<double>(row.report.page_bytes) / static_cast<double>(history_);
    const double predicted_ms = median(row.predicted_s) * 1e3;
    json_.push_back({{"model", std::filesystem::path(model.path()).filename().string()},
                     {"type", model.type_name()},
                     {"n_head", model.hparams().n_head},
                     {"n_head_kv", model.hparams().n_head_kv},
                     {"history", history_},
                     {"conversation", conversation_},
                     {"new", args_.new_tokens},
                     {"method", row.method},
                     {"schedule", row.report.schedule},
                     {"link", row.link},
                     {"link_bytes_per_s",
                      row.link_bytes_per_s > 0 ? Json(row.link_bytes_per_s) : Json(nullptr)},
                     {"bytes_per_token", per_token},
                     {"bytes_read", row.report.bytes_read},
                     {"restore_ms", spread(row.restore_s, 1e3)},
                     {"ttft_ms", spread(row.ttft_s, 1e3)},
                     {"ttft_samples_ms", milliseconds(row.ttft_s)},
                     {"predicted_ms", predicted_ms > 0 ? Json(predicted_ms) : Json(nullptr)},
                     {"io_busy", median(row.io_busy)},
                     {"compute_busy", median(row.compute_busy)},
                     {"fidelity",
                      {{"kv_identical", row.fidelity.kv_identical},
                       {"greedy_agree", row.fidelity.greedy_agree},
                       {"greedy_total", row.fidelity.greedy_total},
                       {"max_logit_diff", row.fidelity.max_logit_diff},
                       {"mean_kl", row.fidelity.mean_kl},
                       {"margin", row.fidelity.margin}}}});
    table_.push_back(
        {fmt::format("{}", history_),
         row.link_bytes_per_s > 0 ? format_rate(row.link_bytes_per_s) : "none", row.method,
         row.report.schedule, fmt::format("{:.1f}", median(row.ttft_s) * 1e3),
         predicted_ms > 0 ? fmt::format("{:.1f}", predicted_ms) : "-",
         fmt::format("{:.1f}", median(row.restore_s) * 1e3), format_bytes(row.report.bytes_read),
         fmt::format("{:.0f} %", median(row.io_busy) * 100),
         fmt::format("{:.0f} %", median(row.compute_busy) * 100),
         row.fidelity.kv_identical ? "identical" : "differs",
         fmt::format("{}/{}", row.fidelity.greedy_agree, row.fidelity.greedy_total),
         fmt::format("{:.1e}", row.fidelity.mean_kl)});
  }

  // What the paper's GPUs like: a multiple of this many rows (section 6.3.2).
  static constexpr int64_t kRounding = 128;

  const BenchArgs& args_;
  ThrottledEnv& env_;
  state::Runtime& runtime_;
  engine::Engine& engine_;
  TokenSource source_;
  int64_t history_ = 0;
  int64_t conversation_ = 0;
  std::vector<int32_t> tokens_;
  Reference reference_;
  Json json_ = Json::array();
  std::vector<std::vector<std::string>> table_ = {{"history", "link", "method", "schedule",
                                                   "TTFT ms", "predicted", "restore ms", "read",
                                                   "I/O busy", "compute", "KV", "greedy", "KL"}};
};

// What the saved state takes on disk, as a share of F16 K and V.
Result<Json> store_json(const BenchArgs& args, state::Runtime& runtime) {
  HCACHE_ASSIGN_OR_RETURN(const store::StoreStat stat, runtime.store()->stat());
  const model::HParams& hp = runtime.model().hparams();
  const double kv_f16 = 2.0 * 2.0 * hp.n_layer * hp.n_embd_kv();
  const double per_token = static_cast<double>(stat.allocated_bytes + stat.catalog_bytes) /
                           static_cast<double>(std::max<uint64_t>(stat.tokens, 1));
  return Json{{"save", args.runtime.save},
              {"schedule", runtime.save_plan().schedule},
              {"tokens", stat.tokens},
              {"page_bytes", stat.page_bytes},
              {"allocated_bytes", stat.allocated_bytes},
              {"catalog_bytes", stat.catalog_bytes},
              {"bytes_per_token", per_token},
              {"kv_f16_bytes_per_token", kv_f16},
              {"share_of_kv_f16", per_token / kv_f16}};
}

}  // namespace

Status bench_restore(BenchArgs args) {
  if (args.runtime.model.device == "list") return list_devices();
  if (args.new_tokens < 1) return invalid_argument("--new must be at least 1");
  warn_of_debug_build();
  // Room for the uninterrupted run and for the restored one beside it.
  const int64_t longest = *std::max_element(args.histories.begin(), args.histories.end());
  args.runtime.ctx = 2 * (longest + args.new_tokens + args.greedy + 64);
  const Scratch scratch(args.runtime);
  ProgressLine line;
  ThrottledEnv env(Env::real());
  HCACHE_ASSIGN_OR_RETURN(const auto runtime, open_runtime(args.runtime, env, line));
  HCACHE_ASSIGN_OR_RETURN(TokenSource source, TokenSource::open(*runtime, args.text));
  RestoreBench bench(args, env, *runtime, std::move(source));
  for (const int64_t n : args.histories) {
    for (int64_t i = 0; i < args.conversations; i++) {
      HCACHE_RETURN_IF_ERROR(bench.measure(n, i, line));
    }
  }
  line.finish();
  HCACHE_ASSIGN_OR_RETURN(Json stored, store_json(args, *runtime));
  Json results = {{"machine", machine_json(*runtime)},
                  {"gemm_flops_per_s", runtime->profile().gemm_flops_per_s},
                  {"store", std::move(stored)},
                  {"rows", bench.json()}};
  HCACHE_RETURN_IF_ERROR(runtime->close());
  return report(args, results, bench.table());
}

}  // namespace hcache::cli
