#include "ops/op_cases.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>

#include <fmt/format.h>

#include "base/error.h"
#include "base/float_formats.h"
#include "ops/random_matrix.h"
#include "ops/sample.h"

namespace beryl {
namespace {

constexpr float kEps = 1e-6f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct PartSpec {
  Format format;
  int64_t rows;
};

// Builds a case: weights, program, sequences. Everything random follows from the case's name, so a case is the same
// on every machine and does not change when others come or go.
class CaseBuilder {
 public:
  // Fills the rows of one slot of a sequence, [n][cols].
  using Fill = std::function<void(RandomStream&, int64_t n, int64_t cols, std::vector<float>& values)>;

  explicit CaseBuilder(std::string_view name) : data_(std::make_unique<CaseData>()), random_(hash(name)) {
    data_->program.weights = &data_->weights;
    data_->program.vocab = 1000;
    data_->program.n_layers = 1;
  }

  CaseData& data() { return *data_; }
  Program& program() { return data_->program; }
  RandomStream& random() { return random_; }

  MatrixRef matrix(const std::vector<PartSpec>& parts, int64_t cols, int64_t stack = 1, float tensor_scale = 1) {
    WeightMatrix matrix;
    std::vector<HostMatrix> without_mins;
    for (const PartSpec& part : parts) {
      RandomMatrix made = random_matrix(part.format, part.rows, cols, stack, tensor_scale, random_.bits());
      matrix.name += (matrix.name.empty() ? "" : "|") + made.matrix.name;
      matrix.parts.push_back(std::move(made.matrix));
      without_mins.push_back(std::move(made.without_mins));
    }
    data_->weights.matrices.push_back(std::move(matrix));
    data_->without_mins.push_back(std::move(without_mins));
    return {static_cast<int>(data_->weights.matrices.size()) - 1};
  }

  VectorRef vector(int64_t n, float low = 0.5f, float high = 1.5f) {
    WeightVector vector{fmt::format("vector {}", data_->weights.vectors.size()), {}};
    for (int64_t i = 0; i < n; ++i) vector.values.push_back(random_.between(low, high));
    data_->weights.vectors.push_back(std::move(vector));
    return {static_cast<int>(data_->weights.vectors.size()) - 1};
  }
  Norm norm(int64_t n) { return {true, vector(n), kEps}; }
  // Of weights of 4 bits: cached values times these are exact in f16.
  Norm exact_norm(int64_t n) {
    const Norm made = norm(n);
    for (float& weight : data_->weights.vectors[static_cast<size_t>(made.weight.index)].values) weight = std::round(8 * weight) / 8;
    return made;
  }
  static Norm plain_norm() { return {true, {}, kEps}; }

  // A slot that starts as NaN: an op's output.
  Rows slot(const char* name, int64_t cols, RowsKind kind = RowsKind::kActivation, RowCount count = RowCount::kTokens) {
    program().rows.push_back({name, cols, kind, count});
    fills_.emplace_back();
    return {static_cast<int>(program().rows.size()) - 1, 0, cols};
  }
  // A slot with contents; by default uniform in [-spread, spread). Activations are exact in bf16.
  Rows input(const char* name, int64_t cols, RowsKind kind = RowsKind::kActivation, RowCount count = RowCount::kTokens,
             float spread = 2) {
    return input(name, cols, kind, count, [spread](RandomStream& random, int64_t, int64_t, std::vector<float>& values) {
      for (float& value : values) value = random.between(-spread, spread);
    });
  }
  Rows input(const char* name, int64_t cols, RowsKind kind, RowCount count, Fill fill) {
    const Rows rows = slot(name, cols, kind, count);
    fills_.back() = std::move(fill);
    return rows;
  }

  int group(int window) {
    program().groups.push_back({window});
    return static_cast<int>(program().groups.size()) - 1;
  }
  int cache(int n_kv_heads, int head_dim, int group) {
    program().caches.push_back({fmt::format("layer {}", program().caches.size()), n_kv_heads, head_dim, group});
    return static_cast<int>(program().caches.size()) - 1;
  }
  // The first n_turned / 2 pairs turn, the others stand still.
  int rope(int head_dim, double base, int n_turned) {
    Rope rope;
    for (int j = 0; j < head_dim / 2; ++j)
      rope.frequencies.push_back(j < n_turned / 2 ? std::pow(base, -2.0 * j / head_dim) : 0);
    program().ropes.push_back(std::move(rope));
    return static_cast<int>(program().ropes.size()) - 1;
  }
  void op(Op op) {
    program().ops.push_back(std::move(op));
    program().layer_of_op.push_back(0);
  }

  // outputs: which tokens leave; null: the last. Call after all slots exist.
  CaseSequence& sequence(int64_t context, int n_tokens, const std::vector<int>* outputs = nullptr) {
    data_->sequences.push_back(make_sequence(context, n_tokens, outputs));
    return data_->sequences.back();
  }
  CaseSequence& neighbour(int64_t context, int n_tokens) {
    data_->neighbours.push_back(make_sequence(context, n_tokens, nullptr));
    return data_->neighbours.back();
  }
  // One sequence of n tokens, all of which leave, and neighbours of one and two.
  void tokens(int n_tokens) {
    std::vector<int> all;
    for (int t = 0; t < n_tokens; ++t) all.push_back(t);
    sequence(0, n_tokens, &all);
    neighbour(5, 1);
    neighbour(0, 2);
  }

  std::unique_ptr<CaseData> take() { return std::move(data_); }

