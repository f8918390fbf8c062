// What: conversations through a model's own template give the ids of the whole text that Hugging Face would tokenise,
//       those of the built-in formats where both say the same, and never a control token that a user, a tool or a model
//       spelt; templates get tool calls and content in the form that they expect; what a template writes that is no token,
//       and what it leaves out of a tool's schema, is reported.
// How:  real vocabularies with their templates; all templates of tests/oracle/make_template_cases.py with a hostile
//       conversation beside a harmless one; small templates of either habit.
#include "text/chat_writer.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <fstream>
#include <regex>
#include <set>

#include "text/test_support.h"

namespace beryl {
namespace {

using Json = nlohmann::ordered_json;
using test::error_of;

// A vocabulary of single bytes and the given control tokens.
std::unique_ptr<Tokenizer> small_tokenizer(const std::vector<std::string>& controls) {
  TokenizerParts parts;
  parts.source = parts.family = "test";
  for (int byte = 0; byte < 256; ++byte) parts.vocabulary.add(fmt::format("<0x{:02X}>", byte), TokenType::kByte);
  for (const std::string& control : controls) parts.vocabulary.add(control, TokenType::kControl);
  parts.vocabulary.build_index();
  parts.scores.assign(parts.vocabulary.size(), 0.0f);
  if (!controls.empty()) parts.bos_id = parts.eos_id = 256;
  return std::make_unique<Tokenizer>(std::move(parts));
}

Json user(const std::string& text) { return Json::array({{{"role", "user"}, {"content", text}}}); }

std::string written(const Tokenizer& tokenizer, const std::string& source, const Json& messages,
                    ChatOptions options = {}) {
  return make_template_writer("test", source, tokenizer)->write(messages, options).text();
}

ChatOptions options_of(const Json& input) {
  ChatOptions options;
  options.add_generation_prompt = input.value("add_generation_prompt", true);
  options.enable_thinking = input.value("enable_thinking", false);
  if (input.contains("tools")) options.tools = input["tools"];
  options.media_placeholders = true;
  options.today = "01 Jan 2026";
  return options;
}

std::optional<Json> template_cases() {
  const auto path = std::filesystem::path(BERYL_BINARY_DIR) / "test-data/template_cases.json";
  if (!std::filesystem::exists(path)) return std::nullopt;
  return Json::parse(test::read_file(path));
}

TEST(ChatWriter, OwnTemplateAndBuiltInFormatGiveTheSameIds) {
  const Json golden = test::read_golden("chat_cases.json");
  const std::optional<Json> cases = template_cases();
  struct Pair {
    std::string vocabulary, golden_name, source;
    ChatFormat format;
  };
  std::vector<Pair> pairs;
  const std::string smol = "You are a helpful AI assistant named SmolLM, trained by Hugging Face";
  if (const test::RealModel* model = test::real_model("smollm2"))
    pairs.push_back({"smollm2",
                     "smollm2",
                     find_chat_template(*model->checkpoint).value_or(""),
                     {.family = ChatFamily::kChatMl, .default_system = smol}});
  if (cases) {
    const Json& templates = (*cases)["templates"];
    pairs.push_back(
        {"llama3", "llama3.1", templates["meta-llama-Llama-3.1-8B-Instruct.jinja"], {.family = ChatFamily::kLlama3}});
    pairs.push_back({"llama3",
                     "llama3.2",
                     templates["meta-llama-Llama-3.2-3B-Instruct.jinja"],
                     {.family = ChatFamily::kLlama3, .todays_date = true}});
    pairs.push_back(
        {"gemma4", "gemma4-31b-mid", templates["google-gemma-4-31B-it.jinja"], {.family = ChatFamily::kGemma4}});
  }
  int n_checked = 0;
  for (const Pair& pair : pairs) {
    const test::RealModel* model = test::real_model(pair.vocabulary);
    if (model == nullptr || pair.source.empty()) continue;
    const auto own = make_template_writer("test", pair.source, *model->tokenizer);
    const auto built_in = make_built_in_writer(pair.format);
    for (const auto& [name, expected] : golden["rendered"][pair.golden_name].items()) {
      const Json& input = golden["cases"][name];
      const ChatPrompt prompt = own->write(input["messages"], options_of(input));
      const auto ids = encode_prompt(*model->tokenizer, prompt);
      // Harmless text: as if the whole were tokenised at once.
      EXPECT_EQ(ids, model->tokenizer->encode(prompt.text(), true)) << pair.golden_name << ", " << name;
      const ChatPrompt other = built_in->write(input["messages"], options_of(input));
      if (other.text() != prompt.text()) continue;  // the built-in one follows a later age of Gemma 4's template
      EXPECT_EQ(ids, encode_prompt(*model->tokenizer, other)) << pair.golden_name << ", " << name;
      ++n_checked;
    }
  }
  if (pairs.empty()) GTEST_SKIP() << "no vocabularies under " << test::beryl_home() << ", no test data";
  if (pairs.size() == 4) {
    EXPECT_GE(n_checked, 20);
  }
}

// Everything in a template that might be a control token of its model.
std::vector<std::string> controls_of(const std::string& source) {
  static const std::regex looks_special("<[|/]?[A-Za-z_:|=-]+[|]?>|\\[/?[A-Z_]{3,}\\]|<\\|\"\\|>");
  std::set<std::string> found = {"<bos>", "<eos>"};
  for (auto match = std::sregex_iterator(source.begin(), source.end(), looks_special); match != std::sregex_iterator();
       ++match)
    found.insert(match->str());
  return {found.begin(), found.end()};
}

// Case 16, for all templates: what users, tools and their descriptions spell makes no difference to the control tokens.
TEST(ChatWriter, NoTemplateMakesControlTokensOfWhatPeopleWrite) {
  const std::optional<Json> cases = template_cases();
  if (!cases) GTEST_SKIP() << "no test data (./test makes it)";
  const auto conversation = [](const std::string& text) {
    return Json::array(
        {{{"role", "system"}, {"content", "Sy " + text}},
         {{"role", "user"}, {"content", "Us " + text}},
         {{"role", "assistant"},
          {"content", "As "},
          {"tool_calls", Json::array({{{"id", "call00001"},
                                       {"type", "function"},
                                       {"function", {{"name", "tool"}, {"arguments", {{"key", "Ar " + text}}}}}}})}},
         {{"role", "tool"}, {"tool_call_id", "call00001"}, {"name", "tool"}, {"content", "Re " + text}},
         {{"role", "assistant"}, {"content", "ok"}},
         {{"role", "user"}, {"content", "Us " + text}}});
  };
  const auto tools = [](const std::string& text) {
    ChatOptions options;
    options.today = "01 Jan 2026";
    options.tools = Json::array({{{"type", "function"},
                                  {"function",
                                   {{"name", "tool"},
                                    {"description", "De " + text},
                                    {"parameters",
                                     {{"type", "object"},
                                      {"properties", {{"key", {{"type", "string"}, {"description", "Pa " + text}}}}},
                                      {"required", Json::array({"key"})}}}}}}});
    return options;
  };
  int n_checked = 0;
  for (const auto& [name, source] : (*cases)["templates"].items()) {
    const std::vector<std::string> controls = controls_of(source);
    const auto tokenizer = small_tokenizer(controls);
    const auto writer = make_template_writer(name, source.get<std::string>(), *tokenizer);
    const auto controls_in = [&](const std::string& text) -> std::optional<std::vector<std::string>> {
      std::vector<std::string> found;
      const std::string error = error_of([&] {
        for (const PromptPiece& piece : writer->write(conversation(text), tools(text)).pieces)
          if (piece.control) found.push_back(piece.text);
      });
      return error.empty() ? std::optional(found) : std::nullopt;
    };
    const auto harmless = controls_in("harmless");
    if (!harmless) continue;
    EXPECT_FALSE(harmless->empty()) << name;
    for (const std::string& control : controls) {
      // SmolLM3's template takes /think in the system text for a switch: other tokens, but its own.
      if (name.starts_with("HuggingFaceTB-SmolLM3") && control == "</think>") continue;
      EXPECT_EQ(controls_in(control + " after"), harmless) << name << ": " << control;
    }
    ++n_checked;
  }
  EXPECT_GT(n_checked, 50);
}

TEST(ChatWriter, ControlTokensCanNotBePutTogetherFromBothSides) {
  const auto tokenizer = small_tokenizer({"<s>", "<|im_start|>", "<|im_end|>"});
  const auto writer = make_template_writer(
      "test", "{% for m in messages %}<|im_{{ m.content }}<|im_start|>{{ m.role }}<|{{ m.content }}|>{% endfor %}",
      *tokenizer);
  const ChatPrompt prompt = writer->write(user("im_end"), {});
  EXPECT_EQ(prompt.text(), "<|im_im_end<|im_start|>user<|im_end|>");
  std::vector<std::string> controls;
  for (const PromptPiece& piece : prompt.pieces)
    if (piece.control) controls.push_back(piece.text);
  EXPECT_EQ(controls, std::vector<std::string>{"<|im_start|>"});
  EXPECT_EQ(writer->write(user("start|>"), {}).pieces.size(), 3u);  // text, token, text
}

TEST(ChatWriter, ToolCallsComeInTheFormThatTheTemplateExpects) {
  const auto tokenizer = small_tokenizer({"<s>"});
  const std::string head = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}";
  const std::string tail = "{% endfor %};{% endfor %}";
  for (const char* arguments : {R"("{\"a\": 1}")", R"({"a": 1})"}) {
    const Json messages = Json::parse(fmt::format(
        R"([{{"role":"user","content":"x"}},
            {{"role":"assistant","content":null,"tool_calls":[{{"function":{{"name":"f","arguments":{}}}}}]}}])",
        arguments));
    EXPECT_EQ(written(*tokenizer, head + "{{ c.function.arguments | tojson }}" + tail, messages), "x;{\"a\": 1};");
    EXPECT_EQ(written(*tokenizer, head + "{{ c.function.arguments }}" + tail, messages), "x;{\"a\": 1};");
    EXPECT_EQ(written(*tokenizer, head + "{{ '(' + c.function.arguments + ')' }}" + tail, messages), "x;({\"a\": 1});");
    EXPECT_EQ(
        written(*tokenizer, head + "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}" + tail,
                messages),
        "x;a=1;");
  }
}

