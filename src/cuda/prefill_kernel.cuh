// The product of prefill_linear.h: y = epilogue(W · x), x as 16-bit values that a kernel before has laid out.
//
// A block makes 128 rows of W times 64, 128 or 256 tokens at a time, 8 warps with 16 rows of W each, in two groups of
// four. A warp takes its own packed tile of W out of shared memory into registers, widens 64 columns of it there
// (prefill_widen.cuh) while the tensor cores multiply the 64 before, and never writes them anywhere. The warps of a
// third group keep two rings full by bulk copies: slabs of x (64 columns), and column tiles of W as they are packed.
// Two blocks with neighbouring rows of W form a cluster and share x (not for 64 tokens): each copies half of every slab
// to both. Blocks stay and take one product tile after the other; those at work together share W and x through the L2.
// y leaves by way of shared memory in whole lines. One group begins a little after the other, so that they do not store
// at the same time.
//
//   x        [token blocks][slabs of 64 columns][128 tokens][128 bytes], 16-byte pieces exchanged (prefill_wgmma.cuh)
//
// Per 128 columns and product tile of 128 x 256: 32 KB of x (and as much from the other block) and 8.4 KB of FP4 from
// the L2, 2,048 cycles of the tensor cores. The sum of an output runs from left to right through all columns, whatever
// the tile: a row's bits do not depend on the number of rows.
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
  int stage_code_bytes;  // of all tiles of a stage
  int k_warps, row_warps, n_stages;
  int n_column_tiles, n_row_tiles;

  const unsigned char* x;
  const float* x_scales;     // [token blocks · 128]
  const float* row_powers;   // [n_row_tiles · 16]
  const float* row_factors;  // [n_row_tiles · 16]: what sums are multiplied by

  RowsView y, other;
  int n_rows;  // of x
  int outputs;
  int head_start;  // cycles
  float softcap;
  DecodeEpilogue epilogue;

  bool staged;  // y's addresses and widths are multiples of 16 bytes: whole lines by bulk copies

  int n_token_blocks, n_row_blocks;  // of the kernel's shape
  int n_stored_blocks;               // of 128 tokens, in x
  int group_blocks;                  // token blocks that are finished before others begin
};

inline constexpr int kPrefillGroups = 2;  // of four warps that multiply
inline constexpr int kPrefillThreads = (kPrefillGroups + 1) * 128;
inline constexpr int kPrefillBlockTokens = 128;     // of x as it lies in memory
inline constexpr int kPrefillSharedBytes = 232448;  // of a block on sm_90
inline constexpr int kPrefillMostSlots = 10;
inline constexpr int kPrefillRowTiles = kPrefillGroups * 4;  // of a block: one a warp

// How a kernel divides its shared memory: a ring of slabs of x (64 columns), a ring of column tiles of W, and the rest.
struct PrefillShape {
  Format format;
  int tokens;  // rows of x

  constexpr int slabs() const { return tile_shape(format).columns / 64; }  // of a column tile
  constexpr int slab_bytes() const { return tokens * 128; }
  constexpr int weight_bytes() const {
    return kPrefillRowTiles * (tile_shape(format).code_bytes + tile_shape(format).meta_bytes);
  }
  constexpr int x_slots() const {
    const int fit = (kPrefillSharedBytes - small_bytes() - 2 * weight_bytes()) / slab_bytes();
    return fit < kPrefillMostSlots ? fit : kPrefillMostSlots;
  }
  // Weights are in registers soon: few slots do.
  constexpr int weight_slots() const {
    const int fit = (kPrefillSharedBytes - small_bytes() - weights_at()) / weight_bytes();
    return fit < 4 ? fit : 4;
  }
  constexpr int weights_at() const { return x_slots() * slab_bytes(); }
  constexpr int small_at() const { return weights_at() + weight_slots() * weight_bytes(); }
  constexpr int small_bytes() const;
  constexpr int shared_bytes() const { return small_at() + small_bytes(); }
};

