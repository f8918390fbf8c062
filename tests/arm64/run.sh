#!/usr/bin/env bash
# Builds the CPU kernels' tests for 64-bit ARM in FOLDER and runs them under qemu. Ends with 77 and one line where the tools for
# that are not there.
#
#   tests/arm64/run.sh FOLDER
set -euo pipefail
folder=${1:?the folder to build in}
source=$(cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd)

skip() { echo "the tests for ARM are skipped: $*"; exit 77; }
compiler=$(command -v aarch64-linux-gnu-g++) || skip "no aarch64-linux-gnu-g++ (package g++-aarch64-linux-gnu)"
qemu=$(command -v qemu-aarch64-static || command -v qemu-aarch64) || skip "no qemu-aarch64-static (package qemu-user-static)"
[ -e /usr/src/googletest/googletest/src/gtest-all.cc ] || skip "no sources of GoogleTest in /usr/src/googletest (package googletest)"

launcher=()
if command -v ccache > /dev/null; then launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache); fi
mkdir -p "$folder"
cmake -S "$source" -B "$folder" -G Ninja -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  "-DCMAKE_CXX_COMPILER=$compiler" "${launcher[@]}" > "$folder/configure.log" 2>&1 || { cat "$folder/configure.log"; exit 1; }
ninja -C "$folder" -j2 > "$folder/build.log" 2>&1 || { cat "$folder/build.log"; exit 1; }
exec "$qemu" "$folder/cpu_arm64_test" --gtest_brief=1
