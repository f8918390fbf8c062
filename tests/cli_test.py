#!/usr/bin/env python3
"""The program as a user meets it: subcommands, streams, exit statuses, terminals.

    cli_test.py BERYL tiny|real [UNITTEST OPTIONS]

tiny: what needs no download. The golden models, and one of them with a tokenizer of bytes, whose replies are compared
with the greedy ids of `beryl trace` (which in turn are compared with the golden files).
real: SmolLM2 and Gemma 3 270M; exit status 77 when neither is there.
"""
import json
import math
import os
import pathlib
import re
import resource
import select
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import unittest

from cli_support import (BOS, CHANNEL, CHANNEL_END, EOS, GEMMA3, GEMMA4_SPECIAL, GOLDEN, GOLDEN_NAMES, IM_END, SMOLLM2,
                         SPECIAL, STOPS, THINK, TURN, TURN_END, UNUSED, Program, Terminal, catches_interrupts, chat_ids,
                         make_speaking_model, read_header, read_tensors, text_of, wait_until)

SKIPPED = 77
beryl = None            # Program
STATISTICS = re.compile(r"^loaded in [\d.]+ s \| prompt (\d+) tokens, [\d.]+ tok/s \| reply (\d+) tokens"
                        r"(?:, [\d.]+ tok/s)? \| peak memory [\d.]+ [kMG]?B(.*)$")
STATUS = re.compile(r"^context \d+ of \d+ \(\d+ %\) \| prompt (\d+) tokens, [\d.]+ tok/s \| reply (\d+) tokens(?:, [\d.]+ tok/s)?(.*)$")


class CliTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="beryl-cli-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)

    def assert_fails(self, result, status, *parts, warns=False):
        """One line on standard error, nothing else; with warns, warnings before it."""
        stderr = result.stderr.decode()
        if warns:
            stderr = re.sub(r"\A(beryl: warning: [^\n]+\n)+", "", stderr)
        self.assertEqual(result.returncode, status, stderr)
        self.assertEqual(result.stdout, b"")
        self.assertRegex(stderr, r"\Aberyl: [^\n]+\n\Z")
        for part in parts:
            self.assertIn(part, stderr)

    def succeed(self, *arguments, **options):
        result = beryl(*arguments, **options)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return result

    def statistics(self, stderr):
        """(prompt tokens, reply tokens, rest) of the last line, which `run` or `chat` has written."""
        line = stderr.decode().splitlines()[-1]
        match = STATISTICS.match(line) or STATUS.match(line)
        self.assertTrue(match, stderr)
        return int(match[1]), int(match[2]), match[3]

    def trace(self, model, *arguments):
        path = self.folder / "trace.safetensors"
        result = self.succeed("trace", model, "-o", path, *arguments)
        self.assertEqual(result.stdout, b"")
        return read_tensors(path)


def ids_text(ids):
    return ",".join(map(str, ids))


class HelpTest(CliTest):
    COMMANDS = ("run", "inspect", "tokenize", "trace", "bench", "perplexity", "verify", "quantize", "pull", "list", "rm")

    def test_alone_it_helps(self):
        texts = [self.succeed(*arguments).stdout.decode() for arguments in ([], ["--help"], ["-h"], ["help"])]
        self.assertEqual(len(set(texts)), 1)
        for command in self.COMMANDS:
            self.assertRegex(texts[0], rf"(?m)^  {command} ")
        self.assertIn('beryl run model.gguf -p "', texts[0])

    def test_every_command_helps_with_usage_options_and_examples(self):
        for command in self.COMMANDS:
            text = self.succeed(command, "--help").stdout.decode()
            self.assertIn(f"Usage: beryl {command} ", text)
            self.assertEqual("--device NAME" in text, command not in ("tokenize", "quantize", "pull", "list", "rm"))
            self.assertIn(f"\n  beryl {command} ", text)
        self.assertIn("layers count from 0", self.succeed("trace", "--help").stdout.decode())

    def test_version(self):
        self.assertRegex(self.succeed("--version").stdout.decode(), r"\Aberyl \d+\.\d+\.\d+\n\Z")


