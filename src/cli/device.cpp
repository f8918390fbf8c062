#include "cli/device.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <variant>
#include <vector>

#include <fmt/format.h>

#include "base/error.h"
#include "cli/console.h"
#include "cli/options.h"
#include "cpu/cpu_backend.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"
#ifdef BERYL_HAS_CUDA
#include "cuda/cuda_backend.h"
#endif

namespace beryl::cli {
namespace {

#ifdef BERYL_HAS_CUDA
// Whoever hides the GPUs from a program needs not be told that it sees none.
bool hides_gpus() {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  return visible != nullptr && (*visible == '\0' || std::string_view(visible) == "-1");
}

std::unique_ptr<Backend> make_gpu() {
  std::unique_ptr<Backend> backend = make_cuda_backend(0);
#ifdef BERYL_CUDA_UNOPTIMIZED
  print_warning("this program's GPU code is unoptimized and slow: it was compiled where there is no GPU, to see that it compiles (cmake -DBERYL_CUDA_OPTIMIZE=ON)");
#endif
  return backend;
}
#endif

std::unique_ptr<Backend> make_cpu(const DeviceOptions& options) {
  const CpuPrecision precision = options.exact                   ? CpuPrecision::kExact
                                 : options.activations == "bf16" ? CpuPrecision::kBf16
                                                                 : CpuPrecision::kFast;
  return make_cpu_backend(static_cast<int>(options.n_threads), precision);
}

}  // namespace

void add_device_options(CLI::App& app, DeviceOptions& options, const std::string& heading) {
  add_choice(app, "--device", options.name, {"auto", "cpu", "reference", "cuda"},
             "auto (the GPU if there is one, else the CPU), cpu, cuda, or reference (exact, slow)")
      ->group(heading);
  add_integer(app, "--threads", options.n_threads, 1, 1024, "threads of the CPU backends (default: one a core)")
      ->group(heading);
  app.add_flag("--exact", options.exact, "CPU: activations and cache in f32, as exact as it goes; slower (default: 8 bits a group of 32, cache f16)")
      ->group(heading);
  add_choice(app, "--activations", options.activations, {"default", "bf16"},
             "CPU: bf16 rounds what BF16 weights are multiplied with: up to twice as fast, 2^-8 off (default: f32 there)")
      ->group(heading);
}

void check_environment() {
  check_cpu_target_in_environment();
  may_pin_threads();
}

void warn_of_idle_options(const DeviceOptions& options, const Backend& backend, const Program& program) {
  const bool rounds = options.activations == "bf16";
  if (!rounds && !options.exact) return;
  if (backend.memory()) {
    print_warning(fmt::format("{} changes nothing: it is for the CPU, and the GPU is used (--device cpu)",
                              rounds ? "--activations bf16" : "--exact"));
    return;
  }
  if (!rounds) return;
  const auto has_bf16 = [&](MatrixRef ref) {
    const std::vector<HostMatrix>& parts = program.matrix(ref).parts;
    return std::any_of(parts.begin(), parts.end(), [](const HostMatrix& part) { return part.format == Format::kBf16; });
  };
  for (const Op& op : program.ops) {
    if (const auto* linear = std::get_if<Linear>(&op); linear != nullptr && has_bf16(linear->weight)) return;
    const auto* experts = std::get_if<Experts>(&op);
    if (experts != nullptr && (has_bf16(experts->gate_up) || has_bf16(experts->down))) return;
  }
  print_warning("--activations bf16 changes nothing: this model multiplies no BF16 weights");
}

std::unique_ptr<Backend> make_backend(const DeviceOptions& options) {
  const int n_threads = static_cast<int>(options.n_threads);
  if (options.exact && options.name != "cpu" && options.name != "auto")
    throw UsageError(fmt::format("--exact is for the CPU's backend, --device is {}{}", options.name,
                                 options.name == "reference" ? ", which has double precision anyway" : ""));
  if (options.activations == "bf16" && (options.exact || (options.name != "cpu" && options.name != "auto")))
    throw UsageError(fmt::format("--activations bf16 is for the CPU's backend without --exact, not {}",
                                 options.exact ? "with it" : "--device " + options.name));
  if (options.name == "reference") return make_reference_backend(n_threads);
  if (options.name == "cpu") return make_cpu(options);
#ifdef BERYL_HAS_CUDA
  if (options.name == "cuda") return make_gpu();
  // What auto promises is to run anyway.
  try {
    return make_gpu();
  } catch (const AbsentGpu& error) {
    if (!hides_gpus()) print_note(fmt::format("{}, so the CPU is used", error.what()));
  } catch (const Error& error) {
    print_warning(fmt::format("the CPU is used, because {}", error.what()));
  }
#else
  if (options.name == "cuda")
    throw Error(ErrorCode::kUnsupported, "this build has no CUDA backend: install the CUDA toolkit and build again");
#endif
  return make_cpu(options);
}

bool falls_back_to_cpu(const DeviceOptions& options, std::unique_ptr<Backend>& backend, const Error& error) {
  if (options.name != "auto" || !backend->memory() || error.code != ErrorCode::kOutOfMemory) return false;
  print_warning(fmt::format("the CPU is used, because {}", error.what()));
  backend = make_cpu(options);
  return true;
}

CacheType cache_type_by_name(const std::string& name) {
  if (name == "f32") return CacheType::kF32;
  if (name == "f16") return CacheType::kF16;
  if (name == "bf16") return CacheType::kBf16;
  if (name == "fp8") return CacheType::kFp8;
  return CacheType::kDefault;
}

}  // namespace beryl::cli
