"""The model's admission: matching, claims, partial sources when blocks are short, retention."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from .store import Row, Store
from .tiers import (
    DEFAULT_PRIORITY,
    Block,
    Item,
    Lease,
    Namespace,
    OutOfBlocks,
    OutOfSequences,
    Prompt,
    UnknownSequence,
)

EXPIRIES_PER_CALL = 64
Range = tuple[int, "int | None", int, "int | None"]
"""(start, end or None, priority, ttl in ms or None)."""


@dataclass(frozen=True)
class Match:
    """Reusable tokens of a prompt, by where they are."""

    device_tokens: int
    host_tokens: int
    partial_tokens: int

    @property
    def tokens(self) -> int:
        return self.device_tokens + self.host_tokens + self.partial_tokens


@dataclass(frozen=True)
class Admitted:
    """What one admitted request was told."""

    id: int
    match: Match
    missed_blocks: int


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
    """Of a reservation."""


@dataclass
class Plan:
    """One request between matching and admission."""

    prompt: Prompt
    ranges: list[Range]
    rows: list[Row | None]
    source: Block | None
    partial: int
    from_host: list[bool] = field(default_factory=list)
    taken: Block | None = None
    loads: bool = False
    """It is a reservation: no request, whose uses count."""


class Admission(Store):
    """Matching and admission on top of the store."""

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
        self.reservations: dict[int, Seq] = {}
        self.leases: dict[int, Lease] = {}
        self.next_id = 0
        self.next_lease = 0

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        saved = pickle.dumps({k: v for k, v in self.__dict__.items() if k != "clock"})
        try:
            yield
        except Exception:
            self.__dict__.update(pickle.loads(saved))
            raise

    # -- looking -------------------------------------------------------------------------------

    def match_prefix(self, prompt: Prompt) -> Match:
        walk = self.walk(prompt)
        host = sum(self.T for row in walk.rows if row is not None and row.device is None)
        return Match(len(walk.rows) * self.T - host, host, walk.partial)

    def blocks_needed(
        self, prompt: Prompt | None = None, *, sequences: Sequence[int] = (), new_tokens: int = 0
    ) -> int:
        need = 0
        if prompt is not None:
            rows = self.walk(prompt).rows
            hits = [row.device for row in rows if row is not None and row.device is not None]
            need += self._ceil(len(prompt.tokens) + new_tokens) - sum(b.held for b in hits) - rows.count(None)
        live = self._live(sequences)
        return need + self._growth(live, [new_tokens] * len(live))

    def _growth(self, live: Sequence[Seq], counts: Sequence[int]) -> int:
        """Blocks that growing these sequences takes: new ones, and copies of a last one that others go on holding."""
        need, left = 0, {block.id: block.refs for seq in live for block in seq.blocks if block is not None}
        for seq, count in zip(live, counts, strict=True):
            need += self._ceil(len(seq.items) + count) - len(seq.blocks)
            if count and len(seq.items) % self.T and left[seq.blocks[-1].id] > 1:
                left[seq.blocks[-1].id] -= 1
                need += 1
        return need

    def evictable_if_released(self, ids: Sequence[int]) -> int:
        named = [block for seq in self._live(ids) for block in seq.blocks if block is not None]
        unique = {block.id: block for block in named}
        return sum(
            block.pins == 0 and block.refs == sum(other is block for other in named)
            for block in unique.values()
        )

    def _ceil(self, tokens: int) -> int:
        return -(-tokens // self.T)

    def _live(self, ids: Sequence[int]) -> list[Seq]:
        for i in ids:
            if i not in self.sequences:
                raise UnknownSequence(i)
        if len(set(ids)) < len(ids):
            raise ValueError(f"duplicate ids: {ids}")
        return [self.sequences[i] for i in ids]

    # -- admission -----------------------------------------------------------------------------

    def add_sequence(self, prompt: Prompt, **options: object) -> Admitted:
        ranges = options.pop("retention", None)
        retention = None if ranges is None else [ranges]
        return self.add_sequence_batch([prompt], retention=retention, **options)[0]  # type: ignore[arg-type]

    def add_sequence_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        retention: Sequence[Sequence[Range] | None] | None = None,
        decode_priority: int = DEFAULT_PRIORITY,
        decode_ttl_ms: int | None = None,
        allow_partial_batch: bool = False,
    ) -> list[Admitted]:
        if any(not prompt.tokens for prompt in prompts):
            raise ValueError("empty prompt")
        given = retention or [None] * len(prompts)
        ranges = [check_ranges(r or ()) for r in given]
        decode = (decode_priority, decode_ttl_ms)
        heads = range(len(prompts), -1, -1) if allow_partial_batch else [len(prompts)]
        for count in heads:
            try:
                with self._all_or_nothing():
                    return self._admit(prompts[:count], ranges[:count], decode)
            except (OutOfBlocks, OutOfSequences):
                if count == heads[-1]:
                    raise
        raise AssertionError("an empty head always fits")

    def reserve(self, prompt: Prompt, *, owner: str = "", retention: Sequence[Range] | None = None) -> Admitted:
        ranges = [check_ranges(retention or ())]
        with self._all_or_nothing():
            (admitted,) = self._admit([prompt], ranges, (DEFAULT_PRIORITY, None), loads=True)
        self.reservations[admitted.id] = self.sequences.pop(admitted.id)
        self.reservations[admitted.id].owner = owner
        return admitted

    def _admit(
        self, prompts: Sequence[Prompt], ranges: Sequence[list[Range]], decode: tuple[int, int | None], loads: bool = False
    ) -> list[Admitted]:
        if len(self.sequences) + len(self.reservations) + len(prompts) > self.max_sequences:
            raise OutOfSequences(len(prompts))
        plans = []
        for prompt, own in zip(prompts, ranges, strict=True):
            walk = self.walk(prompt, len(prompt.tokens) if loads else None)
            plan = Plan(prompt, own, walk.rows, walk.source, walk.partial, loads=loads)
            plans.append(plan)
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
        self._fit(plans)
        if plans:
            self.expire(self.clock(), EXPIRIES_PER_CALL)
        onboarded: list[Block] = []
        admitted = [self._build(plan, decode, onboarded) for plan in plans]
        hits = [h for p in plans for h, was in zip(p.rows, p.from_host, strict=True) if was]
        for source in onboarded:
            for row in hits:
                if row is not None and row.host is source:
                    self._let_go(source)
        for plan in plans:
            if plan.source is not None:
                self._let_go(plan.source)
        return admitted

    def _hold(self, block: Block | None) -> None:
        if block is not None:
            block.hold += 1
            self.tier(block).unlist(block)

    def _let_go(self, block: Block) -> None:
        block.hold -= 1
        self.shelve(block)

    def _fit(self, plans: list[Plan]) -> None:
        """Drop or take over partial sources until the batch fits."""
        onboards = {row.host.id for p in plans for row in p.rows if row is not None and row.device is None and row.host}
        fresh = sum(self._ceil(len(p.prompt.tokens)) - len(p.rows) for p in plans)
        need = fresh + len(onboards)
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

    def _build(self, plan: Plan, decode: tuple[int, int | None], onboarded: list[Block]) -> Admitted:
        """Give one request its blocks, front to back."""
        prompt, blocks = plan.prompt, []
        for row in plan.rows:
            if row is None:
                blocks.append(None)
                continue
            blocks.append(self._hit(row, onboarded))
            blocks[-1].uses += not plan.loads
            ranged = range_of((len(blocks) - 1) * self.T, plan.ranges)
            if ranged is not None:
                blocks[-1].priority, blocks[-1].ttl = ranged
        full = len(blocks)
        for i in range(full, self._ceil(len(prompt.tokens))):
            priority, ttl = range_of(i * self.T, plan.ranges) or (DEFAULT_PRIORITY, None)
            if i == full and plan.taken is not None:
                blocks.append(self._take_over(plan.taken, priority, ttl))
            else:
                blocks.append(self.take_device(priority, ttl))
            if (i + 1) * self.T <= len(prompt.tokens):
                blocks[i].content = (prompt.namespace, prompt.items[: (i + 1) * self.T])
        host = sum(plan.from_host)
        match = Match((full - host) * self.T, host * self.T, plan.partial)
        self._count_admission(plan, match, missed=len(blocks) - full)
        new_id = self.next_id
        self.next_id += 1
        items = list(prompt.items)
        self.sequences[new_id] = Seq(
            prompt.namespace, items, blocks, match.tokens, full, match.tokens, decode
        )
        return Admitted(new_id, match, len(blocks) - full)

    def _hit(self, row: Row, onboarded: list[Block]) -> Block:
        """The device block of a full hit; content that only the host has comes back first."""
        if row.device is None:
            self._onboard(row)
            assert row.host is not None
            onboarded.append(row.host)
        elif any(row.host is source for source in onboarded):
            row.device.refs += 1
        assert row.device is not None
        return row.device

    def _onboard(self, row: Row) -> None:
        source = row.host
        assert source is not None and source.content is not None
        block = self.take_device(source.priority, source.ttl)
        block.content, block.indexed, block.uses = source.content, True, source.uses
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
        counts["copied_blocks"] += plan.source is not None
        if plan.loads:
            return
        counts["prompt_tokens"] += len(plan.prompt.tokens)
        counts["reused_device_tokens"] += match.device_tokens
        counts["reused_host_tokens"] += match.host_tokens
        counts["partial_tokens"] += match.partial_tokens
        counts["reused_device_blocks"] += match.device_tokens // self.T
        counts["reused_host_blocks"] += match.host_tokens // self.T
        counts["partial_blocks"] += plan.partial > 0
        counts["missed_blocks"] += missed


def check_ranges(ranges: Sequence[Range]) -> list[Range]:
    """The ranges in order of their start; ValueError where they overlap or make no sense."""
    ordered = sorted(ranges, key=lambda r: r[0])
    for place, (start, end, priority, ttl) in enumerate(ordered):
        last = place == len(ordered) - 1
        if start < 0 or (end is not None and end <= start) or (end is None and not last):
            raise ValueError(f"retention: {(start, end)}")
        if end is not None and not last and ordered[place + 1][0] < end:
            raise ValueError(f"retention: overlap at {end}")
        if not 0 <= priority <= 100 or (ttl is not None and ttl < 1):
            raise ValueError(f"retention: {(priority, ttl)}")
    return ordered


def range_of(position: int, ranges: Sequence[Range]) -> tuple[int, int | None] | None:
    """Priority and ttl that the ranges give a block whose first token is at `position`."""
    for start, end, priority, ttl in ranges:
        if start <= position and (end is None or position < end):
            return priority, ttl
    return None


def _ours_alone(source: Block) -> bool:
    """Whether only partial matches of the batch being admitted hold this device block."""
    return source.tier == "device" and source.refs == 0 and source.pins == 0
