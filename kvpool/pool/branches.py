"""Branches: sequences that continue from another one (samples, beams), and the path of a tree of drafts with which a
sequence continues."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.arrays.layout import integer_argument
from kvpool.entry.arguments import address, bool_argument, count_array, first_outside, id_array, int64_array, is_integer
from kvpool.entry.interrupt import DeferSignals
from kvpool.errors import KVPoolError, OutOfSequences
from kvpool.pool.core import Core
from kvpool.state import records, verbs
from kvpool.state.sequences import check_ids


class Branches:
    """Forks, reorders and drafts of one pool. Thread-safe."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def fork(self, ids: Any, n: int, stream: Any) -> npt.NDArray[np.int64]:
        """What ``KVCacheManager.fork`` does."""
        which, count = id_array("ids", ids), integer_argument("n", n, 0, 1 << 24)
        if len(which) * count > len(self._core.tokens.sequences):
            # It is refused in any case, so nothing is allocated for it.
            self._core.decide(stream, _refuse_forks, which, len(which) * count, ids=which)
        out = np.empty((len(which), count), np.int64)
        out[:1, :1] = records.NONE

        def release() -> None:
            """Nobody gets the ids."""
            if out.size and out[0, 0] != records.NONE and not self._core.closed:
                new = out.ravel()
                with suppress(KVPoolError):
                    self._core.decide(None, verbs.release, new, True, self._core.now(), ids=new)

        with DeferSignals() as signals:
            signals.undo = release
            self._core.decide(stream, verbs.fork, which, out, ids=which)
            return out[0] if is_integer(ids) else out

    def reorder(self, ids: Any, parents: Any, store: bool, stream: Any) -> None:
        """What ``KVCacheManager.reorder`` does."""
        which, places = id_array("ids", ids), id_array("parents", parents)
        if len(places) != len(which):
            raise ValueError(f"parents has {len(places)} entries: accepted is one for each of the {len(which)} ids")
        outside = first_outside(places, len(which) - 1)
        if outside >= 0:
            raise ValueError(
                f"parents: {int(places[outside])} is out of range: accepted are places in ids, 0 to {len(which) - 1}"
            )
        before, scratch = (
            np.empty((len(which), records.SEQUENCE.itemsize), np.uint8),
            np.zeros((3, len(which)), np.int64),
        )
        keep = bool_argument("store", store)
        self._core.decide(
            stream, verbs.reorder, which, places, keep, self._core.now(), address(before), scratch, ids=which
        )

    def keep(self, ids: Any, drafts: Any, accepted: Any, counts: Any, stream: Any) -> None:
        """What ``KVCacheManager.keep`` does."""
        which = id_array("ids", ids)
        tails, path = count_array("drafts", drafts, which), int64_array("accepted", accepted)
        if counts is None:
            if len(which) != 1:
                raise ValueError(f"counts: accepted is one for each id, {len(which)} numbers here, not None")
            counts = len(path)
        each = count_array("counts", counts, which)
        if int(each.sum()) != len(path):
            raise ValueError(f"counts add up to {int(each.sum())}, accepted has {len(path)} entries")
        self._core.decide(stream, self._keep, which, tails, path, each, self._core.now(), ids=which)

    def _keep(self, heads: Any, which: Any, tails: Any, path: Any, each: Any, now: int) -> int:
        """The verb. The caller holds the state lock."""
        return int(verbs.keep(heads, which, tails, path, each, tails - each, now))


def _refuse_forks(heads: npt.NDArray[np.int64], ids: npt.NDArray[np.int64], wanted: int) -> int:
    """Refuse a call for more forks than the pool has rows for: return the error of an id, or raise OutOfSequences. The
    caller holds the state lock."""
    error = int(check_ids(heads, ids, True))
    if error:
        return error
    raise OutOfSequences(wanted, int(heads[0, records.H.free_rows]))
