// What an op must write, in double and by another way than the reference, and how far a backend may be from it.
//
// Model of the error, for unit roundoffs u of a Tolerance (docs/numerics.md). Roundings are as good as independent of
// each other, so n of them add up like a random walk: 6 times the root of their squares is never seen, and their plain
// sum cannot be exceeded (Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019).
//   one product of a sum   the operand's rounding (u_activation after a norm or from the residual stream; a step of
//                          fixed point) and a few u_accumulate: independent for each product
//   the sum of n           n roundings of partial sums, as large as the result or the root of the squares of the terms
//   a common factor        (a norm's 1 / root, a softmax's 1 / total) relative to the result
//   stored value           u of its place
// Errors are carried through functions by their Lipschitz constants.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/op_cases.h"

namespace beryl {

// Cache contents of all groups as host floats, [cache][part][n_pages][kPageTokens][n_kv_heads · head_dim].
class CacheImage {
 public:
  CacheImage(const Program& program, const StepLimits& limits);   // all NaN
  float* row(int cache, CachePart part, int page, int row);
  const float* row(int cache, CachePart part, int page, int row) const;
  int64_t row_values(int cache) const { return row_values_[static_cast<size_t>(cache)]; }
  int n_pages(int cache) const { return n_pages_[static_cast<size_t>(cache)]; }
  void copy_page(int cache, int from, int to);

 private:
  std::vector<int64_t> row_values_;
  std::vector<int> n_pages_;
  std::vector<std::vector<float>> pools_;   // [2 · cache + part]
};

// Page of a position, through the table of its group.
int page_of(const Program& program, const StepLimits& limits, const StepInput& input, int cache, int sequence,
            int64_t position);

// How many times one rounding's error n of them come to, in any order of summing.
double growth(int64_t n);

struct ExpectedRows {
  Rows rows;
  std::vector<double> values;             // [n live rows][rows.cols]
  std::vector<double> bounds;
};

struct ExpectedCacheRow {
  int cache = 0;
  CachePart part = CachePart::kKeys;
  int page = 0;
  int row = 0;
  std::vector<double> values;
  std::vector<double> bounds;
};

// Route's choice may differ from the reference's where logits are closer than their errors, but not among equals.
struct ExpectedRoutes {
  Rows rows;
  int n_experts = 0;
  int top_k = 0;
  std::vector<double> logits, errors;     // [n_tokens][n_experts]
  std::vector<double> scales;             // [n_experts]
  double relative_bound = 0;              // of g, beyond what the logits' errors do to it
};

struct Expected {
  std::vector<ExpectedRows> rows;
  std::vector<ExpectedCacheRow> cache;
  std::vector<ExpectedRoutes> routes;
};

// rows: [slots][live rows][cols of the slot] before the op. Sample, Advance and CopyPages write nothing that is
// expected here. The bounds hold against the exact result; comparing with the reference adds nothing to them.
Expected expect(const CaseData& data, const Op& op, const StepLimits& limits, const StepInput& input,
                const std::vector<std::vector<float>>& rows, const CacheImage& cache, const Tolerance& tolerance);

}  // namespace beryl
