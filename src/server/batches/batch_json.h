// Files and batches as OpenAI and Anthropic word them.
//
// Threading: pure functions.
#pragma once

#include "api/json.h"
#include "api/list_page.h"
#include "batch_store.h"

namespace hcache::server {

[[nodiscard]] api::Json file_json(const StoredFile& file);
[[nodiscard]] api::Json deleted_file_json(const std::string& id);
// OpenAI's batch. Requests that were cancelled or expired count as failed.
[[nodiscard]] api::Json batch_json(const StoredBatch& batch);
// Anthropic's. Its results_url is a path on this server.
[[nodiscard]] api::Json message_batch_json(const StoredBatch& batch);
[[nodiscard]] api::Json deleted_message_batch_json(const std::string& id);

// `records` are newest first. `word` gives each one's JSON. kInvalidArgument: a cursor is no
// record's, or both are given.
template <typename Record>
[[nodiscard]] Result<api::Json> page_json(const std::vector<Record>& records,
                                          const api::ListPage& page,
                                          api::Json (*word)(const Record&));

extern template Result<api::Json> page_json(const std::vector<StoredFile>&, const api::ListPage&,
                                            api::Json (*)(const StoredFile&));
extern template Result<api::Json> page_json(const std::vector<StoredBatch>&, const api::ListPage&,
                                            api::Json (*)(const StoredBatch&));

}  // namespace hcache::server
