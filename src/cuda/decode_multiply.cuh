// The products of the decode kernel: a warp's tiles of all units of a batch, from the ring of weights and its digits of x to partial
// sums in shared memory.
#pragma once

#include "cuda/decode_linear_block.cuh"

namespace beryl::cuda {

template <class Codec, int kTiles>
__device__ __forceinline__ LaneX<kTiles> make_lane_x(const DecodeBlock& block, int n_rows, int x_chunks, int x_chunk) {
  constexpr int kGroupBytes = Codec::kX == XForm::kInt16 ? 256 : 512;
  const WarpX x(block, n_rows, kGroupBytes, x_chunks, x_chunk);
  const int codes_at = static_cast<int>(x.codes - block.ring), sums_at = static_cast<int>(reinterpret_cast<unsigned char*>(x.sums) - block.ring),
            scales_at = static_cast<int>(reinterpret_cast<unsigned char*>(x.scales) - block.ring);
  LaneX<kTiles> lane_x;
  const volatile uint32_t* tables = block.small->tables[0];
  lane_x.tables = {tables[block.lane], tables[32 + block.lane], tables[64 + block.lane]};
  lane_x.code_stride = n_rows * kGroupBytes;
  lane_x.scale_stride = n_rows * 4;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    // Rows that do not exist read the last one: their columns of d are not used.
    const int code_row = min(4 * n + block.lane / 8, n_rows - 1), scale_row = min(4 * n + block.lane % 4, n_rows - 1);
    lane_x.codes[n] = codes_at + code_row * kGroupBytes + block.lane % 8 * 16;
    lane_x.sums[n] = sums_at + scale_row * 16;
    lane_x.scales[n] = scales_at + scale_row * 4;
  }
  return lane_x;
}

template <int kTiles>
__device__ __forceinline__ void store_partials(float* to, const float (&acc)[kTiles][2], int n_rows, int lane) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const int row = 4 * n + lane % 4;
    if (row < n_rows) {
      to[row * kTileRows + lane / 4] = acc[n][0];
      to[row * kTileRows + lane / 4 + 8] = acc[n][1];
    }
  }
}

__device__ __forceinline__ int stages_of_slot(const DecodeArgs& args, const WeightStream& s) {
  return s.slot_stages == 2 && 2 * s.stage_bytes <= args.slot_bytes ? 2 : 1;
}

// What a phase's warps multiply in one go.
struct Multiply {
  int n_units;                      // all that are in the batch
  int first_chunk, n_chunks;        // one chunk after the other, each with all units
  int buffer;                       // of partial sums
  __device__ __forceinline__ static Multiply of(const LinearPlace& at, const WarpPlace& place) {
    return {min(at.batch, at.n_units - at.unit), at.chunk, at.at_once, place.buffer};
  }
};

