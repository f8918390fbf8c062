// What the system says of memory: how much there is to take, and how much this process has had.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/error.h"

namespace beryl {

// Bytes that this process can still take without others being pushed out, swap included, within its limit of address space (ulimit -v);
// INT64_MAX where the system does not tell. Limits of control groups are not looked at.
int64_t available_memory_bytes();

// The address space that this process has taken.
int64_t address_space_bytes();

// The most that this process has had resident.
int64_t peak_memory_bytes();

// "1.2 GB": decimal units, three digits.
std::string human_bytes(int64_t bytes);

// kOutOfMemory, for an allocation that was refused: "out of memory: 3.4 GB for LABEL, 1.2 GB are free".
Error out_of_memory(std::string_view label, int64_t bytes);

}  // namespace beryl
