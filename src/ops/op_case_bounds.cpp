#include "ops/op_case_bounds.h"

#include <algorithm>
#include <cmath>
#include <complex>
#include <limits>

#include "base/error.h"

namespace beryl {

namespace {
constexpr double kDeviations = 6;            // of a random walk, never seen
}

CacheImage::CacheImage(const Program& program, const StepLimits& limits) {
  for (const CacheDecl& cache : program.caches) {
    row_values_.push_back(int64_t{cache.n_kv_heads} * cache.head_dim);
    n_pages_.push_back(limits.n_pages[static_cast<size_t>(cache.group)]);
    const auto size = static_cast<size_t>(n_pages_.back() * kPageTokens * row_values_.back());
    for (int part = 0; part < 2; ++part) pools_.emplace_back(size, std::numeric_limits<float>::quiet_NaN());
  }
}

float* CacheImage::row(int cache, CachePart part, int page, int row) {
  const auto pool = static_cast<size_t>(2 * cache + (part == CachePart::kValues ? 1 : 0));
  return pools_[pool].data() + (int64_t{page} * kPageTokens + row) * row_values(cache);
}

const float* CacheImage::row(int cache, CachePart part, int page, int row) const {
  return const_cast<CacheImage*>(this)->row(cache, part, page, row);
}

void CacheImage::copy_page(int cache, int from, int to) {
  for (CachePart part : {CachePart::kKeys, CachePart::kValues})
    std::copy_n(row(cache, part, from, 0), kPageTokens * row_values(cache), row(cache, part, to, 0));
}

int page_of(const Program& program, const StepLimits& limits, const StepInput& input, int cache, int sequence,
            int64_t position) {
  const auto group = static_cast<size_t>(program.caches[static_cast<size_t>(cache)].group);
  const int64_t n_entries = limits.n_entries[group];
  return input.tables[group][static_cast<size_t>(sequence * n_entries + position / kPageTokens % n_entries)];
}

double growth(int64_t n) {
  return std::min(static_cast<double>(n), kDeviations * std::sqrt(static_cast<double>(n)));
}

namespace {

using Values = std::vector<double>;

constexpr double kSmallest = 1e-30;         // far below every value; lets subnormals go to zero
constexpr double kGeluSlope = 1.13;         // largest |d gelu_tanh / dz|
constexpr double kSiluSlope = 1.10;

// Independent errors e of terms, added one by one.
class IndependentErrors {
 public:
  void add(double e) {
    sum_ += e;
    squares_ += e * e;
  }
  double total() const { return std::min(sum_, kDeviations * std::sqrt(squares_)); }

 private:
  double sum_ = 0;
  double squares_ = 0;
};

double gelu(double z) {                      // z · sigmoid(2 w), w = sqrt(2/π)(z + 0.044715 z³): 0.5 (1 + tanh w)
  const double w = std::sqrt(2 / M_PI) * (z + 0.044715 * z * z * z);
  return z / (1 + std::exp(-2 * w));
}

double silu(double z) { return z / (1 + std::exp(-z)); }

constexpr size_t kIntegerGroup = 32;

class Expecter {
 public:
  Expecter(const CaseData& data, const StepLimits& limits, const StepInput& input,
           const std::vector<std::vector<float>>& rows, const CacheImage& cache, const Tolerance& tolerance)
      : data_(data), program_(data.program), limits_(limits), input_(input), rows_(rows), cache_(cache),
        u_activation_(tolerance.activation_roundoff), u_cache_(tolerance.cache_roundoff),
        u_sum_(tolerance.accumulate_roundoff), fixed_point_(tolerance.operand_fixed_point), integer_step_(tolerance.integer_step),
        u_bf16_operand_(tolerance.bf16_operand_roundoff),
        u_weight_(tolerance.weight_roundoff), u_prompt_(tolerance.prompt_roundoff), exact_rows_(tolerance.exact_rows) {
    // Of gelu, silu and their kind, relative to the argument: a few roundings, and where activations are coarse a
    // hardware approximation that is still finer than they are.
    u_function_ = 8 * u_sum_ + u_activation_ / 2;
  }

