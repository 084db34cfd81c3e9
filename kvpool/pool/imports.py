"""Imports: calls for KV that a loader or a store writes into blocks of live sequences, of reservations, or of the
host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from kvpool.common.arguments import (
    Ids,
    deadline_argument,
    id_array,
    list_argument,
    priority_argument,
    text_argument,
)
from kvpool.common.arrays import Array, SupportsDLPack
from kvpool.common.arrays.layout import integer_argument
from kvpool.device.base import StreamLike
from kvpool.pool.core import Core
from kvpool.pool.keys import BlockKeys, Prompt
from kvpool.pool.prompt_requests import PromptRequests, Retention
from kvpool.pool.prompts import PARTS_MAX, LayerLoads
from kvpool.pool.reservations import ImportWriter, LoadTarget, Reservation, Reservations, block_buffer
from kvpool.state import records

BlockBuffer: TypeAlias = "bytes | bytearray | memoryview | Array | SupportsDLPack"
"""The bytes of one block: a contiguous buffer, or an array of any package."""


class Imports:
    """The calls by which KV from elsewhere comes into a pool. It is ``KVCacheManager.imports``.

    There are three ways. ``reserve`` takes device blocks for a prompt that no sequence computes, such as one from a
    prefill worker. ``load_targets`` returns the blocks of live sequences, for a store that fills them in place of the
    engine. ``import_blocks`` copies full blocks into the host tier.

    Notes
    -----
    Thread-safe.

    Examples
    --------
    >>> import kvpool
    >>> layout = kvpool.BlockLayout(layers=2, kv_heads=2, head_dim=8, tokens_per_block=4)
    >>> with kvpool.KVCacheManager(layout, device_blocks=8, device="cpu") as cache:
    ...     with cache.imports.reserve(range(6), owner="prefill worker") as reservation:
    ...         print(reservation.slot_mapping)  # write the KV there, then:
    ...         reservation.commit()
    ...     print(cache.match_prefix(range(6)).tokens)
    [0 1 2 3 4 5]
    5
    """

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
        deadline_seconds: float | None = None,
    ) -> Reservation:
        """Take device blocks for a prompt whose KV a loader writes, in this process or another.

        The cached prefix of the prompt is held, and copied to the device if need be, as for a sequence; the loader must
        not write it. Other prompts find the rest only after ``Reservation.commit``.

        Parameters
        ----------
        prompt : BlockKeys or array_like of int, shape (n,)
            The prompt.
        owner : str, default ""
            Name of the loader, for ``KVCacheManager.revoke`` and for people.
        retention : sequence of RetentionRange, optional
            How long to keep the blocks, as in ``KVCacheManager.add_sequence``.
        stream : Stream, int, or stream of another package, optional
            The stream on which the loader writes; it waits for earlier users of the blocks. Without a stream, the call
            itself waits for them, and the loader can write from any process and stream.
        encoder_tokens : int, optional
            As in ``KVCacheManager.add_sequence``, in a pool with a group for cross attention. 0 takes no blocks for it,
            since a commit does not publish them.
        deadline_seconds : float, optional
            The reservation expires this many seconds after the call, on the clock of the pool. By default it never
            does.

        Returns
        -------
        Reservation
            The blocks, and the slots of the tokens to write.

        Raises
        ------
        TypeError, ValueError
            For a bad argument, and for a prompt that can never fit.
        OutOfBlocks, OutOfSequences
            Where too few device blocks or rows are free.
        DeviceError, PoolClosed
            Where the device has failed; after the pool was closed.

        Notes
        -----
        Changes the pool. A reservation takes one of ``max_sequences`` rows. Statistics do not count it as reuse. A wait
        for the device holds no lock.

        ``commit`` of an expired reservation is refused, and ``stats`` counts it. Its blocks stay out of use until
        ``abort`` or ``revoke``, since the loader may still write them. No thread runs for this: deadlines are checked
        by calls that end a reservation, by ``Reservation.overdue`` and by ``stats``.
        """
        ranges = None if retention is None else [retention]
        (keys,), row, *_ = arrivals = self._requests.arrivals(
            [prompt], ranges, records.DEFAULT_PRIORITY, None, False, encoder_tokens
        )
        row[0, records.R.reserves] = 1
        for why in self._requests.refused([keys], row).values():
            raise ValueError(f"prompt: {why}")
        lifetime = deadline_argument(deadline_seconds)
        return self._reservations.take(arrivals, text_argument("owner", owner), stream, lifetime)

    @property
    def reservations(self) -> list[Reservation]:
        """Open reservations, oldest first."""
        return self._reservations.all

    def load_targets(self, ids: Ids, *, stream: StreamLike = None) -> list[LoadTarget]:
        """Return the blocks of live sequences into which a loader can write, in place of the engine.

        It can write all tokens after the committed ones. Then call ``KVCacheManager.commit`` for the tokens that it has
        written: with the loader's stream, or after the writes are done. The engine continues with any call that names
        its own stream, such as ``block_table(ids, stream)``.

        Parameters
        ----------
        ids : int or array_like of int64, shape (n,)
            The sequences.
        stream : Stream, int, or stream of another package, optional
            The stream on which the loader writes, and on which the sequences are used from now on. Without a stream,
            the call waits for earlier users of the blocks.

        Returns
        -------
        list of LoadTarget
            The blocks and slots of each sequence.

        Raises
        ------
        UnknownSequence
            For an id that is not a live sequence.
        TypeError, ValueError
            For a bad argument.
        DeviceError, PoolClosed
            Where the device has failed, or a sequence has lost a block; after the pool was closed.

        Notes
        -----
        Changes nothing but the stream of the sequences. No other thread may change these sequences meanwhile.
        """
        return self._reservations.load_targets(id_array("ids", ids), stream)

    def import_blocks(
        self,
        prompt: BlockKeys,
        data: Sequence[BlockBuffer],
        *,
        first: int = 0,
        priority: int = records.DEFAULT_PRIORITY,
        group: int | None = None,
    ) -> int:
        """Copy the KV of full blocks of a prompt into the host tier, so that later requests hit them.

        Blocks that are cached already are skipped. The call stops where the host tier has no room.

        Parameters
        ----------
        prompt : BlockKeys
            The prompt, from ``KVCacheManager.block_keys`` of this pool.
        data : sequence of buffers or arrays
            The KV of blocks ``first``, ``first + 1``, ...: ``groups[group].block_bytes`` each, laid out as a block of
            ``host_pools[group][0]``, followed by the block of each further layout of the group. In a recurrent group,
            block i is the state after the i-th full block.
        first : int, default 0
            The index of the first block.
        priority : int, default 35
            0 (evicted first) to 100 (evicted last).
        group : int, optional
            The index of a group of layers, required where there are several. A request hits a prefix once all groups
            have what they need of it. A group for cross attention is refused.

        Returns
        -------
        int
            Number of blocks that were stored.

        Raises
        ------
        TypeError, ValueError
            For a bad argument. Nothing is stored then.
        DeviceError, PoolClosed
            Where the device has failed; after the pool was closed.

        Notes
        -----
        Changes the pool. Other calls find a block only after it is written. The call waits for copies out of the memory
        that it takes, and for other imports; it holds no state or transfer lock meanwhile. If the pool is cleared
        during the call, nothing is stored.
        """
        if not isinstance(prompt, BlockKeys):
            raise TypeError(f"prompt: expected the BlockKeys of this pool, got {prompt!r:.80}")
        keys, into = self._requests.keys(prompt), self.core.config.groups[self.core.config.group(group)]
        if into.kind == "cross":
            raise ValueError(f"group: expected a group without cross attention, got {into.index}")
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
        """Return an object that loads the host hits of an admission layer by layer: see ``LayerLoads``.

        Parameters
        ----------
        stream : Stream, int, or stream of another package, optional
            The stream of the engine.
        parts : int, default 8
            The number of parts into which the layers are split, at most one for each layer. Each part is a copy of
            its own, which should have a megabyte or more.

        Returns
        -------
        LayerLoads
            To be passed to ``KVCacheManager.add_sequence_batch`` as ``loads``.

        Raises
        ------
        TypeError, ValueError, PoolClosed
            For a bad argument; after the pool was closed.
        """
        return LayerLoads(self.core, self.core.as_stream(stream), integer_argument("parts", parts, 1, PARTS_MAX))
