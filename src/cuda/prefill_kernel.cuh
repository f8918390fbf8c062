// The product of prefill_linear.h: y = epilogue(W · x), x as 16-bit values that a kernel before has laid out.
//
// A block makes 128 · kM rows of W times 128 tokens at a time. Two groups of four warps multiply, each warp 16 rows of W
// (kM times): it takes its own packed tiles out of shared memory, widens 64 columns of them in registers (prefill_widen.cuh)
// while the tensor cores multiply the 64 before, and never writes them anywhere. A warp of a third group keeps a ring of
// stages full by bulk copies: one column tile of W (packed) and the same columns of x. Blocks stay and take one product tile
// after the other; those at work together share x and W through the L2.
//
//   x        [token blocks][slabs of 64 columns][128 tokens][128 bytes], 16-byte pieces exchanged (prefill_wgmma.cuh)
//   stage    [slabs of a column tile] of that, [8 · kM] codes, [8 · kM] meta data
//
// Per column tile of 128 and product tile of 256 x 128: 32 KB of x and 17 KB of FP4 from the L2, 2,048 cycles of the tensor
// cores. The sum of an output runs from left to right through all columns, whatever the tile: a row's bits do not depend on
// the number of rows.
#pragma once

#include <cstdint>

#include "cuda/async.cuh"
#include "cuda/batch_linear.h"
#include "cuda/prefill_wgmma.cuh"
#include "cuda/prefill_widen.cuh"
#include "cuda/row_math.cuh"

#ifndef BERYL_UNIT_STEPS
#define BERYL_UNIT_STEPS(steps) ((steps) >= 8 ? 2 : 1)
#define BERYL_BUFFERS 4
#endif

namespace beryl::cuda {

struct PrefillKernelArgs {
  const uint8_t* weights;
  int64_t unit_bytes, stage_bytes;
  int stage_code_bytes;             // of all tiles of a stage
  int k_warps, row_warps, n_stages;
  int n_column_tiles, n_row_tiles;

  const unsigned char* x;
  const float* x_scales;            // [token blocks · 128]
  const float* row_powers;          // [n_row_tiles · 16]
  const float* row_factors;         // [n_row_tiles · 16]: what sums are multiplied by

  RowsView y, other;
  int n_rows;                       // of x
  int outputs;
  float softcap;
  DecodeEpilogue epilogue;

  bool staged;                      // y's addresses and widths are multiples of 16 bytes: whole lines by bulk copies

  int n_token_blocks, n_row_blocks; // of the kernel's shape
  int n_stored_blocks;              // of 128 tokens, in x
  int group_blocks;                 // token blocks that are finished before others begin
};

inline constexpr int kPrefillGroups = 2;            // of four warps that multiply
inline constexpr int kPrefillThreads = (kPrefillGroups + 1) * 128;
inline constexpr int kPrefillBlockTokens = 128;     // of x as it lies in memory
inline constexpr int kPrefillSharedBytes = 232448;  // of a block on sm_90
inline constexpr int kPrefillMostStages = 6;

// How a kernel divides its product and its shared memory: 64 · m rows of W a group of warps, `tokens` rows of x.
struct PrefillShape {
  Format format;
  int m, tokens;

