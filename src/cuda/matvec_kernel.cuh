// y = epilogue(W · norm(x)) for few rows of x, one block a multiprocessor: 11 warps that multiply and one that copies.
//
//   weights   units of stages of tiles (matvec_layout.h): the block's units are one stream, read once, copied stage by
//             stage into a ring in shared memory. The ring is filled before the wait for the previous kernel, because
//             weights depend on nothing. Blocks take half a multiprocessor's shared memory where that is enough, and
//             let the next kernel start at once: so its ring fills while this one computes, and memory does not idle
//             between kernels.
//   x         [n_rows][cols] f32 or bf16: normed and cut into digits (codec.cuh) once a block, kept in shared memory
//   y         [n_rows][outputs] f32 or bf16
//
// Warp (k, r) multiplies the column tiles k, k + k_warps, ... of its row tile r of each unit. Its sums of a unit go to
// shared memory as partial sums; after a batch of units the block adds those of the k_warps warps, in order, and stores
// y. So every sum has one order, whatever the number of rows, the chunks of x and the speed of warps, and there are no
// atomics.
//
// Moves the packed bytes of W. x and y stay in the L2.
#pragma once

#include <cstdint>

#include "cuda/async.cuh"
#include "cuda/codec.cuh"
#include "cuda/device.cuh"
#include "cuda/matvec.h"

