#include "grammar/json_schema.h"

#include <algorithm>
#include <map>
#include <utility>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/error.h"
#include "weights/json_text.h"
#include "weights/quote.h"

namespace beryl {
namespace {

using Json = nlohmann::ordered_json;
using Keys = std::set<std::string_view>;

constexpr int64_t kMaxCount = 100000;  // of lengths and items that are counted
constexpr size_t kMaxCountedProperties = 40;
constexpr size_t kMaxSchemas = 20000;

// What says something to people only.
const Keys kAnnotations = {"title",    "description", "default",  "examples", "example", "deprecated",
                           "readOnly", "writeOnly",   "$comment", "$schema",  "$id",     "id"};
const Keys kDefinitions = {"$defs", "definitions"};

// Formats as expressions. Narrower than need be here and there (no 29th of February, years of this and the last
// millennium, no leap seconds), and never too wide.
const std::string kDate =
    R"([12]\d{3}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8])))";
const std::string kTime = R"(([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+\-]([01]\d|2[0-3]):[0-5]\d))";
const std::string kByte = R"((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d))";
const std::string kGroup = "[0-9a-f]{1,4}";
const std::string kLabel = R"([a-z0-9]([a-z0-9\-]{0,30}[a-z0-9])?)";
const std::string kHost = kLabel + R"((\.)" + kLabel + "){0,7}";
const std::string kSegment = R"(([A-Za-z0-9\-._~!$&'()*+,;=:@]|%[0-9A-F]{2}))";
const std::string kTail = "(/" + kSegment + R"(*)*(\?()" + kSegment + "|[/?])*)?(#(" + kSegment + "|[/?])*)?";
const std::string kPointer = "(/([^/~]|~[01])*)*";
const std::string kDays = R"((\d{1,4}Y(\d{1,4}M(\d{1,4}D)?)?|\d{1,4}M(\d{1,4}D)?|\d{1,4}D))";
const std::string kHours = R"((T(\d{1,4}H(\d{1,4}M(\d{1,4}S)?)?|\d{1,4}M(\d{1,4}S)?|\d{1,4}S)))";
const std::map<std::string, std::string> kFormats = {
    {"date", kDate},
    {"time", kTime},
    {"date-time", kDate + "T" + kTime},
    {"duration", "P(" + kDays + kHours + "?|" + kHours + R"(|\d{1,4}W))"},
    {"ipv4", "(" + kByte + R"(\.){3})" + kByte},
    {"ipv6", "((" + kGroup + ":){7}" + kGroup + "|(" + kGroup + ":){1,3}(:" + kGroup + "){1,3}|::(" + kGroup + ")?)"},
    {"hostname", kHost},
    {"email", R"([A-Za-z0-9_%+\-]{1,32}(\.[A-Za-z0-9_%+\-]{1,16}){0,2}@)" + kHost},
    {"uuid", "[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}"},
    {"uri", R"([a-z][a-z0-9+.\-]{0,15}:(//)" + kHost + R"((:\d{1,4})?)" + kTail + "|" + kSegment + "+)"},
    {"uri-reference", "(//" + kHost + ")?" + kTail},
    {"json-pointer", kPointer},
    {"relative-json-pointer", "(0|[1-9][0-9]{0,8})(#|" + kPointer + ")"},
};

class SchemaCheck {
 public:
  SchemaCheck(const std::string& name, const Json& root, std::vector<std::string>& notes)
      : name_(name), root_(root), notes_(notes) {}

  CheckedSchema run() {
    const std::string text = root_.dump(-1, ' ', true, Json::error_handler_t::replace);
    while (text.find(constant_stem_) != text.npos) constant_stem_ += '_';
    CheckedSchema result;
    result.schema = schema(root_, "");
    require_ends();
    result.patterns = std::move(patterns_);
    return result;
  }

 private:
  // What stands for a string that matches as a whole.
  Json matching(const std::string& regex, const std::string& place) {
    patterns_.push_back({fmt::format("{}{}x", constant_stem_, patterns_.size()), regex,
                         fmt::format("{}: at {}", name_, place.empty() ? "its root" : quote(place, 120))});
    return {{"const", patterns_.back().constant}};
  }

