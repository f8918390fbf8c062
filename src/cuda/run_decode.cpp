// Launches of the decode kernel: the plan's phases with pointers, made once, and what a launch adds.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>

#include "cuda/cuda_executor.h"
#include "cuda/index_math.h"
#include "cuda/tensor_map.h"

namespace beryl::cuda {

PhaseRows CudaExecutor::phase_rows(const PlannedRows& planned, int64_t col) const {
  PhaseRows rows = {};
  if (!planned.rows.present()) return rows;
  rows.exchange = planned.exchange >= 0;
  if (rows.exchange) {
    rows.values = buffers_.as<float>(layout_.decode_exchange) + planned.exchange + col;
    rows.stride = static_cast<int32_t>(layout_.decode.exchange_floats);
  } else {
    const RowsView own = view(planned.rows);
    rows.values = own.values + col;
    rows.stride = static_cast<int32_t>(own.stride);
  }
  return rows;
}

LinearPhase CudaExecutor::linear_phase(const PlannedPhase& planned, int index) const {
  const Linear& op = std::get<Linear>(program_.ops[static_cast<size_t>(planned.op)]);
  const MatrixPiece& piece = layout_.matrices[static_cast<size_t>(op.weight.index)].pieces[static_cast<size_t>(planned.piece)];
  const MatvecPlan& plan = piece.plan;
  const auto* weights = buffers_.as<uint8_t>(piece.buffer);
  LinearPhase phase = {};
  const int n_blocks = device_.matvec.n_sms;
  const int unit_partials = plan.stage_tiles() * plan.n_chunks() * kTileRows;
  const uint64_t inverse = ((uint64_t{1} << 32) + static_cast<uint64_t>(unit_partials) - 1) / static_cast<uint64_t>(unit_partials);
  const int form = decode_x_form(plan.format);
  const WorkShare share = {plan.n_units / n_blocks, plan.n_units % n_blocks, static_cast<int16_t>(index % n_blocks), static_cast<int16_t>(form),
                           static_cast<uint32_t>(inverse)};
  phase.stream = {share, weights, plan.unit_bytes, plan.n_stages, plan.stage_bytes, slot_stages(plan.format), unit_partials};
  phase.row_scales = plan.scales_offset != 0 ? reinterpret_cast<const float*>(weights + plan.scales_offset) : nullptr;
  phase.x = phase_rows(planned.x, 0);
  phase.y = phase_rows(planned.y, piece.row_begin);
  phase.other = phase_rows(planned.other, planned.other.exchange >= 0 ? 0 : piece.row_begin);
  // The second of two pieces of a gated matrix has the same outputs as the first.
  if (!piece.gated && (op.epilogue == Epilogue::kGatedGelu || op.epilogue == Epilogue::kGatedSilu)) {
    phase.y = phase_rows(planned.y, 0);
    phase.other = phase_rows(planned.other, 0);
  }
  if (planned.squares >= 0) {
    phase.squares = buffers_.as<float>(layout_.decode_exchange) + planned.squares;
    phase.y_weight = vector(std::get<AddNorm>(program_.ops[static_cast<size_t>(planned.squares_op)]).norm.weight);
    if (phase.y_weight != nullptr) phase.y_weight += piece.row_begin;
  }
  phase.residual = planned.residual;
  phase.add_scale = 1;
  if (planned.add_op >= 0) {
    const AddNorm& add = std::get<AddNorm>(program_.ops[static_cast<size_t>(planned.add_op)]);
    phase.add = phase_rows(planned.add, 0);
    phase.add_norm = add.norm.present;
    phase.add_eps = add.norm.eps;
    phase.add_scale = add.scale;
    if (planned.add_squares >= 0) phase.add_squares = buffers_.as<float>(layout_.decode_exchange) + planned.add_squares;
  }
  if (planned.residual && planned.residual_first)
    phase.residual_in = buffers_.as<float>(layout_.rows[static_cast<size_t>(program_.residual_slot)]);
  phase.residual_stride = static_cast<int32_t>(layout_.decode.residual_cols);
  phase.has_norm = op.norm.present;
  phase.norm_weight = vector(op.norm.weight);
  phase.norm_eps = op.norm.eps;
  phase.softcap = op.softcap;
  phase.cols = static_cast<int32_t>(plan.cols);
  phase.outputs = static_cast<int32_t>(plan.outputs());
  phase.tile_codes = plan.stage_tiles() * tile_shape(plan.format).code_bytes;
  phase.tile_columns = tile_shape(plan.format).columns;
  phase.n_groups = static_cast<int32_t>((plan.cols + 127) / 128);
  phase.inverse_cols = 1.0f / static_cast<float>(plan.cols);
  phase.full = plan.row_warps == 1 && tile_shape(plan.format).columns == 128 && plan.cols == int64_t{256} * plan.k_warps * plan.n_chunks();
  phase.row_warps_inverse = static_cast<uint32_t>((65536 + plan.row_warps - 1) / plan.row_warps);
  phase.k_warps = static_cast<int16_t>(plan.k_warps);
  phase.row_warps = static_cast<int16_t>(plan.row_warps);
  phase.n_chunks = static_cast<int16_t>(plan.n_chunks());
  phase.x_scale = codec_x_scale(plan.format);
  phase.format = plan.format;
  phase.epilogue = planned.gate_only ? DecodeEpilogue::kStore : decode_epilogue(op.epilogue, piece.gated);
  phase.gated = piece.gated;
  const bool adds = phase.residual && phase.add.values != nullptr;
  uint32_t path = 0;
  if (adds) path |= kAdds;
  if (phase.full && decode_takes_plain_integers(plan.format) && (phase.residual ? adds && plan.n_chunks() == 1 : !phase.has_norm)) path |= kShortX;
  if (plan.row_warps == 1 && plan.k_warps >= kMatvecWarps - 1 && plan.n_chunks() <= 4 &&
      (phase.gated ? plan.n_chunks() == 1 : phase.epilogue == DecodeEpilogue::kStore))
    path |= kShortFinish;
  if (plan.format == Format::kFp4G128 && (path & kShortX) && (path & kShortFinish)) path |= kHolds;
  phase.start = {share, plan.n_chunks(), phase.residual || phase.has_norm ? kNotAtOnce : plan.n_chunks() * x_chunk_bytes(1, x_group_bytes(form)), path};
  return phase;
}

AttentionPhase CudaExecutor::attention_phase(const PlannedPhase& planned, int index) const {
  const Attention& op = std::get<Attention>(program_.ops[static_cast<size_t>(planned.op)]);
  const TokenView token = token_view(op.cache);
  AttentionPhase phase = {};
  phase.q = phase_rows(planned.x, 0);
  phase.out = phase_rows(planned.y, 0);
  phase.cache = cache_view(op.cache);
  const int64_t rows = std::min(limits_.max_tokens, kDecodeRows), half = index % 2;
  phase.partial_sums = buffers_.as<float>(layout_.decode_partials) + half * rows * layout_.decode.partial_floats;
  phase.partial_states = buffers_.as<float2>(layout_.decode_states) + half * rows * layout_.decode.partial_states;
  if (layout_.decode_maps >= 0) phase.maps = buffers_.as<uint8_t>(layout_.decode_maps) + int64_t{op.cache} * 2 * kTensorMapBytes;
  phase.table = token.table;
  phase.n_entries = token.n_entries;
  phase.n_heads = op.n_heads;
  phase.heads_of_kv = op.n_heads / phase.cache.n_kv_heads;
  phase.window = program_.groups[static_cast<size_t>(program_.caches[static_cast<size_t>(op.cache)].group)].window;
  phase.scale = op.scale;
  phase.softcap = op.softcap;
  const auto rope_of = [&](int rope) { return rope < 0 ? nullptr : buffers_.as<float>(layout_.ropes[static_cast<size_t>(rope)]); };
  if (planned.finish_op >= 0) {
    const QkvFinish& finish = std::get<QkvFinish>(program_.ops[static_cast<size_t>(planned.finish_op)]);
    phase.finish = true;
    phase.q_norm = finish.q_norm.present;
    phase.q_weight = vector(finish.q_norm.weight);
    phase.q_eps = finish.q_norm.eps;
    phase.q_rope = rope_of(finish.rope);
  }
  if (planned.source_op >= 0) {
    const QkvFinish& source = std::get<QkvFinish>(program_.ops[static_cast<size_t>(planned.source_op)]);
    phase.kv = phase_rows(planned.kv, 0);
    phase.kv_heads_before = source.n_heads;
    phase.k_norm = source.k_norm.present;
    phase.v_norm = source.v_norm.present;
    phase.k_weight = vector(source.k_norm.weight);
    phase.v_weight = vector(source.v_norm.weight);
    phase.k_eps = source.k_norm.eps;
    phase.v_eps = source.v_norm.eps;
    phase.k_rope = rope_of(source.rope);
    phase.v_from_k = source.v_from_k;
    phase.appends = planned.source_op == planned.finish_op;
  }
  return phase;
}

// How the copy engine sees the caches that the decode kernel attends to.
void CudaExecutor::send_cache_maps() {
  if (layout_.decode_maps < 0) return;
  std::vector<std::array<CUtensorMap, 2>> maps(program_.caches.size());
  for (size_t i = 0; i < maps.size(); ++i) {
    const CacheDecl& cache = program_.caches[i];
    const auto group = static_cast<size_t>(cache.group);
    if (!decode_attends(cache.head_dim, layout_.cache_element, program_.groups[group].window)) continue;
    const CacheView view = cache_view(static_cast<int>(i));
    const int64_t n_rows = int64_t{limits_.n_pages[group]} * cache.n_kv_heads * kPageTokens;
    const int element_bytes = layout_.cache_element == CacheElement::kFp8 ? 1 : 2;
    maps[i] = {cache_tensor_map(view.keys, n_rows, view.key_cols * element_bytes), cache_tensor_map(view.values, n_rows, cache.head_dim * element_bytes)};
  }
  check(cudaMemcpy(buffers_.as<uint8_t>(layout_.decode_maps), maps.data(), maps.size() * sizeof(maps[0]), cudaMemcpyHostToDevice),
        "sending the caches' tensor maps");
}

// Phases and streams of all lists, one behind the other, to the device.
void CudaExecutor::send_decode_phases() {
  std::vector<DecodePhase> phases;
  std::vector<WeightStream> streams;
  const auto add = [&](const std::vector<DecodeSegment>& segments, std::vector<DecodeList>& lists) {
    for (const DecodeSegment& segment : segments) {
      DecodeList list;
      list.phases_at = static_cast<int64_t>(phases.size());
      list.streams_at = static_cast<int64_t>(streams.size());
      list.index = n_decode_lists_;
      if (!segment.phases.empty()) ++n_decode_lists_;
      int index = 0;
      DecodeNeeds needs = segment.needs;
      bool after_linear = false;
      int form = -1, attentions = 0, fp4_phases = 0, held_phases = 0;
      for (const PlannedPhase& planned : segment.phases) {
        DecodePhase phase;
        std::memset(static_cast<void*>(&phase), 0, sizeof(phase));
        phase.kind = planned.kind;
        if (planned.kind == PhaseKind::kLinear) {
          LinearPhase& linear = phase.linear = linear_phase(planned, index++);
          linear.norm_held = after_linear && (linear.start.path & kShortX) != 0 && linear.residual && linear.has_norm && linear.norm_weight != nullptr;
          if (linear.norm_held) {
            if (linear.add_norm && linear.residual_in == nullptr) linear.start.path |= kNearX;
            LinearPhase& before = phases.back().linear;
            before.next_norm = linear.norm_weight;
            before.next_k_warps = linear.k_warps;
            needs.holds_vectors = true;
          }
          fp4_phases += linear.format == Format::kFp4G128, held_phases += (linear.start.path & kHolds) != 0;
          if (linear.residual) needs.residual_cols = static_cast<int>(layout_.decode.residual_cols);
          const WorkShare& share = linear.stream.share;
          if (form >= 0 && form != share.form) linear.start.path |= kOtherForm;
          form = share.form;
          if (linear.n_chunks > 1) {
            int& most = needs.forms[form].batch_partials;
            most = std::max(most, (share.units_each + (share.units_more > 0 ? 1 : 0)) * linear.stream.unit_partials);
          }
          after_linear = true;
          streams.push_back(phase.linear.stream);
        } else {
          phase.attention = attention_phase(planned, attentions++);
          after_linear = false;
          WeightStream stream = {};
          stream.weights = buffers_.as<uint8_t>(layout_.decode_phases) + phases.size() * sizeof(DecodePhase) + offsetof(DecodePhase, attention);
          streams.push_back(stream);
        }
        phases.push_back(phase);
      }
      if (!segment.phases.empty()) {
        DecodePhase end;
        std::memset(static_cast<void*>(&end), 0, sizeof(end));
        phases.push_back(end);
        streams.push_back({});
      }
      needs.holds_weights = held_phases > 0 && held_phases * 10 >= fp4_phases * 9;
      const int rows = std::min(limits_.max_tokens, kDecodeRows);
      list.cuts.resize(static_cast<size_t>(kDecodeRows) + 1);
      if (!segment.phases.empty())
        for (int n = 1; n <= rows; ++n)
          list.cuts[static_cast<size_t>(n)] = cut_decode(needs, n, device_.matvec.shared_per_block);
      lists.push_back(std::move(list));
    }
  };
  add(layout_.decode.segments, decode_segments_);
  add(layout_.output_segments, output_segments_);
  add(layout_.decode.single, decode_single_);
  BERYL_CHECK(static_cast<int>(phases.size()) == layout_.n_decode_phases(), "as many phases as were planned");
  if (phases.empty()) return;
  send_cache_maps();
  check(cudaMemcpy(buffers_.as<DecodePhase>(layout_.decode_phases), phases.data(), phases.size() * sizeof(phases[0]), cudaMemcpyHostToDevice),
        "sending the decode phases");
  check(cudaMemcpy(buffers_.as<WeightStream>(layout_.decode_streams), streams.data(), streams.size() * sizeof(streams[0]), cudaMemcpyHostToDevice),
        "sending the decode phases");
  // Where no sum waits there are ones.
  const int64_t rows = std::min(limits_.max_tokens, kDecodeRows);
  if (layout_.decode.partial_floats > 0) {
    check(cudaMemset(buffers_.as<float>(layout_.decode_partials), 0xff, static_cast<size_t>(2 * rows * layout_.decode.partial_floats * 4)), "clearing sums");
    check(cudaMemset(buffers_.as<float2>(layout_.decode_states), 0xff, static_cast<size_t>(2 * rows * layout_.decode.partial_states * 8)), "clearing sums");
  }
}

CudaExecutor::DecodeRun CudaExecutor::decode_run(size_t begin, size_t end) const {
  const std::vector<DecodeSegment>& segments = has_dropped_ ? layout_.output_segments : layout_.decode.segments;
  const auto found = std::lower_bound(segments.begin(), segments.end(), static_cast<int>(begin),
                                      [](const DecodeSegment& segment, int op) { return segment.begin < op; });
  if (found == segments.end() || found->begin != static_cast<int>(begin) || found->end > static_cast<int>(end)) return {};
  // One launch has the same rows throughout.
  if (!has_dropped_ && drops_rows() && begin < layout_.output_part->begin && found->end > static_cast<int>(layout_.output_part->begin))
    return {};
  const std::vector<DecodeList>& lists = has_dropped_ ? output_segments_ : decode_segments_;
  return {&*found, &lists[static_cast<size_t>(found - segments.begin())]};
}

bool CudaExecutor::run_decode(const DecodeSegment& segment, const DecodeList& list) {
  if (segment.phases.empty()) return false;
  const int64_t rows = segment.gathers ? n_tokens_ : list_rows(segment);
  // One op, of one phase or two (gate and up apart), takes more rows than a run of ops; and the rows are its own: a head has few after a
  // long prompt, and no scratch for another kernel was planned then (device_memory.cpp).
  if (segment.end - segment.begin > 1 ? n_tokens_ > kWholeStepRows : rows > kDecodeRows) return false;
  if (segment.gathers && n_outputs_ != n_tokens_) return false;
  if (rows == 0) return true;
  const DecodeCut& cut = list.cuts[static_cast<size_t>(rows)];
  if (cut.n_slots == 0) return false;
  DecodeArgs args = {};
  args.phases = buffers_.as<DecodePhase>(layout_.decode_phases) + list.phases_at;
  args.streams = buffers_.as<WeightStream>(layout_.decode_streams) + list.streams_at;
  args.n_rows = static_cast<int32_t>(rows);
  args.positions = positions();
  args.sequences = sequences();
  args.residual = buffers_.as<float>(layout_.decode_residual);
  args.residual_cols = layout_.decode.residual_cols;
  if (segment.changes_residual) args.residual_out = buffers_.as<float>(layout_.rows[static_cast<size_t>(program_.residual_slot)]);
  args.flags = buffers_.as<uint32_t>(layout_.decode_flags) + int64_t{list.index} * kDecodeFlagWords;
  if (takes_times_ && rows == 1 && segment.phases.size() > 1) args.timeline = buffers_.as<uint64_t>(layout_.decode_timeline);
  args.plain_reads = plain_reads_;
  launch_decode(context_, args, cut, device_.matvec.n_sms);
  return true;
}

// Rows of a single op's launch: of its outputs where it reads gathered rows.
int64_t CudaExecutor::list_rows(const DecodeSegment& segment) const {
  const PlannedPhase& first = segment.phases.front();
  return first.residual || !first.x.rows.present() ? n_tokens_ : n_rows(first.x.rows);
}

// Plain reads first: what they leave in rows and caches is written over by the last run. One kind of phase at a time, so that each has its
// real neighbours.
std::vector<StepPart> CudaExecutor::time_step(size_t end) {
  check(cudaSetDevice(device_.device), "choosing the GPU");
  close_pages();
  end = std::min(end, program_.ops.size());
  bucket_position_ = bucket_position(last_position_);
  takes_times_ = true;
  const auto time_with = [&](PlainReads reads) {
    plain_reads_ = reads;
    return time_parts(end);
  };
  const std::vector<StepPart> linear = time_with(PlainReads::kLinear), attention = time_with(PlainReads::kAttention);
  std::vector<StepPart> parts = time_with(PlainReads::kNone);
  takes_times_ = false;
  for (size_t i = 0; i < parts.size(); ++i) parts[i].reading = linear[i].reading + attention[i].reading;      // one of them is 0
  return parts;
}

std::vector<StepPart> CudaExecutor::time_parts(size_t end) {
  const Event before = make_clock_event(), after = make_clock_event();
  std::vector<StepPart> parts;
  const auto timed = [&](auto&& launch) {
    check(cudaEventRecord(before.get(), stream_.get()), "taking the time");
    launch();
    check(cudaEventRecord(after.get(), stream_.get()), "taking the time");
    synchronize();
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, before.get(), after.get()), "taking the time");
    return double{milliseconds} * 1e3;
  };
  bring_rows_back(0);
  for (size_t op = 0; op < end;) {
    double dropping = 0;                // part of the op that it comes before
    if (drops_rows() && op == layout_.output_part->begin) dropping = timed([&] { drop_rows(op); });
    if (const DecodeRun found = decode_run(op, end); found.segment != nullptr) {
      bool runs = false;
      const double microseconds = timed([&] { runs = run_decode(*found.segment, *found.list); });
      if (runs) {
        add_decode_parts(*found.segment, dropping + microseconds, parts);
        op = static_cast<size_t>(found.segment->end);
        continue;
      }
    }
    parts.push_back({op, op + 1, dropping + timed([&] { execute_op(op); }), 0});
    ++op;
  }
  return parts;
}