// By one warp. args_at etc.: addresses of shared memory, from which all is computed anew (afresh).
template <class Codec, Format kFormat, int kRows>
__device__ __forceinline__ void multiply(uint32_t args_at, uint32_t shared_at, uint32_t phase_at, const Multiply& m) {
  constexpr TileShape kTile = tile_shape(kFormat);
  constexpr int kTiles = row_tiles(kRows);
  constexpr bool kPairs = slot_stages(kFormat) == 2;      // two tiles of a slot side by side
  static_assert(Codec::kXScale == codec_x_scale(kFormat) && Codec::kNeedsSums == needs_x_sums(kFormat));
  const DecodeArgs& args = *shared_object<const DecodeArgs>(args_at);
  unsigned char* shared = shared_object<unsigned char>(shared_at);
  const LinearPhase& p = *shared_object<const LinearPhase>(phase_at);
  const DecodeBlock block(args, shared);
  WarpPlace& place = block.small->places[block.warp];
  RingPlace ring = {place.slot, place.parity};
  const int lane = block.lane, n_rows = count_rows<kRows>(args), n_slots = args.n_slots, slot_bytes = args.slot_bytes, stage_bytes = p.stream.stage_bytes;
  const int slot_stages = stages_of_slot(args, p.stream), unit_floats = p.stream.unit_partials * n_rows;
  const LinearCut& cut = args.cuts[Codec::kX == XForm::kInt16 ? 0 : 1];
  float* partials = reinterpret_cast<float*>(block.scratch + cut.partials_at) + m.buffer * cut.partial_floats + block.warp * n_rows * kTileRows;
  const unsigned char* const codes_at = shared + block.warp * kTile.code_bytes;
  const unsigned char* const meta_at = shared + p.tile_codes + block.warp * kTile.meta_bytes;
#pragma unroll 1
  for (int chunk = 0; chunk < m.n_chunks; ++chunk) {
    const int n_stages = min(p.stream.n_stages - (m.first_chunk + chunk) * kChunkStages, kChunkStages);
    const LaneX<kTiles> lane_x = make_lane_x<Codec, kTiles>(block, n_rows, m.n_chunks, chunk);
    float* to = partials + (m.first_chunk + chunk) * p.k_warps * p.row_warps * n_rows * kTileRows;
    if constexpr (kPairs) {
      static_assert(kChunkStages == 2);
      if (slot_stages == 2 && n_stages == 2) {
#pragma unroll 1
        for (int unit = 0; unit < m.n_units; ++unit, to += unit_floats) {
          const int at = ring.slot * slot_bytes;
          barrier_wait_suspended(&block.small->full[ring.slot], ring.parity);
          typename Codec::Loaded tiles[2];
#pragma unroll
          for (int s = 0; s < 2; ++s) Codec::load(tiles[s], codes_at + at + s * stage_bytes, meta_at + at + s * stage_bytes, lane);
          __syncwarp();
          if (lane == 0) barrier_arrive(&block.small->empty[ring.slot]);
          ring.next(n_slots);
          typename Codec::template Product<kTiles> products[2];
#pragma unroll
          for (int s = 0; s < 2; ++s) products[s].start(tiles[s], shared, lane_x, s);
#pragma unroll
          for (int i = 0; i < Codec::kSteps; ++i)
#pragma unroll
            for (int s = 0; s < 2; ++s) products[s].step(tiles[s], i);
          float acc[kTiles][2] = {};
#pragma unroll
          for (int s = 0; s < 2; ++s) products[s].finish(tiles[s], acc);
          store_partials(to, acc, n_rows, lane);
        }
        continue;
      }
    }
#pragma unroll 1
    for (int unit = 0; unit < m.n_units; ++unit, to += unit_floats) {
      float acc[kTiles][2] = {};
#pragma unroll 1
      for (int stage = 0; stage < n_stages; ++stage) {
        const bool second = stage > 0 && slot_stages == 2, last = slot_stages != 2 || stage + 1 == n_stages;     // of its slot
        const int at = ring.slot * slot_bytes + (second ? stage_bytes : 0);
        if (!second) barrier_wait_suspended(&block.small->full[ring.slot], ring.parity);
        typename Codec::Loaded tile;
        Codec::load(tile, codes_at + at, meta_at + at, lane);
        if (last) {
          __syncwarp();
          if (lane == 0) barrier_arrive(&block.small->empty[ring.slot]);
          ring.next(n_slots);
        }
        typename Codec::template Product<kTiles> product;
        product.start(tile, shared, lane_x, stage);
#pragma unroll
        for (int i = 0; i < Codec::kSteps; ++i) product.step(tile, i);
        product.finish(tile, acc);
      }
      store_partials(to, acc, n_rows, lane);
    }
  }
  __syncwarp();                     // all have read the place
  if (lane == 0) place.slot = ring.slot, place.parity = ring.parity;
  __syncwarp();
}

// Products of one row of FP4, from slots of two stages, of which a warp holds in registers what it multiplies next. The first one is taken while
// x is awaited, so that the ring has one slot more when there is nothing to multiply, and all that products need besides x is there before it.
// x stays in registers through all units of a chunk. Each of the two stages has columns of the tensor core's b of its own: x of stage s is in
// columns 2 s and 2 s + 1, which are those of lanes 8 s to 8 s + 7, and zeros are in all others. So lane 4 i + s has stage s's sums of rows i and
// i + 8, and both stages are finished at once. The next slot is taken before the sums are finished: loads and sums wait side by side.
struct HeldMultiply {
  static constexpr TileShape kTile = tile_shape(Format::kFp4G128);
  // Of the next slot: codes of both stages, scales (bf16 of rows lane / 4 and lane / 4 + 8) of stage lane % 2.
  E2m1Codes codes[2];
  uint32_t scales;
  // Where this warp is in the ring, as addresses of shared memory.
  uint32_t lane_codes, lane_scales; // what this lane loads of the first slot,
  uint32_t slot_at;                 // and how many bytes behind that of this one
  uint32_t full, parity;            // the slot's barrier
  uint32_t full_end, full_bytes;    // of the ring's barriers
  uint32_t slot_bytes, stage_bytes;
  int lane;
  E2m1Tables tables;

