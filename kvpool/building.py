"""What a pool is built of: its groups of layers from the arguments, the columns of its rows, and the arrays of its state."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvpool.block_table import own_table
from kvpool.device.base import Device
from kvpool.errors import InsufficientMemory
from kvpool.groups import KINDS, Group, LayerGroup, capacities_argument, describe, groups_argument
from kvpool.layout import BlockLayout, integer_argument
from kvpool.retention import priority_argument
from kvpool.state.states import GroupSizes, Settings, States, state_bytes

MAX_TOKENS = 262_144


class Rules(NamedTuple):
    """What the states of all groups have in common, checked; ``tokens`` of a sequence at most, None for as many as fit."""

    sequences: int
    tokens: int | None
    secret: bytes | None
    events: int
    min_priority: int
    min_reuse: int


def rules(sequences: Any, tokens: Any, secret: Any, events: Any, min_priority: Any, min_reuse: Any) -> Rules:
    """The arguments of a pool by these names. Raises TypeError or ValueError."""
    if secret is not None and (not isinstance(secret, bytes) or not 16 <= len(secret) <= 64):
        raise ValueError("secret: accepted are 16 to 64 bytes")
    return Rules(
        integer_argument("max_sequences", sequences, 1, 1 << 24),
        None if tokens is None else integer_argument("max_sequence_tokens", tokens, 1, (1 << 31) - 1),
        secret,
        integer_argument("event_capacity", events, 0, 1 << 31),
        priority_argument("offload_min_priority", min_priority),
        integer_argument("offload_min_reuse", min_reuse, 1, 65535),
    )


def pool_groups(
    layout: Any, groups: Any, tokens_per_block: Any, window: Any, sinks: Any, device_blocks: Any, host_blocks: Any
) -> tuple[tuple[Group, ...], int]:
    """The groups of a pool, and the tokens of a block, from either a layout or a list of groups. Raises TypeError or ValueError."""
    if (layout is None) == (groups is None):
        raise TypeError(f"layout={layout!r:.80}, groups={groups!r:.80}: accepted is either a BlockLayout or a list of LayerGroup")
    if groups is None:
        if not isinstance(layout, BlockLayout):
            raise TypeError(f"layout={layout!r:.80}: accepted is a BlockLayout")
        if tokens_per_block is not None:
            raise ValueError(f"tokens_per_block={tokens_per_block!r:.80}: accepted is None, since the layout says it")
        checked: tuple[LayerGroup, ...] = (LayerGroup(layout, window=window, sinks=sinks),)
        width = layout.tokens_per_block
        for name, value, least in (("device_blocks", device_blocks, 1), ("host_blocks", host_blocks, 0)):
            integer_argument(name, value, least, (1 << 31) - 1)
    else:
        if window is not None or sinks != 0:
            raise ValueError(f"window={window!r:.80}, sinks={sinks!r:.80}: accepted are those of each LayerGroup where there are groups")
        checked, width = groups_argument(groups, tokens_per_block)
    if width > np.iinfo(np.int16).max:
        raise ValueError(f"tokens_per_block={width}: accepted are up to {np.iinfo(np.int16).max}")
    device = capacities_argument("device_blocks", device_blocks, checked)
    host = capacities_argument("host_blocks", host_blocks, checked)
    return describe(checked, device, host), width


def fewest_blocks(groups: Sequence[Group]) -> int:
    """Device blocks of the group with the fewest, of those that need all of a prefix; 2**31 where there is none."""
    return min((group.device_blocks for group in groups if group.kind == "attention" and group.window is None), default=1 << 31)


def build_states(device: Device, groups: Sequence[Group], width: int, rules: Rules, partial_reuse: bool, table: Any) -> States:
    """The state of a pool. Raises InsufficientMemory; TypeError and ValueError for a ``table`` that is none for it."""
    fit = fewest_blocks(groups)
    rooms = [fit] if fit < 1 << 31 else [group.device_blocks for group in groups]
    rooms += [group.device_blocks for group in groups if group.kind == "cross"]  # of the encoder's tokens, in the same columns
    columns = -(-(rules.tokens or min(max(rooms) * width, MAX_TOKENS)) // width)
    sizes = [
        GroupSizes(
            group.device_blocks, group.host_blocks, group.window or 0, group.sinks, KINDS.index(group.kind),
            (group.snapshot_tokens or 0) // width,
        )
        for group in groups
    ]  # fmt: skip
    needed = state_bytes(sizes, width, rules.sequences, columns, rules.events)
    available = device.available_bytes("host")
    if available is not None and needed > available:
        raise InsufficientMemory("state: the host", needed, available)
    settings = Settings(
        width, rules.sequences, columns, rules.secret or os.urandom(32), partial_reuse, rules.min_priority, rules.min_reuse, rules.events
    )
    return States(sizes, settings, own_table(table, len(groups), rules.sequences, columns))
