#include "s3/s3_eraser.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace hcache::store {
namespace {

constexpr std::int64_t kEraseNs = 60'000'000'000;  // for each request

S3Call get(std::string key) {
  S3Call call;
  call.key = std::move(key);
  return call;
}

S3Call remove(std::string key) {
  S3Call call;
  call.method = "DELETE";
  call.key = std::move(key);
  return call;
}

// Not there is as good as erased.
Status unless_gone(const Status& status) {
  return status.code() == Code::kNotFound ? Status() : status;
}

}  // namespace

void S3Eraser::stop() {
  MutexLock lock(waits_->mutex);
  waits_->stop = true;
  waits_->come.notify_all();
}

std::vector<Result<std::string>> S3Eraser::ask(std::vector<S3Call> calls) {
  // Shared with the callbacks, which may come when nobody waits any more.
  struct Answers {
    std::vector<std::optional<Result<std::string>>> got;  // guarded by waits_->mutex
    std::size_t left = 0;
  };
  const auto answers = std::make_shared<Answers>();
  answers->got.resize(calls.size());
  answers->left = calls.size();
  {
    MutexLock lock(waits_->mutex);
    if (waits_->stop) calls.clear();
  }
  for (std::size_t i = 0; i < calls.size(); ++i) {
    S3Call& call = calls[i];
    call.deadline_ns = env_.monotonic_ns() + kEraseNs;
    call.bulk = true;
    call.done = [answers, i, waits = waits_](Result<std::string> answer) {
      MutexLock lock(waits->mutex);
      answers->got[i] = std::move(answer);
      if (--answers->left == 0) waits->come.notify_all();
    };
    client_.call(std::move(call));
  }
  std::vector<Result<std::string>> out;
  MutexLock lock(waits_->mutex);
  while (answers->left > 0 && !waits_->stop) waits_->come.wait(waits_->mutex);
  for (std::optional<Result<std::string>>& answer : answers->got) {
    out.push_back(answer ? std::move(*answer) : cancelled("the S3 tier is gone"));
  }
  return out;
}

Result<std::string> S3Eraser::ask(S3Call call) {
  std::vector<S3Call> one;
  one.push_back(std::move(call));
  return std::move(ask(std::move(one))[0]);
}

Status S3Eraser::erase(std::span<const ChunkId> ids) {
  Status failed;
  const auto note = [&](const Status& status) {
    if (failed.ok()) failed = unless_gone(status);
  };
  std::vector<S3Call> calls;
  for (const ChunkId& id : ids) calls.push_back(get(index_key(seal_.hide(id))));
  const auto bodies = ask(std::move(calls));
  std::map<ObjectName, Victims> objects;
  std::vector<S3Call> removals;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (!bodies[i].ok()) {
      note(bodies[i].status());
      continue;
    }
    const ChunkId hidden = seal_.hide(ids[i]);
    removals.push_back(remove(index_key(hidden)));
    const auto index = decode_index(ids[i], *bodies[i], seal_);
    if (!index.ok()) continue;  // where its pages lie nobody knows
    for (const S3Entry& entry : index->entries) {
      Victims& victims = objects[entry.object];
      victims.alone = lies_alone(index->record.info);
      if (victims.chunks.empty() || victims.chunks.back() != hidden) {
        victims.chunks.push_back(hidden);
      }
      victims.holes.push_back({entry.offset, seal_.value_bytes(entry.page.bytes)});
    }
  }
  // The indexes first: nothing may point to what is gone.
  for (const auto& removed : ask(std::move(removals))) note(removed.status());
  removals.clear();
  note(take_out(objects, &removals));
  for (const auto& removed : ask(std::move(removals))) note(removed.status());
  return failed;
}

Status S3Eraser::take_out(const std::map<ObjectName, Victims>& objects,
                          std::vector<S3Call>* removals) {
  std::vector<const std::pair<const ObjectName, Victims>*> shared;
  std::vector<S3Call> heads;
  for (const auto& object : objects) {
    if (object.second.alone) {
      removals->push_back(remove(data_key(object.first)));
      continue;
    }
    shared.push_back(&object);
    S3Call& head = heads.emplace_back(get(data_key(object.first)));
    head.bytes = kMaxHeadBytes;
    head.at_most = true;
  }
  Status failed;
  const auto answers = ask(std::move(heads));
  for (std::size_t i = 0; i < shared.size(); ++i) {
    const ObjectName& name = shared[i]->first;
    const Victims& victims = shared[i]->second;
    Status status = unless_gone(answers[i].status());
    if (answers[i].ok()) {
      const auto members = decode_head(*answers[i]);
      const bool empty =
          members && std::all_of(members->begin(), members->end(), [&](const S3Member& member) {
            return member.erased || std::find(victims.chunks.begin(), victims.chunks.end(),
                                              member.id) != victims.chunks.end();
          });
      if (empty) {
        removals->push_back(remove(data_key(name)));
      } else {
        status = overwrite(name, victims, removals);  // one at a time: they are large
      }
    }
    if (failed.ok()) failed = status;
  }
  return failed;
}

Status S3Eraser::overwrite(const ObjectName& name, const Victims& victims,
                           std::vector<S3Call>* removals) {
  auto object = ask(get(data_key(name)));
  if (!object.ok()) return unless_gone(object.status());
  auto rest = without_chunks(std::move(*object), victims.chunks, victims.holes);
  if (!rest) {
    removals->push_back(remove(data_key(name)));
    return {};
  }
  S3Call put;
  put.method = "PUT";
  put.key = data_key(name);
  put.body = std::make_shared<const std::string>(std::move(*rest));
  return ask(std::move(put)).status();
}

}  // namespace hcache::store
