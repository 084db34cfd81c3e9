"""A user's program is checked by its types: right calls pass, and each wrong call is found where it stands."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import numpy as np
import kvpool

layout = kvpool.BlockLayout(layers=2, kv_heads=2, head_dim=8, tokens_per_block=4)
group = kvpool.LayerGroup(layout, window=8)
whole = kvpool.KVCacheManager(groups=[group], device_blocks=[8], device="cpu")
with kvpool.KVCacheManager(layout, device_blocks=8, device="cpu") as cache:
    keys: kvpool.BlockKeys = cache.block_keys(range(9), salt="tenant")
    one: int = cache.add_sequence(keys, stream=0)
    ids = cache.add_sequence_batch([keys, [1, 2, 3], np.arange(5)]).ids
    cache.append_tokens(one, [1, 2])
    cache.append_tokens(ids, np.arange(3, dtype=np.int64), [1, 1, 1])
    length: int = cache.sequence_length(one)
    lengths: list[int] = cache.sequence_length(ids).tolist()
    again: kvpool.BlockKeys = cache.keys_of(one)
    several: list[kvpool.BlockKeys] = cache.keys_of(ids)
    shape: tuple[int, ...] = cache.device_pool.shape
    cache.device_pool[0] = 0
    parts: int = cache.groups[0].device_blocks
    with cache.pin(keys) as lease:
        owner: str = lease.owner
    cache.forget(namespace=("tenant", None))
    with cache.exclusive():
        cache.commit(one, stream=0)
    cache.release([one, *ids.tolist()])

cache.append_tokens("x", [1])  # wrong
cache.append_tokens(one, "text")  # wrong
cache.add_sequence("text")  # wrong
cache.commit(one, counts="all")  # wrong
cache.release(1.5)  # wrong
cache.block_keys(range(9), salt=3)  # wrong
cache.add_sequence([1], stream="s")  # wrong
cache.pin("key")  # wrong
cache.keys_of(one).append(1)  # wrong
cache.sequence_length(ids) + "x"  # wrong
cache.device_pool.no_such_name  # wrong
cache.groups.append(group)  # wrong
kvpool.KVCacheManager(groups=layout, device_blocks=8)  # wrong
kvpool.KVCacheManager(layout, device_blocks="8")  # wrong
cache.exclusive(1)  # wrong
kvpool.no_such_name()  # wrong
"""
WRONG = {line for line, text in enumerate(PROGRAM.splitlines(), 1) if text.endswith("# wrong")}


def command(tool: str) -> list[str]:
    """How a type checker that is installed is started, to print a line for each finding."""
    if tool == "mypy":
        pytest.importorskip("mypy")
        return [sys.executable, "-m", "mypy", "--no-error-summary", "--follow-imports=silent"]
    path = shutil.which(tool, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if path is None:
        pytest.skip("pyright is not installed: pip install pyright")
    return [path, "--pythonpath", sys.executable]


@pytest.mark.exhaustive
@pytest.mark.parametrize("tool", ["mypy", "pyright"])
def test_wrong_calls_are_found_and_right_ones_pass(tool: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    # An editable installation is found by a hook, which type checkers do not run.
    environment = {**os.environ, "MYPYPATH": str(ROOT), "PYTHONPATH": str(ROOT)}
    words = [*command(tool), str(program)]
    run = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    print(run.stdout, run.stderr)
    assert {int(line) for line in re.findall(r"program\.py:(\d+).*error", run.stdout)} == WRONG


def test_public_names_are_listed_and_others_are_not() -> None:
    script = "import kvpool; print(*dir(kvpool))"
    listed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    import kvpool

    assert sorted(name for name in listed if not name.startswith("__")) == sorted(set(kvpool.__all__) - {"__version__"})


# ----------------------------------------
# The tree passes mypy and ruff with the project's settings.


@pytest.mark.parametrize(
    "command", [pytest.param("mypy kvpool", marks=pytest.mark.exhaustive), "ruff check .", "ruff format --check ."]
)
def test_tool_finds_nothing(command: str) -> None:
    tool = command.split()[0]
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed; it comes with the extra 'test'")
    done = subprocess.run([sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
