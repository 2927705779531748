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

std::vector<double> milliseconds(std::vector<double> seconds) {
  for (double& s : seconds) s *= 1e3;
  return seconds;
}

// What the uninterrupted run had and said.
struct Reference {
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
  policy::RestoreRecord record;
  std::vector<double> ttft_s;
  std::vector<double> predicted_s;  // every restore corrects what the next one is predicted from
  std::vector<double> restore_s;
  std::vector<double> io_busy;
  std::vector<double> compute_busy;
  Fidelity fidelity;
};

// One request and what was seen of it on the engine's thread.
struct Run {
  scheduler::Outcome outcome;
  double ttft_s = 0;                       // from its submission to the first token's logits
  std::vector<std::vector<float>> logits;  // that each of its tokens was chosen from
};

// With what each device's layers took of it, where there are several.
std::string bytes_read(const policy::RestoreRecord& record) {
  std::string text = format_bytes(record.read.disk);
  if (record.devices.size() < 2) return text;
  for (size_t i = 0; i < record.devices.size(); ++i) {
    text +=
        fmt::format("{}{}", i == 0 ? " (" : " + ", format_bytes(record.devices[i].pages.total()));
  }
  return text + ")";
}

class RestoreBench {
 public:
  RestoreBench(const RestoreBenchArgs& args, ThrottledEnv& env, serving::Serving& serving,
               TokenSource source)
      : args_(args),
        env_(env),
        serving_(serving),
        model_(serving.runtime().model()),
        source_(std::move(source)) {}

