"""Builds the emulated driver, a runtime over it, and a copy of CuPy with that runtime in the place of NVIDIA's.

Everything goes to a cache folder outside of the tree, once for each version of CuPy and of the sources here.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
DRIVER = HERE / "driver"
CACHE = "KVPOOL_EMULATED_CACHE"
"""Environment variable: where everything is built, instead of ``~/.cache/kvpool-emulated``."""

CUPY = "14.2.0"
CUPY_SHA256 = "cfed725e612178cfbdbf62f4a3a598b60edecbbca718c0d4580c21a16ae4a62c"
WHEELS = (
    f"cupy-cuda13x=={CUPY}",
    "nvidia-cuda-runtime==13.*",
    "nvidia-cuda-crt==13.*",
    "nvidia-cuda-profiler-api==13.*",
    "nvidia-nvjitlink==13.*",
)
CYTHON = "Cython>=3.2,<3.3,!=3.2.6"
COMPILE_TIME = "CUPY_CUDA_VERSION=13020,CUPY_HIP_VERSION=0,CUPY_USE_CUDA_PYTHON=False"
RUNTIME_MODULE = "cupy_backends/cuda/api/runtime"


class BuildError(Exception):
    """What is missing, in words."""


def cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(CACHE) or Path(base) / "kvpool-emulated")


def digest() -> str:
    """Digest of everything that decides what is built."""
    digest = hashlib.sha256(f"{CUPY} {CUPY_SHA256} {WHEELS} {CYTHON} {COMPILE_TIME} {sys.version}".encode())
    for file in (*sorted(DRIVER.glob("*.[ch]")), HERE / "build.py"):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def place() -> Path:
    """Where the parts are, built or not."""
    return cache() / f"cupy-{CUPY}-{digest()}"


def built() -> bool:
    return (place() / "done").exists()


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """One process builds, and the others wait for it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run(*command: object, what: str, **options: object) -> None:
    words = [str(part) for part in command]
    done = subprocess.run(words, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise BuildError(f"{what} failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")


def need_tools() -> None:
    missing = [tool for tool in ("gcc", "g++") if shutil.which(tool) is None]
    if missing:
        raise BuildError(f"{' and '.join(missing)} not found: install the compilers")
    if sys.platform != "linux" or sysconfig.get_platform() != "linux-x86_64":
        raise BuildError(f"the emulated driver is for Linux on x86-64, this is {sysconfig.get_platform()}")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise BuildError(f"{header} not found: install Python's development files")


def pip(*arguments: object, environment: dict[str, str] | None = None) -> None:
    what = f"pip {arguments[0]} (is there a network?)"
    command = sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments
    run(*command, what=what, env={**os.environ, **(environment or {})})


def fetch(base: Path) -> None:
    """The wheels, unpacked, and CuPy's source, checked."""
    done = base / "done"
    if done.exists():
        return
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir(parents=True)
    pip("download", "--no-deps", "--only-binary", ":all:", "-d", base / "wheels", *WHEELS)
    for wheel in (base / "wheels").glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(base / ("cupy" if wheel.name.startswith("cupy") else "cuda"))
    pip("install", "--no-deps", "--target", base / "cython", CYTHON)
    stub = {"CUPY_INSTALL_USE_STUB": "1"}
    pip("download", "--no-deps", "--no-binary", "cupy", "-d", base, f"cupy=={CUPY}", environment=stub)
    source = base / f"cupy-{CUPY}.tar.gz"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    if digest != CUPY_SHA256:
        raise BuildError(f"{source.name} has the sha256 {digest}, and {CUPY_SHA256} is expected")
    run("tar", "xzf", source, "-C", base, what="unpacking CuPy's source")
    done.touch()


def enum_names(header: str, start: str) -> list[tuple[str, int]]:
    """The names and numbers of an enumeration of errors."""
    return [
        (name, int(number, 0))
        for name, number in re.findall(rf"^\s+({start}\w+)\s*=\s*(0x[0-9a-f]+|\d+)\s*,?", header, re.MULTILINE)
    ]


def error_table(names: list[tuple[str, int]]) -> str:
    rows = "".join(f'    {{{number}, "{name}", "{name}"}},\n' for name, number in names)
    return f"const struct {{ int code; const char *name, *text; }} emu_errors[] = {{\n{rows}    {{0, 0, 0}},\n}};\n"


def not_supported(names: set[str], status: int) -> str:
    """Functions that say their name; whatever is implemented takes their place."""
    says = (
        "#include <stdio.h>\n"
        + "static int say(const char* name) {\n"
        + '    fprintf(stderr, "emulated driver: %s is not implemented\\n", name);\n'
        + f"    return {status};\n}}\n"
    )
    return says + "".join(
        f'__attribute__((weak, visibility("default"))) int {name}(void) {{ return say("{name}"); }}\n'
        for name in sorted(names)
    )


def build_driver(headers: Path, work: Path, library: Path) -> None:
    text = (headers / "cuda.h").read_text(encoding="utf-8")
    renamed = re.findall(r"^ *#define (cu[A-Z]\w*) +(?:__CUDA_API_PT[DS]*\()?(cu[A-Z]\w*?)\)? *$", text, re.MULTILINE)
    renamed = [(name, other) for name, other in renamed if not other.endswith(("_ptds", "_ptsz"))]
    declared = set(re.findall(r"CUresult CUDAAPI (cu[A-Z]\w*)\(", text)) | {other for _, other in renamed}
    names = "".join(f'    {{"{name}", "{other}"}},\n' for name, other in renamed)
    (work / "names.c").write_text(
        error_table(enum_names(text, "CUDA_(?:SUCCESS|ERROR)"))
        + f"const char* const emu_names[][2] = {{\n{names}    {{0, 0}},\n}};\n",
        encoding="utf-8",
    )
    (work / "missing.c").write_text(
        not_supported({name for name in declared if not name.endswith(("_ptds", "_ptsz"))}, 801), encoding="utf-8"
    )
    objects = []
    for source in (
        *(DRIVER / f"{name}.c" for name in ("core", "scheduler", "events", "memory", "kernels", "capture")),
        work / "names.c",
        work / "missing.c",
    ):
        objects.append(work / f"{source.stem}.o")
        run("gcc", *C_OPTIONS, f"-I{headers}", "-c", source, "-o", objects[-1], what=f"compiling {source.name}")
    run(
        "gcc",
        "-shared",
        "-Wl,-soname,libcuda.so.1",
        "-o",
        library / "libcuda.so.1",
        *objects,
        "-lpthread",
        "-ldl",
        what="linking libcuda.so.1",
    )


def build_blas(base: Path, headers: Path, work: Path, library: Path) -> None:
    """What CuPy's module for cuBLAS links, most of which says that it is not supported."""
    (module,) = (base / "cupy/cupy_backends/cuda/libs").glob("cublas.*.so")
    functions = set(re.findall(rb"\bcublas[A-Z]\w+", module.read_bytes()))
    (work / "blas_missing.c").write_text(not_supported({name.decode() for name in functions}, 15), encoding="utf-8")
    sources = DRIVER / "blas.c", work / "blas_missing.c"
    links = f"-L{library}", "-l:libcuda.so.1", f"-Wl,-rpath,{library}", "-Wl,-soname,libcublas.so.13"
    target = library / "libcublas.so.13"
    run("gcc", *C_OPTIONS, "-shared", f"-I{headers}", *sources, "-o", target, *links, what="building libcublas.so.13")
    (work / "empty.c").write_text("")
    run(
        "gcc",
        "-shared",
        "-Wl,-soname,libcublasLt.so.13",
        "-o",
        library / "libcublasLt.so.13",
        work / "empty.c",
        what="building libcublasLt.so.13",
    )


C_OPTIONS = ("-std=gnu11", "-O2", "-g", "-Wall", "-Wno-unused-parameter", "-fvisibility=hidden", "-fPIC")


def build_runtime(base: Path, headers: Path, work: Path, library: Path, overlay: Path) -> None:
    """CuPy's module over our runtime, in the place of the one over NVIDIA's."""
    names = (headers / "driver_types.h").read_text(encoding="utf-8")
    (work / "runtime_names.c").write_text(error_table(enum_names(names, "cuda(?:Success|Error)")), encoding="utf-8")
    functions = re.findall(
        r"(?:__CUDART_BUILTIN__|CUDARTAPI) (cuda[A-Z]\w*)\(",
        (headers / "cuda_runtime_api.h").read_text(encoding="utf-8"),
    )
    (work / "runtime_missing.c").write_text(not_supported(set(functions), 801), encoding="utf-8")
    objects = []
    for source in (DRIVER / "runtime.c", work / "runtime_names.c", work / "runtime_missing.c"):
        objects.append(work / f"{source.stem}.o")
        run("gcc", *C_OPTIONS, f"-I{headers}", "-c", source, "-o", objects[-1], what=f"compiling {source.name}")
    source, generated = base / f"cupy-{CUPY}", work / "runtime_module.cpp"
    command = (
        sys.executable,
        "-m",
        "cython",
        "--cplus",
        "-3",
        "-E",
        COMPILE_TIME,
        f"{RUNTIME_MODULE}.pyx",
        "-o",
        generated,
    )
    run(*command, what="cython", cwd=source, env={**os.environ, "PYTHONPATH": str(base / "cython")})
    module = overlay / f"{RUNTIME_MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not module.exists():
        raise BuildError(f"{module} not found: CuPy's wheel is for another Python")
    module.unlink()  # it may share its bytes with the wheel that was unpacked
    macros = ("-DCYTHON_COMPRESS_STRINGS=0", "-DCUPY_CACHE_KEY=emulated")
    folders = headers, sysconfig.get_path("include"), source, source / "cupy_backends/cuda/api"
    includes = [f"-I{folder}" for folder in folders]
    links = f"-L{library}", "-l:libcuda.so.1", "-Wl,-Bsymbolic", f"-Wl,-rpath,{library}"
    command = (
        "g++",
        "-std=c++17",
        "-O1",
        "-w",
        "-fPIC",
        "-shared",
        *macros,
        *includes,
        generated,
        *objects,
        "-o",
        module,
    )
    run(*command, *links, what=f"compiling {RUNTIME_MODULE}.pyx")


def link_tree(source: Path, target: Path) -> None:
    """A copy that shares the bytes where the file system can."""
    for file in source.rglob("*"):
        if file.is_file():
            copy = target / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file, copy)
            except OSError:
                shutil.copy2(file, copy)


