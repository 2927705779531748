#include "api/rerank.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "request_fields.h"

namespace hcache::api {
namespace {

constexpr size_t kMostDocuments = 1 << 16;

void documents_field(Fields& f, std::string_view name, std::string_view doc, RerankRequest* r) {
  const Json schema = {{"type", "array"},
                       {"items", {{"type", "string"}}},
                       {"minItems", 1},
                       {"maxItems", kMostDocuments}};
  f.value(name, schema, doc, [&](const Json& value, const std::string& path) -> Status {
    std::vector<std::string> texts;
    HCACHE_RETURN_IF_ERROR(read_strings(value, path, &texts));
    if (texts.empty()) return invalid_argument(path + ": expected an array that is not empty");
    if (texts.size() > kMostDocuments) {
      return invalid_argument(path + ": more than 65536 documents");
    }
    if (r->documents.empty()) r->documents = std::move(texts);
    return {};
  });
}

}  // namespace

void rerank_fields(Fields& f, RerankRequest* r) {
  f.text("model", &r->model_name, "The model; it must be the one that is served.");
  f.required().text("query", &r->query, "What the documents are to answer.");
  documents_field(f, "documents", "The documents.", r);
  documents_field(f, "texts", "The documents, where the answer is to have TEI's form.", r);
  r->tei = f.has("texts");
  if (f.reading() && r->documents.empty()) f.fail("documents", "missing, and so is texts");
  int64_t top_n = 0;
  f.integer("top_n", &top_n, {1, 1 << 30}, "Only so many results, the best; without it all.");
  if (f.has("top_n")) r->top_n = top_n;
  f.flag("return_text", &r->return_text, "Whether a result in TEI's form has its document.");
}

Result<RerankRequest> parse_rerank(const Json& body) {
  RerankRequest r;
  HCACHE_RETURN_IF_ERROR(read_fields(body, [&](Fields& f) { rerank_fields(f, &r); }));
  return r;
}

Json rerank_answer(const RerankRequest& request, std::string_view model_name,
                   std::span<const Rank> ranks) {
  std::vector<size_t> order(ranks.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return ranks[a].score > ranks[b].score; });
  if (request.top_n) {
    order.resize(std::min(order.size(), static_cast<size_t>(*request.top_n)));
  }
  Json results = Json::array();
  for (const size_t i : order) {
    Json result = {{"index", i}, {request.tei ? "score" : "relevance_score", ranks[i].score}};
    if (request.tei && request.return_text) result["text"] = request.documents[i];
    results.push_back(std::move(result));
  }
  if (request.tei) return results;
  int64_t tokens = 0;
  for (const Rank& rank : ranks) tokens += rank.tokens;
  return {{"model", model_name},
          {"object", "list"},
          {"usage", {{"prompt_tokens", tokens}, {"total_tokens", tokens}}},
          {"results", std::move(results)}};
}

}  // namespace hcache::api
