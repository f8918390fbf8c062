#!/usr/bin/env python3
"""beryl beside llama.cpp (or whatever has a program with llama-bench's options): the same files, one run, in turn.

    bench/peers/compare.py --beryl build/beryl --peer FOLDER/build/bin/llama-bench MODEL.gguf...
        --threads 2,1 --prompt 512 --gen 128 --depth 0 --rounds 5

A model may also be NAME:FORMAT:HEAD=FILE.gguf: beryl then runs `bench --synthetic NAME --format FORMAT --head HEAD`, the peers the
file, for formats that they do not have.

In each round every program runs once on each model and thread count, one after the other, and before them memory is read
at full speed, because machines that are shared change theirs. Figures are tokens a second: median (least .. most) over the
rounds; the ratio is beryl's median to the peer's; the share is the median of what beryl reached of the read speed measured in the
same round, if a token moved the file's weights once. --record FILE keeps each round, a line of JSON: a machine may change its state between
rounds. At real-time priority the system still gives a twentieth of each second to others, on each processor at a time of its own: short
measurements with --repeat are mostly free of that (--gen 8 --repeat 9). Peers without the option --n-depth are compared at depth 0 only.

With --load, instead: a whole process that loads a file which is in memory, reads a prompt of about six tokens and writes one. Seconds from its
start to its end, and the most memory that it had, in MB; the ratio of seconds is the peer's to beryl's.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

PREFIX = []


def output_of(*command):
    result = subprocess.run([*PREFIX, *map(str, command)], capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: {result.stderr.strip()[-500:]}")
    return result.stdout


def read_speed(beryl, n_threads):
    rows = output_of(beryl, "bench", "--read", "--threads", n_threads, "-r", 5).strip().splitlines()
    return float(rows[-1].split("|")[4])


def speeds(program, model, n_threads, options, is_beryl):
    """{(test, depth): tokens a second}, and the bytes of the weights."""
    arguments = ["-p", options.prompt, "-n", options.gen, "-r", options.repeat, "-o", "json"]
    if options.depth > 0:
        arguments += ["-d", options.depth]
    synthetic, _, file = model.rpartition("=")
    if is_beryl and synthetic:
        name, layers, head = synthetic.split(":")
        subject = ["--synthetic", name, "--format", layers, "--head", head]
    else:
        subject = [file] if is_beryl else ["-m", file]
    if is_beryl:
        text = output_of(program, "bench", *subject, "--device", "cpu", "--threads", n_threads, *arguments)
    else:
        text = output_of(program, *subject, "-t", n_threads, *arguments)
    results = json.loads(text)
    return {f"pp{each['n_prompt']}" if each["n_prompt"] else f"tg{each['n_gen']}": statistics.median(each["samples_ts"])
            for each in results}, results[0]["model_size"]


def process(*command):
    """Seconds and MB of a whole process."""
    start = time.monotonic()
    with open(os.devnull, "w") as nowhere:
        child = subprocess.Popen([*PREFIX, *map(str, command)], stdout=nowhere, stderr=nowhere)
        _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} ended with {child.returncode}")
    return time.monotonic() - start, usage.ru_maxrss * 1024e-6


def compare_loading(options):
    print("| model | threads | peer | s | peer's s | ratio | MB | peer's MB |\n|---|---|---|---|---|---|---|---|")
    help_of = {peer: subprocess.run([peer, "--help"], capture_output=True, text=True).stdout for peer in options.peer}
    for n_threads in options.threads.split(","):
        for model in options.models:
            own, theirs = [], {peer: [] for peer in options.peer}
            for _ in range(options.rounds):
                own.append(process(options.beryl, "run", model, "--device", "cpu", "--threads", n_threads, "--raw", "-p",
                                   "The quick brown fox jumps", "-n", 1))
                for peer in options.peer:
                    no_warm_up = ["--no-warmup"] if "--no-warmup" in help_of[peer] else ["--warmup", "0"]
                    theirs[peer].append(process(peer, "-m", model, "-t", n_threads, "-p", 6, "-n", 1, "-r", 1, *no_warm_up))
            for peer, found in theirs.items():
                (seconds, memory), (peer_seconds, peer_memory) = zip(*own), zip(*found)
                ratio = statistics.median(peer_seconds) / statistics.median(seconds)
                print(f"| {short_name(model)} | {n_threads} | {peer} | {words(seconds, 3)} | {words(peer_seconds, 3)} | {ratio:.2f} | "
                      f"{words(memory)} | {words(peer_memory)} |", flush=True)
            if options.record:
                with options.record.open("a") as record:
                    for i, (seconds, memory) in enumerate(own):
                        print(json.dumps({"model": short_name(model), "threads": int(n_threads), "test": "load",
                                          "beryl": [seconds, memory], **{str(peer): found[i] for peer, found in theirs.items()}}),
                              file=record)


def short_name(model):
    synthetic, _, file = model.rpartition("=")
    return synthetic or pathlib.Path(file).stem


def words(values, digits=1):
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} .. {max(values):.{digits}f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--beryl", default="build/beryl", type=pathlib.Path)
    parser.add_argument("--peer", action="append", required=True, type=pathlib.Path, help="a built llama-bench; may be repeated")
    parser.add_argument("--threads", default="2,1")
    parser.add_argument("--prompt", default=512, type=int)
    parser.add_argument("--gen", default=128, type=int)
    parser.add_argument("--depth", default=0, type=int)
    parser.add_argument("--rounds", default=5, type=int)
    parser.add_argument("--repeat", default=1, type=int, help="times that a program measures in a round, of which the median counts")
    parser.add_argument("--prefix", default="", help="before every command, for example 'chrt -f 5'")
    parser.add_argument("--record", type=pathlib.Path, help="a file that a line of JSON a round and test is added to")
    parser.add_argument("--load", action="store_true", help="compare loading and memory instead of speeds")
    options = parser.parse_args()
    PREFIX.extend(options.prefix.split())
    if options.load:
        return compare_loading(options)
    if options.depth > 0:
        options.peer = [peer for peer in options.peer
                        if "--n-depth" in subprocess.run([peer, "--help"], capture_output=True, text=True).stdout]
        if not options.peer:
            sys.exit("no peer has the option --n-depth")
    print("| model | threads | test | peer | beryl | peer's | ratio | GB/s read | share |\n|---|---|---|---|---|---|---|---|---|")
    for n_threads in options.threads.split(","):
        for model in options.models:
            own, theirs, reads, n_bytes = {}, [{} for _ in options.peer], [], 0
            for _ in range(options.rounds):
                reads.append(read_speed(options.beryl, n_threads))
                found, n_bytes = speeds(options.beryl, model, n_threads, options, True)
                for test, value in found.items():
                    own.setdefault(test, []).append(value)
                for peer, results in zip(options.peer, theirs):
                    for test, value in speeds(peer, model, n_threads, options, False)[0].items():
                        results.setdefault(test, []).append(value)
            for test, values in own.items():
                if options.record:
                    with options.record.open("a") as record:
                        for i, value in enumerate(values):
                            print(json.dumps({"model": short_name(model), "threads": int(n_threads), "test": test,
                                              "depth": options.depth, "bytes": n_bytes, "read_gb_s": reads[i], "beryl": value,
                                              **{str(peer): results[test][i] for peer, results in zip(options.peer, theirs)}}),
                                  file=record)
                share = ""
                if test.startswith("tg") and options.depth == 0:
                    share = f"{statistics.median(value * n_bytes * 1e-9 / read for value, read in zip(values, reads)):.0%}"
                name = test + (f" @ d{options.depth}" if options.depth else "")
                for peer, results in zip(options.peer, theirs):
                    ratio = statistics.median(values) / statistics.median(results[test])
                    print(f"| {short_name(model)} | {n_threads} | {name} | {peer} | {words(values)} | {words(results[test])} | "
                          f"{ratio:.2f} | {words(reads)} | {share} |", flush=True)


if __name__ == "__main__":
    main()
