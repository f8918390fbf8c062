// A model in other weight formats, as a folder that every command loads: which tensor gets which format, and which
// files travel along.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "weights/checkpoint.h"
#include "weights/quantize.h"

namespace beryl {

struct QuantizeFormats {
  Format layers = Format::kFp4G128;
  // Embedding, head and per-layer table. Default: FP8 beside formats with E2M1 codes, Q8_0 beside those with integers
  // of fewer than eight bits, else as the layers.
  std::optional<Format> head = {};

  Format head_format() const;
};

// Why a tensor is written the way it is.
enum class Treatment : uint8_t {
  kEncoded,     // in the format asked for
  kSame,        // it has that format already: copied
  kVector,      // norms, scalars: few weights that all others depend on
  kRouter,      // chooses experts: few weights, and an error in one changes all that follows
  kOddRows,     // rows are no whole blocks of the format
};

struct ModelFile {
  std::string name;
  std::string copied_from;    // a path; empty: `text`
  std::string text;
};

struct QuantizePlan {
  std::unique_ptr<Checkpoint> checkpoint;   // tensors point into it; null for a synthetic model
  std::vector<QuantizeTensor> tensors;
  std::vector<Treatment> treatments;        // one a tensor
  std::vector<ModelFile> files;             // besides the weights
  std::vector<std::string> dropped;         // tensors of parts that beryl does not run (vision, audio), by name
  bool was_quantised = false;               // some tensor that is encoded was quantised before, in another format
};

// Opens the model and checks it as a loader does, in bounded memory. Throws what open_model throws, and
// Error(kUnsupported) for a tensor that cannot be written.
QuantizePlan plan_quantize(const std::string& source, const QuantizeFormats& formats);

// A synthetic model (synthetic.h) of nearly normal weights, as if read from a BF16 checkpoint. It has no tokenizer.
QuantizePlan plan_synthetic(const std::string& name, const QuantizeFormats& formats, uint64_t seed);

struct QuantizeOptions {
  bool replaces = false;      // an existing folder that quantize wrote
  int n_threads = 1;
  std::function<bool(const QuantizeProgress&)> keep_going;
};

// Writes the folder, whole or not at all. Throws Error(kBadInput) when the destination is there (see NewFolder) or is
// the source, Error(kIo), and what write_quantized throws.
QuantizeResult write_model_folder(const QuantizePlan& plan, const std::string& destination,
                                  const QuantizeOptions& options);

}  // namespace beryl
