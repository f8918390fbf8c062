// The layout of device memory, and its allocation.
#include "cuda/device_memory.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "cuda/device_check.h"
#include "cuda/prefill_attention.h"
#include "cuda/index_math.h"

namespace beryl::cuda {

namespace {

// How the ops use a matrix.
struct MatrixUse {
  bool linear = false;
  bool gated = false;
  bool embed = false;
  bool experts = false;
};

std::vector<MatrixUse> matrix_uses(const Program& program) {
  std::vector<MatrixUse> uses(program.weights->matrices.size());
  const auto use = [&](MatrixRef ref) -> MatrixUse& { return uses[static_cast<size_t>(ref.index)]; };
  for (const Op& op : program.ops) {
    if (const auto* embed = std::get_if<Embed>(&op)) use(embed->table).embed = true;
    if (const auto* linear = std::get_if<Linear>(&op)) {
      use(linear->weight).linear = true;
      use(linear->weight).gated |= is_gated(linear->epilogue);
    }
    if (const auto* route = std::get_if<Route>(&op)) use(route->weight).experts = true;
    if (const auto* experts = std::get_if<Experts>(&op)) {
      use(experts->gate_up).experts = true;
      use(experts->down).experts = true;
    }
  }
  return uses;
}

class LayoutBuilder {
 public:
  LayoutBuilder(const Program& program, const StepLimits& limits, const DeviceProperties& device)
      : program_(program), limits_(limits), device_(device) {}

  MemoryLayout build() {
    lay_weights();
    lay_caches();
    lay_activations();
    lay_inputs();
    lay_decode();
    lay_scratch();
    return std::move(layout_);
  }

 private:
  int add(MemoryKind kind, std::string label, int64_t bytes) {
    layout_.allocations.push_back({kind, std::move(label), bytes});
    return static_cast<int>(layout_.allocations.size()) - 1;
  }
  // Of a slot's rows: the most that a step can have.
  int64_t max_rows(Rows rows) const {
    return program_.rows[static_cast<size_t>(rows.slot)].count == RowCount::kTokens ? limits_.max_tokens
                                                                                    : limits_.max_outputs;
  }

  MatrixPiece packed_piece(const MatvecSource& source) {
    MatrixPiece piece;
    piece.packed = true;
    piece.gated = source.gated;
    piece.source = source;
    piece.plan = plan_matvec(source, device_.matvec.n_sms);
    piece.rows = piece.plan.rows;
    piece.buffer = add(MemoryKind::kWeights, source.parts.front()->name, piece.plan.packed_bytes);
    return piece;
  }

  MatrixPiece plain_piece(const HostMatrix& part) {
    MatrixPiece piece;
    piece.part = &part;
    piece.shape = plain_shape(part);
    piece.rows = part.rows;
    piece.buffer = add(MemoryKind::kWeights, part.name, piece.shape.code_bytes());
    if (piece.shape.has_scales)
      piece.scales_buffer = add(MemoryKind::kWeights, part.name + " scales", piece.shape.scale_bytes());
    if (piece.shape.has_mins) piece.mins_buffer = add(MemoryKind::kWeights, part.name + " mins", piece.shape.min_bytes());
    return piece;
  }

  void lay_matrix(const WeightMatrix& matrix, MatrixUse use, DeviceMatrix& out) {
    size_t next = 0;
    int64_t row = 0;
    while (next < matrix.parts.size()) {
      const HostMatrix& first = matrix.parts[next];
      MatrixPiece piece;
      // A table that is only embedded is read by rows, so it lies in rows.
      const bool streams = use.linear && !use.experts && matvec_supports(first);
      if (streams) {
        MatvecSource source;
        source.parts.push_back(&first);
        for (size_t i = next + 1; i < matrix.parts.size() && matrix.parts[i].format == first.format; ++i)
          source.parts.push_back(&matrix.parts[i]);
        if (use.gated) {
          source.gated = next == 0 && source.parts.size() == 2 && matrix.parts.size() == 2;
          if (!source.gated) source.parts.resize(1);
        }
        piece = packed_piece(source);
        next += source.parts.size();
      } else {
        piece = plain_piece(first);
        ++next;
      }
      piece.row_begin = row;
      row += piece.rows;
      out.pieces.push_back(std::move(piece));
    }
  }

