// y = epilogue(W · norm(x)) for few rows of x, one block a multiprocessor, 16 warps a block.
//
//   weights   units of stages of tiles (matvec_layout.h): the block's units are one stream, read once, copied stage by stage into
//             a ring in shared memory; the ring is filled before the wait for the previous kernel, because weights depend on
//             nothing. Blocks take half a multiprocessor's shared memory where that is enough, and let the next kernel start at
//             once: so its ring fills while this one computes, and memory does not idle between kernels.
//   x         [n_rows][cols] f32 or bf16: normed and cut into digits (codec.cuh) once a block, kept in shared memory
//   y         [n_rows][outputs] f32 or bf16
//
// Warp (k, r) multiplies the column tiles k, k + k_warps, ... of its row tile r of each unit. Its sums of a unit go to shared memory
// as partial sums; after a batch of units the block adds those of the k_warps warps, in order, and stores y. So every sum has one
// order, whatever the number of rows, the chunks of x and the speed of warps, and there are no atomics.
//
// Moves the packed bytes of W. x and y stay in the L2.
#pragma once

#include <cstdint>

#include "cuda/async.cuh"
#include "cuda/codec.cuh"
#include "cuda/device.cuh"
#include "cuda/matvec.h"

namespace beryl::cuda {

inline constexpr int kMatvecThreads = kMatvecWarps * 32;

// The plan and the launch in the form that the kernel wants.
struct MatvecKernelArgs {
  MatvecArgs op;
  const float* row_scales;          // [n_row_tiles · 16], null: 1
  int64_t unit_bytes;
  int64_t outputs;
  int cols;
  int n_units;
  int n_stages;
  int stage_bytes;
  int last_stage_bytes;
  int n_column_tiles;
  int k_warps;
  int row_warps;
  int ring_stages;
  int chunk_stages;
  int n_chunks;
  int batch_units;
  int x_bytes;
  int scale_bytes;
  int partial_bytes;
  bool gated;
};

struct MatvecShared {               // behind the ring, x, its scales and the partial sums
  float4 sums[kMatvecMaxRows][kMatvecWarps];
  alignas(8) uint64_t full[kMatvecMaxStages];
  uint64_t empty[kMatvecMaxStages];
};
static_assert(sizeof(MatvecShared) <= 2560);

// Activations come from other multiprocessors: past the L1, which is not coherent.
__device__ __forceinline__ float4 load_row4(const MatvecRows& rows, int row, int col) {
  if (rows.is_bf16) {
    uint2 bits;
    asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];"
                 : "=r"(bits.x), "=r"(bits.y)
                 : "l"(static_cast<const uint16_t*>(rows.data) + row * rows.stride + col)
                 : "memory");
    return make_float4(bf16_at(bits.x, 0), bf16_at(bits.x, 1), bf16_at(bits.y, 0), bf16_at(bits.y, 1));
  }
  float4 value;
  asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "l"(static_cast<const float*>(rows.data) + row * rows.stride + col)
               : "memory");
  return value;
}
__device__ __forceinline__ float load_row(const MatvecRows& rows, int row, int64_t col) {
  if (rows.is_bf16) return __bfloat162float(static_cast<const __nv_bfloat16*>(rows.data)[row * rows.stride + col]);
  return __ldcg(static_cast<const float*>(rows.data) + row * rows.stride + col);
}
__device__ __forceinline__ void store_row(const MatvecRows& rows, int row, int64_t col, float value) {
  if (rows.is_bf16) {
    static_cast<__nv_bfloat16*>(const_cast<void*>(rows.data))[row * rows.stride + col] = __float2bfloat16_rn(value);
  } else {
    static_cast<float*>(const_cast<void*>(rows.data))[row * rows.stride + col] = value;
  }
}

__device__ __forceinline__ float4 load_weight4(const float* weight, int col) {
  return weight ? __ldg(reinterpret_cast<const float4*>(weight + col)) : make_float4(1, 1, 1, 1);
}
__device__ __forceinline__ float4 times(float4 a, float4 b) {
  return make_float4(__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y), __fmul_rn(a.z, b.z), __fmul_rn(a.w, b.w));
}
__device__ __forceinline__ float4 times(float4 a, float b) { return times(a, make_float4(b, b, b, b)); }
__device__ __forceinline__ float4 fused(float4 a, float b, float4 c) {
  return make_float4(__fmaf_rn(a.x, b, c.x), __fmaf_rn(a.y, b, c.y), __fmaf_rn(a.z, b, c.z), __fmaf_rn(a.w, b, c.w));
}
__device__ __forceinline__ float dot(float4 a, float4 b, float sum) {
  return __fmaf_rn(a.w, b.w, __fmaf_rn(a.z, b.z, __fmaf_rn(a.y, b.y, __fmaf_rn(a.x, b.x, sum))));
}

