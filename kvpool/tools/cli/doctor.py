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
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvpool.tools.cli import terminal

if TYPE_CHECKING:
    from kvpool.device.cuda.runtime import Gpu

OK = "ok"
ABSENT = "absent"
WARNING = "warning"
FAILED = "failed"
_MIB, _GIB = 1 << 20, 1 << 30
_CACHE_NEEDS = 200 * _MIB
_CONTAINER = "in a container, start it with --gpus all"
_DEVICES = ("auto", "cpu", "cuda", "sim")
_EVERYTHING = "everything"
_MOONCAKE = "mooncake-transfer-engine-non-cuda"
_GPU_EXTRA = '[cuda12]" or ".[cuda13]'
SUITE_RAN_ON = ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
"""The models on which all tests have passed: see docs/support.md."""
MASTER = "MOONCAKE_MASTER"
"""Names the master where no option does. Mooncake's own tools read it too."""


class Check(NamedTuple):
    """The status of one part: ok, absent (optional, not installed), warning (works, but not well) or failed. ``advice``
    may be empty."""

    name: str
    status: str
    reason: str
    advice: str = ""


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


_NUMBA_CUDA = _extra("numba_cuda", "numba-cuda", "kernels in Python", _GPU_EXTRA, "0.30")
_PARTS = (
    _extra("numpy", "numpy", _EVERYTHING, "", "2.2"),
    _extra("numba", "numba", _EVERYTHING, "", "0.62"),
    _extra("cupy", "cupy", "the cuda device", _GPU_EXTRA, "14"),
    _NUMBA_CUDA,
    _extra("tqdm", "tqdm", "progress bars", "[cli]", "4.64"),
    _extra("matplotlib", "matplotlib", "plots", "[plot]", "3.6"),
    _extra("prometheus_client", "prometheus-client", "metrics", "[metrics]", "0.19"),
    _extra("zmq", "pyzmq", "other workers and routers", "[remote]", "25"),
    _extra("msgspec", "msgspec", "KV events for routers", "[events]", "0.18"),
    _extra("opentelemetry", "opentelemetry-api", "spans", "[otel]", "1.20"),
    _extra("cryptography", "cryptography", "stores behind the host", "[stores]", "50"),
    _extra("mooncake", _MOONCAKE, "a store in a cluster", "[mooncake]", "0.3.13"),
    _extra("obstore", "obstore", "a store in a bucket", "[s3]", "0.12"),
    _extra("jax", "jax", "the example of an engine in JAX", "[jax]", "0.10"),
    Package("nixl", "nixl", "serving them through NIXL", "pip install --no-deps nixl nixl-cu13"),
)
_CUPY_PACKAGES = ("cupy-cuda13x", "cupy-cuda12x", "cupy")


def add_parser(subparsers: terminal.Subparsers) -> None:
    """Declare the command and its options."""
    summary = "say what can be used on this machine, and what is missing for the rest"
    add = terminal.declare(subparsers, "doctor", summary, run).add_argument
    add("--device", choices=_DEVICES, default="auto", help="the device that has to work (default: auto)")
    master = f"a Mooncake master that has to be reached (default: ${MASTER}, which may be unreachable)"
    add("--mooncake", metavar="HOST:PORT", help=master)
    add("--json", action="store_true", help="print the checks as JSON")


def run(options: argparse.Namespace) -> int:
    """Check each part that kvpool uses on this machine: packages, compiled code, driver, GPUs,
    memory that can be pinned, the device, how copies are chosen, and Mooncake. One line each:

      ok       works
      absent   optional, and not installed
      warning  works, but not as well as it could
      failed   does not work, and is needed

    exit status: 0 nothing has failed, and the requested device can be used; 1 otherwise
    """
    checks = examine(options.device, options.mooncake)
    lines = list[str]()
    for check in checks:
        lines.append(f"{check.name}: {check.status}, {' '.join(check.reason.split())}")
        lines += [f"    advice: {check.advice}"] if check.advice else []
    terminal.print_result(options, [check._asdict() for check in checks], "\n".join(lines))
    return terminal.FAILED if any(check.status == FAILED for check in checks) else terminal.OK


