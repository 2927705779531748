#include "projector.h"

#include <fmt/format.h>
#include <mtmd-helper.h>
#include <mtmd.h>
#include <stb/stb_image.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "base/ids.h"
#include "model/chat.h"
#include "model/llama_log.h"

namespace hcache::libllama {

struct MediaChunks {
  struct Chunk {
    uint64_t serial = 0;  // never twice
    mtmd::input_chunk_ptr chunk;
  };
  std::vector<Chunk> chunks;
};

namespace {

// Of a picture that is unpacked, and of all in a prompt: they take 192 and 768 MiB.
constexpr int64_t kMostPixels = int64_t{1} << 26;
constexpr int64_t kMostPromptPixels = int64_t{1} << 28;

struct ContextOf {
  void operator()(mtmd_context* context) const { mtmd_free(context); }
};

// Tokens of a medium's rows: below 0, and told apart by what decides about the rows. One that a
// row before in the chain has already is drawn again, by a rule that depends on that chain alone.
class RowTokens {
 public:
  explicit RowTokens(std::string projector) : projector_(std::move(projector)) {}

  void append(std::string_view medium, uint64_t part, int64_t n_rows, std::vector<int32_t>* out) {
    for (uint64_t attempt = 0;; ++attempt) {
      std::vector<int32_t> tokens = draw(medium, part, attempt, n_rows);
      const bool are_new = std::none_of(tokens.begin(), tokens.end(),
                                        [&](int32_t token) { return seen_.contains(token); });
      if (!are_new) continue;
      seen_.insert(tokens.begin(), tokens.end());
      out->insert(out->end(), tokens.begin(), tokens.end());
      return;
    }
  }

 private:
  [[nodiscard]] std::vector<int32_t> draw(std::string_view medium, uint64_t part, uint64_t attempt,
                                          int64_t n_rows) const {
    std::vector<int32_t> tokens;
    while (static_cast<int64_t>(tokens.size()) < n_rows) {
      Hasher hasher("hcache media row");
      hasher.add(projector_).add(medium).add_u64(part).add_u64(attempt).add_u64(tokens.size());
      const auto id = hasher.finish<ChunkId>();
      for (size_t at = 0; at < id.bytes.size(); at += sizeof(uint32_t)) {
        uint32_t bits = 0;
        std::memcpy(&bits, id.bytes.data() + at, sizeof bits);
        tokens.push_back(static_cast<int32_t>(bits | 0x80000000U));
      }
    }
    tokens.resize(static_cast<size_t>(n_rows));
    return tokens;
  }

  const std::string projector_;
  std::unordered_set<int32_t> seen_;
};

class ProjectorImpl final : public Projector {
 public:
  ProjectorImpl(const llama_model& model, Options options)
      : options_(std::move(options)), width_(llama_model_n_embd_inp(&model)) {}

  Status open(const llama_model& model);
  bool takes_pictures() const override { return mtmd_support_vision(context_.get()); }
  bool takes_sounds() const override { return mtmd_support_audio(context_.get()); }
  int64_t encoded() const override { return n_encoded_; }
  Result<MediaPrompt> tokenise(const std::string& text, std::span<const std::string> files,
                               bool add_special) const override;
  Result<std::span<const float>> encode(const MediaChunks& chunks, size_t n) override;

 private:
  [[nodiscard]] Result<mtmd::bitmap_ptr> read(const std::string& file, size_t number) const;
  [[nodiscard]] Result<MediaRun> run_of(const mtmd_input_chunk* chunk, int64_t row,
                                        int64_t position) const;