  constexpr int slabs() const { return tile_shape(format).columns / 64; }
  constexpr int row_tiles() const { return kPrefillGroups * 4 * m; }
  constexpr int x_bytes() const { return slabs() * tokens * 128; }                // of a stage
  constexpr int weight_bytes() const { return row_tiles() * (tile_shape(format).code_bytes + tile_shape(format).meta_bytes); }
  constexpr int stages() const {
    const int fit = (kPrefillSharedBytes - small_bytes()) / (x_bytes() + weight_bytes());
    return fit < kPrefillMostStages ? fit : kPrefillMostStages;
  }
  constexpr int weights_at() const { return stages() * x_bytes(); }
  constexpr int small_at() const { return weights_at() + stages() * weight_bytes(); }
  constexpr int small_bytes() const;
  constexpr int shared_bytes() const { return small_at() + small_bytes(); }
};

// y on its way to memory: 16 tokens of a group's 64 rows at a time, in two buffers by turns.
inline constexpr int kStagedTokens = 16, kStagedStride = 68;      // floats from token to token: no bank conflicts
template <int kTokens>
struct PrefillSmall {
  float y[kPrefillGroups][2][kStagedTokens * kStagedStride];
  float x_scales[kPrefillGroups][kTokens];
  alignas(8) uint64_t full[kPrefillMostStages];
  uint64_t empty[kPrefillMostStages];
};
constexpr int PrefillShape::small_bytes() const {
  return static_cast<int>(tokens == 256 ? sizeof(PrefillSmall<256>) : sizeof(PrefillSmall<128>));
}

#if BERYL_WGMMA

// One of the two activations: v · sigmoid(v · (linear + cubic · v²)).
struct QuickGate {
  float linear, cubic;
  __device__ __forceinline__ explicit QuickGate(bool gelu)
      : linear(gelu ? 1.5957691216057308f : 1.0f), cubic(gelu ? 1.5957691216057308f * 0.044715f : 0.0f) {}
  __device__ __forceinline__ float operator()(float v) const {
    return __fdividef(v, 1.0f + __expf(-v * __fmaf_rn(cubic * v, v, linear)));
  }
};

template <class Codec, Format kFormat, int kM, int kTokens>
class PrefillLinear {
 public:
  static constexpr PrefillShape kShape = {kFormat, kM, kTokens};
  static constexpr TileShape kTile = tile_shape(kFormat);
  static constexpr int kSlabs = kShape.slabs();
  static constexpr int kSlabBytes = kTokens * 128;
  static constexpr int kTileSteps = kSlabs * 4;
  // A unit is what is widened at a time. While one is, those of all buffers but one are multiplied or wait for it.
  static constexpr int kUnitSteps = BERYL_UNIT_STEPS(kM * kTileSteps);
  static constexpr int kBuffers = BERYL_BUFFERS;
  static constexpr int kTileUnits = kTileSteps / kUnitSteps;
  static constexpr int kUnits = kM * kTileUnits;
  static constexpr int kRowTiles = kShape.row_tiles();
  static constexpr int kStages = kShape.stages();
  static constexpr int kMetaAt = kRowTiles * kTile.code_bytes;
  static constexpr int kColumnTiles = kTokens / 8;            // of d
  static constexpr bool kBf16 = kFormat == Format::kBf16;
  using Small = PrefillSmall<kTokens>;
  static_assert(kUnits % kBuffers == 0 && kStages >= 2);

