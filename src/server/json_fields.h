// Reads a request's JSON, field by field: what is wrong is told with the field's name, what it is, and what was expected.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace beryl::server {

using Json = nlohmann::ordered_json;

// Throws ApiError(400) that names the byte for what is no JSON or no UTF-8, and for what is nested deeper than 64 levels;
// or that says that an object was expected.
Json parse_object(const std::string& body);
// One line, with ill-formed UTF-8 replaced and numbers that JSON lacks as null.
std::string to_line(const Json& json);

// An object's members. A member that is null counts as absent. All throw ApiError(400).
class Fields {
 public:
  // path: of the object, for messages; "" for the body itself, "stream_options." for one in it.
  explicit Fields(const Json& object, std::string path = {}) : object_(object), path_(std::move(path)) {}

  bool has(const char* name) const { return find(name) != nullptr; }
  const Json* find(const char* name) const;
  double number(const char* name, double otherwise, double least, double most) const;
  int64_t integer(const char* name, int64_t otherwise, int64_t least, int64_t most) const;
  bool boolean(const char* name, bool otherwise) const;
  std::optional<std::string> string(const char* name) const;
  std::string required_string(const char* name) const;
  const Json* array(const char* name) const;           // null: absent
  const Json* object(const char* name) const;          // null: absent
  // A string, or a list of strings; of at most so many.
  std::vector<std::string> strings(const char* name, size_t most) const;
  [[noreturn]] void refuse(const char* name, std::string_view expected) const;
  std::string path_of(const char* name) const { return path_ + name; }

 private:
  const Json& object_;
  std::string path_;
};

// "the text 'abc'", "the number 1e9", "an array": a value in few words.
std::string in_words(const Json& value);

}  // namespace beryl::server
