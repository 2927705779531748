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
#include <set>

#include "base/memory.h"
#include "base/units.h"
#include "digest.h"
#include "gguf_file.h"
#include "hparams.h"
#include "streamed_layers.h"
#include "weight_types.h"

namespace hcache::model {
namespace {

constexpr size_t kUploadChunk = size_t{4} << 20;
constexpr uintptr_t kPageBytes = 4096;

// ---- Tensors -----------------------------------------------------------------------------------

// Where a weight wants to live.
enum class Use {
  kVector,       // F32, added or multiplied element by element
  kMatrix,       // left-hand side of a product: may be repacked
  kPlainMatrix,  // k and v: also multiply saved hidden states, so never repacked
};

// One weight on its way from the file to the device.
struct Slot {
  ggml_tensor** target = nullptr;
  const GgufTensor* source = nullptr;
  int64_t first_row = 0;  // a part of a fused matrix, in rows (elements of a fused bias)
  int64_t n_rows = 0;
  Use use = Use::kVector;
  Device* device = nullptr;
  int layer = -1;      // -1: none's
  bool is_kv = false;  // see LayerPart::kKv
};

// Finds each tensor the architecture has, checks it, and notes where it goes. A tensor of the file
// that nobody asked for is an error: it would change the result if it were ignored.
class TensorReader {
 public:
  // `devices`: each layer's.
  TensorReader(const GgufFile& file, const DecoderSpec& spec, HParams& h,
               const std::vector<Device*>& devices)
      : file_(file), spec_(spec), h_(h), devices_(devices), device_(devices.back()) {}

  Status read(Weights& w, const GgufTensor*& token_embd, const GgufTensor*& position_embd);
  [[nodiscard]] const std::vector<Slot>& slots() const { return slots_; }

 private:
  struct Shape {
    int64_t ne0;
    int64_t ne1 = 1;
  };

  // The tensor with its shape checked; nullptr when it is absent and optional.
  Result<const GgufTensor*> claim(const std::string& name, Shape shape, bool required) {
    const GgufTensor* t = file_.tensor(name);
    if (t == nullptr) {
      if (!required) return t;
      return not_found(fmt::format("{}: tensor {} is missing", file_.path(), name));
    }
    claimed_.insert(name);
    if (t->ne[0] != shape.ne0 || t->ne[1] != shape.ne1 || t->ne[2] != 1 || t->ne[3] != 1) {
      return data_loss(fmt::format("{}: tensor {} is {}, expected [{}, {}]", file_.path(), name,
                                   t->describe(), shape.ne0, shape.ne1));
    }
    return t;
  }

  [[nodiscard]] Status bad_type(const GgufTensor& t, std::string_view why) const {
    return unimplemented(
        fmt::format("{}: tensor {} is {}: {}", file_.path(), t.name, ggml_type_name(t.type), why));
  }

  [[nodiscard]] Status check_matrix(const GgufTensor& t) const {
    if (find_weight_type(t.type) == nullptr)
      return bad_type(t, "no matrix product takes this type");
    if (device_->is_cpu()) return {};
    const std::unique_ptr<ggml_context, decltype(&ggml_free)> ctx(
        ggml_init({ggml_tensor_overhead() * 4, nullptr, true}), &ggml_free);
    ggml_tensor* w = ggml_new_tensor_2d(ctx.get(), t.type, t.ne[0], t.ne[1]);
    ggml_tensor* x = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, t.ne[0], 1);
    if (!ggml_backend_dev_supports_op(device_->dev(), ggml_mul_mat(ctx.get(), w, x))) {
      return bad_type(t, fmt::format("device {} can't multiply it", device_->name()));
    }
    return {};
  }

  Status vector(ggml_tensor*& target, const std::string& name, int64_t n, bool required) {
    HCACHE_ASSIGN_OR_RETURN(const GgufTensor* t, claim(name, {n}, required));
    if (t == nullptr) return {};
    if (t->type != GGML_TYPE_F32) return bad_type(*t, "norms and biases must be F32");
    add_slot(target, t, 0, n, Use::kVector);
    return {};
  }

  Status norm(NormWeights& target, const std::string& name, int64_t n, bool required) {
    HCACHE_RETURN_IF_ERROR(vector(target.w, name + ".weight", n, required));
    const bool has_bias = spec_.norm == Norm::kLayer && file_.tensor(name + ".weight") != nullptr;
    return has_bias ? vector(target.b, name + ".bias", n, true) : Status();
  }

