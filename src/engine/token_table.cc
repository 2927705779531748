#include "token_table.h"

#include <algorithm>
#include <cstddef>

namespace hcache::engine {
namespace {

constexpr int64_t kTableBytes = 16 << 20;

}  // namespace

Status TokenTable::allocate(int64_t max_batch_rows) {
  const model::HParams& hp = model_.hparams();
  const int64_t entry_bytes = 2 * hp.n_embd_kv() * static_cast<int64_t>(sizeof(float));
  const int64_t n_entries =
      std::max(max_batch_rows, std::min<int64_t>(hp.n_vocab, kTableBytes / entry_bytes));
  for (Table& table : tables_) {
    const int64_t width = table.stage->model().hparams().n_embd_kv();
    table.pool.open(2);
    table.k = ggml_new_tensor_2d(table.pool.ctx(), GGML_TYPE_F32, width, n_entries);
    table.v = ggml_new_tensor_2d(table.pool.ctx(), GGML_TYPE_F32, width, n_entries);
    HCACHE_RETURN_IF_ERROR(
        table.pool.allocate(table.stage->device().buffer_type(), "the first layer's token table"));
  }
  return {};
}

size_t TokenTable::n_bytes() const {
  size_t n = 0;
  for (const Table& table : tables_) n += table.pool.n_bytes();
  return n;
}

void TokenTable::keep_unknown_tokens(StepState& step) {
  if (!step.token_rows.empty() || model_.spec().learned_positions) return;
  const auto n_embd = static_cast<size_t>(model_.hparams().n_embd);
  std::unordered_map<int32_t, int64_t> fresh;
  for (const int32_t token : step.tokens) {
    if (!entries_.contains(token)) fresh.try_emplace(token, 0);
  }
  if (static_cast<int64_t>(entries_.size() + fresh.size()) > tables_.front().k->ne[1])
    entries_.clear();
  auto next = static_cast<int64_t>(entries_.size());
  fresh.clear();
  for (size_t row = 0; row < step.tokens.size(); ++row) {
    const int32_t token = step.tokens[row];
    int64_t entry = 0;
    bool compute = false;
    if (const auto known = entries_.find(token); known != entries_.end()) {
      entry = known->second;
      compute = row + 1 == step.tokens.size() && step.new_tokens.empty();
    } else {
      const auto [at, is_new] = fresh.try_emplace(token, next);
      entry = at->second;
      compute = is_new;
      if (is_new) ++next;
    }
    step.token_rows.push_back(static_cast<int32_t>(entry));
    if (!compute) continue;
    const size_t kept = step.new_tokens.size();
    const auto from = step.x.begin() + static_cast<std::ptrdiff_t>(row * n_embd);
    if (kept != row) {
      std::copy_n(from, n_embd, step.x.begin() + static_cast<std::ptrdiff_t>(kept * n_embd));
    }
    step.new_tokens.push_back(token);
    step.table_rows.push_back(entry);
  }
  step.x.resize(step.new_tokens.size() * n_embd);
}

void TokenTable::learn(const StepState& step) {
  for (size_t i = 0; i < step.new_tokens.size(); ++i) {
    entries_[step.new_tokens[i]] = step.table_rows[i];
  }
}

model::Product TokenTable::through(const Stage& stage, const StepState& step, bool k,
                                   const model::Product& product) const {
  const int64_t n = step.n_rows;
  const auto own = std::find_if(tables_.begin(), tables_.end(),
                                [&](const Table& table) { return table.stage == &stage; });
  return [&stage, n, product, table = k ? own->k : own->v](ggml_context* ctx, ggml_tensor* weight,
                                                           ggml_tensor* rows) {
    ggml_tensor* known = ggml_set_rows(ctx, table, product(ctx, weight, rows),
                                       ggml_view_1d(ctx, stage.table_rows(), rows->ne[1], 0));
    return ggml_get_rows(ctx, known, ggml_view_1d(ctx, stage.token_rows(), n, 0));
  };
}

}  // namespace hcache::engine
