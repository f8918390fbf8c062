// What: a config written as config.json is the same config when it is read.
// How:  every synthetic model's, with a table of two rows in place of its embedding.
#include "model/config_json.h"

#include <tuple>

#include <gtest/gtest.h>

#include "model/synthetic.h"
#include "model/test_checkpoints.h"

namespace beryl {
namespace {

auto parts(const AttentionSpec& a) {
  return std::tuple(a.n_heads, a.n_kv_heads, a.head_dim, a.window, a.rope, a.scale, a.softcap, a.qk_norm, a.v_norm,
                    a.v_from_k, a.cache_layer);
}
auto parts(const FfnSpec& f) { return std::tuple(f.dim, f.activation, f.n_experts, f.top_k, f.expert_dim); }

TEST(ConfigJsonTest, EverySyntheticConfigComesBack) {
  for (const std::string& name : synthetic_names())
    for (const bool tied : {false, true}) {
      SCOPED_TRACE(name);
      ModelConfig config = synthetic_config(name);
      config.vocab = 2;
      const test::TempFolder folder;
      const auto checkpoint =
          test::folder_with(folder, nlohmann::json::parse(config_json(config, tied)), config.model_dim);
      const ModelConfig read = read_config(*checkpoint);
      EXPECT_EQ(read.family, config.family);
      EXPECT_EQ(read.model_dim, config.model_dim);
      EXPECT_EQ(read.vocab, config.vocab);
      EXPECT_EQ(read.context, config.context);
      EXPECT_EQ(read.norm_eps, config.norm_eps);
      EXPECT_EQ(read.embedding_scale, config.embedding_scale);
      EXPECT_EQ(read.final_softcap, config.final_softcap);
      EXPECT_EQ(read.per_layer_dim, config.per_layer_dim);
      EXPECT_EQ(read.untied_head, !tied);
      EXPECT_EQ(read.norm_plus_one, config.family == Family::kGemma3);   // how its folders store norms
      EXPECT_FALSE(read.interleaved_rope);
      EXPECT_TRUE(read.suppressed_tokens.empty());
      ASSERT_EQ(read.n_layers(), config.n_layers());
      for (size_t i = 0; i < config.layers.size(); ++i) {
        SCOPED_TRACE(i);
        EXPECT_TRUE(parts(read.layers[i].attention) == parts(config.layers[i].attention));
        EXPECT_TRUE(parts(read.layers[i].ffn) == parts(config.layers[i].ffn));
        EXPECT_EQ(read.layers[i].post_norms, config.layers[i].post_norms);
        EXPECT_EQ(read.layers[i].output_scale, config.layers[i].output_scale);
      }
    }
}

}  // namespace
}  // namespace beryl
