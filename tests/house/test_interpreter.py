"""Under NUMBA_DISABLE_JIT the pool runs in the interpreter, slowly, and decides the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

KEYS = """
import kvpool
layout = kvpool.BlockLayout(layers=1, kv_heads=1, head_dim=1, tokens_per_block=5, dtype="uint8")
with kvpool.KVCacheManager(layout, device_blocks=4, device="cpu", secret=bytes(range(32))) as cache:
    for extra in (None, [0] * 20 + [-(2**63), 2**63 - 1]):
        print(cache.block_keys([2**31 - 1, 0, *range(20)], salt="s", extra_ids=extra).keys.tolist())
"""

INDEXES = """
import numpy as np
from kvpool.common.jit import jit
from kvpool.common.jit.intrinsics import address_of, array_at
@jit
def row(values, i):
    return array_at(address_of(values), (2, 2), np.int64)[i, 1]
for i in (0, 1, -1, 2):
    try:
        print(row(np.arange(4), np.int64(i)))
    except IndexError:
        print("refused")
"""

INTEGERS = """
import numpy as np
from kvpool.common.jit import jit
from kvpool.common.jit.intrinsics import address_of, array_at, call, entry_of
@jit
def seen(values, i):
    at = address_of(values)
    signed, unsigned = array_at(at, (2,), np.int32), array_at(at, (2,), np.uint32)
    return signed[i] << 32, unsigned[i] - 1, array_at(at, (2,), np.uint16)[i] * 2**20
@jit
def inverted(flag):
    return ~flag
@jit
def passed(entry, values, i):
    return call(entry, (values[i] == 0,))
values = np.array([-(2**31), 0], np.int32)
for i in range(2):
    print(*map(int, seen(values, np.int64(i))), passed(entry_of(inverted, 0), values, np.int64(i)))
"""

NARROW = """
import numpy as np
from kvpool.common.jit import jit
from kvpool.common.jit.intrinsics import entry_of
try:
    entry_of(jit(lambda values: values[0]), np.zeros(1, np.int32))
except AssertionError as error:
    print(error)
"""


def python(*arguments: str, jit: bool) -> str:
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "0" if jit else "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_interpreter_computes_the_keys_of_machine_code() -> None:
    assert python("-c", KEYS, jit=False) == python("-c", KEYS, jit=True)


def test_no_index_counts_from_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_BOUNDSCHECK", "1")
    for jit in (False, True):
        assert python("-c", INDEXES, jit=jit).split() == ["1", "3", "refused", "refused"]


def test_integers_are_as_wide_as_in_machine_code() -> None:
    assert python("-c", INTEGERS, jit=False) == python("-c", INTEGERS, jit=True)


def test_what_is_called_by_its_number_returns_an_int64() -> None:
    assert "expected int64 or nothing, got int32" in python("-c", NARROW, jit=True)


def test_a_python_without_the_gil_is_refused() -> None:
    code = "import sys\nsys._is_gil_enabled = lambda: False\nimport kvpool\nkvpool.KVCacheManager"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ImportError: Python: expected the GIL, got a free-threaded build without it" in done.stderr


@pytest.mark.exhaustive
def test_scenarios_hold_in_the_interpreter() -> None:
    python(
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/state/test_scenarios_tiers.py",
        "tests/sequences/test_forks.py",
        jit=False,
    )
