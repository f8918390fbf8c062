// The decode weight stream of Gemma 4 12B as a graph of kernels, and what it is worth: a program of its own.
//
//   matvec_bench check            every format and number of rows against double precision; bits that must not change
//   matvec_bench chain [format]   the chain of one token, whole and by shape, beside pure reads of the same bytes
//   matvec_bench profile          each of the five shapes a few times, for a profiler
//
// The chain: 48 layers of qkv, o, gate|up, down, each depending on the one before, with all norms, then the FP8 head.
// For one row the residual sums are in it too (AddNorm within the next matvec, "fused"); for more rows they are left
// out, since there a kernel of their own is faster. Attention is left out: o reads q. Prints a table and one JSON line
// a measurement.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "base/float_formats.h"
#include "base/rng.h"
#include "cuda/handles.h"
#include "cuda/matvec.h"
#include "weights/format.h"

using namespace beryl;
using namespace beryl::cuda;

namespace {

constexpr int kHidden = 3840, kFfn = 15360, kVocab = 262144, kLayers = 48, kReplays = 25;

void parallel(int n, const std::function<void(int)>& work) {
  std::atomic<int> next{0};
  std::vector<std::thread> threads;
  const unsigned n_threads = std::max(1u, std::thread::hardware_concurrency());
  for (unsigned t = 0; t < n_threads; ++t)
    threads.emplace_back([&] {
      for (int i; (i = next++) < n;) work(i);
    });
  for (std::thread& thread : threads) thread.join();
}

// ---- random weights ----

// Random bits are random codes; scales are set to sane values, so that rows of W have entries of about 1 / sqrt(cols).
HostMatrix random_matrix(Format format, int64_t rows, int64_t cols, uint64_t seed) {
  HostMatrix matrix;
  matrix.name = "random";
  matrix.format = format;
  matrix.rows = rows;
  matrix.cols = cols;
  const int64_t row = row_bytes(format, cols), scale_row = row_scale_bytes(format, cols);
  auto storage = std::make_shared<std::vector<std::byte>>(static_cast<size_t>(rows * (row + scale_row)));
  std::byte* codes = storage->data();
  std::byte* scales = codes + rows * row;
  const float size = 1.0f / std::sqrt(static_cast<float>(cols));
  const FormatInfo& format_info = info(format);
  parallel(static_cast<int>(rows), [&](int r) {
    std::byte* bytes = codes + r * row;
    const Random4 start = philox(seed, static_cast<uint64_t>(r));
    uint64_t state = start.x[0] | uint64_t{start.x[1]} << 32 | 1;
    auto next = [&] {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;
      return static_cast<uint32_t>(state >> 32);
    };
    auto unit = [&] { return 0.5f + to_unit_float(next()); };
    for (int64_t i = 0; i < row; ++i) bytes[i] = static_cast<std::byte>(next());
    auto put16 = [&](std::byte* at, uint16_t value) { std::memcpy(at, &value, 2); };
    const int64_t n_blocks = cols / format_info.block_weights;
    for (int64_t b = 0; b < n_blocks; ++b) {
      std::byte* block = bytes + b * format_info.block_bytes;
      const float f = size * unit();
      switch (format) {
        case Format::kQ4_0: put16(block, f32_to_f16(f / 5)); break;
        case Format::kQ5_0: put16(block, f32_to_f16(f / 10)); break;
        case Format::kQ8_0: put16(block, f32_to_f16(f / 80)); break;
        case Format::kQ4_1: put16(block, f32_to_f16(f / 5)), put16(block + 2, f32_to_f16(-1.4f * f)); break;
        case Format::kQ5_1: put16(block, f32_to_f16(f / 10)), put16(block + 2, f32_to_f16(-1.5f * f)); break;
        case Format::kQ4_K: put16(block, f32_to_f16(f / 160)), put16(block + 2, f32_to_f16(f / 25)); break;
        case Format::kQ5_K: put16(block, f32_to_f16(f / 320)), put16(block + 2, f32_to_f16(f / 25)); break;
        case Format::kQ6_K: put16(block + 208, f32_to_f16(f / 1500)); break;
        case Format::kMxfp4: block[0] = static_cast<std::byte>(127 - 7 + next() % 3); break;
        case Format::kNvfp4:
          for (int g = 0; g < 4; ++g) block[g] = static_cast<std::byte>(f32_to_e4m3(size * unit() / 2 * 8));
          break;
        case Format::kFp8: block[0] &= static_cast<std::byte>(0xbf); break;
        case Format::kF16: put16(block, f32_to_f16(size * 3.4f * (to_unit_float(next()) - 0.5f))); break;
        case Format::kBf16: put16(block, f32_to_bf16(size * 3.4f * (to_unit_float(next()) - 0.5f))); break;
        default: break;
      }
    }
    for (int64_t s = 0; scale_row > 0 && s < scale_row / format_info.scale_bytes; ++s) {
      std::byte* at = scales + r * scale_row + s * format_info.scale_bytes;
      const float f = size * unit();
      if (format == Format::kFp4G128) {
        put16(at, f32_to_bf16(f / 3));
      } else {
        const float value = f;
        std::memcpy(at, &value, 4);
      }
    }
  });
  matrix.codes = codes;
  matrix.scales = scale_row > 0 ? scales : nullptr;
  if (format == Format::kNvfp4) matrix.tensor_scale = 0.125f;
  matrix.storage = storage;
  return matrix;
}

std::vector<float> random_values(size_t n, uint64_t seed, float outlier = 1) {
  std::vector<float> values(n);
  for (size_t i = 0; i < n; ++i) {
    const Random4 r = philox(seed, i);
    const float u = to_unit_float(r.x[0]) + to_unit_float(r.x[1]) + to_unit_float(r.x[2]) - 1.5f;
    values[i] = 2 * u * (r.x[3] % 97 == 0 ? outlier : 1.0f);
  }
  return values;
}

// ---- device memory ----
template <class T>
struct Device {
  DevicePtr memory;
  size_t n = 0;
  explicit Device(size_t count) : n(count) {
    void* p = nullptr;
    check(cudaMalloc(&p, std::max<size_t>(16, count * sizeof(T))), "bench memory");
    memory.reset(p);
  }
  explicit Device(const std::vector<T>& host) : Device(host.size()) {
    check(cudaMemcpy(data(), host.data(), n * sizeof(T), cudaMemcpyHostToDevice), "bench copy");
  }
  T* data() const { return static_cast<T*>(memory.get()); }
  std::vector<T> host() const {
    std::vector<T> out(n);
    check(cudaMemcpy(out.data(), data(), n * sizeof(T), cudaMemcpyDeviceToHost), "bench copy");
    return out;
  }
  void poison() const { check(cudaMemset(data(), 0xff, n * sizeof(T)), "bench poison"); }
};

// A packed matrix with its host form.
struct Packed {
  std::vector<HostMatrix> parts;
  MatvecSource source;
  MatvecPlan plan;
  std::vector<std::byte> bytes;
};
std::unique_ptr<Packed> pack(Format format, std::vector<int64_t> rows, int64_t cols, bool gated, int n_sms,
                             uint64_t seed) {
  auto packed = std::make_unique<Packed>();
  for (size_t i = 0; i < rows.size(); ++i) packed->parts.push_back(random_matrix(format, rows[i], cols, seed * 16 + i));
  for (const HostMatrix& part : packed->parts) packed->source.parts.push_back(&part);
  packed->source.gated = gated;
  packed->plan = plan_matvec(packed->source, n_sms);
  const MatvecPlan& plan = packed->plan;
  packed->bytes.resize(static_cast<size_t>(plan.packed_bytes));
  parallel(plan.n_units, [&](int unit) {
    pack_units(plan, packed->source, unit, unit + 1, packed->bytes.data() + unit * plan.unit_bytes);
  });
  if (plan.scales_offset)
    pack_row_scales(plan, packed->source, reinterpret_cast<float*>(packed->bytes.data() + plan.scales_offset));
  return packed;
}

// ---- the reference ----
struct Inputs {                     // of one op, on the host
  std::vector<float> x, add, norm_weight, add_weight;
  bool has_norm = false, has_add = false;
  float eps = 1e-6f, add_scale = 1;
};
// x' and h of one row, in double.
void reference_x(const Inputs& in, int row, int64_t cols, std::vector<double>& sum, std::vector<double>& h) {
  sum.resize(static_cast<size_t>(cols));
  for (int64_t c = 0; c < cols; ++c) sum[c] = in.x[row * cols + c];
  auto factor = [&](auto value) {
    double squares = 0;
    for (int64_t c = 0; c < cols; ++c) squares += value(c) * value(c);
    return 1 / std::sqrt(squares / static_cast<double>(cols) + in.eps);
  };
  if (in.has_add) {
    const double f = factor([&](int64_t c) { return static_cast<double>(in.add[row * cols + c]); });
    for (int64_t c = 0; c < cols; ++c) sum[c] = (sum[c] + in.add[row * cols + c] * f * in.add_weight[c]) * in.add_scale;
  }
  h = sum;
  if (in.has_norm) {
    const double f = factor([&](int64_t c) { return sum[c]; });
    for (int64_t c = 0; c < cols; ++c) h[c] = sum[c] * f * in.norm_weight[c];
  }
}
std::vector<double> reference(const Packed& m, const std::vector<double>& h, MatvecEpilogue epilogue,
                              const float* other, float softcap, int64_t row_stride = 1) {
  const int64_t rows = m.plan.rows, outputs = m.plan.outputs();
  std::vector<double> z(static_cast<size_t>(rows), NAN), y(static_cast<size_t>(outputs), NAN);
  parallel(static_cast<int>((rows + row_stride - 1) / row_stride), [&](int i) {
    const int64_t row = i * row_stride;
    std::vector<float> w(h.size());
    int64_t r = row;
    size_t part = 0;
    while (r >= m.parts[part].rows) r -= m.parts[part++].rows;
    decode_row(m.parts[part], 0, r, w.data());
    double sum = 0;
    for (size_t c = 0; c < h.size(); ++c) sum += static_cast<double>(w[c]) * h[c];
    z[row] = sum;
  });
  auto gelu = [](double v) { return 0.5 * v * (1 + std::tanh(0.7978845608028654 * (v + 0.044715 * v * v * v))); };
  auto silu = [](double v) { return v / (1 + std::exp(-v)); };
  for (int64_t r = 0; r < outputs; ++r) {
    switch (epilogue) {
      case MatvecEpilogue::kGatedGelu: y[r] = gelu(z[r]) * z[r + outputs]; break;
      case MatvecEpilogue::kGatedSilu: y[r] = silu(z[r]) * z[r + outputs]; break;
      case MatvecEpilogue::kGeluTimesOther: y[r] = gelu(z[r]) * other[r]; break;
      case MatvecEpilogue::kTimesGeluOther: y[r] = z[r] * gelu(other[r]); break;
      case MatvecEpilogue::kTimesSiluOther: y[r] = z[r] * silu(other[r]); break;
      case MatvecEpilogue::kSoftcap: y[r] = softcap * std::tanh(z[r] / softcap); break;
      case MatvecEpilogue::kStore: y[r] = z[r]; break;
    }
  }
  return y;
}

struct Comparison {
  double relative = 0;              // |y - ref| / |ref|
  double worst = 0;                 // largest |y - ref| / rms(ref)
  bool complete = true;             // no NaN
};
Comparison compare(const float* y, const std::vector<double>& ref) {
  double difference = 0, size = 0, largest = 0;
  int64_t n = 0;
  Comparison result;
  for (size_t i = 0; i < ref.size(); ++i) {
    if (std::isnan(ref[i])) continue;
    if (!(std::fabs(y[i]) < 1e30f)) result.complete = false;
    const double d = y[i] - ref[i];
    difference += d * d, size += ref[i] * ref[i], ++n;
    largest = std::max(largest, std::fabs(d));
  }
  result.relative = std::sqrt(difference / size);
  result.worst = largest / std::sqrt(size / static_cast<double>(std::max<int64_t>(n, 1)));
  return result;
}

bool all_good = true;
void expect(bool condition, const std::string& what) {
  if (condition) return;
  all_good = false;
  std::printf("FAIL %s\n", what.c_str());
}

// ---- check ----
struct CheckCase {
  Format format;
  std::vector<int64_t> rows;
  int64_t cols;
  MatvecEpilogue epilogue;
  bool norm, add;
};

void check_case(const CheckCase& c, const MatvecDevice& device, const LaunchContext& context, uint64_t seed) {
  const bool gated = c.epilogue == MatvecEpilogue::kGatedGelu || c.epilogue == MatvecEpilogue::kGatedSilu;
  const auto m = pack(c.format, c.rows, c.cols, gated, device.n_sms, seed);
  const Device<std::byte> weights(m->bytes);
  const int64_t outputs = m->plan.outputs(), cols = c.cols;
  Inputs in;
  in.has_norm = c.norm, in.has_add = c.add;
  in.add_scale = 0.75f;
  in.x = random_values(static_cast<size_t>(8 * cols), seed + 1, 30);
  in.add = random_values(static_cast<size_t>(8 * cols), seed + 2, 5);
  in.norm_weight = random_values(static_cast<size_t>(cols), seed + 3);
  in.add_weight = random_values(static_cast<size_t>(cols), seed + 4);
  const std::vector<float> other = random_values(static_cast<size_t>(8 * outputs), seed + 5);
  const Device<float> x(in.x), add(in.add), norm_weight(in.norm_weight), add_weight(in.add_weight), others(other);
  const Device<float> y(static_cast<size_t>(8 * outputs)), sum(static_cast<size_t>(8 * cols));
  auto run = [&](int first, int n_rows, const MatvecDevice& on) {
    MatvecArgs args = {};
    args.weights = reinterpret_cast<const uint8_t*>(weights.data());
    args.x = {x.data() + first * cols, cols, false};
    args.n_rows = n_rows;
    args.has_norm = c.norm, args.norm_weight = norm_weight.data(), args.norm_eps = in.eps;
    if (c.add) {
      args.add = {add.data() + first * cols, cols, false};
      args.add_weight = add_weight.data(), args.add_eps = in.eps, args.add_scale = in.add_scale;
      args.sum = sum.data() + first * cols, args.sum_stride = cols;
    }
    args.epilogue = c.epilogue, args.softcap = 3;
    args.other = {others.data() + first * outputs, outputs, false};
    args.y = {y.data() + first * outputs, outputs, false};
    y.poison(), sum.poison();
    launch_matvec(m->plan, args, on, context);
    check(cudaStreamSynchronize(context.stream), "bench check");
    return y.host();
  };
  const std::vector<float> all = run(0, 8, device);
  const std::vector<float> sums = sum.host();
  Comparison worst;
  std::vector<double> new_x, h;
  for (const int row : {0, 5}) {
    reference_x(in, row, cols, new_x, h);
    const Comparison r =
        compare(all.data() + row * outputs, reference(*m, h, c.epilogue, other.data() + row * outputs, 3));
    worst.relative = std::max(worst.relative, r.relative), worst.worst = std::max(worst.worst, r.worst);
    worst.complete = worst.complete && r.complete;
    if (c.add) expect(compare(sums.data() + row * cols, new_x).relative < 1e-6, "the sum of AddNorm");
  }
  bool same = true;
  MatvecDevice narrow = device;  // so little shared memory that x is prepared in chunks, or rows launched in halves
  narrow.shared_per_sm = narrow.shared_per_block = 99 * 1024;
  for (int row = 0; row < 8; ++row) {
    const std::vector<float> one = run(row, 1, device);
    same = same && std::memcmp(one.data() + row * outputs, all.data() + row * outputs, sizeof(float) * outputs) == 0;
  }
  for (const int n : {2, 3, 4, 5, 7})
    same = same && std::memcmp(run(0, n, device).data(), all.data(), sizeof(float) * outputs * n) == 0;
  same = same && std::memcmp(run(0, 8, narrow).data(), all.data(), sizeof(float) * outputs * 8) == 0;
  same = same && std::memcmp(run(0, 8, device).data(), all.data(), sizeof(float) * outputs * 8) == 0;
  const std::string name(info(c.format).name);
  // Integers: a step of x is 2^-15 of its group's largest value, here up to 30 times the usual one; the error of a sum
  // over columns is that of one of them. Pairs of bf16 have 16 bits, pairs of f16 22.
  const double bound = c.format == Format::kBf16                              ? 1e-5
                       : c.format == Format::kFp8 || c.format == Format::kF16 ? 1e-6
                                                                              : 4e-4;
  expect(worst.complete, name + ": every output is a number");
  expect(worst.relative < bound, name + ": error");
  expect(same, name + ": the same bits for any number of rows and chunks");
  std::printf(
      "%-9s %6ld x %5ld epilogue %d norm %d add %d  k_warps %2d row_warps %d: relative error %.1e, worst %.1e of rms, "
      "bits %s\n",
      name.c_str(), m->plan.rows, cols, static_cast<int>(c.epilogue), c.norm, c.add, m->plan.k_warps, m->plan.row_warps,
      worst.relative, worst.worst, same ? "equal" : "DIFFER");
}

void check_all(const MatvecDevice& device, const LaunchContext& context) {
  using E = MatvecEpilogue;
  const Format formats[] = {Format::kFp4G128, Format::kMxfp4, Format::kNvfp4, Format::kQ4_0, Format::kQ4_1,
                            Format::kQ5_0,    Format::kQ5_1,  Format::kQ8_0,  Format::kQ4_K, Format::kQ5_K,
                            Format::kQ6_K,    Format::kFp8,   Format::kF16,   Format::kBf16};
  uint64_t seed = 1;
  for (const Format f : formats) {
    const bool k = f == Format::kQ4_K || f == Format::kQ5_K || f == Format::kQ6_K;
    check_case({f, {512, 256, 256}, 3840, E::kStore, true, false}, device, context, seed += 100);
    check_case({f, {1000, 1000}, k ? 2560 : 2560, E::kGatedGelu, true, true}, device, context, seed += 100);
    check_case({f,
                {777},
                k                       ? 1024
                : f == Format::kFp4G128 ? 896
                : f == Format::kNvfp4   ? 576
                                        : 608,
                E::kSoftcap,
                false,
                false},
               device, context, seed += 100);
    check_case({f, {320}, 15360, E::kGeluTimesOther, false, false}, device, context, seed += 100);
  }
  check_case({Format::kFp4G128, {3840}, 15360, E::kTimesGeluOther, false, false}, device, context, seed += 100);
  check_case({Format::kQ4_K, {3840}, 15360, E::kTimesSiluOther, false, false}, device, context, seed += 100);
  check_case({Format::kFp4G128, {40, 40}, 5376, E::kGatedSilu, true, true}, device, context, seed += 100);
  check_case({Format::kFp8, {262144}, 1152, E::kSoftcap, true, true}, device, context, seed += 100);
  std::printf("check: %s\n", all_good ? "all passed" : "FAILED");
}

// ---- pure reads ----
struct ReadArgs {
  const uint4* from;
  int64_t n;
  unsigned* sink;
  int early;                        // the next kernel may start at once
};
__global__ void __launch_bounds__(512) read_kernel(ReadArgs a) {
#if __CUDA_ARCH__ >= 900
  if (a.early) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (!a.early) asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  unsigned all = 0;
  for (; i + 3 * stride < a.n; i += 4 * stride) {
    uint4 v[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) v[u] = __ldcs(a.from + i + u * stride);
#pragma unroll
    for (int u = 0; u < 4; ++u) all ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
  }
  for (; i < a.n; i += stride) {
    const uint4 v = __ldcs(a.from + i);
    all ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (all == 0x12345678u) *a.sink = all;
#if __CUDA_ARCH__ >= 900
  if (a.early) asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- the chain ----
enum Shape { kQkv, kO, kGateUp, kDown, kHead, kShapes };
const char* const kShapeNames[] = {"qkv", "o", "gate_up", "down", "head"};

class Chain {
 public:
  Chain(Format format, const MatvecDevice& device) : format_(format), device_(device) {
    const int n = device.n_sms;
    packed_[kQkv][0] = pack(format, {4096, 2048, 2048}, kHidden, false, n, 1);
    packed_[kQkv][1] = pack(format, {8192, 512}, kHidden, false, n, 2);
    packed_[kO][0] = pack(format, {kHidden}, 4096, false, n, 3);
    packed_[kO][1] = pack(format, {kHidden}, 8192, false, n, 4);
    packed_[kGateUp][0] = pack(format, {kFfn, kFfn}, kHidden, true, n, 5);
    packed_[kDown][0] = pack(format, {kHidden}, kFfn, false, n, 6);
    packed_[kHead][0] = pack(Format::kFp8, {kVocab}, kHidden, false, n, 7);
    // Every layer's copy lies elsewhere, so nothing is found in the cache.
    for (int l = 0; l < kLayers; ++l)
      for (int s = 0; s < kHead; ++s) weights_[l][s] = std::make_unique<Device<std::byte>>(at(l, s).bytes);
    head_ = std::make_unique<Device<std::byte>>(at(0, kHead).bytes);
    for (int l = 0; l < kLayers; ++l) {
      for (int s = 0; s < kHead; ++s) layer_bytes_ += at(l, s).plan.packed_bytes;
    }
    for (auto& norms : norms_) {
      std::vector<float> values = random_values(kHidden, 900 + static_cast<uint64_t>(&norms - norms_));
      for (float& v : values) v = 1 + 0.3f * v;
      norms = std::make_unique<Device<float>>(values);
    }
    x0_ = std::make_unique<Device<float>>(random_values(8 * kHidden, 77, 20));
    for (auto& h : hidden_) h = std::make_unique<Device<float>>(8 * kHidden);
    qkv_ = std::make_unique<Device<float>>(8 * 8704);
    o_ = std::make_unique<Device<float>>(8 * kHidden);
    act_ = std::make_unique<Device<float>>(8 * kFfn);
    down_ = std::make_unique<Device<float>>(random_values(8 * kHidden, 78));
    logits_ = std::make_unique<Device<float>>(static_cast<size_t>(8) * kVocab);
    sink_ = std::make_unique<Device<unsigned>>(4);
  }

  static bool global(int l) { return l % 6 == 5; }
  Packed& at(int l, int s) const { return *packed_[s][(s == kQkv || s == kO) && global(l)]; }
  int64_t bytes(int l, int s) const { return at(l, s).plan.packed_bytes; }
  const std::byte* weights(int l, int s) const { return s == kHead ? head_->data() : weights_[l][s]->data(); }
  int64_t layer_bytes() const { return layer_bytes_; }
  int64_t head_bytes() const { return at(0, kHead).plan.packed_bytes; }

  bool fused = true;                // AddNorm within the matvec; else x is normed only

  MatvecArgs args(int l, int s, int n_rows) const {
    MatvecArgs a = {};
    a.weights = reinterpret_cast<const uint8_t*>(weights(l, s));
    a.n_rows = n_rows;
    a.norm_eps = a.add_eps = 1e-6f;
    a.add_scale = 1;
    a.epilogue = s == kGateUp ? MatvecEpilogue::kGatedGelu
                 : s == kHead ? MatvecEpilogue::kSoftcap
                              : MatvecEpilogue::kStore;
    a.softcap = 30;
    if (s == kQkv || s == kGateUp || s == kHead) {
      const float* from = s == kGateUp ? hidden_[0]->data() : l == 0 && s == kQkv ? x0_->data() : hidden_[1]->data();
      a.x = {from, kHidden, false};
      a.has_norm = true;
      a.norm_weight = norms_[s == kGateUp]->data();
      if (fused) {
        a.add = {s == kGateUp ? o_->data() : down_->data(), kHidden, false};
        a.add_weight = norms_[2 + (s == kGateUp)]->data();
        a.sum = hidden_[s == kGateUp]->data();
        a.sum_stride = kHidden;
      } else {
        a.x = {s == kGateUp ? o_->data() : down_->data(), kHidden, false};
      }
    }
    if (s == kO) a.x = {qkv_->data(), 8704, false};
    if (s == kDown) a.x = {act_->data(), kFfn, false};
    if (s == kQkv) a.y = {qkv_->data(), 8704, false};
    if (s == kO) a.y = {o_->data(), kHidden, false};
    if (s == kGateUp) a.y = {act_->data(), kFfn, false};
    if (s == kDown) a.y = {down_->data(), kHidden, false};
    if (s == kHead) a.y = {logits_->data(), kVocab, false};
    return a;
  }
  void launch_one(int l, int s, int n_rows, const LaunchContext& context) const {
    launch_matvec(at(l, s).plan, args(l, s, n_rows), device_, context);
  }
  void read_one(int l, int s, bool early, const LaunchContext& context) const {
    ReadArgs a = {reinterpret_cast<const uint4*>(weights(l, s)), bytes(l, s) / 16, sink_->data(), early};
    LaunchShape shape;
    shape.grid = dim3(static_cast<unsigned>(device_.n_sms) * 2);
    shape.block = dim3(512);
    shape.name = "read";
    launch(context, shape, read_kernel, a);
  }
  void token(int n_rows, const LaunchContext& context) const {
    for (int l = 0; l < kLayers; ++l)
      for (int s = 0; s < kHead; ++s) launch_one(l, s, n_rows, context);
    launch_one(kLayers, kHead, n_rows, context);
  }
  void read_token(bool early, const LaunchContext& context) const {
    for (int l = 0; l < kLayers; ++l)
      for (int s = 0; s < kHead; ++s) read_one(l, s, early, context);
    read_one(0, kHead, early, context);
  }

  // Runs layer by layer and compares some layers' every output with double precision, on the x that the kernel really
  // had.
  void verify(int n_rows, const LaunchContext& context) const {
    double worst[kShapes] = {};
    const std::vector<float> norm[4] = {norms_[0]->host(), norms_[1]->host(), norms_[2]->host(), norms_[3]->host()};
    for (int l = 0; l <= kLayers; ++l) {
      for (int s = l == kLayers ? kHead : 0; s < (l == kLayers ? kShapes : kHead); ++s) {
        const bool looked_at = l == 0 || l == 5 || l == 29 || l >= 47;
        Inputs in;
        MatvecArgs a = args(l, s, n_rows);
        const int64_t cols = at(l, s).plan.cols, outputs = at(l, s).plan.outputs();
        auto fetch = [&](const MatvecRows& rows, int64_t n) {
          std::vector<float> out(static_cast<size_t>(n_rows * n));
          for (int r = 0; r < n_rows; ++r)
            check(cudaMemcpy(out.data() + r * n, static_cast<const float*>(rows.data) + r * rows.stride, 4 * n,
                             cudaMemcpyDeviceToHost),
                  "bench copy");
          return out;
        };
        if (looked_at) {
          in.x = fetch(a.x, cols);
          in.has_norm = a.has_norm, in.has_add = a.add.data != nullptr;
          if (in.has_add) in.add = fetch(a.add, cols), in.add_weight = norm[2 + (s == kGateUp)];
          if (in.has_norm) in.norm_weight = norm[s == kGateUp];
        }
        launch_one(l, s, n_rows, context);
        check(cudaStreamSynchronize(context.stream), kShapeNames[s]);
        if (!looked_at) continue;
        const std::vector<float> y = fetch(a.y, outputs);
        const int row = n_rows - 1;
        std::vector<double> sum, h;
        reference_x(in, row, cols, sum, h);
        const Comparison c = compare(y.data() + row * outputs,
                                     reference(at(l, s), h, a.epilogue, nullptr, a.softcap, s == kHead ? 61 : 1));
        expect(c.complete && c.relative < 2e-4, std::string("chain, ") + kShapeNames[s]);
        worst[s] = std::max(worst[s], c.relative);
      }
    }
    std::printf("verify %s, %d rows: worst relative error qkv %.1e o %.1e gate_up %.1e down %.1e head %.1e\n",
                std::string(info(format_).name).c_str(), n_rows, worst[0], worst[1], worst[2], worst[3], worst[4]);
  }

  uint64_t digest(int n_rows, const LaunchContext& context) const {
    const std::vector<float> start = random_values(8 * kHidden, 78);
    check(cudaMemcpy(down_->data(), start.data(), start.size() * 4, cudaMemcpyHostToDevice), "bench copy");
    token(n_rows, context);
    check(cudaStreamSynchronize(context.stream), "bench token");
    uint64_t hash = 0;
    const std::vector<float> values = logits_->host();
    for (size_t i = 0; i < kVocab; ++i) {
      uint32_t bits;
      std::memcpy(&bits, &values[i], 4);
      hash = hash * 1000003u + bits;
    }
    return hash;
  }

 private:
  Format format_;
  MatvecDevice device_;
  std::unique_ptr<Packed> packed_[kShapes][2];
  std::unique_ptr<Device<std::byte>> weights_[kLayers][kHead];
  std::unique_ptr<Device<std::byte>> head_;
  std::unique_ptr<Device<float>> norms_[4], x0_, hidden_[2], qkv_, o_, act_, down_, logits_;
  std::unique_ptr<Device<unsigned>> sink_;
  int64_t layer_bytes_ = 0;
};

// Median, in ms, of graph replays.
double time_graph(cudaStream_t stream, const std::function<void()>& capture) {
  cudaGraph_t raw = nullptr;
  cudaGraphExec_t raw_exec = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  capture();
  check(cudaStreamEndCapture(stream, &raw), "capture");
  const Graph graph(raw);
  check(cudaGraphInstantiate(&raw_exec, raw, 0), "graph");
  const GraphExec exec(raw_exec);
  const Event begin = [] { cudaEvent_t e; check(cudaEventCreate(&e), "event"); return Event(e); }();
  const Event end = [] { cudaEvent_t e; check(cudaEventCreate(&e), "event"); return Event(e); }();
  for (int i = 0; i < 4; ++i) check(cudaGraphLaunch(exec.get(), stream), "replay");
  std::vector<float> times;
  for (int i = 0; i < kReplays; ++i) {
    check(cudaEventRecord(begin.get(), stream), "event");
    check(cudaGraphLaunch(exec.get(), stream), "replay");
    check(cudaEventRecord(end.get(), stream), "event");
    check(cudaEventSynchronize(end.get()), "replay");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin.get(), end.get()), "event");
    times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void bench_format(Format format, bool details, const MatvecDevice& device, const LaunchContext& context) {
  Chain chain(format, device);
  const std::string name(info(format).name);
  const double layer_gb = static_cast<double>(chain.layer_bytes()) / 1e9,
               head_gb = static_cast<double>(chain.head_bytes()) / 1e9;
  for (const bool fused : {true, false}) {
    chain.fused = fused;
    for (const int n_rows : {1, 4}) chain.verify(n_rows, context);
    const uint64_t bits = chain.digest(1, context);
    expect(bits == chain.digest(1, context) && bits == chain.digest(3, context),
           "row 0 of a token has the same bits again and in a batch");
  }
  const double read = time_graph(context.stream, [&] { chain.read_token(true, context); });
  const double serial = time_graph(context.stream, [&] { chain.read_token(false, context); });
  std::printf(
      "%s: layers %.3f GB, head %.3f GB; pure reads, overlapping: %.3f ms (%.2f TB/s), one after the other: %.3f ms\n",
      name.c_str(), layer_gb, head_gb, read, (layer_gb + head_gb) / read, serial);
  for (const int n_rows : {1, 1, 2, 4, 8}) {
    chain.fused = n_rows == 1 && !chain.fused;    // one row both ways
    const double ms = time_graph(context.stream, [&] { chain.token(n_rows, context); });
    std::printf(
        "%s: token, %d rows%s: %.3f ms, %.0f tokens/s, %.2f TB/s, %.1f %% of pure reads (%.1f %% of serial ones)\n",
        name.c_str(), n_rows, chain.fused ? ", sums fused" : "", ms, 1000 * n_rows / ms, (layer_gb + head_gb) / ms,
        100 * read / ms, 100 * serial / ms);
    std::printf(
        "{\"bench\":\"matvec_chain\",\"format\":\"%s\",\"rows\":%d,\"fused\":%s,\"ms\":%.4f,\"gb\":%.4f,\"pure_read_"
        "ms\":%.4f,\"serial_read_ms\":%.4f}\n",
        name.c_str(), n_rows, chain.fused ? "true" : "false", ms, layer_gb + head_gb, read, serial);
    if (!details && n_rows >= 4) break;
  }
  if (!details) return;
  for (int s = 0; s < kShapes; ++s) {
    for (const int n_rows : {1, 4, 8}) {
      chain.fused = n_rows == 1;
      const int count = s == kHead ? 4 : 40;
      auto each = [&](auto&& launch_it) {
        return 1000 / count * time_graph(context.stream, [&] {
          for (int i = 0, l = 0; i < count; ++l)
            if (s == kHead || !Chain::global(l)) launch_it(s == kHead ? kLayers : l), ++i;
        });
      };
      const double us = each([&](int l) { chain.launch_one(l, s, n_rows, context); });
      const double early = each([&](int l) { chain.read_one(l, s, true, context); });
      const double late = each([&](int l) { chain.read_one(l, s, false, context); });
      const double mb = static_cast<double>(chain.bytes(0, s)) / 1e6;
      std::printf(
          "%-8s %d rows: %7.2f us, %.2f TB/s; pure read %7.2f us overlapping (%.1f %%), %7.2f us serial (%.1f %%)\n",
          kShapeNames[s], n_rows, us, mb / us, early, 100 * early / us, late, 100 * late / us);
      std::printf(
          "{\"bench\":\"matvec\",\"format\":\"%s\",\"shape\":\"%s\",\"rows\":%d,\"us\":%.3f,\"mb\":%.3f,\"pure_read_"
          "us\":%.3f,\"serial_read_us\":%.3f}\n",
          name.c_str(), kShapeNames[s], n_rows, us, mb, early, late);
    }
  }
}

void profile(const MatvecDevice& device, const LaunchContext& context) {
  const Chain chain(Format::kFp4G128, device);
  for (int i = 0; i < 2; ++i) {
    for (int s = 0; s < kHead; ++s) chain.launch_one(i, s, 1, context);
    chain.launch_one(kLayers, kHead, 1, context);
  }
  check(cudaStreamSynchronize(context.stream), "profile");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::string mode = argc > 1 ? argv[1] : "check";
    const MatvecDevice device = matvec_device();
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, 0), "device");
    std::printf("%s, %d multiprocessors, shared memory %d a block, %d a multiprocessor\n", properties.name,
                device.n_sms, device.shared_per_block, device.shared_per_sm);
    const Stream stream = make_stream();
    const LaunchContext context{stream.get(), properties.major >= 9};
    if (mode == "check") check_all(device, context);
    if (mode == "chain") {
      const auto format = format_by_name(argc > 2 ? argv[2] : "fp4_g128");
      if (!format) throw Error(ErrorCode::kBadInput, "no such format");
      bench_format(*format, argc <= 3, device, context);
    }
    if (mode == "profile") profile(device, context);
    std::printf("%s\n", all_good ? "ok" : "FAILED");
    return all_good ? 0 : 1;
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
