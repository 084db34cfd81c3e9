"""``python -m kvpool doctor``: which parts of kvpool work on this machine, and what the others lack. Each part has a
status, one line of reason and, if something is to be done, one line of advice."""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import platform
import re
import resource
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from kvpool.tools.cli import terminal

OK = "ok"
ABSENT = "absent"
WARNING = "warning"
FAILED = "failed"
_MIB, _GIB = 1 << 20, 1 << 30
_CACHE_NEEDS = 200 * _MIB
_CONTAINER = "in a container, start it with --gpus all"
_DEVICES = ("cpu", "cuda", "sim")
_EVERYTHING = "everything"
_MOONCAKE = "mooncake-transfer-engine-non-cuda"
_GPU_EXTRA = '[cuda12]" or ".[cuda13]'
SUITE_RAN_ON = ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
"""The models on which all tests have passed: see docs/support.md."""
MASTER = "MOONCAKE_MASTER"
"""Names the master where no option does. Mooncake's own tools read it too."""

OPEN_TO_ALL = (
    "clients listen on all interfaces, without a password: their memory and the host tier can be read and written"
)


class Package(NamedTuple):
    """A package, its purpose, how to install it, and the oldest version that suffices, if that is known."""

    module: str
    package: str
    use: str
    install: str
    minimum: str = ""


def _extra(module: str, package: str, use: str, extra: str, minimum: str) -> Package:
    """A package that an extra of a checkout brings."""
    return Package(module, package, use, f'pip install -U ".{extra}"', minimum)


_PARTS = (
    _extra("numpy", "numpy", _EVERYTHING, "", "1.24"),
    _extra("numba", "numba", _EVERYTHING, "", "0.60"),
    _extra("cupy", "cupy", "the cuda device", _GPU_EXTRA, "14"),
    _extra("numba_cuda", "numba-cuda", "kernels in Python", _GPU_EXTRA, "0.30"),
    _extra("tqdm", "tqdm", "progress bars", "[cli]", "4.64"),
    _extra("matplotlib", "matplotlib", "plots", "[plot]", "3.6"),
    _extra("prometheus_client", "prometheus-client", "metrics", "[metrics]", "0.19"),
    _extra("zmq", "pyzmq", "other workers and routers", "[remote]", "25"),
    _extra("msgspec", "msgspec", "KV events for routers", "[events]", "0.18"),
    _extra("opentelemetry", "opentelemetry-api", "spans", "[otel]", "1.20"),
    _extra("cryptography", "cryptography", "stores behind the host", "[stores]", "50"),
    _extra("mooncake", _MOONCAKE, "a store in a cluster", "[mooncake]", "0.3.13"),
    _extra("obstore", "obstore", "a store in a bucket", "[s3]", "0.12"),
    _extra("jax", "jax", "the example of an engine in JAX", "[jax]", "0.5"),
    Package("nixl", "nixl", "serving them through NIXL", "pip install --no-deps nixl nixl-cu13"),
)
_CUPY_PACKAGES = ("cupy-cuda13x", "cupy-cuda12x", "cupy")


def add_parser(subparsers: terminal.Subparsers) -> None:
    """Declare the command and its options."""
    summary = "say what can be used on this machine, and what is missing for the rest"
    add = terminal.declare(subparsers, "doctor", summary, run).add_argument
    add("--device", choices=("auto", *_DEVICES), default="auto", help="the device that has to work (default: auto)")
    master = f"a Mooncake master that has to be reached (default: ${MASTER}, which may be unreachable)"
    add("--mooncake", metavar="HOST:PORT", help=master)
    add("--json", action="store_true", help="print the findings as JSON")


