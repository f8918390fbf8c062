// The one place that knows which backends this build has and chooses among them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <CLI/CLI.hpp>

#include "ops/backend.h"

namespace beryl::cli {

struct DeviceOptions {
  std::string name = "auto";     // auto, cpu, reference, cuda
  int64_t n_threads = 0;         // of host backends; 0: one a core
};

// --device and --threads, under this heading of the help.
void add_device_options(CLI::App& app, DeviceOptions& options, const std::string& heading = "Options");

// auto: the GPU where this build and this machine have one, else the CPU. Throws Error(kUnsupported or kDevice) when a
// device asked for by name is not there.
std::unique_ptr<Backend> make_backend(const DeviceOptions& options);

// "f32", "bf16", "fp8", else the backend's own choice.
CacheType cache_type_by_name(const std::string& name);

}  // namespace beryl::cli
