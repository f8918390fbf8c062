// A Norm (ops/op.h) with its weight looked up.
#pragma once

namespace beryl {

struct RowNorm {
  bool present = false;           // false: no norm at all
  const float* weight = nullptr;  // [columns]; null: a norm without weight
  float eps = 0;
};

}  // namespace beryl
