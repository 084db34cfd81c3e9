"""States of recurrent layers: the verb that says which blocks an engine reads them from and writes them to."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.reservations import ReservePool
from kvpool.sequence import id_array
from kvpool.state import live, recurrent


class RecurrentPool(ReservePool):
    """A pool that can have recurrent groups; ``KVCacheManager`` is one."""

    def state_blocks(self, ids: Any, stream: Any = None, group: int | None = None) -> npt.NDArray[np.int32]:
        """Device blocks of the states of these sequences in a recurrent group, int32[n, 2]: where a step reads, and where it writes.

        The first is that of the state behind the committed tokens, -1 where none is committed; the second takes the state behind all
        tokens. Both are the same where the running state is overwritten in place. Snapshots between them are in the block table: the
        entry of column i, if it is not -1, takes the state behind ``(i + 1) * tokens_per_block`` tokens.

        The committed state is in place until a step overwrites it, which is why engines that verify drafts keep the states between.
        Behind a ``rewind`` the engine writes the running state again, unless the sequence now ends with a column that had the same block
        before: that holds its state, and may be read by others. Behind a ``keep`` of drafts that are not the first ones it writes the
        states of all columns from the first draft that was dropped on.

        ``group``: to be named where there are several. ``stream``: where the engine goes on with the sequences; it waits for what they
        were used on before. Thread-safe; changes nothing but the stream. Raises UnknownSequence, DeviceError, TypeError, ValueError (also
        for a group that is not recurrent).
        """
        which, g = id_array("ids", ids), self._group(group)
        if self._groups[g].kind != "recurrent":
            raise ValueError(f"group={g}: accepted are recurrent groups; this one is of kind {self._groups[g].kind}")
        if stream is not None:
            self._decide(0, stream, live.use, which, ids=which)
        out = np.empty((len(which), 2), np.int32)
        with self._lock:
            recurrent.state_blocks(self._states.heads[g], self._rows(which), out)
        return out
