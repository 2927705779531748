// hcache model info|synth|expand-kv|requantize: offline work on model files.

#include <fmt/format.h>

#include <memory>

#include "base/units.h"
#include "commands.h"
#include "model/tools.h"
#include "options.h"
#include "terminal.h"

namespace hcache::cli {
namespace {

struct ModelArgs {
  std::string in;
  std::string out;
  std::string shape;
  std::string type;
  std::string vocab_from;
  int layers = 0;
  int threads = 0;
  int64_t seed = 0;
  bool json = false;
  bool tensors = false;
};

model::Progress progress_of(const std::shared_ptr<ProgressLine>& line, const std::string& what) {
  return [line, what](float fraction) { return line->update(what, static_cast<double>(fraction)); };
}

Status info(const ModelArgs& args) {
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
  } else {
    fmt::print("not runnable  {}\n", info.unsupported);
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

Status synth(const ModelArgs& args) {
  model::SynthOptions options;
  HCACHE_ASSIGN_OR_RETURN(options.shape, model::find_shape(args.shape));
  HCACHE_ASSIGN_OR_RETURN(options.type, model::parse_weight_type(args.type));
  options.n_layer = args.layers;
  options.seed = static_cast<uint64_t>(args.seed);
  options.vocab_from = args.vocab_from;
  options.n_threads = args.threads;
  options.progress = progress_of(std::make_shared<ProgressLine>(), "writing " + args.out);
  return model::synthesise_model(options, args.out);
}

Status expand(const ModelArgs& args) {
  return model::expand_kv(args.in, args.out, args.threads,
                          progress_of(std::make_shared<ProgressLine>(), "writing " + args.out));
}

Status requantize(const ModelArgs& args) {
  HCACHE_ASSIGN_OR_RETURN(const ggml_type type, model::parse_weight_type(args.type));
  return model::requantise(args.in, args.out, type, args.threads,
                           progress_of(std::make_shared<ProgressLine>(), "writing " + args.out));
}

}  // namespace

void add_model(CLI::App& app, Verb* verb) {
  CLI::App* group = app.add_subcommand("model", "Describe, synthesise and rewrite model files");
  group->require_subcommand(1);
  const auto args = std::make_shared<ModelArgs>();

  CLI::App* info_app = group->add_subcommand("info", "What a GGUF file holds");
  info_app->add_option("FILE", args->in, "GGUF file; default: as -m of the other verbs");
  add_option(*info_app, "tensors", &args->tensors);
  add_option(*info_app, "json", &args->json);
  info_app->callback([args, verb] { *verb = [args] { return info(*args); }; });

  CLI::App* synth_app =
      group->add_subcommand("synth", "Write a model of a published shape with random weights");
  add_option(*synth_app, "synth-shape", &args->shape)->required();
  add_option(*synth_app, "layers", &args->layers);
  add_option(*synth_app, "type", &args->type);
  add_option(*synth_app, "vocab-from", &args->vocab_from);
  add_option(*synth_app, "synth-seed", &args->seed);
  add_option(*synth_app, "threads", &args->threads);
  add_option(*synth_app, "out", &args->out)->required();
  synth_app->callback([args, verb] { *verb = [args] { return synth(*args); }; });

  CLI::App* expand_app = group->add_subcommand(
      "expand-kv",
      "Write the multi-head twin of a grouped-query model: same answers, every query "
      "head with a K and V head of its own");
  expand_app->add_option("IN", args->in, "GGUF file to read")->required();
  expand_app->add_option("OUT", args->out, "GGUF file to write")->required();
  add_option(*expand_app, "threads", &args->threads);
  expand_app->callback([args, verb] { *verb = [args] { return expand(*args); }; });

  CLI::App* requantize_app =
      group->add_subcommand("requantize", "Write the same model with every matrix in one type");
  requantize_app->add_option("IN", args->in, "GGUF file to read")->required();
  requantize_app->add_option("OUT", args->out, "GGUF file to write")->required();
  add_option(*requantize_app, "type", &args->type);
  add_option(*requantize_app, "threads", &args->threads);
  requantize_app->callback([args, verb] { *verb = [args] { return requantize(*args); }; });
}

}  // namespace hcache::cli
