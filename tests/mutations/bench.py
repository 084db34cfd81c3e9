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
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

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
    """The copy of the tree, and a process that runs tests in it. Not thread-safe.

    The package is written from its syntax trees: without comments, each statement in a line.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in _COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, folder / name)
        for path in (folder / "kvpool").rglob("*.py"):
            path.write_text(ast.unparse(ast.parse(path.read_text(encoding="utf-8"))), encoding="utf-8")
        self.package = Package(folder / "kvpool")
        self.patience = SECONDS
        environment = {
            **os.environ,
            "NUMBA_DISABLE_JIT": "1",
            "PYTHONPATH": str(folder),
            "PYTHONDONTWRITEBYTECODE": "1",  # a file may change twice in a second
        }
        self._worker = subprocess.Popen(
            [sys.executable, "-m", "tests.mutations.worker"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        self._worker.communicate()

    def check(self, mutations: Iterable[Mutation]) -> None:
        """Raise RuntimeError where a test of these fails with no mutation made: it would kill any."""
        files: dict[str, set[str]] = {}
        for mutation in mutations:
            for test in mutation.tests:
                files.setdefault(test.partition("::")[0], set()).add(test)
        longest = 0.0
        for tests in files.values():
            began = time.monotonic()
            failed, said = self.failed(sorted(tests), "--exhaustive")
            longest = max(longest, time.monotonic() - began)
            if failed:
                raise RuntimeError(f"without a mutation fail {', '.join(failed)}:\n{said}")
        # What takes that much longer with a mutation hangs.
        self.patience = min(SECONDS, 60 + 10 * longest)

    def run(self, mutation: Mutation) -> Verdict:
        """Make a mutation, run its tests, take it back. Raises ValueError for one that fits its function no more,
        RuntimeError where the tests did not run, or not on the copy."""
        failed, said = self.changed(*self.package.applied(mutation), mutation.tests, "--exhaustive")
        return Verdict(mutation, tuple(test for test in mutation.tests if not _names_one_of(test, failed)), said)

    def changed(self, path: Path, text: str, tests: Iterable[str], *options: str) -> tuple[list[str], str]:
        """``failed`` while a file has another text."""
        before = path.read_text(encoding="utf-8")
        path.write_text(text, encoding="utf-8")
        try:
            return self.failed(tests, *options)
        finally:
            path.write_text(before, encoding="utf-8")

    def failed(self, tests: Iterable[str], *options: str) -> tuple[list[str], str]:
        """The tests that fail in the copy as it is, and what pytest said; all of them, where the interpreter died or
        hung. ``options`` are for pytest."""
        result, said = self._run(tests, options)
        return (result["failed"] if result else [*tests]), said

    def reached(self, tests: Path, lines: Path) -> dict[str, float]:
        """The tests of a file that pass, and the seconds that each takes. Which lines each of them reaches is written
        to a file of coverage.py. There are none where the interpreter dies: some trace calls themselves."""
        try:
            result, _ = self._run([str(tests.relative_to(self.folder))], (), lines)
        except RuntimeError:
            return {}
        seconds: dict[str, float] = result.get("seconds", {})
        return {test: seconds[test] for test in seconds if test not in result["failed"]}

    def _run(
        self, tests: Iterable[str], options: Iterable[str], reach: Path | None = None
    ) -> tuple[dict[str, Any], str]:
        """What came of a run of pytest, or nothing where it did not end by itself, and what it said."""
        said, result = self.folder / "said", self.folder / "result.json"
        result.unlink(missing_ok=True)
        request = {
            "arguments": ["-q", "--tb=line", "-p", "no:cacheprovider", *options, *tests],
            "said": str(said),
            "result": str(result),
            "reach": reach and str(reach),
            "patience": self.patience,
        }
        print(json.dumps(request), file=self._worker.stdin, flush=True)
        ended, text = self._worker.stdout.readline(), said.read_text(encoding="utf-8")
        if not result.exists():
            return {}, f"{text}\n{ended}"
        outcome: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        if outcome["status"] > 1:
            raise RuntimeError(f"the tests did not run:\n{text}")
        if not Path(outcome["package"]).is_relative_to(self.folder.resolve()):
            raise RuntimeError(f"the tests imported {outcome['package']}, not the copy in {self.folder}")
        return outcome, text


def _names_one_of(test: str, failed: Iterable[str]) -> bool:
    """Whether a node id is one of these, or a test with parameters that is."""
    return any(name == test or name.startswith(f"{test}[") for name in failed)


@contextmanager
def bench() -> Iterator[Bench]:
    """A workbench that is gone at the end."""
    with tempfile.TemporaryDirectory(prefix="kvpool-mutations-") as folder:
        with closing(Bench(Path(folder))) as made:
            yield made
