// What the CUDA backend keeps in device memory: the one description from which both the plan and the allocation follow.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cuda/batch_linear.h"
#include "cuda/decode_plan.h"
#include "cuda/handles.h"
#include "cuda/kernels.h"
#include "cuda/matvec_layout.h"
#include "cuda/packed_rows.h"
#include "cuda/plain_matrix.h"
#include "cuda/prefill_linear.h"
#include "ops/backend.h"

namespace beryl::cuda {

// Steps of up to this many rows are kept as graphs.
inline constexpr int kGraphRows = 64;
// Steps of up to this many tokens split the keys over blocks.
inline constexpr int kSplitTokens = 64;
inline constexpr int64_t kPartialBytes = int64_t{64} << 20;    // bound of the split partials
inline constexpr int64_t kPanelBytes = int64_t{32} << 20;      // bound of the expanded weights: they should stay in L2

// A part of a matrix (or neighbouring parts of one format) as it lies on the device.
struct MatrixPiece {
  bool packed = false;              // tiles (matvec_layout.h), else planes
  bool gated = false;               // packed: gate and up together
  int64_t row_begin = 0;            // first row of the whole matrix, over all parts
  int64_t rows = 0;
  // Packed.
  MatvecSource source;
  MatvecPlan plan;
  int buffer = -1;
  // Planes.
  const HostMatrix* part = nullptr;
  PlainShape shape;
  int scales_buffer = -1;
  int mins_buffer = -1;
};

struct DeviceMatrix {
  std::vector<MatrixPiece> pieces;  // empty: no op uses the matrix
};

// Buffers by index into MemoryLayout::allocations; -1: absent.
struct MemoryLayout {
  std::vector<Allocation> allocations;
  CacheElement cache_element = CacheElement::kBf16;

  std::vector<DeviceMatrix> matrices;
  int vectors = -1;
  std::vector<int64_t> vector_offsets;          // in floats

  std::vector<int> keys, values, key_scales, value_scales;
  std::vector<int> key_cols;                    // of a cache's rows of keys
  std::vector<VectorRef> key_weights;           // CacheView::key_weight
  std::vector<int> rows;
  std::vector<int> frequencies, ropes;
  std::vector<int> tables;

  // Inputs of a step, one buffer: what changes with every step comes first and is sent in one copy.
  int inputs = -1;
  int64_t ids_at = 0, positions_at = 0, sequences_at = 0, output_rows_at = 0, sampling_at = 0, copies_at = 0;
  int64_t output_positions_at = 0, output_sequences_at = 0;   // of the rows that leave
  int64_t step_bytes = 0;                       // of the part above
  int64_t bias_ids_at = 0, bias_values_at = 0, masks_at = 0;
  int64_t input_bytes = 0;
  int64_t max_copies = 0, max_biases = 0, mask_words = 0;
  int history = -1;

  int normed = -1;                              // [rows][cols] f32
  int batch = -1;                               // scratch of batch_linear.h, zero between launches
  int prefill = -1;                             // scratch of prefill_linear.h
  int planes = -1;                              // x as bf16 pairs
  int64_t plane_values = 0;                     // of one plane
  int panel = -1;                               // weights as bf16 pairs
  int64_t panel_values = 0;
  int gated = -1;                               // [rows][outputs] f32
  int route_logits = -1;
  int expert_index = -1;                        // begin, active, pairs
  int expert_gate = -1, expert_up = -1, expert_down = -1;
  int partial_sums = -1, partial_state = -1;
  int widened = -1;                             // one layer's FP8 cache as bf16
  int max_splits = 0, partial_tokens = 0;
  int sample_values = -1, sample_scratch = -1, sampled = -1;

  // Where rows that do not leave are dropped (dropped_rows.h); begin and slots.
  std::optional<OutputPart> output_part;
  DecodePlan decode;
  // The ops from output_part on as launches for the rows that are left there, in the order of ops. The exchange rows have places of their
  // own, behind those of `decode`, which counts them in exchange_floats.
  std::vector<DecodeSegment> output_segments;
  int n_decode_phases() const;      // of all lists, with their ends
  int decode_maps = -1;             // [caches][keys, values] tensor maps (tensor_map.h), where the device has programmatic launches
  int decode_phases = -1, decode_streams = -1, decode_flags = -1, decode_timeline = -1;
  int decode_exchange = -1, decode_residual = -1, decode_partials = -1, decode_states = -1;
};

struct DeviceProperties {
  std::string name;
  int device = 0;
  bool programmatic = false, programmatic_grids = false;   // LaunchContext
  bool has_fp8_cache = true;
  // Several ops in one launch of the decode kernel; with BERYL_WHOLE_STEPS=0 one op a launch, by the same code and with the same bits.
  bool whole_steps = true;
  // Products of more than kBatchRows rows by prefill_linear.h, attention of more than kSplitTokens by prefill_attention.h.
  // BERYL_PREFILL=0: expanded weights and pairs of bf16 instead, as where there is no such product: slower, and nearly f32.
  bool prefill_products = false;
  MatvecDevice matvec;
};

// Whether batch_linear.h takes the op: all of its matrix is packed, and its rows lie at 16-byte addresses.
bool takes_batch(const Program& program, const MemoryLayout& layout, const Linear& op);

// Whether prefill_linear.h takes so many rows.
inline bool takes_prefill(const DeviceProperties& device, int64_t n_rows) {
  return device.prefill_products && n_rows > kBatchRows;
}

// Rows of weights that are expanded at a time.
int64_t panel_rows(int64_t padded_cols);

MemoryLayout make_layout(const Program& program, const StepLimits& limits, const DeviceProperties& device);

// Memory of a layout, each buffer followed by guard bytes.
class DeviceBuffers {
 public:
  static constexpr int64_t kGuardBytes = 256;
  static constexpr int kGuardValue = 0xA5;

  // Throws Error(kOutOfMemory) that says what is needed and what is free.
  explicit DeviceBuffers(const std::vector<Allocation>& allocations);

  template <class T>
  T* as(int index, int64_t offset_bytes = 0) const {
    if (index < 0) return nullptr;
    return reinterpret_cast<T*>(static_cast<std::byte*>(memory_[static_cast<size_t>(index)].get()) + offset_bytes);
  }
  std::vector<std::string> damaged() const;

 private:
  std::vector<Allocation> allocations_;
  std::vector<DevicePtr> memory_;
};

// Copies all weights of the layout to the device; waits for them.
void import_weights(const Program& program, const MemoryLayout& layout, const DeviceBuffers& buffers);

}  // namespace beryl::cuda
