"""Racing: a prefetch against the engine. What would come later than the engine computes it is not loaded, or given
up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kvpool.keepers.choice import Load, LoadOrCompute
from kvpool.keepers.lanes import Lane


class Race:
    """What one prefetch loads from one store, which may be given up."""

    def __init__(self, choice: LoadOrCompute, load: Load, items: int, now: float) -> None:
        self._choice, self._load, self._items, self._at = choice, load, items, now
        self._came, self._began = 0, math.inf

    def came(self, items: int, began: float, now: float) -> None:
        """So many more items are in the pool, by a job that began then."""
        self._came += items
        self._began = min(self._began, began)
        self.lost(now)

    def lost(self, now: float) -> bool:
        """Whether to give it up: the engine computes the rest sooner."""
        return self._choice.late(self._load, self._places(), max(0.0, now - self._at))

    @property
    def until(self) -> float:
        """When it is given up if nothing comes, on the keeper's clock."""
        return self._at + self._load.until

    def drop(self) -> None:
        """It was ended for a reason that says nothing of the store."""
        self._choice.drop(self._load)

    def end(self, now: float) -> None:
        """It has ended. What it took is learned from."""
        took = max(0.0, now - self._at)
        queued = min(took, max(0.0, self._began - self._at))
        self._choice.end(self._load, self._places(), took, queued)

    def _places(self) -> int:
        """Blocks of the prompt that have come, in all groups of layers."""
        return self._load.blocks * self._came // self._items


class Races:
    """Decides for each store whether a prefetch loads from it. The keeper's thread owns it.

    ``prefill_tokens_per_s``: how fast the engine computes prompts; None: all that is there is loaded. ``groups``: how
    many blocks a place of a prompt has at most.
    """

    def __init__(
        self, lanes: Sequence[Lane], prefill_tokens_per_s: float | None, groups: int, tokens_per_block: int,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._clock = clock
        self._choices = [
            None if prefill_tokens_per_s is None
            else LoadOrCompute(prefill_tokens_per_s, groups * lane.queue.block_bytes, tokens_per_block)
            for lane in lanes
        ]  # fmt: skip
        self._block_bytes = [lane.queue.block_bytes for lane in lanes]

    def begin(self, store: int, places: int, items: int, ahead: int) -> Race | None | bool:
        """Whether to load ``items`` blocks at so many ``places`` of a prompt. ``ahead``: blocks that the store loads
        before. Returns a race, None if nothing is raced against, or False for no load."""
        choice = self._choices[store]
        if choice is None:
            return None
        load = choice.choose(places, ahead * self._block_bytes[store])
        return Race(choice, load, items, self._clock()) if load.blocks else False
