// The products of many rows alone: a program of its own.
//
//   prefill_bench check [formats]   every format, epilogue and several numbers of rows against double precision, within
//   a
//                                   bound from the data, and against themselves: a row has the same bits whatever the
//                                   number of rows; nothing beyond y and scratch is written
//   prefill_bench speed [formats]   the products of a layer of Gemma 4 12B for prompts, in TFLOP/s, beside cuBLASLt
//   (bf16,
//                                   where its library is found) on the same shape in the same run; the first format for
//                                   65 to 8192 rows, others for 2048
//   prefill_bench quick [formats]   2048 rows, without cuBLASLt
//   --tokens 128, --head-start N    behind the mode: as PrefillTuning says
//
// Times are medians of graph replays; each launch of a graph has weights of its own, so that they come from memory. Of
// our products the time contains the launch that prepares x; its own time is printed besides.
#include <cstdio>
#include <cstdlib>
#include <limits>

#include <cuda_bf16.h>
#include <dlfcn.h>
#if __has_include(<cublasLt.h>)
#include <cublasLt.h>
#endif

#include "cuda/bench_support.h"
#include "cuda/packed_weight.h"
#include "cuda/prefill_linear.h"

using namespace beryl;
using namespace beryl::cuda;

namespace {

constexpr int kGuard = 4096;  // floats, behind y and scratch

PrefillTuning tuning;

bool all_good = true;
void expect(bool condition, const std::string& what) {
  if (condition) return;
  all_good = false;
  std::printf("FAIL %s\n", what.c_str());
}
bool is_gated(DecodeEpilogue e) { return e == DecodeEpilogue::kGatedGelu || e == DecodeEpilogue::kGatedSilu; }

// ---- double precision: a thread an output, weights one by one through packed_weight.h ----
struct ReferenceArgs {
  PackedMatrix matrix;
  RowsView x, other;
  const float* norm_weight;  // null: 1
  bool has_norm;
  float eps, softcap;
  DecodeEpilogue epilogue;
  int n_rows, outputs;
  double* y;  // [n_rows][outputs]
  double* bounds;
};
struct Sum {
  double value = 0, squares = 0;  // of weight · x
};
__device__ Sum product(const ReferenceArgs& a, int64_t row, int token, double factor) {
  Sum sum;
  for (int64_t tile = 0; tile < a.matrix.n_column_tiles; ++tile) {
    const PackedTileRow packed = packed_tile_row(a.matrix, row, static_cast<int>(tile));
    for (int c = 0; c < a.matrix.tile_columns; ++c) {
      const int64_t column = tile * a.matrix.tile_columns + c;
      if (column >= a.matrix.cols) break;
      double x = a.x.values[token * a.x.stride + column] * factor;
      if (a.norm_weight != nullptr && a.has_norm) x *= a.norm_weight[column];
      const double term = x * static_cast<double>(packed_weight(a.matrix.format, packed, c));
      sum.value += term, sum.squares += term * term;
    }
  }
  return sum;
}
__device__ double gelu_of(double v) { return 0.5 * v * (1 + tanh(0.7978845608028654 * (v + 0.044715 * v * v * v))); }
__device__ double silu_of(double v) { return v / (1 + exp(-v)); }
__global__ void __launch_bounds__(128) reference_kernel(ReferenceArgs a, double roundoff) {
  const int output = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x), token = static_cast<int>(blockIdx.y);
  if (output >= a.outputs) return;
  double factor = 1;
  if (a.has_norm) {
    double squares = 0;
    for (int64_t c = 0; c < a.matrix.cols; ++c) {
      const double v = a.x.values[token * a.x.stride + c];
      squares += v * v;
    }
    factor = 1 / sqrt(squares / static_cast<double>(a.matrix.cols) + static_cast<double>(a.eps));
  }
  const Sum sum = product(a, output, token, factor);
  // Each term is off by two roundings, independent of the others': six deviations are never seen. And a few of the sum.
  const auto error = [&](const Sum& s) { return 6 * roundoff * sqrt(s.squares) + 1e-4 * fabs(s.value); };
  double value = sum.value, bound = error(sum);
  const auto other = [&] { return static_cast<double>(a.other.values[token * a.other.stride + output]); };
  switch (a.epilogue) {
    case DecodeEpilogue::kGatedGelu:
    case DecodeEpilogue::kGatedSilu: {
      const Sum up = product(a, output + a.outputs, token, factor);
      const double gate = a.epilogue == DecodeEpilogue::kGatedGelu ? gelu_of(value) : silu_of(value);
      bound = 1.13 * bound * (fabs(up.value) + error(up)) + fabs(gate) * error(up);
      value = gate * up.value;
      break;
    }
    case DecodeEpilogue::kGeluTimesOther: bound *= 1.13 * fabs(other()), value = gelu_of(value) * other(); break;
    case DecodeEpilogue::kTimesGeluOther: bound *= fabs(gelu_of(other())), value *= gelu_of(other()); break;
    case DecodeEpilogue::kTimesSiluOther: bound *= fabs(silu_of(other())), value *= silu_of(other()); break;
    case DecodeEpilogue::kSoftcap: value = a.softcap * tanh(value / a.softcap); break;
    case DecodeEpilogue::kStore: break;
  }
  a.y[static_cast<int64_t>(token) * a.outputs + output] = value;
  a.bounds[static_cast<int64_t>(token) * a.outputs + output] = bound + 1e-5 * fabs(value) + 1e-30;
}

