"""Layer groups: layers of one model that share a rule of what they keep, and how a tier's bytes are split between such groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from kvpool.layout import BlockLayout, integer_argument
from kvpool.sequence import window_argument

KINDS = ("attention", "recurrent", "cross")
_BLOCKS_MAX = 2**31 - 1
_TOKENS_MAX = 2**31 - 1
_WIDTH_MAX = np.iinfo(np.int16).max


@dataclass(frozen=True)
class LayerGroup:
    """Layers of a model whose KV or state is kept and given back together, in blocks of their own.

    Parameters
    ----------
    layout
        What a block of these layers holds. Layers of the group that differ in heads: a sequence of layouts, whose pools ("parts") lie
        behind one block id.
    window, sinks
        A sliding window, as ``KVCacheManager`` describes it; None for full attention.
    kind
        ``"attention"``: a block holds the KV of ``tokens_per_block`` tokens.
        ``"recurrent"``: a block holds one state of all these layers, that behind a prefix; the layouts have ``tokens_per_block=1``.
        ``"cross"``: cross attention, filled once for the tokens of the encoder.
    snapshot_tokens
        Of a recurrent group: states are kept behind the last full block of a prompt that can be reused, and every so many tokens, a
        multiple of the pool's ``tokens_per_block``. None: there only.

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
    kind: str = "attention"
    snapshot_tokens: int | None = None

    def __post_init__(self) -> None:
        parts = self.layout if isinstance(self.layout, (list, tuple)) else (self.layout,)
        if not parts or not all(isinstance(part, BlockLayout) for part in parts):
            raise TypeError(f"layout={self.layout!r:.80}: accepted is a BlockLayout, or a list of them")
        object.__setattr__(self, "layout", parts[0] if len(parts) == 1 else tuple(parts))
        widths = sorted({part.tokens_per_block for part in parts})
        if len(widths) > 1:
            raise ValueError(f"layout: tokens_per_block={widths}: accepted are parts with the same")
        if not isinstance(self.kind, str):
            raise TypeError(f"kind={self.kind!r:.80}: a string is needed, one of {', '.join(KINDS)}")
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r:.80}: must be one of {', '.join(KINDS)}")
        window, sinks = window_argument(self.window, self.sinks)
        object.__setattr__(self, "window", window or None)
        object.__setattr__(self, "sinks", sinks)
        if window and self.kind != "attention":
            raise ValueError(f"window={window}: accepted is None in a {self.kind} group")
        if self.snapshot_tokens is not None:
            object.__setattr__(self, "snapshot_tokens", integer_argument("snapshot_tokens", self.snapshot_tokens, 1, _TOKENS_MAX))
            if self.kind != "recurrent":
                raise ValueError(f"snapshot_tokens={self.snapshot_tokens}: accepted is None in a group of kind {self.kind}")
        if self.kind == "recurrent" and widths != [1]:
            raise ValueError(f"layout: tokens_per_block={widths[0]}: accepted is 1 in a recurrent group, whose blocks hold one state each")

    @property
    def layouts(self) -> tuple[BlockLayout, ...]:
        """The parts."""
        return (self.layout,) if isinstance(self.layout, BlockLayout) else tuple(self.layout)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all parts."""
        return sum(layout.block_bytes for layout in self.layouts)


@dataclass(frozen=True)
class Group:
    """A group of a pool, as ``KVCacheManager.groups`` lists them.

    Its blocks are [0, device_blocks) on the device and [device_blocks, device_blocks + host_blocks) on the host in block tables. Where
    blocks of all groups are named, as in leases, these two ranges begin at ``first_device_block`` and ``first_host_block``.
    """

    index: int
    layouts: tuple[BlockLayout, ...]
    kind: str
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


def describe(groups: Sequence[LayerGroup], device_blocks: Sequence[int], host_blocks: Sequence[int]) -> tuple[Group, ...]:
    """The groups of a pool with these capacities, in blocks; arguments that have been checked."""
    device, host, found = 0, sum(device_blocks), list[Group]()
    for index, (group, at_device, at_host) in enumerate(zip(groups, device_blocks, host_blocks, strict=True)):
        rule = (group.kind, group.window, group.sinks, group.snapshot_tokens)
        found.append(Group(index, group.layouts, *rule, at_device, at_host, device, host))
        device, host = device + at_device, host + at_host
    return tuple(found)


def groups_argument(groups: Any, tokens_per_block: Any = None) -> tuple[tuple[LayerGroup, ...], int]:
    """The groups of one pool, and the tokens of a block in all of them. Raises TypeError or ValueError.

    ``tokens_per_block`` is what the caller says of it: None where a layout does.
    """
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, LayerGroup) for group in groups):
        raise TypeError(f"groups={groups!r:.80}: accepted is a list of LayerGroup")
    if all(group.kind == "cross" for group in groups):
        raise ValueError(f"groups has {len(groups)} entries, none of them attention or recurrent: accepted is at least one such group")
    widths = {i: group.layouts[0].tokens_per_block for i, group in enumerate(groups) if group.kind != "recurrent"}
    first = next(iter(widths), None)
    if first is None:
        if tokens_per_block is None:
            raise ValueError("tokens_per_block=None: needed where all groups are recurrent, since no layout says it")
        width = integer_argument("tokens_per_block", tokens_per_block, 1, _WIDTH_MAX)
    else:
        width = widths[first]
        if tokens_per_block is not None:
            raise ValueError(f"tokens_per_block={tokens_per_block!r:.80}: accepted is None, since groups[{first}] says {width}")
    for i, own in widths.items():
        if own != width:
            raise ValueError(f"groups[{i}]: tokens_per_block={own}: accepted is {width}, as in groups[{first}]")
    for i, group in enumerate(groups):
        if group.snapshot_tokens is not None and group.snapshot_tokens % width:
            raise ValueError(f"groups[{i}]: snapshot_tokens={group.snapshot_tokens}: accepted are multiples of tokens_per_block={width}")
    return tuple(groups), width


def capacities_argument(name: str, value: Any, groups: Sequence[LayerGroup]) -> tuple[int, ...]:
    """``device_blocks`` (at least 1 each) or ``host_blocks`` of every group. Raises TypeError or ValueError.

    A single number is accepted for a single group, and 0 host blocks for any.
    """
    least = 0 if name == "host_blocks" else 1
    if not isinstance(value, (list, tuple)) and not (isinstance(value, np.ndarray) and value.ndim):
        number = integer_argument(name, value, least, _BLOCKS_MAX)
        if number and len(groups) > 1:
            raise ValueError(f"{name}={number}: accepted is a list of {len(groups)} numbers, one for each group")
        return (number,) * len(groups)
    if len(value) != len(groups):
        raise ValueError(f"{name} has {len(value)} entries: accepted is one for each of the {len(groups)} groups")
    return tuple(integer_argument(f"{name}[{i}]", one, least, _BLOCKS_MAX) for i, one in enumerate(value))


def group_argument(group: Any, count: int) -> int:
    """The group that an argument means, one of ``count``; None is the only one. Raises TypeError or ValueError."""
    if group is None and count > 1:
        raise ValueError(f"group=None: accepted are 0 to {count - 1} where there are several")
    return 0 if group is None else integer_argument("group", group, 0, count - 1)


def split_blocks(
    groups: Sequence[LayerGroup], nbytes: int, *, max_sequence_tokens: int, tokens_per_block: int | None = None
) -> list[int]:
    """Blocks of every group that ``nbytes`` bytes of a tier are good for: ``device_blocks`` or ``host_blocks`` of a pool of these groups.

    Every group gets bytes in proportion to what one sequence of ``max_sequence_tokens`` tokens keeps in it, in whole blocks:

    - attention: blocks for as many tokens, or for ``window + sinks`` tokens if these are fewer;
    - recurrent: its states every ``snapshot_tokens``, the one behind the prompt's last full block, and the running one;
    - cross: blocks for ``max_sequence_tokens`` tokens of the encoder.

    What rounding leaves goes to the group with the largest share, where it makes whole blocks. ``tokens_per_block`` as in
    ``KVCacheManager``: only where all groups are recurrent.

    Reads no pool. Raises ValueError where that leaves a group without a block (the message says how many bytes are needed), and
    ValueError or TypeError for a wrong argument.

    Examples
    --------
    >>> import kvpool
    >>> layout = kvpool.BlockLayout(layers=8, kv_heads=8, head_dim=64, tokens_per_block=16)
    >>> groups = [kvpool.LayerGroup(layout, window=window) for window in (1024, 4096, 8192)]
    >>> kvpool.split_blocks(groups, 2**30, max_sequence_tokens=32768)
    [315, 1260, 2521]
    """
    checked, width = groups_argument(groups, tokens_per_block)
    nbytes = integer_argument("nbytes", nbytes, 1, 2**62)
    tokens = integer_argument("max_sequence_tokens", max_sequence_tokens, 1, _TOKENS_MAX)
    kept = list(_kept_blocks(checked, tokens, width))
    sizes = [group.block_bytes for group in checked]
    costs = [blocks * size for blocks, size in zip(kept, sizes, strict=True)]
    total = sum(costs)
    found = [nbytes * blocks // total for blocks in kept]
    if not all(found):
        least = min(range(len(kept)), key=kept.__getitem__)
        raise ValueError(f"nbytes={nbytes}: no block for groups[{least}]; needed are at least {-(-total // kept[least])}")
    largest = max(range(len(costs)), key=costs.__getitem__)
    found[largest] += (nbytes - sum(blocks * size for blocks, size in zip(found, sizes, strict=True))) // sizes[largest]
    return found


def _kept_blocks(groups: tuple[LayerGroup, ...], tokens: int, width: int) -> Iterator[int]:
    """Blocks that a sequence of so many tokens keeps in each group."""
    for group in groups:
        if group.kind == "recurrent":
            yield 2 + (0 if group.snapshot_tokens is None else tokens // group.snapshot_tokens)
        else:
            seen = tokens if group.window is None else min(tokens, group.window + group.sinks)
            yield -(-seen // width)
