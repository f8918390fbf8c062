// The one place that knows which backends this build has and chooses among them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <CLI/CLI.hpp>

#include "base/error.h"
#include "ops/backend.h"

namespace beryl::cli {

struct DeviceOptions {
  std::string name = "auto";     // auto, cpu, reference, cuda
  int64_t n_threads = 0;         // of host backends; 0: one a core
  bool exact = false;            // of the CPU backend: no activations in 8 bits
  std::string activations = "default";   // bf16: of the CPU backend, in products with BF16 weights
};

// --device, --threads, --exact and --activations, under this heading of the help.
void add_device_options(CLI::App& app, DeviceOptions& options, const std::string& heading = "Options");

// Error(kBadInput) for a value of BERYL_CPU_TARGET or BERYL_PIN_THREADS that means nothing. Of every command, before it writes anything,
// whether it computes on the CPU or not: a misspelt setting is told wherever it stands.
void check_environment();

// auto: the GPU where this build and this machine have one that can be used, else the CPU and a line that says why. Throws
// Error(kUnsupported, kDevice or kOutOfMemory) when a device asked for by name is not there or cannot be used.
std::unique_ptr<Backend> make_backend(const DeviceOptions& options);

// A line of warning where --activations bf16 or --exact was given and changes nothing: a GPU was taken, or no product of this program has
// BF16 weights.
void warn_of_idle_options(const DeviceOptions& options, const Backend& backend, const Program& program);

// For `error`, thrown while a model was loaded. Where auto took the GPU and the model does not fit into its memory: a line of
// warning, the CPU's backend in place of the GPU's, and true. Else false.
bool falls_back_to_cpu(const DeviceOptions& options, std::unique_ptr<Backend>& backend, const Error& error);

// load(*backend), once more after falling back.
template <class Load>
auto load_on(const DeviceOptions& options, std::unique_ptr<Backend>& backend, const Load& load) {
  try {
    return load(*backend);
  } catch (const Error& error) {
    if (!falls_back_to_cpu(options, backend, error)) throw;
  }
  return load(*backend);
}

// compute(), with the model's name before what is said of numbers that are not finite.
template <class Compute>
auto naming_model(const std::string& model, const Compute& compute) {
  try {
    return compute();
  } catch (const NotFinite& error) {
    throw Error(error.code, model + ": " + error.what());
  }
}

// "f32", "f16", "bf16", "fp8", else the backend's own choice.
CacheType cache_type_by_name(const std::string& name);

}  // namespace beryl::cli