  Expected operator()(const Sample&) { return {}; }
  Expected operator()(const Advance&) { return {}; }
  Expected operator()(const CopyPages&) { return {}; }

  Expected operator()(const Embed& op) {
    ExpectedRows out = empty_rows(op.out);
    const auto cols = static_cast<size_t>(op.out.cols);
    const HostMatrix& table = program_.matrix(op.table).parts[0];
    Values weights(cols), magnitudes(cols);
    for (int64_t t = 0; t < input_.n_tokens(); ++t) {
      decode(op.table, 0, 0, input_.ids[static_cast<size_t>(t)], weights, magnitudes);
      for (size_t c = 0; c < cols; ++c) {
        const double value = weights[c] * op.scale;
        set(out, t, static_cast<int64_t>(c), value,
            magnitudes[c] * std::abs(op.scale) * (3 * u_sum_ + narrowing(table.format)));
      }
    }
    return {{std::move(out)}, {}, {}};
  }

  Expected operator()(const Linear& op) {
    ExpectedRows y = empty_rows(op.y);
    const int64_t count = live(op.x);
    const Operand h = operand(op.x, op.norm);
    const size_t n_parts = program_.matrix(op.weight).parts.size();
    const bool is_prompt = count > exact_rows_;
    if (is_gated(op.epilogue)) {
      const Product gate = product(op.weight, 0, 0, h, count, is_prompt), up = product(op.weight, 1, 0, h, count, is_prompt);
      for (int64_t t = 0; t < count; ++t)
        for (int64_t r = 0; r < op.y.cols; ++r) {
          const auto i = static_cast<size_t>(t * op.y.cols + r);
          const auto [value, error] =
              gated(op.epilogue, gate.values[i], gate.errors[i], up.values[i], up.errors[i]);
          set(y, t, r, value, error);
        }
      return {{std::move(y)}, {}, {}};
    }
    int64_t first_row = 0;
    for (size_t part = 0; part < n_parts; ++part) {
      const int64_t rows = program_.matrix(op.weight).parts[part].rows;
      const Product z = product(op.weight, part, 0, h, count, is_prompt);
      for (int64_t t = 0; t < count; ++t)
        for (int64_t r = 0; r < rows; ++r) {
          const auto i = static_cast<size_t>(t * rows + r);
          double value = z.values[i], error = z.errors[i];
          if (op.epilogue == Epilogue::kGeluTimesOther) {
            const double other = at(op.other, t, first_row + r);
            error = (kGeluSlope * (error + u_activation_ * std::abs(value)) + u_function_ * std::abs(value)) *
                    std::abs(other);
            value = gelu(value) * other;
          } else if (op.epilogue == Epilogue::kSoftcap) {
            value = op.softcap * std::tanh(value / op.softcap);
            error += 8 * u_sum_ * (op.softcap + std::abs(value));
          }
          set(y, t, first_row + r, value, error);
        }
      first_row += rows;
    }
    return {{std::move(y)}, {}, {}};
  }

  Expected operator()(const QkvFinish& op) {
    Expected expected;
    const int64_t d = op.head_dim;
    ExpectedRows q = empty_rows(op.qkv.slice(0, op.n_heads * d));
    for (int64_t t = 0; t < input_.n_tokens(); ++t) {
      const auto token = static_cast<size_t>(t);
      for (int64_t head = 0; head < op.n_heads; ++head) {
        const Head result = finish(head_of(op.qkv, t, head, d), op.q_norm, op.rope, input_.positions[token]);
        for (int64_t c = 0; c < d; ++c) set(q, t, head * d + c, result.values[static_cast<size_t>(c)],
                                            result.errors[static_cast<size_t>(c)]);
      }
      if (op.n_kv_heads == 0) continue;
      const int64_t position = input_.positions[token];
      const int page = page_of(program_, limits_, input_, op.cache, input_.sequences[token], position);
      ExpectedCacheRow keys{op.cache, CachePart::kKeys, page, static_cast<int>(position % kPageTokens), {}, {}};
      ExpectedCacheRow values = keys;
      values.part = CachePart::kValues;
      for (int64_t head = 0; head < op.n_kv_heads; ++head) {
        const Values raw_k = head_of(op.qkv, t, op.n_heads + head, d);
        const Values raw_v = op.v_from_k ? raw_k : head_of(op.qkv, t, op.n_heads + op.n_kv_heads + head, d);
        append(keys, finish(raw_k, op.k_norm, op.rope, position));
        append(values, finish(raw_v, op.v_norm, -1, position));
      }
      expected.cache.push_back(std::move(keys));
      expected.cache.push_back(std::move(values));
    }
    expected.rows.push_back(std::move(q));
    return expected;
  }

