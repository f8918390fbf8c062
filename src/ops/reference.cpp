// The oracle: every op as its formula says, in double precision, one scalar at a time.
//
// Nothing here is clever. Its only inputs that are not double are the weights (decoded exactly, weights/decode.h) and
// ids and positions. Rows of a matrix are shared among threads, which changes no sum.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/threads.h"
#include "ops/backend.h"
#include "ops/host_executor.h"
#include "weights/host_matrix.h"

namespace beryl {
namespace {

double gelu_tanh(double z) {
  constexpr double kSqrt2OverPi = 0.79788456080286535588;
  return 0.5 * z * (1 + std::tanh(kSqrt2OverPi * (z + 0.044715 * z * z * z)));
}

double silu(double z) { return z / (1 + std::exp(-z)); }

// Calls body(begin, end) on slices of [0, count); threads only where the work pays for starting them.
template <class Body>
void parallel_slices(int n_threads, int64_t count, int64_t work, const Body& body) {
  constexpr int64_t kWorkWorthAThread = 2'000'000;
  const int64_t n_slices = std::clamp<int64_t>(work / kWorkWorthAThread, 1, std::min<int64_t>(n_threads, count));
  if (n_slices <= 1) {
    body(int64_t{0}, count);
    return;
  }
  const auto slice = [&](int64_t i) { body(count * i / n_slices, count * (i + 1) / n_slices); };
  const std::vector<std::jthread> helpers = start_helpers(static_cast<int>(n_slices), slice);
  slice(0);
  for (auto i = static_cast<int64_t>(helpers.size()) + 1; i < n_slices; ++i) slice(i);   // the system has no thread for them
}

class ReferenceExecutor final : public HostExecutor<double> {
 public:
  ReferenceExecutor(const Program& program, const StepLimits& limits, int n_threads)
      : HostExecutor<double>(program, limits), n_threads_(n_threads) {}

 protected:
  void execute(const Op& op) override {
    std::visit([this](const auto& each) { run_op(each); }, op);
  }

 private:
  void run_op(const Sample&) { BERYL_CHECK(false, "run by HostExecutor"); }
  void run_op(const Advance&) { BERYL_CHECK(false, "run by HostExecutor"); }
  void run_op(const CopyPages&) { BERYL_CHECK(false, "run by HostExecutor"); }

  void run_op(const Embed& op) {
    const HostMatrix& table = program_.matrix(op.table).parts.front();
    std::vector<float> decoded(static_cast<size_t>(op.out.cols));
    for (int64_t t = 0; t < n_tokens_; ++t) {
      decode_row(table, 0, id(t), decoded.data());
      double* out = row(op.out, t);
      for (int64_t c = 0; c < op.out.cols; ++c)
        out[c] = static_cast<double>(decoded[static_cast<size_t>(c)]) * op.scale;
    }
  }

  void run_op(const Linear& op) {
    const WeightMatrix& weight = program_.matrix(op.weight);
    const int64_t count = n_rows(op.x);
    const std::vector<double> h = normed_rows(op.x, op.norm, count);
    const bool gated = op.epilogue == Epilogue::kGatedGelu || op.epilogue == Epilogue::kGatedSilu;
    if (gated) {
      std::vector<double> gate(static_cast<size_t>(count * op.y.cols)), up(gate.size());
      multiply(weight.parts[0], 0, h.data(), count, gate.data(), op.y.cols);
      multiply(weight.parts[1], 0, h.data(), count, up.data(), op.y.cols);
      for (int64_t t = 0; t < count; ++t)
        for (int64_t r = 0; r < op.y.cols; ++r) {
          const auto i = static_cast<size_t>(t * op.y.cols + r);
          row(op.y, t)[r] = (op.epilogue == Epilogue::kGatedGelu ? gelu_tanh(gate[i]) : silu(gate[i])) * up[i];
        }
      return;
    }
    std::vector<double> y(static_cast<size_t>(count * op.y.cols));
    int64_t first_row = 0;
    for (const HostMatrix& part : weight.parts) {
      multiply(part, 0, h.data(), count, y.data() + first_row, op.y.cols);
      first_row += part.rows;
    }
    for (int64_t t = 0; t < count; ++t)
      for (int64_t r = 0; r < op.y.cols; ++r) {
        double value = y[static_cast<size_t>(t * op.y.cols + r)];
        if (op.epilogue == Epilogue::kGeluTimesOther) value = gelu_tanh(value) * row(op.other, t)[r];
        if (op.epilogue == Epilogue::kSoftcap) value = op.softcap * std::tanh(value / op.softcap);
        row(op.y, t)[r] = value;
      }
  }

