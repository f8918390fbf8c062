// The MODEL of a command line: a path, or the name of a model in the store.
#pragma once

#include <string>

namespace beryl::cli {

// `given` where a file or folder lies there; else where the model of that name lies. An empty one stays empty. Throws
// Error(kIo) with names that are near it, Error(kBadInput) when several models may be meant.
std::string find_model(const std::string& given);

}  // namespace beryl::cli