class WrongUseTest(CliTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.model = make_speaking_model(cls.folder / "model")

    def test_wrong_command_lines_are_one_line_and_status_2(self):
        model, out = self.model, self.folder / "out.safetensors"
        cases = [
            (["fly"], "'fly'", "run, chat, serve, inspect"),
            (["a\nb"], "'a\\x0ab'"),
            (["--fly"], "--fly"),
            (["run"], "MODEL"),
            (["run", ""], "MODEL is empty"),
            (["run", model, "--fly"], "--fly", "beryl run --help"),
            (["run", model, "-p"], "--prompt"),
            (["run", model, "-p", "x", "y", "z"], "y"),
            (["run", model], "prompt is empty"),
            (["run", model, "-p", ""], "prompt is empty"),
            (["run", model, "--raw"], "prompt is empty"),
            (["run", model, "-p", "x", "--raw", "--system", "y"], "--system"),
            (["run", model, "-p", "x", "--raw", "--think"], "--think"),
            (["run", model, "-p", "x", "--raw", "--chat-template", "y"], "--chat-template"),
            (["run", model, "-p", "x", "--special"], "--special"),
            (["inspect"], "MODEL"),
            (["inspect", model, "--plan", "--ctx", "0"], "--ctx", "'0'"),
            (["tokenize"], "MODEL"),
            (["tokenize", model, "a", "b"], "b"),
            (["trace", model, "-p", "x"], "--output"),
            (["trace", model, "-o", out], "--ids", "--prompt"),
            (["trace", model, "-o", out, "--ids", "1", "-p", "x"], "--ids", "--prompt"),
            (["trace", model, "-o", out, "-p", ""], "empty"),
            (["trace", model, "-o", out, "--ids", "1", "--chunk", "0"], "--chunk", "'0'"),
            (["trace", model, "-o", "", "--ids", "1"], "-o"),
            (["bench"], "MODEL or --synthetic"),
            (["bench", "--synthetic", "llama3.2-1b", "--format", "q9"], "--format", "'q9'"),
            (["bench", "--synthetic", "llama3.2-1b", "--format", "q4_0,"], "--format", "''"),
            (["bench", "--synthetic", "llama3.2-1b", "--format", "q4_0", "--head", "fp8,q8_0"], "--head", "2"),
            (["bench", model, "--cache", "bf16,int4"], "--cache is 'bf16,int4'", "fp8"),
            (["bench", model, "--format", "q4_0"], "--format", "--synthetic"),
            (["bench", model, "--head", "q8_0"], "--head", "--synthetic"),
            (["bench", model, "--device", "reference", "--cache", "f32"], "--cache", "double"),
            (["bench", model, "--device", "reference", "--exact"], "--exact", "reference"),
            (["bench", model, "--device", "reference", "--activations", "bf16"], "--activations bf16", "reference"),
            (["bench", model, "--exact", "--activations", "bf16"], "--activations bf16", "--exact"),
            (["bench", model, "--activations", "f16"], "--activations is 'f16'", "bf16"),
            (["bench", model, "-o", "csv"], "-o is 'csv'", "jsonl"),
            (["bench", model, "-p", "0", "-n", "0"], "nothing to measure"),
            (["bench", model, "-p", "-1"], "-p is '-1'", "whole numbers"),
            (["bench", model, "-b", "0"], "-b is '0'"),
            (["bench", model, "-d", "1,,2"], "-d is '1,,2'"),
            (["bench", model, "--allocate", "9999999999"], "--allocate is '9999999999'"),
            (["perplexity", model], "FILE"),
            (["perplexity", model, out, "--ctx", "1"], "--ctx is '1'"),
            (["perplexity", model, out, "--ctx", "16", "--skip", "15"], "--skip is 15", "14", "16"),
            (["perplexity", model, out, "--skip", "-1"], "--skip is '-1'"),
            (["perplexity", model, out, "--against", "double"], "--against is 'double'", "reference"),
            (["perplexity", model, out, "--margin", "nan"], "--margin is 'nan'"),
            (["perplexity", model, out, "-o", "csv"], "-o is 'csv'", "json"),
            (["verify", "--filter", "no such case"], "no such case"),
            (["trace", model, "-o", out, "--ids", "1", "--greedy", "-1"], "--greedy", "'-1'"),
        ]
        for text in ("", ",", "1,", ",1", "1,,2", "1 2", "one", "1,2x", "0x1", "1.5", "1e2", "[1]", "1;2", "+1"):
            cases.append((["trace", model, "-o", out, "--ids", text], "--ids holds '"))
        for text in ("-1", "256", "1,2,99999", "1,9223372036854775807"):
            cases.append((["trace", model, "-o", out, "--ids", text], "--ids holds", "from 0 to 255"))
        cases.append((["trace", model, "-o", out, "--ids", "9223372036854775808"], "--ids holds"))
        for option, values in {"-n": ("0", "-1", "x", "1.5", "0x10", "1e3", "", " 1", "99999999999999999999"),
                               "--ctx": ("0", "99999999999"), "--threads": ("0", "1025"), "--chunk": ("0", "-5"),
                               "--temp": ("-0.1", "nan", "inf", "hot", "1,5", "0.5x"), "--top-k": ("-1", "1.0"),
                               "--top-p": ("-0.1", "1.01"), "--min-p": ("2",), "--repeat-penalty": ("0", "-1"),
                               "--presence-penalty": ("1e9",), "--frequency-penalty": ("nan",), "--seed": ("-1", "x"),
                               "--device": ("gpu", "CPU", "")}.items():
            for value in values:
                cases.append((["run", model, "-p", "x", option, value], f"'{value}'", "expected"))
        for arguments, *parts in cases:
            with self.subTest(arguments=arguments[:1] + arguments[2:]):
                self.assert_fails(beryl(*arguments), 2, *parts)
        self.assertFalse(out.exists())

    def test_values_that_look_like_options_or_lists_are_taken_as_they_are(self):
        for text in ("--help", "-n 5", "[a,b]", '"quoted"', "a\nb", "{x: y}", "'", "\\n", "@file", "%s"):
            with self.subTest(text=text):
                result = self.succeed("trace", self.model, "-o", self.folder / "t.safetensors", "-p", text)
                ids = read_tensors(self.folder / "t.safetensors")["ids"][1]
                self.assertEqual(bytes(ids).decode(), text)

    def test_the_last_of_two_values_counts(self):
        result = self.succeed("run", self.model, "-p", "x", "-n", "3", "-n", "2", "--temp", "0")
        self.assertLessEqual(self.statistics(result.stderr)[1], 2)


class FailureTest(CliTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.model = make_speaking_model(cls.folder / "model")
        cls.endless = make_speaking_model(cls.folder / "endless", suppressed=STOPS)
        # A head of NaN: every logit is.
        cls.sick = make_speaking_model(cls.folder / "sick")
        data = bytearray((cls.sick / "model.safetensors").read_bytes())
        _, _, begin, end = read_header(cls.sick / "model.safetensors")["lm_head.weight"]
        data[begin:end] = struct.pack("<H", 0x7fc0) * ((end - begin) // 2)
        (cls.sick / "model.safetensors").write_bytes(data)

    def test_files_that_are_no_models(self):
        text = self.folder / "text.gguf"
        text.write_text("This is no model.")
        empty = self.folder / "empty"
        empty.mkdir()
        commands = {"run": ["-p", "x"], "inspect": [], "tokenize": ["x"],
                    "trace": ["--ids", "1", "-o", self.folder / "out.safetensors"], "perplexity": [text]}
        for command, rest in commands.items():
            for path, *parts in ((self.folder / "absent.gguf", "absent.gguf"), (text, "GGUF"), (empty, "config.json")):
                with self.subTest(command=command, path=path.name):
                    self.assert_fails(beryl(command, path, *rest), 1, *parts)

    def test_a_model_without_a_tokenizer_takes_ids_only(self):
        self.assert_fails(beryl("run", GOLDEN / "llama", "-p", "x"), 1, "tokenizer", "--ids")
        self.assert_fails(beryl("tokenize", GOLDEN / "llama", "x"), 1, "tokenizer")
        self.assert_fails(beryl("trace", GOLDEN / "llama", "-p", "x", "-o", self.folder / "o"), 1, "tokenizer")
        self.assert_fails(beryl("perplexity", GOLDEN / "llama", __file__), 1, "tokenizer")

    def test_a_prompt_longer_than_the_context_names_both_numbers(self):
        result = beryl("run", self.model, "--raw", "--ctx", "16", "-p", "x" * 17)
        self.assert_fails(result, 1, " 17 ", " 16")

    def test_a_prompt_that_fills_the_context_gets_one_token(self):
        result = self.succeed("run", self.model, "--raw", "--ctx", "16", "-p", "x" * 16, "--temp", "0")
        self.assertLessEqual(self.statistics(b"\n".join(result.stderr.splitlines()[:1]))[1], 1)
        self.assertRegex(result.stderr.decode(), r"\nberyl: warning: [^\n]*16[^\n]*full[^\n]*\n\Z")

    def test_numbers_that_are_not_finite_end_the_reply(self):
        result = beryl("run", self.sick, "--raw", "-p", "x")
        self.assert_fails(result, 1, str(self.sick), "finite")   # no line of speeds

    def test_a_trace_of_numbers_that_are_not_finite_says_so(self):
        out = self.folder / "sick.safetensors"
        result = beryl("trace", self.sick, "--ids", "1,2", "-o", out)
        self.assert_fails(result, 1, str(self.sick), "NaN or infinite", str(out))
        self.assertTrue(any(value != value for value in read_tensors(out)["logits"][1]))
        out.unlink()
        self.assert_fails(beryl("trace", self.sick, "--ids", "1,2", "--greedy", "3", "-o", out), 1, str(self.sick), "not finite")
        self.assertFalse(out.exists())

    def test_a_perplexity_of_numbers_that_are_not_finite_names_the_first(self):
        result = beryl("perplexity", self.sick, __file__, "--ctx", "16", "--device", "cpu")
        self.assert_fails(result, 1, f"{self.sick}: the logits after token 8 of window 0 are not finite on cpu")

    def test_a_bench_of_numbers_that_are_not_finite_fails(self):
        for rest in (["-p", "0", "-n", "3"], ["-p", "3", "-n", "0"], ["-p", "3", "-n", "0", "-d", "2", "-b", "2", "-o", "jsonl"], ["--ops"]):
            with self.subTest(rest=rest):
                self.assert_fails(beryl("bench", self.sick, "--device", "cpu", "-r", "1", *rest), 1, str(self.sick), "no finite numbers")

    def test_a_bench_past_the_models_positions_ends_at_once(self):
        short = make_speaking_model(self.folder / "short", context=100)
        for rest, *parts in ((["-d", "100000"], "-d 100000", "100", "made for 100"), (["-p", "101", "-n", "0"], "-p 101", "101 positions"),
                             (["-p", "0", "-n", "51", "-d", "0,50"], "-d 50 and -n 51 need 101"), (["--ops", "-d", "90"], "made for 100")):
            with self.subTest(rest=rest):
                self.assert_fails(beryl("bench", short, "--device", "cpu", "-r", "1", *rest, timeout=20), 1, *parts)
        self.succeed("bench", short, "--device", "cpu", "-r", "1", "-p", "0", "-n", "50", "-d", "50")

    def test_a_wrong_setting_in_the_environment_is_told_by_every_command(self):
        model, out = self.model, self.folder / "out"
        commands = (["run", model, "-p", "x"], ["chat", model], ["serve", model], ["inspect", model], ["inspect", model, "--plan"],
                    ["tokenize", model, "x"], ["trace", model, "--ids", "1", "-o", out], ["bench", model], ["bench", "--read"],
                    ["perplexity", model, __file__], ["verify"], ["quantize", model, out], ["list"],
                    ["bench", model, "--device", "reference"])
        for command in commands:
            for name, value, expected in (("BERYL_CPU_TARGET", "avx1024", "one of"), ("BERYL_PIN_THREADS", "banana", " or 0 was expected")):
                with self.subTest(command=command, name=name):
                    self.assert_fails(beryl(*command, environment={name: value}, timeout=20), 1, f"{name} is '{value}'", expected)
        self.assertFalse(out.exists())
        for value in ("", "0", "1"):
            self.succeed("bench", model, "--device", "cpu", "-p", "1", "-n", "0", "-r", "1", environment={"BERYL_PIN_THREADS": value})
        self.succeed("bench", model, "--device", "cpu", "-p", "1", "-n", "0", "-r", "1", environment={"BERYL_CPU_TARGET": ""})
        self.succeed("--version", environment={"BERYL_PIN_THREADS": "banana"})

    def test_threads_that_the_system_refuses_are_one_line_that_says_what_and_which_limit(self):
        if os.getuid() != 0:
            self.skipTest("this user's other processes count, too")
        # The superuser is held to no number of processes, so somebody else runs a copy that he may read.
        self.folder.chmod(0o755)
        program = Program(shutil.copy(beryl.path, self.folder / "beryl"))

        def run(n_processes, *arguments):
            def limit():
                os.setgroups([])
                os.setregid(54321, 54321)
                resource.setrlimit(resource.RLIMIT_NPROC, (n_processes, n_processes))
                os.setreuid(54321, 54321)
            return program(*arguments, "--device", "cpu", preexec_fn=limit, environment={"HOME": str(self.folder)}, timeout=60)

        answer = ["run", self.model, "--raw", "-p", "x", "-n", "2", "--threads"]
        result = run(1, *answer, "1")
        self.assertEqual(result.returncode, 0, result.stderr.decode())   # the tokenizer needs no thread of its own
        for n_threads in (2, 4):
            self.assert_fails(run(1, *answer, n_threads), 1, f"have 1 of {n_threads} threads", "--threads asks for fewer",
                              "this user may have 1 processes and threads (ulimit -u)")
        text = self.folder / "text.txt"
        text.write_text("What nobody reads. " * 40)
        result = run(1, "perplexity", self.model, text, "--threads", "1", "--against", "reference")
        self.assertEqual(result.returncode, 0, result.stderr.decode())   # does all itself
        serve = ["serve", self.model, "--threads", "1", "--port", "0"]
        for most, what in ((1, "the engine's thread could not be started"), (2, "a thread that watches connections could not be started"),
                           (3, "the HTTP server could not be started: a thread was refused"), (4, "a thread for a connection could not be started")):
            with self.subTest(most=most):
                self.assert_fails(run(most, *serve), 1, what, f"this user may have {most} processes and threads (ulimit -u)",
                                  warns=True)

    def test_what_stands_against_listening_is_told(self):
        serve = ["serve", self.model, "--device", "cpu", "--threads", "1", "--port"]
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            self.assert_fails(beryl(*serve, port), 1, f"127.0.0.1:{port}", "Address already in use", "--port takes another", warns=True)
        self.assert_fails(beryl(*serve, "0", "--host", "192.0.2.1"), 1, "192.0.2.1:0", "--host takes an address of this machine", warns=True)
        messages = []
        for most in (*range(4, 32), 64, 96, 128):   # ever more files, until they suffice
            def limit(n_files=most):
                resource.setrlimit(resource.RLIMIT_NOFILE, (n_files, n_files))
            process = beryl.start(*serve, "0", preexec_fn=limit)
            lines = iter(lambda: process.stderr.readline().decode(), "")
            messages.append(next((line for line in lines if "warning: " not in line), ""))
            process.terminate()
            process.communicate(timeout=60)
            if "/v1" in messages[-1]:
                break
        self.assertIn("/v1", messages[-1])
        self.assertTrue(any("this process may have 64 files and connections open (ulimit -n), at least " in each for each in messages), messages)

    def test_memory_that_is_refused_says_what_is_free_and_which_context_fits(self):
        def limited(n_bytes):
            return {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_AS, (n_bytes, n_bytes))}
        run = ["run", self.model, "--raw", "-p", "x", "-n", "2", "--device", "cpu", "--threads", "1", "--temp", "0"]
        result = beryl(*run, "--ctx", 1 << 24, **limited(1 << 30))
        self.assert_fails(result, 1, "out of memory: ", " are free; a context of ", " would fit", warns=True)
        context = int(re.search(r"a context of (\d+) would fit", result.stderr.decode())[1])
        self.assertGreater(context, 4096)
        self.succeed(*run, "--ctx", context * 9 // 10, **limited(1 << 30))   # the program itself takes some address space, too
        result = beryl("serve", self.model, "--device", "cpu", "--threads", "1", "--parallel", "3", "--ctx", 1 << 24, **limited(1 << 30))
        self.assert_fails(result, 1, " are free; a context of ", "for 3 sequences at once would fit", warns=True)

    def test_random_weights_that_do_not_fit_say_what_they_need(self):
        def small():
            resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        result = beryl("bench", "--synthetic", "gemma3-4b", "--format", "q8_0", "--head", "q8_0", "--device", "cpu", "--threads", "1",
                       "-p", "1", "-n", "0", preexec_fn=small)
        self.assert_fails(result, 1, "out of memory", "GB")
        status = pathlib.Path("/proc/meminfo").read_text()
        if sum(int(kb) for kb in re.findall(r"(?m)^(?:MemAvailable|SwapFree):\s+(\d+)", status)) > 200e6:
            self.skipTest("a machine with room for 70 billion weights of 32 bits")
        result = beryl("bench", "--synthetic", "llama3.1-70b", "--format", "f32", "--head", "f32", "--device", "cpu")
        self.assert_fails(result, 1, "llama3.1-70b with weights in f32 needs 560 GB", "282 GB of random weights", "are free")

    def test_standard_input_without_an_end_is_refused(self):
        with open("/dev/zero", "rb") as zeros:
            result = subprocess.run([beryl.path, "tokenize", self.model, "--ids"], stdin=zeros, capture_output=True,
                                    timeout=120)
        self.assert_fails(result, 1, "standard input", "bytes")

    def test_trace_refuses_places_it_cannot_write_before_it_computes(self):
        folder = self.folder / "folder"
        folder.mkdir()
        absent, below_file = self.folder / "no" / "such" / "folder.safetensors", self.model / "config.json" / "x"
        # Stands for /dev/null and its like, which must not become a file; a program that fails here must do no harm.
        pipe = self.folder / "pipe"
        os.mkfifo(pipe)
        for path in (pipe, folder, absent, below_file):
            with self.subTest(path=path):
                result = beryl("trace", self.model, "--ids", "1", "-o", path)
                self.assert_fails(result, 1, str(path), "cannot be written")
        self.assertTrue(pipe.is_fifo())
        self.assertEqual(list(self.folder.glob("*partial*")), [])

    def test_a_full_disk_and_a_closed_output_are_errors(self):
        for arguments in (["run", self.model, "-p", "x"], ["inspect", self.model], ["tokenize", self.model, "x"],
                          ["--help"], ["run", "--help"], ["--version"]):
            with self.subTest(arguments=arguments[0]):
                with open("/dev/full", "wb") as full:
                    process = beryl.start(*arguments, stdout=full)
                    stderr = process.communicate(timeout=60)[1].decode()
                self.assertEqual(process.returncode, 1, stderr)
                self.assertRegex(stderr.splitlines()[-1], r"^beryl: standard output cannot be written: No space left")
                closed = subprocess.run(["/bin/sh", "-c", 'exec "$0" "$@" >&-', beryl.path, *map(str, arguments)],
                                        stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=60)
                self.assertEqual(closed.returncode, 1)
                self.assertIn(b"standard output cannot be written", closed.stderr)

    def test_a_closed_output_does_not_turn_a_trace_into_something_else(self):
        out = self.folder / "closed.safetensors"
        arguments = ["trace", str(self.model), "--ids", "1,2", "-o", str(out)]
        subprocess.run(["/bin/sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', beryl.path, *arguments], timeout=60, check=True)
        self.assertEqual(list(read_tensors(out)["ids"][1]), [1, 2])

    def test_a_reader_that_leaves_ends_the_program_quietly(self):
        for ignored, status in ((False, -signal.SIGPIPE), (True, 1)):
            with self.subTest(ignored=ignored):
                process = beryl.start("run", self.endless, "--raw", "-p", "x", "-n", "100000", "--ctx", "100100",
                                      restore_signals=not ignored)
                self.assertTrue(process.stdout.read(1))
                process.stdout.close()
                stderr = process.stderr.read().decode()
                self.assertEqual(process.wait(60), status)
                self.assertLessEqual(stderr.count("\n"), 1)
                process.stderr.close()


class TraceTest(CliTest):
    def test_golden_models_on_both_backends(self):
        # The answers are fp32; the bound is what two orders of summation in fp32 may differ by.
        for name in GOLDEN_NAMES:
            golden = read_tensors(GOLDEN / name / "golden.safetensors")
            ids = golden["long.ids"][1]
            config = json.loads((GOLDEN / name / "config.json").read_text())
            n_layers, width = config["num_hidden_layers"], config["hidden_size"]
            probes = golden["long.probe_positions"][1]
            for device, chunk in (("reference", 64), ("cpu", 7)):
                with self.subTest(model=name, device=device):
                    found = self.trace(GOLDEN / name, "--ids", ids_text(ids), "--layers", "--device", device,
                                       "--chunk", chunk, *(["--exact"] if device == "cpu" else []))
                    self.assertEqual(sorted(found), sorted(["ids", "logits", "embedded"] +
                                                           [f"hidden.{i}" for i in range(n_layers)]))
                    self.assertEqual(found["ids"], ([len(ids)], ids))
                    self.assertEqual(found["logits"][0], golden["long.logits"][0])
                    self.assert_near(found["logits"][1], golden["long.logits"][1], 2e-4)
                    # Entry 0 of the golden states is what enters layer 0; the last has passed the final norm.
                    states = ["embedded"] + [f"hidden.{i}" for i in range(n_layers - 1)]
                    for entry, state in enumerate(states):
                        self.assertEqual(found[state][0], [len(ids), width])
                        for probe, position in enumerate(probes):
                            begin = (entry * len(probes) + probe) * width
                            self.assert_near(found[state][1][position * width:(position + 1) * width],
                                             golden["long.hidden"][1][begin:begin + width], 2e-4)

    def test_greedy_ids_for_any_chunk(self):
        for name in GOLDEN_NAMES:
            golden = read_tensors(GOLDEN / name / "golden.safetensors")
            ids, n_prompt = list(golden["greedy.ids"][1]), golden["greedy.prompt_len"][1][0]
            for chunk in (1, 5, 13, 1000):
                with self.subTest(model=name, chunk=chunk):
                    found = self.trace(GOLDEN / name, "--ids", ids_text(ids[:n_prompt]), "--chunk", chunk,
                                       "--greedy", len(ids) - n_prompt)
                    self.assertEqual(sorted(found), ["greedy", "ids", "logits"])
                    self.assertEqual(list(found["greedy"][1]), ids[n_prompt:])

    def test_a_prompt_is_its_tokens(self):
        model = make_speaking_model(self.folder / "model")
        text = f"a{SPECIAL[IM_END]}b"
        self.assertEqual(list(self.trace(model, "-p", text)["ids"][1]), list(text.encode()))
        self.assertEqual(list(self.trace(model, "--special", "-p", text)["ids"][1]), [ord("a"), IM_END, ord("b")])

    def test_an_old_file_is_replaced(self):
        path = self.folder / "trace.safetensors"
        path.write_text("old")
        self.assertEqual(list(self.trace(GOLDEN / "llama", "--ids", "5")["ids"][1]), [5])

    def assert_near(self, found, expected, bound):
        self.assertEqual(len(found), len(expected))
        worst = max(abs(a - b) for a, b in zip(found, expected))   # a NaN fails too: it is not <= bound
        self.assertLessEqual(worst, bound)
        self.assertTrue(all(a == a for a in found))


class InspectTest(CliTest):
    def copy_with_tensor(self, name):
        """A golden model with one more tensor of this name."""
        folder = self.folder / name
        folder.mkdir()
        shutil.copy(GOLDEN / "llama" / "config.json", folder)
        data = (GOLDEN / "llama" / "model.safetensors").read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8:8 + size])
        end = len(data) - 8 - size
        header[name] = {"dtype": "F32", "shape": [2], "data_offsets": [end, end + 8]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size:] + bytes(8))
        return folder

    def test_what_a_model_is(self):
        expected = {
            "gemma3": ["Gemma 3", "window 8", "global", "rope base 1e+06, positions / 8", "0-4: ", "5: "],
            "gemma4_dense": ["Gemma 4", "V from K", "soft cap 30", "0-1, 3-4: window 8", "2, 5: global"],
            "gemma4_dense_hd512": ["Gemma 4", "256 wide", "512 wide"],
            "gemma4_e2b": ["Gemma 4", "per-layer embeddings", "reads the cache of layer 2"],
            "gemma4_moe": ["Gemma 4", "2 of 8 experts of 32"],
            "llama": ["Llama", "Llama 3 scaling: factor 8"],
        }
        self.assertEqual(sorted(expected), GOLDEN_NAMES)
        for name, parts in expected.items():
            with self.subTest(model=name):
                text = self.succeed("inspect", GOLDEN / name).stdout.decode()
                config = json.loads((GOLDEN / name / "config.json").read_text())
                counts = []
                for _, shape, _, _ in read_header(GOLDEN / name / "model.safetensors").values():
                    count = 1
                    for dim in shape:
                        count *= dim
                    counts.append(count)
                self.assertIn(f"{len(counts)} tensors", text)
                self.assertRegex(text, rf"(?m)^layers +{config['num_hidden_layers']}\b")
                self.assertRegex(text, rf"(?m)^vocabulary +{config['vocab_size']} tokens")
                # Gemma 4 has a scalar a layer, which becomes a number in the step.
                scalars = sum(count == 1 for count in counts)
                self.assertRegex(text, rf"(?m)^parameters .*\({sum(counts) - scalars}\)")
                self.assertRegex(text, r"(?m)^tokenizer +none")
                self.assertIn("unread keys", text)
                self.assertIn("initializer_range", text)
                self.assertNotIn("num_hidden_layers", text)
                for part in parts:
                    self.assertIn(part, text)

    def test_tensors(self):
        text = self.succeed("inspect", GOLDEN / "llama", "--tensors").stdout.decode()
        for name, (_, shape, begin, end) in read_header(GOLDEN / "llama" / "model.safetensors").items():
            self.assertRegex(text, rf"(?m)^{re.escape(name)} +bf16 +{end - begin} +{re.escape(str(shape))}$")

    def test_step_and_plan(self):
        text = self.succeed("inspect", GOLDEN / "gemma3", "--step").stdout.decode()
        self.assertEqual(re.findall(r"(?m)^layer (\d+)$", text), [str(i) for i in range(6)])
        self.assertIn("Attention", text)
        totals = []
        for context in (64, 512):
            text = self.succeed("inspect", GOLDEN / "gemma3", "--plan", "--ctx", context,
                                "--device", "cpu").stdout.decode()
            self.assertIn(f"memory on cpu for a context of {context}\n", text)
            number, unit = re.search(r"(?m)^ +total without the mapped file +([\d.]+) (\w+)", text).groups()
            totals.append(float(number) * {"kB": 1e3, "MB": 1e6}[unit])
        self.assertLess(totals[0], totals[1])

    def test_what_is_ignored_and_what_is_refused(self):
        text = self.succeed("inspect", self.copy_with_tensor("vision_tower.x")).stdout.decode()
        self.assertRegex(text, r"(?m)^ignored +1 tensors, 8 B\n  vision_tower\.x$")
        refused = beryl("inspect", self.copy_with_tensor("model.layers.0.mystery"))
        self.assertEqual(refused.returncode, 1)
        self.assertRegex(refused.stderr.decode(), r"\Aberyl: [^\n]*'model\.layers\.0\.mystery'[^\n]*\n\Z")
        self.assertIn(b"vocabulary", refused.stdout)       # what could be told is told

    def test_the_tokenizer_and_the_chat_format(self):
        text = self.succeed("inspect", make_speaking_model(self.folder / "speaking")).stdout.decode()
        self.assertRegex(text, r"(?m)^tokenizer .*256 tokens")
        self.assertRegex(text, rf"(?m)^ +a reply ends with .*<\|im_end\|> \({IM_END}\)")
        self.assertRegex(text, r"(?m)^chat format +ChatML; the file has no template")


class BenchTest(CliTest):
    def test_bench_reads_memory_without_a_model(self):
        rows = self.succeed("bench", "--read", "--threads", "2", "-r", "2").stdout.decode().splitlines()[2:]
        self.assertEqual([row.split("|")[1].strip() for row in rows], ["1", "2"])
        for row in rows:
            self.assertGreater(float(row.split("|")[2]), 0)
        self.assert_fails(beryl("bench", "--read", GOLDEN / "llama"), 2, "--read", "MODEL")
        self.assert_fails(beryl("bench", "--read", "--ops"), 2, "--read", "--ops")
        self.assert_fails(beryl("bench", "--read", "--device", "cuda"), 2, "--read", "GPU")
        self.assert_fails(beryl("bench", "--read", "--floor"), 2, "--read", "--floor")
        self.assert_fails(beryl("bench", GOLDEN / "llama", "--ops", "--floor"), 2, "--ops", "--floor")
        for arguments in (["--read"], [GOLDEN / "llama", "--device", "cpu", "--ops"]):
            for output in ("json", "jsonl"):
                self.assert_fails(beryl("bench", *arguments, "-o", output), 2, "-o " + output, "Markdown")

    def test_measures_every_combination_of_the_lists(self):
        arguments = ["bench", GOLDEN / "llama", "--device", "cpu", "-p", "3,0", "-n", "5", "-d", "0,20", "-b", "1,2",
                     "--allocate", "0,100", "-r", "3"]
        lines = self.succeed(*arguments, "-o", "jsonl").stdout.decode().splitlines()
        results = [json.loads(line) for line in lines]
        found = [(each["n_allocated"], each["n_streams"], each["n_depth"], each["n_prompt"], each["n_gen"])
                 for each in results]
        self.assertEqual(found, [(allocated, streams, depth, n_prompt, 0 if n_prompt else 5)
                                 for allocated in (25, 100) for streams in (1, 2) for depth in (0, 20)
                                 for n_prompt in (3, 0)])
        for each in results:
            self.assertEqual(each["backends"], "cpu")
            self.assertEqual(each["type_k"], "f16")
            self.assertRegex(each["test_time"], r"\A\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ\Z")
            self.assertRegex(each["build_commit"], r"\A[\w.-]+\Z")
            self.assertGreater(each["n_threads"], 0)
            self.assertGreater(each["model_size"], 0)
            self.assertEqual(len(each["samples_ts"]), 3)
            tokens = (each["n_prompt"] + each["n_gen"]) * each["n_streams"]
            for speed, nanoseconds in zip(each["samples_ts"], each["samples_ns"]):
                self.assertAlmostEqual(speed, tokens / nanoseconds * 1e9, delta=speed * 0.01)
            self.assertAlmostEqual(each["avg_ts"], sum(each["samples_ts"]) / 3, delta=each["avg_ts"] * 1e-9)

        of_caches = self.succeed("bench", GOLDEN / "llama", "--device", "cpu", "-p", "1", "-n", "0", "-r", "1", "--cache", "f32,f16")
        self.assertEqual([line.split("|")[2].strip() for line in of_caches.stdout.decode().splitlines()[2:]], ["f32", "f16"])
        self.assert_fails(beryl("bench", GOLDEN / "llama", "--device", "cpu", "-p", "1", "-n", "0", "--cache", "bf16"), 1, "F16 or F32",
                          "BF16")
        label = self.succeed("bench", "--synthetic", "smollm2-135m", "--format", "q6_k", "--head", "q8_0", "--device", "cpu", "-p", "0",
                             "-n", "1", "-r", "1").stdout.decode().splitlines()[2].split("|")[1]
        self.assertIn("are q8_0", label)

        whole = json.loads(self.succeed(*arguments, "-o", "json").stdout)
        self.assertEqual([set(each) for each in whole], [set(each) for each in results])
        table = self.succeed(*arguments).stdout.decode()
        self.assertEqual(table.count("\n"), 2 + len(results))
        self.assertIn("| tg5 @ d20 x2 of 100 |", table)


    def test_memory_stays_near_the_files_size(self):
        folder = self.folder / "small"
        self.succeed("quantize", "--synthetic", "smollm2-135m", folder, "--format", "q4_0", "--head", "q8_0")
        file = sum(path.stat().st_size for path in folder.iterdir())
        process = beryl.start("bench", folder, "--device", "cpu", "--threads", "2", "-p", "512", "-n", "0", "-r", "1")
        process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        process.stdout.close()
        process.stderr.close()
        self.assertEqual(process.returncode, 0)
        cache = 30 * 512 * 2 * 3 * 64 * 2                                # layers, positions, keys and values, heads, f16
        # Weights twice would be 90 MB more; the table of embeddings beside the packed head, 30.
        self.assertLess(usage.ru_maxrss * 1024, file + cache + 42e6)

    def test_the_floor_is_measured_beside_each_repetition(self):
        arguments = ["bench", GOLDEN / "llama", "--device", "cpu", "-p", "3", "-n", "4", "-d", "16", "-r", "3", "--floor"]
        prompt, decode = (json.loads(line) for line in self.succeed(*arguments, "-o", "jsonl").stdout.decode().splitlines())
        header = read_header(GOLDEN / "llama" / "model.safetensors")
        weights = sum(end - begin for name, (_, _, begin, end) in header.items()
                      if "norm" not in name and "embed_tokens" not in name)
        config = json.loads((GOLDEN / "llama" / "config.json").read_text())
        row = 2 * config["hidden_size"]                                  # of the embedding, BF16
        keys_and_values = 2 * 2 * config["num_key_value_heads"] * config["head_dim"] * config["num_hidden_layers"]   # f16
        # A token more in the cache: the one that the step appends is read by its attention and written.
        self.assertEqual(decode["step_bytes"], weights + row + keys_and_values * (16 + 2 + 1 + 1))
        self.assertNotIn("step_bytes", prompt)
        for each in (prompt, decode):
            self.assertEqual(len(each["samples_read_gb_s"]), 3)
            self.assertTrue(all(0.05 < speed < 5000 for speed in each["samples_read_gb_s"]))
        for share, tokens, read in zip(decode["samples_share_of_read"], decode["samples_ts"], decode["samples_read_gb_s"]):
            self.assertAlmostEqual(share, tokens * decode["step_bytes"] / read * 1e-9, delta=share * 0.01)
        table = self.succeed(*arguments).stdout.decode().splitlines()
        self.assertTrue(table[0].endswith("| GB/s read | share |"))
        self.assertRegex(table[3], r"\| [\d.]+ \| \d+ % \|\Z")
        self.assertEqual({line.count("|") for line in table}, {9})


class PerplexityTest(CliTest):
    TEXT = "“Free as in freedom,” she said, and the café closed at ½ past ten. " * 3

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.model = make_speaking_model(cls.folder / "model")
        cls.file = cls.folder / "text.txt"
        cls.file.write_text(cls.TEXT, encoding="utf-8")

    def expected(self, model, ids, window, skip, bos, device):
        """(negative log-likelihood, distribution) of each prediction that counts, from traces of the windows."""
        found = []
        for begin in range(0, len(ids) - window + 1, window):
            ids_of_window = ids[begin:begin + window]
            first = ids_of_window[0] if bos is None else bos
            (_, vocab), logits = self.trace(model, "--ids", ids_text([first] + ids_of_window[1:]), "--device",
                                            device)["logits"]
            for row in range(skip, window - 1):
                weights = [math.exp(value) for value in logits[row * vocab:(row + 1) * vocab]]
                total = sum(weights)
                probabilities = [weight / total for weight in weights]
                found.append((-math.log(probabilities[ids_of_window[row + 1]]), probabilities))
        return found

    def test_equals_what_traces_of_the_windows_say(self):
        with_bos = make_speaking_model(self.folder / "bos", bos=UNUSED)
        for model, bos in ((self.model, None), (with_bos, UNUSED)):
            ids = ([] if bos is None else [bos]) + list(self.TEXT.encode())
            for window, options, skip in ((64, ["--chunk", "7"], 32), (50, ["--skip", "0"], 0), (2, [], 0)):
                with self.subTest(bos=bos, window=window):
                    result = json.loads(self.succeed("perplexity", model, self.file, "--device", "cpu", "--ctx", window,
                                                     *options, "-o", "json").stdout)
                    losses = [loss for loss, _ in self.expected(model, ids, window, skip, bos, "cpu")]
                    mean = statistics.fmean(losses)
                    error = statistics.stdev(losses) / math.sqrt(len(losses))
                    self.assertEqual((result["n_tokens"], result["window_tokens"], result["n_skipped"]),
                                     (len(ids), window, skip))
                    self.assertEqual((result["n_windows"], result["n_scored"]), (len(ids) // window, len(losses)))
                    self.assertEqual(result["device"], "cpu")
                    self.assertGreater(result["tokens_per_second"], 0)
                    for name, value in (("mean_nll", mean), ("nll_error", error), ("perplexity", math.exp(mean)),
                                        ("perplexity_error", error * math.exp(mean))):
                        self.assertAlmostEqual(result[name], value, delta=1e-7 * value, msg=name)

    def test_compares_two_devices(self):
        arguments = ["perplexity", self.model, self.file, "--device", "cpu", "--against", "reference", "--ctx", "64"]
        result = json.loads(self.succeed(*arguments, "-o", "json").stdout)
        self.assertEqual((result["device"], result["against"]["device"]), ("cpu", "reference"))
        ids = list(self.TEXT.encode())
        q, p = (self.expected(self.model, ids, 64, 32, None, device) for device in ("cpu", "reference"))
        self.assertAlmostEqual(result["against"]["mean_nll"], statistics.fmean(loss for loss, _ in p), delta=1e-6)
        divergences = [sum(a * math.log(a / b) for a, b in zip(each, other)) for (_, each), (_, other) in zip(p, q)]
        self.assertAlmostEqual(result["mean_kl"], statistics.fmean(divergences), delta=1e-12)
        self.assertAlmostEqual(result["largest_kl"], max(divergences), delta=1e-12)
        self.assertEqual(result["n_flips"],
                         sum(each.index(max(each)) != other.index(max(other)) for (_, each), (_, other) in zip(p, q)))
        self.assertLessEqual(result["n_flips_below_margin"], result["n_flips"])
        text = self.succeed(*arguments).stdout.decode()
        self.assertRegex(text, r"\A\d+ tokens, \d+ of \d+ predictions counted: the last 31 of each window of 64\n"
                               r"cpu +perplexity [\d.]+ \+- [\d.]+, [\d.]+ tok/s\nreference +perplexity [\d.]+ [^\n]+\n"
                               r"KL +mean [^\n]+\ntop-1 flips +\d+ \([\d.]+ %\)[^\n]+\n\Z")
        self.assertIn(f"perplexity {result['perplexity']:.4f} +- {result['perplexity_error']:.4f}", text)

    def test_texts_that_cannot_be_used_are_one_line(self):
        empty, short = self.folder / "empty.txt", self.folder / "short.txt"
        empty.write_text("")
        short.write_text("x" * 63)
        for path, *parts in ((empty, "empty.txt: is empty"), (short, "too short", " 63 ", " 64 "),
                             (self.folder / "absent.txt", "absent.txt"), (self.folder, "not a regular file")):
            with self.subTest(path=path.name):
                self.assert_fails(beryl("perplexity", self.model, path, "--ctx", "64"), 1, *parts)


class DeviceTest(CliTest):
    """GPUs are hidden from the program under test (Program)."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.speaking = make_speaking_model(cls.folder / "speaking")

    def test_a_gpu_asked_for_that_is_not_there_is_one_line(self):
        out = self.folder / "out.safetensors"
        model = GOLDEN / "llama"
        for arguments in (["bench", model, "-p", "1", "-n", "1"], ["trace", model, "--ids", "1,2", "-o", out], ["verify"],
                          ["perplexity", self.speaking, __file__],
                          ["bench", "--synthetic", "llama3.2-1b"]):
            with self.subTest(arguments=arguments):
                result = beryl(*arguments, "--device", "cuda")
                self.assert_fails(result, 1)
                self.assertRegex(result.stderr.decode(), "no CUDA backend|no NVIDIA driver|no NVIDIA GPU")
        self.assertFalse(out.exists())

    def test_activations_without_effect_are_told(self):
        quantized = self.folder / "quantized"
        self.succeed("quantize", self.speaking, quantized, "--format", "q8_0", "--head", "q8_0")
        text = self.folder / "text.txt"
        text.write_text("x" * 64)
        commands = (["run", "-p", "x", "-n", "1", "--temp", "0"], ["trace", "--ids", "1", "-o", self.folder / "t.safetensors"],
                    ["bench", "-p", "1", "-n", "0", "-r", "1"], ["perplexity", text, "--ctx", "32"], ["inspect", "--plan"])
        for command, *rest in commands:
            for model, is_told in ((quantized, True), (self.speaking, False)):
                with self.subTest(command=command, model=model.name):
                    result = self.succeed(command, model, *rest, "--device", "cpu", "--activations", "bf16")
                    lines = [line for line in result.stderr.decode().splitlines() if "--activations" in line]
                    self.assertEqual(lines, ["beryl: warning: --activations bf16 changes nothing: this model multiplies no BF16 weights"]
                                     if is_told else [])

    def test_auto_takes_the_cpu_and_says_nothing_of_hidden_gpus(self):
        result = self.succeed("bench", GOLDEN / "llama", "-p", "1", "-n", "1", "-r", "1")
        self.assertEqual(result.stderr, b"")


class TokenizeTest(CliTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.model = make_speaking_model(cls.folder / "model")

    def ids(self, *arguments, **options):
        text = self.succeed("tokenize", self.model, "--ids", *arguments, **options).stdout.decode()
        self.assertTrue(text.endswith("\n") and text.count("\n") == 1)
        return [int(part) for part in text.split(",")] if text.strip() else []

    def test_ids_of_an_argument_and_of_standard_input(self):
        self.assertEqual(self.ids("Hello"), list(b"Hello"))
        self.assertEqual(self.ids("--", "-1 is"), list(b"-1 is"))
        for data in (b"Hello\n", b"", b"\n\n", "naïve 😀".encode(), b"a\0b"):
            self.assertEqual(self.ids(stdin=data), list(data))

    def test_special_tokens_only_where_asked_for(self):
        text = f"a{SPECIAL[IM_END]}"
        self.assertEqual(self.ids(text), list(text.encode()))
        self.assertEqual(self.ids("--special", text), [ord("a"), IM_END])

    def test_a_line_a_token(self):
        output = self.succeed("tokenize", self.model, "--special", f"a\n{SPECIAL[IM_END]}").stdout.decode()
        self.assertEqual([line.split(None, 1) for line in output.splitlines()],
                         [["97", "'a'"], ["10", "'\\x0a'"], [str(IM_END), SPECIAL[IM_END]]])

    def test_ids_go_into_trace(self):
        ids = self.succeed("tokenize", self.model, "--ids", "Round trip").stdout.decode().strip()
        self.assertEqual(bytes(self.trace(self.model, "--ids", ids)["ids"][1]), b"Round trip")


class SpeakingCase(CliTest):
    """For replies of the model of bytes."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.model = make_speaking_model(cls.folder / "model")
        cls.endless = make_speaking_model(cls.folder / "endless", suppressed=STOPS)   # never ends a reply itself

    def greedy(self, ids, n, model=None, stops=STOPS):
        """The reply to ids as ids, and whether a stop token ended it."""
        found = list(self.trace(model or self.model, "--ids", ids_text(ids), "--greedy", n)["greedy"][1])
        for i, token in enumerate(found):
            if token in stops:
                return found[:i], True
        return found, False

    def run_text(self, *arguments, **options):
        return self.succeed("run", self.model, "--temp", "0", *arguments, **options).stdout.decode("utf-8")

    @staticmethod
    def line(text):
        """How a reply is shown: it ends its line."""
        return text if not text or text.endswith("\n") else text + "\n"


class RunTest(SpeakingCase):
    def test_raw_goes_on_with_the_text(self):
        for prompt in ("Once upon a time", "😀", "x"):
            reply, _ = self.greedy(prompt.encode(), 40)
            self.assertEqual(self.run_text("--raw", "-p", prompt, "-n", 40), self.line(text_of(reply)))

    def test_a_chat_is_written_in_the_models_format(self):
        for system in (None, "Be brief."):
            messages = ([("system", system.encode())] if system else []) + [("user", b"Hi <|im_end|>")]
            reply, _ = self.greedy(chat_ids(messages), 40)
            options = ["--system", system] if system else []
            result = self.succeed("run", self.model, "--temp", "0", "-p", "Hi <|im_end|>", "-n", 40, *options)
            self.assertEqual(result.stdout.decode(), self.line(text_of(reply)))
            n_prompt, n_reply, _ = self.statistics(result.stderr)
            self.assertEqual((n_prompt, n_reply), (len(chat_ids(messages)), len(reply)))
            # The folder has no template, which one line says.
            self.assertEqual(result.stderr.decode().count("\n"), 2)
            self.assertIn("beryl: warning: ", result.stderr.decode().splitlines()[0])

    def test_one_bos_where_the_model_wants_one(self):
        model = make_speaking_model(self.folder / "with_bos", bos=UNUSED)
        for options, prompt in ((["--raw"], "x"), (["--raw", "--special"], f"{SPECIAL[UNUSED]}x")):
            reply, _ = self.greedy([UNUSED, ord("x")], 20)
            result = self.succeed("run", model, "--temp", "0", "-n", 20, "-p", prompt, *options)
            self.assertEqual(result.stdout.decode(), self.line(text_of(reply)))
            self.assertEqual(self.statistics(result.stderr)[0], 2)
        self.assertEqual(self.trace(model, "-p", "x")["ids"][1], [UNUSED, ord("x")])

    def test_special_text_in_a_raw_prompt(self):
        text = f"a{SPECIAL[IM_END]}b"
        for options, ids in (([], list(text.encode())), (["--special"], [ord("a"), IM_END, ord("b")])):
            reply, _ = self.greedy(ids, 20)
            self.assertEqual(self.run_text("--raw", "-p", text, "-n", 20, *options), self.line(text_of(reply)))

    def test_standard_input_is_a_prompt(self):
        expected = self.run_text("--raw", "-p", "two\nlines", "-n", 20)
        self.assertEqual(self.run_text("--raw", "-n", 20, stdin=b"two\nlines"), expected)
        self.assertEqual(self.run_text("--raw", "-n", 20, stdin=b"two\nlines\n"), expected)   # one newline is no text
        self.assertNotEqual(self.greedy(b"two\nlines\n", 20), self.greedy(b"two\nlines", 20))

    def test_output_is_valid_utf8_wherever_a_reply_is_cut(self):
        ids, _ = self.greedy("😀 naïve".encode(), 200)
        self.assertIn("\ufffd", text_of(ids))          # random bytes: most are no text
        for n in (*range(1, 11), 50, len(ids)):
            self.assertEqual(self.run_text("--raw", "-p", "😀 naïve", "-n", n), self.line(text_of(ids[:n])))

    def test_special_tokens_of_a_reply_are_shown_on_demand(self):
        prompt = next(text for text in map(str, range(1000))
                      if UNUSED in self.greedy(text.encode(), 60)[0])
        reply, _ = self.greedy(prompt.encode(), 60)
        shown = self.run_text("--raw", "-p", prompt, "-n", 60, "--show-special")
        self.assertEqual(shown.count(SPECIAL[UNUSED]), reply.count(UNUSED))
        self.assertNotIn(SPECIAL[UNUSED], self.run_text("--raw", "-p", prompt, "-n", 60))

    def test_tokens_never_to_be_sampled_are_not(self):
        first = self.greedy(b"x", 8)[0]
        banned = sorted({first[0], first[3]})
        model = make_speaking_model(self.folder / "suppressed", suppressed=banned)
        path = self.folder / "trace.safetensors"
        ids = list(b"x")
        for _ in range(12):                            # greedy over what is allowed, step by step
            beryl("trace", model, "--ids", ids_text(ids), "-o", path)
            logits = read_tensors(path)["logits"][1][-256:]
            ids.append(max((i for i in range(256) if i not in banned), key=lambda i: logits[i]))
        reply = ids[1:]
        reply = reply[:next((i for i, token in enumerate(reply) if token in STOPS), len(reply))]
        result = self.succeed("run", model, "--raw", "-p", "x", "-n", 12, "--temp", "0")
        self.assertEqual(result.stdout.decode(), self.line(text_of(reply)))
        self.assertIn(f"{len(banned)} of them are never sampled", self.succeed("inspect", model).stdout.decode())

    def test_a_seed_repeats_a_reply_and_seeds_differ(self):
        def reply(*options):
            return self.succeed("run", self.model, "--raw", "-p", "x", "-n", "30", "--temp", "1.5", "--verbose",
                                *options)
        one, again, other = reply("--seed", 1), reply("--seed", 1), reply("--seed", 2)
        self.assertEqual(one.stdout, again.stdout)
        self.assertNotEqual(one.stdout, other.stdout)
        self.assertIn("seed 1", self.statistics(one.stderr)[2])
        random = reply()
        seed = re.search(r"seed (\d+)", self.statistics(random.stderr)[2])[1]
        self.assertEqual(reply("--seed", seed).stdout, random.stdout)

    def test_sampling_options_do_something(self):
        base = ["run", self.model, "--raw", "-p", "x", "-n", "60", "--seed", "3", "--temp", "3", "--top-k", "0",
                "--top-p", "1"]
        plain = self.succeed(*base).stdout
        greedy = self.line(text_of(self.greedy(b"x", 60)[0])).encode()
        self.assertNotEqual(plain, greedy)
        for option in (["--top-k", "1"], ["--top-p", "0"], ["--min-p", "1"]):
            self.assertEqual(self.succeed(*base, *option).stdout, greedy, option)
        reply = self.greedy(b"x", 60)[0]
        self.assertLess(len(set(reply)), len(reply))   # a greedy reply repeats itself: penalties change it
        for option in (["--repeat-penalty", "5"], ["--presence-penalty", "20"], ["--frequency-penalty", "20"]):
            self.assertNotEqual(self.succeed(*base, "--top-k", "1", *option).stdout, greedy, option)

    def test_chunks_threads_and_devices_change_nothing(self):
        prompt = "All the same, whatever the size of the steps. " * 3
        texts = {self.run_text("--raw", "-p", prompt, "-n", 30, *options)
                 for options in ([], ["--chunk", 1], ["--chunk", 7], ["--threads", 1], ["--device", "cpu"],
                                 ["--device", "reference"], ["--exact"], ["--exact", "--chunk", 7], ["--ctx", 200])}
        self.assertEqual(len(texts), 1)
        coarse = {self.run_text("--raw", "-p", prompt, "-n", 30, "--activations", "bf16", *options)
                  for options in ([], ["--chunk", 7], ["--threads", 1])}
        self.assertEqual(len(coarse), 1)

    def test_a_context_beyond_the_models_own_is_one_warning(self):
        model = make_speaking_model(self.folder / "short", context=64)
        result = self.succeed("run", model, "--raw", "-p", "x", "-n", "5", "--ctx", "100")
        warnings = [line for line in result.stderr.decode().splitlines() if "warning" in line]
        self.assertEqual(len(warnings), 1)
        self.assertRegex(warnings[0], r"100\b.*\b64\b")
        self.assert_fails(beryl("run", model, "--raw", "-p", "x" * 65), 1, " 65 ", " 64")

    def test_a_chat_template_of_the_users_writes_the_prompt(self):
        def prompt_tokens(*options):
            result = self.succeed("run", self.model, "-p", "seven77", "-n", "1", *options)
            return int(re.search(r"prompt (\d+) tokens", result.stderr.decode())[1])

        template = self.folder / "mine.jinja"
        template.write_text("{{ messages[0].content }}<|im_start|>")
        whole = prompt_tokens()
        self.assertEqual(prompt_tokens("--chat-template", "built-in"), whole)
        self.assertLess(prompt_tokens("--chat-template", template), whole)
        template.write_text("\n{% for %}")
        self.assert_fails(beryl("run", self.model, "-p", "x", "--chat-template", template), 1, "mine.jinja: line 2: ")
        template.write_text("{{ raise_exception('not today') }}")
        self.assert_fails(beryl("run", self.model, "-p", "x", "--chat-template", template), 1, "not today")
        self.assert_fails(beryl("run", self.model, "-p", "x", "--chat-template", self.folder / "no-such-file"), 1,
                          "no-such-file")

    def test_thinking_is_offered_only_by_models_that_think(self):
        result = self.succeed("run", self.model, "-p", "x", "-n", "5", "--think")
        self.assertRegex(result.stderr.decode(), r"(?m)^beryl: warning: --think changes nothing: .*ChatML")

    def test_text_comes_as_it_is_made(self):
        process = beryl.start("run", self.endless, "--raw", "-p", "x", "-n", "20000", "--ctx", "20100")
        n_reads = 0
        while process.stdout.read(4096):
            n_reads += 1
            if n_reads == 20:
                self.assertIsNone(process.poll())      # it is still at it
                process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
        self.assertGreaterEqual(n_reads, 20)

    def test_ctrl_c_ends_a_reply_cleanly(self):
        arguments = ["--raw", "-p", "x", "--ctx", "100000", "--seed", "5", "-n", "90000"]
        process = beryl.start("run", self.endless, *arguments)
        data = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, stderr = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 130, stderr)
        text = (data + rest).decode("utf-8")
        self.assertTrue(text.endswith("\n"))
        n_reply = self.statistics(stderr)[1]
        self.assertGreater(n_reply, 0)
        self.assertLess(n_reply, 90000)
        # What came is the beginning of the whole reply.
        arguments[-1] = str(n_reply)
        self.assertEqual(self.succeed("run", self.endless, *arguments).stdout.decode(), text)

    def test_ctrl_c_while_the_prompt_is_read(self):
        process = beryl.start("run", self.model, "--raw", "--chunk", "1", stdin=subprocess.PIPE)
        process.stdin.write(b"A long prompt. " * 8000)
        process.stdin.close()
        process.stdin = None
        wait_until(lambda: catches_interrupts(process.pid))
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 130, stderr)
        self.assertEqual(stdout, b"")
        n_prompt, n_reply, _ = self.statistics(stderr)
        self.assertLess(n_prompt, 120000)
        self.assertEqual(n_reply, 0)


class ConversationTest(SpeakingCase):
    """What the model is given, on a terminal that can not edit lines. chat_test.py has what people do there."""

    def talk(self, *arguments, environment=None, model=None, command="chat"):
        return Terminal(beryl, command, model or self.model, "--temp", "0", *arguments,
                        environment={"NO_COLOR": "1", "TERM": "dumb"} | (environment or {}))

    def answer(self, terminal, text):
        """(text of the reply, numbers of its statistics)."""
        terminal.write(text.encode() + b"\n")
        shown = terminal.read_until(b"> ").decode("utf-8")
        reply, statistics, _ = re.match(r"(?s)(.*?)((?:loaded in|context \d)[^\n]*\n)(> )\Z", shown).groups()
        return reply, self.statistics(statistics.encode())[:2]

    @staticmethod
    def shown(ids):
        """As a terminal may get it: without control characters."""
        text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text_of(ids))
        return SpeakingCase.line(text)

    def test_turns_build_on_each_other_and_only_new_tokens_are_read(self):
        with_bos = make_speaking_model(self.folder / "with_bos", bos=UNUSED)
        for model, start in ((self.model, []), (with_bos, [UNUSED])):
            messages, held = [], []
            with self.talk("-n", "12", model=model) as terminal:
                self.assertIn(b"/exit", terminal.read_until(b"> "))
                for text in ("Hello", "And then?", "Why <|im_end|>?", "So."):
                    # What the model has read: all turns in ChatML, with each reply as its very tokens.
                    messages.append(("user", text.encode()))
                    ids = start + chat_ids(messages)
                    reply, stopped = self.greedy(ids, 12)
                    found, (n_prompt, n_reply) = self.answer(terminal, text)
                    self.assertEqual(found, self.shown(reply))
                    self.assertEqual(n_reply, len(reply))
                    self.assertEqual(n_prompt, len(ids) - len(held))
                    messages.append(("assistant", bytes(reply)))
                    # The last token of a reply that was cut has not been read yet.
                    held = ids + (reply if stopped else reply[:-1])
                terminal.write(b"/exit\n")
                self.assertEqual(terminal.wait(), 0)

    def test_reset_forgets(self):
        with self.talk("-n", "10") as terminal:
            terminal.read_until(b"> ")
            first = self.answer(terminal, "Hello")
            self.answer(terminal, "More")
            terminal.write(b"/reset\n")
            terminal.read_until(b"> ")
            self.assertEqual(self.answer(terminal, "Hello"), first)
            terminal.write(b"\x04")
            self.assertEqual(terminal.wait(), 0)

    def test_ctrl_c_ends_a_reply_and_the_conversation_goes_on(self):
        with self.talk("-n", "90000", "--ctx", "100000", "--seed", "1", model=self.endless) as terminal:
            terminal.read_until(b"> ")
            for text in ("Hello", "Stop it"):
                terminal.write(text.encode() + b"\n")
                wait_until(lambda: select.select([terminal.fd], [], [], 0)[0])
                terminal.interrupt()
                n_prompt, n_reply, _ = self.statistics(terminal.read_until(b"\n> ")[:-3])
                self.assertLess(n_reply, 90000)
            # The second turn was the end of the first reply, its last token and the end of the turn, and itself.
            self.assertEqual(n_prompt, 1 + len([IM_END, ord("\n")]) + len(chat_ids([("user", b"Stop it")])))
            # At the prompt, twice ends.
            terminal.interrupt()
            self.assertIn(b"Ctrl-C once more", terminal.read_until(b"> "))
            terminal.interrupt()
            self.assertEqual(terminal.wait(), 130)

    def test_ctrl_c_at_the_prompt_ends_only_when_nothing_is_said_in_between(self):
        with self.talk("-n", "5") as terminal:
            terminal.read_until(b"> ")
            for text in ("Hello", "x"):
                terminal.interrupt()
                terminal.read_until(b"> ")
                self.answer(terminal, text)
            terminal.write(b"/exit\n")
            self.assertEqual(terminal.wait(), 0)

    def test_the_key_forgets_the_line(self):
        with self.talk("-n", "5") as terminal:
            terminal.read_until(b"> ")
            terminal.write(b"half a li\x03")
            try:
                terminal.read_until(b"> ", seconds=3)
            except TimeoutError:                       # dropped by the terminal: see Terminal.interrupt
                terminal.write(b"\n")
                terminal.read_until(b"> ")
            self.assertEqual(self.answer(terminal, "Hello")[1][0], len(chat_ids([("user", b"Hello")])))
            terminal.write(b"\x04")
            self.assertEqual(terminal.wait(), 0)

    def test_what_does_not_fit_is_said_and_the_conversation_goes_on(self):
        with self.talk("-n", "4", "--ctx", "64") as terminal:
            terminal.read_until(b"> ")
            first = self.answer(terminal, "Hello")
            terminal.write(b"x" * 100 + b"\n")
            self.assertRegex(terminal.read_until(b"> "), rb"\Aberyl: this message alone [^\n]*context of 64[^\n]*--ctx\)\n> \Z")
            terminal.write(b"/reset\n")
            terminal.read_until(b"> ")
            self.assertEqual(self.answer(terminal, "Hello"), first)

    def test_raw_lines_are_texts_of_their_own(self):
        with self.talk("-n", "10", "--raw", command="run") as terminal:
            terminal.read_until(b"> ")
            for text in ("Once", "Twice", "Once"):
                self.assertEqual(self.answer(terminal, text)[0], self.shown(self.greedy(text.encode(), 10)[0]))

    def test_no_control_character_of_a_reply_reaches_the_terminal(self):
        prompt, ids = next((text, ids) for text, ids in ((text, self.greedy(text.encode(), 200)[0])
                                                         for text in map(str, range(1000)))
                           if any(token < 0x20 and token not in (9, 10) for token in ids))
        with self.talk("-n", "200", "--raw", command="run") as terminal:
            terminal.read_until(b"> ")
            self.assertEqual(self.answer(terminal, prompt)[0], self.shown(ids))
        piped = self.run_text("--raw", "-p", prompt, "-n", 200)
        self.assertEqual(piped, self.line(text_of(ids)))       # elsewhere the text is as it is

    def test_the_last_line_is_dim_unless_colour_is_unwelcome(self):
        for environment, dim in (({"NO_COLOR": "", "TERM": "xterm"}, True), ({"NO_COLOR": "1", "TERM": "xterm"}, False),
                                 ({"NO_COLOR": ""}, False)):
            with self.talk("-p", "x", "-n", "3", environment=environment, command="run") as terminal:
                self.assertEqual(terminal.wait(), 0)
                self.assertEqual(b"\x1b[2mloaded in " in terminal.seen, dim)
                self.assertEqual(b"\x1b" in terminal.seen.replace(b"\x1b[2m", b"").replace(b"\x1b[0m", b""), False)

    def test_a_terminal_that_goes_away_ends_the_program(self):
        terminal = self.talk()
        terminal.read_until(b"> ")
        os.close(terminal.fd)
        wait_until(lambda: os.waitpid(terminal.pid, os.WNOHANG)[0] != 0)


class ThinkingTest(SpeakingCase):
    """A model of bytes with Gemma 4's markers."""
    N = 150

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.model = make_speaking_model(cls.folder / "thinker", "gemma4_dense", special=GEMMA4_SPECIAL, bos=BOS,
                                        end=TURN_END)

    @staticmethod
    def prompt(messages):
        ids = [BOS, TURN, *b"system\n", THINK, *b"\n", TURN_END, *b"\n"]
        for role, text in messages:
            ids += [TURN, *f"{role}\n".encode(), *text.encode(), TURN_END, *b"\n"]
        return ids + [TURN, *b"model\n"]

    def think(self):
        """A question that makes the model think: (question, reply, its answers and thoughts in turn, as text)."""
        for question in map(str, range(1000)):
            reply, _ = self.greedy(self.prompt([("user", question)]), self.N, stops=(TURN_END, EOS))
            if CHANNEL in reply and CHANNEL_END in reply[reply.index(CHANNEL):]:
                parts, inside = [[]], False
                for token in reply:
                    if token == (CHANNEL_END if inside else CHANNEL):
                        parts.append([])
                        inside = not inside
                    else:
                        parts[-1].append(token)
                return question, reply, [text_of(part, GEMMA4_SPECIAL) for part in parts]
        self.fail("this model does not think")

    def test_thoughts_go_to_standard_error_and_the_answer_to_standard_output(self):
        question, reply, parts = self.think()
        result = self.succeed("run", self.model, "--think", "-p", question, "-n", self.N, "--temp", "0")
        answer = "".join(parts[0::2])
        self.assertIn(result.stdout.decode(), (answer, answer + "\n"))
        lines = result.stderr.decode("utf-8")
        for thought in parts[1::2]:
            harmless = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", thought)
            self.assertIn(harmless, lines)
        self.assertEqual(self.statistics(result.stderr)[:2], (len(self.prompt([("user", question)])), len(reply)))

    def test_the_next_turn_leaves_thoughts_out(self):
        question, reply, parts = self.think()
        answer = "".join(parts[0::2]).strip()
        full = self.prompt([("user", question), ("model", answer), ("user", "More")])
        second, _ = self.greedy(full, self.N, stops=(TURN_END, EOS))
        first = self.prompt([("user", question)])
        with Terminal(beryl, "run", self.model, "--think", "-n", self.N, "--temp", "0",   # on a terminal it is chat
                      environment={"NO_COLOR": "1", "TERM": "dumb"}) as terminal:
            terminal.read_until(b"> ")
            # Of the second prompt, what stood before the thoughts has been read.
            held = first + reply
            n_same = next(i for i, (a, b) in enumerate(zip(held, full)) if a != b)
            for text, n_prompt, n_reply in ((question, len(first), len(reply)), ("More", len(full) - n_same, len(second))):
                terminal.write(text.encode() + b"\n")
                shown = terminal.read_until(b"\ncontext ") + terminal.read_until(b"\n> ")
                self.assertEqual(self.statistics(shown[shown.rindex(b"\ncontext ") + 1:-3])[:2], (n_prompt, n_reply))


class QuantizeTest(CliTest):
    """From outside: what is written runs, and nothing is lost or left behind. Bits: quantize_test, quantize_model_test."""

    def logits(self, model):
        path = self.folder / "logits.safetensors"
        self.succeed("trace", model, "--ids", "5,9,200,7,31", "--device", "reference", "-o", path)
        return read_tensors(path)["logits"][1]

    def quantize(self, source, name, *options):
        """The folder that was written, and what was said on standard error."""
        folder = self.folder / name
        result = self.succeed("quantize", source, folder, *options)
        self.assertEqual(result.stdout, b"")
        self.assertEqual(list(self.folder.glob(f"{name}.*")), [])
        return folder, result.stderr.decode()

    def test_without_loss_the_logits_are_the_same(self):
        for name in GOLDEN_NAMES:
            with self.subTest(model=name):
                wide, said = self.quantize(GOLDEN / name, f"{name}-f32", "--format", "f32")
                self.assertIn("f32 is exact", said)
                self.assertIn(" vectors (norms, scales)", said)
                narrow, _ = self.quantize(wide, f"{name}-bf16", "--format", "bf16")
                expected = self.logits(GOLDEN / name)
                self.assertEqual(self.logits(wide), expected)
                self.assertEqual(self.logits(narrow), expected)

    def test_formats_with_loss_run_and_are_what_inspect_says(self):
        for name in GOLDEN_NAMES:
            for layers in ("nvfp4", "mxfp4", "q4_0", "q8_0", "fp8"):
                with self.subTest(model=name, format=layers):
                    folder, said = self.quantize(GOLDEN / name, f"{name}-{layers}", "--format", layers, "--head", "fp8")
                    self.assertRegex(said, rf"\b{layers} is off by [\d.]+ % \(rms\)")
                    self.assertTrue(all(abs(value) < 1e4 for value in self.logits(folder)))   # NaN is not < either
                    text = self.succeed("inspect", folder).stdout.decode()
                    self.assertRegex(text, rf"(?m)^  {layers} +\d+ matrices")
                    self.assertRegex(text, r"(?m)^  fp8 +\d+ matrices")

    def test_the_tokenizer_travels_and_the_reply_is_the_same(self):
        model = make_speaking_model(self.folder / "speaking", suppressed=STOPS)
        folder, _ = self.quantize(model, "speaking-f32", "--format", "f32")
        arguments = ["-p", "Hello", "-n", "20", "--temp", "0"]
        self.assertEqual(self.succeed("run", folder, *arguments).stdout, self.succeed("run", model, *arguments).stdout)
        for path in model.iterdir():
            if path.name != "model.safetensors":
                self.assertEqual((folder / path.name).read_bytes(), path.read_bytes())

    def test_wrong_command_lines(self):
        model, out = GOLDEN / "llama", self.folder / "out"
        for arguments, *parts in ((["quantize"], "SRC or --synthetic"),
                                  (["quantize", model], "DST"),
                                  (["quantize", "--synthetic", "smollm2-135m"], "DST"),
                                  (["quantize", model, out, "--synthetic", "smollm2-135m"], "either"),
                                  (["quantize", model, out, "--format", "q9"], "--format", "'q9'", "fp4"),
                                  (["quantize", model, out, "--format", "i32"], "--format", "'i32'"),
                                  (["quantize", model, out, "--head", "q9"], "--head", "'q9'"),
                                  (["quantize", model, out, "--threads", "0"], "--threads"),
                                  (["quantize", model, self.folder / "out.safetensors"], "folder"),
                                  (["quantize", model, out, "x"], "x")):
            with self.subTest(arguments=arguments):
                self.assert_fails(beryl(*arguments), 2, *parts)
        self.assert_fails(beryl("quantize", "--synthetic", "gemma5", out), 1, "gemma5", "gemma4-12b")
        self.assertFalse(out.exists())

    def test_destinations_are_not_harmed(self):
        model = self.folder / "model"
        shutil.copytree(GOLDEN / "llama", model)
        before = {path.name: path.read_bytes() for path in model.iterdir()}
        for options in ([], ["--force"]):
            self.assert_fails(beryl("quantize", model, model, *options), 1, "the model to read")
            self.assert_fails(beryl("quantize", model, self.folder / "absent" / "out", *options), 1, "No such file")
        self.assertEqual({path.name: path.read_bytes() for path in model.iterdir()}, before)
        out, _ = self.quantize(model, "kept", "--format", "q8_0")
        self.assert_fails(beryl("quantize", model, out), 1, "--force")
        self.assertIn("q8_0", self.succeed("inspect", out).stdout.decode())
        self.quantize(model, "kept", "--format", "bf16", "--force")
        self.assertNotIn("q8_0", self.succeed("inspect", out).stdout.decode())
        (out / "thesis.txt").write_text("precious")
        self.assert_fails(beryl("quantize", model, out, "--force"), 1, "thesis.txt")
        self.assertEqual((out / "thesis.txt").read_text(), "precious")

    def test_a_weight_that_is_not_finite_is_named_and_nothing_is_left(self):
        model = self.folder / "sick"
        shutil.copytree(GOLDEN / "llama", model)
        name = "model.layers.1.mlp.up_proj.weight"
        _, (rows, cols), begin, end = read_header(model / "model.safetensors")[name]
        for bits, value in ((0x7fc0, "nan"), (0xff80, "-inf")):
            data = bytearray((GOLDEN / "llama" / "model.safetensors").read_bytes())
            at = begin + 2 * (3 * cols + 5)
            data[at:at + 2] = struct.pack("<H", bits)
            (model / "model.safetensors").write_bytes(data)
            for layers in ("bf16", "f32", "q8_0", "nvfp4"):
                with self.subTest(value=value, format=layers):
                    self.assert_fails(beryl("quantize", model, self.folder / "none", "--format", layers), 1, name,
                                      f"has {value} at row 3, column 5")
                    self.assertEqual(list(self.folder.glob("none*")), [])

    def test_a_full_disk_is_one_line_and_nothing_is_left(self):
        def limit():   # a file may have 100 kB: as on a full disk, but with another word for it
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        # Python ignores the signal that comes with it, and so does its child.
        result = beryl("quantize", GOLDEN / "llama", self.folder / "full", "--format", "f32", preexec_fn=limit,
                       restore_signals=False)
        self.assert_fails(result, 1, f"{self.folder / 'full' / 'model.safetensors'}: cannot write", "File too large")
        self.assertEqual(list(self.folder.glob("full*")), [])

    def test_a_synthetic_model_in_bounded_memory(self):
        def quantize(*arguments):
            process = beryl.start("quantize", *arguments, "--threads", "2")
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            self.assertEqual(process.returncode, 0, process.stderr.read())
            process.stdout.close()
            process.stderr.close()
            return usage.ru_maxrss * 1024
        wide, narrow = self.folder / "random", self.folder / "random-q8"
        wrote = quantize("--synthetic", "smollm2-135m", wide, "--format", "bf16")
        read = quantize(wide, narrow, "--format", "q8_0")
        self.assertGreater((wide / "model.safetensors").stat().st_size, 260e6)
        self.assertGreater((narrow / "model.safetensors").stat().st_size, 140e6)
        for peak in (wrote, read):
            self.assertLess(peak, 70e6)
        text = self.succeed("inspect", narrow).stdout.decode()
        self.assertRegex(text, r"(?m)^parameters +13[45] million")
        self.assertRegex(text, r"(?m)^  q8_0 +211 matrices")
        result = self.succeed("trace", narrow, "--ids", "1,2,3", "-o", self.folder / "t.safetensors")
        self.assertNotIn(b"NaN", result.stderr)

    def test_ctrl_c_leaves_nothing(self):
        for moment in range(3):
            process = beryl.start("quantize", "--synthetic", "smollm2-135m", self.folder / "stopped", "--format", "q4_k",
                                  "--threads", "1")
            def written():
                files = list(self.folder.glob("stopped.partial-*/model.safetensors.partial-*"))
                return bool(files) and files[0].stat().st_size > 0
            wait_until(written)
            time.sleep(0.1 * moment)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=60)
            self.assertEqual(process.returncode, 130, stderr)
            self.assertIn(b"nothing was written", stderr)
            self.assertEqual(list(self.folder.glob("stopped*")), [])

    def test_progress_is_a_line_on_a_terminal_only(self):
        arguments = ["quantize", "--synthetic", "smollm2-135m", "--format", "bf16", "--threads", "2"]
        with Terminal(beryl, *arguments, self.folder / "terminal") as terminal:
            self.assertEqual(terminal.wait(), 0)
            lines = terminal.seen.split(b"\n")
        self.assertRegex(lines[0], rb"\A(\r\x1b\[K *[\d.]+ %  \d+ M weights/s[^\r]*)+\r\x1b\[K[^\r]*kept as they are")
        self.assertNotIn(b"\r", b"\n".join(lines[1:]))
        result = self.succeed(*arguments, self.folder / "elsewhere")
        self.assertNotIn(b"\r", result.stderr)
        self.assertEqual(result.stderr.count(b"\n"), 2)