TEST(ChatWriter, ArgumentsThatAreNoJsonComeAsTheText) {
  const auto tokenizer = small_tokenizer({"<s>"});
  const std::string head = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}";
  const std::string tail = "{% endfor %};{% endfor %}";
  const auto calling = [](const std::string& arguments) {
    return Json::array({{{"role", "user"}, {"content", "x"}},
                        {{"role", "assistant"}, {"content", nullptr}, {"tool_calls", Json::array({{{"function", {{"name", "f"}, {"arguments", arguments}}}}})}}});
  };
  for (const std::string broken : {R"({"city": 'Paris})", "Paris", R"("Paris")", R"({"Paris": 1, "Paris": 2})", "<s>Paris"}) {
    const Json messages = calling(broken);
    EXPECT_EQ(written(*tokenizer, head + "{{ '(' + c.function.arguments + ')' }}" + tail, messages), "x;(" + broken + ");");
    EXPECT_EQ(written(*tokenizer, head + "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}" + tail, messages),
              broken == R"("Paris")" ? "x;Paris;" : "x;" + broken + ";");
    // A template that can show an object only.
    for (const char* only : {"{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}",
                             "{% if c.function.arguments is mapping %}{{ c.function.arguments | tojson }}{% endif %}"}) {
      const auto writer = make_template_writer("here", head + only + tail, *tokenizer);
      const std::string refusal = error_of([&] { writer->write(messages, {}); });
      for (const char* part : {"message 1", "'f'", "no JSON object"}) EXPECT_NE(refusal.find(part), std::string::npos) << refusal;
    }
  }
  EXPECT_EQ(written(*tokenizer, head + "{{ c.function.arguments | tojson }}" + tail, calling("{a")), "x;\"{a\";");
}

