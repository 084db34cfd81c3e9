"""Progress: what requests have done since they were admitted, in tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvpool.entry.arguments import id_array, is_integer
from kvpool.pool.core import Core


class RequestStats(NamedTuple):
    """Of each sequence, int32[n] in the order of the ids; int for one id.

    ``prompt``: tokens that it was added with, without those that were appended later. Of those, ``device`` and
    ``host`` were reused in full blocks and ``partial`` were copied out of a block that matched in part. ``decoded``:
    tokens that it has now after its prompt. ``committed``: tokens whose KV is written. ``dropped``: tokens that were
    rewound, and drafts that were not kept. ``recomputed``: tokens of full blocks whose content was cached already
    when this sequence committed them, so that computing them was wasted, as by requests that share a prefix and run
    at the same time.

    With several groups of layers, ``host`` is of the group that has the most; ``recomputed`` of the first group that is
    not for cross attention. A fork begins with its parent's figures, and a beam takes them over with the tokens. A
    rewind into the prompt makes ``prompt`` smaller.
    """

    prompt: Any
    device: Any
    host: Any
    partial: Any
    decoded: Any
    committed: Any
    dropped: Any
    recomputed: Any


class Progress:
    """The figures of one pool's live sequences. Thread-safe."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def of(self, ids: Any) -> RequestStats:
        """What ``KVCacheManager.request_stats`` does."""
        core, which = self._core, id_array("ids", ids)
        with core.lock:
            rows = core.rows(which)
            own = core.tokens.sequences[rows]
            hosts = [state.sequences["from_host"][rows] for state in core.states]
        host = np.max(hosts, axis=0)
        partial = own["cached"] % core.config.tokens_per_block
        full = own["cached"] - partial
        found = RequestStats(
            own["prompt"].copy(), full - host, host, partial, own["length"] - own["prompt"], own["committed"].copy(),
            own["dropped"].copy(), own["recomputed"].copy(),
        )  # fmt: skip
        return RequestStats(*(int(one[0]) for one in found)) if is_integer(ids) else found
