#!/usr/bin/env python3
"""The server as clients meet it: the unmodified `openai` and `anthropic` packages, raw requests, many at once.

    server_test.py BERYL tiny|real [UNITTEST OPTIONS]

tiny: golden models with a tokenizer of bytes, whose replies are any bytes at all. real: SmolLM2 and Gemma 3 270M.
The packages lie in an environment of their own in the cache folder, made once; exit status 77, with a line, where they
can not be had, and for `real` when neither model is there.
"""
import json
import math
import os
import pathlib
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest

from cli_support import (BOS, CHANNEL, CHANNEL_END, EOS, GEMMA3, GEMMA4_SPECIAL, GEMMA4_TOOLS, IM_END, SMOLLM2, TURN_END, Program,
                         make_speaking_model, wait_until)
from server_support import SKIPPED, Server, clients_python

beryl = None            # Program
HELLO = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function",
          "function": {"name": "get_weather", "description": "The weather in a city",
                       "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]
# Tools and a form of content that a model of random weights comes to the end of.
SHORT_TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"], "additionalProperties": False}}},
    {"type": "function", "function": {"name": "get_time", "parameters": {
        "type": "object", "properties": {"zone": {"enum": ["utc", "local"]}}, "required": ["zone"]}}}]
PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
                                           "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3}},
          "required": ["name", "age", "tags"], "additionalProperties": False}


def openai_client(server, key="none"):
    import openai
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0, timeout=120)


class ServerTest(unittest.TestCase):
    arguments = ("--device", "cpu", "--ctx", "512", "--parallel", "4", "--chunk", "64")

    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="beryl-server-"))
        cls.model = cls.make_model()
        cls.server = Server(beryl, cls.model, "--name", "tiny", *cls.arguments)

    @classmethod
    def tearDownClass(cls):
        try:
            cls.server.__exit__(None)
        finally:
            shutil.rmtree(cls.folder)

    @classmethod
    def make_model(cls):
        return make_speaking_model(cls.folder / "model")

    def chat(self, messages=HELLO, server=None, **fields):
        status, answer = (server or self.server).post("/v1/chat/completions", {"messages": messages} | fields)
        self.assertEqual(status, 200, answer)
        return answer

    def assert_person(self, text):
        person = json.loads(text)
        self.assertEqual(list(person), ["name", "age", "tags"])
        self.assertTrue(isinstance(person["name"], str) and len(person["name"]) <= 8, person)
        self.assertIn(person["age"], range(121))
        self.assertTrue(len(person["tags"]) <= 3 and set(person["tags"]) <= {"a", "b"}, person)

    def assert_call(self, name, arguments):
        """Of SHORT_TOOLS."""
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if name == "get_weather":
            self.assertEqual(sorted(arguments), ["city", "days"])
            self.assertTrue(len(arguments["city"]) <= 6 and arguments["days"] in range(1, 10), arguments)
        else:
            self.assertEqual(name, "get_time")
            self.assertIn(arguments["zone"], ("utc", "local"))

    def refused(self, path, body, *words, status=400, param=None):
        got, answer = self.server.post(path, body)
        self.assertEqual(got, status, answer)
        error = answer["error"]
        for word in words:
            self.assertIn(word, error["message"])
        if param:
            self.assertEqual(error["param"], param, error)
        return error

    def wait_until_idle(self, server=None):
        def idle():
            metrics = (server or self.server).metrics()
            return metrics["requests_running"] == metrics["requests_waiting"] == 0 and \
                metrics["cache_pages_free"] == metrics["cache_pages"]
        wait_until(idle)


class ClientTest(ServerTest):
    """OpenAI's package: what comes back has its types."""

    def test_chats(self):
        client = openai_client(self.server)
        answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=12, seed=1, n=2, logprobs=True,
                                                top_logprobs=3)
        self.assertEqual([choice.index for choice in answer.choices], [0, 1])
        self.assertEqual(answer.usage.prompt_tokens + answer.usage.completion_tokens, answer.usage.total_tokens)
        n_tokens = 0
        for choice in answer.choices:
            self.assertEqual(choice.message.role, "assistant")
            self.assertIn(choice.finish_reason, ("stop", "length"))
            for token in choice.logprobs.content:
                self.assertEqual(len(token.top_logprobs), 3)
                self.assertLessEqual(token.logprob, token.top_logprobs[0].logprob)
                self.assertGreaterEqual(token.top_logprobs[0].logprob, token.top_logprobs[1].logprob)
            n_tokens += len(choice.logprobs.content) + (choice.finish_reason == "stop")
        self.assertEqual(n_tokens, answer.usage.completion_tokens)
        self.assertNotEqual(answer.choices[0].message.content, answer.choices[1].message.content)
        again = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=12, seed=1)
        self.assertEqual(again.choices[0].message.content, answer.choices[0].message.content)

    def test_streams_are_the_same_in_pieces(self):
        client = openai_client(self.server)
        for fields in ({"temperature": 0}, {"seed": 5}, {"seed": 6, "stop": ["a", "zz"]}, {"seed": 7, "frequency_penalty": 0.5}):
            fields = {"model": "tiny", "messages": HELLO, "max_tokens": 40} | fields
            whole = client.chat.completions.create(**fields)
            chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            self.assertEqual(text, whole.choices[0].message.content)
            self.assertEqual([c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason],
                             [whole.choices[0].finish_reason])
            self.assertEqual(chunks[-1].choices, [])
            self.assertEqual(chunks[-1].usage.completion_tokens, whole.usage.completion_tokens)
            self.assertTrue(all(chunk.usage is None for chunk in chunks[:-1]))

    def test_completions(self):
        client = openai_client(self.server)
        answer = client.completions.create(model="tiny", prompt=["Once", [72, 105]], max_tokens=6, temperature=0, logprobs=2, n=2)
        self.assertEqual(len(answer.choices), 4)
        self.assertEqual(answer.usage.prompt_tokens, 6)
        for i, choice in enumerate(answer.choices):
            self.assertEqual(len(choice.logprobs.tokens), len(choice.logprobs.token_logprobs))
            self.assertEqual(choice.logprobs.text_offset[0], 0)
        self.assertEqual(answer.choices[0].text, answer.choices[1].text)
        plain = client.completions.create(model="tiny", prompt="Once", max_tokens=6, temperature=0)
        self.assertEqual(plain.choices[0].text, answer.choices[0].text)
        echoed = client.completions.create(model="tiny", prompt=["Once", [72, 105]], max_tokens=6, temperature=0, echo=True, n=2)
        self.assertEqual([choice.text for choice in echoed.choices], [("Once" if i < 2 else "Hi") + answer.choices[i].text for i in range(4)])
        stream = client.completions.create(model="tiny", prompt="Once", max_tokens=6, temperature=0, stream=True)
        self.assertEqual("".join(chunk.choices[0].text for chunk in stream), plain.choices[0].text)
        self.assertEqual(client.completions.create(model="tiny", prompt="Once", max_tokens=0).choices[0].text, "")

    def test_models_and_tokens(self):
        import openai
        client = openai_client(self.server)
        self.assertEqual([model.id for model in client.models.list()], ["tiny"])
        self.assertEqual(client.models.retrieve("tiny").object, "model")
        text = "Grüße, 世界 🙂 <|im_end|>"
        status, answer = self.server.post("/tokenize", {"content": text})
        self.assertEqual((status, answer["count"]), (200, len(text.encode())))     # no token for what only spells one
        self.assertEqual(self.server.post("/detokenize", {"tokens": answer["tokens"]})[1]["content"], text)
        # With special tokens: there and back.
        answer = self.server.post("/tokenize", {"content": text, "parse_special": True})[1]
        self.assertEqual(answer["tokens"][-1], IM_END)
        self.assertEqual(self.server.post("/detokenize", {"tokens": answer["tokens"]})[1]["content"], text)
        self.assertEqual(self.server.post("/detokenize", {"tokens": answer["tokens"], "show_special": False})[1]["content"], text.removesuffix("<|im_end|>"))
        # By these a request is named in the packages.
        self.assertRegex(client.models.with_raw_response.list().headers["x-request-id"], "^req_")
        self.assertRegex(client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1)._request_id, "^req_")
        with self.assertRaises(openai.NotFoundError) as caught:
            client.models.retrieve("another")
        self.assertRegex(caught.exception.request_id, "^req_")

    def test_errors_have_their_types(self):
        import openai
        client = openai_client(self.server)
        with self.assertRaises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 600}])
        self.assertEqual(caught.exception.code, "context_length_exceeded")
        self.assertRegex(str(caught.exception), r"the prompt has 6\d\d tokens, the context 512")
        with self.assertRaises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="tiny", messages=HELLO, temperature=-1)
        self.assertEqual(caught.exception.param, "temperature")
        with self.assertRaises(openai.NotFoundError):
            client.models.retrieve("another")
        with Server(beryl, self.model, *self.arguments, "--api-key", "one", "--api-key", "two") as server:
            for key, right in (("one", True), ("two", True), ("On", False), ("", False), ("onetwo", False), ("ones", False)):
                if right:
                    self.assertEqual(len(openai_client(server, key).models.list().data), 1)
                else:
                    with self.assertRaises(openai.AuthenticationError):
                        openai_client(server, key or "x").models.list()
            self.assertEqual(server.request("GET", "/health")[0], 200)
            self.assertEqual(server.request("GET", "/metrics")[0], 401)
            self.assertEqual(server.request("GET", "/v1/models", headers={"X-Api-Key": "two"})[0], 200)


