#include "streamed_layers.h"

#include <fmt/format.h>
#include <ggml-alloc.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <tuple>
#include <utility>

#include "base/units.h"

namespace hcache::model {
namespace {

constexpr uint64_t kBlock = kDirectAlignment;
// Unused bytes between two weights of a layer that are read along rather than skipped.
constexpr uint64_t kMaxGap = 16 * kBlock;
constexpr uint64_t kPieceBytes = 1 << 20;
constexpr size_t kSlots = 2;

uint64_t block_down(uint64_t n) { return n / kBlock * kBlock; }
uint64_t block_up(uint64_t n) { return (n + kBlock - 1) / kBlock * kBlock; }

// Of one of the model's files.
struct Range {
  size_t part = 0;
  uint64_t begin = 0;
  uint64_t end = 0;
};

uint64_t offset_in(const GgufFile& file, const StreamedSource& source) {
  return static_cast<uint64_t>(source.bytes.data() - file.parts()[source.part].bytes.data());
}

// Whole blocks around the weights, in the file's order; ranges at most `gap` apart become one.
std::vector<Range> blocks_around(const GgufFile& file, std::span<const StreamedSource> sources,
                                 bool kv_only, uint64_t gap) {
  std::vector<Range> ranges;
  for (const StreamedSource& source : sources) {
    if (kv_only && !source.is_kv) continue;
    const uint64_t begin = offset_in(file, source);
    ranges.push_back({source.part, block_down(begin), block_up(begin + source.bytes.size())});
  }
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
    return std::tie(a.part, a.begin) < std::tie(b.part, b.begin);
  });
  std::vector<Range> merged;
  for (const Range& range : ranges) {
    if (!merged.empty() && range.part == merged.back().part &&
        range.begin <= merged.back().end + gap) {
      merged.back().end = std::max(merged.back().end, range.end);
    } else {
      merged.push_back(range);
    }
  }
  return merged;
}

// What of `all` lies outside the ranges of `taken`, which are parts of it.
std::vector<Range> outside(const std::vector<Range>& all, const std::vector<Range>& taken) {
  std::vector<Range> rest;
  for (Range range : all) {
    for (const Range& t : taken) {
      if (t.part != range.part || t.end <= range.begin || t.begin >= range.end) continue;
      if (t.begin > range.begin) rest.push_back({range.part, range.begin, t.begin});
      range.begin = t.end;
    }
    if (range.begin < range.end) rest.push_back(range);
  }
  return rest;
}

// The tensors of one unit in its slot. Where the host writes images into slots, at their place in
// the image; elsewhere one behind the other, as the device aligns them.
Status put_in_slot(const GgufFile& file, const Device& device, ggml_backend_buffer_t buffer,
                   std::byte* slot, bool as_image, StreamedUnit& unit) {
  const size_t alignment = ggml_backend_buffer_get_alignment(buffer);
  size_t cursor = 0;
  for (StreamedTensor& t : unit.tensors) {
    cursor = (cursor + alignment - 1) / alignment * alignment;
    std::byte* address = slot + (as_image ? t.image_offset : cursor);
    cursor += ggml_backend_buft_get_alloc_size(device.buffer_type(), t.tensor);
    if (ggml_backend_tensor_alloc(buffer, t.tensor, address) != GGML_STATUS_SUCCESS) {
      return internal_error(
          fmt::format("{}: tensor {} can't lie in a slot", file.path(), t.tensor->name));
    }
  }
  return {};
}

// Bytes of a slot for one unit laid out by the device's rules.
size_t device_layout_bytes(const Device& device, const StreamedUnit& unit) {
  const size_t alignment = ggml_backend_buft_get_alignment(device.buffer_type());
  size_t bytes = 0;
  for (const StreamedTensor& t : unit.tensors) {
    bytes = (bytes + alignment - 1) / alignment * alignment +
            ggml_backend_buft_get_alloc_size(device.buffer_type(), t.tensor);
  }
  return bytes;
}

