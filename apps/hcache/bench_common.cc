#include <fmt/format.h>
#include <ggml.h>

#include <algorithm>
#include <future>
#include <random>

#include "base/cpu_target.h"
#include "base/env.h"
#include "bench.h"

namespace hcache::cli {

double now_s() { return static_cast<double>(Env::real().monotonic_ns()) * 1e-9; }

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  const size_t n = v.size();
  if (n == 0) return 0;
  return n % 2 == 1 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

Json spread(const std::vector<double>& v, double factor) {
  return {{"min", factor * *std::min_element(v.begin(), v.end())},
          {"median", factor * median(v)},
          {"max", factor * *std::max_element(v.begin(), v.end())}};
}

std::string describe_devices(const model::Model& model) {
  if (model.devices().size() == 1) return model.device().description();
  std::string out;
  for (const auto& part : model.parts()) {
    out +=
        fmt::format("{}{} ({}, {} of {} heads)", out.empty() ? "" : " + ", part->device().name(),
                    part->device().description(), part->hparams().n_head, model.hparams().n_head);
  }
  if (!out.empty()) return out;
  for (const model::Device* device : model.devices()) {
    int n_layers = 0;
    for (int layer = 0; layer < model.hparams().n_layer; ++layer) {
      n_layers += &model.device(layer) == device ? 1 : 0;
    }
    out += fmt::format("{}{} ({}, {} layers)", out.empty() ? "" : " + ", device->name(),
                       device->description(), n_layers);
  }
  return out;
}

Json machine_json(const model::Model& model) {
  const model::Device& device = model.device();
  Json json = host_json();
  json["device"] = describe_devices(model);
  json["threads"] = device.n_threads();
  json["kernels"] = device.kernel_identity();
  json["cpu_target"] = cpu_target();
  json["ggml"] = ggml_version();
  json["version"] = HCACHE_VERSION;
#ifdef NDEBUG
  json["build"] = "release";
#else
  json["build"] = "debug";
#endif
  return json;
}

void warn_of_debug_build() {
#ifndef NDEBUG
  fmt::print(stderr, "hcache: this is a debug build; its times mean little\n");
#endif
}

Status report(const BenchArgs& args, const Json& results,
              const std::vector<std::vector<std::string>>& table) {
  if (args.json_file != "-") {
    const Json& machine = results["machine"];
    fmt::print("{}, {} threads, {}\n\n{}", machine["device"].get<std::string>(),
               machine["threads"].get<int>(), machine["cpu"].get<std::string>(),
               format_columns(table));
  }
  if (args.json_file.empty()) return {};
  return write_json(results, args.json_file);
}

Status release_idle(serving::Serving& serving, scheduler::SeqId seq) {
  std::promise<Status> done;
  serving.scheduler().visit_idle(seq, /*release=*/true,
                                 [&done](const Result<scheduler::IdleSequence>& sequence) {
                                   done.set_value(sequence.status());
                                 });
  return done.get_future().get();
}

void wait_for_turn(const BenchArgs& args) {
  if (args.paced) wait_for_line();
}

Scratch::Scratch(RuntimeArgs& args) {
  const std::string name = fmt::format("bench-{:016x}", Env::real().random_u64());
  for (std::string& dir : args.state.stores) {
    dir = join_path(dir, name);
    options_.dirs.push_back(dir);
  }
}

Scratch::~Scratch() {
  store::Store::destroy(Env::real(), options_).ignore("there may be none yet");
  for (const std::string& dir : options_.dirs) {
    Env::real().remove_path(dir).ignore("there may be none yet");
  }
}

namespace {

std::string sentence(std::mt19937& rng) {
  static constexpr const char* kWho[] = {"The keeper",       "A captain", "My brother",
                                         "The old engineer", "Nobody",    "The harbour master",
                                         "Her neighbour"};
  static constexpr const char* kDid[] = {"counted", "repaired",   "forgot",      "measured",
                                         "sold",    "wrote down", "asked about", "painted"};
  static constexpr const char* kWhat[] = {"the lamps",
                                          "seven boats",
                                          "the price of salt",
                                          "a broken clock",
                                          "the names of the rocks",
                                          "every wave",
                                          "the northern road"};
  static constexpr const char* kWhen[] = {"before the storm",   "in the spring of that year",
                                          "without a word",     "while the tide came in",
                                          "for the third time", "as the law required"};
  const auto pick = [&](auto& list) { return list[rng() % std::size(list)]; };
  std::string out = fmt::format("{} {} {} {}. ", pick(kWho), pick(kDid), pick(kWhat), pick(kWhen));
  return out;
}

}  // namespace

Result<TokenSource> TokenSource::open(const state::Runtime& runtime, const std::string& file) {
  TokenSource source;
  source.n_vocab_ = runtime.model().hparams().n_vocab;
  auto tokenizer = model::Tokenizer::load(runtime.model().path());
  if (tokenizer.code() == Code::kFailedPrecondition) return source;
  HCACHE_RETURN_IF_ERROR(tokenizer.status());
  source.tokenizer_ = std::move(tokenizer).value();
  if (!file.empty()) {
    HCACHE_ASSIGN_OR_RETURN(source.text_, read_whole_file(Env::real(), file));
    if (source.text_.empty()) return invalid_argument(fmt::format("{} is empty", file));
  }
  return source;
}

Result<std::vector<int32_t>> TokenSource::take(int64_t n, uint32_t seed) const {
  std::mt19937 rng(seed);
  std::vector<int32_t> tokens;
  if (tokenizer_ == nullptr) {
    for (int64_t i = 0; i < n; i++) {
      tokens.push_back(static_cast<int32_t>(rng() % static_cast<uint64_t>(n_vocab_)));
    }
    return tokens;
  }
  std::string text = fmt::format("{}. ", seed);
  if (!text_.empty()) {
    // Another seed begins at another sentence.
    const size_t stop = text_.find(". ", rng() % text_.size());
    if (stop != std::string::npos) text += text_.substr(stop + 2);
  }
  while (static_cast<int64_t>(tokens.size()) < n) {
    if (text_.empty()) {
      for (int i = 0; i < 100; i++) text += sentence(rng);
    } else {
      text += text_;
    }
    HCACHE_ASSIGN_OR_RETURN(tokens, tokenizer_->encode(text));
  }
  tokens.resize(static_cast<size_t>(n));
  return tokens;
}

std::span<const int32_t> part(const std::vector<int32_t>& tokens, int64_t from, int64_t to) {
  return std::span<const int32_t>(tokens).subspan(static_cast<size_t>(from),
                                                  static_cast<size_t>(to - from));
}

}  // namespace hcache::cli
