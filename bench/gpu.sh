#!/usr/bin/env bash
# Everything that needs a GPU, in one call: tests, sanitizers, verification, benchmarks, hardware counters.
#
#   bench/gpu.sh [BUILD [RESULTS]]      BUILD: a folder with the built programs (build)
#                                       RESULTS: where the outputs go (bench/results)
#   bench/gpu.sh --pack BUILD FOLDER    copies programs and libraries into FOLDER, for a machine that cannot build: there
#                                       FOLDER is the BUILD of the first form, called from this source tree
#   STEPS="tests decode"                some of the steps: tests verify sanitizers decode prefill ops counters
#   MODEL=gemma4-12b REPETITIONS=3      what the benchmarks run, and how often
#
# Each step has its own file and its own time limit, 20 minutes in all; one that fails does not stop the next ones. At the end a
# table of the steps and the speeds. Exit status: how many steps failed.
set -u
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
programs="beryl cuda_test cuda_model_test batch_bench prefill_bench attention_bench"

if [ "${1:-}" = --pack ]; then
  build=${2:?the build folder} folder=${3:?the folder to fill}
  mkdir -p "$folder/lib"
  for program in $programs; do
    [ -e "$build/$program" ] || { echo "gpu.sh: $build/$program is not built" >&2; exit 1; }
    cp "$build/$program" "$folder/" && strip "$folder/$program"
  done
  # All but what every machine has, and the driver's own.
  ldd "$folder"/{beryl,cuda_test,cuda_model_test,batch_bench,prefill_bench,attention_bench} | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' | sort -u |
    grep -Ev '/(libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+|libcuda)\.so' | xargs -r cp -Lt "$folder/lib"
  du -sh "$folder"
  exit 0
fi

build=${1:-build} results=${2:-bench/results}
steps=${STEPS:-tests verify sanitizers decode prefill ops counters}
model=${MODEL:-gemma4-12b} repetitions=${REPETITIONS:-3}
export BERYL_SOURCE_DIR=$PWD
[ ! -d "$build/lib" ] || export LD_LIBRARY_PATH=$(cd "$build/lib" && pwd)${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
mkdir -p "$results" || exit 1
for program in $programs; do
  [ -x "$build/$program" ] || { echo "gpu.sh: $build/$program is not built" >&2; exit 1; }
done
failed=0

wants() { [[ " $steps " == *" $1 "* ]]; }
has() {
  command -v "$1" > /dev/null || { printf '%-34s %4s    not run: there is no %s\n' "$2" "" "$1"; return 1; }
}

# report NAME STATUS BEGIN WORDS: a line of the table.
report() {
  [ "$2" = 0 ] || failed=$((failed + 1))
  local how="exit $2"
  [ "$2" != 124 ] || how="TOOK TOO LONG"
  printf '%-34s %4d s  %s  %s\n' "$1" $((SECONDS - $3)) "$how" "$(cut -c1-100 <<< "$4")"
}

# step NAME SECONDS FILE COMMAND...: standard output into FILE, what goes wrong behind it (a file of results stays pure).
step() {
  local name=$1 seconds=$2 file=$results/$3 status=0 begin=$SECONDS errors
  shift 3
  errors=$(timeout -k 5 "$seconds" "$@" 2>&1 > "$file") || status=$?
  local last=$(tail -n 1 "$file")
  [[ "$last" != "{"* ]] || last="$(wc -l < "$file") results"
  report "$name" $status $begin "${errors:-$last}"
}

# sharded NAME SECONDS FILE SHARDS COMMAND...: a gtest program in so many processes at once.
sharded() {
  local name=$1 seconds=$2 file=$results/$3 n=$4 status=0 begin=$SECONDS shard pids=() pid part
  shift 4
  for ((shard = 0; shard < n; ++shard)); do
    GTEST_TOTAL_SHARDS=$n GTEST_SHARD_INDEX=$shard timeout -k 5 "$seconds" "$@" > "$file.$shard" 2>&1 &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do
    part=0
    wait "$pid" || part=$?
    [ $part = 0 ] || status=$part
  done
  cat "$file".[0-9]* > "$file"
  rm -f "$file".[0-9]*
  report "$name" $status $begin "$(grep -c '^\[       OK' "$file") passed, $(grep -c '^\[  FAILED  \].*ms)' "$file") failed,$(
    ) $(grep -c '^\[  SKIPPED \].*ms)' "$file") skipped; $(grep -m 1 -E '========= (Invalid|Uninit|Error|Warning|Race)|^beryl:' "$file")"
}

