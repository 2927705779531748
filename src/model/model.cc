#include "model/model.h"

#include <fmt/format.h>
#include <ggml-alloc.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>

#include "adapters.h"
#include "base/memory.h"
#include "base/units.h"
#include "digest.h"
#include "gguf_file.h"
#include "hparams.h"
#include "products.h"
#include "rope.h"
#include "streamed_layers.h"
#include "weight_slots.h"

namespace hcache::model {
namespace {

constexpr size_t kUploadChunk = size_t{4} << 20;
constexpr uintptr_t kPageBytes = 4096;

// ---- Placement ---------------------------------------------------------------------------------

// The CPU's repacked or tiled weight layouts, best first.
std::vector<ggml_backend_buffer_type_t> extra_buffer_types(const Device& device) {
  std::vector<ggml_backend_buffer_type_t> out;
  if (!device.is_cpu()) return out;
  auto get = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(ggml_backend_reg_get_proc_address(
      ggml_backend_dev_backend_reg(device.dev()), "ggml_backend_dev_get_extra_bufts"));
  if (get == nullptr) return out;
  for (ggml_backend_buffer_type_t* b = get(device.dev()); b != nullptr && *b != nullptr; b++) {
    out.push_back(*b);
  }
  return out;
}

ggml_tensor* new_tensor(ggml_context* ctx, const Slot& slot) {
  const ggml_type type = slot.source->type;
  ggml_tensor* t = nullptr;
  if (slot.use == Use::kVector) {
    t = ggml_new_tensor_1d(ctx, type, slot.n_rows);
  } else if (slot.n_matrices > 1) {
    t = ggml_new_tensor_3d(ctx, type, slot.n_columns, slot.n_rows / slot.n_matrices,
                           slot.n_matrices);
  } else {
    t = ggml_new_tensor_2d(ctx, type, slot.n_columns, slot.n_rows);
  }
  ggml_set_name(t, slot.source->name.c_str());
  return t;
}

// Whether a product with a matrix of this shape works from that buffer type.
bool takes_matrix(const Device& device, ggml_backend_buffer_type_t type, const Slot& slot) {
  const ContextPtr ctx(ggml_init({ggml_tensor_overhead() * 4, nullptr, true}));
  constexpr int64_t kRows = 512;
  ggml_tensor* w = new_tensor(ctx.get(), slot);
  ggml_tensor* y = nullptr;
  if (slot.n_matrices > 1) {
    ggml_tensor* x = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, slot.n_columns, 1, kRows);
    ggml_tensor* ids = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, 1, kRows);
    y = ggml_mul_mat_id(ctx.get(), w, x, ids);
  } else {
    ggml_tensor* x = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, slot.n_columns, kRows);
    y = ggml_mul_mat(ctx.get(), w, x);
  }
  const BufferPtr probe(ggml_backend_buft_alloc_buffer(type, 0));
  if (probe == nullptr) return false;
  w->buffer = probe.get();
  return ggml_backend_dev_supports_op(device.dev(), y);
}

// Advises the system on the pages that hold these bytes of a mapping.
void advise(std::span<const uint8_t> bytes, int advice) {
  const auto begin = reinterpret_cast<uintptr_t>(bytes.data()) / kPageBytes * kPageBytes;
  const auto end = reinterpret_cast<uintptr_t>(bytes.data() + bytes.size());
  madvise(reinterpret_cast<void*>(begin), end - begin, advice);
}

void widen_row(const GgufTensor& table, int64_t row, float* out) {
  const size_t bytes = table.row_bytes();
  const uint8_t* source = table.data.data() + static_cast<size_t>(row) * bytes;
  if (table.type == GGML_TYPE_F32) {
    memcpy(out, source, bytes);
  } else {
    ggml_get_type_traits(table.type)->to_float(source, out, table.ne[0]);
  }
}

}  // namespace

struct Model::Impl {
  Impl(std::shared_ptr<const GgufFile> f, Env& e) : env(e), file(std::move(f)) {}