// A device may want zeros behind a tensor's rows, which it writes once, at allocation: units that
// share a slot must then be alike.
Status check_padding(const GgufFile& file, const Device& device, const StreamedWeights& weights) {
  for (size_t i = kSlots; i < weights.units.size(); ++i) {
    const StreamedUnit& a = weights.units[i - kSlots];
    const StreamedUnit& b = weights.units[i];
    bool alike = a.tensors.size() == b.tensors.size();
    for (size_t t = 0; alike && t < a.tensors.size(); ++t) {
      alike = a.tensors[t].tensor->type == b.tensors[t].tensor->type &&
              a.tensors[t].n_bytes == b.tensors[t].n_bytes;
    }
    const auto padded = [&](const StreamedUnit& unit) {
      return std::any_of(unit.tensors.begin(), unit.tensors.end(), [&](const StreamedTensor& t) {
        return ggml_backend_buft_get_alloc_size(device.buffer_type(), t.tensor) > t.n_bytes;
      });
    };
    if (!alike && (padded(a) || padded(b))) {
      return unimplemented(fmt::format(
          "{}: layers with weights of different types can't take turns on device {}, which pads "
          "their rows; use --weights resident, or a file of one type",
          file.path(), device.name()));
    }
  }
  return {};
}

// Whether the host may read images straight into slots of the device's memory.
bool takes_images(const GgufFile& file, const Device& device) {
  const size_t alignment = ggml_backend_buft_get_alignment(device.buffer_type());
  return device.host_visible() && kBlock % alignment == 0 && file.alignment() % alignment == 0;
}

std::byte* aligned_base(ggml_backend_buffer_t buffer) {
  const auto base = reinterpret_cast<uintptr_t>(ggml_backend_buffer_get_base(buffer));
  return reinterpret_cast<std::byte*>(block_up(base));
}

Status make_slots(const GgufFile& file, Device& device, StreamedLayers& out) {
  StreamedWeights& w = out.weights;
  const bool as_image = takes_images(file, device);
  w.slot_bytes = w.image_bytes;
  if (!as_image) {
    HCACHE_RETURN_IF_ERROR(check_padding(file, device, w));
    w.slot_bytes = {};
    for (size_t i = 0; i < w.units.size(); ++i) {
      size_t& bytes = w.slot_bytes.at(i % kSlots);
      bytes = std::max<size_t>(bytes, block_up(device_layout_bytes(device, w.units[i])));
    }
  }
  const size_t n_bytes = w.slot_bytes[0] + w.slot_bytes[1] + kBlock;
  out.buffers.emplace_back(ggml_backend_buft_alloc_buffer(device.buffer_type(), n_bytes));
  ggml_backend_buffer_t buffer = out.buffers.back().get();
  if (buffer == nullptr) {
    return resource_exhausted(
        fmt::format("{}: device {} has no {} for the slots of streamed weights", file.path(),
                    device.name(), format_bytes(n_bytes)));
  }
  ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
  std::byte* base = aligned_base(buffer);
  const std::array<std::byte*, kSlots> slots = {base, base + w.slot_bytes[0]};
  if (as_image) {
    w.slots = slots;
    prefer_huge_pages({base, w.slot_bytes[0] + w.slot_bytes[1]});
  }
  for (size_t i = 0; i < w.units.size(); ++i) {
    HCACHE_RETURN_IF_ERROR(
        put_in_slot(file, device, buffer, slots.at(i % kSlots), as_image, w.units[i]));
  }
  return {};
}

// Copies every image to host memory that the device copies from fastest.
Status fill_host(const GgufFile& file, const Device& device, const Progress& progress,
                 StreamedLayers& out) {
  StreamedWeights& w = out.weights;
  const size_t n_bytes = w.n_bytes();
  out.buffers.emplace_back(device.alloc_host(n_bytes + kBlock));
  if (out.buffers.back() == nullptr) {
    return resource_exhausted(fmt::format(
        "{}: no {} of host memory for the weights that are not on the device; use --weights disk",
        file.path(), format_bytes(n_bytes)));
  }
  std::byte* at = aligned_base(out.buffers.back().get());
  size_t done = 0;
  for (StreamedUnit& unit : w.units) {
    unit.host = at;
    for (const WeightPiece& piece : unit.pieces) {
      const uint8_t* from = file.parts()[piece.file].bytes.data() + piece.file_offset;
      std::memcpy(at + piece.image_offset, from, piece.file_bytes);
      // The mapping's pages have served their purpose.
      madvise(const_cast<uint8_t*>(from), piece.file_bytes, MADV_COLD);
      done += piece.n_bytes;
      if (progress && !progress(static_cast<float>(done) / static_cast<float>(n_bytes))) {
        return cancelled(fmt::format("{}: loading was cancelled", file.path()));
      }
    }
    at += unit.n_bytes;
  }
  return {};
}

