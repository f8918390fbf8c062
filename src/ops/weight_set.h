// All weights of one model in host memory, in the order in which a program refers to them.
//
// A backend imports the whole set once. Ops hold indices into it, so a program can be built, printed and costed
// before any weight is moved.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "weights/host_matrix.h"

namespace beryl {

// One matrix that a Linear, Embed or Experts op reads. Its parts keep the formats of the file (a quantised file may
// give q, k and v three different ones) and are never copied just to be joined:
//   stacked  y = [part 0 rows | part 1 rows | ...]            q|k|v
//   gated    y = act(part 0 · x) * (part 1 · x), equal rows     gate, up (see Epilogue)
// Every part has the same cols and the same stack (experts).
struct WeightMatrix {
  std::string name;                 // "layer 3 qkv"
  std::vector<HostMatrix> parts;

  int64_t rows() const {            // of all parts
    int64_t total = 0;
    for (const HostMatrix& part : parts) total += part.rows;
    return total;
  }
  int64_t cols() const { return parts.front().cols; }
  int64_t stack() const { return parts.front().stack; }
  int64_t bytes() const {           // all experts
    int64_t total = 0;
    for (const HostMatrix& part : parts) total += part.bytes();
    return total;
  }
};

struct WeightVector {
  std::string name;
  std::vector<float> values;        // folded: what the formula multiplies by (Gemma 3's 1 + w is done)
};

struct WeightSet {
  std::vector<WeightMatrix> matrices;
  std::vector<WeightVector> vectors;
};

}  // namespace beryl
