// A batch from one file into another: what `hcache batch` does, apart from the model.
//
// Beside the output lies a note, OUTPUT.batch, while the batch is unfinished: which input and model
// it belongs to. So a run that was interrupted or killed goes on where the output ends, and one
// with another input or model is refused.
//
// Threading: one thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/env.h"
#include "base/status.h"
#include "batch_input.h"
#include "batch_run.h"
#include "result_log.h"

namespace hcache::server {

struct BatchFileOptions {
  std::string input;
  std::string output;
  bool restart = false;    // whatever the output holds is given up
  int64_t in_flight = 64;  // most requests at a time
};

struct BatchFileProgress {
  BatchRun::Counts counts;
  int64_t found = 0;  // of counts: were there already
  BatchDriver::Tokens tokens;
};

class BatchFile {
 public:
  // Looks through the input and at what the output has. Nothing has changed yet, but for
  // `restart`. Errors of BatchInput::open(). kAlreadyExists: the output is there, and no unfinished
  // batch. kFailedPrecondition: it is that of another input, or another process writes it.
  static Result<std::unique_ptr<BatchFile>> open(Env& env, const BatchFileOptions& options);

  [[nodiscard]] const BatchInput& input() const { return *input_; }
  // Whether an unfinished batch goes on.
  [[nodiscard]] bool resumes() const { return note_.has_value(); }

  // Answers everything that has no answer yet. `model` names what answers, so that no other one
  // goes on (kFailedPrecondition). `progress` is told after every answer, and several times a
  // second; after false what runs is ended, and kCancelled comes back. Errors of the files. Once.
  // `*last`, if given, is set to the last progress, also after an error.
  Status run(Answerer& answerer, const std::string& model,
             const std::function<bool(const BatchFileProgress&)>& progress,
             BatchFileProgress* last = nullptr);

 private:
  // What OUTPUT.batch says.
  struct Note {
    std::string input;  // its hash
    std::string model;
  };

  BatchFile(Env& env, BatchFileOptions options) : env_(env), options_(std::move(options)) {}
  Status prepare();
  Status start_anew();
  [[nodiscard]] Result<std::optional<Note>> read_note() const;
  [[nodiscard]] Status write_note(const Note& note) const;
  [[nodiscard]] std::string note_path() const { return options_.output + ".batch"; }
  [[nodiscard]] std::string lock_path() const { return options_.output + ".lock"; }
  Status remove_if_there(const std::string& path);
  Status drive(BatchRun& run, const std::function<bool(const BatchFileProgress&)>& progress,
               BatchFileProgress* last);

  Env& env_;
  const BatchFileOptions options_;
  std::unique_ptr<FileLock> lock_;
  std::optional<BatchInput> input_;
  std::optional<Note> note_;  // of an unfinished batch
};

}  // namespace hcache::server
