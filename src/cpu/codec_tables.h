// Small tables of the formats whose scales or codes are floats of one byte.
#pragma once

namespace beryl {

struct ByteTable {
  float values[256];
};
extern const ByteTable kNvfp4HalfScales;   // nvfp4_half_scale of weights/decode.h
extern const ByteTable kE4m3Values;        // e4m3_to_f32

}  // namespace beryl