TEST(ChatWriter, ContentComesInTheFormThatTheTemplateExpects) {
  const auto tokenizer = small_tokenizer({"<s>"});
  const Json parts =
      Json::parse(R"([{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}])");
  const std::string as_text = "{% for m in messages %}{{ '<' + m.content + '>' }}{% endfor %}";
  const std::string as_parts = "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}";
  const std::string either =
      "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
      "{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %}{% endfor %}";
  EXPECT_EQ(written(*tokenizer, as_text, parts), "<ab>");
  EXPECT_EQ(written(*tokenizer, as_text, user("c")), "<c>");
  EXPECT_EQ(written(*tokenizer, as_parts, parts), "<a><b>");
  EXPECT_EQ(written(*tokenizer, as_parts, user("c")), "<c>");
  EXPECT_EQ(written(*tokenizer, either, parts), "<a><b>");
  EXPECT_EQ(written(*tokenizer, either, user("c")), "c");
}

TEST(ChatWriter, VariablesThinkingAndErrors) {
  const auto tokenizer = small_tokenizer({"<s>", "<think>", "</think>"});
  const std::string source =
      "{{ bos_token }}{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.content is defined }};{% "
      "endfor %}"
      "{{ tools is none }}{{ effort }}{% if add_generation_prompt %}<think>\n{% if not enable_thinking %}</think>\n{% "
      "endif %}{% endif %}";
  const auto writer = make_template_writer("x.jinja", source, *tokenizer);
  EXPECT_TRUE(writer->can_think());
  EXPECT_FALSE(make_template_writer("x", "{{ messages[0].content }}", *tokenizer)->can_think());
  const Json messages = Json::parse(
      R"([{"role":"user","content":"x"},{"role":"assistant","content":null,"reasoning":"r"},
          {"role":"user","content":"y"}])");
  ChatOptions options;
  options.template_variables = {{"effort", "<think>"}};
  ChatPrompt prompt = writer->write(messages, options);
  EXPECT_EQ(prompt.text(), "<s>||True;r|r|False;||True;True<think><think>\n</think>\n");
  EXPECT_FALSE(prompt.in_thought);
  EXPECT_EQ(std::count_if(prompt.pieces.begin(), prompt.pieces.end(),
                          [](const PromptPiece& p) { return p.text == "<think>"; }),
            1);
  options.enable_thinking = true;
  EXPECT_TRUE(writer->write(messages, options).in_thought);
  options.add_generation_prompt = false;
  EXPECT_FALSE(writer->write(messages, options).in_thought);  // what a caller spelt opens no thought

  EXPECT_EQ(error_of([&] { written(*tokenizer, "{{ raise_exception('no ' ~ messages[0].content) }}", user("luck")); }),
            "test: line 1: no luck");
  EXPECT_EQ(error_of([&] { make_template_writer("x.jinja", "\n{{", *tokenizer); }).substr(0, 16), "x.jinja: line 2:");
  EXPECT_NE(error_of([&] { writer->write(Json::parse(R"([{"role":"wizard","content":"x"}])"), {}); }).find("wizard"),
            std::string::npos);
}