class ResponsesTest(ServerTest):
    """OpenAI's later API."""
    arguments = ("--device", "cpu", "--ctx", "1024", "--parallel", "4", "--chunk", "64")

    def test_responses(self):
        client = openai_client(self.server)
        fields = {"model": "tiny", "input": "Hello", "instructions": "Be brief.", "temperature": 0, "max_output_tokens": 30}
        whole = client.responses.create(**fields)
        openai = self.chat([{"role": "system", "content": "Be brief."}] + HELLO, temperature=0, max_tokens=30)
        self.assertEqual(whole.output_text, openai["choices"][0]["message"]["content"])
        self.assertEqual(whole.status, "incomplete" if openai["choices"][0]["finish_reason"] == "length" else "completed")
        self.assertEqual((whole.usage.input_tokens, whole.usage.output_tokens),
                         (openai["usage"]["prompt_tokens"], openai["usage"]["completion_tokens"]))
        events = list(client.responses.create(**fields, stream=True))
        self.assertEqual([event.sequence_number for event in events], list(range(len(events))))
        self.assertEqual(events[-1].type, f"response.{whole.status}")
        self.assertEqual("".join(e.delta for e in events if e.type == "response.output_text.delta"), whole.output_text)
        self.assertEqual(events[-1].response.output_text, whole.output_text)
        with client.responses.stream(**fields) as stream:
            self.assertEqual(list(stream)[-1].response.output_text, whole.output_text)
        items = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]
        again = client.responses.create(model="tiny", input=items, temperature=0, max_output_tokens=30, top_logprobs=2,
                                        include=["message.output_text.logprobs"])
        self.assertEqual(again.output_text, whole.output_text)
        self.assertEqual(len(again.output[0].content[0].logprobs[0].top_logprobs), 2)

    def test_tools_and_their_results_are_read(self):
        client = openai_client(self.server)
        tools = [{"type": "function", "name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}, "strict": False}]
        answer = client.responses.create(model="tiny", tools=tools, max_output_tokens=1, input=[
            {"role": "user", "content": "Hello"},
            {"type": "function_call", "call_id": "t1", "name": "f", "arguments": '{"a":1}'},
            {"type": "function_call", "call_id": "t2", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "t1", "output": "one"},
            {"type": "function_call_output", "call_id": "t2", "output": "two"}])
        calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": a}} for i, a in (("t1", '{"a":1}'), ("t2", "{}"))]
        openai = self.chat(HELLO + [{"role": "assistant", "content": "", "tool_calls": calls},
                                    {"role": "tool", "tool_call_id": "t1", "content": "one"},
                                    {"role": "tool", "tool_call_id": "t2", "content": "two"}], max_tokens=1,
                           tools=[{"type": "function", "function": {"name": "f", "description": "d", "parameters": tools[0]["parameters"]}}])
        self.assertEqual(answer.usage.input_tokens, openai["usage"]["prompt_tokens"])

    def test_errors_have_their_types(self):
        import openai
        client = openai_client(self.server)
        for wrong in ({"input": []}, {"input": [{"type": "image", "x": 1}]}, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
                      {"previous_response_id": "x"}, {"tools": [{"type": "web_search"}]}, {"tool_choice": "required"}, {"max_output_tokens": 0},
                      {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "strin"}}}}, {"text": {"format": {"type": "x"}}}, {"reasoning": {"effort": "x"}}, {"background": True}):
            with self.subTest(wrong=wrong), self.assertRaises(openai.BadRequestError):
                client.responses.create(**({"model": "tiny", "input": "Hello", "max_output_tokens": 1} | wrong))


