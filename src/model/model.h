// A model opened from disk: file, config, weights and step, in the order in which each is made from the one before.
#pragma once

#include <memory>
#include <string>

#include "model/build_step.h"
#include "model/config.h"
#include "model/weights.h"
#include "ops/program.h"
#include "weights/checkpoint.h"

namespace beryl {

struct Model {
  std::unique_ptr<Checkpoint> checkpoint;
  ModelConfig config;
  std::unique_ptr<ModelWeights> weights;   // points into checkpoint
  Program program;                         // points into weights
};

// path: a GGUF file or a Hugging Face folder. Maps and checks everything, moves no weight.
Model open_model(const std::string& path);

}  // namespace beryl
