"""The tables of a step on a GPU, where a kernel of Numba's writes them: as on the host, and as the reference says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from engine import small_layout
from kvpool import KVCacheManager
from kvpool.errors import DeviceError
from kvpool.pool import StepTables
from steps import GARBAGE, NAMES, arrays, check, expected, spans

pytestmark = pytest.mark.gpu


@pytest.fixture
def numba(cupy: Any) -> None:
    """Skipped where there is no numba-cuda."""
    cuda = pytest.importorskip("numba.cuda")
    if "numba_cuda" not in cuda.__file__:
        pytest.skip("numba.cuda is Numba's own, not numba-cuda")


@pytest.fixture
def cache(numba: None) -> Iterator[KVCacheManager]:
    with KVCacheManager(small_layout(4), device_blocks=64, host_blocks=8, device="cuda", max_sequences=8) as cache:
        yield cache


@pytest.fixture
def put(cupy: Any) -> Callable[[np.ndarray], Any]:
    """Brings an array to the GPU, where all streams then see it."""

    def copy(values: np.ndarray) -> Any:
        copied = cupy.asarray(values)
        cupy.cuda.runtime.deviceSynchronize()
        return copied

    return copy


def get(array: Any) -> np.ndarray:
    values: np.ndarray = array.get()
    return values


@pytest.mark.parametrize("seed", range(4))
def test_tables_of_a_step_arrive_on_a_stream(cache: KVCacheManager, cupy: Any, put: Any, seed: int) -> None:
    random, stream = np.random.default_rng(seed), cupy.cuda.Stream(non_blocking=True)
    lengths = random.integers(1, 30, 5).tolist()
    ids = cache.add_sequence_batch([random.integers(0, 99, n).tolist() for n in lengths], stream=stream).ids
    first, counts = spans(random, lengths)
    wanted = expected(cache, ids, first, counts)
    some = [name for name in NAMES if random.random() < 0.8]
    out = arrays(7, sum(counts) + 3, 9, 64, wanted=some, put=put)
    cache.tables.copy_step_tables(out, ids, first, counts, stream=stream)
    stream.synchronize()
    check(out, wanted, get)
    cache.release(ids)


def test_the_null_stream_will_do_and_a_table_may_have_gaps(cache: KVCacheManager, cupy: Any) -> None:
    ids = cache.add_sequence_batch([range(6), range(10, 19)]).ids
    wide = cupy.full((2, 9), GARBAGE, np.int32)
    out = StepTables(table=wide[:, 2:6], seq_lens=cupy.zeros(2, np.int32))
    cache.tables.copy_step_tables(out, ids)
    cupy.cuda.runtime.deviceSynchronize()
    table = cache.block_table(ids).dense(4)
    np.testing.assert_array_equal(wide.get(), np.pad(table, ((0, 0), (2, 3)), constant_values=GARBAGE))
    assert out.seq_lens.get().tolist() == [6, 9]
    cache.release(ids)


def test_arrays_of_the_host_are_refused(cache: KVCacheManager) -> None:
    sequence = cache.add_sequence([1])
    with pytest.raises(TypeError, match="slot_mapping: expected an int64 array of a GPU, got i64 in host memory"):
        cache.tables.copy_step_tables(arrays(1, 1, 1, 1), sequence)
    cache.release(sequence)


def test_without_numba_cuda_the_error_says_what_to_install(
    cache: KVCacheManager, cupy: Any, put: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "kvpool.device.cuda.table_kernels", None)
    monkeypatch.delattr("kvpool.device.cuda.table_kernels", raising=False)
    sequence, table = cache.add_sequence([1]), cupy.zeros((1, 4), np.int32)
    for call in (
        lambda: cache.tables.copy_step_tables(arrays(1, 1, 1, 1, put=put), sequence),
        lambda: cache.tables.copy_batch_block_offsets(table, sequence),
    ):
        with pytest.raises(DeviceError, match=r"tables on a GPU need numba-cuda.*\[cuda12\]"):
            call()
    assert cache.stats().uploads == 0
    cache.release(sequence)
