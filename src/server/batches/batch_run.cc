#include "batch_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace hcache::server {
namespace {

constexpr int64_t kRefusedPauseNs = 500'000'000;
constexpr int64_t kStopWaitNs = 50'000'000;

}  // namespace

Result<std::unique_ptr<BatchRun>> BatchRun::open(BatchInput input, ResultLog& output,
                                                 ResultLog& errors, Answerer& answerer) {
  std::unique_ptr<BatchRun> run(new BatchRun(std::move(input), output, errors, answerer));
  HCACHE_RETURN_IF_ERROR(run->take_logs());
  return run;
}

Status BatchRun::take_logs() {
  const std::vector<BatchLine>& lines = input_.lines();
  counts_.total = static_cast<int64_t>(lines.size());
  states_.resize(lines.size());
  for (const BatchLine& line : lines) ids_.push_back(result_id(input_.hash(), line.number));
  size_t known = output_.found().size();
  note(output_.found());
  if (&errors_ != &output_) {
    known += errors_.found().size();
    note(errors_.found());
  }
  if (static_cast<int64_t>(known) != counts_.done()) {
    return failed_precondition(fmt::format(
        "{} holds results of another input than {}; name another output file, or remove this one",
        output_.path(), input_.path()));
  }
  found_ = counts_.done();
  for (const size_t line : input_.order()) {
    if (states_[line] == State::kOpen) open_.push_back(line);
  }
  // Lines that are no requests are answered at once.
  std::string text;
  std::vector<size_t> bad;
  for (size_t i = 0; i < lines.size(); ++i) {
    if (lines[i].status.ok() || states_[i] != State::kOpen) continue;
    text += error_line(
        ids_[i], lines[i].custom_id,
        {.code = std::string(kInvalidLineCode),
         .message = fmt::format("line {}: {}", lines[i].number, lines[i].status.message())});
    states_[i] = State::kFailed;
    bad.push_back(i);
  }
  return write({}, text, bad);
}

void BatchRun::note(const std::unordered_map<std::string, BatchResult>& found) {
  for (size_t i = 0; i < ids_.size(); ++i) {
    const auto result = found.find(ids_[i]);
    if (result == found.end() || states_[i] != State::kOpen) continue;
    const std::string& code = result->second.error_code;
    states_[i] = result->second.ok()      ? State::kCompleted
                 : code == kCancelledCode ? State::kCancelled
                 : code == kExpiredCode   ? State::kExpired
                                          : State::kFailed;
    ++count_of(states_[i]);
  }
}

int64_t& BatchRun::count_of(State state) {
  switch (state) {
    case State::kCompleted: return counts_.completed;
    case State::kCancelled: return counts_.cancelled;
    case State::kExpired: return counts_.expired;
    case State::kOpen:
    case State::kFailed: break;
  }
  return counts_.failed;
}

bool BatchRun::next(int64_t now_ns, size_t* line) {
  if (cancelled_ || !status_.ok() || open_.empty() || now_ns < not_before_ns_) return false;
  *line = open_.front();
  open_.pop_front();
  return true;
}

void BatchRun::cancel() {
  cancelled_ = true;
  for (const auto& [line, cancel] : in_flight_) {
    if (cancel) cancel();
  }
}

Status BatchRun::record(std::vector<Arrived> answers, int64_t now_ns) {
  std::string good;
  std::string bad;
  std::vector<size_t> lines;
  for (Arrived& arrived : answers) {
    in_flight_.erase(arrived.line);
    const BatchAnswer& answer = arrived.answer;
    // A server that shuts down says so to whatever still runs: that is no answer.
    const bool shut_down = cancelled_ && (answer.http_status == 503 || answer.http_status == 529);
    if (answer.kind != BatchAnswer::Kind::kAnswered || shut_down) {
      open_.push_front(arrived.line);
      if (answer.kind == BatchAnswer::Kind::kRefused) not_before_ns_ = now_ns + kRefusedPauseNs;
      continue;
    }
    states_[arrived.line] = answer.ok() ? State::kCompleted : State::kFailed;
    (answer.ok() ? good : bad) +=
        answer_line(ids_[arrived.line], input_.lines()[arrived.line].custom_id, answer);
    lines.push_back(arrived.line);
  }
  return write(good, bad, lines);
}

