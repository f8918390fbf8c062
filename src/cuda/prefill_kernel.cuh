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

  int n_token_blocks, n_row_blocks;
  int group_blocks;                 // token blocks that are finished before others begin
};

inline constexpr int kPrefillGroups = 2;            // of four warps that multiply
inline constexpr int kPrefillThreads = (kPrefillGroups + 1) * 128;
inline constexpr int kPrefillBlockTokens = 128;
inline constexpr int kPrefillSlabBytes = kPrefillBlockTokens * 128;
inline constexpr int kPrefillBarrierBytes = 256;
inline constexpr int kPrefillSharedBytes = 232448;  // of a block on sm_90

constexpr int prefill_row_tiles(int m) { return kPrefillGroups * 4 * m; }
constexpr int prefill_stage_bytes(Format format, int m) {
  const TileShape tile = tile_shape(format);
  const int bytes = tile.columns / 64 * kPrefillSlabBytes + prefill_row_tiles(m) * (tile.code_bytes + tile.meta_bytes);
  return (bytes + 1023) / 1024 * 1024;
}
constexpr int prefill_stages(Format format, int m) {
  const int fit = (kPrefillSharedBytes - kPrefillBarrierBytes) / prefill_stage_bytes(format, m);
  return fit < 6 ? fit : 6;
}
constexpr int prefill_shared_bytes(Format format, int m) {
  return prefill_stages(format, m) * prefill_stage_bytes(format, m) + kPrefillBarrierBytes;
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

template <class Codec, Format kFormat, int kM>
class PrefillLinear {
 public:
  static constexpr TileShape kTile = tile_shape(kFormat);
  static constexpr int kSlabs = kTile.columns / 64;
  static constexpr int kTileSteps = kSlabs * 4;
  // A unit is what is multiplied while the next is widened; there is an even number of them in a stage.
  static constexpr int kUnitSteps = 4;
  static constexpr int kTileUnits = kTileSteps / kUnitSteps;
  static constexpr int kUnits = kM * kTileUnits;
  static constexpr int kRowTiles = prefill_row_tiles(kM);
  static constexpr int kStageBytes = prefill_stage_bytes(kFormat, kM);
  static constexpr int kStages = prefill_stages(kFormat, kM);
  static constexpr int kCodesAt = kSlabs * kPrefillSlabBytes;
  static constexpr int kMetaAt = kCodesAt + kRowTiles * kTile.code_bytes;
  static constexpr bool kBf16 = kFormat == Format::kBf16;
  static_assert(kUnits % 2 == 0 && kStages >= 2);

  __device__ __forceinline__ PrefillLinear(const PrefillKernelArgs& args, unsigned char* shared_memory)
      : a(args), shared(shared_memory), full(reinterpret_cast<uint64_t*>(shared_memory + kStages * kStageBytes)),
        empty(full + kStages), warp(static_cast<int>(threadIdx.x) / 32), lane(static_cast<int>(threadIdx.x) % 32) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        barrier_init(full + i, 1);
        barrier_init(empty + i, kPrefillGroups * 4);
      }
      barrier_init_fence();
    }
    __syncthreads();
    grid_wait();
    if (warp >= kPrefillGroups * 4) {
      give_registers<40>();
      if (warp == kPrefillGroups * 4) copy();
    } else {
      take_registers<232>();
      multiply();
    }
  }

 private:
  struct Place {
    int row_block, token_block;
  };
  // Groups of token blocks; within one, all row blocks, tokens fastest.
  __device__ __forceinline__ Place place(int tile) const {
    const int whole = a.group_blocks * a.n_row_blocks, group = tile / whole, rest = tile - group * whole;
    const int first = group * a.group_blocks, width = min(a.group_blocks, a.n_token_blocks - first);
    return {rest / width, first + rest % width};
  }
  __device__ __forceinline__ int n_tiles() const { return a.n_row_blocks * a.n_token_blocks; }

  // ---- the copying warp ----
  __device__ __forceinline__ void copy() {
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
      const unsigned char* x = a.x + int64_t{at.token_block} * a.n_column_tiles * (kSlabs * kPrefillSlabBytes);
#pragma unroll 1
      for (int column = 0; column < a.n_column_tiles; ++column) {
        unsigned char* stage = shared + slot * kStageBytes;
        barrier_wait(empty + slot, parity);
        if (lane == 0)
          asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(full + slot)),
                       "r"(kSlabs * kPrefillSlabBytes + kRowTiles * (kTile.code_bytes + kTile.meta_bytes))
                       : "memory");
        __syncwarp();
        if (lane < kSlabs)
          copy_part(stage + lane * kPrefillSlabBytes, x + lane * kPrefillSlabBytes, kPrefillSlabBytes, full + slot);
        const StageWarp from = stage_of_column(a.n_stages, a.k_warps, column);
        const uint8_t* source = unit + from.stage * a.stage_bytes;
        const int index = from.k * a.row_warps + within;
        if (has_codes)
          copy_part(stage + kCodesAt + own * kTile.code_bytes, source + index * kTile.code_bytes, kTile.code_bytes, full + slot);
        if (has_meta)
          copy_part(stage + kMetaAt + own * kTile.meta_bytes, source + a.stage_code_bytes + index * kTile.meta_bytes,
                    kTile.meta_bytes, full + slot);
        x += kSlabs * kPrefillSlabBytes;
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
    const int group = warp / 4, own = group * 4 * kM + warp % 4;        // row tiles own, own + 4, ... of the block's
    int slot = 0;
    uint32_t parity = 0;
    uint32_t operands[2][kUnitSteps][4] = {};
