// GGUF files, versions 2 and 3, little-endian; sets split as NAME-00001-of-0000N.gguf too.
#pragma once

#include <memory>
#include <string>

#include "weights/checkpoint.h"

namespace beryl {

// Limits chosen so that a damaged count cannot cost memory; real files stay far below.
inline constexpr uint64_t kMaxGgufFields = 1 << 16;       // metadata entries of a file
inline constexpr uint64_t kMaxGgufTensors = 1 << 20;      // of a file
inline constexpr uint64_t kMaxGgufNameBytes = 1 << 16;    // a key or a tensor's name
inline constexpr int kMaxGgufArrayDepth = 8;              // arrays of arrays
inline constexpr uint32_t kMaxGgufAlignment = 1 << 16;    // bytes
inline constexpr int64_t kMaxGgufBlocks = 512;            // "ARCH.block_count"

// Maps the file (the first one of a split set maps them all) and validates every byte of the header.
// Throws Error(kBadInput) for damage, Error(kUnsupported) for a big-endian file, another version or a tensor type
// that beryl does not know, Error(kIo) when the file cannot be read.
std::unique_ptr<Checkpoint> open_gguf(const std::string& path);

// A model folder that beryl quantize made of a GGUF file: the source's metadata in kGgufMetadataFile, the tensors under
// their GGUF names in model.safetensors. As a checkpoint it is a GGUF one. Throws like open_gguf.
inline constexpr const char* kGgufMetadataFile = "metadata.gguf";
std::unique_ptr<Checkpoint> open_gguf_folder(const std::string& folder);

// The bytes of a GGUF file without tensors that has the metadata of this one, value by value as they lie there, except
// what is said of the tensors ("general.file_type") and of the file ("split.*").
std::string gguf_metadata_alone(const std::string& path);

}  // namespace beryl
