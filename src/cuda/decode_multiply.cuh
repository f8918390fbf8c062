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

// Products of one row, from slots of two stages, of which a warp holds in registers what it multiplies next. The first one is taken while x is
// awaited, so that the ring has one slot more when there is nothing to multiply, and all that products need besides x is there before it.
template <class Codec, Format kFormat>
struct HeldMultiply {
  static constexpr TileShape kTile = tile_shape(kFormat);
  typename Codec::Loaded tiles[2];  // of the next slot

  // Where this warp is in the ring, and how a slot lies.
  struct Ring {
    const unsigned char *codes_at, *meta_at;
    DecodeShared* small;
    int lane, n_slots, slot_bytes, stage_bytes;
    RingPlace place;
    __device__ __forceinline__ Ring(const DecodeBlock& block, const LinearPhase& p)
        : codes_at(block.ring + block.warp * kTile.code_bytes), meta_at(block.ring + p.tile_codes + block.warp * kTile.meta_bytes), small(block.small),
          lane(block.lane), n_slots(block.args.n_slots), slot_bytes(block.args.slot_bytes), stage_bytes(p.stream.stage_bytes) {
      const WarpPlace& warp_place = small->places[block.warp];
      place = {warp_place.slot, warp_place.parity};
    }
    __device__ __forceinline__ void leave(const DecodeBlock& block) const {
      WarpPlace& warp_place = block.small->places[block.warp];
      __syncwarp();                 // all have read it
      if (lane == 0) warp_place.slot = place.slot, warp_place.parity = place.parity;
      __syncwarp();
    }
  };
  // The slot is free again as soon as all warps have its weights.
  __device__ __forceinline__ void take(Ring& ring) {
    const int at = ring.place.slot * ring.slot_bytes;
    barrier_wait_suspended(&ring.small->full[ring.place.slot], ring.place.parity);
#pragma unroll
    for (int s = 0; s < 2; ++s) Codec::load(tiles[s], ring.codes_at + at + s * ring.stage_bytes, ring.meta_at + at + s * ring.stage_bytes, ring.lane);
    __syncwarp();
    if (ring.lane == 0) barrier_arrive(&ring.small->empty[ring.place.slot]);
    ring.place.next(ring.n_slots);
  }
  // All units of a batch, each in all of its chunks; lane_x: of the first; more: another batch follows, so that its first slot is taken too.
  __device__ __forceinline__ void run(Ring& ring, LaneX<1> lane_x, const DecodeBlock& block, const LinearPhase& p, int n_units, int buffer, bool more) {
    const LinearCut& cut = block.args.cuts[0];
    float* const partials = reinterpret_cast<float*>(block.scratch + cut.partials_at) + buffer * cut.partial_floats + block.warp * kTileRows;
    const int unit_floats = p.stream.unit_partials, n_chunks = p.n_chunks, chunk_floats = p.k_warps * kTileRows;
    int left = n_units * n_chunks + (more ? 1 : 0);          // slots, with the one that is held
#pragma unroll 1
    for (int chunk = 0; chunk < n_chunks; ++chunk) {
      float* to = partials + chunk * chunk_floats;
#pragma unroll 1
      for (int unit = 0; unit < n_units; ++unit, to += unit_floats) {
        typename Codec::template Product<1> products[2];
#pragma unroll
        for (int s = 0; s < 2; ++s) products[s].start(tiles[s], block.ring, lane_x, s);
#pragma unroll
        for (int i = 0; i < Codec::kSteps; ++i)
#pragma unroll
          for (int s = 0; s < 2; ++s) products[s].step(tiles[s], i);
        float acc[1][2] = {};
#pragma unroll
        for (int s = 0; s < 2; ++s) products[s].finish(tiles[s], acc);
        store_partials(to, acc, 1, ring.lane);
        if (--left > 0) take(ring);
      }
      lane_x.codes[0] += 2 * x_group_bytes(0), lane_x.scales[0] += 2 * static_cast<int>(sizeof(float));      // WarpX of the next chunk
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