namespace beryl::cuda {

inline constexpr int kMatvecConsumers = kMatvecWarps * 32;      // threads that multiply
inline constexpr int kMatvecThreads = kMatvecConsumers + 32;     // and the warp that copies

// The plan and the launch in the form that the kernel wants.
struct MatvecKernelArgs {
  MatvecArgs op;
  const float* row_scales;          // [n_row_tiles · 16], null: 1
  int64_t unit_bytes;
  int outputs;
  int cols;
  float inverse_cols;
  int n_units;
  int n_stages;
  int stage_bytes;
  int tiles_bytes;                  // of a stage's codes
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
  float4 sums[kMatvecMaxRows][kMatvecWarps];  // of the warps
  float norm_factors[kMatvecMaxRows];
  float add_factors[kMatvecMaxRows];
  alignas(8) uint64_t full[kMatvecMaxStages];
  uint64_t empty[kMatvecMaxStages];
  uint32_t tables[3][32];           // E2m1Tables, a copy a lane
};
static_assert(sizeof(MatvecShared) <= 2560);

// Activations come from other multiprocessors: past the L1, which is not coherent.
__device__ __forceinline__ float4 load_row4(const MatvecRows& rows, int row, int col) {
  if (rows.is_bf16) {
    const uint2 bits =
        __ldcg(reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(rows.data) + row * rows.stride + col));
    return make_float4(bf16_at(bits.x, 0), bf16_at(bits.x, 1), bf16_at(bits.y, 0), bf16_at(bits.y, 1));
  }
  return __ldcg(reinterpret_cast<const float4*>(static_cast<const float*>(rows.data) + row * rows.stride + col));
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
__device__ __forceinline__ RowFactors row_factors(const MatvecArgs& op, float4 sums, float inverse_cols) {
  RowFactors factors = {0.0f, 1.0f};
  float squares = sums.w;
  if (op.add.data) {
    factors.add = rsqrtf(__fmaf_rn(sums.x, inverse_cols, op.add_eps));
    squares =
        __fmaf_rn(__fmul_rn(factors.add, factors.add), sums.z, __fmaf_rn(__fmul_rn(2.0f, factors.add), sums.y, sums.w));
    squares = __fmul_rn(fmaxf(squares, 0.0f), __fmul_rn(op.add_scale, op.add_scale));
  }
  if (op.has_norm) factors.norm = rsqrtf(__fmaf_rn(squares, inverse_cols, op.norm_eps));
  return factors;
}

__device__ __forceinline__ float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ __forceinline__ float approximate_reciprocal(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}
// The activations in few instructions; relative error about 1e-6.
__device__ __forceinline__ float quick_gelu_tanh(float z) {
  const float exponent = 1.5957691216057308f * (z + 0.044715f * z * z * z);
  return z - __fdividef(z, 1.0f + __expf(exponent));
}
__device__ __forceinline__ float quick_silu(float z) { return __fdividef(z, 1.0f + __expf(-z)); }

// A warp writes a group of 128 columns of one row in the digits that the codec wants; a lane has 4 neighbouring
// columns.
template <class Codec>
__device__ __forceinline__ void write_group(float4 v, int lane, unsigned char* codes, float* scale, float* sums) {
  // As bits, so that a NaN anywhere is the largest and makes every result a NaN.
  const float largest = max_or_nan(max_or_nan(fabsf(v.x), fabsf(v.y)), max_or_nan(fabsf(v.z), fabsf(v.w)));
  const uint32_t bits = __reduce_max_sync(kAllLanes, __float_as_uint(largest) & 0x7fffffffu);
  if constexpr (Codec::kX == XForm::kInt16) {
    constexpr float kLargest = 32512.0f;        // 127 · 256
    constexpr float kRounder = 12582912.0f;     // 1.5 · 2^23: adding it leaves the rounded integer in the low bits
    const float range = __uint_as_float(bits);
    const float inverse = range > 0x1p-110f ? __fmul_rn(kLargest, approximate_reciprocal(range)) : 0.0f;
    const uint32_t q0 = __float_as_uint(__fmaf_rn(v.x, inverse, kRounder)),
                   q1 = __float_as_uint(__fmaf_rn(v.y, inverse, kRounder));
    const uint32_t q2 = __float_as_uint(__fmaf_rn(v.z, inverse, kRounder)),
                   q3 = __float_as_uint(__fmaf_rn(v.w, inverse, kRounder));
    const int word = lane / 4, t = lane % 4;    // word = 2 · k-step + half
    unsigned char* to = codes + word / 4 * 128 + t * 16 + word % 4 * 4;
    *reinterpret_cast<uint32_t*>(to) =
        byte_permute(byte_permute(q0 + 128, q1 + 128, 0x0051), byte_permute(q2 + 128, q3 + 128, 0x0051), 0x5410);
    *reinterpret_cast<uint32_t*>(to + 64) =
        byte_permute(byte_permute(q0, q1, 0x0040), byte_permute(q2, q3, 0x0040), 0x5410);
    if constexpr (Codec::kNeedsSums) {
      int sum = static_cast<int>(q0 + q1 + q2 + q3 - 4u * 0x4b400000u);
#pragma unroll
      for (int offset = 1; offset < 8; offset *= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
      if (lane % 8 == 0) sums[lane / 8] = __int2float_rn(sum) * (1.0f / Codec::kXScale);
    }
    if (lane == 0) *scale = __fmul_rn(range, Codec::kXScale / kLargest);
  } else {
    float inverse = 1.0f, group_scale = 1.0f;
    if (Codec::kX == XForm::kF16 && bits >= 0x00800000u) {
      const uint32_t exponent = bits & 0x7f800000u;          // the largest becomes 1 to 2
      group_scale = __uint_as_float(exponent);
      inverse = exponent < 0x7f000000u ? __uint_as_float(0x7f000000u - exponent) : 0x1p-127f;
      if (exponent == 0x7f800000u) group_scale = __uint_as_float(0x7fc00000u);
    }
    const float values[4] = {__fmul_rn(v.x, inverse), __fmul_rn(v.y, inverse), __fmul_rn(v.z, inverse),
                             __fmul_rn(v.w, inverse)};
    const int step = lane / 4, half = lane / 2 % 2, t = lane % 2 * 2;
    unsigned char* to = codes + step / 2 * 128 + t * 16 + (step % 2 * 2 + half) * 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float a = values[2 * i], b = values[2 * i + 1];
      uint32_t high, low;
      if constexpr (Codec::kX == XForm::kF16) {
        const __half ha = __float2half_rn(a), hb = __float2half_rn(b);
        const __half la = __float2half_rn(__fmul_rn(__fsub_rn(a, __half2float(ha)), 2048.0f));
        const __half lb = __float2half_rn(__fmul_rn(__fsub_rn(b, __half2float(hb)), 2048.0f));
        high = uint32_t{__half_as_ushort(ha)} | uint32_t{__half_as_ushort(hb)} << 16;
        low = uint32_t{__half_as_ushort(la)} | uint32_t{__half_as_ushort(lb)} << 16;
      } else {
        const Bf16Pair pa = split_bf16(a), pb = split_bf16(b);
        high = pack_bf16(pa.high, pb.high);
        low = pack_bf16(pa.low, pb.low);
      }
      *reinterpret_cast<uint32_t*>(to + i * 16) = high;
      *reinterpret_cast<uint32_t*>(to + i * 16 + 64) = low;
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
  static constexpr int kKept =
      3;  // groups a warp whose values stay in registers between the sums of a norm and the digits

  __device__ __forceinline__ Matvec(const MatvecKernelArgs& args, unsigned char* shared_memory)
      : a(args), op(args.op), shared(shared_memory), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {
    x_at = a.ring_stages * a.stage_bytes;
    scales_at = x_at + a.x_bytes;
    partials_at = scales_at + a.scale_bytes;
    small = reinterpret_cast<MatvecShared*>(shared + partials_at + 2 * a.partial_bytes);
    first_unit = block_unit(a.n_units, blockIdx.x, gridDim.x);
    n_units = block_unit(a.n_units, blockIdx.x + 1, gridDim.x) - first_unit;
    n_stages_total = n_units * a.n_stages;
    max_groups = kHasSums ? a.scale_bytes / (op.n_rows * 20) : 0;
    has_tile = warp < a.k_warps * a.row_warps;
    k_of_warp = warp / a.row_warps;
  }

  __device__ __forceinline__ void run() {
    grid_launch_dependents();
    if (threadIdx.x == kMatvecConsumers) {
      for (int s = 0; s < a.ring_stages; ++s) {
        barrier_init(&small->full[s], BERYL_BULK_COPY ? 1 : kMatvecConsumers);
        barrier_init(&small->empty[s], a.k_warps * a.row_warps);
      }
      barrier_init_fence();
    }
    if (warp == 0) {
      small->tables[0][lane] = kPositiveLow;
      small->tables[1][lane] = kNegativeLow;
      small->tables[2][lane] = ~0u;
    }
    __syncthreads();
    if (warp == kMatvecWarps) return copy_stages();
    if (!BERYL_BULK_COPY)
      for (int i = 0; i < min(a.ring_stages, n_stages_total); ++i) copy_together(i, i);
    int in_batch = 0, index = 0, buffer = 0;
    for (int unit = 0; unit < n_units; unit += in_batch) {
      in_batch = min(a.batch_units, n_units - unit);
      float* partials = reinterpret_cast<float*>(shared + partials_at + buffer * a.partial_bytes);
      for (int chunk = 0; chunk < a.n_chunks; ++chunk) {
        const int stage_begin = chunk * a.chunk_stages, stage_end = min(stage_begin + a.chunk_stages, a.n_stages);
        if (a.n_chunks > 1 || unit == 0) {
          if (unit != 0 || chunk != 0) barrier();            // nobody reads the last chunk any more
          if (unit == 0 && chunk == 0) first_x();
          else prepare_x(stage_begin, false);
          barrier();
          if (op.has_norm && threadIdx.x < op.n_rows) small->norm_factors[threadIdx.x] = factors(threadIdx.x).norm;
        }
        if (!BERYL_BULK_COPY || has_tile) {
          // Column tiles of x count from the first of its first group.
          const int first_tile = stage_begin * a.k_warps % kTilesAGroup + k_of_warp;
          float* mine = partials + warp * op.n_rows * kTileRows;
          const LaneX<kTiles> lane_x = make_lane_x();      // here, so that it takes no registers while x is prepared
          for (int u = 0; u < in_batch; ++u, mine += a.k_warps * a.row_warps * op.n_rows * kTileRows) {
            float acc[kTiles][2];
            start_partials(mine, chunk > 0, acc);
            int tile = first_tile;
            for (int stage = stage_begin; stage < stage_end; ++stage, ++index, tile += a.k_warps)
              consume(lane_x, index, tile, acc);
            store_partials(mine, acc);
          }
        }
      }
      barrier();
      finish(unit, in_batch, partials);
      buffer ^= 1;
    }
  }

 private:
  __device__ __forceinline__ static void barrier() { partial_block_barrier<kMatvecConsumers>(); }

  // ---- the ring ----
  __device__ __forceinline__ const unsigned char* stage_from(int index) const {
    int64_t stage = index;
    if (a.n_chunks > 1) {
      const StagePlace place = stage_place({n_units, a.n_stages, a.batch_units, a.chunk_stages}, index);
      stage = place.unit * a.n_stages + place.stage;
    }
    return op.weights + first_unit * a.unit_bytes + stage * a.stage_bytes;
  }
  // The copying warp, with bulk copies: one lane, which waits for nothing but free slots.
  __device__ __forceinline__ void copy_stages() {
#if BERYL_BULK_COPY
    if (lane != 0) return;
    const uint64_t policy = evict_first_policy();
#pragma unroll 1
    for (int i = 0; i < n_stages_total; ++i) {
      const unsigned char* from = stage_from(i);
      if (i >= a.ring_stages) barrier_wait(&small->empty[slot], parity ^ 1);
      bulk_copy(shared + slot * a.stage_bytes, from, a.stage_bytes, &small->full[slot], policy);
      next_slot();
    }
#endif
  }
  // Without bulk copies all that multiply copy, and meet after each stage.
  __device__ __forceinline__ void copy_together(int index, int to_slot) {
    const unsigned char* from = stage_from(index);
    unsigned char* to = shared + to_slot * a.stage_bytes;
    for (int i = threadIdx.x * 16; i < a.stage_bytes; i += kMatvecConsumers * 16)
      copy16_async(shared_address(to + i), from + i, 16);
    barrier_arrive_after_copies(&small->full[to_slot]);
  }
  __device__ __forceinline__ void next_slot() {
    if (++slot == a.ring_stages) slot = 0, parity ^= 1;
  }
  // After a warp has read its share of stage `index`.
  __device__ __forceinline__ void release(int index) {
    if (BERYL_BULK_COPY) {
      __syncwarp();
      if (lane == 0) barrier_arrive(&small->empty[slot]);
    } else {
      barrier();
      if (index + a.ring_stages < n_stages_total) copy_together(index + a.ring_stages, slot);
    }
    next_slot();
  }

  // Stage `index`: this warp's tile times column tile `x_tile` of x.
  __device__ __forceinline__ void consume(const LaneX<kTiles>& lane_x, int index, int x_tile, float (&acc)[kTiles][2]) {
    const unsigned char* codes = shared + slot * a.stage_bytes;
    const int own = has_tile ? warp : 0;
    barrier_wait(&small->full[slot], parity);
    typename Codec::Loaded tile;
    Codec::load(tile, codes + own * kTile.code_bytes, codes + a.tiles_bytes + own * kTile.meta_bytes, lane);
    release(index);
    typename Codec::template Product<kTiles> product;
    product.start(tile, shared, lane_x, x_tile);
#pragma unroll
    for (int i = 0; i < Codec::kSteps; ++i) product.step(tile, i);
    product.finish(tile, acc);
  }

  // ---- partial sums and y ----
  __device__ __forceinline__ void start_partials(const float* mine, bool resume, float (&acc)[kTiles][2]) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int row = 4 * n + lane % 4;
      const bool there = resume && row < op.n_rows && has_tile;
      acc[n][0] = there ? mine[row * kTileRows + lane / 4] : 0.0f;
      acc[n][1] = there ? mine[row * kTileRows + lane / 4 + 8] : 0.0f;
    }
  }
  __device__ __forceinline__ void store_partials(float* mine, const float (&acc)[kTiles][2]) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int row = 4 * n + lane % 4;
      if (row < op.n_rows && has_tile) {
        mine[row * kTileRows + lane / 4] = acc[n][0];
        mine[row * kTileRows + lane / 4 + 8] = acc[n][1];
      }
    }
  }
  __device__ __forceinline__ float add_partials(const float* from) const {
    const int stride = a.row_warps * op.n_rows * kTileRows;
    float sums[4] = {};
#pragma unroll
    for (int k = 0; k < kMatvecWarps; ++k)
      sums[k % 4] = __fadd_rn(sums[k % 4], k < a.k_warps ? from[k * stride] : 0.0f);
    return __fadd_rn(__fadd_rn(sums[0], sums[1]), __fadd_rn(sums[2], sums[3]));
  }
  // Units [unit, unit + count) of the block: sums of the warps, row scales, epilogue.
  __device__ __forceinline__ void finish(int unit, int count, const float* partials) {
    const int bits = a.gated ? 3 : 4;           // rows of a tile that are outputs: 8 or 16
    const int n_items = count * a.row_warps * op.n_rows << bits;
#pragma unroll 1
    for (int item = threadIdx.x; item < n_items; item += kMatvecConsumers) {
      const int r = item & ((1 << bits) - 1), rest = item >> bits;
      int tile = rest, row = 0, u = rest, row_tile = 0;
      if (op.n_rows > 1) tile = rest / op.n_rows, row = rest - tile * op.n_rows, u = tile;
      if (a.row_warps > 1) u = tile / a.row_warps, row_tile = tile - u * a.row_warps;
      const int tile_index = (first_unit + unit) * a.row_warps + tile;
      const int col = (tile_index << bits) + r;
      if (col >= a.outputs) continue;
      const float* scales = a.row_scales ? a.row_scales + tile_index * kTileRows + r : nullptr;
      const float* from = partials + ((u * a.k_warps * a.row_warps + row_tile) * op.n_rows + row) * kTileRows + r;
      const float factor = op.has_norm ? small->norm_factors[row] : 1.0f;
      float value = __fmul_rn(add_partials(from), factor);
      if (scales) value = __fmul_rn(value, scales[0]);
      if (a.gated) {
        float up = __fmul_rn(add_partials(from + 8), factor);
        if (scales) up = __fmul_rn(up, scales[8]);
        value = __fmul_rn(op.epilogue == MatvecEpilogue::kGatedGelu ? quick_gelu_tanh(value) : quick_silu(value), up);
      } else if (op.epilogue != MatvecEpilogue::kStore) {
        switch (op.epilogue) {
          case MatvecEpilogue::kGeluTimesOther: value = quick_gelu_tanh(value) * load_row(op.other, row, col); break;
          case MatvecEpilogue::kTimesGeluOther: value *= quick_gelu_tanh(load_row(op.other, row, col)); break;
          case MatvecEpilogue::kTimesSiluOther: value *= quick_silu(load_row(op.other, row, col)); break;
          case MatvecEpilogue::kSoftcap: value = op.softcap * tanhf(value / op.softcap); break;
          default: break;
        }
      }
      store_row(op.y, row, col, value);
    }
  }

  // ---- x ----
  __device__ __forceinline__ LaneX<kTiles> make_lane_x() const {
    LaneX<kTiles> lane_x;
    const volatile uint32_t* tables = small->tables[0];
    lane_x.tables = {tables[lane], tables[32 + lane], tables[64 + lane]};
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
    return lane_x;
  }
  __device__ __forceinline__ void write(int group, int row, float4 v) {
    const int index = group * op.n_rows + row;
    float* sums = reinterpret_cast<float*>(shared + scales_at);
    write_group<Codec>(v, lane, shared + x_at + index * kGroupBytes, sums + max_groups * op.n_rows * 4 + index,
                       sums + index * 4);
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
    return row_factors(op, total, a.inverse_cols);
  }
  // x' of 4 columns times the norm's weight; the norm's factor, one for a row, multiplies the sums at the end (finish).
  // The new x' is stored by one block, each group by another.
  __device__ __forceinline__ float4 finish_x(float4 x, float4 t, float4 norm_weight, float add_factor, int row,
                                             int group, int col) {
    if (op.add.data) {
      x = times(fused(t, add_factor, x), op.add_scale);
      if (group % gridDim.x == blockIdx.x && col < a.cols)
        *reinterpret_cast<float4*>(op.sum + row * op.sum_stride + col) = x;
    }
    return op.has_norm ? times(x, norm_weight) : x;
  }

  // The first chunk of x: waits for the previous kernel, but loads what does not depend on it before.
  __device__ __forceinline__ void first_x() {
    const int n_groups = (a.cols + 127) / 128;
    const int all_groups = (a.n_stages * a.k_warps + kTilesAGroup - 1) / kTilesAGroup;   // with those of padding
    if (op.n_rows == 1 && op.add.data && all_groups <= kKept * kMatvecWarps && a.n_chunks == 1)
      return kept_x(all_groups);
    const bool sums_first = op.add.data || (op.has_norm && a.n_chunks > 1);
    if (sums_first) {
      grid_wait_only();
#pragma unroll 1
      for (int row = 0; row < op.n_rows; ++row) {
        float4 sums = make_float4(0, 0, 0, 0);
#pragma unroll 2
        for (int group = warp; group < n_groups; group += kMatvecWarps) {
          const int col = group * 128 + lane * 4;
          float4 x = make_float4(0, 0, 0, 0), add = x, weight = x;
          if (col < a.cols) {
            x = load_row4(op.x, row, col);
            if (op.add.data) add = load_row4(op.add, row, col), weight = load_weight4(op.add_weight, col);
          }
          add_sums(op, x, add, times(add, weight), sums);
        }
        put_sums(row, sums);
      }
      barrier();
      if (op.add.data) {
        if (threadIdx.x < op.n_rows) small->add_factors[threadIdx.x] = factors(threadIdx.x).add;
        barrier();
      }
    }
    prepare_x(0, op.has_norm && !sums_first);
  }
  // One row whose values stay in registers between the sums and the digits.
  __device__ __forceinline__ void kept_x(int n_groups) {
    const float4 zero = make_float4(0, 0, 0, 0);
    float4 x[kKept], add[kKept], norm_weight[kKept], sums = zero;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const int col = (warp + i * kMatvecWarps) * 128 + lane * 4;
      x[i] = norm_weight[i] = zero;
      if (col < a.cols) {
        x[i] = load_weight4(op.add_weight, col);
        norm_weight[i] = load_weight4(op.norm_weight, col);
      }
    }
    grid_wait_only();
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const int col = (warp + i * kMatvecWarps) * 128 + lane * 4;
      const float4 weight = x[i];
      x[i] = add[i] = zero;
      if (col < a.cols) {
        x[i] = load_row4(op.x, 0, col);
        add[i] = load_row4(op.add, 0, col);
      }
      const float4 t = times(add[i], weight);
      add_sums(op, x[i], add[i], t, sums);
      add[i] = t;
    }
    put_sums(0, sums);
    barrier();
    const float add_factor = factors(0).add;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const int group = warp + i * kMatvecWarps;
      if (group < n_groups)
        write(group, 0, finish_x(x[i], add[i], norm_weight[i], add_factor, 0, group, group * 128 + lane * 4));
    }
  }

  // x of the chunk that begins with stage `stage_begin`. An AddNorm needs the sums of its rows before; a plain norm can
  // take them on the way (with_sums). Waits for the previous kernel.
  __device__ __forceinline__ void prepare_x(int stage_begin, bool with_sums) {
    const int columns = a.k_warps;
    const int tile_begin = stage_begin * columns, tile_end = min(stage_begin + a.chunk_stages, a.n_stages) * columns;
    const int group_begin = tile_begin / kTilesAGroup, group_end = (tile_end + kTilesAGroup - 1) / kTilesAGroup;
    constexpr int kAhead = 3;       // loads in flight
    float4 weight[kAhead] = {};    // set, or else they would live on from chunk to chunk, all through the products
    auto load_weights = [&](int base) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int col = (base + i * kMatvecWarps) * 128 + lane * 4;
        weight[i] = make_float4(0, 0, 0, 0);
        if (col < a.cols) weight[i] = load_weight4(op.norm_weight, col);
      }
    };
    // The weights of few groups are loaded once and before the wait.
    const bool all_weights = group_end - group_begin <= kAhead * kMatvecWarps;
    if (op.has_norm && all_weights) load_weights(group_begin + warp);
    grid_wait_only();