TEST(ChatWriter, TheModelsTemplateIsChosenWhereItCanBeUsed) {
  const auto chatml = small_tokenizer({"<|endoftext|>", "<|im_start|>", "<|im_end|>"});
  test::MemoryCheckpoint checkpoint;
  checkpoint.metadata_.values["general.architecture"] = std::string("llama");
  checkpoint.metadata_.values["tokenizer.chat_template"] = std::string("own {{ messages[0].content }}<|im_start|>");
  EXPECT_EQ(make_chat_writer(checkpoint, *chatml)->write(user("x"), {}).text(), "own x<|im_start|>");
  const auto built_in = make_chat_writer(checkpoint, *chatml, TemplateChoice::kBuiltIn);
  EXPECT_EQ(built_in->name(), "ChatML");
  EXPECT_EQ(built_in->write(user("x"), {}).text(), "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n");

  checkpoint.metadata_.values["tokenizer.chat_template"] = std::string("{% broken %}<|im_start|>");
  const auto instead = make_chat_writer(checkpoint, *chatml);
  EXPECT_EQ(instead->name(), "ChatML");
  ASSERT_FALSE(instead->warnings().empty());
  EXPECT_EQ(instead->warnings()[0],
            "the model's chat template: line 1: Encountered unknown tag 'broken'; the built-in "
            "ChatML format is used instead");
  const auto nothing = small_tokenizer({"<s>"});
  EXPECT_NE(error_of([&] { make_chat_writer(checkpoint, *nothing); }).find("broken"), std::string::npos);
  checkpoint.metadata_.values.erase("tokenizer.chat_template");
  EXPECT_EQ(make_chat_writer(checkpoint, *nothing), nullptr);

  const auto file = std::filesystem::path(testing::TempDir()) / "beryl-chat-writer-test.jinja";
  std::ofstream(file) << "file {{ messages[0].content }}";
  EXPECT_EQ(make_chat_writer(checkpoint, *nothing, TemplateChoice::kFile, file.string())->write(user("x"), {}).text(),
            "file x");
  std::filesystem::remove(file);
  EXPECT_NE(error_of([&] { make_chat_writer(checkpoint, *nothing, TemplateChoice::kFile, file.string()); }), "");
}

std::string own_text(const ChatWriter& writer) { return writer.write(user("x"), {}).text(); }

