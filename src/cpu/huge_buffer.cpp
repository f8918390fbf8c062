#include "cpu/huge_buffer.h"

#include <sys/mman.h>

#include "base/system_memory.h"

namespace beryl {

namespace {

constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

HugeBuffer::HugeBuffer(const char* label, size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  mapped_bytes_ = bytes + kHugePage;
  mapping_ = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    throw out_of_memory(label, static_cast<int64_t>(bytes));
  }
  const size_t misaligned = reinterpret_cast<size_t>(mapping_) % kHugePage;
  data_ = static_cast<uint8_t*>(mapping_) + (misaligned == 0 ? 0 : kHugePage - misaligned);
  madvise(data_, bytes, MADV_HUGEPAGE);  // small pages do too
}

HugeBuffer::~HugeBuffer() {
  if (mapping_ != nullptr) munmap(mapping_, mapped_bytes_);
}

}  // namespace beryl