def examine(device: str = "auto", mooncake: str | None = None) -> list[Check]:
    """Return the status of each part. It starts no device, but queries the driver for its GPUs."""
    usable, gpus = check_device(device)
    return [
        Check("python", OK, platform.python_version()),
        *(check_package(part, *_look(part)) for part in _PARTS),
        *check_numba_cuda(_version("numba-cuda")),
        *check_compiled_code(),
        check_driver(look_at_driver(), [name for name in _CUPY_PACKAGES if _version(name)], gpus),
        *check_memory(gpus),
        *(
            Check(f"GPU {gpu.number}", OK, f"{gpu.name}, {_gib(gpu.memory)}, CUDA {_release(gpu.driver)}")
            for gpu in gpus
        ),
        *(check_copies(gpus[0]) if gpus else ()),
        usable,
        *check_mooncake(mooncake),
    ]


# -- packages and compiled code ------------------------------------------------------------------


def _look(part: Package) -> tuple[str | None, str | None]:
    """The installed version of a package, and why it cannot be used."""
    names = _CUPY_PACKAGES if part.module == "cupy" else (part.package,)
    version = next(filter(None, map(_version, names)), None)
    # A package that is installed may not be importable, and some installations leave no metadata.
    if version is None and find_spec(part.module) is None:
        return None, "not installed"
    try:
        importlib.import_module(part.module)
    except Exception as error:
        return version, f"{type(error).__name__}: {error}"
    return version, None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_package(part: Package, version: str | None, error: str | None) -> Check:
    """Return the status of a package that is needed or useful."""
    required, shown = part.use == _EVERYTHING, version or "installed"
    if error == "not installed":
        return Check(part.package, FAILED if required else ABSENT, f"{error} ({part.use})", part.install)
    if error is not None:
        reason = f"{shown}, but cannot be imported ({part.use}): {error}"
    elif part.minimum and version and _numbers(version) < _numbers(part.minimum):
        reason = f"{shown}, older than {part.minimum} ({part.use})"
    else:
        return Check(part.package, OK, shown)
    return Check(part.package, FAILED if required else WARNING, reason, part.install)


def _numbers(version: str) -> list[int]:
    """The numbers of a version, to compare two: 2.2.0rc1 is [2, 2, 0]."""
    return [int(number) for number in re.findall(r"\d+", re.match(r"[\d.]*", version)[0])]  # type: ignore[index]


def check_numba_cuda(installed: str | None) -> list[Check]:
    """Return a warning if ``numba.cuda`` is not that of numba-cuda, whose redirector did not run, or does not compile,
    as with a NumPy that is newer than it knows."""
    if installed is None:
        return []
    try:
        if "numba_cuda" not in str(importlib.import_module("numba.cuda").__file__):
            return [Check("numba.cuda", WARNING, "is Numba's own", "take site-packages out of PYTHONPATH")]
        kernels = importlib.import_module("kvpool.device.cuda.table_kernels")
        for name in kernels.KERNELS:
            kernels.compile_for(name, (8, 0))
    except Exception as error:
        reason = f"kernels of tables cannot be compiled: {type(error).__name__}: {error}"
        return [Check("numba.cuda", WARNING, reason, _NUMBA_CUDA.install)]
    return []