  void lay_weights() {
    const std::vector<MatrixUse> uses = matrix_uses(program_);
    layout_.matrices.resize(uses.size());
    for (size_t i = 0; i < uses.size(); ++i)
      if (uses[i].linear || uses[i].embed || uses[i].experts)
        lay_matrix(program_.weights->matrices[i], uses[i], layout_.matrices[i]);
    int64_t floats = 0;
    for (const WeightVector& vector : program_.weights->vectors) {
      layout_.vector_offsets.push_back(floats);
      floats += round_up(static_cast<int64_t>(vector.values.size()), 4);
    }
    layout_.vectors = add(MemoryKind::kWeights, "norms and scales", floats * 4);
  }

  // Where the kernels can make them.
  std::optional<KeysFromValues> keys_of(const CacheDecl& cache) const {
    if (cache.head_dim != kFromValuesDim || layout_.cache_element == CacheElement::kF32) return std::nullopt;
    std::optional<KeysFromValues> keys = keys_from_values(program_, static_cast<int>(&cache - program_.caches.data()));
    for (int column = 0; keys && column < kFromValuesDim; ++column)
      if (keys->is_turned[static_cast<size_t>(column)] != is_turned(column)) return std::nullopt;
    return keys;
  }

  void lay_caches() {
    switch (limits_.cache_type) {
      case CacheType::kDefault:
      case CacheType::kBf16: layout_.cache_element = CacheElement::kBf16; break;
      case CacheType::kFp8: layout_.cache_element = CacheElement::kFp8; break;
      case CacheType::kF32: layout_.cache_element = CacheElement::kF32; break;
      case CacheType::kF16: throw Error(ErrorCode::kUnsupported, "the GPU's caches are BF16, FP8 or F32, not F16");
    }
    const int64_t element = layout_.cache_element == CacheElement::kF32    ? 4
                            : layout_.cache_element == CacheElement::kBf16 ? 2
                                                                           : 1;
    for (const CacheDecl& cache : program_.caches) {
      const int64_t rows = int64_t{limits_.n_pages[static_cast<size_t>(cache.group)]} * kPageTokens * cache.n_kv_heads;
      const std::optional<KeysFromValues> from_values = keys_of(cache);
      layout_.key_cols.push_back(from_values ? kTurnedColumns : cache.head_dim);
      layout_.key_weights.push_back(from_values ? from_values->weight : VectorRef{});
      layout_.keys.push_back(add(MemoryKind::kCache, cache.name + " K", rows * layout_.key_cols.back() * element));
      layout_.values.push_back(add(MemoryKind::kCache, cache.name + " V", rows * cache.head_dim * element));
      const bool scaled = layout_.cache_element == CacheElement::kFp8;
      layout_.key_scales.push_back(scaled ? add(MemoryKind::kCache, cache.name + " K scales", rows * 4) : -1);
      layout_.value_scales.push_back(scaled ? add(MemoryKind::kCache, cache.name + " V scales", rows * 4) : -1);
    }
  }

  void lay_activations() {
    for (size_t i = 0; i < program_.rows.size(); ++i)
      layout_.rows.push_back(add(MemoryKind::kActivations, program_.rows[i].name,
                                 max_rows({static_cast<int>(i), 0, 0}) * program_.rows[i].cols * 4));
    if (static_cast<int>(program_.ropes.size()) > kMaxRopes)
      throw Error(ErrorCode::kUnsupported, fmt::format("{} rope tables; the GPU backend takes up to {}",
                                                       program_.ropes.size(), kMaxRopes));
    for (size_t i = 0; i < program_.ropes.size(); ++i) {
      const auto n_pairs = static_cast<int64_t>(program_.ropes[i].frequencies.size());
      layout_.frequencies.push_back(add(MemoryKind::kWeights, fmt::format("rope {} frequencies", i), n_pairs * 8));
      layout_.ropes.push_back(
          add(MemoryKind::kActivations, fmt::format("rope {}", i), limits_.max_tokens * 2 * n_pairs * 4));
    }
  }

