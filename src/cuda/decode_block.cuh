// What all parts of the decode kernel share: a block's shared memory, its ring of weights, and exchange rows.
#pragma once

#include <cstdint>

#include "cuda/async.cuh"
#include "cuda/decode_phase.h"
#include "cuda/device.cuh"
#include "cuda/row_math.cuh"

namespace beryl::cuda {

inline constexpr int kDecodeConsumers = kMatvecWarps * 32;     // threads that compute
// And the warp that copies weights, in a group of four: only whole groups can hand registers over to others.
inline constexpr int kDecodeThreads = kDecodeConsumers + 128;
inline constexpr int kDecodeMaxSlots = 16;
// Warps are at most in two phases at a time, and two more come ahead.
inline constexpr int kHeldPhases = 4;
inline constexpr int kHeldWeights = 64;
inline constexpr int kHeldScales = 256;

// Where a warp is, kept in shared memory through what does not need it.
struct alignas(16) WarpPlace {
  int phase;
  int slot;                         // of the ring
  uint32_t parity;
  int buffer;                       // of the two for partial sums
  uint32_t factors;                 // parity of DecodeShared::has_factors
  uint32_t tasks;                   // AttentionTasks so far
};

// Where a warp is in a linear phase, and what the phase is for its block: for several rows, whose products leave no registers for that.
// Spilled it would come back from the L2.
struct alignas(16) LinearPlace {
  int first, n_units, batch;        // units of the block, and of a batch
  int unit, chunk;                  // the first ones of what is made now
  int n_chunks, at_once;            // chunks of a unit, and of one go
  uint32_t path;                    // LinearPath, and LinearTaken
};
enum LinearTaken : uint32_t {
  kTakenAll = 1u << 16,             // x of all chunks comes before the first products
  kTakenDirect = 1u << 17,          // the first x came with the residual
};

// What the block does next in an attention phase (decode_copy.cuh), as the copying warp finds it, ahead of those that compute: a
// unit, or some tiles of a long one.
struct alignas(16) AttentionTask {
  static constexpr int kTiles = 32;
  int row;
  int kv_head;
  int first_head, n_heads;
  int unit, n_units;
  int n_tiles;                      // 0: nothing to do
  uint32_t new_rows;                // rows of this launch whose keys and values the unit makes itself
  int append_row;                   // of the pools, where those of the unit's own token go; -1: not by this unit
  int row_shift[2];                 // bytes of a row of keys, of values: 1 << row_shift
  int piece_shift[2];               // rows of a slot of the ring: 1 << piece_shift
  bool begins, ends;                // these are the unit's first, its last tiles
  bool more;                        // another task follows in this phase
  const uint8_t* pools[2];          // keys, values
  const float* scales[2];           // of their rows; null: there are none
  const uint8_t* maps;              // AttentionPhase::maps
  // Rows of the pools where the tiles' pages begin: of the newer, and the older (-1: none); then the slots that the newer one has (begin
  // and end, 8 bits each) and which new rows are there (8 bits); and which boxes have a live key (a bit each).
  int4 tiles[kTiles];
};

// Shared memory: the ring (weights, and an attention phase's keys and values), the scratch (x and partial sums, or what attention needs),
// the residual and norm weights that came ahead where there is room, this, sums of norms, for several rows a LinearPlace a warp.
struct DecodeShared {
  alignas(16) DecodePhase phases[kHeldPhases];
  alignas(8) uint64_t full[kDecodeMaxSlots];
  uint64_t empty[kDecodeMaxSlots];
  uint64_t has_factors;             // of a phase's AddNorm
  WarpPlace places[kMatvecWarps];
  float factors[kDecodeRows];
  float y_weights[2][kHeldWeights]; // LinearPhase::y_weight of the block's first outputs, of phases in turn
  float row_scales[2][kHeldScales]; // and LinearPhase::row_scales of its first rows
  uint32_t tables[3][32];           // E2m1Tables, a copy a lane
  alignas(16) DecodeArgs args;      // for functions, which would read the kernel's own through a generic address
  AttentionTask tasks[2];           // in turn
  uint64_t task_full[2], task_empty[2];
  // The ring, from the warp that copies weights to those that copy keys and values, and back.
  struct Handed {
    int slot;
    uint32_t parity;
    bool filled;
  } handed;
  uint64_t hand_over, hand_back;    // barriers
  int32_t positions[kDecodeRows];
  int32_t sequences[kDecodeRows];
  uint32_t flags;                   // bit r: the flag of row r in this launch
};

// A warp's place in the ring.
struct RingPlace {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next(int n_slots) {
    if (++slot == n_slots) slot = 0, parity ^= 1;
  }
};

// The same object of shared memory, by an address that the compiler cannot relate to the first: so each part of the kernel
// computes its own pointers and loads what it needs of a phase by itself, instead of keeping all of it in registers through
// everything else. Spilled registers would come back from the L2.
template <class T>
__device__ __forceinline__ T* shared_object(uint32_t address) {
  asm volatile("" : "+r"(address));
  return static_cast<T*>(__cvta_shared_to_generic(address));
}
template <class T>
__device__ __forceinline__ T* afresh(T* object) {
  return shared_object<T>(shared_address(object));
}

// The kernel's shared memory, from nothing: an address that was kept would be one of the first to be spilled.
extern __shared__ __align__(128) unsigned char decode_shared[];
__device__ __forceinline__ unsigned char* shared_afresh() {
  uint32_t address;
  asm volatile("mov.u32 %0, _ZN5beryl4cuda13decode_sharedE;" : "=r"(address));
  return static_cast<unsigned char*>(__cvta_shared_to_generic(address));
}
// Where products leave no registers.
template <int kRows>
__device__ __forceinline__ unsigned char* shared_now(unsigned char* shared) {
  if constexpr (kRows == 1) return afresh(shared);
  return shared_afresh();
}

// Likewise the thread's number.
__device__ __forceinline__ int thread_afresh() {
  int thread = static_cast<int>(threadIdx.x);
  asm volatile("" : "+r"(thread));
  __builtin_assume(thread >= 0 && thread < kDecodeThreads);        // so that lanes and warps need no care for signs
  return thread;
}

// Which block this is; read anew where it is needed, so that nobody keeps it in a register (and, there being too few, in memory).
__device__ __forceinline__ int block_index() {
  int index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

// Rows of this launch; kRows: 1, or up to 4 or 8.
template <int kRows>
__device__ __forceinline__ int count_rows(const DecodeArgs& args) {
  return kRows == 1 ? 1 : args.n_rows;
}

struct DecodeBlock {
  const DecodeArgs& args;
  unsigned char* ring;
  unsigned char* scratch;
  DecodeShared* small;
  float* group_sums;                // [2][n_rows][sum_groups]: squares of a group of 128 columns, likewise
  int thread, warp, lane;

  __device__ __forceinline__ DecodeBlock(const DecodeArgs& a, unsigned char* shared)
      : args(a), ring(shared), scratch(shared + a.scratch_at), small(reinterpret_cast<DecodeShared*>(shared + a.small_at)),
        group_sums(reinterpret_cast<float*>(small + 1)),
        thread(thread_afresh()), warp(thread / 32), lane(thread % 32) {}
  // The block's residual.
  __device__ __forceinline__ float* residual(int row, int col) const {
    return args.residual_at != 0 ? reinterpret_cast<float*>(ring + args.residual_at) + row * args.residual_cols + col
                                 : args.residual + (int64_t{block_index()} * kDecodeRows + row) * args.residual_cols + col;
  }
  // The norm weights of this lane that were fetched ahead: columns lane · 4 of two groups, 128 apart.
  __device__ __forceinline__ float* held_vector() const { return reinterpret_cast<float*>(ring + args.vectors_at) + warp * 256 + lane * 4; }
  __device__ __forceinline__ static void barrier() { partial_block_barrier<kDecodeConsumers>(); }
  // Of the warp's phase: the last phase's are still read while a fast warp writes the next one's.
  __device__ __forceinline__ float* y_weights() const { return small->y_weights[small->places[warp].phase & 1]; }
  __device__ __forceinline__ float* row_scales() const { return small->row_scales[small->places[warp].phase & 1]; }
  __device__ __forceinline__ float* norm_sums() const { return group_sums + (small->places[warp].phase & 1) * args.row_sums; }
  __device__ __forceinline__ uint32_t flag(int row) const { return small->flags >> row & 1u; }
  // Of several rows.
  __device__ __forceinline__ LinearPlace& linear_place() const { return reinterpret_cast<LinearPlace*>(group_sums + 2 * args.row_sums)[warp]; }
};

__device__ __forceinline__ void copy4_async(float* shared, const float* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global));
}

