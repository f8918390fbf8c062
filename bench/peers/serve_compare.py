#!/usr/bin/env python3
"""beryl serve beside llama-server: the same file, the same requests, in turn.

    bench/peers/serve_compare.py --beryl build/beryl --peer FOLDER/build/bin/llama-server MODEL.gguf
        --streams 1,4,16 --prompt 128 --gen 64 --rounds 5 --threads 2

In each round each server is started anew for each number of streams, so that neither finds anything in its caches, warmed by one
request, and asked by so many clients at once: POST /v1/completions, streamed, greedy, of a text of its own for each client, ended by
the number of tokens alone. Figures, medians (least .. most) over the rounds: tokens of all replies a second, from the first request to
the last token; and the time to a client's first token, the mean of all clients and the last one's. --prefix 'chrt -f 5' gives the
servers a priority that other programs do not have; start this script with a higher one then, it has little to do.
"""
import argparse
import http.client
import json
import pathlib
import random
import shlex
import socket
import statistics
import subprocess
import threading
import time

WORDS = ("river stone light winter garden letter engine paper window market silver mountain history music bridge summer forest "
         "captain island season village doctor kitchen journey morning science harbor valley teacher machine").split()


def prompt(seed, n_words):
    draw = random.Random(seed)
    return "The story begins here: " + " ".join(draw.choice(WORDS) for _ in range(n_words)) + "."


class Server:
    """Started, and ready."""

    def __init__(self, command):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(self.port)], stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL)
        for _ in range(600):
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise SystemExit(f"{shlex.join(command)}: does not start")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()

    def complete(self, text, n_tokens):
        """(time of the first token, time of the last, tokens)"""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        # What ends a text is banned for the one by its ids, for the other by a word of its own; each passes over the other's.
        connection.request("POST", "/v1/completions", json.dumps({
            "prompt": text, "max_tokens": n_tokens, "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
            "ignore_eos": True, "logit_bias": {str(token): -100 for token in self.stops}}), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"{answer.status}: {answer.read()[:300]}")
        first = last = n = None
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event["choices"] and event["choices"][0].get("text"):
                last = time.perf_counter()
                first = first or last
            if event.get("usage"):
                n = event["usage"]["completion_tokens"]
        return first, last, n

    stops = ()


def measure(command, options, n_streams, seed):
    """(tokens a second, mean time to the first token, the longest)"""
    with Server(command) as server:
        server.stops = options.stop_ids
        server.complete(prompt(f"warm {seed}", 8), 8)
        results = [None] * n_streams
        gate = threading.Barrier(n_streams + 1)

        def client(i):
            text = prompt(f"{seed} {i}", options.prompt)
            gate.wait()
            results[i] = server.complete(text, options.gen)

        threads = [threading.Thread(target=client, args=(i,)) for i in range(n_streams)]
        for thread in threads:
            thread.start()
        gate.wait()
        begin = time.perf_counter()
        for thread in threads:
            thread.join()
    if any(result is None or result[2] != options.gen for result in results):
        raise SystemExit(f"{shlex.join(command)}: replies of {[result and result[2] for result in results]} tokens instead of {options.gen}")
    firsts = [first - begin for first, _, _ in results]
    return n_streams * options.gen / (max(last for _, last, _ in results) - begin), statistics.mean(firsts), max(firsts)


def words(values, digits):
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} .. {max(values):.{digits}f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--beryl", default="build/beryl", type=pathlib.Path)
    parser.add_argument("--peer", required=True, type=pathlib.Path, help="a built llama-server")
    parser.add_argument("--streams", default="1,4,16")
    parser.add_argument("--prompt", default=128, type=int, help="words, about as many tokens")
    parser.add_argument("--gen", default=64, type=int)
    parser.add_argument("--rounds", default=5, type=int)
    parser.add_argument("--threads", default=2, type=int)
    parser.add_argument("--context", default=512, type=int, help="of each stream")
    parser.add_argument("--stop-ids", default="1,106", type=lambda text: [int(part) for part in text.split(",")],
                        help="what ends a text for this model (default: Gemma 3's)")
    parser.add_argument("--beryl-options", default="", help="for example --no-draft")
    parser.add_argument("--peer-options", default="", help="for example --poll 0, without which its threads starve each other under a real-time priority")
    parser.add_argument("--prefix", default="", help="before every server, for example 'chrt -f 5'")
    parser.add_argument("--record", type=pathlib.Path, help="a file that a line of JSON a round is added to")
    options = parser.parse_args()
    print("| streams | tokens a second: beryl | llama-server | ratio | first token, ms: beryl | llama-server | the last client's: beryl | llama-server |\n"
          "|---|---|---|---|---|---|---|---|")
    for n in map(int, options.streams.split(",")):
        own = [*shlex.split(options.prefix), str(options.beryl), "serve", str(options.model), "--device", "cpu", "--threads", str(options.threads),
               "--parallel", str(n), "--ctx", str(options.context), *shlex.split(options.beryl_options)]
        peer = [*shlex.split(options.prefix), str(options.peer), "-m", str(options.model), "-t", str(options.threads), "-tb", str(options.threads),
                "-np", str(n), "-c", str(n * options.context), *shlex.split(options.peer_options)]
        found = {"beryl": [], "peer": []}
        for round_number in range(options.rounds):
            for name, command in (("beryl", own), ("peer", peer)):
                found[name].append(measure(command, options, n, f"{round_number} {n}"))
            if options.record:
                with options.record.open("a") as record:
                    print(json.dumps({"streams": n, "beryl_options": options.beryl_options, **{name: results[-1] for name, results in found.items()}}), file=record)
        speed, mean, longest = ({name: [result[i] for result in results] for name, results in found.items()} for i in range(3))
        ratio = statistics.median(speed["beryl"]) / statistics.median(speed["peer"])
        ms = lambda values: words([1e3 * value for value in values], 0)
        print(f"| {n} | {words(speed['beryl'], 1)} | {words(speed['peer'], 1)} | {ratio:.2f} | {ms(mean['beryl'])} | {ms(mean['peer'])} | "
              f"{ms(longest['beryl'])} | {ms(longest['peer'])} |", flush=True)


if __name__ == "__main__":
    main()
