"""The model's admission: matching, claims, partial sources when blocks are short, retention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .batches import Admitted, Batches, Match, Plan, range_of
from .store import Row, Store
from .tiers import DEFAULT_PRIORITY, Block, Item, Lease, Namespace, Prompt, UnknownSequence


@dataclass
class Seq:
    """A live sequence."""

    namespace: Namespace
    items: list[Item]
    blocks: list[Block | None]
    """None where a window has passed them."""
    committed: int
    reused: int
    cached: int
    decode: tuple[int, int | None]
    owner: str = ""
    """Owner of a reservation."""
    deadline: int | None = None
    """Deadline of a reservation: it is to be committed before."""
    kept: int = -1
    """The last column that its prompt can reuse."""
    private: bool = False
    """It publishes nothing."""
    prompt: int = 0
    """Tokens that it was added with; the next ones are figures of it, too."""
    from_host: int = 0
    dropped: int = 0
    recomputed: int = 0


class Admission(Batches, Store):
    """Matching and admission on top of the store, in one group."""

    def __init__(
        self,
        *,
        tokens_per_block: int,
        device_blocks: int,
        host_blocks: int = 0,
        max_sequences: int = 256,
        partial_reuse: bool = True,
        offload_min_priority: int = 30,
        offload_min_reuse: int = 1,
        clock: Callable[[], int] = lambda: 0,
        window: int | None = None,
        sinks: int = 0,
    ) -> None:
        super().__init__(
            tokens_per_block,
            device_blocks,
            host_blocks,
            partial_reuse,
            offload_min_priority,
            offload_min_reuse,
            clock,
            window,
            sinks,
        )
        self.max_sequences = max_sequences
        self.sequences: dict[int, Seq] = {}
        self.swapped: dict[int, Seq] = {}
        self.reservations: dict[int, Seq] = {}
        self.leases: dict[int, Lease] = {}
        self.next_id = 0
        self.next_lease = 0

    @property
    def groups(self) -> Sequence[Admission]:  # type: ignore[override]
        return [self]

    # -- looking -------------------------------------------------------------------------------

    def blocks_needed(self, prompt: Prompt | None = None, *, sequences: Sequence[int] = (), new_tokens: int = 0) -> int:
        if prompt is not None:
            return self.needs_of_prompt(prompt, new_tokens)[0]
        live = self._live(sequences)
        return self._growth(live, [new_tokens] * len(live))

    def _growth(self, live: Sequence[Seq], counts: Sequence[int]) -> int:
        """Blocks that growing these sequences takes: new ones, and copies of a last one that others go on holding."""
        need, left = 0, {block.id: block.refs for seq in live for block in seq.blocks if block is not None}
        for seq, count in zip(live, counts, strict=True):
            need += self._ceil(len(seq.items) + count) - len(seq.blocks)
            if count and self._copies(seq, left[seq.blocks[-1].id] if seq.blocks else 0):
                left[seq.blocks[-1].id] -= 1
                need += 1
        return need

    def _copies(self, seq: Seq, refs: int) -> bool:
        """Whether a sequence must copy its last block, which that many hold, before the next token."""
        return len(seq.items) % self.T > 0 and refs > 1

    def evictable_after_release(self, ids: Sequence[int]) -> int:
        named = [block for seq in self._live(ids) for block in seq.blocks if block is not None]
        unique = {block.id: block for block in named}
        return sum(
            block.pins == 0 and block.refs == sum(other is block for other in named) for block in unique.values()
        )

    def row(self, number: int) -> Seq:
        """A sequence, which may be swapped out, or a reservation."""
        return next(held[number] for held in (self.sequences, self.swapped, self.reservations) if number in held)

    def _ceil(self, tokens: int) -> int:
        return -(-tokens // self.T)

    def _live(self, ids: Sequence[int], *, away: bool = False) -> list[Seq]:
        """Sequences that run, or that are swapped out."""
        known, others = (self.swapped, self.sequences) if away else (self.sequences, self.swapped)
        for i in ids:
            if i in others:
                raise ValueError(f"swapped out, or not: {i}")
            if i not in known:
                raise UnknownSequence(i)
        if len(set(ids)) < len(ids):
            raise ValueError(f"duplicate ids: {ids}")
        return [known[i] for i in ids]

    def will_find(self, sequence: int, column: int) -> bool:
        """Whether others can go on from a column of a sequence once that is committed."""
        return True

    # -- admission -----------------------------------------------------------------------------

    def new_columns(self, plan: Plan, tokens: int | None = None) -> Sequence[int]:
        """Columns that take a block beside what is reused, for a prompt or for that many tokens."""
        return range(plan.full, self._ceil(len(plan.prompt.tokens) if tokens is None else tokens))

    def claim(self, plans: Sequence[Plan]) -> None:
        """Hold what all requests of a batch match."""
        for plan in plans:
            for row in plan.rows:
                plan.from_host.append(row is not None and row.device is None)
                if row is None:
                    continue
                if row.device is not None:
                    row.device.refs += 1
                    self.device.unlist(row.device)
                else:
                    self._hold(row.host)
            self._hold(plan.source)

    def build_all(self, plans: Sequence[Plan], decode: tuple[int, int | None]) -> list[Admitted]:
        self.overflow = self._overflow(plans)
        admitted = [self._build(plan, decode, plans) for plan in plans]
        self.overflow = 0
        for plan in plans:
            if plan.source is not None:
                self._let_go(plan.source)
        return admitted

    def _overflow(self, plans: Sequence[Plan]) -> int:
        """Content that the host forgets for a batch that onboards: what goes down and finds no block."""
        onboards = _onboards(plans)
        takes = sum(len(self.new_columns(p)) for p in plans) + onboards - sum(p.taken is not None for p in plans)
        room = len(self.host.empty) + len(self.host.redundant) + onboards
        return max(0, sum(map(self.goes_down, self.device.victims()[:takes])) - room) if onboards else 0

    def _hold(self, block: Block | None) -> None:
        if block is not None:
            block.hold += 1
            self.tier(block).unlist(block)

    def _let_go(self, block: Block) -> None:
        block.hold -= 1
        self.shelve(block)

    def fit(self, plans: Sequence[Plan]) -> None:
        """Drop or take over partial sources until the batch fits."""
        need = sum(len(self.new_columns(p)) for p in plans) + _onboards(plans)
        free = self.free("device")
        spare = {p.source.id for p in plans if p.source is not None and _ours_alone(p.source)}
        self.need_device(need, free + len(spare))
        for plan in reversed(plans):
            source = plan.source
            if need > free and source is not None and _ours_alone(source):
                source.hold -= 1
                plan.source = None
                if source.hold:
                    plan.partial = 0
                else:
                    plan.taken = source
                    need -= 1

    def _build(self, plan: Plan, decode: tuple[int, int | None], plans: Sequence[Plan]) -> Admitted:
        """Give one request its blocks, front to back."""
        prompt, blocks = plan.prompt, list[Block | None]()
        for row in plan.rows:
            hit = None if row is None else self._hit(row, plans)
            blocks.append(hit)
            if hit is not None:
                hit.uses += not plan.loads
                hit.priority, hit.ttl = range_of((len(blocks) - 1) * self.T, plan.ranges) or (hit.priority, hit.ttl)
        new = self.new_columns(plan)
        for i in new:
            blocks += [None] * (i - len(blocks))
            priority, ttl = range_of(i * self.T, plan.ranges) or (DEFAULT_PRIORITY, None)
            if i == plan.full and plan.taken is not None:
                blocks.append(self._take_over(plan.taken, priority, ttl))
            else:
                blocks.append(self.take_device(priority, ttl))
            self._name_admitted(plan, i, blocks[i])
        host = sum(plan.from_host)
        match = Match((plan.full - host) * self.T, host * self.T, plan.partial)
        missed = self._ceil(len(prompt.tokens)) - plan.full
        self._count_admission(plan, match, missed)
        new_id = self.next_id
        self.next_id += 1
        items = list(prompt.items)
        self.sequences[new_id] = Seq(
            prompt.namespace,
            items,
            blocks,
            match.tokens,
            plan.full,
            match.tokens,
            decode,
            kept=plan.usable // self.T - 1,
            private=not prompt.publish,
            prompt=len(items),
            from_host=match.host_tokens,
        )
        return Admitted(new_id, match, missed)

    def _name_admitted(self, plan: Plan, i: int, block: Block | None) -> None:
        """Full blocks of a prompt have their content from the first."""
        if block is not None and (i + 1) * self.T <= len(plan.prompt.tokens):
            block.content = (plan.prompt.namespace, plan.prompt.items[: (i + 1) * self.T])

    def _hit(self, row: Row, plans: Sequence[Plan]) -> Block:
        """The device block of a full hit. What only the host has comes back first, for all that hold it."""
        if row.device is None:
            self._onboard(row)
            host = row.host
            assert row.device is not None and host is not None
            row.device.refs = sum(other is row for plan in plans for other in plan.rows)
            host.hold -= row.device.refs
            for plan in plans:
                if plan.source is host:
                    host.hold, row.device.hold, plan.source = host.hold - 1, row.device.hold + 1, row.device
            self.shelve(host)
        return row.device

    def _onboard(self, row: Row) -> None:
        source = row.host
        assert source is not None and source.content is not None
        block = self.take_device(source.priority, source.ttl)
        block.content, block.indexed, block.uses = source.content, True, source.uses
        block.saved = source.saved
        row.device = block
        self.counts["onboarded_blocks"] += 1

    def _take_over(self, block: Block, priority: int, ttl: int | None) -> Block:
        """The request's own copy target is the partial source itself, whose key is forgotten."""
        if block.tail:
            self.forget_tail(block)
        else:
            self.forget_device(block)
        block.blank()
        block.refs, block.priority, block.ttl = 1, priority, ttl
        return block

    def _count_admission(self, plan: Plan, match: Match, missed: int) -> None:
        counts = self.counts
        counts["copied_blocks"] += plan.source is not None and plan.partial > 0
        if plan.loads:
            return
        if not plan.prompt.reuse:
            counts["bypassed_tokens"] += len(plan.prompt.tokens)
            return
        counts["prompt_tokens"] += len(plan.prompt.tokens)
        counts["reused_device_tokens"] += match.device_tokens
        counts["reused_host_tokens"] += match.host_tokens
        counts["partial_tokens"] += match.partial_tokens
        counts["reused_device_blocks"] += match.device_tokens // self.T
        counts["reused_host_blocks"] += match.host_tokens // self.T
        counts["partial_blocks"] += plan.partial > 0
        counts["missed_blocks"] += missed


def _onboards(plans: Sequence[Plan]) -> int:
    """Host blocks that a batch needs device blocks for."""
    hits = [row for plan in plans for row in plan.rows if row is not None and row.device is None]
    return len({row.host.id for row in hits if row.host is not None})


def _ours_alone(source: Block) -> bool:
    """Whether only partial matches of the batch being admitted hold this device block."""
    return source.tier == "device" and source.refs == 0 and source.pins == 0
