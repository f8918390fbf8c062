// What: attention equals the double result within a bound from the data; a token's bits depend neither on the tokens it
//       came with nor on whether its splits were computed in one task or one by one; dead cache slots are never read.
// How:  a paged cache whose slots outside the live band hold NaN, its pages in random order; positions around the edges
//       of pages and splits, and where split_keys changes; windows that begin inside a page.
//       Bound: a score of size |s| is off by (d / 16 + 8) · 2^-24 · Σ |q k| · scale =: e, each weight then by a factor
//       e^(2 e), and the sums of n terms by (n / 1 + 20) · 2^-24 of Σ p |v|, all doubled for safety.
#include "cpu/attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "base/float_formats.h"
#include "cpu/simd.h"
#include "ops/program.h"
#include "ops/random_matrix.h"

namespace beryl {
namespace {

struct Shape {
  std::string name;
  int64_t position;   // of the first token
  int n_tokens;
  int window;
  int n_kv_heads;
  int group;
  int head_dim;
  float softcap = 0;
  bool f16 = false;   // the cache
};

const std::vector<Shape>& shapes() {
  static const std::vector<Shape> table = {
      {"FirstToken", 0, 1, 0, 1, 1, 16},
      {"FirstTokens", 0, 7, 0, 2, 3, 32},
      {"EndOfASplit", 120, 13, 0, 1, 4, 64},
      {"SeveralSplits", 700, 6, 0, 2, 2, 128},
      {"WindowInsideAPage", 300, 9, 100, 1, 4, 64},
      {"WindowOfOne", 200, 5, 1, 1, 2, 32},
      {"WindowLongerThanAllKeys", 5, 11, 512, 1, 4, 256},
      {"WindowOfGemma", 1500, 6, 512, 1, 4, 256, 50.0f},
      {"OddHeads", 129, 4, 0, 3, 5, 40},
      {"TinyHeads", 66, 3, 0, 2, 1, 2},
      {"ManyHeadsOnOne", 90, 2, 0, 1, 32, 80, 3.0f},
      {"LongerSplits", 8300, 2, 0, 1, 2, 32},
      {"SplitsChange", 8190, 5, 0, 1, 2, 32},
      {"LongestSplits", 33000, 1, 0, 1, 1, 16},
      {"LongHeads", 100, 2, 0, 1, 2, 512},
      {"HalvesOfSmolLm", 700, 3, 0, 3, 3, 64, 0, true},
      {"HalvesOfGemma", 1500, 6, 512, 1, 4, 256, 50.0f, true},
      {"HalvesOddHeads", 129, 4, 0, 3, 5, 40, 0, true},
      {"HalvesTinyHeads", 66, 3, 0, 2, 1, 2, 0, true},
      {"HalvesLongHeads", 100, 2, 70, 1, 2, 512, 0, true},
  };
  return table;
}

struct CacheAndQueries {
  explicit CacheAndQueries(const Shape& s) : shape(s) {
    RandomStream random(static_cast<uint64_t>(s.position * 31 + s.head_dim));
    const int64_t last = s.position + s.n_tokens - 1;
    n_entries = static_cast<int>(last / kPageTokens + 1);
    page_stride = kPageTokens * int64_t{s.n_kv_heads} * s.head_dim;
    for (int i = 0; i < n_entries; ++i) table.push_back(i);
    for (size_t i = table.size(); i > 1; --i)
      std::swap(table[i - 1], table[static_cast<size_t>(random.below(static_cast<int>(i)))]);
    const auto pool_floats = static_cast<size_t>(n_entries * page_stride);
    keys.assign(pool_floats, std::numeric_limits<float>::quiet_NaN());
    values = keys;
    half_keys.assign(pool_floats, 0x7e00);   // NaN
    half_values = half_keys;
    for (int64_t m = first_live_key(s.position, s.window); m <= last; ++m)
      for (int head = 0; head < s.n_kv_heads; ++head)
        for (int64_t c = 0; c < s.head_dim; ++c) {
          const size_t i = slot(m, head) + static_cast<size_t>(c);
          keys[i] = random.between(-1, 1);
          values[i] = random.between(-1, 1);
          if (!s.f16) continue;
          half_keys[i] = f32_to_f16(keys[i]);
          half_values[i] = f32_to_f16(values[i]);
          keys[i] = f16_to_f32(half_keys[i]);
          values[i] = f16_to_f32(half_values[i]);
        }
    q_stride = int64_t{s.n_kv_heads} * s.group * s.head_dim;
    for (int64_t i = 0; i < s.n_tokens * q_stride; ++i) q.push_back(random.between(-1, 1));
    scale = 3 / std::sqrt(static_cast<float>(s.head_dim));
  }
  size_t slot(int64_t position, int kv_head) const {
    const int64_t page = table[static_cast<size_t>(position / kPageTokens % n_entries)];
    return static_cast<size_t>(page * page_stride + (kv_head * kPageTokens + position % kPageTokens) * shape.head_dim);
  }
  AttentionTask task(int first_token, int n_tokens, int kv_head, std::vector<float>& out) const {
    AttentionTask t;
    const int64_t offset = first_token * q_stride + int64_t{kv_head} * shape.group * shape.head_dim;
    t.q = q.data() + offset;
    t.out = out.data() + offset;
    t.q_stride = t.out_stride = q_stride;
    t.n_tokens = n_tokens;
    t.group = shape.group;
    t.head_dim = shape.head_dim;
    const int64_t head_offset = kv_head * kPageTokens * shape.head_dim;
    t.cache_is_f16 = shape.f16;
    t.keys = shape.f16 ? static_cast<const void*>(half_keys.data() + head_offset) : keys.data() + head_offset;
    t.values = shape.f16 ? static_cast<const void*>(half_values.data() + head_offset) : values.data() + head_offset;
    t.page_stride_bytes = page_stride * static_cast<int64_t>(shape.f16 ? sizeof(uint16_t) : sizeof(float));
    t.table = table.data();
    t.n_entries = n_entries;
    t.position = shape.position + first_token;
    t.window = shape.window;
    t.split_keys = split_keys(t.position, shape.window);
    t.scale = scale;
    t.softcap = shape.softcap;
    return t;
  }
  // All tokens, at most tokens_at_once in a task (fewer where split_keys changes).
  std::vector<float> run(int tokens_at_once, bool by_splits) const {
    std::vector<float> out(q.size(), -77.5f);
    for (int begin = 0; begin < shape.n_tokens;) {
      int end = begin + 1;
      while (end < shape.n_tokens && end - begin < tokens_at_once &&
             split_keys(shape.position + end, shape.window) == split_keys(shape.position + begin, shape.window))
        ++end;
      const int64_t n_rows = int64_t{end - begin} * shape.group;
      std::vector<float> scratch(static_cast<size_t>(attention_scratch_floats(n_rows, shape.head_dim)), NAN);
      for (int kv_head = 0; kv_head < shape.n_kv_heads; ++kv_head) {
        const AttentionTask t = task(begin, end - begin, kv_head, out);
        if (!by_splits) {
          run_attention(t, scratch.data());
          continue;
        }
        const int64_t n_splits = last_split(t) - first_split(t) + 1;
        EXPECT_LE(n_splits, max_splits(n_entries * kPageTokens, shape.window, shape.n_tokens));
        const int64_t split_floats = n_rows * partial_floats(shape.head_dim);
        std::vector<float> partials(static_cast<size_t>(n_splits * split_floats), NAN);
        for (int64_t i = n_splits - 1; i >= 0; --i)
          run_attention_split(t, first_split(t) + i, partials.data() + i * split_floats, scratch.data());
        merge_attention_splits(t, partials.data());
      }
      begin = end;
    }
    return out;
  }

