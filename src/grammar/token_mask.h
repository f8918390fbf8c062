// The ids that the library's matcher allows next, as the bits of a mask.
#pragma once

#ifdef BERYL_HAS_XGRAMMAR
#include <algorithm>
#include <cstdint>
#include <span>

#include <xgrammar/xgrammar.h>

namespace beryl {

// mask: [(n_ids + 31) / 32], bit id % 32 of word id / 32; all of it is written.
inline void fill_token_mask(xgrammar::GrammarMatcher& matcher, std::span<uint32_t> mask, size_t n_ids) {
  std::fill(mask.begin(), mask.end(), 0u);
  auto n_words = static_cast<int64_t>(mask.size());
  DLTensor tensor = {};
  tensor.data = mask.data();
  tensor.device = {kDLCPU, 0};
  tensor.ndim = 1;
  tensor.dtype = {kDLInt, 32, 1};
  tensor.shape = &n_words;
  matcher.FillNextTokenBitmask(&tensor);
  // Beyond the last id the library leaves bits.
  if (n_ids % 32 != 0) mask.back() &= (1u << (n_ids % 32)) - 1;
}

}  // namespace beryl
#endif
