#include "ops/program.h"

#include <algorithm>

#include <fmt/format.h>

#include "base/error.h"

namespace beryl {

const char* op_name(const Op& op) {
  static constexpr const char* kNames[] = {"Embed", "Linear",     "QkvFinish", "Attention", "AddNorm",  "Route",
                                           "Experts", "GatherRows", "Sample",    "Advance",   "CopyPages"};
  static_assert(std::size(kNames) == std::variant_size_v<Op>);
  return kNames[op.index()];
}

namespace {

// ---- shapes -----------------------------------------------------------------------------------------------------

class ShapeCheck {
 public:
  explicit ShapeCheck(const Program& program) : program_(program) {}

  void operator()(const Embed& op) const {
    const WeightMatrix& table = matrix(op.table);
    rows(op.out);
    BERYL_CHECK(table.parts.size() == 1 && table.cols() == op.out.cols, "Embed: table columns");
  }
  void operator()(const Linear& op) const {
    const WeightMatrix& weight = matrix(op.weight);
    rows(op.x);
    rows(op.y);
    BERYL_CHECK(count(op.x) == count(op.y), "Linear: x and y have the same rows");
    BERYL_CHECK(weight.cols() == op.x.cols, "Linear: weight columns equal x");
    if (is_gated(op.epilogue)) {
      BERYL_CHECK(weight.parts.size() == 2 && weight.parts[0].rows == op.y.cols && weight.parts[1].rows == op.y.cols,
                  "Linear: gate and up rows equal y");
    } else {
      BERYL_CHECK(weight.rows() == op.y.cols, "Linear: weight rows equal y");
    }
    if (op.epilogue == Epilogue::kGeluTimesOther) {
      rows(op.other);
      BERYL_CHECK(op.other.cols == op.y.cols && count(op.other) == count(op.y), "Linear: other has y's shape");
    }
    norm(op.norm, op.x.cols);
  }
  void operator()(const QkvFinish& op) const {
    rows(op.qkv);
    const int n_parts = op.n_kv_heads == 0 ? 0 : (op.v_from_k ? 1 : 2);
    BERYL_CHECK(op.qkv.cols == int64_t{op.n_heads + op.n_kv_heads * n_parts} * op.head_dim, "QkvFinish: columns");
    norm(op.q_norm, op.head_dim);
    norm(op.k_norm, op.head_dim);
    norm(op.v_norm, op.head_dim);
    BERYL_CHECK(op.rope < static_cast<int>(program_.ropes.size()), "QkvFinish: rope index");
    if (op.rope >= 0)
      BERYL_CHECK(static_cast<int>(program_.ropes[static_cast<size_t>(op.rope)].frequencies.size()) == op.head_dim / 2,
                  "QkvFinish: rope pairs");
    if (op.n_kv_heads > 0) {
      const CacheDecl& decl = cache(op.cache);
      BERYL_CHECK(decl.n_kv_heads == op.n_kv_heads && decl.head_dim == op.head_dim, "QkvFinish: cache shape");
    }
  }
  void operator()(const Attention& op) const {
    rows(op.q);
    rows(op.out);
    const CacheDecl& decl = cache(op.cache);
    BERYL_CHECK(op.n_heads % decl.n_kv_heads == 0, "Attention: heads are a multiple of KV heads");
    BERYL_CHECK(op.q.cols == int64_t{op.n_heads} * decl.head_dim && op.out.cols == op.q.cols, "Attention: columns");
  }
  void operator()(const AddNorm& op) const {
    rows(op.out);
    rows(op.y);
    BERYL_CHECK(op.out.cols == op.y.cols && count(op.out) == count(op.y), "AddNorm: out and y");
    if (op.base.present()) {
      rows(op.base);
      BERYL_CHECK(op.base.cols == op.y.cols && count(op.base) == count(op.y), "AddNorm: base and y");
    }
    const int64_t group = op.group > 0 ? op.group : op.y.cols;
    BERYL_CHECK(op.y.cols % group == 0, "AddNorm: whole groups");
    norm(op.norm, group);
  }
  void operator()(const Route& op) const {
    rows(op.x);
    rows(op.routes);
    const WeightMatrix& weight = matrix(op.weight);
    BERYL_CHECK(weight.rows() == op.n_experts && weight.cols() == op.x.cols, "Route: weight shape");
    BERYL_CHECK(op.top_k >= 1 && op.top_k <= op.n_experts && op.routes.cols == 2 * op.top_k, "Route: top_k");
    if (op.expert_scale.present())
      BERYL_CHECK(static_cast<int>(program_.vector(op.expert_scale).values.size()) == op.n_experts, "Route: scales");
    norm(op.norm, op.x.cols);
  }
  void operator()(const Experts& op) const {
    rows(op.x);
    rows(op.routes);
    rows(op.y);
    const WeightMatrix& gate_up = matrix(op.gate_up);
    const WeightMatrix& down = matrix(op.down);
    BERYL_CHECK(gate_up.parts.size() == 2 && gate_up.parts[0].rows == op.expert_dim &&
                    gate_up.parts[1].rows == op.expert_dim && gate_up.cols() == op.x.cols, "Experts: gate and up");
    BERYL_CHECK(down.parts.size() == 1 && down.rows() == op.y.cols && down.cols() == op.expert_dim, "Experts: down");
    BERYL_CHECK(down.stack() == gate_up.stack() && op.routes.cols == 2 * op.top_k, "Experts: routes");
    norm(op.norm, op.x.cols);
  }
  void operator()(const GatherRows& op) const {
    rows(op.x);
    rows(op.out);
    BERYL_CHECK(op.x.cols == op.out.cols && count(op.x) == RowCount::kTokens && count(op.out) == RowCount::kOutputs,
                "GatherRows: from token rows to output rows");
  }
  void operator()(const Sample& op) const {
    rows(op.logits);
    BERYL_CHECK(op.logits.cols <= program_.vocab && count(op.logits) == RowCount::kOutputs, "Sample: logits");
  }
  void operator()(const Advance&) const {}
  void operator()(const CopyPages&) const {}

