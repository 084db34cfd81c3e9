"""StagedStore: one store behind a pool, with the staging rows that blocks pass through; and how they get there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from kvpool.errors import BlockNotFound, KVPoolError, PoolClosed
from kvpool.keepers.known_content import Content, Namespace, namespace_bytes
from kvpool.pool.leases import Lease
from kvpool.pool.manager import KVCacheManager
from kvpool.state import saving
from kvpool.state.records import EXTRA
from kvpool.stores.store import Bytes, Rows
from kvpool.stores.store_client import StoreClient

OWNER = "kvpool keeper"
"""of the leases under which blocks are copied"""


class StagedStore:
    """A store behind a pool: its client, which has staging rows, and what was not saved there. The keeper's thread owns
    it."""

    def __init__(self, index: int, client: StoreClient) -> None:
        self.index, self.client, self.name = index, client, client.name
        self._tags: dict[Namespace, bytes] = {}
        self.dropped: Counter[str] = Counter()
        """saves that were given up, by reason"""

    def tag(self, namespace: Namespace) -> bytes:
        """The name of a namespace in the store."""
        if namespace not in self._tags:
            if len(self._tags) >= 4096:
                self._tags.clear()
            self._tags[namespace] = self.client.secret.tag(namespace_bytes(namespace))
        return self._tags[namespace]


class PoolCopies:
    """Copies blocks of a pool's host tier into staging rows. The keeper's thread owns it.

    ``victims``: whether what is copied is what the host evicts next.
    """

    def __init__(self, pool: KVCacheManager, victims: bool) -> None:
        self._pool, self._victims = pool, victims
        # Views keep this memory alive, also if the pool is closed meanwhile.
        self._parts = [
            [rows.reshape(len(rows), -1).view(np.uint8) for rows in parts if len(rows)] for parts in pool.host_pools
        ]

    def copy(self, contents: Sequence[Content], memory: Bytes, rows: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Copy contents of one group of layers into rows. Returns which of them were there: bool[n].

        What is only on the device is copied to the host first. There it is a redundant copy, the first to be evicted.
        Raises PoolClosed.
        """
        group, copied = self._pool.groups[contents[0].group], np.zeros(len(contents), np.bool_)
        keys = np.frombuffer(b"".join(one.key for one in contents), np.uint64).reshape(-1, 2)
        try:
            here = self._pool.cached_blocks(keys, tier="host")[group.index]
            if not here.all():
                self._pool.offload(keys[~here])
            for places, lease in self._leases(keys, group.index):
                blocks = lease.blocks - group.first_host_block
                for place, block in zip(places.tolist(), blocks.tolist(), strict=True):
                    self._copy(group.index, block, memory[rows[place]])
                copied[places] = self._are(contents, places, blocks + group.device_blocks)
                # Of a lease that somebody has revoked, the rows may have other bytes.
                copied[places] &= _ended(lease)
            # A lease that ends makes its blocks the last victims. But to be copied for a store is no use of them.
            core, own = self._pool.core, keys.view(np.int64)
            core.decide(None, saving.evict_first, group.index, own, self._victims, core.now())
        except PoolClosed:
            raise
        except KVPoolError:
            # The device has failed.
            copied[:] = False
        return copied

    def _leases(self, keys: npt.NDArray[np.uint64], group: int) -> Iterator[tuple[Rows, Lease]]:
        """Leases of host blocks, with the places of their keys."""
        with suppress(BlockNotFound):
            yield np.arange(len(keys)), self._pool.pin(keys, owner=OWNER, tier="host", group=group)
            return
        for place, key in enumerate(keys):
            lease = self._pool.find_and_pin_host(key, owner=OWNER, group=group)
            if lease is not None:
                yield np.array([place]), lease

    def _are(self, contents: Sequence[Content], places: Rows, blocks: Rows) -> npt.NDArray[np.bool_]:
        """Whether pinned blocks are these contents, and not others under the same keys: bool[n]."""
        state = self._pool.core.states[contents[0].group]
        with self._pool.core.lock:
            found, tokens = state.blocks[blocks], state.tokens[blocks].astype("<i4")
            has_extra = (found["flags"] & EXTRA).tolist()
            extra = [state.extra[block].tobytes() if has else b"" for block, has in zip(blocks, has_extra, strict=True)]
        parents = np.stack([found["parent0"], found["parent1"]], axis=1)
        same = np.empty(len(places), np.bool_)
        for i, one in enumerate(contents[place] for place in places.tolist()):
            own = parents[i].tobytes(), tokens[i].tobytes(), extra[i], int(found["namespace"][i])
            same[i] = own == (one.parent, one.tokens, one.extra, one.namespace)
        return same

    def _copy(self, group: int, block: int, row: npt.NDArray[np.uint8]) -> None:
        at = 0
        for part in self._parts[group]:
            row[at : at + part.shape[1]] = part[block]
            at += part.shape[1]
        # What the row had before belongs to somebody else.
        row[at:] = 0


def uses(pool: KVCacheManager, group: int, contents: Sequence[Content]) -> list[int]:
    """How often contents of one group of layers were used, 0 for those that the pool does not have."""
    keys = np.frombuffer(b"".join(one.key for one in contents), np.int64).reshape(-1, 2)
    out = np.empty(len(keys), np.int64)
    with pool.core.lock:
        pool.core.check_open()
        saving.uses(pool.core.states.heads, group, keys, out)
    return out.tolist()


def _ended(lease: Lease) -> bool:
    """Close a lease. Returns whether it was open until now."""
    try:
        lease.close()
    except KVPoolError:
        return False
    return True