  Status linear(Linear& target, const std::string& name, int64_t n_in, int64_t n_out, Use use) {
    HCACHE_ASSIGN_OR_RETURN(const GgufTensor* t, claim(name + ".weight", {n_in, n_out}, true));
    HCACHE_RETURN_IF_ERROR(check_matrix(*t));
    add_slot(target.w, t, 0, n_out, use);
    return vector(target.b, name + ".bias", n_out, false);
  }

  Status fused_qkv(LayerWeights& l, const std::string& name) {
    const int64_t n_q = h_.n_embd_q();
    const int64_t n_kv = h_.n_embd_kv();
    const int64_t n_out = n_q + 2 * n_kv;
    HCACHE_ASSIGN_OR_RETURN(const GgufTensor* t, claim(name + ".weight", {h_.n_embd, n_out}, true));
    HCACHE_RETURN_IF_ERROR(check_matrix(*t));
    add_slot(l.q.w, t, 0, n_q, Use::kMatrix);
    add_slot(l.k.w, t, n_q, n_kv, Use::kPlainMatrix);
    add_slot(l.v.w, t, n_q + n_kv, n_kv, Use::kPlainMatrix);
    HCACHE_ASSIGN_OR_RETURN(const GgufTensor* b, claim(name + ".bias", {n_out}, false));
    if (b == nullptr) return {};
    if (b->type != GGML_TYPE_F32) return bad_type(*b, "norms and biases must be F32");
    add_slot(l.q.b, b, 0, n_q, Use::kVector);
    add_slot(l.k.b, b, n_q, n_kv, Use::kVector);
    add_slot(l.v.b, b, n_q + n_kv, n_kv, Use::kVector);
    return {};
  }

  Status layer(LayerWeights& l, int index);
  Status rope_factors(Weights& w);
  Status tables(const GgufTensor*& token_embd, const GgufTensor*& position_embd);

  void add_slot(ggml_tensor*& target, const GgufTensor* source, int64_t first_row, int64_t n_rows,
                Use use) {
    slots_.push_back({&target, source, first_row, n_rows, use, device_});
  }

