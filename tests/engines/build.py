"""Makes the environments that have a real vLLM, the code of SGLang and LMCache, or mlx-lm and
llama.cpp: wheels at exact versions and hashes, in a folder outside of the tree, once."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from tests.emulated.build import BuildError, only_one

HERE = Path(__file__).parent
VERSION = "0.32.0"


@dataclass(frozen=True)
class Wheels:
    """What an environment is made of."""

    name: str
    about: str
    checks: str
    """statements that it must be able to run"""
    tests: str

    @property
    def pins(self) -> Path:
        return HERE / f"{self.name}.txt"


VLLM = Wheels(
    f"vllm-{VERSION}",
    f"vLLM {VERSION} for CPUs: 400 MB of wheels, 2 GB installed",
    "import vllm, pytest, uvicorn; from vllm.platforms import current_platform; current_platform.import_kernels(); "
    "import torch; torch.ops._C.silu_and_mul",
    "tests/engines",
)
PLUGINS = Wheels(
    "plugins-sglang-0.5.23-lmcache-0.5.6",
    "SGLang 0.5.23 and LMCache 0.5.6: 650 MB of wheels, 2.4 GB installed",
    "import torch, cryptography, sglang.srt.mem_cache.hicache_storage, lmcache.v1.distributed.storage_manager, pytest",
    "tests/engines/plugins",
)
TORCHLESS = Wheels(
    "torchless",
    "mlx-lm 0.32.2 and xllamacpp 2026.10.11549 for CPUs: 250 MB of wheels",
    "import mlx.core, mlx_lm, xllamacpp, gguf, numba, cryptography, pytest",
    "tests/engines/torchless",
)
CACHE = "KVPOOL_ENGINES_CACHE"
"""Environment variable: where environments are made, instead of ``~/.cache/kvpool-engines``."""
PYTHON = (3, 11)
CPUINFO = Path("/proc/cpuinfo")
TORCH = "https://download.pytorch.org/whl/cpu"
"""Where PyTorch's wheel for CPUs is, on machines whose pip does not find it elsewhere."""
LONGEST_S = 1800
KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "XDG_CACHE_HOME", CACHE)
"""What an environment variable must be called to reach the engine: its wheels are somebody's, and see no
credentials."""


def cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(CACHE) or Path(base) / "kvpool-engines")


def place(wheels: Wheels = VLLM) -> Path:
    """Where an environment is, made or not: one for each list of wheels."""
    digest = hashlib.sha256(wheels.pins.read_bytes() + sys.version.encode()).hexdigest()[:16]
    return cache() / f"{wheels.name}-{digest}"


def python(wheels: Wheels = VLLM) -> Path:
    return place(wheels) / "bin" / "python"


def built(wheels: Wheels = VLLM) -> bool:
    return (place(wheels) / "done").exists()


def environment() -> dict[str, str]:
    """What the engine's processes get of this one's environment, and where they find the packages of the checkout."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE.parent)])}


def run(*command: object, environment: dict[str, str] | None = None) -> str:
    """What a command says, or "" if all went well."""
    words = [str(part) for part in command]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=LONGEST_S, env=environment)
    except subprocess.TimeoutExpired:
        return f"{words[0]} had not ended after {LONGEST_S} s"
    return (done.stdout + done.stderr)[-4000:] or f"exit status {done.returncode}" if done.returncode else ""


def need_machine() -> None:
    """Raises BuildError for a machine that the wheels are not for, before anything is installed."""
    if sys.platform != "linux" or sysconfig.get_platform() != "linux-x86_64":
        raise BuildError(f"the wheels are for Linux on x86-64, this is {sysconfig.get_platform()}")
    if sys.version_info[:2] != PYTHON:
        python, wanted = (".".join(map(str, version)) for version in (sys.version_info[:2], PYTHON))
        raise BuildError(
            f"the wheels are for Python {wanted}, this is {python}: make the checkout's environment with that"
        )
    if not {"avx2", "avx512f"} & set(CPUINFO.read_text(encoding="utf-8").split()):
        raise BuildError("vLLM and PyTorch for CPUs need AVX2 or AVX-512, and this processor has neither")


def install(wheels: Wheels, target: Path) -> None:
    """Install what is not installed yet."""
    failed = "" if (target / "bin" / "pip").exists() else run(sys.executable, "-m", "venv", target)
    if failed:
        raise BuildError(f"no environment could be made in {target}:\n{failed}")
    pip = (
        target / "bin" / "python",
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "-q",
        "--no-deps",
        "--no-compile",
    )
    wanted = ("--require-hashes", "--only-binary", ":all:", "-r", wheels.pins)
    failed = run(*pip, *wanted) and run(*pip, *wanted, "--extra-index-url", TORCH)
    if failed:
        raise BuildError(f"pip could not install {wheels.pins.name} (is there a network?):\n{failed}")
    failed = run(target / "bin" / "python", "-c", wheels.checks, environment=environment())
    if failed:
        raise BuildError(f"what was installed cannot be imported. To begin anew, remove the folder {target}:\n{failed}")


def build(wheels: Wheels = VLLM) -> Path:
    """All of it, or nothing to do. Raises BuildError."""
    need_machine()
    target = place(wheels)
    with only_one(cache()):
        if not built(wheels):
            print(f"installing in {target}: {wheels.about}", flush=True)
            install(wheels, target)
            (target / "done").touch()
    return target
