#include "options.h"

#include <fmt/format.h>

#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <limits>

#include "base/units.h"

namespace hcache::cli {
namespace {

constexpr double kBig = 9007199254740992.0;  // 2^53: every integer up to here is a double

// clang-format off
constexpr OptionRow kTable[] = {
    // id, flags, kind, unit, default, min, max, choices, help
    {"model", "-m,--model", Kind::kText, "FILE", "", 0, 0, "",
     "GGUF model; default: $HCACHE_MODEL, else the one that `make` fetched"},
    {"device", "--device", Kind::kText, "NAME", "cpu", 0, 0, "",
     "where to compute: cpu, cuda:N, rpc:HOST:PORT; `list` prints what there is"},
    {"threads", "-t,--threads", Kind::kInteger, "N", "0", 0, 4096, "",
     "CPU threads; 0: one per core"},
    {"state-dir", "--state-dir", Kind::kText, "DIR", "", 0, 0, "",
     "where profiles and the store live; default: $XDG_STATE_HOME/hcache, else "
     "~/.local/state/hcache"},
    {"store", "--store", Kind::kText, "DIR", "", 0, 0, "",
     "store folder, once per disk; default: STATE_DIR/store"},
    {"quota", "--quota", Kind::kBytes, "BYTES", "0", 0, 0, "",
     "most disk space of the store; the least recently used goes first; 0: no limit"},
    {"json", "--json", Kind::kFlag, "", "", 0, 0, "", "print JSON instead of text"},
    {"json-file", "--json", Kind::kText, "FILE", "", 0, 0, "",
     "also write the figures as JSON; - prints them instead of the table"},
    {"verbose", "-v,--verbose", Kind::kFlag, "", "", 0, 0, "", "log what is done, to stderr"},

    {"ctx", "-c,--ctx", Kind::kInteger, "TOKENS", "8192", 64, kBig, "",
     "room for the KV cache, shared by all sequences"},
    {"kv-type", "--kv-type", Kind::kText, "TYPE", "f16", 0, 0, "f32|f16|bf16|q8_0",
     "type of the KV cache"},
    {"attention", "--attention", Kind::kText, "KIND", "auto", 0, 0, "auto|ours|ggml",
     "attention kernel; auto: ours on the CPU with an f16 cache, else ggml's"},
    {"batch", "-b,--batch", Kind::kInteger, "TOKENS", "512", 1, 65536, "",
     "most tokens of one step"},
    {"save", "--save", Kind::kText, "WHAT", "plan", 0, 0, "plan|hidden|kv|all",
     "what is saved of each layer; plan: what restoring will want"},
    {"state-type", "--state-type", Kind::kText, "TYPE", "native", 0, 0,
     "native|f32|f16|bf16|q8", "type of saved hidden states; native loses nothing"},
    {"saver", "--saver", Kind::kText, "HOW", "background", 0, 0, "background|direct",
     "write behind the computation, or in its path (for comparison)"},
    {"salt", "--salt", Kind::kText, "TEXT", "", 0, 0, "",
     "cache salt: nothing is shared between different salts"},
    {"no-store", "--no-store", Kind::kFlag, "", "", 0, 0, "",
     "neither save nor restore; the conversation ends with the process"},
    {"no-save", "--no-save", Kind::kFlag, "", "", 0, 0, "",
     "restore, but write nothing: the stored conversation stays as it is"},
    {"restore-method", "--restore-method", Kind::kText, "METHOD", "plan", 0, 0,
     "plan|hidden|kv|recompute|naive-hybrid|token-partition",
     "how saved state is restored; plan: the fastest mix"},
    {"token-rounding", "--token-rounding", Kind::kInteger, "TOKENS", "1", 1, 65536, "",
     "token-partition splits at multiples of this"},
    {"link", "--link", Kind::kText, "RATE|paper|none", "none", 0, 0, "",
     "slow real reads down to this (19MB/s); paper: the paper's ratio of compute to link"},
    {"session", "--session", Kind::kText, "NAME", "", 0, 0, "",
     "name of a conversation to continue or begin; default: one that is not kept"},
    {"system", "--system", Kind::kText, "TEXT", "", 0, 0, "",
     "system message of a new conversation; default: the model's own"},
    {"prompt", "-p,--prompt", Kind::kText, "TEXT", "", 0, 0, "", "what to say"},
    {"file", "-f,--file", Kind::kText, "FILE", "", 0, 0, "",
     "say what this file holds; with -p, before that text"},
    {"chat-file", "-f,--file", Kind::kText, "FILE", "", 0, 0, "",
     "first say what this file holds"},
    {"raw", "--raw", Kind::kFlag, "", "", 0, 0, "",
     "complete the text as it is, without the chat template"},
    {"max-tokens", "-n,--max-tokens", Kind::kInteger, "TOKENS", "512", 0, kBig, "",
     "end a reply after this many"},
    {"json-lines", "--json", Kind::kFlag, "", "", 0, 0, "",
     "print one JSON object per turn instead of text"},
    {"timeline", "--timeline", Kind::kFlag, "", "", 0, 0, "",
     "print when each layer is read and computed"},
    {"refresh", "--refresh", Kind::kFlag, "", "", 0, 0, "", "measure again"},

    {"temperature", "--temperature,--temp", Kind::kNumber, "X", "0.8", 0, 100, "",
     "randomness of the choice; 0: always the most likely token"},
    {"top-k", "--top-k", Kind::kInteger, "N", "40", 0, 1 << 24, "",
     "choose among the N most likely tokens; 0: all"},
    {"top-p", "--top-p", Kind::kNumber, "P", "0.95", 1e-6, 1, "",
     "choose among the fewest tokens with this probability; 1: all"},
    {"min-p", "--min-p", Kind::kNumber, "P", "0.05", 0, 1, "",
     "drop tokens below this share of the most likely one's probability; 0: none"},
    {"repeat-penalty", "--repeat-penalty", Kind::kNumber, "X", "1", 1e-3, 1e3, "",
     "divide the logits of recent tokens by this; 1: off"},
    {"frequency-penalty", "--frequency-penalty", Kind::kNumber, "X", "0", -100, 100, "",
     "subtract this from a logit for each recent occurrence; 0: off"},
    {"presence-penalty", "--presence-penalty", Kind::kNumber, "X", "0", -100, 100, "",
     "subtract this once from the logit of a recent token; 0: off"},
    {"penalty-last-n", "--penalty-last-n", Kind::kInteger, "TOKENS", "64", 0, 1 << 24, "",
     "how many tokens are recent"},
    {"seed", "--seed", Kind::kInteger, "N", "0", 0, 4294967295.0, "",
     "the same seed gives the same answer"},
    {"json-schema", "--json-schema", Kind::kText, "JSON", "", 0, 0, "",
     "the answer must follow this JSON schema"},
    {"grammar", "--grammar", Kind::kText, "GBNF", "", 0, 0, "",
     "the answer must follow this grammar"},

    {"scenario", "--scenario", Kind::kText, "FILE", "", 0, 0, "",
     "what to simulate (docs/simulator.md)"},
    {"csv-file", "--csv", Kind::kText, "FILE", "", 0, 0, "",
     "also write the figures as CSV, a line for each row"},
    {"sim-trace", "--trace", Kind::kText, "FILE", "", 0, 0, "",
     "recorded requests in Mooncake's format, instead of the scenario's own"},
    {"hardware", "--hardware", Kind::kText, "NAME", "", 0, 0, "",
     "plan for hardware of the paper instead of this machine: a100, a100-80g, a30, rtx4090, l20, h800"},
    {"shape", "-m,--model", Kind::kText, "FILE|NAME", "", 0, 0, "",
     "GGUF model, or with --hardware a published shape: llama2-7b, llama2-13b, opt-30b, ..."},
    {"gpus", "--gpus", Kind::kInteger, "N", "1", 1, 1024, "",
     "with --hardware: devices, tensor parallel"},
    {"ssd", "--ssd", Kind::kInteger, "N", "0", 0, 1024, "",
     "with --hardware: SSDs of 6.9 GB/s over all devices; 0: host memory over the link"},
    {"history", "--history", Kind::kInteger, "TOKENS", "1024", 1, kBig, "",
     "saved tokens to restore"},
    {"new", "--new", Kind::kInteger, "TOKENS", "50", 0, kBig, "",
     "tokens that are new behind the history"},

    {"synth-shape", "--shape", Kind::kText, "NAME", "", 0, 0, "",
     "published shape: llama2-7b, llama2-13b, opt-30b, ...; a wrong name lists them"},
    {"layers", "--layers", Kind::kInteger, "N", "0", 0, 1024, "",
     "how many layers; 0: as published"},
    {"type", "--type", Kind::kText, "TYPE", "f16", 0, 0, "",
     "weight type: f32, f16, bf16, q8_0, q4_0, q4_1, q4_k, ..."},
    {"vocab-from", "--vocab-from", Kind::kText, "FILE", "", 0, 0, "",
     "GGUF file whose vocabulary is copied in; default: none"},
    {"synth-seed", "--seed", Kind::kInteger, "N", "1", 0, kBig, "",
     "the same seed gives the same weights"},
    {"out", "-o,--out", Kind::kText, "FILE", "", 0, 0, "", "GGUF file to write"},
    {"tensors", "--tensors", Kind::kFlag, "", "", 0, 0, "", "list the tensors too"},

    {"histories", "--history", Kind::kInteger, "TOKENS,...", "512,1024,2048,4096", 2, kBig, "",
     "saved tokens to restore, one row each"},
    {"methods", "--methods", Kind::kText, "METHOD,...", "plan,hidden,kv,recompute,resident", 0, 0,
     "plan|hidden|kv|recompute|naive-hybrid|token-partition|token-partition-rounded|resident",
     "ways to restore; resident: the KV cache never left, the ideal"},
    {"links", "--link", Kind::kText, "RATE|paper|none,...", "none", 0, 0, "",
     "slow real reads down to this (19MB/s); paper: the paper's ratio of compute to link"},
    {"reps", "--reps", Kind::kInteger, "N", "3", 1, 1000, "",
     "timed runs of each row, alternating between rows"},
    {"decoded", "--decoded", Kind::kInteger, "TOKENS", "64", 0, kBig, "",
     "so many of the history's last tokens are decoded one at a time, as replies are"},
    {"greedy", "--greedy", Kind::kInteger, "TOKENS", "32", 1, 4096, "",
     "length of the continuation that is compared with the uninterrupted run's"},
    {"conversations", "--conversations", Kind::kInteger, "N", "1", 1, 1000, "",
     "repeat everything with so many different texts"},
    {"bench-save", "--save", Kind::kText, "WHAT", "all", 0, 0, "plan|hidden|kv|all",
     "what is saved: with all, every method finds what it wants to read"},
    {"paced", "--paced", Kind::kFlag, "", "", 0, 0, "",
     "say \"ready\" and wait for a line on stdin before each repetition"},
    {"prompts", "--prompt", Kind::kInteger, "TOKENS,...", "512,2048", 1, kBig, "",
     "prompt lengths to time"},
    {"gen", "--gen", Kind::kInteger, "TOKENS", "64", 1, kBig, "", "tokens to decode"},
    {"depths", "--depth", Kind::kInteger, "TOKENS,...", "0,4096", 0, kBig, "",
     "tokens in the KV cache before the prompt"},
    {"captures", "--capture", Kind::kText, "on|off,...", "off", 0, 0, "on|off",
     "save the state while running"},
    {"text", "--text", Kind::kText, "FILE", "", 0, 0, "",
     "text to take tokens from; default: made-up sentences"},

    {"url", "--url", Kind::kText, "URL", "", 0, 0, "",
     "server to load, http://HOST:PORT; it speaks OpenAI's chat API"},
    {"served-model", "--model", Kind::kText, "NAME", "", 0, 0, "",
     "model to ask for; default: the first one that the server names"},
    {"bearer-key", "--api-key", Kind::kText, "KEY", "", 0, 0, "", "sent as a bearer token"},
    {"trace", "--trace", Kind::kText, "sharegpt|FILE", "sharegpt", 0, 0, "",
     "conversations like ShareGPT4's, or a trace: Mooncake's JSON lines or Azure's CSV"},
    {"sessions", "--sessions", Kind::kInteger, "N", "16", 0, 1e7, "",
     "conversations to hold; of a trace: requests to send, 0: all"},
    {"rate", "--rate", Kind::kNumber, "X", "1", 1e-6, 1e6, "",
     "conversations that begin per second, at random (a Poisson process)"},
    {"rounds", "--rounds", Kind::kInteger, "N", "5", 1, 10000, "",
     "messages of each conversation"},
    {"think", "--think", Kind::kDuration, "TIME", "30s", 0, 0, "",
     "mean pause between an answer and the next message"},
    {"think-spread", "--think-spread", Kind::kText, "LAW", "fixed", 0, 0, "fixed|exponential",
     "whether pauses are all alike or random"},
    {"load-context", "--context", Kind::kInteger, "TOKENS", "0", 0, kBig, "",
     "scale a conversation's lengths so that it comes to this in the end; 0: as in ShareGPT4; of a "
     "trace: leave longer requests out"},
    {"time-scale", "--time-scale", Kind::kNumber, "X", "1", 0, 1e6, "",
     "multiply a trace's times by this; 0.5: twice as fast"},
    {"length-scale", "--length-scale", Kind::kNumber, "X", "1", 1e-6, 1e3, "",
     "multiply a trace's lengths by this"},
    {"concurrency", "--concurrency", Kind::kInteger, "N", "0", 0, 1e5, "",
     "so many clients that never pause, instead of arrivals at random; 0: off"},
    {"pause-after", "--pause-after", Kind::kInteger, "N", "0", 0, 10000, "",
     "when all conversations have had so many rounds, say \"ready\" and wait for a line on stdin; "
     "0: never"},
    {"load-text", "--text", Kind::kText, "FILE", "", 0, 0, "",
     "text to take messages from; default: an essay that is built in"},
    {"token-bytes", "--token-bytes", Kind::kNumber, "X", "4.5", 0.1, 1000, "",
     "bytes of that text per token"},
    {"load-seed", "--seed", Kind::kInteger, "N", "1", 0, 4294967295.0, "",
     "the same seed gives the same load, another one other texts"},
    {"load-temperature", "--temperature,--temp", Kind::kNumber, "X", "0", 0, 100, "",
     "asked of the server; 0: always the most likely token"},
    {"exact-length", "--exact-length", Kind::kFlag, "", "", 0, 0, "",
     "send ignore_eos, so that answers are as long as drawn; otherwise they may be shorter"},
    {"extra", "--extra", Kind::kText, "JSON", "", 0, 0, "",
     "object whose members are added to every request"},
    {"timeout", "--timeout", Kind::kDuration, "TIME", "0s", 0, 0, "",
     "give a request up after this long; 0: never"},
    {"retry", "--retry", Kind::kInteger, "N", "0", 0, 1e6, "",
     "send a request again after a 429, so many times, when Retry-After says"},
    {"warmup", "--warmup", Kind::kInteger, "N", "0", 0, 1e7, "",
     "so many more conversations at first, which are not counted"},
    {"answers", "--answers", Kind::kText, "FILE", "", 0, 0, "",
     "write every answer's text, so that two runs can be compared"},
    {"dry-run", "--dry-run", Kind::kFlag, "", "", 0, 0, "",
     "send nothing; print the load as JSON"},

    {"chunks", "--chunks", Kind::kFlag, "", "", 0, 0, "", "list chunks instead of sessions"},
    {"repair", "--repair", Kind::kFlag, "", "", 0, 0, "",
     "drop damaged pages, so that what they held is recomputed"},
    {"export-session", "--session", Kind::kText, "NAME", "", 0, 0, "",
     "conversation to write, as `hcache store ls` names it"},
    {"session-out", "-o,--out", Kind::kText, "FILE", "", 0, 0, "", "session file to write"},
    {"session-in", "-f,--file", Kind::kText, "FILE", "", 0, 0, "", "session file to read"},
    {"import-session", "--session", Kind::kText, "NAME", "", 0, 0, "",
     "name for the conversation; default: the file's"},
    {"rm-session", "--session", Kind::kText, "NAME", "", 0, 0, "",
     "remove this conversation and what only it uses"},
    {"rm-chunk", "--chunk", Kind::kText, "ID", "", 0, 0, "",
     "remove this chunk and all that follow it"},
    {"rm-unused-for", "--unused-for", Kind::kDuration, "TIME", "", 0, 0, "",
     "remove chunks not used for this long (30m, 12h, 7d)"},
    {"rm-all", "--all", Kind::kFlag, "", "", 0, 0, "", "remove every chunk and conversation"},

    {"serve-host", "--host", Kind::kText, "ADDRESS", "127.0.0.1", 0, 0, "",
     "address to listen on; without an API key others than loopback are warned about"},
    {"serve-port", "--port", Kind::kInteger, "N", "8080", 0, 65535, "",
     "port to listen on; 0: any free one"},
    {"api-key", "--api-key", Kind::kText, "KEY,...", "", 0, 0, "",
     "keys that clients must present one of; each has state of its own"},
    {"api-key-file", "--api-key-file", Kind::kText, "FILE", "", 0, 0, "",
     "file with one API key per line"},
    {"shared-keys", "--share-between-keys", Kind::kFlag, "", "", 0, 0, "",
     "all API keys share their conversations' state"},
    {"cors", "--cors", Kind::kText, "ORIGIN,...", "", 0, 0, "",
     "web origins that may call (https://app.example, or *); default: none"},
    {"log-requests", "--log-requests", Kind::kText, "", "on", 0, 0, "on|off",
     "one line to stderr for every request that has ended"},
    {"reply-tokens", "-n,--max-tokens,--predict,--n-predict", Kind::kInteger, "TOKENS", "-1", -1,
     kBig, "", "end a reply after this many where a request names no limit; -1: when the room ends"},
    {"alias", "-a,--alias", Kind::kText, "NAME", "", 0, 0, "",
     "the model's name for clients; default: its file's"},
    {"chat-template-file", "--chat-template-file", Kind::kText, "FILE", "", 0, 0, "",
     "Jinja chat template to use instead of the model's own"},
    {"parallel", "--parallel,--np", Kind::kInteger, "N", "8", 1, 4096, "",
     "most sequences in one step"},
    {"step-tokens", "--step-tokens", Kind::kInteger, "TOKENS", "256", 1, 65536, "",
     "most tokens of one step: replies first, then prompts"},
    {"restore-exclusive", "--restore-exclusive", Kind::kFlag, "", "", 0, 0, "",
     "compute nothing else while a restore is in flight, as the HCache paper does: the first token "
     "comes earliest, replies under way stall"},
    {"restore-share", "--restore-share", Kind::kNumber, "X", "0.25", 0.01, 10, "",
     "how much longer a restore may make a step in which others decode"},
    {"queue-policy", "--queue-policy", Kind::kText, "POLICY", "fcfs", 0, 0, "fcfs|car",
     "who is admitted next: the first; or, of the first 16, who needs the least loading"},
    {"max-queued", "--max-queued", Kind::kInteger, "N", "256", 1, kBig, "",
     "most requests that wait; beyond it 429"},
    {"max-queued-per-key", "--max-queued-per-key", Kind::kInteger, "N", "0", 0, kBig, "",
     "the same for one API key; 0: no limit"},
    {"max-running-per-key", "--max-running-per-key", Kind::kInteger, "N", "0", 0, kBig, "",
     "most requests of one API key that run at a time; 0: no limit"},
    {"quota-per-key", "--quota-per-key", Kind::kBytes, "BYTES", "0", 0, 0, "",
     "most saved state of one API key; its own least recently used goes first; 0: no limit"},
    {"dram", "--dram", Kind::kBytes, "BYTES", "0", 0, 0, "",
     "host memory for saved state, in front of the disks"},
    {"dram-place", "--dram-place", Kind::kText, "PLACE", "", 0, 0, "",
     "where --dram lies: node:N, a NUMA node (a CXL expander, say); or a path, a DAX device or a "
     "directory on a DAX file system, tmpfs or hugetlbfs"},
    {"evict-policy", "--evict-policy", Kind::kText, "POLICY", "scheduler-aware", 0, 0, "",
     "what stays in --dram and of idle sequences in the arena"},  // and offer()
    {"offload-above", "--offload-above", Kind::kNumber, "SHARE", "1", 0, 1, "",
     "of the arena: fuller than this, idle sequences that are saved leave at once, and not only "
     "when room is wanted"},
    {"fetch-policy", "--fetch-policy", Kind::kText, "POLICY", "scheduler-aware", 0, 0,
     "scheduler-aware|car-timer|on-demand",
     "what is read for requests that wait: into --dram the state of all, in the order of the "
     "queue; into the arena that of the next, in time for the end of a running one; or nothing"},
    {"remote", "--remote", Kind::kText, "URL", "", 0, 0, "",
     "a store that several processes share: redis://[[user]:password@]host[:port][,host…][/number], "
     "a server or a cluster; rediss:// with TLS; or s3://bucket[/prefix][?endpoint=URL&region=NAME] with "
     "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment"},
    {"remote-ttl", "--remote-ttl", Kind::kDuration, "TIME", "24h", 0, 0, "",
     "state in --remote that nobody uses for so long goes; 0: never"},
    {"remote-write", "--remote-write", Kind::kText, "HOW", "through", 0, 0, "through|back|off",
     "what goes to --remote: all that is saved, what --quota evicts from the disks, nothing"},
    {"remote-timeout", "--remote-timeout", Kind::kDuration, "TIME", "250ms", 0, 0, "",
     "how long a request waits for the answer whether --remote has its conversation"},
    {"flush-interval", "--flush-interval", Kind::kDuration, "TIME", "1s", 0, 0, "",
     "state is on disk at the latest so long after it was computed"},
    {"slot-save-path", "--slot-save-path", Kind::kText, "DIR", "", 0, 0, "",
     "allow /slots/ID?action=save|restore|erase, as llama-server's; slots are saved in the store, "
     "nothing is written to this folder"},
    {"grace", "--grace", Kind::kDuration, "TIME", "10s", 0, 0, "",
     "time that running requests have to end after SIGTERM"},
    {"ttl", "--ttl", Kind::kDuration, "TIME", "0", 0, 0, "",
     "conversations without a name are forgotten so long after their last turn; 0: never"},

    {"host", "--host", Kind::kText, "ADDRESS", "127.0.0.1", 0, 0, "", "address to listen on"},
    {"port", "--port", Kind::kInteger, "N", "50052", 1, 65535, "", "port to listen on"},
};
// clang-format on

const OptionRow& row_of(std::string_view id, std::initializer_list<Kind> kinds) {
  for (const OptionRow& row : kTable) {
    if (row.id != id) continue;
    for (const Kind kind : kinds) {
      if (row.kind == kind) return row;
    }
    die(fmt::format("option {} is bound to a variable of another kind", id));
  }
  die(fmt::format("no option {} in the table", id));
}

// The option's long name, for messages.
std::string long_name(const OptionRow& row) {
  const size_t comma = row.flags.find(',');
  std::string_view name = row.flags.substr(0, comma);
  if (!name.starts_with("--") && comma != std::string_view::npos) {
    name = row.flags.substr(comma + 1, row.flags.find(',', comma + 1) - comma - 1);
  }
  return std::string(name);
}

[[noreturn]] void reject(const OptionRow& row, const std::string& why) {
  throw CLI::ValidationError(long_name(row), why);
}

template <typename T>
T in_range(const OptionRow& row, T value) {
  const auto number = static_cast<double>(value);
  if (!(number >= row.min && number <= row.max)) {
    reject(row, fmt::format("{} is not between {} and {}", value, row.min, row.max));
  }
  return value;
}

template <typename T>
T parse_number(const OptionRow& row, const std::string& text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    reject(row, fmt::format("'{}' is not {}", text,
                            std::is_integral_v<T> ? "a whole number" : "a number"));
  }
  return in_range(row, value);
}

std::string parse_text(const OptionRow& row, const std::string& text) {
  if (row.choices.empty()) return text;
  std::string_view rest = row.choices;
  while (true) {
    const size_t bar = rest.find('|');
    if (rest.substr(0, bar) == text) return text;
    if (bar == std::string_view::npos) break;
    rest.remove_prefix(bar + 1);
  }
  reject(row, fmt::format("'{}' is none of {}", text, row.choices));
}

template <typename T>
T unwrap(const OptionRow& row, Result<T> value) {
  if (!value.ok()) reject(row, value.status().message());
  return std::move(value).value();
}

// A single-valued option. `parse` turns the typed text into the value and may throw.
template <typename T, typename Parse>
CLI::Option* add_single(CLI::App& app, const OptionRow& row, T* out, Parse parse) {
  if (!row.fallback.empty()) *out = parse(std::string(row.fallback));
  CLI::Option* option = app.add_option_function<std::string>(
      std::string(row.flags), [out, parse](const std::string& text) { *out = parse(text); },
      std::string(row.help));
  const std::string unit(row.choices.empty() ? row.unit : row.choices);
  option->type_name(unit)->default_str(std::string(row.fallback));
  return option;
}

template <typename T, typename Parse>
CLI::Option* add_list(CLI::App& app, const OptionRow& row, std::vector<T>* out, Parse parse) {
  const auto parse_all = [parse](const std::vector<std::string>& texts) {
    std::vector<T> values;
    for (const std::string& text : texts) {
      for (const std::string& item : CLI::detail::split(text, ',')) values.push_back(parse(item));
    }
    return values;
  };
  if (!row.fallback.empty()) *out = parse_all({std::string(row.fallback)});
  CLI::Option* option = app.add_option_function<std::vector<std::string>>(
      std::string(row.flags),
      [out, parse_all](const std::vector<std::string>& texts) { *out = parse_all(texts); },
      std::string(row.help));
  // One value per flag, so that a positional argument may follow.
  option->type_name(std::string(row.unit))
      ->default_str(std::string(row.fallback))
      ->expected(1, CLI::detail::expected_max_vector_size)
      ->allow_extra_args(false);
  return option;
}

std::string home_path(const char* variable, const std::string& below_home) {
  const char* value = std::getenv(variable);
  if (value != nullptr && *value != '\0') return value;
  const char* home = std::getenv("HOME");
  return (std::filesystem::path(home == nullptr ? "." : home) / below_home).string();
}

}  // namespace