  void lay_inputs() {
    int64_t at = 0;
    const auto place = [&](int64_t bytes) {
      const int64_t begin = at;
      at = round_up(at + bytes, 16);
      return begin;
    };
    layout_.ids_at = place(int64_t{limits_.max_tokens} * 4);
    layout_.positions_at = place(int64_t{limits_.max_tokens} * 4);
    layout_.sequences_at = place(int64_t{limits_.max_tokens} * 4);
    layout_.output_rows_at = place(int64_t{limits_.max_outputs} * 4);
    layout_.output_positions_at = place(int64_t{limits_.max_outputs} * 4);
    layout_.output_sequences_at = place(int64_t{limits_.max_outputs} * 4);
    layout_.sampling_at = place(int64_t{limits_.max_outputs} * static_cast<int64_t>(sizeof(DeviceSampling)));
    for (int n_pages : limits_.n_pages) layout_.max_copies += n_pages;
    layout_.copies_at = place(layout_.max_copies * 12);
    layout_.step_bytes = at;
    layout_.max_biases = int64_t{limits_.max_outputs} * 512 + 1024;
    layout_.bias_ids_at = place(layout_.max_biases * 4);
    layout_.bias_values_at = place(layout_.max_biases * 4);
    layout_.mask_words = (program_.vocab + 31) / 32;
    layout_.masks_at = place(int64_t{limits_.max_outputs} * layout_.mask_words * 4);
    layout_.input_bytes = at;
    layout_.inputs = add(MemoryKind::kInputs, "step", at);
    for (size_t i = 0; i < program_.groups.size(); ++i)
      layout_.tables.push_back(add(MemoryKind::kInputs, fmt::format("page table {}", i),
                                   int64_t{limits_.max_sequences} * limits_.n_entries[i] * 4));
    layout_.history = add(MemoryKind::kInputs, "token counts", int64_t{limits_.max_sequences} * program_.vocab * 4);
  }

