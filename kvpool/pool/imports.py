"""Imports: KV that a loader or a store brings from elsewhere, into blocks of live sequences, of reservations, or of the
host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpool.common.arguments import Ids, id_array, list_argument, priority_argument, text_argument, ttl_argument
from kvpool.common.arrays.layout import integer_argument
from kvpool.device.base import StreamLike
from kvpool.pool.core import Core
from kvpool.pool.keys import BlockKeys, Prompt
from kvpool.pool.prompt_requests import PromptRequests, Retention
from kvpool.pool.prompts import PARTS_MAX, LayerLoads
from kvpool.pool.reservations import ImportWriter, LoadTarget, Reservation, Reservations, block_buffer
from kvpool.state import records


class Imports:
    """KV that comes from elsewhere: ``cache.imports``. Thread-safe."""

    def __init__(self, core: Core, requests: PromptRequests, reservations: Reservations, writer: ImportWriter) -> None:
        self.core, self._requests, self._reservations, self._writer = core, requests, reservations, writer

    def reserve(
        self,
        prompt: Prompt,
        *,
        owner: str = "",
        retention: Retention | None = None,
        stream: StreamLike = None,
        encoder_tokens: int | None = None,
        deadline_ms: int | None = None,
    ) -> Reservation:
        """Take device blocks for the KV of a prompt that a loader, of this process or another, brings from elsewhere.
        Changes the pool.

        What the pool already has of the prompt is held (and onboarded), as for a sequence. The loader must not write
        it. Nobody finds the rest before ``Reservation.commit``. ``stream``: the loader's. Without one, the call waits,
        without a lock, until nothing that is enqueued touches the blocks. Then anybody may write to them, from any
        process and stream.

        ``owner`` names the loader, for ``revoke`` and for people. ``retention`` and ``encoder_tokens`` are as in
        ``add_sequence``; ``encoder_tokens=0`` takes no blocks for cross attention, which a commit never publishes. A
        reservation takes one of ``max_sequences``, and counts as no reuse in the statistics.

        The reservation expires ``deadline_ms`` after this call (None, the default: never). If it was not committed by
        then, ``commit`` is refused, and it counts in ``stats`` as expired. Its blocks stay out of use until ``abort``
        or ``revoke``, since the loader may still write them. There is no thread: deadlines are checked by each call
        that ends a reservation, by ``Reservation.overdue`` and by ``stats``.

        Thread-safe. Raises OutOfBlocks, OutOfSequences, DeviceError, ValueError, TypeError.
        """
        ranges = None if retention is None else [retention]
        (keys,), row, *_ = arrivals = self._requests.arrivals(
            [prompt], ranges, records.DEFAULT_PRIORITY, None, False, encoder_tokens
        )
        row[0, records.R.reserves] = 1
        for why in self._requests.refused([keys], row).values():
            raise ValueError(f"prompt: {why}")
        lifetime = None if deadline_ms is None else ttl_argument("deadline_ms", deadline_ms)
        return self._reservations.take(arrivals, text_argument("owner", owner), stream, lifetime)

    @property
    def reservations(self) -> list[Reservation]:
        """Open reservations, oldest first."""
        return self._reservations.all

    def load_targets(self, ids: Ids, *, stream: StreamLike = None) -> list[LoadTarget]:
        """Where a store may write for live sequences, in place of the engine: all tokens after the committed ones.

        ``stream``: the loader's, on which these sequences are used from now on. Without one, the call waits as
        ``reserve`` does. Then call ``commit`` for the tokens that came: with the loader's stream, or when the bytes are
        there. The engine continues with ``block_table(ids, stream)``, or any other call that names its own stream.
        Changes nothing else. Thread-safe as long as nobody else changes these sequences. Raises UnknownSequence,
        DeviceError, ValueError, TypeError.
        """
        return self._reservations.load_targets(id_array("ids", ids), stream)

    def import_blocks(
        self,
        prompt: BlockKeys,
        data: Sequence[Any],
        *,
        first: int = 0,
        priority: int = records.DEFAULT_PRIORITY,
        group: int | None = None,
    ) -> int:
        """Store the KV of full blocks ``first``, ``first + 1``, ... of a prompt on the host, so that the next request
        with it hits.

        ``data``: for each block a buffer or array of ``layout.block_bytes``, laid out as a block of ``host_pool``. The
        keys are the prompt's, which this pool computed. Blocks that are cached already are skipped. The call stops
        where the host has no room, and returns how many blocks were stored. Nobody finds a block while it is being
        written. If the pool is reset meanwhile, nothing is stored. The call waits, without a state or transfer lock,
        for copies out of the memory that it takes, and for other imports.

        ``group``: the index of a group of layers, required where there are several. A request hits once all groups have
        what they need of a prefix. A buffer has ``groups[group].block_bytes``: the block in ``host_pools[group][0]``,
        then the block in the next part. In a recurrent group, block i is the state after the i-th full block. Groups
        for cross attention are refused. Thread-safe; changes the pool. Raises TypeError, ValueError, PoolClosed,
        DeviceError.
        """
        if not isinstance(prompt, BlockKeys):
            raise TypeError(f"prompt: expected the BlockKeys of this pool, got {prompt!r:.80}")
        keys, into = self._requests.keys(prompt), self.core.config.groups[self.core.config.group(group)]
        if into.kind == "cross":
            raise ValueError(
                f"group: expected one that is not for cross attention, whose content nobody finds, got {into.index}"
            )
        first = integer_argument("first", first, 0, (1 << 31) - 1)
        priority = priority_argument("priority", priority)
        buffers = [block_buffer(i, buffer, into.block_bytes) for i, buffer in enumerate(list_argument("data", data))]
        full = len(keys) // self.core.config.tokens_per_block
        if first + len(buffers) > full:
            raise ValueError(
                f"data: expected blocks of the prompt's {full} full ones, got {len(buffers)} from first={first} on"
            )
        return self._writer.store(into, keys, first, priority, buffers)

    def layer_loads(self, stream: StreamLike = None, *, parts: int = 8) -> LayerLoads:
        """What an admission brings from the host, in so many parts of the layers: see ``LayerLoads``.

        ``stream``: the engine's. ``parts``: more than there are layers are of no use. Each is a copy of its
        own, so let it have a megabyte. Thread-safe; changes nothing. Raises TypeError, ValueError, PoolClosed.
        """
        return LayerLoads(self.core, self.core.as_stream(stream), integer_argument("parts", parts, 1, PARTS_MAX))
