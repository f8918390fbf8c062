#!/usr/bin/env python3
"""beryl pull, list and rm against servers that stall, cut, redirect, lie and refuse.

    pull_test.py BERYL [UNITTEST OPTIONS]

The servers run in this process (pull_server.py), and wait for what they have to see, so that nothing depends on time.
"""
import functools
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import unittest
import urllib.parse

from cli_support import GOLDEN, Program, Terminal, catches_interrupts, make_speaking_model, wait_until
from pull_server import Content, Hub, git_sha1, make_gguf, send_file, send_status, sha256, wait_for_client

MIB = 1 << 20
beryl = None            # path
QUICK = ("--retry-delay", "0")
PATIENCE = 200          # seconds: where a test would hang, ctest's limit is not much longer


class PullCase(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="beryl-pull-"))
        self.addCleanup(shutil.rmtree, self.folder)
        self.content = Content()
        self.addCleanup(self.content.close)
        self.hub = Hub(self.content)
        self.addCleanup(self.hub.close)
        self.store = self.folder / "store"
        self.beryl = Program(beryl)
        for name in ("HF_TOKEN", "XDG_DATA_HOME", "http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy"):
            self.beryl.environment.pop(name, None)
        self.beryl.environment |= {"BERYL_STORE": str(self.store), "HF_ENDPOINT": self.hub.origin}

    def pull(self, source, *arguments, status=0, **options):
        result = self.beryl("pull", source, *QUICK, *arguments, **options)
        self.assertEqual(result.returncode, status, result.stderr.decode())
        if status == 0:
            return result.stdout.decode().strip()
        self.assertEqual(result.stdout, b"")
        return result.stderr.decode()

    def fails(self, source, *parts, arguments=(), status=1):
        """One line says why, the last one; whatever else is there are notes."""
        lines = self.pull(source, *arguments, status=status).splitlines()
        self.assertRegex(lines[-1], r"\Aberyl: ")
        self.assertEqual([line for line in lines[:-1] if line.startswith("beryl: ") and "warning" not in line], [])
        for part in parts:
            self.assertIn(part, lines[-1])
        return lines

    def file_of(self, name):
        """The content of a model of one file, by way of the store."""
        folder = self.store / "models" / name.replace("/", "%2F")
        files = [path for path in folder.iterdir() if not path.name.startswith(".")]
        self.assertEqual(len(files), 1, files)
        return files[0].read_bytes()

    def blobs(self):
        folder = self.store / "blobs"
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []

    def partial(self):
        folder = self.store / "partial"
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []

    def listed(self):
        result = self.beryl("list")
        self.assertEqual(result.returncode, 0, result.stderr)
        return [re.split(r"\s{2,}", line) for line in result.stdout.decode().splitlines()[1:]]

    def add_gguf(self, data, name="a/m", file="m-Q4_0.gguf"):
        return self.hub.add(name, {"README.md": b"hello", file: data})

    def blob(self, data):
        """Where the content server has it."""
        return f"/blob/{sha256(data)}"


