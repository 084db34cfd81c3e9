"""A workbench: a copy of the tree in a temporary folder, in which one mutation at a time is made and its tests are
run."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.mutations.anchors import Package
from tests.mutations.mutation import ROOT, Mutation

_COPIED = ("kvpool", "tests", "asv_bench", "cuda", "examples", "setup.cfg")
SECONDS = 600.0


class Verdict(NamedTuple):
    """``lived``: the tests that ought to have failed, and did not. ``text``: what pytest said."""

    mutation: Mutation
    lived: tuple[str, ...]
    text: str


class Bench:
    """The copy of the tree. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in _COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, folder / name)
        self._package = Package(folder / "kvpool")
        self._patience = SECONDS

    def check(self, mutations: Iterable[Mutation]) -> None:
        """Raise RuntimeError where a test of these fails with no mutation made: it would kill any. The files are
        written as they are with a mutation: without comments, each statement in a line."""
        mutations = list(mutations)
        for path in {self._package.place(mutation).owner.file for mutation in mutations}:
            path.write_text(ast.unparse(self._package.trees[path]), encoding="utf-8")
        files: dict[str, set[str]] = {}
        for mutation in mutations:
            for test in mutation.tests:
                files.setdefault(test.partition("::")[0], set()).add(test)
        longest = 0.0
        for tests in files.values():
            began = time.monotonic()
            failed, said = self.failed(sorted(tests))
            longest = max(longest, time.monotonic() - began)
            if failed:
                raise RuntimeError(f"without a mutation fail {', '.join(failed)}:\n{said}")
        # What takes that much longer with a mutation hangs.
        self._patience = min(SECONDS, 60 + 10 * longest)

    def run(self, mutation: Mutation) -> Verdict:
        """Make a mutation, run its tests, take it back. Raises ValueError for one that fits its function no more,
        RuntimeError where the tests did not run, or not on the copy."""
        path, changed = self._package.applied(mutation)
        text = path.read_text(encoding="utf-8")
        path.write_text(changed, encoding="utf-8")
        try:
            failed, said = self.failed(mutation.tests)
        finally:
            path.write_text(text, encoding="utf-8")
        return Verdict(mutation, tuple(test for test in mutation.tests if not _names_one_of(test, failed)), said)

    def failed(self, tests: Iterable[str]) -> tuple[list[str], str]:
        """The tests that fail in the copy as it is, and what pytest said; all of them, where the interpreter died or
        hung."""
        seen = self.folder / "witness.json"
        seen.unlink(missing_ok=True)
        environment = {
            **os.environ,
            "KVPOOL_WITNESS": str(seen),
            "NUMBA_DISABLE_JIT": "1",
            "PYTHONPATH": str(self.folder),
            "PYTHONDONTWRITEBYTECODE": "1",  # a file may change twice in a second
        }
        options = ["-q", "--tb=line", "--exhaustive", "-p", "no:cacheprovider", "-p", "tests.mutations.witness"]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=self._patience
            )
        except subprocess.TimeoutExpired:
            return [*tests], f"did not end within {self._patience:.0f} s"
        said = done.stdout + done.stderr
        if done.returncode < 0:
            return [*tests], f"{said}\nended by signal {-done.returncode}"
        if done.returncode > 1 or not seen.exists():
            raise RuntimeError(f"the tests did not run:\n{said}")
        report = json.loads(seen.read_text(encoding="utf-8"))
        if not Path(report["package"]).is_relative_to(self.folder.resolve()):
            raise RuntimeError(f"the tests imported {report['package']}, not the copy in {self.folder}")
        return report["failed"], said


def _names_one_of(test: str, failed: Iterable[str]) -> bool:
    """Whether a node id is one of these, or a test with parameters that is."""
    return any(name == test or name.startswith(f"{test}[") for name in failed)


@contextmanager
def bench() -> Iterator[Bench]:
    """A workbench that is gone at the end."""
    with tempfile.TemporaryDirectory(prefix="kvpool-mutations-") as folder:
        yield Bench(Path(folder))
