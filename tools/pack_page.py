#!/usr/bin/env python3
"""The chat page as one document inside the program: a C++ file with its text, its Content-Security-Policy and its ETag.

    pack_page.py OUTPUT.cpp PAGE_FOLDER MARKDOWN_IT.js DOMPURIFY.js [COPYRIGHT_FILE...]

All scripts and styles are inline, and the policy names each by its digest: nothing else runs, and nothing is fetched but what the page asks of
its own server. Each library is preceded by its package's copyright file, where that is there.
"""
import base64
import hashlib
import pathlib
import re
import sys

OWN_SCRIPTS = ["storage.js", "api.js", "markdown.js", "view.js", "page.js"]


def script_text(path):
    """A file that can stand between <script> and </script> as it is."""
    text = path.read_text(encoding="utf-8")
    # HTML looks for these two within scripts. In strings, regular expressions and comments a backslash changes nothing.
    text = text.replace("<!--", "<\\!--")
    text = re.sub(r"</(script)", r"<\\/\1", text, flags=re.I)
    # The map of a minified file would be fetched by developer tools.
    return re.sub(r"^//# sourceMappingURL=.*$", "", text, flags=re.M)


def comment(path):
    return "/*\n" + path.read_text(encoding="utf-8").replace("*/", "* /") + "*/\n" if path.exists() else ""


def digest(text):
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def string_literals(text):
    """A C++ expression, a line a line of the text."""
    lines = []
    for line in text.splitlines(keepends=True):
        escaped = "".join(c if 0x20 <= b < 0x7f and c not in '"\\?' else f"\\{b:03o}" for b, c in ((b, chr(b)) for b in line.encode()))
        lines.append(f'"{escaped}"')
    return "\n    ".join(lines)


def main():
    output, folder, markdown_it, purify, *notices = [pathlib.Path(each) for each in sys.argv[1:]]
    libraries = [(comment(notices[i]) if i < len(notices) else "") + script_text(path) for i, path in enumerate([markdown_it, purify])]
    theme = script_text(folder / "theme.js")
    style = (folder / "page.css").read_text(encoding="utf-8")
    scripts = [*libraries, "\n".join(script_text(folder / name) for name in OWN_SCRIPTS)]
    html = (folder / "page.html").read_text(encoding="utf-8")
    html = html.replace("{{head}}", f"<style>{style}</style>\n<script>{theme}</script>")
    html = html.replace("{{scripts}}", "\n".join(f"<script>{text}</script>" for text in scripts))
    assert "\r" not in html, "HTML turns these into newlines, and the digests would not fit"
    policy = "; ".join([
        "default-src 'none'", "script-src " + " ".join(map(digest, [theme, *scripts])), "style-src " + digest(style),
        "connect-src 'self'", "img-src data:", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
        "require-trusted-types-for 'script'", "trusted-types dompurify"])
    etag = '"' + hashlib.sha256((html + policy).encode()).hexdigest()[:32] + '"'
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(f"""// Made by tools/pack_page.py.
#include "server/page.h"

namespace beryl::server {{

const Page kPage = {{
    {string_literals(html)},
    {string_literals(policy)},
    {string_literals(etag)}}};

}}  // namespace beryl::server
""")


if __name__ == "__main__":
    main()
