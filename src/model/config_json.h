// A config as a Hugging Face config.json, for models that were not read from one: the inverse of the families' readers.
#pragma once

#include <string>

#include "model/config.h"

namespace beryl {

// Requires one kind of sliding and one kind of global layers that differ only in what the family's config.json can say
// apart, as all models of synthetic.h have. tied: the embedding is the head too.
std::string config_json(const ModelConfig& config, bool tied);

}  // namespace beryl
