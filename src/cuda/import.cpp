// Weights from host memory into the layouts of the device: packed by all host threads into a staging buffer, piece by
// piece, so that little more host memory is needed than one piece.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>

#include "base/threads.h"
#include "cuda/device_memory.h"

namespace beryl::cuda {

namespace {

constexpr int64_t kStagingBytes = int64_t{64} << 20;

// Calls body(i) for 0 <= i < n on all threads; rethrows the first exception.
void parallel_for(int64_t n, const std::function<void(int64_t)>& body) {
  const int64_t n_threads = std::min<int64_t>(n, std::max(1u, std::thread::hardware_concurrency()));
  if (n_threads <= 1) {
    for (int64_t i = 0; i < n; ++i) body(i);
    return;
  }
  std::atomic<int64_t> next{0};
  std::exception_ptr failure;
  std::mutex mutex;
  const auto work = [&] {
    try {
      for (int64_t i = next++; i < n; i = next++) body(i);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!failure) failure = std::current_exception();
    }
  };
  {
    const std::vector<std::jthread> others = start_helpers(static_cast<int>(n_threads), [&](int) { work(); });
    work();
  }
  if (failure) std::rethrow_exception(failure);
}

void send(void* to, const void* from, int64_t bytes, const std::string& name) {
  if (bytes > 0) check(cudaMemcpy(to, from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice), name.c_str());
}

void import_packed(const MatrixPiece& piece, const DeviceBuffers& buffers) {
  const MatvecPlan& plan = piece.plan;
  const std::string& name = piece.source.parts.front()->name;
  const int64_t batch = std::clamp<int64_t>(kStagingBytes / plan.unit_bytes, 1, plan.n_units);
  std::vector<std::byte> staging(static_cast<size_t>(batch * plan.unit_bytes));
  for (int64_t unit = 0; unit < plan.n_units; unit += batch) {
    const int64_t n = std::min(batch, plan.n_units - unit);
    parallel_for(n, [&](int64_t i) {
      pack_units(plan, piece.source, static_cast<int>(unit + i), static_cast<int>(unit + i + 1),
                 staging.data() + i * plan.unit_bytes);
    });
    send(buffers.as<std::byte>(piece.buffer, unit * plan.unit_bytes), staging.data(), n * plan.unit_bytes, name);
  }
  if (plan.scales_offset != 0) {
    std::vector<float> scales(static_cast<size_t>(plan.n_units) * static_cast<size_t>(plan.row_warps) * kTileRows);
    pack_row_scales(plan, piece.source, scales.data());
    send(buffers.as<std::byte>(piece.buffer, plan.scales_offset), scales.data(), static_cast<int64_t>(scales.size()) * 4, name);
  }
}

void import_plain(const MatrixPiece& piece, const DeviceBuffers& buffers) {
  const PlainShape& shape = piece.shape;
  const int64_t n_rows = shape.stack * shape.rows;
  const int64_t row_bytes = shape.row_code_bytes + 2 * shape.row_groups * 4;
  const int64_t batch = std::clamp<int64_t>(kStagingBytes / row_bytes, 1, n_rows);
  std::vector<std::byte> codes(static_cast<size_t>(batch * shape.row_code_bytes));
  std::vector<float> scales(static_cast<size_t>(batch * shape.row_groups)), mins(scales.size());
  constexpr int64_t kChunk = 64;      // rows a task
  for (int64_t row = 0; row < n_rows; row += batch) {
    const int64_t n = std::min(batch, n_rows - row);
    parallel_for((n + kChunk - 1) / kChunk, [&](int64_t chunk) {
      for (int64_t i = chunk * kChunk; i < std::min(n, (chunk + 1) * kChunk); ++i)
        import_plain_row(*piece.part, shape, (row + i) / shape.rows, (row + i) % shape.rows,
                         codes.data() + i * shape.row_code_bytes, scales.data() + i * shape.row_groups,
                         mins.data() + i * shape.row_groups);
    });
    const std::string& name = piece.part->name;
    send(buffers.as<std::byte>(piece.buffer, row * shape.row_code_bytes), codes.data(), n * shape.row_code_bytes, name);
    if (shape.has_scales)
      send(buffers.as<float>(piece.scales_buffer, row * shape.row_groups * 4), scales.data(), n * shape.row_groups * 4, name);
    if (shape.has_mins)
      send(buffers.as<float>(piece.mins_buffer, row * shape.row_groups * 4), mins.data(), n * shape.row_groups * 4, name);
  }
}

}  // namespace

void import_weights(const Program& program, const MemoryLayout& layout, const DeviceBuffers& buffers) {
  // Random models read the same bytes for many matrices: those of equal sources are packed once and then copied.
  using SourceKey = std::tuple<std::vector<const std::byte*>, std::vector<const std::byte*>, std::vector<float>, int64_t, int64_t,
                               Format, bool>;
  std::map<SourceKey, int> packed;
  for (const DeviceMatrix& matrix : layout.matrices)
    for (const MatrixPiece& piece : matrix.pieces) {
      if (!piece.packed) {
        import_plain(piece, buffers);
        continue;
      }
      SourceKey key{{}, {}, {}, piece.plan.rows, piece.plan.cols, piece.plan.format, piece.gated};
      for (const HostMatrix* part : piece.source.parts) {
        std::get<0>(key).push_back(part->codes);
        std::get<1>(key).push_back(part->scales);
        std::get<2>(key).push_back(part->tensor_scale);
      }
      const auto [known, is_new] = packed.try_emplace(std::move(key), piece.buffer);
      if (is_new)
        import_packed(piece, buffers);
      else
        check(cudaMemcpy(buffers.as<std::byte>(piece.buffer), buffers.as<std::byte>(known->second),
                         static_cast<size_t>(piece.plan.packed_bytes), cudaMemcpyDeviceToDevice),
              "copying weights");
    }
  for (size_t i = 0; i < program.weights->vectors.size(); ++i) {
    const WeightVector& vector = program.weights->vectors[i];
    send(buffers.as<float>(layout.vectors, layout.vector_offsets[i] * 4), vector.values.data(),
         static_cast<int64_t>(vector.values.size()) * 4, vector.name);
  }
  for (size_t i = 0; i < program.ropes.size(); ++i)
    send(buffers.as<double>(layout.frequencies[i]), program.ropes[i].frequencies.data(),
         static_cast<int64_t>(program.ropes[i].frequencies.size()) * 8, "rope frequencies");
  check(cudaDeviceSynchronize(), "copying weights");
}

}  // namespace beryl::cuda