  void run_op(const QkvFinish& op) {
    const int64_t d = op.head_dim;
    const int64_t k_begin = op.n_heads * d;
    const int64_t v_begin = op.v_from_k ? k_begin : k_begin + op.n_kv_heads * d;
    for (int64_t t = 0; t < n_tokens_; ++t) {
      double* qkv = row(op.qkv, t);
      const double* rope = op.rope < 0 ? nullptr : rope_of(op.rope, t);
      for (int64_t head = 0; head < op.n_heads; ++head) {
        norm_in_place(qkv + head * d, d, op.q_norm);
        turn(qkv + head * d, d, rope);
      }
      if (op.n_kv_heads == 0) continue;
      for (int head = 0; head < op.n_kv_heads; ++head) {
        double* key = cache_at(op.cache, CachePart::kKeys, sequence(t), head, position(t));
        double* value = cache_at(op.cache, CachePart::kValues, sequence(t), head, position(t));
        std::copy_n(qkv + k_begin + head * d, d, key);
        std::copy_n(qkv + v_begin + head * d, d, value);
        norm_in_place(key, d, op.k_norm);
        turn(key, d, rope);
        norm_in_place(value, d, op.v_norm);
      }
    }
  }

  void run_op(const Attention& op) {
    const CacheDecl& cache = program_.caches[static_cast<size_t>(op.cache)];
    const int64_t d = cache.head_dim;
    const int window = program_.groups[static_cast<size_t>(cache.group)].window;
    const int64_t heads_per_kv = op.n_heads / cache.n_kv_heads;
    std::vector<double> p;
    for (int64_t t = 0; t < n_tokens_; ++t) {
      const int64_t last = position(t);
      const int64_t first = window == 0 ? 0 : std::max<int64_t>(0, last - window + 1);
      for (int64_t head = 0; head < op.n_heads; ++head) {
        const double* q = row(op.q, t) + head * d;
        const auto kv_head = static_cast<int>(head / heads_per_kv);
        p.assign(static_cast<size_t>(last - first + 1), 0);
        for (int64_t m = first; m <= last; ++m) {
          const double* k = cache_at(op.cache, CachePart::kKeys, sequence(t), kv_head, m);
          double score = op.scale * std::inner_product(q, q + d, k, 0.0);
          if (op.softcap > 0) score = op.softcap * std::tanh(score / op.softcap);
          p[static_cast<size_t>(m - first)] = score;
        }
        softmax_in_place(p.data(), last - first + 1);
        double* out = row(op.out, t) + head * d;
        std::fill_n(out, d, 0.0);
        for (int64_t m = first; m <= last; ++m) {
          const double* v = cache_at(op.cache, CachePart::kValues, sequence(t), kv_head, m);
          for (int64_t c = 0; c < d; ++c) out[c] += p[static_cast<size_t>(m - first)] * v[c];
        }
      }
    }
  }

  void run_op(const AddNorm& op) {
    const int64_t group = op.group > 0 ? op.group : op.y.cols;
    std::vector<double> y(static_cast<size_t>(op.y.cols));
    for (int64_t t = 0; t < n_rows(op.y); ++t) {
      std::copy_n(row(op.y, t), op.y.cols, y.data());
      for (int64_t begin = 0; begin < op.y.cols; begin += group) norm_in_place(y.data() + begin, group, op.norm);
      const double* base = op.base.present() ? row(op.base, t) : nullptr;
      double* out = row(op.out, t);
      for (int64_t c = 0; c < op.y.cols; ++c)
        out[c] = ((base == nullptr ? 0.0 : base[c]) + y[static_cast<size_t>(c)]) * op.scale;
    }
  }

  void run_op(const Route& op) {
    const int64_t n_experts = op.n_experts;
    const std::vector<double> h = normed_rows(op.x, op.norm, n_tokens_);
    std::vector<double> p(static_cast<size_t>(n_tokens_ * n_experts));
    multiply(program_.matrix(op.weight).parts.front(), 0, h.data(), n_tokens_, p.data(), n_experts);
    const float* expert_scale = vector_values(op.expert_scale);
    std::vector<int> order(static_cast<size_t>(n_experts));
    for (int64_t t = 0; t < n_tokens_; ++t) {
      double* z = p.data() + t * n_experts;
      softmax_in_place(z, n_experts);
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return z[a] > z[b]; });
      double sum = 0;
      for (int i = 0; i < op.top_k; ++i) sum += z[order[static_cast<size_t>(i)]];
      double* routes = row(op.routes, t);
      for (int i = 0; i < op.top_k; ++i) {
        const int expert = order[static_cast<size_t>(i)];
        routes[i] = expert;
        routes[op.top_k + i] = z[expert] / sum * (expert_scale == nullptr ? 1.0 : expert_scale[expert]);
      }
    }
  }