#pragma unroll 1
    for (int tile = static_cast<int>(blockIdx.x); tile < n_tiles(); tile += static_cast<int>(gridDim.x)) {
      const Place at = place(tile);
      const int row_tile = at.row_block * kRowTiles + own;
      float power[kM][2];
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = min(row_tile + 4 * m, a.n_row_tiles - 1) * kTileRows + lane / 4 + 8 * h;
          power[m][h] = has_row_powers(kFormat) ? __ldcg(a.row_powers + row) : 1.0f;
        }
      float sums[kM][16][4];
      typename Codec::Loaded loaded;
      barrier_wait(full + slot, parity);
      widen(0, slot, own, power, loaded, operands[0]);
#pragma unroll 1
      for (int column = 0; column < a.n_column_tiles; ++column) {
        const uint64_t x = slab_descriptor(shared_address(shared + slot * kStageBytes));
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
          const int m = unit / kTileUnits, first = unit % kTileUnits * kUnitSteps;
          products_begin();
#pragma unroll
          for (int i = 0; i < kUnitSteps; ++i) {
            const int step = first + i;
            const int add = step == 0 ? column : 1;
            multiply_step<kBf16>(sums[m], operands[unit % 2][i],
                                 x + static_cast<uint64_t>(step / 4 * (kPrefillSlabBytes / 16)) + step % 4 * kStepPieces, add);
          }
          products_commit();
          products_wait<1>();                       // the unit before is done
          hold(operands[(unit + 1) % 2]);
          if (unit == 0 && column > 0) release(slot == 0 ? kStages - 1 : slot - 1);
          if (unit + 1 < kUnits) {
            widen(unit + 1, slot, own, power, loaded, operands[(unit + 1) % 2]);
          } else {
            if (++slot == kStages) slot = 0, parity ^= 1;
            if (column + 1 < a.n_column_tiles) {
              barrier_wait(full + slot, parity);
              widen(0, slot, own, power, loaded, operands[0]);
            }
          }
        }
      }
      products_wait<0>();
      hold(operands[1]);
#pragma unroll
      for (int m = 0; m < kM; ++m) hold(sums[m]);
      release(slot == 0 ? kStages - 1 : slot - 1);