  Status place_layers(const LoadOptions& options, Device& otherwise);
  Status place(const std::vector<Slot>& slots, const LoadOptions& options);
  Result<WeightPlan> plan(const std::vector<StreamedSource>& sources,
                          const std::vector<Slot>& slots, const LoadOptions& options) const;
  Status stream(const std::vector<Slot>& slots, const LoadOptions& options,
                std::vector<Slot>& resident);
  Status map(Device& device, const std::vector<Slot>& slots);
  Status map_part(Device& device, const GgufPart& part, const std::vector<Slot>& slots);
  ggml_context* new_context(size_t n_tensors) {
    contexts.emplace_back(ggml_init({ggml_tensor_overhead() * n_tensors, nullptr, true}));
    return contexts.back().get();
  }
  // The slots of one device; adds those that must be filled from the file.
  Status place_on(Device& device, const std::vector<Slot>& slots, const LoadOptions& options,
                  std::vector<Slot>& to_fill);
  Status upload(const std::vector<Slot>& slots, const Progress& progress);
  // The share's weights, to the devices of the layers.
  Status load_weights(const LoadOptions& options);
  Status sharing_devices(const LoadOptions& options, std::vector<Device*>& devices,
                         std::vector<double>& proportions) const;
  void share_units(Divisible& heads, Divisible& columns) const;
  Status load_parts(const LoadOptions& options, const std::vector<Device*>& sharing,
                    const std::vector<double>& proportions);

  std::vector<Device*> layer_devices;
  std::vector<Device*> devices;  // each once
  Env& env;
  std::shared_ptr<const GgufFile> file;
  const DecoderSpec* spec = nullptr;
  HParams hparams;
  HParams file_hparams;  // before RopeOverride
  Share share;
  std::vector<std::unique_ptr<Model>> parts;  // empty: no layer is shared
  Weights weights;
  const GgufTensor* token_embd = nullptr;
  const GgufTensor* position_embd = nullptr;  // null without learned positions
  std::vector<ContextPtr> contexts;
  std::vector<BufferPtr> buffers;
  std::unique_ptr<StreamedLayers> streamed;  // null: all layers are on the device
  Adapters adapters;
};

Status Model::Impl::place_layers(const LoadOptions& options, Device& otherwise) {
  Placement placement = options.placement;
  if (placement.rest == nullptr) placement.rest = &otherwise;
  std::vector<std::string> names;
  for (const GgufTensor& t : file->tensors()) names.push_back(t.name);
  HCACHE_ASSIGN_OR_RETURN(layer_devices, model::place_layers(placement, hparams.n_layer, names));
  for (Device* device : layer_devices) {
    if (std::find(devices.begin(), devices.end(), device) == devices.end()) {
      devices.push_back(device);
    }
  }
  return {};
}

// Those that have some of every layer, and how much.
Status Model::Impl::sharing_devices(const LoadOptions& options, std::vector<Device*>& devices,
                                    std::vector<double>& proportions) const {
  const Placement& p = options.placement;
  if (spec->post_norm || spec->head_norm == HeadNorm::kRow) {
    return unimplemented(
        fmt::format("{} normalises what devices would add up; --split-mode tensor does not know "
                    "how, use --split-mode layer",
                    spec->arch));
  }
  if (hparams.n_expert > 0) {
    return unimplemented(
        "--split-mode tensor does not know how to share experts; use --split-mode layer");
  }
  if (options.weights == WeightPlace::kHost || options.weights == WeightPlace::kDisk) {
    return unimplemented(
        "weights are streamed on one device, and --split-mode tensor shares each layer; use "
        "--weights resident");
  }
  if (!p.overrides.empty()) {
    return unimplemented(
        "--override-tensor moves whole layers, and --split-mode tensor shares each; use one of "
        "them");
  }
  if (p.n_layers >= 0 && p.n_layers < hparams.n_layer) {
    return unimplemented(fmt::format(
        "--gpu-layers {} leaves layers to the CPU, and --split-mode tensor shares all {}; raise "
        "it, or use --split-mode layer",
        p.n_layers, hparams.n_layer));
  }
  if (!p.split.empty() && p.split.size() != p.devices.size()) {
    return invalid_argument(
        fmt::format("a tensor split of {} parts for {} devices", p.split.size(), p.devices.size()));
  }
  for (size_t i = 0; i < p.devices.size(); ++i) {
    const double part = p.split.empty() ? 1.0 : p.split[i];
    if (part <= 0) continue;
    devices.push_back(p.devices[i]);
    proportions.push_back(part);
  }
  return {};
}

