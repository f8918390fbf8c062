// operator new and delete that count, for programs that watch how much memory hostile input takes.
#pragma once

#include <atomic>
#include <cstddef>

// Bytes that are live, and the most since the program set peak_bytes.
extern std::atomic<size_t> live_bytes, peak_bytes;
