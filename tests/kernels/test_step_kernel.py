"""The Numba kernel of step tables: in Numba's simulator against the plain reference, and compiled for GPUs that are not
there."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SIMULATED = """
import sys
import numpy as np
from numba import cuda
from tests.device import reference
from kvpool.device.cuda.step_kernel import step_tables

assert cuda.is_available() and "simulator" in cuda.jit.__module__
seed = int(sys.argv[1])
random = np.random.default_rng(seed)
T, sinks = int(random.integers(1, 5)), seed % 2
rows, first, counts = [], [], []
for used in (3, 0, 7, 1):
    row, gone = random.integers(0, 2**20, 7).tolist(), used - sinks - 1 if sinks and used > 2 else 0
    row[sinks : sinks + gone] = [-1] * gone
    length = max(0, used * T - int(random.integers(0, T)))
    count = int(random.integers(0, length - (sinks + gone) * T * (gone > 0) + 1))
    rows.append(row), first.append(length - count), counts.append(count)
wanted = reference.step_tables(rows, first, counts, T)
used = [row[: -(-(a + b) // T)] for row, a, b in zip(rows, first, counts)]
ids = [block for row in used for block in row if block >= 0]
kept = np.cumsum([0, *(sum(block >= 0 for block in row) for row in used)])
ends, starts = [a + b for a, b in zip(first, counts)], np.cumsum([0, *counts])
numbers = np.array([*zip(kept, [row.count(-1) for row in used], ends, starts), (kept[-1], 0, 0, starts[-1])])

wide = wanted["table"].shape[1] + 1
names = ["slot_mapping", "seq_lens", "query_start_loc", "last_page_len", "table", "indptr", "indices"]
out = {name: np.full(values.size + 2, 7, values.dtype) for name, values in wanted.items()}
out["table"] = np.full(4 * wide + 2, 7, np.int32)
wants = int(random.integers(1, 128))
launch = cuda.jit(step_tables)[2, 3]
launch(numbers.ravel(), np.array(ids, np.int32), 4, -(-wide // 3), T, sinks, wants, *map(out.get, names), wide, wide)
for k, name in enumerate(names):
    values, found = wanted[name], out[name]
    if not wants >> k & 1:
        assert (found == 7).all(), name
    elif name == "table":
        full = np.full((4, wide), -1)
        full[:, :-1] = values
        np.testing.assert_array_equal(found, [*full.ravel(), 7, 7], err_msg=name)
    else:
        np.testing.assert_array_equal(found, [*values, 7, 7], err_msg=name)
"""


def need_numba_cuda() -> None:
    if importlib.util.find_spec("numba_cuda") is None:
        pytest.skip("numba-cuda is not installed; it comes with the extra 'test'")


@pytest.mark.parametrize("seed", range(6))
def test_cudasim_runs_the_kernel_as_the_reference_does(seed: int) -> None:
    need_numba_cuda()
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    command = [sys.executable, "-c", SIMULATED, str(seed)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_ptx_of_the_kernel_has_no_local_memory(capability: tuple[int, int]) -> None:
    need_numba_cuda()
    from numba import cuda

    if "numba_cuda" not in (cuda.__file__ or ""):
        pytest.skip("numba.cuda is the one inside numba, not numba-cuda: site-packages come by PYTHONPATH")
    from kvpool.device.cuda.step_kernel import compile_for

    try:
        ptx = compile_for(capability)
    except Exception as error:
        missing = [name for name in ("nvvm", "nvrtc") if name in str(error)]
        if not missing:
            raise
        pytest.skip(f"{missing[0]} is not installed; Numba compiles with nvidia-nvvm and nvidia-cuda-nvrtc")
    assert f".target sm_{capability[0]}{capability[1]}" in ptx
    assert re.search(r"\.entry \w*step_tables", ptx) and re.search(r"\bst\.", ptx)
    assert ".local" not in ptx
