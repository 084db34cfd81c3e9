"""The fake engine over several groups of layers: it writes what each group keeps, and checks every byte that is reused
in any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvpool
from engine import Bytes, Clock, Digests, Engine, Item, Request, small_layout, token_bytes
from kvpool import BlockLayout
from tests import debug


@dataclass
class Side:
    """One group of a pool, as the engine knows it: ``width`` tokens end where a column of its rows does."""

    index: int
    layouts: Sequence[BlockLayout]
    width: int
    kind: str = "attention"
    window: int | None = None
    sinks: int = 0

    def bytes_of(self, digest: bytes, part: int) -> Bytes:
        """What a token, or the state after it, is: unlike that of any other group."""
        return token_bytes(self.layouts[part], digest + bytes((self.index, part)))

    def places(self, row: Sequence[int], count: int) -> list[tuple[int, int, int]]:
        """(token, block, slot) of what ``count`` tokens have in a row: each of them, or of states those after the last
        of a column."""
        if self.kind != "recurrent":
            return [(i, row[i // self.width], i % self.width) for i in range(count)]
        ends = (
            (min((column + 1) * self.width, count) - 1, block)
            for column, block in enumerate(row[: -(-count // self.width)])
        )
        return [(token, block, 0) for token, block in ends if block >= 0]

    def unseen(self, token: int, committed: int) -> bool:
        """Whether the window of the token after the committed ones has passed a token, which is not a sink either."""
        return self.window is not None and self.window <= committed - token and token >= self.sinks


class GroupsEngine(Engine):
    """An engine on a pool of several groups, or on one of one group in its plain form. ``sides`` are its groups."""

    expected: Digests  # type: ignore[assignment]

    def __init__(self, cache: kvpool.KVCacheManager, sides: Sequence[Side]) -> None:
        self.cache, self.sides = cache, sides
        self.T = cache.tokens_per_block
        self.expected = Digests()
        self.live: dict[int, Request] = {}
        self.clock = Clock()
        self.encoded: dict[int, list[bytes]] = {}
        """For each sequence: what its encoder gave."""

    # -- looking -------------------------------------------------------------------------------

    def named(self, group: int) -> dict[str, int]:
        """How a call says which group it means."""
        return {} if len(self.sides) == 1 else {"group": group}

    def free_blocks(self, tier: str = "device") -> list[int]:
        """Blocks of each group that nobody holds."""
        return [len(debug.lists(state)[tier]) for state in self.states()]

    def states(self) -> Sequence[Any]:
        return list(self.cache.core.states)

    def table(self, sequence: Request, group: int = 0) -> list[int]:
        row = self.cache.block_table(sequence.id, **self.named(group)).dense()[0]
        return [int(b) for b in row]

    def reserved(self, reservation: Any, group: int) -> list[int]:
        """The row of an open reservation."""
        return [int(b) for b in reservation.blocks_of(group)]

    # -- bytes ---------------------------------------------------------------------------------

    def fill(self, side: Side, row: Sequence[int], digests: Sequence[bytes], start: int) -> None:
        """Write what a row has of the tokens from ``start`` on."""
        for token, block, slot in side.places(row, len(digests)):
            for part in range(len(side.layouts) if token >= start else 0):
                self.block(block, side.index, part)[:, :, slot] = side.bytes_of(digests[token], part)

    def compare(self, side: Side, block: int, slot: int, digest: bytes, what: str) -> None:
        for part in range(len(side.layouts)):
            same = np.array_equal(self.block(block, side.index, part)[:, :, slot], side.bytes_of(digest, part))
            assert same, (
                f"group {side.index}: block {block}, slot {slot}, part {part} does not hold the bytes of {what}"
            )

    def digests(self, side: Side, sequence: Request) -> Sequence[Any]:
        return self.encoded[sequence.id] if side.kind == "cross" else sequence.bytes

    def write(self, sequence: Request, start: int) -> None:
        for side in self.sides:
            if side.kind != "cross":
                self.fill(side, self.table(sequence, side.index), self.digests(side, sequence), start)

    def check(self, sequence: Request, count: int | None = None) -> None:
        committed = int(self.cache.committed_tokens(sequence.id))
        for side in self.sides:
            row, digests = self.table(sequence, side.index), self.digests(side, sequence)
            assert len(row) == -(-len(digests) // self.T), f"group {side.index}: {len(row)} columns of {sequence}"
            if side.kind == "recurrent":
                assert not row or row[-1] >= 0, f"group {side.index}: no running state of {sequence}"
            for token, block, slot in side.places(row, len(digests)):
                if block < 0:
                    assert side.unseen(token, committed), (
                        f"group {side.index}: token {token} of {sequence} has no block"
                    )
                elif side.kind == "cross" or count is None or token < count:
                    self.compare(side, block, slot, digests[token], f"token {token} of {sequence}")

    def check_cached(self, side: Side, block: int, namespace: object, items: Sequence[Item], tail: int) -> None:
        """Compare a cached block with the last ``tail`` tokens of a prefix, or with the state after it."""
        digests = self.expected.of(namespace, items)
        first = len(items) - (1 if side.kind == "recurrent" else tail)
        for token in range(first, len(items)):
            self.compare(side, block, token - first, digests[token], f"token {token} of {namespace}, {items}")

    # -- verbs ---------------------------------------------------------------------------------

    def add(self, tokens: Sequence[int], *, encoder_tokens: int | None = None, **options: Any) -> Request:
        """As ``Engine.add``; ``encoder_tokens`` where there is cross attention."""
        names = {name: options.pop(name) for name in ("salt", "adapter_id", "extra_ids") if name in options}
        if encoder_tokens is not None:
            options["encoder_tokens"] = encoder_tokens
        new = self.cache.add_sequence(self.prompt(tokens, **names), **options)
        return self.admitted(new, tokens, encoder_tokens=encoder_tokens or 0, **names)

    def admitted(
        self,
        new: int,
        tokens: Sequence[int],
        *,
        salt: object = None,
        adapter_id: object = None,
        extra_ids: Sequence[int] | None = None,
        encoder_tokens: int = 0,
    ) -> Request:
        """The encoder's part is nobody else's, and is written before anything is checked."""
        self.encoded[new] = self.expected.of(("encoder", new), [(i, 0) for i in range(encoder_tokens)])
        for side in self.sides:
            if side.kind == "cross":
                row = self.cache.block_table(new, **self.named(side.index)).dense()[0].tolist()
                self.fill(side, row, self.encoded[new], 0)
        return super().admitted(new, tokens, salt=salt, adapter_id=adapter_id, extra_ids=extra_ids)

    def forked(self, parent: Request, new: int) -> Request:
        self.encoded[new] = self.encoded[parent.id]
        return super().forked(parent, new)

    def reordered(self, sequences: Sequence[Request], parents: Sequence[int]) -> None:
        before = [self.encoded[sequence.id] for sequence in sequences]
        self.encoded.update((sequence.id, before[place]) for sequence, place in zip(sequences, parents, strict=True))
        super().reordered(sequences, parents)

    def chained(self, sequence: Request, drafts: int) -> None:
        """Compute the last tokens of a sequence again, each after the one before."""
        sequence.bytes = self.expected.of(sequence.namespace, sequence.items)  # type: ignore[assignment]
        self.write(sequence, len(sequence) - drafts)
        self._done(sequence)

    def _write_states(self, sequence: Request, start: int) -> None:
        """The pool has given the sequence a block of its own for that."""
        for side in self.sides:
            if side.kind == "recurrent":
                self.fill(side, self.table(sequence, side.index), self.digests(side, sequence), max(start, 0))


Open = Callable[..., GroupsEngine]


def open_groups(groups: Sequence[dict[str, Any]], *, tokens_per_block: int = 4, **options: Any) -> GroupsEngine:
    """An engine on a pool of its own. ``groups`` has the options of each: ``parts``, those of its layouts, rules and
    capacities.

    A plain group alone is opened in the form without groups.
    """
    sides = []
    for g, group in enumerate(groups):
        kind = group.get("kind", "attention")
        layouts = [
            small_layout(1 if kind == "recurrent" else tokens_per_block, **part) for part in group.get("parts", ({},))
        ]
        sides.append(Side(g, layouts, tokens_per_block, kind, group.get("window"), group.get("sinks", 0)))
    options = {"device": "cpu", "clock": Clock()} | options
    capacities = {name: [group.get(name, 0) for group in groups] for name in ("device_blocks", "host_blocks")}
    if len(sides) == 1 and len(sides[0].layouts) == 1 and sides[0].kind == "attention":
        counts = {name: value for name, (value,) in capacities.items()}
        cache = kvpool.KVCacheManager(
            sides[0].layouts[0], window=sides[0].window, sinks=sides[0].sinks, **counts, **options
        )
    else:
        rules = [
            {name: group[name] for name in ("kind", "window", "sinks", "snapshot_tokens") if name in group}
            for group in groups
        ]
        made = [kvpool.LayerGroup(side.layouts, **rule) for side, rule in zip(sides, rules, strict=True)]
        if all(side.kind == "recurrent" for side in sides):
            options["tokens_per_block"] = tokens_per_block
        cache = kvpool.KVCacheManager(groups=made, **capacities, **options)
    engine = GroupsEngine(cache, sides)
    engine.clock = options["clock"]
    return engine
