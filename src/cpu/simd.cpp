#include "cpu/simd.h"

#include <algorithm>
#include <bit>
#include <cstdlib>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <hwy/highway.h>

#include "base/error.h"

namespace beryl {

namespace {

struct Target {
  const char* name;
  int64_t bit;
};
constexpr Target kTargets[] = {{"avx512", HWY_AVX3}, {"avx2", HWY_AVX2}, {"sse4", HWY_SSE4}, {"neon", HWY_NEON}};

void use(int64_t targets) {
  hwy::SetSupportedTargetsForTest(targets);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

// Of the processor, whatever was chosen before.
int64_t processor_targets() {
  static const int64_t targets = hwy::SupportedTargets() & (HWY_TARGETS);
  return targets;
}

}  // namespace

std::vector<std::string> cpu_targets() {
  std::vector<std::string> names;
  for (const Target& target : kTargets)
    if ((processor_targets() & target.bit) != 0) names.emplace_back(target.name);
  return names;
}

std::string cpu_target() {
  processor_targets();
  const int64_t supported = hwy::SupportedTargets() & (HWY_TARGETS);
  for (const Target& target : kTargets)
    if ((supported & target.bit) != 0) return target.name;
  return "none";
}

void choose_cpu_target(const std::string& name) {
  processor_targets();
  if (name.empty()) return use(0);
  for (const Target& target : kTargets)
    if (name == target.name && (processor_targets() & target.bit) != 0) return use(target.bit);
  throw Error(ErrorCode::kBadInput,
              fmt::format("CPU target '{}': this processor has {}", name, fmt::join(cpu_targets(), ", ")));
}

void choose_cpu_target_from_environment() {
  if (cpu_targets().empty())
    throw Error(ErrorCode::kUnsupported, "the CPU backend needs a processor with SSE4.2, AVX2, AVX-512 or NEON");
  if (const char* name = std::getenv("BERYL_CPU_TARGET"); name != nullptr && *name != '\0') choose_cpu_target(name);
}

}  // namespace beryl
