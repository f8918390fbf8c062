#include "base/system_memory.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>

#include <fmt/format.h>

namespace beryl {

namespace {

// Of a line "NAME:   123 kB" in a file of /proc.
std::optional<int64_t> read_bytes(const char* path, std::string_view name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(name) && line.size() > name.size() && line[name.size()] == ':')
      return std::atoll(line.c_str() + name.size() + 1) * 1024;
  return std::nullopt;
}

}  // namespace

int64_t available_memory_bytes() {
  const std::optional<int64_t> available = read_bytes("/proc/meminfo", "MemAvailable");
  int64_t bytes = available ? *available + read_bytes("/proc/meminfo", "SwapFree").value_or(0) : INT64_MAX;
  rlimit limit = {};
  if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    bytes = std::min(bytes, std::max<int64_t>(0, static_cast<int64_t>(limit.rlim_cur) - address_space_bytes()));
  return bytes;
}

int64_t address_space_bytes() { return read_bytes("/proc/self/status", "VmSize").value_or(0); }

int64_t peak_memory_bytes() {
  if (const std::optional<int64_t> peak = read_bytes("/proc/self/status", "VmHWM")) return *peak;
  rusage usage = {};                      // begins with what the parent had
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

std::string human_bytes(int64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "kB", "MB", "GB", "TB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 999.5 && unit + 1 < std::size(kUnits)) {
    value /= 1000;
    ++unit;
  }
  if (unit == 0) return fmt::format("{} B", bytes);
  return fmt::format("{:.{}f} {}", value, value < 9.995 ? 2 : value < 99.95 ? 1 : 0, kUnits[unit]);
}

Error out_of_memory(std::string_view label, int64_t bytes) {
  return {ErrorCode::kOutOfMemory,
          fmt::format("out of memory: {} for {}, {} are free", human_bytes(bytes), label, human_bytes(available_memory_bytes()))};
}

}  // namespace beryl
