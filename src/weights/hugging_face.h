// A Hugging Face model folder: config.json, and model.safetensors or its shards by model.safetensors.index.json.
#pragma once

#include <memory>
#include <string>

#include "weights/checkpoint.h"

namespace beryl {

inline constexpr size_t kMaxConfigBytes = 4 << 20;   // config.json; real ones have a few KB
inline constexpr size_t kMaxIndexBytes = 64 << 20;   // model.safetensors.index.json

// Throws Error(kBadInput, kUnsupported or kIo); a missing file is named.
std::unique_ptr<Checkpoint> open_hugging_face(const std::string& folder);

}  // namespace beryl