  Expected operator()(const Attention& op) {
    const CacheDecl& cache = program_.caches[static_cast<size_t>(op.cache)];
    const int window = program_.groups[static_cast<size_t>(cache.group)].window;
    const auto d = static_cast<size_t>(cache.head_dim);
    const int64_t heads_per_kv = op.n_heads / cache.n_kv_heads;
    // A cache whose values are its unrotated keys may be kept as one vector: then the other is made from it on the way.
    const double u_operand = input_.n_tokens() > exact_rows_ ? u_prompt_ : 0;
    const double u_key = (one_vector(op.cache) ? 2 * u_activation_ : 0) + u_operand;
    ExpectedRows out = empty_rows(op.out);
    Values scores, errors;
    std::vector<TermSums> sums(d);
    std::vector<const float*> values;
    for (int64_t t = 0; t < input_.n_tokens(); ++t) {
      const int64_t position = input_.positions[static_cast<size_t>(t)];
      const int sequence = input_.sequences[static_cast<size_t>(t)];
      const int64_t n_live = window == 0 ? position + 1 : std::min<int64_t>(position + 1, window);
      for (int64_t head = 0; head < op.n_heads; ++head) {
        const Values q = head_of(op.q, t, head, cache.head_dim);
        const int64_t kv_begin = head / heads_per_kv * cache.head_dim;
        scores.clear();
        errors.clear();
        values.clear();
        double largest = -std::numeric_limits<double>::infinity();
        for (int64_t m = position + 1 - n_live; m <= position; ++m) {
          const int page = page_of(program_, limits_, input_, op.cache, sequence, m);
          const int row = static_cast<int>(m % kPageTokens);
          const float* k = cache_.row(op.cache, CachePart::kKeys, page, row) + kv_begin;
          values.push_back(cache_.row(op.cache, CachePart::kValues, page, row) + kv_begin);
          double dot = 0, magnitude = 0, squares = 0;
          for (size_t c = 0; c < d; ++c) {
            const double term = q[c] * static_cast<double>(k[c]);
            dot += term;
            magnitude += std::abs(term);
            squares += term * term;
          }
          double score = dot * op.scale;
          const double of_terms = (u_key + 2 * u_sum_) * std::min(magnitude, kDeviations * std::sqrt(squares));
          double error = std::abs(op.scale) * (of_terms + summing(cache.head_dim, dot, magnitude, squares)) +
                         2 * u_sum_ * std::abs(score);
          if (op.softcap > 0) {
            score = op.softcap * std::tanh(score / op.softcap);
            error += 8 * u_sum_ * (op.softcap + std::abs(score));
          }
          largest = std::max(largest, score);
          scores.push_back(score);
          errors.push_back(error);
        }
        double total = 0;
        for (size_t m = 0; m < scores.size(); ++m) {
          errors[m] += 8 * u_sum_ + 2 * u_sum_ * (std::abs(scores[m]) + std::abs(largest));
          scores[m] = std::exp(scores[m] - largest);
          total += scores[m];
        }
        IndependentErrors of_total;
        for (size_t m = 0; m < scores.size(); ++m) {
          errors[m] = std::expm1(errors[m]);
          scores[m] /= total;
          of_total.add(scores[m] * errors[m]);
        }
        const double factor = of_total.total() + (growth(n_live) + 4) * u_sum_;
        std::fill(sums.begin(), sums.end(), TermSums{});
        for (size_t m = 0; m < scores.size(); ++m) {
          const double relative = errors[m] + u_activation_ + u_operand + 4 * u_sum_;   // p may be rounded before it meets v
          for (size_t c = 0; c < d; ++c) sums[c].add(scores[m] * static_cast<double>(values[m][c]), relative);
        }
        for (size_t c = 0; c < d; ++c) {
          const TermSums& s = sums[c];
          const double of_terms = std::min(s.errors, kDeviations * std::sqrt(s.error_squares));
          set(out, t, head * cache.head_dim + static_cast<int64_t>(c), s.value,
              of_terms + factor * std::abs(s.value) + summing(n_live, s.value, s.magnitude, s.squares));
        }
      }
    }
    return {{std::move(out)}, {}, {}};
  }

