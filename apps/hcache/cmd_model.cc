// hcache model info|synth|synth-adapter|expand-kv|requantize: offline work on model files.

#include <fmt/format.h>

#include <memory>

#include "base/units.h"
#include "commands.h"
#include "common_options.h"
#include "model/tools.h"
#include "terminal.h"

namespace hcache::cli {
namespace {

constexpr const char* kDefaultType = "f16";
constexpr const char* kTypeHelp = "weight type: f32, f16, bf16, q8_0, q4_0, q4_1, q4_k, ...";

struct InfoArgs : Options {
  std::string in = text(&in, "FILE", "", "", "GGUF file; default: as -m of the other verbs");
  bool tensors = flag(&tensors, "--tensors", "list the tensors too");
  bool json = flag(&json, "--json", "print JSON instead of text");
};

struct SynthArgs : Options {
  std::string shape =
      text(&shape, "--shape", "NAME", "",
           "published shape: llama2-7b, llama2-13b, opt-30b, ...; a wrong name lists them",
           {.required = true});
  int layers = integer(&layers, "--layers", "N", 0, {0, 1024}, "how many layers; 0: as published");
  std::string type = text(&type, "--type", "TYPE", kDefaultType, kTypeHelp);
  std::string vocab_from = text(&vocab_from, "--vocab-from", "FILE", "",
                                "GGUF file whose vocabulary is copied in; default: none");
  int64_t seed = integer(&seed, "--seed", "N", 1, {0}, "the same seed gives the same weights");
  ModelOptions model{nullptr};
  std::string out = text(&out, "-o,--out", "FILE", "", "GGUF file to write", {.required = true});

  SynthArgs() { offer(model, {&model.threads}); }
};

// A file that is written anew in another form.
struct RewriteArgs : Options {
  std::string in = text(&in, "IN", "", "", "GGUF file to read", {.required = true});
  std::string out = text(&out, "OUT", "", "", "GGUF file to write", {.required = true});
  ModelOptions model{nullptr};

