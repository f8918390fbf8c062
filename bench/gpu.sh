#!/usr/bin/env bash
# Everything that needs a GPU, in one call: tests, sanitizers, verification, benchmarks, hardware counters.
#
#   bench/gpu.sh [BUILD [RESULTS]]      BUILD: the build folder (build), with the CUDA backend in it
#                                       RESULTS: where the outputs go (bench/results)
#   STEPS="tests verify bench"          some of the steps: tests sanitizers verify bench ops counters
#
# Each step has its own file and its own time limit; a step that fails does not stop the next ones. Exit status: how many failed.
set -u
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
build=${1:-build} results=${2:-bench/results}
steps=${STEPS:-tests sanitizers verify bench ops counters}
model=gemma4-12b
mkdir -p "$results"
failed=0

# step NAME SECONDS FILE COMMAND...
step() {
  local name=$1 seconds=$2 file=$results/$3 status=0 begin=$SECONDS
  shift 3
  timeout "$seconds" "$@" > "$file" 2>&1 || status=$?
  [ $status = 0 ] || failed=$((failed + 1))
  printf '%-28s %4d s  exit %d  %s\n' "$name" $((SECONDS - begin)) $status "$(tail -n 1 "$file" | cut -c1-100)"
}
wants() { [[ " $steps " == *" $1 "* ]]; }

nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.max.sm,memory.total --format=csv | tee "$results/gpu.txt"

if wants tests; then
  step "op tests" 300 gpu-op-tests.txt "$build/cuda_test" --gtest_brief=1
  step "golden models" 120 gpu-golden.txt "$build/cuda_model_test" --gtest_brief=1
fi
if wants sanitizers; then
  # One case of each kernel family; the whole table takes hours under these tools.
  kernels='*CudaOps*Attention*E2B_*:*CudaOps*Sample*:*CudaOps*Step*greedy*:*CudaOps*Experts*:*CudaOps*37_x_288*'
  for tool in memcheck racecheck initcheck; do
    step "$tool" 300 "gpu-$tool.txt" compute-sanitizer --tool $tool --error-exitcode 1 --print-limit 20 \
      "$build/cuda_test" --gtest_filter="$kernels" --gtest_brief=1
  done
fi
if wants verify; then
  step "verify, bf16 cache" 300 gpu-verify.txt "$build/beryl" verify --device cuda
  step "verify, fp8 cache" 300 gpu-verify-fp8.txt "$build/beryl" verify --device cuda --cache fp8
fi
if wants bench; then
  step "decode" 200 h200-decode.json "$build/beryl" bench --synthetic $model --device cuda -p 0 -n 128 -d 0,4096,32768 -r 3 -o json
  step "decode, fp8 cache" 100 h200-decode-fp8.json "$build/beryl" bench --synthetic $model --device cuda --cache fp8 \
    -p 0 -n 128 -d 32768 -r 3 -o json
  step "decode, q4_0" 100 h200-decode-q4_0.json "$build/beryl" bench --synthetic $model --format q4_0 --head q8_0 --device cuda \
    -p 0 -n 128 -r 3 -o json
  step "decode, many streams" 100 h200-decode-streams.json "$build/beryl" bench --synthetic $model --device cuda -p 0 -n 64 \
    -b 4,16,64 -r 3 -o json
  step "allocation" 100 h200-decode-allocation.json "$build/beryl" bench --synthetic $model --device cuda -p 0 -n 64 -d 512 \
    --allocate 4096,16384,32768,131072 -r 3 -o json
  step "prefill" 100 h200-prefill.json "$build/beryl" bench --synthetic $model --device cuda -p 512,2048,8192 -n 0 -r 3 -o json
fi
if wants ops; then
  step "ops of a step" 60 h200-ops.md "$build/beryl" bench --synthetic $model --device cuda -d 4096 -r 5 --ops
  step "weight streams, checked" 120 h200-matvec-check.txt "$build/matvec_bench" check
  step "weight streams" 120 h200-matvec.txt "$build/matvec_bench" chain fp4_g128
fi
if wants counters; then
  step "hardware counters" 200 gpu-counters.txt ncu --clock-control none --set basic --launch-skip 400 --launch-count 12 \
    "$build/beryl" bench --synthetic $model --device cuda -p 0 -n 4 -r 1
fi
exit $failed
