// Logits to ids on the device: the algorithm of ops/sample.h, row by row.
//
//   prepare   a block a chunk of 2,048 ids: bias, mask, penalties; the largest value of the chunk and of each group
//   weigh     a block a chunk: sums of exp((v - v_max) / temperature)         only when some row draws
//   select    a block a row: the choice
//   logprobs  a block a row                                                   only when some row wants them
//
// Where no row draws or wants them, the block that is last done with a row's preparing makes the choice, and what the next step
// starts from (Advance): one launch between two steps.
//
// The k best of a row are found through its groups: the k-th largest of the groups' largest values is a bound below
// which no value matters, so only the groups that reach it are read again. Where too many values tie at the bound, and
// for a nucleus larger than kNucleusTry, a radix search over the whole row finds the exact cut.
//
// Every sum has an order that depends on the row alone, or is one of integers. Sums run in another order than in
// ops/sample.h (chunks first): both are double, so they differ by some 1e-16 of their size.
#include "base/rng.h"
#include "cuda/device.cuh"
#include "cuda/index_math.h"
#include "cuda/kernels.h"
#include "cuda/next_step.cuh"
#include "ops/sample.h"

namespace beryl::cuda {

namespace {

constexpr int kPrepareThreads = kSampleChunk / kIdsPerThread;
constexpr int kSelectThreads = 1024;
constexpr int kMaxCandidates = 8192;      // collected through the groups
constexpr int kMaxSorted = 1024;          // top-k up to this size is sorted; more takes the radix search
constexpr int kNucleusTry = 256;
constexpr int kMaxTiles = kMaxVocab / kSelectThreads;
constexpr double kFixedOne = 1099511627776.0;   // 2^40: weights as integers, for sums in any order

// A number that orders as the float does, -0 as +0.
__device__ __forceinline__ uint32_t order_key(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float key_value(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}
// Ascending candidates: the larger value first, then the lower id.
__device__ __forceinline__ uint64_t candidate(float value, int32_t id) {
  return uint64_t{~order_key(value)} << 32 | static_cast<uint32_t>(id);
}
__device__ __forceinline__ float candidate_value(uint64_t candidate) { return key_value(~static_cast<uint32_t>(candidate >> 32)); }
__device__ __forceinline__ int32_t candidate_id(uint64_t candidate) { return static_cast<int32_t>(candidate); }

struct Best {
  float value;
  int32_t id;
};
__device__ __forceinline__ Best better(Best a, Best b) {
  return b.value > a.value || (b.value == a.value && b.id < a.id) ? b : a;
}
__device__ __forceinline__ Best warp_best(Best best) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    best = better(best, {__shfl_xor_sync(kAllLanes, best.value, offset), __shfl_xor_sync(kAllLanes, best.id, offset)});
  return best;
}
__device__ __forceinline__ double warp_sum(double value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}
// Every thread gets the sum of the block; scratch: [32].
__device__ double block_sum(double value, double* scratch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_warps = blockDim.x / 32;
  value = warp_sum(value);
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  value = warp_sum(lane < n_warps ? scratch[lane] : 0.0);
  __syncthreads();
  return value;
}
// Sum of the values of all threads up to and including this one; total: of all.
template <class T>
__device__ T block_scan(T value, T* scratch, T& total) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_warps = blockDim.x / 32;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const T below = __shfl_up_sync(kAllLanes, value, offset);
    if (lane >= offset) value += below;
  }
  if (lane == 31) scratch[warp] = value;
  __syncthreads();
  T before = 0;
  total = 0;
  for (int w = 0; w < n_warps; ++w) {
    if (w == warp) before = total;
    total += scratch[w];
  }
  __syncthreads();
  return before + value;
}

__device__ __forceinline__ double token_weight(float value, float largest, float temperature) {
  return exp((static_cast<double>(value) - static_cast<double>(largest)) / static_cast<double>(temperature));
}

// ---- prepare ----

