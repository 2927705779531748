// Cost curves and the formulas built on them (HCache §3.2).
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "pipeline.h"
#include "policy/restore_plan.h"

namespace hcache::policy {

CostCurve CostCurve::affine(double base_s, double per_row_s) {
  CostCurve curve;
  curve.base_s_ = base_s;
  curve.per_row_s_ = per_row_s;
  return curve;
}

Result<CostCurve> CostCurve::table(std::vector<Point> points) {
  if (points.empty()) return invalid_argument("cost curve: no points");
  int64_t last_rows = 0;
  for (const Point& p : points) {
    if (p.rows <= last_rows) {
      return invalid_argument(
          fmt::format("cost curve: rows must rise from 1, got {} after {}", p.rows, last_rows));
    }
    if (!std::isfinite(p.seconds) || p.seconds < 0) {
      return invalid_argument(fmt::format("cost curve: {} s at {} rows", p.seconds, p.rows));
    }
    last_rows = p.rows;
  }
  CostCurve curve;
  if (points.size() == 1) {
    curve.per_row_s_ = points[0].seconds / static_cast<double>(points[0].rows);
  } else {
    curve.points_ = std::move(points);
  }
  return curve;
}

double CostCurve::at(int64_t rows) const {
  if (rows <= 0) return 0;
  if (points_.empty()) return std::max(0.0, base_s_ + per_row_s_ * static_cast<double>(rows));
  auto right = std::lower_bound(points_.begin() + 1, points_.end() - 1, rows,
                                [](const Point& p, int64_t r) { return p.rows < r; });
  const Point& a = *(right - 1);
  const Point& b = *right;
  double slope = (b.seconds - a.seconds) / static_cast<double>(b.rows - a.rows);
  return std::max(0.0, a.seconds + slope * static_cast<double>(rows - a.rows));
}

CostCurve CostCurve::scaled(double factor) const {
  CostCurve curve = *this;
  for (Point& p : curve.points_) p.seconds *= factor;
  curve.base_s_ *= factor;
  curve.per_row_s_ *= factor;
  return curve;
}

CostCurve CostCurve::with_row_s(double seconds) const {
  CostCurve curve = *this;
  for (Point& p : curve.points_) p.seconds += seconds * static_cast<double>(p.rows);
  curve.per_row_s_ += seconds;
  return curve;
}

namespace {

Status check_curve(const CostCurve& curve, const char* name) {
  if (!std::isfinite(curve.base_s()) || !std::isfinite(curve.per_row_s()) || curve.base_s() < 0 ||
      curve.per_row_s() < 0) {
    return invalid_argument(fmt::format("costs: {} is negative or not finite", name));
  }
  return {};
}

Status check_time(double seconds, const char* name) {
  if (!std::isfinite(seconds) || seconds < 0) {
    return invalid_argument(fmt::format("costs: {} is {}", name, seconds));
  }
  return {};
}

}  // namespace

Status validate(const RestoreCosts& costs) {
  if (costs.n_layer < 1) return invalid_argument(fmt::format("costs: {} layers", costs.n_layer));
  if (costs.layers.size() != 1 && costs.layers.size() != static_cast<size_t>(costs.n_layer)) {
    return invalid_argument(fmt::format("costs: {} entries for {} layers (1 or all are needed)",
                                        costs.layers.size(), costs.n_layer));
  }
  for (const LayerCosts& layer : costs.layers) {
    HCACHE_RETURN_IF_ERROR(check_curve(layer.project, "project"));
    HCACHE_RETURN_IF_ERROR(check_curve(layer.load_kv, "load_kv"));
    HCACHE_RETURN_IF_ERROR(check_curve(layer.dense, "dense"));
    HCACHE_RETURN_IF_ERROR(check_curve(layer.attn_per_key, "attn_per_key"));
    if (layer.hidden_bytes < 0 || layer.kv_bytes < 0) {
      return invalid_argument("costs: negative bytes per token");
    }
    HCACHE_RETURN_IF_ERROR(check_time(layer.upload_bytes_per_s, "upload_bytes_per_s"));
  }
  if (!costs.device_layers.empty()) {
    int64_t layers = 0;
    for (const int32_t n : costs.device_layers) {
      if (n < 1) return invalid_argument(fmt::format("costs: a device of {} layers", n));
      layers += n;
    }
    if (layers != costs.n_layer) {
      return invalid_argument(
          fmt::format("costs: devices of {} layers, a model of {}", layers, costs.n_layer));
    }
  }
  const LinkCosts& link = costs.link;
  if (!(link.bytes_per_s > 0)) {
    return invalid_argument(fmt::format("costs: link of {} bytes/s", link.bytes_per_s));
  }
  HCACHE_RETURN_IF_ERROR(check_time(link.request_s, "request_s"));
  HCACHE_RETURN_IF_ERROR(check_time(link.start_s, "start_s"));
  HCACHE_RETURN_IF_ERROR(check_time(link.upload_bytes_per_s, "upload_bytes_per_s"));
  HCACHE_RETURN_IF_ERROR(check_time(costs.finish_s, "finish_s"));
  if (link.request_bytes < 1) return invalid_argument("costs: request_bytes must be positive");
  if (costs.slice_rows < 1) return invalid_argument("costs: slice_rows must be positive");
  if (costs.batch_rows < 1) return invalid_argument("costs: batch_rows must be positive");
  if (costs.ring_bytes < 0) return invalid_argument("costs: ring_bytes is negative");
  if (!(costs.compute_share > 0 && costs.compute_share <= 1)) {
    return invalid_argument(fmt::format("costs: compute_share is {}", costs.compute_share));
  }
  return {};
}

Status validate(const RestoreRequest& request, int32_t n_layer) {
  if (request.new_tokens < 0) {
    return invalid_argument(fmt::format("restore: {} new tokens", request.new_tokens));
  }
  if (request.token_rounding < 1) {
    return invalid_argument(fmt::format("restore: token rounding {}", request.token_rounding));
  }
  for (size_t k = 0; k < request.available.runs.size(); ++k) {
    const AvailableRun& run = request.available.runs[k];
    if (run.tokens < 1) {
      return invalid_argument(fmt::format("availability: run {} has {} tokens", k, run.tokens));
    }
    if (run.layers.size() != static_cast<size_t>(n_layer)) {
      return invalid_argument(
          fmt::format("availability: run {} has {} of {} layers", k, run.layers.size(), n_layer));
    }
    if (!run.slowness.empty() && run.slowness.size() != run.layers.size()) {
      return invalid_argument(fmt::format("availability: run {} has the speed of {} of {} layers",
                                          k, run.slowness.size(), n_layer));
    }
    for (const double slowness : run.slowness) {
      if (!(slowness >= 0) || !std::isfinite(slowness)) {
        return invalid_argument(fmt::format("availability: slowness {}", slowness));
      }
    }
    for (Encoding e : run.layers) {
      if (e > kNotNeeded) return invalid_argument(fmt::format("availability: bits {:#x}", e));
    }
  }
  return {};
}

double prefill_layer_s(const LayerCosts& layer, int64_t rows, int64_t history, int64_t batch_rows) {
  if (rows <= 0) return 0;
  int64_t full = rows / batch_rows;
  int64_t rest = rows % batch_rows;
  double seconds = 0;
  if (full > 0) {
    // Batch i stands behind history + i * batch_rows keys and sees (batch_rows + 1) / 2 of its own.
    double n = static_cast<double>(full);
    double b = static_cast<double>(batch_rows);
    double keys = n * (static_cast<double>(history) + (b + 1) / 2) + b * n * (n - 1) / 2;
    seconds += n * layer.dense.at(batch_rows) + layer.attn_per_key.at(batch_rows) * keys;
  }
  if (rest > 0) {
    double keys =
        static_cast<double>(history + full * batch_rows) + (static_cast<double>(rest) + 1) / 2;
    seconds += layer.dense.at(rest) + layer.attn_per_key.at(rest) * keys;
  }
  return seconds;
}

double sliced_s(const CostCurve& curve, int64_t rows, int64_t slice_rows) {
  if (rows <= 0) return 0;
  const int64_t full = rows / slice_rows;
  return static_cast<double>(full) * curve.at(slice_rows) + curve.at(rows % slice_rows);
}

double link_s(const LinkCosts& link, int64_t bytes) {
  if (bytes <= 0) return 0;
  double b = static_cast<double>(bytes);
  int64_t requests = (bytes + link.request_bytes - 1) / link.request_bytes;
  double read = b / link.bytes_per_s + link.request_s * static_cast<double>(requests);
  return link.upload_bytes_per_s > 0 ? std::max(read, b / link.upload_bytes_per_s) : read;
}

}  // namespace hcache::policy
