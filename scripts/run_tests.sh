#!/bin/bash
# run_tests.sh PRESET [ctest options]: runs a built preset's tests; failures show their output.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=$1
shift
# Tests ask for absurd amounts of memory: that must be refused, not end the process.
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_stack_use_after_return=1:strict_string_checks=1:allocator_may_return_null=1}
export LSAN_OPTIONS=${LSAN_OPTIONS:-suppressions=$PWD/tests/lsan.supp:print_suppressions=0}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
export TSAN_OPTIONS=${TSAN_OPTIONS:-halt_on_error=1:second_deadlock_stack=1:allocator_may_return_null=1:suppressions=$PWD/tests/tsan.supp:print_suppressions=0}
# Tests run beside each other: their threads are not to spin for a time slice at every barrier. The
# program sees to that itself (apps/hcache/main.cc).
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-5000}
ctest --test-dir "build/$preset" --output-on-failure --no-tests=error \
  --parallel "${JOBS:-$(nproc)}" "$@"