#pragma unroll 1
    for (int row = 0; row < op.n_rows; ++row) {
      float4 sums = make_float4(0, 0, 0, 0);
      const float add_factor = op.add.data ? small->add_factors[row] : 0.0f;
#pragma unroll 1
      for (int base = group_begin + warp; base < group_end; base += kAhead * kMatvecWarps) {
        float4 x[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int group = base + i * kMatvecWarps, col = group * 128 + lane * 4;
          x[i] = make_float4(0, 0, 0, 0);
          if (group < group_end && col < a.cols) x[i] = load_row4(op.x, row, col);
        }
        if (op.has_norm && !all_weights) load_weights(base);
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int group = base + i * kMatvecWarps, col = group * 128 + lane * 4;
          if (group >= group_end) break;
          if (with_sums) sums.w = dot(x[i], x[i], sums.w);
          float4 add = make_float4(0, 0, 0, 0);
          if (op.add.data && col < a.cols) add = times(load_row4(op.add, row, col), load_weight4(op.add_weight, col));
          write(group - group_begin, row, finish_x(x[i], add, weight[i], add_factor, row, group, col));
        }
      }
      if (with_sums) put_sums(row, sums);
    }
  }

  const MatvecKernelArgs& a;
  const MatvecArgs& op;
  unsigned char* shared;
  MatvecShared* small;
  uint32_t parity = 0;
  int slot = 0;
  int x_at, scales_at, partials_at;
  int max_groups;
  int first_unit, n_units, n_stages_total;
  int warp, lane, k_of_warp;
  bool has_tile;
};