// What the rows of x need from sums over whole rows: t = add · add_weight; |add|², t·x, t·t, x·x.
__device__ __forceinline__ void add_sums(const MatvecArgs& op, float4 x, float4 add, float4 t, float4& sums) {
  sums.w = dot(x, x, sums.w);
  if (!op.add.data) return;
  sums.x = dot(add, add, sums.x);
  sums.y = dot(t, x, sums.y);
  sums.z = dot(t, t, sums.z);
}
// The factors that follow: x' = (x + add_factor · t) · add_scale; h = x' · norm_factor · norm_weight.
struct RowFactors {
  float add;
  float norm;
};
__device__ __forceinline__ RowFactors row_factors(const MatvecArgs& op, float4 sums, int cols) {
  const float columns = static_cast<float>(cols);
  RowFactors factors = {0.0f, 1.0f};
  float squares = sums.w;
  if (op.add.data) {
    factors.add = __frsqrt_rn(__fadd_rn(__fdiv_rn(sums.x, columns), op.add_eps));
    squares = __fmaf_rn(__fmul_rn(factors.add, factors.add), sums.z, __fmaf_rn(__fmul_rn(2.0f, factors.add), sums.y, sums.w));
    squares = __fmul_rn(fmaxf(squares, 0.0f), __fmul_rn(op.add_scale, op.add_scale));
  }
  if (op.has_norm) factors.norm = __frsqrt_rn(__fadd_rn(__fdiv_rn(squares, columns), op.norm_eps));
  return factors;
}

// A warp writes one row's group of 128 columns in the digits that the codec wants; a lane has 4 neighbouring columns.
template <class Codec>
__device__ __forceinline__ void write_group(float4 v, int lane, unsigned char* codes, float* scale, float* sums) {
  const float largest = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
  const bool is_nan = v.x != v.x || v.y != v.y || v.z != v.z || v.w != v.w;
  // As bits, so that a NaN anywhere is the largest and makes every result a NaN.
  const uint32_t bits = __reduce_max_sync(kAllLanes, is_nan ? 0x7fffffffu : __float_as_uint(largest));
  if constexpr (Codec::kX == XForm::kInt16) {
    const float range = __uint_as_float(bits);
    const float inverse = range > 0x1p-110f ? __fdiv_rn(32512.0f, range) : 0.0f;   // 127 · 256
    const int q0 = __float2int_rn(__fmul_rn(v.x, inverse)), q1 = __float2int_rn(__fmul_rn(v.y, inverse));
    const int q2 = __float2int_rn(__fmul_rn(v.z, inverse)), q3 = __float2int_rn(__fmul_rn(v.w, inverse));
    const int step = lane / 8, half = lane / 4 % 2, t = lane % 4, word = step * 2 + half;
    unsigned char* to = codes + word / 4 * 128 + t * 16 + word % 4 * 4;
    *reinterpret_cast<uint32_t*>(to) =
        byte_permute(byte_permute(q0 + 128, q1 + 128, 0x0051), byte_permute(q2 + 128, q3 + 128, 0x0051), 0x5410);
    *reinterpret_cast<uint32_t*>(to + 64) = byte_permute(byte_permute(q0, q1, 0x0040), byte_permute(q2, q3, 0x0040), 0x5410);
    int sum = q0 + q1 + q2 + q3;
    sum += __shfl_xor_sync(kAllLanes, sum, 1);
    sum += __shfl_xor_sync(kAllLanes, sum, 2);
    sum += __shfl_xor_sync(kAllLanes, sum, 4);
    if (lane % 8 == 0) sums[lane / 8] = __int2float_rn(sum) * (1.0f / Codec::kXScale);
    if (lane == 0) *scale = __fmul_rn(__fmul_rn(range, 1.0f / 32512.0f), Codec::kXScale);
  } else {
    float inverse = 1.0f, group_scale = 1.0f;
    if (Codec::kX == XForm::kF16 && bits >= 0x00800000u) {
      const uint32_t exponent = bits & 0x7f800000u;          // the largest becomes 1 to 2
      group_scale = __uint_as_float(exponent);
      inverse = exponent < 0x7f000000u ? __uint_as_float(0x7f000000u - exponent) : 0x1p-127f;
      if (exponent == 0x7f800000u) group_scale = __uint_as_float(0x7fc00000u);
    }
    const float values[4] = {__fmul_rn(v.x, inverse), __fmul_rn(v.y, inverse), __fmul_rn(v.z, inverse), __fmul_rn(v.w, inverse)};
    uint32_t high[2], low[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float a = values[2 * i], b = values[2 * i + 1];
      if constexpr (Codec::kX == XForm::kF16) {
        const __half ha = __float2half_rn(a), hb = __float2half_rn(b);
        const __half la = __float2half_rn(__fmul_rn(__fsub_rn(a, __half2float(ha)), 2048.0f));
        const __half lb = __float2half_rn(__fmul_rn(__fsub_rn(b, __half2float(hb)), 2048.0f));
        high[i] = uint32_t{__half_as_ushort(ha)} | uint32_t{__half_as_ushort(hb)} << 16;
        low[i] = uint32_t{__half_as_ushort(la)} | uint32_t{__half_as_ushort(lb)} << 16;
      } else {
        const Bf16Pair pa = split_bf16(a), pb = split_bf16(b);
        high[i] = pack_bf16(pa.high, pb.high);
        low[i] = pack_bf16(pa.low, pb.low);
      }
    }
    const int step = lane / 4, half = lane / 2 % 2, t = lane % 2 * 2;
    unsigned char* to = codes + step / 2 * 128 + t * 16 + (step % 2 * 2 + half) * 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<uint32_t*>(to + i * 16) = high[i];
      *reinterpret_cast<uint32_t*>(to + i * 16 + 64) = low[i];
    }
    if (lane == 0) *scale = group_scale;
  }
}

