// What the system says of memory: how much there is to take, and how much this process has had.
#pragma once

#include <cstdint>

namespace beryl {

// Bytes that programs can still take without others being pushed out, swap included; INT64_MAX where the system does not tell. Limits of
// control groups are not looked at.
int64_t available_memory_bytes();

// The most that this process has had resident.
int64_t peak_memory_bytes();

}  // namespace beryl