class AnthropicTest(ServerTest):
    """Anthropic's package."""
    arguments = ("--device", "cpu", "--ctx", "1024", "--parallel", "4", "--chunk", "64")

    def client(self, server=None, key="none"):
        import anthropic
        return anthropic.Anthropic(base_url=(server or self.server).url, api_key=key, max_retries=0, timeout=120)

    def test_messages(self):
        client = self.client()
        fields = {"model": "tiny", "messages": HELLO, "max_tokens": 30, "system": [{"type": "text", "text": "Be brief."}],
                  "extra_body": {"temperature": 0}}
        whole = client.messages.create(**fields)
        self.assertEqual((whole.type, whole.role, whole.stop_sequence), ("message", "assistant", None))
        self.assertIn(whole.stop_reason, ("end_turn", "max_tokens"))
        text = "".join(block.text for block in whole.content)
        self.assertEqual(client.messages.count_tokens(model="tiny", messages=HELLO, system="Be brief.").input_tokens,
                         whole.usage.input_tokens + whole.usage.cache_read_input_tokens)
        # The same conversation by the other API.
        openai = self.chat([{"role": "system", "content": "Be brief."}] + HELLO, temperature=0, max_tokens=30)
        self.assertEqual(openai["choices"][0]["message"]["content"], text)
        self.assertEqual(openai["usage"]["completion_tokens"], whole.usage.output_tokens)
        with client.messages.stream(**fields) as stream:
            self.assertEqual("".join(stream.text_stream), text)
            final = stream.get_final_message()
        self.assertEqual((final.stop_reason, final.usage.output_tokens), (whole.stop_reason, whole.usage.output_tokens))
        stopped = client.messages.create(**fields, stop_sequences=["never", text[3:5]])
        self.assertEqual((stopped.stop_reason, stopped.stop_sequence), ("stop_sequence", text[3:5]))
        self.assertEqual("".join(block.text for block in stopped.content), text[:text.index(text[3:5])])

    def test_tools_and_their_results_are_read(self):
        client = self.client()
        tools = [{"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {}}}]
        messages = HELLO + [
            {"role": "assistant", "content": [{"type": "text", "text": "Let me see."},
                                              {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                                              {"type": "tool_use", "id": "t2", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "one"},
                                         {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "two"}]},
                                         {"type": "text", "text": "And?"}]}]
        fields = {"model": "tiny", "messages": messages, "tools": tools}
        self.assertTrue(client.messages.create(**fields, max_tokens=5).content)
        # As the other API has it, so the prompt has as many tokens.
        calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": a}} for i, a in (("t1", '{"a":1}'), ("t2", "{}"))]
        openai = self.chat(HELLO + [{"role": "assistant", "content": "Let me see.", "tool_calls": calls},
                                    {"role": "tool", "tool_call_id": "t1", "content": "one"},
                                    {"role": "tool", "tool_call_id": "t2", "content": "two"}, {"role": "user", "content": "And?"}],
                           max_tokens=1, tools=[{"type": "function", "function": {"name": "f", "description": "d", "parameters": tools[0]["input_schema"]}}])
        self.assertEqual(client.messages.count_tokens(**fields).input_tokens, openai["usage"]["prompt_tokens"])

    def test_models(self):
        import anthropic
        client = self.client()
        models = list(client.models.list())
        self.assertEqual([(model.id, model.type, model.display_name, model.created_at.year > 2020) for model in models], [("tiny", "model", "tiny", True)])
        self.assertEqual(client.models.retrieve("tiny").type, "model")
        with self.assertRaises(anthropic.NotFoundError) as caught:
            client.models.retrieve("another")
        self.assertEqual(caught.exception.body["error"]["type"], "not_found_error")
        self.assertRegex(caught.exception.request_id, "^req_")

    def test_errors_have_their_types(self):
        import anthropic
        client = self.client()
        for wrong in ({"max_tokens": 0}, {"extra_body": {"temperature": "x"}}, {"messages": []}, {"messages": [{"role": "system", "content": "x"}]},
                      {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, {"stop_sequences": 5},
                      {"messages": HELLO + [{"role": "assistant", "content": "x"}]}, {"tools": [{"type": "bash_20250124", "name": "bash"}]},
                      {"tool_choice": {"type": "any"}}, {"thinking": {"type": "enabled", "budget_tokens": 0}},
                      {"messages": [{"role": "user", "content": "x" * 1100}]}):
            with self.subTest(wrong=str(wrong)[:80]):
                with self.assertRaises(anthropic.BadRequestError) as caught:
                    client.messages.create(**({"model": "tiny", "messages": HELLO, "max_tokens": 1} | wrong))
                self.assertEqual(caught.exception.body["error"]["type"], "invalid_request_error")
        with Server(beryl, self.model, *self.arguments, "--api-key", "one") as server:
            with self.assertRaises(anthropic.AuthenticationError):
                self.client(server, "two").messages.count_tokens(model="tiny", messages=HELLO)
            self.assertGreater(self.client(server, "one").messages.count_tokens(model="tiny", messages=HELLO).input_tokens, 5)


class RequestTest(ServerTest):
    """Requests as nobody's package would send them."""

    def test_wrong_values_name_their_field(self):
        wrong = {"temperature": ["hot", [], {}, True, -1, 101], "top_p": ["x", 2, -0.5], "top_k": [1.5, "x", 2**63, -2],
                 "min_p": [7], "presence_penalty": [3, "x"], "frequency_penalty": [-3], "repetition_penalty": [0],
                 "max_tokens": [0, -1, 1.5, "x", 2**63, []], "n": [0, 129, "x"], "stream": ["true", 1, []],
                 "stream_options": ["x", []], "stop": [1, {}, [1], ["a"] * 17], "seed": ["x", 1.5, 2**64],
                 "logprobs": [5, "x"], "top_logprobs": [21, -1, "x"], "tools": [{}, "x"], "tool_choice": ["always", 5],
                 "logit_bias": [[], {"5": "x"}, {"x": 1}, {"999": 1}, {"5": 101}], "response_format": ["x", {"type": "json"}],
                 "messages": ["x", [], {}], "reasoning_effort": ["lots", 1], "thinking_budget": [-1, "x"]}
        for field, values in wrong.items():
            for value in values:
                with self.subTest(field=field, value=value):
                    error = self.refused("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1, field: value}, field)
                    self.assertTrue(error["param"].startswith(field), error)
        for value in (5, {}, [], [[]], [{}], "", [1.5], [999], ["a", 5]):
            with self.subTest(prompt=value):
                self.refused("/v1/completions", {"prompt": value}, "prompt")
        for messages, field, *words in (
                ([{"role": "king", "content": "x"}], "messages.0.role", "king"), ([5], "messages.0", "number 5"), ([{"content": "x"}], "messages.0.role", "missing"),
                (HELLO + [{"role": "user", "content": 5}], "messages.1.content", "number 5"), ([{"role": "user", "content": ["x"]}], "messages.0.content.0", "object"),
                ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text", "missing"),
                ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages.0", "only text"),
                (HELLO + [{"role": "assistant", "tool_calls": [{"id": "a", "function": {}}]}], "messages.1", "name"),
                (HELLO + [{"role": "tool", "tool_call_id": "b", "content": "x"}], "messages.1.tool_call_id", "'b'")):
            with self.subTest(messages=messages):
                self.refused("/v1/chat/completions", {"messages": messages}, f"'{field}'", *words, param=field)
        self.refused("/v1/responses", {"input": [{"type": "function_call_output", "call_id": "b", "output": "x"}]}, "'b'", param="input.0.call_id")
        # How many came.
        self.refused("/v1/chat/completions", {"messages": HELLO, "stop": ["a"] * 17}, "an array of 17")
        self.refused("/v1/completions", {"prompt": ["a"] * 257}, "an array of 257")
        # Of a prompt that is too long, too.
        for path, field, long in (("/v1/chat/completions", "messages", HELLO[:0] + [{"role": "user", "content": "x" * 600}]), ("/v1/completions", "prompt", "x" * 600),
                                  ("/v1/responses", "input", "x" * 600), ("/v1/completions", "prompt", "\n" * 2**20)):
            self.refused(path, {field: long}, "512", param=field)
        self.refused("/v1/chat/completions", {}, "messages", "missing")
        for value in (None, ):
            self.chat(max_tokens=1, temperature=value, stop=value, seed=value, stream=value, n=value, tools=value)

    def test_any_value_in_any_field_is_an_answer_or_a_refusal(self):
        fields = {"/v1/chat/completions": (
                      {"messages": HELLO, "max_tokens": 1}, "messages max_tokens max_completion_tokens temperature top_p top_k min_p presence_penalty "
                      "frequency_penalty repetition_penalty seed stop n logit_bias logprobs top_logprobs stream stream_options tools tool_choice "
                      "parallel_tool_calls response_format reasoning_effort thinking_budget chat_template_kwargs"),
                  "/v1/completions": ({"prompt": "x", "max_tokens": 1}, "prompt max_tokens temperature seed stop n best_of echo suffix logprobs stream response_format"),
                  "/v1/responses": ({"input": "x", "max_output_tokens": 1}, "input instructions max_output_tokens temperature top_p top_logprobs include stream tools "
                                    "tool_choice parallel_tool_calls text reasoning background previous_response_id metadata"),
                  "/v1/messages": ({"messages": HELLO, "max_tokens": 1}, "messages system max_tokens temperature top_p top_k stop_sequences stream tools tool_choice "
                                   "thinking output_config"),
                  "/v1/messages/count_tokens": ({"messages": HELLO}, "messages system tools tool_choice"),
                  "/tokenize": ({"content": "x"}, "content add_special parse_special"), "/detokenize": ({"tokens": [65]}, "tokens show_special")}
        values = ['"true"', '"x"', '""', "1", "-1", "0.5", "9223372036854775808", "-9223372036854775809", "1e308", "true", "null", "[]", "[1]", '["x"]', "[null]", "[{}]", "[[]]",
                  "{}", '{"type": 5}', '{"type": "function"}', '{"x": {"y": []}}', '[{"role": 5}]', '[{"role": "user"}]', '[{"type": "function", "function": 5}]',
                  '[{"type": "function", "function": {"name": "f", "parameters": [1]}}]', '{"format": {"type": "json_schema"}}']
        n_refused = 0
        for path, (body, names) in fields.items():
            for name in names.split():
                for value in values:
                    rest = {key: other for key, other in body.items() if key != name}
                    text = json.dumps(rest)[:-1] + (", " if rest else "") + f'"{name}": {value}}}'
                    status, _, answer = self.server.request("POST", path, text.encode())
                    with self.subTest(path=path, name=name, value=value):
                        self.assertIn(status, (200, 400), answer)
                        if status == 400:
                            n_refused += 1
                            self.assertEqual(answer["error"]["type"], "invalid_request_error")
                            self.assertGreater(len(answer["error"]["message"]), 10)
                            self.assertNotIn("\n", answer["error"]["message"])
        self.assertGreater(n_refused, 1000)
        self.chat(max_tokens=1)

    def test_only_names_of_this_machine_are_answered(self):
        # A web page that gives its own name this address is not let in (DNS rebinding).
        for host, right in (("localhost", True), ("LOCALHOST:80", True), (f"127.0.0.1:{self.server.port}", True), ("[::1]:5", True), ("evil.example", False),
                            ("localhost.evil.example", False), ("127.0.0.1.evil.example:80", False), ("[::2]", False), ("[", False)):
            with self.subTest(host=host):
                for path in ("/v1/models", "/health", "/metrics"):
                    self.assertEqual(self.server.request("GET", path, headers={"Host": host})[0], 200 if right else 403)
        with Server(beryl, self.model, *self.arguments, "--allow-host", "My.Name") as server:
            self.assertEqual([server.request("GET", "/v1/models", headers={"Host": host})[0] for host in ("my.name:8080", "localhost", "other")], [200, 200, 403])
        with Server(beryl, self.model, *self.arguments, "--host", "0.0.0.0") as server:      # whoever has opened it to the network knows its names
            self.assertEqual(server.request("GET", "/v1/models", headers={"Host": "any.name"})[0], 200)

    def test_who_opens_a_server_without_a_key_to_the_network_hears_so(self):
        for host, shown, is_open in (("0.0.0.0", "127.0.0.1", True), ("0", "127.0.0.1", True), ("::", "::1", True), ("127.0.0.1", "127.0.0.1", False),
                                     ("127.0.0.2", "127.0.0.2", False), ("::1", "::1", False), ("localhost", "localhost", False)):
            if ":" in host and not pathlib.Path("/proc/net/if_inet6").exists():       # a machine without IPv6
                continue
            for key in ((), ("--api-key", "secret")):
                with self.subTest(host=host, key=key), Server(beryl, self.model, *self.arguments, "--host", host, *key) as server:
                    self.assertEqual(server.host, shown)
                    self.assertEqual(server.request("GET", "/health")[0], 200)      # what is printed can be opened
                    warnings = [line for line in server.lines if "anyone who reaches this machine" in line]
                    self.assertEqual(len(warnings), is_open and not key, server.lines)
                    self.assertTrue(all("--api-key" in line and "BERYL_API_KEY" in line for line in warnings))
        result = beryl("serve", self.model, "--host", "")
        self.assertEqual((result.returncode, b"--host is empty" in result.stderr), (2, True))

    def test_a_full_context_ends_the_reply_and_nothing_else(self):
        answer = self.chat([{"role": "user", "content": "x" * 440}], max_tokens=5000, seed=1, logit_bias={"249": -100, "250": -100})
        self.assertEqual(answer["choices"][0]["finish_reason"], "length")
        self.assertEqual(answer["usage"]["total_tokens"], 512 + 1)          # the last token needs no place
        self.chat(max_tokens=1)

    def test_schemas_that_the_format_has_no_words_for_are_reported(self):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "string", "format": "no-such", "maxLength": 3}},
                                                                              "required": ["a"]}}}
        answer = self.chat(max_tokens=200, response_format=form)
        self.assertIn("no-such", answer["warnings"][0])
        self.assertNotIn("warnings", self.chat(max_tokens=1))
        # In every API, in streams as in whole answers.
        schema = form["json_schema"]["schema"]
        for path, body in (("/v1/chat/completions", {"messages": HELLO, "max_tokens": 3, "response_format": form}),
                           ("/v1/completions", {"prompt": "x", "max_tokens": 3, "response_format": form}),
                           ("/v1/responses", {"input": "x", "max_output_tokens": 3, "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}),
                           ("/v1/messages", {"messages": HELLO, "max_tokens": 3, "output_config": {"format": {"type": "json_schema", "schema": schema}}})):
            with self.subTest(path=path):
                whole = self.server.post(path, body)[1]["warnings"]
                self.assertIn("no-such", whole[0])
                events = [json.loads(event) for event in self.server.events(path, body) if event != "[DONE]"]
                told = [event.get("warnings") or event.get("response", {}).get("warnings") or event.get("message", {}).get("warnings") for event in events]
                self.assertIn(whole, told)

    def test_bodies_that_are_no_requests(self):
        for body, words in ((b"", "empty"), (b"{", "byte 1"), (b"[]", "array"), (b'{"messages": \xff}', "byte 13"),
                            (b'"x"', "text"), (b'{"a": 1e999}', "too large"), (b"{}x", "byte 2"), (b"{}\0x", "a NUL at byte 2"),
                            (b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested"),
                            (b'{"a": "\xed\xa0\x80"}', "byte 7")):
            with self.subTest(body=body[:20]):
                self.refused("/v1/chat/completions", body, words)
        for body, place in ((b'{"temperature": 1e999}', "temperature"), (b'{"a": {"b": 1}, "max_tokens": -1e999}', "max_tokens"), (b'{"a": 1, "logit_bias": {"b": [2], "5": 1e400}}', "logit_bias.5")):
            self.refused("/v1/chat/completions", body, f"'{place}'", "too large", param=place)
        for method, path, allowed in (("GET", "/v1/chat/completions", "POST"), ("POST", "/v1/models", "GET, HEAD"), ("OPTIONS", "/v1/models", "GET, HEAD"),
                                      ("DELETE", "/tokenize", "POST"), ("POST", "/health", "GET, HEAD"), ("PUT", "/", "GET, HEAD")):
            status, headers, _ = self.server.request(method, path)
            self.assertEqual((status, headers["Allow"]), (405, allowed))
        self.assertEqual(self.server.request("GET", "/nothing")[0], 404)
        for coding in ("gzip", "br, gzip"):
            status, _, answer = self.server.request("POST", "/tokenize", b"\x1f\x8b", headers={"Content-Encoding": coding})
            self.assertEqual(status, 415)
            self.assertIn(coding, answer["error"]["message"])
        self.assertEqual(self.server.request("POST", "/tokenize", {"content": "x"}, headers={"Content-Encoding": "identity"})[0], 200)

    def test_targets_as_proxies_send_them(self):
        def get(target, host="localhost"):
            with self.server.connect() as connection:
                connection.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                return int(connection.makefile("rb").read().split()[1])
        self.assertEqual([get(target) for target in ("http://localhost:99/v1/models", "HTTP://127.0.0.1/health?x=1", "http://localhost", "http://localhost/nothing", "/v1/models/")],
                         [200, 200, 200, 404, 200])
        # The host within it is the one that counts.
        self.assertEqual((get("http://evil.example/v1/models"), get("http://localhost/v1/models", "evil.example")), (403, 200))

    def test_what_is_wrong_with_a_message_names_the_clients_own(self):
        # Each API's list becomes one of its own here, with other numbers.
        template = self.folder / "template.jinja"
        template.write_text("{% for m in messages %}{% if 'bad' in m.content %}{{ raise_exception('not that') }}{% endif %}{{ m.content }}{% endfor %}")
        def text(words):
            return {"role": "user", "content": words}
        reply = {"role": "assistant", "content": "b"}
        call, result = {"type": "tool_use", "id": "t", "name": "f", "input": {}}, {"type": "tool_result", "tool_use_id": "t", "content": "r"}
        calls = [{"type": "function_call", "call_id": c, "name": "f", "arguments": "{}"} for c in "cd"]
        outputs = [{"type": "function_call_output", "call_id": c, "output": "r"} for c in "cd"]
        with Server(beryl, self.model, *self.arguments, "--chat-template", template) as server:
            for path, body, field in (
                    ("chat/completions", {"messages": [text("a"), reply, text("bad")]}, "messages.2"),
                    ("messages", {"system": "s", "messages": [text("a"), {"role": "assistant", "content": [{"type": "text", "text": "b"}, call]},
                                                              {"role": "user", "content": [result, {"type": "text", "text": "bad"}]}]}, "messages.2"),
                    ("messages", {"system": "bad", "messages": [text("a")]}, "system"),
                    ("messages", {"messages": [text("bad")]}, "messages.0"),
                    ("responses", {"instructions": "s", "input": [text("a"), *calls, *outputs, reply, text("bad")]}, "input.6"),
                    ("responses", {"input": [text("a"), *calls, outputs[0] | {"output": "bad"}]}, "input.3"),
                    ("responses", {"instructions": "bad", "input": "a"}, "instructions"), ("responses", {"input": "bad"}, "input")):
                with self.subTest(path=path, body=body):
                    status, answer = server.post(f"/v1/{path}", {"max_tokens": 1} | body)
                    self.assertEqual((status, answer["error"].get("param", field)), (400, field), answer)
                    self.assertRegex(answer["error"]["message"], rf"\A'{field}': .*not that")
        # Parts of messages too.
        for path, body, field in (("messages", {"messages": [text([{"type": "text", "text": "x"}, {"type": "image"}])]}, "messages.0.content.1"),
                                  ("messages", {"messages": [text([{"type": "text", "text": "x"}, {"type": "text"}])]}, "messages.0.content.1.text"),
                                  ("messages", {"messages": [text("a")], "system": [{"type": "text", "text": "x"}, 5]}, "system.1"),
                                  ("messages", {"messages": [text("a")], "tools": [{"name": "f", "input_schema": {}}, {"type": "bash_20250124"}]}, "tools.1"),
                                  ("responses", {"input": [text([{"type": "input_text", "text": "x"}, {"type": "input_image"}])]}, "input.0.content.1"),
                                  ("responses", {"input": "a", "tools": [{"type": "function", "name": "f"}, {"type": "web_search"}]}, "tools.1")):
            with self.subTest(path=path, field=field):
                self.refused(f"/v1/{path}", {"max_tokens": 1} | body, f"'{field}' ")

    def test_request_lines_that_are_none(self):
        def status_of(line):
            with self.server.connect() as connection:
                connection.sendall(line + b"\r\nHost: localhost\r\n\r\n")
                answer = connection.makefile("rb").read()               # the connection closes in any case
            return int(answer.split()[1]) if answer else None
        for line, status in ((b"GET /" + b"x" * 40_000 + b" HTTP/1.1", 414), (b"GET / HTTP/2.0", 505), (b"GET / HTTP/0.9", 505), (b"GET / SPDY/3", 400),
                             (b"GET /", 400), (b"GARBAGE", None)):
            with self.subTest(line=line[:20]):
                self.assertEqual(status_of(line), status)
        self.chat(max_tokens=1)

    def test_a_page_of_elsewhere_can_not_make_the_server_compute(self):
        """A simple POST needs no preflight; a page could send it to any address, though not read the answer."""
        def post(server, headers, path="/v1/completions"):
            return server.request("POST", path, {"prompt": "x", "max_tokens": 1}, headers={"Content-Type": "text/plain"} | headers)
        own = f"http://127.0.0.1:{self.server.port}"
        for headers, right in (({}, True), ({"Origin": own}, True), ({"Origin": own.upper()}, True), ({"Origin": own, "Sec-Fetch-Site": "same-origin"}, True),
                               ({"Origin": "https://page.example", "Sec-Fetch-Site": "same-origin"}, True),     # a proxy with a name of its own
                               ({"Origin": "http://evil.example"}, False), ({"Origin": "null"}, False), ({"Origin": "http://127.0.0.1:1"}, False),
                               ({"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}, False), ({"Sec-Fetch-Site": "cross-site"}, False),
                               ({"Origin": own + ".evil.example"}, False), ({"Origin": "http://localhost:1", "Sec-Fetch-Site": "same-site"}, False)):
            with self.subTest(headers=headers):
                status, _, answer = post(self.server, headers)
                self.assertEqual(status, 200 if right else 403, answer)
                self.assertEqual(post(self.server, headers, "/v1/messages")[0], 400 if right else 403)
                self.assertEqual(self.server.request("GET", "/v1/models", headers=headers)[0], 200)     # which costs nothing, and can not be read
        with Server(beryl, self.model, *self.arguments, "--cors", "http://a.example") as server:
            self.assertEqual([post(server, {"Origin": origin, "Sec-Fetch-Site": "cross-site"})[0] for origin in ("http://a.example", "http://b.example")], [200, 403])
        with Server(beryl, self.model, *self.arguments, "--cors", "*") as server:
            self.assertEqual(post(server, {"Origin": "null", "Sec-Fetch-Site": "cross-site"})[0], 200)

    def test_what_is_ignored_is_said(self):
        for path, body in (("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1}), ("/v1/messages", {"messages": HELLO, "max_tokens": 1}),
                           ("/v1/responses", {"input": "x", "max_output_tokens": 16})):
            answer = self.server.post(path, body | {"container": "x", "web_search_options": {}, "verbosity": None, "ignore_eos": False})[1]
            self.assertEqual([words.split()[0] for words in answer["warnings"]], ["'container'", "'web_search_options'"])
        texts = [self.chat(max_tokens=30, temperature=0, **penalty)["choices"][0]["message"]["content"] for penalty in ({}, {"repeat_penalty": 3}, {"repetition_penalty": 3})]
        self.assertEqual(texts[1], texts[2])
        self.assertNotEqual(texts[0], texts[1])
        self.refused("/v1/chat/completions", {"messages": HELLO, "repeat_penalty": 0}, param="repeat_penalty")

    def test_counts_are_those_of_the_answers(self):
        """Of a reply that a stop string has ended, too; and of one prompt for several replies."""
        # One that would go on for long: a short one may be all there before its reader has found the stop string, and then counts in full.
        endless = {"max_tokens": 480, "seed": 3, "logit_bias": {"249": -100, "250": -100}}
        text = self.chat(**endless)["choices"][0]["message"]["content"]
        self.wait_until_idle()
        before = self.server.metrics()
        answer = self.chat(**endless, stop=[text[10:13]])
        self.wait_until_idle()
        after = self.server.metrics()
        changed = {name: after[name] - before[name] for name in before if after[name] != before[name] and name.startswith(("requests_total", "reply_tokens"))}
        self.assertEqual(changed, {'requests_total{finish="stop"}': 1, "reply_tokens_total": answer["usage"]["completion_tokens"]})
        self.assertEqual(answer["timings"]["predicted_n"], answer["usage"]["completion_tokens"])
        for expected in (0, 128):
            answer = self.chat([{"role": "user", "content": "never seen before " * 8}], max_tokens=2, n=3)
            self.assertEqual(answer["usage"]["prompt_tokens_details"]["cached_tokens"], expected)

    def test_parts_of_characters_have_names_of_their_own(self):
        answer = self.server.post("/v1/completions", {"prompt": "x", "max_tokens": 20, "logprobs": 20, "logit_bias": {"231": 60, "249": -100, "250": -100}})[1]
        logprobs = answer["choices"][0]["logprobs"]
        self.assertIn(r"bytes:\xe7", logprobs["tokens"])
        for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"]):
            self.assertGreaterEqual(len(top), 20)            # no two under one name
            self.assertIn(token, top)
            self.assertNotIn("\ufffd", top)
        self.assertEqual(self.server.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "logprobs": 0, "logit_bias": {"65": 100}})[1]["choices"][0]["logprobs"]["tokens"], ["A"])

    def test_what_is_too_large_is_refused_before_it_is_looked_at(self):
        error = self.refused("/v1/chat/completions", {"messages": [{"role": "user", "content": "\n" * 2**20}]}, "512")
        self.assertEqual(error["code"], "context_length_exceeded")
        self.refused("/v1/completions", b'{"prompt": "' + b"x" * (9 << 20) + b'"}', "8388608", status=413)
        self.refused("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * 10**5}, "context")
        # A gigabyte is only promised; the answer comes first.
        with self.server.connect() as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1073741824\r\n\r\n")
            self.assertIn(b" 413 ", connection.recv(4096))
        with self.server.connect() as connection:
            try:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X-Long: " + b"y" * (1 << 20) + b"\r\n\r\n")
                self.assertRegex(connection.recv(4096), rb"^HTTP/1.1 (431|413|400) ")
            except (BrokenPipeError, ConnectionResetError):
                pass
        self.assertEqual(self.server.request("GET", "/health")[0], 200)

    def test_replies_are_utf8_wherever_they_are_cut(self):
        # The tiny model's tokens are bytes, most of which begin no character.
        for n in range(1, 41):
            answer = self.chat(max_tokens=n, seed=n)
            self.assertLessEqual(answer["usage"]["completion_tokens"], n)
            events = self.server.events("/v1/chat/completions", {"messages": HELLO, "max_tokens": n, "seed": n})
            self.assertEqual(events.pop(), "[DONE]")
            text = "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events)
            self.assertEqual(text, answer["choices"][0]["message"]["content"])

    def test_stop_strings_end_the_text_and_are_not_in_it(self):
        whole = self.chat(max_tokens=200, seed=3)["choices"][0]["message"]["content"]
        self.assertGreater(len(whole), 30)
        for begin, end in ((5, 6), (10, 13), (20, 28)):
            stop = whole[begin:end]
            answer = self.chat(max_tokens=200, seed=3, stop=["never seen", stop])["choices"][0]
            self.assertEqual(answer["message"]["content"], whole[:whole.index(stop)])
            self.assertEqual(answer["finish_reason"], "stop")

    def test_logit_bias_bans_and_forces(self):
        banned = self.chat(max_tokens=100, seed=3, logit_bias={str(byte): -100 for byte in [*range(0x80, 0xf8), *range(0xfc, 0x100)]})
        self.assertTrue(banned["choices"][0]["message"]["content"].isascii())
        forced = self.chat(max_tokens=10, logit_bias={"65": 100})
        self.assertEqual(forced["choices"][0]["message"]["content"], "A" * 10)

    def test_a_conversation_is_not_read_twice(self):
        messages = [{"role": "user", "content": "x" * 150}]
        first = self.chat(messages, max_tokens=5, seed=1)
        messages += [{"role": "assistant", "content": "fine"}, {"role": "user", "content": "and?"}]
        second = self.chat(messages, max_tokens=5, seed=1)
        self.assertEqual(second["usage"]["prompt_tokens_details"]["cached_tokens"], 128)
        self.assertEqual(second["timings"]["reused_n"], 128)
        self.assertEqual(first["usage"]["prompt_tokens_details"]["cached_tokens"] % 64, 0)

    def test_other_origins_may_read_only_where_they_are_let(self):
        self.assertNotIn("Access-Control-Allow-Origin", self.server.request("GET", "/v1/models", headers={"Origin": "http://a"})[1])
        with Server(beryl, self.model, *self.arguments, "--cors", "http://a") as server:
            self.assertEqual(server.request("GET", "/v1/models")[1]["Access-Control-Allow-Origin"], "http://a")
            status, headers, _ = server.request("OPTIONS", "/v1/chat/completions")
            self.assertEqual((status, headers["Access-Control-Allow-Origin"]), (204, "http://a"))
            # The headers that clients' libraries add.
            asked = "anthropic-version,authorization,x-stainless-os"
            self.assertEqual(server.request("OPTIONS", "/v1/messages", headers={"Access-Control-Request-Headers": asked})[1]["Access-Control-Allow-Headers"], asked)
            # What is refused before it is read, too, in the words of its API, and counted.
            n_errors = server.metrics()["http_errors_total"]
            status, headers, body = server.request("POST", "/v1/messages", body=b"x" * (9 << 20))
            self.assertEqual((status, headers["Access-Control-Allow-Origin"], body["type"]), (413, "http://a", "error"))
            self.assertEqual(server.metrics()["http_errors_total"], n_errors + 1)

    def test_an_empty_key_is_none(self):
        for arguments, environment in ((["--api-key", ""], {}), (["--api-key", "a", "--api-key", ""], {}), ([], {"BERYL_API_KEY": ""})):
            done = beryl("serve", self.model, "--port", "0", *arguments, environment=environment)
            self.assertEqual((done.returncode, done.stdout, done.stderr.count(b"\n")), (2, b"", 1), done.stderr)
            self.assertIn(b"is empty", done.stderr)
        with Server(beryl, self.model, *self.arguments, "--api-key", "k") as server:
            for given, expected in (("Bearer k", 200), ("bearer k", 200), ("Bearer ", 401), ("", 401), ("Bearer kk", 401)):
                self.assertEqual(server.request("GET", "/v1/models", headers={"Authorization": given})[0], expected, given)

    def test_tools_are_what_they_should_be(self):
        good = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}, "strict": True}
        for change, field in (({"description": 5}, "description"), ({"strict": "yes"}, "strict"), ({"strict": 1}, "strict"), ({"parameters": "str"}, "parameters"),
                              ({"parameters": [1]}, "parameters"), ({"parameters": {"type": "array"}}, "parameters.type"), ({"name": ""}, "name"),
                              ({"name": "bad name!"}, "name"), ({"name": "x" * 129}, "name"), ({"name": 5}, "name")):
            function = good | change
            with self.subTest(change=change):
                self.refused("/v1/chat/completions", {"messages": HELLO, "tools": [{"type": "function", "function": function}]}, f"tools.0.function.{field}")
                self.refused("/v1/responses", {"input": "x", "tools": [{"type": "function"} | function]}, f"'tools.0.{field}'")
                flat = {"input_schema" if name == "parameters" else name: value for name, value in function.items()}
                self.assertIn(field.replace("parameters", "input_schema"), self.refused("/v1/messages", {"messages": HELLO, "max_tokens": 1, "tools": [flat]})["message"])
        self.refused("/v1/chat/completions", {"messages": HELLO, "tools": [{"type": "function", "function": good}] * 2}, "two functions", "'f'")
        self.refused("/v1/chat/completions", {"messages": HELLO, "tools": [{"type": "retrieval"}]}, "tools.0.type")
        self.chat(tools=[{"type": "function", "function": {"name": "f"}}], max_tokens=1)
        for name in ("functions", "function_call"):
            self.refused("/v1/chat/completions", {"messages": HELLO, name: []}, name)
        self.refused("/v1/chat/completions", {"messages": HELLO, "modalities": ["text", "audio"]}, "modalities")
        self.refused("/v1/chat/completions", {"messages": HELLO, "model": 5}, "model")
        for name in ("conversation", "prompt"):
            self.refused("/v1/responses", {"input": "x", name: {"id": "x"}}, name)
        # Results of calls: of one that there was, and whether they failed.
        def count(**result):
            return self.server.post("/v1/messages/count_tokens", {"messages": [*HELLO, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
                                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "no"} | result]}]})
        self.assertEqual(count(is_error=True)[1]["input_tokens"] - count()[1]["input_tokens"], len("Error: "))
        self.assertEqual((count(is_error="x")[0], count(tool_use_id="b")[0]), (400, 400))
        # A turn that says nothing is a turn.
        def tokens_of(content):
            return self.server.post("/v1/messages/count_tokens", {"messages": [*HELLO, {"role": "assistant", "content": content}, *HELLO]})[1]["input_tokens"]
        self.assertEqual(tokens_of([]), tokens_of(""))
        self.assertEqual(tokens_of([{"type": "text", "text": ""}]), tokens_of(""))
        self.assertEqual(self.server.post("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": []}]})[0], 200)
        for effort in ("xhigh", "max"):
            self.chat(reasoning_effort=effort, max_tokens=1)
        # Many replies, as the original has it.
        self.assertEqual(len(self.chat(n=128, max_tokens=1)["choices"]), 128)
        # A refusal's words are its text.
        plain = self.chat([*HELLO, {"role": "assistant", "content": "No."}, *HELLO], max_tokens=1)["usage"]["prompt_tokens"]
        for refused in ({"content": None, "refusal": "No."}, {"content": [{"type": "refusal", "refusal": "No."}]}):
            self.assertEqual(self.chat([*HELLO, {"role": "assistant"} | refused, *HELLO], max_tokens=1)["usage"]["prompt_tokens"], plain)
        said = [*HELLO, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, *HELLO]
        self.assertEqual(self.server.post("/v1/responses", {"input": said, "max_output_tokens": 16})[1]["usage"]["input_tokens"], plain)

    def test_arguments_that_are_no_json_are_read_all_the_same(self):
        """A model has written them so, and a client sends back what it got."""
        def tokens(arguments):
            call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
            return self.chat([*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]},
                              {"role": "tool", "tool_call_id": "a", "content": "That was no JSON."}], max_tokens=1)["usage"]["prompt_tokens"]
        self.assertEqual(tokens('{"city": Paris') - tokens("Paris"), len(r'{\"city\": '))    # as a JSON string, in a format that writes JSON
        items = [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{broken"}, {"type": "function_call_output", "call_id": "a", "output": "no"}]
        self.assertEqual(self.server.post("/v1/responses", {"input": items, "max_output_tokens": 1})[0], 200)
        for wrong in (5, [1], True):
            self.refused("/v1/chat/completions", {"messages": [*HELLO, {"role": "assistant", "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": wrong}}]}]}, "'messages.1'", "arguments")

    def test_what_a_client_bans_is_no_fault_of_the_server(self):
        body = {"messages": HELLO, "max_tokens": 3, "logit_bias": {str(id): -100 for id in range(256)}}
        self.refused("/v1/chat/completions", body, "logit_bias")

    def test_no_token_is_without_its_log_probability(self):
        """Also where a character comes in several tokens, in streams as in whole answers."""
        bias = {str(byte): 60 for byte in "日🙂".encode()} | {"249": -100, "250": -100}
        body = {"max_tokens": 24, "seed": 5, "logit_bias": bias}
        whole = self.server.post("/v1/completions", body | {"prompt": "x", "logprobs": 1})[1]["choices"][0]
        self.assertEqual(len(whole["logprobs"]["tokens"]), 24)
        chunks = [json.loads(event)["choices"][0]["logprobs"] for event in self.server.events("/v1/completions", body | {"prompt": "x", "logprobs": 1}) if event != "[DONE]"]
        for name in ("tokens", "token_logprobs", "text_offset"):
            self.assertEqual([each for chunk in chunks for each in chunk[name]], whole["logprobs"][name])
        offsets = whole["logprobs"]["text_offset"]
        self.assertEqual(offsets, sorted(offsets))
        self.assertLessEqual(offsets[-1], len(whole["text"]))
        self.refused("/v1/completions", {"prompt": "x", "echo": True, "logprobs": 1}, "echo")
        asked = {"input": "x", "max_output_tokens": 24, "seed": 5, "logit_bias": bias, "include": ["message.output_text.logprobs"]}
        part = self.server.post("/v1/responses", asked)[1]
        self.assertEqual((part["status"], part["output"][0]["status"]), ("incomplete", "incomplete"))
        part = part["output"][0]["content"][0]
        self.assertEqual(len(part["logprobs"]), 24)
        events = [json.loads(event) for event in self.server.events("/v1/responses", asked)]
        last = events[-1]["response"]["output"][0]["content"][0]
        self.assertEqual((last["logprobs"], last["text"]), (part["logprobs"], part["text"]))