template <class Codec, Format kFormat, int kTiles>
class Matvec {
 public:
  static constexpr TileShape kTile = tile_shape(kFormat);
  static constexpr int kTilesAGroup = 128 / kTile.columns;
  static constexpr int kGroupBytes = Codec::kX == XForm::kInt16 ? 256 : 512;   // digits of one row and group
  static constexpr bool kHasSums = Codec::kX == XForm::kInt16;
  static constexpr int kKept = 4;   // groups a warp whose values stay in registers between the sums of a norm and the digits

  __device__ __forceinline__ Matvec(const MatvecKernelArgs& args, unsigned char* shared_memory)
      : a(args), op(args.op), shared(shared_memory), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {
    x_at = a.ring_stages * a.stage_bytes;
    scales_at = x_at + a.x_bytes;
    partials_at = scales_at + a.scale_bytes;
    small = reinterpret_cast<MatvecShared*>(shared + partials_at + 2 * a.partial_bytes);
    first_unit = block_unit(a.n_units, blockIdx.x, gridDim.x);
    n_units = block_unit(a.n_units, blockIdx.x + 1, gridDim.x) - first_unit;
    n_stages_total = n_units * a.n_stages;
    fill_from = op.weights + first_unit * a.unit_bytes;
    max_groups = kHasSums ? a.scale_bytes / (op.n_rows * 20) : 0;
  }

  __device__ __forceinline__ void run() {
    grid_launch_dependents();
    start_ring();
    int in_batch = 0, index = 0, buffer = 0;
    for (int unit = 0; unit < n_units; unit += in_batch) {
      in_batch = min(a.batch_units, n_units - unit);
      float* partials = reinterpret_cast<float*>(shared + partials_at + buffer * a.partial_bytes);
      for (int chunk = 0; chunk < a.n_chunks; ++chunk) {
        if (a.n_chunks > 1 || unit == 0) {
          if (unit != 0 || chunk != 0) __syncthreads();      // nobody reads the last chunk any more
          if (unit == 0 && chunk == 0) first_x();
          else prepare_x(chunk * a.chunk_stages);
          __syncthreads();
        }
        const int stage_begin = chunk * a.chunk_stages, stage_end = min(stage_begin + a.chunk_stages, a.n_stages);
        for (int u = 0; u < in_batch; ++u) {
          float* mine = partials + (u * a.k_warps * a.row_warps + warp) * op.n_rows * kTileRows;
          float acc[kTiles][2];
          load_partials(mine, chunk > 0, acc);
          for (int stage = stage_begin; stage < stage_end; ++stage, ++index) consume(index, stage, stage_begin, acc);
          store_partials(mine, acc);
        }
      }
      __syncthreads();
      finish(unit, in_batch, partials);
      buffer ^= 1;
    }
  }

