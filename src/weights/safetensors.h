// safetensors files: reading with every check of the format, and writing, streamed and atomic.
//
// A file is: u64 length of the header; the header, a JSON object NAME -> {"dtype", "shape", "data_offsets": [begin,
// end]} and "__metadata__" -> strings; the data, which the tensors cover without holes. docs/formats.md tells how
// beryl keeps quantised matrices in such a file.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/mapped_file.h"
#include "weights/checkpoint.h"

namespace beryl {

inline constexpr uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;  // as the reference reader has it

// The key of "__metadata__" whose value, a JSON object NAME -> format name ("fp4_g128"), says what U8 tensors hold.
inline constexpr std::string_view kFormatsKey = "beryl.formats";
// NAME + this is the scale plane of a two-plane tensor NAME.
inline constexpr std::string_view kScaleSuffix = "_scale";

// One file. Tensors lie in file order; a tensor listed in beryl.formats has that format and its logical shape.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);  // throws Error(kBadInput, kUnsupported or kIo)

  const std::string& path() const { return mapped_.path(); }
  std::span<const TensorInfo> tensors() const { return tensors_; }
  const TensorInfo* find(std::string_view name) const;  // null when absent
  // The strings of "__metadata__", in file order.
  std::span<const std::pair<std::string, std::string>> metadata() const { return metadata_; }

 private:
  void read_header();
  void apply_formats();

  MappedFile mapped_;
  std::vector<TensorInfo> tensors_;
  std::vector<uint32_t> by_name_;  // sorted by name
  std::vector<std::pair<std::string, std::string>> metadata_;
};

// A single file as a checkpoint, its "__metadata__" strings as Metadata. For golden files and traces; models are
// folders.
std::unique_ptr<Checkpoint> open_safetensors(const std::string& path);

// What to write: format and logical shape. Quantised matrices become a U8 tensor (FP8: F8_E4M3) and, for two-plane
// formats, a second tensor NAME_scale; their names go into beryl.formats.
struct SafetensorsEntry {
  std::string name;
  Format format = Format::kF32;
  std::vector<int64_t> shape;  // outermost first; the last dimension of a quantised matrix must fit the format
};

// Writes PATH.partial-PID and renames it to PATH in finish(), so that PATH never holds half a file. Planes may be
// filled in any order, each front to back in pieces of any size. Throws Error(kIo), or Error(kBadInput) for names that
// occur twice; both name shown_path (empty: PATH), for a file whose folder, too, gets its name later.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::string& path, std::vector<SafetensorsEntry> entries,
                    const std::vector<std::pair<std::string, std::string>>& metadata = {}, const std::string& shown_path = {});
  ~SafetensorsWriter();  // removes the partial file unless finish() has run
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  void write(size_t entry, std::span<const std::byte> bytes);         // next bytes of the codes
  void write_scales(size_t entry, std::span<const std::byte> bytes);  // next bytes of the scale plane
  void finish();  // every plane must be full; syncs and renames

 private:
  struct Plane {
    std::string name;
    std::string dtype;
    int64_t element_bytes = 1;
    std::vector<int64_t> shape;   // as stored
    uint64_t n_bytes = 0;
    uint64_t begin = 0;           // from the start of the data
    uint64_t written = 0;
  };
  void append(Plane& plane, std::span<const std::byte> bytes);
  void write_at(uint64_t offset, std::span<const std::byte> bytes);

  std::string path_;
  std::string partial_path_;
  std::string shown_path_;
  int fd_ = -1;
  uint64_t data_start_ = 0;
  std::vector<Plane> planes_;
  std::vector<std::pair<size_t, size_t>> planes_of_entry_;  // codes, scales (SIZE_MAX: none)
};

// A tensor in memory, to write.
struct SafetensorsTensor {
  SafetensorsEntry entry;
  std::span<const std::byte> data;
  std::span<const std::byte> scales;  // two-plane formats
};
void write_safetensors(const std::string& path, std::span<const SafetensorsTensor> tensors,
                       const std::vector<std::pair<std::string, std::string>>& metadata = {});

}  // namespace beryl
