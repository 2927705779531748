#!/bin/bash
# deps.sh [GROUP | PACKAGE...]: installs the Debian packages of a group, or those named, when running
# as root or where sudo asks for no password; otherwise prints the exact line to run and fails. Groups:
#   (none)        what building and testing need
#   build         what building the program needs
#   vulkan        what ggml's Vulkan backend needs beside that
#   vulkan-test   what testing it needs beside that
# The last two are empty on Debian 12, for which scripts/vulkan_sdk.py fetches newer ones. All output
# goes to stderr, so that callers may capture what a later step prints.
set -euo pipefail
exec 1>&2

build=(
  # tools
  build-essential cmake ninja-build ccache python3 python3-pip pkg-config
  # libraries; the build of tests is configured always
  libsqlite3-dev liburing-dev libnuma-dev libxxhash-dev libb2-dev nlohmann-json3-dev libcli11-dev
  libboost-dev prometheus-cpp-dev libspdlog-dev libfmt-dev libgtest-dev libgmock-dev libssl-dev
  libcurl4-openssl-dev libzstd-dev
)
# for x86-64 alone
[ "$(dpkg --print-architecture 2>/dev/null)" = amd64 ] && build+=(libipsec-mb-dev)
test=(
  # tools
  git python3-venv clang clang-format clang-tidy
  # libraries
  libbenchmark-dev
  # a server for the tests of the remote tier
  redis-server openssl
)
packages=("${build[@]}" "${test[@]}")
if [ "${1:-}" = build ]; then
  packages=("${build[@]}")
elif [[ ${1:-} == vulkan* ]]; then
  grep -qs '^VERSION_CODENAME=bookworm$' /etc/os-release && exit 0
  packages=(libvulkan-dev glslc spirv-headers)
  [ "$1" = vulkan ] || packages+=(mesa-vulkan-drivers)
elif [ $# -gt 0 ]; then
  packages=("$@")
fi

if ! command -v dpkg-query >/dev/null; then
  echo "deps: not a Debian system; make sure that the like of these is installed: ${packages[*]}"
  exit 0
fi

installed=$(dpkg-query -W -f '${db:Status-Status} ${Package}\n' | sed -n 's/^installed //p')
missing=()
for package in "${packages[@]}"; do
  grep -qxF "$package" <<<"$installed" || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

as_root=()
if [ "$(id -u)" -ne 0 ]; then
  if ! sudo -n true 2>/dev/null; then
    echo "deps: these packages are missing; run this line, then make again:"
    echo "  sudo apt-get update && sudo apt-get install -y --no-install-recommends ${missing[*]}"
    exit 1
  fi
  as_root=(sudo -n)
fi

echo "deps: installing ${missing[*]}"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
run() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive "$@" >>"$log" 2>&1 ||
    { tail -n 30 "$log"; echo "deps: '$*' failed"; exit 1; }
}
run apt-get update
run apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "${missing[@]}"
echo "deps: done"
