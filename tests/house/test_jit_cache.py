"""Compiled code is kept between processes, follows every edit of the sources it can see, and is never unpickled from
strangers."""

from __future__ import annotations

import ast
import contextlib
import gc
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import types
from numba.core import config
from numba.core.errors import TypingError

from kvpool.jit import compiler, jit, sources

# A package with its own copy of the decorator. `entry` inlines a helper of `deep.helper`, which reads a constant of
# `deep.numbers`; `other` names neither.
MODULE_TEXTS = {
    "__init__": "",
    "deep/__init__": "",
    "deep/numbers": "FACTOR = 3\n",
    "deep/helper": """
from sample.deep import numbers
from sample.jit import jit
FACTOR = numbers.FACTOR
@jit(inline="always")
def scaled(x):
    return x * FACTOR
""",
    "entry": """
from sample.deep.helper import scaled
from sample.jit import jit
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
from sample.jit import jit
@jit
def other(x):
    return x - 1
""",
}

REPORT = """
import json, os, sys
from sample import entry, other
from sample.jit.folders import cache_root
functions = {"entry": entry.entry, "plus_ten": entry.plus_ten, "plus_twenty": entry.plus_twenty, "other": other.other}
report = {name: {"value": f(5)} for name, f in functions.items()}
for name, f in functions.items():
    stats = getattr(f, "stats", None)
    if stats:
        report[name] |= {"hits": sum(stats.cache_hits.values()), "misses": sum(stats.cache_misses.values())}
print(json.dumps(report | {"root": str(cache_root())}))
"""


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """The folder of a fresh `sample` package."""
    package = tmp_path / "code" / "sample"
    for name, text in MODULE_TEXTS.items():
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (package / "jit").mkdir()
    shutil.copy(Path(sources.__file__).parents[1] / "errors.py", package)
    for own in sorted(Path(sources.__file__).parent.glob("*.py")):
        text = own.read_text(encoding="utf-8").replace("from kvpool.", "from sample.")
        (package / "jit" / own.name).write_text(text, encoding="utf-8")
    return package


