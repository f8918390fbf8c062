// Where tests find the real models; the reason to skip when they are not there.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>

namespace beryl {

inline std::string cache_folder() {
  if (const char* home = std::getenv("BERYL_HOME")) return home;
  const char* user = std::getenv("HOME");
  return std::string(user == nullptr ? "" : user) + "/.cache/beryl";
}

// The variable's value, else the file in the cache folder.
inline std::string model_path(const char* variable, const char* file) {
  if (const char* path = std::getenv(variable)) return path;
  return cache_folder() + "/" + file;
}
inline std::string gemma3_path() { return model_path("BERYL_GEMMA3_GGUF", "gemma3-270m-q4_k_m.gguf"); }
inline std::string smollm2_path() { return model_path("BERYL_SMOLLM2_GGUF", "smollm2-135m-instruct-q4_1.gguf"); }

}  // namespace beryl

#define BERYL_SKIP_WITHOUT(path) \
  if (!std::filesystem::exists(path)) GTEST_SKIP() << path << " is not there: ./test fetches it where there is a network"
