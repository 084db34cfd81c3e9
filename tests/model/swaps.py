"""What the model does with sequences that leave the device whole, and wait on the host.

Readings of the rules where they leave room:

- A sequence takes along the host copies of what is cached, and blocks of its own for all else. Those that several
  sequences of one call share are copied once; where they do not leave, or come back, in one call, each has its own
  from then on.
- Any host block that nobody holds may be taken for that, whatever its priority.
- Both calls apply expiries, and are not uses of any content. They publish nothing but copies of what is published.
- `release` takes sequences that are swapped out before the others. What waited to be published is, where it is cached
  nowhere; an unfull end is not stored.
- `release(store=False)` forgets no content whose other copy a sequence holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from .admission import Seq
from .batches import EXPIRIES_PER_CALL
from .holds import Holds
from .tiers import Block, OutOfBlocks


class Swaps(Holds):
    """``swapped`` are sequences whose blocks are host blocks."""

    def swap_out(self, ids: Sequence[int]) -> int:
        copied = self._change_tier(self._live(ids), "host")
        self.swapped.update((i, self.sequences.pop(i)) for i in ids)
        return copied

    def resume(self, ids: Sequence[int]) -> int:
        copied = self._change_tier(self._live(ids, away=True), "device")
        self.sequences.update((i, self.swapped.pop(i)) for i in ids)
        return copied

    def _change_tier(self, live: Sequence[Seq], tier: str) -> int:
        """Copy what the tier lacks of these sequences, and give back what they had. How many blocks were copied."""
        left = {block.id: block for seq in live for block in seq.blocks if block is not None}
        copies = {
            i: getattr(self.rows[block.content], tier) if block.indexed and block.content else None
            for i, block in left.items()
        }
        for copy in filter(None, copies.values()):
            self.tier(copy).unlist(copy)
        lacking = [i for i, copy in copies.items() if copy is None]
        if len(lacking) > self.free(tier):
            raise OutOfBlocks(f"{len(lacking)} {tier} blocks")
        self.expire(self.clock(), EXPIRIES_PER_CALL)
        for i in lacking:
            copies[i] = self._copy_to(tier, left[i])
        for seq in live:
            for block in filter(None, seq.blocks):
                copies[block.id].refs += 1
        for seq in live:
            here, seq.blocks = seq.blocks, [None if block is None else copies[block.id] for block in seq.blocks]
            for block in filter(None, reversed(here)):
                self.drop_ref(block)
        return len(lacking)

    def _copy_to(self, tier: str, block: Block) -> Block:
        """A block of the tier that is what this one is; it is not listed, and nobody holds it yet."""
        if tier == "device":
            copy = self.take_device(block.priority, block.ttl)
        else:
            copy = self.take_host(self.host.victims()[0])
        copy.refs, copy.content, copy.indexed = 0, block.content, block.indexed
        copy.priority, copy.ttl, copy.uses, copy.saved = block.priority, block.ttl, block.uses, block.saved
        if block.indexed and block.content:
            setattr(self.rows[block.content], tier, copy)
        self.counts["onboarded_blocks" if tier == "device" else "offloaded_blocks"] += 1
        return copy

    def _give_up(self, seq: Seq, store: bool) -> None:
        """End a sequence that is swapped out."""
        for i, block in enumerate(seq.blocks[: seq.committed // self.T] if store and not seq.private else ()):
            if block is not None and not block.indexed and block.content is not None and self.keeps(seq, i):
                self._publish_on_host(block)
        for i in range(len(seq.blocks) - 1, -1, -1):
            block = seq.blocks[i]
            if block is None:
                continue
            block.refs -= 1
            if not store and i >= seq.reused and block.refs == 0 and block.indexed:
                self.forget_everywhere(block)
            self.shelve(block)

    def _publish_on_host(self, block: Block) -> None:
        assert block.content is not None
        if block.content in self.rows:
            return
        self.new_row(block.content).host = block
        block.indexed, block.uses, block.saved = True, max(block.uses, 1), False
