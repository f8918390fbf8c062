// Which instruction sets the CPU kernels are compiled for, and the choice among them at run time.
//
// Include this before any Highway header. Every kernel file is compiled once for each of SSE4, AVX2 (with FMA) and
// AVX-512 on x86-64, and for NEON on 64-bit ARM; the best one that the processor has runs. (The integer kernels have
// files of their own, and so have products of bf16: integer_dot.h, bf16_dot.h.) Results are the same bits on
// all targets that have a fused multiply-add; SSE4 has none and rounds each product, so its last bits differ.
#pragma once

// SSE4 is the oldest that runs: Highway's one-lane fallback lacks the byte shuffles that the decoders need.
#define HWY_WANT_SSE4 1
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)

#include <cstdint>
#include <string>
#include <vector>

namespace beryl {

// Names, best first: "avx512bf16" (which needs VNNI and VBMI too), "avx512vnni", "avx512", "avx2", "sse4", or "neondot", "neon"; only
// those that this processor has. Those of AVX-512, and those of NEON, differ in the integer and bf16 kernels alone.
std::vector<std::string> cpu_targets();
// The one that kernels run on now.
std::string cpu_target();
// Limits the kernels to one target; an empty name: the best. Throws Error(kBadInput) when the processor lacks it.
// For tests and measurements; not to be called while kernels run.
void choose_cpu_target(const std::string& name);
// Error(kBadInput) where the environment variable BERYL_CPU_TARGET is set and names none of cpu_targets(). Changes nothing.
void check_cpu_target_in_environment();
// choose_cpu_target with the environment variable BERYL_CPU_TARGET where that is set. Throws Error(kUnsupported) when
// the processor has none of the targets.
void choose_cpu_target_from_environment();

}  // namespace beryl
