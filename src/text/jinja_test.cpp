// What: templates give the text that jinja2 gives, or an error where it errs; every character of the output knows where
//       it came from; a hostile template ends soon with one line.
// How:  jinja2 itself is the oracle: tests/oracle/make_template_cases.py renders about 70 real templates over all
//       conversations, and snippets of every feature. Origins by marking each text of the input. Hostile templates by
//       name; tests/template_mutation_test.cpp has more, by chance.
#include "text/jinja.h"

#include <fmt/format.h>

#include <ctime>

#include "text/test_support.h"

namespace beryl {
namespace {

using Json = nlohmann::ordered_json;
using test::error_of;

std::filesystem::path cases_file() { return std::filesystem::path(BERYL_BINARY_DIR) / "test-data/template_cases.json"; }

std::vector<TemplateVariable> variables_of(const Json& object) {
  std::vector<TemplateVariable> variables;
  for (const auto& [name, value] : object.items()) variables.push_back({.name = name, .value = value});
  return variables;
}

std::string joined(const std::vector<RenderedPiece>& pieces) {
  std::string text;
  for (const RenderedPiece& piece : pieces) text += piece.text;
  return text;
}

std::string render(const std::string& source, const Json& variables = Json::object()) {
  return joined(JinjaTemplate(source).render(variables_of(variables)));
}

// Foreign parts in brackets.
std::string origins(const std::string& source, const Json& variables) {
  std::string text;
  for (const RenderedPiece& piece : JinjaTemplate(source).render(variables_of(variables)))
    text += piece.foreign ? fmt::format("[{}]", piece.text) : piece.text;
  return text;
}

TEST(Jinja, RealTemplatesGiveJinja2sTextOrItsError) {
  if (!std::filesystem::exists(cases_file())) GTEST_SKIP() << cases_file() << " is not there (./test makes it)";
  const Json cases = Json::parse(test::read_file(cases_file()));
  const std::string date = cases["date"];
  int n_rendered = 0, n_refused = 0;
  for (const auto& [name, source] : cases["templates"].items()) {
    const JinjaTemplate compiled(source.get<std::string>());
    for (const auto& [conversation, variables] : cases["conversations"].items()) {
      const Json& expected = cases["rendered"][name][conversation];
      std::string text;
      const std::string error = error_of(
          [&] { text = joined(compiled.render(variables_of(variables), [&](const std::string&) { return date; })); });
      if (expected.is_object()) {
        EXPECT_NE(error, "") << name << ", " << conversation << ": jinja2 says " << expected["error"];
        EXPECT_EQ(error.find('\n'), std::string::npos);
        ++n_refused;
        continue;
      }
      ASSERT_EQ(error, "") << name << ", " << conversation;
      ASSERT_EQ(text, expected.get<std::string>()) << name << ", " << conversation;
      ++n_rendered;
    }
  }
  EXPECT_GE(cases["templates"].size(), 70u);
  EXPECT_GT(n_rendered, 2000);
  EXPECT_GT(n_refused, 100);
}

TEST(Jinja, SnippetsOfEveryFeatureGiveJinja2sTextOrItsError) {
  if (!std::filesystem::exists(cases_file())) GTEST_SKIP() << cases_file() << " is not there (./test makes it)";
  const Json cases = Json::parse(test::read_file(cases_file()));
  int n_refused = 0;
  for (const Json& snippet : cases["snippets"]) {
    const std::string source = snippet["source"];
    std::string text;
    const std::string error = error_of([&] {
      text = joined(JinjaTemplate(source).render(variables_of(cases["variables"]),
                                                 [&](const std::string&) { return cases["date"].get<std::string>(); }));
    });
    if (snippet["rendered"].is_object()) {
      EXPECT_NE(error, "") << source << ": jinja2 says " << snippet["rendered"]["error"] << ", beryl writes " << text;
      n_refused += !error.empty();
    } else {
      EXPECT_EQ(error, "") << source;
      EXPECT_EQ(text, snippet["rendered"].get<std::string>()) << source;
    }
  }
  EXPECT_GE(cases["snippets"].size(), 280u);
  EXPECT_GT(n_refused, 100);
}

// Gemma 3's format, for the recorded outputs of a template that no package holds.
constexpr const char* kGemma3 = R"({{ bos_token }}{% set ns = namespace(before='', n=0) %}
{% for m in messages %}
{% if m.role == 'system' %}
{% set ns.before = m.content ~ '\n\n' %}
{% else %}
{% if (m.role == 'user') != (ns.n % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}{{ '\n' ~ ns.before }}
{%- if m.content is string %}
{{ m.content | trim }}
{%- else %}
{% for part in m.content %}
{{ '<start_of_image>' if part.type == 'image' else part.text | trim }}
{%- endfor %}
{% endif %}
<end_of_turn>{{ '\n' }}
{%- set ns.n = ns.n + 1 %}
{% set ns.before = '' %}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<start_of_turn>model{{ '\n' }}
{%- endif %})";

// The recorded outputs of chat_cases.json, where the template that wrote them is at hand.
TEST(Jinja, RecordedConversationsAreWrittenAgain) {
  if (!std::filesystem::exists(cases_file())) GTEST_SKIP() << cases_file() << " is not there (./test makes it)";
  const Json templates = Json::parse(test::read_file(cases_file()))["templates"];
  const Json golden = test::read_golden("chat_cases.json");
  const std::map<std::string, std::pair<std::string, std::string>> recorded = {
      {"gemma4-31b-mid", {templates["google-gemma-4-31B-it.jinja"], "<bos>"}},
      {"gemma4-26b-early", {templates["ggml-vocab-gemma-4.gguf"], "<bos>"}},
      {"gemma3", {kGemma3, "<bos>"}},
      {"llama3.1", {templates["meta-llama-Llama-3.1-8B-Instruct.jinja"], "<|begin_of_text|>"}},
      {"llama3.2", {templates["meta-llama-Llama-3.2-3B-Instruct.jinja"], "<|begin_of_text|>"}},
      {"smollm2", {templates["smollm2-135m-instruct-q4_1.gguf"], ""}}};
  int n_checked = 0;
  for (const auto& [name, from] : recorded) {
    const JinjaTemplate compiled(from.first);
    for (const auto& [conversation, expected] : golden["rendered"][name].items()) {
      Json variables = golden["cases"][conversation];
      variables["bos_token"] = from.second;
      if (!variables.contains("tools")) variables["tools"] = nullptr;
      std::string text;
      const std::string error = error_of([&] {
        text = joined(compiled.render(variables_of(variables), [](const std::string&) { return "01 Jan 2026"; }));
      });
      if (expected.is_object())
        EXPECT_NE(error.find(expected["error"].get<std::string>()), std::string::npos) << error;
      else
        EXPECT_EQ(error + text, expected.get<std::string>()) << name << ", " << conversation;
      ++n_checked;
    }
  }
  EXPECT_EQ(n_checked, 44);
}

TEST(Jinja, TextKnowsWhereItCameFrom) {
  const Json v = {{"u", "User"}, {"d", {{"k", "v<"}}}, {"l", {"a", "b"}}};
  const std::pair<const char*, const char*> cases[] = {
      {"x{{ u }}y", "x[User]y"},
      {"{{ 'a' + u + 'b' }}", "a[User]b"},
      {"{{ 'a' ~ u }}", "a[User]"},
      {"{{ u[1:3] }}-{{ u[0] }}-{{ u[::-1] }}", "[se]-[U]-[resU]"},
      {"{{ ('<' ~ u ~ '>')[1:-1] }}", "[User]"},
      {"{{ ('<' ~ u ~ '>')[0] }}", "<"},
      {"{{ u | upper }}{{ u.lower() }}{{ u|title }}", "[USERuserUser]"},
      {"{{ u.replace('s', '<s>') }}", "[U]<s>[er]"},
      {"{{ '<s>'.replace('s', u) }}", "<[User]>"},
      {"{{ ('  a' ~ u ~ ' ') | trim }}", "a[User]"},
      {"{{ u.split('s') | join('+') }}", "[U]+[er]"},
      {"{{ l | join('<') }}", "[a]<[b]"},
      {"{{ '%s|%5s' % (u, l[0]) }}", "[User]|    [a]"},
      {"{{ '{}|{:>3}'.format(u, l[0]) }}", "[User]|  [a]"},
      {"{{ '<%s>' | format(u) }}", "<[User]>"},
      {"{{ d | tojson }}", "[{\"k\": \"v<\"}]"},
      {"{{ ['<t>'] | tojson }}", "[[\"]<t>[\"]]"},
      {"{{ l }}", "[['a', 'b']]"},
      {"{% set x %}<{{ u }}>{% endset %}{{ x }}", "<[User]>"},
      {"{% macro m(t) %}<{{ t }}>{% endmacro %}{{ m(u) }}", "<[User]>"},
      {"{% filter upper %}<{{ u }}>{% endfilter %}", "<[USER]>"},
      {"{% for k, v in d.items() %}{{ k }}={{ v }}{% endfor %}", "[k]=[v<]"},
      {"{{ u | e }}{{ d.k | e }}", "[Userv&lt;]"},
      {"{{ u | indent(2, true) }}", "  [User]"},
      {"{{ (u ~ '\\nb') | indent }}", "[User]\n    b"},
      {"{{ u.center(8, '*') }}", "**[User]**"},
      {"{{ u | list | reverse | join }}", "[resU]"},
      {"{{ u | urlencode }}{{ u | truncate(1, true, '') if false }}", "[User]"},
      {"{{ {u: 1} }}", "[{'User': 1}]"},
      {"{{ u if u == 'User' else 'x' }}{{ 'User' in [u] }}", "[User]True"},
  };
  for (const auto& [source, expected] : cases) EXPECT_EQ(origins(source, v), expected) << source;

  const JinjaTemplate roles("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}");
  const auto pieces = roles.render({{.name = "messages",
                                     .value = Json::array({{{"role", "user"}, {"content", "hi"}}}),
                                     .trusted = false,
                                     .trusted_members = {"role"}}});
  ASSERT_EQ(pieces.size(), 2u);
  EXPECT_EQ(pieces[0].text, "<|user|>");
  EXPECT_FALSE(pieces[0].foreign);
  EXPECT_TRUE(pieces[1].foreign);
}

TEST(Jinja, ErrorsAreOneLineWithThePlace) {
  EXPECT_EQ(error_of([] { render("a\n{% if x %}\n{{ raise_exception('No\\nway') }}{% endif %}", {{"x", 1}}); }),
            "line 3: No\\x0away");
  EXPECT_EQ(error_of([] { render("\n\n{{ x.y.z }}", {{"x", Json::object()}}); }),
            "line 3: 'dict object' has no attribute 'y'");
  EXPECT_EQ(error_of([] { render("\n{% for %}"); }).substr(0, 8), "line 2: ");
  EXPECT_EQ(error_of([] { render("{% include 'secret' %}"); }),
            "line 1: 'include' reads another template, and there is none to read");
}

std::string repeated(std::string_view part, size_t n) {
  std::string text;
  for (size_t i = 0; i < n; ++i) text += part;
  return text;
}

// Case 40.
TEST(Jinja, HostileTemplatesEndSoonWithOneLine) {
  const std::string n = "100000";
  const std::vector<std::string> hostile = {
      "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
      "{% set n = namespace(x='a') %}{% for i in range(100) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
      "{% set n = namespace(x=[1]) %}{% for i in range(100) %}{% set n.x = n.x + n.x %}{% endfor %}",
      "{% set n = namespace(x=[1]) %}{% for i in range(100) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
      "{% set n = namespace(x=[1]) %}{% for i in range(100) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x|tojson }}",
      "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(100) %}{% set n.x = [n.x, n.x] %}"
      "{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
      "{% set n = namespace(x=[]) %}{% for i in range(100000) %}{% set n.x = [n.x] %}{% endfor %}",
      "{% set n = namespace(x=1) %}{% for i in range(100000) %}{% set n.x = (n.x,) %}{% endfor %}",
      "{% set n = namespace(l=[]) %}{% for i in range(100000) %}{% set n.l = n.l + ['" + std::string(1000, 'x') +
          "' ~ i] %}{% endfor %}",
      "{% set n = namespace() %}{% set n.n = [n] %}{{ n }}",
      "{{ 'a' * 1000000000 }}",
      "{{ 'ab' * 10 ** 30 }}",
      "{{ [1] * 1000000000 }}",
      "{{ (1, 2) * 10 ** 30 }}",
      "{{ '%1000000000d' % 1 }}",
      "{{ '%.1000000000f' % 1 }}",
      "{{ '%*d' % (10 ** 20, 1) }}",
      "{{ '%.999999999d' % 1 }}",
      "{{ '{:1000000000}'.format('a') }}",
      "{{ '{:>99999999999999999999}'.format('a') }}",
      "{{ '{:.1000000000f}'.format(1.0) }}",
      "{{ '{:0,1000000000}'.format(1) }}",
      "{{ 'a'.center(1000000000) }}",
      "{{ 'a'.zfill(10 ** 20) }}",
      "{{ 'a\tb'.expandtabs(1000000000) }}",
      "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
      "{{ ('b' * 100000).join('a' * 100000) }}",
      "{{ 'a'|indent(1000000000, true) }}",
      "{{ [1]|tojson(indent=1000000000) }}",
      "{{ [1]|batch(1000000000, 1)|list }}",
      "{{ [1]|slice(1000000000)|list }}",
      "{{ range(10 ** 9)|list }}",
      "{{ 2 ** (10 ** 10) }}",
      "{{ 10 ** 50 }}",
      "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
      "{% macro m(x) %}{{ m([x]) }}{% endmacro %}{{ m(1) }}",
      "{% macro a() %}{{ caller() }}{% endmacro %}{% macro b() %}{% call a() %}{{ b() }}{% endcall %}{% endmacro %}{{ "
      "b() }}",
      "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
      "{{ " + repeated("(", 100000) + "1" + repeated(")", 100000) + " }}",
      "{{ " + repeated("[", 100000) + repeated("]", 100000) + " }}",
      "{{ " + repeated("not ", 100000) + "1 }}",
      "{{ " + repeated("-", 100000) + "1 }}",
      "{{ 1" + repeated("+1", 100000) + " }}",
      "{{ x" + repeated(".a", 100000) + " }}",
      "{{ 1" + repeated("|abs", 100000) + " }}",
      "{{ 1" + repeated(" if 1 else 1", 50000) + " }}",
      repeated("{% if 1 %}", 50000),
      repeated("{% for x in y %}", 50000),
      repeated("{% set x %}", 50000),
      repeated("{{ x }}", 200000),
      std::string((1 << 20) + 1, 'x'),
      "{{ " + repeated("1", 100000) + " }}",
      "{{ " + repeated("{", 100000),
      "{{ '" + std::string(500000, 'x'),
      "{{ x(" + repeated("1,", 100000) + ") }}",
      "{% for i in range(100000) %}{{ range(100000)|sort(reverse=true)|list|length }}{% endfor %}",
      "{% for i in range(100000) %}{% set x = 'a' * 1000000 %}{% endfor %}",
      "{% for i in range(100000) %}{{ ('a' * 100000).find('b') }}{% endfor %}",
      "{% set x = 'a' * 1000000 %}{% for i in range(100000) %}{{ x in x }}{{ x == x ~ '' }}{% endfor %}",
      "{% macro m(n) %}{% set x = 'a' * 15000000 %}{{ x }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
      "{% macro m(l) %}{% for x in l %}{{ m(l) }}{% endfor %}{% endmacro %}{{ m(range(100000)|list) }}",
  };
  for (const std::string& source : hostile) {
    const std::clock_t start = std::clock();
    ErrorCode code = ErrorCode::kIo;
    const std::string error = error_of([&] { render(source, {{"x", 1}, {"y", {1}}}); }, &code);
    const double seconds = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
    EXPECT_NE(error, "") << source.substr(0, 100);
    EXPECT_EQ(code, ErrorCode::kBadInput) << source.substr(0, 100);
    EXPECT_EQ(error.find('\n'), std::string::npos) << error;
    EXPECT_LT(error.size(), 600u);
    EXPECT_LT(seconds, 30) << source.substr(0, 100);  // a few, but for sanitizers
  }
}

// What Python code would find there is not there, or is undefined and no use.
TEST(Jinja, TheSandboxHasNoWayOut) {
  for (const char* source :
       {"{{ ''.__class__.__mro__ }}", "{{ [].append(1) }}", "{{ {}.update({}) }}", "{{ x.__init__.__globals__ }}",
        "{{ (1).__class__() }}", "{{ range.__self__.x }}", "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ namespace.__init__() }}", "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ cycler.__init__.__globals__.os }}", "{{ self.__init__() }}"})
    EXPECT_NE(error_of([&] { render(source); }), "") << source;
  EXPECT_EQ(render("{{ ''.__class__ }}{{ [].append }}{{ x }}{{ os }}{{ open }}"), "");
}

TEST(Jinja, OneTemplateServesManyRenderings) {
  const JinjaTemplate compiled(
      "{% set n = namespace(i=0) %}{% for x in l %}{% set n.i = n.i + x %}{% endfor %}{{ n.i }}");
  for (int i = 0; i < 3; ++i)
    EXPECT_EQ(joined(compiled.render(variables_of({{"l", {1, 2, i}}}))), std::to_string(3 + i));
  EXPECT_TRUE(compiled.reads("l"));
  EXPECT_FALSE(compiled.reads("n"));
  EXPECT_TRUE(
      JinjaTemplate("{% macro m() %}{% for x in y %}{% if z %}{% endif %}{% endfor %}{% endmacro %}").reads("z"));
}

}  // namespace
}  // namespace beryl
