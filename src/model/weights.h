// The tensors of a checkpoint, found by role, checked and folded, as a WeightSet that a backend imports.
//
// Folded here, so that no kernel needs a flag: Gemma 3's norm weights + 1, constant factors (router, per-layer
// projection), the order of rope pairs in GGUF's llama, the joining of q|k|v and of gate and up. An expected tensor
// that is missing, one of a wrong shape and one that nothing uses are errors that name it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "model/config.h"
#include "model/tensor_names.h"
#include "ops/op.h"
#include "ops/weight_set.h"

namespace beryl {

struct LayerWeights {
  VectorRef attention_norm;
  MatrixRef qkv;                 // q | k | v, or q | k (V from K), or q alone (sharing layer)
  VectorRef q_norm, k_norm;
  MatrixRef attention_output;
  VectorRef post_attention_norm;
  VectorRef ffn_norm;
  MatrixRef gate_up, down;
  VectorRef post_ffn_norm;
  float output_scale = 1;
  // per-layer embeddings
  MatrixRef per_layer_gate, per_layer_projection;
  VectorRef post_per_layer_norm;
  // experts
  VectorRef router_norm;         // router.scale · model_dim^-1/2
  MatrixRef router;
  VectorRef expert_scale;
  MatrixRef expert_gate_up, expert_down;
  VectorRef post_ffn_norm_1, pre_ffn_norm_2, post_ffn_norm_2;
};

struct ModelWeights {
  WeightSet set;
  MatrixRef embedding, head;     // the same index when tied
  VectorRef output_norm;
  MatrixRef per_layer_embedding, per_layer_model_projection;
  VectorRef per_layer_projection_norm;
  std::vector<LayerWeights> layers;
  std::vector<std::string> ignored;   // tensors of parts that beryl does not run (vision, audio), by name
};

// Where the tensors of a model come from, by role: a checkpoint, or made up (synthetic.h).
class TensorSource {
 public:
  virtual ~TensorSource() = default;
  virtual bool has(Role role, int layer) const = 0;
  // [stack][rows][cols]; throws Error naming the tensor when it is missing or of another shape.
  virtual HostMatrix matrix(Role role, int layer, int64_t rows, int64_t cols, int64_t stack) = 0;
  virtual std::vector<float> values(Role role, int layer, int64_t n) = 0;
  // A tensor that the model rightly does not use, if the source has it.
  virtual void ignore(Role role, int layer) = 0;
};

// Asks the source for every tensor of the model and folds them.
std::unique_ptr<ModelWeights> collect_weights(TensorSource& source, const ModelConfig& config);

// From a checkpoint, whose mapping must outlive the result. Also refuses tensors that nothing uses.
std::unique_ptr<ModelWeights> load_weights(const Checkpoint& checkpoint, const ModelConfig& config);

}  // namespace beryl
