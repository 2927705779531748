#!/bin/bash
# Builds with CUDA or Vulkan and measures the bars of a GPU (fidelity, engine, capture, balance) on the
# Llama-2-7B shape: all 32 layers, F16, no throttle (host memory and disks as they are).
#
#   bench/gpu.sh                                      cuda:0; one JSON under bench/results/
#   PRESET=vulkan bench/gpu.sh                        vulkan:0
#   PRESET=release DEVICE=cpu bench/gpu.sh --quick    tries the script without a GPU
#   PRESET=vulkan scripts/run_on_lavapipe.sh bench/gpu.sh --quick    and without a CPU's shortcuts
#
# LAYERS and other options of bench/bars.py make it smaller: LAYERS=2 bench/gpu.sh --bars 1
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${PRESET:-cuda}
device=${DEVICE:-$preset:0}

scripts/build.sh "$preset" hcache
export HCACHE_CUDA_ARCHS=${HCACHE_CUDA_ARCHS:-90}  # of llama-bench too, which bar 2 builds
exec python3 bench/bars.py --gpu --program "build/$preset/bin/hcache" --device "$device" \
  ${LAYERS:+--layers "$LAYERS"} "$@"
