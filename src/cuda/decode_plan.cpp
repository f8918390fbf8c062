// From ops to phases.
#include "cuda/decode_plan.h"

#include <algorithm>
#include <map>
#include <optional>

#include "cuda/device_memory.h"

namespace beryl::cuda {

namespace {

bool contains(Rows outer, Rows inner) {
  return outer.slot == inner.slot && inner.col >= outer.col && inner.col + inner.cols <= outer.col + outer.cols;
}

class Planner {
 public:
  Planner(const Program& program, const MemoryLayout& layout) : program_(program), layout_(layout) {}

  DecodePlan plan(bool whole_steps) {
    const int n = static_cast<int>(program_.ops.size());
    for (int op = 0; op < n; ++op) plan_.single.push_back(single(op));
    for (int op = 0; whole_steps && op < n;) {
      DecodeSegment segment = longest(op);
      if (segment.phases.empty()) {
        ++op;
        continue;
      }
      op = segment.end;
      // One phase by itself gains nothing over the op's own launch.
      if (segment.phases.size() > 1) plan_.segments.push_back(std::move(segment));
    }
    if (program_.residual_slot >= 0) plan_.residual_cols = row_cols(program_.residual_slot);
    return std::move(plan_);
  }

 private:
  template <class T>
  const T* get(int op) const {
    return op >= 0 && op < static_cast<int>(program_.ops.size()) ? std::get_if<T>(&program_.ops[static_cast<size_t>(op)]) : nullptr;
  }
  int64_t row_cols(int slot) const { return program_.rows[static_cast<size_t>(slot)].cols; }
  bool aligned(Rows rows) const { return rows.col % 4 == 0 && row_cols(rows.slot) % 4 == 0; }
  bool is_residual(Rows rows) const {
    return rows.present() && rows.slot == program_.residual_slot && rows.col == 0 && rows.cols == row_cols(rows.slot);
  }
  const DeviceMatrix& matrix(const Linear& linear) const { return layout_.matrices[static_cast<size_t>(linear.weight.index)]; }

  bool takes(const Linear& linear) const {
    const DeviceMatrix& m = matrix(linear);
    return aligned(linear.x) && !m.pieces.empty() && std::all_of(m.pieces.begin(), m.pieces.end(), [](const MatrixPiece& piece) { return piece.packed; });
  }
  bool takes(const Attention& attention) const {
    const CacheDecl& cache = program_.caches[static_cast<size_t>(attention.cache)];
    return decode_attends(cache.head_dim, layout_.cache_element, program_.groups[static_cast<size_t>(cache.group)].window) && aligned(attention.q) && aligned(attention.out);
  }

  void need(DecodeNeeds& needs, const Linear& linear) const {
    for (const MatrixPiece& piece : matrix(linear).pieces) {
      const int stages = std::min(slot_stages(piece.plan.format), piece.plan.n_stages);
      needs.stage_bytes = std::max(needs.stage_bytes, piece.plan.stage_bytes);
      needs.slot_bytes = std::max(needs.slot_bytes, stages * piece.plan.stage_bytes);
      needs.other_formats |= piece.plan.format != Format::kFp4G128 && piece.plan.format != Format::kFp8;
      const int form = decode_x_form(piece.plan.format);
      DecodeNeeds::Form& x = needs.forms[form];
      x.used = true;
      x.unit_partials = std::max(x.unit_partials, piece.plan.stage_tiles() * piece.plan.n_chunks() * kTileRows);
      if (!linear.norm.present) x.x_all_bytes = std::max(x.x_all_bytes, piece.plan.n_chunks() * x_chunk_bytes(1, x_group_bytes(form)));
    }
    // Sums of squares, of a norm or of what is added to the residual.
    const int64_t cols = program_.matrix(linear.weight).cols();
    if (linear.norm.present || cols == plan_.residual_cols) needs.sum_groups = std::max(needs.sum_groups, static_cast<int>((cols + 127) / 128));
  }
  void need(DecodeNeeds& needs, const Attention& attention) {
    const CacheDecl& cache = program_.caches[static_cast<size_t>(attention.cache)];
    needs.attention_bytes = std::max(needs.attention_bytes, attention_scratch_bytes(cache.head_dim, attention.n_heads / cache.n_kv_heads));
    needs.attention_row_bytes = std::max(needs.attention_row_bytes, attention_row_bytes(cache.head_dim));
    needs.attention_slot_bytes = std::max(needs.attention_slot_bytes, attention_slot_bytes(cache.head_dim));
    plan_.partial_floats = std::max(plan_.partial_floats, decode_partial_floats(attention.n_heads, cache.head_dim));
    plan_.partial_states = std::max(plan_.partial_states, decode_partial_states(attention.n_heads));
  }

