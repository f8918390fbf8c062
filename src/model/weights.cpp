#include "model/weights.h"

#include <cmath>
#include <unordered_set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/error.h"
#include "model/tensor_names.h"
#include "weights/host_matrix.h"
#include "weights/quote.h"

namespace beryl {
namespace {

// Rows [begin, begin + count) of every expert. Requires rows in order.
HostMatrix row_slice(const HostMatrix& matrix, int64_t begin, int64_t count) {
  HostMatrix slice = matrix;
  slice.rows = count;
  slice.codes += begin * row_bytes(matrix.format, matrix.cols);
  if (slice.scales != nullptr) slice.scales += begin * row_scale_bytes(matrix.format, matrix.cols);
  return slice;
}

// Parts of multimodal checkpoints that a text engine does not run, and buffers that old exporters saved.
bool is_ignorable(std::string_view name) {
  for (const char* part : {"vision_tower.", "vision_model.", "audio_tower.", "multi_modal_projector.", "embed_vision.",
                           "embed_audio.", "vision_embedder.", "audio_embedder.", "rotary_emb.inv_freq"})
    if (name.find(part) != std::string_view::npos) return true;
  return false;
}

class CheckpointSource final : public TensorSource {
 public:
  CheckpointSource(const Checkpoint& checkpoint, const ModelConfig& config)
      : checkpoint_(checkpoint), family_(config.family), names_(checkpoint) {
    for (const LayerSpec& layer : config.layers)
      reads_divisors_ = reads_divisors_ || layer.attention.rope.scaling == RopeSpec::Scaling::kDivisors;
  }

  bool has(Role role, int layer) const override { return checkpoint_.find(name_of(role, layer)) != nullptr; }

  HostMatrix matrix(Role role, int layer, int64_t rows, int64_t cols, int64_t stack) override {
    const bool stacks = role == Role::kExpertDown || role == Role::kExpertGateUp || role == Role::kExpertGate ||
                        role == Role::kExpertUp;
    const std::string expected =
        stacks ? fmt::format("[{}, {}, {}]", stack, rows, cols) : fmt::format("[{}, {}]", rows, cols);
    const TensorInfo& tensor = use(role, layer, expected);
    HostMatrix result = matrix_of(checkpoint_, tensor);
    for (const std::string& companion : companions_of(checkpoint_, tensor)) used_.insert(companion);
    if (result.rows != rows || result.cols != cols || result.stack != stack)
      refuse(tensor.name, fmt::format("is [{}], {} was expected", fmt::join(tensor.shape, ", "), expected));
    return result;
  }

  std::vector<float> values(Role role, int layer, int64_t n) override {
    const std::string expected = fmt::format("[{}]", n);
    const TensorInfo& tensor = use(role, layer, expected);
    int64_t count = 1;
    for (int64_t dim : tensor.shape) count *= dim;
    if (tensor.shape.size() > 1 || count != n)
      refuse(tensor.name, fmt::format("is [{}], {} was expected", fmt::join(tensor.shape, ", "), expected));
    std::vector<float> result = floats_of(checkpoint_, tensor);
    for (float value : result)
      if (!std::isfinite(value)) refuse(tensor.name, fmt::format("holds {}, finite numbers were expected", value));
    return result;
  }

  void ignore(Role role, int layer) override {
    const std::string name = name_of(role, layer);
    if (checkpoint_.find(name) == nullptr) return;
    used_.insert(name);
    ignored_.push_back(name);
  }

  // Names that the model does not use; refuses those that no model should hold.
  std::vector<std::string> take_ignored() {
    if (reads_divisors_) used_.insert("rope_freqs.weight");   // by the config, which makes the rope's frequencies of it
    std::vector<std::string> unused;
    for (const TensorInfo& tensor : checkpoint_.tensors()) {
      if (used_.contains(tensor.name)) continue;
      if (is_ignorable(tensor.name)) {
        ignored_.push_back(tensor.name);
      } else {
        unused.push_back(tensor.name);
      }
    }
    if (!unused.empty())
      refuse(unused.front(), unused.size() == 1
                                 ? "is used by nothing in this model"
                                 : fmt::format("and {} others are used by nothing in this model", unused.size() - 1));
    return std::move(ignored_);
  }

 private:
  std::string name_of(Role role, int layer) const { return names_.of(role, layer, family_); }

  [[noreturn]] void refuse(const std::string& name, const std::string& what) const {
    throw Error(ErrorCode::kBadInput, fmt::format("{}: tensor {} {}", checkpoint_.path(), quote(name), what));
  }