  __device__ __forceinline__ PrefillLinear(const PrefillKernelArgs& args, unsigned char* shared_memory)
      : a(args), shared(shared_memory), small(*reinterpret_cast<Small*>(shared_memory + kShape.small_at())),
        warp(static_cast<int>(threadIdx.x) / 32), lane(static_cast<int>(threadIdx.x) % 32), group(warp / 4) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        barrier_init(small.full + i, 1);
        barrier_init(small.empty + i, kPrefillGroups * 4);
      }
      barrier_init_fence();
    }
    __syncthreads();
    grid_wait();
    if (group == kPrefillGroups) {
      give_registers<40>();
      if (warp == kPrefillGroups * 4) copy();
    } else {
      take_registers<232>();
      multiply();
    }
  }

 private:
  struct Place {
    int row_block, token_block;     // of the kernel's tokens
  };
  // Groups of token blocks; within one, all row blocks, tokens fastest.
  __device__ __forceinline__ Place place(int tile) const {
    const int whole = a.group_blocks * a.n_row_blocks, index = tile / whole, rest = tile - index * whole;
    const int first = index * a.group_blocks, width = min(a.group_blocks, a.n_token_blocks - first);
    return {rest / width, first + rest % width};
  }
  __device__ __forceinline__ int n_tiles() const { return a.n_row_blocks * a.n_token_blocks; }
  __device__ __forceinline__ unsigned char* x_of(int slot) const { return shared + slot * kShape.x_bytes(); }
  __device__ __forceinline__ unsigned char* weights_of(int slot) const {
    return shared + kShape.weights_at() + slot * kShape.weight_bytes();
  }

  // ---- the copying warp ----
  __device__ __forceinline__ void copy() {
    constexpr int kXCopies = kSlabs * (kTokens / kPrefillBlockTokens);
    constexpr int kBlockSlab = kPrefillBlockTokens * 128;
    int slot = 0;
    uint32_t parity = 1;                            // the first round waits for nothing
    const bool has_codes = lane < kRowTiles, has_meta = kTile.meta_bytes > 0 && lane >= 32 - kRowTiles;
    const int own = has_codes ? lane : lane - (32 - kRowTiles);
#pragma unroll 1
    for (int tile = static_cast<int>(blockIdx.x); tile < n_tiles(); tile += static_cast<int>(gridDim.x)) {
      const Place at = place(tile);
      // Row tiles that the matrix does not have are the last one again.
      const int row_tile = min(at.row_block * kRowTiles + max(own, 0), a.n_row_tiles - 1);
      const int within = row_tile % a.row_warps;
      const uint8_t* unit = a.weights + row_tile / a.row_warps * a.unit_bytes;
      // A lane's block and slab of x; so are token blocks.
      const int block = min(at.token_block * (kTokens / kPrefillBlockTokens) + lane / kSlabs, a.n_stored_blocks - 1);
      const unsigned char* x = a.x + (int64_t{block} * a.n_column_tiles * kSlabs + lane % kSlabs) * kBlockSlab;
#pragma unroll 1
      for (int column = 0; column < a.n_column_tiles; ++column) {
        barrier_wait(small.empty + slot, parity);
        if (lane == 0)
          asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(small.full + slot)),
                       "r"(kShape.x_bytes() + kShape.weight_bytes())
                       : "memory");
        __syncwarp();
        if (lane < kXCopies)
          copy_part(x_of(slot) + lane % kSlabs * kSlabBytes + lane / kSlabs * kBlockSlab, x, kBlockSlab, small.full + slot);
        const StageWarp from = stage_of_column(a.n_stages, a.k_warps, column);
        const uint8_t* source = unit + from.stage * a.stage_bytes;
        const int index = from.k * a.row_warps + within;
        if (has_codes)
          copy_part(weights_of(slot) + own * kTile.code_bytes, source + index * kTile.code_bytes, kTile.code_bytes,
                    small.full + slot);
        if (has_meta)
          copy_part(weights_of(slot) + kMetaAt + own * kTile.meta_bytes,
                    source + a.stage_code_bytes + index * kTile.meta_bytes, kTile.meta_bytes, small.full + slot);
        x += kSlabs * kBlockSlab;
        if (++slot == kStages) slot = 0, parity ^= 1;
      }
    }
  }
  __device__ __forceinline__ static void copy_part(void* to, const void* from, uint32_t n_bytes, uint64_t* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(n_bytes), "r"(shared_address(barrier))
                 : "memory");
  }

  // ---- the multiplying warps ----
  __device__ __forceinline__ void multiply() {
    const int own = group * 4 * kM + warp % 4;      // row tiles own, own + 4, ... of the block's
    int slot = 0;
    uint32_t parity = 0;
    uint32_t operands[kBuffers][kUnitSteps][4] = {};
#pragma unroll 1
    for (int tile = static_cast<int>(blockIdx.x); tile < n_tiles(); tile += static_cast<int>(gridDim.x)) {
      const Place at = place(tile);
      const int row_tile = at.row_block * kRowTiles + own;
      float power[kM][2], factor[kM][2];
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = min(row_tile + 4 * m, a.n_row_tiles - 1) * kTileRows + lane / 4 + 8 * h;
          power[m][h] = has_row_powers(kFormat) ? __ldcg(a.row_powers + row) : 1.0f;
          factor[m][h] = __ldcg(a.row_factors + row);
        }
      // Read after the barriers of store().
      for (int i = static_cast<int>(threadIdx.x) % 128; i < kTokens; i += 128)
        small.x_scales[group][i] = __ldcg(a.x_scales + min(at.token_block * kTokens + i, a.n_stored_blocks * kPrefillBlockTokens - 1));
      float sums[kM][kColumnTiles][4];
      typename Codec::Loaded loaded;
      barrier_wait(small.full + slot, parity);
      widen(0, slot, own, power, loaded, operands[0]);
#pragma unroll 1
      for (int column = 0; column < a.n_column_tiles; ++column) {
        const uint64_t x = slab_descriptor(shared_address(x_of(slot)));
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
          const int m = unit / kTileUnits, first = unit % kTileUnits * kUnitSteps, next = (unit + 1) % kBuffers;
          products_begin();
#pragma unroll
          for (int i = 0; i < kUnitSteps; ++i) {
            const int step = first + i;
            multiply_step<kBf16>(sums[m], operands[unit % kBuffers][i],
                                 x + static_cast<uint64_t>(step / 4 * (kSlabBytes / 16)) + step % 4 * kStepPieces,
                                 step == 0 ? column : 1);
          }
          products_commit();
          products_wait<BERYL_WAIT>();            // what was multiplied from the next buffer is done
          hold(operands[next]);
          if (unit == BERYL_WAIT - 1 && column > 0) release(slot == 0 ? kStages - 1 : slot - 1);
          if (unit + 1 < kUnits) {
            widen(unit + 1, slot, own, power, loaded, operands[next]);
          } else {
            if (++slot == kStages) slot = 0, parity ^= 1;
            if (column + 1 < a.n_column_tiles) {
              barrier_wait(small.full + slot, parity);
              widen(0, slot, own, power, loaded, operands[next]);
            }
          }
        }
      }
      products_wait<0>();