__device__ __forceinline__ void prepare(const SampleArgs& args, int64_t row, int64_t chunk) {
  __shared__ Best bests[kPrepareThreads / 32];
  __shared__ float raw_largest[kPrepareThreads / 32];
  __shared__ double raw_sums[32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t n_chunks = sample_chunks(args.vocab);
  const int64_t first = chunk * kSampleChunk + threadIdx.x * kIdsPerThread;
  const DeviceSampling params = args.sampling[row];
  const float* logits = args.logits.values + row * args.logits.stride;
  float raw[kIdsPerThread], value[kIdsPerThread];
  bool invalid = false;
#pragma unroll
  for (int i = 0; i < kIdsPerThread; ++i) {
    raw[i] = first + i < args.vocab ? logits[first + i] : -INFINITY;
    invalid = invalid || isnan(raw[i]) || raw[i] == INFINITY;
    value[i] = raw[i];
  }
  if (params.bias_end > params.bias_begin) {
    int low = params.bias_begin, high = params.bias_end;
    while (low < high) {              // the first entry of this thread's ids
      const int middle = (low + high) / 2;
      if (args.bias_ids[middle] < first) low = middle + 1;
      else high = middle;
    }
    for (; low < params.bias_end && args.bias_ids[low] < first + kIdsPerThread; ++low)
#pragma unroll
      for (int i = 0; i < kIdsPerThread; ++i)
        if (args.bias_ids[low] == first + i) value[i] += args.bias_values[low];
  }
  const int32_t sequence = args.sequences[args.output_rows[row]];
#pragma unroll
  for (int i = 0; i < kIdsPerThread; ++i) {
    const int64_t id = first + i;
    if (id >= args.vocab) continue;
    if (params.mask >= 0 && (args.masks[params.mask * args.mask_words + id / 32] >> (id % 32) & 1u) == 0)
      value[i] = -INFINITY;
    if (params.uses_history != 0) {
      const uint32_t history = args.history[sequence * args.vocab + id];
      if (history != 0) {
        const float count = static_cast<float>(history & ~kInPrompt);
        value[i] = value[i] > 0 ? __fdiv_rn(value[i], params.repetition_penalty) : __fmul_rn(value[i], params.repetition_penalty);
        if (count > 0)
          value[i] = __fsub_rn(value[i], __fadd_rn(params.presence_penalty, __fmul_rn(params.frequency_penalty, count)));
      }
    }
    if (params.temperature > 0) args.values[row * args.vocab + id] = value[i];
  }

  Best best = {-INFINITY, INT32_MAX};
  float group_raw = -INFINITY;
#pragma unroll
  for (int i = 0; i < kIdsPerThread; ++i) {
    if (first + i < args.vocab) best = better(best, {value[i], static_cast<int32_t>(first + i)});
    group_raw = fmaxf(group_raw, raw[i]);
  }
  const int group_ids = sample_group_ids(args.vocab), group_lanes = group_ids / kIdsPerThread;
  float group_value = best.value;
  for (int offset = 1; offset < group_lanes; offset *= 2) {
    group_value = fmaxf(group_value, __shfl_xor_sync(kAllLanes, group_value, offset));
    group_raw = fmaxf(group_raw, __shfl_xor_sync(kAllLanes, group_raw, offset));
  }
  if (lane % group_lanes == 0 && first < args.vocab) {
    args.group_max[row * kMaxSampleGroups + first / group_ids] = group_value;
    args.raw_group_max[row * kMaxSampleGroups + first / group_ids] = group_raw;
  }
  best = warp_best(best);
  if (lane == 0) bests[warp] = best;
  const bool any_invalid = __syncthreads_or(invalid);
  if (threadIdx.x == 0) {
    for (int w = 1; w < kPrepareThreads / 32; ++w) best = better(best, bests[w]);
    args.chunk_max[row * n_chunks + chunk] = best.value;
    args.chunk_best[row * n_chunks + chunk] = best.id;
    args.chunk_invalid[row * n_chunks + chunk] = any_invalid ? 1 : 0;
  }
  if (params.n_logprobs >= 0) {
    group_raw = lane_max(group_raw);
    if (lane == 0) raw_largest[warp] = group_raw;
    __syncthreads();
    for (int w = 0; w < kPrepareThreads / 32; ++w) group_raw = fmaxf(group_raw, raw_largest[w]);
    double sum = 0;
#pragma unroll
    for (int i = 0; i < kIdsPerThread; ++i)
      if (raw[i] > -INFINITY) sum += exp(static_cast<double>(raw[i]) - static_cast<double>(group_raw));
    sum = block_sum(sum, raw_sums);
    if (threadIdx.x == 0) {
      args.chunk_raw_max[row * n_chunks + chunk] = group_raw;
      args.chunk_raw_sum[row * n_chunks + chunk] = sum;
    }
  }
}

__global__ void __launch_bounds__(kPrepareThreads) prepare_kernel(SampleArgs args) {
  grid_wait();
  prepare(args, blockIdx.y, blockIdx.x);
}

// The largest value of a row and the first id that has it; every thread of the block gets it.
__device__ Best row_best(const SampleArgs& args, int64_t row, int64_t n_chunks, Best* scratch) {
  Best best = {-INFINITY, INT32_MAX};
  for (int64_t i = threadIdx.x; i < n_chunks; i += blockDim.x)
    best = better(best, {args.chunk_max[row * n_chunks + i], args.chunk_best[row * n_chunks + i]});
  best = warp_best(best);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = best;
  __syncthreads();
  for (unsigned w = 0; w < blockDim.x / 32; ++w) best = better(best, scratch[w]);
  __syncthreads();
  return best;
}

// What a row comes to without drawing: no valid id, or its best one. Every thread of the block gets it.
__device__ Best row_choice(const SampleArgs& args, int64_t row, Best* scratch, bool& valid) {
  const int64_t n_chunks = sample_chunks(args.vocab);
  int invalid = 0;
  for (int64_t i = threadIdx.x; i < n_chunks; i += blockDim.x) invalid |= args.chunk_invalid[row * n_chunks + i];
  invalid = __syncthreads_or(invalid);
  const Best best = row_best(args, row, n_chunks, scratch);
  valid = invalid == 0 && best.value > -INFINITY;
  return best;
}
// By one thread.
__device__ __forceinline__ void put_sampled(const SampleArgs& args, int64_t row, bool valid, int32_t id) {
  args.sampled[row] = {valid ? id : -1, valid ? 1 : 0, 0.0f, 0};
  if (valid && args.sampling[row].uses_history != 0) ++args.history[args.sequences[args.output_rows[row]] * args.vocab + id];
}

// ---- prepare, select and Advance, where nobody draws ----

struct ChooseArgs {
  SampleArgs sample;
  AdvanceArgs advance;
};
// Blocks of a row: one a chunk, then one a rope.
__global__ void __launch_bounds__(kPrepareThreads) choose_kernel(ChooseArgs both) {
  __shared__ Best bests[32];
  grid_wait();
  const SampleArgs& args = both.sample;
  const AdvanceArgs& advance = both.advance;
  const int64_t row = blockIdx.y, n_chunks = sample_chunks(args.vocab);
  if (blockIdx.x < n_chunks) prepare(args, row, blockIdx.x);
  else turn_rope(advance.ropes, static_cast<int>(blockIdx.x - n_chunks), row, advance.positions[row] + 1);
  // The position is read by all before it changes, and all chunks are there for the last block.
  bool last = false;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(&args.finished[row], 1u) + 1 == gridDim.x;
    __threadfence();
  }
  if (!__syncthreads_or(last)) return;
  bool valid;
  const Best best = row_choice(args, row, bests, valid);
  if (threadIdx.x != 0) return;
  args.finished[row] = 0;
  put_sampled(args, row, valid, best.id);
  advance_row(advance, row, valid, best.id);
}