  Status measure(int64_t history, int64_t conversation, ProgressLine& line) {
    line_ = &line;
    history_ = history;
    conversation_ = conversation;
    const auto seed = static_cast<uint32_t>(history + 100003 * conversation + 1);
    HCACHE_ASSIGN_OR_RETURN(tokens_, source_.take(history + args_.new_tokens, seed));
    HCACHE_RETURN_IF_ERROR(make_reference());
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
        const std::string what =
            fmt::format("history {}: restoring ({} of {})", history, ++done, runs);
        if (!line.update(what, 0)) return cancelled("interrupted");
        HCACHE_RETURN_IF_ERROR(run(row, rep < 0, what));
      }
    }
    for (const RestoreRow& row : rows) add_row(row);
    return release_idle(serving_, resident_);
  }

  [[nodiscard]] const Json& json() const { return json_; }
  [[nodiscard]] const std::vector<std::vector<std::string>>& table() const { return table_; }

 private:
  Result<std::vector<RestoreRow>> make_rows() const {
    std::vector<RestoreRow> rows;
    for (const std::string& link : args_.links) {
      HCACHE_ASSIGN_OR_RETURN(const Link parsed, parse_link(link));
      const double rate = parsed.bytes_per_s(serving_.runtime().profile());
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

  // Runs a request whose tokens are chosen by `choose` (may be empty: the likeliest), and keeps the
  // logits. Its sequence stays in the arena.
  Result<Run> submit(scheduler::Request request, const std::string& what,
                     const std::function<int32_t(size_t)>& choose = {}) {
    Run run;
    double begin = 0;
    request.salt = serving_.runtime().salt();
    request.next = [&](std::span<const float> logits) -> Result<scheduler::NextToken> {
      const size_t n = run.logits.size();
      if (n == 0) run.ttft_s = now_s() - begin;
      run.logits.emplace_back(logits.begin(), logits.end());
      return scheduler::NextToken{
          .token = choose ? choose(n) : model::argmax(logits), .stop = false, .finish_reason = {}};
    };
    request.on_state = [&](scheduler::Phase, double fraction) { tell(what, fraction); };
    begin = now_s();
    HCACHE_ASSIGN_OR_RETURN(run.outcome,
                            serving_.run(std::move(request), [] { return !interrupted(); }));
    HCACHE_RETURN_IF_ERROR(run.outcome.status);
    return run;
  }

  void tell(const std::string& what, double fraction) { line_->update(what, fraction); }

  // Prefill, then decode, as a conversation does; saved on the way. What answers the new tokens is
  // forked off unsaved, so that the store has the history alone, and stays for the resident method.
  Status make_reference() {
    reference_ = {};
    const std::string what = fmt::format("history {}: uninterrupted run", history_);
    const int64_t decoded = std::min(args_.decoded, history_ - 1);
    scheduler::Request held;
    held.tokens.assign(tokens_.begin(), tokens_.begin() + (history_ - decoded));
    held.cache = scheduler::CacheUse::kNone;
    // The last token that is chosen is not computed any more.
    held.max_new_tokens = decoded + 1;
    HCACHE_ASSIGN_OR_RETURN(const Run history, submit(std::move(held), what, [&](size_t n) {
                              return tokens_[static_cast<size_t>(history_ - decoded) + n];
                            }));
    HCACHE_RETURN_IF_ERROR(serving_.finish_chores());
    HCACHE_ASSIGN_OR_RETURN(reference_.kv, read_kv(history.outcome.seq));

    scheduler::Request asked = whole_request();
    asked.cache = scheduler::CacheUse::kAll;
    HCACHE_ASSIGN_OR_RETURN(Run answered, submit(std::move(asked), what));
    reference_.logits = std::move(answered.logits);
    for (const std::vector<float>& logits : reference_.logits) {
      reference_.reply.push_back(model::argmax(logits));
    }
    resident_ = answered.outcome.seq;
    return release_idle(serving_, history.outcome.seq);
  }

  // History and new tokens, and the answer to them; nothing of it is saved.
  [[nodiscard]] scheduler::Request whole_request() const {
    scheduler::Request request;
    request.tokens = tokens_;
    request.max_new_tokens = args_.greedy;
    request.save = false;
    return request;
  }

  Result<std::vector<std::byte>> read_kv(scheduler::SeqId seq) {
    std::vector<std::byte> kv;
    HCACHE_RETURN_IF_ERROR(serving_.on_engine([&](state::Runtime& runtime) -> Status {
      HCACHE_ASSIGN_OR_RETURN(kv, runtime.engine().read_kv(seq, history_));
      return Status();
    }));
    return kv;
  }

  // The continuation is forced along the reference's, so that every position is comparable.
  Status run(RestoreRow& row, bool verify, const std::string& what) {
    scheduler::Request request = whole_request();
    request.cache = row.resident ? scheduler::CacheUse::kAll : scheduler::CacheUse::kSaved;
    request.restore = {.mode = row.mode, .token_rounding = row.token_rounding};
    if (!verify) request.max_new_tokens = 1;
    env_.set_read_bytes_per_s(row.link_bytes_per_s);
    if (row.resident) {
      HCACHE_RETURN_IF_ERROR(drop_new_tokens(what));
    } else {
      HCACHE_RETURN_IF_ERROR(serving_.on_engine([](state::Runtime& runtime) {
        runtime.engine().forget_tokens();  // a new process knows none
        return Status();
      }));
    }
    HCACHE_ASSIGN_OR_RETURN(const Run run, submit(std::move(request), what,
                                                  [&](size_t n) { return reference_.reply[n]; }));
    if (verify) {
      HCACHE_ASSIGN_OR_RETURN(row.fidelity, compare(run));
    } else {
      const scheduler::Outcome& outcome = run.outcome;
      if (row.resident) {
        row.record = {};
        row.record.schedule = "-";
      } else if (outcome.restores.empty() || outcome.restores.back().restored_tokens == 0) {
        HCACHE_ASSIGN_OR_RETURN(row.record, prefill_plan());
      } else {
        row.record = outcome.restores.back();
      }
      row.ttft_s.push_back(run.ttft_s);
      row.predicted_s.push_back(row.record.predicted_first_s);
      row.restore_s.push_back(row.record.restore_s);
      row.io_busy.push_back(row.record.io_busy_s / run.ttft_s);
      row.compute_busy.push_back((row.record.compute_busy_s + outcome.prefill_s) / run.ttft_s);
    }
    if (row.resident) {
      resident_ = run.outcome.seq;
      return {};
    }
    return release_idle(serving_, run.outcome.seq);
  }

  // The resident sequence holds what the new tokens have in common with another one: the history.
  Status drop_new_tokens(const std::string& what) {
    scheduler::Request other = whole_request();
    other.tokens.resize(static_cast<size_t>(history_ + 1));
    other.tokens.back() = other.tokens.back() == 0 ? 1 : 0;
    other.max_new_tokens = 0;
    HCACHE_ASSIGN_OR_RETURN(const Run run, submit(std::move(other), what));
    resident_ = run.outcome.seq;
    return {};
  }

  // What the planner expects of computing everything, which `plan` may choose too: there is no
  // restore that would tell.
  Result<policy::RestoreRecord> prefill_plan() {
    policy::RestoreRecord record;
    HCACHE_RETURN_IF_ERROR(serving_.on_engine([&](state::Runtime& runtime) -> Status {
      HCACHE_ASSIGN_OR_RETURN(const state::PlannedRestore planned,
                              runtime.plan(tokens_, {}, {.mode = policy::Mode::kRecompute}));
      record.schedule = planned.plan.schedule;
      record.predicted_first_s = planned.plan.predicted.makespan_s;
      return {};
    }));
    return record;
  }

  Result<Fidelity> compare(const Run& run) {
    Fidelity f;
    const std::vector<policy::RestoreRecord>& restores = run.outcome.restores;
    if (restores.empty() || restores.back().kept_rows == 0) {
      HCACHE_ASSIGN_OR_RETURN(const std::vector<std::byte> kv, read_kv(run.outcome.seq));
      f.kv_identical = kv == reference_.kv;
    }
    for (size_t i = 0; i < reference_.reply.size(); i++) {
      const std::vector<float>& expected = reference_.logits[i];
      const std::vector<float>& logits = run.logits.at(i);
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
    }
    f.mean_kl /= static_cast<double>(f.greedy_total);
    return f;
  }

  void add_row(const RestoreRow& row) {
    const model::Model& model = model_;
    const double per_token =
        static_cast<double>(row.record.hidden_pages.total() + row.record.kv_pages.total()) /
        static_cast<double>(history_);
    const double predicted_ms = median(row.predicted_s) * 1e3;
    json_.push_back({{"model", std::filesystem::path(model.path()).filename().string()},
                     {"type", model.type_name()},
                     {"n_head", model.hparams().n_head},
                     {"n_head_kv", model.hparams().n_head_kv},
                     {"history", history_},
                     {"conversation", conversation_},
                     {"new", args_.new_tokens},
                     {"method", row.method},
                     {"schedule", row.record.schedule},
                     {"kept_rows", row.record.kept_rows},
                     {"link", row.link},
                     {"link_bytes_per_s",
                      row.link_bytes_per_s > 0 ? Json(row.link_bytes_per_s) : Json(nullptr)},
                     {"bytes_per_token", per_token},
                     {"bytes_read", row.record.read.disk},
                     {"devices", devices_json(row.record)},
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
    table_.push_back({fmt::format("{}", history_),
                      row.link_bytes_per_s > 0 ? format_rate(row.link_bytes_per_s) : "none",
                      row.method, row.record.schedule,
                      fmt::format("{:.1f}", median(row.ttft_s) * 1e3),
                      predicted_ms > 0 ? fmt::format("{:.1f}", predicted_ms) : "-",
                      fmt::format("{:.1f}", median(row.restore_s) * 1e3), bytes_read(row.record),
                      fmt::format("{:.0f} %", median(row.io_busy) * 100),
                      fmt::format("{:.0f} %", median(row.compute_busy) * 100),
                      row.fidelity.kv_identical ? "identical" : "differs",
                      fmt::format("{}/{}", row.fidelity.greedy_agree, row.fidelity.greedy_total),
                      fmt::format("{:.1e}", row.fidelity.mean_kl)});
  }

  // What the paper's GPUs like: a multiple of this many rows (section 6.3.2).
  static constexpr int64_t kRounding = 128;

  const RestoreBenchArgs& args_;
  ThrottledEnv& env_;
  serving::Serving& serving_;
  const model::Model& model_;
  TokenSource source_;
  ProgressLine* line_ = nullptr;
  int64_t history_ = 0;
  int64_t conversation_ = 0;
  std::vector<int32_t> tokens_;
  Reference reference_;
  scheduler::SeqId resident_ = scheduler::kNoSeq;  // holds the history, and is not saved
  Json json_ = Json::array();
  std::vector<std::vector<std::string>> table_ = {{"history", "link", "method", "schedule",
                                                   "TTFT ms", "predicted", "restore ms", "read",
                                                   "I/O busy", "compute", "KV", "greedy", "KL"}};
};

// What the saved state takes on disk, as a share of F16 K and V.
Result<Json> store_json(const RestoreBenchArgs& args, state::Runtime& runtime) {
  HCACHE_ASSIGN_OR_RETURN(const store::StoreStat stat, runtime.store()->stat());
  const model::HParams& hp = runtime.model().hparams();
  const double kv_f16 = 2.0 * 2.0 * hp.n_layer * hp.n_embd_kv();
  const double per_token =
      static_cast<double>(stat.allocated_bytes + stat.catalog_bytes + stat.record_bytes) /
      static_cast<double>(std::max<uint64_t>(stat.tokens, 1));
  return Json{{"save", args.runtime.save},
              {"schedule", runtime.save_plan().schedule},
              {"packed", runtime.save_plan().packed},
              {"tokens", stat.tokens},
              {"page_bytes", stat.page_bytes},
              {"allocated_bytes", stat.allocated_bytes},
              {"catalog_bytes", stat.catalog_bytes},
              {"bytes_per_token", per_token},
              {"kv_f16_bytes_per_token", kv_f16},
              {"share_of_kv_f16", per_token / kv_f16}};
}

}  // namespace

Status bench_restore(RestoreBenchArgs args) {
  if (args.runtime.model.device == "list") return list_devices();
  warn_of_debug_build();
  // Room for the uninterrupted run and for the restored one beside it.
  const int64_t longest = *std::max_element(args.histories.begin(), args.histories.end());
  args.runtime.ctx = 2 * (longest + args.new_tokens + args.greedy + 64);
  const Scratch scratch(args.runtime);
  // What is saved knows of the link, if there is only one.
  if (args.links.size() == 1) args.runtime.link = args.links.front();
  ProgressLine line;
  ThrottledEnv env(Env::real());
  HCACHE_ASSIGN_OR_RETURN(const auto serving, open_serving(args.runtime, env, line));
  state::Runtime& runtime = serving->runtime();
  HCACHE_ASSIGN_OR_RETURN(TokenSource source, TokenSource::open(runtime, args.text_file));
  RestoreBench bench(args, env, *serving, std::move(source));
  for (const int64_t n : args.histories) {
    for (int64_t i = 0; i < args.conversations; i++) {
      HCACHE_RETURN_IF_ERROR(bench.measure(n, i, line));
    }
  }
  line.finish();
  HCACHE_ASSIGN_OR_RETURN(Json stored, store_json(args, runtime));
  Json results = {{"machine", machine_json(runtime.model())},
                  {"gemm_flops_per_s", runtime.profile().gemm_flops_per_s},
                  {"store", std::move(stored)},
                  {"rows", bench.json()}};
  HCACHE_RETURN_IF_ERROR(serving->close());
  return report(args, results, bench.table());
}

}  // namespace hcache::cli
