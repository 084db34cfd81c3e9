"""The model of a group of recurrent layers: a block is the state after all tokens of its prefix, kept at snapshots and
at the end.

Readings of the rules where they leave room:

- The last full block that a prompt can reuse has a block of its own from admission on; it is not taken again after a
  rewind before it.
- A running block keeps its priority and ttl when it moves to the next column, and forgets a content that waits to be
  published.
- The next token overwrites a state as a whole: one that a reader pins is copied, as one that others hold.
- A rewind that finds no block in its last column moves the first one after it there, and copies it where others hold
  it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .admission import Seq
from .batches import EXPIRIES_PER_CALL, Plan
from .model import Model, is_shared
from .tiers import Block


class Recurrent(Model):
    """Rows with None wherever no state is kept."""

    leaves_holes = True  # type: ignore[assignment]

    def __init__(self, *, snapshot_tokens: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.snapshot_tokens = snapshot_tokens

    def needs(self, block: int, count: int) -> bool:
        return block == count // self.T - 1

    def will_find(self, sequence: int, column: int) -> bool:
        seq = self.sequences[sequence]
        return self.keeps(seq, column) and seq.blocks[column] is not None

    def keeps(self, seq: Seq, i: int) -> bool:
        return i == seq.kept or self._is_snapshot(i)

    def _is_snapshot(self, column: int) -> bool:
        return self.snapshot_tokens is not None and (column + 1) * self.T % self.snapshot_tokens == 0

    def new_columns(self, plan: Plan, tokens: int | None = None) -> Sequence[int]:
        last = self._ceil(len(plan.prompt.tokens) if tokens is None else tokens) - 1
        kept = (last, plan.usable // self.T - 1)
        return [i for i in range(plan.full, last + 1) if i in kept or self._is_snapshot(i)]

    def _growth(self, live: Sequence[Seq], counts: Sequence[int]) -> int:
        need, left = 0, {block.id: block.refs for seq in live for block in seq.blocks if block is not None}
        for seq, count in zip(live, counts, strict=True):
            if not count:
                continue
            block = seq.blocks[-1] if seq.blocks else None
            moves = block is not None and self._is_movable(block, left[block.id])
            if block is not None and self._copies(seq, left[block.id]):
                left[block.id] -= 1
                need, moves = need + 1, True
            for column in range(len(seq.blocks) - 1, self._ceil(len(seq.items) + count) - 1):
                if not moves or self._is_snapshot(column):
                    need += 1
                moves = True
        return need

    def _copies(self, seq: Seq, refs: int) -> bool:
        return len(seq.items) % self.T > 0 and refs + seq.blocks[-1].pins > 1

    def _is_movable(self, block: Block, refs: int) -> bool:
        return refs == 1 and block.pins == 0 and not block.indexed

    def _open_column(self, seq: Seq) -> None:
        last = seq.blocks[-1] if seq.blocks else None
        if last is None or self._is_snapshot(len(seq.blocks) - 1) or not self._is_movable(last, last.refs):
            super()._open_column(seq)
        else:
            last.content = None
            seq.blocks[-1:] = [None, last]

    def _is_passed(self, seq: Seq, i: int) -> bool:
        return i < (seq.committed - 1) // self.T

    def has_passed(self, seq: Seq, length: int) -> bool:
        return length < seq.committed

    def accept_drafts(self, ids: Sequence[int], drafts: Sequence[int], accepted: Sequence[Sequence[int]]) -> None:
        """Nothing moves: all are rewound, then states of columns whose tokens are others now will be written again."""
        live, lengths, written = self._move_items(ids, drafts, accepted)
        need, again = self._rewind_need(live, lengths), 0
        for seq, columns, length in zip(live, written, lengths, strict=True):
            stay, _, last = self._cut(seq, length)
            again += sum(
                block is not None and block is not last and is_shared(block) for block in [stay[i] for i in columns]
            )
        if again:
            self.need_device(need + again, self.free("device"))
        if need + again:
            self.expire(self.clock(), EXPIRIES_PER_CALL)
        for seq, length in zip(live, lengths, strict=True):
            self._rewind_one(seq, length)
        self._own_columns(live, written)

    def _rewind_need(self, live: Sequence[Seq], lengths: Sequence[int]) -> int:
        for seq, length in zip(live, lengths, strict=True):
            if self.has_passed(seq, length):
                raise ValueError(f"counts: {length} tokens have been passed")
        return super()._rewind_need(live, lengths)

    def _cut(self, seq: Seq, length: int) -> tuple[list[Block | None], list[Block], Block | None]:
        stay, go, written = super()._cut(seq, length)
        if stay and stay[-1] is None:
            stay[-1] = written = go.pop(0)
        return stay, go, written

    def check(self) -> None:
        super().check()
        for seq in self.sequences.values():
            assert len(seq.blocks) == self._ceil(len(seq.items)), seq
            assert not seq.blocks or seq.blocks[-1] is not None, f"no running state: {seq}"