// ---- weigh ----

__global__ void __launch_bounds__(kPrepareThreads) weigh_kernel(SampleArgs args) {
  __shared__ Best bests[32];
  __shared__ double sums[32];
  grid_wait();
  const int64_t row = blockIdx.y, n_chunks = gridDim.x, chunk = blockIdx.x;
  const DeviceSampling params = args.sampling[row];
  if (!(params.temperature > 0)) return;
  const float largest = row_best(args, row, n_chunks, bests).value;
  const int64_t first = chunk * kSampleChunk + threadIdx.x * kIdsPerThread;
  double kept = 0, above = 0;
#pragma unroll
  for (int i = 0; i < kIdsPerThread; ++i) {
    if (first + i >= args.vocab) continue;
    const float value = args.values[row * args.vocab + first + i];
    if (value == -INFINITY) continue;
    const double weight = token_weight(value, largest, params.temperature);
    kept += weight;
    if (weight >= static_cast<double>(params.min_p)) above += weight;
  }
  kept = block_sum(kept, sums);
  above = block_sum(above, sums);
  if (threadIdx.x == 0) {
    args.chunk_kept_weight[row * n_chunks + chunk] = kept;
    args.chunk_weight[row * n_chunks + chunk] = above;
  }
}

// ---- select ----

struct SelectShared {
  uint64_t candidates[kMaxCandidates];
  double weights[kMaxSorted];
  double doubles[kMaxTiles];
  double scan_doubles[32];
  int scan_ints[32];
  unsigned long long masses[256];
  int counts[256];
  Best bests[32];
  int n_candidates;
  uint32_t prefix;
  unsigned long long wanted;
  int32_t chosen;
};