# "NVIDIA H200" is h200 in the names of its results.
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2> /dev/null | head -n 1 | sed 's/^NVIDIA //' | tr 'A-Z ' 'a-z-')
[ -n "$gpu" ] || { echo "gpu.sh: nvidia-smi finds no GPU" >&2; exit 1; }
nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.max.sm,memory.used,memory.total --format=csv | tee "$results/gpu.txt"

if wants tests; then
  sharded "op tests" 120 gpu-op-tests.txt 8 "$build/cuda_test"
  sharded "golden models" 60 gpu-golden.txt 4 "$build/cuda_model_test"
  # Once more with each op of a decode step in its own launch.
  sharded "steps, op by op" 60 gpu-single-ops.txt 8 env BERYL_WHOLE_STEPS=0 "$build/cuda_test" --gtest_filter='*Step_*'
  sharded "golden models, op by op" 60 gpu-golden-single-ops.txt 4 env BERYL_WHOLE_STEPS=0 "$build/cuda_model_test"
fi
if wants verify; then
  step "verify" 30 gpu-verify.txt "$build/beryl" verify --device cuda
fi
if wants sanitizers && has compute-sanitizer sanitizers; then
  # Of each kernel family some cases; the whole table takes hours under these tools. Formats: each, in every way to
  # multiply (one row with its norm, five rows, gate and up, a matrix product). Attention: all head sizes, one row and a chunk,
  # and with FP8 and F32 caches (CudaCacheOps).
  codecs='{fp4_g128,nvfp4,mxfp4,q4_0,q4_1,q5_0,q5_1,q8_0,q4_k,q5_k,q6_k,fp8,bf16,f16,f32}'
  cases() { local IFS=:; echo "$*"; }
  linear=$(eval "cases '*'/CudaOps*/Linear_${codecs}_{33_x_'*'_1_rows_norm_residual,257_x_'*'_5_rows,47_'*'_gated_gelu_'*',37_x_'*'_130_rows}")
  attention=$(cases '*/Attention_*_512_1' '*/Attention_*_58_13' '*/Attention_SmolLM2*_0_130' '*/Attention_Gemma_4_global_0_40_*' \
    '*/Attention_Gemma_4_sliding_window_128_*' '*/Attention_Gemma_3_27B_sliding_60_70' '*/Attention_Llama_1B_0_50_*' '*/Attention_*sliding_0_1_511_*')
  cache=$(cases '*/QkvFinish_*_63_3_0_5_127_1' '*/QkvFinish_Gemma_4_E2B_*sharing*' '*/CopyPages_*')
  rows=$(cases '*/AddNorm_*_640_*' '*/AddNorm_*_17_rows' '*/AddNorm_3840_*_1_rows' '*/Embed_*_640_scaled' '*/GatherRows_640*')
  choice=$(cases '*/Route_*' '*/Experts_*_rows' '*/Sample_greedy' '*/Sample_all_filters*' '*/Sample_mask' '*/Sample_penalties' \
    '*/Sample_greedy_ties' '*/Sample_bias*')
  whole=$(cases '*/Step_*')
  # These two see every access; racecheck looks at shared memory and is ten times slower, so it takes one case of each kernel.
  for tool in memcheck initcheck; do
    sharded "$tool" 100 "gpu-$tool.txt" 14 compute-sanitizer --tool $tool --error-exitcode 1 --print-limit 20 \
      "$build/cuda_test" --gtest_filter="$(cases "$linear" "$attention" "$cache" "$rows" "$choice" "$whole")-*_8500_1"
  done
  sharded racecheck 150 gpu-racecheck.txt 14 compute-sanitizer --tool racecheck --error-exitcode 1 --print-limit 20 \
    "$build/cuda_test" --gtest_filter="$(eval "cases '*'/CudaOps*/Linear_{fp4_g128,q4_0,q4_k,q6_k,fp8}_{33_x_'*'_1_rows_norm_residual,47_'*'_gated_gelu_'*'}" \
      ):$(cases '*/CudaOps*/Linear_fp4_g128_37_x_*_130_rows' '*/CudaOps*/Linear_bf16_257_x_*_5_rows' '*/Attention_Gemma_4_*_58_13' \
      '*/Attention_Llama_1B_512_1' '*/Attention_SmolLM2*_58_13' '*/CudaOps*/QkvFinish_Gemma_4_*_63_3_*' '*/AddNorm_640_norm_*' \
      '*/Experts_q4_0_q4_0_q8_0*' '*/Route_f32_2_of_8*' '*/Sample_greedy' '*/Sample_top_k' '*/CudaOps*/Step_greedy*' '*/Step_append_and_attend_Gemma_4_global_255_1' \
      '*/Step_append_and_attend_Gemma_4_31B_global_129_33_*')"
  # Whole models, and so what only a whole step runs.
  sharded "memcheck, whole models" 90 gpu-memcheck-models.txt 6 compute-sanitizer --tool memcheck --error-exitcode 1 --print-limit 20 \
    "$build/cuda_model_test" --gtest_filter='*Greedy*'
