"""The configuration of a pool: its groups of layers, the split of bytes between them, and the checked arguments."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from kvpool.common.arguments import bool_argument, clock_argument, priority_argument
from kvpool.common.arrays import Int32s
from kvpool.common.arrays.layout import BlockLayout, PoolIds, choice_argument, integer_argument
from kvpool.common.arrays.strided import AnyArray
from kvpool.state.arrays import LRU, POLICIES, GroupSizes, Settings

HISTORY_ROW = 16
"""Bytes by which a pool remembers a content that is gone."""
GroupKind: TypeAlias = Literal["attention", "recurrent", "cross"]
KINDS: tuple[GroupKind, ...] = ("attention", "recurrent", "cross")
MAX_TOKENS = 262_144
"""The most tokens of a sequence where neither the caller nor the device limits them."""
_BLOCKS_MAX = 2**31 - 1
_TOKENS_MAX = 2**31 - 1
_WIDTH_MAX = np.iinfo(np.int16).max
TierMemory: TypeAlias = "AnyArray | Callable[[int, int], AnyArray]"
"""Memory for a tier, or a function (nbytes, alignment) that returns it."""
Options = TypeVar("Options")


@dataclass(frozen=True)
class LayerGroup:
    """Layers of a model that keep and release their KV or state together. They have blocks of their own.

    Parameters
    ----------
    layout : BlockLayout or sequence of BlockLayout
        The layout of a block of these layers; if the layers differ in heads, several layouts. Each layout has memory of
        its own (a "part"), and one block id means a block in every part.
    window : int, optional
        A sliding window, as ``KVCacheManager`` describes it. By default full attention.
    sinks : int, default 0
        With ``window``, the first tokens of a sequence that every token sees as well.
    kind : {"attention", "recurrent", "cross"}, default "attention"
        "attention": a block has the KV of ``tokens_per_block`` tokens. "recurrent": a block has one state of all these
        layers, the state after a prefix, and the layouts have ``tokens_per_block=1``. "cross": cross attention, whose
        blocks are filled once, with the KV of the encoder's tokens.
    snapshot_tokens : int, optional
        Only for a recurrent group: a multiple of the pool's ``tokens_per_block``. A state is kept after the last full
        block of a prompt that can be reused, and after every ``snapshot_tokens`` tokens. By default only after that
        block.

    Raises
    ------
    TypeError, ValueError
        For an argument of the wrong type or value; the message names it.

    Notes
    -----
    Immutable, hashable, and safe to share between threads.

    Examples
    --------
    >>> import kvpool
    >>> layout = kvpool.BlockLayout(layers=2, kv_heads=2, head_dim=8, tokens_per_block=4)
    >>> group = kvpool.LayerGroup(layout, window=128, sinks=4)
    >>> group.layouts == (layout,), group.block_bytes
    (True, 512)
    """

    layout: BlockLayout | Sequence[BlockLayout]
    _: KW_ONLY
    window: int | None = None
    sinks: int = 0
    kind: GroupKind = "attention"
    snapshot_tokens: int | None = None

    def __post_init__(self) -> None:
        parts = tuple(self.layout) if isinstance(self.layout, (list, tuple)) else (self.layout,)
        if not parts or not all(isinstance(part, BlockLayout) for part in parts):
            raise TypeError(f"layout: expected a BlockLayout, or a list of them, got {self.layout!r:.80}")
        object.__setattr__(self, "layout", parts[0] if len(parts) == 1 else parts)
        widths = sorted({part.tokens_per_block for part in parts})
        if len(widths) > 1:
            raise ValueError(f"layout: expected parts with the same tokens_per_block, got {widths}")
        choice_argument("kind", self.kind, KINDS)
        window = None if self.window is None else integer_argument("window", self.window, 1, _TOKENS_MAX)
        sinks = integer_argument("sinks", self.sinks, 0, _TOKENS_MAX)
        if sinks and not window:
            raise ValueError(f"sinks: expected 0 without a window, got {sinks}")
        object.__setattr__(self, "window", window)
        object.__setattr__(self, "sinks", sinks)
        if window and self.kind != "attention":
            raise ValueError(f"window: expected None in a {self.kind} group, got {window}")
        if self.snapshot_tokens is not None:
            tokens = integer_argument("snapshot_tokens", self.snapshot_tokens, 1, _TOKENS_MAX)
            object.__setattr__(self, "snapshot_tokens", tokens)
            if self.kind != "recurrent":
                raise ValueError(f"snapshot_tokens: expected None in a group of kind {self.kind}, got {tokens}")
        if self.kind == "recurrent" and widths != [1]:
            raise ValueError(
                "layout.tokens_per_block: expected 1 in a recurrent group, whose blocks hold one state each, got "
                f"{widths[0]}"
            )

    @property
    def layouts(self) -> tuple[BlockLayout, ...]:
        """The layouts, one for each part."""
        return (self.layout,) if isinstance(self.layout, BlockLayout) else tuple(self.layout)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all parts."""
        return sum(layout.block_bytes for layout in self.layouts)


