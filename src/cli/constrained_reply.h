// A reply within a constraint: engine/generate.h's loop, with the ids that may come next told to the sampler before each step.
#pragma once

#include <functional>

#include "engine/generate.h"
#include "grammar/constraint.h"

namespace beryl::cli {

// As generate(); `constraint` begins where the reply begins. Error(kUnsupported) when no token of the vocabulary goes on
// with what was written so far.
GenerateResult generate_within(Constraint& constraint, Stepper& stepper, int sequence, const GenerateRequest& request,
                               const std::function<bool(const Sampled&)>& on_token);

}  // namespace beryl::cli
