// What a device is asked for. Three implementations: reference (double, naive: the oracle), CPU and CUDA.
//
// A Backend makes an Executor from a program: it imports the weights into its own layout and allocates caches,
// activations and inputs, once. After that running allocates nothing. Not thread-safe: one thread drives an executor.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ops/program.h"
#include "ops/step_input.h"

namespace beryl {

// kDefault: the backend's own choice. A backend refuses what it does not have; the reference has double whatever is asked.
enum class CacheType : uint8_t { kDefault, kF32, kF16, kBf16, kFp8 };

struct StepLimits {
  int max_tokens = 1;               // rows of one step
  int max_outputs = 1;
  int max_sequences = 1;
  std::vector<int> n_pages;         // [groups] pages in each group's pools
  std::vector<int> n_entries;       // [groups] entries of one sequence's table
  CacheType cache_type = CacheType::kDefault;
};

enum class MemoryKind : uint8_t { kMappedWeights, kWeights, kCache, kActivations, kInputs };

struct Allocation {
  MemoryKind kind;
  std::string label;                // "layer 3 K"
  int64_t bytes = 0;                // kMappedWeights: bytes of the file that are read in place
};

struct OpRange {
  size_t begin = 0;
  size_t end = SIZE_MAX;            // cut to the number of ops
};

enum class CachePart : uint8_t { kKeys, kValues };

// A piece of a step as the backend really runs it: neighbouring ops that it does not run apart.
struct StepPart {
  size_t op_begin = 0;
  size_t op_end = 0;
  double microseconds = 0;
  double preparing = 0;             // of these: until the inputs were there and ready, waiting included; 0: not known
  // Microseconds of the same without its products: a plain read of its weights, or of keys and values, at this place; 0: not known.
  double reading = 0;
};

class Executor {
 public:
  virtual ~Executor() = default;

  virtual void set_input(const StepInput& input) = 0;
  // Counts for the penalties of one sequence, forgotten and set anew; Sample then counts what it chooses.
  virtual void set_history(int sequence, std::span<const int32_t> prompt, std::span<const int32_t> reply) = 0;
  // Asynchronous where the device is; throws Error(kDevice) when the device fails. What only passes from op to op of one
  // run (program.h: only_passes) may never be in memory, and rows of tokens may be dropped where only outputs are read (output_part):
  // after it, read_rows of such rows gives anything.
  virtual void run(OpRange range = {}) = 0;
  virtual void synchronize() = 0;
  // Of the last run, [n_outputs]; waits for the device.
  virtual std::vector<Sampled> samples() = 0;

  // Runs ops [0, end) of the current input as run() does, with clocks, and waits. Parts in order, all ops in one of them; empty: the
  // backend cannot tell.
  virtual std::vector<StepPart> time_step(size_t end) {
    (void)end;
    return {};
  }

  // For traces, tests and tools; each waits for the device. Values are converted to and from f32.
  virtual void read_rows(int slot, int64_t row_begin, int64_t n_rows, float* out) = 0;          // [n_rows][cols]
  virtual void write_rows(int slot, int64_t row_begin, int64_t n_rows, const float* values) = 0;
  virtual void read_cache(int cache, CachePart part, int page, int row, float* out) = 0;         // [n_kv][head_dim]
  virtual void write_cache(int cache, CachePart part, int page, int row, const float* values) = 0;
  // Everything that was allocated, in the order and with the labels and bytes of Backend::plan.
  virtual std::vector<Allocation> allocations() const = 0;
  // Of one value in the cache.
  virtual int cache_element_bytes() const = 0;
  // Of all that a cache keeps of one position, scales aside: for bytes_moved.
  virtual int64_t position_bytes(int cache) const = 0;
  // Labels of buffers whose guard bytes behind the end were overwritten.
  virtual std::vector<std::string> damaged_guards() = 0;
};

// Of a device that has memory of its own.
struct DeviceMemory {
  int64_t total_bytes = 0;
  int64_t free_bytes = 0;           // for a program's buffers: less what the driver will take for code and graphs
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string_view name() const = 0;
  // As its maker calls it; empty: a host backend.
  virtual std::string device_name() const { return {}; }
  // Bytes a second of a plain read of device memory, measured now; 0: the backend does not measure it.
  virtual double read_ceiling() { return 0; }
  // As it is now. Host backends have none: theirs is the machine's, which lends more than it has.
  virtual std::optional<DeviceMemory> memory() const { return std::nullopt; }
  // What these allocations take of that memory, rounding included.
  virtual int64_t taken_bytes(const std::vector<Allocation>& allocations) const {
    int64_t sum = 0;
    for (const Allocation& allocation : allocations) sum += allocation.bytes;
    return sum;
  }
  // Exactly what prepare will allocate, without allocating.
  virtual std::vector<Allocation> plan(const Program& program, const StepLimits& limits) const = 0;
  virtual std::unique_ptr<Executor> prepare(const Program& program, const StepLimits& limits) = 0;
};

std::unique_ptr<Backend> make_reference_backend(int n_threads);

}  // namespace beryl