def environment_of(package: Path, **variables: str) -> dict[str, str]:
    """The environment of a child that imports `package`, without the cache settings of this process."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("KVPOOL_CACHE_DIR", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "HOME", "TMPDIR")
    }
    # Bytecode files tell edits apart by whole seconds and size; these tests edit faster. A home that is not there: no
    # cache of the user's.
    own = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(package.parent), "HOME": str(package.parent / "nowhere")}
    return {**kept, **own, **variables}


def report_of(package: Path, before: str = "", **variables: str) -> dict[str, Any]:
    """What a new process found, with `before` run ahead of the first import."""
    command = [sys.executable, "-c", before + REPORT]
    done = subprocess.run(command, env=environment_of(package, **variables), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def misses_of(report: dict[str, Any]) -> dict[str, int]:
    return {name: value["misses"] for name, value in report.items() if name != "root"}


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def files_below(root: str) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in Path(root).rglob("*") if path.is_file()}


@pytest.mark.parametrize("level", ["0", "3"])
def test_second_process_compiles_nothing(sample: Path, level: str) -> None:
    first = report_of(sample, NUMBA_OPT=level)
    assert first["root"] == str(sample / "__pycache__" / "jit")
    assert all(misses_of(first).values())
    files = files_below(first["root"])
    second = report_of(sample, NUMBA_OPT=level)
    assert not any(misses_of(second).values()) and all(second[name]["hits"] == 1 for name in misses_of(second))
    assert [second[name]["value"] for name in misses_of(second)] == [16, 26, 36, 4]
    assert files_below(second["root"]) == files


def test_edit_of_a_helper_in_another_file_is_noticed(sample: Path) -> None:
    assert report_of(sample)["entry"]["value"] == 16
    edit(sample / "deep" / "helper.py", "x * FACTOR", "x * FACTOR + 100")
    assert report_of(sample)["entry"]["value"] == 116
    edit(sample / "deep" / "numbers.py", "3", "4")
    changed = report_of(sample)
    assert [changed["entry"]["value"], changed["plus_ten"]["value"]] == [121, 131]
    assert misses_of(changed) == {"entry": 1, "plus_ten": 1, "plus_twenty": 1, "other": 0}


WAYS_TO_IMPORT = [
    "from sample.deep.numbers import FACTOR",
    "from sample.deep import numbers",
    "from .deep.numbers import FACTOR",
    "from . import deep",
    "from sample import deep",
    "import sample.deep.numbers",
    "import math, sample",
    "import sample as package",
    "from sample.deep import (\n    numbers,\n)",
    "import importlib\nnumbers = importlib.import_module('sample.deep.numbers')",
]


@pytest.mark.parametrize("line", WAYS_TO_IMPORT)
def test_every_way_to_import_is_seen(sample: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    (sample / "user.py").write_text(f"{line}\n", encoding="utf-8")
    monkeypatch.setattr(sources, "FOLDER", sample)
    monkeypatch.setattr(sources, "PACKAGE", "sample")
    assert "deep/numbers.py" in sources.visible("sample.user", sources.read_sources())


def test_edit_while_a_process_runs_is_not_cached_as_the_new_code(sample: Path) -> None:
    entry = sample / "entry.py"
    swap = (
        f"import pathlib, sample.entry\np = pathlib.Path({str(entry)!r})\np.write_text(p.read_text().replace('+ 1', '+ "
        "7'))\n"
    )
    assert report_of(sample, before=swap)["entry"]["value"] == 16
    assert report_of(sample)["entry"]["value"] == 22


def test_old_code_does_not_pile_up(sample: Path) -> None:
    for number in range(4, 14):
        script = "from sample.entry import entry\nentry(1)"
        subprocess.run([sys.executable, "-c", script], env=environment_of(sample), check=True)
        edit(sample / "deep" / "numbers.py", f"= {number - 1}", f"= {number}")
    kept = [path.name for path in (sample / "__pycache__" / "jit").glob("sample.entry-*")]
    assert len(kept) == 8


def test_damaged_and_misplaced_files_cost_a_compilation(sample: Path) -> None:
    root = Path(report_of(sample)["root"])
    entries, others = sorted(root.rglob("entry-*.nbc")), sorted(root.rglob("*other-*.nbc"))
    assert (len(entries), len(others)) == (2, 1), "one for Python's calls, one for those of jitted code"
    for path in entries:
        shutil.copy(others[0], path)
    others[0].write_bytes(others[0].read_bytes()[:100])
    again = report_of(sample)
    assert [again["entry"]["value"], again["other"]["value"]] == [16, 4]
    assert misses_of(again) == {"entry": 1, "plus_ten": 0, "plus_twenty": 0, "other": 1}


def test_a_file_with_one_wrong_byte_is_compiled_anew(sample: Path) -> None:
    root = Path(report_of(sample)["root"])
    for path in root.rglob("*.nbc"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    again = report_of(sample)
    assert [again[name]["value"] for name in misses_of(again)] == [16, 26, 36, 4]
    assert all(misses_of(again).values()) and not any(misses_of(report_of(sample)).values())


@pytest.mark.parametrize("danger", ["writable", "foreign"])
def test_a_file_that_others_could_write_while_its_folder_was_open_to_them_is_not_loaded(
    sample: Path, danger: str
) -> None:
    """The owner has closed the folder since. Who can write a file can have written it."""
    for path in Path(report_of(sample)["root"]).rglob("*.nbc"):
        if danger == "writable":
            path.chmod(0o666)
        elif os.getuid() == 0:
            os.chown(path, 65534, 65534)
        else:
            pytest.skip("only root can give a file away")
    assert all(misses_of(report_of(sample)).values()) and not any(misses_of(report_of(sample)).values())


@pytest.mark.parametrize("setting", [{"NUMBA_CPU_FEATURES": "+sse2"}, {"NUMBA_ENABLE_AVX": "0"}])
def test_code_for_other_features_of_a_processor_is_other_code(sample: Path, setting: dict[str, str]) -> None:
    report_of(sample)
    assert all(misses_of(report_of(sample, **setting)).values())
    assert not any(misses_of(report_of(sample, **setting)).values())


def test_of_two_processes_at_once_one_compiles(sample: Path) -> None:
    command = [sys.executable, "-c", REPORT]
    children = [
        subprocess.Popen(command, env=environment_of(sample), stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    reports = [json.loads(child.communicate()[0]) for child in children]
    assert [[report[name]["value"] for name in misses_of(report)] for report in reports] == [[16, 26, 36, 4]] * 2
    assert all(sum(misses_of(report)[name] for report in reports) == 1 for name in misses_of(reports[0]))
    assert not [path for path in files_below(reports[0]["root"]) if path.endswith(".lock")]
    assert not any(misses_of(report_of(sample)).values())


def test_chosen_directory_comes_first(sample: Path, tmp_path: Path) -> None:
    report = report_of(sample, NUMBA_CACHE_DIR=str(tmp_path / "chosen"))
    assert report["root"] == str(tmp_path / "chosen" / "sample")
    assert files_below(report["root"]) and not (sample / "__pycache__").exists()


def test_a_second_folder_of_a_list_is_read_and_never_written(sample: Path, tmp_path: Path) -> None:
    baked, own = tmp_path / "baked", tmp_path / "own"
    first = report_of(sample, KVPOOL_CACHE_DIR=str(baked), NUMBA_CACHE_DIR=str(tmp_path / "numba"))
    assert first["root"] == str(baked) and all(misses_of(first).values()) and not (tmp_path / "numba").exists()
    files = files_below(str(baked))
    second = report_of(sample, KVPOOL_CACHE_DIR=f"{own}{os.pathsep}{baked}")
    assert second["root"] == str(own) and not any(misses_of(second).values())
    edit(sample / "other.py", "- 1", "- 2")
    third = report_of(sample, KVPOOL_CACHE_DIR=f"{own}{os.pathsep}{baked}")
    assert misses_of(third)["other"] and files_below(str(own)) and files_below(str(baked)) == files
    baked.chmod(0o777)
    shutil.rmtree(own)
    chosen = environment_of(sample, KVPOOL_CACHE_DIR=f"{own}{os.pathsep}{baked}")
    done = subprocess.run([sys.executable, "-c", REPORT], env=chosen, capture_output=True, text=True, check=True)
    assert all(misses_of(json.loads(done.stdout)).values()) and done.stderr.count(str(baked)) == 1


def test_checkout_and_installation_of_the_same_sources_compile_once(sample: Path, tmp_path: Path) -> None:
    checkout = report_of(sample, XDG_CACHE_HOME=str(tmp_path / "user"))
    assert all(misses_of(checkout).values()) and not (sample / "__pycache__").exists()
    installed = shutil.copytree(sample, tmp_path / "site-packages" / "sample")
    (installed.parent / "sample-1.0.dist-info").mkdir()
    report = report_of(installed, XDG_CACHE_HOME=str(tmp_path / "user"))
    assert report["root"] == checkout["root"] and not any(misses_of(report).values())


def test_terminal_is_told_once_that_functions_are_compiled_and_a_pipe_is_not(sample: Path) -> None:
    said = []
    for _ in range(2):
        master, slave = os.openpty()
        try:
            done = subprocess.run(
                [sys.executable, "-c", REPORT], env=environment_of(sample), stdout=slave, stderr=slave
            )
        finally:
            os.close(slave)
        with os.fdopen(master, "rb") as terminal:
            said.append(_read_all(terminal))
        assert done.returncode == 0
    assert re.search(r"compiling, about [1-9]\d* s, once", said[0])
    assert said[0].count("sample: compiling") == 1 and str(sample / "__pycache__" / "jit") in said[0]
    assert "compiling" not in said[1], "the second process loads what the first one compiled"
    edit(sample / "other.py", "- 1", "- 2")
    piped = subprocess.run([sys.executable, "-c", REPORT], env=environment_of(sample), capture_output=True, text=True)
    assert misses_of(json.loads(piped.stdout))["other"] and not piped.stderr


def test_functions_are_compiled_where_standard_error_is_closed(sample: Path) -> None:
    assert all(misses_of(report_of(sample, before="import sys\nsys.stderr.close()\n")).values())


def _read_all(terminal: Any) -> str:
    """What a terminal was told; its end is an error where nobody has it open any more."""
    found = b""
    with contextlib.suppress(OSError):
        while part := terminal.read1():
            found += part
    return found.decode()


def test_installed_copy_writes_nothing_beside_its_modules(sample: Path, tmp_path: Path) -> None:
    (sample.parent / "sample-1.0.dist-info").mkdir()
    report = report_of(sample, XDG_CACHE_HOME=str(tmp_path / "user"))
    assert report["root"] == str(tmp_path / "user" / "sample")
    assert stat.S_IMODE(Path(report["root"]).stat().st_mode) == 0o700
    assert not (sample / "__pycache__").exists()


# What follows must hold for root too, whom no permission bit stops. Nobody can make a folder below a plain file, and a
# user without an entry in the password file has no home.
NO_HOME = """
import pwd
def getpwuid(uid):
    raise KeyError(uid)
