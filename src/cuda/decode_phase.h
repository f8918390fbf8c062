// What the decode kernel (decode.h) does, one after the other: phases, as plain data in device memory.
//
// Rows that go from one phase to the next within a launch lie in exchange rows: f32 whose lowest bit is a flag. It flips
// with every launch that writes the row, so a reader waits for a value by reading it: no counters, no fences, no barrier
// of the grid. To have the same bits everywhere, all results of the kernel are rounded to the 23 bits above the flag,
// those that leave the launch too (their flag is 0).
#pragma once

#include <cstdint>

#include "cuda/kernels.h"
#include "cuda/matvec_layout.h"

namespace beryl::cuda {

inline constexpr int kDecodeRows = 8;           // rows of x for one reading of the weights
// Up to so many a step is one launch; with more, each block's preparing of all rows costs more than launches do, so ops run one by one
// and products by batch_linear.h, where it takes them. The bits are the same.
inline constexpr int kWholeStepRows = 4;
// Shared memory of a warp's digits, sums and scales (codec.cuh) in one chunk, which has two groups of 128 columns.
// Forms of x by bytes of a group of 128 columns: 0 are integers, 1 are 16-bit floats (LinearCut).
BERYL_HOST_DEVICE constexpr int x_group_bytes(int form) { return form == 0 ? 256 : 512; }
BERYL_HOST_DEVICE constexpr int x_chunk_bytes(int n_rows, int group_bytes) { return 2 * n_rows * (group_bytes + 20); }
inline constexpr int kTensorMapBytes = 128;      // of a tensor map (tensor_map.h)
inline constexpr int kDecodeStamps = 4;         // times of a block in a phase: its begin, x ready, products done, its end
inline constexpr int kDecodeFlagWords = 16;     // of DecodeArgs::flags

enum class DecodeEpilogue : uint8_t {
  kStore,
  kGatedGelu,                       // gelu_tanh(gate) · up; gated tiles
  kGatedSilu,
  kGeluTimesOther,                  // gelu_tanh(W h) · other
  kTimesGeluOther,                  // (W h) · gelu_tanh(other): up, where gate has another format and was stored before
  kTimesSiluOther,
  kSoftcap,
};

// Rows of a phase; `exchange`: with flags.
struct PhaseRows {
  float* values;
  int32_t stride;                   // values from row to row
  bool exchange;
};

// How the scratch of a linear phase is cut: x of each warp, then two buffers of partial sums. Phases whose groups of x have 512 bytes (form 1)
// have another cut than those of 256 (form 0), so that these need not have room for both: a block takes a barrier where the form changes.
struct LinearCut {
  int32_t x_bytes;                  // of one warp
  int32_t partials_at;              // from the scratch's begin
  int32_t partial_floats;           // of one of the two buffers,
  int32_t partial_row_floats;       // and a row's share of it
};

// Which units of a matrix are whose, and how many of them are made at a time.
struct alignas(16) WorkShare {
  int32_t units_each, units_more;   // block_units (matvec_layout.h)
  int16_t rotation;                 // below the number of blocks, added to a block's: so that the same ones do not always have more
  int16_t form;                     // LinearCut
  uint32_t unit_partials_inverse;   // the upper half of i · this is i / unit_partials, for i below 2^16
};

// The weights of a phase as the copying warp sees them.
struct WeightStream {
  WorkShare share;
  const uint8_t* weights;           // null: the end of the list; n_stages 0: an AttentionPhase, and keys and values are copied
  int64_t unit_bytes;
  int32_t n_stages;                 // of a unit
  int32_t stage_bytes;
  int32_t slot_stages;              // stages of one copy, 1 or 2, where a slot of the ring has room for two
  int32_t unit_partials;            // k_warps · row_warps · n_chunks · 16: floats of a unit's partial sums, a row of x
};

// What a block needs of a linear phase first, together: all warps walk through this while nothing else goes on.
struct alignas(16) LinearStart {
  WorkShare share;
  int32_t n_chunks;
  int32_t x_all_bytes;                             // of a row's x of all chunks (x_chunk_bytes), where it may be prepared at once
  uint32_t path;                                   // LinearPath
};
enum LinearPath : uint32_t {
  kAdds = 1,                        // to the residual, before
  kShortX = 2,                      // decode_short.cuh, up to 4 rows
  kNearX = 4,                       // of those: an AddNorm and a norm whose weights come ahead, where there is room for them
  kShortFinish = 8,                 // ShortFinish (decode_finish.cuh), likewise
  kOtherForm = 16,                  // the linear phase before has another form of x (LinearCut)
  kHolds = 32,                      // HeldMultiply (decode_multiply.cuh), where slots of the ring have two stages
};
inline constexpr int32_t kNotAtOnce = 1 << 24;     // LinearStart::x_all_bytes where x is prepared chunk by chunk

// What a phase's x is: rows, or the residual stream, after it took the result of an earlier phase.
struct LinearPhase {
  LinearStart start;
  WeightStream stream;
  const float* row_scales;          // [n_row_tiles · 16], null: 1
  PhaseRows x;                      // when !residual
  PhaseRows y;
  PhaseRows other;                  // of the epilogues that take another
  // Where an AddNorm takes y: exchange rows with the stride of y for the sums of squares of its row tiles, before they are multiplied
  // with the norm's weight, as y is (null: 1).
  float* squares;                   // null: no AddNorm does
  const float* y_weight;

