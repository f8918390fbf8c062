// The batched linear layers alone: a program of its own.
//
//   batch_bench check [formats]  every format, epilogue and several numbers of rows: against double precision, and bit
//                                for bit against one warp that adds in the order that matvec_layout.h prescribes
//   batch_bench chain [format]   the products of one step of Gemma 4 12B as a graph of kernels, whole and by shape,
//                                beside pure reads of the same bytes
//   batch_bench profile          each of the five shapes once, with 16 and 64 rows, for a profiler
//
// The chain: 48 layers of qkv, o, gate|up, down, each depending on the one before, with the norms before qkv, gate|up
// and the FP8 head. Attention and residual sums are left out: o reads q. Prints a table and one JSON line a
// measurement.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cuda/batch_linear.h"
#include "cuda/bench_support.h"
#include "cuda/codec.cuh"
#include "cuda/row_math.cuh"
#include "weights/decode.h"
#include "weights/format.h"

using namespace beryl;
using namespace beryl::cuda;

namespace {

constexpr int kHidden = 3840, kFfn = 15360, kVocab = 262144, kLayers = 48;

// ---- the prescribed order: one warp for a row tile and 4 rows of x ----
struct OrderArgs {
  const uint8_t* weights;
  const float* row_scales;
  int64_t unit_bytes, stage_bytes;
  int stage_code_bytes, k_warps, row_warps, n_stages, n_column_tiles, cols, n_rows, outputs;
  bool gated, has_norm;
  const float* norm_weight;
  float eps, softcap;
  DecodeEpilogue epilogue;
  RowsView x, other, y;
};
template <class Codec, Format kFormat>
__global__ void __launch_bounds__(32) order_kernel(OrderArgs a) {
  constexpr TileShape kTile = tile_shape(kFormat);
  constexpr int kRowBytes = Codec::kX == XForm::kInt16 ? 256 : 512;
  __shared__ __align__(16) unsigned char codes[4 * kRowBytes];
  __shared__ __align__(16) float sums[16], scales[4], norm_sums[512];
  const int lane = static_cast<int>(threadIdx.x), row_tile = static_cast<int>(blockIdx.x),
            first_row = static_cast<int>(blockIdx.y) * 4;
  float factor = 1;
  const int row = min(first_row + lane % 4, a.n_rows - 1);
  auto x_of = [&](int r, int col) {
    return col < a.cols
               ? *reinterpret_cast<const float4*>(a.x.values + min(first_row + r, a.n_rows - 1) * a.x.stride + col)
               : make_float4(0, 0, 0, 0);
  };
  for (int r = 0; a.has_norm && r < 4; ++r) {
    for (int group = 0; group * 128 < a.cols; ++group) {
      const float4 v = x_of(r, group * 128 + lane * 4);
      float sum = fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, v.x * v.x)));
      for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
      if (lane == 0) norm_sums[group] = sum;
    }
    __syncwarp();
    float parts[4] = {};
    for (int group = 0; group * 128 < a.cols; ++group) parts[group % 4] += norm_sums[group];
    const float sum = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    if (lane % 4 == r) factor = rsqrtf(fmaf(sum, 1.0f / static_cast<float>(a.cols), a.eps));
    __syncwarp();
  }
  LaneX<1> lane_x = {};
  lane_x.tables = {kPositiveLow, kNegativeLow, ~0u};
  lane_x.codes[0] = lane / 8 * kRowBytes + lane % 8 * 16;
  lane_x.scales[0] = static_cast<int>(reinterpret_cast<unsigned char*>(scales + lane % 4) - codes);
  lane_x.sums[0] = static_cast<int>(reinterpret_cast<unsigned char*>(sums + lane % 4 * 4) - codes);
  float total[2] = {};
  for (int stage = 0; stage < a.n_stages; stage += kChunkStages) {
    float chunk[2] = {};
    for (int k = 0; k < a.k_warps; ++k) {
      float part[1][2] = {};
      for (int s = stage; s < min(stage + kChunkStages, a.n_stages); ++s) {
        const int column = column_tile_of(a.n_stages, a.k_warps, s, k);
        if (column >= a.n_column_tiles) continue;
        const int first_col = column * kTile.columns / 128 * 128;
        __syncwarp();
        for (int r = 0; r < 4; ++r) {
          float4 v = x_of(r, first_col + lane * 4);
          if (a.has_norm && first_col + lane * 4 < a.cols)
            v = times(v, load_weight4(a.norm_weight, first_col + lane * 4));
          write_group(Codec::kX, Codec::kNeedsSums, Codec::kXScale, v, lane, codes + r * kRowBytes, scales + r,
                      sums + r * 4);
        }
        __syncwarp();
        const uint8_t* at = a.weights + row_tile / a.row_warps * a.unit_bytes + s * a.stage_bytes;
        const int index = k * a.row_warps + row_tile % a.row_warps;
        typename Codec::Loaded tile;
        Codec::load(tile, at + index * kTile.code_bytes, at + a.stage_code_bytes + index * kTile.meta_bytes, lane);
        typename Codec::template Product<1> product;
        product.start(tile, codes, lane_x, kTile.columns == 64 ? column % 2 : 0);
        for (int i = 0; i < Codec::kSteps; ++i) product.step(tile, i);
        product.finish(tile, part);
      }
      for (int h = 0; h < 2; ++h) chunk[h] = k == 0 ? part[0][h] : __fadd_rn(chunk[h], part[0][h]);
    }
    for (int h = 0; h < 2; ++h) total[h] = stage == 0 ? chunk[h] : __fadd_rn(total[h], chunk[h]);
  }
  for (int h = 0; h < 2; ++h) {
    if (a.has_norm) total[h] = __fmul_rn(total[h], factor);
    if (a.row_scales != nullptr) total[h] = __fmul_rn(total[h], a.row_scales[row_tile * 16 + lane / 4 + 8 * h]);
  }
  if (first_row + lane % 4 >= a.n_rows) return;
  for (int h = 0; h < (a.gated ? 1 : 2); ++h) {
    const int col = row_tile * (a.gated ? 8 : 16) + lane / 4 + 8 * h;
    if (col >= a.outputs) continue;
    float value = total[h];
    const float other = a.other.values != nullptr ? a.other.values[row * a.other.stride + col] : 0.0f;
    switch (a.epilogue) {
      case DecodeEpilogue::kGatedGelu: value = __fmul_rn(quick_gelu_tanh(total[0]), total[1]); break;
      case DecodeEpilogue::kGatedSilu: value = __fmul_rn(quick_silu(total[0]), total[1]); break;
      case DecodeEpilogue::kGeluTimesOther: value = quick_gelu_tanh(value) * other; break;
      case DecodeEpilogue::kTimesGeluOther: value = value * quick_gelu_tanh(other); break;
      case DecodeEpilogue::kTimesSiluOther: value = value * quick_silu(other); break;
      case DecodeEpilogue::kSoftcap: value = a.softcap * tanhf(__fdividef(value, a.softcap)); break;
      case DecodeEpilogue::kStore: break;
    }
    a.y.values[row * a.y.stride + col] = __uint_as_float(round_result(value));
  }
}
using OrderKernel = void (*)(OrderArgs);
OrderKernel order_kernel_of(Format format) {
  switch (format) {
    case Format::kFp4G128: return order_kernel<Fp4G128, Format::kFp4G128>;
    case Format::kMxfp4: return order_kernel<Mxfp4, Format::kMxfp4>;
    case Format::kNvfp4: return order_kernel<Nvfp4, Format::kNvfp4>;
    case Format::kQ4_0: return order_kernel<GroupOf32<4, false>, Format::kQ4_0>;
    case Format::kQ4_1: return order_kernel<GroupOf32<4, true>, Format::kQ4_1>;
    case Format::kQ5_0: return order_kernel<GroupOf32<5, false>, Format::kQ5_0>;
    case Format::kQ5_1: return order_kernel<GroupOf32<5, true>, Format::kQ5_1>;
    case Format::kQ8_0: return order_kernel<GroupOf32<8, false>, Format::kQ8_0>;
    case Format::kQ4_K: return order_kernel<GroupOf32K<4>, Format::kQ4_K>;
    case Format::kQ5_K: return order_kernel<GroupOf32K<5>, Format::kQ5_K>;
    case Format::kQ6_K: return order_kernel<Q6K, Format::kQ6_K>;
    case Format::kFp8: return order_kernel<Fp8, Format::kFp8>;
    case Format::kF16: return order_kernel<Float16<false>, Format::kF16>;
    default: return order_kernel<Float16<true>, Format::kBf16>;
  }
}
void launch_in_order(const MatvecPlan& plan, const BatchLinearArgs& args, const LaunchContext& context) {
  OrderArgs a = {};
  a.weights = args.weights;
  a.row_scales = plan.scales_offset != 0 ? reinterpret_cast<const float*>(args.weights + plan.scales_offset) : nullptr;
  a.unit_bytes = plan.unit_bytes, a.stage_bytes = plan.stage_bytes;
  a.stage_code_bytes = plan.stage_tiles() * tile_shape(plan.format).code_bytes;
  a.k_warps = plan.k_warps, a.row_warps = plan.row_warps, a.n_stages = plan.n_stages;
  a.n_column_tiles = plan.n_column_tiles, a.cols = static_cast<int>(plan.cols), a.n_rows = args.n_rows;
  a.outputs = static_cast<int>(plan.outputs()), a.gated = plan.gated, a.has_norm = args.has_norm;
  a.norm_weight = args.norm_weight, a.eps = args.norm_eps, a.softcap = args.softcap, a.epilogue = args.epilogue;
  a.x = args.x, a.other = args.other, a.y = args.y;
  order_kernel_of(
      plan.format)<<<dim3(static_cast<unsigned>(plan.n_row_tiles), static_cast<unsigned>(args.n_rows + 3) / 4), 32, 0,
                     context.stream>>>(a);
  check(cudaGetLastError(), "order kernel");
}

