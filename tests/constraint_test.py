#!/usr/bin/env python3
"""Structured output: whatever is written within a constraint is what was asked for, and what cannot be enforced is refused.

    constraint_test.py BERYL CONSTRAINT_WALK [UNITTEST OPTIONS]

Random replies (constraint_walk.cpp) are held against Python's json and re and the jsonschema package; where that is missing,
schemas are checked for JSON only. Exit status 77: a build without structured output.
"""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

from cli_support import Program, make_speaking_model, models_folder

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tools"))
try:
    import jsonschema
except ImportError:
    jsonschema = None

SKIPPED = 77
beryl = walk = None
GEMMA4_VOCABULARY = models_folder() / "vocab" / "ggml-vocab-gemma-4.gguf"


class Walker:
    def __init__(self, model):
        self.model = model
        self.process = subprocess.Popen([walk, str(model)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __call__(self, kind, text, n=15, seed=1, most=600, **calls):
        """kind: one of constraint_walk's, or a notation of calls with the tools as text."""
        if not isinstance(text, str):
            text = json.dumps(text)
        if kind in ("gemma4", "tagged", "bare"):
            kind, text, calls = "nothing", "", {"notation": kind, "tools": text} | calls
        elif "tools" in calls:
            calls["tools"] = json.dumps(calls["tools"])
        job = {"kind": kind, "text": text, "n": n, "seed": seed, "most": most} | calls
        self.process.stdin.write(json.dumps(job).encode() + b"\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            self.__init__(self.model)
            raise AssertionError(f"the program has died of {job}")
        return json.loads(line)

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


class WalkCase(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="beryl-constraint-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.model = make_speaking_model(cls.folder / "model")
        cls.walker = Walker(cls.model)
        cls.addClassCleanup(cls.walker.close)

    def replies(self, kind, text, **options):
        """The texts of the replies that came to an end; some must."""
        answer = self.walker(kind, text, **options)
        self.assertNotIn("error", answer, text)
        texts = [bytes.fromhex(reply["hex"]).decode("utf-8") for reply in answer["replies"] if reply["finished"]]
        self.assertGreater(len(texts), 0, text)
        return texts

    def feed(self, kind, text, feed, n, **options):
        """How many tokens of these bytes, again and again, were allowed, and the processor time of the first half of n and of all."""
        answer = self.walker(kind, text, n=n, feed=feed, **options)
        self.assertNotIn("error", answer, text)
        return answer["fed"], answer["half_ms"], answer["ms"]

    def assert_refused(self, kind, text, *parts, code="unsupported"):
        answer = self.walker(kind, text)
        self.assertIn("error", answer, text)
        self.assertEqual(answer["code"], code, answer)
        self.assertNotIn("\n", answer["error"])
        for part in parts:
            self.assertIn(part, answer["error"])


PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
                                           "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "minItems": 1, "maxItems": 3}},
          "required": ["name", "tags"]}
TREE = {"$defs": {"node": {"type": "object", "properties": {"value": {"type": "number"}, "left": {"$ref": "#/$defs/node"}, "right": {"anyOf": [
    {"$ref": "#/$defs/node"}, {"type": "null"}]}}, "required": ["value"], "additionalProperties": False}}, "$ref": "#/$defs/node"}


class SchemaTest(WalkCase):
    SCHEMAS = [
        True, {}, {"title": "anything", "description": "at all"}, PERSON, TREE,
        {"type": "object"}, {"type": "object", "properties": {}}, {"type": "array"}, {"type": "string"}, {"type": "number"}, {"type": "integer"},
        {"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}, {"type": ["integer", "array"], "minimum": 3, "maxItems": 2},
        {"const": {"a": [1, None, "x\"\\\n\u00e9\U0001f600"]}}, {"enum": ["a", "b\"", 1, 2.5, None, True, [1], {"k": "v"}]},
        {"enum": ["x", "y"], "type": "string"}, {"const": 3, "type": "integer"}, {"const": 3, "type": ["number", "null"]},
        {"type": "string", "minLength": 3}, {"type": "string", "maxLength": 4}, {"type": "string", "minLength": 2, "maxLength": 2},
        {"type": "string", "minLength": 20, "maxLength": 1000}, {"type": "string", "pattern": "^[a-c]+[0-9]{2,3}$"},
        {"type": "string", "pattern": "a.c"}, {"type": "string", "pattern": "(a+)+b"}, {"type": "string", "pattern": "^[^x]*$"},
        {"type": "string", "pattern": "say \"[x\\\\\n\u00e9]{2}\""}, {"type": "string", "pattern": "^[^a]{3,5}$"}, {"type": "string", "pattern": "^a(\\.b+)?Z$"},
        {"type": "string", "pattern": "^[\\x00-\\x1f\"]{4}$"}, {"type": "string", "pattern": "é|ü"}, {"type": "string", "pattern": "^\\S{1,4}$"}, {"type": "string", "maxLength": 0},
        {"type": "string", "pattern": "^\\d{3}-\\d{4}$"}, {"type": "string", "pattern": "^\\S{1,4}@\\w+$"}, {"type": "string", "pattern": "\\."},
        {"type": "integer", "minimum": -5, "maximum": 13}, {"type": "integer", "exclusiveMinimum": 0}, {"type": "integer", "maximum": -7},
        {"type": "integer", "exclusiveMinimum": 9, "exclusiveMaximum": 12}, {"type": "integer", "minimum": 10, "maximum": 1000000007},
        {"type": "integer", "multipleOf": 7}, {"type": "integer", "multipleOf": 5, "minimum": 1, "maximum": 20},
        {"type": "number", "minimum": 0, "maximum": 1}, {"type": "number", "exclusiveMinimum": -1.5, "maximum": 2.25}, {"type": "number", "minimum": 1e3},
        {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}, {"type": "array", "items": False}, {"type": "array", "maxItems": 0},
        {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False},
        {"type": "array", "prefixItems": [{"type": "boolean"}, True], "items": {"type": "null"}, "maxItems": 4, "minItems": 1},
        {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, "minItems": 1},
        {"type": "object", "additionalProperties": {"type": "integer"}}, {"type": "object", "additionalProperties": False},
        {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1, "maxProperties": 2},
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": True, "c\"\n": {"const": 1}}, "required": ["b", "c\"\n"]},
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "c": {"type": "integer"}}, "minProperties": 2},
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "c": {"type": "integer"}}, "maxProperties": 1},
        {"type": "object", "patternProperties": {"^x[0-9]$": {"type": "integer"}}},
        {"type": "object", "propertyNames": {"pattern": "^[a-z]{1,3}$"}}, {"type": "object", "propertyNames": {"enum": ["k", "l"]}},
        {"anyOf": [{"type": "integer", "minimum": 5}, {"type": "string", "maxLength": 2}]}, {"oneOf": [{"type": "integer"}, {"type": "string"}]},
        {"oneOf": [{"type": "object", "properties": {"k": {"const": "a"}, "x": {"type": "integer"}}, "required": ["k", "x"]},
                   {"type": "object", "properties": {"k": {"const": "b"}, "y": {"type": "string"}}, "required": ["k"]}]},
        {"allOf": [PERSON]}, {"type": "object", "properties": {"self": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["self"]},
        {"type": "object", "properties": {"a": {"type": "string"}, "b": {"$ref": "#/properties/a"}}},
        {"definitions": {"x/y~z": {"enum": [1, 2]}}, "type": "array", "items": {"$ref": "#/definitions/x~1y~0z"}, "minItems": 1},
        {"type": "string", "format": "no-such-format"}, {"type": "integer", "format": "int32"},
    ]

    def test_replies_satisfy_the_schema(self):
        for i, schema in enumerate(self.SCHEMAS):
            with self.subTest(schema=schema):
                for text in self.replies("schema", schema, n=6, seed=i, most=400):
                    value = json.loads(text)
                    if jsonschema:
                        jsonschema.Draft202012Validator(schema).validate(value)

    def test_what_has_no_end_is_refused(self):
        ref = {"$ref": "#"}
        node = lambda required, **members: {"type": "object", "properties": {"next": ref, **members}, "required": required}
        for schema, place in ((node(["next"]), "/properties/next/$ref"), ({"type": "array", "items": ref, "minItems": 1}, "/items/$ref"),
                              ({"type": "array", "prefixItems": [{"type": "null"}, ref], "minItems": 2}, "/prefixItems/1/$ref"), (node([], ), None),
                              ({"type": "object", "additionalProperties": ref, "minProperties": 1}, "/additionalProperties/$ref"), (node([]) | {"minProperties": 1}, "/properties/next/$ref"),
                              ({"$defs": {"a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]}, "b": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "array", "items": {"$ref": "#/$defs/b"}, "minItems": 1}]}},
                                "$ref": "#/$defs/a"}, "$ref"),
                              (TREE, None), ({"type": ["object", "null"], "properties": {"next": ref}, "required": ["next"]}, None), ({"type": "array", "items": ref}, None),
                              ({"anyOf": [{"type": "array", "items": ref, "minItems": 1}, {"type": "null"}]}, None), (node(["value"], value={"type": "null"}), None)):
            with self.subTest(schema=schema):
                if place is None:
                    self.assertNotIn("error", self.walker("schema", schema))
                else:
                    self.assert_refused("schema", schema, "comes to an end", place, code="bad")

    def test_formats(self):
        import datetime
        import ipaddress
        import uuid
        from urllib.parse import urlparse
        # (What Python's library reads of fractions of seconds depends on its version.)
        whole = lambda s: re.sub(r"\.\d+", "", s).replace("Z", "+00:00")
        checks = {"date": datetime.date.fromisoformat, "time": lambda s: datetime.time.fromisoformat(whole(s)),
                  "date-time": lambda s: datetime.datetime.fromisoformat(whole(s)), "ipv4": ipaddress.IPv4Address, "uuid": uuid.UUID,
                  "email": lambda s: "@" in s, "hostname": lambda s: re.fullmatch(r"[a-z0-9.-]+", s), "uri": lambda s: urlparse(s).scheme,
                  "ipv6": ipaddress.IPv6Address, "duration": lambda s: s.startswith("P"),
                  "json-pointer": lambda s: s == "" or s.startswith("/"), "uri-reference": lambda s: urlparse(s),
                  "relative-json-pointer": lambda s: s[0].isdigit()}
        for name, check in checks.items():
            with self.subTest(format=name):
                for text in self.replies("schema", {"type": "string", "format": name}, n=12):
                    self.assertIsNot(check(json.loads(text)), None, text)

    def test_an_unknown_format_is_noted(self):
        answer = self.walker("schema", {"type": "object", "properties": {"a": {"type": "string", "format": "iban"}}})
        self.assertEqual(len(answer["notes"]), 1)
        self.assertIn("'/properties/a': the format 'iban' is not enforced", answer["notes"][0])

    def test_objects(self):
        for text in self.replies("json", "", n=12, most=400):
            self.assertIsInstance(json.loads(text), dict)

    def test_what_cannot_be_enforced_is_refused_with_its_place(self):
        integer = {"type": "integer"}
        inside = lambda schema: {"type": "object", "properties": {"a": schema}}
        for schema, *parts in [
                (inside({"type": "string", "not": {"const": "x"}}), "'/properties/a'", "'not'"), ({"not": integer}, "'not'"),
                ({"if": integer, "then": integer}, "'if'"), ({"type": "object", "dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
                ({"type": "array", "uniqueItems": True}, "'uniqueItems'"), ({"type": "array", "contains": integer}, "'contains'"),
                ({"allOf": [integer, {"minimum": 3}]}, "/allOf"), ({"anyOf": [integer], "minimum": 3}, "'minimum'", "anyOf"),
                ({"$ref": "#/$defs/a", "$defs": {"a": integer}, "minimum": 3}, "'minimum'", "$ref"), ({"$ref": "other.json"}, "other.json"),
                ({"$ref": "#/x-elsewhere", "x-elsewhere": integer}, "#/x-elsewhere"), ({"const": 1, "minimum": 0}, "'minimum'"),
                ({"enum": [1, "x"], "type": "string"}, "value '1'"), ({"minimum": 3}, "'minimum'", "'type'"), ({"properties": {}}, "'properties'"),
                ({"type": "number", "multipleOf": 0.5}, "'multipleOf'"), ({"type": "integer", "multipleOf": 3, "minimum": 0}, "multipleOf"),
                ({"type": "integer", "minimum": 1.5}, "/minimum"), ({"type": "string", "pattern": "^a|b$c"}, "'$'"), ({"type": "string", "pattern": "a^"}, "'^'"),
                ({"type": "string", "pattern": "(?=a)b"}, "look"), ({"type": "string", "pattern": "\\bx"}, "escape"),
                ({"type": "string", "pattern": "a", "maxLength": 3}, "'pattern'"), ({"type": "string", "format": "date", "maxLength": 3}, "'format'"),
                ({"type": "string", "pattern": "((a{4000}){100})"}, "repetitions"), ({"type": "string", "maxLength": 10**9}, "100000"),
                ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "oneOf"), (False, "false"), ({"type": "string", "nullable": True}, "'nullable'"),
                ({"type": "object", "properties": {"a": integer}, "required": ["b"]}, "'b'"), ({"type": ["integer", "number"]}, "integer"),
                ({"type": "object", "properties": {f"k{i}": integer for i in range(50)}, "maxProperties": 3}, "more than 40"),
                ({"type": "object", "patternProperties": {"^a": integer}, "additionalProperties": False}, "/patternProperties"),
                ({"type": "array", "items": [integer]}, "prefixItems"), ({"type": "string", "contentEncoding": "base64"}, "'contentEncoding'")]:
            with self.subTest(schema=schema):
                self.assert_refused("schema", schema, *parts)
        for schema, *parts in [
                ([], "array"), (3, "number"), ("not json", "JSON"), ('{"a": 1} x', "JSON"), ("", "JSON"), ({"type": "strin"}, "'strin'"), ({"type": 3}, "'/type'"),
                ({"type": []}, "'/type'"), ({"type": ["string", "string"]}, "different"), ({"enum": []}, "'/enum'"), ({"anyOf": []}, "'/anyOf'"),
                ({"type": "string", "minLength": -1}, "'/minLength'"), ({"type": "string", "minLength": 3, "maxLength": 2}, "greater"),
                ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum"), ({"type": "string", "pattern": "(a"}, "byte 0"), ({"type": "string", "pattern": "a)"}, "byte 1"),
                ({"$ref": "#"}, "itself"), ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "itself"),
                ({"$ref": "#/$defs/none"}, "there is no"), ({"type": "object", "properties": []}, "'/properties'"), ('{"a": 1, "a": 2}', "twice"),
                ("[" * 100_000, "JSON"), ('{"type":' * 60 + "1" + "}" * 60, "")]:
            with self.subTest(schema=schema):
                self.assert_refused("schema", schema, *parts, code="bad")

    def test_large_and_deep_schemas_end_soon(self):
        wide = {"type": "object", "properties": {f"key{i}": {"type": "string", "maxLength": 50} for i in range(300)}}
        self.walker("schema", wide, n=1, most=50)
        deep = {"type": "integer"}
        for _ in range(20):
            deep = {"type": "array", "items": deep, "maxItems": 3}
        self.walker("schema", deep, n=1, most=50)
        answer = self.walker("schema", "x" * (1 << 21))
        self.assertIn("bytes", answer["error"])


class RegexTest(WalkCase):
    def test_replies_match_as_a_whole(self):
        for i, regex in enumerate(("yes|no", "(yes|no)", "[a-f]{3,5}", "a*b+c?", "(?:ab|cd){2}", "\\d+\\.\\d{2}", "[^a-z\\d]x", "^abc$", "x(y(z)?)?", "(a+)+b", ".{1,3}",
                                   "\\w+ \\w+", "[\\w.-]+@[a-z]+\\.(com|org)", "(?<year>\\d{4})-\\d\\d", "\\x41\\u0042[\\x43-\\x45]", "a{0,3}?b", "é+ü?[α-ω]", "\\{\\}\\[\\]\\(\\)\\|\\\\",
                                   "[\\]\\-^]+", "\\n\\t", "[^\\W_]+", "[+*?.]{2}", "🙂{2}", "(a|b|ab)*c", "(a*)*b", ".*a.{12}", "(|a)b", "a||b", "")):
            with self.subTest(regex=regex):
                python = re.sub(r"\(\?<", "(?P<", regex)
                for text in self.replies("regex", regex, seed=i):
                    self.assertTrue(re.fullmatch(python, text, re.A), (regex, text))

    def test_random_expressions(self):
        """What is written matches, and what matches may be written."""
        random = __import__("random").Random(7)

        def make(depth):
            """An expression, and how to make a text of it."""
            kind = random.randrange(9 if depth else 4)
            if kind < 3:
                regex, characters = random.choice([("a", "a"), ("b", "b"), ("x", "x"), ("\\.", "."), ("\\d", "07"), ("\\w", "Z_3"), ("[a-c]", "abc"), ("[^a]", "b\"\n\x01é🙂"), (".", "a.0é\u0800🙂"),
                                                   ("\\n", "\n"), ("\"", "\""), ("\\\\", "\\"), ("é", "é"), ("[\\d_-]", "-_9"), (" ", " ")])
                return regex, lambda: random.choice(characters)
            if kind == 3:
                return "", lambda: ""
            if kind in (4, 5, 6):
                (a, text_of_a), (b, text_of_b) = make(depth - 1), make(depth - 1)
                return (f"({a}|{b})", lambda: random.choice((text_of_a, text_of_b))()) if kind == 4 else (a + b, lambda: text_of_a() + text_of_b())
            # (Some counts within counts are refused: those are rare, and skipped.)
            a, text_of_a = make(depth - 1)
            quantifier, least, most = random.choice([("*", 0, 3), ("+", 1, 3), ("?", 0, 1), ("{2}", 2, 2), ("{1,3}", 1, 3), ("{0,2}", 0, 2), ("{2,}", 2, 4), ("{0}", 0, 0), ("??", 0, 1), ("*?", 0, 3),
                                                     ("{3,}", 3, 5), ("{0,}", 0, 2)])
            return f"({a}){quantifier}", lambda: "".join(text_of_a() for _ in range(random.randint(least, most)))
        for i in range(300):
            regex, text_of = make(4)
            with self.subTest(regex=regex):
                if "error" not in self.walker("regex", regex, n=0):
                    for _ in range(6):
                        text = text_of()
                        self.assertTrue(re.fullmatch(regex, text, re.A), (regex, text))
                        n = len(text.encode())
                        self.assertEqual(self.feed("regex", regex, text + "\0", n)[0], n, (regex, text))
                        # Counted characters of a JSON string are those that need no escape.
                        if not ("{" in regex and re.search(r'["\\\x00-\x1f]', text)):
                            string = json.dumps(text, ensure_ascii=False)
                            n = len(string.encode())
                            self.assertEqual(self.feed("schema", {"type": "string", "pattern": f"^{regex}$"}, string, n)[0], n, (regex, text))
                answers = self.walker("regex", regex, n=4, seed=i, most=60), self.walker("schema", {"type": "string", "pattern": f"^{regex}$"}, n=4, seed=i, most=60)
                for kind, answer in enumerate(answers):
                    if "a count of" in answer.get("error", ""):
                        continue
                    self.assertNotIn("error", answer)
                    for reply in answer["replies"]:
                        if reply["finished"]:
                            text = bytes.fromhex(reply["hex"]).decode()
                            text = json.loads(text) if kind else text
                            self.assertTrue(re.fullmatch(regex, text, re.A), (regex, text))

    def test_time_is_linear(self):
        """However repetitions lie within and beside each other: a token costs what the first ones did."""
        for regex, feed in (("(a+)+b", "a"), ("a*a*a*b", "a"), ("((ab)+c?)+d", "ab"), ("(a*b*)*c", "ab"), ("(a+b?)+c", "ab"), ("(a|a)*b", "a"), ("(a|b|ab)*c", "ab"), ("(a|aa)+b", "a"), ("(a?)*b", "a"),
                            ("(a{1,5})+b", "a"), ("(a{2,})*b", "a"), ("(a+){1,50}b", "a"), ("((a+)+)+b", "a"), ("((a?b?)*c?)*d", "abc"), ("(\\w+\\s?)+", "ab "), ("([a-z]+,)*[a-z]+", "ab,"), ("(.*a.*b)*c", "ab"),
                            ("([a-z]{1,200}a*)*X", "a"), ("(a{200,}b*)*c", "a"), ("[^,]*,x", "a"), ("(a*)*b", "a")):
            for kind, text, before in (("regex", regex, ""), ("schema", {"type": "string", "pattern": regex}, '"')):
                with self.subTest(kind=kind, regex=regex):
                    self.assertLess(self.feed(kind, text, before + feed * 400, 400)[2], 120)     # else what follows would take minutes
                    is_linear = lambda fed, half, ms: ms < 2.8 * half + 0.3
                    tries = [self.feed(kind, text, before + feed * 4000, 4000)]
                    while len(tries) < 5 and not is_linear(*tries[-1]):
                        tries.append(self.feed(kind, text, before + feed * 4000, 4000))
                    self.assertEqual(tries[0][0], 4000)
                    self.assertTrue(is_linear(*tries[-1]), tries)

    def test_what_is_no_regular_language_or_too_large_is_refused(self):
        for regex, *parts in [("(a)\\1", "byte 3"), ("a\\b", "escape"), ("(?=a)", "byte 0"), ("(?<!a)b", "byte 0"), ("(?i)a", "byte 0"), ("a$b", "'$'"), ("a^b", "'^'"), ("(^a)", "'^'"),
                              ("(a$)|b", "'$'"), ("\\p{L}", "escape"), ("([a-z]{0,30}){0,30}x", "a count of what may be empty"), ("(a*|b){3}", "a count of what may be empty"),
                              ("(([a-z]{1,30}){1,30}){1,30}x", "count of counts"),
                              ("a++", "possessive"), ("[[:alpha:]]", "'['"), ("a{999999}", "100000"), ("(a{4000}){100}", "repetitions"), ("(ab){101}", "above 100"), ("([^a]b){11}", "above 10"), ("((ab){20}c){6}", "above 100"),
                              ("\\cA", "escape"), ("a}", "'}'"), ("a{,3}", "'{'"), ("a{x", "'{'"), ("(" * 100 + ")" * 100, "nesting"), ("[]", "class"), ("\\Qa\\E", "escape"), ("(?P<n>a)", "byte 0")]:
            with self.subTest(regex=regex):
                self.assert_refused("regex", regex, *parts)
        for regex, *parts in [("(a", "byte 0"), ("a)", "byte 1"), ("*a", "byte 0"), ("a|*", "byte 2"), ("[a", "byte 0"), ("\\", "not finished"), ("\\xg1", "hexadecimal"), ("a{3,2}", "below"),
                              ("a" * 20000, "bytes")]:
            with self.subTest(regex=regex):
                self.assert_refused("regex", regex, *parts, code="bad")
        self.assertIn("error", self.walker("regex", "[z-a]"))
        for regex, *parts in [("[a-z]*" * 201, "more than 200 repetitions"), ("([^a]?b?){1,10}" * 7, "64 classes"), ("[^a]" * 65 + "*", "64 classes")]:
            self.assert_refused("regex", regex, *parts)

    @unittest.skipUnless(GEMMA4_VOCABULARY.exists(), f"{GEMMA4_VOCABULARY} is not there")
    def test_what_can_be_read_in_too_many_ways_is_refused(self):
        walker = Walker(GEMMA4_VOCABULARY)
        self.addCleanup(walker.close)
        for kind, text in (("regex", ".?" * 20), ("regex", "[a-z]*" * 200),
                           ("schema", {"anyOf": [{"type": "string", "pattern": f".*a{i}.*b.*"} for i in range(60)]}), ("regex", ".*" * 60), ("regex", "([^a]?b*)*" * 30)):
            with self.subTest(text=str(text)[:60]):
                answer = walker(kind, text, n=1, most=10)
                self.assertEqual(answer.get("code"), "unsupported", answer)
                self.assertIn("too many ways", answer["error"])
        # Many of these are not read in many ways.
        for kind, text in (("regex", "[^,]*," * 60), ("regex", "(a+)+b"), ("regex", "(\\w*\\s*)*"), ("regex", "(yes|no|maybe)( and (yes|no|maybe)){0,9}"), ("regex", ".*"), ("regex", "(" + "|".join(f"word{i}" for i in range(300)) + ")"),
                           ("schema", {"type": "object", "properties": {f"key{i}": {"type": ["string", "null"], "maxLength": 50} for i in range(100)}}), ("json", ""),
                           ("schema", {"anyOf": [{"type": "string", "enum": [f"one {i}"]} for i in range(60)]}),
                           # Large forms: 128 tools are what clients may send.
                           ("schema", {"type": "string", "enum": [f"value number {7919 * i % 100003}" for i in range(3000)]}),
                           ("schema", {"anyOf": [{"type": "object", "properties": {"name": {"const": f"other_{i}"}, "arguments": {"type": "object", "properties": {"path": {"type": "string", "maxLength": 20}},
                                                                                                                                  "required": ["path"], "additionalProperties": False}},
                                                  "required": ["name", "arguments"], "additionalProperties": False} for i in range(128)]})):
            with self.subTest(text=str(text)[:60]):
                self.assertNotIn("error", walker(kind, text, n=1, most=10))


class GrammarTest(WalkCase):
    def test_replies_are_of_the_grammar(self):
        digits = 'root ::= sum\nsum ::= term ("+" term)*\nterm ::= [0-9] | "(" sum ")"'
        for text in self.replies("grammar", digits, n=30):
            self.assertRegex(text, r"\A[0-9+()]+\Z")
            eval(text)                                  # noqa: S307: digits, + and brackets
        for text in self.replies("grammar", 'root ::= "a" root "b" | ""', n=30):
            self.assertEqual(text, "a" * (len(text) // 2) + "b" * (len(text) // 2))

    def test_bad_grammars_say_why(self):
        for text in ("", "root ::= ", "root ::= other", 'start ::= "a"', 'root ::= "a', "root ::= [a", "]", 'root ::= "a"{3,1}', "(" * 1000, "root ::= " + "(" * 5000, "\0"):
            with self.subTest(text=text[:20]):
                answer = self.walker("grammar", text)
                self.assertIn("error", answer)
                self.assertNotIn("\n", answer["error"])
        self.assertIn("error", self.walker("grammar", "root ::= root"))


TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 14}, "unit": {"enum": ["c", "f"]},
                                     "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2}, "opts": {"type": "object", "properties": {
                                         "lang": {"type": "string", "pattern": "^[a-z]{2}$"}, "deep": {"$ref": "#/$defs/flag"}}}},
    "required": ["city"], "$defs": {"flag": {"type": "boolean"}}}}},
    {"type": "function", "function": {"name": "stop", "description": "no arguments"}},
    {"type": "function", "function": {"name": "noop", "parameters": {"type": "object", "properties": {}}}}]