  DecodeSegment single(int op) {
    DecodeSegment segment;
    segment.begin = op;
    segment.end = op + 1;
    if (const auto* linear = get<Linear>(op); linear != nullptr && takes(*linear)) {
      PlannedPhase first;
      first.x.rows = linear->x;
      first.other.rows = linear->other;
      add_linear(segment, op, first, {linear->y});
    } else if (const auto* attention = get<Attention>(op); attention != nullptr && takes(*attention)) {
      PlannedPhase phase;
      phase.kind = PhaseKind::kAttention;
      phase.op = op;
      phase.x.rows = attention->q;
      phase.y.rows = attention->out;
      segment.phases.push_back(phase);
      need(segment.needs, *attention);
    }
    return segment;
  }

  PlannedRows exchange(Rows rows) {
    PlannedRows planned = {rows, plan_.exchange_floats};
    plan_.exchange_floats += (rows.cols + 31) / 32 * 32;
    return planned;
  }

  // The phases of a Linear: one a piece. `first` says where x comes from.
  void add_linear(DecodeSegment& segment, int op, const PlannedPhase& first, const PlannedRows& y) {
    const Linear& linear = *get<Linear>(op);
    const std::vector<MatrixPiece>& pieces = matrix(linear).pieces;
    const bool two = is_gated(linear.epilogue) && pieces.size() == 2;
    PlannedRows gate;
    for (size_t i = 0; i < pieces.size(); ++i) {
      PlannedPhase phase = first;
      phase.kind = PhaseKind::kLinear;
      phase.op = op;
      phase.piece = static_cast<int>(i);
      phase.y = y;
      if (two && i == 0) {
        phase.gate_only = true;
        phase.y = gate = exchange(linear.y);
      } else if (two) {
        phase.other = gate;
      }
      if (i > 0) phase.residual_first = false, phase.add_op = -1;
      segment.phases.push_back(phase);
    }
    need(segment.needs, linear);
  }

  // Whether an op from `begin` on reads the columns before something else fills them.
  bool read_from(int begin, Rows rows) const {
    for (int op = begin; op < static_cast<int>(program_.ops.size()); ++op) {
      bool reads = false, writes = false;
      for_each_rows(program_.ops[static_cast<size_t>(op)], [&](Rows used, bool written) {
        if (used.slot != rows.slot || used.col >= rows.col + rows.cols || rows.col >= used.col + used.cols) return;
        (written ? writes : reads) = true;
      });
      if (reads) return true;
      if (writes) return false;
    }
    return false;
  }
  // What was made so far in a segment, by slot; `users`: phases whose y it is.
  struct Made {
    Rows rows;
    std::vector<size_t> phases;
  };
  // The phases' rows become exchange rows when a later phase of the segment reads them.
  PlannedRows use(DecodeSegment& segment, std::map<int, Made>& made, Rows rows) {
    Made& from = made.at(rows.slot);
    PlannedRows& y = segment.phases[from.phases.front()].y;
    if (y.exchange < 0) {
      const PlannedRows planned = exchange(from.rows);
      for (size_t phase : from.phases) segment.phases[phase].y = planned;
    }
    PlannedRows planned = segment.phases[from.phases.back()].y;
    planned.rows = rows;
    planned.exchange += rows.col - from.rows.col;
    return planned;
  }

  // Lets the phases that make all of `rows` store the sums of squares of their row tiles; -1: they do not have such tiles.
  int64_t squares_of(DecodeSegment& segment, const Made& made, Rows rows, int add_op) {
    if (made.rows.col != rows.col || made.rows.cols != rows.cols) return -1;
    for (const size_t index : made.phases) {
      const PlannedPhase& phase = segment.phases[index];
      if (phase.kind != PhaseKind::kLinear) return -1;
      const Linear& linear = *get<Linear>(phase.op);
      if (is_gated(linear.epilogue) || matrix(linear).pieces[static_cast<size_t>(phase.piece)].row_begin % kTileRows != 0) return -1;
    }
    const int64_t at = plan_.exchange_floats;
    plan_.exchange_floats += ((rows.cols + kTileRows - 1) / kTileRows + 31) / 32 * 32;
    for (const size_t index : made.phases) segment.phases[index].squares_op = add_op;
    for (const size_t index : made.phases)
      segment.phases[index].squares = at + matrix(*get<Linear>(segment.phases[index].op)).pieces[static_cast<size_t>(segment.phases[index].piece)].row_begin / kTileRows;
    return at;
  }