@dataclass(frozen=True)
class Group:
    """A group of a pool, as ``KVCacheManager.groups`` lists them.

    In block tables its blocks are [0, device_blocks) on the device and [device_blocks, device_blocks + host_blocks) on
    the host. Leases use pool ids, which count the blocks of all groups; there the two ranges begin at
    ``first_device_block`` and ``first_host_block``.

    Attributes
    ----------
    index : int
        Its index, which calls take as ``group``.
    layouts : tuple of BlockLayout
        The layouts, one for each part.
    kind : {"attention", "recurrent", "cross"}
        As in ``LayerGroup``.
    window : int or None
        As in ``LayerGroup``.
    sinks : int
        As in ``LayerGroup``.
    snapshot_tokens : int or None
        As in ``LayerGroup``.
    device_blocks, host_blocks : int
        The capacities of the group.
    first_device_block, first_host_block : int
        Pool ids of the first blocks.
    """

    index: int
    layouts: tuple[BlockLayout, ...]
    kind: GroupKind
    window: int | None
    sinks: int
    snapshot_tokens: int | None
    device_blocks: int
    host_blocks: int
    first_device_block: int
    first_host_block: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all parts."""
        return sum(layout.block_bytes for layout in self.layouts)


def groups_argument(groups: object, tokens_per_block: object = None) -> tuple[tuple[LayerGroup, ...], int]:
    """The groups of one pool, and the tokens of a block in all of them. Raises TypeError or ValueError.

    ``tokens_per_block`` is the caller's argument. It must be None where a layout gives the number.
    """
    if not isinstance(groups, (list, tuple)):
        raise TypeError(f"groups: expected a list of LayerGroup, got {groups!r:.80}")
    groups = tuple(groups)
    if not all(isinstance(group, LayerGroup) for group in groups):
        raise TypeError(f"groups: expected a list of LayerGroup, got {groups!r:.80}")
    if all(group.kind == "cross" for group in groups):
        raise ValueError(
            f"groups: expected one at least that is for attention or recurrent, got {[group.kind for group in groups]}"
        )
    widths = {i: group.layouts[0].tokens_per_block for i, group in enumerate(groups) if group.kind != "recurrent"}
    first = next(iter(widths), None)
    if first is None:
        if tokens_per_block is None:
            raise ValueError(
                "tokens_per_block: expected a number where all groups are recurrent, since no layout says it, got None"
            )
        width = integer_argument("tokens_per_block", tokens_per_block, 1, _WIDTH_MAX)
    else:
        width = widths[first]
        if tokens_per_block is not None:
            raise ValueError(
                f"tokens_per_block: expected None, since groups[{first}] says {width}, got {tokens_per_block!r:.80}"
            )
    for i, group_width in widths.items():
        if group_width != width:
            raise ValueError(
                f"groups[{i}].tokens_per_block: expected {width}, as in groups[{first}], got {group_width}"
            )
    for i, group in enumerate(groups):
        if group.snapshot_tokens is not None and group.snapshot_tokens % width:
            raise ValueError(
                f"groups[{i}].snapshot_tokens: expected a multiple of tokens_per_block={width}, got "
                f"{group.snapshot_tokens}"
            )
    return groups, width


def capacities_argument(name: str, value: object, groups: Sequence[LayerGroup]) -> tuple[int, ...]:
    """``device_blocks`` (at least 1 each) or ``host_blocks`` of every group. Raises TypeError or ValueError.

    A single number is accepted for a single group. A single 0 is accepted as ``host_blocks`` of any number of
    groups.
    """
    least = 0 if name == "host_blocks" else 1
    if not isinstance(value, (list, tuple)) and not (isinstance(value, np.ndarray) and value.ndim):
        number = integer_argument(name, value, least, _BLOCKS_MAX)
        if number and len(groups) > 1:
            raise ValueError(f"{name}: expected a list of {len(groups)} numbers, one for each group, got {number}")
        return (number,) * len(groups)
    each = list(value)
    if len(each) != len(groups):
        raise ValueError(f"{name}: expected one for each of the {len(groups)} groups, got {len(each)}")
    return tuple(integer_argument(f"{name}[{i}]", count, least, _BLOCKS_MAX) for i, count in enumerate(each))


def group_argument(group: object, count: int) -> int:
    """The index of the group that an argument names, below ``count``. None names the only group. Raises TypeError or
    ValueError."""
    if group is None and count > 1:
        raise ValueError(f"group: expected 0 to {count - 1} where there are several, got None")
    return 0 if group is None else integer_argument("group", group, 0, count - 1)


def split_blocks(
    groups: Sequence[LayerGroup], nbytes: int, *, max_sequence_tokens: int, tokens_per_block: int | None = None
) -> list[int]:
    """Split the bytes of a tier into blocks for each group: a pool's ``device_blocks`` or ``host_blocks``.

    Every group gets bytes in proportion to the whole blocks that one sequence of ``max_sequence_tokens`` tokens keeps
    in it:

    - attention: blocks for as many tokens, or for ``window + sinks`` tokens if these are fewer;
    - recurrent: its states every ``snapshot_tokens``, the one after the prompt's last full block, and the running one;
    - cross: blocks for ``max_sequence_tokens`` tokens of the encoder.

    If the bytes that rounding leaves make whole blocks, the group with the largest share gets these.

    Parameters
    ----------
    groups : sequence of LayerGroup
        The groups of the pool.
    nbytes : int
        Bytes of the tier.
    max_sequence_tokens : int
        Tokens of the longest sequence.
    tokens_per_block : int, optional
        Only if all groups are recurrent, as in ``KVCacheManager``.

    Returns
    -------
    list of int
        The number of blocks of each group.

    Raises
    ------
    ValueError
        If a group would get no block; the message says how many bytes are needed. For a bad argument.
    TypeError
        For an argument of the wrong type.

    Examples
    --------
    >>> import kvpool
    >>> layout = kvpool.BlockLayout(layers=8, kv_heads=8, head_dim=64, tokens_per_block=16)
    >>> groups = [kvpool.LayerGroup(layout, window=window) for window in (1024, 4096, 8192)]
    >>> kvpool.pool.split_blocks(groups, 2**30, max_sequence_tokens=32768)
    [315, 1260, 2521]
    """
    checked, width = groups_argument(groups, tokens_per_block)
    nbytes = integer_argument("nbytes", nbytes, 1, 2**62)
    tokens = integer_argument("max_sequence_tokens", max_sequence_tokens, 1, _TOKENS_MAX)
    kept = list(_kept_blocks(checked, tokens, width))
    sizes = [group.block_bytes for group in checked]
    costs = [blocks * size for blocks, size in zip(kept, sizes, strict=True)]
    total = sum(costs)
    split = [nbytes * blocks // total for blocks in kept]
    if not all(split):
        least = min(range(len(kept)), key=kept.__getitem__)
        raise ValueError(
            f"nbytes: expected {-(-total // kept[least])} or more, for one block of groups[{least}], got {nbytes}"
        )
    largest = max(range(len(costs)), key=costs.__getitem__)
    split[largest] += (nbytes - sum(blocks * size for blocks, size in zip(split, sizes, strict=True))) // sizes[largest]
    return split


def _kept_blocks(groups: tuple[LayerGroup, ...], tokens: int, width: int) -> Iterator[int]:
    """Blocks that a sequence of ``tokens`` tokens keeps in each group."""
    for group in groups:
        if group.kind == "recurrent":
            yield 2 + (0 if group.snapshot_tokens is None else tokens // group.snapshot_tokens)
        else:
            seen = tokens if group.window is None else min(tokens, group.window + group.sinks)
            yield -(-seen // width)


def _policy(policy: str, recurrent: bool) -> str:
    """The policy that a pool follows. The other experts of ``adaptive`` have no say over states."""
    if recurrent and policy not in (LRU, "adaptive"):
        raise ValueError(
            f"policy: expected lru or adaptive, since a recurrent group needs the ends that others evict, got "
            f"{policy!r}"
        )
    return LRU if recurrent else policy


# -- the pool -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EvictionOptions:
    """Which evicted content a pool offloads to the host, and how much of the rest it can explain.

    Passed to ``KVCacheManager`` as ``eviction=``. The eviction policy itself is its ``policy=``.

    Parameters
    ----------
    offload_min_priority : int, default 30
        0 to 100. Evicted content with a lower priority is dropped instead of offloaded.
    offload_min_reuse : int, default 1
        1 to 65535. Evicted content with fewer uses is dropped instead of offloaded. Its first use counts.
    history_bytes : int, default 65536
        Memory in which the pool notes which content is gone and why, for ``CachedContent.explain``: 16 bytes for each
        of the last contents, whose number is rounded down to a power of two. 0 keeps no history.

    Raises
    ------
    TypeError, ValueError
        For an argument of the wrong type or value; the message names it.

    Examples
    --------
    >>> import kvpool
    >>> layout = kvpool.BlockLayout(layers=2, kv_heads=2, head_dim=8, tokens_per_block=4)
    >>> eviction = kvpool.EvictionOptions(offload_min_reuse=2)
    >>> with kvpool.KVCacheManager(layout, device_blocks=8, host_blocks=8, device="cpu", eviction=eviction) as cache:
    ...     print(cache.free_blocks)
    8
    """

    offload_min_priority: int = 30
    offload_min_reuse: int = 1
    history_bytes: int = 65536

    def __post_init__(self) -> None:
        priority_argument("offload_min_priority", self.offload_min_priority)
        integer_argument("offload_min_reuse", self.offload_min_reuse, 1, 65535)
        integer_argument("history_bytes", self.history_bytes, 0, 1 << 31)


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryOptions:
    """Memory of the caller for the tiers and the block table of a pool, and how the pool shares and stages memory.

    Passed to ``KVCacheManager`` as ``memory=``.

    Parameters
    ----------
    device_memory, host_memory : array or callable or sequence of these, optional
        Memory of the caller for a tier: an array of any package, C-contiguous, writable, of exactly the bytes of the
        tier, at an address that is a multiple of 64; or a function ``(nbytes, alignment)`` that returns one. With
        several groups or layouts, a list with one for each layout, group after group, or a function, which is called
        for each. By default the pool allocates both tiers.
    table : ndarray of int32, shape (max_sequences, columns), optional
        Memory of the caller for the persistent block table, C-contiguous; ``columns`` is ``max_sequence_tokens`` in
        blocks. With several groups the shape is (groups, max_sequences, columns). It may be some rows of a larger
        array whose other rows belong to another model. By default the pool allocates it.
    shared : bool, default False
        Put tiers in main memory where other processes can attach them: see ``PoolMemory.share``. In a forked child,
        calls of such a pool raise ForkedProcess, and access to its memory ends the child.
    staging_depth : int, default 8
        1 to 65536. Uploads of block tables that can be in flight on one stream. The next one waits for the oldest on
        that stream.

    Raises
    ------
    TypeError, ValueError
        For an argument of the wrong type or value; the message names it. The pool checks arrays when it is made.

    Notes
    -----
    The pool references the memory of the caller until it is closed. Until then, nothing else may write it. What a tier
    contains at the start does not matter; the pool fills ``table`` with -1. On the cuda device, host memory that CUDA
    reports as pinned is used as it is and must stay pinned until the pool is closed. Other host memory is registered
    until then.

    Examples
    --------
    >>> import mmap
    >>> import numpy as np
    >>> import kvpool
    >>> layout = kvpool.BlockLayout(layers=2, kv_heads=2, head_dim=8, tokens_per_block=4)
    >>> pages = mmap.mmap(-1, 8 * layout.block_bytes)
    >>> memory = kvpool.MemoryOptions(host_memory=np.frombuffer(pages, np.uint8))
    >>> with kvpool.KVCacheManager(layout, device_blocks=8, host_blocks=8, device="cpu", memory=memory) as cache:
    ...     print(cache.memory.host_pool.shape)
    (8, 2, 2, 4, 2, 8)
    """

    device_memory: TierMemory | Sequence[TierMemory] | None = None
    host_memory: TierMemory | Sequence[TierMemory] | None = None
    table: Int32s | None = None
    shared: bool = False
    staging_depth: int = 8

    def __post_init__(self) -> None:
        bool_argument("shared", self.shared)
        integer_argument("staging_depth", self.staging_depth, 1, 1 << 16)


def options_argument(name: str, value: object, kind: type[Options]) -> Options:
    """The options that an argument gives, or the defaults for None. Raises TypeError."""
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name}: expected {kind.__name__} or None, got {value!r:.80}")
    return kind() if value is None else value


@dataclass(frozen=True)
class PoolConfig:
    """The checked arguments of one pool; ``KVCacheManager`` describes them. ``settings`` are those that the states of
    all groups share."""

    groups: tuple[Group, ...]
    settings: Settings
    clock: Callable[[], int]
    persistent_secret: bool
    """whether the secret was given, so that another pool can have the same keys"""

    @classmethod
    def of(
        cls,
        layout: object,
        groups: object,
        tokens_per_block: object,
        window: object,
        sinks: object,
        device_blocks: object,
        host_blocks: object,
        *,
        max_sequences: object,
        max_sequence_tokens: object,
        partial_reuse: object,
        policy: object,
        eviction: object,
        secret: object,
        event_capacity: object,
        clock: object,
    ) -> PoolConfig:
        """Check the arguments that ``KVCacheManager`` has by these names. Raises TypeError or ValueError; the message
        names the argument."""
        checked, width = _pool_groups(layout, groups, tokens_per_block, window, sinks, device_blocks, host_blocks)
        if max_sequence_tokens is not None:
            max_sequence_tokens = integer_argument("max_sequence_tokens", max_sequence_tokens, 1, _TOKENS_MAX)
        # A recurrent group keeps no state after a part of a block, so nothing can be reused in part.
        recurrent = any(group.kind == "recurrent" for group in checked)
        options = options_argument("eviction", eviction, EvictionOptions)
        settings = Settings(
            width,
            integer_argument("max_sequences", max_sequences, 1, 1 << 24),
            -(-(max_sequence_tokens or _longest(checked, width)) // width),
            secret_argument(secret),
            bool_argument("partial_reuse", partial_reuse) and not recurrent,
            int(options.offload_min_priority),
            int(options.offload_min_reuse),
            integer_argument("event_capacity", event_capacity, 0, 1 << 31),
            _policy(choice_argument("policy", policy, POLICIES), recurrent),
            _power_of_two(int(options.history_bytes) // HISTORY_ROW),
        )
        return cls(checked, settings, clock_argument(clock), secret is not None)

    @cached_property
    def tokens_per_block(self) -> int:
        return self.settings.width

    @cached_property
    def columns(self) -> int:
        """The length of a row of the block table."""
        return self.settings.columns

    @cached_property
    def crosses(self) -> bool:
        """Whether a group is for cross attention."""
        return any(group.kind == "cross" for group in self.groups)

    def group(self, group: object) -> int:
        """The index of the group that an argument names. Raises TypeError or ValueError."""
        return group_argument(group, len(self.groups))

    @property
    def sizes(self) -> list[GroupSizes]:
        """The sizes and rules of each group, as its state needs them."""
        return [
            GroupSizes(
                group.device_blocks,
                group.host_blocks,
                group.window or 0,
                group.sinks,
                KINDS.index(group.kind),
                (group.snapshot_tokens or 0) // self.tokens_per_block,
            )
            for group in self.groups
        ]


def _pool_groups(
    layout: Any, groups: Any, tokens_per_block: Any, window: Any, sinks: Any, device_blocks: Any, host_blocks: Any
) -> tuple[tuple[Group, ...], int]:
    """The groups of a pool, and the tokens of a block, from either a layout or a list of groups. Raises TypeError or
    ValueError."""
    if (layout is None) == (groups is None):
        raise TypeError(
            f"layout: expected either a BlockLayout or a list of LayerGroup, got {layout!r:.80}, groups={groups!r:.80}"
        )
    if groups is None:
        if not isinstance(layout, BlockLayout):
            raise TypeError(f"layout: expected a BlockLayout, got {layout!r:.80}")
        if tokens_per_block is not None:
            raise ValueError(f"tokens_per_block: expected None, since the layout says it, got {tokens_per_block!r:.80}")
        checked: tuple[LayerGroup, ...] = (LayerGroup(layout, window=window, sinks=sinks),)
        width = layout.tokens_per_block
        for name, value, least in (("device_blocks", device_blocks, 1), ("host_blocks", host_blocks, 0)):
            integer_argument(name, value, least, (1 << 31) - 1)
    else:
        if window is not None or sinks != 0:
            raise ValueError(
                f"window, sinks: expected those of each LayerGroup where there are groups, got window={window!r:.80}, "
                f"sinks={sinks!r:.80}"
            )
        checked, width = groups_argument(groups, tokens_per_block)
    if width > np.iinfo(np.int16).max:
        raise ValueError(f"tokens_per_block: expected up to {np.iinfo(np.int16).max}, got {width}")
    device = capacities_argument("device_blocks", device_blocks, checked)
    host = capacities_argument("host_blocks", host_blocks, checked)
    ids, pool_groups = PoolIds(device, host), list[Group]()
    for index, (group, at_device, at_host) in enumerate(zip(checked, device, host, strict=True)):
        rule = (group.kind, group.window, group.sinks, group.snapshot_tokens)
        pool_groups.append(Group(index, group.layouts, *rule, at_device, at_host, *ids.first(index)))
    return tuple(pool_groups), width


def _power_of_two(count: int) -> int:
    """The largest that is not above ``count``; 0 for 0."""
    return 1 << count.bit_length() - 1 if count else 0


def _longest(groups: Sequence[Group], width: int) -> int:
    """Tokens of the longest sequence that fits on the device. The tokens of an encoder use the same columns."""
    whole = [group.device_blocks for group in groups if group.kind == "attention" and group.window is None]
    rooms = [min(whole)] if whole else [group.device_blocks for group in groups]
    rooms += [group.device_blocks for group in groups if group.kind == "cross"]
    return min(max(rooms) * width, MAX_TOKENS)


def secret_argument(secret: object) -> bytes:
    """The secret of a pool, random by default."""
    key = bytes(secret) if isinstance(secret, bytes) else b""
    if secret is not None and not 16 <= len(key) <= 64:
        raise ValueError(
            f"secret: expected 16 to 64 bytes, got {f'{len(key)} bytes' if key else type(secret).__name__}"
        )
    return key or os.urandom(32)