class ModelTest(PullCase):
    def test_a_folder_comes_whole_and_is_a_model_of_every_command(self):
        model = make_speaking_model(self.folder / "m", "llama")
        files = {path.name: path.read_bytes() for path in model.iterdir()}
        self.hub.add("own/tiny", files | {"README.md": b"x", "onnx/model.onnx": b"y", "pytorch_model.bin": b"z"})
        self.assertEqual(self.pull("hf:own/tiny"), "own/tiny")
        folder = self.store / "models" / "own%2Ftiny"
        self.assertEqual({path.name: path.read_bytes() for path in folder.iterdir() if path.name[0] != "."}, files)
        for name in ("own/tiny", "tiny", "hf:own/tiny"):
            for command, rest in {"inspect": [], "tokenize": ["ab"], "run": ["--raw", "-p", "ab", "-n", "2"],
                                  "trace": ["--ids", "1", "-o", self.folder / "t.safetensors"],
                                  "perplexity": [GOLDEN / "llama" / "config.json", "--ctx", "64"], "bench": ["-p", "4", "-n", "0"],
                                  "quantize": [self.folder / "q", "--format", "q8_0", "--force"]}.items():
                with self.subTest(name=name, command=command):
                    result = self.beryl(command, name, *rest)
                    self.assertEqual(result.returncode, 0, result.stderr.decode())
        ((name, size, model_format, digest),) = self.listed()
        self.assertEqual((name, model_format), ("own/tiny", "safetensors bf16"))
        lines = "".join(f"{sha256(data)}  {path}\n" for path, data in files.items())
        self.assertEqual(digest, sha256(lines.encode())[:12])
        # Nothing is asked for again.
        before = len(self.hub.asked(".json")) + len(self.content.requests)
        self.pull("hf:own/tiny")
        self.assertEqual(len(self.hub.asked(".json")) + len(self.content.requests), before)

    def test_shards_are_those_of_the_index(self):
        model = self.folder / "sharded"
        model.mkdir()
        data = (GOLDEN / "llama" / "model.safetensors").read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8:8 + size])
        header.pop("__metadata__", None)
        shards, weight_map = {}, {}
        for i, (name, entry) in enumerate(header.items()):
            shard = f"model-{i % 2 + 1:05}-of-00002.safetensors"
            begin, end = entry["data_offsets"]
            entries, content = shards.setdefault(shard, ({}, bytearray()))
            entries[name] = entry | {"data_offsets": [len(content), len(content) + end - begin]}
            content += data[8 + size + begin:8 + size + end]
            weight_map[name] = shard
        files = {"config.json": (GOLDEN / "llama" / "config.json").read_bytes(),
                 "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(),
                 "model-extra.safetensors": b"no shard"}
        for shard, (entries, content) in shards.items():
            text = json.dumps(entries).encode()
            text += b" " * (-len(text) % 8)
            files[shard] = len(text).to_bytes(8, "little") + text + bytes(content)
        self.hub.add("own/shards", files)
        self.pull("hf:own/shards")
        inspected = self.beryl("inspect", "shards")
        self.assertEqual(inspected.returncode, 0, inspected.stderr.decode())
        self.assertFalse((self.store / "models" / "own%2Fshards" / "model-extra.safetensors").exists())
        # A shard that the repository lacks is found out before anything is fetched.
        del files["model-00002-of-00002.safetensors"]
        self.hub.add("own/lacks", files)
        self.fails("hf:own/lacks", "model-00002-of-00002.safetensors", "does not have")
        files["model.safetensors.index.json"] = b'{"weight_map": {"a": "../x.safetensors"}}'
        self.hub.add("own/evil", files)
        self.fails("hf:own/evil", "../x.safetensors")

    def test_one_gguf_file_of_several(self):
        files = {f"m-{tag}.gguf": make_gguf(seed=i) for i, tag in enumerate(("Q8_0", "Q4_K_M", "F16", "UD-Q4_K_XL"))}
        self.hub.add("a/m-GGUF", files | {"mmproj-m.gguf": b"x", "config.json": b"{}"})
        self.assertEqual(self.pull("hf:a/m-GGUF:q8_0"), "a/m-GGUF:Q8_0")
        self.assertEqual(self.file_of("a/m-GGUF:Q8_0"), files["m-Q8_0.gguf"])
        result = self.beryl("pull", "hf:a/m-GGUF")
        self.assertEqual(result.stdout, b"a/m-GGUF:Q4_K_M\n")
        self.assertIn(b"there are also F16, Q8_0, UD-Q4_K_XL", result.stderr)
        self.assertEqual(self.pull("hf:a/m-GGUF:m-F16.gguf", "--name", "half"), "half")
        self.assertEqual(self.pull(f"{self.hub.origin}/a/m-GGUF/blob/main/m-UD-Q4_K_XL.gguf"), "a/m-GGUF:UD-Q4_K_XL")
        self.assertEqual([row[0] for row in self.listed()],
                         ["a/m-GGUF:Q4_K_M", "a/m-GGUF:Q8_0", "a/m-GGUF:UD-Q4_K_XL", "half"])
        self.assertEqual(self.beryl("inspect", "m-GGUF:Q8_0", "--tensors").returncode,
                         self.beryl("inspect", "half", "--tensors").returncode)
        self.fails("hf:a/m-GGUF:Q5_K_M", "'Q5_K_M'", "F16, Q4_K_M, Q8_0, UD-Q4_K_XL")
        self.fails("hf:a/m-GGUF:gguf", "no GGUF file 'gguf'")
        self.hub.add("a/twins", {"m-Q5_0.gguf": b"", "n-Q5_0.gguf": b""})
        self.fails("hf:a/twins:Q5_0", "m-Q5_0.gguf, n-Q5_0.gguf", "hf:a/twins:FILE")
        self.fails("hf:a/twins", "say which")
        self.hub.add("a/none", {"model.onnx": b""})
        self.fails("hf:a/none", "no GGUF file")

    def test_split_files_come_whole(self):
        parts = {f"Q8_0/m-Q8_0-{i + 1:05}-of-00003.gguf": make_gguf(seed=i, part=i, of=3) for i in range(3)}
        self.hub.add("a/split", parts)
        self.assertEqual(self.pull("hf:a/split:Q8_0"), "a/split:Q8_0")
        text = self.beryl("inspect", "split", "--tensors").stdout.decode()
        self.assertEqual(self.listed()[0][2], "gguf f32", text)
        folder = self.store / "models" / "a%2Fsplit:Q8_0"
        self.assertEqual(len([path for path in folder.iterdir() if path.suffix == ".gguf"]), 3)
        for path, data in parts.items():
            self.content.files[f"/x/{pathlib.PurePosixPath(path).name}"] = data
        # Any part of an address means all of them.
        self.assertEqual(self.pull(f"{self.content.origin}/x/m-Q8_0-00002-of-00003.gguf?key=1"), "m-Q8_0")
        self.assertTrue(all(request.path.endswith("?key=1") for request in self.content.asked(".gguf")))
        del self.hub.repositories["a/split"]["Q8_0/m-Q8_0-00002-of-00003.gguf"]
        self.fails("hf:a/split:Q8_0", "3 parts", "has 2")

    def test_names_that_lead_elsewhere_are_not_taken(self):
        good = make_gguf()
        self.hub.add("a/evil", {"../../evil-Q8_0.gguf": good, "/etc/evil-Q8_0.gguf": good, ".hidden-Q8_0.gguf": good,
                                "a/../b-Q8_0.gguf": good, "new\nline-Q8_0.gguf": good, "x//y-Q8_0.gguf": good})
        self.fails("hf:a/evil:Q8_0", "no GGUF file")
        self.assertEqual(self.blobs(), [])

    def test_wrong_command_lines(self):
        for arguments, *parts in ((["pull"], "SOURCE"), (["pull", "gemma"], "hf:OWNER/REPO"), (["pull", "hf:gemma"], "hf:OWNER/REPO"),
                                  (["pull", "hf:../x"], "hf:OWNER/REPO"), (["pull", "hf:a/b:"], "''"), (["pull", "hf:a/b:../c"], "'../c'"),
                                  (["pull", "ftp://a/b.gguf"], "expected"), (["pull", "https://"], "no address"),
                                  (["pull", "https://example.com/model.bin"], ".gguf"), (["pull", "hf:a/b@..:c"], "'..'"),
                                  (["pull", "hf:a/b", "--name", "../x"], "--name"), (["pull", "hf:a/b", "--sha256", "12"], "--sha256"),
                                  (["pull", "hf:a/b", "--connections", "0"], "--connections"), (["rm"], "NAME")):
            with self.subTest(arguments=arguments):
                result = self.beryl(*arguments)
                self.assertEqual(result.returncode, 2, result.stderr)
                self.assertRegex(result.stderr.decode(), r"\Aberyl: [^\n]+\n\Z")
                for part in parts:
                    self.assertIn(part, result.stderr.decode())
        for name, value in (("HF_TOKEN", "a\r\nX: y"), ("HF_ENDPOINT", "nowhere")):
            environment = self.beryl.environment
            self.beryl.environment = environment | {name: value}
            self.assertIn(name, self.pull("hf:a/b", status=2))
            self.beryl.environment = environment
        self.assertFalse(self.store.exists())

    def test_what_is_published_but_cannot_be_used_is_kept_with_a_warning(self):
        self.add_gguf(b"GGUF of the future")
        result = self.beryl("pull", "hf:a/m")
        self.assertEqual(result.returncode, 0)
        self.assertIn(b"beryl cannot use it", result.stderr)
        self.assertEqual(self.listed()[0][2], "not usable")

    def test_an_update_replaces_and_frees(self):
        first, second = make_gguf(seed=1), make_gguf(seed=2)
        self.add_gguf(first)
        self.pull("hf:a/m")
        self.add_gguf(second)
        self.pull("hf:a/m")
        self.assertEqual(self.file_of("a/m:Q4_0"), second)
        self.assertEqual(self.blobs(), [sha256(second)])

    def test_a_pull_repairs_what_is_damaged(self):
        data = make_gguf()
        self.add_gguf(data)
        self.pull("hf:a/m")
        blob = self.store / "blobs" / sha256(data)
        blob.chmod(0o644)
        blob.write_bytes(data[:-1] + b"x")
        result = self.beryl("pull", "hf:a/m")
        self.assertIn(b"damaged in the store", result.stderr)
        self.assertEqual(self.file_of("a/m:Q4_0"), data)
        blob.unlink()                                   # or gone
        self.pull("hf:a/m")
        self.assertEqual(self.file_of("a/m:Q4_0"), data)

    def test_a_name_belongs_to_one_source(self):
        self.add_gguf(make_gguf())
        self.add_gguf(make_gguf(), name="b/m")
        self.pull("hf:a/m", "--name", "mine")
        self.fails("hf:b/m", "'mine'", "hf:a/m", arguments=("--name", "mine"))


