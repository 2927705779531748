#!/bin/bash
# Builds with CUDA or Vulkan and measures the bars of a GPU (fidelity, engine, capture, balance) on the
# Llama-2-7B shape: all 32 layers, F16, no throttle (host memory and disks as they are). With --batch first:
# a batch on the shape of Llama's 30B model in Q8_0 with 24 GiB of the device's memory, the rest of the weights
# in host memory, against llama-server with what fits of the layers there and K and V on either side.
#
#   bench/gpu.sh                                      cuda:0; one JSON under bench/results/
#   bench/gpu.sh --batch --json FILE                  the batch (host memory: 80 GiB and more)
#   PRESET=vulkan bench/gpu.sh                        vulkan:0
#   PRESET=release DEVICE=cpu bench/gpu.sh --quick    tries the script without a GPU
#   PRESET=release DEVICE=cpu bench/gpu.sh --batch --quick --weights disk
#   PRESET=vulkan scripts/run_on_lavapipe.sh bench/gpu.sh --quick    and without a CPU's shortcuts
#
# PROGRAM names a program that was built elsewhere, and HCACHE_PEER_DIR the folder of llama.cpp's llama-bench
# and llama-server: then nothing is built here. LAYERS and the options of bench/bars.py and
# bench/batch_bar.py want less of the device:
#
#   LAYERS=2 bench/gpu.sh --bars 1
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${PRESET:-cuda}
device=${DEVICE:-$preset:0}

program=${PROGRAM:-build/$preset/bin/hcache}
[ -n "${PROGRAM:-}" ] || scripts/build.sh "$preset" hcache
export HCACHE_CUDA_ARCHS=${HCACHE_CUDA_ARCHS:-90}  # of llama.cpp's programs too
common=(--program "$program" --device "$device" ${LAYERS:+--layers "$LAYERS"})
if [ "${1:-}" != --batch ]; then
  exec python3 bench/bars.py --gpu "${common[@]}" "$@"
fi
shift
case " $* " in
  *" --quick "*) shape=() ;;
  *) shape=(--shape llama-30b --layers 0 --type q8_0) ;;
esac
exec python3 bench/batch_bar.py --weights host --device-memory 24GiB --cache-memory 32GiB --buffer 8192 \
  --step-tokens 8192 --graph-tokens 512 --peer-slots 64,32 --peer-options "--load-mode none -b 4096 -ub 2048" \
  "${shape[@]}" "${common[@]}" "$@"