@unittest.skipUnless(SMOLLM2.exists(), f"{SMOLLM2} is not there")
class SmolLM2Test(CliTest):
    QUESTION = "Why is the sky blue?"

    def answer(self, *options, **more):
        return self.succeed("run", SMOLLM2, "--temp", "0", "-n", "24", *options, **more)

    def test_the_same_answer_each_time_and_from_standard_input(self):
        first = self.answer("-p", self.QUESTION)
        self.assertGreater(len(first.stdout.decode().split()), 8)
        self.assertEqual(first.stderr.decode().count("\n"), 1)           # no warning: the file has a template
        self.assertEqual(self.answer("-p", self.QUESTION).stdout, first.stdout)
        self.assertEqual(self.answer(stdin=self.QUESTION.encode() + b"\n").stdout, first.stdout)

    def test_the_answer_streams(self):
        process = beryl.start("run", SMOLLM2, "--temp", "0", "-p", self.QUESTION)
        pieces = []
        while piece := process.stdout.read(4096):
            pieces.append(piece)
        self.assertEqual(process.wait(60), 0)
        process.stdout.close()
        process.stderr.close()
        # All of it would fit into one read: a program that kept it back would have written it at once.
        self.assertLess(sum(map(len, pieces)), 4096)
        self.assertGreater(len(pieces), 10)
        self.assertLess(len(pieces[0]), sum(map(len, pieces)) / 2)

    def test_ctrl_c(self):
        process = beryl.start("run", SMOLLM2, "--temp", "0", "-p", self.QUESTION)
        data = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, stderr = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 130)
        self.assertTrue((data + rest).decode("utf-8").endswith("\n"))
        self.statistics(stderr)

    def test_valid_utf8_wherever_emoji_are_cut(self):
        prompt = "😀\n" * 5
        texts = []
        for n in range(1, 11):
            text = self.succeed("run", SMOLLM2, "--raw", "--temp", "0", "-n", n, "-p", prompt).stdout.decode("utf-8")
            texts.append(text.removesuffix("\n"))
        self.assertIn("😀", texts[-1])
        self.assertTrue(any(text.endswith("\ufffd") for text in texts))   # cut inside a character at least once
        for shorter, longer in zip(texts, texts[1:]):
            self.assertTrue(longer.startswith(shorter.rstrip("\ufffd")))

    def test_a_conversation(self):
        with Terminal(beryl, "chat", SMOLLM2, "--temp", "0", "-n", "16", environment={"NO_COLOR": "1", "TERM": "dumb"}) as terminal:
            terminal.read_until(b"> ")
            prompts = []
            for text in (b"My name is Ada.", b"What did I say?"):
                terminal.write(text + b"\n")
                shown = terminal.read_until(b"\n> ").decode("utf-8")
                prompts.append(int(re.search(r"prompt (\d+) tokens", shown)[1]))
            self.assertLess(prompts[1], prompts[0])                       # the system text is not read again
            terminal.write(b"\x04")
            self.assertEqual(terminal.wait(), 0)


