// Attention of many rows alone: a program of its own.
//
//   attention_bench check    all head sizes, windows, ragged batches and softcaps against double precision, within a
//   bound
//                            from the data; dead positions hold NaN. A row has the same bits when only the second half
//                            of the rows is given. Nothing else is written.
//   attention_bench speed    layers of Gemma 4 12B by chunk and depth, in TFLOP/s of live pairs of a row and a key
//   attention_bench once     one launch of each, for a profiler: 2,048 rows at 8,192
//   ... 512 256              behind the mode: only these head sizes
//
// Times are medians of graph replays.
#include <cstdio>
#include <limits>

#include <cuda_bf16.h>

#include "cuda/bench_support.h"
#include "cuda/kernels.h"
#include "cuda/index_math.h"
#include "cuda/prefill_attention.h"
#include "cuda/prefill_linear.h"

using namespace beryl;
using namespace beryl::cuda;

namespace {

std::vector<int> head_dims;  // empty: all
bool wants(int head_dim) {
  return head_dims.empty() || std::find(head_dims.begin(), head_dims.end(), head_dim) != head_dims.end();
}

bool all_good = true;
void expect(bool condition, const std::string& what) {
  if (condition) return;
  all_good = false;
  std::printf("FAIL %s\n", what.c_str());
}

struct Shape {
  const char* name;
  int n_heads, n_kv_heads, head_dim, window;
  float scale;
};
constexpr Shape kSliding = {"12B sliding", 16, 8, 256, 1024, 1}, kGlobal = {"12B global", 16, 1, 512, 0, 1};

struct Tokens {
  int context, n;
};

// ---- double precision: a block a token and head ----
__device__ double pool_value(const void* pool, int64_t at) {
  return static_cast<double>(__bfloat162float(static_cast<const __nv_bfloat16*>(pool)[at]));
}
__global__ void __launch_bounds__(256) reference_kernel(AttentionArgs a, double* out, double* bounds) {
  extern __shared__ double weights[];  // [live], then their scores' possible errors
  __shared__ double total[2];
  const int token = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y), dim = a.cache.head_dim;
  const int kv_head = head / (a.n_heads / a.cache.n_kv_heads);
  const Band band = live_band(a.token.positions[token], a.window);
  const int n = band.end - band.begin;
  double* errors = weights + n;
  const int32_t* table = a.token.table + int64_t{a.token.sequences[token]} * a.token.n_entries;
  const float* q = a.q.values + token * a.q.stride + head * dim;
  const auto row_of = [&](int position) {
    return cache_offset(table[table_entry(position, a.token.n_entries)], position % kPageTokens, kv_head,
                        a.cache.n_kv_heads, dim);
  };
  for (int i = static_cast<int>(threadIdx.x); i < n; i += 256) {
    const int64_t at = row_of(band.begin + i);
    double dot = 0, squares = 0;
    for (int c = 0; c < dim; ++c) {
      const double term = static_cast<double>(q[c]) * pool_value(a.cache.keys, at + c);
      dot += term, squares += term * term;
    }
    double score = dot * static_cast<double>(a.scale);
    errors[i] = sqrt(squares) * static_cast<double>(a.scale);
    if (a.softcap > 0) score = static_cast<double>(a.softcap) * tanh(score / static_cast<double>(a.softcap));
    weights[i] = score;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    double most = -INFINITY, sum = 0;
    for (int i = 0; i < n; ++i) most = fmax(most, weights[i]);
    for (int i = 0; i < n; ++i) sum += exp(weights[i] - most);
    total[0] = most, total[1] = sum;
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < n; i += 256) weights[i] = exp(weights[i] - total[0]) / total[1];
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < dim; c += 256) {
    double sum = 0, squares = 0, by_scores = 0;
    for (int i = 0; i < n; ++i) {
      const double term = weights[i] * pool_value(a.cache.values, row_of(band.begin + i) + c);
      sum += term, squares += term * term;
    }
    for (int i = 0; i < n; ++i)
      by_scores += weights[i] * fabs(pool_value(a.cache.values, row_of(band.begin + i) + c) - sum) * errors[i];
    const int64_t at = (int64_t{token} * a.n_heads + head) * dim + c;
    out[at] = sum;
    // Roundings of weights are independent; those of q are the same for all keys. A rounding to bf16 is 2^-9 at most,
    // or 2^-9 / sqrt(3) in the mean.
    bounds[at] = 0x1p-9 * (6 * sqrt(squares) + 4 * by_scores) + 1e-4 * fabs(sum) + 1e-6;
  }
}