  const TensorInfo& use(Role role, int layer, const std::string& expected_shape) {
    const std::string name = name_of(role, layer);
    const TensorInfo* tensor = checkpoint_.find(name);
    if (tensor == nullptr) refuse(name, fmt::format("is missing, {} was expected", expected_shape));
    used_.insert(name);
    return *tensor;
  }

  const Checkpoint& checkpoint_;
  Family family_;
  TensorNames names_;
  bool reads_divisors_ = false;
  std::unordered_set<std::string> used_;
  std::vector<std::string> ignored_;
};

class Collector {
 public:
  Collector(TensorSource& source, const ModelConfig& config)
      : source_(source), config_(config), result_(std::make_unique<ModelWeights>()) {}

  std::unique_ptr<ModelWeights> collect() {
    ModelWeights& w = *result_;
    const int64_t width = config_.model_dim;
    w.embedding = add("embedding", {matrix(Role::kEmbedding, -1, config_.vocab, width)});
    w.output_norm = norm("output norm", Role::kOutputNorm, -1, width);
    const bool has_head = config_.untied_head || source_.has(Role::kHead, -1);
    w.head = has_head ? add("head", {matrix(Role::kHead, -1, config_.vocab, width)}) : w.embedding;
    if (config_.per_layer_dim > 0) {
      const int64_t all = config_.n_layers() * config_.per_layer_dim;
      w.per_layer_embedding = add("per-layer embedding", {matrix(Role::kPerLayerEmbedding, -1, config_.vocab, all)});
      HostMatrix projection = matrix(Role::kPerLayerModelProjection, -1, all, width);
      projection.tensor_scale *= static_cast<float>(1 / std::sqrt(static_cast<double>(width)));
      w.per_layer_model_projection = add("per-layer model projection", {projection});
      w.per_layer_projection_norm =
          norm("per-layer projection norm", Role::kPerLayerProjectionNorm, -1, config_.per_layer_dim);
    }
    for (int i = 0; i < config_.n_layers(); ++i) w.layers.push_back(load_layer(i));
    return std::move(result_);
  }

 private:
  LayerWeights load_layer(int i) {
    const LayerSpec& spec = config_.layers[static_cast<size_t>(i)];
    const AttentionSpec& attention = spec.attention;
    const int64_t width = config_.model_dim, d = attention.head_dim;
    const int64_t q_rows = attention.n_heads * d, kv_rows = attention.n_kv_heads * d;
    const auto label = [&](const char* what) { return fmt::format("layer {} {}", i, what); };
    LayerWeights w;

    w.attention_norm = norm(label("attention norm"), Role::kAttentionNorm, i, width);
    std::vector<HostMatrix> qkv;
    if (source_.has(Role::kQkv, i)) {
      const int64_t n_kv_parts = !spec.owns_cache(i) ? 0 : attention.v_from_k ? 1 : 2;
      const HostMatrix fused = matrix(Role::kQkv, i, q_rows + n_kv_parts * kv_rows, width);
      qkv.push_back(row_slice(fused, 0, q_rows));
      for (int64_t part = 0; part < n_kv_parts; ++part)
        qkv.push_back(row_slice(fused, q_rows + part * kv_rows, kv_rows));
    } else {
      qkv.push_back(matrix(Role::kQ, i, q_rows, width));
      if (spec.owns_cache(i)) {
        qkv.push_back(matrix(Role::kK, i, kv_rows, width));
        if (!attention.v_from_k) qkv.push_back(matrix(Role::kV, i, kv_rows, width));
      }
    }
    if (config_.interleaved_rope) {
      qkv[0].interleaved_rows = d;
      if (spec.owns_cache(i)) qkv[1].interleaved_rows = d;
    }
    w.qkv = add(label("qkv"), std::move(qkv));
    if (attention.qk_norm) {
      w.q_norm = norm(label("q norm"), Role::kQNorm, i, d);
      if (spec.owns_cache(i)) w.k_norm = norm(label("k norm"), Role::kKNorm, i, d);
    }
    if (!spec.owns_cache(i))   // some files keep what a sharing layer never uses
      for (Role role : {Role::kK, Role::kV, Role::kKNorm}) source_.ignore(role, i);
    w.attention_output = add(label("attention output"), {matrix(Role::kAttentionOutput, i, width, q_rows)});
    if (spec.post_norms) w.post_attention_norm = norm(label("post-attention norm"), Role::kPostAttentionNorm, i, width);

    w.ffn_norm = norm(label("ffn norm"), Role::kFfnNorm, i, width);
    w.gate_up =
        add(label("gate|up"), {matrix(Role::kGate, i, spec.ffn.dim, width), matrix(Role::kUp, i, spec.ffn.dim, width)});
    w.down = add(label("down"), {matrix(Role::kDown, i, width, spec.ffn.dim)});
    if (spec.post_norms) w.post_ffn_norm = norm(label("post-ffn norm"), Role::kPostFfnNorm, i, width);
    if (spec.ffn.n_experts > 0) load_experts(i, w);

    if (config_.per_layer_dim > 0) {
      w.per_layer_gate = add(label("per-layer gate"), {matrix(Role::kPerLayerGate, i, config_.per_layer_dim, width)});
      w.per_layer_projection =
          add(label("per-layer projection"), {matrix(Role::kPerLayerProjection, i, width, config_.per_layer_dim)});
      w.post_per_layer_norm = norm(label("post-per-layer norm"), Role::kPostPerLayerNorm, i, width);
    }
    if (spec.output_scale) w.output_scale = source_.values(Role::kOutputScale, i, 1).front();
    return w;
  }

