"""``python -m kvpool doctor``: which parts of kvpool work on this machine, and what the others lack."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import resource
from importlib import metadata
from importlib.util import find_spec
from typing import Any, NamedTuple

from kvpool.commands import checks
from kvpool.commands.checks import gib
from kvpool.commands.terminal import FAILED, OK, Subparsers, declare, print_result

_DEVICES = ("cpu", "cuda", "sim")
_EVERYTHING = "everything"
_MOONCAKE = "mooncake-transfer-engine-non-cuda"
_GPU_EXTRA = '[cuda12]" or ".[cuda13]'


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
    _extra("blake3", "blake3", "stores behind the host", "[stores]", "1"),
    _extra("mooncake", _MOONCAKE, "a store in a cluster", "[mooncake]", "0.3.13"),
    _extra("obstore", "obstore", "a store in a bucket", "[s3]", "0.12"),
    _extra("jax", "jax", "the example of an engine in JAX", "[jax]", "0.5"),
    Package("nixl", "nixl", "serving them through NIXL", "pip install --no-deps nixl nixl-cu13"),
)
_CUPY_PACKAGES = ("cupy-cuda13x", "cupy-cuda12x", "cupy")


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command and its options."""
    summary = "say what can be used on this machine, and what is missing for the rest"
    add = declare(subparsers, "doctor", summary, run).add_argument
    add("--device", choices=("auto", *_DEVICES), default="auto", help="the device that has to work (default: auto)")
    master = f"a Mooncake master that has to be reached (default: ${checks.MASTER}, which may be unreachable)"
    add("--mooncake", metavar="HOST:PORT", help=master)
    add("--json", action="store_true", help="print the findings as JSON")


def run(options: argparse.Namespace) -> int:
    """Say what works on this machine and how to mend what does not: packages, compiled code,
    driver, GPUs, memory that can be pinned, which device "auto" is and why, how copies are chosen,
    and Mooncake: whether it can be loaded, and its master reached.

      ok       works
      absent   optional, and not there
      warning  works, but not as well as it could
      failed   has to be mended

    exit status: 0 the device that was asked for can be used and nothing has failed, 1 otherwise
    """
    found = examine(options.device, options.mooncake)
    print_result(options, found, text(found))
    failed = any(check["status"] == checks.FAILED for check in found["checks"])
    return OK if found["usable"] and not failed else FAILED


def examine(device: str = "auto", mooncake: str | None = None) -> dict[str, Any]:
    """All findings of the command. It starts no device, but asks the driver for its GPUs."""
    packages = {part.package: _look(part) for part in _PARTS}
    broken = False
    try:
        chosen, because, missing, gpus, available = _look_at_devices()
    except Exception as error:
        # No device can be imported if a package that all of kvpool needs is missing.
        because = f"kvpool's devices cannot be imported: {type(error).__name__}: {error}"
        chosen = None
        missing = because
        gpus = list[Any]()
        available = None
        broken = True
    wanted = chosen if device == "auto" else device
    cluster = checks.look_at_mooncake(mooncake)
    found = {
        "python": platform.python_version(),
        "packages": packages,
        "numba.cuda": _numba_cuda(packages["numba-cuda"]["version"]),
        "cupy_packages": [name for name in _CUPY_PACKAGES if _version(name)],
        "jit": checks.look_at_jit(),
        "driver": checks.look_at_driver(),
        "gpus": [gpu._asdict() for gpu in gpus],
        "auto": {"device": chosen, "because": because},
        "memory": {"locked_limit": _locked_limit(), "available": available},
        "copies": _copies(gpus),
        "mooncake": cluster,
        "device": device,
        "usable": wanted is not None and not broken and (wanted != "cuda" or missing is None),
        "missing": missing if wanted == "cuda" or broken else None,
    }
    judged = [*checks.judge(found), *checks.judge_mooncake(cluster)]
    return found | {"checks": [check._asdict() for check in judged]}