// The bin, from the highest, in which the running sum reaches `wanted`, and the sum above it. Warp 0 calls it.
template <class T>
__device__ void find_bin(const T* bins, unsigned long long wanted, int& bin, unsigned long long& above) {
  const int lane = threadIdx.x % 32;
  unsigned long long mine = 0;
  for (int i = 0; i < 8; ++i) mine += bins[255 - lane * 8 - i];
  unsigned long long upto = mine;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const unsigned long long below = __shfl_up_sync(kAllLanes, upto, offset);
    if (lane >= offset) upto += below;
  }
  const unsigned reached = __ballot_sync(kAllLanes, upto >= wanted);
  const int owner = reached == 0 ? 31 : __ffs(static_cast<int>(reached)) - 1;
  unsigned long long running = upto - mine;
  int found = 255 - lane * 8 - 7;
  for (int i = 0; i < 8; ++i) {
    const unsigned long long next = running + bins[255 - lane * 8 - i];
    if (next >= wanted) {
      found = 255 - lane * 8 - i;
      break;
    }
    if (i < 7) running = next;
  }
  bin = __shfl_sync(kAllLanes, found, owner);
  above = __shfl_sync(kAllLanes, running, owner);
}

// The key of the k-th largest of n keys, and how many of the keys equal to it belong to the k. Banned keys (those of
// -infinity) never count; when fewer than k others exist the key is that of -infinity and `ties` is 0.
struct Cut {
  uint32_t key;
  unsigned long long ties;
};
template <class Key>
__device__ Cut kth_largest(Key key_of, int64_t n, unsigned long long k, SelectShared& shared) {
  const uint32_t banned = order_key(-INFINITY);
  uint32_t prefix = 0, mask = 0;
  unsigned long long wanted = k;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < 256; i += blockDim.x) shared.counts[i] = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
      const uint32_t key = key_of(i);
      if ((key & mask) == prefix) atomicAdd(&shared.counts[key >> shift & 255u], 1);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      int bin;
      unsigned long long above;
      find_bin(shared.counts, wanted, bin, above);
      if (threadIdx.x == 0) {
        shared.prefix = prefix | static_cast<uint32_t>(bin) << shift;
        shared.wanted = wanted - above;
      }
    }
    __syncthreads();
    prefix = shared.prefix;
    wanted = shared.wanted;
    mask |= 255u << shift;
    __syncthreads();
  }
  if (prefix <= banned) return {banned, 0};
  return {prefix, wanted};
}

// Likewise by weight: the key at which the running sum of fixed-point weights, from the largest value down, reaches
// `wanted`, among keys not below `floor_key`; and how many of the equal keys are needed for it.
template <class Key, class Weight>
__device__ Cut weight_cut(Key key_of, Weight weight_of, int64_t n, uint32_t floor_key, unsigned long long wanted,
                          SelectShared& shared) {
  uint32_t prefix = 0, mask = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < 256; i += blockDim.x) shared.masses[i] = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
      const uint32_t key = key_of(i);
      if (key >= floor_key && (key & mask) == prefix) atomicAdd(&shared.masses[key >> shift & 255u], weight_of(key));
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      int bin;
      unsigned long long above;
      find_bin(shared.masses, wanted, bin, above);
      if (threadIdx.x == 0) {
        shared.prefix = prefix | static_cast<uint32_t>(bin) << shift;
        shared.wanted = wanted > above ? wanted - above : 0;
      }
    }
    __syncthreads();
    prefix = shared.prefix;
    wanted = shared.wanted;
    mask |= 255u << shift;
    __syncthreads();
  }
  const unsigned long long one = weight_of(prefix);
  const unsigned long long ties = one == 0 ? ~0ull : (wanted + one - 1) / one;
  return {prefix, ties == 0 ? 1 : ties};
}

