"""Compares KV bytes wherever the pool promises them: at every reuse, copy between blocks, and release."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.device.base import SOURCE, TARGET, TOKENS
from kvpool.errors import KVPoolError
from kvpool.layout import BlockLayout
from kvpool.replay.content import Difference, Ids, KVBytes, States


class VerificationError(KVPoolError, AssertionError):
    """A block holds other bytes than its content calls for.

    `block` is the block's id, `tier` "device" or "host", `token` the token inside the block; `layer` and `plane`
    say where its bytes first differ, None where the block was never written at all.
    """

    def __init__(self, message: str, *, block: int, tier: str, token: int, layer: int | None, plane: int | None):
        super().__init__(message)
        self.block, self.tier, self.token, self.layer, self.plane = block, tier, token, layer, plane


class Verifier:
    """What every block's bytes must be, kept beside the pool and told only what was written and copied.

    A sequence's bytes follow from its own tokens; a copy's bytes follow from what was written to its source.
    Neither asks kvpool what a block holds. The state is ``uint64[blocks, tokens_per_block]`` and changes no pool
    byte except through `write` and `write_tokens`. Not thread-safe.
    """

    def __init__(self, layout: BlockLayout, device_pool: Any, host_pool: Any, device_blocks: int, host_blocks: int) -> None:
        self.context = "before the first request"
        self.failure: VerificationError | None = None
        self.reused_tokens = self.released_tokens = 0
        self.offloaded_blocks = self.onboarded_blocks = self.partial_copies = 0
        self._device_blocks, self._tokens_per_block = device_blocks, layout.tokens_per_block
        self._tiers = [("device", 0, KVBytes(layout, device_pool, layout.device_strides(device_blocks), device_blocks))]
        if host_blocks:
            host = KVBytes(layout, host_pool, layout.host_strides(host_blocks), host_blocks)
            self._tiers.append(("host", device_blocks, host))
        self._states = np.zeros((device_blocks + host_blocks, layout.tokens_per_block), dtype=np.uint64)
        self._written = np.zeros(self._states.shape, dtype=np.bool_)
        self._mark = np.full(device_blocks + host_blocks, -1, dtype=np.int64)

    def write(self, blocks: Ids, start: int, states: States) -> None:
        """Write tokens ``[start, start + len(states))`` of a sequence whose device blocks are `blocks`."""
        first, last, edges = self._split(start, start + len(states))
        if last > first:
            whole = blocks[first:last]
            grid = self._grid(states, start, first, last)
            self._tiers[0][2].write_blocks(whole, grid)
            self._states[whole], self._written[whole] = grid, True
        self.write_tokens(blocks[edges // self._tokens_per_block], edges % self._tokens_per_block, states[edges - start])

    def write_tokens(self, blocks: Ids, tokens: Ids, states: States) -> None:
        """Write token ``tokens[i]`` of device block ``blocks[i]``, whose state is ``states[i]``."""
        if len(blocks):
            self._tiers[0][2].write_tokens(blocks, tokens, states)
            self._states[blocks, tokens], self._written[blocks, tokens] = states, True

    def check_reuse(self, blocks: Ids, states: States) -> None:
        """Raise `VerificationError` unless the first ``len(states)`` tokens of a sequence are in `blocks`."""
        self._check_sequence(blocks, states, "was handed out as cached")
        self.reused_tokens += len(states)

    def check_release(self, blocks: Ids, states: States) -> None:
        """Raise `VerificationError` unless a sequence about to be released still has all its bytes."""
        self._check_sequence(blocks, states, "was overwritten while in use")
        self.released_tokens += len(states)

    def copied(self, moves: Ids) -> None:
        """Follow copies that the device has just made, and compare every target with what its source held.

        `moves` is ``int64[n, >=3]`` of source, target, tokens, sequential in meaning. A difference is kept in
        `failure`, as the caller is in the middle of the pool's own work; `raise_failure` reports it.
        """
        for batch in self._batches(moves):
            self._follow(batch)
        if len(moves) and self.failure is None:
            _, last = np.unique(moves[::-1, TARGET], return_index=True)
            self._check_targets(moves[len(moves) - 1 - last])

    def raise_failure(self) -> None:
        """Raise the `VerificationError` that `copied` found, if any."""
        if self.failure is not None:
            raise self.failure

    def _split(self, start: int, stop: int) -> tuple[int, int, Ids]:
        """Cut tokens ``[start, stop)`` into full blocks ``[first, last)`` and the positions of all other tokens."""
        size = self._tokens_per_block
        first, last = -(-start // size), stop // size
        if last <= first:
            return 0, 0, np.arange(start, stop)
        return first, last, np.r_[start : first * size, last * size : stop]

    def _grid(self, states: States, start: int, first: int, last: int) -> States:
        size = self._tokens_per_block
        return states[first * size - start : last * size - start].reshape(-1, size)

    def _check_sequence(self, blocks: Ids, states: States, complaint: str) -> None:
        first, last, edges = self._split(0, len(states))
        tier, _, memory = self._tiers[0]
        if last > first:
            found = memory.check_blocks(blocks[first:last], self._grid(states, 0, first, last))
            if found:
                raise self._error(tier, int(blocks[first + found.row]), found, complaint)
        if len(edges):
            ids = blocks[edges // self._tokens_per_block]
            found = memory.check_tokens(ids, edges % self._tokens_per_block, states[edges])
            if found:
                raise self._error(tier, int(ids[found.row]), found, complaint)

    def _batches(self, moves: Ids) -> Iterator[Ids]:
        """Cut `moves` where one reads or writes a block that an earlier one of the same batch has written."""
        while len(moves):
            order = np.arange(len(moves))
            # Assigned backwards, the first move that writes a block wins.
            self._mark[moves[::-1, TARGET]] = order[::-1]
            writer = np.where(self._mark[moves[:, SOURCE]] < 0, len(moves), self._mark[moves[:, SOURCE]])
            clash = (writer < order) | (self._mark[moves[:, TARGET]] < order)
            self._mark[moves[:, TARGET]] = -1
            cut = int(clash.argmax()) if clash.any() else len(moves)
            yield moves[:cut]
            moves = moves[cut:]

    def _follow(self, moves: Ids) -> None:
        """Carry the expected states from sources to targets, and note copies of bytes that nobody wrote."""
        size = self._tokens_per_block
        inside = np.arange(size) < moves[:, TOKENS, None]
        known = self._written[moves[:, SOURCE]]
        if self.failure is None and (inside & ~known).any():
            row, token = (int(i) for i in np.argwhere(inside & ~known)[0])
            block = int(moves[row, SOURCE])
            tier = "device" if block < self._device_blocks else "host"
            message = f"{tier} block {block}, token {token}, {self.context}: was copied before its KV was written"
            self.failure = VerificationError(message, block=block, tier=tier, token=token, layer=None, plane=None)
        states = self._states[moves[:, SOURCE]]
        targets = moves[:, TARGET]
        self._states[targets] = np.where(inside, states, self._states[targets])
        self._written[targets] |= inside & known
        from_device, to_device = moves[:, SOURCE] < self._device_blocks, targets < self._device_blocks
        self.offloaded_blocks += int((from_device & ~to_device).sum())
        self.onboarded_blocks += int((~from_device & to_device & (moves[:, TOKENS] == size)).sum())
        self.partial_copies += int((to_device & (from_device | (moves[:, TOKENS] < size))).sum())

    def _check_targets(self, moves: Ids) -> None:
        for tier, origin, memory in self._tiers:
            mine = moves[(moves[:, TARGET] < self._device_blocks) == (tier == "device")]
            full = mine[mine[:, TOKENS] == self._tokens_per_block]
            difference = memory.check_blocks(full[:, TARGET] - origin, self._states[full[:, TARGET]])
            if difference:
                block, source = int(full[difference.row, TARGET]), int(full[difference.row, SOURCE])
            else:
                part = mine[mine[:, TOKENS] < self._tokens_per_block]
                rows = np.repeat(np.arange(len(part)), part[:, TOKENS])
                tokens = ranges(np.zeros(len(part), dtype=np.int64), part[:, TOKENS])
                ids = part[rows, TARGET]
                difference = memory.check_tokens(ids - origin, tokens, self._states[ids, tokens])
                if difference is None:
                    continue
                block, source = int(ids[difference.row]), int(part[rows[difference.row], SOURCE])
            self.failure = self._error(tier, block, difference, f"is not what the copy from block {source} should leave")
            return

    def _error(self, tier: str, block: int, found: Difference, complaint: str) -> VerificationError:
        place = f"layer {found.layer}, plane {found.plane}, head {found.head}"
        values = f"found {found.found:#x}, expected {found.expected:#x}"
        message = f"{tier} block {block}, token {found.token}, {self.context}: {complaint} ({place}: {values})"
        return VerificationError(message, block=block, tier=tier, token=found.token, layer=found.layer, plane=found.plane)


def ranges(starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> Ids:
    """Return ``[starts[0], starts[0] + counts[0])``, then the next range, and so on, as one array."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(starts - ends + counts, counts)