// y on its way to memory: 16 tokens of a group's 64 rows at a time, in two buffers by turns.
inline constexpr int kStagedTokens = 16, kStagedStride = 68;  // floats from token to token: no bank conflicts
template <int kTokens>
struct PrefillSmall {
  float y[kPrefillGroups][2][kStagedTokens * kStagedStride];
  __nv_bfloat16 x_scales[kPrefillGroups][kTokens];  // powers of two, so exact
  alignas(8) uint64_t x_full[kPrefillMostSlots];
  uint64_t x_empty[kPrefillMostSlots];
  uint64_t weights_full[4];
  uint64_t weights_empty[4];
};
constexpr int PrefillShape::small_bytes() const {
  return static_cast<int>(tokens == 256   ? sizeof(PrefillSmall<256>)
                          : tokens == 128 ? sizeof(PrefillSmall<128>)
                                          : sizeof(PrefillSmall<64>));
}

#if BERYL_WGMMA
#define BERYL_CLUSTER(n) __cluster_dims__(n, 1, 1)

// One of the two activations: v · sigmoid(v · (linear + cubic · v²)).
struct QuickGate {
  float linear, cubic;
  __device__ __forceinline__ explicit QuickGate(bool gelu)
      : linear(gelu ? 1.5957691216057308f : 1.0f), cubic(gelu ? 1.5957691216057308f * 0.044715f : 0.0f) {}
  __device__ __forceinline__ float operator()(float v) const {
    return v * approximate_reciprocal(1.0f + __expf(-v * __fmaf_rn(cubic * v, v, linear)));
  }
};

// A place in a ring.
template <int kSlots>
struct RingPlace {
  int index = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++index == kSlots) index = 0, parity ^= 1;
  }
  __device__ __forceinline__ int before() const { return index == 0 ? kSlots - 1 : index - 1; }
};

template <class Codec, Format kFormat, int kTokens, int kCluster>
class PrefillLinear {
 public:
  static constexpr PrefillShape kShape = {kFormat, kTokens};
  static constexpr TileShape kTile = tile_shape(kFormat);
  static constexpr int kSlabs = kShape.slabs();
  static constexpr int kSlabBytes = kShape.slab_bytes();
  // A unit is what is widened at a time, while the one before is multiplied.
  static constexpr int kUnitSteps = kSlabs == 1 ? 2 : 4, kUnits = kSlabs * 4 / kUnitSteps, kSlabUnits = 4 / kUnitSteps;
  static constexpr int kBuffers = kUnits < 4 ? kUnits : 4;
  static constexpr int kXSlots = kShape.x_slots(), kWeightSlots = kShape.weight_slots();
  static constexpr int kMetaAt = kPrefillRowTiles * kTile.code_bytes;
  static constexpr int kColumnTiles = kTokens / 8;  // of d
  static constexpr int kScales = kTokens > 128 ? kTokens / 128 : 1;  // of x, a thread
  static constexpr bool kBf16 = kFormat == Format::kBf16;
  using Small = PrefillSmall<kTokens>;
  static_assert(kUnits % kBuffers == 0 && kXSlots >= 3 && kWeightSlots >= 2);

