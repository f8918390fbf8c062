#include "model/model.h"

namespace beryl {

Model open_model(const std::string& path) {
  Model model;
  model.checkpoint = open_checkpoint(path);
  model.config = read_config(*model.checkpoint);
  model.weights = load_weights(*model.checkpoint, model.config);
  model.program = build_step(model.config, *model.weights);
  return model;
}

}  // namespace beryl
