#include "model_files.h"

#include <algorithm>
#include <cctype>
#include <iterator>
#include <map>
#include <string_view>

#include "base/log.h"

namespace hcache::router {
namespace {

constexpr std::string_view kEnding = ".gguf";
constexpr std::string_view kPart = "-00001-of-00001";  // of a model in several files

bool is_gguf(std::string_view file) { return file.ends_with(kEnding) && !file.starts_with('.'); }
bool is_projector(std::string_view file) { return file.find("mmproj") != std::string_view::npos; }

bool is_digits(std::string_view text) {
  return std::ranges::all_of(text, [](unsigned char c) { return std::isdigit(c) != 0; });
}

// "NAME-00002-of-00003" taken apart.
struct PartName {
  std::string_view name;
  std::string_view number;  // empty: the model is one file
};

PartName take_apart(std::string_view stem) {
  if (stem.size() <= kPart.size()) return {.name = stem, .number = {}};
  const std::string_view part = stem.substr(stem.size() - kPart.size());
  const bool fits = part[0] == '-' && is_digits(part.substr(1, 5)) && part.substr(6, 4) == "-of-" &&
                    is_digits(part.substr(10));
  if (!fits) return {.name = stem, .number = {}};
  return {.name = stem.substr(0, stem.size() - kPart.size()), .number = part.substr(1, 5)};
}

// The models among a folder's files, by name; parts that are not the first add their bytes alone.
Result<std::map<std::string, ModelFile>> models_of(Env& env, const std::string& folder,
                                                   const std::vector<std::string>& files) {
  std::map<std::string, ModelFile> models;
  for (const std::string& file : files) {
    if (!is_gguf(file) || is_projector(file)) continue;
    const std::string path = join_path(folder, file);
    HCACHE_ASSIGN_OR_RETURN(const FileInfo info, env.file_info(path));
    if (!info.exists || info.directory) continue;
    const PartName part =
        take_apart(std::string_view(file).substr(0, file.size() - kEnding.size()));
    ModelFile& model = models[std::string(part.name)];
    model.name = part.name;
    model.bytes += info.size;
    if (part.number.empty() || part.number == "00001") model.path = path;
  }
  std::erase_if(models, [](const auto& m) { return m.second.path.empty(); });
  return models;
}

// The first of the projectors among a folder's files, for the model in it.
Status add_projector(Env& env, const std::string& folder, const std::vector<std::string>& files,
                     ModelFile* model) {
  std::vector<std::string> found;
  std::ranges::copy_if(files, std::back_inserter(found),
                       [](const std::string& file) { return is_gguf(file) && is_projector(file); });
  if (found.empty()) return {};
  std::ranges::sort(found);
  if (found.size() > 1) {
    log::warn("{} holds {} projectors; {} is taken", folder, found.size(), found.front());
  }
  const std::string path = join_path(folder, found.front());
  HCACHE_ASSIGN_OR_RETURN(const FileInfo info, env.file_info(path));
  if (!info.exists || info.directory) return {};
  model->projector = path;
  model->bytes += info.size;
  return {};
}

}  // namespace

Result<std::vector<ModelFile>> find_models(Env& env, const std::string& folder) {
  HCACHE_ASSIGN_OR_RETURN(const std::vector<std::string> entries, env.list_dir(folder));
  HCACHE_ASSIGN_OR_RETURN(auto models, models_of(env, folder, entries));
  for (const std::string& entry : entries) {
    const std::string path = join_path(folder, entry);
    HCACHE_ASSIGN_OR_RETURN(const FileInfo info, env.file_info(path));
    if (!info.directory || entry.starts_with('.')) continue;
    HCACHE_ASSIGN_OR_RETURN(const std::vector<std::string> files, env.list_dir(path));
    HCACHE_ASSIGN_OR_RETURN(auto inside, models_of(env, path, files));
    if (inside.empty()) continue;
    if (inside.size() > 1) {
      log::warn("{} holds {} models; {} is taken, give the others folders of their own", path,
                inside.size(), inside.begin()->first);
    }
    ModelFile model = std::move(inside.begin()->second);
    model.name = entry;
    HCACHE_RETURN_IF_ERROR(add_projector(env, path, files, &model));
    if (!models.emplace(entry, std::move(model)).second) {
      log::warn("{} is left out: a file of that name is a model already", path);
    }
  }
  std::vector<ModelFile> out;
  for (auto& [name, model] : models) out.push_back(std::move(model));
  return out;
}

}  // namespace hcache::router