#pragma unroll
      for (int i = 0; i < kBuffers; ++i) hold(operands[i]);
#pragma unroll
      for (int m = 0; m < kM; ++m) hold(sums[m]);
      release(slot == 0 ? kStages - 1 : slot - 1);
#pragma unroll
      for (int m = 0; m < kM; ++m) store(sums[m], factor[m], row_tile + 4 * m, at.token_block * kTokens);
    }
    // Shared memory must outlast what still reads it.
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  }
  __device__ __forceinline__ void release(int slot) const {
    __syncwarp();
    if (lane == 0) barrier_arrive(small.empty + slot);
  }
  // The operands of one unit; its row tile is loaded with the tile's first unit.
  __device__ __forceinline__ void widen(int unit, int slot, int own, const float (&power)[kM][2],
                                        typename Codec::Loaded& loaded, uint32_t (&out)[kUnitSteps][4]) const {
    const int m = unit / kTileUnits, first = unit % kTileUnits * kUnitSteps;
    if (first == 0) {
      const unsigned char* weights = weights_of(slot);
      Codec::load(loaded, weights + (own + 4 * m) * kTile.code_bytes, weights + kMetaAt + (own + 4 * m) * kTile.meta_bytes,
                  lane);
    }
#pragma unroll
    for (int i = 0; i < kUnitSteps; ++i) {
#ifdef BERYL_PROBE_PLAIN
      const uint32_t* raw = reinterpret_cast<const uint32_t*>(&loaded);
      for (int j = 0; j < 4; ++j) out[i][j] = raw[(first + i + 2 * j) % 8];
#else
      Widen<Codec>::step(loaded, power[m], first + i, out[i]);
#endif
    }
  }

  // ---- y ----
  __device__ __forceinline__ void group_barrier() const { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }

  // A lane has rows lane / 4 and lane / 4 + 8 of the row tile for tokens 8 i + 2 (lane % 4) and the next.
  __device__ __forceinline__ void store(const float (&sum)[kColumnTiles][4], const float (&factor)[2], int row_tile,
                                        int first_token) {
    const bool gated = a.epilogue == DecodeEpilogue::kGatedGelu || a.epilogue == DecodeEpilogue::kGatedSilu;
    if (!a.staged) {
      group_barrier();
      if (row_tile < a.n_row_tiles) store_directly(sum, factor, row_tile, first_token, gated);
      group_barrier();
    } else if (gated) {
      store_staged<32>(row_tile, first_token, [&](int i, float2 scale, float* to) {
        const QuickGate gate(a.epilogue == DecodeEpilogue::kGatedGelu);
        to += warp % 4 * 8;
        to[0] = gate(sum[i][0] * (factor[0] * scale.x)) * (sum[i][2] * (factor[1] * scale.x));
        to[kStagedStride] = gate(sum[i][1] * (factor[0] * scale.y)) * (sum[i][3] * (factor[1] * scale.y));
      });
    } else {
      store_staged<64>(row_tile, first_token, [&](int i, float2 scale, float* to) {
        to += warp % 4 * 16;
        to[0] = sum[i][0] * (factor[0] * scale.x), to[8] = sum[i][2] * (factor[1] * scale.x);
        to[kStagedStride] = sum[i][1] * (factor[0] * scale.y), to[kStagedStride + 8] = sum[i][3] * (factor[1] * scale.y);
      });
    }
  }
  // By way of shared memory and bulk copies: kOutputs of each token, whole lines. write: values of column tile i.
  template <int kOutputs, class Write>
  __device__ __forceinline__ void store_staged(int row_tile, int first_token, Write&& write) {
    const int first_output = (row_tile - warp % 4) * (kOutputs / 4);
    const int bytes = min(kOutputs, a.outputs - first_output) * static_cast<int>(sizeof(float));
    const int mine = warp % 4 * 4 + lane;           // of lanes 0..3: a token of those staged
    float* y = a.y.values + (first_token + mine) * a.y.stride + first_output;
    const bool copies = lane < 4 && bytes > 0;
#pragma unroll
    for (int part = 0; part < kTokens / kStagedTokens; ++part) {
      float* staged = small.y[group][part % 2];
      asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");      // what left this buffer last has been read
      group_barrier();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = part * kStagedTokens + 8 * i + lane % 4 * 2;
        write(part * 2 + i, *reinterpret_cast<const float2*>(small.x_scales[group] + token),
              staged + (8 * i + lane % 4 * 2) * kStagedStride + lane / 4);
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      group_barrier();
      if (copies && first_token + part * kStagedTokens + mine < a.n_rows)
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(y + part * kStagedTokens * a.y.stride),
                     "r"(shared_address(staged + mine * kStagedStride)), "r"(bytes)
                     : "memory");
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
  }
  __device__ __forceinline__ void store_directly(const float (&sum)[kColumnTiles][4], const float (&factor)[2], int row_tile,
                                                 int first_token, bool gated) const {
    const int token = first_token + lane % 4 * 2;
    const float2* scales = reinterpret_cast<const float2*>(small.x_scales[group] + lane % 4 * 2);
    const int output = row_tile * (gated ? 8 : 16) + lane / 4;
    float* y = a.y.values + token * a.y.stride + output;
    const float* other = a.other.values + token * a.other.stride + output;
    const bool has_first = output < a.outputs, has_second = !gated && output + 8 < a.outputs;
    const int left = a.n_rows - token;              // tokens from this lane's first on
    const QuickGate gate(a.epilogue != DecodeEpilogue::kTimesSiluOther && a.epilogue != DecodeEpilogue::kGatedSilu);
#pragma unroll
    for (int i = 0; i < kColumnTiles; ++i) {
      const float2 scale = scales[4 * i];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool live = (j < 2 ? has_first : has_second) && 8 * i + j % 2 < left;
        float value = sum[i][j] * (factor[j / 2] * (j % 2 == 0 ? scale.x : scale.y));
        if (!live) continue;
        if (gated) {
          value = gate(value) * (sum[i][j % 2 + 2] * (factor[1] * (j % 2 == 0 ? scale.x : scale.y)));
        } else if (a.epilogue == DecodeEpilogue::kSoftcap) {
          value = a.softcap * tanhf(value / a.softcap);
        } else if (a.epilogue != DecodeEpilogue::kStore) {
          const float with = other[(8 * i + j % 2) * a.other.stride + j / 2 * 8];
          value = a.epilogue == DecodeEpilogue::kGeluTimesOther ? gate(value) * with : value * gate(with);
        }
        y[(8 * i + j % 2) * a.y.stride + j / 2 * 8] = value;
      }
    }
  }

  const PrefillKernelArgs& a;
  unsigned char* shared;
  Small& small;
  int warp, lane, group;
};