class RealModelTest(CliTest):
    FILES = {"smollm2-135m-instruct-q4_1": SMOLLM2, "gemma3-270m-q4_k_m": GEMMA3}

    def test_tokens_of_all_recorded_texts(self):
        cases = json.loads((GOLDEN / "tokenizer_cases.json").read_text())["cases"]
        for name, path in (("smollm2", SMOLLM2), ("gemma3", GEMMA3)):
            if not path.exists():
                self.skipTest(f"{path} is not there")
            for case in cases:
                data = bytes.fromhex(case["hex"]) if "hex" in case else case["text"].encode()
                if len(data) > 2000 or name not in case:                  # speed is tested elsewhere
                    continue
                plain = case.get(f"{name}_plain")                         # where it differs
                for options, ids in [(["--special"], case[name])] + ([([], plain)] if plain is not None else []):
                    with self.subTest(tokenizer=name, case=case["name"], options=options):
                        output = self.succeed("tokenize", path, "--ids", *options, stdin=data).stdout.decode()
                        self.assertEqual(output, ids_text(ids) + "\n")

    def test_traces_equal_the_recorded_logits(self):
        # The recorded values are double precision; --exact computes in f32, and by default activations have 8 bits.
        for name, model in json.loads((GOLDEN / "real_models.json").read_text())["models"].items():
            if not self.FILES[name].exists():
                self.skipTest(f"{self.FILES[name]} is not there")
            with self.subTest(model=name):
                n = model["agree_first"]
                found = self.trace(self.FILES[name], "--ids", ids_text(model["prompt"]), "--greedy", n, "--exact")
                self.assertEqual(list(found["greedy"][1]), model["greedy_llamacpp"][:n])
                (n_tokens, vocab), logits = found["logits"]
                self.assertEqual(n_tokens, len(model["prompt"]))
                for token, value in model["top_fp64"]:
                    self.assertAlmostEqual(logits[(n_tokens - 1) * vocab + token], value, delta=1e-2)
                _, logits = self.trace(self.FILES[name], "--ids", ids_text(model["prompt"]), "--device", "cpu")["logits"]
                for token, value in model["top_fp64"]:
                    self.assertAlmostEqual(logits[(n_tokens - 1) * vocab + token], value, delta=0.7)

    def test_a_quantised_copy_is_the_same_model_nearly(self):
        for name, path in self.FILES.items():
            if not path.exists():
                continue
            with self.subTest(model=name):
                folder = self.folder / name
                result = self.succeed("quantize", path, folder, "--format", "q8_0")
                self.assertRegex(result.stderr.decode(), r"\Aberyl: warning: [^\n]* is quantised itself")
                self.assertRegex(self.succeed("inspect", folder).stdout.decode(), r"(?m)^container .*GGUF's metadata")
                text = "Grüße, 世界! 🙂\n  def f(x):\n\treturn x ** 2"
                self.assertEqual(self.succeed("tokenize", folder, text).stdout,
                                 self.succeed("tokenize", path, text).stdout)
                prompt = json.loads((GOLDEN / "real_models.json").read_text())["models"][name]["prompt"]
                vocab, logits = 0, []
                for model in (path, folder):
                    (_, vocab), values = self.trace(model, "--ids", ids_text(prompt), "--exact")["logits"]
                    logits.append(values[-vocab:])
                mean = sum(logits[0]) / vocab
                spread = sum((value - mean) ** 2 for value in logits[0])
                # Weights off by 0.5 % cannot move the logits by a tenth of their spread; a lost norm moves them all.
                self.assertLess(sum((a - b) ** 2 for a, b in zip(*logits)), 0.01 * spread)
                self.assertEqual(max(range(vocab), key=logits[0].__getitem__),
                                 max(range(vocab), key=logits[1].__getitem__))

    @unittest.skipUnless(GEMMA3.exists(), f"{GEMMA3} is not there")
    def test_a_base_model_goes_on_with_a_text_and_chats_with_a_warning(self):
        model = json.loads((GOLDEN / "real_models.json").read_text())["models"]["gemma3-270m-q4_k_m"]
        raw = self.succeed("run", GEMMA3, "--raw", "-p", "The capital of France is", "-n", "12", "--temp", "0",
                           "--exact")
        self.assertEqual(self.statistics(raw.stderr)[:2], (len(model["prompt"]), 12))
        self.assertEqual(raw.stderr.count(b"\n"), 1)
        again = self.succeed("tokenize", GEMMA3, "--ids", raw.stdout.decode().removesuffix("\n")).stdout.decode()
        self.assertEqual([int(token) for token in again.split(",")], model["greedy_llamacpp"][:12])
        chat = self.succeed("run", GEMMA3, "-p", "Hello", "-n", "3")
        self.assertEqual(chat.stderr.count(b"\n"), 2)
        self.assertRegex(chat.stderr.decode(), r"\Aberyl: warning: .*Gemma 3")


def main():
    global beryl
    if len(sys.argv) < 3 or sys.argv[2] not in ("tiny", "real"):
        sys.exit("usage: cli_test.py BERYL tiny|real [UNITTEST OPTIONS]")
    beryl = Program(pathlib.Path(sys.argv[1]).resolve())
    real = ["SmolLM2Test", "RealModelTest"]
    tiny = [name for name, value in globals().items() if isinstance(value, type) and issubclass(value, CliTest)
            and name.endswith("Test") and name not in (*real, "CliTest")]
    if sys.argv[2] == "real" and not SMOLLM2.exists() and not GEMMA3.exists():
        print(f"skipped: neither {SMOLLM2} nor {GEMMA3} is there")
        sys.exit(SKIPPED)
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]], defaultTest=real if sys.argv[2] == "real" else tiny)


if __name__ == "__main__":
    main()
