"""A hub of models and a content server for pull_test.py, in this process, that misbehave as a test tells them to."""
import collections
import dataclasses
import hashlib
import http.server
import json
import re
import struct
import threading
import urllib.parse


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def git_sha1(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def make_gguf(n_floats=256, seed=1, part=None, of=None, quant_name="token_embd.weight"):
    """The smallest file that is GGUF: an architecture and a matrix of pseudo-random floats."""
    def text(value):
        return struct.pack("<Q", len(value)) + value.encode()
    pairs = [text("general.architecture") + struct.pack("<I", 8) + text("llama")]
    if part is not None:
        pairs += [text("split.no") + struct.pack("<IH", 2, part), text("split.count") + struct.pack("<IH", 2, of),
                  text("split.tensors.count") + struct.pack("<Ii", 5, of)]
    name = quant_name if part is None else f"blk.{part}.attn_q.weight"
    tensor = text(name) + struct.pack("<IQIQ", 1, n_floats, 0, 0)
    head = struct.pack("<4sIQQ", b"GGUF", 3, 1, len(pairs)) + b"".join(pairs) + tensor
    head += bytes(-len(head) % 32)
    block = b"".join(hashlib.sha256(b"%d %d" % (seed, i)).digest() for i in range(256))   # 8 kB
    values = bytearray((block * (4 * n_floats // len(block) + 1))[:4 * n_floats])
    values[3::4] = b"\x3f" * len(values[3::4])                     # near 1: finite
    for at in range(0, len(values) - 8, 1 << 16):                  # no two stretches alike
        values[at:at + 3] = struct.pack("<I", at >> 16)[:3]
    return head + bytes(values)


@dataclasses.dataclass
class Request:
    path: str
    headers: dict
    begin: int = None          # of the range asked for
    end: int = None
    server: str = ""


class Server:
    """Threads serve; `handle(request, handler)` may answer instead of the default and then returns True."""

    def __init__(self, host="127.0.0.1"):
        outer = self
        self.requests = []
        self.lock = threading.Lock()
        self.faults = collections.defaultdict(list)     # path's end -> functions(handler, request), used one by one
        self.always = {}                                # path's end -> a function

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 60

            def do_GET(self):
                request = Request(self.path, {key.lower(): value for key, value in self.headers.items()})
                match = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", ""))
                if match:
                    request.begin, request.end = int(match[1]), int(match[2]) + 1
                with outer.lock:
                    outer.requests.append(request)
                    fault = None
                    for ending, function in outer.always.items():
                        if urllib.parse.urlparse(self.path).path.endswith(ending):
                            fault = function
                    for ending, functions in outer.faults.items():
                        if functions and urllib.parse.urlparse(self.path).path.endswith(ending):
                            fault = functions.pop(0)
                            break
                try:
                    if fault:
                        fault(self, request)
                    else:
                        outer.answer(self, request)
                except OSError:                         # the client has left
                    self.close_connection = True

            def log_message(self, *_):
                pass

        class Quiet(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_):
                pass

        self.server = Quiet((host, 0), Handler)
        self.port = self.server.server_address[1]
        self.origin = f"http://{host}:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def asked(self, ending):
        with self.lock:
            return [request for request in self.requests if urllib.parse.urlparse(request.path).path.endswith(ending)]

    def answer(self, handler, request):
        send_status(handler, 404)


def send_status(handler, status, headers=(), body=b""):
    handler.send_response(status)
    for name, value in headers:
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def send_file(handler, request, data, headers=(), keeps=None, ignores_range=False, total=None, then=None):
    """As a good server does; keeps: only that many bytes of the body go out, then the connection ends."""
    begin, end = 0, len(data)
    if request.begin is not None and not ignores_range:
        begin, end = request.begin, min(request.end, len(data))
        if begin >= len(data):
            return send_status(handler, 416, [("Content-Range", f"bytes */{len(data)}")])
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data) if total is None else total}")
    else:
        handler.send_response(200)
    for name, value in headers:
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(end - begin))
    handler.end_headers()
    body = data[begin:end]
    if keeps is not None and keeps < len(body):
        handler.wfile.write(body[:keeps])
        handler.wfile.flush()
        if then:
            then(handler)
        handler.close_connection = True
        return None
    handler.wfile.write(body)
    return None


def wait_for_client(handler):
    """Until the client closes its end."""
    handler.connection.settimeout(60)
    try:
        while handler.connection.recv(4096):
            pass
    except OSError:
        pass


class Content(Server):
    """Serves files by path, with an ETag."""

    def __init__(self, **options):
        super().__init__(**options)
        self.files = {}                                 # path -> bytes
        self.etags = True

    def answer(self, handler, request):
        data = self.files.get(urllib.parse.urlparse(request.path).path)
        if data is None:
            return send_status(handler, 404)
        headers = [("ETag", f'"{sha256(data)[:20]}"')] if self.etags else []
        if request.headers.get("if-range", headers[0][1] if headers else None) != (headers[0][1] if headers else None):
            request = dataclasses.replace(request, begin=None)
        return send_file(handler, request, data, headers)


class Hub(Server):
    """Listings, small files, and redirects to `content` for the large ones."""

    def __init__(self, content):
        super().__init__()
        self.content = content
        self.repositories = {}                          # OWNER/REPO -> {path: bytes}
        self.small = (".json", ".jinja", ".md", ".txt")
        self.listed = {}                                # (repository, path) -> changes of an entry

    def add(self, repository, files):
        self.repositories[repository] = dict(files)
        return f"hf:{repository}"

    def listing(self, repository):
        siblings = []
        for path, data in self.repositories[repository].items():
            entry = {"rfilename": path, "size": len(data), "blobId": git_sha1(data)}
            if not path.endswith(self.small):
                entry |= {"blobId": "0" * 40, "lfs": {"sha256": sha256(data), "size": len(data), "pointerSize": 134}}
            entry |= self.listed.get((repository, path), {})
            siblings.append(entry)
        commit = hashlib.sha1(json.dumps(siblings).encode()).hexdigest()
        return {"id": repository, "sha": commit, "siblings": siblings}

    def answer(self, handler, request):
        path = urllib.parse.unquote(urllib.parse.urlparse(request.path).path)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/([^/]+)", path):
            if match[1] not in self.repositories:
                return send_status(handler, 401, [("X-Error-Code", "RepoNotFound"),
                                                  ("X-Error-Message", "Repository not found")])
            return send_status(handler, 200, [("Content-Type", "application/json")],
                               json.dumps(self.listing(match[1])).encode())
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            data = self.repositories.get(match[1], {}).get(match[3])
            if data is None:
                return send_status(handler, 404, [("X-Error-Code", "EntryNotFound")])
            if match[3].endswith(self.small):
                return send_file(handler, request, data, [("ETag", f'"{git_sha1(data)}"')])
            place = f"/blob/{sha256(data)}"
            self.content.files[place] = data
            return send_status(handler, 302, [("Location", f"{self.content.origin}{place}?signature=secret"),
                                              ("X-Linked-Size", str(len(data))), ("X-Linked-ETag", f'"{sha256(data)}"')],
                               b"Found. Redirecting")
        return send_status(handler, 404)