#endif

template <class Codec, Format kFormat, int kM, int kTokens>
__global__ void __launch_bounds__(kPrefillThreads, 1) prefill_kernel(const __grid_constant__ PrefillKernelArgs args) {
#if BERYL_WGMMA
  extern __shared__ __align__(1024) unsigned char prefill_shared[];
  PrefillLinear<Codec, kFormat, kM, kTokens>(args, prefill_shared).run();
#endif
}

// A format's kernels, of whatever shapes it has.
using PrefillKernelPointer = void (*)(PrefillKernelArgs);
struct PrefillKernel {
  PrefillKernelPointer kernel = nullptr;            // null: none
  int m = 0, tokens = 0, shared_bytes = 0;
};
struct PrefillKernels {
  PrefillKernel kernels[3] = {};
};
template <class Codec, Format kFormat, int kM, int kTokens>
PrefillKernel prefill_kernel_of() {
  return {prefill_kernel<Codec, kFormat, kM, kTokens>, kM, kTokens, PrefillShape{kFormat, kM, kTokens}.shared_bytes()};
}
template <class Codec, Format kFormat>
PrefillKernels prefill_kernels() {
  return {{prefill_kernel_of<Codec, kFormat, 1, 128>(), prefill_kernel_of<Codec, kFormat, 2, 128>(),
           prefill_kernel_of<Codec, kFormat, 1, 256>()}};
}

// In prefill_FAMILY.cu, so that they compile side by side; empty for formats of another family.
PrefillKernels prefill_e2m1_kernels(Format format);
PrefillKernels prefill_integer_kernels(Format format);
PrefillKernels prefill_k_kernels(Format format);
PrefillKernels prefill_float_kernels(Format format);

}  // namespace beryl::cuda
