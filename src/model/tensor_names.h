// Which tensor plays which role, in each container. The table is the specification's.
#pragma once

#include <cstdint>
#include <string>

#include "model/config.h"

namespace beryl {

enum class Role : uint8_t {
  kEmbedding, kOutputNorm, kHead, kPerLayerEmbedding, kPerLayerModelProjection, kPerLayerProjectionNorm,
  // one a layer
  kAttentionNorm, kQ, kK, kV, kQkv, kAttentionOutput, kQNorm, kKNorm, kPostAttentionNorm, kFfnNorm, kGate, kUp, kDown,
  kPostFfnNorm, kOutputScale, kPerLayerGate, kPerLayerProjection, kPostPerLayerNorm,
  kRouter, kRouterScale, kExpertScale, kExpertGateUp, kExpertGate, kExpertUp, kExpertDown,
  kPostFfnNorm1, kPreFfnNorm2, kPostFfnNorm2,
};

class TensorNames {
 public:
  // Looks at which prefix a Hugging Face checkpoint uses.
  explicit TensorNames(const Checkpoint& checkpoint);
  // Of a model that is to be written: in a folder, with the prefix of models without vision.
  explicit TensorNames(Container container) : container_(container), prefix_("model.") {}
  // `family` matters for one name: Llama calls the norm before the feed-forward post_attention_layernorm.
  std::string of(Role role, int layer = -1, Family family = Family::kGemma4) const;

 private:
  Container container_;
  std::string prefix_;       // Hugging Face: "model.", "model.language_model." or "language_model.model."
  std::string head_prefix_;  // "" or "language_model."
};

}  // namespace beryl
