#!/bin/bash
# demo.sh: the main job on a real model. One process reads demo/lighthouse.txt, talks about it and
# exits; another one, with nothing but the state folder, answers the next question by each method.
# HCACHE_MODEL names the model (make demo sets it), HCACHE_PROGRAM the program.
set -euo pipefail
cd "$(dirname "$0")/.."
program=${HCACHE_PROGRAM:-build/release/bin/hcache}
model=${HCACHE_MODEL:-$(make -s print-model)}
methods=(plan hidden kv recompute)
next="Who built the third tower on the Eddystone, and what was new about its stones?"

state=$(mktemp -d "${TMPDIR:-/tmp}/hcache-demo.XXXXXX")
trap 'rm -rf "$state"' EXIT

# The first message: the text and a request. The second one is a line on stdin.
{ cat demo/lighthouse.txt; echo; echo "Say in one sentence what this essay is about."; } \
  >"$state/first.txt"
second="What happened to Henry Winstanley?"
# Greedy, so that answers can be compared token by token. Each method must find what it wants to
# read, so everything is saved here; by default only what the plan will want is.
talk=(-m "$model" --temperature 0 --max-tokens 64 --json)

echo "process 1: reads $(wc -w <demo/lighthouse.txt) words, answers two questions, exits"
"$program" chat "${talk[@]}" --state-dir "$state" --save all --session demo \
  -f "$state/first.txt" <<<"$second" >"$state/first.json"

echo "for comparison: the same conversation and the next question, never interrupted"
"$program" chat "${talk[@]}" --state-dir "$state" --no-store \
  -f "$state/first.txt" <<<"$second"$'\n'"$next" >"$state/uninterrupted.json"

for method in "${methods[@]}"; do
  echo "process 2: the next question, restored by method '$method'"
  "$program" run "${talk[@]}" --state-dir "$state" --session demo --no-save \
    --restore-method "$method" -p "$next" >"$state/$method.json"
done

echo
python3 scripts/demo_table.py "$state/first.json" "$state/uninterrupted.json" \
  "${methods[@]/#/$state/}"