CLI::Option* add_option(CLI::App& app, std::string_view id, std::string* out) {
  const OptionRow& row = row_of(id, {Kind::kText});
  return add_single(app, row, out, [&row](const std::string& t) { return parse_text(row, t); });
}

void offer(CLI::Option* option, const std::vector<Choice>& choices) {
  std::string names;
  std::string help = option->get_description();
  for (const auto& [name, about] : choices) {
    help += fmt::format("{} {}: {}", names.empty() ? ":" : ";", name, about);
    names += fmt::format("{}{}", names.empty() ? "" : "|", name);
  }
  option->type_name(names)->description(help);
}

CLI::Option* add_option(CLI::App& app, std::string_view id, int* out) {
  const OptionRow& row = row_of(id, {Kind::kInteger});
  return add_single(app, row, out,
                    [&row](const std::string& t) { return parse_number<int>(row, t); });
}

CLI::Option* add_option(CLI::App& app, std::string_view id, int64_t* out) {
  const OptionRow& row = row_of(id, {Kind::kInteger, Kind::kDuration});
  if (row.kind == Kind::kDuration) {
    return add_single(app, row, out,
                      [&row](const std::string& t) { return unwrap(row, parse_duration(t)); });
  }
  return add_single(app, row, out,
                    [&row](const std::string& t) { return parse_number<int64_t>(row, t); });
}

