// Blocks as they lie in GGUF files, little-endian, packed. docs/formats.md draws the bits; weights/decode.cpp gives
// their meaning. Only weights/ and the importers of the backends know these layouts.
//
// A block may lie at any byte address (a file promises no more), so copy it out with memcpy before reading fields.
#pragma once

#include <cstdint>

namespace beryl {

struct BlockQ4_0 {       // w = scale * (code - 8)
  static constexpr int kWeights = 32;
  uint16_t scale;        // f16
  uint8_t codes[16];     // low nibbles: weights 0..15; high nibbles: 16..31
};
static_assert(sizeof(BlockQ4_0) == 18);  // 4.5 bits a weight

struct BlockQ4_1 {       // w = scale * code + min
  static constexpr int kWeights = 32;
  uint16_t scale;        // f16
  uint16_t min;          // f16
  uint8_t codes[16];     // as in Q4_0
};
static_assert(sizeof(BlockQ4_1) == 20);  // 5 bits a weight

struct BlockQ5_0 {       // w = scale * (code - 16)
  static constexpr int kWeights = 32;
  uint16_t scale;        // f16
  uint8_t high_bits[4];  // bit i of the little-endian u32: bit 4 of weight i's code
  uint8_t codes[16];     // low 4 bits, as in Q4_0
};
static_assert(sizeof(BlockQ5_0) == 22);  // 5.5 bits a weight

struct BlockQ5_1 {       // w = scale * code + min
  static constexpr int kWeights = 32;
  uint16_t scale;        // f16
  uint16_t min;          // f16
  uint8_t high_bits[4];  // as in Q5_0
  uint8_t codes[16];
};
static_assert(sizeof(BlockQ5_1) == 24);  // 6 bits a weight

struct BlockQ8_0 {       // w = scale * code
  static constexpr int kWeights = 32;
  uint16_t scale;        // f16
  int8_t codes[32];
};
static_assert(sizeof(BlockQ8_0) == 34);  // 8.5 bits a weight

struct BlockQ4_K {       // w = (scale * scales[g]) * code - (min_scale * mins[g]), g = weight / 32
  static constexpr int kWeights = 256;
  uint16_t scale;        // f16
  uint16_t min_scale;    // f16
  uint8_t scales[12];    // 8 scales and 8 mins of 6 bits each: unpack_scales_and_mins (decode.h)
  uint8_t codes[128];    // bytes 32p..32p+31: low nibbles group 2p, high nibbles group 2p + 1
};
static_assert(sizeof(BlockQ4_K) == 144);  // 4.5 bits a weight

struct BlockQ5_K {       // as Q4_K with 5-bit codes
  static constexpr int kWeights = 256;
  uint16_t scale;        // f16
  uint16_t min_scale;    // f16
  uint8_t scales[12];
  uint8_t high_bits[32];  // bit g of byte i: bit 4 of the code of weight 32 g + i
  uint8_t codes[128];     // low 4 bits, as in Q4_K
};
static_assert(sizeof(BlockQ5_K) == 176);  // 5.5 bits a weight

struct BlockQ6_K {       // w = (scale * scales[g]) * (code - 32), g = weight / 16
  static constexpr int kWeights = 256;
  uint8_t low_bits[128];  // per half of 128 weights 64 bytes: low nibbles weights 0..63, high nibbles 64..127
  uint8_t high_bits[64];  // per half 32 bytes: bits 2q..2q+1 of byte i are bits 4..5 of weight 32 q + i
  int8_t scales[16];
  uint16_t scale;        // f16
};
static_assert(sizeof(BlockQ6_K) == 210);  // 6.5625 bits a weight

struct BlockMxfp4 {      // w = 2^(exponent - 127) * E2M1(code)
  static constexpr int kWeights = 32;
  uint8_t exponent;      // E8M0; 255 is 2^128 here, not NaN (decode.h)
  uint8_t codes[16];     // as in Q4_0
};
static_assert(sizeof(BlockMxfp4) == 17);  // 4.25 bits a weight

struct BlockNvfp4 {      // w = UE4M3(scales[g]) * E2M1(code), g = weight / 16
  static constexpr int kWeights = 64;
  uint8_t scales[4];     // the sign bit is ignored; 0x7f (NaN) counts as 0
  uint8_t codes[32];     // bytes 8g..8g+7: low nibbles weights 0..7 of group g, high nibbles 8..15
};
static_assert(sizeof(BlockNvfp4) == 36);  // 4.5 bits a weight

// FP4 g128, ours: two planes, so no struct. Codes: byte i of a row holds columns 2i (low nibble) and 2i + 1 (high).
inline constexpr int kFp4GroupWeights = 128;  // 4.125 bits a weight with its bf16 scale

}  // namespace beryl