class StructuredTest(ServerTest):
    """A model of random weights, which says anything, bound to forms and calls by the clients' packages."""
    arguments = ("--device", "cpu", "--ctx", "4096", "--parallel", "4", "--chunk", "64")
    form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        status, answer = cls.server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1, "response_format": {"type": "json_object"}})
        if status == 400 and "has no structured output" in answer["error"]["message"]:
            cls.tearDownClass()
            raise unittest.SkipTest(answer["error"]["message"])

    @staticmethod
    def joined(chunks):
        """A stream's choices: (content, [(name, arguments)], finish_reason) of each."""
        choices = {}
        for chunk in chunks:
            for choice in chunk.choices:
                content, calls, finish = choices.get(choice.index, ("", [], None))
                for call in choice.delta.tool_calls or ():
                    if call.index == len(calls):
                        calls.append((call.function.name, ""))
                    calls[call.index] = (calls[call.index][0], calls[call.index][1] + call.function.arguments)
                choices[choice.index] = (content + (choice.delta.content or ""), calls, choice.finish_reason or finish)
        return [choices[i] for i in sorted(choices)]

    @staticmethod
    def told(answer):
        return [(choice.message.content or "", [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()],
                 choice.finish_reason) for choice in answer.choices]

    def test_content_of_a_schema(self):
        import pydantic
        client = openai_client(self.server)
        fields = {"model": "any", "messages": HELLO, "seed": 1, "max_tokens": 2000, "response_format": self.form}
        whole = client.chat.completions.create(**fields, n=4, logprobs=True, top_logprobs=2)
        for choice in whole.choices:
            self.assertEqual(choice.finish_reason, "stop")
            self.assert_person(choice.message.content)
            self.assertEqual(b"".join(bytes(token.bytes) for token in choice.logprobs.content).decode(), choice.message.content)
        self.assertEqual(len({choice.message.content for choice in whole.choices}), 4)
        self.assertEqual(self.joined(client.chat.completions.create(**fields, n=4, stream=True)), self.told(whole))
        # As the package itself makes a schema of a class, and an object of the answer.
        class Weather(pydantic.BaseModel):
            rain: bool
            degrees: int = pydantic.Field(ge=-40, le=50)
        answer = client.chat.completions.parse(**fields | {"response_format": Weather})
        self.assertIsInstance(answer.choices[0].message.parsed, Weather)
        # A stop string ends it within.
        text = whole.choices[0].message.content
        stopped = client.chat.completions.create(**fields, stop=text[5:9])
        self.assertEqual(stopped.choices[0].message.content, text[:text.index(text[5:9])])

    def test_other_forms(self):
        client = openai_client(self.server)
        fields = {"model": "any", "messages": HELLO, "max_tokens": 400}
        for seed in range(3):
            answer = client.chat.completions.create(**fields, seed=seed, response_format={"type": "json_object"}, logit_bias={"125": 100, "34": 20, "58": 20})
            self.assertIsInstance(json.loads(answer.choices[0].message.content), dict)
            answer = self.chat(**{k: v for k, v in fields.items() if k != "model"}, seed=seed, response_format={"type": "regex", "pattern": "(yes|no)!{1,3}"})
            self.assertRegex(answer["choices"][0]["message"]["content"], r"\A(yes|no)!{1,3}\Z")
        self.assertTrue(client.chat.completions.create(**fields, response_format={"type": "text"}).choices)
        status, answer = self.server.post("/v1/completions", {"prompt": "x", "max_tokens": 2000, "response_format": self.form})
        self.assertEqual(status, 200)
        self.assert_person(answer["choices"][0]["text"])

    def test_calls_that_must_come(self):
        client = openai_client(self.server)
        fields = {"model": "any", "messages": HELLO, "tools": SHORT_TOOLS, "max_tokens": 3000}
        most = 0
        for seed, choice in enumerate(("required", "required", {"type": "function", "function": {"name": "get_time"}},
                                       {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
                                           {"type": "function", "function": {"name": "get_weather"}}]}})):
            whole = client.chat.completions.create(**fields, tool_choice=choice, seed=seed, n=4)
            for content, calls, finish in self.told(whole):
                self.assertEqual((finish, content), ("tool_calls", ""))
                self.assertGreater(len(calls), 0)
                for name, arguments in calls:
                    self.assert_call(name, arguments)
                most = max(most, len(calls))
                if choice != "required":
                    self.assertEqual({name for name, _ in calls}, {"get_time" if choice["type"] == "function" else "get_weather"})
                if isinstance(choice, dict) and choice["type"] == "function":
                    self.assertEqual(len(calls), 1)
            self.assertEqual(self.joined(client.chat.completions.create(**fields, tool_choice=choice, seed=seed, n=4, stream=True)), self.told(whole))
        self.assertGreater(most, 1)                      # parallel calls
        single = client.chat.completions.create(**fields, tool_choice="required", seed=0, n=8, parallel_tool_calls=False)
        self.assertEqual({len(choice.message.tool_calls) for choice in single.choices}, {1})

    def test_responses(self):
        client = openai_client(self.server)
        tools = [tool["function"] | {"type": "function"} for tool in SHORT_TOOLS]
        fields = {"model": "any", "input": "Hello", "max_output_tokens": 3000, "extra_body": {"seed": 3}}
        form = {"format": self.form["json_schema"] | {"type": "json_schema"}}
        whole = client.responses.create(**fields, text=form)
        self.assert_person(whole.output_text)
        self.assertEqual((whole.status, whole.text.format.name), ("completed", "person"))
        events = list(client.responses.create(**fields, text=form, stream=True))
        self.assertEqual(events[-1].response.output_text, whole.output_text)
        for choice in ("required", {"type": "function", "name": "get_time"},
                       {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]}):
            answer = client.responses.create(**fields, tools=tools, tool_choice=choice)
            self.assertEqual({item.type for item in answer.output}, {"function_call"})
            for item in answer.output:
                self.assert_call(item.name, item.arguments)
                self.assertIn(item.name, ("get_time", "get_weather") if choice == "required" else ("get_time",))
            events = list(client.responses.create(**fields, tools=tools, tool_choice=choice, stream=True))
            self.assertEqual([(item.name, item.arguments) for item in events[-1].response.output],
                             [(item.name, item.arguments) for item in answer.output])

    def test_messages(self):
        import anthropic
        client = anthropic.Anthropic(base_url=self.server.url, api_key="none", max_retries=0)
        tools = [{"name": f["name"], "input_schema": f["parameters"], "strict": f.get("strict", False)} for f in (tool["function"] for tool in SHORT_TOOLS)]
        fields = {"model": "any", "messages": HELLO, "max_tokens": 3000, "extra_body": {"seed": 4}}
        form = {"format": {"type": "json_schema", "schema": PERSON}}
        whole = client.messages.create(**fields, output_config=form)
        self.assert_person(whole.content[0].text)
        with client.messages.stream(**fields, output_config=form) as stream:
            self.assertEqual("".join(stream.text_stream), whole.content[0].text)
        self.assert_person(self.server.post("/v1/messages", {"messages": HELLO, "max_tokens": 3000, "output_format": form["format"]})[1]["content"][0]["text"])
        for choice in ({"type": "any"}, {"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "get_time"}):
            answer = client.messages.create(**fields, tools=tools, tool_choice=choice)
            self.assertEqual((answer.stop_reason, {block.type for block in answer.content}), ("tool_use", {"tool_use"}))
            for block in answer.content:
                self.assert_call(block.name, block.input)
            if "disable_parallel_tool_use" in choice:
                self.assertEqual(len(answer.content), 1)
            if choice["type"] == "tool":
                self.assertEqual({block.name for block in answer.content}, {"get_time"})
            with client.messages.stream(**fields, tools=tools, tool_choice=choice) as stream:
                self.assertEqual([(block.name, block.input) for block in stream.get_final_message().content],
                                 [(block.name, block.input) for block in answer.content])

    def test_calls_and_content_of_a_schema(self):
        # What the model begins with decides; it is led to each by its first byte.
        for first, what in (("<", "calls"), ("{", "content")):
            answer = self.chat(tools=SHORT_TOOLS, response_format=self.form, max_tokens=3000, seed=1, logit_bias={str(ord(first)): 8})["choices"][0]
            self.assertEqual(answer["finish_reason"], "tool_calls" if what == "calls" else "stop")
            if what == "content":
                self.assert_person(answer["message"]["content"])
            for call in answer["message"].get("tool_calls", ()):
                self.assert_call(call["function"]["name"], call["function"]["arguments"])
        # Any text, but none that is a call of another form.
        for seed in range(4):
            answer = self.chat(tools=SHORT_TOOLS, max_tokens=100, seed=seed, logit_bias={str(byte): 8 for byte in b"<{"})["choices"][0]["message"]
            self.assertNotRegex(answer["content"] or "", r"\A\s*(<tool_call>|\{)")

    def test_what_can_not_be_expressed_is_refused(self):
        path = "/v1/chat/completions"
        form = lambda schema: {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
        tool = lambda parameters, **more: {"messages": HELLO, "max_tokens": 1, "tool_choice": "required", "tools": [
            {"type": "function", "function": {"name": "f", "parameters": parameters} | more}]}
        for body, param, *words in (
                (form({"type": "object", "not": {}}), "response_format.json_schema.schema", "'not'"),
                (form({"type": "object", "properties": {"a": {"type": "strin"}}}), "response_format.json_schema.schema", "/properties/a", "'strin'"),
                (form({"type": "string", "pattern": "(?=a)"}), "response_format.json_schema.schema", "look around"),
                (form({"$ref": "#/nothing"}), "response_format.json_schema.schema", "nothing"),
                (form({"enum": [f"value {i}" for i in range(50_000)]}), "response_format.json_schema.schema", "large"),
                ({"messages": HELLO, "response_format": {"type": "regex", "pattern": "("}}, "response_format", "bracket"),
                ({"messages": HELLO, "response_format": {"type": "regex", "pattern": "[a-z]*" * 201}}, "response_format", "more than 200 repetitions"),
                ({"messages": HELLO, "response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
                ({"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema", "missing"),
                ({"messages": HELLO, "tool_choice": "required"}, "tool_choice", "no tools"),
                ({"messages": HELLO, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
                ({"messages": HELLO, "tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice.type", "allowed_tools"),
                (tool({"type": "object", "not": {}}, strict=True), "tools", "'not'"), (tool({"type": "strin"}), "tools.0.function.parameters", "'strin'"),
                (tool({"type": "object", "properties": {"a": {"type": "string", "pattern": "(([a-z]*)*){0,99}"}}}, strict=True), "tools", "cannot be")):
            with self.subTest(body=str(body)[:120]):
                self.refused(path, body, *words, param=param)
        self.chat(**tool({"type": "object", "not": {}}))          # not strict: any object

    def test_repetitions_within_each_other_take_no_longer_than_others(self):
        tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {
            "type": "object", "properties": {"a": {"type": "string", "pattern": "(a+)+b"}}, "required": ["a"], "additionalProperties": False}}}
        called = self.chat(tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=300, seed=1)["choices"][0]["message"]["tool_calls"]
        self.assertRegex(json.loads(called[0]["function"]["arguments"])["a"], r"\Aa+b\Z")
        begin = time.monotonic()
        for pattern in ("(a+)+b", "(a*)*b", "((a+)+)+b"):     # minutes and hours, if a token took the longer the more have come
            reply = self.chat(max_tokens=2000, logit_bias={"97": 100}, response_format={"type": "regex", "pattern": pattern})
            self.assertEqual(reply["choices"][0]["message"]["content"], "a" * 2000)
        self.assertLess(time.monotonic() - begin, 30)

    def test_a_judge_of_forms_that_was_killed_is_replaced(self):
        def judges():
            found = []
            for folder in pathlib.Path("/proc").iterdir():
                try:
                    if folder.name.isdigit():
                        state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                        if int(parent) == self.server.process.pid and state != "Z":
                            found.append(int(folder.name))
                except OSError:                         # it has just ended
                    pass
            return found
        for i in range(3):
            answer = self.chat(max_tokens=2, response_format={"type": "regex", "pattern": f"killed {i}"})
            self.assertEqual(answer["choices"][0]["message"]["content"], "ki")
            running = judges()
            self.assertIn(len(running), (1, 2))         # one a worker, once it has had something to do
            for process in running:
                os.kill(process, signal.SIGKILL)
            if i > 0:                                   # also while it is about to end
                wait_until(lambda: not judges())

    def test_the_forms_of_strangers_do_not_pile_up(self):
        def memory():
            text = pathlib.Path(f"/proc/{self.server.process.pid}/status").read_text()
            return int(text.split("VmRSS:")[1].split()[0])
        def ask(i):
            schema = {"type": "object", "properties": {f"{i} {j}": {"type": "string", "maxLength": 500} for j in range(40)}}
            self.chat(max_tokens=1, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
        for i in range(150):                             # more than are kept
            ask(i)
        before = memory()
        for i in range(150, 300):
            ask(i)
        self.assertLess(memory(), before + 20_000)       # kB; 150 of them are twice that, and the heap has gaps


class LeavingTest(ServerTest):
    """Clients that go away, servers that end, more clients than there is room for."""
    arguments = ("--device", "cpu", "--ctx", "65536", "--parallel", "2", "--chunk", "64", "--queue", "2", "--cache-tokens", "70000",
                 "--no-draft")
    long = {"messages": HELLO, "max_tokens": 60000, "logit_bias": {"249": -100, "250": -100}}

    def test_whoever_leaves_frees_what_it_held(self):
        # During its prompt, mid-stream, mid-answer, in the queue.
        prompt = {"messages": [{"role": "user", "content": "x" * 60000}], "max_tokens": 5}
        # (The caches hold one such prompt, not two.)
        for body, n_running in ((self.long | {"stream": True}, 2), (self.long, 2), (prompt, 1), (prompt | {"stream": True}, 1)):
            with self.subTest(body=str(body)[-60:]):
                connections = [self.server.send_post("/v1/chat/completions", body) for _ in range(4)]
                wait_until(lambda: self.server.metrics()["requests_running"] == n_running)
                for connection in connections:
                    connection.close()
                self.wait_until_idle()
        self.assertGreater(self.server.metrics()['requests_total{finish="cancelled"}'], 15 - 1)

    def test_one_leaving_does_not_disturb_another(self):
        body = self.long | {"max_tokens": 3000, "seed": 4}
        expected = self.server.post("/v1/chat/completions", body)[1]["choices"][0]["message"]["content"]
        stay = self.server.send_post("/v1/chat/completions", body)
        # Begun, so that those who leave cannot fill the queue before it.
        wait_until(lambda: self.server.metrics()["requests_running"] == 1)
        for _ in range(5):
            leave = self.server.send_post("/v1/chat/completions", self.long | {"stream": True})
            leave.recv(100)
            leave.close()
        answer = b""
        while b"timings" not in answer:
            piece = stay.recv(1 << 16)
            self.assertTrue(piece)
            answer += piece
        stay.close()
        self.assertEqual(json.loads(answer.split(b"\r\n\r\n", 1)[1])["choices"][0]["message"]["content"], expected)
        self.wait_until_idle()

    def test_a_full_queue_says_come_back(self):
        connections = []
        for n_running, n_waiting in ((1, 0), (2, 0), (2, 1), (2, 2)):
            connections.append(self.server.send_post("/v1/chat/completions", self.long))
            wait_until(lambda: (lambda m: (m["requests_running"], m["requests_waiting"]))(self.server.metrics()) == (n_running, n_waiting))
        def retry_after():                      # of what the server tells of itself
            metrics = self.server.metrics()
            n_ended = sum(value for name, value in metrics.items() if name.startswith("requests_total"))
            return metrics["requests_waiting"] * metrics["step_seconds_total"] / max(n_ended, 1)
        wait_until(lambda: retry_after() > 1.2)
        least = retry_after()
        status, headers, answer = self.server.request("POST", "/v1/chat/completions", {"messages": HELLO, "max_tokens": 1})
        self.assertEqual((status, answer["error"]["type"]), (503, "overloaded_error"))
        self.assertLessEqual(math.ceil(least), int(headers["Retry-After"]))
        self.assertLessEqual(int(headers["Retry-After"]), math.ceil(retry_after()))
        for connection in connections:
            connection.close()
        self.wait_until_idle()
        self.chat(max_tokens=1)

    def test_a_request_of_many_replies_is_let_in_as_a_whole(self):
        with Server(beryl, self.model, *self.arguments, "--queue", "2", "--parallel", "2") as server:
            status, answer = server.post("/v1/completions", {"prompt": ["a", "b", "c", "d", "e"], "n": 3, "max_tokens": 2})
            self.assertEqual((status, len(answer["choices"])), (200, 15), answer)
            self.assertEqual(len(self.chat(server=server, n=8, max_tokens=1)["choices"]), 8)

    def test_too_many_connections_hear_so(self):
        with Server(beryl, self.model, *self.arguments, "--connections", "3") as server:
            connections = [server.connect() for _ in range(3)]
            time.sleep(0.1)
            wait_until(lambda: server.request("GET", "/v1/models")[0] == 503)
            self.assertEqual(server.request("GET", "/health")[0], 200)
            # Those that were there before notice nothing of a silent one too many.
            extra = server.connect()
            time.sleep(0.1)
            for connection in connections:
                connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
                self.assertTrue(connection.recv(1 << 16).startswith(b"HTTP/1.1 200"))
            extra.close()
            for connection in connections:
                connection.close()
            wait_until(lambda: server.request("GET", "/v1/models")[0] == 200)

    def test_a_slow_reader_does_not_slow_others(self):
        slow = self.server.send_post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 3000, "stream": True, "logprobs": True,
                                                              "top_logprobs": 20, "logit_bias": self.long["logit_bias"]})
        slow.recv(10)                                   # and no more: its reply, some megabytes, piles up
        for _ in range(3):
            self.chat(max_tokens=20)
        wait_until(lambda: self.server.metrics()["requests_running"] == 0, 120)   # the engine is done with it all the same
        data = b""
        while b"[DONE]" not in data:
            piece = slow.recv(1 << 20)
            self.assertTrue(piece, "the stream was cut")
            data = data[-100:] + piece
        slow.close()

    def test_a_server_that_is_told_to_end_finishes_first(self):
        server = Server(beryl, self.model, *self.arguments)
        body = {"messages": HELLO, "max_tokens": 2000, "logit_bias": self.long["logit_bias"], "stream": True}
        connection = server.send_post("/v1/chat/completions", body)
        data = connection.recv(4096)
        server.process.send_signal(signal.SIGTERM)
        with self.assertRaises(OSError):
            for _ in range(100):                        # soon nobody new gets in
                server.connect().close()
                time.sleep(0.05)
        while b"[DONE]" not in data:
            piece = connection.recv(1 << 16)
            self.assertTrue(piece, "the stream was cut")
            data += piece
        self.assertEqual(data.count(b'"finish_reason":"length"'), 1)
        connection.close()
        self.assertEqual(server.process.wait(60), 0)
        server.__exit__(None)


    def test_a_second_signal_ends_it_as_that_signal_does(self):
        for first, second in ((signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGINT)):
            server = Server(beryl, self.model, *self.arguments)
            connection = server.send_post("/v1/chat/completions", self.long | {"stream": True})
            connection.recv(4096)
            server.process.send_signal(first)
            self.assertIn(b"Finishing", server.process.stderr.readline())
            server.process.send_signal(second)
            self.assertEqual(server.process.wait(60), 128 + second)
            connection.close()
            server.process.stderr.close()
            server.process.stdout.close()

    def test_there_are_no_more_connections_than_files(self):
        def limited(soft, hard):
            class Limited(Program):
                def start(self, *arguments):
                    return super().start(*arguments, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)))
            return Server(Limited(beryl.path), self.model, *self.arguments)
        # What may be raised is.
        with limited(64, 1024) as server:
            self.assertNotIn("--connections", "".join(server.lines))
            soft = pathlib.Path(f"/proc/{server.process.pid}/limits").read_text().split("Max open files")[1].split()[0]
            self.assertGreater(int(soft), 64)
        # Otherwise fewer are let in, the others hear so at once, and nothing is left hanging.
        with limited(128, 128) as server:
            told = [line for line in server.lines if "--connections" in line]
            self.assertEqual(len(told), 1, server.lines)
            self.assertRegex(told[0], r"--connections 128 .* \d+ are let in")
            most = int(told[0].split()[-4])
            self.assertIn(most, range(5, 100))
            connections = [server.connect() for _ in range(most + 4)]
            answers = []
            for connection in connections:
                connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
                answers.append(connection.recv(1 << 16)[9:12])
            self.assertEqual((answers.count(b"200") >= most, set(answers) <= {b"200", b"503"}), (True, True), answers)
            crowd = [server.connect() for _ in range(150)]       # more than there are files
            used = lambda: sum(map(int, pathlib.Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
            begin = used()
            time.sleep(2)
            self.assertLess(used() - begin, 100)                 # of 200 hundredths of a second
            for connection in connections + crowd:
                connection.close()
            wait_until(lambda: self.chat(server=server, max_tokens=2, response_format={"type": "regex", "pattern": "ab"})["choices"][0]["message"]["content"] == "ab")
        done = beryl("serve", self.model, "--port", "0", "--device", "cpu", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40)))
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn(b"ulimit -n", done.stderr.splitlines()[-1])


class LoadTest(ServerTest):
    """Many at once: none lost, none mixed up, no page leaked, memory flat. BERYL_LOAD="CLIENTS REQUESTS_OF_EACH" makes it longer."""
    n_clients, n_requests = map(int, os.environ.get("BERYL_LOAD", "24 12").split())
    arguments = ("--device", "cpu", "--ctx", "512", "--parallel", "8", "--chunk", "48", "--cache-tokens", "1024", "--queue", "256")

    def test_every_reply_is_the_one_given_alone(self):
        shared = "You are a model of random weights. " * 3
        questions = [f"{shared if i % 2 else ''}Question {i}?" for i in range(10)]
        body = {"temperature": 0, "max_tokens": 60}
        # Some are bound to a form, some may call tools.
        bound = {2: {"response_format": {"type": "regex", "pattern": "([a-z]{3} ){10}"}}, 3: {"response_format": {"type": "json_object"}},
                 4: {"tools": SHORT_TOOLS[1:], "tool_choice": "required"}}
        asked_of = [body | {"messages": [{"role": "user", "content": text}]} | bound.get(i, {}) for i, text in enumerate(questions)]
        if self.server.post("/v1/chat/completions", asked_of[2] | {"max_tokens": 1})[0] == 400:
            asked_of = [{key: value for key, value in asked.items() if key in ("messages", "temperature", "max_tokens")} for asked in asked_of]
        alone = [self.chat(**asked)["choices"][0]["message"] for asked in asked_of]
        failures = []
        n_done = 0

        def memory():
            return int(pathlib.Path(f"/proc/{self.server.process.pid}/status").read_text().split("VmRSS:")[1].split()[0])

        def client(seed):
            nonlocal n_done
            draw = random.Random(seed)
            try:
                for _ in range(self.n_requests):
                    n_done += 1
                    i = draw.randrange(len(questions))
                    asked = asked_of[i]
                    kind = draw.randrange(4)
                    if kind == 0:                        # leaves
                        connection = self.server.send_post("/v1/chat/completions", asked | {"stream": draw.random() < 0.5})
                        if draw.random() < 0.5:
                            connection.recv(64)
                        connection.close()
                        continue
                    if kind == 1:
                        events = self.server.events("/v1/chat/completions", asked)
                        text = "".join(json.loads(e)["choices"][0]["delta"].get("content", "") for e in events[:-1])
                    else:
                        text = self.chat(**asked)["choices"][0]["message"]["content"] or ""
                    if text != (alone[i]["content"] or ""):
                        failures.append((i, text))
            except Exception as error:                   # noqa: BLE001  whatever it is, the test has failed
                failures.append(error)

        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(self.n_clients)]
        for thread in threads:
            thread.start()
        if is_long := self.n_clients * self.n_requests >= 4000:
            wait_until(lambda: n_done > self.n_clients * self.n_requests // 4 or failures, seconds=3600)
            before = memory()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])
        self.wait_until_idle()
        if is_long:
            metrics = {name: value for name, value in self.server.metrics().items() if name.startswith("requests_total")}
            print(f"{n_done} requests by {self.n_clients}; memory {before} kB after a quarter, {memory()} kB at the end; {metrics}", file=sys.stderr)
            self.assertLess(memory(), before + 12_000)
        self.assertGreater(self.server.metrics()["reused_tokens_total"], 1000)


class ThinkingTest(ServerTest):
    """A model with Gemma 4's tokens: thoughts are apart from content."""

    @classmethod
    def make_model(cls):
        return make_speaking_model(cls.folder / "thinker", "gemma4_dense", bos=BOS, special=GEMMA4_SPECIAL, end=TURN_END)

    def test_thoughts_are_reasoning(self):
        # Forced: a thought is opened, and nothing but "A" comes after it until the budget closes it.
        opened = {str(CHANNEL): 30, "65": 28, str(EOS): -100, str(TURN_END): -100}
        answer = self.chat(max_tokens=20, temperature=0, reasoning_effort="high", thinking_budget=6,
                           logit_bias={"65": 100, str(EOS): -100, str(TURN_END): -100})
        self.assertEqual(answer["choices"][0]["message"]["content"], "A" * 20)
        self.assertNotIn("reasoning_content", answer["choices"][0]["message"])
        answer = self.chat(max_tokens=20, temperature=0, reasoning_effort="high", thinking_budget=6, frequency_penalty=1,
                           logit_bias=opened)
        message = answer["choices"][0]["message"]
        self.assertEqual(message["reasoning_content"].count("A"), len(message["reasoning_content"]))
        self.assertLessEqual(len(message["reasoning_content"]), 6)
        self.assertIn("A", message["content"])
        self.assertEqual(answer["choices"][0]["finish_reason"], "length")
        self.assertTrue(0 < answer["usage"]["completion_tokens_details"]["reasoning_tokens"] < answer["usage"]["completion_tokens"], answer["usage"])
        # None where none is wanted, though the model begins one.
        for wish in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
            silent = self.chat(max_tokens=20, temperature=0, frequency_penalty=1, logit_bias=opened, **wish)["choices"][0]["message"]
            self.assertNotIn("reasoning_content", silent)
            self.assertIn("A", silent["content"])
        # In a stream: the same, in the order in which it came.
        body = {"messages": HELLO, "max_tokens": 20, "temperature": 0, "reasoning_effort": "high", "thinking_budget": 6, "frequency_penalty": 1,
                "logit_bias": opened}
        deltas = [json.loads(event)["choices"][0]["delta"] for event in self.server.events("/v1/chat/completions", body)[:-1]]
        self.assertEqual("".join(delta.get("reasoning_content", "") for delta in deltas), message["reasoning_content"])
        self.assertEqual("".join(delta.get("content", "") for delta in deltas), message["content"])

    def test_a_form_begins_behind_the_thought(self):
        # A thought is opened by the bias, and closed by its budget; or it is not opened.
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
        for bias, thinks in ((30, True), (-100, False)):
            answer = self.chat(max_tokens=3000, seed=2, reasoning_effort="high", thinking_budget=6, response_format=form, frequency_penalty=1,
                               logit_bias={str(CHANNEL): bias, "65": 28})["choices"][0]
            self.assertEqual("reasoning_content" in answer["message"], thinks)
            self.assert_person(answer["message"]["content"])
            self.assertEqual(answer["finish_reason"], "stop")
        # Where no thinking was asked for, none comes.
        answer = self.chat(max_tokens=3000, seed=2, response_format=form, logit_bias={str(CHANNEL): 30})["choices"][0]
        self.assertNotIn("reasoning_content", answer["message"])
        self.assert_person(answer["message"]["content"])

    def test_thoughts_are_blocks(self):
        import anthropic
        client = anthropic.Anthropic(base_url=self.server.url, api_key="none", max_retries=0)
        fields = {"model": "any", "messages": HELLO, "max_tokens": 20, "thinking": {"type": "enabled", "budget_tokens": 6},
                  "extra_body": {"temperature": 0, "frequency_penalty": 1, "logit_bias": {str(CHANNEL): 30, "65": 28, str(EOS): -100, str(TURN_END): -100}}}
        whole = client.messages.create(**fields)
        thoughts = [block.thinking for block in whole.content if block.type == "thinking"]
        self.assertTrue(len(thoughts) == 1 and len(thoughts[0]) <= 6, thoughts)
        silent = client.messages.create(**fields | {"thinking": {"type": "disabled"}})
        self.assertEqual([block.type for block in silent.content], ["text"])
        with client.messages.stream(**fields) as stream:
            for _ in stream:
                pass
            final = stream.get_final_message()
        self.assertEqual([block.type for block in final.content], [block.type for block in whole.content])   # in the order in which they came
        answer = openai_client(self.server).responses.create(
            model="any", input="Hello", max_output_tokens=20, temperature=0, reasoning={"effort": "low"},
            extra_body=fields["extra_body"] | {"thinking_budget": 6})
        self.assertEqual([item.type for item in answer.output], [{"thinking": "reasoning", "text": "message"}[block.type] for block in whole.content])
        self.assertLess(answer.usage.output_tokens_details.reasoning_tokens, answer.usage.output_tokens)
        self.assertGreater(answer.usage.output_tokens_details.reasoning_tokens, 0)
        for kind in ("thinking", "text"):
            self.assertEqual("".join(getattr(block, kind) for block in final.content if block.type == kind),
                             "".join(getattr(block, kind) for block in whole.content if block.type == kind))


class NativeCallsTest(ServerTest):
    """A model with Gemma 4's tokens for calls: its own notation, held to by the grammar and read back."""
    arguments = ("--device", "cpu", "--ctx", "4096", "--parallel", "4", "--chunk", "64")

    @classmethod
    def make_model(cls):
        return make_speaking_model(cls.folder / "caller", "gemma4_dense", bos=BOS, special=GEMMA4_TOOLS, end=TURN_END)

    def test_a_loop_of_four_turns(self):
        run_tool_loop(self, openai_client(self.server), seed=1)

    def test_every_notation_of_a_value_comes_back(self):
        parameters = {"type": "object", "properties": {
            "text": {"type": "string", "maxLength": 12}, "numbers": {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 99}, "maxItems": 2},
            "flag": {"type": ["boolean", "null"]}, "inner": {"type": "object", "properties": {"deep": {"type": "string", "enum": ["a,b}", ":{"]}}, "required": ["deep"]}},
            "required": ["text", "numbers", "flag", "inner"]}
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}]
        for seed in range(6):
            choice = self.chat(tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=2000, seed=seed)["choices"][0]
            self.assertEqual(choice["finish_reason"], "tool_calls", choice)
            arguments = json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])
            self.assertEqual(sorted(arguments), ["flag", "inner", "numbers", "text"])
            self.assertIn(arguments["inner"]["deep"], ("a,b}", ":{"))
            self.assertIn(arguments["flag"], (True, False, None))
            self.assertTrue(all(-9 <= number <= 99 for number in arguments["numbers"]))
            self.assertIsInstance(arguments["text"], str)
        # Left to itself the model may call, but only so; text may stand around it.
        n_calls = 0
        for seed in range(100):
            message = self.chat(tools=SHORT_TOOLS, max_tokens=400, seed=seed, logit_bias={str(0xc0): 4})["choices"][0]["message"]
            for call in message.get("tool_calls", ()):
                self.assert_call(call["function"]["name"], call["function"]["arguments"])
                n_calls += 1
            if n_calls >= 3:
                break
        self.assertGreaterEqual(n_calls, 3)
        message = self.chat(tools=SHORT_TOOLS, tool_choice="none", max_tokens=50, seed=1, logit_bias={str(0xc0): 4})["choices"][0]["message"]
        self.assertNotIn("tool_calls", message)