// By the sizes of the weights and what there is of memory.
Result<WeightPlan> Model::Impl::plan(const std::vector<StreamedSource>& sources,
                                     const std::vector<Slot>& slots,
                                     const LoadOptions& options) const {
  const Device& device = *devices.front();
  WeightSizes sizes;
  sizes.layer_bytes.resize(static_cast<size_t>(hparams.n_layer));
  for (const Slot& slot : slots) {
    uint64_t& bytes =
        slot.layer < 0 ? sizes.shared_bytes : sizes.layer_bytes[static_cast<size_t>(slot.layer)];
    bytes += slot.n_bytes();
  }
  for (auto begin = sources.begin(); begin != sources.end();) {
    const auto end = std::find_if(begin, sources.end(),
                                  [&](const StreamedSource& s) { return s.layer != begin->layer; });
    sizes.slot_bytes.push_back(image_of(*file, {begin, end}).n_bytes);
    // Attention and feed-forward in parallel have one input and one sum: no way to halve them.
    if (!hparams.parallel) {
      const auto halves = halves_of({begin, end});
      sizes.half_bytes.push_back(
          {image_of(*file, halves[0]).n_bytes, image_of(*file, halves[1]).n_bytes});
    }
    begin = end;
  }
  WeightRoom room;
  room.device_limited = options.device_memory > 0;
  room.own_memory = !device.is_cpu();
  uint64_t host_free = std::numeric_limits<uint64_t>::max();
  if (const auto free = free_memory(Env::real()); free.ok()) host_free = *free;
  uint64_t device_free = host_free;
  if (room.own_memory) {
    size_t free = 0;
    size_t total = 0;
    ggml_backend_dev_memory(device.dev(), &free, &total);
    device_free = total == 0 ? std::numeric_limits<uint64_t>::max() : free;
    room.host_bytes = host_free;
  }
  const uint64_t usable = room.device_limited ? options.device_memory : device_free;
  const uint64_t other = options.other_bytes ? options.other_bytes(hparams) : 0;
  room.device_bytes = usable - std::min(usable, other);
  HCACHE_ASSIGN_OR_RETURN(const WeightPlan plan, plan_weights(options.weights, sizes, room));
  return plan;
}

// Lays out the layers that are streamed; the weights of the others are left in `resident`.
Status Model::Impl::stream(const std::vector<Slot>& slots, const LoadOptions& options,
                           std::vector<Slot>& resident) {
  const bool is_part = share.n_head_kv < hparams.n_head_kv;
  if (devices.size() > 1 || is_part) {
    if (options.weights == WeightPlace::kHost || options.weights == WeightPlace::kDisk) {
      return unimplemented(fmt::format(
          "{}: weights are streamed on one device, these layers are on {}; use --weights resident, "
          "or one --device",
          file->path(), devices.size()));
    }
    resident = slots;
    return {};
  }
  std::vector<StreamedSource> sources;
  for (const Slot& slot : slots) {
    if (slot.layer < 0) continue;
    sources.push_back({.layer = slot.layer,
                       .target = slot.target,
                       .create = [slot](ggml_context* ctx) { return new_tensor(ctx, slot); },
                       .part = slot.source->part,
                       .bytes = slot.bytes(),
                       .is_kv = slot.is_kv,
                       .is_feed_forward = slot.is_feed_forward});
  }
  Result<WeightPlan> planned = plan(sources, slots, options);
  if (!planned.ok()) return planned.status().with_context(file->path());
  const auto stays = [&](int layer) { return layer < planned->n_resident; };
  std::erase_if(sources, [&](const StreamedSource& s) { return stays(s.layer); });
  for (const Slot& slot : slots) {
    if (stays(slot.layer)) resident.push_back(slot);
  }
  if (sources.empty()) return {};
  HCACHE_ASSIGN_OR_RETURN(
      streamed, lay_out_streamed(*file, *devices.front(), planned->place, planned->halves, env,
                                 sources, options.progress));
  // Of a file that is mostly streamed only the rows that are looked up are read.
  if (file->tensor("output.weight") != nullptr) advise(token_embd->data, MADV_RANDOM);
  return {};
}

// Weights that are used where the file is mapped.
Status Model::Impl::map(Device& device, const std::vector<Slot>& slots) {
  for (size_t i = 0; i < file->parts().size(); ++i) {
    std::vector<Slot> own;
    std::copy_if(slots.begin(), slots.end(), std::back_inserter(own),
                 [i](const Slot& slot) { return slot.source->part == i; });
    if (!own.empty()) HCACHE_RETURN_IF_ERROR(map_part(device, file->parts()[i], own));
  }
  return {};
}

