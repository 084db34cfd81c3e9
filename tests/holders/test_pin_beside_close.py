"""A pool that is closed by force while another thread pins: the reader never touches memory that is gone."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvpool import LeaseExpired, PoolClosed
from tests.race.lab import Lab


def test_a_pin_begins_to_read_only_while_the_pool_cannot_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(P=4, S=4, progress=1.0)
    sequence = lab.cache.add_sequence([1, 2, 3])
    lab.cache.commit(sequence)
    keys = lab.cache.block_keys([1, 2, 3])
    begin, closer = lab.cache.core.device.host_access, threading.Thread(target=lab.cache.close, args=(True,))

    def beside_close(*args: Any, **options: Any) -> Any:
        access = begin(*args, **options)
        # Here nobody may get the memory: without the state lock, the pool is closed before this goes on.
        closer.start()
        closer.join(0.2)
        return access

    monkeypatch.setattr(lab.cache.core.device, "host_access", beside_close)
    try:
        lab.cache.pin(keys.keys)
    except (LeaseExpired, PoolClosed):
        pass
    closer.join()
    assert lab.cache.closed and not lab.sim.races