 private:
  // ---- the ring ----
  __device__ __forceinline__ void start_ring() {
    if (threadIdx.x == 0) {
      for (int s = 0; s < a.ring_stages; ++s) {
        barrier_init(&small->full[s], BERYL_BULK_COPY ? 1 : kMatvecThreads);
        barrier_init(&small->empty[s], kMatvecWarps);
      }
      barrier_init_fence();
    }
#if BERYL_BULK_COPY
    policy = evict_first_policy();
#else
    __syncthreads();
#endif
    for (int i = 0; i < a.ring_stages; ++i) {
      if (i < n_stages_total && (threadIdx.x == 0 || !BERYL_BULK_COPY)) copy_stage(i, i);
      advance_fill();
    }
#if BERYL_BULK_COPY
    __syncthreads();
#endif
  }
  // The next stage to be copied. With one chunk of x the stream is contiguous, so that a pointer and a counter are enough.
  __device__ __forceinline__ int fill_bytes() const { return fill_stage == a.n_stages - 1 ? a.last_stage_bytes : a.stage_bytes; }
  __device__ __forceinline__ void advance_fill() {
    fill_from += fill_bytes();
    fill_stage = fill_stage == a.n_stages - 1 ? 0 : fill_stage + 1;
  }
  __device__ __forceinline__ void copy_stage(int index, int slot) {
    const unsigned char* from = fill_from;
    int n_bytes = fill_bytes();
    if (a.n_chunks > 1) {
      const StagePlace place = stage_place({n_units, a.n_stages, a.batch_units, a.chunk_stages}, index);
      from = op.weights + (first_unit + place.unit) * a.unit_bytes + int64_t{place.stage} * a.stage_bytes;
      n_bytes = place.stage == a.n_stages - 1 ? a.last_stage_bytes : a.stage_bytes;
    }
    unsigned char* to = shared + slot * a.stage_bytes;
#if BERYL_BULK_COPY
    bulk_copy(to, from, n_bytes, &small->full[slot], policy);
#else
    for (int i = threadIdx.x * 16; i < n_bytes; i += kMatvecThreads * 16) copy16_async(shared_address(to + i), from + i, 16);
    barrier_arrive_after_copies(&small->full[slot]);
#endif
  }
  // After a warp has read its share of stage `index`, which is in `slot`. The stage before it is free as soon as all warps are
  // done with it; the warps take turns to refill it, one stage late, so that they hardly ever wait.
  __device__ __forceinline__ void release(int index) {
#if BERYL_BULK_COPY
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(&small->empty[slot]);
      if (index % kMatvecWarps == warp && index > 0 && index - 1 + a.ring_stages < n_stages_total) {
        const int last_slot = slot == 0 ? a.ring_stages - 1 : slot - 1;
        barrier_wait(&small->empty[last_slot], slot == 0 ? parity ^ 1 : parity);
        copy_stage(index - 1 + a.ring_stages, last_slot);
      }
    }
    __syncwarp();
    if (index > 0) advance_fill();
#else
    __syncthreads();
    if (index + a.ring_stages < n_stages_total) copy_stage(index + a.ring_stages, slot);
    advance_fill();
#endif
    if (++slot == a.ring_stages) slot = 0, parity ^= 1;
  }

  __device__ __forceinline__ void consume(int index, int stage, int stage_begin, float (&acc)[kTiles][2]) {
    const int columns_a_stage = a.k_warps * kStageSlices, tiles_a_slice = a.k_warps * a.row_warps;
    const int n_tiles = min(columns_a_stage, a.n_column_tiles - stage * columns_a_stage) * a.row_warps;
    const unsigned char* codes = shared + slot * a.stage_bytes;
    const unsigned char* meta = codes + n_tiles * kTile.code_bytes;
    const int second = tiles_a_slice + warp < n_tiles ? tiles_a_slice : 0;   // none: the first again, and its result forgotten
    const int first_column = stage_begin * columns_a_stage / kTilesAGroup * kTilesAGroup;   // that x begins with
    const int column = stage * columns_a_stage + k_of_warp - first_column;
    const bool mine = warp < tiles_a_slice && warp < n_tiles;
    barrier_wait(&small->full[slot], parity);
    typename Codec::Loaded tile[2];
    if (mine) {
      Codec::load(tile[0], codes + warp * kTile.code_bytes, meta + warp * kTile.meta_bytes, lane);
      Codec::load(tile[1], codes + (warp + second) * kTile.code_bytes, meta + (warp + second) * kTile.meta_bytes, lane);
    }
    release(index);
    if (!mine) return;
    typename Codec::template Product<kTiles> product[2];
    product[0].start(tile[0], shared, lane_x, column);
    product[1].start(tile[1], shared, lane_x, column + (second ? a.k_warps : 0));
#pragma unroll
    for (int i = 0; i < Codec::kSteps; ++i) {
      product[0].step(tile[0], i);
      product[1].step(tile[1], i);
    }
    product[0].finish(tile[0], acc);
    if (second) product[1].finish(tile[1], acc);
  }

  // ---- partial sums and y ----
  __device__ __forceinline__ void load_partials(const float* mine, bool resume, float (&acc)[kTiles][2]) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int row = 4 * n + lane % 4;
      const bool there = resume && row < op.n_rows && warp < a.k_warps * a.row_warps;
      acc[n][0] = there ? mine[row * kTileRows + lane / 4] : 0.0f;
      acc[n][1] = there ? mine[row * kTileRows + lane / 4 + 8] : 0.0f;
    }
  }
  __device__ __forceinline__ void store_partials(float* mine, const float (&acc)[kTiles][2]) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int row = 4 * n + lane % 4;
      if (row < op.n_rows && warp < a.k_warps * a.row_warps) {
        mine[row * kTileRows + lane / 4] = acc[n][0];
        mine[row * kTileRows + lane / 4 + 8] = acc[n][1];
      }
    }
  }
  __device__ __forceinline__ float add_partials(const float* partials, int unit, int row_tile, int row, int r) const {
    const int stride = a.row_warps * op.n_rows * kTileRows;
    const float* from = partials + ((unit * a.k_warps * a.row_warps + row_tile) * op.n_rows + row) * kTileRows + r;
    float values[kMatvecWarps];
#pragma unroll
    for (int k = 0; k < kMatvecWarps; ++k) values[k] = k < a.k_warps ? from[k * stride] : 0.0f;
    float sum = values[0];
#pragma unroll
    for (int k = 1; k < kMatvecWarps; ++k) sum = __fadd_rn(sum, values[k]);
    return sum;
  }
  // Units [unit, unit + count) of the block: sums of the warps, row scales, epilogue.
  __device__ __forceinline__ void finish(int unit, int count, const float* partials) {
    const int rows_a_tile = a.gated ? kTileRows / 2 : kTileRows;
    const int n_items = count * a.row_warps * op.n_rows * rows_a_tile;
    for (int item = threadIdx.x; item < n_items; item += kMatvecThreads) {
      const int r = item % rows_a_tile, rest = item / rows_a_tile;
      const int row = rest % op.n_rows, tile = rest / op.n_rows;
      const int row_tile = tile % a.row_warps, u = tile / a.row_warps;
      const int64_t tile_index = int64_t{first_unit + unit + u} * a.row_warps + row_tile;
      const int64_t col = tile_index * rows_a_tile + r;
      if (col >= a.outputs) continue;
      const float* scales = a.row_scales ? a.row_scales + tile_index * kTileRows + r : nullptr;
      float value = add_partials(partials, u, row_tile, row, r);
      if (scales) value = __fmul_rn(value, scales[0]);
      if (a.gated) {
        float up = add_partials(partials, u, row_tile, row, r + 8);
        if (scales) up = __fmul_rn(up, scales[8]);
        value = (op.epilogue == MatvecEpilogue::kGatedGelu ? gelu_tanh(value) : silu(value)) * up;
      } else {
        switch (op.epilogue) {
          case MatvecEpilogue::kGeluTimesOther: value = gelu_tanh(value) * load_row(op.other, row, col); break;
          case MatvecEpilogue::kTimesGeluOther: value *= gelu_tanh(load_row(op.other, row, col)); break;
          case MatvecEpilogue::kTimesSiluOther: value *= silu(load_row(op.other, row, col)); break;
          case MatvecEpilogue::kSoftcap: value = op.softcap * tanhf(value / op.softcap); break;
          default: break;
        }
      }
      store_row(op.y, row, col, value);
    }
  }

  // ---- x ----
  __device__ __forceinline__ void set_lane_x() {
    k_of_warp = warp / a.row_warps;
    lane_x.code_stride = op.n_rows * kGroupBytes;
    lane_x.scale_stride = op.n_rows * 4;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      // Rows that do not exist read the last one: their columns of d are not used.
      const int code_row = min(4 * n + lane / 8, op.n_rows - 1), scale_row = min(4 * n + lane % 4, op.n_rows - 1);
      lane_x.codes[n] = x_at + code_row * kGroupBytes + lane % 8 * 16;
      lane_x.sums[n] = scales_at + scale_row * 16;
      lane_x.scales[n] = scales_at + max_groups * op.n_rows * 16 + scale_row * 4;
    }
  }
  __device__ __forceinline__ void write(int group, int row, float4 v) {
    float* sums = reinterpret_cast<float*>(shared + scales_at) + (group * op.n_rows + row) * 4;
    float* scale = reinterpret_cast<float*>(shared + scales_at + max_groups * op.n_rows * 16) + group * op.n_rows + row;
    write_group<Codec>(v, lane, shared + x_at + (group * op.n_rows + row) * kGroupBytes, scale, sums);
  }

  __device__ __forceinline__ void put_sums(int row, float4 sums) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      sums.x = __fadd_rn(sums.x, __shfl_xor_sync(kAllLanes, sums.x, offset));
      sums.y = __fadd_rn(sums.y, __shfl_xor_sync(kAllLanes, sums.y, offset));
      sums.z = __fadd_rn(sums.z, __shfl_xor_sync(kAllLanes, sums.z, offset));
      sums.w = __fadd_rn(sums.w, __shfl_xor_sync(kAllLanes, sums.w, offset));
    }
    if (lane == 0) small->sums[row][warp] = sums;
  }
  __device__ __forceinline__ RowFactors factors(int row) const {
    float4 total = small->sums[row][0];
#pragma unroll
    for (int w = 1; w < kMatvecWarps; ++w) {
      const float4 other = small->sums[row][w];
      total.x = __fadd_rn(total.x, other.x);
      total.y = __fadd_rn(total.y, other.y);
      total.z = __fadd_rn(total.z, other.z);
      total.w = __fadd_rn(total.w, other.w);
    }
    return row_factors(op, total, a.cols);
  }
  // x' and h of 4 columns; the new x' is stored by one block, each group by another.
  __device__ __forceinline__ float4 finish_x(float4 x, float4 t, float4 norm_weight, RowFactors f, int row, int group, int col) {
    if (op.add.data) {
      x = times(fused(t, f.add, x), op.add_scale);
      if (group % gridDim.x == blockIdx.x && col < a.cols) *reinterpret_cast<float4*>(op.sum + row * op.sum_stride + col) = x;
    }
    if (op.has_norm) x = times(times(x, f.norm), norm_weight);
    return x;
  }

  // The first chunk of x: waits for the previous kernel, but loads what does not depend on it before.
  __device__ __forceinline__ void first_x() {
    set_lane_x();
    const int n_groups = (a.cols + 127) / 128;
    const bool whole = op.has_norm || op.add.data;
    if (op.n_rows == 1 && whole && n_groups <= kKept * kMatvecWarps && a.n_chunks == 1) {
      const float4 zero = make_float4(0, 0, 0, 0);
      float4 x[kKept], add[kKept], add_weight[kKept], norm_weight[kKept], sums = zero;
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        const int col = (warp + i * kMatvecWarps) * 128 + lane * 4;
        add_weight[i] = norm_weight[i] = zero;
        if (col < a.cols) {
          add_weight[i] = load_weight4(op.add_weight, col);
          norm_weight[i] = load_weight4(op.norm_weight, col);
        }
      }
      grid_wait_only();
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        const int col = (warp + i * kMatvecWarps) * 128 + lane * 4;
        x[i] = add[i] = zero;
        if (col < a.cols) {
          x[i] = load_row4(op.x, 0, col);
          if (op.add.data) add[i] = load_row4(op.add, 0, col);
        }
      }
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        const float4 t = times(add[i], add_weight[i]);
        add_sums(op, x[i], add[i], t, sums);
        add[i] = t;
      }
      put_sums(0, sums);
      __syncthreads();
      const RowFactors f = factors(0);
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        const int group = warp + i * kMatvecWarps, col = group * 128 + lane * 4;
        if (group < n_groups) write(group, 0, finish_x(x[i], add[i], norm_weight[i], f, 0, group, col));
      }
      return;
    }
    grid_wait_only();
    if (whole) {
      for (int row = 0; row < op.n_rows; ++row) {
        float4 sums = make_float4(0, 0, 0, 0);
#pragma unroll 2
        for (int group = warp; group < n_groups; group += kMatvecWarps) {
          const int col = group * 128 + lane * 4;
          if (col >= a.cols) continue;
          const float4 x = load_row4(op.x, row, col);
          float4 add = make_float4(0, 0, 0, 0);
          if (op.add.data) add = load_row4(op.add, row, col);
          add_sums(op, x, add, times(add, load_weight4(op.add_weight, col)), sums);
        }
        put_sums(row, sums);
      }
      __syncthreads();
    }
    prepare_x(0);
  }

  // x of the chunk that begins with stage `stage_begin`; the sums of its rows are there.
  __device__ __forceinline__ void prepare_x(int stage_begin) {
    const int columns_a_stage = a.k_warps * kStageSlices;
    const int tile_begin = stage_begin * columns_a_stage;
    const int tile_end = min(tile_begin + a.chunk_stages * columns_a_stage, a.n_column_tiles);
    const int group_begin = tile_begin / kTilesAGroup, group_end = (tile_end + kTilesAGroup - 1) / kTilesAGroup;
    const bool whole = op.has_norm || op.add.data;
    constexpr int kAhead = 4;       // loads in flight
    for (int row = 0; row < op.n_rows; ++row) {
      const RowFactors f = whole ? factors(row) : RowFactors{0.0f, 1.0f};
      // The kept version gives a warp groups warp, warp + 16, ...; which warp does it changes no bit.
      for (int base = group_begin + warp; base < group_end; base += kAhead * kMatvecWarps) {
        float4 x[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int group = base + i * kMatvecWarps, col = group * 128 + lane * 4;
          x[i] = make_float4(0, 0, 0, 0);
          if (group < group_end && col < a.cols) x[i] = load_row4(op.x, row, col);
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int group = base + i * kMatvecWarps, col = group * 128 + lane * 4;
          if (group >= group_end) continue;
          if (whole) {
            float4 add = make_float4(0, 0, 0, 0), norm_weight = add;
            if (col < a.cols) {
              if (op.add.data) add = times(load_row4(op.add, row, col), load_weight4(op.add_weight, col));
              norm_weight = load_weight4(op.norm_weight, col);
            }
            x[i] = finish_x(x[i], add, norm_weight, f, row, group, col);
          }
          write(group - group_begin, row, x[i]);
        }
      }
    }
  }

  const MatvecKernelArgs& a;
  const MatvecArgs& op;
  unsigned char* shared;
  MatvecShared* small;
  LaneX<kTiles> lane_x;
  const unsigned char* fill_from;
  int fill_stage = 0;
  uint64_t policy = 0;
  uint32_t parity = 0;
  int slot = 0;
  int x_at, scales_at, partials_at;
  int max_groups;
  int first_unit, n_units, n_stages_total;
  int warp, lane, k_of_warp;
};