pwd.getpwuid = getpwuid
"""


@pytest.fixture
def read_only_sample(sample: Path) -> Path:
    """The package where no `__pycache__` can be made."""
    (sample / "__pycache__").write_text("", encoding="utf-8")
    return sample


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """A temporary directory as systems have them: everyone may write, nobody may rename what others made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def test_read_only_copy_without_home_is_cached_privately(read_only_sample: Path, temporary: Path) -> None:
    first, second = (report_of(read_only_sample, before=NO_HOME, TMPDIR=str(temporary)) for _ in range(2))
    assert first["root"] == str(temporary / f"sample-{os.getuid()}")
    assert stat.S_IMODE(Path(first["root"]).stat().st_mode) == 0o700
    assert all(misses_of(first).values()) and not any(misses_of(second).values())


@pytest.mark.parametrize("danger", ["writable", "foreign", "link", "renamable", "group"])
def test_folder_that_others_can_write_is_refused(read_only_sample: Path, temporary: Path, danger: str) -> None:
    folder = temporary / f"sample-{os.getuid()}"
    if danger == "link":
        (temporary / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(temporary / "elsewhere")
    else:
        folder.mkdir(mode=0o700)
    if danger in ("writable", "group"):
        folder.chmod(0o777 if danger == "writable" else 0o770)
    elif danger == "foreign":
        if os.getuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(folder, 65534, 65534)
    elif danger == "renamable":
        temporary.chmod(0o777)
    report = report_of(read_only_sample, before=NO_HOME, TMPDIR=str(temporary))
    assert report["root"] == "None" and not files_below(str(temporary))
    assert report["entry"]["value"] == 16


def test_folder_that_was_chosen_or_lies_in_a_checkout_is_private_under_any_umask(sample: Path, tmp_path: Path) -> None:
    for variables in ({"NUMBA_CACHE_DIR": str(tmp_path / "new" / "chosen")}, {}):
        report = report_of(sample, before="import os\nos.umask(0)\n", **variables)
        root = Path(report["root"])
        assert root == (tmp_path / "new" / "chosen" / "sample" if variables else sample / "__pycache__" / "jit")
        assert stat.S_IMODE(root.stat().st_mode) == 0o700
        assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in root.rglob("*"))
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


