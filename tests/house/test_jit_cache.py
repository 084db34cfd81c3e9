"""Compiled code is kept between processes, follows every edit that it depends on, and is never unpickled from
strangers."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numba import types
from numba.core import config
from numba.core.errors import TypingError

from kvpool.common.jit import cache, jit

PACKAGE = Path(cache.__file__).parents[2]
# A package with its own copy of the decorator. `entry` calls a helper of `helper`, which reads a constant of `numbers`;
# `other` names neither.
MODULE_TEXTS = {
    "__init__": "",
    "numbers": "FACTOR = 3\n",
    "helper": """
from sample import numbers
from sample.common.jit import jit
@jit(forceinline=True)
def scaled(x):
    return x * numbers.FACTOR
""",
    "entry": """
from sample.helper import scaled
from sample.common.jit import jit
@jit
def entry(x):
    return scaled(x) + 1
def adder(amount):
    @jit
    def add(x):
        return entry(x) + amount
    return add
plus_ten, plus_twenty = adder(10), adder(20)
""",
    "other": """
from sample.common.jit import jit
@jit
def other(x):
    return x - 1
""",
}
REPORT = """
import json
import threading
from sample import entry, other
from sample.common.jit.cache import announcer
from sample.common.jit.cache import cache_root
functions = entry.plus_ten, entry.plus_twenty, entry.entry, other.other
report = []
for function in functions:
    before = announcer.compiled
    report.append((function(5), announcer.compiled - before))
found = {"values": [value for value, _ in report], "compiled": [n for _, n in report]}
print(json.dumps({**found, "threads": threading.active_count()}))
"""
VALUES = [26, 36, 16, 4]
FIRST = [4, 2, 1, 2]
"""Functions and entries that a first process compiles: `scaled`, `entry` and `add` with its entry; and so on."""
NOTHING = [0, 0, 0, 0]


def make_sample(package: Path) -> Path:
    """Write the `sample` package."""
    (package / "common" / "jit").mkdir(parents=True)
    for name, text in MODULE_TEXTS.items():
        (package / f"{name}.py").write_text(text, encoding="utf-8")
    common = PACKAGE / "common"
    sources = [PACKAGE / "errors.py", common / "__init__.py", common / "progress.py"]
    for source in [*sources, *sorted((common / "jit").glob("*.py"))]:
        text = source.read_text(encoding="utf-8").replace("from kvpool.", "from sample.")
        (package / source.relative_to(PACKAGE)).write_text(text, encoding="utf-8")
    return package


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the `sample` package, and in `cache` what one process has compiled."""
    folder = tmp_path_factory.mktemp("compiled")
    report = report_of(make_sample(folder / "code" / "sample"))
    assert (report["values"], report["compiled"]) == (VALUES, FIRST)
    assert report["threads"] == 1, "who compiles without a terminal starts no thread"
    return folder


@pytest.fixture
def sample(compiled: Path, tmp_path: Path) -> Path:
    """A copy of the package and of its compiled code, to change."""
    shutil.copytree(compiled, tmp_path / "copy")
    return tmp_path / "copy" / "code" / "sample"


def cache_of(package: Path) -> Path:
    return package.parents[1] / "cache"


def environment_of(package: Path, **variables: str) -> dict[str, str]:
    """The environment of a child that imports `package`."""
    # Bytecode files distinguish edits by whole seconds and size; these tests edit faster.
    settings = {
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(package.parent),
        "KVPOOL_CACHE_DIR": str(cache_of(package)),
    }
    return {**os.environ, **settings, **variables}


def report_of(package: Path, before: str = "", **variables: str) -> dict[str, Any]:
    """What a new process found, with `before` run ahead of the first import."""
    command = [sys.executable, "-c", before + REPORT]
    done = subprocess.run(command, env=environment_of(package, **variables), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "said": done.stderr}


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


# -- between processes ---------------------------------------------------------------------------


