#include "cpu/simd.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <iterator>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <hwy/highway.h>

#include "base/error.h"
#include "cpu/bf16_dot.h"
#include "cpu/fp8_dot.h"
#include "cpu/integer_dot.h"
#include "weights/quote.h"

namespace beryl {

namespace {

struct Target {
  const char* name;
  int64_t bit;                      // Highway's
  bool (*has_more)();               // of what the integer and bf16 kernels need; null: nothing
  const IntegerKernels* integer;
  const Bf16Kernels* bf16;
  DotFp8 fp8 = nullptr;
};
#if defined(__x86_64__)
bool has_vnni() { return __builtin_cpu_supports("avx512vnni") != 0; }
// A processor whose instruction rounds in another way than is defined takes the next target.
bool has_bf16() {
  static const bool has = has_vnni() && __builtin_cpu_supports("avx512vbmi") != 0 && __builtin_cpu_supports("avx512bf16") != 0 &&
                          bf16_instruction_adds_as_defined();
  return has;
}
constexpr Target kTargets[] = {{"avx512bf16", HWY_AVX3, has_bf16, &kAvx512VbmiIntegerKernels, &kAvx512Bf16Kernels, dot_fp8_avx512vbmi},
                               {"avx512vnni", HWY_AVX3, has_vnni, &kAvx512VnniIntegerKernels, &kAvx512Bf16InF32Kernels},
                               {"avx512", HWY_AVX3, nullptr, &kAvx512IntegerKernels, &kAvx512Bf16InF32Kernels},
                               {"avx2", HWY_AVX2, nullptr, &kAvx2IntegerKernels, &kAvx2Bf16Kernels},
                               {"sse4", HWY_SSE4, nullptr, &kPortableIntegerKernels, &kPortableBf16Kernels}};
#else
bool has_dot_product() { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }
constexpr Target kTargets[] = {{"neondot", HWY_NEON, has_dot_product, &kNeonDotIntegerKernels, &kPortableBf16Kernels},
                               {"neon", HWY_NEON, nullptr, &kPortableIntegerKernels, &kPortableBf16Kernels}};
#endif

const Target* chosen = nullptr;     // null: the best

void use(int64_t targets) {
  hwy::SetSupportedTargetsForTest(targets);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

// Of the processor, whatever was chosen before.
int64_t processor_targets() {
  static const int64_t targets = hwy::SupportedTargets() & (HWY_TARGETS);
  return targets;
}

bool has(const Target& target) {
  return (processor_targets() & target.bit) != 0 && (target.has_more == nullptr || target.has_more());
}

const Target* current() {
  if (chosen != nullptr) return chosen;
  static const Target* const best = [] {
    const auto* const found = std::find_if(std::begin(kTargets), std::end(kTargets), has);
    return found == std::end(kTargets) ? nullptr : found;
  }();
  return best;
}

}  // namespace

std::vector<std::string> cpu_targets() {
  std::vector<std::string> names;
  for (const Target& target : kTargets)
    if (has(target)) names.emplace_back(target.name);
  return names;
}

std::string cpu_target() {
  const Target* const target = current();
  return target == nullptr ? "none" : target->name;
}

const IntegerKernels& integer_kernels() {
  const Target* const target = current();
  return target == nullptr ? kPortableIntegerKernels : *target->integer;
}

const Bf16Kernels& bf16_kernels() {
  const Target* const target = current();
  return target == nullptr ? kPortableBf16Kernels : *target->bf16;
}

DotFp8 fp8_kernel() {
  const Target* const target = current();
  return target == nullptr ? nullptr : target->fp8;
}

void choose_cpu_target(const std::string& name) {
  processor_targets();
  if (name.empty()) {
    chosen = nullptr;
    return use(0);
  }
  for (const Target& target : kTargets)
    if (name == target.name && has(target)) {
      chosen = &target;
      return use(target.bit);
    }
  throw Error(ErrorCode::kBadInput,
              fmt::format("CPU target {}: this processor has {}", quote(name), fmt::join(cpu_targets(), ", ")));
}

void check_cpu_target_in_environment() {
  const char* const name = std::getenv("BERYL_CPU_TARGET");
  if (name == nullptr || *name == '\0') return;
  const std::vector<std::string> names = cpu_targets();
  if (std::find(names.begin(), names.end(), name) == names.end())
    throw Error(ErrorCode::kBadInput, fmt::format("BERYL_CPU_TARGET is {}, one of {} was expected: this processor has no other",
                                                  quote(name), fmt::join(names, ", ")));
}

void choose_cpu_target_from_environment() {
  if (cpu_targets().empty())
    throw Error(ErrorCode::kUnsupported, "the CPU backend needs a processor with SSE4.2, AVX2, AVX-512 or NEON");
  if (const char* name = std::getenv("BERYL_CPU_TARGET"); name != nullptr && *name != '\0') choose_cpu_target(name);
}

}  // namespace beryl