class NameTest(PullCase):
    def setUp(self):
        super().setUp()
        self.data = make_gguf()
        for name in ("one/gemma", "two/gemma", "one/llama"):
            self.add_gguf(self.data, name=name, file=f"{name[4:]}-Q4_0.gguf")
            self.pull(f"hf:{name}")

    def line(self, *arguments, status=1):
        result = self.beryl(*arguments)
        self.assertEqual(result.returncode, status, result.stderr)
        self.assertRegex(result.stderr.decode(), r"\Aberyl: [^\n]+\n\Z")
        return result.stderr.decode()

    def test_unknown_names_are_one_line_with_those_near(self):
        text = self.line("inspect", "lama")
        self.assertIn("no model of this name", text)
        self.assertIn("near: one/llama:Q4_0", text)
        self.assertIn("beryl list", self.line("inspect", "zzzzzzz"))
        self.assertIn("beryl pull 'hf:x/y'", self.line("inspect", "hf:x/y"))
        self.assertIn("one/gemma:Q4_0 or two/gemma:Q4_0", self.line("inspect", "gemma"))
        self.assertIn("one/llama", self.line("rm", "llamma"))
        self.assertIn("too long", self.line("inspect", "x" * 5000))

    def test_a_path_comes_before_a_name(self):
        (self.folder / "llama").mkdir()
        self.assertIn("config.json", self.beryl("inspect", "llama", cwd=self.folder).stderr.decode())
        # Help needs no model.
        self.assertEqual(self.beryl("inspect", "nothing", "--help").returncode, 0)

    def test_rm_takes_what_no_name_uses(self):
        self.assertEqual(self.blobs(), [sha256(self.data)])
        for name in ("one/gemma", "llama"):
            self.assertIn(b"0 B are free", self.beryl("rm", name).stderr)
        self.assertEqual(self.blobs(), [sha256(self.data)])
        result = self.beryl("rm", "gemma")
        self.assertRegex(result.stderr.decode(), r"removed two/gemma:Q4_0, [\d.]+ kB are free again")
        self.assertEqual((self.blobs(), self.listed()), ([], []))
        self.assertIn("no model 'gemma'", self.line("rm", "gemma"))
        self.assertEqual(sorted(path.name for path in self.store.rglob("*") if not path.is_dir()), ["lock"])

    def test_a_damaged_manifest_harms_nothing_else(self):
        manifest = self.store / "models" / "one%2Fllama:Q4_0" / ".beryl.json"
        text = manifest.read_text()
        for damage in ("", "{}", "nonsense", text.replace('"llama-Q4_0.gguf"', '"../../x"'), text[:40], "[" * 100000):
            manifest.write_text(damage)
            result = self.beryl("list")
            self.assertEqual(result.returncode, 0)
            self.assertIn(b"is damaged" if "x" not in damage else b"no pull wrote", result.stderr)
            self.assertIn("is damaged", self.line("inspect", "one/llama"))   # and is not said to be unknown
            self.assertEqual([line.split()[0] for line in result.stdout.decode().splitlines()[1:]], ["one/gemma:Q4_0", "two/gemma:Q4_0"])
        self.assertEqual(self.beryl("rm", "one/gemma").returncode, 0)
        self.assertEqual(self.blobs(), [sha256(self.data)])   # the damaged one may mean it
        self.pull("hf:one/llama")
        self.assertEqual(len(self.listed()), 2)

    def test_what_is_wrong_with_a_manifest_is_said_and_rm_takes_it(self):
        manifest = self.store / "models" / "one%2Fllama:Q4_0" / ".beryl.json"
        text = manifest.read_text()
        size = f'"bytes": {len(self.data)}'
        for damage, part in ((text[:-3], "is no JSON from byte"), ("[]", "an object with 'name' was expected"), (text.replace('"source"', '"x"'), "'source' is missing"),
                             (text.replace("false", '"no"'), "'is_folder' is of type string, boolean was expected"), (text.replace('"files"', '"files": 3, "x"'), "'files' is of type number"),
                             (text.replace('"files"', '"files": [], "x"'), "it has no files"), (text.replace(size, '"bytes": -5'), "'bytes' is '-5', a file's size was expected"),
                             (text.replace(size, '"bytes": 1e300'), "'bytes' is"), (text.replace(size, f'"bytes": {2**63 - 1}'), "'bytes' is"),
                             (text.replace('"one/llama:Q4_0"', '"two/gemma:Q4_0"'), "that of 'two/gemma:Q4_0'"), (text.replace(sha256(self.data), "", 1), "no pull wrote"),
                             (None, "is missing")):
            with self.subTest(part=part, damage=damage):
                if damage is None:
                    manifest.unlink()
                else:
                    manifest.write_text(damage)
                shown = self.beryl("list").stderr.decode()
                self.assertIn(part, shown)
                self.assertIn("beryl rm one/llama:Q4_0", shown)
                self.assertIn(part, self.line("inspect", "one/llama"))
        self.assertIn(b"removed one/llama:Q4_0", self.beryl("rm", "llama").stderr)
        self.assertEqual(self.beryl("list").stderr, b"")
        # Whatever a killed run has left; and while there is a damaged model, it is not said that there are none.
        def leave_some():
            (self.store / "models" / f".{os.getpid()}-two%2Fgemma:Q4_0" / "x").mkdir(parents=True)
        self.assertEqual(self.beryl("rm", "two/gemma", preexec_fn=leave_some).returncode, 0)
        (self.store / "models" / "one%2Fgemma:Q4_0" / ".beryl.json").write_text("")
        self.assertRegex(self.beryl("list").stderr, rb"\Aberyl: warning: [^\n]*is damaged[^\n]*\n\Z")
        self.pull("hf:two/gemma")
        # A name that may mean a damaged model does not silently mean another.
        (self.store / "models" / "one%2Fgemma:Q4_0" / ".beryl.json").write_text("")
        self.assertIn("one/gemma:Q4_0 or two/gemma:Q4_0", self.line("inspect", "gemma"))

    def test_files_that_are_gone_are_told_by_list_and_by_every_use(self):
        blob = self.store / "blobs" / sha256(self.data)
        blob.chmod(0o644)
        for damage, part in ((lambda: blob.write_bytes(b"GGUF"), f"has 4 bytes, {len(self.data)} were expected"), (blob.unlink, "is not there")):
            damage()
            for name, *_, digest in self.listed():
                self.assertRegex(digest, f"^damaged: its file '[a-z]+-Q4_0.gguf' {part}.*pull it again")
            self.assertRegex(self.line("inspect", "llama"), f"'one/llama:Q4_0' is damaged: .*{part}.*pull it again")
        self.pull("hf:one/llama")
        self.assertEqual({digest for *_, digest in self.listed()}, {sha256(self.data)[:12]})

    def test_a_pull_that_only_compares_is_no_second_model(self):
        before = self.beryl("list").stdout
        (self.store / "incomplete").mkdir(exist_ok=True)
        shutil.copy(self.store / "models" / "one%2Fllama:Q4_0" / ".beryl.json", self.store / "incomplete" / "one%2Fllama:Q4_0.json")
        self.assertEqual(self.beryl("list").stdout, before)

    def test_an_empty_name_is_none(self):
        for option in ("--name", "--sha256"):
            self.assertIn(f"{option} is empty", self.line("pull", "hf:one/llama", option, "", status=2))

    def test_a_store_that_is_no_folder(self):
        (self.folder / "plain").write_text("")
        for place in ("/dev/null", self.folder / "plain", self.folder / "plain" / "store"):
            self.beryl.environment["BERYL_STORE"] = str(place)
            for command in (["list"], ["rm", "llama"], ["inspect", "llama"], ["pull", "hf:one/llama"]):
                with self.subTest(place=place, command=command):
                    self.assertRegex(self.line(*command), f"{place}: .* no folder .*BERYL_STORE")
        self.assertIn("no such file or folder", self.line("inspect", "llama"))
        self.beryl.environment["BERYL_STORE"] = str(self.folder / "nowhere")
        result = self.beryl("list")
        self.assertEqual((result.returncode, result.stderr.startswith(b"no models in ")), (0, True))

    def test_the_store_lies_where_it_is_told(self):
        for variables, place in (({"XDG_DATA_HOME": self.folder / "xdg"}, "xdg/beryl"),
                                 ({"BERYL_STORE": "here"}, "here"),
                                 ({"XDG_DATA_HOME": "relative", "HOME": self.folder / "home"}, "home/.local/share/beryl")):
            environment = {key: value for key, value in self.beryl.environment.items() if key != "BERYL_STORE"}
            self.beryl.environment = environment | {key: str(value) for key, value in variables.items()}
            self.pull("hf:one/llama", cwd=self.folder)
            self.assertEqual(self.beryl("inspect", "llama", cwd=self.folder).stdout, self.beryl("inspect", "llama:Q4_0", cwd=self.folder).stdout)
            self.assertTrue((self.folder / place / "models").exists())


