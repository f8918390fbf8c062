// Inputs, graphs and the tools' access to memory; ops are in execute_ops.cpp.
#include "cuda/cuda_executor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include <fmt/format.h>

#include "base/float_formats.h"
#include "cuda/dropped_rows.h"
#include "cuda/index_math.h"
#include "ops/host_executor.h"

namespace beryl::cuda {

namespace {

constexpr size_t kMaxGraphs = 64;

int64_t sampled_bytes(const StepLimits& limits) {
  return limits.max_outputs * (static_cast<int64_t>(sizeof(DeviceSampled)) + kMaxLogprobs * 8);
}

}  // namespace

CudaExecutor::CudaExecutor(const Program& program, const StepLimits& limits, const DeviceProperties& device)
    : program_(program),
      limits_(limits),
      device_(device),
      layout_(make_layout(program_, limits_, device_)),
      buffers_(layout_.allocations),
      stream_(make_stream()),
      context_{stream_.get(), device.programmatic, device.programmatic_grids},
      staging_(make_pinned(static_cast<size_t>(layout_.input_bytes), "staging for inputs")),
      input_sent_(make_event()),
      sampled_host_(make_pinned(static_cast<size_t>(sampled_bytes(limits_)), "staging for samples")) {
  import_weights(program_, layout_, buffers_);
  send_decode_phases();
}

CudaExecutor::~CudaExecutor() = default;

void CudaExecutor::set_input(const StepInput& step) {
  check_input(program_, limits_, step);
  check(cudaSetDevice(device_.device), "choosing the GPU");
  check(cudaEventSynchronize(input_sent_.get()), "sending the step's input");
  auto* staging = static_cast<std::byte*>(staging_.get());
  const auto place = [&](int64_t at, const auto& values) {
    if (!values.empty()) std::memcpy(staging + at, values.data(), values.size() * sizeof(values[0]));
  };
  place(layout_.ids_at, step.ids);
  place(layout_.positions_at, step.positions);
  place(layout_.sequences_at, step.sequences);
  place(layout_.output_rows_at, step.output_rows);
  place_outputs(step, reinterpret_cast<int32_t*>(staging + layout_.output_positions_at),
                reinterpret_cast<int32_t*>(staging + layout_.output_sequences_at));
  if (static_cast<int64_t>(step.page_copies.size()) > layout_.max_copies)
    throw Error(ErrorCode::kBadInput, fmt::format("step input: {} page copies, at most {} expected", step.page_copies.size(),
                                                  layout_.max_copies));
  static_assert(sizeof(PageCopy) == 12);
  place(layout_.copies_at, step.page_copies);

  features_ = {};
  int64_t n_biases = 0, n_masks = 0;
  auto* sampling = reinterpret_cast<DeviceSampling*>(staging + layout_.sampling_at);
  auto* bias_ids = reinterpret_cast<int32_t*>(staging + layout_.bias_ids_at);
  auto* bias_values = reinterpret_cast<float*>(staging + layout_.bias_values_at);
  for (size_t i = 0; i < step.sampling.size(); ++i) {
    const SampleParams& params = step.sampling[i];
    if (params.n_logprobs > kMaxLogprobs)
      throw Error(ErrorCode::kBadInput,
                  fmt::format("step input: {} log-probabilities a token, at most {} expected", params.n_logprobs, kMaxLogprobs));
    std::vector<std::pair<int32_t, float>> biases;
    for (const auto& bias : params.logit_bias)
      if (bias.first >= 0 && bias.first < program_.vocab) biases.push_back(bias);
    std::stable_sort(biases.begin(), biases.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    if (n_biases + static_cast<int64_t>(biases.size()) > layout_.max_biases)
      throw Error(ErrorCode::kBadInput, fmt::format("step input: more than {} logit biases", layout_.max_biases));
    sampling[i] = {params.temperature,
                   params.top_k,
                   params.top_p,
                   params.min_p,
                   params.repetition_penalty,
                   params.presence_penalty,
                   params.frequency_penalty,
                   params.n_logprobs,
                   params.seed,
                   params.draw,
                   static_cast<int32_t>(n_biases),
                   static_cast<int32_t>(n_biases + static_cast<int64_t>(biases.size())),
                   params.allowed == nullptr ? -1 : static_cast<int32_t>(n_masks),
                   uses_history(params) ? 1 : 0};
    for (const auto& [id, value] : biases) {
      bias_ids[n_biases] = id;
      bias_values[n_biases++] = value;
    }
    if (params.allowed != nullptr)
      std::memcpy(staging + layout_.masks_at + n_masks++ * layout_.mask_words * 4, params.allowed,
                  static_cast<size_t>(layout_.mask_words) * 4);
    features_.draws |= params.temperature > 0;
    features_.logprobs |= params.n_logprobs >= 0;
  }

  const auto send = [&](int64_t begin, int64_t bytes) {
    if (bytes > 0)
      check(cudaMemcpyAsync(input<std::byte>(begin), staging + begin, static_cast<size_t>(bytes), cudaMemcpyHostToDevice,
                            stream_.get()),
            "sending the step's input");
  };
  send(0, layout_.copies_at + static_cast<int64_t>(step.page_copies.size()) * 12);
  send(layout_.bias_ids_at, n_biases * 4);
  send(layout_.bias_values_at, n_biases * 4);
  send(layout_.masks_at, n_masks * layout_.mask_words * 4);
  check(cudaEventRecord(input_sent_.get(), stream_.get()), "sending the step's input");
  tables_.resize(step.tables.size());
  for (size_t group = 0; group < step.tables.size(); ++group) {
    if (tables_[group] == step.tables[group]) continue;
    tables_[group] = step.tables[group];
    // Not pinned: the call returns when the source has been read.
    check(cudaMemcpyAsync(buffers_.as<int32_t>(layout_.tables[group]), tables_[group].data(), tables_[group].size() * 4,
                          cudaMemcpyHostToDevice, stream_.get()),
          "sending a page table");
  }

  n_tokens_ = n_input_tokens_ = step.n_tokens();
  n_outputs_ = step.n_outputs();
  has_dropped_ = false;
  outputs_are_runs_ = drops_rows() && outputs_are_runs(step);
  n_copies_ = static_cast<int64_t>(step.page_copies.size());
  has_sampling_ = !step.sampling.empty();
  last_position_ = *std::max_element(step.positions.begin(), step.positions.end());
  turn_ropes();
}

void CudaExecutor::set_history(int sequence, std::span<const int32_t> prompt, std::span<const int32_t> reply) {
  check(cudaSetDevice(device_.device), "choosing the GPU");
  std::vector<uint32_t> history(static_cast<size_t>(program_.vocab), 0);
  for (int32_t id : prompt) history[static_cast<size_t>(id)] |= kInPrompt;
  for (int32_t id : reply) ++history[static_cast<size_t>(id)];
  check(cudaMemcpyAsync(buffers_.as<uint32_t>(layout_.history, int64_t{sequence} * program_.vocab * 4), history.data(),
                        history.size() * 4, cudaMemcpyHostToDevice, stream_.get()),
        "sending token counts");
  // The source is this function's own.
  check(cudaStreamSynchronize(stream_.get()), "sending token counts");
}

void CudaExecutor::run(OpRange range) {
  check(cudaSetDevice(device_.device), "choosing the GPU");
  close_pages();
  const size_t end = std::min(range.end, program_.ops.size()), begin = std::min(range.begin, end);
  bucket_position_ = bucket_position(last_position_);
  bring_rows_back(begin);
  if (begin == 0 && end == program_.ops.size() && n_input_tokens_ <= kGraphRows && n_copies_ == 0)
    run_graph();
  else
    execute_range(begin, end);
  // What the ops change on the device and the host must know.
  for (size_t i = begin; i < end; ++i) {
    if (std::holds_alternative<Sample>(program_.ops[i])) {
      sampled_ = has_sampling_ && n_outputs_ > 0;
      n_sampled_ = n_outputs_;
    } else if (std::holds_alternative<Advance>(program_.ops[i]) && sampled_) {
      ++last_position_;
      n_copies_ = 0;
    }
  }
}

void CudaExecutor::drop_rows(size_t index) {
  if (has_dropped_ || !drops_rows() || index != layout_.output_part->begin) return;
  has_dropped_ = true;
  n_tokens_ = n_outputs_;
  if (n_outputs_ == 0) return;
  const std::vector<int>& slots = layout_.output_part->slots;
  for (size_t first = 0; first < slots.size(); first += kMaxMovedSlots) {
    MoveRowsArgs args = {};
    for (size_t i = first; i < std::min(first + kMaxMovedSlots, slots.size()); ++i) {
      const Rows rows = {slots[i], 0, program_.rows[static_cast<size_t>(slots[i])].cols};
      args.slots[args.n_slots++] = {view(rows), view(rows), rows.cols};
    }
    args.rows = input<int32_t>(layout_.output_rows_at);
    args.n_rows = static_cast<int>(n_outputs_);
    launch_move_rows(context_, args);
  }
  turn_ropes();
}

void CudaExecutor::bring_rows_back(size_t begin) {
  if (!has_dropped_ || begin >= layout_.output_part->begin) return;
  has_dropped_ = false;
  n_tokens_ = n_input_tokens_;
  turn_ropes();
}

void CudaExecutor::execute_op(size_t index) {
  if (has_dropped_ && n_tokens_ == 0) return;
  std::visit([this](const auto& op) { execute(op); }, program_.ops[index]);
}

void CudaExecutor::execute_range(size_t begin, size_t end) {
  for (size_t i = begin; i < end;) {
    drop_rows(i);
    if (const DecodeRun found = decode_run(i, end); found.segment != nullptr && run_decode(*found.segment, *found.list)) {
      i = static_cast<size_t>(found.segment->end);
      continue;
    }
    const auto* sample = std::get_if<Sample>(&program_.ops[i]);
    if (sample != nullptr && i + 1 < end && std::holds_alternative<Advance>(program_.ops[i + 1]) && sample_and_advance(*sample)) {
      i += 2;
      continue;
    }
    execute_op(i++);
  }
}

// A step whose shape was seen before is captured; one that is new runs op by op, so that shapes that never return cost no
// capture. Both launch the same kernels.
void CudaExecutor::run_graph() {
  const GraphKey key = {n_input_tokens_, n_outputs_, bucket_position_, has_sampling_, features_};
  auto cached = std::find_if(graphs_.begin(), graphs_.end(), [&](const CachedGraph& graph) { return graph.key == key; });
  if (cached == graphs_.end()) {
    if (graphs_.size() >= kMaxGraphs)
      graphs_.erase(std::min_element(graphs_.begin(), graphs_.end(), [](const CachedGraph& a, const CachedGraph& b) {
        return a.last_use < b.last_use;
      }));
    graphs_.push_back({key, nullptr, ++uses_});
    execute_range(0, program_.ops.size());
    return;
  }
  cached->last_use = ++uses_;
  if (!cached->graph) {
    cudaGraph_t raw_graph = nullptr;
    check(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeThreadLocal), "capturing a step");
    try {
      execute_range(0, program_.ops.size());
    } catch (...) {
      cudaStreamEndCapture(stream_.get(), &raw_graph);
      const Graph graph(raw_graph);
      throw;
    }
    check(cudaStreamEndCapture(stream_.get(), &raw_graph), "capturing a step");
    const Graph graph(raw_graph);
    cudaGraphExec_t executable = nullptr;
    check(cudaGraphInstantiate(&executable, graph.get(), 0), "instantiating a step");
    cached->graph.reset(executable);
  }
  check(cudaGraphLaunch(cached->graph.get(), stream_.get()), "running a step");
  if (!drops_rows()) return;
  has_dropped_ = true;                // as in a step that was not replayed
  n_tokens_ = n_outputs_;
}

void CudaExecutor::synchronize() {
  check(cudaSetDevice(device_.device), "choosing the GPU");
  check(cudaStreamSynchronize(stream_.get()), "waiting for a step");
}

std::vector<Sampled> CudaExecutor::samples() {
  check(cudaSetDevice(device_.device), "choosing the GPU");
  std::vector<Sampled> samples;
  if (!sampled_) {
    synchronize();
    return samples;
  }
  auto* host = static_cast<std::byte*>(sampled_host_.get());
  const int64_t top_at = limits_.max_outputs * static_cast<int64_t>(sizeof(DeviceSampled));
  const int64_t bytes = features_.logprobs ? sampled_bytes(limits_) : n_sampled_ * static_cast<int64_t>(sizeof(DeviceSampled));
  check(cudaMemcpyAsync(host, buffers_.as<std::byte>(layout_.sampled), static_cast<size_t>(bytes), cudaMemcpyDeviceToHost,
                        stream_.get()),
        "reading samples");
  synchronize();
  const auto* sampled = reinterpret_cast<const DeviceSampled*>(host);
  const auto* ids = reinterpret_cast<const int32_t*>(host + top_at);
  const auto* logprobs = reinterpret_cast<const float*>(host + top_at + limits_.max_outputs * int64_t{kMaxLogprobs} * 4);
  for (int64_t i = 0; i < n_sampled_; ++i) {
    Sampled sample;
    sample.id = sampled[i].id;
    sample.valid = sampled[i].valid != 0;
    sample.logprob = sampled[i].logprob;
    for (int top = 0; top < sampled[i].n_top; ++top)
      sample.top.emplace_back(ids[i * kMaxLogprobs + top], logprobs[i * kMaxLogprobs + top]);
    samples.push_back(std::move(sample));
  }
  return samples;
}

void CudaExecutor::read_rows(int slot, int64_t row_begin, int64_t n_rows, float* out) {
  check(cudaSetDevice(device_.device), "choosing the GPU");
  const int64_t cols = program_.rows[static_cast<size_t>(slot)].cols;
  check(cudaMemcpyAsync(out, buffers_.as<float>(layout_.rows[static_cast<size_t>(slot)], row_begin * cols * 4),
                        static_cast<size_t>(n_rows * cols * 4), cudaMemcpyDeviceToHost, stream_.get()),
        "reading rows");
  synchronize();
}

void CudaExecutor::write_rows(int slot, int64_t row_begin, int64_t n_rows, const float* values) {
  check(cudaSetDevice(device_.device), "choosing the GPU");
  const int64_t cols = program_.rows[static_cast<size_t>(slot)].cols;
  check(cudaMemcpyAsync(buffers_.as<float>(layout_.rows[static_cast<size_t>(slot)], row_begin * cols * 4), values,
                        static_cast<size_t>(n_rows * cols * 4), cudaMemcpyHostToDevice, stream_.get()),
        "writing rows");
  synchronize();
}

int CudaExecutor::cache_element_bytes() const {
  switch (layout_.cache_element) {
    case CacheElement::kF32: return 4;
    case CacheElement::kBf16: return 2;
    case CacheElement::kFp8: return 1;
  }
  return 0;
}

int64_t CudaExecutor::position_bytes(int cache) const {
  const CacheDecl& decl = program_.caches[static_cast<size_t>(cache)];
  return int64_t{decl.n_kv_heads} * (layout_.key_cols[static_cast<size_t>(cache)] + decl.head_dim) * cache_element_bytes();
}

void CudaExecutor::copy_page(CachePart part, cudaMemcpyKind direction) {
  const bool keys = part == CachePart::kKeys;
  PageWindow& window = windows_[keys ? 0 : 1];
  const auto index = static_cast<size_t>(window.cache);
  const CacheDecl& decl = program_.caches[index];
  const auto copy = [&](void* host, void* device, size_t bytes) {
    const bool reads = direction == cudaMemcpyDeviceToHost;
    check(cudaMemcpyAsync(reads ? host : device, reads ? device : host, bytes, direction, stream_.get()), "copying a page");
  };
  copy(window.values.data(),
       buffers_.as<std::byte>(keys ? layout_.keys[index] : layout_.values[index],
                              cache_offset(window.page, 0, 0, decl.n_kv_heads, window.cols) * cache_element_bytes()),
       window.values.size());
  if (layout_.cache_element == CacheElement::kFp8)
    copy(window.scales.data(),
         buffers_.as<float>(keys ? layout_.key_scales[index] : layout_.value_scales[index],
                            cache_scale_offset(window.page, 0, 0, decl.n_kv_heads) * 4),
         window.scales.size() * 4);
  synchronize();
}

CudaExecutor::PageWindow& CudaExecutor::open_page(int cache, CachePart part, int page) {
  PageWindow& window = windows_[part == CachePart::kKeys ? 0 : 1];
  if (window.cache == cache && window.page == page) return window;
  check(cudaSetDevice(device_.device), "choosing the GPU");
  if (window.dirty) copy_page(part, cudaMemcpyHostToDevice);
  const CacheDecl& decl = program_.caches[static_cast<size_t>(cache)];
  const auto rows = static_cast<size_t>(decl.n_kv_heads) * kPageTokens;
  window.cache = cache;
  window.page = page;
  window.dirty = false;
  window.cols = part == CachePart::kKeys ? layout_.key_cols[static_cast<size_t>(cache)] : decl.head_dim;
  window.values.resize(rows * static_cast<size_t>(window.cols) * static_cast<size_t>(cache_element_bytes()));
  window.scales.assign(rows, 1.0f);
  copy_page(part, cudaMemcpyDeviceToHost);
  return window;
}

void CudaExecutor::close_pages() {
  for (CachePart part : {CachePart::kKeys, CachePart::kValues}) {
    PageWindow& window = windows_[part == CachePart::kKeys ? 0 : 1];
    if (window.dirty) copy_page(part, cudaMemcpyHostToDevice);
    window.dirty = false;
    window.cache = -1;
  }
}

void CudaExecutor::PageWindow::read(CacheElement element, int head, int row, float* out) const {
  const auto at = static_cast<size_t>(head * kPageTokens + row);
  const auto n = static_cast<size_t>(cols);
  for (size_t i = at * n; i < at * n + n; ++i, ++out) {
    if (element == CacheElement::kF32) {
      std::memcpy(out, values.data() + i * 4, 4);
    } else if (element == CacheElement::kBf16) {
      uint16_t bits;
      std::memcpy(&bits, values.data() + i * 2, 2);
      *out = bf16_to_f32(bits);
    } else {
      *out = e4m3_to_f32(static_cast<uint8_t>(values[i])) * scales[at];
    }
  }
}

void CudaExecutor::PageWindow::write(CacheElement element, int head, int row, const float* from) {
  const auto at = static_cast<size_t>(head * kPageTokens + row);
  const auto n = static_cast<size_t>(cols);
  float scale = 1;
  if (element == CacheElement::kFp8) {
    float largest = 0;
    bool nan = false;
    for (size_t d = 0; d < n; ++d) {
      largest = std::max(largest, std::abs(from[d]));
      nan = nan || std::isnan(from[d]);
    }
    scale = nan ? std::numeric_limits<float>::quiet_NaN() : largest == 0 ? 1.0f : largest / 448.0f;
    scales[at] = scale;
  }
  for (size_t d = 0; d < n; ++d) {
    const size_t i = at * n + d;
    if (element == CacheElement::kF32) {
      std::memcpy(values.data() + i * 4, from + d, 4);
    } else if (element == CacheElement::kBf16) {
      const uint16_t bits = f32_to_bf16(from[d]);
      std::memcpy(values.data() + i * 2, &bits, 2);
    } else {
      values[i] = static_cast<std::byte>(f32_to_e4m3(from[d] / scale));
    }
  }
  dirty = true;
}

void CudaExecutor::read_cache(int cache, CachePart part, int page, int row, float* out) {
  const CacheDecl& decl = program_.caches[static_cast<size_t>(cache)];
  const VectorRef weight = layout_.key_weights[static_cast<size_t>(cache)];
  const PageWindow& window = open_page(cache, part, page);
  if (part == CachePart::kValues || !weight.present()) {
    for (int head = 0; head < decl.n_kv_heads; ++head, out += decl.head_dim) window.read(layout_.cache_element, head, row, out);
    return;
  }
  // Keys from values (index_math.h).
  const PageWindow& values = open_page(cache, CachePart::kValues, page);
  const std::vector<float>& factors = program_.vector(weight).values;
  float turned[kTurnedColumns];
  for (int head = 0; head < decl.n_kv_heads; ++head, out += decl.head_dim) {
    values.read(layout_.cache_element, head, row, out);
    window.read(layout_.cache_element, head, row, turned);
    for (int column = 0; column < decl.head_dim; ++column)
      out[column] = is_turned(column) ? turned[turned_column(column)] : out[column] * factors[static_cast<size_t>(column)];
  }
}

// Of keys that are made from values, only the columns that rope turns: the others are the values' matter.
void CudaExecutor::write_cache(int cache, CachePart part, int page, int row, const float* values) {
  const CacheDecl& decl = program_.caches[static_cast<size_t>(cache)];
  const bool only_turned = part == CachePart::kKeys && layout_.key_weights[static_cast<size_t>(cache)].present();
  PageWindow& window = open_page(cache, part, page);
  for (int head = 0; head < decl.n_kv_heads; ++head, values += decl.head_dim) {
    float turned[kTurnedColumns];
    for (int column = 0; only_turned && column < decl.head_dim; ++column)
      if (is_turned(column)) turned[turned_column(column)] = values[column];
    window.write(layout_.cache_element, head, row, only_turned ? turned : values);
  }
}

std::vector<std::string> CudaExecutor::damaged_guards() {
  close_pages();
  synchronize();
  return buffers_.damaged();
}

}  // namespace beryl::cuda
