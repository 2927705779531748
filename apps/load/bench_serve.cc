#include "bench_serve.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "base/env.h"
#include "bench_serve_http.h"
#include "bench_serve_report.h"
#include "bench_serve_text.h"
#include "terminal.h"

namespace hcache::cli {
namespace {

constexpr const char* kShareGpt = "sharegpt";

double seconds(int64_t ns) { return static_cast<double>(ns) * 1e-9; }

// Where the clients run.
Json client_machine() {
  Json json = host_json();
  json["version"] = HCACHE_VERSION;
  return json;
}

// Everything that makes the load what it is, and no secret.
Json settings_json(const ServeArgs& args, const sim::Schedule& schedule) {
  return {{"url", args.url},
          {"model", args.client.model},
          {"trace", args.trace},
          {"sessions", args.load.sessions},
          {"warmup", args.load.warmup},
          {"left_out", schedule.left_out},
          {"rate", args.load.rate},
          {"rounds", args.load.rounds},
          {"think_s", args.load.think_s},
          {"think_spread", args.think_spread},
          {"context", args.load.context},
          {"time_scale", args.load.time_scale},
          {"length_scale", args.load.length_scale},
          {"concurrency", args.client.concurrency},
          {"pause_after", args.client.pause_after},
          {"seed", args.load.seed},
          {"text", args.text_file.empty() ? "built in" : args.text_file},
          {"token_bytes", args.bytes_per_token},
          {"temperature", args.client.temperature},
          {"exact_length", args.client.exact_length},
          {"extra", args.client.extra},
          {"timeout_s", seconds(args.timeout_ns)},
          {"retry", args.client.retries}};
}

Json schedule_json(const sim::Schedule& schedule, const load::TextSource& text) {
  Json sessions = Json::array();
  for (size_t i = 0; i < schedule.sessions.size(); i++) {
    const sim::Session& session = schedule.sessions[i];
    Json rounds = Json::array();
    for (const sim::Round& round : session.rounds) {
      rounds.push_back({{"think_s", round.think_s},
                        {"input_tokens", round.input_tokens},
                        {"output_tokens", round.output_tokens},
                        {"known_tokens", round.known_tokens},
                        {"returning", round.returning},
                        {"text", load::message_text(text, round)}});
    }
    sessions.push_back({{"session", i},
                        {"start_s", session.start_s},
                        {"warmup", session.warmup},
                        {"rounds", std::move(rounds)}});
  }
  return sessions;
}

Result<load::TextSource> open_text(const ServeArgs& args) {
  std::string text(load::built_in_text());
  if (!args.text_file.empty()) {
    HCACHE_ASSIGN_OR_RETURN(text, read_whole_file(Env::real(), args.text_file));
  }
  auto source = load::TextSource::make(text, args.bytes_per_token, args.load.seed);
  if (!source.ok()) return source.status().with_context(args.text_file);
  return source;
}

Result<sim::Schedule> make_schedule(const ServeArgs& args) {
  if (args.trace == kShareGpt) {
    if (args.load.sessions == 0) return invalid_argument("no sessions to hold; use --sessions N");
    return sim::draw_conversations(args.load);
  }
  return sim::replay_trace_file(Env::real(), args.load, args.trace);
}

Status refuse_useless(const ServeArgs& args) {
  if (args.trace == kShareGpt) {
    return args.refuse({&args.load.time_scale, &args.load.length_scale},
                       "does nothing without --trace FILE");
  }
  return args.refuse({&args.load.rate, &args.load.rounds, &args.think_ns, &args.think_spread},
                     "does nothing with --trace FILE: the trace says who asks when");
}

// Fills in what follows from other options.
Status complete(ServeArgs* args) {
  args->load.think_s = seconds(args->think_ns);
  args->load.think_exponential = args->think_spread == "exponential";
  args->client.pause = wait_for_line;
  if (args->extra.empty()) return {};
  args->client.extra = Json::parse(args->extra, nullptr, false);
  if (!args->client.extra.is_object()) return invalid_argument("--extra is not a JSON object");
  return {};
}

// One line of JSON per answer, ordered so that two runs can be compared line by line.
Status write_answers(const std::string& file, std::vector<load::Record> records) {
  std::sort(records.begin(), records.end(), [](const auto& a, const auto& b) {
    return std::pair(a.session, a.round) < std::pair(b.session, b.round);
  });
  std::string out;
  for (const load::Record& record : records) {
    if (!record.error.empty()) continue;
    const Json line = {
        {"session", record.session}, {"round", record.round}, {"text", record.answer.text}};
    out += line.dump() + "\n";
  }
  return write_whole_file(Env::real(), file, out);
}

Status report(const ServeArgs& args, const sim::Schedule& schedule, const load::Outcome& outcome) {
  const Json summary = load::summarise(outcome);
  if (args.json_file != "-") {
    fmt::print("{}, {}\n\n{}\n{}", args.url, args.client.model,
               format_columns(load::summary_table(summary)), load::summary_lines(summary));
  }
  if (!args.answers_file.empty()) {
    HCACHE_RETURN_IF_ERROR(write_answers(args.answers_file, outcome.records));
  }
  if (!args.json_file.empty()) {
    Json requests = Json::array();
    for (const load::Record& record : outcome.records) requests.push_back(record_json(record));
    HCACHE_RETURN_IF_ERROR(write_json({{"machine", client_machine()},
                                       {"settings", settings_json(args, schedule)},
                                       {"summary", summary},
                                       {"requests", std::move(requests)}},
                                      args.json_file));
  }
  if (interrupted()) return cancelled("interrupted");
  const auto failed = std::find_if(outcome.records.begin(), outcome.records.end(),
                                   [](const load::Record& r) { return !r.error.empty(); });
  if (summary["ok"].get<int64_t>() > 0 || failed == outcome.records.end()) return {};
  return unavailable(
      fmt::format("every request failed; the first: {}: {}", failed->error, failed->message));
}

}  // namespace

ServeArgs::ServeArgs() {
  text(&client.model, "--model", "NAME", "",
       "model to ask for; default: the first one that the server names");
  load.sessions = integer(&load.sessions, "--sessions", "N", 16, {0, 1e7},
                          "conversations to hold; of a trace: requests to send, 0: all");
  load.rate = number(&load.rate, "--rate", "X", 1, {1e-6, 1e6},
                     "conversations that begin per second, at random (a Poisson process)");
  load.rounds =
      integer(&load.rounds, "--rounds", "N", 5, {1, 10000}, "messages of each conversation");
  integer(&load.context, "--context", "TOKENS", load.context, {0},
          "scale a conversation's lengths so that it comes to this in the end; 0: as in ShareGPT4; "
          "of a trace: leave longer requests out");
  number(&load.time_scale, "--time-scale", "X", load.time_scale, {0, 1e6},
         "multiply a trace's times by this; 0.5: twice as fast");
  number(&load.length_scale, "--length-scale", "X", load.length_scale, {1e-6, 1e3},
         "multiply a trace's lengths by this");
  integer(&client.concurrency, "--concurrency", "N", client.concurrency, {0, 1e5},
          "so many clients that never pause, instead of arrivals at random; 0: off");
  integer(&client.pause_after, "--pause-after", "N", client.pause_after, {0, 10000},
          "when all conversations have had so many rounds, say \"ready\" and wait for a line on "
          "stdin; 0: never");
  load.seed = integer(&load.seed, "--seed", "N", 1, {0, 4294967295.0},
                      "the same seed gives the same load, another one other texts");
  number(&client.temperature, "--temperature,--temp", "X", client.temperature, {0, 100},
         "asked of the server; 0: always the most likely token");
  flag(&client.exact_length, "--exact-length",
       "send ignore_eos, so that answers are as long as drawn; otherwise they may be shorter");
  integer(&client.retries, "--retry", "N", client.retries, {0, 1e6},
          "send a request again after a 429, so many times, when Retry-After says");
  integer(&load.warmup, "--warmup", "N", load.warmup, {0, 1e7},
          "so many more conversations at first, which are not counted");
}

Status bench_serve(const ServeArgs& asked) {
  HCACHE_RETURN_IF_ERROR(refuse_useless(asked));
  ServeArgs args = asked;
  HCACHE_RETURN_IF_ERROR(complete(&args));
  HCACHE_ASSIGN_OR_RETURN(const sim::Schedule schedule, make_schedule(args));
  HCACHE_ASSIGN_OR_RETURN(const load::TextSource text, open_text(args));
  if (args.dry_run) {
    return write_json(
        {{"settings", settings_json(args, schedule)}, {"sessions", schedule_json(schedule, text)}},
        args.json_file);
  }
  if (args.url.empty()) return invalid_argument("no server; use --url http://HOST:PORT");
  HCACHE_ASSIGN_OR_RETURN(const load::HttpUrl url, load::parse_url(args.url));
  HCACHE_ASSIGN_OR_RETURN(const auto loop,
                          load::HttpLoop::open(url, {args.api_key, args.timeout_ns}));
  ProgressLine line;
  const auto proceed = [&](double fraction) { return line.update("serving", fraction); };
  if (args.client.model.empty()) {
    HCACHE_ASSIGN_OR_RETURN(args.client.model, load::first_model(*loop, proceed));
  }
  const load::Outcome outcome = load::run_clients(*loop, schedule, text, args.client, proceed);
  line.finish();
  return report(args, schedule, outcome);
}

}  // namespace hcache::cli