 private:
  void rows(Rows r) const {
    BERYL_CHECK(r.slot >= 0 && r.slot < static_cast<int>(program_.rows.size()), "rows: slot");
    BERYL_CHECK(r.col >= 0 && r.cols > 0 && r.col + r.cols <= program_.rows[static_cast<size_t>(r.slot)].cols,
                "rows: columns");
  }
  RowCount count(Rows r) const { return program_.rows[static_cast<size_t>(r.slot)].count; }
  void norm(const Norm& n, int64_t dim) const {
    if (n.present && n.weight.present())
      BERYL_CHECK(static_cast<int64_t>(program_.vector(n.weight).values.size()) == dim, "norm: weight length");
  }
  const WeightMatrix& matrix(MatrixRef ref) const {
    BERYL_CHECK(ref.index >= 0 && ref.index < static_cast<int>(program_.weights->matrices.size()), "matrix index");
    const WeightMatrix& matrix = program_.matrix(ref);
    for (const HostMatrix& part : matrix.parts)
      BERYL_CHECK(part.cols == matrix.cols() && part.stack == matrix.stack(), "matrix: equal columns and stack");
    return matrix;
  }
  const CacheDecl& cache(int index) const {
    BERYL_CHECK(index >= 0 && index < static_cast<int>(program_.caches.size()), "cache index");
    return program_.caches[static_cast<size_t>(index)];
  }
  const Program& program_;
};

// ---- text -------------------------------------------------------------------------------------------------------

class Printer {
 public:
  explicit Printer(const Program& program) : program_(program) {}

