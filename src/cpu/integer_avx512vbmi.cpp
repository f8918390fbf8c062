// integer_dot.h on AVX-512 with VNNI and VBMI.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>

#include "cpu/integer_dot.h"
#include "weights/blocks.h"
#include "weights/decode.h"

// Behind all standard headers, so that no shared inline function is compiled for this instruction set.
#pragma GCC push_options
// GCC 12 takes the deliberately undefined operands in its own intrinsics for mistakes.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,avx512vnni,avx512vbmi")

namespace beryl {
namespace {
namespace avx512vbmi {

#define BERYL_VBMI 1
#define BERYL_VNNI 1
#include "cpu/integer_avx512-inl.h"
#include "cpu/integer_dot-inl.h"

}  // namespace avx512vbmi
}  // namespace

const IntegerKernels kAvx512VbmiIntegerKernels = {avx512vbmi::Simd::kUnsignedTokens, avx512vbmi::multiply_few, avx512vbmi::expand,
                                                 avx512vbmi::multiply_many};

}  // namespace beryl
#pragma GCC pop_options
#endif
