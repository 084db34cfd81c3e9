"""Blocks and eviction lists of the model: plain objects, plain lists, nothing of kvpool."""

from __future__ import annotations

from dataclasses import dataclass, field

DEFAULT_PRIORITY = 35
PRIORITIES = 101

Item = tuple[int, int]
"""One token: (token id, extra id); an extra id of 0 says that there is none."""
Namespace = tuple[object, object]
"""(salt, adapter id)."""
Content = tuple[Namespace, tuple[Item, ...]]
"""What a full block holds, named by its namespace and *all* tokens up to its end."""


class OutOfBlocks(Exception):
    """Fewer listed device blocks than the call needs."""


class NeverFits(ValueError):
    """The request needs more than an empty pool has."""


class OutOfSequences(Exception):
    """Fewer free sequence slots than the call needs."""


class UnknownSequence(Exception):
    """The id names no live sequence."""


class BlockNotFound(Exception):
    """The content to pin is not in the asked tier."""


class LeaseExpired(Exception):
    """The lease was closed or revoked before."""


class ReservationExpired(Exception):
    """The reservation was committed, aborted or revoked before, or its deadline has passed."""


class PoolBusy(Exception):
    """Reset without force while sequences live or reservations are open."""


@dataclass(frozen=True)
class Prompt:
    """Tokens with the namespace they are looked up in."""

    tokens: tuple[int, ...]
    salt: object = None
    adapter_id: object = None
    extra_ids: tuple[int, ...] | None = None
    reuse: bool = True
    publish: bool = True

    @property
    def namespace(self) -> Namespace:
        return (self.salt, self.adapter_id)

    @property
    def items(self) -> tuple[Item, ...]:
        return tuple(zip(self.tokens, self.extra_ids or (0,) * len(self.tokens), strict=True))


@dataclass
class Block:
    """One block id; `parent` and `tail` describe an unfull tail that is indexed as a child."""

    id: int
    tier: str
    refs: int = 0
    pins: int = 0
    hold: int = 0
    content: Content | None = None
    indexed: bool = False
    parent: Content | None = None
    tail: tuple[Item, ...] = ()
    priority: int = DEFAULT_PRIORITY
    ttl: int | None = None
    deadline: int | None = None
    uses: int = 0
    saved: bool = False

    @property
    def held(self) -> bool:
        return self.refs + self.pins + self.hold > 0

    def blank(self) -> None:
        """Forget what the block holds; who holds it stays."""
        self.content, self.indexed, self.parent, self.tail = None, False, None, ()
        self.priority, self.ttl, self.deadline, self.uses = DEFAULT_PRIORITY, None, None, 0
        self.saved = False


@dataclass
class Lease:
    """Pins on `blocks` until closed or revoked."""

    blocks: list[Block]
    owner: str


@dataclass
class Tier:
    """The blocks of one tier and the lists of those that nobody holds."""

    name: str
    first: int
    capacity: int
    blocks: dict[int, Block] = field(init=False)
    empty: list[Block] = field(init=False)
    redundant: list[Block] = field(init=False)
    by_priority: list[list[Block]] = field(init=False)

    def __post_init__(self) -> None:
        ids = range(self.first, self.first + self.capacity)
        self.blocks = {i: Block(i, self.name) for i in ids}
        self.clear_lists()
        self.empty = list(self.blocks.values())

    def clear_lists(self) -> None:
        self.empty, self.redundant = [], []
        self.by_priority = [[] for _ in range(PRIORITIES)]

    def lists(self) -> list[list[Block]]:
        """Every list, in the order in which victims are looked for."""
        return [self.empty, self.redundant, *self.by_priority]

    def victims(self) -> list[Block]:
        """All listed blocks, the next victim first."""
        return [block for blocks in self.lists() for block in blocks]

    def is_listed(self, block: Block) -> bool:
        return any(block is other for blocks in self.lists() for other in blocks)

    def unlist(self, block: Block) -> None:
        """Take the block out of its list, if it is in one, and drop its expiry."""
        for blocks in self.lists():
            for place, other in enumerate(blocks):
                if other is block:
                    del blocks[place]
                    block.deadline = None
                    return

    def check(self) -> None:
        """Each block is in exactly one list or held, never both; expiries only where listed."""
        listed = [block.id for block in self.victims()]
        assert len(listed) == len(set(listed)), f"{self.name}: listed twice: {listed}"
        for block in self.blocks.values():
            assert min(block.refs, block.pins) >= 0 and block.hold == 0, block
            assert (block.id in listed) != block.held, f"listed and held, or neither: {block}"
            assert block.deadline is None or block.id in listed, f"expiry of a held block: {block}"
        for block in self.empty:
            assert block.content is None and not block.tail and not block.indexed, block