def run_tool_loop(case, client, seed):
    """Four turns of calls and their results, one of them parallel, one streamed; then the answer in words."""
    messages = list(HELLO)
    for turn in range(4):
        fields = {"model": "any", "messages": messages, "tools": SHORT_TOOLS, "seed": seed + turn, "max_tokens": 300,
                  "parallel_tool_calls": turn == 2, "tool_choice": {"type": "function", "function": {"name": "get_time"}} if turn == 1 else "required"}
        if turn == 3:
            with client.chat.completions.stream(**fields) as stream:
                for _ in stream:
                    pass
                choice = stream.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(**fields).choices[0]
        if choice.finish_reason != "length":             # many calls at once
            case.assertEqual(choice.finish_reason, "tool_calls")
        for call in choice.message.tool_calls:
            case.assert_call(call.function.name, call.function.arguments)
        messages.append({"role": "assistant", "content": None, "tool_calls": [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": call.function.arguments}}
            for call in choice.message.tool_calls]})
        messages += [{"role": "tool", "tool_call_id": call.id, "content": f"It is {turn}."} for call in choice.message.tool_calls]
    answer = client.chat.completions.create(model="any", messages=messages, tools=SHORT_TOOLS, tool_choice="none", seed=seed, max_tokens=20)
    case.assertFalse(answer.choices[0].message.tool_calls)
    case.assertTrue(answer.choices[0].message.content)