// Sorts the first n candidates ascending; the array is filled up with the largest number to a power of two.
__device__ void sort_candidates(uint64_t* candidates, int n) {
  int size = 1;
  while (size < n) size *= 2;
  for (int i = n + static_cast<int>(threadIdx.x); i < size; i += blockDim.x) candidates[i] = ~uint64_t{0};
  __syncthreads();
  for (int length = 2; length <= size; length *= 2)
    for (int stride = length / 2; stride > 0; stride /= 2) {
      for (int i = threadIdx.x; i < size / 2; i += blockDim.x) {
        const int low = 2 * stride * (i / stride) + i % stride, high = low + stride;
        const bool ascending = (low & length) == 0;
        const uint64_t a = candidates[low], b = candidates[high];
        if ((a > b) == ascending) {
          candidates[low] = b;
          candidates[high] = a;
        }
      }
      __syncthreads();
    }
}

// The k best of a row, sorted, in shared.candidates; returns how many there are. k <= kMaxSorted. Tokens at -infinity
// are left out when `drop_banned`.
__device__ int best_candidates(const float* values, int64_t vocab, const float* group_max, int k, bool drop_banned,
                               SelectShared& shared) {
  const int group_ids = sample_group_ids(vocab), n_groups = static_cast<int>((vocab + group_ids - 1) / group_ids);
  float bound = -INFINITY;
  if (n_groups > k && vocab > kMaxCandidates) {
    const Cut cut = kth_largest([&](int64_t i) { return order_key(group_max[i]); }, n_groups,
                                static_cast<unsigned long long>(k), shared);
    bound = key_value(cut.key);
  }
  if (threadIdx.x == 0) shared.n_candidates = 0;
  __syncthreads();
  const auto wanted = [&](float value) { return value >= bound && (!drop_banned || value > -INFINITY); };
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int group = warp; group < n_groups; group += static_cast<int>(blockDim.x) / 32) {
    if (!wanted(group_max[group])) continue;
    for (int i = lane; i < group_ids; i += 32) {
      const int64_t id = int64_t{group} * group_ids + i;
      if (id >= vocab || !wanted(values[id])) continue;
      const int at = atomicAdd(&shared.n_candidates, 1);
      if (at < kMaxCandidates) shared.candidates[at] = candidate(values[id], static_cast<int32_t>(id));
    }
  }
  __syncthreads();
  int n = shared.n_candidates;
  __syncthreads();
  if (n > kMaxCandidates) {
    // Too many at the bound: the exact cut, with ties taken by ascending id.
    const Cut cut =
        kth_largest([&](int64_t i) { return order_key(values[i]); }, vocab, static_cast<unsigned long long>(k), shared);
    const uint32_t banned = order_key(-INFINITY);
    unsigned long long ties = cut.ties;
    if (threadIdx.x == 0) shared.n_candidates = 0;
    __syncthreads();
    for (int64_t id = threadIdx.x; id < vocab; id += blockDim.x)
      if (order_key(values[id]) > cut.key)
        shared.candidates[atomicAdd(&shared.n_candidates, 1)] = candidate(values[id], static_cast<int32_t>(id));
    __syncthreads();
    if (cut.key == banned && !drop_banned) ties = static_cast<unsigned long long>(k - shared.n_candidates);
    const int above = shared.n_candidates;
    int taken = 0;
    for (int64_t first = 0; first < vocab && taken < static_cast<int>(ties); first += blockDim.x) {
      const int64_t id = first + threadIdx.x;
      const int tie = id < vocab && order_key(values[id]) == cut.key ? 1 : 0;
      int total;
      const int rank = taken + block_scan(tie, shared.scan_ints, total);
      if (tie != 0 && rank <= static_cast<int>(ties))
        shared.candidates[above + rank - 1] = candidate(values[id], static_cast<int32_t>(id));
      taken += total;
    }
    __syncthreads();
    n = above + min(taken, static_cast<int>(ties));
  }
  sort_candidates(shared.candidates, n);
  return min(n, k);
}