def check_compiled_code() -> list[Check]:
    """Return the status of the compiled code, which is kept on disk. Empty if Numba cannot be imported."""
    try:
        from numba.core import config

        from kvpool.common.jit import keeps
        from kvpool.common.jit.cache import cache_root
    except Exception:
        return []
    root, status = cache_root(), WARNING
    elsewhere = "set NUMBA_CACHE_DIR to a folder that only you can write"
    if config.DISABLE_JIT:
        reason, advice = "everything runs in the interpreter", "unset NUMBA_DISABLE_JIT"
    elif root is None:
        reason, advice = "every process compiles: no folder can be written", elsewhere
    elif not keeps():
        reason, advice = "every process compiles: this Numba does not take kvpool's cache", 'pip install -U "."'
    else:
        free = shutil.disk_usage(root).free
        reason, advice = f"{_compiled(root) / _MIB:.0f} MiB in {root}, {free / _MIB:.0f} MiB free", elsewhere
        if free >= _CACHE_NEEDS:
            status, advice = OK, ""
    return [Check("compiled code", status, reason, advice)]


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


# -- GPUs, memory and devices --------------------------------------------------------------------


class SeenDriver(NamedTuple):
    """NVIDIA's driver: the CUDA version that it supports (13010 is 13.1), or why it cannot be loaded; whether its
    kernel module is there; and the number of GPUs that have a file."""

    version: int | None
    error: str | None
    kernel_module: bool
    gpu_files: int


def look_at_driver() -> SeenDriver:
    """Query NVIDIA's driver without CuPy. Starts no GPU."""
    version, error = ctypes.c_int(), None
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
        error = f"cuDriverGetVersion gave {status}" if status else None
    except (OSError, AttributeError) as raised:
        error = str(raised)
    files = [*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("dxg")]
    module = Path("/proc/driver/nvidia/version").exists()
    return SeenDriver(None if error else version.value, error, module, len(files))


def check_driver(seen: SeenDriver, cupy: list[str], gpus: list[Gpu]) -> Check:
    """Return whether the packages for GPUs, the driver and the GPUs fit together."""
    name, version = "NVIDIA driver", gpus[0].driver if gpus else seen.version
    if version is None:
        if seen.kernel_module or seen.gpu_files:
            return Check(name, WARNING, f"cannot be loaded: {seen.error}", f"{_CONTAINER}; else reinstall the driver")
        return Check(name, ABSENT, "not installed (the cuda device)", "install it on a machine with a GPU")
    problem, advice = "", ""
    if version < 12000:
        problem, advice = ", too old for CuPy", "update the driver"
    elif len(cupy) > 1:
        problem, advice = f", and several CuPy: {', '.join(cupy)}", f"pip uninstall {' '.join(cupy)}, then install one"
    elif cupy == ["cupy-cuda13x"] and version < 13000:
        problem, advice = ", and CuPy for 13", 'pip uninstall cupy-cuda13x, then pip install ".[cuda12]"'
    elif not gpus and not seen.gpu_files:
        problem, advice = ", without a GPU", _CONTAINER
    elif not cupy:
        problem, advice = ", without CuPy", f'pip install ".[{"cuda13" if version >= 13000 else "cuda12"}]"'
    return Check(name, WARNING if problem else OK, f"CUDA {_release(version)}{problem}", advice)


def _release(version: int) -> str:
    """Format a CUDA version: 13010 is 13.1."""
    return f"{version // 1000}.{version % 1000 // 10}"


def check_memory(gpus: list[Gpu]) -> list[Check]:
    """Return whether a limit may prevent pinning of the host tier, and the memory that is available."""
    try:
        from kvpool.device.memory.main_memory import available_ram
    except ImportError:
        return []
    limit, available = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], available_ram()
    locked = Check("locked memory (ulimit -l)", OK, _gib(limit) if limit >= 0 else "unlimited")
    # The limit does not bind a user who may lock any amount.
    if gpus and os.geteuid() and 0 <= limit < (available or limit + 1):
        advice = "ulimit -l unlimited; docker run --ulimit memlock=-1; LimitMEMLOCK=infinity in a systemd unit"
        locked = Check(locked.name, WARNING, f"{locked.reason}: a larger host tier may be refused", advice)
    name = "available memory"
    if available is None:
        return [locked, Check(name, WARNING, "unknown", "choose host_blocks with care")]
    advice = "" if available >= _GIB else "free some, or raise the limit"
    return [locked, Check(name, WARNING if advice else OK, _gib(available), advice)]


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.2f} GiB"


