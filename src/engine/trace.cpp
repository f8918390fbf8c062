#include "engine/trace.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "base/error.h"
#include "engine/stepper.h"

namespace beryl {
namespace {

// Where the ops of each layer end: the first op after the embedding's ops, then after each layer.
std::vector<size_t> layer_ends(const Program& program) {
  std::vector<size_t> ends;
  for (int layer = -1; layer < program.n_layers; ++layer) {
    const auto next =
        std::find_if(program.layer_of_op.begin(), program.layer_of_op.end(), [&](int of) { return of > layer; });
    ends.push_back(static_cast<size_t>(next - program.layer_of_op.begin()));
  }
  return ends;
}

}  // namespace

std::vector<SequenceTrace> trace(const Program& program, Backend& backend, const TraceRequest& request) {
  const auto n_sequences = static_cast<int>(request.sequences.size());
  const auto chunk = static_cast<size_t>(request.chunk_tokens);
  size_t longest = 0;
  for (const auto& ids : request.sequences) longest = std::max(longest, ids.size());
  RunLimits run;
  run.context = static_cast<int64_t>(longest) + request.n_greedy + 1;
  run.chunk_tokens = request.chunk_tokens;
  run.n_sequences = n_sequences;
  run.cache_type = request.cache_type;
  // A step may hold one chunk of every sequence, and all its rows leave through the head.
  run.step_tokens = request.chunk_tokens * n_sequences;
  run.n_outputs = run.step_tokens;
  Stepper stepper(program, run, backend);
  const int logits = logits_slot(program);
  const int64_t model_dim = program.rows[static_cast<size_t>(program.residual_slot)].cols;
  const int64_t vocab = program.rows[static_cast<size_t>(logits)].cols;
  const std::vector<size_t> ends = layer_ends(program);
  const SampleParams greedy;

  std::vector<SequenceTrace> traces(request.sequences.size());
  for (SequenceTrace& each : traces) each.hidden.resize(request.layers ? static_cast<size_t>(program.n_layers) : 0);
  for (size_t begin = 0; begin < longest; begin += chunk) {
    std::vector<SequenceRows> rows;
    for (int s = 0; s < n_sequences; ++s) {
      const std::vector<int32_t>& ids = request.sequences[static_cast<size_t>(s)];
      if (begin >= ids.size()) continue;
      rows.push_back({s, std::span(ids).subspan(begin, std::min(chunk, ids.size() - begin)), Outputs::kAll, nullptr});
    }
    stepper.set_rows(rows);
    // Appends this step's rows of a slot to each sequence's values.
    const auto collect = [&](int slot, int64_t cols, auto&& values_of) {
      int64_t row = 0;
      for (const SequenceRows& each : rows) {
        std::vector<float>& values = values_of(traces[static_cast<size_t>(each.sequence)]);
        const auto n = static_cast<int64_t>(each.ids.size());
        const size_t old_size = values.size();
        values.resize(old_size + static_cast<size_t>(n * cols));
        stepper.executor().read_rows(slot, row, n, values.data() + old_size);
        row += n;
      }
    };
    size_t next_op = 0;
    if (request.layers)
      for (size_t i = 0; i < ends.size(); ++i) {
        stepper.run_ops({next_op, ends[i]});
        next_op = ends[i];
        collect(program.residual_slot, model_dim, [&](SequenceTrace& t) -> std::vector<float>& {
          return i == 0 ? t.embedded : t.hidden[i - 1];
        });
      }
    stepper.run_ops({next_op, program.ops.size() - 1});
    collect(logits, vocab, [](SequenceTrace& t) -> std::vector<float>& { return t.logits; });
  }

  if (request.n_greedy > 0) {
    // The first greedy id follows from the last logits; the others are decoded as one batch.
    std::vector<int32_t> next(traces.size());
    for (size_t s = 0; s < traces.size(); ++s) {
      BERYL_CHECK(stepper.reserve(static_cast<int>(s), stepper.length(static_cast<int>(s)) + request.n_greedy),
                  "context fits");
      const auto last = traces[s].logits.end() - vocab;
      if (!std::all_of(last, traces[s].logits.end(), [](float value) { return std::isfinite(value); }))
        throw NotFinite("the last logits are not finite, so no id follows: the file is broken");
      next[s] = static_cast<int32_t>(std::max_element(last, traces[s].logits.end()) - last);
      traces[s].greedy.push_back(next[s]);
    }
    for (int64_t i = 1; i < request.n_greedy; ++i) {
      if (i == 1) {
        std::vector<SequenceRows> rows;
        for (int s = 0; s < n_sequences; ++s)
          rows.push_back({s, {&next[static_cast<size_t>(s)], 1}, Outputs::kLast, &greedy});
        stepper.run(rows);
      } else {
        stepper.advance();
      }
      const std::vector<Sampled> sampled = stepper.samples();
      for (size_t s = 0; s < traces.size(); ++s) {
        if (!sampled[s].valid)
          throw NotFinite(fmt::format("the logits after {} greedy ids are not finite: the file is broken", i));
        traces[s].greedy.push_back(sampled[s].id);
      }
    }
  }
  return traces;
}

}  // namespace beryl