  void load_experts(int i, LayerWeights& w) {
    const FfnSpec& ffn = config_.layers[static_cast<size_t>(i)].ffn;
    const int64_t width = config_.model_dim;
    const auto label = [&](const char* what) { return fmt::format("layer {} {}", i, what); };
    std::vector<float> scale = source_.values(Role::kRouterScale, i, width);
    for (float& value : scale) value = static_cast<float>(value / std::sqrt(static_cast<double>(width)));
    w.router_norm = add_vector(label("router norm"), std::move(scale));
    w.router = add(label("router"), {matrix(Role::kRouter, i, ffn.n_experts, width)});
    w.expert_scale = add_vector(label("expert scale"), source_.values(Role::kExpertScale, i, ffn.n_experts));
    // Missing both ways, the usual one is named.
    if (source_.has(Role::kExpertGateUp, i) || !source_.has(Role::kExpertGate, i)) {
      const HostMatrix fused = matrix(Role::kExpertGateUp, i, 2 * ffn.expert_dim, width, ffn.n_experts);
      w.expert_gate_up = add(label("expert gate|up"),
                             {row_slice(fused, 0, ffn.expert_dim), row_slice(fused, ffn.expert_dim, ffn.expert_dim)});
    } else {
      w.expert_gate_up =
          add(label("expert gate|up"), {matrix(Role::kExpertGate, i, ffn.expert_dim, width, ffn.n_experts),
                                        matrix(Role::kExpertUp, i, ffn.expert_dim, width, ffn.n_experts)});
    }
    w.expert_down = add(label("expert down"), {matrix(Role::kExpertDown, i, width, ffn.expert_dim, ffn.n_experts)});
    w.post_ffn_norm_1 = norm(label("post-ffn norm 1"), Role::kPostFfnNorm1, i, width);
    w.pre_ffn_norm_2 = norm(label("pre-ffn norm 2"), Role::kPreFfnNorm2, i, width);
    w.post_ffn_norm_2 = norm(label("post-ffn norm 2"), Role::kPostFfnNorm2, i, width);
  }

  HostMatrix matrix(Role role, int layer, int64_t rows, int64_t cols, int64_t stack = 1) {
    return source_.matrix(role, layer, rows, cols, stack);
  }

  VectorRef norm(const std::string& label, Role role, int layer, int64_t n) {
    std::vector<float> weight = source_.values(role, layer, n);
    if (config_.norm_plus_one)
      for (float& value : weight) value += 1;
    return add_vector(label, std::move(weight));
  }

  MatrixRef add(std::string label, std::vector<HostMatrix> parts) {
    result_->set.matrices.push_back({std::move(label), std::move(parts)});
    return {static_cast<int>(result_->set.matrices.size()) - 1};
  }
  VectorRef add_vector(std::string label, std::vector<float> values) {
    result_->set.vectors.push_back({std::move(label), std::move(values)});
    return {static_cast<int>(result_->set.vectors.size()) - 1};
  }

  TensorSource& source_;
  const ModelConfig& config_;
  std::unique_ptr<ModelWeights> result_;
};

}  // namespace

std::unique_ptr<ModelWeights> collect_weights(TensorSource& source, const ModelConfig& config) {
  return Collector(source, config).collect();
}

std::unique_ptr<ModelWeights> load_weights(const Checkpoint& checkpoint, const ModelConfig& config) {
  CheckpointSource source(checkpoint, config);
  std::unique_ptr<ModelWeights> weights = collect_weights(source, config);
  weights->ignored = source.take_ignored();
  return weights;
}

}  // namespace beryl
