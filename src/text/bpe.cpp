// The hash table behind a merge list: linear probing over 16-byte slots, so a lookup is mostly one cache line.
#include "text/bpe.h"

#include <bit>

#include "base/error.h"

namespace beryl {

void MergeTable::reserve(size_t n_merges) {
  slots_.assign(std::bit_ceil(n_merges * 2 + 2), Slot{});
  mask_ = slots_.size() - 1;
  size_ = 0;
}

size_t MergeTable::home(int32_t left, int32_t right) const {
  // Fibonacci hashing of the pair: the high half of the product depends on every bit of both ids.
  const uint64_t key = uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
  const uint64_t product = (key ^ (key >> 29)) * 0x9E3779B97F4A7C15u;
  return (product ^ (product >> 32)) & mask_;
}

void MergeTable::add(int32_t left, int32_t right, uint32_t rank, int32_t result) {
  BERYL_CHECK(left >= 0 && right >= 0 && (size_ + 1) * 2 <= slots_.size(), "merge table: reserve before add");
  for (size_t index = home(left, right);; index = (index + 1) & mask_) {
    Slot& slot = slots_[index];
    if (slot.left < 0) {
      slot = {left, right, rank, result};
      ++size_;
      return;
    }
    if (slot.left == left && slot.right == right) return;
  }
}

std::optional<Merge> MergeTable::find(int32_t left, int32_t right) const {
  if (left < 0 || right < 0 || slots_.empty()) return std::nullopt;
  for (size_t index = home(left, right);; index = (index + 1) & mask_) {
    const Slot& slot = slots_[index];
    if (slot.left < 0) return std::nullopt;
    if (slot.left == left && slot.right == right) return Merge{slot.rank, slot.result};
  }
}

}  // namespace beryl
