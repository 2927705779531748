#include "batch_file.h"

#include <fmt/format.h>

#include <utility>

#include "api/json.h"

namespace hcache::server {
namespace {

using api::Json;

constexpr int kNoteFormat = 1;
constexpr int64_t kTurnNs = 100'000'000;

}  // namespace

Result<std::unique_ptr<BatchFile>> BatchFile::open(Env& env, const BatchFileOptions& options) {
  std::unique_ptr<BatchFile> file(new BatchFile(env, options));
  if (const Status status = file->prepare(); !status.ok()) {
    if (file->lock_ && !file->note_) {
      file->remove_if_there(file->lock_path()).ignore("an empty file stays");
    }
    return status;
  }
  return file;
}

Status BatchFile::prepare() {
  HCACHE_ASSIGN_OR_RETURN(BatchInput input, BatchInput::open(env_, options_.input));
  input_.emplace(std::move(input));
  HCACHE_ASSIGN_OR_RETURN(lock_, env_.lock_file(lock_path()));
  if (options_.restart) return start_anew();
  HCACHE_ASSIGN_OR_RETURN(note_, read_note());
  if (note_ && note_->input != input_->hash()) {
    return failed_precondition(fmt::format(
        "{} was begun with another content of {}; --restart gives up what it has, or name another "
        "output",
        options_.output, options_.input));
  }
  HCACHE_ASSIGN_OR_RETURN(const FileInfo output, env_.file_info(options_.output));
  if (!note_ && output.exists && output.size > 0) {
    return already_exists(fmt::format(
        "{} is there and belongs to no unfinished batch; --restart overwrites it, or name another "
        "output",
        options_.output));
  }
  return {};
}

Status BatchFile::start_anew() {
  HCACHE_RETURN_IF_ERROR(remove_if_there(options_.output));
  return remove_if_there(note_path());
}

Status BatchFile::remove_if_there(const std::string& path) {
  const Status removed = env_.remove_path(path);
  return removed.code() == Code::kNotFound ? Status() : removed;
}

Result<std::optional<BatchFile::Note>> BatchFile::read_note() const {
  HCACHE_ASSIGN_OR_RETURN(const FileInfo info, env_.file_info(note_path()));
  if (!info.exists) return std::optional<Note>();
  HCACHE_ASSIGN_OR_RETURN(const std::string text, read_whole_file(env_, note_path()));
  const Result<Json> json = api::parse_body(text);
  const auto text_at = [&](const char* field) {
    return json->contains(field) && (*json)[field].is_string() ? (*json)[field].get<std::string>()
                                                               : std::string();
  };
  if (!json.ok() || !json->is_object() || !json->contains("format") ||
      (*json)["format"] != kNoteFormat) {
    return data_loss(fmt::format(
        "{} can't be read; --restart begins the batch anew, or name another output", note_path()));
  }
  return std::optional<Note>({.input = text_at("input"), .model = text_at("model")});
}

Status BatchFile::write_note(const Note& note) const {
  const Json json = {{"format", kNoteFormat}, {"input", note.input}, {"model", note.model}};
  return write_whole_file(env_, note_path(), api::to_text(json) + "\n");
}

Status BatchFile::run(Answerer& answerer, const std::string& model,
                      const std::function<bool(const BatchFileProgress&)>& progress,
                      BatchFileProgress* last) {
  if (note_ && note_->model != model) {
    return failed_precondition(fmt::format(
        "{} was begun with another model or --kv-type; --restart gives up what it has, or name "
        "another output",
        options_.output));
  }
  if (!note_) HCACHE_RETURN_IF_ERROR(write_note({.input = input_->hash(), .model = model}));
  HCACHE_ASSIGN_OR_RETURN(const auto log, ResultLog::open(env_, options_.output));
  HCACHE_ASSIGN_OR_RETURN(
      const auto run, BatchRun::open(*std::exchange(input_, std::nullopt), *log, *log, answerer));
  BatchFileProgress own;
  HCACHE_RETURN_IF_ERROR(drive(*run, progress, last != nullptr ? last : &own));
  HCACHE_RETURN_IF_ERROR(remove_if_there(note_path()));
  return remove_if_there(lock_path());
}

Status BatchFile::drive(BatchRun& run,
                        const std::function<bool(const BatchFileProgress&)>& progress,
                        BatchFileProgress* last) {
  last->found = run.found();
  BatchDriver driver(env_, options_.in_flight);
  driver.add(&run);
  const auto look = [&] {
    last->counts = run.counts();
    last->tokens = driver.tokens();
  };
  look();
  bool goes_on = true;
  while (!run.finished() && run.status().ok() && goes_on) {
    driver.turn(kTurnNs);
    look();
    goes_on = !progress || progress(*last);
  }
  driver.stop();
  look();
  if (!run.status().ok()) return run.status();
  return run.finished() ? Status() : cancelled("interrupted");
}

}  // namespace hcache::server