CLI::Option* add_option(CLI::App& app, std::string_view id, uint32_t* out) {
  const OptionRow& row = row_of(id, {Kind::kInteger});
  return add_single(app, row, out,
                    [&row](const std::string& t) { return parse_number<uint32_t>(row, t); });
}

CLI::Option* add_option(CLI::App& app, std::string_view id, uint64_t* out) {
  const OptionRow& row = row_of(id, {Kind::kBytes});
  return add_single(app, row, out,
                    [&row](const std::string& t) { return unwrap(row, parse_bytes(t)); });
}

CLI::Option* add_option(CLI::App& app, std::string_view id, float* out) {
  const OptionRow& row = row_of(id, {Kind::kNumber});
  return add_single(app, row, out,
                    [&row](const std::string& t) { return parse_number<float>(row, t); });
}

CLI::Option* add_option(CLI::App& app, std::string_view id, double* out) {
  const OptionRow& row = row_of(id, {Kind::kNumber, Kind::kRate});
  if (row.kind == Kind::kRate) {
    return add_single(app, row, out,
                      [&row](const std::string& t) { return unwrap(row, parse_rate(t)); });
  }
  return add_single(app, row, out,
                    [&row](const std::string& t) { return parse_number<double>(row, t); });
}

CLI::Option* add_option(CLI::App& app, std::string_view id, bool* out) {
  const OptionRow& row = row_of(id, {Kind::kFlag});
  return app.add_flag(std::string(row.flags), *out, std::string(row.help));
}