  Expected operator()(const AddNorm& op) {
    ExpectedRows out = empty_rows(op.out);
    const int64_t group = op.group > 0 ? op.group : op.y.cols;
    for (int64_t t = 0; t < live(op.y); ++t)
      for (int64_t begin = 0; begin < op.y.cols; begin += group) {
        Values y(static_cast<size_t>(group));
        for (int64_t c = 0; c < group; ++c) y[static_cast<size_t>(c)] = at(op.y, t, begin + c);
        const double relative = apply_norm(y, op.norm);
        for (int64_t c = 0; c < group; ++c) {
          const double normed = y[static_cast<size_t>(c)];
          const double base = op.base.present() ? at(op.base, t, begin + c) : 0;
          set(out, t, begin + c, (base + normed) * op.scale,
              (std::abs(normed) * relative + 3 * u_sum_ * (std::abs(base) + std::abs(normed))) * std::abs(op.scale));
        }
      }
    return {{std::move(out)}, {}, {}};
  }

  Expected operator()(const Route& op) {
    Product z = product(op.weight, 0, 0, operand(op.x, op.norm), input_.n_tokens(), false, false);
    ExpectedRoutes routes{op.routes, op.n_experts, op.top_k, std::move(z.values), std::move(z.errors), {}, 0};
    for (int expert = 0; expert < op.n_experts; ++expert)
      routes.scales.push_back(op.expert_scale.present()
                                  ? program_.vector(op.expert_scale).values[static_cast<size_t>(expert)]
                                  : 1.0);
    routes.relative_bound = 16 * u_sum_ + stored(op.routes);
    return {{}, {}, {std::move(routes)}};
  }

  Expected operator()(const Experts& op) {
    ExpectedRows out = empty_rows(op.y);
    const Operand h = operand(op.x, op.norm);
    const auto cols = static_cast<size_t>(op.x.cols);
    for (int64_t t = 0; t < input_.n_tokens(); ++t) {
      Operand one;
      const auto begin = static_cast<std::ptrdiff_t>(static_cast<size_t>(t) * cols);
      one.values.assign(h.values.begin() + begin, h.values.begin() + begin + op.x.cols);
      one.errors.assign(h.errors.begin() + begin, h.errors.begin() + begin + op.x.cols);
      one.factors = {h.factors[static_cast<size_t>(t)]};
      Values sum(static_cast<size_t>(op.y.cols)), error(sum.size());
      for (int i = 0; i < op.top_k; ++i) {
        const auto expert = static_cast<int64_t>(at(op.routes, t, i));
        const double g = at(op.routes, t, op.top_k + i);
        const Product gate = product(op.gate_up, 0, expert, one, 1), up = product(op.gate_up, 1, expert, one, 1);
        Operand hidden{{}, {}, {0}};
        for (size_t r = 0; r < gate.values.size(); ++r) {
          const auto [value, e] =
              gated(Epilogue::kGatedGelu, gate.values[r], gate.errors[r], up.values[r], up.errors[r]);
          hidden.values.push_back(value);
          hidden.errors.push_back(e + u_activation_ * std::abs(value));
        }
        add_fixed_point(hidden.values.data(), hidden.errors.data(), hidden.values.size());
        const Product y = product(op.down, 0, expert, hidden, 1);
        for (size_t c = 0; c < sum.size(); ++c) {
          sum[c] += g * y.values[c];
          // An expert's output may be stored as an activation before the sum over the experts.
          error[c] += std::abs(g) * (y.errors[c] + (u_activation_ + growth(op.top_k) * u_sum_ + 2 * u_sum_) *
                                                       std::abs(y.values[c]));
        }
      }
      for (size_t c = 0; c < sum.size(); ++c) set(out, t, static_cast<int64_t>(c), sum[c], error[c]);
    }
    return {{std::move(out)}, {}, {}};
  }