#pragma unroll
      for (int m = 0; m < kM; ++m) finish(sums[m], row_tile + 4 * m, at.token_block * kPrefillBlockTokens);
    }
  }
  __device__ __forceinline__ void release(int slot) const {
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + slot);
  }
  // The operands of one unit; its row tile is loaded with the tile's first unit.
  __device__ __forceinline__ void widen(int unit, int slot, int own, const float (&power)[kM][2],
                                        typename Codec::Loaded& loaded, uint32_t (&out)[kUnitSteps][4]) const {
    const int m = unit / kTileUnits, first = unit % kTileUnits * kUnitSteps;
    if (first == 0) {
      const unsigned char* stage = shared + slot * kStageBytes;
      Codec::load(loaded, stage + kCodesAt + (own + 4 * m) * kTile.code_bytes,
                  stage + kMetaAt + (own + 4 * m) * kTile.meta_bytes, lane);
    }
#pragma unroll
    for (int i = 0; i < kUnitSteps; ++i) Widen<Codec>::step(loaded, power[m], first + i, out[i]);
  }

  // ---- y ----
  // A lane has rows lane / 4 and lane / 4 + 8 of the row tile for tokens 8 i + 2 (lane % 4) and the next.
  __device__ __forceinline__ void finish(const float (&sum)[16][4], int row_tile, int first_token) const {
    if (row_tile >= a.n_row_tiles) return;
    const int token = first_token + lane % 4 * 2;
    const float* factors = a.row_factors + row_tile * kTileRows + lane / 4;
    const float factor[2] = {__ldcg(factors), __ldcg(factors + 8)};
    const float2* scales = reinterpret_cast<const float2*>(a.x_scales + token);
    const bool gated = a.epilogue == DecodeEpilogue::kGatedGelu || a.epilogue == DecodeEpilogue::kGatedSilu;
    const int output = row_tile * (gated ? 8 : 16) + lane / 4;
    float* y = a.y.values + token * a.y.stride + output;
    const bool has_first = output < a.outputs, has_second = output + 8 < a.outputs;
    const int left = a.n_rows - token;              // tokens from this lane's first on
    if (gated) {
      const QuickGate gate(a.epilogue == DecodeEpilogue::kGatedGelu);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float2 scale = __ldcg(scales + 4 * i);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float s = j == 0 ? scale.x : scale.y;
          const float value = gate(sum[i][j] * (factor[0] * s)) * (sum[i][2 + j] * (factor[1] * s));
          if (has_first && 8 * i + j < left) y[(8 * i + j) * a.y.stride] = value;
        }
      }
    } else if (a.epilogue == DecodeEpilogue::kStore) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float2 scale = __ldcg(scales + 4 * i);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float s = j == 0 ? scale.x : scale.y;
          float* to = y + (8 * i + j) * a.y.stride;
          if (has_first && 8 * i + j < left) to[0] = sum[i][j] * (factor[0] * s);
          if (has_second && 8 * i + j < left) to[8] = sum[i][2 + j] * (factor[1] * s);
        }
      }
    } else {
      const float* other = a.other.values + token * a.other.stride + output;
      const QuickGate gate(a.epilogue != DecodeEpilogue::kTimesSiluOther);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float2 scale = __ldcg(scales + 4 * i);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const bool live = (j < 2 ? has_first : has_second) && 8 * i + j % 2 < left;
          float value = sum[i][j] * (factor[j / 2] * (j % 2 == 0 ? scale.x : scale.y));
          if (a.epilogue == DecodeEpilogue::kSoftcap) {
            value = a.softcap * tanhf(value / a.softcap);
          } else {
            const float with = live ? other[(8 * i + j % 2) * a.other.stride + j / 2 * 8] : 0.0f;
            value = a.epilogue == DecodeEpilogue::kGeluTimesOther ? gate(value) * with : value * gate(with);
          }
          if (live) y[(8 * i + j % 2) * a.y.stride + j / 2 * 8] = value;
        }
      }
    }
  }

  const PrefillKernelArgs& a;
  unsigned char* shared;
  uint64_t *full, *empty;
  int warp, lane;
};

#endif

template <class Codec, Format kFormat, int kM>
__global__ void __launch_bounds__(kPrefillThreads, 1) prefill_kernel(const __grid_constant__ PrefillKernelArgs args) {
#if BERYL_WGMMA
  extern __shared__ __align__(1024) unsigned char prefill_shared[];
  PrefillLinear<Codec, kFormat, kM>(args, prefill_shared).run();
#endif
}

// A format's kernels for 128 (16-bit weights: none) and 256 rows of W at a time.
using PrefillKernelPointer = void (*)(PrefillKernelArgs);
struct PrefillKernels {
  PrefillKernelPointer kernels[2] = {};
  int shared_bytes[2] = {};
};
template <class Codec, Format kFormat>
PrefillKernels prefill_kernels() {
  // Units come in pairs: tiles of 64 columns have one for each 64 rows of W.
  PrefillKernelPointer small = nullptr;
  if constexpr (tile_shape(kFormat).columns == 128) small = prefill_kernel<Codec, kFormat, 1>;
  return {{small, prefill_kernel<Codec, kFormat, 2>}, {prefill_shared_bytes(kFormat, 1), prefill_shared_bytes(kFormat, 2)}};
}

// In prefill_FAMILY.cu, so that they compile side by side; empty for formats of another family.
PrefillKernels prefill_e2m1_kernels(Format format);
PrefillKernels prefill_integer_kernels(Format format);
PrefillKernels prefill_k_kernels(Format format);
PrefillKernels prefill_float_kernels(Format format);

}  // namespace beryl::cuda