// Draws among all ids that `kept` admits (called for each id in ascending order, tile by tile, by all threads).
template <class Kept>
__device__ void draw_from_tiles(int64_t vocab, double unit, Kept kept_weight, SelectShared& shared) {
  const int n_tiles = static_cast<int>((vocab + kSelectThreads - 1) / kSelectThreads);
  int ties = 0, last_tile = 0;
  for (int tile = 0; tile < n_tiles; ++tile) {
    const double sum = block_sum(kept_weight(int64_t{tile} * kSelectThreads + threadIdx.x, ties), shared.scan_doubles);
    if (threadIdx.x == 0) shared.doubles[tile] = sum;
    if (sum > 0) last_tile = tile;
  }
  __syncthreads();
  double total = 0;
  for (int tile = 0; tile < n_tiles; ++tile) total += shared.doubles[tile];
  const double target = unit * total;
  double before = 0;
  int found = 0;
  for (; found < last_tile && before + shared.doubles[found] <= target; ++found) before += shared.doubles[found];
  // The tile once more, with the ties of the tiles before it counted again.
  ties = 0;
  double weight = 0;
  for (int tile = 0; tile <= found; ++tile) weight = kept_weight(int64_t{tile} * kSelectThreads + threadIdx.x, ties);
  double sum;
  const double upto = before + block_scan(weight, shared.scan_doubles, sum);
  const int32_t id = static_cast<int32_t>(int64_t{found} * kSelectThreads + threadIdx.x);
  if (threadIdx.x == 0) shared.chosen = INT32_MAX;
  __syncthreads();
  if (weight > 0 && upto > target) atomicMin(&shared.chosen, id);
  __syncthreads();
  if (shared.chosen == INT32_MAX) {     // rounding: the last kept id
    __syncthreads();
    if (threadIdx.x == 0) shared.chosen = -1;
    __syncthreads();
    if (weight > 0) atomicMax(&shared.chosen, id);
  }
  __syncthreads();
}

// Draws among the first n sorted candidates, whose weights are in shared.weights, by ascending id.
__device__ void draw_from_candidates(int n, double unit, SelectShared& shared) {
  for (int i = threadIdx.x; i < n; i += blockDim.x)
    shared.candidates[i] = uint64_t{static_cast<uint32_t>(candidate_id(shared.candidates[i]))} << 32 | static_cast<uint32_t>(i);
  sort_candidates(shared.candidates, n);
  if (threadIdx.x == 0) {
    double total = 0;
    for (int i = 0; i < n; ++i) total += shared.weights[static_cast<uint32_t>(shared.candidates[i])];
    const double target = unit * total;
    double running = 0;
    int chosen = n - 1;
    for (int i = 0; i < n; ++i) {
      running += shared.weights[static_cast<uint32_t>(shared.candidates[i])];
      if (running > target) {
        chosen = i;
        break;
      }
    }
    shared.chosen = static_cast<int32_t>(shared.candidates[chosen] >> 32);
  }
  __syncthreads();
}

