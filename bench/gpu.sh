#!/bin/bash
# Builds with CUDA and measures the bars of a GPU (fidelity, engine, capture, balance) on the
# Llama-2-7B shape: all 32 layers, F16, no throttle (host memory and disks as they are).
#
#   bench/gpu.sh                                      cuda:0; one JSON under bench/results/
#   PRESET=release DEVICE=cpu bench/gpu.sh --quick    tries the script without a GPU
#
# LAYERS and other options of bench/bars.py make it smaller: LAYERS=2 bench/gpu.sh --bars 1
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${PRESET:-cuda}
device=${DEVICE:-cuda:0}

scripts/build.sh "$preset" hcache
peer=(scripts/third_party.py peer)
if [[ $preset == cuda ]]; then
  peer+=(--cuda "${HCACHE_CUDA_ARCHS:-90}")
  export HCACHE_CUDA_ARCHS=${HCACHE_CUDA_ARCHS:-90}
fi
python3 "${peer[@]}"  # llama-bench of the same build
exec python3 bench/bars.py --gpu --program "build/$preset/bin/hcache" --device "$device" \
  ${LAYERS:+--layers "$LAYERS"} "$@"