  [[noreturn]] void bad(const std::string& place, const std::string& why) const {
    throw Error(ErrorCode::kBadInput,
                fmt::format("{}: at {}: {}", name_, place.empty() ? "its root" : quote(place, 120), why));
  }
  [[noreturn]] void unsupported(const std::string& place, const std::string& why) const {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{}: at {}: {}", name_, place.empty() ? "its root" : quote(place, 120), why));
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
      if (keys.contains(key) || kAnnotations.contains(key) || kDefinitions.contains(key) || key.starts_with("x-"))
        continue;
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
        for (const auto& [name, definition] : at->items())
          definitions[name] = schema(definition, below(below(place, key), name));
        result[std::string(key)] = std::move(definitions);
      }
    return result;
  }

  // A value that holds another of its own kind, always, has no end: nor has the reply. What has one is the least set that contains
  // what needs no reference, and what needs only references to what is in it.
  void require_ends() const {
    std::set<std::string> with_end;
    std::vector<std::string> rest;
    for (const auto& [target, place] : references_) rest.push_back(target);
    for (bool has_changed = true; has_changed;) {
      has_changed = std::erase_if(rest, [&](const std::string& target) {
                      const bool has = has_end(root_.at(Json::json_pointer(target.substr(1))), with_end);
                      if (has) with_end.insert(target);
                      return has;
                    }) > 0;
    }
    if (!rest.empty()) bad(references_.at(rest.front()), fmt::format("no value of {} comes to an end: each holds another one", quote(rest.front())));
  }

  bool has_end(const Json& node, const std::set<std::string>& with_end) const {
    if (!node.is_object()) return true;
    const auto has = [&](const Json& part) { return has_end(part, with_end); };
    if (const auto at = node.find("$ref"); at != node.end()) return with_end.contains(at->get<std::string>());
    if (node.contains("const") || node.contains("enum")) return true;
    for (const char* key : {"anyOf", "oneOf", "allOf"})
      if (const auto at = node.find(key); at != node.end()) return std::any_of(at->begin(), at->end(), has);
    const auto type = node.find("type");
    if (type == node.end()) return true;
    const Json types = type->is_array() ? *type : Json::array({*type});
    return std::any_of(types.begin(), types.end(), [&](const Json& each) {
      if (each == "array") {
        const auto n = static_cast<size_t>(std::max<int64_t>(0, count(node, "", "minItems")));
        const size_t n_first = node.contains("prefixItems") ? node["prefixItems"].size() : 0;
        for (size_t i = 0; i < std::min(n, n_first); ++i)
          if (!has(node["prefixItems"][i])) return false;
        return n <= n_first || !node.contains("items") || has(node["items"]);
      }
      if (each != "object" || !node.contains("properties")) return each != "object" || count(node, "", "minProperties") <= 0 || has_other(node, with_end);
      const Json& properties = node["properties"];
      if (const auto required = node.find("required"); required != node.end())
        for (const Json& key : *required)
          if (!has(properties[key.get<std::string>()])) return false;
      return std::count_if(properties.begin(), properties.end(), has) >= count(node, "", "minProperties");
    });
  }
  // Of an object without properties: one that it may have.
  bool has_other(const Json& node, const std::set<std::string>& with_end) const {
    if (const auto at = node.find("patternProperties"); at != node.end() && !at->empty()) return has_end(at->begin().value(), with_end);
    return !node.contains("additionalProperties") || has_end(node["additionalProperties"], with_end);
  }

  // The schema without its definitions and annotations.
  Json plain(const Json& node, const std::string& place) {
    if (node.contains("$ref")) return reference(node, place);
    if (node.contains("const") || node.contains("enum")) return values(node, place);
    for (const std::string_view key : {"anyOf", "oneOf", "allOf"})
      if (node.contains(key)) return choice(node, place, key);
    return typed(node, place);
  }