  std::string operator()(const Embed& op) const {
    return fmt::format("{} = {}[ids]{}", rows(op.out), matrix(op.table), times(op.scale));
  }
  std::string operator()(const Linear& op) const {
    const std::string product = fmt::format("{} · {}", matrix(op.weight), normed(op.x, op.norm));
    switch (op.epilogue) {
      case Epilogue::kStore: return fmt::format("{} = {}", rows(op.y), product);
      case Epilogue::kGatedGelu: return fmt::format("{} = gelu(gate) · up, gate|up = {}", rows(op.y), product);
      case Epilogue::kGatedSilu: return fmt::format("{} = silu(gate) · up, gate|up = {}", rows(op.y), product);
      case Epilogue::kGeluTimesOther:
        return fmt::format("{} = gelu({}) · {}", rows(op.y), product, rows(op.other));
      case Epilogue::kSoftcap: return fmt::format("{} = softcap_{}({})", rows(op.y), op.softcap, product);
    }
    return {};
  }
  std::string operator()(const QkvFinish& op) const {
    std::string text = fmt::format("{}: {} q heads × {}{}, rope {}", rows(op.qkv), op.n_heads, op.head_dim,
                                   op.q_norm.present ? " normed" : "", op.rope);
    if (op.n_kv_heads == 0) return text + ", no k and v of its own";
    text += fmt::format("; {} k heads{}, v = {}{} → cache {}", op.n_kv_heads, op.k_norm.present ? " normed" : "",
                        op.v_from_k ? "raw k" : "v", op.v_norm.present ? " normed" : "", cache(op.cache));
    return text;
  }
  std::string operator()(const Attention& op) const {
    const CacheDecl& decl = program_.caches[static_cast<size_t>(op.cache)];
    const int window = program_.groups[static_cast<size_t>(decl.group)].window;
    std::string text = fmt::format("{} = attention({}, cache {}), {} q on {} kv heads × {}, {}, scale {:.6g}",
                                   rows(op.out), rows(op.q), cache(op.cache), op.n_heads, decl.n_kv_heads,
                                   decl.head_dim, window == 0 ? "global" : fmt::format("window {}", window), op.scale);
    if (op.softcap > 0) text += fmt::format(", softcap {}", op.softcap);
    return text;
  }
  std::string operator()(const AddNorm& op) const {
    std::string sum = normed(op.y, op.norm);
    if (op.group > 0) sum += fmt::format(" by groups of {}", op.group);
    if (op.base.present()) sum = fmt::format("{} + {}", rows(op.base), sum);
    return op.scale == 1 ? fmt::format("{} = {}", rows(op.out), sum)
                         : fmt::format("{} = ({}){}", rows(op.out), sum, times(op.scale));
  }
  std::string operator()(const Route& op) const {
    return fmt::format("{} = top {} of softmax({} · {})", rows(op.routes), op.top_k, matrix(op.weight),
                       normed(op.x, op.norm));
  }
  std::string operator()(const Experts& op) const {
    return fmt::format("{} = Σ g · {} · gelu-gated {} · {}, {} routes each", rows(op.y), matrix(op.down),
                       matrix(op.gate_up), normed(op.x, op.norm), op.top_k);
  }
  std::string operator()(const GatherRows& op) const {
    return fmt::format("{} = {}[output rows]", rows(op.out), rows(op.x));
  }
  std::string operator()(const Sample& op) const { return fmt::format("ids = sample({})", rows(op.logits)); }
  std::string operator()(const Advance&) const { return "ids → next step's input, positions + 1"; }
  std::string operator()(const CopyPages&) const { return "copy cache pages"; }

