"""What cli_test.py needs besides the program: safetensors files, a tiny model that speaks, terminals."""
import array
import json
import os
import pathlib
import pty
import re
import select
import shutil
import signal
import subprocess
import termios
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
GOLDEN_NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/golden.safetensors"))


def models_folder():
    return pathlib.Path(os.environ.get("BERYL_HOME") or pathlib.Path.home() / ".cache" / "beryl")


SMOLLM2 = pathlib.Path(os.environ.get("BERYL_SMOLLM2_GGUF") or models_folder() / "smollm2-135m-instruct-q4_1.gguf")
GEMMA3 = pathlib.Path(os.environ.get("BERYL_GEMMA3_GGUF") or models_folder() / "gemma3-270m-q4_k_m.gguf")

TYPES = {"F32": "f", "I32": "i"}


def read_header(path):
    """name -> (dtype, shape, begin, end in the file)."""
    data = pathlib.Path(path).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__", None)
    return {name: (entry["dtype"], entry["shape"], *(8 + size + offset for offset in entry["data_offsets"]))
            for name, entry in header.items()}


def read_tensors(path):
    """name -> (shape, values) of the F32 and I32 tensors."""
    data = pathlib.Path(path).read_bytes()
    tensors = {}
    for name, (dtype, shape, begin, end) in read_header(path).items():
        if dtype in TYPES:
            values = array.array(TYPES[dtype])
            values.frombytes(data[begin:end])
            tensors[name] = (shape, values.tolist())
    return tensors


# The tiny model's vocabulary: an id is a byte, except for four bytes that no UTF-8 text has.
IM_START, IM_END, END_OF_TEXT, UNUSED = 0xf8, 0xf9, 0xfa, 0xfb
SPECIAL = {IM_START: "<|im_start|>", IM_END: "<|im_end|>", END_OF_TEXT: "<|endoftext|>", UNUSED: "<|unused|>"}
STOPS = (IM_END, END_OF_TEXT)
# The same with the markers of Gemma 4, which thinks.
BOS, TURN, TURN_END, THINK, CHANNEL, CHANNEL_END, EOS = range(0xf5, 0xfc)
GEMMA4_SPECIAL = {BOS: "<bos>", TURN: "<|turn>", TURN_END: "<turn|>", THINK: "<|think|>", CHANNEL: "<|channel>",
                  CHANNEL_END: "<channel|>", EOS: "<eos>"}
# And with those of its calls.
GEMMA4_TOOLS = GEMMA4_SPECIAL | {0xc0: "<|tool_call>", 0xc1: "<tool_call|>", 0xfc: "<|\"|>", 0xfd: "<|tool>", 0xfe: "<tool|>",
                                 0xff: "<|tool_response>", 0x01: "<tool_response|>"}


def byte_characters():
    """How byte-level BPE writes each byte: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xa1, 0xac + 1), *range(0xae, 0xff + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def make_speaking_model(folder, source="llama", context=1 << 17, suppressed=(), bos=None, special=None,
                        end=IM_END):
    """A golden model with random weights, given a tokenizer of bytes and special tokens (ChatML's).

    bos: begins every prompt. end: ends a reply.
    """
    special = special or SPECIAL
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True)
    shutil.copy(GOLDEN / source / "model.safetensors", folder)
    config = json.loads((GOLDEN / source / "config.json").read_text())
    config["max_position_embeddings"] = context
    config["eos_token_id"] = end
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {character: byte for byte, character in byte_characters().items() if byte not in special}
    added = [{"id": token, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False} for token, text in special.items()]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "added_tokens": added, "normalizer": None, "pre_tokenizer": byte_level, "decoder": byte_level,
        "post_processor": None,
        "model": {"type": "BPE", "vocab": vocabulary | {text: token for token, text in special.items()}, "merges": [],
                  "unk_token": None, "byte_fallback": False, "ignore_merges": False, "fuse_unk": False,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None, "dropout": None}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "eos_token": special[end], "add_bos_token": bos is not None, "bos_token": special.get(bos)}))
    if suppressed:
        (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": list(suppressed)}))
    return folder


def chat_ids(messages):
    """A conversation in ChatML, as the tiny model's ids, with the opening of the reply."""
    ids = []
    for role, text in messages:
        ids += [IM_START, *f"{role}\n".encode(), *text, IM_END, *b"\n"]
    return ids + [IM_START, *b"assistant\n"]


def text_of(ids, special=None):
    return bytes(token for token in ids if token not in (special or SPECIAL)).decode("utf-8", errors="replace")


class Program:
    """The program under test."""

    def __init__(self, path):
        self.path = str(path)
        # Without GPUs, so that replies are compared bit for bit wherever the tests run.
        self.environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
        self.environment["CUDA_VISIBLE_DEVICES"] = ""

    def __call__(self, *arguments, stdin=b"", timeout=120, environment=None, **options):
        return subprocess.run([self.path, *map(str, arguments)], input=stdin, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, timeout=timeout, env=self.environment | (environment or {}), **options)

    def start(self, *arguments, **options):
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        return subprocess.Popen([self.path, *map(str, arguments)], env=self.environment, bufsize=0, **options)


def catches_interrupts(pid):
    """Has this process a handler for Ctrl-C?"""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.M)[1], 16) >> (signal.SIGINT - 1) & 1 == 1


def wait_until(condition, seconds=60, pause=0.01):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("waited in vain")
        time.sleep(pause)


class Terminal:
    """The program on a terminal of its own, which neither echoes nor changes what is written."""

    def __init__(self, program, *arguments, environment=None):
        try:
            self.pid, self.fd = pty.fork()
        except OSError as error:   # a bare container may have none
            raise unittest.SkipTest(f"no pseudo-terminal can be had here: {error}") from error
        if self.pid == 0:
            try:
                settings = termios.tcgetattr(0)
                settings[1] &= ~termios.OPOST
                settings[3] &= ~termios.ECHO
                termios.tcsetattr(0, termios.TCSANOW, settings)
                os.execve(program.path, [program.path, *map(str, arguments)],
                          program.environment | {"TERM": "xterm"} | (environment or {}))
            finally:
                os._exit(127)
        self.seen = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self.fd)                       # hangs up: a program that still runs ends
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def write(self, data):
        os.write(self.fd, data)

    def interrupt(self):
        """Ctrl-C as a signal: a key would also make the terminal drop output that the program has just written."""
        os.kill(self.pid, signal.SIGINT)

    def read_until(self, ending, seconds=60):
        """All that comes up to and with `ending`; the rest is kept."""
        end = time.monotonic() + seconds
        while ending not in self.seen:
            ready, _, _ = select.select([self.fd], [], [], max(0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"{ending!r} did not come, but {self.seen!r}")
            try:
                data = os.read(self.fd, 4096)
            except OSError:                     # the other side is closed
                data = b""
            if not data:
                raise EOFError(f"{ending!r} did not come, but {self.seen!r}")
            self.seen += data
        at = self.seen.index(ending) + len(ending)
        text, self.seen = self.seen[:at], self.seen[at:]
        return text

    def wait(self, seconds=60):
        """The exit status."""
        end = time.monotonic() + seconds
        while True:
            ready, _, _ = select.select([self.fd], [], [], 0.01)
            if ready:
                try:
                    self.seen += os.read(self.fd, 4096)
                except OSError:
                    pass
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > end:
                raise TimeoutError("does not end")
