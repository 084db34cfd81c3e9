"""The model of the state of one group of layers: what every public verb returns and changes.

Content is named by its namespace and all tokens of its prefix, so that the model has no hash.
Block ids are the pool's: device blocks 0..P-1, host blocks P..P+S-1; both tiers start with their
empty list in id order. A call that raises restores a copy of everything taken before it.

Readings of the rules where they leave room:

- An extra id of 0 says "none": tokens without extra ids match the same tokens with zeros.
- A host block that several requests of a batch hit counts as a host hit for each of them.
- A partial source costs a block only while nothing but partial matches of this batch hold it.
- A partial copy does not count as a use of its source.
- Every admission and prefetch applies expiries; append and rewind do when they take a block.
- Blocks whose ttl ends at the same moment expire in order of block id.
- Blocks taken by `append_tokens` are decode blocks, also after a rewind into the prompt.
- Full blocks of a prompt have their keys from admission on, decoded ones from `commit` on: before
  that, rewinding into one that a reader pins shortens it in place.
- A private copy made by `rewind` inherits priority and ttl of the block it copies.
- `rewind` goes through the sequences in order and fails if one must copy more than is listed and
  given back until then; sharing that ends within the call does not count.
- A tail that is still pinned when its sequence is released is not stored.
- `release(store=False)` forgets what a sequence computed on both tiers, also under a pin.
- "Forgotten" counts every content that a call leaves without a copy, whatever the reason, but not
  what a reset drops.
- `release(store=True)` publishes what waits for it front to back, then lets go tail first.
- A fork is not a request and not a use of its content. Of those that append to a block in one call, all but its last
  holder copy it, in the order of the call; pins alone do not make a copy.
- `reorder` lets go of what nobody goes on from with the last blocks first, and within a column in the order of the
  call.
- A reservation matches the last token too, and takes a row like a sequence. Its matches are not uses and
  count in no statistics of requests; a retention range applies to them.
- A reservation that was not committed before its deadline can only be aborted; it keeps its blocks until then.
- Committing a reservation publishes and releases as a sequence does. What an abort gives back empty goes
  to the front, tail first; what had matched goes to the back, tail first.
- With a window, the blocks that a prefix needs include its last one.
- `prefetch` looks at all that is cached of a prompt, or, where a window or recurrent states leave holes, at what an
  admission would hold.
- A commit publishes before it gives back what the window has passed, sequence by sequence, last block first.
- `offload` looks at each key by itself,
  and, as an explicit wish, heeds neither `offload_min_priority` nor `offload_min_reuse`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .admission import Seq
from .batches import EXPIRIES_PER_CALL
from .swaps import Swaps
from .tiers import (
    Block,
    Content,
    OutOfSequences,
    PoolBusy,
    ReservationExpired,
    Tier,
)


class Model(Swaps):
    """All public verbs, one block and one list operation at a time."""

    # -- growth --------------------------------------------------------------------------------

    def append_tokens(self, ids: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """Append `tokens[i]` to sequence `ids[i]`."""
        live = self._live(ids)
        need = self._growth(live, [len(new) for new in tokens])
        self.need_device(need, self.free("device"))
        if need:
            self.expire(self.clock(), EXPIRIES_PER_CALL)
        self._count("appended_tokens", sum(map(len, tokens)))
        for seq, new in zip(live, tokens, strict=True):
            if new and self._copies(seq, seq.blocks[-1].refs if seq.blocks else 0):
                seq.blocks[-1] = self._private_copy(seq.blocks[-1])
            for token in new:
                if len(seq.items) % self.T == 0:
                    self._open_column(seq)
                seq.items.append((token, 0))

    def never_fits(self, ids: Sequence[int], counts: Sequence[int]) -> bool:
        """Whether one of the sequences would not fit if nobody else held anything."""
        for seq, count in zip(self._live(ids), counts, strict=True):
            blocks = [block and replace(block, refs=1, pins=0) for block in seq.blocks]
            held = sum(block is not None for block in blocks)
            if held + self._growth([replace(seq, blocks=blocks)], [count]) > len(self.device.blocks):
                return True
        return False

    def _count(self, what: str, tokens: int) -> None:
        """Tokens of sequences, which all groups count but those for cross attention."""
        self.counts[what] += tokens if self.matches else 0

    def _open_column(self, seq: Seq) -> None:
        seq.blocks.append(self.take_device(*seq.decode))

    def commit(self, ids: Sequence[int], counts: Sequence[int] | None = None) -> None:
        live = self._live(ids)
        ends = [len(seq.items) for seq in live] if counts is None else counts
        for seq, end in zip(live, ends, strict=True):
            if not seq.committed <= end <= len(seq.items):
                raise ValueError(f"counts: {end}")
        for seq, end in zip(live, ends, strict=True):
            new = range(seq.committed // self.T, end // self.T)
            for i in new:
                self._name(seq, i)
            seq.committed = end
            self._publish_waiting(seq)
            twice = self.T * sum(self._waits(seq, i) for i in new)
            seq.recomputed += twice
            self.counts["recomputed_tokens"] += twice
            self._give_passed(seq)

    def _name(self, seq: Seq, i: int) -> None:
        block = seq.blocks[i]
        if block is not None and block.content is None:
            block.content = self._content(seq, i)

    def _give_passed(self, seq: Seq) -> None:
        for i in range(len(seq.blocks) - 1, -1, -1):
            block = seq.blocks[i]
            if block is not None and self._is_passed(seq, i):
                seq.blocks[i] = None
                self.drop_ref(block)
                self.counts["passed_blocks"] += 1

    def _is_passed(self, seq: Seq, i: int) -> bool:
        return not self.needs(i, seq.committed)

    def _content(self, seq: Seq, i: int) -> Content:
        return (seq.namespace, tuple(seq.items[: (i + 1) * self.T]))

    def _waits(self, seq: Seq, i: int) -> bool:
        """Whether a block could be published."""
        block = seq.blocks[i]
        return (
            not seq.private
            and block is not None
            and not block.indexed
            and block.content is not None
            and self.keeps(seq, i)
        )

    def _publish_waiting(self, seq: Seq) -> None:
        for i, block in enumerate(seq.blocks[: seq.committed // self.T]):
            if block is not None and self._waits(seq, i):
                self.publish(block)

    def keeps(self, seq: Seq, i: int) -> bool:
        """Whether a full block of a sequence is published."""
        return True

    def rewind(self, ids: Sequence[int], counts: Sequence[int]) -> None:
        live = self._live(ids)
        for seq, count in zip(live, counts, strict=True):
            if not 0 <= count <= len(seq.items):
                raise ValueError(f"counts: {count}")
        lengths = [len(seq.items) - count for seq, count in zip(live, counts, strict=True)]
        if self._rewind_need(live, lengths):
            self.expire(self.clock(), EXPIRIES_PER_CALL)
        for seq, length in zip(live, lengths, strict=True):
            self._rewind_one(seq, length)

    def _rewind_need(self, live: Sequence[Seq], lengths: Sequence[int]) -> int:
        """Blocks to be copied; those that are given back until one is needed count as free."""
        need, free = 0, self.free("device")
        for seq, length in zip(live, lengths, strict=True):
            if self.has_passed(seq, length):
                raise ValueError(f"counts: {length} tokens have been passed")
            _, go, written = self._cut(seq, length)
            free += sum(block.refs == 1 and block.pins == 0 for block in go)
            need += written is not None and is_shared(written)
            self.need_device(need, free)
        return need

    def has_passed(self, seq: Seq, length: int) -> bool:
        """Whether a block has gone back that a sequence of this length would need."""
        return any(block is None and self.needs(i, length) for i, block in enumerate(seq.blocks))

    def accept_drafts(self, ids: Sequence[int], drafts: Sequence[int], accepted: Sequence[Sequence[int]]) -> None:
        """Drafts that stay move in front, into blocks of the sequence's own; the others are rewound, first where
        nothing moves."""
        live, lengths, written = self._move_items(ids, drafts, accepted)
        if not any(written):
            self.rewind(ids, [len(seq.items) - length for seq, length in zip(live, lengths, strict=True)])
            return
        # What this call gives back does not count: tokens are moved out of it.
        need = 0
        for seq, columns, length in zip(live, written, lengths, strict=True):
            last = self._cut(seq, length)[2]
            need += sum(
                is_shared(block) for block in ([seq.blocks[i] for i in columns] if columns else filter(None, [last]))
            )
        self.need_device(need, self.free("device"))
        if need:
            self.expire(self.clock(), EXPIRIES_PER_CALL)
        self._own_columns(live, written)
        for seq, _, length in sorted(zip(live, written, lengths, strict=True), key=lambda each: bool(each[1])):
            self._rewind_one(seq, length)

    def _move_items(
        self, ids: Sequence[int], drafts: Sequence[int], accepted: Sequence[Sequence[int]]
    ) -> tuple[list[Seq], list[int], list[range]]:
        """Bring the tokens of drafts that stay in front; the sequences, the tokens they keep, and the columns that are
        written for that."""
        live = self._live(ids)
        for seq, count, path in zip(live, drafts, accepted, strict=True):
            if count > len(seq.items) - seq.committed or list(path) != sorted({i for i in path if 0 <= i < count}):
                raise ValueError(f"drafts: {count}, accepted: {path}")
        written = [self._written(seq, count, path) for seq, count, path in zip(live, drafts, accepted, strict=True)]
        lengths = [len(seq.items) - count + len(path) for seq, count, path in zip(live, drafts, accepted, strict=True)]
        for seq, count, path in zip(live, drafts, accepted, strict=True):
            base = len(seq.items) - count
            stay, go = [seq.items[base + i] for i in path], [seq.items[base + i] for i in range(count) if i not in path]
            seq.items[base:] = stay + go
        return live, lengths, written

    def _own_columns(self, live: Sequence[Seq], written: Sequence[range]) -> None:
        for seq, columns in zip(live, written, strict=True):
            for i in columns:
                block = seq.blocks[i]
                seq.blocks[i] = None if block is None else self._own(block)

    def _written(self, seq: Seq, count: int, path: Sequence[int]) -> range:
        """Columns into which accepted drafts are moved."""
        base, gap = len(seq.items) - count, 0
        while gap < len(path) and path[gap] == gap:
            gap += 1
        return range((base + gap) // self.T, self._ceil(base + len(path)) if gap < len(path) else 0)

    def _cut(self, seq: Seq, length: int) -> tuple[list[Block | None], list[Block], Block | None]:
        """What a rewind to this length leaves in the row, what it gives back, and the last block of the row if it will
        be written again."""
        stay, go = seq.blocks[: self._ceil(length)], seq.blocks[self._ceil(length) :]
        written = stay[-1] if length % self.T and length < len(seq.items) else None
        return stay, [block for block in go if block is not None], written

    def _rewind_one(self, seq: Seq, length: int) -> None:
        seq.blocks[:], go, written = self._cut(seq, length)
        for block in reversed(go):
            self.drop_ref(block, front=True)
        if written is not None:
            seq.blocks[-1] = self._own(written)
        self._count("dropped_tokens", len(seq.items) - length)
        seq.dropped += len(seq.items) - length
        seq.prompt = min(seq.prompt, length)
        del seq.items[length:]
        seq.committed = min(seq.committed, length)
        seq.reused = min(seq.reused, length // self.T)

    def _own(self, block: Block) -> Block:
        """A block that its sequence may write to: a copy where others, sequences or readers, hold it too."""
        if is_shared(block):
            return self._private_copy(block)
        if block.indexed:
            self.forget_device(block)
        block.content = None
        return block

    def _private_copy(self, block: Block) -> Block:
        copy = self.take_device(block.priority, block.ttl)
        self.drop_ref(block)
        self.counts["copied_blocks"] += 1
        return copy

    # -- forks ---------------------------------------------------------------------------------

    def fork(self, ids: Sequence[int], n: int) -> list[list[int]]:
        live = self._live(ids)
        if len(self.sequences) + len(self.swapped) + len(self.reservations) + n * len(live) > self.max_sequences:
            raise OutOfSequences(n * len(live))
        new = []
        for seq in live:
            new.append(list(range(self.next_id, self.next_id + n)))
            self.next_id += n
            for i in new[-1]:
                self.sequences[i] = replace(seq, items=[*seq.items], blocks=[*seq.blocks])
                for block in filter(None, seq.blocks):
                    block.refs += 1
        return new

    def reorder(self, ids: Sequence[int], parents: Sequence[int], *, store: bool = False) -> None:
        """All sequences get their new blocks, then those of before are let go of, the last column first."""
        live = self._live(ids)
        dropped = [place for place in range(len(ids)) if place not in parents]
        for place in dropped:
            if store:
                self._publish_waiting(live[place])
        new = [replace(live[p], items=[*live[p].items], blocks=[*live[p].blocks]) for p in parents]
        for block in [block for seq in new for block in seq.blocks if block is not None]:
            block.refs += 1
        for index in range(max(len(seq.blocks) for seq in live) - 1, -1, -1):
            for seq in live:
                if index < len(seq.blocks) and seq.blocks[index] is not None:
                    self._release_block(seq, index, store)
        self.sequences.update(zip(ids, new, strict=True))

    def release(self, ids: Sequence[int], *, store: bool = True) -> None:
        away = [i for i in ids if i in self.swapped]
        self._live([i for i in ids if i not in away])
        for i in away:
            self._give_up(self.swapped.pop(i), store)
        for i in ids:
            if i in away:
                continue
            seq = self.sequences[i]
            if store:
                self._publish_waiting(seq)
            for index in range(len(seq.blocks) - 1, -1, -1):
                if seq.blocks[index] is not None:
                    self._release_block(seq, index, store)
            del self.sequences[i]

    def _release_block(self, seq: Seq, index: int, store: bool) -> None:
        block = seq.blocks[index]
        start = index * self.T
        tail = tuple(seq.items[start : min(seq.committed, start + self.T)])
        block.refs -= 1
        if not store and index >= seq.reused and block.refs == 0 and block.indexed:
            self.forget_everywhere(block)
        if block.held:
            return
        if store and not seq.private and self.partial_reuse and 0 < len(tail) < self.T and not block.indexed:
            self.store_tail(block, (seq.namespace, tuple(seq.items[:start])), tail)
        self.shelve(block)

    # -- reservations --------------------------------------------------------------------------

    def _reserved(self, reservation: int) -> Seq:
        if reservation not in self.reservations:
            raise ReservationExpired(reservation)
        return self.reservations[reservation]

    @property
    def overdue(self) -> set[int]:
        """Open reservations whose deadline has passed."""
        now = self.clock()
        return {i for i, seq in self.reservations.items() if seq.deadline is not None and seq.deadline <= now}

    def commit_reserved(self, reservation: int, count: int) -> None:
        seq = self._reserved(reservation)
        if reservation in self.overdue:
            raise ReservationExpired(reservation)
        if not seq.cached <= count <= len(seq.items):
            raise ValueError(f"tokens: {count}")
        self.sequences[reservation] = self.reservations.pop(reservation)
        self.commit([reservation], [count])
        self.release([reservation])

    def abort_reserved(self, reservation: int) -> None:
        seq = self._reserved(reservation)
        del self.reservations[reservation]
        for index in range(len(seq.blocks) - 1, -1, -1):
            if seq.blocks[index] is not None:
                self.drop_ref(seq.blocks[index], front=index >= seq.reused)

    # -- leases --------------------------------------------------------------------------------

    def revoke(self, owner: str) -> int:
        mine = [lease for lease, held in self.leases.items() if held.owner == owner]
        for lease in mine:
            self.close_lease(lease)
        loading = [i for i, seq in self.reservations.items() if seq.owner == owner]
        for reservation in loading:
            self.abort_reserved(reservation)
        return len(mine) + len(loading)

    # -- the whole pool ------------------------------------------------------------------------

    def refresh(self, now_ms: int | None = None) -> int:
        return self.expire(self.clock() if now_ms is None else now_ms)

    def reset(self, force: bool = False) -> None:
        """Drop all content; pinned blocks are empty once the last pin is gone."""
        if (self.sequences or self.swapped or self.reservations) and not force:
            raise PoolBusy(len(self.sequences))
        self.sequences.clear()
        self.swapped.clear()
        self.reservations.clear()
        self.rows.clear()
        self.children.clear()
        for tier in (self.device, self.host):
            tier.clear_lists()
            for block in tier.blocks.values():
                block.refs = 0
                block.blank()
                self.shelve(block)

    def check(self) -> None:
        """The model's own invariants."""
        for tier in (self.device, self.host):
            tier.check()
            self._check_holds(tier)
        for row in self.rows.values():
            assert row.device is not None or row.host is not None, row
            assert all(b.indexed for b in (row.device, row.host) if b is not None), row
        for bucket in self.children.values():
            assert all(child.content in self.rows for child in bucket if child.block is None)

    def _check_holds(self, tier: Tier) -> None:
        named = [
            b.id
            for held in (self.sequences, self.swapped, self.reservations)
            for seq in held.values()
            for b in seq.blocks
            if b is not None
        ]
        pinned = [b.id for lease in self.leases.values() for b in lease.blocks]
        for block in tier.blocks.values():
            assert block.refs == named.count(block.id), block
            assert block.pins == pinned.count(block.id), block


def is_shared(block: Block) -> bool:
    """Whether others, sequences or readers, hold a block of a sequence too."""
    return block.refs + block.pins > 1