  __device__ __forceinline__ PrefillLinear(const PrefillKernelArgs& args, unsigned char* shared_memory)
      : a(args),
        shared(shared_memory),
        small(*reinterpret_cast<Small*>(shared_memory + kShape.small_at())),
        warp(static_cast<int>(threadIdx.x) / 32),
        lane(static_cast<int>(threadIdx.x) % 32),
        group(warp / 4) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kXSlots; ++i) {
        barrier_init(small.x_full + i, 1);
        barrier_init(small.x_empty + i, kCluster * kPrefillGroups * 4);
      }
      for (int i = 0; i < kWeightSlots; ++i) {
        barrier_init(small.weights_full + i, 1);
        barrier_init(small.weights_empty + i, kPrefillGroups * 4);
      }
      barrier_init_fence();
    }
    block_or_cluster_barrier();
    grid_wait();
    if (group == kPrefillGroups) {
      give_registers<40>();
      const int copier = warp - kPrefillGroups * 4;
      if (copier == 0) copy_x();
      else if (copier <= kWeightCopiers) copy_weights(copier - 1);
      __syncwarp();
    } else {
      take_registers<232>();
      // One group goes ahead, so that one stores while the other still multiplies.
      if (group == 1)
        for (const long long begin = clock64(); clock64() - begin < a.head_start;) {
        }
      multiply();
    }
    // The other block's copies and arrivals reach into this one's shared memory.
    if (kCluster > 1) block_or_cluster_barrier();
  }

 private:
  struct Place {
    int row_block, token_block;  // of the kernel's tokens
  };
  // Groups of token blocks; within one, all row blocks, tokens fastest.
  __device__ __forceinline__ Place place(int tile) const {
    const int whole = a.group_blocks * a.n_row_blocks, index = tile / whole, rest = tile - index * whole;
    const int first = index * a.group_blocks, width = min(a.group_blocks, a.n_token_blocks - first);
    return {rest / width, first + rest % width};
  }
  __device__ __forceinline__ int n_tiles() const { return a.n_row_blocks * a.n_token_blocks; }
  __device__ __forceinline__ unsigned char* x_of(int slot) const { return shared + slot * kSlabBytes; }
  __device__ __forceinline__ unsigned char* weights_of(int slot) const {
    return shared + kShape.weights_at() + slot * kShape.weight_bytes();
  }

  __device__ __forceinline__ static void block_or_cluster_barrier() {
    if constexpr (kCluster == 1) __syncthreads();
    else asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  }
  __device__ __forceinline__ static int rank() { return static_cast<int>(blockIdx.x) % kCluster; }
  __device__ __forceinline__ static int first_tile() { return static_cast<int>(blockIdx.x) / kCluster; }
  __device__ __forceinline__ static int tile_step() { return static_cast<int>(gridDim.x) / kCluster; }

  // ---- the copying warps ----
  __device__ __forceinline__ static void expect(uint64_t* barrier, uint32_t n_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(n_bytes)
                 : "memory");
  }
  // x: with two blocks in a cluster, each copies half of every slab to both.
  __device__ __forceinline__ void copy_x() {
    constexpr int kOwnTokens = kTokens / kCluster;
    constexpr int kPart = kOwnTokens < kPrefillBlockTokens ? kOwnTokens : kPrefillBlockTokens;  // tokens of a copy
    constexpr int kCopies = kOwnTokens / kPart;
    RingPlace<kXSlots> slot = {0, 1};  // the first round waits for nothing
    const int part = rank() * kCopies + min(lane, kCopies - 1), first = part * kPart;
#pragma unroll 1
    for (int tile = first_tile(); tile < n_tiles(); tile += tile_step()) {
      const int token_block = place(tile).token_block;
      // A token block that there is not is the last one again.
      const int token = token_block * kTokens + first, stored = min(token / kPrefillBlockTokens, a.n_stored_blocks - 1);
      const unsigned char* x =
          a.x + (int64_t{stored} * a.n_column_tiles * kSlabs * kPrefillBlockTokens + token % kPrefillBlockTokens) * 128;
#pragma unroll 1
      for (int slab = 0; slab < a.n_column_tiles * kSlabs; ++slab) {
        barrier_wait(small.x_empty + slot.index, slot.parity);
        if (lane == 0) expect(small.x_full + slot.index, kSlabBytes);
        __syncwarp();
        if (lane < kCopies) copy_to_all(x_of(slot.index) + first * 128, x, kPart * 128, small.x_full + slot.index);
        x += kPrefillBlockTokens * 128;
        slot.next();
      }
    }
  }
  // A copy takes its warp some 40 cycles to ask for, so two share them.
  static constexpr int kWeightCopiers = 2;
  __device__ __forceinline__ void copy_weights(int copier) {
    constexpr int kOwnTiles = kPrefillRowTiles / kWeightCopiers;
    RingPlace<kWeightSlots> slot = {0, 1};
    const bool has_codes = lane<kOwnTiles, has_meta = kTile.meta_bytes> 0 && lane >= kOwnTiles && lane < 2 * kOwnTiles;
    const int own = copier * kOwnTiles + lane % kOwnTiles;
    const int offset = has_codes ? own * kTile.code_bytes : kMetaAt + own * kTile.meta_bytes;
    const int tile_bytes = has_codes ? kTile.code_bytes : kTile.meta_bytes;
#pragma unroll 1
    for (int tile = first_tile(); tile < n_tiles(); tile += tile_step()) {
      // Row tiles that the matrix does not have are the last one again.
      const int row_tile = min((place(tile).row_block * kCluster + rank()) * kPrefillRowTiles + own, a.n_row_tiles - 1);
      const uint8_t* unit = a.weights + row_tile / a.row_warps * a.unit_bytes + (has_codes ? 0 : a.stage_code_bytes);
      const int within = row_tile % a.row_warps;
#pragma unroll 1
      for (int column = 0; column < a.n_column_tiles; ++column) {
        const StageWarp from = stage_of_column(a.n_stages, a.k_warps, column);
        barrier_wait(small.weights_empty + slot.index, slot.parity);
        if (copier == 0 && lane == 0) expect(small.weights_full + slot.index, kShape.weight_bytes());
        if (has_codes || has_meta)
          copy_part(weights_of(slot.index) + offset,
                    unit + from.stage * a.stage_bytes + (from.k * a.row_warps + within) * tile_bytes,
                    static_cast<uint32_t>(tile_bytes), small.weights_full + slot.index);
        slot.next();
      }
    }
  }
  __device__ __forceinline__ static void copy_part(void* to, const void* from, uint32_t n_bytes, uint64_t* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(n_bytes), "r"(shared_address(barrier))
                 : "memory");
  }
  // To the same place in all blocks of the cluster.
  __device__ __forceinline__ static void copy_to_all(void* to, const void* from, uint32_t n_bytes, uint64_t* barrier) {
    if constexpr (kCluster == 1) {
      copy_part(to, from, n_bytes, barrier);
    } else {
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
          "%4;" ::"r"(shared_address(to)),
          "l"(from), "r"(n_bytes), "r"(shared_address(barrier)), "h"(static_cast<uint16_t>((1 << kCluster) - 1))
          : "memory");
    }
  }

  // ---- the multiplying warps ----
  __device__ __forceinline__ void multiply() {
    RingPlace<kXSlots> x_slot;
    RingPlace<kWeightSlots> weight_slot;
    uint32_t operands[kBuffers][kUnitSteps][4] = {};
#pragma unroll 1
    for (int tile = first_tile(); tile < n_tiles(); tile += tile_step()) {
      const Place at = place(tile);
      const int row_tile = (at.row_block * kCluster + rank()) * kPrefillRowTiles + warp;
      float power[2], factor[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = min(row_tile, a.n_row_tiles - 1) * kTileRows + lane / 4 + 8 * h;
        power[h] = has_row_powers(kFormat) ? __ldcg(a.row_powers + row) : 1.0f;
        factor[h] = __ldcg(a.row_factors + row);
      }
      float x_scale[kScales];
#pragma unroll
      for (int i = 0; i < kScales; ++i) {
        const int token = at.token_block * kTokens + i * 128 + static_cast<int>(threadIdx.x) % 128;
        x_scale[i] = __ldcg(a.x_scales + min(token, a.n_stored_blocks * kPrefillBlockTokens - 1));
      }
      float sums[kColumnTiles][4];
      typename Codec::Loaded loaded;
      widen(0, weight_slot, power, loaded, operands[0]);
#pragma unroll 1
      for (int column = 0; column < a.n_column_tiles; ++column) {
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
          const int next = (unit + 1) % kBuffers;
          const bool first_of_slab = unit % kSlabUnits == 0;
          if (first_of_slab) barrier_wait(small.x_full + x_slot.index, x_slot.parity);
          const uint64_t x = slab_descriptor(shared_address(x_of(x_slot.index)));
          products_begin();
#pragma unroll
          for (int i = 0; i < kUnitSteps; ++i)
            multiply_step<kBf16>(sums, operands[unit % kBuffers][i],
                                 x + (unit % kSlabUnits * kUnitSteps + i) * kStepPieces,
                                 unit == 0 && i == 0 ? column : 1);
          products_commit();
          products_wait<1>();  // the unit before is done
          hold(operands[next]);
          if (first_of_slab && (unit > 0 || column > 0)) release_x(x_slot.before());
          if (unit % kSlabUnits == kSlabUnits - 1) x_slot.next();
          if (unit + 1 < kUnits) widen(unit + 1, weight_slot, power, loaded, operands[next]);
          else if (column + 1 < a.n_column_tiles) widen(0, weight_slot, power, loaded, operands[next]);
        }
      }
      products_wait<0>();
#pragma unroll
      for (int i = 0; i < kBuffers; ++i) hold(operands[i]);
      hold(sums);
      release_x(x_slot.before());
      // Read after the first barrier of store(), and before its last.
#pragma unroll
      for (int i = 0; i < kScales; ++i)
        if (kTokens >= 128 || threadIdx.x % 128 < kTokens)
          small.x_scales[group][i * 128 + static_cast<int>(threadIdx.x) % 128] = __float2bfloat16_rn(x_scale[i]);
      store(sums, factor, row_tile, at.token_block * kTokens);
    }
    // Shared memory must outlast what still reads it.
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  }
  __device__ __forceinline__ void release_x(int slot) const {
    __syncwarp();
    if constexpr (kCluster == 1) {
      if (lane == 0) barrier_arrive(small.x_empty + slot);
    } else if (lane < kCluster) {
      // Nothing was written that the other block reads: no fence.
      asm volatile(
          "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
          "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(shared_address(small.x_empty + slot)),
          "r"(lane)
          : "memory");
    }
  }
  __device__ __forceinline__ void release_weights(RingPlace<kWeightSlots>& slot) const {
    __syncwarp();
    if (lane == 0) barrier_arrive(small.weights_empty + slot.index);
    slot.next();
  }
  // The operands of one unit. With the first the warp's row tile of the column tile comes into registers, and its slot
  // is free.
  __device__ __forceinline__ void widen(int unit, RingPlace<kWeightSlots>& slot, const float (&power)[2],
                                        typename Codec::Loaded& loaded, uint32_t (&out)[kUnitSteps][4]) const {
    if (unit == 0) barrier_wait(small.weights_full + slot.index, slot.parity);
    const unsigned char* codes = weights_of(slot.index) + warp * kTile.code_bytes;
    if constexpr (kTile.columns == 64) {
      // Codes that are operands as they are: loaded at once they would lie where units under way have theirs.
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint4 words = reinterpret_cast<const uint4*>(codes)[lane + 32 * (2 * h + unit)];
        out[0][h] = words.x, out[0][2 + h] = words.y;
        out[1][h] = words.z, out[1][2 + h] = words.w;
      }
      if (unit + 1 == kUnits) release_weights(slot);
    } else {
      if (unit == 0) {
        Codec::load(loaded, codes, weights_of(slot.index) + kMetaAt + warp * kTile.meta_bytes, lane);
        release_weights(slot);
      }
#pragma unroll
      for (int i = 0; i < kUnitSteps; ++i) Widen<Codec>::step(loaded, power, unit * kUnitSteps + i, out[i]);
    }
  }

  // ---- y ----
  __device__ __forceinline__ void group_barrier() const {
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
  }

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
        to[kStagedStride] = sum[i][1] * (factor[0] * scale.y),
        to[kStagedStride + 8] = sum[i][3] * (factor[1] * scale.y);
      });
    }
  }
  // By way of shared memory and bulk copies: kOutputs of each token, whole lines. write: values of column tile i.
  template <int kOutputs, class Write>
  __device__ __forceinline__ void store_staged(int row_tile, int first_token, Write&& write) {
    const int first_output = (row_tile - warp % 4) * (kOutputs / 4);
    const int bytes = min(kOutputs, a.outputs - first_output) * static_cast<int>(sizeof(float));
    const int mine = warp % 4 * 4 + lane;  // of lanes 0..3: a token of those staged
    float* y = a.y.values + (first_token + mine) * a.y.stride + first_output;
    const bool copies = lane < 4 && bytes > 0;
#pragma unroll
    for (int part = 0; part < kTokens / kStagedTokens; ++part) {
      float* staged = small.y[group][part % 2];
      asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");  // what left this buffer last has been read
      group_barrier();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = part * kStagedTokens + 8 * i + lane % 4 * 2;
        write(part * 2 + i, __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(small.x_scales[group] + token)),
              staged + (8 * i + lane % 4 * 2) * kStagedStride + lane / 4);
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      group_barrier();
      if (copies && first_token + part * kStagedTokens + mine < a.n_rows)
        asm volatile(
            "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(y + part * kStagedTokens * a.y.stride),
            "r"(shared_address(staged + mine * kStagedStride)), "r"(bytes)
            : "memory");
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
  }
  __device__ __forceinline__ void store_directly(const float (&sum)[kColumnTiles][4], const float (&factor)[2],
                                                 int row_tile, int first_token, bool gated) const {
    const int token = first_token + lane % 4 * 2;
    const __nv_bfloat162* scales = reinterpret_cast<const __nv_bfloat162*>(small.x_scales[group] + lane % 4 * 2);
    const int output = row_tile * (gated ? 8 : 16) + lane / 4;
    float* y = a.y.values + token * a.y.stride + output;
    const float* other = a.other.values + token * a.other.stride + output;
    const bool has_first = output < a.outputs, has_second = !gated && output + 8 < a.outputs;
    const int left = a.n_rows - token;  // tokens from this lane's first on
    const QuickGate gate(a.epilogue != DecodeEpilogue::kTimesSiluOther && a.epilogue != DecodeEpilogue::kGatedSilu);
#pragma unroll
    for (int i = 0; i < kColumnTiles; ++i) {
      const float2 scale = __bfloat1622float2(scales[4 * i]);
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

#else
#define BERYL_CLUSTER(n)
#endif

template <class Codec, Format kFormat, int kTokens, int kCluster>
__global__ void __launch_bounds__(kPrefillThreads, 1) BERYL_CLUSTER(kCluster)
    prefill_kernel(const __grid_constant__ PrefillKernelArgs args) {
#if BERYL_WGMMA
  extern __shared__ __align__(1024) unsigned char prefill_shared[];
  PrefillLinear<Codec, kFormat, kTokens, kCluster>(args, prefill_shared).run();
#endif
}

// A format's kernels, of whatever shapes it has.
using PrefillKernelPointer = void (*)(PrefillKernelArgs);
struct PrefillKernel {
  PrefillKernelPointer kernel = nullptr;  // null: none
  int tokens = 0, cluster = 0, shared_bytes = 0;
};
struct PrefillKernels {
  PrefillKernel kernels[3] = {};
};
template <class Codec, Format kFormat, int kTokens, int kCluster>
PrefillKernel prefill_kernel_of() {
  return {prefill_kernel<Codec, kFormat, kTokens, kCluster>, kTokens, kCluster,
          PrefillShape{kFormat, kTokens}.shared_bytes()};
}
template <class Codec, Format kFormat>
PrefillKernels prefill_kernels() {
  return {{prefill_kernel_of<Codec, kFormat, 128, 2>(), prefill_kernel_of<Codec, kFormat, 256, 2>(),
           prefill_kernel_of<Codec, kFormat, 64, 1>()}};
}

// In prefill_FAMILY.cu, so that they compile side by side; empty for formats of another family.
PrefillKernels prefill_e2m1_kernels(Format format);
PrefillKernels prefill_integer_kernels(Format format);
PrefillKernels prefill_k_kernels(Format format);
PrefillKernels prefill_float_kernels(Format format);

}  // namespace beryl::cuda