def parse_gemma4(text, at):
    """A value in Gemma 4's notation, and where it ends. Strings have been replaced by \x01…\x02."""
    if text[at] == "\x01":
        end = text.index("\x02", at)
        return text[at + 1:end], end + 1
    if text[at] == "{":
        value, at = {}, at + 1
        while text[at] != "}":
            at += text[at] == ","
            key = re.compile(r"[^:,{}\[\]\x01]+").match(text, at)
            assert text[key.end()] == ":", text
            value[key[0]], at = parse_gemma4(text, key.end() + 1)
        return value, at + 1
    if text[at] == "[":
        value, at = [], at + 1
        while text[at] != "]":
            at += text[at] == ","
            item, at = parse_gemma4(text, at)
            value.append(item)
        return value, at + 1
    match = re.compile(r"true|false|null|-?\d+(\.\d+)?([eE][+-]?\d+)?").match(text, at)
    return json.loads(match[0]), match.end()


class ToolTest(WalkCase):
    def validate(self, name, arguments):
        tool = next(tool["function"] for tool in TOOLS if tool["function"]["name"] == name)
        if jsonschema:
            jsonschema.Draft202012Validator(tool.get("parameters", {"type": "object"})).validate(arguments)

    def test_bare(self):
        names = set()
        for text in self.replies("bare", TOOLS, n=20, most=1000):
            call = json.loads(text)
            self.assertEqual(list(call), ["name", "parameters"])
            self.validate(call["name"], call["parameters"])
            names.add(call["name"])
        self.assertEqual(len(names), 3)

    @unittest.skipUnless(GEMMA4_VOCABULARY.exists(), f"{GEMMA4_VOCABULARY} is not there")
    def test_gemma4(self):
        walker = Walker(GEMMA4_VOCABULARY)
        self.addCleanup(walker.close)
        answer = walker("gemma4", TOOLS, n=8, most=250)
        self.assertNotIn("error", answer)
        # Ids of the marks, which alone open and close.
        marks = {48: "\x03", 49: "\x04", 52: "\x05"}
        n_calls = 0
        for reply in answer["replies"]:
            if not reply["finished"]:
                continue
            text = bytes.fromhex(reply["hex"]).decode()
            n = {mark: text.count(name) for mark, name in ((48, "<|tool_call>"), (49, "<tool_call|>"), (52, "<|\"|>"))}
            self.assertEqual(n, {mark: reply["ids"].count(mark) for mark in marks})      # none is spelled out
            parts = re.split(r"<\|\"\|>", text)
            text = "".join(part if i % 2 == 0 else f"\x01{part}\x02" for i, part in enumerate(parts))
            at = 0
            while at < len(text):
                head = re.compile(r"<\|tool_call>call:([a-z_]+)").match(text, at)
                self.assertTrue(head, text[at:])
                arguments, at = parse_gemma4(text, head.end())
                self.assertEqual(list(arguments), sorted(arguments))
                self.validate(head[1], arguments)
                self.assertTrue(text.startswith("<tool_call|>", at))
                at += len("<tool_call|>")
                n_calls += 1
        self.assertGreater(n_calls, 3)
        for parameters, part in (({"type": "object", "properties": {"a:b": {}}}, "'a:b'"), ({"type": "object", "propertyNames": {"enum": ["k"]}}, "'propertyNames'"),
                                 ({"type": "object", "properties": {"a": {"not": {}}}}, "'not'")):
            answer = walker("gemma4", [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}])
            self.assertIn(part, answer["error"])

    def test_a_tool_that_is_not_strict_takes_any_object_where_its_schema_cannot_be_expressed(self):
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}]
        answer = self.walker("bare", tools, n=5)
        self.assertIn("'not'", answer["notes"][0])
        for text in self.replies("bare", tools):
            self.assertIsInstance(json.loads(text)["parameters"], dict)
        tools[0]["function"]["strict"] = True
        self.assert_refused("bare", tools, "'not'")

    def test_tagged(self):
        for single in (True, False):
            most = 0
            for text in self.replies("tagged", TOOLS, n=20, most=1500, single=single):
                self.assertRegex(text, r"(?s)\A<tool_call>\n.*\n</tool_call>\Z")
                calls = text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>").split("\n</tool_call>\n<tool_call>\n")
                most = max(most, len(calls))
                for call in map(json.loads, calls):
                    self.assertEqual(list(call), ["name", "arguments"])
                    self.validate(call["name"], call["arguments"])
            self.assertEqual(most > 1, not single)

    def test_calls_beside_content(self):
        # Content of a schema; any text, which then does not look like a call.
        for notation in ("tagged", "bare"):
            kinds = set()
            for text in self.replies("schema", {"type": "integer"}, notation=notation, tools=TOOLS, n=30):
                kinds.add(text[0] in "<{")
                if text[0] not in "<{":
                    self.assertIsInstance(json.loads(text), int)
            self.assertIn(False, kinds)
            for text in self.replies("text", "", notation=notation, tools=TOOLS, n=30, most=300):
                if text.lstrip(" \n\r\t").startswith(("<tool_call>", "{")):
                    json.loads(text.removeprefix("<tool_call>").split("</tool_call>")[0])

    def test_lists_that_cannot_be(self):
        function = lambda **members: [{"type": "function", "function": members}]
        for tools in ([], function(), function(name="a b"), function(name="f") * 2, function(name="f", parameters=3), [3], {}, function(name="f", parameters={"type": "string", "not": {}}, strict=True)):
            with self.subTest(tools=tools):
                self.assertIn("error", self.walker("bare", tools))
        self.assert_refused("gemma4", TOOLS, "lacks the marks")