  void lay_scratch() {
    int64_t normed = 0, gated = 0, batch_bytes = 0, prefill_bytes = 0, route_logits = 0, expert_index = 0, expert_gate = 0, expert_down = 0, partial = 0, widened = 0;
    const auto grow = [](int64_t& bytes, int64_t needed) { bytes = std::max(bytes, needed); };
    bool samples = false;
    for (size_t index = 0; index < program_.ops.size(); ++index) {
      const Op& op = program_.ops[index];
      if (const auto* linear = std::get_if<Linear>(&op)) {
        const int64_t rows = max_rows(linear->y), cols = program_.matrix(linear->weight).cols();
        const DeviceMatrix& matrix = layout_.matrices[static_cast<size_t>(linear->weight.index)];
        const bool all_plain = std::none_of(matrix.pieces.begin(), matrix.pieces.end(), [](const MatrixPiece& piece) { return piece.packed; });
        if (all_plain) grow(normed, std::min<int64_t>(rows, kGraphRows) * cols * 4);
        const bool batch = takes_batch(program_, layout_, *linear);
        const bool decoded = decodes(index, std::min<int64_t>(rows, kDecodeRows));
        if (batch && (rows > kWholeStepRows || !decoded))
          for (const MatrixPiece& piece : matrix.pieces)
            grow(batch_bytes, batch_scratch_bytes(piece.plan, static_cast<int>(std::min<int64_t>(rows, kBatchRows)), device_.matvec));
        const bool prefill = batch && takes_prefill(device_, rows);
        if (prefill)
          for (const MatrixPiece& piece : matrix.pieces) grow(prefill_bytes, prefill_scratch_bytes(piece.plan, rows));
        // Without the product of many rows by expanded weights.
        const bool few = all_plain ? rows <= kGraphRows : batch ? prefill || rows <= kBatchRows : decoded && rows <= kDecodeRows;
        if (is_gated(linear->epilogue) && (!few || matrix.pieces.size() > 1)) grow(gated, rows * linear->y.cols * 4);
        if (!few) {
          const int64_t padded = round_up(cols, kGemmColumns);
          grow(layout_.plane_values, rows * padded);
          int64_t widest = 0;
          for (const MatrixPiece& piece : matrix.pieces) grow(widest, piece.rows);
          grow(layout_.panel_values, std::min(widest, panel_rows(padded)) * padded);
        }
      } else if (const auto* route = std::get_if<Route>(&op)) {
        const int64_t rows = max_rows(route->x);
        if (route->n_experts > kMaxExperts)
          throw Error(ErrorCode::kUnsupported,
                      fmt::format("{} experts; the GPU backend takes up to {}", route->n_experts, kMaxExperts));
        grow(normed, rows * program_.matrix(route->weight).cols() * 4);
        grow(route_logits, rows * route->n_experts * 4);
      } else if (const auto* experts = std::get_if<Experts>(&op)) {
        const int64_t rows = max_rows(experts->x), pairs = rows * experts->top_k;
        const int64_t n_experts = program_.matrix(experts->down).stack();
        grow(normed, rows * program_.matrix(experts->gate_up).cols() * 4);
        grow(expert_index, (2 * n_experts + 1 + pairs) * 4);
        grow(expert_gate, pairs * experts->expert_dim * 4);
        grow(expert_down, pairs * experts->y.cols * 4);
      } else if (const auto* attention = std::get_if<Attention>(&op)) {
        const CacheDecl& cache = program_.caches[static_cast<size_t>(attention->cache)];
        const int window = program_.groups[static_cast<size_t>(cache.group)].window;
        const int64_t last = window > 0 ? INT32_MAX - 1
                                        : int64_t{limits_.n_entries[static_cast<size_t>(cache.group)]} * kPageTokens - 1;
        const int splits = most_splits(static_cast<int>(std::min<int64_t>(last, INT32_MAX - 1)), window);
        layout_.max_splits = std::max(layout_.max_splits, splits);
        grow(partial, int64_t{attention->n_heads} * cache.head_dim * 4);
        heads_ = std::max(heads_, attention->n_heads);
        if (layout_.cache_element == CacheElement::kFp8 && device_.prefill_products && limits_.max_tokens > kSplitTokens &&
            has_prefill_heads(cache.head_dim)) {
          const int64_t n_pages = limits_.n_pages[static_cast<size_t>(cache.group)];
          grow(widened, widened_bytes(n_pages * cache.n_kv_heads * kPageTokens, cache.head_dim,
                                      layout_.key_cols[static_cast<size_t>(attention->cache)]));
        }
      } else if (std::holds_alternative<Sample>(op)) {
        samples = true;
        if (program_.vocab > kMaxVocab)
          throw Error(ErrorCode::kUnsupported, fmt::format("a vocabulary of {}; the GPU sampler takes up to {}",
                                                           program_.vocab, kMaxVocab));
      }
    }
    const auto scratch = [&](const char* label, int64_t bytes) {
      return bytes > 0 ? add(MemoryKind::kActivations, label, bytes) : -1;
    };
    layout_.normed = scratch("normed rows", normed);
    layout_.batch = scratch("rows in digits", batch_bytes);
    layout_.prefill = scratch("rows in 16 bits", prefill_bytes);
    layout_.planes = scratch("rows as bf16 pairs", layout_.plane_values * 4);
    layout_.panel = scratch("weights as bf16 pairs", layout_.panel_values * 4);
    layout_.gated = scratch("gated rows", gated);
    layout_.route_logits = scratch("route logits", route_logits);
    layout_.expert_index = scratch("expert index", expert_index);
    layout_.expert_gate = scratch("expert gate", expert_gate);
    layout_.expert_up = scratch("expert up", expert_gate);
    layout_.expert_down = scratch("expert down", expert_down);
    if (partial > 0) {
      const int64_t token_bytes = partial * layout_.max_splits;
      layout_.partial_tokens =
          static_cast<int>(std::clamp<int64_t>(kPartialBytes / token_bytes, 1, std::min(limits_.max_tokens, kSplitTokens)));
      layout_.partial_sums = scratch("attention sums", token_bytes * layout_.partial_tokens);
      layout_.partial_state =
          scratch("attention states", int64_t{layout_.partial_tokens} * heads_ * layout_.max_splits * 8);
    }
    layout_.widened = scratch("cache as bf16", widened);
    if (samples) {
      const int64_t rows = limits_.max_outputs;
      layout_.sample_values = scratch("sampler values", rows * program_.vocab * 4);
      // Per chunk: largest, best, invalid, largest logit (4 bytes each), three sums (8 bytes each); per group two maxima; a count.
      layout_.sample_scratch =
          scratch("sampler scratch", rows * (sample_chunks(program_.vocab) * (4 * 4 + 3 * 8) + 2 * kMaxSampleGroups * 4 + 4));
      layout_.sampled =
          scratch("sampled", rows * (static_cast<int64_t>(sizeof(DeviceSampled)) + kMaxLogprobs * 8));
    }
  }

