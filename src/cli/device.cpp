#include "cli/device.h"

#include <fmt/format.h>

#include "base/error.h"
#include "cli/console.h"
#include "cli/options.h"
#include "cpu/cpu_backend.h"
#ifdef BERYL_HAS_CUDA
#include "cuda/cuda_backend.h"
#endif

namespace beryl::cli {

void add_device_options(CLI::App& app, DeviceOptions& options, const std::string& heading) {
  add_choice(app, "--device", options.name, {"auto", "cpu", "reference", "cuda"},
             "auto (the GPU if there is one, else the CPU), cpu, cuda, or reference (exact, slow)")
      ->group(heading);
  add_integer(app, "--threads", options.n_threads, 1, 1024, "threads of the CPU backends (default: one a core)")
      ->group(heading);
}

std::unique_ptr<Backend> make_backend(const DeviceOptions& options) {
  const int n_threads = static_cast<int>(options.n_threads);
  if (options.name == "reference") return make_reference_backend(n_threads);
  if (options.name == "cpu") return make_cpu_backend(n_threads);
#ifdef BERYL_HAS_CUDA
  if (options.name == "cuda") return make_cuda_backend(0);
  if (cuda_device_count() > 0) {
    try {
      return make_cuda_backend(0);
    } catch (const Error& error) {
      // Too old, or held by another process. What auto promises is to run anyway.
      if (error.code != ErrorCode::kDevice && error.code != ErrorCode::kUnsupported) throw;
      print_warning(fmt::format("the GPU is not used, but the CPU: {}", error.what()));
    }
  }
#else
  if (options.name == "cuda")
    throw Error(ErrorCode::kUnsupported, "this build has no CUDA backend: install the CUDA toolkit and build again");
#endif
  return make_cpu_backend(n_threads);
}

CacheType cache_type_by_name(const std::string& name) {
  if (name == "f32") return CacheType::kF32;
  if (name == "bf16") return CacheType::kBf16;
  if (name == "fp8") return CacheType::kFp8;
  return CacheType::kDefault;
}

}  // namespace beryl::cli
