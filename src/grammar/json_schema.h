// Which part of JSON Schema (2020-12, with what earlier drafts call the same) can be enforced, and how a schema is written so
// that what the library makes of it is exactly that.
//
// The library takes one keyword of a schema and drops the others without a word: beside $ref, const, enum, anyOf, oneOf and
// allOf nothing counts, "not" and "if" never do. So a schema is walked here first, and what would be dropped is refused with
// its place:
//
//   $ref "#…"          alone
//   const, enum        beside a "type" that all of the values have, alone
//   anyOf, allOf of one, oneOf where the library proves that only one can hold: alone
//   type               one or several
//     string           minLength and maxLength, or pattern, or a known format
//     integer          minimum, maximum, exclusive…; multipleOf as far as the library goes
//     number           minimum, maximum, exclusive…
//     array            items, prefixItems, minItems, maxItems
//     object           properties, required, additionalProperties, minProperties, maxProperties; patternProperties or
//                      propertyNames where there are no properties
//   no type            nothing of these: any value
//
// Annotations (title, description, default, …) pass; an unknown format is an annotation and is noted.
//
// An object with properties and no word about others gets no others: what is made is a valid answer all the same, and
// models asked for two fields should not invent a third.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace beryl {

// The schema as the library is to get it. name: for messages ("--json-schema: FILE"). Throws Error(kBadInput or
// kUnsupported) that names the place as a JSON pointer.
nlohmann::ordered_json checked_schema(const std::string& name, const nlohmann::ordered_json& schema, std::vector<std::string>& notes);

}  // namespace beryl
