// A talk in a file: JSON, with its messages as OpenAI's list.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

namespace beryl::cli {

struct SavedTalk {
  std::string model;                    // its name, for people
  std::string system_text;
  nlohmann::ordered_json settings;      // name -> number or true or false
  nlohmann::ordered_json messages;      // of user and assistant in turn, as many of each; thoughts as reasoning_content
};

// Replaces a file only if that is a saved talk as well. Throws Error(kIo, kBadInput).
void save_talk(const std::string& path, const SavedTalk& talk);
// Throws Error(kIo), or Error(kBadInput) that says what is wrong with the file.
SavedTalk load_talk(const std::string& path);

}  // namespace beryl::cli
