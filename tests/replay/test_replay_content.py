"""The bytes that the replay writes differ by namespace, prefix, token, layer, plane and head, in every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpool.common.arrays.layout import BlockLayout
from kvpool.device import get_device
from kvpool.device.memory.pools import MemoryPools
from kvpool.tools.replay.content import KVBytes, token_states
from tests.device.reference import block_view

LAYOUTS = [
    BlockLayout(2, 3, 8, 4, dtype="float16", order=order, tokens=tokens)
    for order in ("layer_first", "block_first")
    for tokens in ("NHD", "HND")
] + [
    BlockLayout(3, 1, 5, 4, dtype="float8_e4m3fn", planes=1),
    BlockLayout(2, 2, 3, 4, dtype="bfloat16", tokens="HND"),
    BlockLayout(1, 2, 1, 4, dtype="float32", order="block_first"),
    BlockLayout(2, 1, 2, 1, dtype="int64"),
]
BLOCKS = 6
TIERS = ["device", "host"]


def names(layout: BlockLayout) -> str:
    return f"{layout.order}-{layout.tokens}-{layout.dtype_name}-{layout.planes}x{layout.kv_heads}x{layout.head_dim}"


def open_tier(layout: BlockLayout, tier: str) -> tuple[Any, KVBytes]:
    pools = MemoryPools(get_device("cpu"), layout, BLOCKS, BLOCKS)
    if tier == "device":
        return pools, KVBytes(layout, pools.device_pool, layout.device_strides(BLOCKS), BLOCKS)
    return pools, KVBytes(layout, pools.host_pool, layout.host_strides(BLOCKS), BLOCKS)


def view_of(pools: Any, layout: BlockLayout, tier: str, block: int) -> Any:
    """One block as [layers, planes, tokens, heads, head_dim]."""
    return block_view(layout, pools.device_pool, pools.host_pool, block + BLOCKS * (tier == "host"))


def states_of(layout: BlockLayout, blocks: int, first: int = 0) -> Any:
    size = layout.tokens_per_block
    return token_states(np.arange(first, first + blocks * size), size).reshape(blocks, size)


# The state of a token.


def test_state_is_decided_by_everything_up_to_the_token_and_by_nothing_after() -> None:
    tokens = np.arange(37, dtype=np.int32)
    states = token_states(tokens, 8)
    assert states.shape == (37,) and len(np.unique(states)) == 37
    for at in (0, 7, 8, 20, 36):
        changed = tokens.copy()
        changed[at] += 1
        same = token_states(changed, 8) == states
        assert same[:at].all() and not same[at:].any()


def test_state_differs_between_namespaces() -> None:
    namespaces: list[tuple[str | None, int | str | None]] = [(salt, None) for salt in (None, "a", "b", "1", "None")]
    namespaces += [(None, 1), (None, "1"), (None, 0), ("a", 1)]
    states = {int(token_states([1, 2, 3], 4, salt=salt, adapter_id=adapter)[0]) for salt, adapter in namespaces}
    assert len(states) == len(namespaces)
    assert token_states([1], 4, salt="a") == token_states([1], 4, salt=b"a")


# Their bytes.


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=names)
def test_bytes_of_a_token_are_the_same_in_every_block_tier_and_way_of_writing(layout: BlockLayout, tier: str) -> None:
    pools, memory = open_tier(layout, tier)
    states = states_of(layout, 3)
    memory.write(states, np.array([4, 0, 2]))
    rows, tokens = (axis.reshape(-1) for axis in np.indices(states.shape))
    memory.write(states.reshape(-1), np.array([1, 5, 3])[rows], tokens)
    whole = [view_of(pools, layout, tier, block) for block in (4, 0, 2)]
    pieces = [view_of(pools, layout, tier, block) for block in (1, 5, 3)]
    # As bytes: floats that are not numbers differ from themselves.
    raw, pieces = ([np.ascontiguousarray(view).view(np.uint8) for view in views] for views in (whole, pieces))
    assert np.array_equal(raw, pieces)
    shape = (layout.layers, layout.kv_heads, layout.head_dim, layout.tokens_per_block)
    plain = BlockLayout(*shape, layout.dtype, layout.planes)
    others, other_memory = open_tier(plain, "host")
    other_memory.write(states, np.array([4, 0, 2]))
    other = [np.ascontiguousarray(view_of(others, plain, "host", block)).view(np.uint8) for block in (4, 0, 2)]
    assert np.array_equal(raw, other)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=names)
def test_every_single_changed_byte_is_found_and_placed(layout: BlockLayout, tier: str) -> None:
    pools, memory = open_tier(layout, tier)
    states = states_of(layout, 3)
    blocks = np.array([5, 1, 2])
    memory.write(states, blocks)
    assert memory.check(states, blocks) is None
    rows, tokens = (axis.reshape(-1) for axis in np.indices(states.shape))
    view = view_of(pools, layout, tier, 1)
    for place in np.ndindex(view.shape[:-1]):
        element = view[place].view(np.uint8)
        for byte in (0, len(element) - 1):
            element[byte] ^= 1
            layer, plane, token, head = place
            whole = memory.check(states, blocks)
            for mismatch in (whole, memory.check(states.reshape(-1), blocks[rows], tokens)):
                assert mismatch is not None and mismatch.found != mismatch.expected
                assert (mismatch.token, mismatch.layer, mismatch.plane, mismatch.head) == (token, layer, plane, head)
            assert whole is not None and whole.row == 1
            element[byte] ^= 1
    assert memory.check(states, blocks) is None


@pytest.mark.parametrize("layout", LAYOUTS[:4], ids=names)
def test_content_in_the_wrong_place_is_found(layout: BlockLayout) -> None:
    pools, memory = open_tier(layout, "device")
    states = states_of(layout, 1)
    block = np.array([3])
    view = view_of(pools, layout, "device", 3)
    for axis in range(4):
        memory.write(states, block)
        assert memory.check(states, block) is None
        view[...] = np.roll(view, 1, axis=axis)
        assert memory.check(states, block) is not None, f"axis {axis} rolled unseen"
    memory.write(states_of(layout, 1, first=1), block)
    assert memory.check(states, block) is not None