  Expected operator()(const GatherRows& op) {
    ExpectedRows out = empty_rows(op.out);
    for (int64_t i = 0; i < input_.n_outputs(); ++i)
      for (int64_t c = 0; c < op.out.cols; ++c) {
        const double value = at(op.x, input_.output_rows[static_cast<size_t>(i)], c);
        set(out, i, c, value, 0);
        // A copy: exact but for a change of type between the two slots.
        if (stored(op.out) <= stored(op.x)) out.bounds[static_cast<size_t>(i * op.out.cols + c)] = 0;
      }
    return {{std::move(out)}, {}, {}};
  }

 private:
  struct Operand {                          // [count][cols]
    Values values;
    Values errors;                          // how far a backend's operand may be off, each independently
    Values factors;                         // [count]: relative error that a whole row shares
  };
  struct Product {                          // [count][rows]
    Values values, errors;
  };
  struct Head {                             // [head_dim]
    Values values, errors;
  };
  struct TermSums {                         // of one output's terms
    double value = 0, magnitude = 0, squares = 0, errors = 0, error_squares = 0;
    void add(double term, double relative_error) {
      const double error = std::abs(term) * relative_error;
      value += term;
      magnitude += std::abs(term);
      squares += term * term;
      errors += error;
      error_squares += error * error;
    }
  };

  int64_t live(Rows rows) const {
    return program_.rows[static_cast<size_t>(rows.slot)].count == RowCount::kTokens ? input_.n_tokens()
                                                                                    : input_.n_outputs();
  }
  double at(Rows rows, int64_t row, int64_t col) const {
    const int64_t stride = program_.rows[static_cast<size_t>(rows.slot)].cols;
    return rows_[static_cast<size_t>(rows.slot)][static_cast<size_t>(row * stride + rows.col + col)];
  }
  bool is_narrow(Rows rows) const {
    return program_.rows[static_cast<size_t>(rows.slot)].kind == RowsKind::kActivation;
  }
  double stored(Rows rows) const { return is_narrow(rows) ? u_activation_ : u_sum_; }
  double narrowing(Format format) const { return format == Format::kF32 || format == Format::kF16 ? u_weight_ : 0; }

  ExpectedRows empty_rows(Rows rows) const {
    const auto size = static_cast<size_t>(live(rows) * rows.cols);
    return {rows, Values(size), Values(size)};
  }
  void set(ExpectedRows& out, int64_t row, int64_t col, double value, double error) const {
    const auto i = static_cast<size_t>(row * out.rows.cols + col);
    out.values[i] = value;
    out.bounds[i] = error + stored(out.rows) * (std::abs(value) + error) + kSmallest;
  }

  void decode(MatrixRef ref, size_t part, int64_t expert, int64_t row, Values& weights, Values& magnitudes) const {
    const HostMatrix& matrix = program_.matrix(ref).parts[part];
    const HostMatrix& without_mins = data_.without_mins[static_cast<size_t>(ref.index)][part];
    std::vector<float> whole(weights.size()), products(weights.size());
    decode_row(matrix, expert, row, whole.data());
    decode_row(without_mins, expert, row, products.data());
    for (size_t c = 0; c < weights.size(); ++c) {
      weights[c] = whole[c];
      magnitudes[c] = std::abs(double{products[c]}) + std::abs(double{whole[c]} - double{products[c]});
    }
  }

  // Normalises x in place; the relative error that this may have.
  double apply_norm(Values& x, const Norm& norm) const {
    if (!norm.present) return 0;
    long double squares = 0;
    for (double value : x) squares += static_cast<long double>(value) * value;
    const double root = std::sqrt(static_cast<double>(squares / static_cast<long double>(x.size())) + norm.eps);
    for (size_t c = 0; c < x.size(); ++c)
      x[c] = x[c] / root * (norm.weight.present() ? program_.vector(norm.weight).values[c] : 1.0f);
    return (growth(static_cast<int64_t>(x.size())) / 2 + 6) * u_sum_;
  }