def check_device(device: str) -> tuple[Check, list[Gpu]]:
    """Return whether a device can be used, and the GPUs."""
    name, gpus = f"device {device}", list["Gpu"]()
    try:
        from kvpool.device import automatic
        from kvpool.device.cuda import describe_gpus, unusable

        missing = unusable()
        gpus = [] if missing else describe_gpus()
        chosen, reason = automatic() if device == "auto" else (device, "usable")
    except Exception as error:  # a package is missing, or the environment names no device
        return Check(name, FAILED, f"{type(error).__name__}: {error}"), gpus
    if chosen == "cuda" and missing:
        return Check(name, FAILED, missing), gpus
    return Check(name, OK, f"{chosen}: {reason}" if device == "auto" else reason), gpus


def check_copies(gpu: Gpu) -> list[Check]:
    """Return how copies are chosen on a GPU, which kernels have passed their test on it, and whether all tests have
    passed on one of its model."""
    from kvpool.device.cuda import COPY_PATH, calibration
    from kvpool.device.cuda.trials import has_passed

    copies = Check("copies", OK, "chosen by rule: not measured", "call cache.memory.calibrate() once")
    try:
        if forced := os.environ.get(COPY_PATH):
            copies = Check("copies", OK, f"{forced}, by {COPY_PATH}")
        elif calibration.stored(gpu) is not None:
            copies = Check("copies", OK, f"as measured in {calibration.place(gpu.name, gpu.driver)}")
    except (OSError, ValueError) as error:
        copies = copies._replace(status=WARNING, reason=f"chosen by rule: {error}")
    passed = ", ".join(path for path in calibration.KERNELS if has_passed(gpu, path))
    tested = f"self-tested here: {passed}" if passed else "not self-tested here; the first pool does it"
    ran = "has passed" if gpu.name in SUITE_RAN_ON else "has not run"
    return [copies, Check("copy kernels", OK, f"{tested}; the suite of tests {ran} on this model")]


# -- Mooncake ------------------------------------------------------------------------------------


def check_mooncake(asked: str | None) -> list[Check]:
    """Return whether Mooncake's client can be loaded, whether the master that an option or the environment names can be
    reached, and that its clients are open to all."""
    master = asked or os.environ.get(MASTER)
    try:
        # Imported here, so that the doctor runs where kvpool cannot be imported.
        from kvpool.storage.backends.mooncake import guarded_client as client
    except ImportError as raised:
        return [Check("mooncake", FAILED, f"kvpool cannot be imported: {raised}")] if asked else []
    checks, version, error = list[Check](), client.version(), ""
    if version is not None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                client.library()
        except ImportError as raised:
            error = str(raised)
        reason = error or ("can be loaded" if version == client.TESTED else f"{version}, tested is {client.TESTED}")
        checks.append(Check("mooncake client", OK if reason == "can be loaded" else WARNING, reason))
    seen_as = None
    if master:
        name = f"mooncake master {master}"
        try:
            if not re.fullmatch(r"\S+:[0-9]+", master):
                raise ValueError(f"expected HOST:PORT, got {master!r:.80}")
            seen_as = client.reach(master)
            checks.append(Check(name, OK, f"accepts connections, and sees this machine as {seen_as}"))
        except (OSError, ValueError, OverflowError) as raised:
            status = FAILED if asked else WARNING
            checks.append(Check(name, status, str(raised), "start mooncake_master there, or name its --rpc_port"))
    if version is not None and not error:
        reason = "clients listen on all interfaces, without a password: host tiers can be read and written"
        advice = "keep the ports of clients and master in a network of their own: docs/cluster.md"
        checks.append(Check("mooncake security", WARNING if seen_as else OK, reason, advice))
    return checks