// A pool with pages in random order and NaN where nobody looks, and rows for all tokens.
struct Problem {
  Shape shape;
  std::vector<Tokens> batch;
  int n_tokens = 0, n_entries = 0, n_pages = 0;
  std::unique_ptr<Device<uint16_t>> keys, values;
  std::unique_ptr<Device<float>> q, out;
  std::unique_ptr<Device<int32_t>> positions, sequences, table;

  Problem(const Shape& s, std::vector<Tokens> b, uint64_t seed, bool dead_is_nan) : shape(s), batch(std::move(b)) {
    std::vector<int32_t> position, sequence;
    int longest = 0;
    for (size_t i = 0; i < batch.size(); ++i) {
      for (int t = 0; t < batch[i].n; ++t)
        position.push_back(batch[i].context + t), sequence.push_back(static_cast<int>(i));
      longest = std::max(longest, batch[i].context + batch[i].n);
    }
    n_tokens = static_cast<int>(position.size());
    int most = 0;
    for (const Tokens& tokens : batch) most = std::max(most, tokens.n);
    n_entries = s.window > 0 ? std::min((s.window + most + 62) / 64 + 1, (longest + 63) / 64) : (longest + 63) / 64;
    n_pages = n_entries * static_cast<int>(batch.size()) + 3;
    const int64_t row = int64_t{s.n_kv_heads} * kPageTokens * s.head_dim, size = n_pages * row;
    std::vector<int32_t> pages(static_cast<size_t>(n_pages)), entries(batch.size() * static_cast<size_t>(n_entries));
    for (int i = 0; i < n_pages; ++i) pages[static_cast<size_t>(i)] = i;
    for (int i = n_pages - 1; i > 0; --i)
      std::swap(pages[static_cast<size_t>(i)],
                pages[philox(seed, static_cast<uint64_t>(i)).x[0] % static_cast<uint32_t>(i + 1)]);
    for (size_t i = 0; i < entries.size(); ++i) entries[i] = pages[i];
    std::vector<uint16_t> k(static_cast<size_t>(size), dead_is_nan ? 0x7fc0 : 0), v = k;
    const auto fill = [&](int page, int slot, uint64_t which) {
      for (int head = 0; head < s.n_kv_heads; ++head) {
        const auto at = static_cast<size_t>(cache_offset(page, slot, head, s.n_kv_heads, s.head_dim));
        for (int c = 0; c < s.head_dim; c += 4) {
          const Random4 r = philox(seed + 1 + which, at + static_cast<size_t>(c));
          for (int i = 0; i < 4; ++i) {
            k[at + static_cast<size_t>(c + i)] = f32_to_bf16(4 * to_unit_float(r.x[i]) - 2);
            v[at + static_cast<size_t>(c + i)] = f32_to_bf16(4 * to_unit_float(r.x[i] * 2654435761u) - 2);
          }
        }
      }
    };
    std::vector<std::pair<int, int>> live;
    for (size_t i = 0; i < batch.size(); ++i) {
      const int end = batch[i].context + batch[i].n;
      for (int p = live_band(batch[i].context, s.window).begin; p < end; ++p)
        live.emplace_back(entries[i * static_cast<size_t>(n_entries) + static_cast<size_t>(p / 64 % n_entries)],
                          p % 64);
    }
    parallel(static_cast<int>(live.size()),
             [&](int i) { fill(live[static_cast<size_t>(i)].first, live[static_cast<size_t>(i)].second, 0); });
    const float spread = 3 / (s.scale * 0.667f * std::sqrt(static_cast<float>(s.head_dim)));
    const int64_t cols = int64_t{s.n_heads} * s.head_dim;
    std::vector<float> rows(static_cast<size_t>(n_tokens * (cols + 128)), std::numeric_limits<float>::quiet_NaN());
    parallel(n_tokens, [&](int t) {
      for (int64_t c = 0; c < cols; ++c) {
        const Random4 r = philox(seed + 9, static_cast<uint64_t>(t * cols + c));
        rows[static_cast<size_t>(t * (cols + 128) + c)] =
            spread * (to_unit_float(r.x[0]) + to_unit_float(r.x[1]) + to_unit_float(r.x[2]) - 1.5f) * 2;
      }
    });
    keys = std::make_unique<Device<uint16_t>>(k), values = std::make_unique<Device<uint16_t>>(v);
    q = std::make_unique<Device<float>>(rows);
    out = std::make_unique<Device<float>>(static_cast<size_t>(n_tokens * cols + 1024));
    positions = std::make_unique<Device<int32_t>>(position), sequences = std::make_unique<Device<int32_t>>(sequence);
    table = std::make_unique<Device<int32_t>>(entries);
  }
  // Of the tokens from first on.
  AttentionArgs args(int first = 0) const {
    AttentionArgs a = {};
    const int64_t cols = int64_t{shape.n_heads} * shape.head_dim;
    a.q = {q->data() + first * (cols + 128), cols + 128};
    a.out = {out->data() + first * cols, cols};
    a.token = {positions->data() + first, sequences->data() + first, table->data(), n_entries};
    a.cache = {keys->data(), values->data(), nullptr, nullptr, nullptr, CacheElement::kBf16, shape.n_kv_heads, shape.head_dim, shape.head_dim};
    a.cache_rows = int64_t{n_pages} * shape.n_kv_heads * kPageTokens;
    a.n_heads = shape.n_heads, a.window = shape.window, a.scale = shape.scale;
    a.n_tokens = n_tokens - first;
    return a;
  }
};

