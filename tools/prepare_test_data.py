#!/usr/bin/env python3
"""Make the data that the tests read but the repository does not hold.

    prepare_test_data.py DIR       DIR: where to write, BUILD/test-data

Fetches the real models (fetch_models.py), makes a Python environment with the packages of
tests/oracle/requirements.txt in the cache folder, and runs scripts of tests/oracle. Work whose results are
newer than all it is made from is not done again. Without a network a line says what is missing; tests that
need it skip themselves. Exit status: 0 made, or said what could not be had; 1 a script failed.
"""
import dataclasses
import fcntl
import pathlib
import subprocess
import sys

import fetch_models

ROOT = pathlib.Path(__file__).resolve().parent.parent
ORACLE, GOLDEN = ROOT / "tests" / "oracle", ROOT / "tests" / "golden"
REQUIREMENTS = ORACLE / "requirements.txt"


@dataclasses.dataclass(frozen=True)
class Step:
    outputs: tuple             # paths below DIR
    command: tuple             # script of tests/oracle and its arguments; {out} is DIR
    inputs: tuple              # the files it reads, besides the script itself


def cached(bundle):
    """The files that fetch_models.py puts into the cache folder."""
    return tuple(fetch_models.cache_folder() / file.path for file in fetch_models.BUNDLES[bundle].files)


def steps():
    (smollm2,), (gemma3,), vocab = cached("smollm2"), cached("gemma"), cached("vocab")
    gemma4, llama3, gpt2, templates = vocab
    vocabularies = {"gemma4": gemma4, "gemma3": gemma3, "llama3": llama3, "smollm2": smollm2, "gpt2": gpt2}
    golden = tuple(sorted(GOLDEN.glob("*/*.*")))
    names = sorted({path.parent.name for path in golden})
    golden_gguf = [Step(tuple(f"golden-gguf/{kind}/{name}.gguf" for name in names),
                        ("make_gguf.py", "--type", kind, "--out", f"{{out}}/golden-gguf/{kind}"),
                        golden + (ORACLE / "ref_forward.py",))
                   for kind in ("f32", "bf16")]
    decode_cases = Step(("decode_cases.safetensors",),
                        ("make_decode_cases.py", "{out}/decode_cases.safetensors", str(smollm2), str(gemma3)),
                        (smollm2, gemma3))
    tokenizers = [Step(tuple(f"tokenizers/{name}/{file}.json"
                             for file in ("tokenizer", "tokenizer_config", "generation_config")),
                       ("make_tokenizer_json.py", str(path), f"{{out}}/tokenizers/{name}"), (path,))
                  for name, path in vocabularies.items()]
    template_cases = Step(("template_cases.json",),
                          ("make_template_cases.py", "{out}/template_cases.json", str(templates), str(gemma4),
                           str(smollm2)),
                          (templates, gemma4, smollm2, GOLDEN / "chat_cases.json", GOLDEN / "template_cases.json"))
    return [*golden_gguf, decode_cases, *tokenizers, template_cases]


def note(text):
    print(f"test data: {text}", file=sys.stderr, flush=True)


def python_environment(requirements=REQUIREMENTS, name="test-python"):
    """The Python with the requirements; None when they cannot be had."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = fetch_models.cache_folder() / f"{name}-{version}"
    python, made_from = folder / "bin" / "python", folder / "made-from"
    recipe = requirements.read_text()
    if python.exists() and made_from.exists() and made_from.read_text() == recipe:
        return python
    note(f"making a Python environment in {folder}")
    for command in ([sys.executable, "-m", "venv", "--clear", folder],
                    [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", requirements]):
        run = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             text=True)
        if run.returncode != 0:
            lines = run.stdout.strip().splitlines() or ["no reason given"]
            note(next((line for line in lines if line.startswith("ERROR")), lines[-1]))
            return None
    made_from.write_text(recipe)
    return python


def is_done(step, out, inputs):
    outputs = [out / path for path in step.outputs]
    if not all(path.exists() for path in outputs):
        return False
    return min(path.stat().st_mtime for path in outputs) > max(path.stat().st_mtime for path in inputs)


def prepare(out):
    """False when a script failed."""
    for bundle in fetch_models.BUNDLES:          # one that cannot be had keeps no other away
        if fetch_models.fetch_all([bundle]) == 130:
            return False
    python = None
    for step in steps():
        script = ORACLE / step.command[0]
        inputs = (script, REQUIREMENTS) + step.inputs
        absent = [str(path) for path in step.inputs if not path.exists()]
        if absent:
            note(f"{script.name} lacks {', '.join(absent)}; tests that need its results are skipped")
            continue
        if is_done(step, out, inputs):
            continue
        python = python or python_environment()
        if not python:
            note("without these packages nothing is made; tests that need it are skipped")
            return True
        for path in step.outputs:
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            (out / path).unlink(missing_ok=True)
        arguments = [argument.replace("{out}", str(out)) for argument in step.command[1:]]
        if subprocess.run([python, script, *arguments], stdin=subprocess.DEVNULL).returncode != 0:
            note(f"{script.name} failed")
            return False
        if not is_done(step, out, inputs):
            note(f"{script.name} did not write all of {', '.join(step.outputs)}")
            return False
    return True


def main():
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    out = pathlib.Path(sys.argv[1]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return 0 if prepare(out) else 1


if __name__ == "__main__":
    sys.exit(main())
