#!/usr/bin/env python3
"""Gemma 4's own notation of calls, end to end: the unmodified `openai` and `anthropic` packages, the real server, the real vocabulary and
chat template, and a double in place of the model that gives out the ids of a script.

    native_calls_test.py SCRIPTED_SERVER [UNITTEST OPTIONS]

Exit status 77, with a line, where the packages or the vocabulary can not be had.
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

from cli_support import models_folder
from server_support import SKIPPED, clients_python

VOCABULARY = models_folder() / "vocab" / "ggml-vocab-gemma-4.gguf"
scripted_server = None

TEMPLATES = models_folder() / "chat-templates.json"
# Where prompts end: behind a user's message (with a thought that is closed at once, where none is wanted), behind a result.
USER, THINKS, RESULT = "<|turn>model\n<|channel>thought\n<channel|>", "<|turn>model\n", "<tool_response|>"
END, WAITS = "<turn|>", "<|tool_response>"                # how replies end: the turn is over; a result is waited for
THOUGHT = "<|channel>thought\nThe user wants \"two\" things.\n<channel|>"


def string(text):
    return f'<|"|>{text}<|"|>'


def call(name, arguments):
    return f"<|tool_call>call:{name}{{{arguments}}}<tool_call|>"


def function(name, required=(), **properties):
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": {
        "type": "object", "properties": properties, "required": list(required)}}}


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
TOOLS = [function("get_weather", ["city"], city=TEXT, days=NUMBER), function("get_time", ["zone"], zone=TEXT),
         function("write_file", ["path", "text"], path=TEXT, text=TEXT, options={"type": "object", "properties": {"mode": NUMBER, "tags": {"type": "array", "items": TEXT}}})]
# What a program may hold that looks like the notation, and is text.
CODE = 'def f(x):\n\treturn {"a": [1, \'}\', x]}  # call:get_time{zone:1} <turn|> 日本 🙂'
LOOP = [
    (USER, 1, call("get_weather", f"city:{string('Paris')},days:3") + WAITS),
    (RESULT, 1, call("get_weather", f"city:{string('Köln, {DE}')}") + call("get_time", f"zone:{string('CET')}") + WAITS),
    (RESULT, 3, call("write_file", f"options:{{mode:-7,tags:[{string('a,b')},{string(']')}]}},path:{string('a/b.py')},text:{string(CODE.replace('<turn|>', '<turn |>'))}") + WAITS),
    (RESULT, 4, call("get_time", f"zone:{string('')}") + WAITS),
    (RESULT, 5, "It rains: I asked with call:get_time{zone:x} and [1]." + END),
]
CALLS = [[("get_weather", {"city": "Paris", "days": 3})],
         [("get_weather", {"city": "Köln, {DE}"}), ("get_time", {"zone": "CET"})],
         [("write_file", {"options": {"mode": -7, "tags": ["a,b", "]"]}, "path": "a/b.py", "text": CODE.replace("<turn|>", "<turn |>")})],
         [("get_time", {"zone": ""})]]


class ScriptedTest(unittest.TestCase):
    def clients(self, scripts, template=None):
        import anthropic
        import openai
        folder = pathlib.Path(tempfile.mkdtemp(prefix="beryl-scripts-"))
        self.addCleanup(shutil.rmtree, folder)
        (folder / "scripts.json").write_text(json.dumps(scripts))
        if template:
            (folder / "template.jinja").write_text(json.loads(TEMPLATES.read_text())[template])
        server = subprocess.Popen([scripted_server, VOCABULARY, folder / "scripts.json", *([folder / "template.jinja"] if template else [])], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                  stderr=None if "BERYL_SCRIPT_LOG" in os.environ else subprocess.DEVNULL)   # guesses of what comes have no script

        def end():
            server.stdin.close()
            self.assertEqual(server.wait(60), 0)
            server.stdout.close()
        self.addCleanup(end)
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        options = {"api_key": "none", "max_retries": 0, "timeout": 60}
        return openai.OpenAI(base_url=f"{url}/v1", **options), anthropic.Anthropic(base_url=url, **options)

    def streamed(self, client, fields):
        """A stream's message as the whole answer has it; what was once said only grows."""
        content, thought, calls, finish = "", "", [], None
        for chunk in client.chat.completions.create(**fields, stream=True):
            choice = chunk.choices[0]
            self.assertIsNone(finish)
            finish = choice.finish_reason
            content += choice.delta.content or ""
            thought += getattr(choice.delta, "reasoning_content", None) or ""
            for part in choice.delta.tool_calls or ():
                if part.index == len(calls):
                    self.assertTrue(part.id and part.function.name)
                    calls.append([part.function.name, "", part.id])
                calls[part.index][1] += part.function.arguments or ""
        return content, thought, [(name, json.loads(arguments)) for name, arguments, _ in calls], finish, [identity for *_, identity in calls]

    def whole(self, client, fields):
        choice = client.chat.completions.create(**fields).choices[0]
        calls = choice.message.tool_calls or []
        return (choice.message.content or "", getattr(choice.message, "reasoning_content", None) or "",
                [(each.function.name, json.loads(each.function.arguments)) for each in calls], choice.finish_reason, [each.id for each in calls])

    def test_a_loop_of_four_turns(self):
        self.run_loop()

    @unittest.skipUnless(TEMPLATES.exists(), f"{TEMPLATES} is not there")
    def test_a_loop_with_the_model_s_own_template(self):
        self.run_loop("google-gemma-4-31B-it.jinja")

    def run_loop(self, template=None):
        client, _ = self.clients(LOOP, template)
        for ask in (self.whole, self.streamed):
            for choice in ("auto", "required"):
                messages = [{"role": "user", "content": "What is the weather, and the <|tool_call>call:get_time{}<tool_call|>?"}]
                for turn, expected in enumerate(CALLS):
                    with self.subTest(ask=ask.__name__, choice=choice, turn=turn):
                        content, _, calls, finish, identities = ask(client, {"model": "any", "messages": messages, "tools": TOOLS, "tool_choice": choice})
                        self.assertEqual((content, calls, finish), ("", expected, "tool_calls"))
                        self.assertEqual(len(set(identities)), len(expected))
                    messages.append({"role": "assistant", "content": None, "tool_calls": [
                        {"id": identity, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
                        for identity, (name, arguments) in zip(identities, calls)]})
                    messages += [{"role": "tool", "tool_call_id": identity, "content": f"Result {turn} of {name}: <tool_call|> }}"}
                                 for identity, (name, _) in zip(identities, calls)]
                content, _, calls, finish, _ = ask(client, {"model": "any", "messages": messages, "tools": TOOLS})
                self.assertEqual((content, calls, finish), ("It rains: I asked with call:get_time{zone:x} and [1].", [], "stop"))

    def test_thoughts_and_text_around_calls(self):
        client, other = self.clients([(THINKS, 1, THOUGHT + "Let me see." + call("get_time", f"zone:{string('UTC')}") + WAITS), (THINKS, 2, "It is noon." + END)])
        tools = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS]
        messages = [{"role": "user", "content": "What time is it?"}]
        fields = {"model": "any", "messages": messages, "tools": TOOLS, "reasoning_effort": "high"}
        for ask in (self.whole, self.streamed):
            content, thought, calls, finish, _ = ask(client, fields)
            self.assertEqual((content, thought.strip(), calls, finish), ("Let me see.", "The user wants \"two\" things.", [("get_time", {"zone": "UTC"})], "tool_calls"))
        asked = {"model": "any", "messages": messages, "tools": tools, "max_tokens": 200, "thinking": {"type": "enabled", "budget_tokens": 1024}}
        whole = other.messages.create(**asked)
        with other.messages.stream(**asked) as stream:
            final = stream.get_final_message()
        for message in (whole, final):
            self.assertEqual([block.type for block in message.content], ["thinking", "text", "tool_use"])
            self.assertEqual((message.content[1].text, message.content[2].name, message.content[2].input, message.stop_reason), ("Let me see.", "get_time", {"zone": "UTC"}, "tool_use"))
        # The reply behind a result is no thought, though there was one before. (Text beside a call comes behind its result in the prompt.)
        answer = other.messages.create(**asked | {"messages": messages + [
            {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, {"type": "tool_use", "id": "t", "name": "get_time", "input": {"zone": "UTC"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "12:00"}]}]})
        self.assertEqual([(block.type, block.text) for block in answer.content], [("text", "It is noon.")])
        # Responses.
        response = client.responses.create(model="any", input="What time is it?", tools=[tool["function"] | {"type": "function", "strict": False} for tool in TOOLS], reasoning={"effort": "high"})
        self.assertEqual([item.type for item in response.output], ["reasoning", "message", "function_call"])
        self.assertEqual(json.loads(response.output[2].arguments), {"zone": "UTC"})

    def test_blocks_keep_their_order(self):
        """What the model says before, between and behind calls, in streams however their pieces come, as in whole answers."""
        client, other = self.clients([(THINKS, 1, "First." + call("get_time", f"zone:{string('UTC')}") + "Then." + call("get_weather", f"city:{string('Rome')}") + "Last." + END)])
        tools = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS]
        asked = {"model": "any", "messages": [{"role": "user", "content": "Go."}], "tools": tools, "max_tokens": 200, "thinking": {"type": "enabled", "budget_tokens": 1024}}
        expected = ["First.", "get_time", "Then.", "get_weather", "Last."]

        def said(blocks):
            return [block.text if block.type == "text" else block.name for block in blocks]
        self.assertEqual(said(other.messages.create(**asked).content), expected)
        wish = {"model": "any", "input": "Go.", "tools": [tool["function"] | {"type": "function", "strict": False} for tool in TOOLS], "reasoning": {"effort": "high"}}

        def items(output):
            return [item.content[0].text if item.type == "message" else item.name for item in output]
        self.assertEqual(items(client.responses.create(**wish).output), expected)
        for _ in range(20):
            with other.messages.stream(**asked) as stream:
                self.assertEqual(said(stream.get_final_message().content), expected)
            with client.responses.stream(**wish) as stream:
                self.assertEqual(items(stream.get_final_response().output), expected)

    def test_what_is_not_written_right(self):
        """Malformed calls are the calls that they plainly mean, else all of their bytes are content; never an error, never other arguments."""
        def utc(arguments):
            return f"<|tool_call>call:get_time{{{arguments}}}<tool_call|>", "", [("get_time", {"zone": "UTC"})]

        def unread(text):
            return text, text, []
        # What the model writes, and the content and calls that it is.
        broken = {"a quote is missing": unread('<|tool_call>call:get_time{zone:<|"|>UTC}<tool_call|>'), "a brace": unread(f"<|tool_call>call:get_time{{zone:{string('UTC')}<tool_call|>"),
                  "no name": unread("<|tool_call>call:{}<tool_call|>"), "nothing": unread("<|tool_call><tool_call|>"),
                  "JSON": unread('<|tool_call>{"name": "get_time", "arguments": {"zone": "UTC"}}<tool_call|>'),
                  "no end": (f"<|tool_call>call:get_time{{zone:{string('UTC')}}}", "", [("get_time", {"zone": "UTC"})]),
                  "no such tool": (call("fly", "to:1"), "", [("fly", {"to": 1})]),
                  "single quotes": utc("zone:'UTC'"), "double quotes": utc('zone:"UTC"'), "bare": utc("zone:UTC"), "keys in quotes": utc(f"'zone': {string('UTC')}"),
                  "single quotes around commas": (call("get_weather", "city:'at 10:30, gate: B'"), "", [("get_weather", {"city": "at 10:30, gate: B"})]),
                  "single quotes around lines": (call("get_weather", "city:'it\'s\nhere, line\nthird: x'"), "", [("get_weather", {"city": "it's\nhere, line\nthird: x"})]),
                  "an apostrophe": (call("get_weather", "city:L'Aquila"), "", [("get_weather", {"city": "L'Aquila"})]),
                  "bare lines": unread(call("get_weather", "city:first line\nsecond, line\nthird: x")), "a key of words": unread(call("get_weather", "city:Paris, the gate: B")),
                  "a comma is missing": unread(call("get_weather", "city:Paris days:3")), "a single quote is missing": unread(call("get_weather", "city:'at 10:30, gate: B")),
                  "an end alone": ("<tool_call|>x", "x", []), "a list": unread("[1]"),
                  "call in prose": ("Use call:get_time{zone:<|\"|>x<|\"|>} for it.", "Use call:get_time{zone:x} for it.", [])}
        client, _ = self.clients([(f"{i}<turn|>\n{USER}", 1, "Now: " + text + END) for i, (text, _, _) in enumerate(broken.values(), 10)])
        for i, (name, (_, content, calls)) in enumerate(broken.items(), 10):
            fields = {"model": "any", "messages": [{"role": "user", "content": f"Case {i}"}], "tools": TOOLS}
            for ask in (self.whole, self.streamed):
                with self.subTest(name, ask=ask.__name__):
                    said, _, made, finish, _ = ask(client, fields)
                    self.assertEqual((said, made, finish), ("Now: " + content, calls, "tool_calls" if calls else "stop"))


def main():
    global scripted_server
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if "BERYL_CLIENTS" not in os.environ:
        python = clients_python()
        if python is None or not VOCABULARY.exists():
            print(f"skipped: {'the packages of the clients can not be had' if python is None else f'{VOCABULARY} is not there'}")
            sys.exit(SKIPPED)
        os.execve(python, [str(python), *sys.argv], os.environ | {"BERYL_CLIENTS": "1"})
    scripted_server = pathlib.Path(sys.argv[1]).resolve()
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])


if __name__ == "__main__":
    main()