  __device__ __forceinline__ HeldMultiply(const DecodeBlock& block, const LinearPhase& p) {
    const WarpPlace& place = block.small->places[block.warp];
    lane = block.lane, parity = place.parity;
    stage_bytes = p.stream.stage_bytes;
    // From shared memory, else it would come from the kernel's arguments in each turn.
    slot_bytes = *const_cast<const volatile int*>(&block.small->args.slot_bytes);
    slot_at = place.slot * slot_bytes;
    lane_codes = shared_address(block.ring) + block.warp * kTile.code_bytes + lane * 16;
    lane_scales = shared_address(block.ring) + p.tile_codes + block.warp * kTile.meta_bytes + lane / 4 * 4 + (lane & 1) * stage_bytes;
    full_bytes = block.args.n_slots * sizeof(uint64_t);
    full = shared_address(&block.small->full[place.slot]), full_end = shared_address(block.small->full) + full_bytes;
    const volatile uint32_t* words = block.small->tables[0];
    tables = {words[lane], words[32 + lane], words[64 + lane]};
    // Else they would be computed from the thread's number in each turn.
    asm volatile("" : "+r"(lane), "+r"(lane_codes), "+r"(lane_scales), "+r"(full_end), "+r"(full_bytes), "+r"(slot_bytes), "+r"(stage_bytes));
  }
  __device__ __forceinline__ void leave(const DecodeBlock& block) const {
    WarpPlace& place = block.small->places[block.warp];
    __syncwarp();                   // all have read it
    if (lane == 0) place.slot = static_cast<int>((full - shared_address(block.small->full)) / sizeof(uint64_t)), place.parity = parity;
    __syncwarp();
  }
  // The slot is free again as soon as all warps have its weights.
  __device__ __forceinline__ void take() {
    warp_wait_suspended(full, parity);
    const uint32_t first = lane_codes + slot_at, second = first + stage_bytes;
    codes[0].rows[0] = load_shared16(first), codes[0].rows[1] = load_shared16(first + 512);
    codes[1].rows[0] = load_shared16(second), codes[1].rows[1] = load_shared16(second + 512);
    scales = load_shared4(lane_scales + slot_at);
    __syncwarp();
    if (lane == 0) barrier_arrive_at(full + kDecodeMaxSlots * sizeof(uint64_t));
    full += sizeof(uint64_t), slot_at += slot_bytes;
    if (full == full_end) full -= full_bytes, slot_at = 0, parity ^= 1;
  }

  struct X {
    uint32_t b[2][8];               // [stage][k-step and half]
    float scale;                    // of stage lane % 2
  };
  // Of one chunk. digits, scales_at: what this lane loads of the first stage, and its stage's scale.
  __device__ __forceinline__ static void load_x(X& x, uint32_t digits, uint32_t scales_at, int lane) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const uint4 low = load_shared16(digits + s * x_group_bytes(0)), high = load_shared16(digits + s * x_group_bytes(0) + 128);
      const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) x.b[s][i] = lane / 8 == s ? words[i] : 0;
    }
    x.scale = __uint_as_float(load_shared4(scales_at));
  }
  // A chain of products for each stage.
  __device__ __forceinline__ void multiply(const X& x, int (&d)[2][4]) const {
    clear(d[0]), clear(d[1]);
#pragma unroll
    for (int i = 0; i < Fp4G128::kSteps; ++i)
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const E2m1Operands a(codes[s], i, tables);
        mma_s8(d[s], a.positive[0], a.positive[1], a.positive[2], a.positive[3], x.b[s][2 * i], x.b[s][2 * i + 1]);
        mma_s8(d[s], a.negative[0], a.negative[1], a.negative[2], a.negative[3], x.b[s][2 * i], x.b[s][2 * i + 1]);
      }
  }
  // The bits of Fp4G128::Product::finish of one stage after the other, in lanes 4 i + 1: rows i and i + 8.
  __device__ __forceinline__ static void finish(const int (&d)[2][4], uint32_t scales, const X& x, float (&sums)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float joined = join_digits(d[0][2 * i] + d[1][2 * i], d[0][2 * i + 1] + d[1][2 * i + 1]);
      const float scale = __fmul_rn(bf16_at(scales, i), x.scale);
      const float first = __shfl_up_sync(kAllLanes, __fmaf_rn(joined, scale, 0.0f), 1);
      sums[i] = __fmaf_rn(joined, scale, first);
    }
  }

  // All units of a batch, each in all of its chunks; more: another batch follows, so that its first slot is taken too.
  __device__ __forceinline__ void run(const DecodeBlock& block, const LinearPhase& p, int n_units, int buffer, bool more) {
    const LinearCut& cut = block.args.cuts[0];
    const int n_chunks = p.n_chunks;
    const WarpX warp_x(block, 1, x_group_bytes(0), n_chunks, 0);
    uint32_t digits = shared_address(warp_x.codes) + lane % 8 * 16, scales_at = shared_address(warp_x.scales) + (lane & 1) * sizeof(float);
    uint32_t chunk_to = shared_address(reinterpret_cast<float*>(block.scratch + cut.partials_at) + buffer * cut.partial_floats + block.warp * kTileRows + lane / 4);
    const uint32_t unit_bytes = p.stream.unit_partials * sizeof(float), chunk_bytes = p.k_warps * kTileRows * sizeof(float);
    int left = n_units * n_chunks + (more ? 1 : 0);          // slots, with the one that is held
#pragma unroll 1
    for (int chunk = 0; chunk < n_chunks; ++chunk) {
      X x;
      load_x(x, digits, scales_at, lane);
      uint32_t to = chunk_to;
#pragma unroll 1
      for (int unit = 0; unit < n_units; ++unit) {
        const bool goes_on = __all_sync(kAllLanes, --left != 0);       // as in warp_wait_suspended
        int d[2][4];
        multiply(x, d);
        const uint32_t scales_now = scales;
        if (goes_on) take();
        float sums[2];
        finish(d, scales_now, x, sums);
        if ((lane & 3) == 1) store_shared4(to, sums[0]), store_shared4(to + 8 * sizeof(float), sums[1]);
        if (!goes_on) return;
        to += unit_bytes;
      }
      chunk_to += chunk_bytes, digits += 2 * x_group_bytes(0), scales_at += 2 * sizeof(float);               // WarpX of the next chunk
    }
  }
};