@pytest.mark.parametrize("danger", ["writable", "foreign", "link", "group", "renamable"])
@pytest.mark.parametrize("which", ["chosen", "checkout"])
def test_chosen_folder_and_checkout_are_not_used_where_others_can_write(
    sample: Path, tmp_path: Path, temporary: Path, which: str, danger: str
) -> None:
    """What lies there would be unpickled: the place is passed over, with a word in the log, and what lies there stays
    as it is."""
    chosen = tmp_path / "chosen"
    folder = chosen / "sample" if which == "chosen" else sample / "__pycache__" / "jit"
    folder.parent.mkdir()
    if danger == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir(mode=0o700)
    if danger in ("writable", "group"):
        folder.chmod(0o777 if danger == "writable" else 0o770)
    elif danger == "foreign":
        if os.getuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(folder, 65534, 65534)
    elif danger == "renamable":
        folder.parent.chmod(0o777)
    variables = {"NUMBA_CACHE_DIR": str(chosen)} if which == "chosen" else {}
    command = [sys.executable, "-c", REPORT]
    environment = environment_of(sample, TMPDIR=str(temporary), **variables)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    report = json.loads(done.stdout)
    if (which, danger) == ("checkout", "renamable"):
        assert report["root"] == str(folder), "who can write beside the bytecode needs no cache to run code"
        return
    assert report["root"] == str(
        temporary / f"sample-{os.getuid()}" if which == "checkout" else sample / "__pycache__" / "jit"
    )
    assert not files_below(str(folder)) and str(folder) in done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a link away")