  RewriteArgs() { offer(model, {&model.threads}); }
};

struct AdapterArgs : Options {
  std::string in = text(&in, "IN", "", "", "GGUF file of the model", {.required = true});
  std::string out = text(&out, "OUT", "", "", "GGUF file to write", {.required = true});
  std::string only = text(&only, "--only", "TEXT", "",
                          "change the matrices whose names hold this; default: all but embeddings");
  int rank = integer(&rank, "--rank", "N", model::AdapterOptions().rank, {1, 4096},
                     "of the matrices that are added");
  double alpha = number(&alpha, "--alpha", "X", 16, {0, 1e6},
                        "what is added counts alpha / rank times; 0: once");
  double size =
      number(&size, "--size", "X", 0.1, {0, 100},
             "deviation of what is added to a product with a vector of ones, before that");
  int64_t seed = integer(&seed, "--seed", "N", 1, {0}, "the same seed gives the same weights");
};

struct ProjectorArgs : Options {
  std::string in = text(&in, "IN", "", "", "GGUF file of the model", {.required = true});
  std::string out = text(&out, "OUT", "", "", "GGUF file to write", {.required = true});
  std::string kind = choice(&kind, "--kind", "mlp", "mlp|gemma3|qwen2vl_merger",
                            "libmtmd's name of what makes rows of a picture");
  int image_size = integer(&image_size, "--image-size", "PIXELS", 112, {28, 4096},
                           "side of pictures, where they have a fixed size; a multiple of 28");
  int64_t seed = integer(&seed, "--seed", "N", 1, {0}, "the same seed gives the same weights");
};

struct RequantizeArgs : RewriteArgs {
  std::string type = text(&type, "--type", "TYPE", kDefaultType, kTypeHelp);
};

model::Progress progress_of(const std::shared_ptr<ProgressLine>& line, const std::string& what) {
  return [line, what](float fraction) { return line->update(what, static_cast<double>(fraction)); };
}

Status info(const InfoArgs& args) {
  HCACHE_ASSIGN_OR_RETURN(const std::string path, resolve_model(args.in));
  HCACHE_ASSIGN_OR_RETURN(const model::ModelInfo info, model::describe_model(path));
  if (args.json) {
    fmt::print("{}\n", model::to_json(info, args.tensors));
    return {};
  }
  const model::HParams& h = info.hparams;
  fmt::print("file          {} ({})\n", info.path, format_bytes(info.n_bytes));
  fmt::print("weights       {:.1f} M parameters, {}\n", static_cast<double>(info.n_params) / 1e6,
             info.types);
  if (info.supported) {
    fmt::print("model         {}{}{}\n", h.arch, h.name.empty() ? "" : ", ", h.name);
    fmt::print(
        "shape         {} layers, width {}, {} heads ({} for K and V) of {}, "
        "feed-forward {}\n",
        h.n_layer, h.n_embd, h.n_head, h.n_head_kv, h.head_dim, h.n_ff);
    fmt::print("vocabulary    {} tokens, context {} tokens\n", h.n_vocab, h.n_ctx_train);
    fmt::print("state         {} bytes of F16 K and V per token\n", info.kv_bytes_per_token());
    fmt::print("engine        ours\n");
  } else {
    fmt::print("engine        libllama's, if llama.cpp knows the model: {}\n", info.unsupported);
  }
  if (args.tensors) {
    std::vector<std::vector<std::string>> rows = {{"tensor", "type", "bytes", "shape"}};
    for (const model::TensorInfo& t : info.tensors) {
      rows.push_back({t.name, t.type, fmt::format("{}", t.bytes),
                      fmt::format("{}", fmt::join(t.shape, " x "))});
    }
    fmt::print("\n{}", format_columns(rows));
  }
  return {};
}

Status synth(const SynthArgs& args) {
  model::SynthOptions options;
  HCACHE_ASSIGN_OR_RETURN(options.shape, model::find_shape(args.shape));
  HCACHE_ASSIGN_OR_RETURN(options.type, model::parse_weight_type(args.type));
  options.n_layer = args.layers;
  options.seed = static_cast<uint64_t>(args.seed);
  options.vocab_from = args.vocab_from;
  options.n_threads = args.model.threads;
  options.progress = progress_of(std::make_shared<ProgressLine>(), "writing " + args.out);
  return model::synthesise_model(options, args.out);
}

Status synth_adapter(const AdapterArgs& args) {
  model::AdapterOptions options;
  options.model = args.in;
  options.only = args.only;
  options.rank = args.rank;
  options.alpha = static_cast<float>(args.alpha);
  options.size = static_cast<float>(args.size);
  options.seed = static_cast<uint64_t>(args.seed);
  return model::synthesise_adapter(options, args.out);
}

Status synth_projector(const ProjectorArgs& args) {
  model::ProjectorShape shape;
  shape.model = args.in;
  shape.kind = args.kind;
  shape.image_size = args.image_size;
  shape.seed = static_cast<uint64_t>(args.seed);
  return model::synthesise_projector(shape, args.out);
}

Status expand(const RewriteArgs& args) {
  return model::expand_kv(args.in, args.out, args.model.threads,
                          progress_of(std::make_shared<ProgressLine>(), "writing " + args.out));
}

Status requantize(const RequantizeArgs& args) {
  HCACHE_ASSIGN_OR_RETURN(const ggml_type type, model::parse_weight_type(args.type));
  return model::requantise(args.in, args.out, type, args.model.threads,
                           progress_of(std::make_shared<ProgressLine>(), "writing " + args.out));
}

}  // namespace

void add_model(CLI::App& app, Verb* verb) {
  CLI::App* group = app.add_subcommand("model", "Describe, synthesise and rewrite model files");
  group->require_subcommand(1);
  add_verb<InfoArgs>(*group, verb, "info", "What a GGUF file holds", info);
  add_verb<SynthArgs>(*group, verb, "synth",
                      "Write a model of a published shape with random weights", synth);
  add_verb<AdapterArgs>(*group, verb, "synth-adapter",
                        "Write a low-rank adapter (LoRA) of a model with random weights",
                        synth_adapter);
  add_verb<ProjectorArgs>(
      *group, verb, "synth-projector",
      "Write a projector for pictures (--mmproj) of a model with random weights", synth_projector);
  add_verb<RewriteArgs>(*group, verb, "expand-kv",
                        "Write the multi-head twin of a grouped-query model: same answers, every "
                        "query head with a K and V head of its own",
                        expand);
  add_verb<RequantizeArgs>(*group, verb, "requantize",
                           "Write the same model with every matrix in one type", requantize);
}

}  // namespace hcache::cli
