"""Drafts: the verb that keeps a path of a tree of draft tokens."""

from __future__ import annotations

from typing import Any

from kvpool.reservations import ReservePool
from kvpool.sequence import count_array, id_array, int64_array, private
from kvpool.state import groups


class DraftPool(ReservePool):
    """A pool whose sequences can end in drafts; ``KVCacheManager`` is one."""

    def keep(self, ids: Any, drafts: Any, accepted: Any, counts: Any = None, *, stream: Any = None) -> None:
        """Of the last ``drafts[i]`` tokens of each sequence keep those that the model accepted, and drop the others. Changes the pool.

        ``accepted``: int[sum of counts], for one sequence after the other ``counts[i]`` indices among its drafts (0 is the first), in
        rising order, such as a path through a tree of drafts that were appended in an order where parents come first; with one id, all
        of them. They stay in that order behind the tokens before the drafts: tokens and KV are moved, across blocks, all layers and
        planes. Drafts are tokens that are not committed.

        The move is enqueued on the stream that has written the drafts, which is the engine's: one launch for each stream of the call,
        and several on a GPU where very many tokens move. Nothing is moved where the accepted drafts are the first ones: that is what
        ``rewind`` does. A block that others hold is copied, never written. States of recurrent groups are not moved: see ``state_blocks``.

        Raises OutOfBlocks (for such copies), UnknownSequence, DeviceError, ValueError, TypeError. Thread-safe.
        """
        which = id_array("ids", ids)
        tails, path = count_array("drafts", drafts, which), private(int64_array("accepted", accepted), accepted)
        if counts is None:
            if len(which) != 1:
                raise ValueError("counts: accepted is one for each id where there are several")
            counts = len(path)
        each = count_array("counts", counts, which)
        if int(each.sum()) != len(path):
            raise ValueError(f"counts add up to {int(each.sum())}, accepted has {len(path)} entries")
        most = 2 * (len(path) // self.tokens_per_block + 2 * len(which))
        self._decide(most, stream, self._keep, which, tails, path, each, ids=which)

    def _keep(self, heads: Any, which: Any, tails: Any, path: Any, each: Any) -> int:
        """The verb, with room for its token moves. The state lock is held by the caller."""
        self._states.reserve_token_moves(len(path))
        return int(groups.keep(heads, which, tails, path, each, tails - each, self.now(), self._needs))
