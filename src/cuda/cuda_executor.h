// Runs a program on the GPU: inputs into device memory, ops to launches, and steps to graphs.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/device_memory.h"
#include "ops/backend.h"

namespace beryl::cuda {

class CudaExecutor final : public Executor {
 public:
  CudaExecutor(const Program& program, const StepLimits& limits, const DeviceProperties& device);
  ~CudaExecutor() override;

  void set_input(const StepInput& input) override;
  void set_history(int sequence, std::span<const int32_t> prompt, std::span<const int32_t> reply) override;
  void run(OpRange range) override;
  void synchronize() override;
  std::vector<Sampled> samples() override;
  std::vector<StepPart> time_step(size_t end) override;
  void read_rows(int slot, int64_t row_begin, int64_t n_rows, float* out) override;
  void write_rows(int slot, int64_t row_begin, int64_t n_rows, const float* values) override;
  void read_cache(int cache, CachePart part, int page, int row, float* out) override;
  void write_cache(int cache, CachePart part, int page, int row, const float* values) override;
  std::vector<Allocation> allocations() const override { return layout_.allocations; }
  int cache_element_bytes() const override;
  int64_t position_bytes(int cache) const override;
  std::vector<std::string> damaged_guards() override;

 private:
  // What a captured step depends on besides what lies in device memory.
  struct GraphKey {
    int64_t n_tokens = 0;
    int64_t n_outputs = 0;
    int last_position = 0;            // of the length bucket
    bool samples = false;
    SampleFeatures features;
    bool operator==(const GraphKey&) const = default;
  };
  struct CachedGraph {
    GraphKey key;
    GraphExec graph;                  // null: seen once, not captured yet
    uint64_t last_use = 0;
  };

  // A page of one cache's keys or values in host memory, for tools and tests that read and write row after row.
  struct PageWindow {
    int cache = -1;
    int page = -1;
    bool dirty = false;
    int cols = 0;                     // of a row
    std::vector<std::byte> values;    // [n_kv_heads][kPageTokens][cols]
    std::vector<float> scales;        // [n_kv_heads][kPageTokens]
    // Of one head's row, decoded; what is written may be rounded.
    void read(CacheElement element, int head, int row, float* out) const;
    void write(CacheElement element, int head, int row, const float* from);
  };
  PageWindow& open_page(int cache, CachePart part, int page);
  // Writes the windows back if they were changed, and forgets them.
  void close_pages();
  void copy_page(CachePart part, cudaMemcpyKind direction);

  void execute(const Embed& op);
  void execute(const Linear& op);
  void execute(const QkvFinish& op);
  void execute(const Attention& op);
  void execute(const AddNorm& op);
  void execute(const Route& op);
  void execute(const Experts& op);
  void execute(const GatherRows& op);
  void execute(const Sample& op);
  void execute(const Advance& op);
  void execute(const CopyPages& op);
  void execute_op(size_t index);
  void execute_range(size_t begin, size_t end);
  void run_graph();
  // Whether this input has rows that are dropped at output_part.
  bool drops_rows() const { return layout_.output_part && n_outputs_ < n_input_tokens_; }
  // Before op `index`: drops them there.
  void drop_rows(size_t index);
  // Before ops from `begin` on: a list that is run again from before that place has all rows again.
  void bring_rows_back(size_t begin);

  void linear_of_planes(const Linear& op, int64_t n_rows);
  // By batch_linear.h, or prefill_linear.h.
  void packed_linear(const Linear& op, int64_t n_rows);
  void multiply_linear(const Linear& op, int64_t n_rows);
  void multiply_piece(const MatrixPiece& piece, int64_t piece_row, int64_t n_outputs, int64_t n_rows, int64_t padded_cols,
                      RowsView y, RowsView other, PlainEpilogue epilogue, float softcap);
  void norm_rows(RowsView x, const Norm& norm, int64_t cols, int64_t n_rows);
  void turn_ropes();
  // Sample and the Advance behind it; false: they are launched one by one.
  bool sample_and_advance(const Sample& op);

  // run_decode.cpp
  struct DecodeList {
    int64_t phases_at = 0, streams_at = 0;
    int index = 0;                    // of its flags
    std::vector<DecodeCut> cuts;      // by the number of rows
  };
  struct DecodeRun {
    const DecodeSegment* segment;     // null: none
    const DecodeList* list;
  };
  // The segment that begins at op `begin`, ends by `end` and suits the rows that are there.
  DecodeRun decode_run(size_t begin, size_t end) const;
  PhaseRows phase_rows(const PlannedRows& planned, int64_t col) const;
  LinearPhase linear_phase(const PlannedPhase& planned, int index) const;
  AttentionPhase attention_phase(const PlannedPhase& planned, int index) const;
  void send_decode_phases();
  void send_cache_maps();
  int64_t list_rows(const DecodeSegment& segment) const;
  // False: these rows are not for the decode kernel, and nothing was launched.
  bool run_decode(const DecodeSegment& segment, const DecodeList& list);
  // The parts of the launch that has just ended, which took so long.
  std::vector<StepPart> time_parts(size_t end);
  void add_decode_parts(const DecodeSegment& segment, double microseconds, std::vector<StepPart>& parts) const;

  RowsView view(Rows rows) const;
  int64_t n_rows(Rows rows) const;
  const float* vector(VectorRef ref) const;
  PlainMatrix plain(const MatrixPiece& piece) const;
  PackedMatrix packed(const MatrixPiece& piece) const;
  size_t index_of(const void* op) const;
  CacheView cache_view(int cache) const;
  TokenView token_view(int cache) const;
  // Of the rows that are there.
  const int32_t* positions() const { return input<int32_t>(has_dropped_ ? layout_.output_positions_at : layout_.positions_at); }
  const int32_t* sequences() const { return input<int32_t>(has_dropped_ ? layout_.output_sequences_at : layout_.sequences_at); }
  SampleArgs sample_args(RowsView logits) const;
  TurnRopesArgs ropes_args() const;
  AdvanceArgs advance_args() const;
  template <class T>
  T* input(int64_t offset) const {
    return buffers_.as<T>(layout_.inputs, offset);
  }

  const Program program_;
  const StepLimits limits_;
  const DeviceProperties device_;
  const MemoryLayout layout_;
  const DeviceBuffers buffers_;
  const Stream stream_;
  const LaunchContext context_;

  // Staging for inputs: free again when input_sent_ has happened.
  const PinnedPtr staging_;
  const Event input_sent_;
  std::vector<std::vector<int32_t>> tables_;      // as they were sent last
  const PinnedPtr sampled_host_;

  // Of the current input.
  int64_t n_input_tokens_ = 0;
  int64_t n_tokens_ = 0;              // rows that are there: all, or the outputs
  int64_t n_outputs_ = 0;
  bool has_dropped_ = false;
  bool outputs_are_runs_ = false;     // dropped_rows.h
  int last_position_ = 0;
  int64_t n_copies_ = 0;
  bool has_sampling_ = false;
  bool sampled_ = false;              // Sample has run since set_input
  int64_t n_sampled_ = 0;
  SampleFeatures features_;
  int bucket_position_ = 0;           // for grids, while ops are launched

  std::vector<DecodeList> decode_segments_, output_segments_, decode_single_;
  int n_decode_lists_ = 0;
  bool takes_times_ = false;          // the decode kernel writes its timeline
  PlainReads plain_reads_ = PlainReads::kNone;

  PageWindow windows_[2];            // of keys, of values
  std::vector<CachedGraph> graphs_;
  uint64_t uses_ = 0;
};

}  // namespace beryl::cuda
