#!/bin/bash
# build.sh [--configure] PRESET [TARGET...]: configures one preset of CMakePresets.json and builds it,
# or only the targets named, or with --configure nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
only_configure=
if [ "$1" = --configure ]; then
  only_configure=1
  shift
fi
preset=$1
shift
mkdir -p build
log=build/configure-$preset.log

# A flag of make wins over the preset: HCACHE_CUDA_ARCHS, HCACHE_LLAMA_PREFIX, HCACHE_LLAMA_SOURCE.
flags=()
for name in HCACHE_CUDA_ARCHS HCACHE_LLAMA_PREFIX HCACHE_LLAMA_SOURCE; do
  [ -n "${!name:-}" ] && flags+=("-D$name=${!name}")
done

[ -n "${HCACHE_INSTALL_PREFIX:-}" ] && flags+=("-DCMAKE_INSTALL_PREFIX=$HCACHE_INSTALL_PREFIX")

# Errors, warnings and the progress of the library's build come on stderr; the rest is for the log.
if ! cmake --preset "$preset" "${flags[@]}" >"$log"; then
  echo "configuring failed; the rest of the output is in $log" >&2
  exit 1
fi
[ -z "$only_configure" ] || exit 0
if [ $# -eq 0 ]; then
  cmake --build --preset "$preset"
else
  cmake --build --preset "$preset" --target "$@"
fi
echo "built: build/$preset"
