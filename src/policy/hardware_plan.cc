#include "policy/hardware_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace hcache::policy {

namespace {

constexpr int64_t kGiB = int64_t{1} << 30;

constexpr std::array kDevices = {
    DeviceSpec{"a100", "A100 40G", 312e12, 32e9, 40 * kGiB, 1555e9},
    DeviceSpec{"a100-80g", "A100 80G", 312e12, 32e9, 80 * kGiB, 2039e9},
    DeviceSpec{"a30", "A30", 165e12, 32e9, 24 * kGiB, 933e9},
    DeviceSpec{"rtx4090", "RTX 4090", 330e12, 32e9, 24 * kGiB, 1008e9},
    DeviceSpec{"l20", "L20", 120e12, 32e9, 48 * kGiB, 864e9},
    DeviceSpec{"h800", "H800", 990e12, 64e9, 80 * kGiB, 3350e9},
};

// Efficiencies: the first three are fitted so that the closed forms give the paper's Table 3 (with
// 4 SSDs; docs/planner.md shows the admissible intervals); 0.70 elsewhere is a guess from them.
constexpr std::array kModels = {
    //         name, title,  layers, embd, heads, kv, dim, ff, gated, efficiency, calibrated
    ModelShape{"llama2-7b", "Llama 2 7B", 32, 4096, 32, 32, 128, 11008, true, 0.65, true},
    ModelShape{"llama2-13b", "Llama 2 13B", 40, 5120, 40, 40, 128, 13824, true, 0.72, true},
    ModelShape{"opt-30b", "OPT 30B", 48, 7168, 56, 56, 128, 28672, false, 0.70, true},
    ModelShape{"llama-65b", "LLaMA 65B", 80, 8192, 64, 64, 128, 22016, true, 0.70, false},
    ModelShape{"llama2-70b", "Llama 2 70B", 80, 8192, 64, 8, 128, 28672, true, 0.70, false},
    ModelShape{"llama3-8b", "Llama 3 8B", 32, 4096, 32, 8, 128, 14336, true, 0.70, false},
    ModelShape{"mistral-7b", "Mistral 7B", 32, 4096, 32, 8, 128, 14336, true, 0.70, false},
    ModelShape{"qwen1.5-7b", "Qwen1.5 7B", 32, 4096, 32, 32, 128, 11008, true, 0.70, false},
    ModelShape{"qwen2.5-7b", "Qwen2.5 7B", 28, 3584, 28, 4, 128, 18944, true, 0.70, false},
    ModelShape{"qwen3-8b", "Qwen3 8B", 36, 4096, 32, 8, 128, 12288, true, 0.70, false},
    ModelShape{"falcon-7b", "Falcon 7B", 32, 4544, 71, 1, 64, 18176, false, 0.70, false},
    ModelShape{"falcon-40b", "Falcon 40B", 60, 8192, 128, 8, 64, 32768, false, 0.70, false},
    ModelShape{"opt-66b", "OPT 66B", 64, 9216, 72, 72, 128, 36864, false, 0.70, false},
    ModelShape{"opt-13b", "OPT 13B", 40, 5120, 40, 40, 128, 20480, false, 0.70, false},
    ModelShape{"opt-6.7b", "OPT 6.7B", 32, 4096, 32, 32, 128, 16384, false, 0.70, false},
    ModelShape{"smollm2-135m", "SmolLM2 135M", 30, 576, 9, 3, 64, 1536, true, 0.70, false},
};

template <typename Table>
auto find_by_name(const Table& table, std::string_view what, std::string_view name)
    -> Result<typename Table::value_type> {
  std::string known;
  for (const auto& row : table) {
    if (row.name == name) return row;
    known += known.empty() ? "" : ", ";
    known += row.name;
  }
  return not_found(fmt::format("unknown {} '{}' ({})", what, name, known));
}

// Floating-point operations of one token in one layer (a multiply-add counts as two, §3.2).
struct LayerFlops {
  double project;  // K and V from hidden states: 4 D^2 if multi-head
  double dense;    // the whole layer without attention over keys: 24 D^2 in the paper's shape
  double per_key;  // attention, per key seen: 2 D, so that N tokens take the paper's N^2 D
};

LayerFlops layer_flops(const ModelShape& m) {
  const double embd = m.n_embd;
  const double q = static_cast<double>(m.n_head) * m.head_dim;
  const double kv = static_cast<double>(m.n_head_kv) * m.head_dim;
  const double ffn = (m.gated_ffn ? 3.0 : 2.0) * embd * m.n_ff;
  return {4 * embd * kv, 2 * (2 * embd * q + 2 * embd * kv + ffn), 2 * q};
}

int64_t hidden_bytes(const HardwareSetup& s) {
  return std::llround(s.hidden_bytes_per_value * s.model.n_embd);
}
int64_t kv_bytes(const HardwareSetup& s) {
  return std::llround(s.kv_bytes_per_value * 2 * s.model.n_head_kv * s.model.head_dim);
}
double effective_flops(const HardwareSetup& s) {
  return s.device.flops * s.n_gpu * s.model.gemm_efficiency;
}
double effective_link(const HardwareSetup& s) {
  const double links = s.device.link_bytes_per_s * s.n_gpu;
  return s.n_ssd > 0 ? std::min(links, kSsdBytesPerS * s.n_ssd) : links;
}

Status check(const HardwareSetup& s) {
  if (s.n_gpu < 1 || s.n_ssd < 0 || s.history < 1 || s.new_tokens < 0) {
    return invalid_argument(
        fmt::format("hardware plan: {} GPUs, {} SSDs, history {}, new tokens {}", s.n_gpu, s.n_ssd,
                    s.history, s.new_tokens));
  }
  if (!(s.hidden_bytes_per_value > 0) || !(s.kv_bytes_per_value > 0) || !(s.device.flops > 0) ||
      !(s.device.link_bytes_per_s > 0) || !(s.model.gemm_efficiency > 0) || s.model.n_layer < 1) {
    return invalid_argument("hardware plan: rates, efficiency and layers must be positive");
  }
  return {};
}

PaperCosts paper_costs(const HardwareSetup& s) {
  const LayerFlops flops = layer_flops(s.model);
  const double n = static_cast<double>(s.history);
  PaperCosts c;
  c.io_hidden = n * static_cast<double>(hidden_bytes(s)) / effective_link(s);
  c.io_kv = n * static_cast<double>(kv_bytes(s)) / effective_link(s);
  c.c_hidden = n * flops.project / effective_flops(s);
  c.c_token = (n * flops.dense + n * n * flops.per_key / 2) / effective_flops(s);
  return c;
}

// Layers that `share` of n_layer stands for, rounded up as the paper does; exact multiples stay.
int32_t ceil_layers(double share, int32_t n_layer) {
  return std::clamp(static_cast<int32_t>(std::ceil(share - 1e-9)), 0, n_layer);
}

int64_t planned_bytes(const Plan& plan, const LayerCosts& layer) {
  if (plan.runs.empty()) return 0;
  int64_t bytes = 0;
  for (Method m : plan.runs.front().layers) {
    if (m == Method::kHidden) bytes += layer.hidden_bytes;
    if (m == Method::kKv) bytes += layer.kv_bytes;
  }
  return bytes;
}

}  // namespace

