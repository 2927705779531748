#include "encoder_answers.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <string_view>

namespace hcache::encoder {
namespace {

using api::Json;

constexpr std::array<std::string_view, 16> kAnswered = {
    "/v1/embeddings", "/embedding",  "/v1/rerank",   "/rerank", "/v1/models", "/v1/models/{model}",
    "/api/tags",      "/api/ps",     "/api/version", "/health", "/api/embed", "/api/embeddings",
    "/tokenize",      "/detokenize", "/props",       "/metrics"};

template <typename Value>
void add_metric(std::string* out, std::string_view name, std::string_view type,
                std::string_view help, Value value) {
  fmt::format_to(std::back_inserter(*out), "# HELP {0} {2}\n# TYPE {0} {1}\n{0} {3}\n", name, type,
                 help, value);
}

}  // namespace

std::string pooling_name(model::Pooling pooling) {
  switch (pooling) {
    case model::Pooling::kNone: return "none";
    case model::Pooling::kMean: return "mean";
    case model::Pooling::kFirst: return "cls";
    case model::Pooling::kLast: return "last";
    case model::Pooling::kRank: return "rank";
  }
  return "none";
}

EncoderCard encoder_card(const EncoderServerOptions& options, const libllama::LlamaEncoder& encoder,
                         const std::string& model_name, int64_t created_s) {
  const libllama::LlamaModelInfo& info = encoder.info();
  EncoderCard out;
  out.card.name = model_name;
  out.card.aliases = options.aliases;
  out.card.tags = options.tags;
  out.card.created_s = created_s;
  out.card.context = encoder.options().max_text_tokens;
  out.card.vocabulary = info.n_vocab;
  out.card.width = info.n_embd_out;
  out.card.parameters = info.n_params;
  out.card.bytes = info.n_bytes;
  out.ollama.card = out.card;
  out.ollama.architecture = info.architecture;
  const size_t types = info.description.rfind(' ');
  out.ollama.weight_types =
      types == std::string::npos ? info.description : info.description.substr(types + 1);
  out.props = {{"default_generation_settings", {{"n_ctx", out.card.context}}},
               {"total_slots", encoder.options().max_batch_texts},
               {"model_alias", model_name},
               {"model_path", options.model_path},
               {"modalities", {{"vision", false}, {"audio", false}}},
               {"pooling", pooling_name(*encoder.options().pooling)},
               {"n_embd", encoder.width()},
               {"build_info", "hcache " + options.version},
               {"engine", "libllama"}};
  return out;
}

std::string encoder_metrics(const EncodeCounts& c) {
  std::string out;
  add_metric(&out, "hcache_encode_requests_waiting", "gauge",
             "Requests that are computed or wait for it.", c.waiting);
  add_metric(&out, "hcache_encode_requests_total", "counter", "Requests that were computed.",
             c.done);
  add_metric(&out, "hcache_encode_failed_total", "counter", "Requests that failed.", c.failed);
  add_metric(&out, "hcache_encode_refused_total", "counter",
             "Requests that were told 429 because too many waited.", c.refused);
  add_metric(&out, "hcache_encode_dropped_total", "counter",
             "Requests whose clients left before they were computed.", c.dropped);
  add_metric(&out, "hcache_encode_texts_total", "counter", "Texts that were computed.", c.texts);
  add_metric(&out, "hcache_encode_tokens_total", "counter", "Tokens of these texts.", c.tokens);
  add_metric(&out, "hcache_encode_batches_total", "counter", "Batches in which they were computed.",
             c.batches);
  add_metric(&out, "hcache_encode_seconds_total", "counter", "Time that computing took.",
             c.seconds);
  return out;
}

Json encoder_document(const Json& document) {
  Json out = document;
  Json& paths = out["paths"];
  for (auto path = paths.begin(); path != paths.end();) {
    path = std::ranges::find(kAnswered, path.key()) == kAnswered.end() ? paths.erase(path)
                                                                       : std::next(path);
  }
  return out;
}

}  // namespace hcache::encoder
