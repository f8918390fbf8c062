// Jinja templates, rendered as Python's jinja2 does with the settings of Hugging Face's transformers: trim_blocks,
// lstrip_blocks, loop controls, the immutable sandbox, tojson without escapes for HTML, raise_exception, strftime_now,
// the tag `generation`.
//
// A template is foreign code, so it is bounded: its size, the steps it takes, the texts it makes, the memory that its
// values hold, and how deeply it nests and calls. Beyond that, as for whatever jinja2 refuses, it ends with one Error.
// It can read no file and no other template.
//
// Left out, each an error that says so: autoescape, blocks that are scoped or required, the filters pprint, random,
// striptags, urlize and wordwrap, lipsum, str.encode, str.translate, integers beyond 2^126.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace beryl {

// A variable of a template. Text within it is foreign, unless `trusted` says that no user, tool or model wrote it.
struct TemplateVariable {
  std::string name;
  nlohmann::ordered_json value = nullptr;
  bool trusted = false;
  // In a list of objects: members of these objects whose texts are trusted all the same.
  std::vector<std::string> trusted_members = {};
};

// A part of a rendered text, from one side.
struct RenderedPiece {
  std::string text;      // never empty
  bool foreign = false;  // from a variable that is not trusted; else the template's own
};

// What one rendering may take. What the variables bring comes on top.
struct TemplateLimits {
  uint64_t work = uint64_t{2} << 30;     // a step of the machine counts 64, a character that is handled 1: seconds
  size_t bytes = size_t{256} << 20;      // of all values alive
  size_t characters = size_t{16} << 20;  // of one text
};

class JinjaTemplate {
 public:
  // Throws Error(kBadInput) with the line for what jinja2 does not compile.
  explicit JinjaTemplate(std::string_view source);
  ~JinjaTemplate();
  JinjaTemplate(JinjaTemplate&&) noexcept;
  JinjaTemplate& operator=(JinjaTemplate&&) noexcept;

  // The pieces in order, no two neighbours from the same side. clock: what strftime_now(format) gives; by default the
  // local time. Throws Error(kBadInput) with the line. May be called by several threads at once.
  std::vector<RenderedPiece> render(const std::vector<TemplateVariable>& variables,
                                    const std::function<std::string(const std::string&)>& clock = {},
                                    const TemplateLimits& limits = {}) const;

  // Whether the template reads a variable of this name from outside.
  bool reads(std::string_view name) const;

 private:
  struct Parsed;
  std::unique_ptr<Parsed> parsed_;
};

}  // namespace beryl