// Two blocks share a multiprocessor's registers (this kernel's and the next one's); with 8 rows there is one.
template <class Codec, Format kFormat, int kTiles>
__global__ void __launch_bounds__(kMatvecThreads, kTiles == 1 ? 2 : 1)
    matvec_kernel(const __grid_constant__ MatvecKernelArgs args) {
  extern __shared__ __align__(128) unsigned char matvec_shared[];
  Matvec<Codec, kFormat, kTiles>(args, matvec_shared).run();
}

using MatvecKernel = void (*)(MatvecKernelArgs);
// For 1 to 4 rows of x, or 5 to 8.
template <class Codec, Format kFormat>
MatvecKernel kernel_for(int n_tiles) {
  return n_tiles == 1 ? matvec_kernel<Codec, kFormat, 1> : matvec_kernel<Codec, kFormat, 2>;
}

// In matvec_FAMILY.cu, so that they compile side by side; null for formats of another family. n_tiles: of 4 rows of x,
// 1 or 2.
MatvecKernel matvec_e2m1_kernel(Format format, int n_tiles);
MatvecKernel matvec_integer_kernel(Format format, int n_tiles);
MatvecKernel matvec_k_kernel(Format format, int n_tiles);
MatvecKernel matvec_float_kernel(Format format, int n_tiles);

}  // namespace beryl::cuda
