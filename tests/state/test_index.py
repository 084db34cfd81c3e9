"""The index has a bucket for every key, however many blocks there are."""

from __future__ import annotations

import numpy as np
import pytest

from kvpool.memory.pools import BLOCKS_MAX
from kvpool.state.arrays import buckets
from kvpool.state.index import bucket


@pytest.mark.parametrize("blocks", [1, 7, 2**29, 2**29 + 1, BLOCKS_MAX])
def test_every_key_has_a_bucket(blocks: int) -> None:
    count = buckets(blocks)
    assert bucket(np.int64(0), np.int64(count)) == 0 and bucket(np.int64(-1), np.int64(count)) == count - 1
    for key in np.random.default_rng(0).integers(-(2**63), 2**63, 100, np.int64):
        assert 0 <= bucket(key, np.int64(count)) < count