fi

# bench FILE SECONDS NAME OPTIONS...: decoding from random weights, results in llama-bench's fields, a line each.
bench() {
  local file=$1 seconds=$2 name=$3
  shift 3
  step "$name" "$seconds" "$file" "$build/beryl" bench --synthetic "$model" --device cuda -r "$repetitions" -o jsonl "$@"
}
# gather NAME FILES...: the lines of these as one JSON array.
gather() {
  local name=$1
  shift
  { echo '['; (cd "$results" && cat "$@") | sed '$!s/$/,/'; echo ']'; } > "$results/$name"
  (cd "$results" && rm -f "$@")
}
if wants decode; then
  bench decode.1 150 "decode, bf16 and fp8 cache" -p 0 -n 128 -d 0,4096,32768 --cache bf16,fp8
  bench decode.2 40 "decode, q4_0 with q8_0 head" -p 0 -n 128 -d 0 --format q4_0 --head q8_0
  bench decode.3 60 "decode, many streams" -p 0 -n 64 -d 0 -b 4,16,64
  bench decode.4 60 "decode, allocations" -p 0 -n 128 -d 512 --allocate 4096,16384,32768,131072
  gather "$gpu-decode.json" decode.1 decode.2 decode.3 decode.4
fi
if wants prefill; then
  bench prefill.1 70 prefill -p 512,2048,8192,32768 -n 0
  bench prefill.2 30 "prefill, fp8 cache" -p 8192 -n 0 --cache fp8
  bench prefill.3 30 "prefill, chunks of 512" -p 2048,8192 -n 0 --chunk 512
  gather "$gpu-prefill.json" prefill.1 prefill.2 prefill.3
fi
if wants ops; then
  step "ops of a step" 30 "$gpu-ops.md" "$build/beryl" bench --synthetic "$model" --device cuda -d 4096 -r 5 --ops
  step "products of many rows, checked" 40 "$gpu-batch-check.txt" "$build/batch_bench" check
  step "products of many rows" 40 "$gpu-batch.txt" "$build/batch_bench" chain fp4_g128
  step "products of prompts, checked" 30 "$gpu-prefill-check.txt" "$build/prefill_bench" check
  step "attention of prompts, checked" 30 "$gpu-prefill-attention-check.txt" "$build/attention_bench" check
  step "attention of prompts" 30 "$gpu-prefill-attention.txt" "$build/attention_bench" speed
  step "products of prompts" 40 "$gpu-prefill-products.txt" "$build/prefill_bench" speed fp4_g128 q4_0 q4_k q6_k q8_0 fp8 bf16
fi
if wants counters && has ncu "hardware counters"; then
  # The clocks stay as they are. A step as it runs; then o, gate|up and down of the last of 48 layers, the head, and qkv of the first layer in
  # launches of their own (of 241 a token; the profiler can not launch attention by itself).
  step "hardware counters" 40 gpu-counters.txt ncu --clock-control none --set basic -k regex:decode_kernel --launch-skip 12 --launch-count 1 \
    "$build/beryl" bench --synthetic "$model" --device cuda -p 0 -n 16 -r 1
  step "hardware counters, op by op" 60 gpu-counters-ops.txt env BERYL_WHOLE_STEPS=0 ncu --clock-control none --set basic -k regex:decode_kernel \
    --launch-skip 478 --launch-count 5 "$build/beryl" bench --synthetic "$model" --device cuda -p 0 -n 4 -r 1
fi

# The speeds, from fields that stand in a line of their own each.
for file in "$gpu-decode.json" "$gpu-prefill.json"; do
  [ -e "$results/$file" ] || continue
  awk 'function field(name) {
         if (!match($0, "\"" name "\":[^,}]*")) return "?"
         text = substr($0, RSTART + length(name) + 3, RLENGTH - length(name) - 3); gsub(/"/, "", text); return text
       }
       /avg_ts/ {
         printf "%-34s %-4s p%-5s n%-4s depth %-6s x%-3s of %-7s %9.2f t/s  sd %.2f\n", field("model_type"), field("type_k"),
                field("n_prompt"), field("n_gen"), field("n_depth"), field("n_streams"), field("n_allocated"), field("avg_ts"),
                field("stddev_ts")
       }' "$results/$file"
done
exit $failed
