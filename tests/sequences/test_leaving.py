"""Leaving a pool with things held gives a ResourceWarning that names them, and never hides the caller's exception."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
from collections.abc import Callable

import pytest

import kvpool

LAYOUT = kvpool.BlockLayout(layers=1, kv_heads=1, head_dim=8, tokens_per_block=4)


def opened() -> kvpool.KVCacheManager:
    return kvpool.KVCacheManager(LAYOUT, device_blocks=8, host_blocks=8, device="cpu")


def hold_all(pool: kvpool.KVCacheManager) -> tuple[object, ...]:
    """Hold two sequences (one of them swapped out), a lease, and a reservation."""
    first, second = pool.add_sequence([1, 2, 3, 4, 5]), pool.add_sequence([7])
    pool.commit(first)
    pool.swap_out(second)
    keys = pool.block_keys([1, 2, 3, 4])
    return pool.pin(keys, owner="reader"), pool.imports.reserve([9], owner="loader")


HELD = r"while it held 2 sequences, 1 lease, 1 reservation"


def close(pool: kvpool.KVCacheManager) -> None:
    assert len(pool.close().sequences) == 2


def leave(pool: kvpool.KVCacheManager) -> None:
    with pool:
        pass


@pytest.mark.parametrize("end", [close, leave])
def test_what_is_held_is_named_once(end: Callable[[kvpool.KVCacheManager], None]) -> None:
    pool = opened()
    held = hold_all(pool)
    with pytest.warns(ResourceWarning, match=rf"^the pool was closed {HELD}: .*'reader'.*'loader'") as seen:
        end(pool)
    assert [warning.filename for warning in seen] == [__file__], "the line that closed the pool"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pool.close()
    del held


def test_a_pool_that_is_dropped_names_what_it_held() -> None:
    pool = opened()
    held = hold_all(pool)
    with pytest.warns(ResourceWarning, match=f"^the pool was never closed, and dropped {HELD}$"):
        del pool
        gc.collect()
    del held


@pytest.mark.parametrize("action", ["error", "default"])
def test_the_exception_of_the_block_is_not_covered(action: str) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter(action)  # type: ignore[arg-type]
        with pytest.raises(ZeroDivisionError) as raised, opened() as pool:
            hold_all(pool)
            raise ZeroDivisionError
    assert raised.value.__context__ is None and pool.closed
    assert len(seen) == (action == "default")


def test_a_warning_that_is_an_error_is_raised_after_the_memory_was_freed() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ResourceWarning, match="closed while it held 1 sequence"), opened() as pool:
            pool.add_sequence([1])
    with pytest.raises(kvpool.PoolClosed):
        pool.add_sequence([1])


def test_no_warning_without_a_reason() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with opened() as pool:
            pool.release(pool.add_sequence([1]))
        dropped = opened()
        dropped.release(dropped.add_sequence([1]))
        del dropped
        with pytest.raises(ValueError, match="device_blocks"):
            kvpool.KVCacheManager(LAYOUT, device_blocks=-1, device="cpu")
        gc.collect()


def test_the_interpreter_says_it_at_its_end() -> None:
    program = (
        "import kvpool\n"
        "pool = kvpool.KVCacheManager(kvpool.BlockLayout(1, 1, 8, 4), device_blocks=8, device='cpu')\n"
        "pool.add_sequence([1])\n"
    )
    done = subprocess.run([sys.executable, "-W", "default", "-c", program], capture_output=True, text=True, check=True)
    assert "ResourceWarning: the pool was never closed, and dropped while it held 1 sequence" in done.stderr
    assert "Traceback" not in done.stderr
