// Whether a run fits into the memory of a device, and if not, which would: asked before anything is allocated.
#pragma once

#include <cstdint>
#include <string>

#include "model/memory_plan.h"
#include "ops/backend.h"

namespace beryl {

// The largest context below run.context, in whole pages, with which the run fits into free_bytes; 0: none does. Chunks are
// no longer than the context.
int64_t largest_context(const Program& program, RunLimits run, const Backend& backend, int64_t free_bytes);

// Throws Error(kOutOfMemory) in one line when the backend's device has less memory free than the run takes: what is needed, what
// is free, and which context would fit. Nothing to say of backends without memory of their own.
void require_memory(const Program& program, const RunLimits& run, const Backend& backend);

// What to say behind an allocation that a host refused: "; a context of N would fit", of free_bytes. Empty where no context would, or
// where this one should.
std::string smaller_context_words(const Program& program, const RunLimits& run, const Backend& backend, int64_t free_bytes);

// Rows of a prompt that a step should take: larger chunks are faster on a GPU, and cost activations and slack in the sliding caches.
// The largest of 2,048, 1,024, ... above `otherwise` that fits and takes at most a sixteenth of the device's memory beyond what a
// chunk of `otherwise` takes; `otherwise` if none does, and where the backend has no memory of its own. Never more than the context.
int fitting_chunk(const Program& program, RunLimits run, const Backend& backend, int otherwise);

}  // namespace beryl