  const Options options_;
  const int width_;
  std::unique_ptr<mtmd_context, ContextOf> context_;
  std::atomic<int64_t> n_encoded_ = 0;
  uint64_t encoded_ = 0;  // serial of the chunk that libmtmd holds the rows of; 0: none
};

Status ProjectorImpl::open(const llama_model& model) {
  const std::string& path = options_.projector.path;
  if (std::error_code error; !std::filesystem::exists(path, error)) {
    return not_found(fmt::format("{}: there is no such file", path));
  }
  const model::ErrorLog log;
  mtmd_helper_log_set(
      [](ggml_log_level level, const char* line, void*) {
        ggml_log_callback callback = nullptr;
        void* data = nullptr;
        llama_log_get(&callback, &data);
        if (callback != nullptr) callback(level, line, data);
      },
      nullptr);
  mtmd_context_params params = mtmd_context_params_default();
  params.use_gpu = options_.device != nullptr;
  params.device = options_.device;
  params.print_timings = false;
  if (options_.n_threads > 0) params.n_threads = options_.n_threads;
  params.media_marker = model::kMediaMarker.data();
  params.image_min_tokens = options_.projector.min_image_tokens;
  params.image_max_tokens = options_.projector.max_image_tokens;
  context_.reset(mtmd_init_from_file(path.c_str(), &model, params));
  if (!context_) {
    return data_loss(fmt::format("{}: llama.cpp can't take it for this model's projector: {}", path,
                                 log.text("no reason")));
  }
  return {};
}

Result<mtmd::bitmap_ptr> ProjectorImpl::read(const std::string& file, size_t number) const {
  const auto bad = [&](const std::string& why) {
    return invalid_argument(fmt::format("medium {}: {}", number + 1, why));
  };
  if (file.size() > INT_MAX) return bad("a file of more than 2 GiB");
  const auto* bytes = reinterpret_cast<const unsigned char*>(file.data());
  int width = 0;
  int height = 0;
  int channels = 0;
  const bool picture =
      stbi_info_from_memory(bytes, static_cast<int>(file.size()), &width, &height, &channels) != 0;
  if (picture && !takes_pictures()) return bad("the model takes no pictures");
  if (picture && int64_t{width} * height > kMostPixels) {
    return bad(fmt::format("a picture of {} x {} is too large; the most is {} pixels", width,
                           height, kMostPixels));
  }
  const model::ErrorLog log;
  const mtmd_helper_bitmap_wrapper loaded = mtmd_helper_bitmap_init_from_buf(
      context_.get(), bytes, file.size(), false, mtmd_helper_init_opt_default());
  mtmd::bitmap_ptr bitmap(loaded.bitmap);
  if (loaded.video_ctx != nullptr) mtmd_helper_video_free(loaded.video_ctx);
  if (!bitmap) {
    return bad(fmt::format(
        "{} bytes that are no picture or sound that can be read ({}): give JPEG, "
        "PNG, BMP or GIF{}",
        file.size(), log.text("another format"), takes_sounds() ? ", WAV, MP3 or FLAC" : ""));
  }
  return bitmap;
}

Result<MediaRun> ProjectorImpl::run_of(const mtmd_input_chunk* chunk, int64_t row,
                                       int64_t position) const {
  MediaRun run;
  run.first = row;
  run.n_rows = static_cast<int64_t>(mtmd_input_chunk_get_n_tokens(chunk));
  run.first_position = position;
  run.n_positions = mtmd_input_chunk_get_n_pos(chunk);
  run.whole = mtmd_decode_use_non_causal(context_.get(), chunk);
  if (run.whole && run.n_rows > options_.most_whole_rows) {
    return invalid_argument(
        fmt::format("a picture takes {} rows that are computed at once, and the largest step has "
                    "{}: start with --batch {}",
                    run.n_rows, options_.most_whole_rows, run.n_rows));
  }
  const mtmd_image_tokens* image = mtmd_input_chunk_get_tokens_image(chunk);
  for (int64_t i = 0; i < run.n_rows; ++i) {
    const auto p = static_cast<int32_t>(position + i);
    MediaRun::Position sections = {p, p, p, 0};
    if (image != nullptr && mtmd_decode_use_mrope(context_.get())) {
      const mtmd_decoder_pos at = mtmd_image_tokens_get_decoder_pos(
          image, static_cast<llama_pos>(position), static_cast<size_t>(i));
      sections = {static_cast<int32_t>(at.t), static_cast<int32_t>(at.y),
                  static_cast<int32_t>(at.x), static_cast<int32_t>(at.z)};
    }
    run.positions.push_back(sections);
  }
  return run;
}

Result<MediaPrompt> ProjectorImpl::tokenise(const std::string& text,
                                            std::span<const std::string> files,
                                            bool add_special) const {
  size_t n_markers = 0;
  const std::string_view marker = model::kMediaMarker;
  for (size_t at = text.find(marker); at != std::string::npos; at = text.find(marker, at + 1)) {
    ++n_markers;
  }
  if (n_markers != files.size()) {
    return invalid_argument(
        fmt::format("{} media for a prompt that has {} places for them: it "
                    "must not have the text {} itself",
                    files.size(), n_markers, marker));
  }
  std::vector<mtmd::bitmap_ptr> bitmaps;
  std::vector<const mtmd_bitmap*> pointers;
  int64_t pixels = 0;
  for (size_t i = 0; i < files.size(); ++i) {
    HCACHE_ASSIGN_OR_RETURN(mtmd::bitmap_ptr bitmap, read(files[i], i));
    if (!mtmd_bitmap_is_audio(bitmap.get())) {
      pixels += int64_t{mtmd_bitmap_get_nx(bitmap.get())} * mtmd_bitmap_get_ny(bitmap.get());
    }
    if (pixels > kMostPromptPixels) {
      return invalid_argument(
          fmt::format("the pictures of a prompt have {} pixels at most", kMostPromptPixels));
    }
    pointers.push_back(bitmap.get());
    bitmaps.push_back(std::move(bitmap));
  }
  const mtmd_input_text input = {.text = text.data(),
                                 .text_len = text.size(),
                                 .add_special = add_special,
                                 .parse_special = true};
  const mtmd::input_chunks chunks(mtmd_input_chunks_init());
  const model::ErrorLog log;
  if (mtmd_tokenize(context_.get(), chunks.ptr.get(), &input, pointers.data(), pointers.size()) !=
      0) {
    return invalid_argument(fmt::format("the prompt's {} media can't be taken: {}", files.size(),
                                        log.text("no reason")));
  }
  static std::atomic<uint64_t> serial = 0;
  MediaPrompt prompt;
  std::vector<MediaRun> runs;
  auto owned = std::make_shared<MediaChunks>();
  RowTokens tokens(fmt::format("{} {} {}", options_.projector.digest,
                               options_.projector.min_image_tokens,
                               options_.projector.max_image_tokens));
  int64_t position = 0;
  std::string medium;  // whose parts come
  uint64_t part = 0;
  for (size_t i = 0; i < chunks.size(); ++i) {
    const mtmd_input_chunk* chunk = chunks[i];
    if (mtmd_input_chunk_get_type(chunk) == MTMD_INPUT_CHUNK_TYPE_TEXT) {
      size_t n = 0;
      const llama_token* ids = mtmd_input_chunk_get_tokens_text(chunk, &n);
      prompt.tokens.insert(prompt.tokens.end(), ids, ids + n);
      position += static_cast<int64_t>(n);
      continue;
    }
    HCACHE_ASSIGN_OR_RETURN(MediaRun run,
                            run_of(chunk, static_cast<int64_t>(prompt.tokens.size()), position));
    const char* id = mtmd_input_chunk_get_id(chunk);
    const std::string_view name = id == nullptr ? std::string_view() : id;
    part = name == medium ? part + 1 : 0;
    medium = name;
    tokens.append(name, part, run.n_rows, &prompt.tokens);
    position += run.n_positions;
    runs.push_back(std::move(run));
    owned->chunks.push_back({++serial, mtmd::input_chunk_ptr(mtmd_input_chunk_copy(chunk))});
  }
  prompt.rows = std::make_shared<MediaRows>(std::move(runs));
  prompt.chunks = std::move(owned);
  return prompt;
}

Result<std::span<const float>> ProjectorImpl::encode(const MediaChunks& chunks, size_t n) {
  const MediaChunks::Chunk& medium = chunks.chunks.at(n);
  if (encoded_ != medium.serial) {
    encoded_ = 0;
    const model::ErrorLog log;
    if (mtmd_encode_chunk(context_.get(), medium.chunk.get()) != 0) {
      return internal_error(
          fmt::format("the projector fails at a picture: {}", log.text("no reason")));
    }
    encoded_ = medium.serial;
    ++n_encoded_;
  }
  const size_t n_rows = mtmd_input_chunk_get_n_tokens(medium.chunk.get());
  return std::span<const float>(mtmd_get_output_embd(context_.get()),
                                n_rows * static_cast<size_t>(width_));
}

}  // namespace

Result<std::unique_ptr<Projector>> Projector::load(const llama_model& model,
                                                   const Options& options) {
  auto projector = std::make_unique<ProjectorImpl>(model, options);
  HCACHE_RETURN_IF_ERROR(projector->open(model));
  return std::unique_ptr<Projector>(std::move(projector));
}

}  // namespace hcache::libllama