void check_case(const LaunchContext& context, const Shape& shape, const std::vector<Tokens>& batch, float softcap,
                uint64_t seed) {
  if (!wants(shape.head_dim)) return;
  const Problem problem(shape, batch, seed, true);
  AttentionArgs args = problem.args();
  args.softcap = softcap;
  const int64_t cols = int64_t{shape.n_heads} * shape.head_dim, size = problem.n_tokens * cols;
  const Device<double> exact(static_cast<size_t>(size)), bounds(static_cast<size_t>(size));
  int longest = 0;
  for (const Tokens& tokens : batch) longest = std::max(longest, tokens.context + tokens.n);
  if (shape.window > 0) longest = std::min(longest, shape.window);
  check(cudaFuncSetAttribute(reference_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, longest * 16), "reference");
  reference_kernel<<<dim3(static_cast<unsigned>(problem.n_tokens), static_cast<unsigned>(shape.n_heads)), 256,
                     static_cast<size_t>(longest) * 16, context.stream>>>(args, exact.data(), bounds.data());
  check(cudaGetLastError(), "reference");
  check(cudaStreamSynchronize(context.stream), "reference");
  const auto ref = exact.host(), bound = bounds.host();

  problem.out->poison();
  launch_prefill_attention(context, args);
  check(cudaStreamSynchronize(context.stream), "attention");
  const auto whole = problem.out->host();
  double worst = 0, difference = 0, norm = 0;
  int64_t wrong = 0, beyond = 0;
  for (int64_t i = 0; i < size; ++i) {
    const double off = std::abs(whole[i] - ref[i]);
    if (!(off <= bound[i]) && wrong++ == 0)
      std::printf("row %d, head %d, column %d is %g, exactly %g, bound %g\n", static_cast<int>(i / cols),
                  static_cast<int>(i % cols / shape.head_dim), static_cast<int>(i % shape.head_dim), whole[i], ref[i],
                  bound[i]);
    worst = std::max(worst, off / bound[i]), difference += off * off, norm += ref[i] * ref[i];
  }
  for (size_t i = static_cast<size_t>(size); i < whole.size(); ++i) beyond += std::isnan(whole[i]) ? 0 : 1;
  std::string what = std::string(shape.name) + ",";
  for (const Tokens& tokens : batch) what += " " + std::to_string(tokens.context) + "+" + std::to_string(tokens.n);
  expect(wrong == 0, what + ": " + std::to_string(wrong) + " of " + std::to_string(size) + " beyond their bound");
  expect(beyond == 0, what + ": written beyond");
  std::printf("%-60s heads of %d, softcap %g: relative error %.1e, worst of bound %.2f\n", what.c_str(), shape.head_dim,
              softcap, std::sqrt(difference / norm), worst);
  std::fflush(stdout);
  // The second half alone.
  const int first = problem.n_tokens / 2 + 1;
  problem.out->poison();
  AttentionArgs second = problem.args(first);
  second.softcap = softcap;
  launch_prefill_attention(context, second);
  check(cudaStreamSynchronize(context.stream), "attention");
  const auto got = problem.out->host();
  expect(std::memcmp(got.data() + first * cols, whole.data() + first * cols,
                     static_cast<size_t>(size - first * cols) * 4) == 0,
         std::string(shape.name) + ": bits depend on the rows beside");
}