def test_a_folder_behind_a_link_of_somebody_else_is_refused(sample: Path, tmp_path: Path, temporary: Path) -> None:
    """Its owner can make it lead to another folder, whoever may rename it."""
    (tmp_path / "mine").mkdir(mode=0o700)
    (temporary / "link").symlink_to(tmp_path / "mine")
    os.lchown(temporary / "link", 65534, 65534)
    report = report_of(sample, NUMBA_CACHE_DIR=str(temporary / "link"))
    assert report["root"] == str(sample / "__pycache__" / "jit") and not files_below(str(tmp_path / "mine"))


@pytest.mark.parametrize("link", [False, True])
def test_a_folder_inside_one_that_others_can_rename_is_refused(
    sample: Path, tmp_path: Path, temporary: Path, link: bool
) -> None:
    """Its name is looked up again for each file. Meanwhile another user can put a folder of his own there."""
    chosen = tmp_path / "everybody" / "mine"
    chosen.mkdir(parents=True, mode=0o700)
    if link:
        (tmp_path / "link").symlink_to(chosen)
    (tmp_path / "everybody").chmod(0o777)
    variables = {"NUMBA_CACHE_DIR": str(tmp_path / "link" if link else chosen), "TMPDIR": str(temporary)}
    assert report_of(sample, **variables)["root"] == str(sample / "__pycache__" / "jit")
    assert not files_below(str(chosen))


def test_works_where_nothing_can_be_written(read_only_sample: Path) -> None:
    before = f"import tempfile\ntempfile.tempdir = {str(read_only_sample / 'other.py' / 'temporary')!r}\n"
    report = report_of(read_only_sample, before=before, HOME=str(read_only_sample / "other.py"))
    assert report["root"] == "None" and report["entry"]["value"] == 16


def test_works_without_jit(sample: Path) -> None:
    report = report_of(sample, NUMBA_DISABLE_JIT="1")
    assert report["plus_ten"] == {"value": 26}


WITHOUT = "from numba.core import typed_passes\ndel typed_passes.PreLowerStripPhis\n"
MORE = """
import abc
from numba.core.codegen import CodeLibrary
CodeLibrary.more = abc.abstractmethod(lambda self: None)
CodeLibrary.__abstractmethods__ |= {"more"}
"""


@pytest.mark.parametrize("release", [WITHOUT, MORE])
def test_missing_private_names_of_numba_cost_only_the_cache(sample: Path, release: str) -> None:
    report = report_of(sample, before=release)
    assert report["entry"]["value"] == 16 and not files_below(report["root"])


