"""The model's decisions over all groups of a pool: how much of a prompt every group can reuse, and whether a batch fits
in each."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .store import Row, Walk, common_items
from .tiers import DEFAULT_PRIORITY, Block, BlockNotFound, Content, NeverFits, OutOfBlocks, OutOfSequences, Prompt

if TYPE_CHECKING:
    from .admission import Admission

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
    """What was returned for one admitted request."""

    id: int
    match: Match
    missed_blocks: int


@dataclass(frozen=True)
class Planned:
    """What an admission would do with the head of a batch."""

    admitted: list[Admitted | None]
    blocks: list[int]
    """Free device blocks that it takes, per group."""
    computing: list[tuple[set[int], int]]
    """For each prompt: the sequences of which one computes most of what it lacks, and the tokens to reuse then."""


class _Undone(Exception):
    """A plan is made, and taken back."""


@dataclass
class Plan:
    """One request in one group, between matching and admission."""

    prompt: Prompt
    ranges: list[Range]
    rows: list[Row | None]
    source: Block | None
    partial: int
    full: int
    """Blocks that all groups reuse."""
    usable: int
    encoder_tokens: int = 0
    from_host: list[bool] = field(default_factory=list)
    taken: Block | None = None
    loads: bool = False
    """It is a reservation: no request, whose uses count."""


@contextmanager
def all_or_nothing(groups: Sequence[Admission]) -> Iterator[None]:
    """Whatever raises leaves all groups as they were."""
    saved = pickle.dumps(
        [{name: value for name, value in group.__dict__.items() if name != "clock"} for group in groups]
    )
    try:
        yield
    except Exception:
        for group, before in zip(groups, pickle.loads(saved), strict=True):
            group.__dict__.update(before)
        raise


class Batches:
    """What all groups decide together; a model of one group is its own only one."""

    groups: Sequence[Admission]

    # -- looking -------------------------------------------------------------------------------

    def look(self, prompt: Prompt, usable: int | None = None) -> tuple[int, list[Walk]]:
        """The full blocks that every group can reuse, and what each has of them; by default the last token is not
        matched.

        Each answer of a group is a bound for the next one, until a whole round changes nothing.
        """
        usable = max(len(prompt.tokens) - 1, 0) if usable is None else usable
        usable = usable if prompt.reuse else 0
        limit, before = usable // self.groups[0].T, -1
        while limit != before:
            before = limit
            for group in self.groups:
                limit = group.longest(prompt, limit)
        walks = [group.walk(prompt, usable, limit) for group in self.groups]
        partial = min(walk.partial for walk, group in zip(walks, self.groups, strict=True) if group.matches)
        for walk in walks:
            walk.partial, walk.source = partial, walk.source if partial else None
        return limit, walks

    def match_prefix(self, prompt: Prompt) -> Match:
        full, walks = self.look(prompt)
        width = self.groups[0].T
        host = width * max(sum(row is not None and row.device is None for row in walk.rows) for walk in walks)
        return Match(full * width - host, host, walks[0].partial)

    def needs_of_prompt(self, prompt: Prompt, new_tokens: int = 0, encoder_tokens: int = 0) -> list[int]:
        """Free device blocks that a prompt and ``new_tokens`` more take, per group."""
        full, walks = self.look(prompt)
        tokens = len(prompt.tokens)
        needs = []
        for group, walk in zip(self.groups, walks, strict=True):
            plan = Plan(prompt, [], walk.rows, None, 0, full, max(tokens - 1, 0), encoder_tokens)
            held = sum(row is not None and row.device is not None and row.device.held for row in walk.rows)
            needs.append(
                len(group.new_columns(plan, tokens + new_tokens)) + sum(row is not None for row in walk.rows) - held
            )
        return needs

    def missing_blocks(self, prompt: Prompt, there: Sequence[Sequence[bool]]) -> tuple[int, list[list[int]]]:
        """The longest prefix that all groups could reuse with what is ``there`` besides what is cached, tried one after
        the other, and what each group lacks for it; nothing if it is not longer than with what is cached."""
        width = self.groups[0].T
        here = [[content in group.rows for content in group.contents(prompt)] for group in self.groups]

        def reach(have: Sequence[Sequence[bool]]) -> int:
            limit = max(len(prompt.tokens) - 1, 0) // width if prompt.reuse else 0
            for count in range(limit, -1, -1):
                needed = [[g for g in range(count) if group.needs(g, count * width)] for group in self.groups]
                if all(
                    all(available[i] for i in places) or not group.matches
                    for group, available, places in zip(self.groups, have, needed, strict=True)
                ):
                    return count
            raise AssertionError("an empty prefix lacks nothing")

        both = [[a or b for a, b in zip(cached, other, strict=True)] for cached, other in zip(here, there, strict=True)]
        most = reach(both)
        if most == reach(here):
            return most * width, [[] for _ in self.groups]
        return most * width, [
            [i for i in range(most) if group.matches and group.needs(i, most * width) and not cached[i]]
            for group, cached in zip(self.groups, here, strict=True)
        ]

    # -- tiers and pins ------------------------------------------------------------------------

    def prefetch(self, prompt: Prompt) -> int:
        holes = any(group.leaves_holes for group in self.groups)
        _, walks = self.look(prompt, max(len(prompt.tokens) - holes, 0))
        return sum(group.bring(walk.rows) for group, walk in zip(self.groups, walks, strict=True))

    def pin(self, contents: Sequence[Content], *, owner: str = "", tier: str | None = None) -> int:
        """Pin the host copy of each content, or its device block (`tier` asks for one), in every group that has it;
        lease id.

        Groups that need all of a prefix must have it.
        """
        copies_by_group = [[group.copy_of(content, tier) for content in contents] for group in self.groups]
        whole = [group.matches and not group.leaves_holes for group in self.groups]
        for content, *copies in zip(contents, *copies_by_group, strict=True):
            if not any(copies) or any(copy is None for copy, needed in zip(copies, whole, strict=True) if needed):
                raise BlockNotFound(content)
        return self._lease(copies_by_group, owner)

    def find_and_pin_host(self, content: Content, *, owner: str = "") -> int | None:
        try:
            return self.pin([content], owner=owner, tier="host")
        except BlockNotFound:
            return None

    def pin_blocks(self, ids: Sequence[int], *, owner: str = "") -> int:
        """Pin blocks by id among those of all groups, where somebody holds them or they are cached."""
        known = {
            self.global_id(g, block): (g, block) for g, group in enumerate(self.groups) for block in group.every_block()
        }
        blocks: list[list[Block | None]] = [[] for _ in self.groups]
        for i in ids:
            g, block = known.get(i, (0, None))
            if block is None or not (block.held or block.indexed or block.tail):
                raise BlockNotFound(i)
            blocks[g].append(block)
        return self._lease(blocks, owner)

    def _lease(self, blocks: Sequence[Sequence[Block | None]], owner: str) -> int:
        """Groups that have nothing to pin take part, so that a lease is known by one number."""
        taken = [
            group.lease([b for b in blocks if b], owner) for group, blocks in zip(self.groups, blocks, strict=True)
        ]
        return taken[0]

    def global_id(self, g: int, block: Block) -> int:
        """The id of a block among those of all groups: all device blocks come before all host blocks."""
        before = [getattr(group, block.tier).capacity for group in self.groups[:g]]
        if block.tier == "device":
            return sum(before) + block.id
        return (
            sum(group.device.capacity for group in self.groups)
            + sum(before)
            + block.id
            - self.groups[g].device.capacity
        )

    # -- admission -----------------------------------------------------------------------------

    def add_sequence(self, prompt: Prompt, **options: object) -> Admitted:
        ranges = options.pop("retention", None)
        retention = None if ranges is None else [ranges]
        encoder = options.pop("encoder_tokens", None)
        (admitted,) = self.add_sequence_batch(
            [prompt],
            retention=retention,
            encoder_tokens=None if encoder is None else [encoder],
            **options,  # type: ignore[arg-type]
        )
        assert admitted is not None
        return admitted

    def add_sequence_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        retention: Sequence[Sequence[Range] | None] | None = None,
        decode_priority: int = DEFAULT_PRIORITY,
        decode_ttl_ms: int | None = None,
        allow_partial_batch: bool = False,
        encoder_tokens: Sequence[int] | None = None,
    ) -> list[Admitted | None]:
        """Return the admission of each prompt of the head of the batch, None for one that can never fit."""
        if any(not prompt.tokens for prompt in prompts):
            raise ValueError("empty prompt")
        if (encoder_tokens is None) == any(not group.matches for group in self.groups):
            raise ValueError(f"encoder_tokens: {encoder_tokens}")
        retention_of = retention or [None] * len(prompts)
        ranges = [check_ranges(r or ()) for r in retention_of]
        decode = (decode_priority, decode_ttl_ms)
        encoder = encoder_tokens or [0] * len(prompts)
        never = {
            i
            for i, (prompt, tokens) in enumerate(zip(prompts, encoder, strict=True))
            if self.never_fits(prompt, tokens)
        }
        if never and not allow_partial_batch:
            raise NeverFits(f"prompts {never}")
        kept = [i for i in range(len(prompts)) if i not in never]
        heads = range(len(kept), -1, -1) if allow_partial_batch else [len(kept)]
        for count in heads:
            admitted_here = kept[:count]
            try:
                with all_or_nothing(self.groups):
                    admissions = self._admit(
                        [prompts[i] for i in admitted_here],
                        [ranges[i] for i in admitted_here],
                        decode,
                        encoder=[encoder[i] for i in admitted_here],
                    )
                admitted_by_prompt = dict(zip(admitted_here, admissions, strict=True))
                return [admitted_by_prompt.get(i) for i in range(kept[count] if count < len(kept) else len(prompts))]
            except (OutOfBlocks, OutOfSequences):
                if count == heads[-1]:
                    raise
        raise AssertionError("an empty head always fits")

    def plan_batch(self, prompts: Sequence[Prompt], *, encoder_tokens: Sequence[int] | None = None) -> Planned:
        """An admission, all of which is taken back."""
        full = [self.look(prompt)[0] for prompt in prompts]
        computing = [self.computing(prompt, blocks) for prompt, blocks in zip(prompts, full, strict=True)]
        before = [group.free("device") for group in self.groups]
        with suppress(_Undone), all_or_nothing(self.groups):
            admitted = self.add_sequence_batch(prompts, allow_partial_batch=True, encoder_tokens=encoder_tokens)
            blocks = [free - group.free("device") for free, group in zip(before, self.groups, strict=True)]
            raise _Undone
        computed_by = [
            (set[int](), 0) if admission is None else ahead
            for admission, ahead in zip(admitted, computing, strict=False)
        ]
        return Planned(admitted, blocks, computed_by)

    def computing(self, prompt: Prompt, full: int) -> tuple[set[int], int]:
        """The live sequences of which one will have committed most of what a prompt begins with, beyond ``full``
        blocks."""
        width, best, computing = self.groups[0].T, 0, set[int]()
        for i, seq in self.groups[0].sequences.items():
            if seq.namespace != prompt.namespace or seq.private or not prompt.reuse:
                continue
            columns = common_items(seq.items, prompt.items[: len(prompt.tokens) - 1]) // width
            while columns and not all(group.will_find(i, columns - 1) for group in self.groups):
                columns -= 1
            if columns > full and columns * width > seq.committed and columns >= best:
                computing = {i} | (computing if columns == best else set())
                best = columns
        return computing, best * width

    def never_fits(self, prompt: Prompt, encoder_tokens: int = 0, *, loads: bool = False) -> bool:
        """Whether some group would not have room for a prompt if nothing else lived, with what is cached now and
        without."""
        usable = len(prompt.tokens) - (not loads)
        full, walks = self.look(prompt, usable)
        for group, walk in zip(self.groups, walks, strict=True):
            anew = Plan(prompt, [], [], None, 0, 0, usable, encoder_tokens)
            reused = Plan(prompt, [], walk.rows, None, 0, full, usable, encoder_tokens)
            held = sum(row is not None for row in walk.rows)
            if min(len(group.new_columns(anew)), len(group.new_columns(reused)) + held) > group.device.capacity:
                return True
        return False

    def reserve(
        self,
        prompt: Prompt,
        *,
        owner: str = "",
        retention: Sequence[Range] | None = None,
        deadline_seconds: float | None = None,
    ) -> Admitted:
        ranges = [check_ranges(retention or ())]
        if self.never_fits(prompt, loads=True):
            raise NeverFits
        with all_or_nothing(self.groups):
            (admitted,) = self._admit([prompt], ranges, (DEFAULT_PRIORITY, None), loads=True)
        for group in self.groups:
            group.reservations[admitted.id] = group.sequences.pop(admitted.id)
            group.reservations[admitted.id].owner = owner
            if deadline_seconds is not None:
                group.reservations[admitted.id].deadline = group.clock() + round(1000 * deadline_seconds)
        return admitted

    def _admit(
        self,
        prompts: Sequence[Prompt],
        ranges: Sequence[list[Range]],
        decode: tuple[int, int | None],
        *,
        loads: bool = False,
        encoder: Sequence[int] | None = None,
    ) -> list[Admitted]:
        """Look, claim and fit in every group; only then does any take blocks."""
        first = self.groups[0]
        if len(first.sequences) + len(first.swapped) + len(first.reservations) + len(prompts) > first.max_sequences:
            raise OutOfSequences(len(prompts))
        batches: list[list[Plan]] = [[] for _ in self.groups]
        for i, (prompt, prompt_ranges) in enumerate(zip(prompts, ranges, strict=True)):
            usable = len(prompt.tokens) - (not loads)
            full, walks = self.look(prompt, usable)
            for plans, walk in zip(batches, walks, strict=True):
                tokens = encoder[i] if encoder else 0
                plans.append(
                    Plan(prompt, prompt_ranges, walk.rows, walk.source, walk.partial, full, usable, tokens, loads=loads)
                )
        for group, plans in zip(self.groups, batches, strict=True):
            group.claim(plans)
        for group, plans in zip(self.groups, batches, strict=True):
            group.fit(plans)
        for same in zip(*batches, strict=True):
            for plan in same:
                plan.partial = min(other.partial for other in same)
        if prompts:
            for group in self.groups:
                group.expire(group.clock(), EXPIRIES_PER_CALL)
        built = [group.build_all(plans, decode) for group, plans in zip(self.groups, batches, strict=True)]
        return [_together(same) for same in zip(*built, strict=True)]


def _together(admitted: Sequence[Admitted]) -> Admitted:
    """Return what a request gets, from the answers of each group."""
    matches = [admission.match for admission in admitted]
    host = max(match.host_tokens for match in matches)
    full = matches[0].device_tokens + matches[0].host_tokens
    return Admitted(admitted[0].id, Match(full - host, host, matches[0].partial_tokens), admitted[0].missed_blocks)


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