// Formats of which a kernel has the code. Decoding is bound by instructions on their way to the warps, and the less code there is between what
// runs, the more of it stays near them: FP4 with an FP8 head is 0.6 to 1 % faster without the other twelve (docs/performance.md).
enum class KernelFormats { kUsual, kAll };

template <int kRows, KernelFormats kFormats>
__device__ __forceinline__ void multiply_format(Format format, const DecodeBlock& block, const LinearPhase& p, const Multiply& m) {
  const uint32_t args_at = shared_address(&block.small->args), shared_at = shared_address(block.ring), phase_at = shared_address(&p);
  if (format == Format::kFp4G128) return multiply<Fp4G128, Format::kFp4G128, kRows>(args_at, shared_at, phase_at, m);
  if constexpr (kFormats == KernelFormats::kUsual) return multiply<Fp8, Format::kFp8, kRows>(args_at, shared_at, phase_at, m);
  // The others apart: one search among all would jump over code three times, and behind a jump instructions come late.
  int other = static_cast<int>(format);
  asm volatile("" : "+r"(other));
  switch (static_cast<Format>(other)) {
    case Format::kMxfp4: return multiply<Mxfp4, Format::kMxfp4, kRows>(args_at, shared_at, phase_at, m);
    case Format::kNvfp4: return multiply<Nvfp4, Format::kNvfp4, kRows>(args_at, shared_at, phase_at, m);
    case Format::kQ4_0: return multiply<GroupOf32<4, false>, Format::kQ4_0, kRows>(args_at, shared_at, phase_at, m);
    case Format::kQ4_1: return multiply<GroupOf32<4, true>, Format::kQ4_1, kRows>(args_at, shared_at, phase_at, m);
    case Format::kQ5_0: return multiply<GroupOf32<5, false>, Format::kQ5_0, kRows>(args_at, shared_at, phase_at, m);
    case Format::kQ5_1: return multiply<GroupOf32<5, true>, Format::kQ5_1, kRows>(args_at, shared_at, phase_at, m);
    case Format::kQ8_0: return multiply<GroupOf32<8, false>, Format::kQ8_0, kRows>(args_at, shared_at, phase_at, m);
    case Format::kQ4_K: return multiply<GroupOf32K<4>, Format::kQ4_K, kRows>(args_at, shared_at, phase_at, m);
    case Format::kQ5_K: return multiply<GroupOf32K<5>, Format::kQ5_K, kRows>(args_at, shared_at, phase_at, m);
    case Format::kQ6_K: return multiply<Q6K, Format::kQ6_K, kRows>(args_at, shared_at, phase_at, m);
    case Format::kFp8: return multiply<Fp8, Format::kFp8, kRows>(args_at, shared_at, phase_at, m);
    case Format::kF16: return multiply<Float16<false>, Format::kF16, kRows>(args_at, shared_at, phase_at, m);
    default: return multiply<Float16<true>, Format::kBf16, kRows>(args_at, shared_at, phase_at, m);
  }
}

}  // namespace beryl::cuda