  void add_fixed_point(const double* values, double* errors, size_t n) const {
    double largest = 0;
    for (size_t c = 0; c < n; ++c) largest = std::max(largest, std::abs(values[c]));
    for (size_t c = 0; c < n; ++c) errors[c] += fixed_point_ * largest;
  }

  Operand operand(Rows x, const Norm& norm) const {
    Operand h;
    const bool rounded = norm.present || !is_narrow(x);
    for (int64_t t = 0; t < live(x); ++t) {
      Values row(static_cast<size_t>(x.cols)), errors(row.size());
      for (int64_t c = 0; c < x.cols; ++c) row[static_cast<size_t>(c)] = at(x, t, c);
      h.factors.push_back(apply_norm(row, norm));
      for (size_t c = 0; c < row.size(); ++c) errors[c] = (rounded ? u_activation_ + 2 * u_sum_ : 0) * std::abs(row[c]);
      add_fixed_point(row.data(), errors.data(), row.size());
      h.values.insert(h.values.end(), row.begin(), row.end());
      h.errors.insert(h.errors.end(), errors.begin(), errors.end());
    }
    return h;
  }

  // may_be_coarse: a backend may multiply integer codes with x in integers, and BF16 with x in bf16.
  Product product(MatrixRef ref, size_t part, int64_t expert, const Operand& h, int64_t count, bool is_prompt = false,
                  bool may_be_coarse = true) const {
    const HostMatrix& matrix = program_.matrix(ref).parts[part];
    const auto cols = static_cast<size_t>(matrix.cols), rows = static_cast<size_t>(matrix.rows);
    // A product's own roundings: code times scale, plus min, times x.
    const double relative = 4 * u_sum_ + narrowing(matrix.format) + (is_prompt ? (matrix.format == Format::kBf16 ? 0x1p-8 : 2 * 0x1p-11) : 0);
    Values uncertain(h.values.size());
    for (size_t i = 0; i < uncertain.size(); ++i) uncertain[i] = h.errors[i] + relative * std::abs(h.values[i]);
    if (may_be_coarse && matrix.format == Format::kBf16)
      for (size_t i = 0; i < uncertain.size(); ++i) uncertain[i] += u_bf16_operand_ * std::abs(h.values[i]);
    if (may_be_coarse && integer_step_ > 0 && has_integer_codes(matrix.format))
      for (size_t begin = 0; begin < uncertain.size(); begin += kIntegerGroup) {   // such rows are whole groups
        double largest = 0;
        for (size_t i = begin; i < begin + kIntegerGroup; ++i) largest = std::max(largest, std::abs(h.values[i]));
        for (size_t i = begin; i < begin + kIntegerGroup; ++i) uncertain[i] += integer_step_ * largest;
      }
    Product result{Values(static_cast<size_t>(count) * rows), Values(static_cast<size_t>(count) * rows)};
    Values weights(cols), magnitudes(cols);
    for (size_t r = 0; r < rows; ++r) {
      decode(ref, part, expert, static_cast<int64_t>(r), weights, magnitudes);
      for (size_t t = 0; t < static_cast<size_t>(count); ++t) {
        const double* x = h.values.data() + t * cols;
        const double* e = uncertain.data() + t * cols;
        double value = 0, sum = 0, squares = 0, error_sum = 0, error_squares = 0;
        for (size_t c = 0; c < cols; ++c) {
          value += weights[c] * x[c];
          const double term = magnitudes[c] * std::abs(x[c]), error = magnitudes[c] * e[c];
          sum += term;
          squares += term * term;
          error_sum += error;
          error_squares += error * error;
        }
        const double of_terms = std::min(error_sum, kDeviations * std::sqrt(error_squares));
        result.values[t * rows + r] = value;
        result.errors[t * rows + r] =
            of_terms + summing(matrix.cols, value, sum, squares) + h.factors[t] * std::abs(value);
      }
    }
    return result;
  }

  // Of n roundings of partial sums, where the terms' absolute values and squares sum to these.
  double summing(int64_t n, double value, double sum, double squares) const {
    const double count = static_cast<double>(n);
    return u_sum_ * std::min(count * sum, kDeviations * std::sqrt(count) * (std::abs(value) + std::sqrt(squares)));
  }

