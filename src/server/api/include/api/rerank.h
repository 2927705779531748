// Requests that rank documents by a query, in the forms of Jina and of Hugging Face's Text
// Embeddings Inference (TEI), as llama-server takes them. Pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "api/json.h"
#include "base/status.h"

namespace hcache::api {

struct RerankRequest {
  std::string model_name;
  std::string query;
  std::vector<std::string> documents;
  bool tei = false;              // they were sent as `texts`
  std::optional<int64_t> top_n;  // how many results; absent: all
  bool return_text = false;      // TEI's: each result has its document
};

[[nodiscard]] Result<RerankRequest> parse_rerank(const Json& body);

// Of one document.
struct Rank {
  double score = 0;
  int64_t tokens = 0;  // of query and document
};

// Best first, equal ones in the order of the documents.
[[nodiscard]] Json rerank_answer(const RerankRequest& request, std::string_view model_name,
                                 std::span<const Rank> ranks);

}  // namespace hcache::api
