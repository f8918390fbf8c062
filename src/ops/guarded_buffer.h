// Host memory with guard bytes behind its end, so that a test sees a write past it. Zeroed lazily by the system.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "base/system_memory.h"

namespace beryl {

enum class PageSize : uint8_t { kDefault, kHuge };   // kHuge: where the system grants them; for what is read in long streams

class GuardedBuffer {
 public:
  static constexpr size_t kGuardBytes = 64;
  static constexpr unsigned char kGuardValue = 0xA5;

  GuardedBuffer() = default;
  GuardedBuffer(std::string label, size_t bytes, PageSize page_size = PageSize::kDefault)
      : label_(std::move(label)), bytes_(bytes) {
    block_ = std::calloc(1, bytes + kGuardBytes + kAlignment);
    if (block_ == nullptr) throw out_of_memory(label_, static_cast<int64_t>(bytes));
    if (page_size == PageSize::kHuge) advise_huge_pages(block_, bytes);
    const size_t misaligned = reinterpret_cast<size_t>(block_) % kAlignment;
    data_ = static_cast<unsigned char*>(block_) + (misaligned == 0 ? 0 : kAlignment - misaligned);
    std::memset(data_ + bytes_, kGuardValue, kGuardBytes);
  }
  ~GuardedBuffer() { std::free(block_); }
  GuardedBuffer(GuardedBuffer&& other) noexcept { swap(other); }
  GuardedBuffer& operator=(GuardedBuffer&& other) noexcept {
    swap(other);
    return *this;
  }

  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  const std::string& label() const { return label_; }
  size_t bytes() const { return bytes_; }
  bool damaged() const {
    for (size_t i = 0; i < kGuardBytes && data_ != nullptr; ++i)
      if (data_[bytes_ + i] != kGuardValue) return true;
    return false;
  }

 private:
  static constexpr size_t kAlignment = 64;
  // Of the whole huge pages in a block. A request: where it is not granted, small pages do too.
  static void advise_huge_pages(void* block, size_t bytes) {
    constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
    const auto begin = reinterpret_cast<uintptr_t>(block);
    const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage, last = (begin + bytes) / kHugePage * kHugePage;
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  }
  void swap(GuardedBuffer& other) noexcept {
    std::swap(label_, other.label_);
    std::swap(block_, other.block_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }
  std::string label_;
  void* block_ = nullptr;
  unsigned char* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace beryl
