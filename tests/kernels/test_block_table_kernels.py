"""The Numba kernels around block tables: in Numba's simulator against the plain reference, and compiled for GPUs that are not there."""

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
from kvpool.device import reference
from kvpool.kernels import block_table

assert cuda.is_available() and "simulator" in cuda.jit.__module__
seed = int(sys.argv[1])
random = np.random.default_rng(seed)
T = int(random.integers(1, 5))
table = random.integers(0, 2**20, (4, 5)).astype(np.int32)
for row, length in enumerate(random.permutation([5, 0, 2, 3])):
    table[row, length:] = -1
rows = random.permutation(4)[:3].astype([np.int32, np.int64][seed % 2])

width = int(random.integers(3, 6))
affine = np.array([[1, 0], [64, 0], [64, 32]], np.int64)[: 1 + (seed + 1) % 3]
out = np.full((len(affine), 3, width), 7, np.int32)
block_table.gather_rows[2, 3](table, rows, affine, out)
expected = [reference.gather_rows(table, rows, int(scale), int(offset), width) for scale, offset in affine]
np.testing.assert_array_equal(out, np.stack(expected))

counts = [[3, 0, 4], [0, 2, 3], [2, 5, 0], [0, 0, 3]][seed]
first_tokens, indptr = random.integers(0, 4 * T, 3), np.concatenate([[0], np.cumsum(counts)])
# Some tokens lie beyond the row.
first_tokens[np.argmax(counts)] = 5 * T - 1
slots = np.full(indptr[-1], 7, np.int64)
block_table.slot_mapping[2, 3](table, rows, first_tokens, indptr, T, slots)
np.testing.assert_array_equal(slots, reference.slot_mapping(table, rows, first_tokens, indptr, T))
"""


def need_numba_cuda() -> None:
    if importlib.util.find_spec("numba_cuda") is None:
        pytest.skip("numba-cuda is not installed; it comes with the extra 'test'")


@pytest.mark.parametrize("seed", range(4))
def test_cudasim_runs_the_kernels_as_the_reference_does(seed: int) -> None:
    need_numba_cuda()
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    done = subprocess.run([sys.executable, "-c", SIMULATED, str(seed)], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_ptx_of_the_kernels_has_no_local_memory(capability: tuple[int, int]) -> None:
    need_numba_cuda()
    from numba import cuda, int32, int64

    from kvpool.kernels import block_table

    if "numba_cuda" not in (cuda.__file__ or ""):
        pytest.skip("numba.cuda is the one inside numba, not numba-cuda: site-packages come by PYTHONPATH")
    gather = block_table.gather_rows, (int32[:, ::1], int64[::1], int64[:, ::1], int32[:, :, ::1])
    slots = block_table.slot_mapping, (int32[:, ::1], int64[::1], int64[::1], int64[::1], int64, int64[::1])
    for kernel, signature in (gather, slots):
        try:
            ptx, _ = cuda.compile_ptx(kernel.py_func, signature, cc=capability)
        except Exception as error:
            missing = [name for name in ("nvvm", "nvrtc") if name in str(error)]
            if not missing:
                raise
            pytest.skip(f"{missing[0]} is not installed; Numba compiles with nvidia-nvvm and nvidia-cuda-nvrtc")
        assert f".target sm_{capability[0]}{capability[1]}" in ptx
        assert re.search(r"\.entry \w*" + kernel.py_func.__name__, ptx) and re.search(r"\bst\.", ptx)
        assert ".local" not in ptx