def test_a_process_compiles_what_no_other_has_compiled_and_what_an_edit_has_reached(sample: Path) -> None:
    files = {path: path.read_bytes() for path in cache_of(sample).iterdir()}
    edit(sample / "helper.py", "@jit", "# an edit that changes no code\n@jit")
    swap = (
        f"import sample.entry, pathlib\np = pathlib.Path({str(sample / 'numbers.py')!r})\np.write_text('FACTOR = 4')\n"
    )
    again = report_of(sample, before=swap)
    assert (again["values"], again["compiled"]) == (VALUES, NOTHING), "it had imported the module before the edit"
    assert {path: path.read_bytes() for path in cache_of(sample).iterdir()} == files
    edited = report_of(sample)
    assert (edited["values"], edited["compiled"]) == ([31, 41, 21, 4], [4, 2, 1, 0])


@pytest.mark.exhaustive
def test_code_for_other_features_of_a_processor_is_other_code(sample: Path) -> None:
    script = "from sample.common.jit.compiler import _compiler\nprint(_compiler())"
    keys = [
        subprocess.check_output([sys.executable, "-c", script], env=environment_of(sample, **setting))
        for setting in ({}, {"NUMBA_CPU_FEATURES": "+sse2"}, {"NUMBA_ENABLE_AVX": "0"}, {"NUMBA_OPT": "0"})
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.exhaustive
def test_one_of_two_processes_compiles_while_the_other_waits(sample: Path) -> None:
    shutil.rmtree(cache_of(sample))
    command = [sys.executable, "-c", REPORT]
    children = [
        subprocess.Popen(command, env=environment_of(sample), stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    reports = [json.loads(child.communicate()[0]) for child in children]
    assert [report["values"] for report in reports] == [VALUES] * 2
    assert sum(sum(report["compiled"]) for report in reports) == sum(FIRST)


@pytest.mark.exhaustive
def test_a_process_that_is_stopped_while_it_compiles_holds_no_other_for_ever(sample: Path) -> None:
    shutil.rmtree(cache_of(sample))
    stop = """
import os, signal
from sample.common.jit import compiler
def stop(*unused):
    os.kill(os.getpid(), signal.SIGSTOP)
compiler._translate = stop
"""
    holder = subprocess.Popen([sys.executable, "-c", stop + REPORT], env=environment_of(sample))
    try:
        os.waitpid(holder.pid, os.WUNTRACED)
        listen = "import logging\nlogging.basicConfig()\nfrom sample.common.jit import cache\n"
        listen += "cache._patience, cache._Announcer.PATIENCE = 0.5, 0.1\n"
        report = report_of(sample, before=listen)
    finally:
        holder.kill()
        holder.wait()
    assert (report["values"], report["compiled"]) == (VALUES, FIRST)
    for reported in ("waiting for another process", "stopped waiting: another process"):
        assert report["said"].count(reported) == 1
    assert report_of(sample)["compiled"] == NOTHING, "it keeps what it has compiled without the lock"


@pytest.mark.exhaustive
def test_code_that_is_gone_when_it_is_looked_at_is_compiled_anew(sample: Path) -> None:
    for path in cache_of(sample).glob("*.nbc"):
        path.unlink()
    (cache_of(sample) / "gone-with-another.nbc").symlink_to("nowhere")
    assert report_of(sample)["compiled"] == FIRST


@pytest.mark.exhaustive
def test_works_where_nothing_can_be_written_and_where_standard_error_is_closed(sample: Path) -> None:
    (sample / "plain").touch()
    nowhere = {name: str(sample / "plain" / "x") for name in ("KVPOOL_CACHE_DIR", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    before = f"import sys, tempfile\ntempfile.tempdir = {nowhere['XDG_CACHE_HOME']!r}\nsys.stderr.close()\n"
    report = report_of(sample, before=before, **nowhere)
    assert (report["values"], report["compiled"]) == (VALUES, FIRST)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "without", ["typed_passes.PreLowerStripPhis", "registry.CPUDispatcher", "codegen.CPUCodegen.magic_tuple"]
)
def test_missing_private_names_of_numba_cost_only_the_cache(sample: Path, without: str) -> None:
    shutil.rmtree(cache_of(sample))
    report = report_of(sample, before=f"from numba.core import codegen, registry, typed_passes\ndel {without}\n")
    assert report["values"] == VALUES and not cache_of(sample).exists()


SLOW = """
import sys, time
from sample.common.jit import cache
passed = 0.0
def clock():
    global passed
    passed += float(sys.argv[1])
    return passed
cache.time = type("Slow", (), {"monotonic": staticmethod(clock), "sleep": time.sleep})
"""
LINE = r"sample: compiling, about [1-9]\d* s, once; it is kept in "


@pytest.mark.parametrize("second", ["0.01", "1"])
@pytest.mark.parametrize(
    ("configure", "start"),
    [
        ("", ""),
        ("logging.basicConfig()", "WARNING:kvpool.common.jit.announcer:"),
        ("logging.getLogger('kvpool').addHandler(logging.NullHandler())", None),
    ],
    ids=["no log", "log", "another log"],
)
def test_a_library_reports_once_that_compiling_takes_seconds(
    sample: Path, second: str, configure: str, start: str | None
) -> None:
    """It uses the log, and standard error where none is configured. ``second``: by how much the clock moves on at each
    reading."""
    shutil.rmtree(cache_of(sample))
    for count in (int(second == "1" and start is not None), 0):
        script = f"import logging\n{configure}\n{SLOW}{REPORT}"
        done = subprocess.run(
            [sys.executable, "-c", script, second], env=environment_of(sample), capture_output=True, text=True
        )
        assert json.loads(done.stdout)["values"] == VALUES, done.stderr
        assert len(re.findall(f"^{start}{LINE}{cache_of(sample)}$", done.stderr, re.MULTILINE)) == count
        assert "compiling" not in re.sub(LINE, "", done.stderr), "once; a second process loads it"


# Every verb of a request's life, with offloads and onboards: what a server runs.
LIFE = """
import numpy as np
from kvpool import KVCacheManager
from kvpool.common.arrays.layout import BlockLayout
from kvpool.common.jit.cache import announcer
layout = BlockLayout.of_block_bytes(4096, 16)
with KVCacheManager(layout, device_blocks=8, host_blocks=8, device="cpu") as cache:
    for start in (0, 1000, 0):
        sequence = cache.add_sequence(np.arange(start, start + 100, dtype=np.int32))
        cache.append_tokens(sequence, np.arange(8, dtype=np.int32))
        cache.commit(sequence)
        cache.release(sequence)
    cache.verify()
print(announcer.compiled)
"""


def test_second_process_of_the_real_package_compiles_nothing() -> None:
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    runs = [
        subprocess.run([sys.executable, "-c", LIFE], env=environment, capture_output=True, text=True) for _ in range(2)
    ]
    assert [run.returncode for run in runs] == [0, 0] and not runs[1].stderr
    assert runs[1].stdout.strip() == "0"


# -- functions -------------------------------------------------------------------------------------


@jit
def _doubled(x, wanted):
    if x < 0:
        raise ValueError("x is below zero")
    return x * 2 if wanted else x


@jit
def _sum_of_kinds(small):
    return _doubled(small[0], True) + _doubled(3, False) + _doubled(np.int64(4), small[0] > 0)


@pytest.mark.skipif(config.DISABLE_JIT, reason="nothing is compiled")
def test_function_that_jitted_code_calls_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an int32 nor a constant makes another function of it, and its exceptions come through its callers."""
    monkeypatch.setattr(cache, "read", lambda name: None)
    assert _sum_of_kinds(np.array([5], np.int32)) == 10 + 3 + 8
    assert list(_doubled.libraries) == [(types.int64, types.boolean)] and not _doubled.overloads
    with pytest.raises(ValueError, match="x is below zero"):
        _sum_of_kinds(np.array([-1], np.int32))
    assert _doubled(4, True) == 8 and list(_doubled.overloads) == [(types.int64, types.boolean)]


@pytest.mark.skipif(config.DISABLE_JIT, reason="nothing is compiled")
def test_a_brief_call_lets_no_other_thread_run_and_is_the_same_code() -> None:
    @jit
    def spin(turns):
        total = 0
        for turn in range(turns):
            total = (total * 31 + turn) % 1_000_003
        return total

    counted, over, interval = [0], threading.Event(), sys.getswitchinterval()
    short = spin.keep_gil

    def count() -> None:
        while not over.is_set():
            counted[0] += 1
            time.sleep(0)  # it gives the lock away, and takes it as soon as it can

    short(1)
    assert short.libraries is spin.libraries and len(spin.overloads) == len(short.overloads) == 1
    thread = threading.Thread(target=count)
    try:
        sys.setswitchinterval(1000.0)  # nobody takes the lock from who has it
        thread.start()
        before = counted[0]
        assert short(10_000_000) and counted[0] == before
    finally:
        sys.setswitchinterval(interval)
        over.set()
        thread.join()
    assert short(99) == spin(99) == spin.py_func(99)


def test_no_function_is_inlined_everywhere_that_did_not_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "read", lambda name: None)

    @jit
    def leaf(count: int) -> int:
        total = 0
        for number in range(count):
            total += number * count
        return total

    @jit(forceinline=True)
    def middle(count: int) -> int:
        return leaf(count) + 1

    @jit
    def top(count: int) -> int:
        return middle(count)

    assert top(3) == 10
    for function, asked in ((leaf, False), (middle, True), (top, False)):
        (library,) = function.libraries.values()  # type: ignore[attr-defined]
        (code,) = [function for function in library.module.functions if not function.is_declaration]
        assert (b"alwaysinline" in b" ".join(code.attributes)) == asked, function


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collector_is_as_it_was_after_a_compilation_that_failed(enabled: bool) -> None:
    @jit
    def broken(x):
        return x.no_such_attribute

    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(TypingError):
            broken(1)
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


# -- names ---------------------------------------------------------------------------------------

TEXT = """
from kvpool.common.jit import jit
LIMIT, EDGES = 7, (1, 2)
@jit
def leaf(x):
    return x * NUMBERS.FACTOR
def adder(amount):
    @jit
    def add(x, more=1):
        if x > LIMIT:
            return leaf(x) + amount
        return EDGES[0] + more
    return add
add = adder(10)
"""


def name_of(text: str, factor: int = 3) -> str:
    """The name of `add` for an int64, as a module with this text has it."""
    module: dict[str, Any] = {"NUMBERS": ModuleType("numbers_of_a_test"), "__name__": "module_of_a_test"}
    module["NUMBERS"].FACTOR = factor
    exec(text, module)
    return str(module["add"]._name_of((types.int64,)))


EDITS = {
    "a constant": ("LIMIT, EDGES = 7", "LIMIT, EDGES = 8"),
    "a tuple": ("(1, 2)", "(1, 3)"),
    "a callee": ("x * NUMBERS", "x + NUMBERS"),
    "a cell": ("adder(10)", "adder(11)"),
    "a default": ("more=1", "more=2"),
    "the name of an argument": ("(x, more=1):", "(x, mores=1):\n        more = mores"),
    "an option": ("@jit\ndef leaf", "@jit(forceinline=True)\ndef leaf"),
}


@pytest.mark.skipif(config.DISABLE_JIT, reason="nothing is compiled")
@pytest.mark.parametrize("what", EDITS)
def test_every_edit_that_code_can_depend_on_gives_it_another_name(what: str) -> None:
    old, new = EDITS[what]
    assert old in TEXT and name_of(TEXT.replace(old, new)) != name_of(TEXT) == name_of(TEXT.replace("\n@", "\n# \n@"))


@pytest.mark.skipif(config.DISABLE_JIT, reason="nothing is compiled")
def test_a_constant_of_another_module_is_part_of_the_name() -> None:
    assert name_of(TEXT, factor=4) != name_of(TEXT) != ""


@pytest.mark.skipif(config.DISABLE_JIT, reason="nothing is compiled")
def test_code_that_has_the_address_of_an_object_is_not_kept() -> None:
    assert name_of(TEXT.replace("LIMIT, EDGES = 7", "LIMIT, EDGES = object()")) == ""