// ---- exchange rows ----

// Longer than any step; a value that never comes is an error in this program, and better a fault than a machine that
// hangs.
inline constexpr uint32_t kMaxPolls = 1u << 23;

__device__ __forceinline__ uint32_t load_common_word(const float* from) {
  uint32_t bits;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(bits) : "l"(from) : "memory");
  return bits;
}
__device__ __forceinline__ uint4 load_common_words(const float* from) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_common_word(float* to, uint32_t bits) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(bits) : "memory");
}
__device__ __forceinline__ void count_poll(uint32_t& polls) {
  if (++polls > kMaxPolls) __trap();
}

__device__ __forceinline__ float without_flag(uint32_t bits) { return __uint_as_float(bits & ~1u); }

// All lanes ask for one word: many that ask for all of a row would fill the L2's queues.
__device__ __forceinline__ void await_word(const float* at, uint32_t flag) {
  for (uint32_t polls = 0; (load_common_word(at) ^ flag) & 1u;) count_poll(polls);
}
__device__ __forceinline__ float load_exchange(const float* from, uint32_t flag) {
  for (uint32_t polls = 0;;) {
    const uint32_t bits = load_common_word(from);
    if (((bits ^ flag) & 1u) == 0) return without_flag(bits);
    count_poll(polls);
  }
}
__device__ __forceinline__ float load_row(const PhaseRows& rows, int row, int64_t col, uint32_t flag) {
  const float* from = rows.values + row * int64_t{rows.stride} + col;
  return rows.exchange ? load_exchange(from, flag) : __ldcg(from);
}
__device__ __forceinline__ void store_row(const PhaseRows& rows, int row, int64_t col, float value, uint32_t flag) {
  store_common_word(rows.values + row * int64_t{rows.stride} + col, round_result(value) | (rows.exchange ? flag : 0u));
}

}  // namespace beryl::cuda
