// Writing tensors in other formats, as a stream: rows are read, encoded by all threads and written a chunk at a time,
// so memory follows the number of threads and not the model.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "weights/host_matrix.h"
#include "weights/safetensors.h"

namespace beryl {

// Where the rows of one tensor come from, and how it is to be written. A tensor whose format is that of its source is
// copied bit for bit (but a float one with a scale of its own is multiplied with it).
struct QuantizeTensor {
  SafetensorsEntry entry;           // the name and the format to write, the shape
  HostMatrix source;                // of the same shape; or shape and format only (codes null), where make_row is set
  // Instead of source: row `row` of all, experts one after the other. Called by many threads at once.
  std::function<void(int64_t row, float* out)> make_row = {};
  // source.codes lies in a mapped file: its pages are given back once they are read, so that they do not count as
  // memory of this program. Must not be set for memory of any other kind, which would be lost.
  bool gives_pages_back = false;
};

struct QuantizeProgress {
  int64_t n_done = 0;               // weights
  int64_t n_weights = 0;            // of all tensors
  std::string_view tensor;          // the one that is being written
};

// What encoding cost a tensor, from its weights before and after.
struct QuantizeError {
  double squared_error = 0;         // sum over weights
  double squared_weights = 0;
};

struct QuantizeResult {
  bool finished = false;            // false: stopped by keep_going; nothing is left at the path
  std::vector<QuantizeError> errors;   // one a tensor; zeros where it was copied
};

// Writes the safetensors file at `path`. keep_going is called by this thread after every chunk (a few million weights)
// and stops the work by returning false. A tensor with a scale of its own gets it beside it as NAME_scale.
// Errors: kBadInput naming tensor, row, column and value for weights that are not finite or that the format cannot
// hold; kIo, naming shown_path as SafetensorsWriter does. None leaves a file behind.
QuantizeResult write_quantized(const std::string& path, std::span<const QuantizeTensor> tensors, int n_threads,
                               const std::vector<std::pair<std::string, std::string>>& metadata,
                               const std::function<bool(const QuantizeProgress&)>& keep_going, const std::string& shown_path = {});

}  // namespace beryl
