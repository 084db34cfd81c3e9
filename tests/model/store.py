"""What the model remembers about content: index rows, children, shelving, eviction, expiry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .tiers import DEFAULT_PRIORITY, Block, Content, Item, OutOfBlocks, Prompt, Tier

CANDIDATES = 16
"""Children that a lookup compares, most recent first."""


@dataclass
class Row:
    """Where the content of one full block is."""

    device: Block | None = None
    host: Block | None = None


@dataclass
class Child:
    """A candidate for partial matches: an indexed full block (`content`) or a stored tail (`block`)."""

    items: tuple[Item, ...]
    content: Content | None = None
    block: Block | None = None


@dataclass
class Walk:
    """What is cached of a prompt: full blocks from its start, then at most one partial source."""

    rows: list[Row | None]
    """None where a window has passed the block, so that it is not needed."""
    source: Block | None
    partial: int


class Store:
    """Both tiers and the index over them; no sequences, no leases."""

    matches = True
    """Whether its blocks can be found by their content."""

    @property
    def leaves_holes(self) -> bool:
        """Whether not all blocks of a prefix are needed to reuse it."""
        return self.window is not None

    def __init__(
        self,
        tokens_per_block: int,
        device_blocks: int,
        host_blocks: int,
        partial_reuse: bool,
        offload_min_priority: int,
        offload_min_reuse: int,
        clock: Callable[[], int],
        window: int | None = None,
        sinks: int = 0,
    ) -> None:
        self.T = tokens_per_block
        self.window, self.sinks = window, sinks
        self.device = Tier("device", 0, device_blocks)
        self.host = Tier("host", device_blocks, host_blocks)
        self.partial_reuse = partial_reuse
        self.offload_min_priority = offload_min_priority
        self.offload_min_reuse = offload_min_reuse
        self.clock = clock
        self.rows: dict[Content, Row] = {}
        self.children: dict[tuple[Content, int], list[Child]] = {}
        self.counts: Counter[str] = Counter()
        self.overflow = 0
        self.chosen: list[int] | None = None
        """What a policy of the pool's own has chosen among blocks of the default priority, in order. None: LRU."""

    def tier(self, block: Block) -> Tier:
        return self.device if block.tier == "device" else self.host

    def every_block(self) -> list[Block]:
        return [*self.device.blocks.values(), *self.host.blocks.values()]

    def copy_of(self, content: Content, tier: str | None) -> Block | None:
        """The block of a content on a tier; by default the host copy where there is one, else the device block."""
        row = self.rows.get(content, Row())
        return row.host or row.device if tier is None else row.host if tier == "host" else row.device

    def contents(self, prompt: Prompt, count: int | None = None) -> list[Content]:
        """Names of the first `count` full blocks of the prompt (None: of all)."""
        count = len(prompt.tokens) // self.T if count is None else count
        return [(prompt.namespace, prompt.items[: (i + 1) * self.T]) for i in range(count)]

    # -- lists ---------------------------------------------------------------------------------

    def shelve(self, block: Block, *, front: bool = False, deadline: int | None = None) -> None:
        """Put a block that nobody holds into the list that its content calls for."""
        if block.held:
            return
        tier = self.tier(block)
        tier.unlist(block)
        row = self.rows.get(block.content) if block.indexed and block.content else None
        if block.tier == "host" and row is not None and row.device is not None:
            target = tier.redundant
        elif row is not None or block.tail:
            target = tier.by_priority[block.priority]
            if block.priority != DEFAULT_PRIORITY and block.ttl is not None:
                block.deadline = self.clock() + block.ttl if deadline is None else deadline
        else:
            block.blank()
            target = tier.empty
        target.insert(0 if front else len(target), block)

    def drop_ref(self, block: Block, *, front: bool = False) -> None:
        block.refs -= 1
        self.shelve(block, front=front)

    def expire(self, now: int, limit: int | None = None) -> int:
        """Move blocks whose time is over to the back of the default list; how many they were."""
        listed = self.device.victims() + self.host.victims()
        due = [b for b in listed if b.deadline is not None and b.deadline <= now]
        due.sort(key=lambda b: (b.deadline, b.id))
        for block in due[:limit]:
            self.tier(block).unlist(block)
            block.priority, block.ttl = DEFAULT_PRIORITY, None
            self.shelve(block)
        self.counts["expired_blocks"] += len(due[:limit])
        return len(due[:limit])

    # -- victims -------------------------------------------------------------------------------

    def take_device(self, priority: int, ttl: int | None) -> Block:
        """The next device victim, its content offloaded or forgotten, held once by a sequence."""
        block = self._policy_of(self.device, self.device.victims()[0])
        deadline = block.deadline
        self.device.unlist(block)
        if block.indexed or block.tail:
            self._evict(block, deadline)
        block.blank()
        block.refs, block.priority, block.ttl = 1, priority, ttl
        return block

    def _policy_of(self, tier: Tier, block: Block) -> Block:
        """The block that a policy of the pool's own has chosen in the place of this victim, if it may."""
        if self.chosen and block in tier.by_priority[DEFAULT_PRIORITY]:
            block = tier.blocks[self.chosen.pop(0)]
            assert block in tier.by_priority[DEFAULT_PRIORITY], f"the policy has chosen {block}"
        return block

    def _evict(self, block: Block, deadline: int | None) -> None:
        if block.tail:
            self.forget_tail(block)
            return
        assert block.content is not None
        row = self.rows[block.content]
        if row.host is not None:
            self.counts["offloads_saved"] += 1
            self.forget_device(block, deadline)
            return
        goes = self.goes_down(block)
        target = self.host_victim(block.priority) if goes else None
        if goes and self.overflow and (target is None or target.indexed):
            self.overflow -= 1
        if target is None:
            self.forget_device(block)
        else:
            self.copy_to_host(block, target)
            self.forget_device(block, deadline)

    def host_victim(self, priority: int) -> Block | None:
        """The empty, redundant or no more important host block that is taken next.

        What the call under way has to forget in any case goes before clean copies.
        """
        spare = [*self.host.empty, *(self.host.redundant if not self.overflow else ())]
        others = [block for blocks in self.host.by_priority[: priority + 1] for block in blocks]
        return next(iter([*spare, *others]), None)

    def goes_down(self, block: Block) -> bool:
        """Whether the content of a device block is worth a copy on the host, which it has not."""
        worth = block.priority >= self.offload_min_priority and block.uses >= self.offload_min_reuse
        return block.content is not None and block.indexed and worth and self.rows[block.content].host is None

    def take_host(self, target: Block) -> Block:
        """Take a host victim, whose content is forgotten; nobody holds it, and it is not listed."""
        target = self._policy_of(self.host, target)
        self.host.unlist(target)
        if target.indexed:
            assert target.content is not None
            row = self.rows[target.content]
            self.counts["forgotten_host_blocks" if row.device is None else "redundant_dropped"] += 1
            row.host = None
            self._drop_row_if_empty(target.content)
        target.blank()
        return target

    def copy_to_host(self, block: Block, victim: Block) -> Block:
        """Copy an indexed device block to a host victim; the copy is not listed yet."""
        target = self.take_host(victim)
        assert block.content is not None
        self.rows[block.content].host = target
        target.content, target.indexed = block.content, True
        target.priority, target.ttl, target.uses = block.priority, block.ttl, block.uses
        target.saved = block.saved
        self.counts["offloaded_blocks"] += 1
        return target

    # -- saving --------------------------------------------------------------------------------

    def read_dirty(self, blocks: Sequence[Block], uses: int = 1) -> list[Content]:
        """Return the content of these blocks that the dirty-block cursor has not read yet, in their order."""
        unsaved = []
        for block in blocks:
            if block.indexed and block.content is not None and not block.saved and block.uses >= uses:
                unsaved.append(block.content)
                row = self.rows[block.content]
                for copy in filter(None, (row.device, row.host)):
                    copy.saved = True
        return unsaved

    def soon_evicted(self, margin: int) -> list[Block]:
        """Content that is lost when that many host blocks are taken, the next victim first."""
        room = len(self.host.empty) + len(self.host.redundant)
        return [block for blocks in self.host.by_priority for block in blocks][: max(0, margin - room)]

    # -- index ---------------------------------------------------------------------------------

    def publish(self, block: Block) -> None:
        """Make a keyed device block findable, unless another device block holds its content."""
        assert block.content is not None
        row = self.rows.get(block.content) or self.new_row(block.content)
        if row.device is None:
            row.device, block.indexed, block.uses, block.saved = block, True, 1, False
            if row.host is not None:
                block.uses, block.saved = max(1, row.host.uses), row.host.saved
                self.shelve(row.host)

    def new_row(self, content: Content) -> Row:
        """Index content that no block has yet."""
        row = self.rows[content] = Row()
        namespace, items = content
        parent, last_items = (namespace, items[: -self.T]), items[-self.T :]
        self._supersede_tails(parent, last_items)
        self._bucket(parent, last_items).append(Child(last_items, content=content))
        return row

    def forget_device(self, block: Block, deadline: int | None = None) -> None:
        """Erase the device id of a published block's row; a host copy stands in for it."""
        assert block.content is not None
        row = self.rows[block.content]
        assert row.device is block
        row.device, block.indexed = None, False
        if row.host is not None:
            row.host.priority, row.host.ttl = block.priority, block.ttl
            row.host.uses = block.uses
            self.shelve(row.host, deadline=deadline)
        self.counts["forgotten_device_blocks"] += row.host is None
        self._drop_row_if_empty(block.content)

    def forget_everywhere(self, block: Block) -> None:
        """Erase the row of a published block, its other copy included, unless a sequence holds that."""
        assert block.content is not None
        row = self.rows[block.content]
        other = row.host if block.tier == "device" else row.device
        if other is None or not other.refs:
            self.forget_both(block, other)

    def forget_both(self, block: Block, other: Block | None) -> None:
        """Erase the row of a published block and of its other copy."""
        assert block.content is not None
        row, last = self.rows[block.content], other or block
        row.device = row.host = None
        for changed in filter(None, (block, other)):
            changed.indexed = False
        self.counts[f"forgotten_{last.tier}_blocks"] += 1
        self._drop_row_if_empty(block.content)
        if other is not None:
            self.shelve(other)

    def erase(self, content: Content) -> None:
        """Forget a cached content on both tiers because somebody wants it so."""
        row = self.rows[content]
        block = row.device or row.host
        assert block is not None
        self.forget_both(block, row.host if row.device is not None else None)
        self.shelve(block)
        self.counts["forgotten_by_call_blocks"] += 1

    def erase_tail(self, block: Block) -> None:
        self.forget_tail(block)
        self.shelve(block)
        self.counts["forgotten_by_call_blocks"] += 1

    def erase_namespace(self, namespace: object) -> int:
        """Device blocks first, each tier by its ids."""
        before = self.counts["forgotten_by_call_blocks"]
        for block in self.every_block():
            if block.indexed and block.content is not None and block.content[0] == namespace:
                self.erase(block.content)
            elif block.parent is not None and block.parent[0] == namespace:
                self.erase_tail(block)
        return self.counts["forgotten_by_call_blocks"] - before

    def erase_contents(self, contents: Sequence[Content]) -> int:
        known = [content for content in dict.fromkeys(contents) if content in self.rows]
        for content in known:
            self.erase(content)
        return len(known)

    def erase_tails(self, prompt: Prompt) -> int:
        """Tails that the tokens of a prompt after some full block begin with, the most recent first."""
        before = self.counts["forgotten_by_call_blocks"]
        for start in range(0, len(prompt.tokens), self.T):
            rest = prompt.items[start:]
            for child in self._bucket((prompt.namespace, prompt.items[:start]), rest)[::-1]:
                if child.block is not None and rest[: len(child.items)] == child.items:
                    self.erase_tail(child.block)
        return self.counts["forgotten_by_call_blocks"] - before

    def set_priority(self, contents: Sequence[Content], priority: int, ttl: int | None) -> int:
        """Set the priority of the device copy, else of the host's. A block with a new priority is last of its list."""
        rows = [self.rows[content] for content in contents if content in self.rows]
        for row in rows:
            block = row.device or row.host
            assert block is not None
            moves, block.priority, block.ttl = block.priority != priority, priority, ttl
            block.deadline = None
            if not block.held and moves:
                self.shelve(block)
            elif not block.held and ttl is not None and priority != DEFAULT_PRIORITY:
                block.deadline = self.clock() + ttl
        return len(rows)

    def store_tail(self, block: Block, parent: Content, items: tuple[Item, ...]) -> None:
        """Index an unfull tail for partial matches, unless an indexed child starts with it."""
        recent = self._bucket(parent, items)[-CANDIDATES:]
        if any(len(c.items) > len(items) and c.items[: len(items)] == items for c in recent):
            return
        self._supersede_tails(parent, items)
        block.content, block.parent, block.tail = None, parent, items
        self._bucket(parent, items).append(Child(items, block=block))

    def forget_tail(self, block: Block) -> None:
        assert block.parent is not None
        bucket = self._bucket(block.parent, block.tail)
        bucket[:] = [child for child in bucket if child.block is not block]
        self.counts["forgotten_device_blocks"] += 1
        block.parent, block.tail = None, ()

    def _supersede_tails(self, parent: Content, items: tuple[Item, ...]) -> None:
        for child in self._bucket(parent, items)[-CANDIDATES:][::-1]:
            if child.block is not None and items[: len(child.items)] == child.items:
                self.forget_tail(child.block)
                self.shelve(child.block)

    def _drop_row_if_empty(self, content: Content) -> None:
        row = self.rows[content]
        if row.device is None and row.host is None:
            del self.rows[content]
            namespace, items = content
            bucket = self._bucket((namespace, items[: -self.T]), items[-self.T :])
            bucket[:] = [child for child in bucket if child.content != content]

    def _bucket(self, parent: Content, items: tuple[Item, ...]) -> list[Child]:
        """Children of `parent` that start with the same token, oldest first."""
        return self.children.setdefault((parent, items[0][0]), [])

    # -- matching ------------------------------------------------------------------------------

    def longest(self, prompt: Prompt, limit: int) -> int:
        """The most leading full blocks, at most ``limit``, that can be reused."""
        return len(self.reusable_rows(prompt, limit))

    def walk(self, prompt: Prompt, usable: int, limit: int) -> Walk:
        """What an admission of this prompt would reuse now of its first ``usable`` tokens, in at most ``limit`` full
        blocks."""
        rows = self.reusable_rows(prompt, limit)
        done = len(rows) * self.T
        source, partial = None, 0
        wanted = prompt.items[done:usable]
        if self.partial_reuse and wanted:
            parent = (prompt.namespace, prompt.items[:done])
            for child in self._bucket(parent, wanted)[-CANDIDATES:][::-1]:
                common = common_items(child.items, wanted)
                if common > partial:
                    partial, source = common, self._where(child)
        return Walk(rows, source, partial)

    def needs(self, block: int, count: int) -> bool:
        """Whether ``count`` computed tokens need a block: it has a sink, a token that the next one sees, or is the last
        full one."""
        if self.window is None or block * self.T < self.sinks or block == count // self.T - 1:
            return True
        return (block + 1) * self.T > count - self.window + 1

    def reusable_rows(self, prompt: Prompt, limit: int) -> list[Row | None]:
        """Rows of the longest prefix of at most ``limit`` blocks of which all that is needed is cached."""
        contents = self.contents(prompt, limit)
        for count in range(limit, -1, -1):
            needed = [self.needs(i, count * self.T) for i in range(count)]
            if all(content in self.rows for content, need in zip(contents, needed, strict=False) if need):
                return [self.rows[content] if need else None for content, need in zip(contents, needed, strict=False)]
        raise AssertionError("nothing is needed of an empty prefix")

    def _where(self, child: Child) -> Block:
        if child.block is not None:
            return child.block
        assert child.content is not None
        row = self.rows[child.content]
        block = row.device or row.host
        assert block is not None
        return block

    # -- what tests look at --------------------------------------------------------------------

    def order(self, tier: str) -> list[int]:
        """Ids of the tier's listed blocks, the next victim first."""
        return [block.id for block in getattr(self, tier).victims()]

    def free(self, tier: str) -> int:
        return len(self.order(tier))

    def cached(self, tier: str) -> dict[Content, int]:
        """Content of full blocks that the tier has, with the id that has it."""
        blocks = {content: getattr(row, tier) for content, row in self.rows.items()}
        return {content: block.id for content, block in blocks.items() if block is not None}

    def need_device(self, needed: int, free: int) -> None:
        if needed > free:
            raise OutOfBlocks(f"{needed} device blocks needed, {free} free")


def common_items(items: Sequence[Item], other: Sequence[Item]) -> int:
    """Length of the longest common prefix."""
    length = 0
    for a, b in zip(items, other, strict=False):
        if a != b:
            break
        length += 1
    return length