  struct WithError {
    double value, error;
  };
  // act(gate) · up. Either may be stored as an activation before.
  WithError gated(Epilogue epilogue, double gate, double gate_error, double up, double up_error) const {
    const bool is_gelu = epilogue == Epilogue::kGatedGelu;
    const double activated = is_gelu ? gelu(gate) : silu(gate);
    gate_error += u_activation_ * std::abs(gate);
    up_error += u_activation_ * std::abs(up);
    const double error = (is_gelu ? kGeluSlope : kSiluSlope) * gate_error + u_function_ * std::abs(gate);
    return {activated * up, error * (std::abs(up) + up_error) + std::abs(activated) * up_error};
  }

  Values head_of(Rows rows, int64_t token, int64_t head, int64_t d) const {
    Values x(static_cast<size_t>(d));
    for (int64_t c = 0; c < d; ++c) x[static_cast<size_t>(c)] = at(rows, token, head * d + c);
    return x;
  }

  // norm, then rope, in one head; a rotation as the product of complex numbers.
  Head finish(Values x, const Norm& norm, int rope, int64_t position) const {
    const double relative = apply_norm(x, norm);
    Head head{x, Values(x.size())};
    for (size_t c = 0; c < x.size(); ++c) head.errors[c] = relative * std::abs(x[c]);
    if (rope < 0) return head;
    const std::vector<double>& frequencies = program_.ropes[static_cast<size_t>(rope)].frequencies;
    for (size_t j = 0; j < frequencies.size(); ++j) {
      const std::complex<double> pair(x[j], x[j + frequencies.size()]);
      const std::complex<double> turn = std::polar(1.0, static_cast<double>(position) * frequencies[j]);
      const std::complex<double> turned = pair * turn;
      head.values[j] = turned.real();
      head.values[j + frequencies.size()] = turned.imag();
      const double low = std::abs(pair.real()), high = std::abs(pair.imag());
      const double c = std::abs(turn.real()), s = std::abs(turn.imag());
      const double table = frequencies[j] == 0 ? 0 : 4 * u_sum_ * (low + high);
      head.errors[j] = (relative + 3 * u_sum_) * (low * c + high * s) + table;
      head.errors[j + frequencies.size()] = (relative + 3 * u_sum_) * (high * c + low * s) + table;
    }
    return head;
  }

  // Stored in the cache: relative, and in E4M3 with a scale for the head also absolute, below its smallest normal.
  void append(ExpectedCacheRow& row, const Head& head) const {
    double largest = 0;
    for (double value : head.values) largest = std::max(largest, std::abs(value));
    const bool shared = row.part == CachePart::kKeys && one_vector(row.cache);
    for (size_t c = 0; c < head.values.size(); ++c) {
      // Where one vector serves as K and V, the rotation comes after the rounding: of both of a pair.
      const size_t half = head.values.size() / 2, partner = c < half ? c + half : c - half;
      const double rounded = shared ? std::hypot(head.values[c], head.values[partner]) : std::abs(head.values[c]);
      row.values.push_back(head.values[c]);
      row.bounds.push_back(head.errors[c] + u_cache_ * (rounded + head.errors[c] + largest / 4096) +
                           (shared ? u_activation_ * rounded : 0) + kSmallest);
    }
  }

  bool one_vector(int cache) const { return keys_from_values(program_, cache).has_value(); }

  const CaseData& data_;
  const Program& program_;
  const StepLimits& limits_;
  const StepInput& input_;
  const std::vector<std::vector<float>>& rows_;
  const CacheImage& cache_;
  double u_activation_, u_cache_, u_sum_, fixed_point_, integer_step_, u_bf16_operand_, u_weight_, u_prompt_, u_function_;
  int exact_rows_;
};

}  // namespace

Expected expect(const CaseData& data, const Op& op, const StepLimits& limits, const StepInput& input,
                const std::vector<std::vector<float>>& rows, const CacheImage& cache, const Tolerance& tolerance) {
  return std::visit(Expecter(data, limits, input, rows, cache, tolerance), op);
}

}  // namespace beryl
