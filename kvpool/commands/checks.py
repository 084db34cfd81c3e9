"""The doctor's checks of a machine: what it inspects, and a verdict and a remedy for each part; and of Mooncake:
whether its client can be loaded, whether a master answers, and who can reach the memory of its clients."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

OK = "ok"
ABSENT = "absent"
WARNING = "warning"
FAILED = "failed"
_MIB, _GIB = 1 << 20, 1 << 30
_CACHE_NEEDS = 200 * _MIB
_CONTAINER = "in a container, start it with --gpus all"


class Check(NamedTuple):
    """One verdict: ``status`` is ok, absent (optional, and not there), warning (works, but not well) or failed.
    ``remedy`` may be empty."""

    name: str
    status: str
    found: str
    remedy: str = ""


# -- looking -------------------------------------------------------------------------------------


def look_at_jit() -> dict[str, Any] | None:
    """Where compiled code is kept, and whether it can be kept. None if Numba cannot be imported, which another check
    reports."""
    try:
        from numba.core import config

        from kvpool.jit import keeps
        from kvpool.jit.cache import cache_root
    except Exception:
        return None
    root = cache_root()
    return {
        "disabled": bool(config.DISABLE_JIT),
        "root": None if root is None else str(root),
        "used": None if root is None else _compiled(root),
        "free": None if root is None else shutil.disk_usage(root).free,
        "in_use": keeps(),
    }


def _compiled(root: Path) -> int:
    """Bytes of compiled code below a folder. Other processes replace files and remove folders in the meantime: those
    count nothing."""
    total = 0
    for folder, _, names in os.walk(root):  # it passes over a folder that is gone
        for name in names:
            if name.endswith(".nbc"):
                with suppress(OSError):
                    total += os.stat(os.path.join(folder, name)).st_size
    return total


def look_at_driver(root: Path = Path("/")) -> dict[str, Any]:
    """NVIDIA's driver, queried without CuPy: the CUDA version that it supports (13010 is 13.1), and the files that show
    it. Starts no GPU."""
    version, error = ctypes.c_int(), None
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
        error = f"cuDriverGetVersion gave {status}" if status else None
    except (OSError, AttributeError) as raised:
        error = str(raised)
    files = [*(root / "dev").glob("nvidia[0-9]*"), *(root / "dev").glob("dxg")]
    return {
        "version": None if error else version.value,
        "error": error,
        "kernel_module": (root / "proc/driver/nvidia/version").exists(),
        "gpu_files": len(files),
    }


# -- judging -------------------------------------------------------------------------------------


def judge(found: dict[str, Any]) -> list[Check]:
    """The verdicts on the findings of ``examine``."""
    checks = [package(name, part) for name, part in found["packages"].items()]
    if found["numba.cuda"]["error"] and found["packages"]["numba-cuda"]["version"]:
        remedy = found["packages"]["numba-cuda"]["install"]
        if "PYTHONPATH" in found["numba.cuda"]["error"]:
            remedy = "take site-packages out of PYTHONPATH: Python then finds it by itself, and reads its .pth files"
        checks.append(Check("numba.cuda", WARNING, found["numba.cuda"]["error"], remedy))
    compiled = [] if found["jit"] is None else [compiled_code(found["jit"])]
    return [*checks, *compiled, driver(found), locked_memory(found), main_memory(found["memory"]["available"])]


def package(name: str, part: dict[str, Any]) -> Check:
    """The verdict on a package that is needed or useful."""
    version, missing = part["version"] or "installed", FAILED if part["required"] else ABSENT
    if part["error"] == "not installed":
        return Check(name, missing, f"not installed ({part['use']})", part["install"])
    if part["error"] is not None:
        found = f"{version}, but cannot be imported ({part['use']}): {part['error']}"
    elif part["minimum"] and part["version"] and _numbers(part["version"]) < _numbers(part["minimum"]):
        found = f"{version}, older than {part['minimum']} ({part['use']})"
    else:
        return Check(name, OK, version)
    return Check(name, FAILED if part["required"] else WARNING, found, part["install"])


def _numbers(version: str) -> list[int]:
    """The numbers of a version, to compare two: 1.24.0rc1 is [1, 24, 0]."""
    return [int(number) for number in re.findall(r"\d+", re.match(r"[\d.]*", version)[0])]  # type: ignore[index]


def compiled_code(seen: dict[str, Any]) -> Check:
    """The verdict on Numba's compiled code, which takes half a minute to make and is kept on disk."""
    name, elsewhere = "compiled code", "set NUMBA_CACHE_DIR to a folder that only you can write"
    anew = "every process compiles anew, for half a minute"
    if seen["disabled"]:
        found = "NUMBA_DISABLE_JIT is set: everything runs in the interpreter, slowly"
        return Check(name, WARNING, found, "unset NUMBA_DISABLE_JIT")
    if seen["root"] is None:
        return Check(name, WARNING, f"no place for it can be written: {anew}", elsewhere)
    if not seen["in_use"]:
        return Check(name, WARNING, f"this Numba does not take kvpool's cache: {anew}", 'pip install -U "."')
    kept = f"{seen['used'] / _MIB:.0f} MiB in {seen['root']}"
    if seen["free"] < _CACHE_NEEDS:
        found = f"{kept}, where {seen['free'] / _MIB:.0f} MiB are free"
        return Check(name, WARNING, found, f"make room there, or {elsewhere}")
    return Check(name, OK, kept)