  void run_op(const Experts& op) {
    const WeightMatrix& gate_up = program_.matrix(op.gate_up);
    const HostMatrix& down = program_.matrix(op.down).parts.front();
    const std::vector<double> h = normed_rows(op.x, op.norm, n_tokens_);
    const auto dim = static_cast<size_t>(op.expert_dim);
    std::vector<double> gate(dim), up(dim), y(static_cast<size_t>(op.y.cols));
    for (int64_t t = 0; t < n_tokens_; ++t) {
      double* out = row(op.y, t);
      std::fill_n(out, op.y.cols, 0.0);
      const double* routes = row(op.routes, t);
      for (int i = 0; i < op.top_k; ++i) {
        const auto expert = static_cast<int64_t>(routes[i]);
        multiply(gate_up.parts[0], expert, h.data() + t * op.x.cols, 1, gate.data(), op.expert_dim);
        multiply(gate_up.parts[1], expert, h.data() + t * op.x.cols, 1, up.data(), op.expert_dim);
        for (size_t r = 0; r < dim; ++r) gate[r] = gelu_tanh(gate[r]) * up[r];
        multiply(down, expert, gate.data(), 1, y.data(), op.y.cols);
        for (int64_t c = 0; c < op.y.cols; ++c) out[c] += routes[op.top_k + i] * y[static_cast<size_t>(c)];
      }
    }
  }

  void run_op(const GatherRows& op) {
    for (int64_t i = 0; i < n_outputs_; ++i) std::copy_n(row(op.x, output_row(i)), op.x.cols, row(op.out, i));
  }

  void norm_in_place(double* x, int64_t n, const Norm& norm) const {
    if (!norm.present) return;
    double squares = 0;
    for (int64_t i = 0; i < n; ++i) squares += x[i] * x[i];
    const double factor = 1 / std::sqrt(squares / static_cast<double>(n) + norm.eps);
    const float* weight = vector_values(norm.weight);
    for (int64_t i = 0; i < n; ++i) x[i] *= factor * (weight == nullptr ? 1.0 : weight[i]);
  }

  std::vector<double> normed_rows(Rows x, const Norm& norm, int64_t count) const {
    std::vector<double> h(static_cast<size_t>(count * x.cols));
    for (int64_t t = 0; t < count; ++t) {
      std::copy_n(row(x, t), x.cols, h.data() + t * x.cols);
      norm_in_place(h.data() + t * x.cols, x.cols, norm);
    }
    return h;
  }

  // y[t][r] = Σ_c W[expert][r][c] · h[t][c]; y rows are y_stride apart.
  void multiply(const HostMatrix& matrix, int64_t expert, const double* h, int64_t count, double* y,
                int64_t y_stride) const {
    const int64_t cols = matrix.cols;
    parallel_slices(n_threads_, matrix.rows, matrix.rows * cols * (count + 1), [&](int64_t begin, int64_t end) {
      std::vector<float> decoded(static_cast<size_t>(cols));
      std::vector<double> weights(static_cast<size_t>(cols));
      for (int64_t r = begin; r < end; ++r) {
        decode_row(matrix, expert, r, decoded.data());
        std::copy(decoded.begin(), decoded.end(), weights.begin());
        for (int64_t t = 0; t < count; ++t)
          y[t * y_stride + r] = std::inner_product(weights.begin(), weights.end(), h + t * cols, 0.0);
      }
    });
  }

  static void turn(double* x, int64_t d, const double* rope) {
    if (rope == nullptr) return;
    const int64_t half = d / 2;
    for (int64_t j = 0; j < half; ++j) {
      const double c = rope[j], s = rope[half + j], low = x[j], high = x[j + half];
      x[j] = low * c - high * s;
      x[j + half] = high * c + low * s;
    }
  }

  static void softmax_in_place(double* p, int64_t n) {
    const double largest = *std::max_element(p, p + n);
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += p[i] = std::exp(p[i] - largest);
    for (int64_t i = 0; i < n; ++i) p[i] /= sum;
  }

  int n_threads_;
};

class ReferenceBackend final : public Backend {
 public:
  explicit ReferenceBackend(int n_threads) : n_threads_(n_threads) {}
  std::string_view name() const override { return "reference"; }
  std::vector<Allocation> plan(const Program& program, const StepLimits& limits) const override {
    return plan_host_buffers(program, limits, sizeof(double), sizeof(double));
  }
  std::unique_ptr<Executor> prepare(const Program& program, const StepLimits& limits) override {
    check_shapes(program);
    return std::make_unique<ReferenceExecutor>(program, limits, n_threads_);
  }

 private:
  int n_threads_;
};

}  // namespace

std::unique_ptr<Backend> make_reference_backend(int n_threads) {
  if (n_threads <= 0) n_threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  return std::make_unique<ReferenceBackend>(n_threads);
}

}  // namespace beryl