  const GgufFile& file_;
  const DecoderSpec& spec_;
  HParams& h_;
  const std::vector<Device*>& devices_;
  Device* device_;  // of what is being read
  std::set<std::string, std::less<>> claimed_;
  std::vector<Slot> slots_;
};

// The embedding tables: rows are looked up on the host.
Status TensorReader::tables(const GgufTensor*& token_embd, const GgufTensor*& position_embd) {
  token_embd = file_.tensor("token_embd.weight");
  if (token_embd == nullptr) {
    return not_found(fmt::format("{}: tensor token_embd.weight is missing", file_.path()));
  }
  h_.n_vocab = token_embd->ne[1];
  if (h_.n_vocab > std::numeric_limits<int32_t>::max()) {
    return data_loss(
        fmt::format("{}: tensor token_embd.weight has {} rows", file_.path(), h_.n_vocab));
  }
  HCACHE_RETURN_IF_ERROR(claim("token_embd.weight", {h_.n_embd, h_.n_vocab}, true).status());
  if (find_weight_type(token_embd->type) == nullptr) {
    return bad_type(*token_embd, "rows of this type can't be looked up");
  }
  if (const GgufValue* tokens = file_.find("tokenizer.ggml.tokens");
      tokens != nullptr && static_cast<int64_t>(tokens->count) != h_.n_vocab) {
    return data_loss(fmt::format("{}: the vocabulary has {} tokens, token_embd.weight {} rows",
                                 file_.path(), tokens->count, h_.n_vocab));
  }
  if (!spec_.learned_positions) return {};
  const int64_t n_rows = int64_t{h_.n_ctx_train} + h_.position_offset;
  HCACHE_ASSIGN_OR_RETURN(position_embd, claim("position_embd.weight", {h_.n_embd, n_rows}, true));
  if (find_weight_type(position_embd->type) == nullptr) {
    return bad_type(*position_embd, "rows of this type can't be looked up");
  }
  return {};
}

Status TensorReader::layer(LayerWeights& l, int index) {
  const std::string p = fmt::format("blk.{}.", index);
  device_ = devices_[static_cast<size_t>(index)];
  const int64_t n_embd = h_.n_embd;
  HCACHE_RETURN_IF_ERROR(norm(l.attn_norm, p + "attn_norm", n_embd, true));
  if (spec_.parallel_attention) {
    HCACHE_RETURN_IF_ERROR(norm(l.attn_norm_2, p + "attn_norm_2", n_embd, false));
  } else {
    HCACHE_RETURN_IF_ERROR(norm(l.ffn_norm, p + "ffn_norm", n_embd, true));
  }
  if (spec_.fused_qkv || file_.tensor(p + "attn_qkv.weight") != nullptr) {
    HCACHE_RETURN_IF_ERROR(fused_qkv(l, p + "attn_qkv"));
  } else {
    HCACHE_RETURN_IF_ERROR(linear(l.q, p + "attn_q", n_embd, h_.n_embd_q(), Use::kMatrix));
    HCACHE_RETURN_IF_ERROR(linear(l.k, p + "attn_k", n_embd, h_.n_embd_kv(), Use::kPlainMatrix));
    HCACHE_RETURN_IF_ERROR(linear(l.v, p + "attn_v", n_embd, h_.n_embd_kv(), Use::kPlainMatrix));
  }
  if (spec_.qk_norm) {
    HCACHE_RETURN_IF_ERROR(vector(l.q_norm.w, p + "attn_q_norm.weight", h_.head_dim, true));
    HCACHE_RETURN_IF_ERROR(vector(l.k_norm.w, p + "attn_k_norm.weight", h_.head_dim, true));
  }
  HCACHE_RETURN_IF_ERROR(linear(l.o, p + "attn_output", h_.n_embd_q(), n_embd, Use::kMatrix));
  if (spec_.gated_ffn) {
    HCACHE_RETURN_IF_ERROR(linear(l.gate, p + "ffn_gate", n_embd, h_.n_ff, Use::kMatrix));
  }
  HCACHE_RETURN_IF_ERROR(linear(l.up, p + "ffn_up", n_embd, h_.n_ff, Use::kMatrix));
  return linear(l.down, p + "ffn_down", h_.n_ff, n_embd, Use::kMatrix);
}

// Whether K and V of the layer need the weight that `target` is.
bool makes_kv(const LayerWeights& l, ggml_tensor* const* target) {
  const std::array<ggml_tensor* const*, 9> parts = {
      &l.attn_norm.w,   &l.attn_norm.b, &l.attn_norm_2.w,
      &l.attn_norm_2.b, &l.k_norm.w,    &l.k.w,
      &l.k.b,           &l.v.w,         &l.v.b};
  return std::find(parts.begin(), parts.end(), target) != parts.end();
}

// Llama 3's frequency factors: one tensor for all layers of a device, the first of which has it.
Status TensorReader::rope_factors(Weights& w) {
  for (auto at = devices_.begin(); at != devices_.end(); ++at) {
    if (std::find(devices_.begin(), at, *at) != at) continue;
    device_ = *at;
    ggml_tensor*& target = w.layers[static_cast<size_t>(at - devices_.begin())].rope_factors;
    HCACHE_RETURN_IF_ERROR(vector(target, "rope_freqs.weight", h_.n_rot / 2, false));
  }
  return {};
}

Status TensorReader::read(Weights& w, const GgufTensor*& token_embd,
                          const GgufTensor*& position_embd) {
  HCACHE_RETURN_IF_ERROR(tables(token_embd, position_embd));
  HCACHE_RETURN_IF_ERROR(norm(w.output_norm, "output_norm", h_.n_embd, true));
  if (file_.tensor("output.weight") != nullptr) {
    HCACHE_RETURN_IF_ERROR(linear(w.output, "output", h_.n_embd, h_.n_vocab, Use::kMatrix));
  } else {
    HCACHE_RETURN_IF_ERROR(check_matrix(*token_embd));
    add_slot(w.output.w, token_embd, 0, h_.n_vocab, Use::kMatrix);
  }
  w.layers.resize(static_cast<size_t>(h_.n_layer));
  for (int i = 0; i < h_.n_layer; i++) {
    const size_t begin = slots_.size();
    LayerWeights& l = w.layers[static_cast<size_t>(i)];
    HCACHE_RETURN_IF_ERROR(layer(l, i));
    for (size_t s = begin; s < slots_.size(); ++s) {
      slots_[s].layer = i;
      slots_[s].is_kv = makes_kv(l, slots_[s].target);
    }
  }
  if (spec_.rope_mode == GGML_ROPE_TYPE_NORMAL) {
    HCACHE_RETURN_IF_ERROR(rope_factors(w));
  }
  for (const GgufTensor& t : file_.tensors()) {
    if (!claimed_.contains(t.name)) {
      return unimplemented(
          fmt::format("{}: tensor {} is no part of a {} decoder as this build knows it",
                      file_.path(), t.name, spec_.arch));
    }
  }
  return {};
}

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

// Whether a product with a matrix of this shape works from that buffer type.
bool takes_matrix(const Device& device, ggml_backend_buffer_type_t type, const Slot& slot) {
  const ContextPtr ctx(ggml_init({ggml_tensor_overhead() * 4, nullptr, true}));
  ggml_tensor* w =
      ggml_new_tensor_2d(ctx.get(), slot.source->type, slot.source->ne[0], slot.n_rows);
  constexpr int64_t kRows = 512;
  ggml_tensor* x = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, slot.source->ne[0], kRows);
  ggml_tensor* y = ggml_mul_mat(ctx.get(), w, x);
  const BufferPtr probe(ggml_backend_buft_alloc_buffer(type, 0));
  if (probe == nullptr) return false;
  w->buffer = probe.get();
  return ggml_backend_dev_supports_op(device.dev(), y);
}

