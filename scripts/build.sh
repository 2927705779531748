#!/bin/bash
# build.sh PRESET: configures and builds one preset of CMakePresets.json.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=$1
mkdir -p build
log=build/configure-$preset.log

# A flag of make wins over the preset: HCACHE_CUDA_ARCHS, HCACHE_LLAMA_PREFIX, HCACHE_LLAMA_SOURCE.
flags=()
for name in HCACHE_CUDA_ARCHS HCACHE_LLAMA_PREFIX HCACHE_LLAMA_SOURCE; do
  [ -n "${!name:-}" ] && flags+=("-D$name=${!name}")
done

# Errors, warnings and the progress of the library's build come on stderr; the rest is for the log.
if ! cmake --preset "$preset" "${flags[@]}" >"$log"; then
  echo "configuring failed; the rest of the output is in $log" >&2
  exit 1
fi
cmake --build --preset "$preset"
echo "built: build/$preset"
