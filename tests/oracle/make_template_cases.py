#!/usr/bin/env python3
"""Render chat templates with jinja2, for the tests of beryl's own engine.

    make_template_cases.py OUT TEMPLATES MODEL...    TEMPLATES: chat-templates.json of the cache folder
                                                     MODEL: GGUF files whose templates are rendered as well

jinja2 is set up as Hugging Face's transformers does it. Every template meets every conversation of
chat_cases.json and template_cases.json; each snippet of the latter is rendered with its variables. OUT gets
the sources, the inputs, and for each pair the text, or {"error": why}.
"""
import json
import pathlib
import sys

import gguf
import jinja2
import jinja2.ext
import jinja2.sandbox

GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "golden"
DATE = "01 Jan 2026"        # what strftime_now gives
BOS, EOS = "<bos>", "<eos>"


class Generation(jinja2.ext.Extension):
    """The tag that marks what a model wrote; it changes nothing of the text."""
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


class Namespace(jinja2.utils.Namespace):
    """Without names that begin with an underscore."""

    def __init__(*args, **kwargs):
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            Namespace.check(name)
        jinja2.utils.Namespace.__init__(self, given)

    def __setitem__(self, name, value):
        Namespace.check(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)

    @staticmethod
    def check(name):
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(name)


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def environment():
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                       extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = to_json
    env.globals.update(raise_exception=raise_exception, strftime_now=lambda format: DATE, namespace=Namespace)
    return env


def render(env, source, variables):
    try:
        return env.from_string(source).render(**variables)
    except Exception as error:      # whatever it is, beryl has to refuse it too
        return {"error": f"{type(error).__name__}: {error}"[:200]}


def main():
    out, templates, *models = sys.argv[1:]
    sources = json.loads(pathlib.Path(templates).read_text())
    for model in models:
        field = gguf.GGUFReader(model).fields.get("tokenizer.chat_template")
        if field:
            sources[pathlib.Path(model).name] = field.contents()
    own = json.loads((GOLDEN / "template_cases.json").read_text())
    conversations = {**json.loads((GOLDEN / "chat_cases.json").read_text())["cases"], **own["conversations"]}
    for variables in conversations.values():
        for name, value in (("tools", None), ("documents", None), ("bos_token", BOS), ("eos_token", EOS)):
            variables.setdefault(name, value)
    env = environment()
    result = {
        "date": DATE,
        "templates": sources,
        "conversations": conversations,
        "rendered": {name: {case: render(env, source, variables) for case, variables in conversations.items()}
                     for name, source in sources.items()},
        "variables": own["variables"],
        "snippets": [{"source": source, "rendered": render(env, source, own["variables"])}
                     for source in own["snippets"]],
    }
    pathlib.Path(out).write_text(json.dumps(result, ensure_ascii=False))


if __name__ == "__main__":
    main()