// Makes the tensors of a unit; its slot comes later.
void add_unit(const GgufFile& file, std::span<const StreamedSource> sources, StreamedLayers& out) {
  StreamedWeights& w = out.weights;
  UnitImage image = image_of(file, sources);
  for (size_t i = 0; i < sources.size(); ++i) {
    ggml_tensor* tensor = sources[i].create(out.contexts.back().get());
    *sources[i].target = tensor;
    image.unit.tensors.push_back(
        {tensor, image.offsets[i], sources[i].bytes.size(), sources[i].is_kv});
  }
  size_t& largest = w.image_bytes.at(w.units.size() % kSlots);
  largest = std::max(largest, image.n_bytes);
  w.units.push_back(std::move(image.unit));
}

}  // namespace

std::array<std::vector<StreamedSource>, 2> halves_of(std::span<const StreamedSource> layer) {
  std::array<std::vector<StreamedSource>, 2> halves;
  for (const StreamedSource& source : layer) {
    halves.at(source.is_feed_forward ? 1 : 0).push_back(source);
  }
  return halves;
}

UnitImage image_of(const GgufFile& file, std::span<const StreamedSource> sources) {
  UnitImage image;
  const std::vector<Range> runs = blocks_around(file, sources, false, kMaxGap);
  std::vector<size_t> run_offsets;  // in the image
  for (const Range& run : runs) {
    run_offsets.push_back(image.n_bytes);
    image.n_bytes += run.end - run.begin;
  }
  const auto place_of = [&](size_t part, uint64_t offset) -> size_t {
    const auto run = std::find_if(runs.begin(), runs.end(), [&](const Range& r) {
      return r.part == part && r.begin <= offset && offset < r.end;
    });
    return run_offsets[static_cast<size_t>(run - runs.begin())] + (offset - run->begin);
  };
  const auto add = [&](const std::vector<Range>& ranges) {
    uint64_t bytes = 0;
    for (const Range& range : ranges) {
      for (uint64_t at = range.begin; at < range.end; at += kPieceBytes) {
        const uint64_t n = std::min(kPieceBytes, range.end - at);
        const uint64_t in_file = std::min<uint64_t>(n, file.parts()[range.part].bytes.size() - at);
        image.unit.pieces.push_back({range.part, at, place_of(range.part, at), n, in_file});
        bytes += n;
      }
    }
    return bytes;
  };
  const std::vector<Range> kv = blocks_around(file, sources, true, 0);
  image.unit.kv_bytes = add(kv);
  image.unit.n_kv_pieces = image.unit.pieces.size();
  image.unit.n_bytes = image.unit.kv_bytes + add(outside(runs, kv));
  for (const StreamedSource& source : sources) {
    image.offsets.push_back(place_of(source.part, offset_in(file, source)));
  }
  return image;
}

Result<std::unique_ptr<StreamedLayers>> lay_out_streamed(const GgufFile& file, Device& device,
                                                         WeightPlace place, bool halves, Env& env,
                                                         std::span<const StreamedSource> sources,
                                                         const Progress& progress) {
  auto out = std::make_unique<StreamedLayers>();
  StreamedWeights& w = out->weights;
  w.place = place;
  w.env = &env;
  for (const GgufPart& part : file.parts()) w.files.push_back({part.path, part.identity});
  w.first_layer = sources.front().layer;
  w.halves = halves;
  out->contexts.emplace_back(ggml_init({ggml_tensor_overhead() * sources.size(), nullptr, true}));
  for (size_t begin = 0; begin < sources.size();) {
    size_t end = begin;
    while (end < sources.size() && sources[end].layer == sources[begin].layer) ++end;
    const auto of_layer = sources.subspan(begin, end - begin);
    if (halves) {
      for (const std::vector<StreamedSource>& half : halves_of(of_layer))
        add_unit(file, half, *out);
    } else {
      add_unit(file, of_layer, *out);
    }
    begin = end;
  }
  HCACHE_RETURN_IF_ERROR(make_slots(file, device, *out));
  if (place == WeightPlace::kHost) {
    HCACHE_RETURN_IF_ERROR(fill_host(file, device, progress, *out));
  }
  return out;
}

}  // namespace hcache::model