def _look_at_devices() -> tuple[str | None, str, str | None, list[Any], int | None]:
    """The device that "auto" chooses, and why; why there is no cuda device; the GPUs; available bytes of memory."""
    from kvpool.device import automatic
    from kvpool.device.cuda import describe_gpus, unusable
    from kvpool.device.main_memory import available_ram

    missing = unusable()
    chosen: str | None = None
    try:
        chosen, because = automatic()
    except ValueError as error:
        because = str(error)
    return chosen, because, missing, [] if missing else describe_gpus(), available_ram()


def _look(part: Package) -> dict[str, Any]:
    names = _CUPY_PACKAGES if part.module == "cupy" else (part.package,)
    version = next(filter(None, map(_version, names)), None)
    # A package that is installed may not be importable, and some installations leave no metadata.
    there = version is not None or find_spec(part.module) is not None
    error = _failure(part.module) if there else "not installed"
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
            importlib.import_module("kvpool.device.cuda.step_kernel").compile_for((8, 0))
    except Exception as error:
        wrong = f"step tables cannot be compiled: {type(error).__name__}: {error}"
    return {"place": place, "error": wrong}


def _locked_limit() -> int | None:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _copies(gpus: list[Any]) -> dict[str, Any] | None:
    """How copies are chosen on the first GPU, according to the stored calibration."""
    if not gpus:
        return None
    from kvpool.device.cuda import COPY_PATH, calibration

    path = calibration.place(gpus[0].name, gpus[0].driver)
    stored, problem = None, None
    try:
        stored = calibration.load(path)
    except (OSError, ValueError) as error:
        problem = str(error)
    table = [m._asdict() for m in stored.measurements] if stored else []
    return {"file": str(path), "error": problem, "table": table, "environment": os.environ.get(COPY_PATH)}


def text(found: dict[str, Any]) -> str:
    """The findings as lines of text."""
    lines = [f"{checks.OK:8} python: {found['python']}"]
    for check in found["checks"]:
        lines.append(f"{check['status']:8} {check['name']}: {check['found']}")
        lines += [f"{'':8} -> {check['remedy']}"] if check["remedy"] else []
    lines += ["", *(_gpu_line(gpu) for gpu in found["gpus"])]
    lines += [] if found["gpus"] else ["no GPU that kvpool can use"]
    lines.append(f'device "auto" is {found["auto"]["device"]}: {found["auto"]["because"]}')
    lines += _copy_lines(found["copies"])
    if not found["usable"]:
        lines += ["", f"device {found['device']!r} cannot be used: {found['missing'] or found['auto']['because']}"]
    return "\n".join(lines)


def _gpu_line(gpu: dict[str, Any]) -> str:
    return (
        f"GPU {gpu['number']}: {gpu['name']}, {gib(gpu['memory'])}, CUDA "
        f"{gpu['driver'] // 1000}.{gpu['driver'] % 1000 // 10}"
    )


def _copy_lines(copies: dict[str, Any] | None) -> list[str]:
    if copies is None:
        return []
    from kvpool.device.cuda import COPY_PATH, calibration

    if copies["environment"]:
        return [f"copies: {copies['environment']}, by {COPY_PATH}"]
    if not copies["table"]:
        return [f"copies: chosen by rule; cache.calibrate() measures them ({copies['error'] or copies['file']})"]
    table: dict[tuple[str, int, int], dict[str, float]] = {}
    for m in copies["table"]:
        table.setdefault((m["direction"], m["nbytes"], m["fragments"]), {})[m["path"]] = m["gigabytes_per_second"]
    measured = calibration.Calibration("", 0, tuple(calibration.Measurement(**m) for m in copies["table"]))
    lines = [f"copies: as measured in {copies['file']}", f"{'direction':9} {'KiB':>6} {'count':>6}  GB/s"]
    for (direction, nbytes, count), speeds in table.items():
        best = measured.choose(direction, nbytes, count)
        shown = "  ".join(f"{path} {speed:.1f}{'*' if path == best else ''}" for path, speed in speeds.items())
        lines.append(f"{direction:9} {nbytes / 1024:6.0f} {count:6}  {shown}")
    return lines
