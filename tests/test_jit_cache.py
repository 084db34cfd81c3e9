"""Compiled code is kept between processes, follows every edit of the sources it can see, and is never unpickled from strangers."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvpool.jit

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
from sample.jit import cache_root
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
    shutil.copy(kvpool.jit.__file__, package / "jit.py")
    return package


def environment_of(package: Path, **variables: str) -> dict[str, str]:
    """The environment of a child that imports `package`, without the cache settings of this process."""
    kept = {name: value for name, value in os.environ.items() if name not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "HOME", "TMPDIR")}
    # Bytecode files tell edits apart by whole seconds and size; these tests edit faster.
    return {**kept, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(package.parent), **variables}


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


def test_second_process_compiles_nothing(sample: Path) -> None:
    first = report_of(sample)
    assert first["root"] == str(sample / "__pycache__" / "jit")
    assert all(misses_of(first).values())
    files = files_below(first["root"])
    second = report_of(sample)
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
    monkeypatch.setattr(kvpool.jit, "_FOLDER", sample)
    monkeypatch.setattr(kvpool.jit, "_NAME", "sample")
    assert "deep/numbers.py" in kvpool.jit._visible("sample.user", kvpool.jit._read_sources())


def test_edit_while_a_process_runs_is_not_cached_as_the_new_code(sample: Path) -> None:
    entry = sample / "entry.py"
    swap = f"import pathlib, sample.entry\np = pathlib.Path({str(entry)!r})\np.write_text(p.read_text().replace('+ 1', '+ 7'))\n"
    assert report_of(sample, before=swap)["entry"]["value"] == 16
    assert report_of(sample)["entry"]["value"] == 22


def test_old_code_does_not_pile_up(sample: Path) -> None:
    for number in range(4, 12):
        script = "from sample.entry import entry\nentry(1)"
        subprocess.run([sys.executable, "-c", script], env=environment_of(sample), check=True)
        edit(sample / "deep" / "numbers.py", f"= {number - 1}", f"= {number}")
    kept = [path.name for path in (sample / "__pycache__" / "jit").glob("sample.entry-*")]
    assert len(kept) == 4


def test_damaged_and_misplaced_files_cost_a_compilation(sample: Path) -> None:
    root = Path(report_of(sample)["root"])
    paths = sorted(root.rglob("entry-*.nbc")) + sorted(root.rglob("*other-*.nbc"))
    assert len(paths) == 2
    shutil.copy(paths[1], paths[0])
    paths[1].write_bytes(paths[1].read_bytes()[:100])
    again = report_of(sample)
    assert [again["entry"]["value"], again["other"]["value"]] == [16, 4]
    assert misses_of(again) == {"entry": 1, "plus_ten": 0, "plus_twenty": 0, "other": 1}


def test_two_processes_at_once(sample: Path) -> None:
    command = [sys.executable, "-c", REPORT]
    children = [subprocess.Popen(command, env=environment_of(sample), stdout=subprocess.PIPE, text=True) for _ in range(2)]
    values = [{name: value["value"] for name, value in json.loads(child.communicate()[0]).items() if name != "root"} for child in children]
    assert values[0] == values[1] == {"entry": 16, "plus_ten": 26, "plus_twenty": 36, "other": 4}
    assert not any(misses_of(report_of(sample)).values())


def test_chosen_directory_comes_first(sample: Path, tmp_path: Path) -> None:
    report = report_of(sample, NUMBA_CACHE_DIR=str(tmp_path / "chosen"))
    assert report["root"] == str(tmp_path / "chosen" / "sample")
    assert files_below(report["root"]) and not (sample / "__pycache__").exists()


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


def test_works_where_nothing_can_be_written(read_only_sample: Path) -> None:
    before = f"import tempfile\ntempfile.tempdir = {str(read_only_sample / 'other.py' / 'temporary')!r}\n"
    report = report_of(read_only_sample, before=before, HOME=str(read_only_sample / "other.py"))
    assert report["root"] == "None" and report["entry"]["value"] == 16


def test_works_without_jit(sample: Path) -> None:
    report = report_of(sample, NUMBA_DISABLE_JIT="1")
    assert report["plus_ten"] == {"value": 26}


def test_missing_private_names_of_numba_cost_only_the_cache(sample: Path) -> None:
    report = report_of(sample, before="from numba.core import compiler\ndel compiler.CompileResult._rebuild\n")
    assert report["entry"]["value"] == 16 and not files_below(report["root"])


# Every verb of a request's life, with offloads and onboards: what a server runs.
LIFE = """
import numpy as np
from numba.core import event
compiled = event.RecordingListener()
with event.install_listener("numba:compile", compiled):
    from kvpool import KVCacheManager
    from kvpool.layout import BlockLayout
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
    root = Path(kvpool.jit.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    runs = [subprocess.run([sys.executable, "-c", LIFE], env=environment, capture_output=True, text=True) for _ in range(2)]
    assert [(run.returncode, run.stderr) for run in runs] == [(0, "")] * 2
    assert runs[1].stdout.strip() == "[]"