// ---- double precision ----
std::vector<double> reference(const Packed& m, const float* x, const float* norm_weight, float eps,
                              DecodeEpilogue epilogue, const float* other, float softcap) {
  const int64_t rows = m.plan.rows, outputs = m.plan.outputs(), cols = m.plan.cols;
  std::vector<double> h(x, x + cols), z(static_cast<size_t>(rows)), y(static_cast<size_t>(outputs));
  if (norm_weight != nullptr) {
    double squares = 0;
    for (const double v : h) squares += v * v;
    const double f = 1 / std::sqrt(squares / static_cast<double>(cols) + eps);
    for (int64_t c = 0; c < cols; ++c) h[c] *= f * norm_weight[c];
  }
  parallel(static_cast<int>(rows), [&](int row) {
    std::vector<float> w(h.size());
    int64_t r = row;
    size_t part = 0;
    while (r >= m.parts[part].rows) r -= m.parts[part++].rows;
    decode_row(m.parts[part], 0, r, w.data());
    double sum = 0;
    for (size_t c = 0; c < h.size(); ++c) sum += static_cast<double>(w[c]) * h[c];
    z[row] = sum;
  });
  const auto gelu = [](double v) { return 0.5 * v * (1 + std::tanh(0.7978845608028654 * (v + 0.044715 * v * v * v))); };
  const auto silu = [](double v) { return v / (1 + std::exp(-v)); };
  for (int64_t r = 0; r < outputs; ++r) {
    switch (epilogue) {
      case DecodeEpilogue::kGatedGelu: y[r] = gelu(z[r]) * z[r + outputs]; break;
      case DecodeEpilogue::kGatedSilu: y[r] = silu(z[r]) * z[r + outputs]; break;
      case DecodeEpilogue::kGeluTimesOther: y[r] = gelu(z[r]) * other[r]; break;
      case DecodeEpilogue::kTimesGeluOther: y[r] = z[r] * gelu(other[r]); break;
      case DecodeEpilogue::kTimesSiluOther: y[r] = z[r] * silu(other[r]); break;
      case DecodeEpilogue::kSoftcap: y[r] = softcap * std::tanh(z[r] / softcap); break;
      case DecodeEpilogue::kStore: y[r] = z[r]; break;
    }
  }
  return y;
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
  DecodeEpilogue epilogue;
  bool norm;
};
void check_case(const CheckCase& c, const std::vector<int>& counts, const MatvecDevice& device,
                const LaunchContext& context, uint64_t seed) {
  const bool gated = c.epilogue == DecodeEpilogue::kGatedGelu || c.epilogue == DecodeEpilogue::kGatedSilu;
  const auto m = pack(c.format, c.rows, c.cols, gated, device.n_sms, seed);
  const Device<std::byte> weights(m->bytes);
  const int64_t outputs = m->plan.outputs(), cols = c.cols;
  const int n_max = *std::max_element(counts.begin(), counts.end());
  const auto xs = random_values(static_cast<size_t>(n_max * cols), seed + 1, 30);
  const auto norms = random_values(static_cast<size_t>(cols), seed + 3);
  const auto others = random_values(static_cast<size_t>(n_max * outputs), seed + 5);
  const Device<float> x(xs), norm(norms), other(others), y(static_cast<size_t>(n_max * outputs));
  const Device<std::byte> scratch(static_cast<size_t>(batch_scratch_bytes(m->plan, n_max, device)));
  const auto arguments = [&](int n_rows) {
    BatchLinearArgs args = {};
    args.weights = reinterpret_cast<const uint8_t*>(weights.data());
    args.x = {x.data(), cols};
    args.n_rows = n_rows;
    args.has_norm = c.norm, args.norm_weight = norm.data(), args.norm_eps = 1e-6f;
    args.epilogue = c.epilogue, args.softcap = 3;
    args.other = {other.data(), outputs};
    args.y = {y.data(), outputs};
    args.scratch = scratch.data();
    return args;
  };
  const auto finish = [&] {
    check(cudaStreamSynchronize(context.stream), "bench check");
    return y.host();
  };
  check(cudaMemset(scratch.data(), 0, scratch.n), "bench scratch");
  y.poison();
  launch_in_order(m->plan, arguments(n_max), context);
  const std::vector<float> in_order = finish();
  const std::string name(info(c.format).name);
  double relative = 0;
  for (const int row : {0, n_max - 1}) {
    const auto ref = reference(*m, xs.data() + row * cols, c.norm ? norms.data() : nullptr, 1e-6f, c.epilogue,
                               others.data() + row * outputs, 3);
    double difference = 0, size = 0;
    for (int64_t i = 0; i < outputs; ++i) {
      const double d = in_order[row * outputs + i] - ref[i];
      difference += d * d, size += ref[i] * ref[i];
    }
    relative = std::max(relative, std::sqrt(difference / size));
  }
  // Integers: a step of x is 2^-15 of its group's largest value, here up to 30 times the usual one. Pairs of bf16 have
  // 16 bits, pairs of f16 22; results 23.
  const double bound = c.format == Format::kBf16                              ? 1e-5
                       : c.format == Format::kFp8 || c.format == Format::kF16 ? 2e-6
                                                                              : 4e-4;
  expect(relative < bound, name + ": error against double precision");
  bool same = true;
  for (const int n : counts) {
    y.poison();
    launch_batch_linear(m->plan, arguments(n), device, context);
    const std::vector<float> got = finish();
    int64_t wrong = 0;
    for (int64_t i = 0; i < n * outputs; ++i) {
      uint32_t a, b;
      std::memcpy(&a, &got[i], 4), std::memcpy(&b, &in_order[i], 4);
      if (a != b && wrong++ == 0)
        std::printf("%s, %d rows: row %d, output %d is %g, in order %g\n", name.c_str(), n,
                    static_cast<int>(i / outputs), static_cast<int>(i % outputs), got[i], in_order[i]);
    }
    for (int64_t i = n * outputs; i < n_max * outputs; ++i) {
      uint32_t a;
      std::memcpy(&a, &got[i], 4);
      if (a != ~0u) ++wrong;                    // written beyond its rows
    }
    same = same && wrong == 0;
    expect(wrong == 0, name + ", " + std::to_string(n) + " rows: " + std::to_string(wrong) + " bits differ");
  }
  std::printf("%-9s %6ld x %5ld, epilogue %d, norm %d, %d chunks, k %d x %d rows: relative error %.1e, bits %s\n",
              name.c_str(), static_cast<long>(m->plan.rows), static_cast<long>(cols), static_cast<int>(c.epilogue),
              c.norm, m->plan.n_chunks(), m->plan.k_warps, m->plan.row_warps, relative, same ? "equal" : "DIFFER");
  std::fflush(stdout);
}
void check_all(const std::vector<std::string>& names, const MatvecDevice& device, const LaunchContext& context) {
  using E = DecodeEpilogue;
  const Format formats[] = {Format::kFp4G128, Format::kMxfp4, Format::kNvfp4, Format::kQ4_0, Format::kQ4_1,
                            Format::kQ5_0,    Format::kQ5_1,  Format::kQ8_0,  Format::kQ4_K, Format::kQ5_K,
                            Format::kQ6_K,    Format::kFp8,   Format::kF16,   Format::kBf16};
  uint64_t seed = 1;
  const std::vector<int> some = {64, 9, 16, 17, 48}, many = {100, 1, 5, 16, 31, 33, 47, 63, 64};
  for (const Format f : formats) {
    if (!names.empty() && std::find(names.begin(), names.end(), info(f).name) == names.end()) continue;
    const bool k = f == Format::kQ4_K || f == Format::kQ5_K || f == Format::kQ6_K;
    check_case({f, {512, 256, 256}, 3840, E::kStore, true}, some, device, context, seed += 100);
    check_case({f, {1000, 1000}, 2560, E::kGatedGelu, true}, some, device, context, seed += 100);
    const int64_t odd = k ? 1024 : f == Format::kFp4G128 ? 896 : f == Format::kNvfp4 ? 576 : 608;
    check_case({f, {777}, odd, E::kSoftcap, false}, many, device, context, seed += 100);
    check_case({f, {320}, 15360, E::kGeluTimesOther, false}, some, device, context, seed += 100);
    check_case({f, {40, 40}, k ? 5376 : 5376 + (f == Format::kFp4G128 ? 128 : 64), E::kGatedSilu, true}, some, device,
               context, seed += 100);
    check_case({f, {2500}, 2048, E::kTimesGeluOther, true}, some, device, context, seed += 100);
    check_case({f, {2200}, 1024, E::kTimesSiluOther, true}, some, device, context, seed += 100);
  }
  for (const Format f : {Format::kFp4G128, Format::kFp8, Format::kQ4_K})
    if (names.empty()) check_case({f, {16400}, 2560, E::kStore, true}, {64, 16, 32}, device, context, seed += 100);
  // So many row tiles that a block multiplies all chunks of its own.
  if (names.empty())
    check_case({Format::kFp4G128, {68000}, 4352, E::kStore, true}, {64, 16}, device, context, seed += 100);
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
  Chain(Format format, int n_layers, const MatvecDevice& device) : n_layers_(n_layers), device_(device) {
    const int n = device.n_sms;
    packed_[kQkv][0] = pack(format, {4096, 2048, 2048}, kHidden, false, n, 1);
    packed_[kQkv][1] = pack(format, {8192, 512}, kHidden, false, n, 2);
    packed_[kO][0] = pack(format, {kHidden}, 4096, false, n, 3);
    packed_[kO][1] = pack(format, {kHidden}, 8192, false, n, 4);
    packed_[kGateUp][0] = pack(format, {kFfn, kFfn}, kHidden, true, n, 5);
    packed_[kDown][0] = pack(format, {kHidden}, kFfn, false, n, 6);
    packed_[kHead][0] = pack(Format::kFp8, {kVocab}, kHidden, false, n, 7);
    // Every layer's copy lies elsewhere, so nothing is found in the cache.
    for (int l = 0; l < n_layers_; ++l) {
      for (int s = 0; s < kHead; ++s) {
        const bool first = l == (global(l) ? 5 : 0) || ((s == kGateUp || s == kDown) && l == 0);
        weights_[l][s] = std::make_unique<Device<std::byte>>(at(l, s).bytes.size());
        if (first || !global(l) || l > 5)
          check(first ? cudaMemcpy(weights_[l][s]->data(), at(l, s).bytes.data(), at(l, s).bytes.size(),
                                   cudaMemcpyHostToDevice)
                      : cudaMemcpy(weights_[l][s]->data(), weights_[global(l) && s <= kO ? 5 : 0][s]->data(),
                                   at(l, s).bytes.size(), cudaMemcpyDeviceToDevice),
                "bench copy");
        layer_bytes_ += at(l, s).plan.packed_bytes;
        scratch_bytes_ = std::max(scratch_bytes_, batch_scratch_bytes(at(l, s).plan, kBatchRows, device));
      }
    }
    head_ = std::make_unique<Device<std::byte>>(at(0, kHead).bytes);
    scratch_bytes_ = std::max(scratch_bytes_, batch_scratch_bytes(at(0, kHead).plan, kBatchRows, device));
    for (auto& norm : norms_) {
      std::vector<float> values = random_values(kHidden, 900 + static_cast<uint64_t>(&norm - norms_));
      for (float& v : values) v = 1 + 0.3f * v;
      norm = std::make_unique<Device<float>>(values);
    }
    qkv_ = std::make_unique<Device<float>>(kBatchRows * 8704);
    o_ = std::make_unique<Device<float>>(kBatchRows * kHidden);
    act_ = std::make_unique<Device<float>>(kBatchRows * kFfn);
    down_ = std::make_unique<Device<float>>(random_values(kBatchRows * kHidden, 78, 20));
    logits_ = std::make_unique<Device<float>>(static_cast<size_t>(kBatchRows) * kVocab);
    scratch_ = std::make_unique<Device<std::byte>>(static_cast<size_t>(scratch_bytes_));
    check(cudaMemset(scratch_->data(), 0, scratch_->n), "bench scratch");
    sink_ = std::make_unique<Device<unsigned>>(4);
  }

  static bool global(int l) { return l % 6 == 5; }
  const Packed& at(int l, int s) const { return *packed_[s][(s == kQkv || s == kO) && global(l)]; }
  int64_t bytes(int l, int s) const { return at(l, s).plan.packed_bytes; }
  const std::byte* weights(int l, int s) const { return s == kHead ? head_->data() : weights_[l][s]->data(); }
  int64_t layer_bytes() const { return layer_bytes_; }
  int64_t head_bytes() const { return at(0, kHead).plan.packed_bytes; }
  int64_t scratch_bytes() const { return scratch_bytes_; }

  BatchLinearArgs args(int l, int s, int n_rows) const {
    BatchLinearArgs a = {};
    a.weights = reinterpret_cast<const uint8_t*>(weights(l, s));
    a.n_rows = n_rows;
    a.norm_eps = 1e-6f;
    a.has_norm = s == kQkv || s == kGateUp || s == kHead;
    a.norm_weight = norms_[s == kGateUp]->data();
    a.epilogue = s == kGateUp ? DecodeEpilogue::kGatedGelu
                 : s == kHead ? DecodeEpilogue::kSoftcap
                              : DecodeEpilogue::kStore;
    a.softcap = 30;
    a.scratch = scratch_->data();
    if (s == kQkv) a.x = {down_->data(), kHidden}, a.y = {qkv_->data(), 8704};
    if (s == kO) a.x = {qkv_->data(), 8704}, a.y = {o_->data(), kHidden};
    if (s == kGateUp) a.x = {o_->data(), kHidden}, a.y = {act_->data(), kFfn};
    if (s == kDown) a.x = {act_->data(), kFfn}, a.y = {down_->data(), kHidden};
    if (s == kHead) a.x = {down_->data(), kHidden}, a.y = {logits_->data(), kVocab};
    return a;
  }
  void launch_one(int l, int s, int n_rows, const LaunchContext& context) const {
    launch_batch_linear(at(l, s).plan, args(l, s, n_rows), device_, context);
  }
  void read_one(int l, int s, bool early, const LaunchContext& context) const {
    LaunchShape shape;
    shape.grid = dim3(static_cast<unsigned>(device_.n_sms) * 2);
    shape.block = dim3(512);
    shape.name = "read";
    launch(context, shape, read_kernel,
           ReadArgs{reinterpret_cast<const uint4*>(weights(l, s)), bytes(l, s) / 16, sink_->data(), early});
  }
  void token(int n_rows, const LaunchContext& context) const {
    for (int l = 0; l < n_layers_; ++l)
      for (int s = 0; s < kHead; ++s) launch_one(l, s, n_rows, context);
    launch_one(0, kHead, n_rows, context);
  }
  void read_token(bool early, const LaunchContext& context) const {
    for (int l = 0; l < n_layers_; ++l)
      for (int s = 0; s < kHead; ++s) read_one(l, s, early, context);
    read_one(0, kHead, early, context);
  }

  // Every shape's y against the prescribed order, bit for bit, on the x that the chain gives it.
  void verify(int n_rows, const LaunchContext& context) const {
    for (const int l : {0, 5}) {
      for (int s = 0; s < kShapes; ++s) {
        const BatchLinearArgs a = args(l, s, n_rows);
        const int64_t outputs = at(l, s).plan.outputs();
        const Device<float> expected(static_cast<size_t>(n_rows * outputs));
        BatchLinearArgs in_order = a;
        in_order.y = {expected.data(), outputs};
        launch_in_order(at(l, s).plan, in_order, context);
        launch_one(l, s, n_rows, context);
        check(cudaStreamSynchronize(context.stream), kShapeNames[s]);
        const std::vector<float> e = expected.host();
        std::vector<float> y(static_cast<size_t>(n_rows * outputs));
        check(cudaMemcpy2D(y.data(), outputs * 4, a.y.values, a.y.stride * 4, outputs * 4, n_rows,
                           cudaMemcpyDeviceToHost),
              "bench copy");
        expect(std::memcmp(e.data(), y.data(), y.size() * 4) == 0,
               std::string("chain, ") + kShapeNames[s] + ", " + std::to_string(n_rows) + " rows: bits differ");
      }
    }
  }

 private:
  int n_layers_;
  MatvecDevice device_;
  std::unique_ptr<Packed> packed_[kShapes][2];
  std::unique_ptr<Device<std::byte>> weights_[kLayers][kHead];
  std::unique_ptr<Device<std::byte>> head_, scratch_;
  std::unique_ptr<Device<float>> norms_[2], qkv_, o_, act_, down_, logits_;
  std::unique_ptr<Device<unsigned>> sink_;
  int64_t layer_bytes_ = 0, scratch_bytes_ = 0;
};