// Two blocks share a multiprocessor's registers (this kernel's and the next one's); with 8 rows there is one.
template <class Codec, Format kFormat, int kTiles>
__global__ void __launch_bounds__(kMatvecThreads, kTiles == 1 ? 2 : 1) matvec_kernel(const __grid_constant__ MatvecKernelArgs args) {
  extern __shared__ __align__(128) unsigned char matvec_shared[];
  Matvec<Codec, kFormat, kTiles>(args, matvec_shared).run();
}

using MatvecKernel = void (*)(MatvecKernelArgs);
// For 1 to 4 rows of x, or 5 to 8.
template <class Codec, Format kFormat>
MatvecKernel kernel_for(int n_tiles) {
  return n_tiles == 1 ? matvec_kernel<Codec, kFormat, 1> : matvec_kernel<Codec, kFormat, 2>;
}

// In matvec_FAMILY.cu, so that they compile side by side; null for formats of another family. n_tiles: of 4 rows of x, 1 or 2.
MatvecKernel matvec_e2m1_kernel(Format format, int n_tiles);
MatvecKernel matvec_integer_kernel(Format format, int n_tiles);
MatvecKernel matvec_k_kernel(Format format, int n_tiles);
MatvecKernel matvec_float_kernel(Format format, int n_tiles);

}  // namespace beryl::cuda