def test_every_private_name_of_numba_is_looked_for_before_it_is_used() -> None:
    tree = ast.parse(Path(compiler.__file__).read_text(encoding="utf-8"))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr)}
    own = {"_cache", "_files", "_inner", "_placed", "_reach"}
    assert used - own == used & {name for _, names in compiler._NAMES for name in names.split()}


@jit
def _doubled(x, wanted):
    if x < 0:
        raise ValueError("x is below zero")
    return x * 2 if wanted else x


@jit
def _sum_of_kinds(small):
    return _doubled(small[0], True) + _doubled(3, False) + _doubled(np.int64(4), small[0] > 0)


def test_a_command_says_without_a_terminal_that_functions_are_compiled_and_how_long_that_takes(tmp_path: Path) -> None:
    script = """
from kvpool.commands.terminal import announce_compilation
announce_compilation()

from kvpool.device.work import numbers_bytes
numbers_bytes(3)
"""
    environment = {**os.environ, "KVPOOL_CACHE_DIR": str(tmp_path / "new"), "PYTHONPATH": str(PACKAGE_ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert re.fullmatch(rf"kvpool: compiling, about [1-9]\d* s, once; it is kept in {tmp_path}/new\n", done.stderr)


PACKAGE_ROOT = Path(sources.__file__).parents[2]


@pytest.mark.skipif(config.DISABLE_JIT, reason="nothing is compiled")
def test_function_that_jitted_code_calls_is_compiled_once_and_gets_no_machine_code() -> None:
    """Neither an int32 nor a constant makes another function of it, and its exceptions come through its callers."""
    assert _sum_of_kinds(np.array([5], np.int32)) == 10 + 3 + 8
    assert list(_doubled._inner.overloads) == [(types.int64, types.boolean)] and not _doubled.overloads
    with pytest.raises(ValueError, match="x is below zero"):
        _sum_of_kinds(np.array([-1], np.int32))
    assert _doubled(4, True) == 8 and list(_doubled.overloads) == [(types.int64, types.boolean)]


@pytest.mark.skipif(config.DISABLE_JIT, reason="nothing is compiled")
def test_no_function_is_inlined_everywhere_that_did_not_ask_for_it() -> None:
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
        (compiled,) = [*function.overloads.values(), *function._inner.overloads.values()]  # type: ignore[attr-defined]
        assert ("alwaysinline" in compiled.library.get_llvm_str()) == asked, function


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collector_is_as_it_was_after_a_compilation(enabled: bool) -> None:
    seen = []

    @jit
    def broken(x):
        return x.no_such_attribute

    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(TypingError):
            broken(1)
        seen.append(gc.isenabled())
    finally:
        (gc.enable if before else gc.disable)()
    assert seen == [enabled]


# Every verb of a request's life, with offloads and onboards: what a server runs.
LIFE = """
import numpy as np
from numba.core import event
compiled = event.RecordingListener()
with event.install_listener("numba:compile", compiled):
    from kvpool import KVCacheManager
    from kvpool.arrays.layout import BlockLayout
    layout = BlockLayout.of_block_bytes(4096, 16)
    with KVCacheManager(layout, device_blocks=8, host_blocks=8, device="cpu") as cache:
        for start in (0, 1000, 0):
            sequence = cache.add_sequence(np.arange(start, start + 100, dtype=np.int32))
            cache.append_tokens(sequence, np.arange(8, dtype=np.int32))
            cache.commit(sequence)
            cache.release(sequence)
        cache.verify()
print([event.data["dispatcher"].py_func.__qualname__ for _, event in compiled.buffer if event.is_start])
"""


def test_second_process_of_the_real_package_compiles_nothing() -> None:
    root = Path(sources.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    runs = [
        subprocess.run([sys.executable, "-c", LIFE], env=environment, capture_output=True, text=True) for _ in range(2)
    ]
    assert [(run.returncode, run.stderr) for run in runs] == [(0, "")] * 2
    assert runs[1].stdout.strip() == "[]"