Status Model::Impl::map_part(Device& device, const GgufPart& part, const std::vector<Slot>& slots) {
  ggml_context* ctx = new_context(slots.size());
  const auto bytes = part.bytes;
  auto* base = const_cast<uint8_t*>(bytes.data());  // read only: ggml never writes weights
  size_t largest = 0;
  for (const Slot& slot : slots) largest = std::max(largest, slot.n_bytes());
  buffers.emplace_back(
      ggml_backend_dev_buffer_from_host_ptr(device.dev(), base, bytes.size(), largest));
  if (buffers.back() == nullptr) {
    return internal_error(
        fmt::format("{}: device {} can't use the mapped file", part.path, device.name()));
  }
  ggml_backend_buffer_set_usage(buffers.back().get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
  if (streamed == nullptr) madvise(base, bytes.size(), MADV_WILLNEED);
  for (const Slot& slot : slots) {
    *slot.target = new_tensor(ctx, slot);
    auto* data = const_cast<uint8_t*>(slot.bytes().data());
    if (ggml_backend_tensor_alloc(buffers.back().get(), *slot.target, data) !=
        GGML_STATUS_SUCCESS) {
      return internal_error(
          fmt::format("{}: tensor {} can't be mapped", part.path, slot.source->name));
    }
    // Of a file that is mostly streamed no other pages may be read along.
    if (streamed != nullptr) advise(slot.bytes(), MADV_WILLNEED);
  }
  return {};
}

Status Model::Impl::place(const std::vector<Slot>& slots, const LoadOptions& options) {
  std::vector<Slot> resident;
  HCACHE_RETURN_IF_ERROR(stream(slots, options, resident));
  std::vector<Slot> to_fill;
  for (Device* device : devices) {
    std::vector<Slot> own;
    std::copy_if(resident.begin(), resident.end(), std::back_inserter(own),
                 [device](const Slot& slot) { return slot.device == device; });
    HCACHE_RETURN_IF_ERROR(place_on(*device, own, options, to_fill));
  }
  return upload(to_fill, options.progress);
}

// Decides for every weight between the mapping, a repacked buffer and the device's plain memory,
// and allocates.
Status Model::Impl::place_on(Device& device, const std::vector<Slot>& slots,
                             const LoadOptions& options, std::vector<Slot>& to_fill) {
  ggml_backend_dev_props props{};
  ggml_backend_dev_get_props(device.dev(), &props);
  const size_t buffer_alignment = ggml_backend_buft_get_alignment(device.buffer_type());
  const bool mapped = options.use_mmap && device.host_visible() &&
                      props.caps.buffer_from_host_ptr && file->alignment() % buffer_alignment == 0;
  const auto extra = options.use_extra_buffers && streamed == nullptr
                         ? extra_buffer_types(device)
                         : std::vector<ggml_backend_buffer_type_t>();

  std::vector<Slot> in_mapping;
  std::map<ggml_backend_buffer_type_t, std::vector<Slot>> by_type;
  for (const Slot& slot : slots) {
    const auto fits = [&](ggml_backend_buffer_type_t t) { return takes_matrix(device, t, slot); };
    // Our own products read the file's layout.
    const bool own = has_own_product(slot.source->type);
    const auto found = slot.use == Use::kMatrix && !own
                           ? std::find_if(extra.begin(), extra.end(), fits)
                           : extra.end();
    if (found != extra.end()) {
      by_type[*found].push_back(slot);
    } else if (mapped && slot.is_contiguous()) {
      in_mapping.push_back(slot);
    } else {
      by_type[device.buffer_type()].push_back(slot);
    }
  }

  if (!in_mapping.empty()) HCACHE_RETURN_IF_ERROR(map(device, in_mapping));
  for (const auto& [type, group] : by_type) {
    ggml_context* ctx = new_context(group.size());
    size_t bytes = 0;
    for (const Slot& slot : group) {
      *slot.target = new_tensor(ctx, slot);
      bytes += slot.n_bytes();
    }
    buffers.emplace_back(ggml_backend_alloc_ctx_tensors_from_buft(ctx, type));
    if (buffers.back() == nullptr) {
      return resource_exhausted(fmt::format("{}: device {} has no room for {} MiB of weights",
                                            file->path(), device.name(), bytes >> 20));
    }
    ggml_backend_buffer_set_usage(buffers.back().get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    to_fill.insert(to_fill.end(), group.begin(), group.end());
  }
  return {};
}

Status Model::Impl::upload(const std::vector<Slot>& slots, const Progress& progress) {
  size_t total = 0;
  for (const Slot& slot : slots) total += slot.n_bytes();
  size_t done = 0;
  std::vector<uint8_t> gathered;
  for (const Slot& slot : slots) {
    // Repacked layouts take whole tensors only; other devices report progress by some rows.
    const size_t row = slot.row_bytes();
    const int64_t at_once = slot.device->is_cpu()
                                ? slot.n_rows
                                : std::max<int64_t>(1, static_cast<int64_t>(kUploadChunk / row));
    for (int64_t first = 0; first < slot.n_rows; first += at_once) {
      const int64_t n = std::min(at_once, slot.n_rows - first);
      const size_t at = static_cast<size_t>(first) * row;
      const size_t n_bytes = static_cast<size_t>(n) * row;
      const uint8_t* from = nullptr;
      if (slot.is_contiguous()) {
        from = slot.bytes().data() + at;
      } else {
        gathered.resize(n_bytes);
        slot.gather(first, n, gathered.data());
        from = gathered.data();
      }
      ggml_backend_tensor_set(*slot.target, from, at, n_bytes);
      done += n_bytes;
      if (progress && !progress(static_cast<float>(done) / static_cast<float>(total))) {
        return cancelled(fmt::format("{}: loading was cancelled", file->path()));
      }
    }
  }
  return {};
}

// How finely the layers can be shared: the columns of the output projections are cut between
// heads, those of the feed-forward block anywhere, both between blocks of the weights' types.
void Model::Impl::share_units(Divisible& heads, Divisible& columns) const {
  constexpr int64_t kLeastColumns = 32;
  const int64_t head = int64_t{hparams.n_head / hparams.n_head_kv} * hparams.head_dim;
  heads = {.n = hparams.n_head_kv,
           .what = fmt::format("{}: the model's KV heads ({})", file->path(), hparams.n_head_kv),
           .remedy = {}};
  columns = {
      .n = hparams.n_ff,
      .unit = kLeastColumns,
      .what = fmt::format("{}: the feed-forward blocks' columns ({})", file->path(), hparams.n_ff),
      .remedy = {}};
  for (const GgufTensor& t : file->tensors()) {
    const bool is_output = t.name.ends_with(".attn_output.weight");
    if (!is_output && !t.name.ends_with(".ffn_down.weight")) continue;
    Divisible& cut = is_output ? heads : columns;
    const int64_t block = ggml_blck_size(t.type);
    const int64_t unit = std::lcm(cut.unit, is_output ? block / std::gcd(block, head) : block);
    if (unit == cut.unit) continue;
    cut.unit = unit;
    cut.what = fmt::format("{}: tensor {} ({} in blocks of {} columns)", file->path(), t.name,
                           ggml_type_name(t.type), block);
    cut.remedy = "weights of a type with smaller blocks, such as Q8_0";
  }
}

// Loads a part for each device that has some of every layer.
Status Model::Impl::load_parts(const LoadOptions& options, const std::vector<Device*>& sharing,
                               const std::vector<double>& proportions) {
  Divisible heads;
  Divisible columns;
  share_units(heads, columns);
  HCACHE_ASSIGN_OR_RETURN(const std::vector<Share> shares, cut_shares(heads, columns, proportions));
  const auto n_layer = static_cast<size_t>(hparams.n_layer);
  for (const Share& own : shares) {
    const auto index = static_cast<size_t>(own.index);
    auto part = std::make_unique<Impl>(file, env);
    part->spec = spec;
    part->hparams = hparams;
    part->share = own;
    part->devices = {sharing[index]};
    part->layer_devices.assign(n_layer, sharing[index]);
    LoadOptions of_part = options;
    of_part.weights = WeightPlace::kResident;
    if (options.progress) {
      of_part.progress = [&, n = static_cast<float>(shares.size())](float done) {
        return options.progress((static_cast<float>(own.index) + done) / n);
      };
    }
    HCACHE_RETURN_IF_ERROR(part->load_weights(of_part));
    part->hparams.n_head = own.n_head_kv * (hparams.n_head / hparams.n_head_kv);
    part->hparams.n_head_kv = own.n_head_kv;
    part->hparams.n_ff = own.n_ff;
    parts.push_back(std::unique_ptr<Model>(new Model(std::move(part))));
  }
  const Impl& first = *parts.front()->impl_;
  hparams.n_vocab = first.hparams.n_vocab;
  weights = first.weights;
  token_embd = first.token_embd;
  position_embd = first.position_embd;
  devices = sharing;
  layer_devices.assign(n_layer, sharing.front());
  return {};
}

Status Model::Impl::load_weights(const LoadOptions& options) {
  TensorReader reader(*file, *spec, hparams, share, layer_devices);
  HCACHE_RETURN_IF_ERROR(reader.read(weights, token_embd, position_embd));
  HCACHE_RETURN_IF_ERROR(place(reader.slots(), options));
  for (size_t i = 0; i < layer_devices.size(); ++i) {
    const auto first = std::find(layer_devices.begin(), layer_devices.end(), layer_devices[i]);
    weights.layers[i].rope_factors =
        weights.layers[static_cast<size_t>(first - layer_devices.begin())].rope_factors;
  }
  for (const std::string& path : options.adapters) {
    HCACHE_RETURN_IF_ERROR(adapters.add(path, hparams, reader.slots(), env));
  }
  return {};
}

Model::Model(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Model::~Model() = default;

Result<std::unique_ptr<Model>> Model::load(const std::string& path, Device& device,
                                           const LoadOptions& options) {
  HCACHE_ASSIGN_OR_RETURN(auto file, GgufFile::open(path, *options.env));
  auto impl = std::make_unique<Impl>(std::move(file), *options.env);
  HCACHE_ASSIGN_OR_RETURN(impl->spec, read_architecture(*impl->file));
  HCACHE_ASSIGN_OR_RETURN(impl->hparams, read_hparams(*impl->file, *impl->spec));
  impl->file_hparams = impl->hparams;
  HCACHE_RETURN_IF_ERROR(override_rope(*impl->file, *impl->spec, options.rope, impl->hparams)
                             .with_context(impl->file->path()));
  if (options.placement.share_layers) {
    std::vector<Device*> sharing;
    std::vector<double> proportions;
    HCACHE_RETURN_IF_ERROR(
        impl->sharing_devices(options, sharing, proportions).with_context(impl->file->path()));
    if (sharing.size() > 1) {
      if (!options.adapters.empty()) {
        return unimplemented(
            "--split-mode tensor does not know how to share adapters; use --split-mode layer");
      }
      HCACHE_RETURN_IF_ERROR(impl->load_parts(options, sharing, proportions));
      return std::unique_ptr<Model>(new Model(std::move(impl)));
    }
  }
  HCACHE_RETURN_IF_ERROR(impl->place_layers(options, device).with_context(impl->file->path()));
  impl->share = {.n_head_kv = impl->hparams.n_head_kv, .n_ff = impl->hparams.n_ff};
  HCACHE_RETURN_IF_ERROR(impl->load_weights(options));
  return std::unique_ptr<Model>(new Model(std::move(impl)));
}

const std::string& Model::path() const { return impl_->file->path(); }
const HParams& Model::hparams() const { return impl_->hparams; }
const DecoderSpec& Model::spec() const { return *impl_->spec; }
const Weights& Model::weights() const { return impl_->weights; }
const std::vector<std::unique_ptr<Model>>& Model::parts() const { return impl_->parts; }
const Share& Model::share() const { return impl_->share; }
const StreamedWeights* Model::streamed() const {
  return impl_->streamed == nullptr ? nullptr : &impl_->streamed->weights;
}

const std::vector<AdapterInfo>& Model::adapters() const { return impl_->adapters.infos(); }
std::span<const LowRank> Model::low_rank(const ggml_tensor* weight) const {
  return impl_->adapters.of(weight);
}
bool Model::adapts_kv(int layer) const {
  const LayerWeights& w = weights().layers[static_cast<size_t>(layer)];
  return !low_rank(w.k.w).empty() || !low_rank(w.v.w).empty();
}

int Model::product_generation() const {
  const auto is_own = [](const Device& device, const LayerWeights& w) {
    const auto own = [](const Linear* linear) {
      return linear->w != nullptr && has_own_product(linear->w->type);
    };
    const std::array matrices = {&w.q,          &w.k,           &w.v,    &w.o,
                                 &w.gate,       &w.up,          &w.down, &w.experts.gate,
                                 &w.experts.up, &w.experts.down};
    return device.is_cpu() && std::ranges::any_of(matrices, own);
  };
  for (const auto& part : impl_->parts) {
    if (part->product_generation() > 0) return kProductGeneration;
  }
  const auto& layers = weights().layers;
  for (size_t i = 0; i < layers.size(); ++i) {
    if (is_own(device(static_cast<int>(i)), layers[i])) return kProductGeneration;
  }
  return 0;
}

std::string Model::describe_places() const {
  const int n_layer = impl_->hparams.n_layer;
  const StreamedWeights* streamed = this->streamed();
  if (streamed == nullptr) {
    std::string names;
    for (const Device* device : impl_->devices) {
      names += (names.empty() ? "" : ", ") + device->name();
    }
    const char* where = impl_->parts.empty() ? "on" : "shared by";
    return fmt::format("all {} layers {} {}", n_layer, where, names);
  }
  return fmt::format("{} of {} layers on {}, {}", streamed->first_layer, n_layer,
                     impl_->devices.front()->name(), streamed->describe());
}
Device& Model::device(int layer) const { return *impl_->layer_devices[static_cast<size_t>(layer)]; }
const std::vector<Device*>& Model::devices() const { return impl_->devices; }
const Device& Model::pinning_device() const {
  const auto found = std::find_if(impl_->devices.begin(), impl_->devices.end(),
                                  [](const Device* device) { return device->pins_host_memory(); });
  return found != impl_->devices.end() ? **found : *impl_->devices.front();
}

Status Model::embed_tokens(std::span<const int32_t> tokens, float* out) const {
  const HParams& h = impl_->hparams;
  for (const int32_t token : tokens) {
    if (token < 0 || token >= h.n_vocab) {
      return invalid_argument(
          fmt::format("token {} is outside the vocabulary of {}", token, h.n_vocab));
    }
  }
  for (const int32_t token : tokens) {
    widen_row(*impl_->token_embd, token, out);
    if (h.embedding_scale != 1) {
      for (int i = 0; i < h.n_embd; ++i) out[i] *= h.embedding_scale;
    }
    out += h.n_embd;
  }
  return {};
}

Status Model::add_learned_positions(std::span<const int32_t> positions, float* out) const {
  if (impl_->position_embd == nullptr) return {};
  const HParams& h = impl_->hparams;
  for (const int32_t position : positions) {
    if (position < 0 || position >= h.n_ctx_train) {
      return out_of_range(fmt::format("position {} lies beyond the {} learned positions of {}",
                                      position, h.n_ctx_train, path()));
    }
  }
  std::vector<float> row(static_cast<size_t>(h.n_embd));
  for (const int32_t position : positions) {
    widen_row(*impl_->position_embd, int64_t{position} + h.position_offset, row.data());
    for (const float value : row) *out++ += value;
  }
  return {};
}

std::string Model::type_name() const {
  std::vector<ggml_type> types;
  for (const LayerWeights& l : impl_->weights.layers) {
    for (const Linear* m : {&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down, &l.experts.gate,
                            &l.experts.up, &l.experts.down}) {
      if (m->w != nullptr && std::find(types.begin(), types.end(), m->w->type) == types.end()) {
        types.push_back(m->w->type);
      }
    }
  }
  std::sort(types.begin(), types.end());
  std::string out;
  for (const ggml_type type : types) {
    std::string name = ggml_type_name(type);
    for (char& c : name) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    out += (out.empty() ? "" : ", ") + name;
  }
  return types.size() > 1 ? "mixed: " + out : out;
}

size_t Model::n_bytes() const {
  size_t total = 0;
  for (const GgufTensor& t : impl_->file->tensors()) total += t.data.size();
  return total;
}

uint64_t Model::n_params() const {
  uint64_t total = 0;
  for (const GgufTensor& t : impl_->file->tensors()) total += static_cast<uint64_t>(t.n_elements());
  return total;
}

Result<std::string> Model::content_digest(const std::string& cache_dir,
                                          const Progress& progress) const {
  HParams h = impl_->file_hparams;
  h.n_vocab = impl_->hparams.n_vocab;
  return cached_digest(impl_->env, *impl_->file, h, cache_dir, impl_->streamed != nullptr,
                       progress);
}

}  // namespace hcache::model