def run(options: argparse.Namespace) -> int:
    """Check each part that kvpool uses on this machine: packages, compiled code, driver, GPUs,
    memory that can be pinned, the device, how copies are chosen, and Mooncake. One line each:

      ok       works
      absent   optional, and not installed
      warning  works, but not as well as it could
      failed   does not work, and is needed

    exit status: 0 nothing has failed, and the requested device can be used; 1 otherwise
    """
    findings = examine(options.device, options.mooncake)
    terminal.print_result(options, findings, text(findings))
    return terminal.FAILED if any(check["status"] == FAILED for check in findings["checks"]) else terminal.OK


def examine(device: str = "auto", mooncake: str | None = None) -> dict[str, Any]:
    """Return all findings of the command. It starts no device, but queries the driver for its GPUs."""
    packages = {part.package: _look(part) for part in _PARTS}
    try:
        devices = _look_at_devices()
    except Exception as error:
        # No device can be imported if a package that all of kvpool needs is missing.
        because = f"kvpool's devices cannot be imported: {type(error).__name__}: {error}"
        devices = _Devices(None, because, because, [], None, broken=True)
    wanted = devices.chosen if device == "auto" else device
    cluster = look_at_mooncake(mooncake)
    findings = {
        "python": platform.python_version(),
        "packages": packages,
        "numba.cuda": _numba_cuda(packages["numba-cuda"]["version"]),
        "cupy_packages": [name for name in _CUPY_PACKAGES if _version(name)],
        "jit": look_at_jit(),
        "driver": look_at_driver(),
        "gpus": [gpu._asdict() for gpu in devices.gpus],
        "auto": {"device": devices.chosen, "because": devices.because},
        "memory": {"locked_limit": _locked_limit(), "available": devices.available},
        "copies": _copies(devices.gpus),
        "mooncake": cluster,
        "device": device,
        "usable": wanted is not None and not devices.broken and (wanted != "cuda" or devices.missing is None),
        "missing": devices.missing if wanted == "cuda" or devices.broken else None,
    }
    judged = [*judge(findings), *machine(findings), *judge_mooncake(cluster)]
    return findings | {"checks": [check._asdict() for check in judged]}


class _Devices(NamedTuple):
    """The device that "auto" chooses, and why; why there is no cuda device; the GPUs; available bytes of memory; and
    whether no device can be imported."""

    chosen: str | None
    because: str
    missing: str | None
    gpus: list[Any]
    available: int | None
    broken: bool = False


def _look_at_devices() -> _Devices:
    from kvpool.device import automatic
    from kvpool.device.cuda import describe_gpus, unusable
    from kvpool.device.memory.main_memory import available_ram

    missing = unusable()
    chosen: str | None = None
    try:
        chosen, because = automatic()
    except ValueError as error:
        because = str(error)
    return _Devices(chosen, because, missing, [] if missing else describe_gpus(), available_ram())


