#!/bin/bash
# tidy.sh BUILD_DIR [file...]: clang-tidy over the sources (all that the build compiles by default).
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1
shift
files=("$@")
if [ ${#files[@]} -eq 0 ]; then
  mapfile -t files < <(python3 -c '
import json, sys
root, database = sys.argv[1:]
for entry in json.load(open(database)):
    if entry["file"].startswith(root) and "/build/" not in entry["file"]:
        print(entry["file"])' "$PWD" "$build/compile_commands.json" | sort -u)
fi
total=${#files[@]}
printf '%s\0' "${files[@]}" |
  xargs -0 -n 1 -P "${JOBS:-$(nproc)}" sh -c '
    echo "tidy: $1" &&
    clang-tidy --quiet --extra-arg=-Wno-unknown-warning-option -p "$0" "$1" 2>/dev/null' "$build"
echo "tidy: ok ($total files)"