void check_all(const LaunchContext& context) {
  const Shape shapes[] = {kSliding,
                          kGlobal,
                          {"E2B global", 8, 1, 512, 0, 1},
                          {"two wide KV heads", 6, 2, 512, 100, 0.1f},
                          {"E2B sliding", 8, 1, 256, 512, 1},
                          {"Llama 8B", 32, 8, 128, 0, 0.08838835f},
                          {"Llama 1B", 32, 8, 64, 0, 0.125f},
                          {"SmolLM2", 9, 3, 64, 0, 0.125f},
                          {"odd window", 4, 4, 128, 77, 0.1f}};
  uint64_t seed = 1;
  for (const Shape& shape : shapes) {
    check_case(context, shape, {{0, 130}}, 0, seed += 100);
    check_case(context, shape, {{1000, 77}}, 0, seed += 100);
    check_case(context, shape, {{0, 3}, {1100, 1}, {64, 1}, {60, 70}, {511, 40}}, 0, seed += 100);
  }
  check_case(context, kGlobal, {{1500, 300}}, 0, seed += 100);
  check_case(context, kSliding, {{1900, 300}}, 0, seed += 100);
  // So many rows that blocks have two groups; the second half alone has one.
  check_case(context, kSliding, {{0, 700}}, 0, seed += 100);
  check_case(context, shapes[5], {{30, 300}}, 0, seed += 100);
  check_case(context, shapes[6], {{0, 40}, {600, 300}}, 0, seed += 100);
  check_case(context, kGlobal, {{63, 66}}, 5, seed += 100);
  check_case(context, kSliding, {{63, 66}}, 50, seed += 100);
  std::printf("check: %s\n", all_good ? "all passed" : "FAILED");
}

void speed(const LaunchContext& context, const Shape& shape, int depth, int n, bool before) {
  if (!wants(shape.head_dim)) return;
  const Problem problem(shape, {{depth, n}}, 5, false);
  double pairs = 0;
  for (int t = 0; t < n; ++t) {
    const Band band = live_band(depth + t, shape.window);
    pairs += band.end - band.begin;
  }
  const double tera = 4e-12 * pairs * shape.n_heads * shape.head_dim;
  const auto time = [&](const char* what, const std::function<void()>& launch, int n_launches) {
    const double us = 1000.0 / n_launches *
                      time_graph(
                          context.stream,
                          [&] {
                            for (int i = 0; i < n_launches; ++i) launch();
                          },
                          5);
    std::printf("%-12s %5d rows at %5d, %-12s %9.1f us, %6.1f TFLOP/s\n", shape.name, n, depth, what, us,
                tera / us * 1e6);
    std::fflush(stdout);
  };
  const AttentionArgs args = problem.args();
  time(
      "prefill", [&] { launch_prefill_attention(context, args); }, 4);
  if (before)
    time(
        "mma.sync", [&] { launch_attention_whole(context, args); }, 1);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::string mode = argc > 1 ? argv[1] : "check";
    for (int i = 2; i < argc; ++i) head_dims.push_back(std::atoi(argv[i]));
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, 0), "device");
    const Stream stream = make_stream();
    const LaunchContext context{stream.get(), properties.major >= 9};
    if (!has_prefill_linear()) throw Error(ErrorCode::kUnsupported, "this device has no such attention");
    if (mode == "check") check_all(context);
    if (mode == "speed") {
      for (const Shape& shape : {kSliding, kGlobal})
        for (const int n : {512, 1024, 2048, 4096})
          for (const int depth : {0, 2048, 8192, 30720})
            if (shape.window == 0 || depth <= 2048) speed(context, shape, depth, n, n == 512 && depth <= 2048);
    }
    if (mode == "once") {
      for (const Shape& shape : {kSliding, kGlobal}) {
        if (!wants(shape.head_dim)) continue;
        const Problem problem(shape, {{8192, 2048}}, 5, false);
        launch_prefill_attention(context, problem.args());
        check(cudaStreamSynchronize(context.stream), "attention");
      }
    }
    return all_good ? 0 : 1;
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