def build(say: object = print) -> Path:
    """All of it, or nothing to do. Raises BuildError."""
    need_tools()
    target = place()
    with only_one(cache()):
        if built():
            return target
        wanted = hashlib.sha256(f"{WHEELS} {CYTHON} {sys.version}".encode()).hexdigest()[:8]
        base = cache() / f"fetched-{CUPY}-{wanted}"
        print("fetching CuPy, its source, the headers and Cython", flush=True)
        fetch(base)
        shutil.rmtree(target, ignore_errors=True)
        work, library, overlay = target / "work", target / "lib", target / "overlay"
        for folder in (work, library, overlay):
            folder.mkdir(parents=True)
        (headers,) = (file.parent for file in (base / "cuda").rglob("cuda.h"))
        print("building the driver", flush=True)
        build_driver(headers, work, library)
        link_tree(base / "cupy", overlay)
        link_tree(headers, target / "include")
        for file in (base / "cuda").rglob("libnvJitLink.so.*"):  # numba-cuda's linker
            shutil.copy2(file, library)
        print("building CuPy's runtime module", flush=True)
        build_runtime(base, headers, work, library, overlay)
        build_blas(base, headers, work, library)
        (target / "done").touch()
    return target


def environment(root: Path | None = None) -> dict[str, str]:
    """What a process needs so that its CuPy and its numba-cuda are over the emulated driver."""
    target = root or place()
    libraries = [str(target / "lib"), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    # Not site-packages: numba-cuda's redirector would not run.
    paths = [
        str(HERE / "site"),
        str(target / "overlay"),
        str(HERE.parents[1]),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    return {
        "LD_LIBRARY_PATH": ":".join(libraries),
        "PYTHONPATH": ":".join(paths),
        "KVPOOL_EMULATED": str(target),
        "CUDA_PATH": str(target),
        "CUPY_CACHE_DIR": str(target / "kernels"),
        # These modules of CuPy's come with kernels that are compiled, and with NVIDIA's runtime.
        "CUPY_ACCELERATORS": "",
    }