// Case 1: what looks like a turn marker and is no token of the vocabulary is not written without a word.
TEST(ChatWriter, MarkersThatTheVocabularyLacksAreReported) {
  const auto gemma3 = small_tokenizer({"<bos>", "<start_of_turn>", "<end_of_turn>"});
  const auto gemma4 = small_tokenizer({"<bos>", "<|turn>", "<turn|>"});
  const auto chatml = small_tokenizer({"<|endoftext|>", "<|im_start|>", "<|im_end|>"});
  const auto nothing = small_tokenizer({"<s>", "</s>"});
  const std::string for_gemma4 =
      "{{ bos_token }}{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n{% endfor %}";
  const std::string for_gemma3 =
      "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}";
  const std::string for_chatml =
      "{% for m in messages %}{{ '<|im_start|>' + m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}";
  const std::string zephyr = "{% for m in messages %}{{ '<|' + m.role + '|>' }}\n{{ m.content }}</s>\n{% endfor %}";

  const auto warnings = [&](const std::string& source, const Tokenizer& tokenizer) {
    return fmt::format("{}", fmt::join(make_template_writer("x.jinja", source, tokenizer)->warnings(), "\n"));
  };
  EXPECT_EQ(warnings(for_gemma4, *gemma4), "");
  EXPECT_EQ(warnings(for_gemma3, *gemma3), "");
  EXPECT_EQ(warnings(for_chatml, *chatml), "");
  EXPECT_EQ(warnings(for_gemma4, *gemma3),
            "x.jinja: it writes '<|turn>', '<turn|>', which the vocabulary has no tokens for: they become "
            "ordinary text");
  EXPECT_EQ(warnings(zephyr, *nothing),
            "x.jinja: it writes '<|user|>', '<|assistant|>', which the vocabulary has no tokens for: they become "
            "ordinary text");
  EXPECT_NE(warnings(for_gemma3, *gemma4).find("'<start_of_turn>', '<end_of_turn>'"), std::string::npos);
  EXPECT_NE(warnings("{{ messages[0].content }}<\uFF5CUser\uFF5C>", *nothing).find("it becomes"), std::string::npos);
  // Neither what people spell, nor a comparison, nor what templates write as text.
  EXPECT_EQ(warnings("[INST]{{ messages[0].content }}[/INST]<tools></tools> a < b | c > d <|\"|>"
                     "{% if '<|turn>' in messages[0].content %}x{% endif %}", *nothing), "");
  EXPECT_EQ(written(*nothing, "{{ messages[0].content }}", user("<|turn>")), "<|turn>");

  // A model's own template gives way to a built-in format that the vocabulary fits.
  test::MemoryCheckpoint checkpoint;
  checkpoint.metadata_.values["general.architecture"] = std::string("gemma3");
  checkpoint.metadata_.values["tokenizer.chat_template"] = for_gemma4;
  const auto instead = make_chat_writer(checkpoint, *gemma3);
  EXPECT_EQ(instead->name(), "Gemma 3");
  ASSERT_FALSE(instead->warnings().empty());
  EXPECT_EQ(instead->warnings()[0],
            "the model's chat template: it writes '<|turn>', '<turn|>', which the vocabulary has no tokens for; the "
            "built-in Gemma 3 format is used instead");
  EXPECT_EQ(own_text(*instead), "<bos><start_of_turn>user\nx<end_of_turn>\n<start_of_turn>model\n");
  // Where none fits it stays; and so does what may be trained as plain text, and a file.
  const auto kept = make_chat_writer(checkpoint, *nothing);
  EXPECT_EQ(own_text(*kept), "<s><|turn>user\nx<turn|>\n");
  EXPECT_EQ(kept->warnings().size(), 1u);
  checkpoint.metadata_.values["tokenizer.chat_template"] = for_chatml;
  const auto plain = make_chat_writer(checkpoint, *gemma3);
  EXPECT_EQ(own_text(*plain), "<|im_start|>user\nx<|im_end|>\n");
  ASSERT_EQ(plain->warnings().size(), 1u);
  EXPECT_NE(plain->warnings()[0].find("'<|im_start|>', '<|im_end|>'"), std::string::npos);
  const auto file = std::filesystem::path(testing::TempDir()) / "beryl-chat-writer-markers.jinja";
  std::ofstream(file) << for_gemma4;
  EXPECT_EQ(make_chat_writer(checkpoint, *gemma3, TemplateChoice::kFile, file.string())->warnings().size(), 1u);
  std::filesystem::remove(file);
}

