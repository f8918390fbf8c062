// Models of true shapes with random weights, by name: speed and memory can be measured without anybody's weights.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/model.h"

namespace beryl {

// "gemma4-12b", "llama3.1-8b", ...: every size that the families' readers know.
std::vector<std::string> synthetic_names();

struct SyntheticFormats {
  Format layers = Format::kFp4G128;
  Format head = Format::kFp8;      // embedding and head, one matrix where the family ties them; per-layer table too
  // Every matrix has data of its own, as in a file. Else all matrices of one format point into one block of random data as large as
  // the largest of them, the same role every fourth layer at the same place: much less host memory, for devices that make a copy of
  // each matrix (and of equal ones only once from the host's); for speeds of a host backend it would sit in a cache.
  bool separate = false;
};

// Error(kBadInput) naming the known ones for an unknown name.
ModelConfig synthetic_config(const std::string& name);

// Rows that a format does not fit get Q4_0 or Q8_0 (as quantisers do), or BF16.
// with_data false: shapes only (codes is null), for plans and op lists. Else Error(kOutOfMemory) where the system has not so much.
Model make_synthetic_model(const std::string& name, const SyntheticFormats& formats, uint64_t seed, bool with_data);

}  // namespace beryl
