#!/usr/bin/env python3
"""Ids of texts on which tokenizers tend to differ, by the reference implementation (the `tokenizers` package).

Usage: make_tokenizer_edges.py TOKENIZERS_FOLDER OUTPUT.json

TOKENIZERS_FOLDER holds NAME/tokenizer.json as make_tokenizer_json.py writes them. The output is committed as
tests/golden/tokenizer_edges.json. Texts: white space of all kinds next to letters, marks, numbers of all kinds, planes,
runs, punctuation, and random mixtures of these with a fixed seed. Special tokens are not recognised.

Gemma 3 is left out: its SentencePiece scores order merges by token, a merge list by pair, so the two may break ties
differently on such mixtures.
"""

import json
import pathlib
import random
import sys

from tokenizers import Tokenizer

NAMES = ["gemma4", "llama3", "smollm2", "gpt2"]
SPACES = "\t\n\x0b\x0c\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u180e\u2000\u2003\u2009\u200a\u200b\u2028\u2029\u202f\u205f\u2060\u3000\ufeff"
LETTERS = "aZéßİıŀσςſΚК\u0301\u0308אبगकाไ안あア你𐐀𝐀𒀀"
NUMBERS = "09²½Ⅷ①٣०๓〇一𝟗"
SIGNS = "'’\".,!?-_()[]{}<>|/\\@#$%^&*+=~`§©€∑→😀👍🏽\u200d🏳\ufe0f"


def texts():
    for space in SPACES:
        yield f"a{space}b{space}{space}c"
        yield f"{space}1{space}'s{space}\n"
    for number in NUMBERS:
        yield f"a{number}{number}{number}{number}b {number}"
    for ending in ["'s", "'T", "'re", "'VE", "'m", "'ll", "'D", "'ſ", "’s"]:
        yield f"we{ending} x{ending}{ending}"
    for n in (2, 3, 4, 7, 16, 31, 32, 65):
        yield "x" + " " * n + "y" + "\n" * n + "z" + "\t" * n + "." * n
    source = random.Random(20260101)
    pools = [SPACES, LETTERS, NUMBERS, SIGNS, " ", "the quick brown fox", "\r\n "]
    for _ in range(150):
        yield "".join(source.choice(source.choice(pools)) for _ in range(source.randint(1, 24)))


def main():
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    folder = pathlib.Path(sys.argv[1])
    tokenizers = {}
    for name in NAMES:
        contents = json.loads((folder / name / "tokenizer.json").read_text(encoding="utf-8"))
        # Only what is never special is matched in text, so that control tokens stay text.
        contents["added_tokens"] = [token for token in contents["added_tokens"] if not token["special"]]
        tokenizers[name] = Tokenizer.from_str(json.dumps(contents))
    cases = [
        {"text": text, **{name: tokenizers[name].encode(text, add_special_tokens=False).ids for name in NAMES}}
        for text in texts()
    ]
    lines = ",\n".join(json.dumps(case, ensure_ascii=True, separators=(",", ":")) for case in cases)
    pathlib.Path(sys.argv[2]).write_text('{"cases": [\n' + lines + "\n]}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
