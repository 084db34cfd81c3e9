"""Processes share the work of compiling: they keep what one process keeps, and the loss of one loses nothing."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvpool
from kvpool.helpers import Helpers

PROGRAM = "from kvpool.warming import warm_host_cache; warm_host_cache()"
ENDLESS = """
import os, time
helper = os.getppid()
while os.getppid() == helper:
    time.sleep(0.1)
"""
SCRIPT = """
import json, os, sys
from kvpool.helpers import Helpers
from kvpool.jit.announcer import announcer
program, processes = sys.argv[1], int(sys.argv[2])
with Helpers(program, processes) as helpers:
    if processes > 1:
        helpers.start()
        for process, _ in helpers._running:
            process.wait()
    exec(program)
print(json.dumps(announcer.compiled))
"""


def compiled_by(folder: Path, processes: int) -> tuple[int, set[str]]:
    """How many functions the first process compiled after its helpers had ended, and what is kept."""
    environment = {**os.environ, "KVPOOL_CACHE_DIR": str(folder), "PYTHONPATH": str(Path(kvpool.__file__).parents[1])}
    command = [sys.executable, "-c", SCRIPT, PROGRAM, str(processes)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), {path.name for path in folder.glob("*.nbc")}


def test_helpers_compile_what_one_process_compiles_and_nothing_else(tmp_path: Path) -> None:
    alone, kept = compiled_by(tmp_path / "alone", 1)
    left, shared = compiled_by(tmp_path / "shared", 3)
    assert alone and (left, shared) == (0, kept)


INNER = """
import os, sys
from kvpool.helpers import compile_ahead
from kvpool.jit.compiler import Dispatcher
Dispatcher.compile = lambda function, kinds: None
compile_ahead(sys.argv[1], 0, 1, os.getppid())
"""


def test_helpers_share_the_functions_inside_of_one_call_too(tmp_path: Path) -> None:
    """Half of a first replay is one call. Whoever compiles it finds the functions that it calls."""
    environment = {**os.environ, "KVPOOL_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(kvpool.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", INNER, PROGRAM], env=environment, check=True)
    ahead = {path.name for path in tmp_path.glob("*.nbc")}
    compiled, kept = compiled_by(tmp_path, 1)
    assert ahead and ahead < kept and not any("-entry" in name or "-locked" in name for name in ahead)
    assert compiled == len(kept) - len(ahead) < len(kept) / 2


def test_a_helper_that_fails_or_is_killed_is_named_and_its_work_is_left_to_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING), Helpers("raise OSError('no such thing')", 2) as failing:
        assert failing.start() == failing.start() == 2
        failing._running[0][0].wait()
    with caplog.at_level(logging.WARNING), Helpers(ENDLESS, 2) as killed:
        killed.start()
        killed._running[0][0].kill()
        killed._running[0][0].wait()
    first, second = [record.getMessage() for record in caplog.records]
    assert "ended with status 1" in first and "OSError: no such thing" in first
    assert "ended with status -9" in second


def test_helpers_end_with_the_work(tmp_path: Path) -> None:
    with Helpers(ENDLESS, 3) as helpers:
        helpers.start()
        processes = [process for process, _ in helpers._running]
    assert [process.poll() for process in processes] == [-9, -9]


def test_nobody_helps_where_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.jit.cache_root", lambda: None)
    with Helpers(PROGRAM, 4) as helpers:
        assert helpers.start() == 1


@pytest.mark.parametrize("executable", [None, "", "/no/such/python", "/etc/passwd"])
def test_nobody_helps_where_no_interpreter_can_be_started(
    executable: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    with caplog.at_level(logging.WARNING), Helpers(PROGRAM, 4) as helpers:
        assert helpers.start() == helpers.start() == 1
    assert len(caplog.records) == bool(executable)


def test_a_helper_imports_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("numba", "kvpool", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    with caplog.at_level(logging.WARNING), Helpers("pass", 2) as helpers:
        helpers.start()
        helpers._running[0][0].wait()
    assert not (tmp_path / "run").exists() and not caplog.records


@pytest.mark.parametrize("processes", [0, -1, 257, 1.5, "2"])
def test_a_wrong_number_of_processes_is_named(processes: object) -> None:
    with pytest.raises((TypeError, ValueError), match="processes"):
        kvpool.warm_up(processes=processes)  # type: ignore[arg-type]
