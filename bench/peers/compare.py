#!/usr/bin/env python3
"""beryl beside llama.cpp (or whatever has a program with llama-bench's options): the same files, one run, in turn.

    bench/peers/compare.py --beryl build/beryl --peer FOLDER/build/bin/llama-bench MODEL.gguf...
        --threads 2,1 --prompt 512 --gen 128 --depth 0 --rounds 5

A model may also be NAME:FORMAT:HEAD=FILE.gguf: beryl then runs `bench --synthetic NAME --format FORMAT --head HEAD`, the peers the
file, for formats that they do not have.

In each round every program runs once on each model and thread count, one after the other, and measures --repeat times; its median
counts. beryl reads memory at full speed between its repetitions (`bench --floor`), because machines that are shared change theirs: the share
is of that speed, by the bytes that a token must move (weights, live cache). Figures are tokens a second: median (least .. most) over the
rounds; the ratio is beryl's median to the peer's. --record FILE keeps each round, a line of JSON. At real-time priority the system still
gives a twentieth of each second to others, on each processor at a time of its own: short measurements, often repeated, are mostly free of
that (--gen 8 --repeat 9). Peers without the option --n-depth are compared at depth 0 only.

With --load, instead: a whole process that loads a file which is in memory, reads a prompt of about six tokens and writes one. Seconds from its
start to its end, and the most memory that it had, in MB; the ratio of seconds is the peer's to beryl's. With --memory: the same of a process
that measures a prompt of --prompt tokens once, and 8 tokens behind nothing.
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


def speeds(program, model, n_threads, options, is_beryl):
    """What each test's JSON line says, by name."""
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
        text = output_of(program, "bench", *subject, "--device", "cpu", "--threads", n_threads, "--floor", *arguments)
    else:
        text = output_of(program, *subject, "-t", n_threads, *arguments)
    return {f"pp{each['n_prompt']}" if each["n_prompt"] else f"tg{each['n_gen']}": each for each in json.loads(text)}


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


def compare_processes(options):
    print("| model | threads | peer | s | peer's s | ratio | MB | peer's MB |\n|---|---|---|---|---|---|---|---|")
    help_of = {peer: subprocess.run([peer, "--help"], capture_output=True, text=True).stdout for peer in options.peer}
    measures = ["-p", options.prompt, "-n", 8, "-r", 1]

    def beryl_command(model, n_threads):
        machine = ["--device", "cpu", "--threads", n_threads]
        if options.memory:
            return [options.beryl, "bench", model, *machine, *measures]
        return [options.beryl, "run", model, *machine, "--raw", "-p", "The quick brown fox jumps", "-n", 1]

    def peer_command(peer, model, n_threads):
        if options.memory:
            return [peer, "-m", model, "-t", n_threads, *measures]
        no_warm_up = ["--no-warmup"] if "--no-warmup" in help_of[peer] else ["--warmup", "0"]
        return [peer, "-m", model, "-t", n_threads, "-p", 6, "-n", 1, "-r", 1, *no_warm_up]

    for n_threads in options.threads.split(","):
        for model in options.models:
            own, theirs = [], {peer: [] for peer in options.peer}
            for _ in range(options.rounds):
                own.append(process(*beryl_command(model, n_threads)))
                for peer in options.peer:
                    theirs[peer].append(process(*peer_command(peer, model, n_threads)))
            for peer, found in theirs.items():
                (seconds, memory), (peer_seconds, peer_memory) = zip(*own), zip(*found)
                ratio = statistics.median(peer_seconds) / statistics.median(seconds)
                print(f"| {short_name(model)} | {n_threads} | {peer} | {words(seconds, 3)} | {words(peer_seconds, 3)} | {ratio:.2f} | "
                      f"{words(memory)} | {words(peer_memory)} |", flush=True)
            if options.record:
                with options.record.open("a") as record:
                    for i, (seconds, memory) in enumerate(own):
                        print(json.dumps({"model": short_name(model), "threads": int(n_threads),
                                          "test": f"memory pp{options.prompt}" if options.memory else "load",
                                          "beryl": [seconds, memory], **{str(peer): found[i] for peer, found in theirs.items()}}),
                              file=record)


def short_name(model):
    synthetic, _, file = model.rpartition("=")
    return synthetic or pathlib.Path(file).stem


def medians(lines, key):
    """Of each round's repetitions; empty where the test has no such figures."""
    return [statistics.median(line[key]) for line in lines if key in line]


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
    parser.add_argument("--repeat", default=5, type=int, help="times that a program measures in a round, of which the median counts")
    parser.add_argument("--prefix", default="", help="before every command, for example 'chrt -f 5'")
    parser.add_argument("--record", type=pathlib.Path, help="a file that a line of JSON a round and test is added to")
    parser.add_argument("--load", action="store_true", help="compare loading and memory instead of speeds")
    parser.add_argument("--memory", action="store_true", help="compare memory with a prompt instead of speeds")
    options = parser.parse_args()
    PREFIX.extend(options.prefix.split())
    if options.load or options.memory:
        return compare_processes(options)
    if options.depth > 0:
        options.peer = [peer for peer in options.peer
                        if "--n-depth" in subprocess.run([peer, "--help"], capture_output=True, text=True).stdout]
        if not options.peer:
            sys.exit("no peer has the option --n-depth")
    print("| model | threads | test | peer | beryl | peer's | ratio | GB/s read | share |\n|---|---|---|---|---|---|---|---|---|")
    for n_threads in options.threads.split(","):
        for model in options.models:
            own, theirs = {}, [{} for _ in options.peer]
            for _ in range(options.rounds):
                for program, results in [(options.beryl, own), *zip(options.peer, theirs)]:
                    for test, line in speeds(program, model, n_threads, options, results is own).items():
                        results.setdefault(test, []).append(line)
            for test, lines in own.items():
                values, reads, shares = (medians(lines, key) for key in ("samples_ts", "samples_read_gb_s", "samples_share_of_read"))
                others = [medians(results[test], "samples_ts") for results in theirs]
                if options.record:
                    with options.record.open("a") as record:
                        for i, line in enumerate(lines):
                            print(json.dumps({"model": short_name(model), "threads": int(n_threads), "test": test, "depth": options.depth,
                                              "repeat": options.repeat, "step_bytes": line.get("step_bytes"), "read_gb_s": reads[i],
                                              "share": shares[i] if shares else None, "beryl": values[i],
                                              **{str(peer): found[i] for peer, found in zip(options.peer, others)}}), file=record)
                share = f"{statistics.median(shares):.0%} ({min(shares):.0%} .. {max(shares):.0%})" if shares else ""
                name = test + (f" @ d{options.depth}" if options.depth else "")
                for peer, found in zip(options.peer, others):
                    ratio = statistics.median(values) / statistics.median(found)
                    print(f"| {short_name(model)} | {n_threads} | {name} | {peer} | {words(values)} | {words(found)} | "
                          f"{ratio:.2f} | {words(reads)} | {share} |", flush=True)


if __name__ == "__main__":
    main()
