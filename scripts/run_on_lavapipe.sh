#!/bin/bash
# run_on_lavapipe.sh COMMAND...: runs a command where Vulkan's only device is Mesa's software one (lavapipe),
# fetched by scripts/third_party.py where the system's is not used; `vulkan:0` to the program.
set -euo pipefail
folder=$(cd "$(dirname "$0")" && pwd)
mapfile -t found < <("${PYTHON:-python3}" "$folder/third_party.py" lavapipe)
[ -n "${found[0]:-}" ] || exit 1  # what is missing was said above

export VK_DRIVER_FILES=${found[0]} VK_ICD_FILENAMES=${found[0]}
[ -n "${found[1]:-}" ] && export LD_LIBRARY_PATH=${found[1]}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
# ggml passes over devices of the type CPU that nobody asked for.
export GGML_VK_VISIBLE_DEVICES=0
# Half-precision arithmetic is emulated: slow, and LLVM takes minutes over such a shader.
export GGML_VK_DISABLE_F16=1
# LLVM is told to optimise little, once.
cache=${HCACHE_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/hcache}
export GALLIVM_PERF=nopt MESA_SHADER_CACHE_DIR=$cache/lavapipe-shaders
mkdir -p "$MESA_SHADER_CACHE_DIR"
# Tests leave out what does not depend on the device.
export HCACHE_TEST_IN_SOFTWARE=1
exec "$@"
