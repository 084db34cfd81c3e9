"""Compiles the CUDA sources for GPUs that need not be there, and reads what the compiler made of them."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

from kvpool.device.launches import OPTIONS, cuda_source

ARCHITECTURES = ["sm_75", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120"]
BULK = ARCHITECTURES[3:]
"""Those that have bulk copies."""
EXHAUSTIVE = {name: () if name == "sm_90" else pytest.mark.exhaustive for name in ARCHITECTURES}
"""One architecture is always compiled for, the others with ``--exhaustive``."""
EACH = [pytest.param(name, marks=EXHAUSTIVE[name]) for name in ARCHITECTURES]
EACH_BULK = [pytest.param(name, marks=EXHAUSTIVE[name]) for name in BULK]


@functools.cache
def cubin(source: str, architecture: str) -> bytes:
    """A source of ``cuda/`` as machine code, by NVRTC as at run time, else by nvcc; skips where there is neither."""
    try:
        from cuda.core import Program, ProgramOptions

        program = Program(
            cuda_source(source), "c++", ProgramOptions(arch=architecture, std=OPTIONS[0].partition("=")[2])
        )
    except (ImportError, RuntimeError) as error:  # no package, or none of the library
        if isinstance(error, RuntimeError) and "nvrtc" not in str(error):
            raise
    else:
        return bytes(program.compile("cubin").code)
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("neither cuda-core with nvidia-cuda-nvrtc nor nvcc is installed; the cubins are compiled with them")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / source
        file.write_text(cuda_source(source), encoding="utf-8")
        command = [compiler, "-cubin", f"-arch={architecture}", *OPTIONS, "-o", f"{folder}/out", str(file)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return Path(folder, "out").read_bytes()


@functools.cache
def _tool(name: str) -> str:
    """The path of one of NVIDIA's tools, from a package of pip or the system."""
    spec = importlib.util.find_spec("nvidia")
    places = [
        str(path)
        for folder in (spec.submodule_search_locations or [] if spec else [])
        for path in Path(folder).glob("*/bin")
    ]
    path = shutil.which(name, path=os.pathsep.join([*places, os.environ.get("PATH", "")]))
    if path is None:
        pytest.skip(f"{name} is not installed; it comes with the package nvidia-cuda-{name}")
    return path


@functools.cache
def dump(source: str, architecture: str, what: str) -> dict[str, str]:
    """What ``cuobjdump -<what>`` prints about each kernel of a source."""
    return dump_image(cubin(source, architecture), what)


def dump_image(image: bytes, what: str) -> dict[str, str]:
    """What ``cuobjdump -<what>`` prints about each kernel of machine code."""
    tool, environment = _tool("cuobjdump"), dict(os.environ)
    if what == "sass":
        environment["PATH"] = os.pathsep.join([str(Path(_tool("nvdisasm")).parent), environment.get("PATH", "")])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        done = subprocess.run([tool, f"-{what}", file.name], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # sm_75 writes down the scope of each access.
    pieces = re.split(r"^\s*Function ?: ?|^\s*Function ", done.stdout.replace(".SYS", ""), flags=re.MULTILINE)[1:]
    return {re.match(r"\w+", piece).group(): piece for piece in pieces}  # type: ignore[union-attr]


class Instruction(NamedTuple):
    """An instruction, and which scoreboards it raises (-1: none) and waits for (a mask)."""

    text: str
    raises: int
    waits: int


def scoreboards(sass: str) -> list[Instruction]:
    """The instructions of a kernel with what their encoding says of scoreboards, as in Jia et al., "Dissecting the
    NVIDIA Volta GPU Architecture via Microbenchmarking", 2018: of the 128 bits, 110 to 112 are the scoreboard that is
    raised until a result is there (7: none), and 116 to 121 those that are waited for. It is so since sm_70."""
    words = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);\s+/\* 0x[0-9a-f]{16} \*/\s+/\* (0x[0-9a-f]{16}) \*/", sass)
    numbers = [(text, int(high, 16)) for text, high in words]
    return [Instruction(t, r if (r := high >> 46 & 7) != 7 else -1, high >> 52 & 0x3F) for t, high in numbers]
