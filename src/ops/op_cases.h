// One table of op cases, described once: the tests of every backend and `beryl verify` run it.
//
// A case is a small program with random weights, the sequences that enter it and what their caches hold. run_case runs
// it on a backend and on the reference, op by op from equal inputs, and compares every value that an op must write
// with the double result; the bound on the error comes from the data (op_case_bounds.h). Around that:
//   - cache slots outside the live band, rows past the step's and outputs not yet written hold NaN before each run;
//   - what an op must not write keeps its bits; guard bytes behind the buffers are intact;
//   - allocations() is plan(); the list run at once equals the ops run one by one, bit for bit;
//   - a row's bits do not depend on its neighbours, its page order, the allocation or the chunk it came in.
#pragma once

#include <climits>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ops/backend.h"

namespace beryl {

// Unit roundoffs of a backend: f32 2^-24, bf16 2^-8, E4M3 2^-4. Integers that hold a row of x relative to its largest
// value have a fixed step instead.
struct Tolerance {
  double activation_roundoff = 0x1p-24;   // kActivation rows when stored, and operands of products
  double cache_roundoff = 0x1p-24;        // keys and values when stored
  double accumulate_roundoff = 0x1p-24;   // sums, functions, kResidual and kLogits rows
  double operand_fixed_point = 0;         // half a step of x in fixed point, relative to the row's largest |x|
  double integer_step = 0;                // half a step of x in products with integer codes (Linear and Experts), relative to
                                          // the largest |x| of its 32 columns
  double bf16_operand_roundoff = 0;       // of x in products with BF16 weights (Linear and Experts)
  double weight_roundoff = 0;             // f32 and f16 matrices that the backend keeps in a narrower type
  // Linear with more rows than this rounds x and weights to f16, where weights are BF16 x to bf16. Attention rounds q and
  // the softmax's weights by prompt_roundoff.
  int exact_rows = INT_MAX;
  double prompt_roundoff = 0;
};

// One sequence of a step: its tokens come in at positions context, context + 1, ...
struct CaseSequence {
  uint64_t key = 0;                       // what its cache holds is a function of (key, cache, part, position)
  int64_t context = 0;
  int n_tokens = 1;
  int fork_of = -1;                       // index into CaseData::sequences: same context, pages shared, the last copied
  std::vector<int32_t> ids;               // [n_tokens]
  std::vector<int> outputs;               // tokens that leave through the head, ascending
  std::vector<SampleParams> sampling;     // [outputs], or empty
  std::vector<int32_t> prompt, reply;     // set_history
  std::vector<std::vector<float>> rows;   // [slots][n_tokens or outputs][cols] before the step; empty: NaN
};

struct CaseData {
  WeightSet weights;
  std::vector<std::vector<HostMatrix>> without_mins;   // [matrices][parts], see RandomMatrix
  Program program;                        // points to weights
  std::vector<CaseSequence> sequences;    // the rows of the step, in order
  std::vector<CaseSequence> neighbours;   // more of the same kind, to stand beside them
  int slack_entries = 0;                  // page table entries beyond what the step needs
  bool holds_nan = false;                 // a row of the case is NaN by design, and what follows from it
  int n_steps = 1;                        // runs; after the first, what Advance left is the input
  std::deque<std::vector<uint32_t>> masks;   // what SampleParams::allowed points to
};

struct OpCase {
  std::string name;                       // "Linear/q4_k/257x512 9 tokens"
  std::string op;                         // "Linear"; "Step" for a chain of ops
  std::function<std::unique_ptr<CaseData>()> build;
};

std::vector<OpCase> op_cases();

struct CaseOptions {
  Tolerance tolerance;
  CacheType cache_type = CacheType::kDefault;
  // Up to how many rows a step's size must not change a row's bits (0: not checked).
  int independent_rows = INT_MAX;
};

// What a backend of this name promises: its roundoffs with a cache of this type, and its independence of neighbours.
CaseOptions options_for(std::string_view backend_name, CacheType cache_type = CacheType::kDefault);

struct CaseResult {
  bool passed = false;
  double worst = 0;                       // largest error relative to its bound; at most 1 when passed
  int64_t n_values = 0;                   // compared with the reference
  std::string message;                    // what is wrong: op, place, values; empty when passed
};

CaseResult run_case(const OpCase& op_case, Backend& backend, Backend& reference, const CaseOptions& options = {});

// Everything that the case's list writes in one run on this backend, as bits: for comparing two backends exactly.
std::vector<uint32_t> output_bits(const OpCase& op_case, Backend& backend, CacheType cache_type = CacheType::kDefault);

}  // namespace beryl