// The lines' states say what they become; they are open again after an error.
Status BatchRun::write(std::string_view good, std::string_view bad,
                       const std::vector<size_t>& lines) {
  Status good_status;
  Status bad_status;
  if (&output_ == &errors_) {
    if (!lines.empty()) good_status = output_.append(std::string(good) + std::string(bad));
    bad_status = good_status;
  } else {
    if (!good.empty()) good_status = output_.append(good);
    if (!bad.empty()) bad_status = errors_.append(bad);
  }
  for (const size_t line : lines) {
    const bool completed = states_[line] == State::kCompleted;
    if (completed ? good_status.ok() : bad_status.ok()) {
      ++count_of(states_[line]);
      continue;
    }
    states_[line] = State::kOpen;
    if (input_.lines()[line].status.ok()) open_.push_front(line);
  }
  return good_status.ok() ? bad_status : good_status;
}

Status BatchRun::finish_rest(const BatchError& error) {
  std::string text;
  std::vector<size_t> lines;
  for (size_t i = 0; i < states_.size(); ++i) {
    if (states_[i] != State::kOpen) continue;
    text += error_line(ids_[i], input_.lines()[i].custom_id, error);
    states_[i] = error.code == kCancelledCode ? State::kCancelled
                 : error.code == kExpiredCode ? State::kExpired
                                              : State::kFailed;
    lines.push_back(i);
  }
  open_.clear();
  return write({}, text, lines);
}

// ---- The driver ---------------------------------------------------------------------------------

int64_t BatchDriver::in_flight() const {
  int64_t n = 0;
  for (const BatchRun* run : runs_) n += run->in_flight();
  return n;
}

void BatchDriver::fill() {
  size_t idle = 0;  // runs in a row that had nothing to start
  while (idle < runs_.size() && in_flight() < most_in_flight_) {
    BatchRun& run = *runs_[next_run_++ % runs_.size()];
    idle = start_one(run) ? 0 : idle + 1;
  }
}

bool BatchDriver::start_one(BatchRun& run) {
  size_t line = 0;
  if (!run.next(env_.monotonic_ns(), &line)) return false;
  Result<BatchRequest> request = run.input_.read(line);
  if (!request.ok()) {
    run.open_.push_front(line);
    run.status_ = request.status();
    return false;
  }
  run.in_flight_[line] = {};
  const auto done = [inbox = inbox_, run = &run, line](BatchAnswer answer) {
    MutexLock lock(inbox->mutex);
    inbox->arrived.emplace_back(run, BatchRun::Arrived{line, std::move(answer)});
    inbox->changed.notify_all();
  };
  Answerer::Cancel cancel = run.answerer_.submit(std::move(*request), done);
  run.in_flight_[line] = std::move(cancel);
  return true;
}

void BatchDriver::turn(int64_t wait_ns) {
  fill();
  std::vector<std::pair<BatchRun*, BatchRun::Arrived>> arrived;
  {
    MutexLock lock(inbox_->mutex);
    if (inbox_->arrived.empty() && !inbox_->woken) {
      inbox_->changed.wait_for_ns(inbox_->mutex, wait_ns);
    }
    inbox_->woken = false;
    arrived = std::exchange(inbox_->arrived, {});
  }
  deliver(std::move(arrived));
}

void BatchDriver::wake() {
  MutexLock lock(inbox_->mutex);
  inbox_->woken = true;
  inbox_->changed.notify_all();
}

void BatchDriver::deliver(std::vector<std::pair<BatchRun*, BatchRun::Arrived>> arrived) {
  for (BatchRun* run : runs_) {
    std::vector<BatchRun::Arrived> own;
    for (auto& [whose, one] : arrived) {
      if (whose != run) continue;
      if (one.answer.kind == BatchAnswer::Kind::kAnswered) {
        tokens_.prompt += one.answer.prompt_tokens;
        tokens_.cached += one.answer.cached_tokens;
        tokens_.reply += one.answer.reply_tokens;
      }
      own.push_back(std::move(one));
    }
    if (own.empty()) continue;
    if (Status status = run->record(std::move(own), env_.monotonic_ns()); !status.ok()) {
      run->status_ = std::move(status);
    }
  }
}

void BatchDriver::stop() {
  for (BatchRun* run : runs_) run->cancel();
  while (in_flight() > 0) turn(kStopWaitNs);
}

}  // namespace hcache::server
