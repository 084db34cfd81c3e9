"""Forks: sequences that go on from what another has, for parallel sampling and beams. What they share, they share until one writes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.errors import KVPoolError
from kvpool.layout import integer_argument
from kvpool.reservations import ReservePool
from kvpool.sequence import address, bool_argument, first_outside, id_array, is_integer
from kvpool.state import blocks, groups


class ForkPool(ReservePool):
    """A pool whose sequences can be forked and change places; ``KVCacheManager`` is one."""

    def fork(self, ids: Any, n: int = 1, *, stream: Any = None) -> npt.NDArray[np.int64]:
        """Sequences that go on from what a live one has now, ``n`` of each: int64[n] ids, or int64[m, n] for m ids. Changes the pool.

        Takes no blocks: all are shared, also a last one that is not full. Who appends to it, or rewinds into it, gets a copy, which
        ``append_tokens`` and ``blocks_needed`` count; the last holder writes in place. Each fork takes one of ``max_sequences`` and is
        committed, grown and released like any sequence. The KV of shared tokens that are not committed yet is written once, for all
        that share them, and before one of them appends.

        ``stream``: where the forks will be used, by default where their parent is; it comes behind what is enqueued there so far.
        Thread-safe. Raises OutOfSequences, UnknownSequence (also for reservations, which cannot be forked), DeviceError, ValueError,
        TypeError.
        """
        which, count = id_array("ids", ids), integer_argument("n", n, 0, 1 << 24)
        out = np.empty((len(which), count), np.int64)
        out[:1, :1] = blocks.NONE
        try:
            self._decide(0, stream, groups.fork, which, out, ids=which)
        except BaseException:
            # Ctrl-C is delivered behind the decision: nobody gets the ids.
            if out.size and out[0, 0] != blocks.NONE and not self.closed:
                new = out.ravel()
                with suppress(KVPoolError):
                    self._decide(0, None, groups.release, new, True, self.now(), ids=new)
            raise
        return out[0] if is_integer(ids) else out

    def reorder(self, ids: Any, parents: Any, *, store: bool = False, stream: Any = None) -> None:
        """The step of a beam search: sequence ``ids[i]`` goes on from what ``ids[parents[i]]`` has now, all at once. Changes the pool.

        ``parents``: int64[n], places in ``ids``. Who is named by several is shared by them, as ``fork`` shares; what nobody names is given
        back as by ``release(store=store)``. Ids and their rows in block tables stay; lengths, committed and cached tokens become
        the parent's, and so does its stream, unless ``stream`` names another. Takes no blocks. Several groups of beams go in one call.

        Thread-safe. Raises UnknownSequence, DeviceError, ValueError, TypeError.
        """
        # Private, since nobody may change what has been checked.
        which, places = id_array("ids", ids), id_array("parents", parents).copy()
        if len(places) != len(which):
            raise ValueError(f"parents has {len(places)} entries: accepted is one for each of the {len(which)} ids")
        outside = first_outside(places, len(which) - 1)
        if outside >= 0:
            raise ValueError(f"parents: {int(places[outside])} is out of range: accepted are places in ids, 0 to {len(which) - 1}")
        before, scratch = np.empty((len(which), blocks.SEQUENCE.itemsize), np.uint8), np.zeros((3, len(which)), np.int64)
        keep = bool_argument("store", store)
        self._decide(0, stream, groups.reorder, which, places, keep, self.now(), address(before), scratch, ids=which)