  // Whether the decode kernel takes the op by itself, with any number of rows up to this.
  bool decodes(size_t op, int64_t rows) const {
    const DecodeSegment& single = layout_.decode.single[op];
    if (single.phases.empty()) return false;
    for (int n = 1; n <= static_cast<int>(rows); ++n)
      if (cut_decode(single.needs, n, device_.matvec.shared_per_block).n_slots == 0) return false;
    return true;
  }

  // What is planned from output_part on as if nothing was before it. A step of one row drops none, or all.
  void lay_output_segments() {
    if (!layout_.output_part || limits_.max_tokens == 1) return;
    Program rest = program_;
    std::fill_n(rest.ops.begin(), layout_.output_part->begin, Op(CopyPages{}));
    DecodePlan plan = plan_decode(rest, layout_, true);
    const int64_t before = layout_.decode.exchange_floats;
    const auto move = [&](int64_t& place) {
      if (place >= 0) place += before;
    };
    for (DecodeSegment& segment : plan.segments)
      for (PlannedPhase& phase : segment.phases) {
        for (PlannedRows* rows : {&phase.x, &phase.y, &phase.other, &phase.add, &phase.kv}) move(rows->exchange);
        move(phase.squares);
        move(phase.add_squares);
      }
    layout_.output_segments = std::move(plan.segments);
    if (!layout_.output_segments.empty()) layout_.decode.exchange_floats += plan.exchange_floats;
  }

  void lay_decode() {
    layout_.output_part = output_part(program_);
    layout_.decode = plan_decode(program_, layout_, device_.whole_steps);
    if (device_.whole_steps) lay_output_segments();
    const DecodePlan& plan = layout_.decode;
    const int n_phases = layout_.n_decode_phases();
    if (n_phases == 0) return;
    const int64_t rows = std::min(limits_.max_tokens, kDecodeRows);
    const auto lists = static_cast<int64_t>(plan.segments.size() + layout_.output_segments.size() + plan.single.size());
    layout_.decode_phases = add(MemoryKind::kInputs, "decode phases", n_phases * static_cast<int64_t>(sizeof(DecodePhase)));
    layout_.decode_streams = add(MemoryKind::kInputs, "decode streams", n_phases * static_cast<int64_t>(sizeof(WeightStream)));
    if (device_.programmatic)
      layout_.decode_maps = add(MemoryKind::kInputs, "decode tensor maps", static_cast<int64_t>(program_.caches.size()) * 2 * kTensorMapBytes);
    layout_.decode_flags = add(MemoryKind::kActivations, "decode flags", lists * kDecodeFlagWords * 4);
    size_t longest = 0;
    for (const std::vector<DecodeSegment>* list : {&plan.segments, &std::as_const(layout_.output_segments)})
      for (const DecodeSegment& segment : *list) longest = std::max(longest, segment.phases.size());
    const auto scratch = [&](const char* label, int64_t bytes) { return bytes > 0 ? add(MemoryKind::kActivations, label, bytes) : -1; };
    layout_.decode_timeline = scratch("decode timeline", static_cast<int64_t>(longest) * device_.matvec.n_sms * kDecodeStamps * 8);
    layout_.decode_exchange = scratch("exchange rows", rows * plan.exchange_floats * 4);
    layout_.decode_residual = scratch("residual copies", int64_t{device_.matvec.n_sms} * kDecodeRows * plan.residual_cols * 4);
    layout_.decode_partials = scratch("attention units", 2 * rows * plan.partial_floats * 4);
    layout_.decode_states = scratch("attention unit states", 2 * rows * plan.partial_states * 8);
  }

