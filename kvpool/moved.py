"""Moved: what a device has been told to copy, and how long that took where the device can tell, by direction."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.device.base import SOURCE, TARGET, TOKENS
from kvpool.jit import jit
from kvpool.order import OFFLOAD, ONBOARD, WITHIN


@jit
def _add(moves: Any, device_blocks: int, nanoseconds: int, totals: Any) -> None:
    """Add the tokens of moves, and their share of the time by tokens, to ``totals`` int64[2, 3]."""
    offload = onboard = within = 0
    for i in range(moves.shape[0]):
        from_host, to_host = moves[i, SOURCE] >= device_blocks, moves[i, TARGET] >= device_blocks
        if from_host == to_host:
            within += moves[i, TOKENS]
        elif to_host:
            offload += moves[i, TOKENS]
        else:
            onboard += moves[i, TOKENS]
    share = nanoseconds / max(offload + onboard + within, 1)
    totals[0, OFFLOAD] += offload
    totals[0, ONBOARD] += onboard
    totals[0, WITHIN] += within
    totals[1, OFFLOAD] += np.int64(offload * share)
    totals[1, ONBOARD] += np.int64(onboard * share)
    totals[1, WITHIN] += np.int64(within * share)


class Moved:
    """Totals of one pool: ``tokens`` and ``nanoseconds``, lists of three, by direction. One thread at a time adds; any thread may read."""

    def __init__(self, device_blocks: int) -> None:
        self._device_blocks = device_blocks
        self._totals: npt.NDArray[np.int64] = np.zeros((2, 3), np.int64)

    def add(self, moves: npt.NDArray[np.int64], nanoseconds: int) -> None:
        """Count moves int64[n, 4] that were made, or enqueued, in one go. Directions share the time by their tokens."""
        _add(moves, self._device_blocks, nanoseconds, self._totals)

    @property
    def tokens(self) -> list[int]:
        return self._totals[0].tolist()

    @property
    def nanoseconds(self) -> list[int]:
        return self._totals[1].tolist()