 private:
  static uint64_t hash(std::string_view name) {   // FNV-1a
    uint64_t value = 0xcbf29ce484222325u;
    for (char c : name) value = (value ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
    return value;
  }

  CaseSequence make_sequence(int64_t context, int n_tokens, const std::vector<int>* outputs) {
    CaseSequence sequence;
    sequence.key = random_.bits();
    sequence.context = context;
    sequence.n_tokens = n_tokens;
    const bool has_outputs = std::any_of(program().rows.begin(), program().rows.end(),
                                         [](const RowsDecl& rows) { return rows.count == RowCount::kOutputs; });
    if (has_outputs) sequence.outputs = outputs == nullptr ? std::vector<int>{n_tokens - 1} : *outputs;
    for (int t = 0; t < n_tokens; ++t) sequence.ids.push_back(random_.below(static_cast<int>(program().vocab)));
    for (size_t slot = 0; slot < program().rows.size(); ++slot) {
      const RowsDecl& decl = program().rows[slot];
      std::vector<float> values;
      if (fills_[slot]) {
        const int64_t n = decl.count == RowCount::kTokens ? n_tokens : static_cast<int64_t>(sequence.outputs.size());
        values.resize(static_cast<size_t>(n * decl.cols));
        fills_[slot](random_, n, decl.cols, values);
        if (decl.kind == RowsKind::kActivation)
          for (float& value : values) value = bf16_to_f32(f32_to_bf16(value));
      }
      sequence.rows.push_back(std::move(values));
    }
    return sequence;
  }

  std::unique_ptr<CaseData> data_;
  RandomStream random_;
  std::vector<Fill> fills_;
};

using Table = std::vector<OpCase>;

void add(Table& table, const char* op, const std::string& what, std::function<void(CaseBuilder&)> fill) {
  const std::string name = fmt::format("{}/{}", op, what);
  table.push_back({name, op, [name, fill = std::move(fill)] {
                     CaseBuilder builder(name);
                     fill(builder);
                     return builder.take();
                   }});
}

constexpr Format kWeightFormats[] = {Format::kF32,  Format::kF16,  Format::kBf16, Format::kQ4_0,   Format::kQ4_1,
                                     Format::kQ5_0, Format::kQ5_1, Format::kQ8_0, Format::kQ4_K,   Format::kQ5_K,
                                     Format::kQ6_K, Format::kMxfp4, Format::kNvfp4, Format::kFp4G128, Format::kFp8};

// The whole number of blocks nearest to `cols`, at least one.
int64_t cols_near(Format format, int64_t cols) {
  const int64_t block = info(format).block_weights;
  return std::max<int64_t>(1, (cols + block / 2) / block) * block;
}

const char* epilogue_name(Epilogue epilogue) {
  switch (epilogue) {
    case Epilogue::kStore: return "store";
    case Epilogue::kGatedGelu: return "gated gelu";
    case Epilogue::kGatedSilu: return "gated silu";
    case Epilogue::kGeluTimesOther: return "gelu times other";
    case Epilogue::kSoftcap: return "softcap";
  }
  return "";
}

// ---- Linear, Embed ----------------------------------------------------------------------------------------------

struct LinearSpec {
  std::vector<PartSpec> parts;
  int64_t cols = 0;
  int n_tokens = 1;
  Epilogue epilogue = Epilogue::kStore;
  int norm = 0;                     // 0 none, 1 with a weight, 2 without
  bool from_residual = false;       // x is f32 on every backend
  float tensor_scale = 1;
  bool sliced = false;              // x, y and other are columns of wider rows
};

std::string describe(const LinearSpec& spec) {
  std::string text;
  for (const PartSpec& part : spec.parts)
    text += fmt::format("{}{} {}", text.empty() ? "" : " | ", info(part.format).name, part.rows);
  text += fmt::format(" x {}, {} rows", spec.cols, spec.n_tokens);
  if (spec.epilogue != Epilogue::kStore) text += fmt::format(", {}", epilogue_name(spec.epilogue));
  if (spec.norm > 0) text += spec.norm == 1 ? ", norm" : ", plain norm";
  if (spec.from_residual) text += ", residual";
  if (spec.tensor_scale != 1) text += ", tensor scale";
  if (spec.sliced) text += ", slices";
  return text;
}

void add_linear(Table& table, const LinearSpec& spec) {
  add(table, "Linear", describe(spec), [spec](CaseBuilder& builder) {
    const bool gated = spec.epilogue == Epilogue::kGatedGelu || spec.epilogue == Epilogue::kGatedSilu;
    const bool is_head = spec.epilogue == Epilogue::kSoftcap;
    const RowCount count = is_head ? RowCount::kOutputs : RowCount::kTokens;
    int64_t y_cols = 0;
    for (const PartSpec& part : spec.parts) y_cols += part.rows;
    if (gated) y_cols /= 2;
    const int64_t margin = spec.sliced ? 64 : 0;
    const RowsKind x_kind = spec.from_residual ? RowsKind::kResidual : RowsKind::kActivation;
    Linear op;
    op.weight = builder.matrix(spec.parts, spec.cols, 1, spec.tensor_scale);
    op.x = builder.input("x", spec.cols + 2 * margin, x_kind, count).slice(margin, spec.cols);
    op.y = builder.slot("y", y_cols + 2 * margin, is_head ? RowsKind::kLogits : RowsKind::kActivation, count)
               .slice(margin, y_cols);
    if (spec.epilogue == Epilogue::kGeluTimesOther)
      op.other = builder.input("other", y_cols + 2 * margin, RowsKind::kActivation, count).slice(margin, y_cols);
    if (spec.norm == 1) op.norm = builder.norm(spec.cols);
    if (spec.norm == 2) op.norm = CaseBuilder::plain_norm();
    op.epilogue = spec.epilogue;
    op.softcap = is_head ? 3.0f : 0.0f;   // outputs are of order 1 to 5, so that it bends
    builder.op(op);
    builder.tokens(spec.n_tokens);
  });
}

void add_linears(Table& table) {
  // rows, cols wanted, rows of x: smallest, odd, one past a tile, real models' widths.
  struct Shape {
    int64_t rows, cols;
    int n_tokens;
  };
  constexpr Shape kShapes[] = {{1, 1, 1},     {3, 96, 2},    {7, 160, 3},  {33, 576, 4},  {257, 640, 5},
                               {16, 224, 6},  {64, 1024, 7}, {257, 576, 8}, {33, 640, 9},  {48, 512, 17},
                               {65, 192, 33}, {40, 352, 64}, {37, 288, 130}, {5, 4096, 1}};
  size_t nth = 0;
  for (Format format : kWeightFormats) {
    for (const Shape& shape : kShapes)
      add_linear(table,
                 {.parts = {{format, shape.rows}}, .cols = cols_near(format, shape.cols), .n_tokens = shape.n_tokens});
    const int64_t cols = cols_near(format, 320);
    add_linear(table, {.parts = {{format, 33}}, .cols = cols, .n_tokens = 1, .norm = 1, .from_residual = true});
    add_linear(table, {.parts = {{format, 17}}, .cols = cols, .n_tokens = 9, .norm = 2, .from_residual = true,
                       .tensor_scale = 0.37f});
    add_linear(table, {.parts = {{format, 47}, {format, 47}},
                       .cols = cols,
                       .n_tokens = 3,
                       .epilogue = Epilogue::kGatedGelu,
                       .norm = 1,
                       .from_residual = true});
    add_linear(table, {.parts = {{format, 64}, {format, 64}}, .cols = cols, .n_tokens = 12,
                       .epilogue = Epilogue::kGatedSilu});
    add_linear(table, {.parts = {{format, 31}}, .cols = cols, .n_tokens = 5, .epilogue = Epilogue::kGeluTimesOther,
                       .from_residual = true, .sliced = true});
    add_linear(table, {.parts = {{format, 101}}, .cols = cols, .n_tokens = static_cast<int>(1 + nth % 8),
                       .epilogue = Epilogue::kSoftcap, .norm = 1, .from_residual = true});
    // Parts of different formats, as quantised files have them.
    const Format second = kWeightFormats[(nth + 7) % std::size(kWeightFormats)];
    const Format third = kWeightFormats[(nth + 3) % std::size(kWeightFormats)];
    add_linear(table, {.parts = {{format, 24}, {second, 24}}, .cols = 512, .n_tokens = 2,
                       .epilogue = nth % 2 == 0 ? Epilogue::kGatedGelu : Epilogue::kGatedSilu, .norm = 1,
                       .from_residual = true});
    add_linear(table, {.parts = {{format, 48}, {second, 16}, {third, 9}},
                       .cols = 256,
                       .n_tokens = static_cast<int>(nth % 9 + 1),
                       .norm = 1,
                       .from_residual = true});
    // Prompts: all epilogues, one past the rows of a batch, more than a block of tokens.
    add_linear(table, {.parts = {{format, 40}, {format, 40}}, .cols = cols, .n_tokens = 65, .epilogue = Epilogue::kGatedGelu,
                       .norm = 1, .from_residual = true});
    add_linear(table, {.parts = {{format, 33}}, .cols = cols, .n_tokens = 131, .epilogue = Epilogue::kGeluTimesOther,
                       .tensor_scale = 0.37f, .sliced = true});
    add_linear(table, {.parts = {{format, 24}, {second, 24}}, .cols = 512, .n_tokens = 70, .epilogue = Epilogue::kGatedSilu,
                       .norm = 2, .from_residual = true});
    ++nth;
  }
  // Wide models: more units than a GPU has blocks, in one, two and four rounds of columns.
  for (const int64_t cols : {4096, 7680, 15360})
    add_linear(table, {.parts = {{Format::kFp4G128, 2300}}, .cols = cols, .n_tokens = 1});
  // The norm's columns are more than a GPU block's warps take at once.
  for (const Format format : {Format::kFp4G128, Format::kQ4_K, Format::kFp8})
    for (const int n_tokens : {1, 3, 8})
      add_linear(table, {.parts = {{format, 21}}, .cols = 5376, .n_tokens = n_tokens, .norm = 1, .from_residual = true});
  add_linear(table, {.parts = {{Format::kQ4_K, 48}, {Format::kQ4_K, 16}, {Format::kQ6_K, 16}},
                     .cols = 768,
                     .n_tokens = 20,
                     .norm = 1,
                     .from_residual = true});
  add_linear(table,
             {.parts = {{Format::kQ5_0, 48}, {Format::kQ5_0, 16}, {Format::kQ8_0, 16}}, .cols = 640, .n_tokens = 8});
}

void add_embeds(Table& table) {
  for (Format format : kWeightFormats)
    for (bool scaled : {false, true}) {
      const int64_t cols = cols_near(format, scaled ? 640 : 1);
      add(table, "Embed", fmt::format("{} x {}{}", info(format).name, cols, scaled ? ", scaled" : ""),
          [format, scaled, cols](CaseBuilder& builder) {
            builder.program().vocab = 97;
            Embed op;
            op.table = builder.matrix({{format, 97}}, cols);
            op.out = scaled ? builder.slot("residual", cols, RowsKind::kResidual)
                            : builder.slot("wide", cols + 96).slice(32, cols);
            op.scale = scaled ? std::sqrt(static_cast<float>(cols)) : 1.0f;
            builder.op(op);
            builder.tokens(7);
            std::vector<int32_t>& ids = builder.data().sequences[0].ids;
            ids[0] = 0;
            ids[1] = 96;
            ids[2] = ids[4] = 41;
          });
    }
}

// ---- the cache --------------------------------------------------------------------------------------------------

// Attention of the models in the specification.
struct Geometry {
  const char* name;
  int n_heads, n_kv_heads, head_dim, window;
  double rope_base;
  int n_turned;                     // columns of a head that rope turns
  bool normed, v_from_k;
  float scale;
};

constexpr Geometry kGeometries[] = {
    {"Gemma 4 sliding", 16, 8, 256, 1024, 1e4, 256, true, false, 1},
    {"Gemma 4 global", 16, 1, 512, 0, 1e6, 128, true, true, 1},
    {"Gemma 4 E2B sliding", 8, 1, 256, 512, 1e4, 256, true, false, 1},
    {"Gemma 4 E2B global", 8, 1, 512, 0, 1e6, 128, true, false, 1},
    {"Gemma 3 270M sliding", 4, 1, 256, 512, 1e4, 256, true, false, 0.0625f},
    {"Gemma 3 27B sliding", 32, 16, 128, 1024, 1e4, 128, true, false, 0.0772f},
    {"Llama 8B", 32, 8, 128, 0, 5e5, 128, false, false, 0.08838835f},
    {"Llama 1B", 32, 8, 64, 0, 5e5, 64, false, false, 0.125f},
    {"SmolLM2 135M", 9, 3, 64, 0, 1e5, 64, false, false, 0.125f},
    {"Gemma 4 31B global", 32, 4, 512, 0, 1e6, 128, true, true, 1},
};

bool is_gemma4(const Geometry& geometry) { return geometry.scale == 1; }

// Where keys can be made from values, the cached ones are exact in a backend that keeps whole keys, too.
QkvFinish make_finish(CaseBuilder& builder, const Geometry& geometry, bool shares, int cache) {
  QkvFinish op;
  op.n_heads = geometry.n_heads;
  op.n_kv_heads = shares ? 0 : geometry.n_kv_heads;
  op.head_dim = geometry.head_dim;
  op.v_from_k = geometry.v_from_k && !shares;
  if (geometry.normed) op.q_norm = builder.norm(geometry.head_dim);
  if (geometry.normed && !shares) {
    op.k_norm = geometry.v_from_k ? builder.exact_norm(geometry.head_dim) : builder.norm(geometry.head_dim);
    if (is_gemma4(geometry)) op.v_norm = CaseBuilder::plain_norm();
  }
  op.rope = builder.rope(geometry.head_dim, geometry.rope_base, geometry.n_turned);
  op.cache = shares ? -1 : cache;
  const int n_parts = shares ? 0 : op.v_from_k ? 1 : 2;
  op.qkv = builder.input("qkv", int64_t{geometry.n_heads + geometry.n_kv_heads * n_parts} * geometry.head_dim);
  return op;
}

struct Tokens {                     // of one sequence
  int64_t context;
  int n_tokens;
};

std::string describe(const std::vector<Tokens>& batch) {
  std::string text;
  for (const Tokens& tokens : batch)
    text += fmt::format("{}{}+{}", text.empty() ? "" : " ", tokens.context, tokens.n_tokens);
  return text;
}

void add_sequences(CaseBuilder& builder, const std::vector<Tokens>& batch) {
  for (const Tokens& tokens : batch) builder.sequence(tokens.context, tokens.n_tokens);
  builder.neighbour(30, 1);
  builder.neighbour(0, 2);
}

void add_finish(Table& table, const Geometry& geometry, const std::vector<Tokens>& batch, bool shares = false,
                int slack_entries = 0) {
  add(table, "QkvFinish", fmt::format("{}{}, {}", geometry.name, shares ? " sharing" : "", describe(batch)),
      [=](CaseBuilder& builder) {
        const int cache =
            shares ? -1 : builder.cache(geometry.n_kv_heads, geometry.head_dim, builder.group(geometry.window));
        builder.op(make_finish(builder, geometry, shares, cache));
        builder.data().slack_entries = slack_entries;
        add_sequences(builder, batch);
      });
}

void add_finishes(Table& table) {
  for (const Geometry& geometry : kGeometries) {
    add_finish(table, geometry, {{0, 1}});
    add_finish(table, geometry, {{63, 3}, {0, 5}, {127, 1}});
    if (geometry.window == 0) continue;
    Geometry ring = geometry;      // at the edge of a ring; how long it is makes no difference but time
    ring.window = 128;
    add_finish(table, ring, {{127, 2}, {128, 1}});
    add_finish(table, ring, {{126, 5}, {511, 2}}, false, 1);
  }
  // Sharing layers only finish q, and name no cache at all.
  add_finish(table, kGeometries[2], {{0, 1}, {511, 3}}, true);
  add_finish(table, kGeometries[3], {{5, 9}, {100000, 1}}, true);
  // Positions far out, where angles in f32 would be wrong; in a ring, so that the pool stays small.
  Geometry far = kGeometries[8];
  far.name = "far out";
  far.window = 128;
  add_finish(table, far, {{100000, 2}, {131071, 1}, {262143, 3}});
  far = kGeometries[0];
  far.name = "far out, normed";
  far.window = 64;
  add_finish(table, far, {{100000, 2}, {262143, 1}}, false, 2);

  Geometry bare = kGeometries[8];
  bare.name = "no rope";
  add(table, "QkvFinish", "no rope", [bare](CaseBuilder& builder) {
    QkvFinish op = make_finish(builder, bare, false, builder.cache(bare.n_kv_heads, bare.head_dim, builder.group(0)));
    op.rope = -1;
    builder.op(op);
    add_sequences(builder, {{7, 2}});
  });
  // Two caches in one group and one in another; only the second of them is written.
  add(table, "QkvFinish", "second of three caches", [](CaseBuilder& builder) {
    const Geometry& geometry = kGeometries[8];
    const int global = builder.group(0), sliding = builder.group(128);
    builder.cache(geometry.n_kv_heads, geometry.head_dim, global);
    const int cache = builder.cache(geometry.n_kv_heads, geometry.head_dim, sliding);
    builder.cache(1, 32, global);
    builder.op(make_finish(builder, geometry, false, cache));
    add_sequences(builder, {{200, 3}, {1, 1}});
  });
}

struct AttentionSpec {
  Geometry geometry;
  std::vector<Tokens> batch;
  float softcap = 0;
  float q_spread = 0;               // 0: one that gives scores of order 3
  int slack_entries = 0;
  const char* note = "";
};

void add_attention(Table& table, const AttentionSpec& spec) {
  add(table, "Attention", fmt::format("{}, {}{}{}", spec.geometry.name, describe(spec.batch),
                                      spec.softcap > 0 ? ", softcap" : "", spec.note), [spec](CaseBuilder& builder) {
    const Geometry& geometry = spec.geometry;
    Attention op;
    op.n_heads = geometry.n_heads;
    op.cache = builder.cache(geometry.n_kv_heads, geometry.head_dim, builder.group(geometry.window));
    op.scale = geometry.scale;
    op.softcap = spec.softcap;
    const int64_t cols = int64_t{geometry.n_heads} * geometry.head_dim;
    // Keys are uniform in [-2, 2): a score's deviation is spread · scale · 2/3 · sqrt(head_dim).
    const float usual = 3 / (geometry.scale * 0.667f * std::sqrt(static_cast<float>(geometry.head_dim)));
    const float spread = spec.q_spread > 0 ? spec.q_spread * usual : usual;
    op.q = builder.input("qkv", cols + 128, RowsKind::kActivation, RowCount::kTokens, spread).slice(0, cols);
    op.out = builder.slot("attended", cols);
    builder.op(op);
    builder.data().slack_entries = spec.slack_entries;
    add_sequences(builder, spec.batch);
  });
}

void add_attentions(Table& table) {
  const auto decode = [&](const Geometry& geometry, const std::vector<int64_t>& lengths) {
    for (int64_t length : lengths) add_attention(table, {.geometry = geometry, .batch = {{length - 1, 1}}});
  };
  // Decode, by live length: one key, the edges of a page and of splits at 256, 512 and 1024; a sliding layer before,
  // at and past its window, and after several turns of its ring.
  decode(kGeometries[0], {1, 64, 65, 257, 1023, 1024, 1025, 5000});
  decode(kGeometries[1], {1, 63, 64, 65, 255, 256, 257, 513, 1023, 1024, 1025, 1500});
  decode(kGeometries[2], {1, 63, 65, 256, 511, 512, 513, 577, 2600});
  decode(kGeometries[3], {2, 64, 257, 511, 512, 513, 1025});
  decode(kGeometries[4], {1, 65, 255, 257, 511, 512, 513, 514, 3000});
  decode(kGeometries[5], {1, 65, 513, 1024, 1025});
  decode(kGeometries[6], {1, 64, 255, 257, 512, 1025});
  decode(kGeometries[7], {1, 63, 256, 513, 1024});
  decode(kGeometries[8], {1, 2, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 2049});
  // More pages than a GPU has multiprocessors, so that some have two.
  decode(kGeometries[1], {8500});
  decode(kGeometries[8], {8449, 17000});

  // A ring with more pages than it needs, and one far out.
  add_attention(table, {.geometry = kGeometries[4], .batch = {{4000, 1}}, .slack_entries = 2, .note = ", slack"});
  add_attention(table, {.geometry = kGeometries[2], .batch = {{200000, 2}}, .slack_entries = 1, .note = ", slack"});

  // Chunks of a prompt: from nothing, over a page edge, over the window's edge, wrapping within the chunk.
  for (const Geometry& geometry : kGeometries) {
    add_attention(table, {.geometry = geometry, .batch = {{0, 9}}});
    add_attention(table, {.geometry = geometry, .batch = {{58, 13}}});
  }
  add_attention(table, {.geometry = kGeometries[2], .batch = {{500, 25}}});
  add_attention(table, {.geometry = kGeometries[4], .batch = {{1015, 20}}});
  add_attention(table, {.geometry = kGeometries[8], .batch = {{0, 130}}});
  add_attention(table, {.geometry = kGeometries[8], .batch = {{250, 17}}});

  // Prompts, for which backends have other products: all head sizes, two chunks that meet within a tile of rows, a ring.
  add_attention(table, {.geometry = kGeometries[1], .batch = {{0, 40}, {129, 33}}});
  Geometry short_window = kGeometries[0];
  short_window.name = "Gemma 4 sliding, window 128";
  short_window.window = 128;
  add_attention(table, {.geometry = short_window, .batch = {{300, 70}}});
  add_attention(table, {.geometry = kGeometries[5], .batch = {{60, 70}}});
  add_attention(table, {.geometry = kGeometries[7], .batch = {{0, 50}, {511, 2}, {63, 20}}, .softcap = 20});

  // Ragged batches: decode rows and chunks of prompts side by side.
  add_attention(table, {.geometry = kGeometries[0], .batch = {{0, 3}, {1100, 1}, {64, 1}}});
  add_attention(table, {.geometry = kGeometries[1], .batch = {{255, 1}, {0, 6}, {513, 2}}});
  add_attention(table, {.geometry = kGeometries[2], .batch = {{511, 1}, {512, 1}, {1500, 1}, {0, 4}}});
  add_attention(table, {.geometry = kGeometries[3], .batch = {{63, 2}, {700, 1}}});
  add_attention(table, {.geometry = kGeometries[4], .batch = {{0, 1}, {511, 3}, {2000, 1}, {100, 7}, {64, 1}}});
  add_attention(table, {.geometry = kGeometries[5], .batch = {{1023, 2}, {0, 2}, {10, 1}}});
  add_attention(table, {.geometry = kGeometries[6], .batch = {{256, 1}, {0, 5}, {63, 2}}});
  add_attention(table, {.geometry = kGeometries[7], .batch = {{0, 17}, {300, 1}, {511, 2}}});
  add_attention(table, {.geometry = kGeometries[8],
                        .batch = {{0, 1}, {63, 1}, {64, 1}, {255, 1}, {256, 1}, {700, 1}, {5, 11}, {127, 4}}});

  // Softcaps; scores so far apart that one key takes all, and all equal.
  add_attention(table, {.geometry = kGeometries[8], .batch = {{300, 2}}, .softcap = 5});
  add_attention(table, {.geometry = kGeometries[4], .batch = {{600, 1}}, .softcap = 50});
  add_attention(table, {.geometry = kGeometries[8], .batch = {{300, 2}}, .q_spread = 30, .note = ", peaked"});
  add_attention(table, {.geometry = kGeometries[0], .batch = {{270, 1}}, .q_spread = 30, .note = ", peaked"});
  add_attention(table, {.geometry = kGeometries[8], .batch = {{300, 2}}, .q_spread = 1e-6f, .note = ", flat"});
}

// ---- rows in, rows out ------------------------------------------------------------------------------------------

struct AddNormSpec {
  int64_t cols;
  int64_t group = 0;
  int norm = 1;                     // 0 none, 1 with a weight, 2 without
  bool base = true;
  bool in_place = true;             // else out is a third slot, of activations
  float scale = 1;
  int n_tokens = 3;
  bool sliced = false;
};

void add_add_norm(Table& table, const AddNormSpec& spec) {
  std::string what = fmt::format("{}", spec.cols);
  if (spec.group > 0) what += fmt::format(" by {}", spec.group);
  what += spec.norm == 0 ? ", no norm" : spec.norm == 1 ? ", norm" : ", plain norm";
  what += !spec.base ? ", no base" : spec.in_place ? ", in place" : ", elsewhere";
  if (spec.scale != 1) what += ", scaled";
  if (spec.sliced) what += ", slices";
  add(table, "AddNorm", fmt::format("{}, {} rows", what, spec.n_tokens), [spec](CaseBuilder& builder) {
    const int64_t margin = spec.sliced ? 32 : 0;
    AddNorm op;
    op.y = builder.input("y", spec.cols + margin).slice(margin, spec.cols);
    if (spec.base)
      op.base = builder.input("residual", spec.cols + margin, RowsKind::kResidual).slice(margin, spec.cols);
    op.out = spec.base && spec.in_place ? op.base : builder.slot("out", spec.cols + margin).slice(0, spec.cols);
    const int64_t group = spec.group > 0 ? spec.group : spec.cols;
    if (spec.norm == 1) op.norm = builder.norm(group);
    if (spec.norm == 2) op.norm = CaseBuilder::plain_norm();
    op.group = spec.group;
    op.scale = spec.scale;
    builder.op(op);
    builder.tokens(spec.n_tokens);
  });
}

void add_row_ops(Table& table) {
  add_add_norm(table, {.cols = 1, .n_tokens = 1});
  add_add_norm(table, {.cols = 7});
  for (int64_t cols : {640, 1536, 3840, 5376}) {
    add_add_norm(table, {.cols = cols, .n_tokens = 1});
    add_add_norm(table, {.cols = cols, .scale = 0.71f, .n_tokens = 9});
  }
  add_add_norm(table, {.cols = 2048, .norm = 0, .n_tokens = 5});
  add_add_norm(table, {.cols = 576, .norm = 0, .in_place = false, .scale = 0.5f});
  add_add_norm(table, {.cols = 576, .norm = 2, .in_place = false});
  add_add_norm(table, {.cols = 640, .base = false});
  add_add_norm(table, {.cols = 96, .norm = 0, .base = false, .scale = -3});
  add_add_norm(table, {.cols = 256 * 5, .group = 256, .in_place = false, .scale = 0.70710678f, .n_tokens = 17});
  add_add_norm(table, {.cols = 256 * 30, .group = 256, .scale = 0.70710678f, .n_tokens = 2});
  add_add_norm(table, {.cols = 64 * 3, .group = 64, .norm = 2, .base = false});
  add_add_norm(table, {.cols = 160, .sliced = true});
  add_add_norm(table, {.cols = 96, .group = 32, .in_place = false, .n_tokens = 33, .sliced = true});
  // A row of zeros must stay finite.
  add(table, "AddNorm", "zero rows", [](CaseBuilder& builder) {
    AddNorm op;
    op.y = builder.input("y", 128, RowsKind::kActivation, RowCount::kTokens, 0.0f);
    op.base = op.out = builder.input("residual", 128, RowsKind::kResidual);
    op.norm = builder.norm(128);
    builder.op(op);
    builder.tokens(2);
  });

  for (int64_t cols : {1, 640, 3841})
    for (bool narrows : {false, true})
      add(table, "GatherRows", fmt::format("{}{}", cols, narrows ? ", to activations" : ""), [=](CaseBuilder& builder) {
        GatherRows op;
        op.x = builder.input("residual", cols + 2, RowsKind::kResidual).slice(1, cols);
        op.out =
            builder.slot("gathered", cols, narrows ? RowsKind::kActivation : RowsKind::kResidual, RowCount::kOutputs);
        builder.op(op);
        const std::vector<int> none, several = {0, 2, 5, 6}, last = {3};
        builder.sequence(0, 7, &several);
        builder.sequence(4, 2, &none);
        builder.sequence(0, 4, &last);
        builder.neighbour(1, 1);
        builder.neighbour(2, 3);
      });
}

// ---- experts ----------------------------------------------------------------------------------------------------

void add_routes(Table& table) {
  struct Spec {
    Format format;
    int n_experts, top_k;
    int64_t cols;
    int n_tokens;
    bool normed, scaled, tied;
  };
  const Spec specs[] = {{Format::kF32, 8, 2, 96, 5, false, false, false},
                        {Format::kF32, 128, 8, 288, 1, true, true, false},
                        {Format::kBf16, 128, 8, 640, 9, true, true, false},
                        {Format::kF32, 16, 4, 64, 6, false, true, true},
                        {Format::kBf16, 8, 8, 64, 3, true, false, true},
                        {Format::kQ8_0, 33, 5, 256, 20, true, true, false},
                        {Format::kF16, 5, 1, 32, 2, false, false, false}};
  for (const Spec& spec : specs)
    add(table, "Route", fmt::format("{} {} of {} x {}, {} rows{}", info(spec.format).name, spec.top_k, spec.n_experts,
                                    spec.cols, spec.n_tokens, spec.tied ? ", ties" : ""), [spec](CaseBuilder& builder) {
      Route op;
      op.weight = builder.matrix({{spec.format, spec.n_experts}}, spec.cols);
      if (spec.tied) {   // rows 2i and 2i + 1 are equal, so their logits are
        HostMatrix& matrix = builder.data().weights.matrices[0].parts[0];
        const auto row = static_cast<size_t>(row_bytes(matrix.format, matrix.cols));
        auto bytes = std::make_shared<std::vector<std::byte>>(matrix.codes,
                                                              matrix.codes + row * static_cast<size_t>(matrix.rows));
        for (size_t r = 1; r < static_cast<size_t>(matrix.rows); r += 2)
          std::copy_n(bytes->begin() + static_cast<std::ptrdiff_t>((r - 1) * row), row,
                      bytes->begin() + static_cast<std::ptrdiff_t>(r * row));
        matrix.storage = bytes;
        matrix.codes = bytes->data();
        builder.data().without_mins[0][0] = matrix;
      }
      op.x = builder.input("residual", spec.cols, RowsKind::kResidual);
      if (spec.normed) op.norm = builder.norm(spec.cols);
      if (spec.scaled) op.expert_scale = builder.vector(spec.n_experts);
      op.routes = builder.slot("routes", 2 * spec.top_k, RowsKind::kResidual);
      op.n_experts = spec.n_experts;
      op.top_k = spec.top_k;
      builder.op(op);
      builder.tokens(spec.n_tokens);
    });
}

// Different experts within a token; most tokens choose the same few, so that some experts have many and some none.
CaseBuilder::Fill random_routes(int n_experts, int top_k) {
  return [n_experts, top_k](RandomStream& random, int64_t n, int64_t cols, std::vector<float>& values) {
    for (int64_t t = 0; t < n; ++t) {
      float* routes = values.data() + t * cols;
      const int first = random.below(3) == 0 ? random.below(n_experts) : 1;
      std::vector<bool> taken(static_cast<size_t>(n_experts));
      for (int i = 0; i < top_k; ++i) {
        int expert = (first + 2 * i) % n_experts;
        while (taken[static_cast<size_t>(expert)]) expert = (expert + 1) % n_experts;
        taken[static_cast<size_t>(expert)] = true;
        routes[i] = static_cast<float>(expert);
        routes[top_k + i] = random.between(0.05f, 1.0f);
      }
    }
  };
}

void add_experts(Table& table) {
  struct Spec {
    Format gate, up, down;
    int n_experts, top_k;
    int64_t cols, expert_dim;
    int n_tokens;
    bool normed;
  };
  const Spec specs[] = {
      {Format::kQ4_0, Format::kQ4_0, Format::kQ8_0, 6, 2, 96, 64, 1, true},
      {Format::kQ4_0, Format::kQ4_0, Format::kQ4_0, 8, 3, 160, 96, 20, false},
      {Format::kQ4_1, Format::kQ5_1, Format::kQ5_0, 5, 2, 64, 32, 7, true},
      {Format::kQ4_K, Format::kQ4_K, Format::kQ6_K, 4, 2, 256, 256, 5, true},
      {Format::kQ4_K, Format::kQ5_K, Format::kQ8_0, 16, 8, 256, 96, 2, true},
      {Format::kMxfp4, Format::kMxfp4, Format::kMxfp4, 8, 4, 96, 160, 13, false},
      {Format::kNvfp4, Format::kNvfp4, Format::kNvfp4, 8, 2, 192, 64, 3, true},
      {Format::kFp4G128, Format::kFp4G128, Format::kFp4G128, 16, 8, 256, 128, 1, true},
      {Format::kFp4G128, Format::kFp4G128, Format::kFp8, 6, 2, 128, 128, 9, true},
      {Format::kFp8, Format::kFp8, Format::kFp8, 3, 1, 80, 33, 4, false},
      {Format::kBf16, Format::kBf16, Format::kBf16, 4, 4, 72, 40, 20, true},
      {Format::kF32, Format::kF16, Format::kF32, 3, 2, 17, 9, 2, false},
  };
  for (const Spec& spec : specs)
    add(table, "Experts",
        fmt::format("{} {} {}, {} of {}, {} x {}, {} rows", info(spec.gate).name, info(spec.up).name,
                    info(spec.down).name, spec.top_k, spec.n_experts, spec.cols, spec.expert_dim, spec.n_tokens),
        [spec](CaseBuilder& builder) {
          Experts op;
          op.gate_up =
              builder.matrix({{spec.gate, spec.expert_dim}, {spec.up, spec.expert_dim}}, spec.cols, spec.n_experts);
          op.down = builder.matrix({{spec.down, spec.cols}}, spec.expert_dim, spec.n_experts);
          op.x = builder.input("residual", spec.cols, RowsKind::kResidual);
          if (spec.normed) op.norm = builder.norm(spec.cols);
          op.routes = builder.input("routes", 2 * spec.top_k, RowsKind::kResidual, RowCount::kTokens,
                                    random_routes(spec.n_experts, spec.top_k));
          op.y = builder.slot("y", spec.cols);
          op.top_k = spec.top_k;
          op.expert_dim = spec.expert_dim;
          builder.op(op);
          builder.tokens(spec.n_tokens);
        });
}

// ---- sampling and whole steps -----------------------------------------------------------------------------------

// Logits of order 4, from few distinct values when tied.
CaseBuilder::Fill random_logits(bool tied) {
  return [tied](RandomStream& random, int64_t, int64_t, std::vector<float>& values) {
    for (float& value : values)
      value = tied ? static_cast<float>(random.below(7)) : random.between(-6, 6) + random.between(-4, 4);
  };
}

// params(i): of row i.
void add_sample(Table& table, const std::string& what, int64_t vocab, int n_rows, bool tied, bool history,
                std::function<SampleParams(CaseData&, RandomStream&, int)> params,
                std::function<void(CaseData&)> change = nullptr) {
  add(table, "Sample", what, [=](CaseBuilder& builder) {
    builder.program().vocab = vocab;
    builder.op(Sample{builder.input("logits", vocab, RowsKind::kLogits, RowCount::kOutputs, random_logits(tied))});
    for (int i = 0; i < n_rows; ++i) {
      CaseSequence& sequence = builder.sequence(i * 3, 1);
      sequence.sampling = {params(builder.data(), builder.random(), i)};
      if (history)
        for (int j = 0; j < 300; ++j) {
          const int id = builder.random().below(static_cast<int>(vocab));
          (j % 3 == 0 ? sequence.reply : sequence.prompt).push_back(id);
          if (j % 30 == 0) sequence.reply.insert(sequence.reply.end(), 3, id);
        }
    }
    for (int i = 0; i < 2; ++i)
      builder.neighbour(9 + i, 1).sampling = {params(builder.data(), builder.random(), n_rows + i)};
    if (change) change(builder.data());
  });
}

void add_samples(Table& table) {
  using Random = RandomStream;
  const auto seeded = [](Random& random, SampleParams params) {
    params.seed = random.bits();
    params.draw = random.bits() % 5000;
    return params;
  };
  const auto same = [seeded](SampleParams params) {
    return [params, seeded](CaseData&, Random& random, int) { return seeded(random, params); };
  };
  add_sample(table, "greedy", 1003, 5, false, false, same({}));
  add_sample(table, "greedy, ties", 1003, 5, true, false, same({.n_logprobs = 3}));
  add_sample(table, "greedy, smallest vocabulary", 1, 2, false, false, same({.n_logprobs = 4}));
  add_sample(table, "greedy, 262144 tokens", 262144, 2, false, false, same({.n_logprobs = 5}));
  add_sample(table, "temperature", 1003, 8, false, false, same({.temperature = 0.8f}));
  add_sample(table, "high temperature", 1003, 8, false, false, same({.temperature = 50}));
  add_sample(table, "low temperature", 1003, 4, false, false, same({.temperature = 0.01f}));
  add_sample(table, "top-k", 1003, 8, false, false, same({.temperature = 1.5f, .top_k = 40}));
  add_sample(table, "top-k, ties at the edge", 1003, 8, true, false, same({.temperature = 3, .top_k = 100}));
  add_sample(table, "top-k 1", 1003, 4, true, false, same({.temperature = 1, .top_k = 1}));
  add_sample(table, "top-p", 1003, 8, false, false, same({.temperature = 1, .top_p = 0.9f}));
  add_sample(table, "top-p, ties at the edge", 1003, 8, true, false, same({.temperature = 2, .top_p = 0.3f}));
  add_sample(table, "top-p near 0", 1003, 4, false, false, same({.temperature = 1, .top_p = 1e-6f}));
  add_sample(table, "min-p", 1003, 8, false, false, same({.temperature = 2, .min_p = 0.1f}));
  add_sample(table, "all filters, log-probabilities", 1003, 8, false, false,
             same({.temperature = 1.2f, .top_k = 64, .top_p = 0.95f, .min_p = 0.02f, .n_logprobs = 20}));
  add_sample(table, "all filters, 32000 tokens", 32000, 3, false, false,
             same({.temperature = 1.2f, .top_k = 500, .top_p = 0.8f, .min_p = 0.001f, .n_logprobs = 0}));
  add_sample(table, "penalties", 1003, 6, false, true,
             same({.temperature = 1, .repetition_penalty = 1.3f, .presence_penalty = 0.5f, .frequency_penalty = 0.7f}));
  add_sample(table, "penalties, greedy", 257, 6, true, true,
             same({.repetition_penalty = 1.1f, .presence_penalty = -0.5f, .frequency_penalty = 0.25f}));
  add_sample(table, "bias and bans", 1003, 6, false, false, [seeded](CaseData&, Random& random, int i) {
    SampleParams params{.temperature = i % 2 == 0 ? 0.0f : 1.0f, .n_logprobs = 2};
    for (int j = 0; j < 20; ++j) params.logit_bias.emplace_back(random.below(1003), random.between(-20, 20));
    for (int j = 0; j < 500; ++j) params.logit_bias.emplace_back(random.below(1003), -kInfinity);
    params.logit_bias.emplace_back(1002, 3.0f);
    return seeded(random, params);
  });
  add_sample(table, "mask", 1003, 6, false, false, [seeded](CaseData& data, Random& random, int i) {
    std::vector<uint32_t> mask((1003 + 31) / 32);
    for (uint32_t& word : mask) word = i == 0 ? 0 : static_cast<uint32_t>(random.bits() & random.bits());
    mask[1002 / 32] |= 1u << (1002 % 32);   // row 0 allows the last token only
    data.masks.push_back(std::move(mask));
    return seeded(random,
                  {.temperature = i % 2 == 0 ? 1.0f : 0.0f, .n_logprobs = 1, .allowed = data.masks.back().data()});
  });
  add_sample(table, "everything banned", 100, 3, false, false, [seeded](CaseData&, Random& random, int i) {
    SampleParams params{.temperature = 1};
    for (int id = 0; id < 100 && i == 1; ++id) params.logit_bias.emplace_back(id, -kInfinity);
    return seeded(random, params);
  });
  add_sample(table, "NaN in one row", 1003, 4, false, false, same({.temperature = 1, .n_logprobs = 1}),
             [](CaseData& data) {
               data.sequences[1].rows[0][1002] = std::numeric_limits<float>::quiet_NaN();
               data.sequences[2].rows[0][17] = -kInfinity;  // a logit of -infinity is a ban, not an error
             });
  add_sample(table, "every row its own parameters", 1003, 8, false, true, [seeded](CaseData&, Random& random, int i) {
    SampleParams params;
    if (i % 4 > 0) params.temperature = 0.5f + 0.25f * static_cast<float>(i);
    if (i % 3 == 0) params.top_k = 10 + i;
    if (i % 3 == 1) params.top_p = 0.5f;
    if (i % 2 == 1) params.repetition_penalty = 1.2f;
    if (i % 5 == 2) params.n_logprobs = i;
    return seeded(random, params);
  });
}

// Decode of several sequences for n_steps steps that need nothing from the host: embedding, a layer's attention, head,
// sampler, Advance.
void add_replay(Table& table, const std::string& what, int n_steps, const Geometry& geometry,
                const std::vector<int64_t>& contexts, const SampleParams& params, bool nan_row) {
  add(table, "Step", what, [=](CaseBuilder& builder) {
    const int64_t dim = 96;
    const int64_t vocab = builder.program().vocab = 211;
    builder.data().n_steps = n_steps;
    const int cache = builder.cache(geometry.n_kv_heads, geometry.head_dim, builder.group(geometry.window));
    const int64_t q_cols = int64_t{geometry.n_heads} * geometry.head_dim;
    const int64_t kv_cols = int64_t{geometry.n_kv_heads} * geometry.head_dim;
    QkvFinish finish = make_finish(builder, geometry, false, cache);
    const Rows residual = builder.slot("residual", dim, RowsKind::kResidual);
    const Rows attended = builder.slot("attended", q_cols);
    const Rows projected = builder.slot("projected", dim);
    const Rows gathered = builder.slot("gathered", dim, RowsKind::kResidual, RowCount::kOutputs);
    const Rows logits = builder.slot("logits", vocab, RowsKind::kLogits, RowCount::kOutputs);
    const MatrixRef table_matrix = builder.matrix({{Format::kBf16, vocab}}, dim);
    if (nan_row) {   // token 5's embedding is NaN, so the sequence that holds it samples nothing valid
      HostMatrix& matrix = builder.data().weights.matrices[0].parts[0];
      auto bytes = std::make_shared<std::vector<std::byte>>(matrix.codes, matrix.codes + vocab * dim * 2);
      std::fill_n(bytes->begin() + 5 * dim * 2, dim * 2, std::byte{0xff});
      matrix.storage = bytes;
      matrix.codes = bytes->data();
      builder.data().without_mins[0][0] = matrix;
    }
    const int n_parts = geometry.v_from_k ? 1 : 2;
    std::vector<PartSpec> qkv_parts = {{Format::kQ4_0, q_cols}, {Format::kQ4_0, kv_cols}};
    if (n_parts == 2) qkv_parts.push_back({Format::kQ8_0, kv_cols});
    builder.op(Embed{table_matrix, residual, 8});
    builder.op(
        Linear{.weight = builder.matrix(qkv_parts, dim), .x = residual, .norm = builder.norm(dim), .y = finish.qkv});
    builder.op(finish);
    builder.op(Attention{finish.qkv.slice(0, q_cols), attended, geometry.n_heads, cache, geometry.scale / 2, 0});
    builder.op(
        Linear{.weight = builder.matrix({{Format::kBf16, dim}}, q_cols), .x = attended, .norm = {}, .y = projected});
    builder.op(AddNorm{residual, residual, projected, builder.norm(dim), 0, 1});
    builder.op(GatherRows{residual, gathered});
    builder.op(Linear{.weight = builder.matrix({{Format::kQ8_0, vocab}}, dim), .x = gathered, .norm = builder.norm(dim),
                      .y = logits, .epilogue = Epilogue::kSoftcap, .other = {}, .softcap = 30});
    builder.op(Sample{logits});
    builder.op(Advance{});
    const auto prepare = [&](CaseSequence& sequence) {
      sequence.sampling = {params};
      sequence.sampling[0].seed = builder.random().bits();
      sequence.sampling[0].draw = static_cast<uint64_t>(sequence.context);
      if (uses_history(params)) {
        sequence.prompt = {1, 2, 3, 50};
        sequence.reply = {7, 7, 100};
      }
    };
    for (int64_t context : contexts) prepare(builder.sequence(context, 1));
    prepare(builder.neighbour(3, 1));
    prepare(builder.neighbour(64, 1));
    builder.data().holds_nan = nan_row;
    if (nan_row) builder.data().sequences[1].ids[0] = 5;
  });
}

// Layers and a head, as a model has them: what a backend keeps from op to op and from layer to layer.
struct Layers {
  std::vector<Geometry> geometries;  // of each
  Format format;
  int64_t dim, ffn_dim;
};
void add_layers(Table& table, const std::string& what, const Layers& layers, const std::vector<int64_t>& contexts) {
  add(table, "Step", what, [=](CaseBuilder& builder) {
    const Format format = layers.format;
    const int64_t dim = layers.dim, ffn_dim = layers.ffn_dim, vocab = builder.program().vocab = 200;
    const Rows residual = builder.slot("residual", dim, RowsKind::kResidual);
    builder.program().residual_slot = residual.slot;
    const Rows block = builder.slot("block", dim), hidden = builder.slot("hidden", ffn_dim);
    const Rows gathered = builder.slot("gathered", dim, RowsKind::kResidual, RowCount::kOutputs);
    const Rows logits = builder.slot("logits", vocab, RowsKind::kLogits, RowCount::kOutputs);
    builder.op(Embed{builder.matrix({{Format::kBf16, vocab}}, dim), residual, 8});
    for (const Geometry& geometry : layers.geometries) {
      const int cache = builder.cache(geometry.n_kv_heads, geometry.head_dim, builder.group(geometry.window));
      const QkvFinish finish = make_finish(builder, geometry, false, cache);
      const int64_t q_cols = int64_t{geometry.n_heads} * geometry.head_dim;
      const Rows attended = builder.slot("attended", q_cols);
      builder.op(Linear{.weight = builder.matrix({{format, finish.qkv.cols}}, dim), .x = residual, .norm = builder.norm(dim), .y = finish.qkv});
      builder.op(finish);
      builder.op(Attention{finish.qkv.slice(0, q_cols), attended, geometry.n_heads, cache, geometry.scale / 4, 0});
      builder.op(Linear{.weight = builder.matrix({{format, dim}}, q_cols), .x = attended, .norm = {}, .y = block});
      builder.op(AddNorm{residual, residual, block, builder.norm(dim), 0, 1});
      builder.op(Linear{.weight = builder.matrix({{format, ffn_dim}, {format, ffn_dim}}, dim), .x = residual, .norm = builder.norm(dim),
                        .y = hidden, .epilogue = Epilogue::kGatedGelu});
      builder.op(Linear{.weight = builder.matrix({{format, dim}}, ffn_dim), .x = hidden, .norm = {}, .y = block});
      builder.op(AddNorm{residual, residual, block, builder.norm(dim), 0, 0.75f});
    }
    builder.op(GatherRows{residual, gathered});
    builder.op(Linear{.weight = builder.matrix({{Format::kFp8, vocab}}, dim), .x = gathered, .norm = builder.norm(dim), .y = logits});
    for (int64_t context : contexts) builder.sequence(context, 1);
    builder.neighbour(90, 1);
    builder.neighbour(3, 1);
  });
}

// A chunk appended and attended in one step, at once with decode rows; then a sharing layer that reads the same cache with its own q.
void add_append(Table& table, const Geometry& geometry, const std::vector<Tokens>& batch) {
  add(table, "Step", fmt::format("append and attend, {}, {}", geometry.name, describe(batch)), [=](CaseBuilder& builder) {
    const int cache = builder.cache(geometry.n_kv_heads, geometry.head_dim, builder.group(geometry.window));
    const QkvFinish finish = make_finish(builder, geometry, false, cache);
    const int64_t q_cols = int64_t{geometry.n_heads} * geometry.head_dim;
    const QkvFinish sharing = make_finish(builder, geometry, true, cache);
    const Rows first = builder.slot("attended", q_cols), second = builder.slot("attended by the sharing layer", q_cols);
    const float scale = geometry.normed ? 1 / std::sqrt(static_cast<float>(geometry.head_dim)) : geometry.scale;
    builder.op(finish);
    builder.op(Attention{finish.qkv.slice(0, q_cols), first, geometry.n_heads, cache, scale, 0});
    builder.op(sharing);
    builder.op(Attention{sharing.qkv, second, geometry.n_heads, cache, scale, 0});
    add_sequences(builder, batch);
  });
}

// A head has fewer rows than the step has tokens: what a backend keeps for its kernel must not depend on which of the two it looks at.
// (Columns for which a kernel for many rows adds up partial sums.)
void add_late_head(Table& table, int n_tokens) {
  add(table, "Step", fmt::format("a head of one row after {} tokens", n_tokens), [=](CaseBuilder& builder) {
    const int64_t cols = 2816, vocab = builder.program().vocab = 300;
    const Rows residual = builder.input("residual", cols, RowsKind::kResidual);
    const Rows gathered = builder.slot("gathered", cols, RowsKind::kResidual, RowCount::kOutputs);
    const Rows logits = builder.slot("logits", vocab, RowsKind::kLogits, RowCount::kOutputs);
    builder.op(GatherRows{residual, gathered});
    builder.op(Linear{.weight = builder.matrix({{Format::kFp8, vocab}}, cols), .x = gathered, .norm = builder.norm(cols), .y = logits});
    builder.sequence(0, n_tokens);
  });
}

void add_steps(Table& table) {
  for (int n_tokens : {3, 7, 20, 70}) add_late_head(table, n_tokens);
  const std::vector<Geometry> unlike = {{"sliding", 4, 2, 256, 128, 1e4, 256, true, false, 1}, {"global", 4, 1, 512, 0, 1e6, 128, true, true, 1}};
  add_layers(table, "two layers, fp4, one row", {unlike, Format::kFp4G128, 256, 512}, {200});
  add_layers(table, "two layers, fp4, four rows", {unlike, Format::kFp4G128, 256, 2304}, {200, 70, 0, 127});
  add_layers(table, "two layers, q4_0, six rows", {unlike, Format::kQ4_0, 256, 2304}, {300, 64, 63, 5, 191, 128});
  // As wide as a large model: a GPU's blocks have several units of each matrix, all of their warps multiply (15 for qkv and gate|up, 16 for
  // the others), and what a layer adds to the residual is added in the next product's launch. One row and its neighbours take different ways.
  const Layers wide = {{{"wide", 16, 2, 256, 128, 1e4, 256, true, false, 1}}, Format::kFp4G128, 3840, 4096};
  add_layers(table, "a layer of 3840, fp4, one row", wide, {200});
  add_layers(table, "a layer of 3840, fp4, three rows", wide, {200, 263, 326});
  add_replay(table, "greedy, 3 runs with one input", 3, kGeometries[8], {0, 62, 63, 200}, {.n_logprobs = 2}, false);
  add_replay(
      table, "sampled with penalties, 4 runs with one input", 4, kGeometries[8], {5, 126, 127},
      {.temperature = 1.5f, .top_k = 50, .repetition_penalty = 1.5f, .presence_penalty = 1, .frequency_penalty = 1},
      false);
  add_replay(table, "ring, 3 runs with one input", 3, kGeometries[4], {511, 510, 1300}, {.temperature = 1}, false);
  add_replay(table, "keys and values from one vector, 3 runs with one input", 3, kGeometries[1], {62, 0},
             {.temperature = 1}, false);
  add_replay(table, "a row of NaN beside good ones, 2 runs with one input", 2, kGeometries[8], {10, 11, 12},
             {.temperature = 1}, true);

  for (const Geometry& geometry : kGeometries) add_append(table, geometry, {{0, 5}, {61, 4}, {130, 1}});
  // Keys that can be made from values, of positions before: one row, several, a prompt, one of more than 64 rows, units of two pages.
  for (const Geometry& geometry : kGeometries) {
    if (!geometry.v_from_k) continue;
    add_append(table, geometry, {{255, 1}});
    add_append(table, geometry, {{0, 66}});
    add_append(table, geometry, {{513, 2}, {64, 1}, {0, 3}});
    add_append(table, geometry, {{129, 33}, {0, 20}});
    add_append(table, geometry, {{200, 70}});
  }
  add_append(table, kGeometries[1], {{8500, 1}});

  // Forks: a sequence goes on from another's pages; only the last, partly filled one is copied.
  for (int window : {0, 128})
    add(table, "CopyPages", window == 0 ? "forks, global" : "forks, ring", [window](CaseBuilder& builder) {
      const Geometry& geometry = kGeometries[8];
      const int group = builder.group(window), other_group = builder.group(0);
      const int cache = builder.cache(geometry.n_kv_heads, geometry.head_dim, group);
      builder.cache(2, 32, group);          // moves with its group
      builder.cache(1, 48, other_group);    // copied by its own group's copies
      const QkvFinish finish = make_finish(builder, geometry, false, cache);
      const int64_t q_cols = int64_t{geometry.n_heads} * geometry.head_dim;
      const Rows attended = builder.slot("attended", q_cols);
      builder.op(CopyPages{});
      builder.op(finish);
      builder.op(Attention{finish.qkv.slice(0, q_cols), attended, geometry.n_heads, cache, geometry.scale, 0});
      builder.sequence(300, 1);
      builder.sequence(300, 1).fork_of = 0;
      builder.sequence(77, 1);
      builder.sequence(300, 1).fork_of = 0;
      builder.sequence(77, 1).fork_of = 2;
      builder.neighbour(30, 1);
      builder.neighbour(0, 1);
    });
}

}  // namespace

std::vector<OpCase> op_cases() {
  Table table;
  add_embeds(table);
  add_linears(table);
  add_finishes(table);
  add_attentions(table);
  add_row_ops(table);
  add_routes(table);
  add_experts(table);
  add_samples(table);
  add_steps(table);
  return table;
}

}  // namespace beryl