  // residual = (residual + norm(add)) · add_scale where add.values is not null; `add` was multiplied with the norm's weight before.
  PhaseRows add;
  const float* add_squares;         // exchange rows with the stride of `add`: sums of squares of each 16 columns, if add_norm
  const float* residual_in;         // rows with the residual's stride; null: this launch's own copy
  const float* norm_weight;         // null: 1
  const float* next_norm;           // norm_weight of the next phase, if norm_held there; else null
  float add_eps, add_scale, norm_eps, softcap;

  int32_t residual_stride;
  int32_t cols;
  int32_t outputs;                  // columns of y
  int32_t tile_codes;               // bytes of a stage's codes
  int32_t tile_columns;
  int32_t n_groups;                 // of 128 columns
  float inverse_cols;
  uint32_t row_warps_inverse;       // i · this >> 16 is i / row_warps, for i below 4096
  int16_t k_warps, row_warps;
  int16_t n_chunks;
  float x_scale;                    // what the scales of x are multiplied by (codec.cuh: kXScale)
  Format format;
  DecodeEpilogue epilogue;
  bool gated;
  bool residual;
  bool add_norm;                    // false: a plain sum
  bool full;                        // each warp has 256 columns in each chunk, and no other warp has the same
  bool has_norm;
  bool norm_held;                   // the phase before fetches norm_weight to shared memory, where there is room
  int16_t next_k_warps;             // of that phase
};

// QkvFinish and Attention of one layer, or Attention alone (finish = false: q is ready and all keys are in the cache).
struct AttentionPhase {
  PhaseRows q;                      // [n_heads · head_dim], raw or finished
  PhaseRows kv;                     // the rows that hold the raw keys (first) and values of new tokens; null: no new ones
  PhaseRows out;
  const float* q_weight;
  const float* k_weight;
  const float* v_weight;
  const float* q_rope;              // [n_rows][2][head_dim / 2]
  const float* k_rope;
  CacheView cache;
  // Of attention phases in turn: what a merge puts back need not be there yet when the next phase leaves its sums.
  float* partial_sums;              // [n_rows][heads][kMaxDecodeUnits][head_dim], all ones where nothing waits
  float2* partial_states;           // [n_rows][heads][kMaxDecodeUnits][16], likewise
  const void* maps;                 // of the cache's keys and values (tensor_map.h); null where there is no tensor copy engine
  const int32_t* table;             // [max_sequences][n_entries]
  int32_t n_entries;
  int32_t n_heads, heads_of_kv;
  int32_t window;
  int32_t kv_heads_before;          // query heads in front of the keys in `kv`
  float q_eps, k_eps, v_eps;
  float scale, softcap;
  bool finish;                      // norms and rope of q
  bool q_norm, k_norm, v_norm;
  bool v_from_k;
  bool appends;                     // new keys and values go into the cache
};

enum class PhaseKind : int32_t { kEnd, kLinear, kAttention };

struct alignas(16) DecodePhase {
  PhaseKind kind;
  union {
    LinearPhase linear;
    AttentionPhase attention;
  };
};
static_assert(sizeof(DecodePhase) <= 400);

// Phases that only read: weights, or keys and values, come as always but are not multiplied, so that all results are nonsense.
enum class PlainReads : uint8_t { kNone, kLinear, kAttention };

// Of one launch.
struct DecodeArgs {
  const DecodePhase* phases;        // ends with kEnd
  const WeightStream* streams;      // of the phases, in order; ends with null weights
  int32_t n_rows;
  uint32_t rows_inverse;            // i · this >> 16 is i / n_rows, for i below 4096
  const int32_t* positions;         // [n_rows]
  const int32_t* sequences;
  float* residual;                  // [blocks][kDecodeRows][residual_cols]: each block's own copy where it does not fit into shared memory
  int64_t residual_cols;
  float* residual_out;              // [n_rows] rows, residual_cols apart: where the last block puts it; null: nowhere
  uint32_t* flags;                  // [kDecodeRows]: launches that wrote the row so far; then the count of finished blocks

  uint64_t* timeline;               // [phases][blocks][kDecodeStamps] cycles of the block's multiprocessor, or null; for one row
  PlainReads plain_reads;           // with a timeline

  // Cut of shared memory, in bytes.
  int32_t slot_bytes, n_slots;
  LinearCut cuts[2];                // by form
  int32_t scratch_at, small_at;     // from the shared memory's begin
  int32_t residual_at;              // likewise, of the residual [n_rows][residual_cols]; 0: it is in `residual`
  int32_t vectors_at;               // likewise, of norm weights [warps][256]; 0: there is no room
  int32_t sum_groups;               // groups of 128 columns of the widest normed row, a multiple of 4
  int32_t row_sums;                 // n_rows · sum_groups
};

}  // namespace beryl::cuda
