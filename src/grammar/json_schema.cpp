#include "grammar/json_schema.h"

#include <algorithm>
#include <cctype>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/error.h"
#include "grammar/regex_check.h"
#include "weights/json_text.h"
#include "weights/quote.h"

namespace beryl {
namespace {

using Json = nlohmann::ordered_json;
using Keys = std::set<std::string_view>;

constexpr int64_t kMaxCount = 100000;   // of lengths and items that are counted
constexpr size_t kMaxSchemas = 20000;

// What says something to people only.
const Keys kAnnotations = {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment", "$schema", "$id", "id"};
const Keys kDefinitions = {"$defs", "definitions"};
const Keys kFormats = {"email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"};

class SchemaCheck {
 public:
  SchemaCheck(const std::string& name, const Json& root, std::vector<std::string>& notes) : name_(name), root_(root), notes_(notes) {}

  Json run() { return schema(root_, ""); }

 private:
  [[noreturn]] void bad(const std::string& place, const std::string& why) const {
    throw Error(ErrorCode::kBadInput, fmt::format("{}: at {}: {}", name_, place.empty() ? "its root" : quote(place, 120), why));
  }
  [[noreturn]] void unsupported(const std::string& place, const std::string& why) const {
    throw Error(ErrorCode::kUnsupported, fmt::format("{}: at {}: {}", name_, place.empty() ? "its root" : quote(place, 120), why));
  }

  // A JSON pointer's next part.
  static std::string below(const std::string& place, std::string_view key) {
    std::string part;
    for (const char c : key) part += c == '~' ? std::string("~0") : c == '/' ? std::string("~1") : std::string(1, c);
    return fmt::format("{}/{}", place, part);
  }

  // Every key is one of these or an annotation.
  void only(const Json& node, const std::string& place, const Keys& keys, std::string_view beside) const {
    for (const auto& [key, value] : node.items()) {
      if (keys.contains(key) || kAnnotations.contains(key) || kDefinitions.contains(key) || key.starts_with("x-")) continue;
      unsupported(place, fmt::format("the keyword {} cannot be enforced {}", quote(key), beside));
    }
  }

  Json schema(const Json& node, const std::string& place) {
    if (++n_schemas_ > kMaxSchemas) unsupported(place, fmt::format("more than {} schemas", kMaxSchemas));
    if (node.is_boolean()) {
      if (!node.get<bool>()) unsupported(place, "the schema false, which nothing satisfies");
      return node;
    }
    if (!node.is_object()) bad(place, fmt::format("a schema is an object or true, this is a {}", node.type_name()));
    Json result = plain(node, place);
    for (const std::string_view key : kDefinitions)
      if (const auto at = node.find(key); at != node.end()) {
        if (!at->is_object()) bad(below(place, key), "an object of schemas was expected");
        Json definitions = Json::object();
        for (const auto& [name, definition] : at->items()) definitions[name] = schema(definition, below(below(place, key), name));
        result[std::string(key)] = std::move(definitions);
      }
    return result;
  }

  // The schema without its definitions and annotations.
  Json plain(const Json& node, const std::string& place) {
    if (node.contains("$ref")) return reference(node, place);
    if (node.contains("const") || node.contains("enum")) return values(node, place);
    for (const std::string_view key : {"anyOf", "oneOf", "allOf"})
      if (node.contains(key)) return choice(node, place, key);
    return typed(node, place);
  }

  Json reference(const Json& node, const std::string& place) const {
    only(node, place, {"$ref"}, "beside '$ref'");
    if (!node["$ref"].is_string()) bad(below(place, "$ref"), "a string was expected");
    const auto target = node["$ref"].get<std::string>();
    if (target != "#" && !target.starts_with("#/")) unsupported(below(place, "$ref"), fmt::format("{}: only references within the schema (\"#/…\")", quote(target)));
    // Through a chain of nothing but references one comes back to the start, or to a schema.
    std::set<std::string> seen;
    std::string at = target;
    for (const Json* found = &node; found->is_object() && found->contains("$ref");) {
      if (!seen.insert(at).second) bad(below(place, "$ref"), fmt::format("{} refers to itself and says nothing else", quote(target)));
      try {
        found = &root_.at(Json::json_pointer(at.substr(1)));
      } catch (const nlohmann::json::exception&) {
        bad(below(place, "$ref"), fmt::format("there is no {}", quote(at)));
      }
      if (!found->is_object() && !found->is_boolean()) bad(below(place, "$ref"), fmt::format("{} is no schema", quote(at)));
      if (found->is_object() && found->contains("$ref") && (*found)["$ref"].is_string()) at = (*found)["$ref"].get<std::string>();
    }
    // Parts of a schema are walked where they lie; elsewhere (under an unknown keyword) nobody has looked.
    if (at != "#" && !at.starts_with("#/$defs/") && !at.starts_with("#/definitions/") && !at.starts_with("#/properties/") && !at.starts_with("#/items"))
      unsupported(below(place, "$ref"), fmt::format("{}: references lead to \"#\", \"#/$defs/…\", \"#/definitions/…\", \"#/properties/…\" or \"#/items\"", quote(at)));
    return {{"$ref", target}};
  }

  static std::string_view type_of(const Json& value) {
    if (value.is_null()) return "null";
    if (value.is_boolean()) return "boolean";
    if (value.is_number_integer()) return "integer";
    if (value.is_number()) return "number";
    if (value.is_string()) return "string";
    return value.is_array() ? "array" : "object";
  }

  Json values(const Json& node, const std::string& place) const {
    const bool is_const = node.contains("const");
    only(node, place, {"const", "enum", "type"}, is_const ? "beside 'const'" : "beside 'enum'");
    if (is_const && node.contains("enum")) unsupported(place, "'const' beside 'enum'");
    if (!is_const && (!node["enum"].is_array() || node["enum"].empty())) bad(below(place, "enum"), "an array of at least one value was expected");
    const Json all = is_const ? Json::array({node["const"]}) : node["enum"];
    if (node.contains("type"))
      for (const Json& value : all) {
        const auto fits = [&](const Json& type) { return type == type_of(value) || (type == "number" && type_of(value) == "integer"); };
        const Json& types = node["type"];
        if (!(types.is_array() ? std::any_of(types.begin(), types.end(), fits) : fits(types)))
          unsupported(place, fmt::format("the value {} is none of 'type'", quote(value.dump(-1, ' ', true), 60)));
      }
    return is_const ? Json{{"const", node["const"]}} : Json{{"enum", node["enum"]}};
  }

  Json choice(const Json& node, const std::string& place, std::string_view key) {
    only(node, place, {key}, fmt::format("beside '{}'", key));
    const std::string inner = below(place, key);
    const Json& options = node[std::string(key)];
    if (!options.is_array() || options.empty()) bad(inner, "an array of at least one schema was expected");
    if (key == "allOf" && options.size() > 1) unsupported(inner, "more than one schema at once; write them as one");
    Json checked = Json::array();
    for (size_t i = 0; i < options.size(); ++i) checked.push_back(schema(options[i], below(inner, std::to_string(i))));
    // Of one alternative all three say the same.
    return {{options.size() == 1 ? "anyOf" : std::string(key), std::move(checked)}};
  }

  Json typed(const Json& node, const std::string& place) {
    if (!node.contains("type")) {
      for (const std::string_view key : {"properties", "required", "additionalProperties", "patternProperties"})
        if (node.contains(key)) unsupported(place, fmt::format("{} without 'type': \"object\"", quote(key)));
      only(node, place, {}, "without a 'type'");
      return true;
    }
    const Json& type = node["type"];
    if (type.is_string()) return of_type(node, place, type.get<std::string>(), {});
    if (!type.is_array() || type.empty()) bad(below(place, "type"), "a string or an array of strings was expected");
    // Each keyword belongs to one of the types, and is refused only where it belongs to none.
    Json options = Json::array();
    Keys used;
    std::set<std::string> seen;
    for (const Json& one : type) {
      if (!one.is_string() || !seen.insert(one.get<std::string>()).second) bad(below(place, "type"), "an array of different strings was expected");
      const Keys keys = keys_of(one.get<std::string>(), place);
      used.insert(keys.begin(), keys.end());
    }
    if (seen.contains("number") && seen.contains("integer")) unsupported(below(place, "type"), "both number and integer");
    used.insert("type");
    only(node, place, used, "with these types");
    for (const Json& one : type) {
      const Keys keys = keys_of(one.get<std::string>(), place);
      Json part = Json::object();
      for (const auto& [key, value] : node.items())
        if (keys.contains(key)) part[key] = value;
      options.push_back(of_type(part, place, one.get<std::string>(), used));
    }
    return {{"anyOf", std::move(options)}};
  }

  Keys keys_of(const std::string& type, const std::string& place) const {
    if (type == "string") return {"minLength", "maxLength", "pattern", "format"};
    if (type == "integer") return {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "format"};
    if (type == "number") return {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "format"};
    if (type == "array") return {"items", "prefixItems", "minItems", "maxItems"};
    if (type == "object") return {"properties", "required", "additionalProperties", "minProperties", "maxProperties", "patternProperties", "propertyNames"};
    if (type == "boolean" || type == "null") return {};
    bad(below(place, "type"), fmt::format("{} is no type, expected string, integer, number, boolean, null, array or object", quote(type)));
  }

  Json of_type(const Json& node, const std::string& place, const std::string& type, const Keys&) {
    Keys keys = keys_of(type, place);
    keys.insert("type");
    only(node, place, keys, fmt::format("for the type {}", type));
    Json result = {{"type", type}};
    for (const auto& [key, value] : node.items())
      if (key != "type" && keys.contains(key)) result[key] = value;
    if (type == "string") check_string(result, place);
    if (type == "integer" || type == "number") check_number(result, place, type == "integer");
    if (type == "array") check_array(result, place);
    if (type == "object") check_object(result, place);
    return result;
  }

  // A whole number in [0, kMaxCount]; -1: there is none.
  int64_t count(const Json& node, const std::string& place, const std::string& key) const {
    const auto at = node.find(key);
    if (at == node.end()) return -1;
    if (!at->is_number_integer() || *at < 0) bad(below(place, key), "a whole number from 0 on was expected");
    if (*at > kMaxCount) unsupported(below(place, key), fmt::format("counts above {}", kMaxCount));
    return at->get<int64_t>();
  }

  void check_string(Json& node, const std::string& place) {
    const int64_t least = count(node, place, "minLength"), most = count(node, place, "maxLength");
    if (most >= 0 && least > most) bad(place, "minLength is greater than maxLength");
    if (const auto at = node.find("pattern"); at != node.end()) {
      if (!at->is_string()) bad(below(place, "pattern"), "a string was expected");
      if (least >= 0 || most >= 0) unsupported(place, "'pattern' beside 'minLength' or 'maxLength'");
      *at = checked_pattern(at->get<std::string>(), below(place, "pattern"));
    }
    if (const auto at = node.find("format"); at != node.end()) {
      if (!at->is_string()) bad(below(place, "format"), "a string was expected");
      const auto format = at->get<std::string>();
      if (!kFormats.contains(format)) {
        note_format(node, place, format);
      } else if (node.contains("pattern") || least >= 0 || most >= 0) {
        unsupported(place, "'format' beside 'pattern', 'minLength' or 'maxLength'");
      }
    }
  }

  void note_format(Json& node, const std::string& place, const std::string& format) {
    notes_.push_back(fmt::format("{}: at {}: the format {} is not enforced", name_, place.empty() ? "its root" : quote(place, 120), quote(format)));
    node.erase("format");
  }

  // Within a JSON string some characters stand escaped, which a pattern knows nothing of: the library leaves them out of every
  // class, and where the pattern asks for one itself it would write it as it is.
  std::string checked_pattern(const std::string& pattern, const std::string& place) const {
    const std::string result = checked_regex(fmt::format("{}: at {}", name_, quote(place, 120)), pattern);
    for (size_t i = 0; i < pattern.size(); ++i) {
      const auto byte = static_cast<unsigned char>(pattern[i]);
      const bool is_escape = byte == '\\' && i + 1 < pattern.size();
      const char escaped = is_escape ? pattern[i + 1] : '\0';
      if (byte < 0x20 || byte > 0x7e) unsupported(place, "a pattern with other characters than those of ASCII");
      if (byte == '"' || (is_escape && std::string_view("\\\"nrtfv0xu").find(escaped) != std::string_view::npos))
        unsupported(place, fmt::format("the pattern {} names characters that a JSON string escapes, or by number", quote(pattern)));
      i += is_escape ? 1 : 0;
    }
    return result;
  }

  void check_number(Json& node, const std::string& place, bool is_integer) {
    if (const auto at = node.find("format"); at != node.end()) {
      if (!at->is_string()) bad(below(place, "format"), "a string was expected");
      note_format(node, place, at->get<std::string>());
    }
    for (const char* key : {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}) {
      const auto at = node.find(key);
      if (at == node.end()) continue;
      if (!at->is_number()) bad(below(place, key), "a number was expected");
      if (is_integer && !at->is_number_integer()) unsupported(below(place, key), "bounds of an integer that are none");
      if (at->is_number_unsigned() && at->get<uint64_t>() > INT64_MAX) unsupported(below(place, key), "numbers above 2^63 - 1");
    }
  }

  void check_array(Json& node, const std::string& place) {
    const int64_t least = count(node, place, "minItems"), most = count(node, place, "maxItems");
    if (most >= 0 && least > most) bad(place, "minItems is greater than maxItems");
    if (const auto at = node.find("items"); at != node.end()) {
      if (at->is_array()) unsupported(below(place, "items"), "an array of schemas; today's word for it is 'prefixItems'");
      if (!(at->is_boolean() && !at->get<bool>())) *at = schema(*at, below(place, "items"));
    }
    if (const auto at = node.find("prefixItems"); at != node.end()) {
      if (!at->is_array() || at->empty()) bad(below(place, "prefixItems"), "an array of at least one schema was expected");
      // The library writes all of them, however few minItems asks for; that is an answer too.
      for (size_t i = 0; i < at->size(); ++i) {
        Json part = schema((*at)[i], below(below(place, "prefixItems"), std::to_string(i)));
        (*at)[i] = part.is_boolean() ? Json::object() : part;
      }
      if (most >= 0 && most < static_cast<int64_t>(at->size())) unsupported(place, "fewer items than 'prefixItems'");
    }
  }

  void check_object(Json& node, const std::string& place) {
    const int64_t least = count(node, place, "minProperties"), most = count(node, place, "maxProperties");
    if (most >= 0 && least > most) bad(place, "minProperties is greater than maxProperties");
    std::set<std::string> names;
    if (const auto at = node.find("properties"); at != node.end()) {
      if (!at->is_object()) bad(below(place, "properties"), "an object of schemas was expected");
      for (auto& [key, property] : at->items()) {
        property = schema(property, below(below(place, "properties"), key));
        names.insert(key);
      }
      if (names.empty()) node.erase("properties");
    }
    const bool has_properties = !names.empty();
    if (const auto at = node.find("required"); at != node.end()) {
      if (!at->is_array()) bad(below(place, "required"), "an array of strings was expected");
      for (const Json& key : *at) {
        if (!key.is_string()) bad(below(place, "required"), "an array of strings was expected");
        if (!names.contains(key.get<std::string>()))
          unsupported(below(place, "required"), fmt::format("{} is none of 'properties'", quote(key.get<std::string>())));
      }
    }
    const auto additional = node.find("additionalProperties");
    const bool allows_others = additional != node.end() && !(additional->is_boolean() && !additional->get<bool>());
    if (allows_others) *additional = schema(*additional, below(place, "additionalProperties"));
    for (const char* key : {"patternProperties", "propertyNames"}) {
      const auto at = node.find(key);
      if (at == node.end()) continue;
      if (has_properties || additional != node.end() || node.contains(std::string_view(key) == "patternProperties" ? "propertyNames" : "patternProperties"))
        unsupported(below(place, key), "together with 'properties', 'additionalProperties' or each other");
      if (!at->is_object()) bad(below(place, key), "an object was expected");
      if (std::string_view(key) == "patternProperties") {
        if (at->size() != 1) unsupported(below(place, key), "another number of patterns than one");
        Json checked = Json::object();
        for (const auto& [pattern, property] : at->items())
          checked[checked_pattern(pattern, below(place, key))] = schema(property, below(below(place, key), pattern));
        *at = std::move(checked);
      } else {
        Json names_schema = *at;
        if (!names_schema.contains("type")) names_schema["type"] = "string";
        if (names_schema["type"] != "string") bad(below(place, key), "a schema of strings was expected");
        *at = schema(names_schema, below(place, key));
      }
    }
    if (has_properties) {
      // A name of the list could come again as one of the others, with another value. Without others it is an answer still.
      if (allows_others) notes_.push_back(fmt::format("{}: at {}: no other properties than those of the list are offered", name_, place.empty() ? "its root" : quote(place, 120)));
      node["additionalProperties"] = false;
    }
  }

  const std::string& name_;
  const Json& root_;
  std::vector<std::string>& notes_;
  size_t n_schemas_ = 0;
};

}  // namespace

nlohmann::ordered_json checked_schema(const std::string& name, const nlohmann::ordered_json& schema, std::vector<std::string>& notes) {
  return SchemaCheck(name, schema, notes).run();
}

}  // namespace beryl
