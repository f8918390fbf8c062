#include "base/system_memory.h"

#include <sys/resource.h>

#include <cstdlib>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>

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
  return available ? *available + read_bytes("/proc/meminfo", "SwapFree").value_or(0) : INT64_MAX;
}

int64_t peak_memory_bytes() {
  if (const std::optional<int64_t> peak = read_bytes("/proc/self/status", "VmHWM")) return *peak;
  rusage usage = {};                      // begins with what the parent had
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

}  // namespace beryl