  Json reference(const Json& node, const std::string& place) {
    only(node, place, {"$ref"}, "beside '$ref'");
    if (!node["$ref"].is_string()) bad(below(place, "$ref"), "a string was expected");
    const auto target = node["$ref"].get<std::string>();
    if (target != "#" && !target.starts_with("#/"))
      unsupported(below(place, "$ref"), fmt::format("{}: only references within the schema (\"#/…\")", quote(target)));
    // Through a chain of nothing but references one comes back to the start, or to a schema.
    std::set<std::string> seen;
    std::string at = target;
    for (const Json* found = &node; found->is_object() && found->contains("$ref");) {
      if (!seen.insert(at).second)
        bad(below(place, "$ref"), fmt::format("{} refers to itself and says nothing else", quote(target)));
      try {
        found = &root_.at(Json::json_pointer(at.substr(1)));
      } catch (const nlohmann::json::exception&) {
        bad(below(place, "$ref"), fmt::format("there is no {}", quote(at)));
      }
      if (!found->is_object() && !found->is_boolean())
        bad(below(place, "$ref"), fmt::format("{} is no schema", quote(at)));
      if (found->is_object() && found->contains("$ref") && (*found)["$ref"].is_string())
        at = (*found)["$ref"].get<std::string>();
    }
    // Parts of a schema are walked where they lie; elsewhere (under an unknown keyword) nobody has looked.
    if (at != "#" && !at.starts_with("#/$defs/") && !at.starts_with("#/definitions/") &&
        !at.starts_with("#/properties/") && !at.starts_with("#/items"))
      unsupported(
          below(place, "$ref"),
          fmt::format(
              "{}: references lead to \"#\", \"#/$defs/…\", \"#/definitions/…\", \"#/properties/…\" or \"#/items\"",
              quote(at)));
    references_.emplace(target, below(place, "$ref"));
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
    if (!is_const && (!node["enum"].is_array() || node["enum"].empty()))
      bad(below(place, "enum"), "an array of at least one value was expected");
    const Json all = is_const ? Json::array({node["const"]}) : node["enum"];
    if (node.contains("type"))
      for (const Json& value : all) {
        const auto fits = [&](const Json& type) {
          return type == type_of(value) || (type == "number" && type_of(value) == "integer");
        };
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
    if (type.is_string()) return of_type(node, place, type.get<std::string>());
    if (!type.is_array() || type.empty()) bad(below(place, "type"), "a string or an array of strings was expected");
    // Each keyword belongs to one of the types, and is refused only where it belongs to none.
    Json options = Json::array();
    Keys used;
    std::set<std::string> seen;
    for (const Json& one : type) {
      if (!one.is_string() || !seen.insert(one.get<std::string>()).second)
        bad(below(place, "type"), "an array of different strings was expected");
      const Keys keys = keys_of(one.get<std::string>(), place);
      used.insert(keys.begin(), keys.end());
    }
    if (seen.contains("number") && seen.contains("integer"))
      unsupported(below(place, "type"), "both number and integer");
    used.insert("type");
    only(node, place, used, "with these types");
    for (const Json& one : type) {
      const Keys keys = keys_of(one.get<std::string>(), place);
      Json part = Json::object();
      for (const auto& [key, value] : node.items())
        if (keys.contains(key)) part[key] = value;
      options.push_back(of_type(part, place, one.get<std::string>()));
    }
    return {{"anyOf", std::move(options)}};
  }

  Keys keys_of(const std::string& type, const std::string& place) const {
    if (type == "string") return {"minLength", "maxLength", "pattern", "format"};
    if (type == "integer")
      return {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "format"};
    if (type == "number") return {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "format"};
    if (type == "array") return {"items", "prefixItems", "minItems", "maxItems"};
    if (type == "object")
      return {"properties",    "required",          "additionalProperties", "minProperties",
              "maxProperties", "patternProperties", "propertyNames"};
    if (type == "boolean" || type == "null") return {};
    bad(below(place, "type"),
        fmt::format("{} is no type, expected string, integer, number, boolean, null, array or object", quote(type)));
  }

  Json of_type(const Json& node, const std::string& place, const std::string& type) {
    Keys keys = keys_of(type, place);
    keys.insert("type");
    only(node, place, keys, fmt::format("for the type {}", type));
    Json result = {{"type", type}};
    for (const auto& [key, value] : node.items())
      if (key != "type" && keys.contains(key)) result[key] = value;
    if (type == "string") return string_of(result, place);
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

  // A pattern of JSON Schema may match anywhere within the string; what matches as a whole does so, too.
  Json string_of(Json& node, const std::string& place) {
    const int64_t least = count(node, place, "minLength"), most = count(node, place, "maxLength");
    if (most >= 0 && least > most) bad(place, "minLength is greater than maxLength");
    const bool has_length = least > 0 || most >= 0;
    if (const auto at = node.find("format"); at != node.end()) {
      if (!at->is_string()) bad(below(place, "format"), "a string was expected");
      const auto format = kFormats.find(at->get<std::string>());
      if (format == kFormats.end()) {
        note_format(node, place, at->get<std::string>());
      } else {
        if (node.contains("pattern") || has_length)
          unsupported(place, "'format' beside 'pattern', 'minLength' or 'maxLength'");
        return matching(format->second, below(place, "format"));
      }
    }
    if (const auto at = node.find("pattern"); at != node.end()) {
      if (!at->is_string()) bad(below(place, "pattern"), "a string was expected");
      if (has_length) unsupported(place, "'pattern' beside 'minLength' or 'maxLength'");
      return matching(at->get<std::string>(), below(place, "pattern"));
    }
    if (!has_length) return {{"type", "string"}};
    return matching(most < 0 ? fmt::format("[\\s\\S]{{{},}}", least)
                             : fmt::format("[\\s\\S]{{{},{}}}", std::max<int64_t>(least, 0), most),
                    place);
  }

  void note_format(Json& node, const std::string& place, const std::string& format) {
    notes_.push_back(fmt::format("{}: at {}: the format {} is not enforced", name_,
                                 place.empty() ? "its root" : quote(place, 120), quote(format)));
    node.erase("format");
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
      if (at->is_number_unsigned() && at->get<uint64_t>() > INT64_MAX)
        unsupported(below(place, key), "numbers above 2^63 - 1");
    }
  }

  void check_array(Json& node, const std::string& place) {
    const int64_t least = count(node, place, "minItems"), most = count(node, place, "maxItems");
    if (most >= 0 && least > most) bad(place, "minItems is greater than maxItems");
    if (const auto at = node.find("items"); at != node.end()) {
      if (at->is_array())
        unsupported(below(place, "items"), "an array of schemas; today's word for it is 'prefixItems'");
      if (!(at->is_boolean() && !at->get<bool>())) *at = schema(*at, below(place, "items"));
    }
    if (const auto at = node.find("prefixItems"); at != node.end()) {
      if (!at->is_array() || at->empty())
        bad(below(place, "prefixItems"), "an array of at least one schema was expected");
      // A beginning of them is an answer too, as many as minItems asks for.
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
          unsupported(below(place, "required"),
                      fmt::format("{} is none of 'properties'", quote(key.get<std::string>())));
      }
    }
    const auto additional = node.find("additionalProperties");
    const bool allows_others = additional != node.end() && !(additional->is_boolean() && !additional->get<bool>());
    if (allows_others) *additional = schema(*additional, below(place, "additionalProperties"));
    for (const char* key : {"patternProperties", "propertyNames"}) {
      const auto at = node.find(key);
      if (at == node.end()) continue;
      if (has_properties || additional != node.end() ||
          node.contains(std::string_view(key) == "patternProperties" ? "propertyNames" : "patternProperties"))
        unsupported(below(place, key), "together with 'properties', 'additionalProperties' or each other");
      if (!at->is_object()) bad(below(place, key), "an object was expected");
      if (std::string_view(key) == "patternProperties") {
        // One pattern for all names, which is what propertyNames and additionalProperties say together.
        if (at->size() != 1) unsupported(below(place, key), "another number of patterns than one");
        const std::string pattern = at->begin().key();
        Json property = schema(at->begin().value(), below(below(place, key), pattern));
        Json names_schema = Json{{"enum", Json::array({matching(pattern, below(place, key))["const"]})}};
        node.erase("patternProperties");
        node["propertyNames"] = std::move(names_schema);
        node["additionalProperties"] = std::move(property);
      } else {
        Json names_schema = *at;
        if (!names_schema.contains("type") && !names_schema.contains("enum") && !names_schema.contains("const"))
          names_schema["type"] = "string";
        if (names_schema.contains("type") && names_schema["type"] != "string")
          bad(below(place, key), "a schema of strings was expected");
        Json checked = schema(names_schema, below(place, key));
        if (checked.contains("const")) checked = Json{{"enum", Json::array({checked["const"]})}};
        *at = std::move(checked);
      }
      break;
    }
    // The library counts properties by writing out which come together.
    if ((least > 0 || most >= 0) && names.size() > kMaxCountedProperties)
      unsupported(place,
                  fmt::format("minProperties or maxProperties beside more than {} properties", kMaxCountedProperties));
    if (has_properties) {
      // A name of the list could come again as one of the others, with another value. Without others it is an answer
      // still.
      if (allows_others)
        notes_.push_back(fmt::format("{}: at {}: no other properties than those of the list are offered", name_,
                                     place.empty() ? "its root" : quote(place, 120)));
      node["additionalProperties"] = false;
    }
  }

  const std::string& name_;
  const Json& root_;
  std::vector<std::string>& notes_;
  std::vector<SchemaPattern> patterns_;
  std::map<std::string, std::string> references_;   // by target: the first place
  std::string constant_stem_ = "stands-for-pattern-";
  size_t n_schemas_ = 0;
};

}  // namespace

CheckedSchema checked_schema(const std::string& name, const nlohmann::ordered_json& schema,
                             std::vector<std::string>& notes) {
  return SchemaCheck(name, schema, notes).run();
}

}  // namespace beryl