struct CheckCase {
  Format format;
  std::vector<int64_t> rows;
  int64_t cols;
  DecodeEpilogue epilogue;
  bool norm;
};
void check_case(const CheckCase& c, const std::vector<int>& counts, const MatvecDevice& device,
                const LaunchContext& context, uint64_t seed) {
  const auto m = pack(c.format, c.rows, c.cols, is_gated(c.epilogue), device.n_sms, seed);
  const Device<std::byte> weights(m->bytes);
  const int64_t outputs = m->plan.outputs(), cols = c.cols;
  const int n_max = *std::max_element(counts.begin(), counts.end());
  auto xs = random_values(static_cast<size_t>(n_max * cols), seed + 1, 30);
  // Rows of very different sizes.
  for (int row = 0; row < n_max && !c.norm; ++row)
    for (int64_t i = 0; i < cols; ++i)
      xs[row * cols + i] = std::ldexp(xs[row * cols + i], row % 7 == 3 ? -30 : row % 7 == 5 ? 9 : 0);
  const auto norms = random_values(static_cast<size_t>(cols), seed + 3);
  const auto others = random_values(static_cast<size_t>(n_max * outputs), seed + 5);
  const Device<float> x(xs), norm(norms), other(others), y(static_cast<size_t>(n_max * outputs) + kGuard);
  const auto scratch_bytes = static_cast<size_t>(prefill_scratch_bytes(m->plan, n_max));
  const Device<std::byte> scratch(scratch_bytes + kGuard * 4);
  BatchLinearArgs args = {};
  args.weights = reinterpret_cast<const uint8_t*>(weights.data());
  args.x = {x.data(), cols};
  args.has_norm = c.norm, args.norm_weight = norm.data(), args.norm_eps = 1e-6f;
  args.epilogue = c.epilogue, args.softcap = 3;
  args.other = {other.data(), outputs};
  args.y = {y.data(), outputs};
  args.scratch = scratch.data();

  const Device<double> exact(static_cast<size_t>(n_max * outputs)), bounds(static_cast<size_t>(n_max * outputs));
  ReferenceArgs reference = {packed_matrix(m->plan, args.weights),
                             args.x,
                             args.other,
                             norm.data(),
                             c.norm,
                             1e-6f,
                             3,
                             c.epilogue,
                             n_max,
                             static_cast<int>(outputs),
                             exact.data(),
                             bounds.data()};
  // Where there are mins, roundings are relative to code and min, which all but cancel in many weights.
  const bool mins =
      c.format == Format::kQ4_1 || c.format == Format::kQ5_1 || c.format == Format::kQ4_K || c.format == Format::kQ5_K;
  const double roundoff = c.format == Format::kBf16 ? 0x1p-9 : mins ? 0x1p-10 : 0x1p-12 * 1.5;
  reference_kernel<<<dim3(static_cast<unsigned>((outputs + 127) / 128), static_cast<unsigned>(n_max)), 128, 0,
                     context.stream>>>(reference, roundoff);
  check(cudaGetLastError(), "reference");
  check(cudaStreamSynchronize(context.stream), "reference");
  const auto ref = exact.host(), bound = bounds.host();

  const std::string name(info(c.format).name);
  std::vector<float> whole;
  double worst = 0, difference = 0, size = 0;
  bool same = true;
  for (const int n : counts) {
    y.poison(), scratch.poison();
    args.n_rows = n;
    launch_prefill_linear(m->plan, args, device, context, tuning);
    check(cudaStreamSynchronize(context.stream), "product");
    const std::vector<float> got = y.host();
    if (whole.empty()) whole = got;
    int64_t wrong = 0, differ = 0, beyond = 0;
    for (int64_t i = 0; i < n * outputs; ++i) {
      const double off = std::abs(got[i] - ref[i]);
      if (!(off <= bound[i]) && wrong++ == 0)
        std::printf("%s, %d rows: row %d, output %d is %g, exactly %g, bound %g\n", name.c_str(), n,
                    static_cast<int>(i / outputs), static_cast<int>(i % outputs), got[i], ref[i], bound[i]);
      worst = std::max(worst, off / bound[i]);
      if (n == n_max) difference += off * off, size += ref[i] * ref[i];
      uint32_t a, b;
      std::memcpy(&a, &got[i], 4), std::memcpy(&b, &whole[i], 4);
      differ += a != b;
    }
    for (size_t i = static_cast<size_t>(n * outputs); i < got.size(); ++i) {
      uint32_t bits;
      std::memcpy(&bits, &got[i], 4);
      beyond += bits != ~0u;
    }
    const std::vector<std::byte> after = scratch.host();
    for (size_t i = static_cast<size_t>(prefill_scratch_bytes(m->plan, n)); i < after.size(); ++i)
      beyond += after[i] != std::byte{0xff};
    same = same && differ == 0;
    const std::string what = name + ", " + std::to_string(n) + " rows: ";
    expect(wrong == 0, what + std::to_string(wrong) + " outputs beyond their bound");
    expect(differ == 0, what + std::to_string(differ) + " bits depend on the number of rows");
    expect(beyond == 0, what + std::to_string(beyond) + " written beyond");
  }
  std::printf("%-9s %6ld x %5ld, epilogue %d, norm %d: relative error %.1e, worst of bound %.2f, bits %s\n",
              name.c_str(), static_cast<long>(m->plan.rows), static_cast<long>(cols), static_cast<int>(c.epilogue),
              c.norm, std::sqrt(difference / size), worst, same ? "equal" : "DIFFER");
  std::fflush(stdout);
}
// Rows with NaN or infinity are NaN, zeros are zeros, and neither touches the others.
void check_special(const MatvecDevice& device, const LaunchContext& context) {
  const auto m = pack(Format::kFp4G128, {256}, 512, false, device.n_sms, 77);
  const Device<std::byte> weights(m->bytes);
  auto xs = random_values(4 * 512, 78);
  xs[0 * 512 + 17] = std::numeric_limits<float>::quiet_NaN();
  xs[2 * 512 + 500] = std::numeric_limits<float>::infinity();
  for (int i = 0; i < 512; ++i) xs[3 * 512 + i] = 0;
  const Device<float> x(xs), y(4 * 256);
  const Device<std::byte> scratch(static_cast<size_t>(prefill_scratch_bytes(m->plan, 4)));
  BatchLinearArgs args = {};
  args.weights = reinterpret_cast<const uint8_t*>(weights.data());
  args.x = {x.data(), 512}, args.n_rows = 4, args.y = {y.data(), 256}, args.scratch = scratch.data();
  launch_prefill_linear(m->plan, args, device, context, tuning);
  check(cudaStreamSynchronize(context.stream), "special rows");
  const auto got = y.host();
  for (int i = 0; i < 256; ++i) {
    expect(std::isnan(got[i]) && std::isnan(got[2 * 256 + i]), "a row with NaN is NaN");
    expect(std::isfinite(got[256 + i]) && got[3 * 256 + i] == 0, "its neighbours are not");
    if (!all_good) return;
  }
}
void check_all(const std::vector<std::string>& names, const MatvecDevice& device, const LaunchContext& context) {
  using E = DecodeEpilogue;
  const Format formats[] = {Format::kFp4G128, Format::kMxfp4, Format::kNvfp4, Format::kQ4_0, Format::kQ4_1,
                            Format::kQ5_0,    Format::kQ5_1,  Format::kQ8_0,  Format::kQ4_K, Format::kQ5_K,
                            Format::kQ6_K,    Format::kFp8,   Format::kF16,   Format::kBf16};
  uint64_t seed = 1;
  check_special(device, context);
  for (const Format f : formats) {
    if (!names.empty() && std::find(names.begin(), names.end(), info(f).name) == names.end()) continue;
    const bool k = f == Format::kQ4_K || f == Format::kQ5_K || f == Format::kQ6_K;
    check_case({f, {512, 256, 256}, 3840, E::kStore, true}, {300, 128, 65, 1}, device, context, seed += 100);
    check_case({f, {1000, 1000}, 1024, E::kGatedGelu, true}, {200, 130}, device, context, seed += 100);
    const int64_t odd = k ? 768 : f == Format::kFp4G128 ? 896 : f == Format::kNvfp4 ? 576 : 608;
    check_case({f, {777}, odd, E::kSoftcap, false}, {257, 100}, device, context, seed += 100);
    check_case({f, {40, 40}, k ? 1280 : 1024 + (f == Format::kFp4G128 ? 128 : 64), E::kGatedSilu, true}, {130}, device,
               context, seed += 100);
    check_case({f, {320}, 5120, E::kGeluTimesOther, false}, {66}, device, context, seed += 100);
    check_case({f, {300}, 512, E::kTimesGeluOther, true}, {66}, device, context, seed += 100);
    check_case({f, {300}, 512, E::kTimesSiluOther, true}, {66}, device, context, seed += 100);
  }
  // More tiles than blocks, and several groups of tokens; all kernels a few times over.
  if (names.empty())
    check_case({Format::kFp4G128, {4600}, 640, E::kStore, true}, {2200, 2200, 1100}, device, context, seed += 100);
  std::printf("check: %s\n", all_good ? "all passed" : "FAILED");
}

