#include "model/build_step.h"

#include <algorithm>
#include <cmath>
#include <map>

#include <fmt/format.h>

#include "base/error.h"

namespace beryl {
namespace {

class StepBuilder {
 public:
  StepBuilder(const ModelConfig& config, const ModelWeights& weights) : config_(config), weights_(weights) {
    program_.weights = &weights.set;
    program_.vocab = config.vocab;
    program_.n_layers = config.n_layers();
  }

  Program build() {
    declare_rows();
    declare_caches();
    layer_ = -1;
    emit(CopyPages{});
    emit(Embed{weights_.embedding, x_, static_cast<float>(config_.embedding_scale)});
    if (config_.per_layer_dim > 0) emit_per_layer_inputs();
    for (layer_ = 0; layer_ < config_.n_layers(); ++layer_) {
      emit_attention();
      emit_feed_forward();
      if (config_.per_layer_dim > 0) emit_per_layer_block();
    }
    emit_head();
    check_shapes(program_);
    return std::move(program_);
  }

 private:
  const LayerSpec& spec() const { return config_.layers[static_cast<size_t>(layer_)]; }
  const LayerWeights& w() const { return weights_.layers[static_cast<size_t>(layer_)]; }
  Norm norm(VectorRef weight) const { return {true, weight, static_cast<float>(config_.norm_eps)}; }
  Norm plain_norm() const { return norm(VectorRef{}); }

  void emit(Op op) {
    program_.ops.push_back(std::move(op));
    program_.layer_of_op.push_back(layer_);
  }

  Rows declare(const char* name, int64_t cols, RowsKind kind = RowsKind::kActivation,
               RowCount count = RowCount::kTokens) {
    program_.rows.push_back({name, cols, kind, count});
    return {static_cast<int>(program_.rows.size()) - 1, 0, cols};
  }

  void declare_rows() {
    int64_t qkv = 0, heads = 0, ffn = 0;
    int top_k = 0;
    for (int i = 0; i < config_.n_layers(); ++i) {
      const LayerSpec& layer = config_.layers[static_cast<size_t>(i)];
      qkv = std::max(qkv, qkv_cols(layer, i));
      heads = std::max(heads, int64_t{layer.attention.n_heads} * layer.attention.head_dim);
      ffn = std::max(ffn, layer.ffn.dim);
      top_k = std::max(top_k, layer.ffn.top_k);
    }
    x_ = declare("residual", config_.model_dim, RowsKind::kResidual);
    program_.residual_slot = x_.slot;
    block_ = declare("block", config_.model_dim);
    qkv_ = declare("qkv", qkv);
    attended_ = declare("attended", heads);
    hidden_ = declare("hidden", ffn);
    if (top_k > 0) {
      routes_ = declare("routes", 2 * top_k, RowsKind::kResidual);
      mixed_ = declare("experts", config_.model_dim);
      summed_ = declare("branches", config_.model_dim);
    }
    if (config_.per_layer_dim > 0) {
      const int64_t all = config_.n_layers() * config_.per_layer_dim;
      per_layer_ = declare("per-layer inputs", all);
      projected_ = declare("per-layer projection", all);
      gated_ = declare("per-layer gate", config_.per_layer_dim);
    }
    gathered_ = declare("last rows", config_.model_dim, RowsKind::kResidual, RowCount::kOutputs);
    logits_ = declare("logits", weights_.set.matrices[static_cast<size_t>(weights_.head.index)].rows(),
                      RowsKind::kLogits, RowCount::kOutputs);
  }

  static int64_t qkv_cols(const LayerSpec& layer, int index) {
    const AttentionSpec& a = layer.attention;
    const int n_kv_parts = !layer.owns_cache(index) ? 0 : a.v_from_k ? 1 : 2;
    return int64_t{a.n_heads + n_kv_parts * a.n_kv_heads} * a.head_dim;
  }

  // Layers that share a cache own none; groups are told by their window, rope tables by their frequencies.
  void declare_caches() {
    std::map<int, int> group_of_window;
    for (int i = 0; i < config_.n_layers(); ++i) {
      const LayerSpec& layer = config_.layers[static_cast<size_t>(i)];
      const AttentionSpec& a = layer.attention;
      if (!group_of_window.contains(a.window)) {
        group_of_window[a.window] = static_cast<int>(program_.groups.size());
        program_.groups.push_back({a.window});
      }
      if (layer.owns_cache(i)) {
        cache_of_layer_.push_back(static_cast<int>(program_.caches.size()));
        program_.caches.push_back({fmt::format("layer {}", i), a.n_kv_heads, a.head_dim, group_of_window[a.window]});
      } else {
        cache_of_layer_.push_back(cache_of_layer_[static_cast<size_t>(a.cache_layer)]);
      }
      std::vector<double> frequencies = rope_frequencies(a.rope, a.head_dim);
      const auto same = std::find_if(program_.ropes.begin(), program_.ropes.end(),
                                     [&](const Rope& rope) { return rope.frequencies == frequencies; });
      rope_of_layer_.push_back(static_cast<int>(same - program_.ropes.begin()));
      if (same == program_.ropes.end()) program_.ropes.push_back({std::move(frequencies)});
    }
  }

