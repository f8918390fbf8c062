// For tests: a golden model on a host backend, and ways to run ids through it.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "cpu/cpu_backend.h"
#include "engine/stepper.h"
#include "model/model.h"
#include "model/test_checkpoints.h"
#include "ops/random_matrix.h"

namespace beryl::test {

inline std::unique_ptr<Backend> host_backend(const std::string& name) {
  return name == "cpu" ? make_cpu_backend(2) : make_reference_backend(1);
}

// Ids below the golden vocabulary's 256.
inline std::vector<int32_t> random_ids(size_t n, uint64_t seed) {
  RandomStream random(seed);
  std::vector<int32_t> ids(n);
  for (int32_t& id : ids) id = random.below(256);
  return ids;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// Room for chunks of every sequence in one step, and for all their rows through the head.
inline RunLimits run_limits(int64_t context, int chunk, int n_sequences = 1) {
  RunLimits run;
  run.context = context;
  run.chunk_tokens = chunk;
  run.n_sequences = n_sequences;
  run.step_tokens = run.n_outputs = chunk * n_sequences;
  return run;
}

struct Feed {
  int sequence = 0;
  std::vector<int32_t> ids;
};

// Runs all of them side by side, `chunk` rows of each a step; the logits of every row, [feeds][ids · vocab].
inline std::vector<std::vector<float>> feed(Stepper& stepper, const std::vector<Feed>& feeds, size_t chunk) {
  const int slot = logits_slot(stepper.program());
  const auto vocab = static_cast<size_t>(stepper.program().vocab);
  std::vector<std::vector<float>> logits(feeds.size());
  size_t longest = 0;
  for (const Feed& each : feeds) longest = std::max(longest, each.ids.size());
  for (size_t begin = 0; begin < longest; begin += chunk) {
    std::vector<SequenceRows> rows;
    for (const Feed& each : feeds)
      if (begin < each.ids.size())
        rows.push_back({each.sequence, std::span(each.ids).subspan(begin, std::min(chunk, each.ids.size() - begin)),
                        Outputs::kAll, nullptr});
    stepper.run(rows);
    int64_t row = 0;
    for (size_t i = 0; i < feeds.size(); ++i) {
      if (begin >= feeds[i].ids.size()) continue;
      const size_t n = std::min(chunk, feeds[i].ids.size() - begin), old_size = logits[i].size();
      logits[i].resize(old_size + n * vocab);
      stepper.executor().read_rows(slot, row, static_cast<int64_t>(n), logits[i].data() + old_size);
      row += static_cast<int64_t>(n);
    }
  }
  return logits;
}

inline std::vector<float> feed(Stepper& stepper, int sequence, const std::vector<int32_t>& ids, size_t chunk) {
  return feed(stepper, {{sequence, ids}}, chunk)[0];
}

// NaN into every row of every page of every cache.
inline void poison_caches(Executor& executor, const Program& program, const StepLimits& limits) {
  for (size_t cache = 0; cache < program.caches.size(); ++cache) {
    const CacheDecl& decl = program.caches[cache];
    const std::vector<float> nan(static_cast<size_t>(decl.n_kv_heads * decl.head_dim),
                                 std::numeric_limits<float>::quiet_NaN());
    for (CachePart part : {CachePart::kKeys, CachePart::kValues})
      for (int page = 0; page < limits.n_pages[static_cast<size_t>(decl.group)]; ++page)
        for (int row = 0; row < kPageTokens; ++row)
          executor.write_cache(static_cast<int>(cache), part, page, row, nan.data());
  }
}

// The model with an embedding of its own (so the head is untied) in which one token's row is NaN: whatever sequence has
// that token has NaN from there on, and no other has.
inline void poison_token(Model& model, int32_t token) {
  WeightSet& set = model.weights->set;
  WeightMatrix table = set.matrices[static_cast<size_t>(model.weights->embedding.index)];
  HostMatrix& part = table.parts.front();
  auto values = std::make_shared<std::vector<std::byte>>(static_cast<size_t>(part.rows * part.cols) * sizeof(float));
  auto* out = reinterpret_cast<float*>(values->data());
  for (int64_t row = 0; row < part.rows; ++row) decode_row(part, 0, row, out + row * part.cols);
  for (int64_t col = 0; col < part.cols; ++col) out[token * part.cols + col] = std::numeric_limits<float>::quiet_NaN();
  part.format = Format::kF32;
  part.codes = values->data();
  part.storage = std::move(values);
  model.weights->embedding.index = static_cast<int>(set.matrices.size());
  set.matrices.push_back(std::move(table));
  model.program = build_step(model.config, *model.weights);
}

// Parameter: a golden model and a backend.
class GoldenEngine : public testing::TestWithParam<std::tuple<std::string, std::string>> {
 protected:
  GoldenEngine() : model_(open_model(golden_folder(model_name()))), backend_(host_backend(std::get<1>(GetParam()))) {}
  static const std::string& model_name() { return std::get<0>(GetParam()); }
  Stepper stepper(const RunLimits& run) { return Stepper(model_.program, run, *backend_); }

  Model model_;
  std::unique_ptr<Backend> backend_;
};

#define BERYL_INSTANTIATE_GOLDEN_ENGINE(suite)                                                              \
  INSTANTIATE_TEST_SUITE_P(Golden, suite,                                                                   \
                           testing::Combine(testing::ValuesIn(::beryl::test::golden_models()),              \
                                            testing::Values(std::string("reference"), std::string("cpu"))), \
                           [](const auto& info) { return std::get<0>(info.param) + "_" + std::get<1>(info.param); })

}  // namespace beryl::test