class RealModelTest(unittest.TestCase):
    assert_call = ServerTest.assert_call

    @unittest.skipUnless(SMOLLM2.exists(), f"{SMOLLM2} is not there")
    def test_a_chat_model(self):
        with Server(beryl, SMOLLM2, "--device", "cpu", "--ctx", "4096") as server:
            client = openai_client(server)
            fields = {"model": "any", "messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
            whole = client.chat.completions.create(**fields, max_tokens=40)
            alone = beryl("run", SMOLLM2, "--device", "cpu", "-p", fields["messages"][0]["content"], "--temp", "0", "-n", "40")
            self.assertEqual(whole.choices[0].message.content, alone.stdout.decode().removesuffix("\n"))
            text = whole.choices[0].message.content
            with client.chat.completions.stream(**fields, max_tokens=200, stop=text[30:36]) as stream:
                for _ in stream:
                    pass
                self.assertEqual(stream.get_final_completion().choices[0].message.content, text[:text.index(text[30:36])])
            # Tools in text: the call is read back, its result is answered.
            messages = [{"role": "user", "content": "What is the weather in Paris?"}]
            answer = client.chat.completions.create(model="any", messages=messages, tools=TOOLS, temperature=0, max_tokens=100)
            choice = answer.choices[0]
            self.assertEqual(choice.finish_reason == "tool_calls", bool(choice.message.tool_calls))
            messages += [{"role": "assistant", "content": None, "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{\"city\": \"Paris\"}"}}]},
                {"role": "tool", "tool_call_id": "call_1", "content": "It rains, 12 degrees."}]
            answer = client.chat.completions.create(model="any", messages=messages, tools=TOOLS, temperature=0, max_tokens=60)
            self.assertTrue(answer.choices[0].message.content)
            run_tool_loop(self, client, seed=1)

    @unittest.skipUnless(GEMMA3.exists(), f"{GEMMA3} is not there")
    def test_a_base_model(self):
        with Server(beryl, GEMMA3, "--device", "cpu", "--ctx", "4096") as server:
            client = openai_client(server)
            run_tool_loop(self, client, seed=2)          # a base model, but with the turns of Gemma 3
            prompt = "The capital of France is"
            alone = client.completions.create(model="any", prompt=prompt, max_tokens=24, temperature=0)
            run = beryl("run", GEMMA3, "--device", "cpu", "--raw", "-p", prompt, "--temp", "0", "-n", "24")
            self.assertEqual(alone.choices[0].text, run.stdout.decode().removesuffix("\n"))
            long = " ".join(["One two three four five six seven eight nine ten."] * 40)
            texts = []
            threads = [threading.Thread(target=lambda: texts.append(
                client.completions.create(model="any", prompt=prompt, max_tokens=24, temperature=0).choices[0].text)) for _ in range(3)]
            busy = threading.Thread(target=lambda: client.completions.create(model="any", prompt=long, max_tokens=8, temperature=0))
            for thread in (busy, *threads):
                thread.start()
            for thread in (busy, *threads):
                thread.join()
            self.assertEqual(texts, [alone.choices[0].text] * 3)
            # What repeats is guessed, and a beginning that was read is not read again.
            again = server.post("/v1/completions", {"prompt": long, "max_tokens": 60, "temperature": 0})[1]
            self.assertGreater(again["timings"]["reused_n"], 300)
            self.assertGreater(again["timings"]["draft_n_accepted"], 0)


def main():
    global beryl
    if len(sys.argv) < 3 or sys.argv[2] not in ("tiny", "real"):
        sys.exit("usage: server_test.py BERYL tiny|real [UNITTEST OPTIONS]")
    if "BERYL_CLIENTS" not in os.environ:
        python = clients_python()
        if python is None:
            print("skipped: the clients' packages can not be had")
            sys.exit(SKIPPED)
        os.execve(python, [str(python), *sys.argv], os.environ | {"BERYL_CLIENTS": "1"})
    beryl = Program(pathlib.Path(sys.argv[1]).resolve())
    if sys.argv[2] == "real" and not SMOLLM2.exists() and not GEMMA3.exists():
        print(f"skipped: neither {SMOLLM2} nor {GEMMA3} is there")
        sys.exit(SKIPPED)
    tiny = [name for name, value in globals().items() if isinstance(value, type) and issubclass(value, ServerTest)
            and name != "ServerTest"]
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]], defaultTest=["RealModelTest"] if sys.argv[2] == "real" else tiny)


if __name__ == "__main__":
    main()
