// One model on disk: metadata and tensors, the same for a GGUF file and a Hugging Face folder.
//
// Everything is read-only and memory-mapped; spans stay valid for the checkpoint's lifetime. Opening validates the
// whole header (sizes, offsets, overlaps, types), and no count in it is believed before the file's size backs it, so a
// damaged file is one Error(kBadInput) of one line that names the file, the field and its value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "weights/format.h"
#include "weights/host_matrix.h"

namespace beryl {

enum class Container { kGguf, kHuggingFace };

struct TensorInfo {
  std::string name;
  Format format = Format::kF32;
  std::vector<int64_t> shape;           // outermost first, as Hugging Face writes it: [out, in]; [] is a scalar
  std::span<const std::byte> data;
};

// A list of strings that lies in the file (vocabularies hold 262,144 of them, so nothing is copied).
class StringList {
 public:
  virtual ~StringList() = default;
  virtual size_t size() const = 0;
  virtual std::string_view operator[](size_t index) const = 0;
};

// Metadata by key. GGUF: the key itself ("gemma4.block_count"). Hugging Face: the path into config.json with dots
// ("rope_parameters.full_attention.rope_theta"). Absent key or JSON null: nullopt. A present key of another type is an
// Error(kBadInput) that names it, its type and the type wanted.
class Metadata {
 public:
  virtual ~Metadata() = default;
  virtual bool has(std::string_view key) const = 0;
  virtual std::optional<int64_t> integer(std::string_view key) const = 0;   // any integer type that fits
  virtual std::optional<double> number(std::string_view key) const = 0;     // integers too
  virtual std::optional<bool> boolean(std::string_view key) const = 0;
  virtual std::optional<std::string> string(std::string_view key) const = 0;
  virtual bool is_array(std::string_view key) const = 0;
  virtual std::optional<std::vector<int64_t>> integers(std::string_view key) const = 0;  // array of integers or bools
  virtual std::optional<std::vector<float>> floats(std::string_view key) const = 0;      // array of numbers
  virtual std::shared_ptr<const StringList> strings(std::string_view key) const = 0;     // null when absent
  virtual std::vector<std::string> keys() const = 0;                        // in file order
  virtual std::string describe(std::string_view key) const = 0;             // type and value, cut to one short line
};

class Checkpoint {
 public:
  virtual ~Checkpoint() = default;
  virtual const std::string& path() const = 0;
  virtual Container container() const = 0;
  virtual const Metadata& metadata() const = 0;
  virtual std::span<const TensorInfo> tensors() const = 0;
  virtual const TensorInfo* find(std::string_view name) const = 0;          // null when absent
  // What the reader tolerated and what it means for the user; one line each, shown by the program.
  virtual std::span<const std::string> warnings() const = 0;
};

// path: a .gguf file (the first of a split set too), a folder with config.json and model.safetensors or
// model.safetensors.index.json, or a folder that beryl quantize made of a GGUF file (metadata.gguf and
// model.safetensors). Throws Error(kBadInput, kUnsupported or kIo).
std::unique_ptr<Checkpoint> open_checkpoint(const std::string& path);

// The matrix a tensor holds: [n] is 1 x n, [] is 1 x 1, [stack, rows, cols] are experts. Takes in what lies beside it
// (companions_of): the scale plane of a two-plane format, and what becomes tensor_scale: GGUF's one-element "X.scale"
// beside a matrix "X.weight", our own one-element "NAME_scale" beside a block-quantised NAME. Points into the
// checkpoint's mapping, which must outlive it, except where `storage` is set. Throws Error(kBadInput or kUnsupported)
// naming the tensor when it is no weight, has a zero dimension or more than three, or lacks its scales or has them in a
// wrong shape.
HostMatrix matrix_of(const Checkpoint& checkpoint, const TensorInfo& tensor);

// Names of the tensors that matrix_of(tensor) reads or rightly ignores besides the tensor itself, so that a loader can
// tell which tensors nothing uses. (Ignored: "X.input_scale" and "X_input_scale"-like scales of activations.)
std::vector<std::string> companions_of(const Checkpoint& checkpoint, const TensorInfo& tensor);

// All weights of a tensor in f32, in its own order (decode_row). For vectors and tests; copies.
std::vector<float> floats_of(const Checkpoint& checkpoint, const TensorInfo& tensor);

}  // namespace beryl