// The bytes of the file that a slot holds.
std::span<const uint8_t> slot_bytes(const Slot& slot) {
  const bool is_vector = slot.use == Use::kVector;
  const size_t unit = is_vector ? sizeof(float) : slot.source->row_bytes();
  return slot.source->data.subspan(static_cast<size_t>(slot.first_row) * unit,
                                   static_cast<size_t>(slot.n_rows) * unit);
}

ggml_tensor* new_tensor(ggml_context* ctx, const Slot& slot) {
  ggml_tensor* t =
      slot.use == Use::kVector
          ? ggml_new_tensor_1d(ctx, slot.source->type, slot.n_rows)
          : ggml_new_tensor_2d(ctx, slot.source->type, slot.source->ne[0], slot.n_rows);
  ggml_set_name(t, slot.source->name.c_str());
  return t;
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
  Impl(std::unique_ptr<GgufFile> f, Env& e) : env(e), file(std::move(f)) {}

  Status place_layers(const LoadOptions& options, Device& otherwise);
  Status place(const std::vector<Slot>& slots, const LoadOptions& options);
  Result<WeightPlan> plan(const std::vector<StreamedSource>& sources,
                          const std::vector<Slot>& slots, const LoadOptions& options) const;
  Status stream(const std::vector<Slot>& slots, const LoadOptions& options,
                std::vector<Slot>& resident);
  Status map(Device& device, const std::vector<Slot>& slots);
  ggml_context* new_context(size_t n_tensors) {
    contexts.emplace_back(ggml_init({ggml_tensor_overhead() * n_tensors, nullptr, true}));
    return contexts.back().get();
  }
  // The slots of one device; adds those that must be filled from the file.
  Status place_on(Device& device, const std::vector<Slot>& slots, const LoadOptions& options,
                  std::vector<Slot>& to_fill);
  Status upload(const std::vector<Slot>& slots, const Progress& progress);

  std::vector<Device*> layer_devices;
  std::vector<Device*> devices;  // each once
  Env& env;
  std::unique_ptr<GgufFile> file;
  const DecoderSpec* spec = nullptr;
  HParams hparams;
  Weights weights;
  const GgufTensor* token_embd = nullptr;
  const GgufTensor* position_embd = nullptr;  // null without learned positions
  std::vector<ContextPtr> contexts;
  std::vector<BufferPtr> buffers;
  std::unique_ptr<StreamedLayers> streamed;  // null: all layers are on the device
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
    bytes += slot_bytes(slot).size();
  }
  for (auto begin = sources.begin(); begin != sources.end();) {
    const auto end = std::find_if(begin, sources.end(),
                                  [&](const StreamedSource& s) { return s.layer != begin->layer; });
    sizes.slot_bytes.push_back(image_of(*file, {begin, end}).n_bytes);
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
  if (devices.size() > 1) {
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
                       .bytes = slot_bytes(slot),
                       .is_kv = slot.is_kv});
  }
  Result<WeightPlan> planned = plan(sources, slots, options);
  if (!planned.ok()) return planned.status().with_context(file->path());
  const auto stays = [&](int layer) { return layer < planned->n_resident; };
  std::erase_if(sources, [&](const StreamedSource& s) { return stays(s.layer); });
  for (const Slot& slot : slots) {
    if (stays(slot.layer)) resident.push_back(slot);
  }
  if (sources.empty()) return {};
  HCACHE_ASSIGN_OR_RETURN(streamed, lay_out_streamed(*file, *devices.front(), planned->place, env,
                                                     sources, options.progress));
  return {};
}