// ---- cuBLASLt ----
__global__ void fill_bf16_kernel(uint16_t* out, int64_t n, uint32_t seed) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x) {
    uint32_t h = static_cast<uint32_t>(i) * 2654435761u + seed;
    h ^= h >> 16, h *= 0x85ebca6bu, h ^= h >> 13, h *= 0xc2b2ae35u, h ^= h >> 16;
    out[i] = __bfloat16_as_ushort(__float2bfloat16_rn((static_cast<float>(h >> 8) * 0x1p-24f - 0.5f) * 3.4f));
  }
}
__global__ void fill_f32_kernel(float* out, int64_t n, uint32_t seed) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x) {
    uint32_t h = static_cast<uint32_t>(i) * 2654435761u + seed;
    h ^= h >> 16, h *= 0x85ebca6bu, h ^= h >> 13, h *= 0xc2b2ae35u, h ^= h >> 16;
    out[i] = (static_cast<float>(h >> 8) * 0x1p-24f - 0.5f) * 3.4f;
  }
}
#if __has_include(<cublasLt.h>)
class Lt {
 public:
  Lt() : library_(dlopen("libcublasLt.so.13", RTLD_NOW)), workspace_(size_t{64} << 20) {
    if (library_ == nullptr) std::printf("no cuBLASLt: %s\n", dlerror());
    else take("cublasLtCreate", create_), create_(&handle_);
  }
  bool found() const { return library_ != nullptr; }
  // y[n][rows] = x[n][cols] · w[rows][cols]ᵀ, all bf16, f32 sums.
  void prepare(int64_t rows, int64_t cols, int64_t n) {
    decltype(&cublasLtMatmulDescCreate) desc_create;
    decltype(&cublasLtMatmulDescSetAttribute) desc_set;
    decltype(&cublasLtMatrixLayoutCreate) layout_create;
    decltype(&cublasLtMatmulPreferenceCreate) preference_create;
    decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
    decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
    take("cublasLtMatmulDescCreate", desc_create), take("cublasLtMatmulDescSetAttribute", desc_set);
    take("cublasLtMatrixLayoutCreate", layout_create), take("cublasLtMatmulPreferenceCreate", preference_create);
    take("cublasLtMatmulPreferenceSetAttribute", preference_set), take("cublasLtMatmulAlgoGetHeuristic", heuristic);
    take("cublasLtMatmul", multiply_);
    desc_create(&desc_, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    const cublasOperation_t transposed = CUBLAS_OP_T;
    desc_set(desc_, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof(transposed));
    layout_create(&w_, CUDA_R_16BF, static_cast<uint64_t>(cols), static_cast<uint64_t>(rows), cols);
    layout_create(&x_, CUDA_R_16BF, static_cast<uint64_t>(cols), static_cast<uint64_t>(n), cols);
    layout_create(&y_, CUDA_R_16BF, static_cast<uint64_t>(rows), static_cast<uint64_t>(n), rows);
    cublasLtMatmulPreference_t preference;
    preference_create(&preference);
    const size_t bytes = workspace_.n;
    preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof(bytes));
    int n_found = 0;
    cublasLtMatmulHeuristicResult_t result = {};
    if (heuristic(handle_, desc_, w_, x_, y_, y_, preference, 1, &result, &n_found) != CUBLAS_STATUS_SUCCESS ||
        n_found == 0)
      throw Error(ErrorCode::kDevice, "cuBLASLt has no algorithm");
    algorithm_ = result.algo;
  }
  void launch(const void* w, const void* x, void* y, cudaStream_t stream) {
    const float one = 1, zero = 0;
    if (multiply_(handle_, desc_, &one, w, w_, x, x_, &zero, y, y_, y, y_, &algorithm_, workspace_.data(), workspace_.n,
                  stream) != CUBLAS_STATUS_SUCCESS)
      throw Error(ErrorCode::kDevice, "cuBLASLt fails");
  }