CLI::Option* add_option(CLI::App& app, std::string_view id, std::vector<std::string>* out) {
  const OptionRow& row = row_of(id, {Kind::kText});
  return add_list(app, row, out, [&row](const std::string& t) { return parse_text(row, t); });
}

CLI::Option* add_option(CLI::App& app, std::string_view id, std::vector<int64_t>* out) {
  const OptionRow& row = row_of(id, {Kind::kInteger});
  return add_list(app, row, out,
                  [&row](const std::string& t) { return parse_number<int64_t>(row, t); });
}

void add_state_options(CLI::App& app, StateOptions* out) {
  add_option(app, "state-dir", &out->state_dir);
  add_option(app, "store", &out->stores);
  add_option(app, "quota", &out->quota_bytes);
  app.parse_complete_callback([out] {
    if (out->state_dir.empty()) {
      const char* xdg = std::getenv("XDG_STATE_HOME");
      const std::filesystem::path base =
          xdg != nullptr && *xdg != '\0' ? xdg : home_path("HOME", "") + "/.local/state";
      out->state_dir = (base / "hcache").string();
    }
    if (out->stores.empty()) {
      out->stores.push_back((std::filesystem::path(out->state_dir) / "store").string());
    }
  });
}

void add_model_options(CLI::App& app, ModelOptions* out) {
  add_option(app, "model", &out->path);
  add_option(app, "device", &out->device);
  add_option(app, "threads", &out->threads);
}

