// Every op as launches: slots, weights and caches to pointers, and the choice between the decode kernel, the products of few and
// of many rows on packed tiles, the kernels for planes and the matrix product of expanded weights.
#include <algorithm>

#include "cuda/cuda_executor.h"
#include "cuda/dropped_rows.h"
#include "cuda/index_math.h"
#include "cuda/prefill_attention.h"

namespace beryl::cuda {

namespace {

RowsView offset(RowsView rows, int64_t col) {
  return rows.values == nullptr ? rows : RowsView{rows.values + col, rows.stride};
}

PlainEpilogue plain_epilogue(Epilogue epilogue) {
  switch (epilogue) {
    case Epilogue::kGeluTimesOther: return PlainEpilogue::kGeluTimesOther;
    case Epilogue::kSoftcap: return PlainEpilogue::kSoftcap;
    case Epilogue::kGatedGelu: return PlainEpilogue::kTimesGeluOther;
    case Epilogue::kGatedSilu: return PlainEpilogue::kTimesSiluOther;
    case Epilogue::kStore: break;
  }
  return PlainEpilogue::kStore;
}

}  // namespace

RowsView CudaExecutor::view(Rows rows) const {
  if (!rows.present()) return {};
  const auto slot = static_cast<size_t>(rows.slot);
  return {buffers_.as<float>(layout_.rows[slot]) + rows.col, program_.rows[slot].cols};
}

int64_t CudaExecutor::n_rows(Rows rows) const {
  return program_.rows[static_cast<size_t>(rows.slot)].count == RowCount::kTokens ? n_tokens_ : n_outputs_;
}

const float* CudaExecutor::vector(VectorRef ref) const {
  if (!ref.present()) return nullptr;
  return buffers_.as<float>(layout_.vectors, layout_.vector_offsets[static_cast<size_t>(ref.index)] * 4);
}

PlainMatrix CudaExecutor::plain(const MatrixPiece& piece) const {
  return {buffers_.as<uint8_t>(piece.buffer),
          buffers_.as<float>(piece.scales_buffer),
          buffers_.as<float>(piece.mins_buffer),
          piece.part->tensor_scale,
          piece.shape.codes,
          piece.shape.group_shift,
          piece.shape.rows,
          piece.shape.cols,
          piece.shape.padded_cols,
          piece.shape.row_code_bytes,
          piece.shape.row_groups};
}

PackedMatrix CudaExecutor::packed(const MatrixPiece& piece) const {
  return packed_matrix(piece.plan, buffers_.as<uint8_t>(piece.buffer));
}

// Of an op of this program, which lies within an element of ops.
size_t CudaExecutor::index_of(const void* op) const {
  return static_cast<size_t>((static_cast<const std::byte*>(op) - reinterpret_cast<const std::byte*>(program_.ops.data())) /
                             static_cast<std::ptrdiff_t>(sizeof(Op)));
}

CacheView CudaExecutor::cache_view(int cache) const {
  const auto index = static_cast<size_t>(cache);
  return {buffers_.as<std::byte>(layout_.keys[index]),   buffers_.as<std::byte>(layout_.values[index]),
          buffers_.as<float>(layout_.key_scales[index]), buffers_.as<float>(layout_.value_scales[index]),
          vector(layout_.key_weights[index]),            layout_.cache_element,
          program_.caches[index].n_kv_heads,             program_.caches[index].head_dim,
          layout_.key_cols[index]};
}

TokenView CudaExecutor::token_view(int cache) const {
  const auto group = static_cast<size_t>(program_.caches[static_cast<size_t>(cache)].group);
  return {positions(), sequences(),
          buffers_.as<int32_t>(layout_.tables[group]), limits_.n_entries[group]};
}

void CudaExecutor::execute(const Embed& op) {
  const DeviceMatrix& matrix = layout_.matrices[static_cast<size_t>(op.table.index)];
  BERYL_CHECK(matrix.pieces.size() == 1, "an embedding table is one matrix");
  const MatrixPiece& piece = matrix.pieces.front();
  const int32_t* ids = input<int32_t>(layout_.ids_at);
  if (piece.packed)
    launch_packed_embed(context_, {packed(piece), 0, ids, view(op.out), op.scale}, n_tokens_);
  else
    launch_embed(context_, {plain(piece), ids, view(op.out), op.scale, op.out.cols}, n_tokens_);
}

void CudaExecutor::norm_rows(RowsView x, const Norm& norm, int64_t cols, int64_t n_rows) {
  launch_norm_rows(context_,
                   {x, vector(norm.weight), norm.present, norm.eps, cols, buffers_.as<float>(layout_.normed), nullptr,
                    nullptr, 0},
                   n_rows);
}

void CudaExecutor::execute(const Linear& op) {
  const int64_t rows = n_rows(op.y);
  if (rows == 0) return;
  if (rows <= (takes_batch(program_, layout_, op) ? kWholeStepRows : kDecodeRows) &&
      run_decode(layout_.decode.single[index_of(&op)], decode_single_[index_of(&op)]))
    return;
  const std::vector<MatrixPiece>& pieces = layout_.matrices[static_cast<size_t>(op.weight.index)].pieces;
  const bool all_plain = std::none_of(pieces.begin(), pieces.end(), [](const MatrixPiece& piece) { return piece.packed; });
  if (all_plain && rows <= kGraphRows)
    linear_of_planes(op, rows);
  else if ((rows <= kBatchRows || takes_prefill(device_, rows)) && takes_batch(program_, layout_, op))
    packed_linear(op, rows);
  else
    multiply_linear(op, rows);
}

void CudaExecutor::packed_linear(const Linear& op, int64_t n_rows) {
  const std::vector<MatrixPiece>& pieces = layout_.matrices[static_cast<size_t>(op.weight.index)].pieces;
  const auto run_piece = [&](const MatrixPiece& piece, RowsView y, RowsView other, DecodeEpilogue epilogue) {
    const bool many = takes_prefill(device_, n_rows);
    const BatchLinearArgs args = {buffers_.as<uint8_t>(piece.buffer), view(op.x), static_cast<int>(n_rows), op.norm.present,
                                  vector(op.norm.weight), op.norm.eps, epilogue, other, op.softcap, y,
                                  buffers_.as<void>(many ? layout_.prefill : layout_.batch)};
    if (many) launch_prefill_linear(piece.plan, args, device_.matvec, context_);
    else launch_batch_linear(piece.plan, args, device_.matvec, context_);
  };
  const RowsView y = view(op.y), other = view(op.other);
  if (is_gated(op.epilogue) && pieces.size() == 2) {
    const RowsView gate = {buffers_.as<float>(layout_.gated), op.y.cols};
    run_piece(pieces[0], gate, {}, DecodeEpilogue::kStore);
    run_piece(pieces[1], y, gate, decode_epilogue(op.epilogue, false));
    return;
  }
  for (const MatrixPiece& piece : pieces)
    run_piece(piece, offset(y, piece.row_begin), offset(other, piece.row_begin), decode_epilogue(op.epilogue, true));
}

// Weights that are not packed, for few rows.
void CudaExecutor::linear_of_planes(const Linear& op, int64_t n_rows) {
  const DeviceMatrix& matrix = layout_.matrices[static_cast<size_t>(op.weight.index)];
  const int64_t cols = program_.matrix(op.weight).cols();
  norm_rows(view(op.x), op.norm, cols, n_rows);
  const RowsView x = {buffers_.as<float>(layout_.normed), cols};
  const RowsView y = view(op.y), other = view(op.other);
  const auto run_piece = [&](const MatrixPiece& piece, RowsView piece_y, RowsView piece_other, PlainEpilogue epilogue) {
    launch_plain_linear(context_, {plain(piece), x, piece_y, piece_other, epilogue, op.softcap, n_rows});
  };
  if (!is_gated(op.epilogue)) {
    for (const MatrixPiece& piece : matrix.pieces)
      run_piece(piece, offset(y, piece.row_begin), offset(other, piece.row_begin), plain_epilogue(op.epilogue));
  } else {
    const RowsView gate = {buffers_.as<float>(layout_.gated), op.y.cols};
    run_piece(matrix.pieces[0], gate, {}, PlainEpilogue::kStore);
    run_piece(matrix.pieces[1], y, gate, plain_epilogue(op.epilogue));
  }
}

void CudaExecutor::multiply_linear(const Linear& op, int64_t n_rows) {
  const DeviceMatrix& matrix = layout_.matrices[static_cast<size_t>(op.weight.index)];
  const int64_t cols = program_.matrix(op.weight).cols();
  const int64_t padded = (cols + kGemmColumns - 1) / kGemmColumns * kGemmColumns;
  auto* planes = buffers_.as<uint16_t>(layout_.planes);
  launch_norm_rows(context_,
                   {view(op.x), vector(op.norm.weight), op.norm.present, op.norm.eps, cols, nullptr, planes,
                    planes + layout_.plane_values, padded},
                   n_rows);
  const RowsView y = view(op.y), other = view(op.other);
  const PlainEpilogue epilogue = plain_epilogue(op.epilogue);
  if (!is_gated(op.epilogue)) {
    for (const MatrixPiece& piece : matrix.pieces)
      multiply_piece(piece, 0, piece.rows, n_rows, padded, offset(y, piece.row_begin), offset(other, piece.row_begin),
                     epilogue, op.softcap);
    return;
  }
  const RowsView gate = {buffers_.as<float>(layout_.gated), op.y.cols};
  const MatrixPiece& first = matrix.pieces.front();
  const MatrixPiece& last = matrix.pieces.back();     // the same piece where gate and up are packed together
  multiply_piece(first, 0, op.y.cols, n_rows, padded, gate, {}, PlainEpilogue::kStore, 0);
  multiply_piece(last, matrix.pieces.size() == 1 ? op.y.cols : 0, op.y.cols, n_rows, padded, y, gate, epilogue, 0);
}

// Rows [piece_row, piece_row + n_outputs) of a piece, expanded panel by panel.
void CudaExecutor::multiply_piece(const MatrixPiece& piece, int64_t piece_row, int64_t n_outputs, int64_t n_rows,
                                  int64_t padded_cols, RowsView y, RowsView other, PlainEpilogue epilogue, float softcap) {
  auto* planes = buffers_.as<uint16_t>(layout_.planes);
  auto* panel = buffers_.as<uint16_t>(layout_.panel);
  const int64_t step = panel_rows(padded_cols);
  for (int64_t begin = 0; begin < n_outputs; begin += step) {
    const int64_t n = std::min(step, n_outputs - begin);
    uint16_t *high = panel, *low = panel + layout_.panel_values;
    if (piece.packed)
      launch_packed_panel(context_, {packed(piece), piece_row + begin, n, high, low, padded_cols});
    else
      launch_plain_panel(context_, {plain(piece), piece_row + begin, n, high, low, padded_cols});
    launch_gemm(context_, {planes, planes + layout_.plane_values, high, low, padded_cols, n_rows, n, offset(y, begin),
                           offset(other, begin), epilogue, softcap});
  }
}

void CudaExecutor::execute(const QkvFinish& op) {
  QkvFinishArgs args = {};
  args.qkv = view(op.qkv);
  if (op.n_kv_heads > 0) {
    args.token = token_view(op.cache);
    args.cache = cache_view(op.cache);
  }
  args.rope = op.rope < 0 ? nullptr : buffers_.as<float>(layout_.ropes[static_cast<size_t>(op.rope)]);
  args.q_weight = vector(op.q_norm.weight);
  args.k_weight = vector(op.k_norm.weight);
  args.v_weight = vector(op.v_norm.weight);
  args.q_norm = op.q_norm.present;
  args.k_norm = op.k_norm.present;
  args.v_norm = op.v_norm.present;
  args.q_eps = op.q_norm.eps;
  args.k_eps = op.k_norm.eps;
  args.v_eps = op.v_norm.eps;
  args.n_heads = op.n_heads;
  args.head_dim = op.head_dim;
  args.v_from_k = op.v_from_k;
  launch_qkv_finish(context_, args, n_tokens_);
}

void CudaExecutor::execute(const Attention& op) {
  if (n_tokens_ <= kDecodeRows && run_decode(layout_.decode.single[index_of(&op)], decode_single_[index_of(&op)])) return;
  AttentionArgs args = {};
  args.q = view(op.q);
  args.out = view(op.out);
  args.token = token_view(op.cache);
  args.cache = cache_view(op.cache);
  args.n_heads = op.n_heads;
  const auto group = static_cast<size_t>(program_.caches[static_cast<size_t>(op.cache)].group);
  args.window = program_.groups[group].window;
  args.cache_rows = int64_t{limits_.n_pages[group]} * args.cache.n_kv_heads * kPageTokens;
  args.scale = op.scale;
  args.softcap = op.softcap;
  args.n_tokens = static_cast<int>(n_tokens_);
  // Forms for many rows take each sequence's rows for neighbours.
  if (n_tokens_ > kSplitTokens && (!has_dropped_ || outputs_are_runs_)) {
    auto* widened = buffers_.as<void>(layout_.widened);
    if (device_.prefill_products && takes_prefill_attention(args, widened)) launch_prefill_attention(context_, args, widened);
    else launch_attention_whole(context_, args);
    return;
  }
  args.partial_sums = buffers_.as<float>(layout_.partial_sums);
  args.partial_state = buffers_.as<float2>(layout_.partial_state);
  args.max_splits = layout_.max_splits;
  const int n_splits = std::min(most_splits(bucket_position_, args.window), layout_.max_splits);
  for (int token = 0; token < static_cast<int>(n_tokens_); token += layout_.partial_tokens) {
    args.first_token = token;
    args.n_tokens = std::min(layout_.partial_tokens, static_cast<int>(n_tokens_) - token);
    launch_attention_split(context_, args, n_splits);
  }
}

void CudaExecutor::execute(const AddNorm& op) {
  const int64_t rows = n_rows(op.out);
  if (rows == 0) return;
  launch_add_norm(context_,
                  {view(op.out), view(op.base), view(op.y), vector(op.norm.weight), op.norm.present, op.norm.eps, op.out.cols,
                   op.group > 0 ? op.group : op.out.cols, op.scale},
                  rows);
}

void CudaExecutor::execute(const Route& op) {
  const int64_t cols = program_.matrix(op.weight).cols();
  norm_rows(view(op.x), op.norm, cols, n_tokens_);
  const RowsView normed = {buffers_.as<float>(layout_.normed), cols};
  const RowsView logits = {buffers_.as<float>(layout_.route_logits), op.n_experts};
  for (const MatrixPiece& piece : layout_.matrices[static_cast<size_t>(op.weight.index)].pieces)
    launch_plain_linear(context_, {plain(piece), normed, offset(logits, piece.row_begin), {}, PlainEpilogue::kStore, 0,
                                   n_tokens_});
  launch_route_select(context_, {logits, vector(op.expert_scale), view(op.routes), op.n_experts, op.top_k}, n_tokens_);
}

void CudaExecutor::execute(const Experts& op) {
  const DeviceMatrix& gate_up = layout_.matrices[static_cast<size_t>(op.gate_up.index)];
  const DeviceMatrix& down = layout_.matrices[static_cast<size_t>(op.down.index)];
  BERYL_CHECK(gate_up.pieces.size() == 2 && down.pieces.size() == 1, "experts have gate, up and down");
  const int64_t cols = program_.matrix(op.gate_up).cols(), n_pairs = n_tokens_ * op.top_k;
  const auto n_experts = static_cast<int>(program_.matrix(op.down).stack());
  norm_rows(view(op.x), op.norm, cols, n_tokens_);
  const RowsView normed = {buffers_.as<float>(layout_.normed), cols};
  auto* begin = buffers_.as<int32_t>(layout_.expert_index);
  int32_t *active = begin + n_experts + 1, *pairs = active + n_experts;
  launch_route_group(context_, {view(op.routes), n_pairs, n_experts, op.top_k, begin, pairs, active});
  const int max_active = static_cast<int>(std::min<int64_t>(n_experts, n_pairs));
  const RowsView gate = {buffers_.as<float>(layout_.expert_gate), op.expert_dim};
  const RowsView hidden = {buffers_.as<float>(layout_.expert_up), op.expert_dim};
  const RowsView values = {buffers_.as<float>(layout_.expert_down), op.y.cols};
  const auto linear = [&](const MatrixPiece& piece, RowsView x, int x_divisor, RowsView y, RowsView other,
                          PlainEpilogue epilogue) {
    launch_expert_linear(context_, {plain(piece), begin, pairs, active, max_active, x, x_divisor, y, other, epilogue});
  };
  linear(gate_up.pieces[0], normed, op.top_k, gate, {}, PlainEpilogue::kStore);
  linear(gate_up.pieces[1], normed, op.top_k, hidden, gate, PlainEpilogue::kTimesGeluOther);
  linear(down.pieces[0], hidden, 1, values, {}, PlainEpilogue::kStore);
  launch_expert_combine(context_, {values.values, view(op.routes), view(op.y), op.y.cols, op.top_k}, n_tokens_);
}

void CudaExecutor::execute(const GatherRows& op) {
  if (n_outputs_ == 0) return;
  if (has_dropped_) {                 // they lie one behind the other already
    MoveRowsArgs args = {};
    args.slots[args.n_slots++] = {view(op.out), view(op.x), op.x.cols};
    args.n_rows = static_cast<int>(n_outputs_);
    launch_move_rows(context_, args);
    return;
  }
  launch_gather_rows(context_, {view(op.x), view(op.out), input<int32_t>(layout_.output_rows_at), op.x.cols}, n_outputs_);
}

SampleArgs CudaExecutor::sample_args(RowsView logits) const {
  SampleArgs args = {};
  args.logits = logits;
  args.vocab = program_.vocab;
  args.sampling = input<DeviceSampling>(layout_.sampling_at);
  args.bias_ids = input<int32_t>(layout_.bias_ids_at);
  args.bias_values = input<float>(layout_.bias_values_at);
  args.masks = input<uint32_t>(layout_.masks_at);
  args.mask_words = layout_.mask_words;
  args.history = buffers_.as<uint32_t>(layout_.history);
  args.sequences = input<int32_t>(layout_.sequences_at);
  args.output_rows = input<int32_t>(layout_.output_rows_at);
  args.values = buffers_.as<float>(layout_.sample_values);
  const int64_t rows = limits_.max_outputs, chunks = rows * sample_chunks(program_.vocab);
  args.chunk_weight = buffers_.as<double>(layout_.sample_scratch);
  args.chunk_kept_weight = args.chunk_weight + chunks;
  args.chunk_raw_sum = args.chunk_kept_weight + chunks;
  args.group_max = reinterpret_cast<float*>(args.chunk_raw_sum + chunks);
  args.raw_group_max = args.group_max + rows * kMaxSampleGroups;
  args.chunk_max = args.raw_group_max + rows * kMaxSampleGroups;
  args.chunk_raw_max = args.chunk_max + chunks;
  args.chunk_best = reinterpret_cast<int32_t*>(args.chunk_raw_max + chunks);
  args.chunk_invalid = args.chunk_best + chunks;
  args.finished = reinterpret_cast<uint32_t*>(args.chunk_invalid + chunks);
  args.sampled = buffers_.as<DeviceSampled>(layout_.sampled);
  args.top_ids = reinterpret_cast<int32_t*>(args.sampled + rows);
  args.top_logprobs = reinterpret_cast<float*>(args.top_ids + rows * kMaxLogprobs);
  return args;
}

void CudaExecutor::execute(const Sample& op) {
  if (!has_sampling_ || n_outputs_ == 0) return;
  launch_sample(context_, sample_args(view(op.logits)), n_outputs_, features_);
}

TurnRopesArgs CudaExecutor::ropes_args() const {
  TurnRopesArgs args = {};
  args.positions = positions();
  args.n_ropes = static_cast<int>(program_.ropes.size());
  for (size_t i = 0; i < program_.ropes.size(); ++i) {
    args.frequencies[i] = buffers_.as<double>(layout_.frequencies[i]);
    args.tables[i] = buffers_.as<float>(layout_.ropes[i]);
    args.n_pairs[i] = static_cast<int>(program_.ropes[i].frequencies.size());
  }
  return args;
}

void CudaExecutor::turn_ropes() {
  if (!program_.ropes.empty()) launch_turn_ropes(context_, ropes_args(), n_tokens_);
}

AdvanceArgs CudaExecutor::advance_args() const {
  return {input<int32_t>(layout_.ids_at), input<int32_t>(layout_.positions_at), input<DeviceSampling>(layout_.sampling_at),
          buffers_.as<DeviceSampled>(layout_.sampled), ropes_args(), static_cast<int>(n_outputs_)};
}

bool CudaExecutor::sample_and_advance(const Sample& op) {
  if (!has_sampling_ || n_outputs_ == 0 || features_.draws || features_.logprobs) return false;
  launch_sample_and_advance(context_, sample_args(view(op.logits)), advance_args());
  return true;
}

void CudaExecutor::execute(const Advance&) {
  // A step without sampling has nothing to advance to; one whose Sample ran before this range does.
  if (!has_sampling_ || n_outputs_ == 0) return;
  launch_advance(context_, advance_args());
}

void CudaExecutor::execute(const CopyPages&) {
  if (n_copies_ == 0) return;
  for (size_t i = 0; i < program_.caches.size(); ++i) {
    const CacheDecl& cache = program_.caches[i];
    const int64_t page_rows = int64_t{kPageTokens} * cache.n_kv_heads;
    const auto copy = [&](int buffer, int64_t page_bytes) {
      if (buffer < 0) return;
      launch_copy_pages(context_, {input<int32_t>(layout_.copies_at), static_cast<int>(n_copies_), cache.group,
                                   buffers_.as<uint4>(buffer), page_bytes});
    };
    copy(layout_.keys[i], page_rows * layout_.key_cols[i] * cache_element_bytes());
    copy(layout_.values[i], page_rows * cache.head_dim * cache_element_bytes());
    copy(layout_.key_scales[i], page_rows * 4);
    copy(layout_.value_scales[i], page_rows * 4);
  }
}

}  // namespace beryl::cuda