  DecodeSegment longest(int begin) {
    DecodeSegment segment;
    segment.begin = segment.end = begin;
    std::map<int, Made> made;
    std::map<int, int> finish_of_cache;           // QkvFinish that appended in this segment, and
    std::map<int, PlannedRows> rows_of_cache;     // the rows that it had
    bool has_residual = false;
    const auto is_made = [&](Rows rows) { return made.contains(rows.slot) && contains(made.at(rows.slot).rows, rows); };
    const auto was_made = [&](Rows rows) { return made.contains(rows.slot); };
    for (int op = begin; op < static_cast<int>(program_.ops.size());) {
      // [AddNorm] [GatherRows] Linear
      int at = op, add_op = -1;
      if (const auto* add = get<AddNorm>(at)) {
        if (!is_residual(add->out) || !is_residual(add->base) || !is_made(add->y) || (add->group != 0 && add->group != add->y.cols)) break;
        add_op = at++;
      }
      Rows gathered;
      if (const auto* gather = get<GatherRows>(at)) {
        if (!is_residual(gather->x)) break;
        gathered = gather->out;
        ++at;
      }
      if (const auto* linear = get<Linear>(at)) {
        if (!takes(*linear)) break;
        const bool on_residual = gathered.present() ? linear->x.slot == gathered.slot && linear->x.cols == gathered.cols : is_residual(linear->x);
        if (!on_residual && (add_op >= 0 || gathered.present())) break;
        if (gathered.present() && read_from(at + 1, gathered)) break;
        segment.gathers |= gathered.present();
        if (linear->other.present() && was_made(linear->other)) break;
        PlannedPhase first;
        first.other.rows = linear->other;
        if (on_residual) {
          first.residual = true;
          first.residual_first = !has_residual;
          has_residual = true;
          if (add_op >= 0) {
            const Rows y = get<AddNorm>(add_op)->y;
            if (read_from(add_op + 1, y)) break;
            first.add_op = add_op;
            first.add = use(segment, made, y);
            if (get<AddNorm>(add_op)->norm.present) {
              const int64_t squares = squares_of(segment, made.at(y.slot), y, add_op);
              if (squares < 0) break;
              first.add_squares = squares;
            }
            segment.changes_residual = true;
          }
        } else if (is_made(linear->x)) {
          if (linear->norm.present || read_from(at + 1, linear->x)) break;
          first.x = use(segment, made, linear->x);
        } else {
          // Rows from before the segment, which no block of it may overwrite.
          if (op != begin) break;
          first.x.rows = linear->x;
        }
        const size_t n = segment.phases.size();
        add_linear(segment, at, first, {linear->y});
        Made& result = made[linear->y.slot];
        result = {linear->y, {}};
        for (size_t i = n; i < segment.phases.size(); ++i)
          if (!segment.phases[i].gate_only) result.phases.push_back(i);
      } else if (const auto* finish = get<QkvFinish>(at); finish != nullptr && add_op < 0 && !gathered.present()) {
        const auto* attention = get<Attention>(at + 1);
        if (attention == nullptr || !takes(*attention) || !contains(finish->qkv, attention->q) || attention->n_heads != finish->n_heads ||
            attention->q.col != finish->qkv.col || read_from(at + 2, finish->qkv))
          break;
        if (!is_made(finish->qkv) && op != begin) break;
        PlannedPhase phase;
        phase.kind = PhaseKind::kAttention;
        phase.op = at + 1;
        phase.finish_op = at;
        PlannedRows qkv = {finish->qkv};
        if (is_made(finish->qkv)) qkv = use(segment, made, finish->qkv);
        phase.x = qkv;
        phase.x.rows = attention->q;
        if (finish->n_kv_heads > 0) {
          finish_of_cache[attention->cache] = at;
          rows_of_cache[attention->cache] = qkv;
        }
        if (finish_of_cache.contains(attention->cache)) {
          phase.source_op = finish_of_cache[attention->cache];
          phase.kv = rows_of_cache[attention->cache];
        }
        phase.y.rows = attention->out;
        segment.phases.push_back(phase);
        made[attention->out.slot] = {attention->out, {segment.phases.size() - 1}};
        need(segment.needs, *attention);
        at += 1;
      } else {
        break;
      }
      op = at + 1;
      segment.end = op;
    }
    return segment;
  }

  const Program& program_;
  const MemoryLayout& layout_;
  DecodePlan plan_;
};

}  // namespace

int DecodePlan::n_phases() const {
  size_t n = 0;
  for (const auto* list : {&segments, &single})
    for (const DecodeSegment& segment : *list) n += segment.phases.empty() ? 0 : segment.phases.size() + 1;
  return static_cast<int>(n);
}

DecodeEpilogue decode_epilogue(Epilogue epilogue, bool together) {
  switch (epilogue) {
    case Epilogue::kGatedGelu: return together ? DecodeEpilogue::kGatedGelu : DecodeEpilogue::kTimesGeluOther;
    case Epilogue::kGatedSilu: return together ? DecodeEpilogue::kGatedSilu : DecodeEpilogue::kTimesSiluOther;
    case Epilogue::kGeluTimesOther: return DecodeEpilogue::kGeluTimesOther;
    case Epilogue::kSoftcap: return DecodeEpilogue::kSoftcap;
    case Epilogue::kStore: break;
  }
  return DecodeEpilogue::kStore;
}

DecodePlan plan_decode(const Program& program, const MemoryLayout& layout, bool whole_steps) {
  return Planner(program, layout).plan(whole_steps);
}

}  // namespace beryl::cuda