def _look(part: Package) -> dict[str, Any]:
    names = _CUPY_PACKAGES if part.module == "cupy" else (part.package,)
    version = next(filter(None, map(_version, names)), None)
    # A package that is installed may not be importable, and some installations leave no metadata.
    installed = version is not None or find_spec(part.module) is not None
    error = _failure(part.module) if installed else "not installed"
    required = part.use == _EVERYTHING
    about = {"use": part.use, "install": part.install, "minimum": part.minimum, "required": required}
    return {"version": version, "error": error, **about}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _failure(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _numba_cuda(installed: str | None) -> dict[str, Any]:
    """Which package provides ``numba.cuda``, and whether it compiles. If numba-cuda's redirector did not run, it is
    silently the old one inside Numba. A NumPy that is newer than it knows is found out by compiling."""
    wrong = None
    try:
        place = str(importlib.import_module("numba.cuda").__file__)
        if installed and "numba_cuda" not in place:
            wrong = "numba-cuda is installed, but numba.cuda is Numba's own: is site-packages on PYTHONPATH?"
    except Exception as error:
        return {"place": None, "error": f"{type(error).__name__}: {error}"}
    try:
        if installed and not wrong:
            kernels = importlib.import_module("kvpool.device.cuda.table_kernels")
            for name in kernels.KERNELS:
                kernels.compile_for(name, (8, 0))
    except Exception as error:
        wrong = f"kernels of tables cannot be compiled: {type(error).__name__}: {error}"
    return {"place": place, "error": wrong}


def _locked_limit() -> int | None:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _copies(gpus: list[Any]) -> dict[str, Any] | None:
    """Return how copies are chosen on the first GPU, according to the stored calibration, which kernels have passed
    their test on it, and whether all tests have passed on one of its model."""
    if not gpus:
        return None
    from kvpool.device.cuda import COPY_PATH, calibration
    from kvpool.device.cuda.trials import has_passed

    path = calibration.place(gpus[0].name, gpus[0].driver)
    stored, problem = None, None
    try:
        stored = calibration.stored(gpus[0])
    except (OSError, ValueError) as error:
        problem = str(error)
    return {
        "file": str(path),
        "error": problem,
        "measured": stored is not None,
        "environment": os.environ.get(COPY_PATH),
        "kernels": {path: has_passed(gpus[0], path) for path in calibration.KERNELS},
        "suite_ran": gpus[0].name in SUITE_RAN_ON,
    }


def text(found: dict[str, Any]) -> str:
    """Format the findings: ``name: status, reason`` for each check, and its advice on the next line."""
    lines = list[str]()
    for check in found["checks"]:
        lines.append(f"{check['name']}: {check['status']}, {' '.join(check['reason'].split())}")
        lines += [f"    advice: {check['advice']}"] if check["advice"] else []
    return "\n".join(lines)


class Check(NamedTuple):
    """The status of one part: ok, absent (optional, not installed), warning (works, but not well) or failed. ``advice``
    may be empty."""

    name: str
    status: str
    reason: str
    advice: str = ""


# -- looking -------------------------------------------------------------------------------------


def look_at_jit() -> dict[str, Any] | None:
    """Where compiled code is kept, and whether it can be kept. None if Numba cannot be imported, which another check
    reports."""
    try:
        from numba.core import config

        from kvpool.common.jit import keeps
        from kvpool.common.jit.cache import cache_root
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
    """Return the status of packages, compiled code, driver and memory, from the findings of ``examine``."""
    checks = [package(name, part) for name, part in found["packages"].items()]
    if found["numba.cuda"]["error"] and found["packages"]["numba-cuda"]["version"]:
        advice = found["packages"]["numba-cuda"]["install"]
        if "PYTHONPATH" in found["numba.cuda"]["error"]:
            advice = "take site-packages out of PYTHONPATH: Python then finds it by itself, and reads its .pth files"
        checks.append(Check("numba.cuda", WARNING, found["numba.cuda"]["error"], advice))
    compiled = [] if found["jit"] is None else [compiled_code(found["jit"])]
    return [*checks, *compiled, driver(found), locked_memory(found), main_memory(found["memory"]["available"])]


def machine(found: dict[str, Any]) -> list[Check]:
    """Return the status of Python, of each GPU, of copies on the first one, and of the requested device."""
    checks = [Check("python", OK, found["python"])]
    for gpu in found["gpus"]:
        shown = f"{gpu['name']}, {gib(gpu['memory'])}, CUDA {_release(gpu['driver'])}"
        checks.append(Check(f"GPU {gpu['number']}", OK, shown))
    copies, device, auto = found["copies"], found["device"], found["auto"]
    if copies is not None and copies["environment"]:
        checks.append(Check("copies", OK, f"{copies['environment']}, by KVPOOL_COPY_PATH"))
    elif copies is not None and copies["measured"]:
        checks.append(Check("copies", OK, f"as measured in {copies['file']}"))
    elif copies is not None:
        reason = f"chosen by rule: {copies['error'] or 'not measured'}"
        checks.append(Check("copies", WARNING if copies["error"] else OK, reason, "call cache.memory.calibrate() once"))
    checks += [copy_kernels(copies)] if copies is not None else []
    chosen = f"{auto['device']}: {auto['because']}" if device == "auto" else "usable"
    status, reason = (OK, chosen) if found["usable"] else (FAILED, found["missing"] or auto["because"])
    return [*checks, Check(f"device {device}", status, reason)]


def copy_kernels(copies: dict[str, Any]) -> Check:
    """Return which kernels have copied the right bytes on this machine's first GPU, and whether the tests of the whole
    package have passed on this model. Neither says anything of the other."""
    passed = [path for path, has_passed in copies["kernels"].items() if has_passed]
    tested = f"self-tested here: {', '.join(passed)}" if passed else "not self-tested here; the first pool does it"
    ran = "has passed" if copies["suite_ran"] else "has not run"
    return Check("copy kernels", OK, f"{tested}; the suite of tests {ran} on this model")


def _release(version: int) -> str:
    """Format a CUDA version: 13010 is 13.1."""
    return f"{version // 1000}.{version % 1000 // 10}"


def package(name: str, part: dict[str, Any]) -> Check:
    """Return the status of a package that is needed or useful."""
    version, missing = part["version"] or "installed", FAILED if part["required"] else ABSENT
    if part["error"] == "not installed":
        return Check(name, missing, f"not installed ({part['use']})", part["install"])
    if part["error"] is not None:
        finding = f"{version}, but cannot be imported ({part['use']}): {part['error']}"
    elif part["minimum"] and part["version"] and _numbers(part["version"]) < _numbers(part["minimum"]):
        finding = f"{version}, older than {part['minimum']} ({part['use']})"
    else:
        return Check(name, OK, version)
    return Check(name, FAILED if part["required"] else WARNING, finding, part["install"])


def _numbers(version: str) -> list[int]:
    """The numbers of a version, to compare two: 1.24.0rc1 is [1, 24, 0]."""
    return [int(number) for number in re.findall(r"\d+", re.match(r"[\d.]*", version)[0])]  # type: ignore[index]


def compiled_code(seen: dict[str, Any]) -> Check:
    """Return the status of Numba's compiled code, which takes half a minute to make and is kept on disk."""
    name, elsewhere = "compiled code", "set NUMBA_CACHE_DIR to a folder that only you can write"
    anew = "every process compiles again, for half a minute"
    if seen["disabled"]:
        finding = "NUMBA_DISABLE_JIT is set: everything runs in the interpreter"
        return Check(name, WARNING, finding, "unset NUMBA_DISABLE_JIT")
    if seen["root"] is None:
        return Check(name, WARNING, f"no folder can be written: {anew}", elsewhere)
    if not seen["in_use"]:
        return Check(name, WARNING, f"this Numba does not take kvpool's cache: {anew}", 'pip install -U "."')
    kept = f"{seen['used'] / _MIB:.0f} MiB in {seen['root']}"
    if seen["free"] < _CACHE_NEEDS:
        finding = f"{kept}, where {seen['free'] / _MIB:.0f} MiB are free"
        return Check(name, WARNING, finding, f"make room there, or {elsewhere}")
    return Check(name, OK, kept)


def driver(found: dict[str, Any]) -> Check:
    """Return whether the packages for GPUs, the driver and the GPUs fit together."""
    name, seen, cupy = "NVIDIA driver", found["driver"], found["cupy_packages"]
    version = found["gpus"][0]["driver"] if found["gpus"] else seen["version"]
    if version is None:
        if seen["kernel_module"] or seen["gpu_files"]:
            advice = f"{_CONTAINER}; else reinstall the driver"
            return Check(name, WARNING, f"cannot be loaded: {seen['error']}", advice)
        advice = "install NVIDIA's driver, on a machine with a GPU"
        return Check(name, ABSENT, "not installed (the cuda device)", advice)
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
    problem, advice = next(((words, advice) for applies, words, advice in problems if applies), ("", ""))
    return Check(name, WARNING if problem else OK, f"CUDA {_release(version)}{problem}", advice)


def locked_memory(found: dict[str, Any]) -> Check:
    """Return whether a limit may prevent pinning of the host tier. It does not bind a user who may lock any amount."""
    name, limit, room = "locked memory (ulimit -l)", found["memory"]["locked_limit"], found["memory"]["available"]
    shown = "unlimited" if limit is None else gib(limit)
    if limit is None or os.geteuid() == 0 or not found["gpus"] or (room is not None and limit >= room):
        return Check(name, OK, shown)
    advice = "ulimit -l unlimited; docker run --ulimit memlock=-1; LimitMEMLOCK=infinity in a systemd unit"
    return Check(name, WARNING, f"{shown}: a larger host tier may be refused", advice)


def main_memory(available: int | None) -> Check:
    """Return the status of the main memory that the system and its control groups leave available."""
    name = "available memory"
    if available is None:
        reason = "unknown: a host tier that is too large is not refused"
        return Check(name, WARNING, reason, "choose host_blocks with care")
    if available < _GIB:
        return Check(name, WARNING, gib(available), "free some, or raise the limit")
    return Check(name, OK, gib(available))


def gib(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else f"{nbytes / _GIB:.2f} GiB"


# -- Mooncake ------------------------------------------------------------------------------------


def look_at_mooncake(asked: str | None) -> dict[str, Any]:
    """What is installed, and whether the master that an option or the environment names can be reached."""
    findings: dict[str, Any] = dict.fromkeys(("version", "tested", "error", "seen_as", "unreachable"))
    findings |= {"master": asked or os.environ.get(MASTER) or None, "asked": asked is not None}
    try:
        # Imported here, so that the doctor runs where kvpool cannot be imported.
        from kvpool.storage.backends.mooncake import guarded_client as client
    except ImportError:
        return findings | {"unreachable": findings["master"] and "kvpool cannot be imported"}
    findings |= {"version": client.version(), "tested": client.TESTED}
    if findings["version"] is not None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                client.library()
        except ImportError as raised:
            findings["error"] = str(raised)
    return findings | _reached(findings["master"], client.reach)


def _reached(master: str | None, reach: Callable[[str], str]) -> dict[str, Any]:
    if master is None:
        return {}
    if not re.fullmatch(r"\S+:[0-9]+", master):
        return {"unreachable": f"expected HOST:PORT, got {master!r:.80}"}
    try:
        return {"seen_as": reach(master)}
    except (OSError, ValueError, OverflowError) as error:
        return {"unreachable": str(error)}


def judge_mooncake(found: dict[str, Any]) -> list[Check]:
    """Return the status of Mooncake, from the findings of ``look_at_mooncake``."""
    checks = [_client(found)] if found["version"] else []
    if found["master"] is not None:
        checks.append(_master(found))
    if found["version"] is not None and not found["error"]:
        advice = "keep the ports of clients and master in a network of their own: docs/cluster.md"
        checks.append(Check("mooncake security", WARNING if found["seen_as"] else OK, OPEN_TO_ALL, advice))
    return checks


def _client(findings: dict[str, Any]) -> Check:
    name, version = "mooncake client", findings["version"]
    if findings["error"]:
        words, _, advice = findings["error"].rpartition(": ")
        return Check(name, WARNING, words or findings["error"], advice if "install" in advice else "")
    if version != findings["tested"]:
        return Check(name, WARNING, f"{version}, tested is {findings['tested']}")
    return Check(name, OK, "can be loaded")


def _master(findings: dict[str, Any]) -> Check:
    name = f"mooncake master {findings['master']}"
    if findings["unreachable"]:
        status = FAILED if findings["asked"] else WARNING
        return Check(name, status, findings["unreachable"], "start mooncake_master there, or name its --rpc_port")
    return Check(name, OK, f"accepts connections, and sees this machine as {findings['seen_as']}")
