"""What server_test.py needs: a running server, and the clients' Python packages in an environment of their own."""
import json
import pathlib
import re
import select
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import prepare_test_data  # noqa: E402

REQUIREMENTS = ROOT / "tests" / "server_requirements.txt"
SKIPPED = 77


def clients_python():
    """The Python that has the clients' packages; None where they can not be had."""
    return prepare_test_data.python_environment(REQUIREMENTS, "server-test-python")


class Server:
    """beryl serve on a free port; ended with SIGTERM, after which it must end with 0."""

    def __init__(self, program, model, *arguments):
        self.process = program.start("serve", model, "--port", "0", *arguments)
        self.lines = []
        while True:
            ready, _, _ = select.select([self.process.stderr], [], [], 120)
            line = self.process.stderr.readline().decode() if ready else ""
            if not line:
                raise RuntimeError(f"the server did not start: {self.lines}")
            self.lines.append(line)
            found = re.search(r"http://([^ /]+):(\d+)/v1", line)
            if found:
                break
        self.host, self.port = found[1].strip("[]"), int(found[2])
        self.url = f"http://{found[1]}:{self.port}"

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            status = "none, it did not end"
        rest = self.process.stderr.read().decode()
        self.process.stderr.close()
        self.process.stdout.close()
        if kind is None and status != 0:
            raise AssertionError(f"the server ended with {status}: {rest}")

    def request(self, method, path, body=None, headers=None, timeout=60):
        """(status, headers, JSON or text)"""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, method=method,
                                         headers={"Content-Type": "application/json"} | (headers or {}))
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                status, names, content = answer.status, answer.headers, answer.read()
        except urllib.error.HTTPError as error:
            status, names, content = error.code, error.headers, error.read()
        text = content.decode()           # strict: all that comes is UTF-8
        is_json = names.get("Content-Type", "") == "application/json"
        return status, names, json.loads(text) if is_json else text

    def post(self, path, body, **options):
        status, _, answer = self.request("POST", path, body, **options)
        return status, answer

    def events(self, path, body):
        """The data of all events of a stream."""
        status, names, text = self.request("POST", path, body | {"stream": True})
        assert status == 200 and names.get_content_type() == "text/event-stream", (status, text)
        return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]

    def metrics(self):
        _, _, text = self.request("GET", "/metrics")
        return {name: float(value) for name, value in re.findall(r"^beryl_(\S+) (\S+)$", text, re.M)}

    def connect(self):
        return socket.create_connection((self.host, self.port), timeout=60)

    def send_post(self, path, body):
        """A connection that has asked and not read yet."""
        data = json.dumps(body).encode()
        connection = self.connect()
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                           f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return connection
