"""Compares KV bytes wherever the pool guarantees them: at every reuse, copy between blocks, and release."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.arrays.layout import BlockLayout
from kvpool.device.base import NULL_STREAM, SOURCE, TARGET, TOKENS, Stream
from kvpool.errors import KVPoolError
from kvpool.replay.content import Difference, KVBytes, States
from kvpool.replay.summary import Verified
from kvpool.replay.tokens import Ids, ranges

Enqueue = Callable[[Stream, Callable[[], None], Ids, Ids], None]
"""Enqueues a function on a stream. It reads and writes the tokens that are given in two arrays of rows
(block, first, end)."""


_NONE: Ids = np.empty((0, 3), np.int64)


class VerificationError(KVPoolError, AssertionError):
    """A block's bytes are not those of its content.

    `block` is the block's id, `tier` is "device" or "host", and `token` is the token inside the block. `layer` and
    `plane` say where its bytes first differ; they are None if the block was never written.
    """

    def __init__(self, message: str, *, block: int, tier: str, token: int, layer: int | None, plane: int | None):
        super().__init__(message)
        self.block, self.tier, self.token, self.layer, self.plane = block, tier, token, layer, plane


class Verifier:
    """Keeps the expected bytes of every block, outside the pool. It learns only of writes and copies.

    A sequence's bytes follow from its own tokens. The bytes of a copy follow from the bytes that were written to its
    source. The verifier never asks kvpool for a block's content. Its state is ``uint64[blocks, tokens_per_block]``.
    Only `write` and `write_tokens` change bytes of the pool. Thread-safe, for copies that other threads cause; only one
    thread may write and check sequences.

    Blocks that come from outside are compared as soon as they are on the host: `expect` says beforehand which content
    may come, and `loaded` finds which of it a block has.

    With `enqueue`, bytes are written and compared when the device gets to that work. The order of the calls determines
    the expected bytes. A difference that is found then is kept in `failure`, and `raise_failure` raises it.
    """

    def __init__(
        self,
        layout: BlockLayout,
        device_pool: npt.NDArray[Any],
        host_pool: npt.NDArray[Any],
        device_blocks: int,
        host_blocks: int,
        enqueue: Enqueue | None = None,
    ) -> None:
        self._enqueue, self._lock = enqueue, threading.RLock()
        self._expected: dict[bytes, States] | None = None
        self.context = "before the first request"
        self.failure: VerificationError | None = None
        self.verified = Verified()
        self._device_blocks, self._tokens_per_block = device_blocks, layout.tokens_per_block
        self._tiers = [("device", 0, KVBytes(layout, device_pool, layout.device_strides(device_blocks), device_blocks))]
        if host_blocks:
            host = KVBytes(layout, host_pool, layout.host_strides(host_blocks), host_blocks)
            self._tiers.append(("host", device_blocks, host))
        self._states = np.zeros((device_blocks + host_blocks, layout.tokens_per_block), dtype=np.uint64)
        self._written = np.zeros(self._states.shape, dtype=np.bool_)
        self._mark = np.full(device_blocks + host_blocks, -1, dtype=np.int64)

    def write(self, blocks: Ids, start: int, states: States, stream: Stream = NULL_STREAM) -> None:
        """Write tokens ``[start, start + len(states))`` of a sequence whose device blocks are `blocks`."""
        first, last, edges = self._split(start, start + len(states))
        whole, grid = blocks[first:last], self._grid(states, start, first, last)
        with self._lock:
            self._states[whole], self._written[whole] = grid, True
            self._launch(stream, lambda: self._tiers[0][2].write_blocks(whole, grid), writes=self._rows(whole))
        self.write_tokens(
            blocks[edges // self._tokens_per_block], edges % self._tokens_per_block, states[edges - start], stream
        )

    def write_tokens(self, blocks: Ids, tokens: Ids, states: States, stream: Stream = NULL_STREAM) -> None:
        """Write token ``tokens[i]`` of device block ``blocks[i]``, whose state is ``states[i]``."""
        rows = np.stack([blocks, tokens, tokens + 1], axis=1)
        with self._lock:
            self._states[blocks, tokens], self._written[blocks, tokens] = states, True
            self._launch(stream, lambda: self._tiers[0][2].write_tokens(blocks, tokens, states), writes=rows)

    def check_reuse(self, blocks: Ids, states: States, stream: Stream = NULL_STREAM) -> None:
        """Raise `VerificationError` unless the first ``len(states)`` tokens of a sequence are in `blocks`."""
        self._check_sequence(blocks, states, "was handed out as cached", stream)
        self.verified.reused_tokens += len(states)

    def check_release(self, blocks: Ids, states: States, stream: Stream = NULL_STREAM) -> None:
        """Raise `VerificationError` unless a sequence that is about to be released still has all its bytes."""
        self._check_sequence(blocks, states, "was overwritten while in use", stream)
        self.verified.released_tokens += len(states)

    def copied(self, moves: Ids, stream: Stream = NULL_STREAM) -> None:
        """Record copies that the device has just enqueued, and compare every target with its source's expected bytes.

        `moves` is ``int64[n, >=3]`` of source, target, tokens, as if made one after the other. A difference is kept in
        `failure`, since the caller is in the middle of the pool's own work, and `raise_failure` raises it.
        """
        with self._lock:
            for batch in self._batches(moves):
                self._follow(batch)
            if len(moves) and self.failure is None:
                _, last = np.unique(moves[::-1, TARGET], return_index=True)
                targets = moves[len(moves) - 1 - last]
                states, context = self._states[targets[:, TARGET]], self.context
                rows = np.stack([targets[:, TARGET], np.zeros(len(targets), np.int64), targets[:, TOKENS]], axis=1)
                self._launch(stream, lambda: self._check_targets(targets, states, context), reads=rows)

    def expect(self, states: States) -> None:
        """From now on, the full blocks of a sequence with these token states may come to the host from outside, and
        those of no other."""
        with self._lock:
            grid = self._grid(states, 0, 0, len(states) // self._tokens_per_block)
            _, _, host = self._tiers[-1]
            self._expected = {host.first_lanes(row): row for row in grid}

    def loaded(self, blocks: Ids) -> None:
        """Compare host blocks that have come from outside with what is expected, if `expect` was ever called. A
        difference is kept in `failure`."""
        tier, origin, host = self._tiers[-1]
        with self._lock:
            expected = self._expected
            if expected is None:
                return
            for block in blocks.tolist():
                states = expected.get(host.read_first_lanes(block - origin))
                found = None if states is None else host.check_blocks(np.array([block - origin]), states[None])
                self._written[block] = states is not None and found is None
                if states is None or found is not None:
                    token = 0 if found is None else found.token
                    self._fail(block, tier, token, "what came from a store is no block of this prompt")
                else:
                    self._states[block] = states
                    self.verified.loaded_blocks += 1

    def raise_failure(self) -> None:
        """Raise the `VerificationError` that is kept in `failure`, if any."""
        if self.failure is not None:
            raise self.failure

    def _launch(self, stream: Stream, function: Callable[[], None], reads: Ids = _NONE, writes: Ids = _NONE) -> None:
        if not len(reads) and not len(writes):
            return
        if self._enqueue is None:
            function()
        else:
            self._enqueue(stream, lambda: self._keep(function), reads, writes)

    def _keep(self, function: Callable[[], None]) -> None:
        """Call a function, and keep its error in `failure`, since no caller could handle it."""
        try:
            function()
        except VerificationError as failure:
            self.failure = self.failure or failure

    def _rows(self, blocks: Ids) -> Ids:
        """All tokens of these blocks, as rows (block, first, end)."""
        return np.stack([blocks, np.zeros_like(blocks), np.full_like(blocks, self._tokens_per_block)], axis=1)

    def _split(self, start: int, stop: int) -> tuple[int, int, Ids]:
        """Split tokens ``[start, stop)`` into full blocks ``[first, last)`` and the positions of all other tokens."""
        size = self._tokens_per_block
        first, last = -(-start // size), stop // size
        if last <= first:
            return 0, 0, np.arange(start, stop)
        return first, last, np.r_[start : first * size, last * size : stop]

    def _grid(self, states: States, start: int, first: int, last: int) -> States:
        size = self._tokens_per_block
        return states[first * size - start : last * size - start].reshape(-1, size)

    def _check_sequence(self, blocks: Ids, states: States, complaint: str, stream: Stream) -> None:
        context, size = self.context, self._tokens_per_block
        used = blocks[: -(-len(states) // size)]
        rows = self._rows(used)
        if len(states) % size:
            rows[-1, 2] = len(states) % size

        def check() -> None:
            first, last, edges = self._split(0, len(states))
            tier, _, memory = self._tiers[0]
            ids = blocks[first:last]
            found = memory.check_blocks(ids, self._grid(states, 0, first, last))
            if found is None:
                ids = blocks[edges // size]
                found = memory.check_tokens(ids, edges % size, states[edges])
            if found is not None:
                raise self._error(tier, int(ids[found.row]), found, complaint, context)

        with self._lock:
            self._launch(stream, check, reads=rows)

    def _batches(self, moves: Ids) -> Iterator[Ids]:
        """Split `moves` into batches: no move reads or writes a block that an earlier one of its batch has written."""
        while len(moves):
            order = np.arange(len(moves))
            # The marks are assigned backwards, so the first move that writes a block wins.
            self._mark[moves[::-1, TARGET]] = order[::-1]
            writer = np.where(self._mark[moves[:, SOURCE]] < 0, len(moves), self._mark[moves[:, SOURCE]])
            clash = (writer < order) | (self._mark[moves[:, TARGET]] < order)
            self._mark[moves[:, TARGET]] = -1
            cut = int(clash.argmax()) if clash.any() else len(moves)
            yield moves[:cut]
            moves = moves[cut:]

    def _follow(self, moves: Ids) -> None:
        """Copy the expected states from sources to targets, and note copies of bytes that nobody wrote."""
        size = self._tokens_per_block
        inside = np.arange(size) < moves[:, TOKENS, None]
        known = self._written[moves[:, SOURCE]]
        if self.failure is None and (inside & ~known).any():
            row, token = (int(i) for i in np.argwhere(inside & ~known)[0])
            block = int(moves[row, SOURCE])
            tier = "device" if block < self._device_blocks else "host"
            self._fail(block, tier, token, "was copied before its KV was written")
        states = self._states[moves[:, SOURCE]]
        targets = moves[:, TARGET]
        self._states[targets] = np.where(inside, states, self._states[targets])
        self._written[targets] |= inside & known
        from_device, to_device = moves[:, SOURCE] < self._device_blocks, targets < self._device_blocks
        self.verified.offloaded_blocks += int((from_device & ~to_device).sum())
        self.verified.onboarded_blocks += int((~from_device & to_device & (moves[:, TOKENS] == size)).sum())
        self.verified.partial_copies += int((to_device & (from_device | (moves[:, TOKENS] < size))).sum())

    def _check_targets(self, moves: Ids, states: States, context: str) -> None:
        """Compare the targets of moves with their token states, ``uint64[n, tokens_per_block]``. The first difference
        is kept in `failure`."""
        for tier, origin, memory in self._tiers:
            mine = (moves[:, TARGET] < self._device_blocks) == (tier == "device")
            whole = mine & (moves[:, TOKENS] == self._tokens_per_block)
            full, part = moves[whole], moves[mine & ~whole]
            difference = memory.check_blocks(full[:, TARGET] - origin, states[whole])
            if difference:
                block, source = int(full[difference.row, TARGET]), int(full[difference.row, SOURCE])
            else:
                rows = np.repeat(np.arange(len(part)), part[:, TOKENS])
                tokens = ranges(np.zeros(len(part), dtype=np.int64), part[:, TOKENS])
                ids = part[rows, TARGET]
                difference = memory.check_tokens(ids - origin, tokens, states[mine & ~whole][rows, tokens])
                if difference is None:
                    continue
                block, source = int(ids[difference.row]), int(part[rows[difference.row], SOURCE])
            complaint = f"is not what the copy from block {source} should leave"
            self.failure = self.failure or self._error(tier, block, difference, complaint, context)
            return

    def _fail(self, block: int, tier: str, token: int, complaint: str) -> None:
        """Keep the failure of a block that has no bytes to show."""
        message = f"{tier} block {block}, token {token}, {self.context}: {complaint}"
        failure = VerificationError(message, block=block, tier=tier, token=token, layer=None, plane=None)
        self.failure = self.failure or failure

    def _error(self, tier: str, block: int, found: Difference, complaint: str, context: str) -> VerificationError:
        place = f"layer {found.layer}, plane {found.plane}, head {found.head}"
        values = f"found {found.found:#x}, expected {found.expected:#x}"
        message = f"{tier} block {block}, token {found.token}, {context}: {complaint} ({place}: {values})"
        return VerificationError(
            message, block=block, tier=tier, token=found.token, layer=found.layer, plane=found.plane
        )