__device__ void draw(const SampleArgs& args, const DeviceSampling& params, int64_t row, int64_t n_chunks, float largest,
                     SelectShared& shared) {
  const float* values = args.values + row * args.vocab;
  const float* group_max = args.group_max + row * kMaxSampleGroups;
  const double unit = static_cast<double>(philox(params.seed, params.draw).x[0]) * 0x1p-32;
  const double top_p = params.top_p, min_p = params.min_p;
  const bool has_top_k = params.top_k > 0 && params.top_k < args.vocab;

  if (!has_top_k && params.top_p >= 1) {
    // Kept is a matter of each token alone: the chunks' sums find the chunk, then only that one is read.
    const double* sums = args.chunk_weight + row * n_chunks;
    double total = 0;
    int64_t last = 0;
    for (int64_t i = 0; i < n_chunks; ++i) {
      total += sums[i];
      if (sums[i] > 0) last = i;
    }
    const double target = unit * total;
    double before = 0;
    int64_t found = 0;
    for (; found < last && before + sums[found] <= target; ++found) before += sums[found];
    if (threadIdx.x == 0) shared.chosen = INT32_MAX;
    __syncthreads();
    int32_t last_kept = -1;
    for (int part = 0; part < kSampleChunk / kSelectThreads; ++part) {
      const int64_t id = found * kSampleChunk + part * kSelectThreads + threadIdx.x;
      double weight = 0;
      if (id < args.vocab && values[id] > -INFINITY) weight = token_weight(values[id], largest, params.temperature);
      if (weight < min_p) weight = 0;
      if (weight > 0) last_kept = static_cast<int32_t>(id);
      double sum;
      const double upto = before + block_scan(weight, shared.scan_doubles, sum);
      if (weight > 0 && upto > target) atomicMin(&shared.chosen, static_cast<int32_t>(id));
      before += sum;
    }
    __syncthreads();
    const bool missed = shared.chosen == INT32_MAX;
    __syncthreads();
    if (missed) {
      if (threadIdx.x == 0) shared.chosen = -1;
      __syncthreads();
      atomicMax(&shared.chosen, last_kept);
    }
    __syncthreads();
    return;
  }

  if (!has_top_k || params.top_k <= kMaxSorted) {
    const int k = has_top_k ? params.top_k : kNucleusTry;
    int n = best_candidates(values, args.vocab, group_max, k, true, shared);
    for (int i = threadIdx.x; i < n; i += blockDim.x)
      shared.weights[i] = token_weight(candidate_value(shared.candidates[i]), largest, params.temperature);
    __syncthreads();
    if (threadIdx.x == 0) {
      // How many of the sorted ones stay; -1: the nucleus is larger than what was sorted.
      int kept = n;
      if (top_p < 1) {
        double total = 0;
        if (has_top_k)
          for (int i = 0; i < n; ++i) total += shared.weights[i];
        else
          for (int64_t i = 0; i < n_chunks; ++i) total += args.chunk_kept_weight[row * n_chunks + i];
        double running = 0;
        kept = 0;
        while (kept < n && (kept == 0 || running < top_p * total)) running += shared.weights[kept++];
        if (kept == n && running < top_p * total && !has_top_k && n == kNucleusTry) kept = -1;
      }
      while (kept > 1 && shared.weights[kept - 1] < min_p) --kept;
      shared.n_candidates = kept;
    }
    __syncthreads();
    n = shared.n_candidates;
    __syncthreads();
    if (n > 0) {
      draw_from_candidates(n, unit, shared);
      return;
    }
  }

  // The general case, by radix searches over the whole row.
  const auto key_of = [&](int64_t i) { return order_key(values[i]); };
  const auto fixed_weight = [&](uint32_t key) {
    return static_cast<unsigned long long>(token_weight(key_value(key), largest, params.temperature) * kFixedOne + 0.5);
  };
  const uint32_t banned = order_key(-INFINITY);
  Cut cut = {banned, 0};
  if (has_top_k) cut = kth_largest(key_of, args.vocab, static_cast<unsigned long long>(params.top_k), shared);
  if (top_p < 1) {
    unsigned long long mine = 0;
    for (int64_t i = threadIdx.x; i < args.vocab; i += blockDim.x)
      if (key_of(i) > cut.key) mine += fixed_weight(key_of(i));
    if (threadIdx.x == 0) shared.masses[0] = 0;
    __syncthreads();
    atomicAdd(&shared.masses[0], mine);
    __syncthreads();
    unsigned long long total = shared.masses[0];
    __syncthreads();
    if (cut.key != banned) total += cut.ties * fixed_weight(cut.key);
    const auto wanted = static_cast<unsigned long long>(ceil(top_p * static_cast<double>(total)));
    const uint32_t floor_key = cut.key == banned ? banned + 1 : cut.key;
    const Cut nucleus = weight_cut(key_of, fixed_weight, args.vocab, floor_key, wanted, shared);
    if (nucleus.key > cut.key || nucleus.ties < cut.ties) cut = nucleus;
  }
  draw_from_tiles(
      args.vocab, unit,
      [&](int64_t id, int& ties) {
        const uint32_t key = id < args.vocab ? key_of(id) : 0;
        int total;
        const int tie = id < args.vocab && key == cut.key && cut.key != banned ? 1 : 0;
        const int rank = ties + block_scan(tie, shared.scan_ints, total);
        ties += total;
        if (id >= args.vocab || key < cut.key || key <= banned) return 0.0;
        if (tie != 0 && static_cast<unsigned long long>(rank) > cut.ties) return 0.0;
        const double weight = token_weight(key_value(key), largest, params.temperature);
        return weight < min_p ? 0.0 : weight;
      },
      shared);
}

