"""Builds CUDA sources for the CPU, so that the emulated driver has something to run when their kernels are launched."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SHIM = HERE.parent / "kernels"
_KERNEL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(")
_WORDS = re.compile(r"__global__.* (\w+)##bytes\(const __grid_constant__")


def kernels(source: str) -> list[str]:
    """The kernels of a source; one that a macro makes for each word has names that end in its bytes."""
    made = re.findall(r"^[A-Z_]+\((\d+), ", source, flags=re.MULTILINE) or (16, 8, 4, 2, 1)
    words = {f"{name}{word}" for name in _WORDS.findall(source) for word in made}
    return sorted(words | {name for name in _KERNEL.findall(source) if not name.endswith("_")})


@functools.cache
def library(source: str, options: tuple[str, ...]) -> Path | None:
    """The source as a library of twins, built once; None, with what the compiler says, where it cannot be built."""
    root = Path(os.environ["KVPOOL_EMULATED"])
    kept = tuple(option for option in options if option.startswith(("-D", "-I")))
    waits = "true" if "__syncthreads" in source or "__syncwarp" in source else "false"
    wrappers = "".join(f"TWIN({name})\n" for name in kernels(source))
    text = f'#include "twin.h"\n{source}\n#define WAITS {waits}\n{wrappers}'
    headers = (HERE / "twin.h").read_text(encoding="utf-8") + (SHIM / "shim.h").read_text(encoding="utf-8")
    name = hashlib.sha256(f"{text} {kept} {headers}".encode()).hexdigest()[:24]
    folder = root / "twins"
    folder.mkdir(exist_ok=True)
    built, file = folder / f"{name}.so", folder / f"{name}.cpp"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            file.write_text(text, encoding="utf-8")
            # An access at a crooked address ends in a trap, as it does on a GPU.
            traps = "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"
            built_as = "-std=c++17", "-O1", "-w", "-fno-strict-aliasing", "-fvisibility=hidden", "-shared", "-fPIC"
            includes = f"-I{HERE}", f"-I{HERE / 'include'}", f"-I{SHIM}", *kept, f"-I{root / 'include'}"
            command = ["g++", *built_as, *traps, *includes, str(file), "-o", str(built.with_suffix(".new"))]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(
                    f"emulated driver: no twins of {', '.join(kernels(source)) or file.name}:\n{done.stderr[:2000]}",
                    file=sys.stderr,
                )
                return None
            built.with_suffix(".new").rename(built)
    return built


@functools.cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def announce(source: str, options: tuple[str, ...]) -> None:
    """Say where the twins of the image are that this thread loads next."""
    twin = library(source, tuple(options))
    if twin is not None:
        driver().emu_next_image(str(twin).encode())