Result<std::string> resolve_model(const std::string& given) {
  if (!given.empty()) return given;
  if (const char* model = std::getenv("HCACHE_MODEL"); model != nullptr && *model != '\0') {
    return std::string(model);
  }
  // The same rule as scripts/third_party.py.
  std::filesystem::path cache = home_path("HCACHE_CACHE_DIR", "");
  if (const char* dir = std::getenv("HCACHE_CACHE_DIR"); dir == nullptr || *dir == '\0') {
    cache = std::filesystem::path(home_path("XDG_CACHE_HOME", ".cache")) / "hcache";
  }
  const std::filesystem::path path = cache / "models" / HCACHE_DEFAULT_MODEL;
  std::error_code ignored;
  if (std::filesystem::exists(path, ignored)) return path.string();
  return not_found(
      fmt::format("no model given and none at {}; use -m FILE.gguf, or fetch the default one with "
                  "`make print-model`",
                  path.string()));
}

void add_sampling_options(CLI::App& app, model::SamplingOptions* out) {
  add_option(app, "temperature", &out->temperature);
  add_option(app, "top-k", &out->top_k);
  add_option(app, "top-p", &out->top_p);
  add_option(app, "min-p", &out->min_p);
  add_option(app, "repeat-penalty", &out->repeat_penalty);
  add_option(app, "frequency-penalty", &out->frequency_penalty);
  add_option(app, "presence-penalty", &out->presence_penalty);
  add_option(app, "penalty-last-n", &out->penalty_last_n);
  add_option(app, "seed", &out->seed);
  add_option(app, "json-schema", &out->json_schema);
  add_option(app, "grammar", &out->grammar);
}

}  // namespace hcache::cli