 private:
  template <class F>
  void take(const char* name, F& to) {
    to = reinterpret_cast<F>(dlsym(library_, name));
  }
  void* library_;
  cublasLtHandle_t handle_ = nullptr;
  decltype(&cublasLtCreate) create_ = nullptr;
  decltype(&cublasLtMatmul) multiply_ = nullptr;
  cublasLtMatmulDesc_t desc_ = nullptr;
  cublasLtMatrixLayout_t w_ = nullptr, x_ = nullptr, y_ = nullptr;
  cublasLtMatmulAlgo_t algorithm_ = {};
  Device<std::byte> workspace_;
};
#else
class Lt {  // built without its header
 public:
  bool found() const { return false; }
  void prepare(int64_t, int64_t, int64_t) {}
  void launch(const void*, const void*, void*, cudaStream_t) {}
};
#endif

// ---- speed ----
struct ShapeCase {
  const char* name;
  std::vector<int64_t> rows;
  int64_t cols;
  bool gated, norm;
  int per_layer;  // of 48 layers; the global layers' shapes are near enough
};
void speed(Format format, bool with_library, const std::vector<int>& counts, const MatvecDevice& device,
           const LaunchContext& context) {
  constexpr int kCopies = 4, kLaunches = 8;
  const std::vector<ShapeCase> shapes = {{"qkv", {4096, 2048, 2048}, 3840, false, true, 1},
                                         {"o", {3840}, 4096, false, false, 1},
                                         {"gate_up", {15360, 15360}, 3840, true, true, 1},
                                         {"down", {3840}, 15360, false, false, 1}};
  const std::string name(info(format).name);
  const int n_max = *std::max_element(counts.begin(), counts.end());
  std::vector<double> layer(counts.size(), 0), library_layer(counts.size(), 0);
  double flops_of_one = 0;
  for (const ShapeCase& s : shapes) {
    const auto m = pack(format, s.rows, s.cols, s.gated, device.n_sms, 5);
    const int64_t rows = m->plan.rows, cols = s.cols, outputs = m->plan.outputs();
    std::vector<std::unique_ptr<Device<std::byte>>> weights;
    for (int i = 0; i < kCopies; ++i) weights.push_back(std::make_unique<Device<std::byte>>(m->bytes));
    const Device<float> x(static_cast<size_t>(n_max * cols)), y(static_cast<size_t>(n_max * outputs)),
        norm(static_cast<size_t>(cols));
    fill_f32_kernel<<<264, 256, 0, context.stream>>>(x.data(), n_max * cols, 1);
    fill_f32_kernel<<<264, 256, 0, context.stream>>>(norm.data(), cols, 2);
    const Device<std::byte> scratch(static_cast<size_t>(prefill_scratch_bytes(m->plan, n_max)));
    std::unique_ptr<Lt> library;
    std::vector<std::unique_ptr<Device<uint16_t>>> wide;
    std::unique_ptr<Device<uint16_t>> wide_x, wide_y;
    if (with_library) {
      library = std::make_unique<Lt>();
      if (!library->found()) library.reset();
    }
    if (library) {
      for (int i = 0; i < kCopies; ++i) {
        wide.push_back(std::make_unique<Device<uint16_t>>(static_cast<size_t>(rows * cols)));
        fill_bf16_kernel<<<264, 256, 0, context.stream>>>(wide.back()->data(), rows * cols, 3 + i);
      }
      wide_x = std::make_unique<Device<uint16_t>>(static_cast<size_t>(n_max * cols));
      wide_y = std::make_unique<Device<uint16_t>>(static_cast<size_t>(n_max * rows));
      fill_bf16_kernel<<<264, 256, 0, context.stream>>>(wide_x->data(), n_max * cols, 9);
    }
    check(cudaStreamSynchronize(context.stream), "filling");
    flops_of_one += 2.0 * static_cast<double>(rows) * static_cast<double>(cols);
    for (size_t c = 0; c < counts.size(); ++c) {
      const int n = counts[c];
      BatchLinearArgs args = {};
      args.x = {x.data(), cols}, args.n_rows = n;
      args.has_norm = s.norm, args.norm_weight = norm.data(), args.norm_eps = 1e-6f;
      args.epilogue = s.gated ? DecodeEpilogue::kGatedGelu : DecodeEpilogue::kStore;
      args.y = {y.data(), outputs};
      args.scratch = scratch.data();
      const double us = 1000.0 / kLaunches *
                        time_graph(
                            context.stream,
                            [&] {
                              for (int i = 0; i < kLaunches; ++i) {
                                args.weights = reinterpret_cast<const uint8_t*>(weights[i % kCopies]->data());
                                launch_prefill_linear(m->plan, args, device, context, tuning);
                              }
                            },
                            7);
      const double prepare_us = 1000.0 / kLaunches *
                                time_graph(
                                    context.stream,
                                    [&] {
                                      for (int i = 0; i < kLaunches; ++i)
                                        prepare_prefill_linear(m->plan, args, context);
                                    },
                                    7);
      double library_us = 0;
      if (library) {
        library->prepare(rows, cols, n);
        library_us = 1000.0 / kLaunches *
                     time_graph(
                         context.stream,
                         [&] {
                           for (int i = 0; i < kLaunches; ++i)
                             library->launch(wide[i % kCopies]->data(), wide_x->data(), wide_y->data(), context.stream);
                         },
                         7);
      }
      const double tera = 2e-6 * static_cast<double>(rows) * static_cast<double>(cols) * n;
      layer[c] += us, library_layer[c] += library_us;
      std::printf(
          "%-8s %-8s %5d rows: %8.1f us (x %5.1f), %6.1f TFLOP/s, without x %6.1f; cuBLASLt bf16 %8.1f us, %6.1f "
          "TFLOP/s\n",
          name.c_str(), s.name, n, us, prepare_us, tera / us, tera / (us - prepare_us), library_us,
          library_us > 0 ? tera / library_us : 0.0);
      std::fflush(stdout);
    }
  }
  for (size_t c = 0; c < counts.size(); ++c)
    std::printf(
        "{\"bench\":\"prefill_layer\",\"format\":\"%s\",\"rows\":%d,\"us\":%.1f,\"tflops\":%.1f,\"library_us\":%.1f,"
        "\"tokens_per_s_of_48\":%.0f}\n",
        name.c_str(), counts[c], layer[c], flops_of_one * counts[c] * 1e-6 / layer[c], library_layer[c],
        counts[c] / (48 * layer[c] * 1e-6));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::string mode = argc > 1 ? argv[1] : "check";
    std::vector<std::string> names;
    for (int i = 2; i < argc; ++i) {
      const std::string word = argv[i];
      if (word == "--tokens" && i + 1 < argc) tuning.tokens = std::atoi(argv[++i]);
      else if (word == "--head-start" && i + 1 < argc) tuning.head_start = std::atoi(argv[++i]);
      else names.push_back(word);
    }
    const MatvecDevice device = this_device();
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, 0), "device");
    const Stream stream = make_stream();
    const LaunchContext context{stream.get(), properties.major >= 9};
    if (!has_prefill_linear()) throw Error(ErrorCode::kUnsupported, "this device has no such products");
    if (mode == "check") check_all(names, device, context);
    if (mode == "speed" || mode == "quick") {
      bool first = mode == "speed";
      for (const std::string& name : names.empty() ? std::vector<std::string>{"fp4_g128"} : names) {
        const auto format = format_by_name(name);
        if (!format) throw Error(ErrorCode::kBadInput, "no such format");
        speed(*format, first, first ? std::vector<int>{65, 128, 256, 512, 1024, 2048, 8192} : std::vector<int>{2048}, device, context);
        first = false;
      }
    }
    std::printf("%s\n", all_good ? "ok" : "FAILED");
    return all_good ? 0 : 1;
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