class RunTest(WalkCase):
    """The program, with a model that says anything: random weights, at a temperature at which all are alike."""

    def setUp(self):
        self.beryl = Program(beryl)

    def ended(self, arguments, n, seeds):
        """Replies that ended by themselves."""
        texts = []
        for seed in range(seeds):
            result = self.beryl("run", self.model, "-p", "x", "--temp", "100", "--top-k", "0", "--top-p", "1", "-n", str(n), "--seed", str(seed), *arguments)
            self.assertEqual(result.returncode, 0, result.stderr)
            if int(re.search(rb"reply (\d+) tokens", result.stderr)[1]) < n:
                texts.append(result.stdout.decode().removesuffix("\n"))
        self.assertGreater(len(texts), 0)
        return texts

    def test_forms_of_a_reply(self):
        schema = self.folder / "schema.json"
        schema.write_text(json.dumps({"type": "object", "properties": {"ok": {"type": "boolean"}, "list": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3}},
                                      "required": ["ok", "list"]}))
        for text in self.ended(["--json-schema", schema], 300, 4):
            value = json.loads(text)
            self.assertEqual(list(value), ["ok", "list"])
        for text in self.ended(["--regex", "(yes|no)!{1,3}"], 30, 4):
            self.assertRegex(text, r"\A(yes|no)!{1,3}\Z")
        grammar = self.folder / "grammar.ebnf"
        grammar.write_text('root ::= "<" [a-c]+ ">"')
        for text in self.ended(["--grammar", grammar, "--device", "reference"], 60, 3):
            self.assertRegex(text, r"\A<[a-c]+>\Z")
        for text in self.ended(["--json"], 600, 4):
            self.assertIsInstance(json.loads(text), dict)

    def test_wrong_use_is_one_line(self):
        bad = self.folder / "bad.json"
        bad.write_text('{"type": "object", "not": {}}')
        for arguments, status, *parts in ((["--json", "--regex", "a"], 2, "one of"), (["--json-schema", bad], 1, "'not'"),
                                          (["--json-schema", self.folder / "none"], 1, "none"), (["--regex", "(a"], 1, "byte 0"), (["--regex", "(?=a)"], 1, "look")):
            result = self.beryl("run", self.model, "-p", "x", "--raw", *arguments)
            self.assertEqual(result.returncode, status, result.stderr)
            self.assertRegex(result.stderr.decode(), r"\Aberyl: [^\n]+\n\Z")
            for part in parts:
                self.assertIn(part, result.stderr.decode())

    def test_the_same_reply_as_without_where_the_constraint_allows_all(self):
        lengths = []
        for prompt in "abcdefgh":
            arguments = ["run", self.model, "-p", prompt, "-n", "30", "--temp", "0", "--presence-penalty", "1", "--repeat-penalty", "1.3"]
            free = self.beryl(*arguments, "--show-special").stdout.decode("utf-8", errors="replace")
            bound = self.beryl(*arguments, "--grammar", self.any_text()).stdout.decode()
            # Text in a grammar is UTF-8 and has no control tokens: where the free reply has other things, they part.
            prefix = re.split("\ufffd|<\\||\n\\Z", free)[0]
            self.assertEqual(bound[:len(prefix)], prefix)
            lengths.append(len(prefix))
        self.assertGreater(sum(lengths), 0)

    def any_text(self):
        path = self.folder / "any.ebnf"
        path.write_text("root ::= [^\\x00]*")
        return path


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    beryl, walk = sys.argv[1:3]
    if subprocess.run([walk, "/dev/null"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == SKIPPED:
        print("built without structured output")
        sys.exit(SKIPPED)
    if jsonschema is None:
        # The environment that prepare_test_data.py makes has it.
        import fetch_models
        python = fetch_models.cache_folder() / f"test-python-{sys.version_info.major}.{sys.version_info.minor}" / "bin" / "python"
        if python.exists() and pathlib.Path(sys.executable) != python and "BERYL_TEST_PYTHON" not in os.environ:
            os.execve(python, [str(python), *sys.argv], {**os.environ, "BERYL_TEST_PYTHON": "1"})
        print("without the jsonschema package: schemas are checked for JSON only", file=sys.stderr)
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