// Weights that are used where the file is mapped.
Status Model::Impl::map(Device& device, const std::vector<Slot>& slots) {
  ggml_context* ctx = new_context(slots.size());
  const auto bytes = file->bytes();
  auto* base = const_cast<uint8_t*>(bytes.data());  // read only: ggml never writes weights
  size_t largest = 0;
  for (const Slot& slot : slots) largest = std::max(largest, slot_bytes(slot).size());
  buffers.emplace_back(
      ggml_backend_dev_buffer_from_host_ptr(device.dev(), base, bytes.size(), largest));
  if (buffers.back() == nullptr) {
    return internal_error(
        fmt::format("{}: device {} can't use the mapped file", file->path(), device.name()));
  }
  ggml_backend_buffer_set_usage(buffers.back().get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
  if (streamed == nullptr) madvise(base, bytes.size(), MADV_WILLNEED);
  for (const Slot& slot : slots) {
    *slot.target = new_tensor(ctx, slot);
    auto* data = const_cast<uint8_t*>(slot_bytes(slot).data());
    if (ggml_backend_tensor_alloc(buffers.back().get(), *slot.target, data) !=
        GGML_STATUS_SUCCESS) {
      return internal_error(
          fmt::format("{}: tensor {} can't be mapped", file->path(), slot.source->name));
    }
    // Of a file that is mostly streamed no other pages may be read along.
    if (streamed != nullptr) advise(slot_bytes(slot), MADV_WILLNEED);
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
    const auto found =
        slot.use == Use::kMatrix ? std::find_if(extra.begin(), extra.end(), fits) : extra.end();
    if (found != extra.end()) {
      by_type[*found].push_back(slot);
    } else if (mapped) {
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
      bytes += slot_bytes(slot).size();
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
  for (const Slot& slot : slots) total += slot_bytes(slot).size();
  size_t done = 0;
  const auto step = [&](size_t bytes) -> Status {
    done += bytes;
    if (progress &&
        !progress(static_cast<float>(done) / static_cast<float>(std::max<size_t>(1, total)))) {
      return cancelled(fmt::format("{}: loading was cancelled", file->path()));
    }
    return {};
  };
  for (const Slot& slot : slots) {
    const auto bytes = slot_bytes(slot);
    // Repacked layouts take whole tensors only; other devices report progress by the chunk.
    const size_t chunk = slot.device->is_cpu() ? bytes.size() : kUploadChunk;
    for (size_t at = 0; at < bytes.size(); at += chunk) {
      const size_t size = std::min(chunk, bytes.size() - at);
      ggml_backend_tensor_set(*slot.target, bytes.data() + at, at, size);
      HCACHE_RETURN_IF_ERROR(step(size));
    }
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
  HCACHE_RETURN_IF_ERROR(impl->place_layers(options, device).with_context(impl->file->path()));
  TensorReader reader(*impl->file, *impl->spec, impl->hparams, impl->layer_devices);
  HCACHE_RETURN_IF_ERROR(reader.read(impl->weights, impl->token_embd, impl->position_embd));
  HCACHE_RETURN_IF_ERROR(impl->place(reader.slots(), options));
  for (size_t i = 0; i < impl->layer_devices.size(); ++i) {
    const auto first =
        std::find(impl->layer_devices.begin(), impl->layer_devices.end(), impl->layer_devices[i]);
    impl->weights.layers[i].rope_factors =
        impl->weights.layers[static_cast<size_t>(first - impl->layer_devices.begin())].rope_factors;
  }
  return std::unique_ptr<Model>(new Model(std::move(impl)));
}

const std::string& Model::path() const { return impl_->file->path(); }
const HParams& Model::hparams() const { return impl_->hparams; }
const DecoderSpec& Model::spec() const { return *impl_->spec; }
const Weights& Model::weights() const { return impl_->weights; }
const StreamedWeights* Model::streamed() const {
  return impl_->streamed == nullptr ? nullptr : &impl_->streamed->weights;
}

std::string Model::describe_places() const {
  const int n_layer = impl_->hparams.n_layer;
  const StreamedWeights* streamed = this->streamed();
  if (streamed == nullptr) {
    std::string names;
    for (const Device* device : impl_->devices) {
      names += (names.empty() ? "" : ", ") + device->name();
    }
    return fmt::format("all {} layers on {}", n_layer, names);
  }
  const bool in_host = streamed->place == WeightPlace::kHost;
  return fmt::format(
      "{} of {} layers on {}, {} streamed from {} ({} for a step) through {} slots of {}",
      streamed->first_layer, n_layer, impl_->devices.front()->name(),
      n_layer - streamed->first_layer, in_host ? "host memory" : "disk",
      format_bytes(streamed->n_bytes()), std::min<size_t>(2, streamed->layers.size()),
      format_bytes(streamed->slot_bytes));
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
    for (const Linear* m : {&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down}) {
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
  return cached_digest(impl_->env, *impl_->file, impl_->hparams, cache_dir,
                       impl_->streamed != nullptr, progress);
}

}  // namespace hcache::model
