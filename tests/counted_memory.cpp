#include "counted_memory.h"

#include <cstdlib>
#include <cstring>
#include <new>

std::atomic<size_t> live_bytes{0}, peak_bytes{0};

namespace {

constexpr size_t kPrefixBytes = 16;  // before each block, for its size; keeps malloc's alignment

void* allocate(size_t bytes) {
  auto* block = static_cast<char*>(std::malloc(bytes + kPrefixBytes));
  if (block == nullptr) throw std::bad_alloc();
  std::memcpy(block, &bytes, sizeof(bytes));
  const size_t live = live_bytes += bytes;
  if (live > peak_bytes) peak_bytes = live;
  return block + kPrefixBytes;
}

void release(void* pointer) {
  if (pointer == nullptr) return;
  char* block = static_cast<char*>(pointer) - kPrefixBytes;
  size_t bytes = 0;
  std::memcpy(&bytes, block, sizeof(bytes));
  live_bytes -= bytes;
  std::free(block);
}

}  // namespace

void* operator new(size_t bytes) { return allocate(bytes); }
void* operator new[](size_t bytes) { return allocate(bytes); }
void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return allocate(bytes); }
void* operator new[](size_t bytes, const std::nothrow_t&) noexcept { return allocate(bytes); }
void operator delete(void* pointer, const std::nothrow_t&) noexcept { release(pointer); }
void operator delete[](void* pointer, const std::nothrow_t&) noexcept { release(pointer); }
void operator delete(void* pointer) noexcept { release(pointer); }
void operator delete[](void* pointer) noexcept { release(pointer); }
void operator delete(void* pointer, size_t) noexcept { release(pointer); }
void operator delete[](void* pointer, size_t) noexcept { release(pointer); }
