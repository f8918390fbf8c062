#include "ops/host_executor.h"

namespace beryl {

std::vector<Allocation> plan_host_buffers(const Program& program, const StepLimits& limits, int element_bytes, int cache_bytes) {
  std::vector<Allocation> plan;
  for (const WeightMatrix& matrix : program.weights->matrices)
    for (const HostMatrix& part : matrix.parts)
      plan.push_back({part.storage ? MemoryKind::kWeights : MemoryKind::kMappedWeights, part.name, part.bytes()});
  int64_t vector_bytes = 0;
  for (const WeightVector& vector : program.weights->vectors)
    vector_bytes += static_cast<int64_t>(vector.values.size() * sizeof(float));
  plan.push_back({MemoryKind::kWeights, "norms and scales", vector_bytes});

  for (const CacheDecl& cache : program.caches) {
    const int64_t n_pages = limits.n_pages[static_cast<size_t>(cache.group)];
    const int64_t bytes = n_pages * kPageTokens * cache.n_kv_heads * cache.head_dim * cache_bytes;
    plan.push_back({MemoryKind::kCache, cache.name + " keys", bytes});
    plan.push_back({MemoryKind::kCache, cache.name + " values", bytes});
  }
  for (const RowsDecl& rows : program.rows) {
    const int64_t n_rows = rows.count == RowCount::kTokens ? limits.max_tokens : limits.max_outputs;
    plan.push_back({MemoryKind::kActivations, rows.name, n_rows * rows.cols * element_bytes});
  }
  for (size_t i = 0; i < program.ropes.size(); ++i) {
    const auto n_pairs = static_cast<int64_t>(program.ropes[i].frequencies.size());
    plan.push_back({MemoryKind::kActivations, fmt::format("rope {}", i), limits.max_tokens * 2 * n_pairs * element_bytes});
  }
  for (const char* name : {"ids", "positions", "sequences"})
    plan.push_back({MemoryKind::kInputs, name, limits.max_tokens * int64_t{4}});
  plan.push_back({MemoryKind::kInputs, "output rows", limits.max_outputs * int64_t{4}});
  for (size_t i = 0; i < program.groups.size(); ++i)
    plan.push_back({MemoryKind::kInputs, fmt::format("page table {}", i),
                    int64_t{limits.max_sequences} * limits.n_entries[i] * 4});
  plan.push_back({MemoryKind::kInputs, "token counts", limits.max_sequences * program.vocab * 4});
  return plan;
}

namespace {

[[noreturn]] void refuse(const std::string& what) { throw Error(ErrorCode::kBadInput, "step input: " + what); }

}  // namespace

void check_input(const Program& program, const StepLimits& limits, const StepInput& input) {
  const int64_t n_tokens = input.n_tokens(), n_outputs = input.n_outputs();
  if (n_tokens < 1 || n_tokens > limits.max_tokens)
    refuse(fmt::format("{} tokens, between 1 and {} expected", n_tokens, limits.max_tokens));
  if (n_outputs > limits.max_outputs || n_outputs > n_tokens)
    refuse(fmt::format("{} output rows, at most {} expected", n_outputs, std::min<int64_t>(limits.max_outputs, n_tokens)));
  if (static_cast<int64_t>(input.positions.size()) != n_tokens || static_cast<int64_t>(input.sequences.size()) != n_tokens)
    refuse("ids, positions and sequences differ in length");
  if (!input.sampling.empty() && static_cast<int64_t>(input.sampling.size()) != n_outputs)
    refuse(fmt::format("{} sampling parameters for {} output rows", input.sampling.size(), n_outputs));
  if (input.tables.size() != program.groups.size())
    refuse(fmt::format("{} page tables, {} expected", input.tables.size(), program.groups.size()));
  for (size_t group = 0; group < input.tables.size(); ++group) {
    const auto expected = static_cast<size_t>(limits.max_sequences) * static_cast<size_t>(limits.n_entries[group]);
    if (input.tables[group].size() != expected)
      refuse(fmt::format("page table {} has {} entries, {} expected", group, input.tables[group].size(), expected));
    for (int32_t page : input.tables[group])
      if (page < -1 || page >= limits.n_pages[group])
        refuse(fmt::format("page table {} names page {}, the pool has {}", group, page, limits.n_pages[group]));
  }
  for (int64_t i = 0; i < n_tokens; ++i) {
    const auto t = static_cast<size_t>(i);
    if (input.ids[t] < 0 || input.ids[t] >= program.vocab)
      refuse(fmt::format("token id {} at row {}, the vocabulary has {}", input.ids[t], i, program.vocab));
    const int32_t sequence = input.sequences[t];
    if (sequence < 0 || sequence >= limits.max_sequences)
      refuse(fmt::format("sequence {} at row {}, at most {} expected", sequence, i, limits.max_sequences - 1));
    if (input.positions[t] < 0) refuse(fmt::format("position {} at row {}", input.positions[t], i));
    for (size_t group = 0; group < program.groups.size(); ++group) {
      const int n_entries = limits.n_entries[group];
      const int64_t entry = input.positions[t] / kPageTokens;
      if (program.groups[group].window == 0 && entry >= n_entries)
        refuse(fmt::format("position {} at row {} is past the context of {}", input.positions[t], i,
                           n_entries * kPageTokens));
      if (input.tables[group][static_cast<size_t>(sequence) * static_cast<size_t>(n_entries) +
                              static_cast<size_t>(entry % n_entries)] < 0)
        refuse(fmt::format("position {} of sequence {} has no page in group {}", input.positions[t], sequence, group));
    }
  }
  for (size_t i = 0; i < input.output_rows.size(); ++i) {
    const int32_t row = input.output_rows[i];
    if (row < 0 || row >= n_tokens || (i > 0 && row <= input.output_rows[i - 1]))
      refuse(fmt::format("output row {} of {} tokens; ascending indices expected", row, n_tokens));
  }
  for (const PageCopy& copy : input.page_copies) {
    if (copy.group < 0 || static_cast<size_t>(copy.group) >= program.groups.size())
      refuse(fmt::format("page copy in group {}, there are {}", copy.group, program.groups.size()));
    const int n_pages = limits.n_pages[static_cast<size_t>(copy.group)];
    if (copy.from < 0 || copy.from >= n_pages || copy.to < 0 || copy.to >= n_pages)
      refuse(fmt::format("page copy from {} to {}, the pool has {}", copy.from, copy.to, n_pages));
  }
}

}  // namespace beryl