  Shape shape;
  int n_entries = 0;
  int64_t page_stride = 0, q_stride = 0;
  std::vector<int32_t> table;
  std::vector<float> keys, values, q;     // keys and values of an f16 cache: what its numbers are
  std::vector<uint16_t> half_keys, half_values;
  float scale = 1;
};

std::vector<uint32_t> bits_of(const std::vector<float>& values) {
  std::vector<uint32_t> bits;
  for (const float value : values) bits.push_back(std::bit_cast<uint32_t>(value));
  return bits;
}

class AttentionTest : public testing::TestWithParam<std::tuple<std::string, size_t>> {
 protected:
  void SetUp() override { choose_cpu_target(std::get<0>(GetParam())); }
  void TearDown() override { choose_cpu_target(""); }
};

TEST_P(AttentionTest, EqualsTheDoubleResultWithinRoundoff) {
  const CacheAndQueries data(shapes()[std::get<1>(GetParam())]);
  const Shape& s = data.shape;
  const std::vector<float> out = data.run(s.n_tokens, false);
  for (int t = 0; t < s.n_tokens; ++t)
    for (int head = 0; head < s.n_kv_heads * s.group; ++head) {
      const int64_t d = s.head_dim, position = s.position + t, first = first_live_key(position, s.window);
      const auto base = static_cast<size_t>(t * data.q_stride + head * d);
      std::vector<double> p;
      double error = 0;
      for (int64_t m = first; m <= position; ++m) {
        const size_t key = data.slot(m, head / s.group);
        double score = 0, magnitude = 0;
        for (int64_t c = 0; c < d; ++c) {
          const auto i = static_cast<size_t>(c);
          score += double{data.q[base + i]} * data.keys[key + i];
          magnitude += std::abs(double{data.q[base + i]} * data.keys[key + i]);
        }
        error = std::max(error, (static_cast<double>(d) / 16 + 8) * 0x1p-24 * magnitude * data.scale);
        score *= data.scale;
        if (s.softcap > 0) score = s.softcap * std::tanh(score / s.softcap);
        p.push_back(score);
      }
      error += 0x1p-21 * std::abs(*std::max_element(p.begin(), p.end())) + 0x1p-21;
      const double largest = *std::max_element(p.begin(), p.end());
      double sum = 0;
      for (double& value : p) sum += value = std::exp(value - largest);
      for (int64_t c = 0; c < d; ++c) {
        double exact = 0, magnitude = 0;
        for (int64_t m = first; m <= position; ++m) {
          const double v = data.values[data.slot(m, head / s.group) + static_cast<size_t>(c)];
          exact += p[static_cast<size_t>(m - first)] / sum * v;
          magnitude += p[static_cast<size_t>(m - first)] / sum * std::abs(v);
        }
        const double roundings = static_cast<double>(std::min<int64_t>(position - first + 1, kMaxSplitKeys)) + 20;
        ASSERT_NEAR(out[base + static_cast<size_t>(c)], exact, 2 * magnitude * (2 * error + roundings * 0x1p-24))
            << "token " << t << ", head " << head << ", column " << c;
      }
    }
}

TEST_P(AttentionTest, BitsDependOnTheTokenAlone) {
  const CacheAndQueries data(shapes()[std::get<1>(GetParam())]);
  const std::vector<uint32_t> expected = bits_of(data.run(data.shape.n_tokens, false));
  for (const int tokens_at_once : {1, 2, 3, 5, 8}) {
    EXPECT_EQ(bits_of(data.run(tokens_at_once, false)), expected) << tokens_at_once << " tokens at once";
    EXPECT_EQ(bits_of(data.run(tokens_at_once, true)), expected) << tokens_at_once << " tokens at once, by splits";
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, AttentionTest,
                         testing::Combine(testing::ValuesIn(cpu_targets()), testing::Range(size_t{0}, shapes().size())),
                         [](const auto& param) {
                           return std::get<0>(param.param) + "_" + shapes()[std::get<1>(param.param)].name;
                         });

TEST(AttentionTargetsTest, FusedTargetsGiveTheSameBits) {
  for (const Shape& shape : shapes()) {
    const CacheAndQueries data(shape);
    std::vector<uint32_t> first;
    for (const std::string& target : cpu_targets()) {
      if (target == "sse4") continue;  // rounds each product
      choose_cpu_target(target);
      const std::vector<uint32_t> bits = bits_of(data.run(shape.n_tokens, false));
      if (first.empty()) first = bits;
      EXPECT_EQ(bits, first) << target << ", " << shape.name;
    }
    choose_cpu_target("");
  }
}

}  // namespace
}  // namespace beryl