 private:
  std::string rows(Rows r) const {
    const RowsDecl& decl = program_.rows[static_cast<size_t>(r.slot)];
    if (r.col == 0 && r.cols == decl.cols) return fmt::format("{}[{}]", decl.name, r.cols);
    return fmt::format("{}[{}:{}]", decl.name, r.col, r.col + r.cols);
  }
  std::string matrix(MatrixRef ref) const {
    const WeightMatrix& m = program_.matrix(ref);
    std::string shape;
    for (const HostMatrix& part : m.parts)
      shape += fmt::format("{}{} {}", shape.empty() ? "" : " | ", part.rows, info(part.format).name);
    const std::string stack = m.stack() > 1 ? fmt::format("{} × ", m.stack()) : "";
    return fmt::format("'{}' ({}{} × {})", m.name, stack, shape, m.cols());
  }
  std::string normed(Rows r, const Norm& norm) const {
    if (!norm.present) return rows(r);
    return fmt::format("norm({}{})", rows(r), norm.weight.present() ? "" : ", no weight");
  }
  std::string cache(int index) const { return fmt::format("'{}'", program_.caches[static_cast<size_t>(index)].name); }
  static std::string times(float scale) { return scale == 1 ? "" : fmt::format(" · {:.6g}", scale); }
  const Program& program_;
};

// ---- costs ------------------------------------------------------------------------------------------------------

int64_t live_keys(const Program& program, const CacheDecl& cache, const StepShape& shape) {
  const int window = program.groups[static_cast<size_t>(cache.group)].window;
  const int64_t length = shape.context + 1;
  return window == 0 ? length : std::min<int64_t>(length, window);
}

int64_t row_count(const Program& program, Rows rows, const StepShape& shape) {
  return program.rows[static_cast<size_t>(rows.slot)].count == RowCount::kTokens ? shape.n_tokens : shape.n_outputs;
}

}  // namespace

void check_shapes(const Program& program) {
  BERYL_CHECK(program.weights != nullptr, "a program has weights");
  BERYL_CHECK(program.layer_of_op.size() == program.ops.size(), "every op knows its layer");
  for (const CacheDecl& cache : program.caches)
    BERYL_CHECK(cache.group >= 0 && cache.group < static_cast<int>(program.groups.size()) && cache.n_kv_heads > 0 &&
                    cache.head_dim > 0 && cache.head_dim % 2 == 0, "cache shape");
  for (const Op& op : program.ops) std::visit(ShapeCheck(program), op);
}

bool only_passes(const Program& program, int slot) {
  if (slot == program.residual_slot || program.rows[static_cast<size_t>(slot)].kind == RowsKind::kLogits) return false;
  bool written = false, passes = false;
  for (const Op& op : program.ops)
    for_each_rows(op, [&](Rows rows, bool writes) {
      if (rows.slot != slot) return;
      passes = !writes && written;
      written |= writes;
    });
  return passes;
}

std::optional<KeysFromValues> keys_from_values(const Program& program, int cache) {
  for (const Op& op : program.ops) {
    const auto* finish = std::get_if<QkvFinish>(&op);
    if (finish == nullptr || finish->cache != cache || finish->n_kv_heads == 0) continue;
    const Norm &k = finish->k_norm, &v = finish->v_norm;
    if (!finish->v_from_k || !k.present || !v.present || k.eps != v.eps || !k.weight.present() || v.weight.present()) return std::nullopt;
    KeysFromValues result = {k.weight, std::vector<bool>(static_cast<size_t>(finish->head_dim))};
    if (finish->rope < 0) return result;
    const std::vector<double>& frequencies = program.ropes[static_cast<size_t>(finish->rope)].frequencies;
    for (size_t j = 0; j < frequencies.size(); ++j) result.is_turned[j] = result.is_turned[j + frequencies.size()] = frequencies[j] != 0;
    return result;
  }
  return std::nullopt;
}

std::optional<OutputPart> output_part(const Program& program) {
  const auto fills = [](const Op& op) {
    const auto* finish = std::get_if<QkvFinish>(&op);
    return std::holds_alternative<Embed>(op) || (finish != nullptr && finish->n_kv_heads > 0);
  };
  OutputPart part;
  size_t gather = 0;
  for (size_t i = 0; i < program.ops.size(); ++i) {
    if (fills(program.ops[i])) part.begin = i + 1;
    if (std::holds_alternative<GatherRows>(program.ops[i])) gather = i;
  }
  // Of a list that begins or ends within a step nobody knows what is read.
  if (part.begin == 0 || gather < part.begin) return std::nullopt;
  std::vector<Rows> made;           // by these ops
  for (size_t i = part.begin; i < program.ops.size(); ++i)
    for_each_rows(program.ops[i], [&](Rows rows, bool written) {
      if (program.rows[static_cast<size_t>(rows.slot)].count != RowCount::kTokens) return;
      if (written) return made.push_back(rows);
      const bool is_made = std::any_of(made.begin(), made.end(), [&](Rows each) {
        return each.slot == rows.slot && each.col <= rows.col && rows.col + rows.cols <= each.col + each.cols;
      });
      if (!is_made && std::find(part.slots.begin(), part.slots.end(), rows.slot) == part.slots.end()) part.slots.push_back(rows.slot);
    });
  return part;
}

int logits_slot(const Program& program) {
  for (const Op& op : program.ops)
    if (const auto* sample = std::get_if<Sample>(&op)) return sample->logits.slot;
  BERYL_CHECK(false, "a program that samples");
  return -1;
}

std::string to_text(const Program& program) {
  std::string text;
  int layer = -2;
  for (size_t i = 0; i < program.ops.size(); ++i) {
    if (program.layer_of_op[i] != layer) {
      layer = program.layer_of_op[i];
      text += layer < 0 ? "before the layers\n" : layer == program.n_layers ? "after the layers\n"
                                                                            : fmt::format("layer {}\n", layer);
    }
    text += fmt::format("  {:<11}{}\n", op_name(program.ops[i]), std::visit(Printer(program), program.ops[i]));
  }
  return text;
}

int64_t bytes_moved(const Op& op, const Program& program, const StepShape& shape, const std::function<int64_t(int)>& position_bytes) {
  if (const auto* embed = std::get_if<Embed>(&op)) {
    const HostMatrix& table = program.matrix(embed->table).parts.front();
    return shape.n_tokens * (row_bytes(table.format, table.cols) + row_scale_bytes(table.format, table.cols));
  }
  if (const auto* linear = std::get_if<Linear>(&op)) return program.matrix(linear->weight).bytes();
  if (const auto* route = std::get_if<Route>(&op)) return program.matrix(route->weight).bytes();
  if (const auto* experts = std::get_if<Experts>(&op)) {
    // At most every expert once; with few tokens at most top_k a token.
    const WeightMatrix& gate_up = program.matrix(experts->gate_up);
    const int64_t used = std::min<int64_t>(gate_up.stack(), shape.n_tokens * experts->top_k);
    return (gate_up.bytes() + program.matrix(experts->down).bytes()) / gate_up.stack() * used;
  }
  if (const auto* attention = std::get_if<Attention>(&op)) {
    const CacheDecl& cache = program.caches[static_cast<size_t>(attention->cache)];
    return shape.n_tokens * live_keys(program, cache, shape) * position_bytes(attention->cache);
  }
  if (const auto* finish = std::get_if<QkvFinish>(&op))
    return finish->n_kv_heads > 0 ? shape.n_tokens * position_bytes(finish->cache) : 0;
  return 0;
}

int64_t flops(const Op& op, const Program& program, const StepShape& shape) {
  if (const auto* linear = std::get_if<Linear>(&op)) {
    const WeightMatrix& weight = program.matrix(linear->weight);
    return 2 * row_count(program, linear->x, shape) * weight.rows() * weight.cols();
  }
  if (const auto* route = std::get_if<Route>(&op))
    return 2 * shape.n_tokens * program.matrix(route->weight).rows() * program.matrix(route->weight).cols();
  if (const auto* experts = std::get_if<Experts>(&op)) {
    const WeightMatrix& gate_up = program.matrix(experts->gate_up);
    return 2 * shape.n_tokens * experts->top_k * (gate_up.rows() * gate_up.cols() + experts->expert_dim * experts->y.cols);
  }
  if (const auto* attention = std::get_if<Attention>(&op)) {
    const CacheDecl& cache = program.caches[static_cast<size_t>(attention->cache)];
    return 4 * shape.n_tokens * live_keys(program, cache, shape) * attention->n_heads * cache.head_dim;
  }
  return 0;
}

}  // namespace beryl
