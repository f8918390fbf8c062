#include "cpu/codec_tables.h"

#include <cstdint>

#include "base/float_formats.h"
#include "weights/decode.h"

namespace beryl {

namespace {

template <class Function>
ByteTable make_table(Function function) {
  ByteTable table;
  for (int i = 0; i < 256; ++i) table.values[i] = function(static_cast<uint8_t>(i));
  return table;
}

}  // namespace

const ByteTable kNvfp4HalfScales = make_table(nvfp4_half_scale);
const ByteTable kE4m3Values = make_table(e4m3_to_f32);

}  // namespace beryl