def driver(found: dict[str, Any]) -> Check:
    """The verdict on whether the packages for GPUs, the driver and the GPUs fit together."""
    name, seen, cupy = "NVIDIA driver", found["driver"], found["cupy_packages"]
    version = found["gpus"][0]["driver"] if found["gpus"] else seen["version"]
    if version is None:
        if seen["kernel_module"] or seen["gpu_files"]:
            remedy = f"{_CONTAINER}; else reinstall the driver"
            return Check(name, WARNING, f"the system has one that cannot be loaded: {seen['error']}", remedy)
        remedy = "install NVIDIA's driver, on a machine with a GPU"
        return Check(name, ABSENT, "not installed (the cuda device)", remedy)
    fitting = "cuda13" if version >= 13000 else "cuda12"
    several = f"pip uninstall {' '.join(cupy)}, then install one"
    older = 'pip uninstall cupy-cuda13x, then pip install ".[cuda12]"'
    problems = (
        (version < 12000, ", too old for CuPy", "update the driver"),
        (len(cupy) > 1, f", and several CuPy: {', '.join(cupy)}", several),
        (cupy == ["cupy-cuda13x"] and version < 13000, ", and CuPy for 13", older),
        (not found["gpus"] and not seen["gpu_files"], ", without a GPU", _CONTAINER),
        (not cupy, ", without CuPy", f'pip install ".[{fitting}]"'),
    )
    problem, remedy = next(((words, remedy) for there, words, remedy in problems if there), ("", ""))
    shown = f"for CUDA {version // 1000}.{version % 1000 // 10}{problem}"
    return Check(name, WARNING if problem else OK, shown, remedy)


def locked_memory(found: dict[str, Any]) -> Check:
    """Whether a limit may prevent pinning of the host tier. It does not bind a user who may lock any amount."""
    name, limit, room = "locked memory (ulimit -l)", found["memory"]["locked_limit"], found["memory"]["available"]
    shown = "unlimited" if limit is None else gib(limit)
    if limit is None or os.geteuid() == 0 or not found["gpus"] or (room is not None and limit >= room):
        return Check(name, OK, shown)
    remedy = "ulimit -l unlimited; docker run --ulimit memlock=-1; LimitMEMLOCK=infinity in a systemd unit"
    return Check(name, WARNING, f"{shown}: a larger host tier may be refused", remedy)


def main_memory(available: int | None) -> Check:
    """The verdict on the main memory that the system and its control groups leave available."""
    name = "memory left by the system and its control groups"
    if available is None:
        found = "unknown here: a host tier that is too large is not refused, but ends the process"
        return Check(name, WARNING, found, "choose host_blocks with care")
    if available < _GIB:
        return Check(name, WARNING, gib(available), "free some, or raise the limit")
    return Check(name, OK, gib(available))


def gib(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else f"{nbytes / _GIB:.2f} GiB"


# -- Mooncake ------------------------------------------------------------------------------------

MASTER = "MOONCAKE_MASTER"
"""Names the master where no option does. Mooncake's own tools read it too."""

OPEN_TO_ALL = (
    "every client listens on all interfaces, without a password or encryption: who reaches its ports can read and "
    "write the memory that it lends, and the host tier"
)


def look_at_mooncake(asked: str | None) -> dict[str, Any]:
    """What is installed, and whether the master that an option or the environment names can be reached."""
    found: dict[str, Any] = dict.fromkeys(("version", "tested", "error", "seen_as", "unreachable"))
    found |= {"master": asked or os.environ.get(MASTER) or None, "asked": asked is not None}
    try:
        # Imported here, so that the doctor runs where kvpool cannot be imported.
        from kvpool.stores.mooncake import guarded_client as client
    except ImportError:
        return found | {"unreachable": found["master"] and "kvpool cannot be imported"}
    found |= {"version": client.version(), "tested": client.TESTED}
    if found["version"] is not None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                client.library()
        except ImportError as raised:
            found["error"] = str(raised)
    return found | _reached(found["master"], client.reach)


def _reached(master: str | None, reach: Callable[[str], str]) -> dict[str, Any]:
    if master is None:
        return {}
    if not re.fullmatch(r"\S+:[0-9]+", master):
        return {"unreachable": f"{master!r:.80} is no address: accepted is HOST:PORT"}
    try:
        return {"seen_as": reach(master)}
    except (OSError, ValueError, OverflowError) as error:
        return {"unreachable": str(error)}


def judge_mooncake(found: dict[str, Any]) -> list[Check]:
    """The verdicts on what ``look_at_mooncake`` has found."""
    checks = [_client(found)] if found["version"] else []
    if found["master"] is not None:
        checks.append(_master(found))
    if found["version"] is not None and not found["error"]:
        remedy = "keep the ports of its clients and master in a network of their own; docs/cluster.md says how"
        checks.append(Check("mooncake security", WARNING if found["seen_as"] else OK, OPEN_TO_ALL, remedy))
    return checks


def _client(found: dict[str, Any]) -> Check:
    name, version = "mooncake client", found["version"]
    if found["error"]:
        words, _, remedy = found["error"].rpartition(": ")
        return Check(name, WARNING, words or found["error"], remedy if "install" in remedy else "")
    if version != found["tested"]:
        return Check(name, WARNING, f"{version}, which was not tested with kvpool ({found['tested']} was)")
    return Check(name, OK, "can be loaded")


def _master(found: dict[str, Any]) -> Check:
    name = f"mooncake master {found['master']}"
    if found["unreachable"]:
        status = FAILED if found["asked"] else WARNING
        return Check(name, status, found["unreachable"], "start mooncake_master there, or name its --rpc_port")
    return Check(name, OK, f"accepts connections; it sees this machine as {found['seen_as']}")