std::span<const DeviceSpec> device_table() { return kDevices; }
std::span<const ModelShape> model_table() { return kModels; }

Result<DeviceSpec> find_device(std::string_view name) {
  return find_by_name(kDevices, "hardware", name);
}
Result<ModelShape> find_model(std::string_view name) {
  return find_by_name(kModels, "model shape", name);
}

ClosedForm closed_form(const PaperCosts& c, int32_t n_layer) {
  ClosedForm form;
  const double n = n_layer;
  if (c.io_hidden >= c.io_kv) {
    const int32_t kv = ceil_layers(n * c.c_token / (c.c_token + c.io_kv), n_layer);
    form.kv = kv;
    form.recompute = n_layer - kv;
  } else if (c.c_hidden > c.io_hidden) {
    form.hidden = ceil_layers(n * c.io_kv / (c.io_kv + c.c_hidden - c.io_hidden), n_layer);
    form.kv = n_layer - form.hidden;
  } else {
    form.hidden = ceil_layers(n * c.c_token / (c.c_token + c.io_hidden - c.c_hidden), n_layer);
    form.recompute = n_layer - form.hidden;
  }
  form.makespan_s = std::max(form.hidden * c.c_hidden + form.recompute * c.c_token,
                             form.hidden * c.io_hidden + form.kv * c.io_kv);
  form.schedule = paper_schedule_string(form.hidden, form.kv, form.recompute);
  return form;
}

Result<RestoreCosts> hardware_costs(const HardwareSetup& setup) {
  HCACHE_RETURN_IF_ERROR(check(setup));
  const LayerFlops flops = layer_flops(setup.model);
  const double rate = effective_flops(setup);
  LayerCosts layer;
  layer.project = CostCurve::affine(0, flops.project / rate);
  layer.dense = CostCurve::affine(0, flops.dense / rate);
  layer.attn_per_key = CostCurve::affine(0, flops.per_key / rate);
  layer.hidden_bytes = hidden_bytes(setup);
  layer.kv_bytes = kv_bytes(setup);
  RestoreCosts costs;
  costs.n_layer = setup.model.n_layer;
  costs.layers = {layer};
  costs.link.bytes_per_s = effective_link(setup);
  return costs;
}

// A weight of two bytes is multiplied and added once per token.
double layer_weight_bytes(const ModelShape& model) {
  return layer_flops(model).dense * model.n_layer;
}

Result<HardwarePlan> plan_for_hardware(const HardwareSetup& setup) {
  HCACHE_ASSIGN_OR_RETURN(const RestoreCosts costs, hardware_costs(setup));
  const LayerCosts& layer = costs.layers[0];
  HardwarePlan plan;
  plan.layer = paper_costs(setup);
  plan.link_bytes_per_s = effective_link(setup);
  plan.flops = effective_flops(setup);
  if (layer.hidden_bytes < layer.kv_bytes) {
    plan.balanced_bytes_per_s =
        static_cast<double>(layer.hidden_bytes) * plan.flops / layer_flops(setup.model).project;
  }
  plan.paper = closed_form(plan.layer, costs.n_layer);
  plan.paper_bytes_per_token =
      plan.paper.hidden * layer.hidden_bytes + plan.paper.kv * layer.kv_bytes;
  plan.kv_bytes_per_token = costs.n_layer * layer.kv_bytes;

  RestoreRequest request;
  request.available = Availability::uniform(setup.history, costs.n_layer, kHasBoth);
  request.new_tokens = setup.new_tokens;
  HCACHE_ASSIGN_OR_RETURN(plan.exact, plan_restore(costs, request));
  plan.exact_bytes_per_token = planned_bytes(plan.exact, layer);
  for (Mode mode :
       {Mode::kHidden, Mode::kKv, Mode::kRecompute, Mode::kNaiveHybrid, Mode::kTokenPartition}) {
    request.mode = mode;
    HCACHE_ASSIGN_OR_RETURN(Plan baseline, plan_restore(costs, request));
    plan.modes.push_back({mode, std::move(baseline)});
  }
  return plan;
}

}  // namespace hcache::policy