  const Program& program_;
  const StepLimits& limits_;
  const DeviceProperties& device_;
  MemoryLayout layout_;
  int heads_ = 0;
};

}  // namespace

int MemoryLayout::n_decode_phases() const {
  int n = decode.n_phases();
  for (const DecodeSegment& segment : output_segments) n += static_cast<int>(segment.phases.size()) + 1;
  return n;
}

bool takes_batch(const Program& program, const MemoryLayout& layout, const Linear& op) {
  const std::vector<MatrixPiece>& pieces = layout.matrices[static_cast<size_t>(op.weight.index)].pieces;
  return op.x.col % 4 == 0 && program.rows[static_cast<size_t>(op.x.slot)].cols % 4 == 0 &&
         std::all_of(pieces.begin(), pieces.end(), [](const MatrixPiece& piece) { return piece.packed; });
}

int64_t panel_rows(int64_t padded_cols) {
  constexpr int64_t kMostBlocks = 65535 / 128 * 128;   // of a grid's second dimension
  return std::clamp<int64_t>(kPanelBytes / (padded_cols * 4) / 128 * 128, 128, kMostBlocks);
}

MemoryLayout make_layout(const Program& program, const StepLimits& limits, const DeviceProperties& device) {
  return LayoutBuilder(program, limits, device).build();
}

DeviceBuffers::DeviceBuffers(const std::vector<Allocation>& allocations) : allocations_(allocations) {
  // The caller has asked Backend::memory before; but the answer ages, and who loads no model does not ask.
  const int64_t needed = device_bytes(allocations, kGuardBytes);
  size_t free_bytes = 0, total_bytes = 0;
  check(cudaMemGetInfo(&free_bytes, &total_bytes), "asking for free memory");
  const DeviceMemory there = {static_cast<int64_t>(total_bytes), static_cast<int64_t>(free_bytes)};
  const auto refuse = [&](std::string_view at) {
    throw Error(ErrorCode::kOutOfMemory, too_small_message(allocations, needed, there, at));
  };
  if (needed > there.free_bytes) refuse("");
  for (const Allocation& allocation : allocations) {
    void* memory = nullptr;
    const cudaError_t status = cudaMalloc(&memory, static_cast<size_t>(allocation.bytes + kGuardBytes));
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      refuse(allocation.label);
    }
    check(status, allocation.label.c_str());
    memory_.emplace_back(memory);
    auto* bytes = static_cast<std::byte*>(memory);
    check(cudaMemset(bytes, 0, static_cast<size_t>(allocation.bytes)), allocation.label.c_str());
    check(cudaMemset(bytes + allocation.bytes, kGuardValue, static_cast<size_t>(kGuardBytes)), allocation.label.c_str());
  }
}

std::vector<std::string> DeviceBuffers::damaged() const {
  std::vector<std::string> labels;
  unsigned char guard[kGuardBytes];
  for (size_t i = 0; i < memory_.size(); ++i) {
    check(cudaMemcpy(guard, as<std::byte>(static_cast<int>(i), allocations_[i].bytes), sizeof(guard), cudaMemcpyDeviceToHost),
          allocations_[i].label.c_str());
    if (std::any_of(guard, guard + kGuardBytes, [](unsigned char byte) { return byte != kGuardValue; }))
      labels.push_back(allocations_[i].label);
  }
  return labels;
}

}  // namespace beryl::cuda