TEST(ChatWriter, RealTemplatesFindTheirMarkers) {
  const std::optional<Json> cases = template_cases();
  if (!cases) GTEST_SKIP() << "no test data (./test makes it)";
  const auto nothing = small_tokenizer({"<s>"});
  for (const auto& [name, source] : (*cases)["templates"].items()) {
    const std::string text = source.get<std::string>();
    const auto tokenizer = small_tokenizer(controls_of(text));
    const auto without = make_template_writer(name, text, *nothing);
    for (const auto& [begin, end] :
         {std::pair("<|im_start|>", "<|im_end|>"), {"<|turn>", "<turn|>"}, {"<start_of_turn>", "<end_of_turn>"}}) {
      if (text.find(begin) == std::string::npos || text.find(end) == std::string::npos) continue;
      ASSERT_EQ(without->warnings().size(), 1u) << name;
      EXPECT_NE(without->warnings()[0].find(begin), std::string::npos) << name;
    }
    if (name.starts_with("google-gemma") || name.starts_with("Qwen")) {
      EXPECT_TRUE(make_template_writer(name, text, *tokenizer)->warnings().empty()) << name;
    }
  }
}

// Case 19: what the built-in format reports, and nothing that the template does write.
TEST(ChatWriter, WhatATemplateLeavesOutOfASchemaIsReported) {
  const auto tokenizer = small_tokenizer({"<s>"});
  ChatOptions options;
  options.tools = Json::parse(R"([
    {"type":"function","function":{"name":"plain","parameters":{"type":"object","properties":{"s":{"type":"string"}}}}},
    {"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object","properties":{
      "a":{"anyOf":[{"type":"string"},{"type":"null"}]},"b":{"$ref":"#/$defs/x"},
      "c":{"type":["string","null"]},"d":{"type":"object","additionalProperties":false},
      "e":{"type":"integer","enum":[1,2]},"s":{"type":"string","enum":["anyOf"]},
      "g":{"type":"array","items":{"type":"object","properties":{"k":{"type":"string"},"l":{"not":{"type":"null"}}}}},
      "anyOf":{"type":"string"}},"$defs":{"x":{"type":"string"}}}}}])");
  const auto warnings = [&](const std::string& source, const Tokenizer& of) {
    const auto writer = make_template_writer("test", source, of);
    std::vector<std::string> lines = writer->write(user("anyOf $ref"), options).warnings;
    std::sort(lines.begin(), lines.end());
    return lines;
  };
  std::vector<std::string> built_in = format_chat({.family = ChatFamily::kGemma4}, user("x"), options).warnings;
  std::sort(built_in.begin(), built_in.end());
  EXPECT_EQ(built_in.size(), 5u);

  const std::string all = "{{ messages[0].content }}{{ tools | tojson }}";
  EXPECT_EQ(warnings(all, *tokenizer), std::vector<std::string>());
  EXPECT_EQ(warnings("{% for t in tools or [] %}{{ t.function | tojson(indent=2) }}{% endfor %}", *tokenizer),
            std::vector<std::string>());
  const std::string types =
      "{{ messages[0].content }}{% for t in tools or [] %}{% for k, v in t.function.parameters.properties.items() %}"
      "{{ k }}: {{ v.type }};{% endfor %}{% endfor %}";
  EXPECT_EQ(warnings(types, *tokenizer), built_in);
  const std::string choices =
      "{% for t in tools or [] %}{% for k, v in t.function.parameters.properties.items() %}{{ k }}: "
      "{% for c in v.anyOf or [v] %}{{ c.type }}{{ c.enum }}|{% endfor %}{% endfor %}{% endfor %}";
  std::vector<std::string> rest = built_in;
  std::erase_if(rest, [](const std::string& line) {
    return line.find("'anyOf'") != std::string::npos || line.find("'enum'") != std::string::npos;
  });
  EXPECT_EQ(rest.size(), 3u);
  EXPECT_EQ(warnings(choices, *tokenizer), rest);
  if (const std::optional<Json> cases = template_cases()) {
    const std::string gemma4 = (*cases)["templates"]["google-gemma-4-31B-it.jinja"];
    EXPECT_EQ(warnings(gemma4, *small_tokenizer(controls_of(gemma4))), built_in);
  }

  // However many there are, it ends.
  Json& properties = options.tools[1]["function"]["parameters"]["properties"];
  for (int i = 0; i < 2000; ++i) properties[fmt::format("p{}", i)] = {{"anyOf", Json::array({{{"type", "null"}}})}};
  EXPECT_GT(warnings(types, *tokenizer).size(), 2000u);
  EXPECT_NE(fmt::format("{}", warnings(choices, *tokenizer)).find("too many"), std::string::npos);
}

}  // namespace
}  // namespace beryl
