// Zeroed memory for what is read in long streams, 64-byte aligned and in huge pages where the system grants them: reading
// weights from 4 KB pages was measured at two thirds of the speed (docs/performance.md).
#pragma once

#include <cstddef>
#include <cstdint>

namespace beryl {

class HugeBuffer {
 public:
  HugeBuffer() = default;
  // Throws Error(kOutOfMemory); `label` says what for. Pages are taken when they are first written.
  HugeBuffer(const char* label, size_t bytes);
  ~HugeBuffer();
  HugeBuffer(const HugeBuffer&) = delete;
  HugeBuffer& operator=(const HugeBuffer&) = delete;

  uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  void* mapping_ = nullptr;
  size_t mapped_bytes_ = 0;
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace beryl