void bench_format(Format format, const MatvecDevice& device, const LaunchContext& context) {
  const Chain chain(format, kLayers, device);
  const std::string name(info(format).name);
  const double gb = static_cast<double>(chain.layer_bytes() + chain.head_bytes()) / 1e9;
  for (const int n_rows : {16, 32, 64}) chain.verify(n_rows, context);
  const double read = time_graph(context.stream, [&] { chain.read_token(true, context); });
  const double serial = time_graph(context.stream, [&] { chain.read_token(false, context); });
  std::printf(
      "%s: %.3f GB; pure reads, overlapping: %.3f ms (%.2f TB/s), one after the other: %.3f ms; scratch %.1f MB\n",
      name.c_str(), gb, read, gb / read, serial, static_cast<double>(chain.scratch_bytes()) / 1e6);
  for (const int n_rows : {9, 16, 32, 64}) {
    const double ms = time_graph(context.stream, [&] { chain.token(n_rows, context); });
    std::printf("%s: products of a step, %d rows: %.3f ms, %.0f tokens/s, %.2f TB/s, %.1f %% of pure reads\n",
                name.c_str(), n_rows, ms, 1000 * n_rows / ms, gb / ms, 100 * read / ms);
    std::printf(
        "{\"bench\":\"batch_chain\",\"format\":\"%s\",\"rows\":%d,\"ms\":%.4f,\"gb\":%.4f,\"pure_read_ms\":%.4f,"
        "\"serial_read_ms\":%.4f}\n",
        name.c_str(), n_rows, ms, gb, read, serial);
  }
  for (int s = 0; s < kShapes; ++s) {
    const int count = s == kHead ? 4 : 40;
    const auto each = [&](auto&& launch_it) {
      return 1000 / count * time_graph(context.stream, [&] {
        for (int i = 0, l = 0; i < count; ++l)
          if (s == kHead || !Chain::global(l)) launch_it(s == kHead ? 0 : l), ++i;
      });
    };
    const double early = each([&](int l) { chain.read_one(l, s, true, context); });
    const double late = each([&](int l) { chain.read_one(l, s, false, context); });
    for (const int n_rows : {16, 32, 64}) {
      const double us = each([&](int l) { chain.launch_one(l, s, n_rows, context); });
      const double mb = static_cast<double>(chain.bytes(0, s)) / 1e6;
      std::printf("%-8s %d rows: %7.2f us, %.2f TB/s; pure read %7.2f us overlapping, %7.2f us serial\n",
                  kShapeNames[s], n_rows, us, mb / us, early, late);
      std::printf("{\"bench\":\"batch\",\"format\":\"%s\",\"shape\":\"%s\",\"rows\":%d,\"us\":%.3f,\"mb\":%.3f,"
                  "\"pure_read_us\":%.3f,\"serial_read_us\":%.3f}\n",
                  name.c_str(), kShapeNames[s], n_rows, us, mb, early, late);
    }
  }
}

void profile(const MatvecDevice& device, const LaunchContext& context) {
  const Chain chain(Format::kFp4G128, 6, device);
  for (const int n_rows : {16, 64})
    for (int s = 0; s < kShapes; ++s) chain.launch_one(0, s, n_rows, context);
  check(cudaStreamSynchronize(context.stream), "profile");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::string mode = argc > 1 ? argv[1] : "check";
    const MatvecDevice device = this_device();
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, 0), "device");
    std::printf("%s, %d multiprocessors, shared memory %d a block, %d a multiprocessor\n", properties.name,
                device.n_sms, device.shared_per_block, device.shared_per_sm);
    const Stream stream = make_stream();
    const LaunchContext context{stream.get(), properties.major >= 9};
    if (mode == "check") check_all(std::vector<std::string>(argv + std::min(argc, 2), argv + argc), device, context);
    if (mode == "chain") {
      const auto format = format_by_name(argc > 2 ? argv[2] : "fp4_g128");
      if (!format) throw Error(ErrorCode::kBadInput, "no such format");
      bench_format(*format, device, context);
    }
    if (mode == "profile") profile(device, context);
    std::printf("%s\n", all_good ? "ok" : "FAILED");
    return all_good ? 0 : 1;
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