  // u = (table[id] · sqrt(P) + norm(projection · x0 · model_dim^-1/2)) / sqrt(2), all layers' slices at once; the
  // projection's factor is folded into its matrix.
  void emit_per_layer_inputs() {
    const double width = static_cast<double>(config_.per_layer_dim);
    emit(Embed{weights_.per_layer_embedding, per_layer_, static_cast<float>(std::sqrt(width))});
    emit(Linear{weights_.per_layer_model_projection, x_, {}, projected_, Epilogue::kStore, {}, 0});
    emit(AddNorm{per_layer_, per_layer_, projected_, norm(weights_.per_layer_projection_norm), config_.per_layer_dim,
                 static_cast<float>(std::sqrt(0.5))});
  }

  void emit_attention() {
    const AttentionSpec& a = spec().attention;
    const bool owns = spec().owns_cache(layer_);
    const Rows qkv = qkv_.slice(0, qkv_cols(spec(), layer_));
    const int64_t q_cols = int64_t{a.n_heads} * a.head_dim;
    const int cache = cache_of_layer_[static_cast<size_t>(layer_)];
    emit(Linear{w().qkv, x_, norm(w().attention_norm), qkv, Epilogue::kStore, {}, 0});
    QkvFinish finish;
    finish.qkv = qkv;
    finish.n_heads = a.n_heads;
    finish.n_kv_heads = owns ? a.n_kv_heads : 0;
    finish.head_dim = a.head_dim;
    if (a.qk_norm) {
      finish.q_norm = norm(w().q_norm);
      if (owns) finish.k_norm = norm(w().k_norm);
    }
    if (a.v_norm && owns) finish.v_norm = plain_norm();
    finish.v_from_k = owns && a.v_from_k;
    finish.rope = rope_of_layer_[static_cast<size_t>(layer_)];
    finish.cache = owns ? cache : -1;
    emit(finish);
    emit(Attention{qkv.slice(0, q_cols), attended_.slice(0, q_cols), a.n_heads, cache, static_cast<float>(a.scale),
                   static_cast<float>(a.softcap)});
    emit(Linear{w().attention_output, attended_.slice(0, q_cols), {}, block_, Epilogue::kStore, {}, 0});
    add_block(block_, w().post_attention_norm, 1);
  }

  void emit_feed_forward() {
    const FfnSpec& ffn = spec().ffn;
    const Rows hidden = hidden_.slice(0, ffn.dim);
    const Epilogue gated = ffn.activation == Activation::kSilu ? Epilogue::kGatedSilu : Epilogue::kGatedGelu;
    emit(Linear{w().gate_up, x_, norm(w().ffn_norm), hidden, gated, {}, 0});
    emit(Linear{w().down, hidden, {}, block_, Epilogue::kStore, {}, 0});
    Rows result = block_;
    if (ffn.n_experts > 0) {
      emit(Route{x_, norm(w().router_norm), w().router, w().expert_scale, routes_.slice(0, 2 * ffn.top_k),
                 ffn.n_experts, ffn.top_k});
      emit(Experts{x_, norm(w().pre_ffn_norm_2), routes_.slice(0, 2 * ffn.top_k), w().expert_gate_up, w().expert_down,
                   mixed_, ffn.top_k, ffn.expert_dim});
      emit(AddNorm{summed_, {}, block_, norm(w().post_ffn_norm_1), 0, 1});
      emit(AddNorm{summed_, summed_, mixed_, norm(w().post_ffn_norm_2), 0, 1});
      result = summed_;
    }
    add_block(result, w().post_ffn_norm, config_.per_layer_dim > 0 ? 1 : output_scale());
  }

  // x = x + norm(projection · (gelu(gate · x) · u[layer]))
  void emit_per_layer_block() {
    const Rows input = per_layer_.slice(layer_ * config_.per_layer_dim, config_.per_layer_dim);
    emit(Linear{w().per_layer_gate, x_, {}, gated_, Epilogue::kGeluTimesOther, input, 0});
    emit(Linear{w().per_layer_projection, gated_, {}, block_, Epilogue::kStore, {}, 0});
    add_block(block_, w().post_per_layer_norm, output_scale());
  }

  // Carried by the layer's last AddNorm.
  float output_scale() const { return spec().output_scale ? w().output_scale : 1.0f; }

  void add_block(Rows block, VectorRef weight, float scale) {
    emit(AddNorm{x_, x_, block, spec().post_norms ? norm(weight) : Norm{}, 0, scale});
  }

  void emit_head() {
    emit(GatherRows{x_, gathered_});
    const bool caps = config_.final_softcap > 0;
    emit(Linear{weights_.head,
                gathered_,
                norm(weights_.output_norm),
                logits_,
                caps ? Epilogue::kSoftcap : Epilogue::kStore,
                {},
                static_cast<float>(config_.final_softcap)});
    emit(Sample{logits_});
    emit(Advance{});
  }

  const ModelConfig& config_;
  const ModelWeights& weights_;
  Program program_;
  int layer_ = -1;
  Rows x_, block_, qkv_, attended_, hidden_, routes_, mixed_, summed_, per_layer_, projected_, gated_, gathered_,
      logits_;
  std::vector<int> cache_of_layer_, rope_of_layer_;
};

}  // namespace

Program build_step(const ModelConfig& config, const ModelWeights& weights) {
  return StepBuilder(config, weights).build();
}

}  // namespace beryl