class TransferTest(PullCase):
    def test_ranges_come_side_by_side_and_none_twice(self):
        data = make_gguf(9 * MIB // 4)
        source = self.add_gguf(data)
        side_by_side = threading.Barrier(3)

        def held(handler, request):
            if request.begin:                           # all but the first, which finds out that there are ranges
                side_by_side.wait(60)
            send_file(handler, request, data)
        self.content.faults[self.blob(data)] = [held] * 4
        self.pull(source, "--connections", "3")
        self.assertEqual(self.file_of("a/m:Q4_0"), data)
        ranges = sorted((request.begin, request.end) for request in self.content.asked(self.blob(data)))
        self.assertEqual([begin for begin, _ in ranges], [0] + [end for _, end in ranges[:-1]])
        self.assertEqual(ranges[-1][1], len(data))
        # The hub was asked once; then the place it named.
        self.assertEqual(len(self.hub.asked("m-Q4_0.gguf")), 1)

    def test_cut_transfers_go_on_where_they_were(self):
        data = make_gguf(4 * MIB // 4)
        source = self.add_gguf(data)
        self.content.always[self.blob(data)] = functools.partial(send_file, data=data, keeps=300_000)
        self.pull(source)
        self.assertEqual(self.file_of("a/m:Q4_0"), data)
        self.assertGreater(len({request.begin for request in self.content.asked(self.blob(data))}), 10)

    def test_a_server_that_stalls(self):
        data = make_gguf(2 * MIB // 4)
        source = self.add_gguf(data)
        self.content.faults[self.blob(data)] = [functools.partial(send_file, data=data, keeps=100_000, then=wait_for_client),
                                                lambda handler, request: wait_for_client(handler)]
        text = self.beryl("pull", source, *QUICK, "--stall", "0.5")
        self.assertEqual(text.returncode, 0, text.stderr)
        self.assertIn(b"nothing came for 0.5 s", text.stderr)
        self.assertEqual(self.file_of("a/m:Q4_0"), data)

    def test_a_server_that_stalls_for_ever_is_given_up(self):
        source = self.add_gguf(make_gguf())
        self.hub.always["/revision/main"] = lambda handler, request: wait_for_client(handler)
        self.fails(source, "nothing came for 0.5 s", "tried 2 times", arguments=("--stall", "0.5", "--retries", "1"))

    def test_a_server_that_ignores_ranges(self):
        data = make_gguf(3 * MIB // 4)
        source = self.add_gguf(data)
        whole = functools.partial(send_file, data=data, ignores_range=True)
        self.content.always[self.blob(data)] = whole
        self.content.faults[self.blob(data)] = [functools.partial(whole, keeps=700_000), functools.partial(whole, keeps=900_000)]
        self.pull(source)
        self.assertEqual(self.file_of("a/m:Q4_0"), data)
        # One that always cuts at the same place comes no further, and that is noticed.
        other = make_gguf(3 * MIB // 4, seed=7)
        self.add_gguf(other, name="a/cut")
        self.content.always[self.blob(other)] = functools.partial(send_file, data=other, ignores_range=True, keeps=500_000)
        self.fails("hf:a/cut", "tried 4 times without getting further", arguments=("--retries", "3"))

    def test_a_server_that_ignores_ranges_after_it_gave_some(self):
        data = make_gguf(6 * MIB // 4)
        source = self.add_gguf(data)
        self.content.faults[self.blob(data)] = [functools.partial(send_file, data=data)]
        self.content.always[self.blob(data)] = functools.partial(send_file, data=data, ignores_range=True)
        self.pull(source)
        self.assertEqual(self.file_of("a/m:Q4_0"), data)

    def test_shorter_ranges_than_asked_for_are_taken(self):
        data = make_gguf(3 * MIB // 4)
        source = self.add_gguf(data)

        def short(handler, request):
            request.end = min(request.end, request.begin + 200_000)
            send_file(handler, request, data)
        self.content.always[self.blob(data)] = short
        self.pull(source)
        self.assertEqual(self.file_of("a/m:Q4_0"), data)

    def test_errors_that_pass(self):
        data = make_gguf(3 * MIB // 4)
        source = self.add_gguf(data)
        answer = lambda status, *headers: lambda handler, request: send_status(handler, status, headers)
        drop = lambda handler, request: setattr(handler, "close_connection", True)
        self.hub.faults["/revision/main"] = [answer(500), answer(429, ("Retry-After", "0")), drop, answer(502)]
        self.hub.faults["m-Q4_0.gguf"] = [answer(503, ("Retry-After", "Wed, 21 Oct 2015 07:28:00 GMT")), drop, answer(429)]
        self.content.faults[self.blob(data)] = [answer(503), answer(408), drop, answer(504)]
        self.pull(source, "--retries", "9")
        self.assertEqual(self.file_of("a/m:Q4_0"), data)
        self.hub.always["/revision/main"] = answer(500)
        lines = self.fails(source, "answers 500", "tried 3 times", arguments=("--retries", "2"))
        self.assertEqual(len(lines), 3)
        self.hub.always["/revision/main"] = answer(429, ("Retry-After", "86400"))
        self.fails(source, "answers 429", "wait 86400 s")
        self.hub.always["/revision/main"] = answer(418)
        self.fails(source, "answers 418")

    def test_retry_after_is_kept(self):
        source = self.add_gguf(make_gguf())
        self.hub.faults["/revision/main"] = [lambda handler, request: send_status(handler, 429, [("Retry-After", "1")])]
        result = self.beryl("pull", source, *QUICK)
        self.assertEqual(result.returncode, 0)
        self.assertIn(b"the server answers 429; goes on in 1 s", result.stderr)

    def test_refusals_say_what_to_do(self):
        source = self.add_gguf(make_gguf())
        gated = lambda handler, request: send_status(handler, 403, [("X-Error-Message", "Access to a/m is restricted\x1b[2J")])
        self.fails("hf:a/none", "answers 401", "HF_TOKEN", "Repository not found")
        for place in ("/revision/main", "m-Q4_0.gguf"):
            for status, part in ((401, "HF_TOKEN"), (403, "HF_TOKEN"), (404, "no such file"), (410, "no such file")):
                self.hub.always = {place: lambda handler, request: send_status(handler, status)}
                self.fails(source, f"answers {status}", part)
        self.hub.always = {"m-Q4_0.gguf": gated}
        self.fails(source, "restricted\\x1b[2J")
        self.beryl.environment["HF_TOKEN"] = "hf_wrong"
        self.hub.always = {"/revision/main": lambda handler, request: send_status(handler, 401)}
        lines = self.fails(source, "does not accept the token")
        self.assertNotIn("hf_wrong", "\n".join(lines))

    def test_no_server_is_one_line_at_once(self):
        self.hub.close()
        self.fails("hf:a/m", "127.0.0.1", "connect")

    def test_the_token_goes_to_the_hub_alone(self):
        data = make_gguf(3 * MIB // 4)
        source = self.add_gguf(data)
        self.beryl.environment["HF_TOKEN"] = "hf_secret"
        self.pull(source)
        self.assertEqual({request.headers.get("authorization") for request in self.hub.requests}, {"Bearer hf_secret"})
        self.assertEqual({request.headers.get("authorization") for request in self.content.requests}, {None})
        # Nor does it follow an address that is none of the hub's, or to the same host by another port or name.
        self.pull(f"{self.content.origin}/blob/{sha256(data)}.gguf", status=1)
        alias = self.hub.origin.replace("127.0.0.1", "localhost")
        self.hub.faults["m-Q4_0.gguf"] = [lambda handler, request: send_status(handler, 302, [("Location", f"{alias}/elsewhere.gguf")])]
        self.beryl("rm", "a/m")
        self.fails(source, "answers 404")
        self.assertEqual(self.hub.asked("/elsewhere.gguf")[0].headers.get("authorization"), None)
        for request in self.content.requests:
            self.assertNotIn("hf_secret", str(request.headers))

    def test_redirects(self):
        data = make_gguf(3 * MIB // 4)
        self.content.files["/d/real.gguf"] = data
        self.content.files["/x/m.gguf"] = data
        to = lambda location, status=302: lambda handler, request: send_status(handler, status, [("Location", location)] if location else [])
        for i, location in enumerate(("/d/real.gguf", "../d/real.gguf", f"{self.content.origin}/d/real.gguf", f"//127.0.0.1:{self.content.port}/d/real.gguf")):
            with self.subTest(location=location):
                self.content.always["/x/m.gguf"] = to(location, (301, 302, 303, 307)[i])
                self.assertEqual(self.pull(f"{self.content.origin}/x/m.gguf", "--name", f"m{i}"), f"m{i}")
                self.assertEqual(self.file_of(f"m{i}"), data)
        for location, part in (("/x/m.gguf", "more than 10 redirects"), ("file:///etc/passwd", "protocol 'file'"), ("", "no address"),
                               ("http://", "no address"), ("gopher://x/", "gopher")):
            with self.subTest(location=location):
                self.content.always["/x/m.gguf"] = to(location)
                self.fails(f"{self.content.origin}/x/m.gguf", part, arguments=("--name", "bad"))

    def test_an_address_behind_a_redirect_that_expires(self):
        data = make_gguf(9 * MIB // 4)
        source = self.add_gguf(data)
        expired = lambda handler, request: send_status(handler, 403)
        used = {}                                       # by signature: each holds for three requests

        def redirect(handler, request):
            with self.hub.lock:
                used[str(len(used))] = 0
                place = f"{self.content.origin}{self.blob(data)}?{len(used) - 1}"
            send_status(handler, 302, [("Location", place)])

        def serve(handler, request):
            with self.hub.lock:
                used[request.path.split("?")[1]] += 1
                is_valid = used[request.path.split("?")[1]] <= 3
            return send_file(handler, request, data) if is_valid else expired(handler, request)
        self.hub.always["m-Q4_0.gguf"], self.content.always[self.blob(data)] = redirect, serve
        self.pull(source, "--connections", "2")
        self.assertEqual(self.file_of("a/m:Q4_0"), data)
        self.assertGreater(len(used), 2)
        self.hub.always.clear()
        # One that never holds is no endless loop.
        other = make_gguf(3 * MIB // 4, seed=5)
        self.add_gguf(other, name="a/never")
        self.content.always[self.blob(other)] = expired
        self.fails("hf:a/never", "answers 403")


class LieTest(PullCase):
    def test_digests(self):
        data = make_gguf(2 * MIB // 4)
        source = self.add_gguf(data)
        wrong = bytearray(data)
        wrong[-1] ^= 1
        self.content.faults[self.blob(data)] = [functools.partial(send_file, data=bytes(wrong))] * 8
        self.fails(source, sha256(bytes(wrong)), sha256(data), "thrown away")
        self.assertEqual((self.blobs(), self.partial()), ([], []))
        self.content.faults.clear()
        self.pull(source)
        # Of a small file, and of an address.
        model = {path.name: path.read_bytes() for path in make_speaking_model(self.folder / "m").iterdir()}
        self.hub.add("a/folder", model)
        self.hub.listed["a/folder", "config.json"] = {"blobId": git_sha1(b"other")}
        self.fails("hf:a/folder", "config.json", git_sha1(b"other"))
        self.content.files["/m.gguf"] = data
        url = f"{self.content.origin}/m.gguf"
        self.fails(url, sha256(data), "0" * 64, arguments=("--sha256", "0" * 64))
        self.assertEqual(self.pull(url, "--sha256", sha256(data).upper()), "m")
        # What is in the store already is not fetched again, and has its size all the same.
        self.content.requests.clear()
        result = self.beryl("pull", url, "--sha256", sha256(data), "--name", "again")
        self.assertRegex(result.stderr.decode(), r"again: [1-9]\S* [kM]B, .*which was there already")
        self.assertEqual(self.content.requests, [])
        sizes = {name: size for name, size, *_ in self.listed()}
        self.assertEqual(sizes["again"], sizes["m"])
        self.assertNotEqual(sizes["again"], "0 B")

    def test_lengths(self):
        data = make_gguf(2 * MIB // 4)
        source = self.add_gguf(data)
        place = self.blob(data)
        for lie, *parts in ((functools.partial(send_file, data=data + b"x"), f"{len(data) + 1} bytes", f"lists {len(data)}"),
                            (functools.partial(send_file, data=data[:-1]), f"{len(data) - 1} bytes"),
                            (functools.partial(send_file, data=data, total=5), "5 bytes"),
                            (functools.partial(send_file, data=data[:-1], ignores_range=True), f"{len(data) - 1} bytes")):
            self.content.always = {place: lie}
            self.fails(source, *parts)

        def other_range(handler, request):
            request.begin += 1
            send_file(handler, request, data)
        self.content.always = {place: other_range}
        self.fails(source, "asked for bytes 0 to", "the server sends 1 to")

        def no_range(handler, request):
            send_status(handler, 206, [], data[request.begin:request.end])
        self.content.always = {place: no_range}
        self.fails(source, "does not say which")

        def endless(handler, request):
            handler.send_response(200)
            handler.send_header("Transfer-Encoding", "chunked")
            handler.end_headers()
            while True:
                handler.wfile.write(b"10000\r\n" + bytes(1 << 16) + b"\r\n")
        self.content.always = {place: endless}
        self.fails(source, "sends more than the")
        self.content.always = {}
        self.hub.always = {"/revision/main": endless}
        self.fails(source, "sends more than")
        self.hub.always = {}
        self.hub.faults["m-Q4_0.gguf"] = [lambda handler, request: send_status(handler, 302, [("Location", "/"), ("X-Linked-Size", "7")])]
        self.fails(source, "7 bytes")
        self.hub.faults["m-Q4_0.gguf"] = [lambda handler, request: send_status(handler, 302, [("Location", "/"), ("X-Linked-ETag", f'"{"1" * 64}"')])]
        self.fails(source, "1" * 64, "run again")
        self.pull(source)

    def test_heads_without_an_end(self):
        source = self.add_gguf(make_gguf())

        def endless(handler, request):
            handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
            while True:
                handler.wfile.write(b"X-Field: value\r\n" * 1000)
        self.hub.always = {"/revision/main": endless}
        self.fails(source, "tried 1 times", arguments=("--retries", "0"))

    def test_an_encoding_that_was_not_asked_for(self):
        data = make_gguf()
        source = self.add_gguf(data)
        self.content.always = {self.blob(data): functools.partial(send_file, data=data, headers=[("Content-Encoding", "gzip")])}
        self.fails(source, "encoding 'gzip'")

    def test_listings_that_are_none(self):
        source = self.add_gguf(make_gguf())
        for body in (b"", b"<html>", b"{}", b"[]", b'{"siblings": 5}', b'{"siblings": [{}]}', b'{"siblings": [{"rfilename": 1}]}',
                     b'{"siblings": [{"rfilename": "a-Q4_0.gguf", "lfs": {"sha256": "..", "size": 1}}]}',
                     b'{"siblings": [{"rfilename": "a-Q4_0.gguf", "size": -1}]}', b'{"siblings": [{"rfilename": "a-Q4_0.gguf", "size": 1e30}]}',
                     b'{"siblings": [{"rfilename": "a-Q4_0.gguf", "size": 1}, {"rfilename": "a-Q4_0.gguf", "size": 1}]}',
                     b"[" * 100_000, b'{"siblings": [{"rfilename": "\xff", "size": 1}]}'):
            with self.subTest(body=body[:80]):
                self.hub.always = {"/revision/main": lambda handler, request: send_status(handler, 200, [], body)}
                self.fails(source)

    def test_what_is_no_model_does_not_stay(self):
        self.content.files["/page.gguf"] = b"<!DOCTYPE html><html>not found</html>"
        self.fails(f"{self.content.origin}/page.gguf", "page.gguf")
        cut = make_gguf(1000)[:-100]                    # a server that believes in a shorter file
        self.content.files["/cut.gguf"] = cut
        self.fails(f"{self.content.origin}/cut.gguf", "cut.gguf")
        self.content.files["/empty.gguf"] = b""
        self.fails(f"{self.content.origin}/empty.gguf", "empty")
        self.assertEqual((self.blobs(), self.listed()), ([], []))


class AddressTest(PullCase):
    def setUp(self):
        super().setUp()
        self.data = make_gguf(5 * MIB // 4)
        self.content.files["/m.gguf"] = self.data
        self.url = f"{self.content.origin}/m.gguf"

    def version(self):
        """What the server calls the file, whichever of its answers it is."""
        return [("ETag", f'"{sha256(self.data)[:20]}"')]

    def interrupted(self, serve, *arguments, how=signal.SIGINT):
        """A pull that is interrupted when the server has sent what `serve` lets go and waits."""
        reached, leave = threading.Event(), threading.Event()
        self.addCleanup(leave.set)

        def hold(handler):
            reached.set()
            leave.wait()
        self.content.faults["/m.gguf"] = [functools.partial(serve, then=hold)]
        if not serve.keywords["headers"]:               # no version is named, so the second request asks for all of it
            self.content.faults["/m.gguf"].insert(0, functools.partial(send_file, data=serve.keywords["data"]))
        # Neither side gives up waiting, however late the signal comes on a busy machine: a second try would fetch all of it.
        process = self.beryl.start("pull", self.url, *QUICK, "--stall", "3600", *arguments)
        self.addCleanup(process.kill)
        self.assertTrue(reached.wait(PATIENCE))
        wait_until(lambda: any(path.stat().st_size >= 600_000 for path in (self.store / "partial").glob("*.part")), PATIENCE)
        self.assertIsNone(process.poll())
        process.send_signal(how)
        _, stderr = process.communicate(timeout=PATIENCE)
        leave.set()
        return process.returncode, stderr.decode()

    def test_ctrl_c_keeps_what_came(self):
        serve = functools.partial(send_file, data=self.data, keeps=700_000, headers=self.version())
        status, stderr = self.interrupted(serve)
        self.assertEqual(status, 130, stderr)
        self.assertIn("kept", stderr)
        self.assertEqual(len(self.partial()), 2)
        ((name, size, *_),) = self.listed()
        self.assertEqual(name, "m")
        n = len(self.content.requests)
        self.pull(self.url)
        self.assertGreaterEqual(self.content.requests[n].begin, 600_000)
        self.assertTrue(self.content.requests[n].headers["if-range"])
        self.assertEqual(self.file_of("m"), self.data)
        self.assertEqual(self.partial(), [])

    def test_rm_takes_what_an_interruption_left(self):
        self.interrupted(functools.partial(send_file, data=self.data, keeps=700_000, headers=self.version()))
        removed = self.beryl("rm", "m")
        self.assertEqual(removed.returncode, 0, removed.stderr)
        self.assertEqual((self.partial(), self.listed()), ([], []))

    def test_a_kill_costs_little(self):
        self.interrupted(functools.partial(send_file, data=self.data, keeps=700_000, headers=self.version()), how=signal.SIGKILL)
        self.pull(self.url)
        self.assertEqual(self.file_of("m"), self.data)

    def test_a_file_that_changed_since_is_fetched_anew(self):
        for etag in ("old", None):
            with self.subTest(etag=etag):
                old = make_gguf(5 * MIB // 4, seed=9)
                self.content.etags = etag is not None
                headers = [("ETag", f'"{etag}"')] if etag else []
                self.interrupted(functools.partial(send_file, data=old, keeps=700_000, headers=headers))
                self.pull(self.url)
                self.assertEqual(self.file_of("m"), self.data)
                self.beryl("rm", "m")

    def test_a_file_that_changes_in_between_is_fetched_anew(self):
        old = make_gguf(5 * MIB // 4, seed=9)
        self.content.faults["/m.gguf"] = [functools.partial(send_file, data=old, headers=[("ETag", '"old"')])] * 2
        result = self.beryl("pull", self.url, *QUICK)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn(b"begins anew", result.stderr)
        self.assertEqual(self.file_of("m"), self.data)
        self.beryl("rm", "m")
        number = iter(range(1000))
        self.content.always["/m.gguf"] = lambda handler, request: send_file(handler, request, self.data, [("ETag", f'"{next(number)}"')])
        self.fails(self.url, "changes while it is fetched")

    def test_a_server_that_names_no_versions(self):
        self.content.etags = False
        self.pull(self.url)
        self.assertEqual(self.file_of("m"), self.data)
        self.assertIsNone(self.content.requests[-1].begin)      # whole: ranges could be of two versions
        self.pull(self.url, "--sha256", sha256(self.data), "--name", "again")

    def test_servers_of_addresses_that_lie(self):
        send = lambda handler, request: send_status(handler, 206, [("Content-Range", "bytes 0-9/100")], self.data[:10])
        self.content.always["/m.gguf"] = send
        self.fails(self.url, "all of it was asked for")
        self.content.always["/m.gguf"] = functools.partial(send_file, data=self.data, total=1 << 60, headers=[("ETag", '"1"')])
        self.fails(self.url, "GB are needed")
        for status in (401, 403):
            self.content.always["/m.gguf"] = lambda handler, request: send_status(handler, status)
            self.fails(self.url, "HF_TOKEN is for the hub alone")
        self.assertEqual((self.partial(), self.listed()), ([], []))

    def test_secrets_of_an_address_are_not_shown(self):
        url = self.url.replace("//", "//user:hunter2@") + "?key=hunter3"
        result = self.beryl("pull", url, *QUICK)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.content.files.clear()
        self.beryl("rm", "m")
        lines = self.pull(url, status=1)
        everything = result.stderr.decode() + lines + "".join(path.read_text() for path in self.store.rglob("*.json"))
        self.assertNotIn("hunter", everything)


class TogetherTest(PullCase):
    def test_two_pulls_of_one_model(self):
        data = make_gguf(3 * MIB // 4)
        for second_name in (None, "other"):             # of one name, and of two that share the file
            with self.subTest(second_name=second_name):
                source = self.add_gguf(data)
                self.content.requests.clear()
                reached, go_on = threading.Event(), threading.Event()

                def held(handler, request):
                    reached.set()
                    go_on.wait(60)
                    send_file(handler, request, data)
                self.content.faults[self.blob(data)] = [held]
                first = self.beryl.start("pull", source)
                self.assertTrue(reached.wait(60))
                second = self.beryl.start("pull", source, *(["--name", second_name] if second_name else []))
                seen = b""
                while b"waits for it" not in seen:
                    chunk = os.read(second.stderr.fileno(), 4096)
                    self.assertTrue(chunk, seen)
                    seen += chunk
                self.assertIn("being fetched right now", self.beryl("rm", "a/m").stderr.decode())
                for _, _, *_, state in self.listed():
                    self.assertEqual(state, "being fetched right now")
                go_on.set()
                for process in (first, second):
                    _, stderr = process.communicate(timeout=60)
                    self.assertEqual(process.returncode, 0, stderr)
                begins = [request.begin for request in self.content.asked(self.blob(data))]
                self.assertEqual(len(begins), len(set(begins)))
                for name in filter(None, ("a/m", second_name)):
                    self.assertEqual(self.beryl("rm", name).returncode, 0)
                self.assertEqual(self.blobs(), [])

    def test_many_pulls_and_removals_at_once(self):
        data = [make_gguf(seed=i) for i in range(3)]
        for i in range(3):
            self.add_gguf(data[i], name=f"a/m{i}")
        failures = []

        def work(i):
            for _ in range(6):
                result = self.beryl("pull", f"hf:a/m{i}", *QUICK)
                if result.returncode != 0:
                    failures.append(result.stderr)
                result = self.beryl("rm", f"a/m{(i + 1) % 3}")
                if result.returncode != 0 and b"no model" not in result.stderr and b"right now" not in result.stderr:
                    failures.append(result.stderr)
        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])
        for i in range(3):
            self.pull(f"hf:a/m{i}")
            self.assertEqual(self.file_of(f"a/m{i}:Q4_0"), data[i])
        self.assertEqual(self.blobs(), sorted(map(sha256, data)))
        self.assertEqual(self.partial(), [])


class DiskTest(PullCase):
    def test_a_full_disk_is_one_line_and_what_came_is_kept(self):
        data = make_gguf(3 * MIB // 4)
        source = self.add_gguf(data)
        def limit():   # a file may have 2 MB: as on a full disk, but with another word for it
            resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))
        text = self.pull(source, "--connections", "1", status=1, preexec_fn=limit, restore_signals=False)
        self.assertRegex(text.splitlines()[-1], r"\Aberyl: .*\.part: cannot write: File too large\Z")
        n = len(self.content.requests)
        self.pull(source, "--connections", "1")
        self.assertGreaterEqual(self.content.requests[n].begin, 1_000_000)
        self.assertEqual(self.file_of("a/m:Q4_0"), data)

    def test_too_little_space_is_told_before(self):
        source = self.add_gguf(make_gguf())
        self.hub.listed["a/m", "m-Q4_0.gguf"] = {"lfs": {"sha256": "1" * 64, "size": 1 << 43}}
        self.fails(source, "8796.09 GB are needed", "are free")
        self.assertEqual(self.hub.asked("m-Q4_0.gguf"), [])

    def test_a_store_that_cannot_be(self):
        source = self.add_gguf(make_gguf())
        (self.folder / "file").write_text("")
        self.beryl.environment["BERYL_STORE"] = str(self.folder / "file" / "store")
        self.fails(source, "file/store")
        self.assertEqual(self.beryl("list").returncode, 1)


class ShownTest(PullCase):
    def test_a_bar_on_a_terminal_and_lines_elsewhere(self):
        data = make_gguf(3 * MIB // 4)
        source = self.add_gguf(data)
        with Terminal(self.beryl, "pull", source) as terminal:
            self.assertEqual(terminal.wait(), 0)
            self.assertRegex(terminal.seen, rb"\r\x1b\[K\[#*\.*\] +\d+ %  [\d.]+ [kMG]?B")
            self.assertTrue(terminal.seen.endswith(b"a/m:Q4_0\n"))
        self.beryl("rm", "a/m")
        result = self.beryl("pull", source)
        self.assertNotIn(b"\r", result.stderr)
        lines = result.stderr.decode().splitlines()
        self.assertRegex(lines[0], r"\Aa/m:Q4_0: 1 file, 3\.\d+ MB\Z")
        self.assertRegex(lines[-1], rf"\Aa/m:Q4_0: 3\.\d+ MB, gguf f32, sha256 {sha256(data)}, as published\Z")
        self.assertTrue(all(re.match(r"\d+ %, ", line) for line in lines[1:-1]), lines)

    def test_ctrl_c_while_it_waits(self):
        source = self.add_gguf(make_gguf())
        self.hub.always["/revision/main"] = lambda handler, request: send_status(handler, 429, [("Retry-After", "600")])
        process = self.beryl.start("pull", source)
        self.assertIn(b"goes on in 600 s", process.stderr.read(50) + os.read(process.stderr.fileno(), 4096))
        self.assertTrue(catches_interrupts(process.pid))
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 130, stderr)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    beryl = sys.argv[1]
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