__global__ void __launch_bounds__(kSelectThreads) select_kernel(SampleArgs args) {
  extern __shared__ __align__(16) uint8_t raw_shared[];
  SelectShared& shared = *reinterpret_cast<SelectShared*>(raw_shared);
  grid_wait();
  const int64_t row = blockIdx.x, n_chunks = sample_chunks(args.vocab);
  const DeviceSampling params = args.sampling[row];
  bool valid;
  const Best best = row_choice(args, row, shared.bests, valid);
  int32_t id = best.id;
  if (valid && params.temperature > 0) {
    draw(args, params, row, n_chunks, best.value, shared);
    id = shared.chosen;
  }
  if (threadIdx.x == 0) put_sampled(args, row, valid, id);
}

// ---- logprobs ----

__global__ void __launch_bounds__(kSelectThreads) logprobs_kernel(SampleArgs args) {
  extern __shared__ __align__(16) uint8_t raw_shared[];
  SelectShared& shared = *reinterpret_cast<SelectShared*>(raw_shared);
  grid_wait();
  const int64_t row = blockIdx.x, n_chunks = sample_chunks(args.vocab);
  const DeviceSampling params = args.sampling[row];
  if (params.n_logprobs < 0 || args.sampled[row].valid == 0) return;
  const float* logits = args.logits.values + row * args.logits.stride;
  const float* largest = args.chunk_raw_max + row * n_chunks;
  const double* sums = args.chunk_raw_sum + row * n_chunks;
  double top = -INFINITY, sum = 0;
  for (int64_t i = 0; i < n_chunks; ++i) top = fmax(top, static_cast<double>(largest[i]));
  for (int64_t i = 0; i < n_chunks; ++i)
    if (sums[i] > 0) sum += sums[i] * exp(static_cast<double>(largest[i]) - top);
  const double log_sum = top + log(sum);
  int n = min(params.n_logprobs, kMaxLogprobs);
  if (n > 0) n = best_candidates(logits, args.vocab, args.raw_group_max + row * kMaxSampleGroups, n, false, shared);
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    const int32_t id = candidate_id(shared.candidates[i]);
    args.top_ids[row * kMaxLogprobs + i] = id;
    args.top_logprobs[row * kMaxLogprobs + i] = static_cast<float>(static_cast<double>(logits[id]) - log_sum);
  }
  if (threadIdx.x == 0) {
    args.sampled[row].logprob = static_cast<float>(static_cast<double>(logits[args.sampled[row].id]) - log_sum);
    args.sampled[row].n_top = n;
  }
}

}  // namespace

void launch_sample(const LaunchContext& context, const SampleArgs& args, int64_t n_outputs, SampleFeatures features) {
  const auto rows = static_cast<unsigned>(n_outputs), chunks = static_cast<unsigned>(sample_chunks(args.vocab));
  launch(context, {.grid = {chunks, rows}, .block = kPrepareThreads, .name = "Sample, preparing"}, prepare_kernel, args);
  if (features.draws)
    launch(context, {.grid = {chunks, rows}, .block = kPrepareThreads, .name = "Sample, weighing"}, weigh_kernel, args);
  const LaunchShape shape = {
      .grid = rows, .block = kSelectThreads, .shared_bytes = static_cast<int>(sizeof(SelectShared)), .name = "Sample"};
  launch(context, shape, select_kernel, args);
  if (features.logprobs) launch(context, shape, logprobs_kernel, args);
}

void launch_sample_and_advance(const LaunchContext& context, const SampleArgs& args, const AdvanceArgs& advance) {
  const auto blocks = static_cast<unsigned>(sample_chunks(args.vocab) + advance.ropes.n_ropes);
  launch(context, {.grid = {blocks, static_cast<unsigned>(advance.n_outputs)}, .block = kPrepareThreads, .name = "Sample and Advance"},
         choose_kernel, ChooseArgs{args, advance});
}

}  // namespace beryl::cuda
