// A step as data: the ops in order, and the activations, caches and rope tables that they name.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ops/op.h"
#include "ops/weight_set.h"

namespace beryl {

inline constexpr int kPageTokens = 64;   // positions a cache page holds

// What a buffer of activations is for; a backend may choose the element type by it (reference: double for all; CPU and
// CUDA: f32 for all).
enum class RowsKind : uint8_t { kResidual, kActivation, kLogits };
enum class RowCount : uint8_t { kTokens, kOutputs };

struct RowsDecl {
  std::string name;                 // "residual"
  int64_t cols = 0;
  RowsKind kind = RowsKind::kActivation;
  RowCount count = RowCount::kTokens;
};

// Caches of one group share page tables: page p of a sequence means page p in each of them.
struct PageGroup {
  int window = 0;                   // 0: global, the table is as long as the context; else the table wraps
};

// K and V of one layer: [n_pages][kPageTokens][n_kv_heads][head_dim] each.
struct CacheDecl {
  std::string name;                 // "layer 3"
  int n_kv_heads = 0;
  int head_dim = 0;
  int group = 0;                    // index into Program::groups
};

// Pair j of a head is (j, j + head_dim / 2), turned by position · frequencies[j]; 0: not turned.
struct Rope {
  std::vector<double> frequencies;  // [head_dim / 2]
};

struct Program {
  const WeightSet* weights = nullptr;   // outlives the program
  std::vector<RowsDecl> rows;
  std::vector<PageGroup> groups;
  std::vector<CacheDecl> caches;
  std::vector<Rope> ropes;
  std::vector<Op> ops;
  std::vector<int> layer_of_op;     // [ops]: the layer an op belongs to; -1 before the first, n_layers after the last
  int64_t vocab = 0;
  int n_layers = 0;
  int residual_slot = -1;           // the residual stream, what a trace reads after each layer

  const WeightMatrix& matrix(MatrixRef ref) const { return weights->matrices[static_cast<size_t>(ref.index)]; }
  const WeightVector& vector(VectorRef ref) const { return weights->vectors[static_cast<size_t>(ref.index)]; }
};

// Aborts (BERYL_CHECK) when an op's shapes disagree; so the loops that run it have nothing left to check.
void check_shapes(const Program& program);

// Whether the rows of a slot only carry values from one op to a later one: after a run of the whole list a backend need not
// have them in memory. The residual stream and logits never do.
bool only_passes(const Program& program, int slot);

// A cache whose keys can be made from its values: key = value · weight, column by column, but for the pairs of columns that rope turns.
// Gemma 4's layers with V from K: both are norms of one vector, and V's has no weight.
struct KeysFromValues {
  VectorRef weight;                 // [head_dim]
  std::vector<bool> is_turned;      // [head_dim]: columns that the keys have by themselves
};
std::optional<KeysFromValues> keys_from_values(const Program& program, int cache);

// The ops from which on a step's other rows are of no use: behind the last one that fills a cache (in layers that share one nothing
// does) only rows that leave through GatherRows are read. An executor may drop the others there.
struct OutputPart {
  size_t begin = 0;                 // index of the first of these ops
  std::vector<int> slots;           // rows of tokens made before it that they read
};
std::optional<OutputPart> output_part(const Program& program);

// The slot that the program samples from. Requires a Sample op.
int logits_slot(const Program& program);

// How large one run is: what the costs below depend on.
struct StepShape {
  int64_t n_tokens = 1;
  int64_t n_outputs = 1;
  int64_t context = 0;              // positions already in the cache of each token's sequence
};

// Must-move bytes of device memory: weights once, live cache once a sequence (n_tokens sequences when decoding), with
// position_bytes(cache) a position (Executor). Activations stay in on-chip caches and do not count.
int64_t bytes_moved(const Op& op, const Program& program, const StepShape& shape, const std::function<int64_t(int)>& position_bytes);
int64_t flops(const Op& op, const Program& program, const StepShape& shape);

// The op list as text, a line an op: `beryl inspect --step`.
std::string to_text(const Program& program);

}  // namespace beryl