// Cycles become microseconds by the time of the whole launch, so that the parts sum to it.
void CudaExecutor::add_decode_parts(const DecodeSegment& segment, double microseconds, std::vector<StepPart>& parts) const {
  const size_t n_phases = segment.phases.size(), n_blocks = static_cast<size_t>(device_.matvec.n_sms);
  if (n_phases < 2 || n_tokens_ != 1) {
    parts.push_back({static_cast<size_t>(segment.begin), static_cast<size_t>(segment.end), microseconds, 0});
    return;
  }
  std::vector<uint64_t> stamps(n_phases * n_blocks * kDecodeStamps);
  check(cudaMemcpy(stamps.data(), buffers_.as<uint64_t>(layout_.decode_timeline), stamps.size() * 8, cudaMemcpyDeviceToHost), "reading times");
  const auto at = [&](size_t phase, size_t block, int stamp) { return stamps[(phase * n_blocks + block) * kDecodeStamps + static_cast<size_t>(stamp)]; };
  double total = 0;
  for (size_t block = 0; block < n_blocks; ++block) total += static_cast<double>(at(n_phases - 1, block, 3) - at(0, block, 0));
  size_t op = static_cast<size_t>(segment.begin);
  for (size_t phase = 0; phase < n_phases; ++phase) {
    double cycles = 0, preparing = 0;
    for (size_t block = 0; block < n_blocks; ++block) {
      const uint64_t end = phase + 1 < n_phases ? at(phase + 1, block, 0) : at(phase, block, 3);
      cycles += static_cast<double>(end - at(phase, block, 0));
      if (segment.phases[phase].kind == PhaseKind::kLinear) preparing += static_cast<double>(at(phase, block, 1) - at(phase, block, 0));
    }
    const auto end = static_cast<size_t>(segment.phases[phase].op) + 1;
    StepPart part = {op, end, cycles / total * microseconds, preparing / total * microseconds};
    if (plain_reads_ == (segment.phases[phase].kind == PhaseKind::kLinear ? PlainReads::kLinear : PlainReads::kAttention))
      part.reading = part.microseconds;
    // The pieces of one matrix are one part.
    if (!parts.empty() && parts.back().op_end == end) {
      parts.back().microseconds += part.microseconds;
      parts.back().preparing += part.preparing;
      parts.back().reading += part.reading;
    } else {
      parts.push_back(part);
    }
    op = end;
  }
  parts.back().op_end = static_cast<size_t>(segment.end);
}

}  // namespace beryl::cuda
