"""Layer groups: every argument is checked with the right error, and bytes are split in proportion to what one sequence
keeps."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpool import BlockLayout, KVCacheManager, LayerGroup
from kvpool.pool import split_blocks
from kvpool.pool.config import capacities_argument, groups_argument


def layout(tokens: int = 16, heads: int = 2, layers: int = 1) -> BlockLayout:
    return BlockLayout(layers=layers, kv_heads=heads, head_dim=8, tokens_per_block=tokens)


STATE = layout(tokens=1, heads=40)
FULL, WINDOWED, RECURRENT = (
    LayerGroup(layout()),
    LayerGroup(layout(), window=64, sinks=4),
    LayerGroup(STATE, kind="recurrent"),
)
CROSS = LayerGroup(layout(), kind="cross")


def test_a_group_says_what_its_blocks_hold() -> None:
    parts = [layout(heads=2), layout(heads=8, layers=3)]
    group = LayerGroup(parts, window=np.int32(64), sinks=np.int64(4))
    assert group.layouts == tuple(parts)
    assert group.block_bytes == sum(part.block_bytes for part in parts)
    assert (group.window, group.sinks, group.kind, group.snapshot_tokens) == (64, 4, "attention", None)
    assert type(group.window) is type(group.sinks) is int


@pytest.mark.parametrize(
    ("groups", "given", "width"),
    [
        ((FULL, WINDOWED, RECURRENT, CROSS), None, 16),
        ([RECURRENT, CROSS], None, 16),
        ([RECURRENT], 32, 32),
        ([FULL, LayerGroup(STATE, kind="recurrent", snapshot_tokens=48)], None, 16),
    ],
)
def test_groups_agree_on_the_tokens_of_a_block(groups: Any, given: int | None, width: int) -> None:
    assert groups_argument(groups, given) == (tuple(groups), width)


def test_capacities_are_one_number_for_each_group() -> None:
    two, one = (FULL, WINDOWED), (FULL,)
    for value, groups, capacities in (
        ([5, np.int64(7)], two, (5, 7)),
        (np.array([5, 7]), two, (5, 7)),
        (9, one, (9,)),
        ([9], one, (9,)),
        (np.array(9), one, (9,)),
    ):
        assert capacities_argument("device_blocks", value, groups) == capacities
    assert capacities_argument("host_blocks", [0, 7], two) == (0, 7)
    assert capacities_argument("host_blocks", 0, two) == (0, 0)


def test_global_ids_have_all_device_blocks_first() -> None:
    groups = [FULL, WINDOWED, CROSS]
    with KVCacheManager(groups=groups, device_blocks=[5, 7, 2], host_blocks=[0, 3, 4], device="cpu") as cache:
        assert [
            (g.index, g.device_blocks, g.first_device_block, g.host_blocks, g.first_host_block) for g in cache.groups
        ] == [
            (0, 5, 0, 0, 14),
            (1, 7, 5, 3, 14),
            (2, 2, 12, 4, 17),
        ]
        assert [(g.kind, g.window) for g in cache.groups] == [("attention", None), ("attention", 64), ("cross", None)]
        assert {g.block_bytes for g in cache.groups} == {layout().block_bytes}


# -- the split of a tier's bytes
# --------------------------------------------------------------------------------------------------------


def shares(groups: list[LayerGroup], nbytes: int, **options: Any) -> list[float]:
    return [
        blocks * group.block_bytes / nbytes
        for blocks, group in zip(split_blocks(groups, nbytes, **options), groups, strict=True)
    ]


def test_windows_of_equal_layers_get_bytes_in_proportion() -> None:
    groups = [LayerGroup(layout(), window=window) for window in (1024, 4096, 8192)]
    assert shares(groups, 1 << 30, max_sequence_tokens=32768) == pytest.approx([0.077, 0.308, 0.615], abs=0.001)


@pytest.mark.parametrize("group", [FULL, CROSS], ids=["full", "cross"])
def test_full_attention_counts_as_a_window_of_the_longest_sequence(group: LayerGroup) -> None:
    window = LayerGroup(layout(), window=3072)
    assert shares([window, group], 1 << 24, max_sequence_tokens=100) == pytest.approx([0.5, 0.5], abs=0.001)
    assert split_blocks([WINDOWED, group], 1 << 24, max_sequence_tokens=3072) == split_blocks(
        [WINDOWED, window], 1 << 24, max_sequence_tokens=9999
    )


def test_layers_and_parts_of_a_group_count() -> None:
    groups = [FULL, LayerGroup([layout(layers=2), layout(heads=4)])]
    assert split_blocks(groups, 10_000 * layout().block_bytes, max_sequence_tokens=64) == [2000, 2000]


def test_a_recurrent_group_counts_its_states() -> None:
    def states(tokens: int | None) -> list[int]:
        groups = [LayerGroup(STATE, kind="recurrent", snapshot_tokens=tokens), FULL]
        return split_blocks(groups, 100 * (5 * STATE.block_bytes + 64 * layout().block_bytes), max_sequence_tokens=1024)

    assert states(320) == [500, 6400]  # 3 on the way, the prompt's and the running one; 64 blocks of 16 tokens
    states_at_the_end, blocks = states(None)
    assert states_at_the_end == pytest.approx(blocks * 2 / 64, rel=0.01)
    assert blocks > 6400


def test_a_pool_of_recurrent_groups_is_split_by_its_tokens_per_block() -> None:
    groups = [LayerGroup(STATE, kind="recurrent", snapshot_tokens=64), RECURRENT]
    assert split_blocks(groups, 8 * STATE.block_bytes, max_sequence_tokens=256, tokens_per_block=32) == [6, 2]


@pytest.mark.parametrize("seed", range(20))
def test_a_split_wastes_no_block_of_the_largest_group_and_never_passes_the_bytes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shapes = [
        layout(heads=int(heads), layers=int(layers))
        for heads, layers in rng.integers(1, 9, size=(rng.integers(1, 5), 2))
    ]
    groups = [LayerGroup(shape, window=int(rng.integers(1, 2000)), sinks=int(rng.integers(9))) for shape in shapes]
    nbytes = int(rng.integers(1 << 24, 1 << 26))
    blocks = split_blocks(groups, nbytes, max_sequence_tokens=1500)
    rest = nbytes - sum(count * group.block_bytes for count, group in zip(blocks, groups, strict=True))
    assert min(blocks) >= 1
    assert 0 <= rest < max(group.block_bytes for group in groups), f"seed {seed}"


def test_too_few_bytes_are_refused_with_those_that_are_needed() -> None:
    groups = [FULL, LayerGroup(layout(), window=16)]
    message = r"nbytes: expected (\d+) or more, for one block of groups\[1\], got 1000"
    with pytest.raises(ValueError, match=message) as raised:
        split_blocks(groups, 1000, max_sequence_tokens=1024)
    needed = int(re.findall(message, str(raised.value))[0])
    assert split_blocks(groups, needed, max_sequence_tokens=1024) == [64, 1]


# -- what is refused


def group(layout: Any = FULL.layouts, **options: Any) -> LayerGroup:
    return LayerGroup(layout, **options)


def state(**options: Any) -> LayerGroup:
    return LayerGroup(STATE, kind="recurrent", **options)


def capacities(**given: Any) -> tuple[int, ...]:
    ((name, value),) = given.items()
    return capacities_argument(name, value, (FULL, WINDOWED))


def split(groups: Any = (FULL, WINDOWED), nbytes: Any = 1 << 20, max_sequence_tokens: Any = 1024) -> list[int]:
    return split_blocks(groups, nbytes, max_sequence_tokens=max_sequence_tokens)


def groups_of(groups: Any, tokens_per_block: Any = None) -> object:
    return groups_argument(groups, tokens_per_block)


REFUSED: list[tuple[Callable[..., object], dict[str, Any], str]] = [
    (group, {"layout": None}, "layout: expected a BlockLayout.*got None"),
    (group, {"layout": [layout(), "x"]}, "layout: "),
    (group, {"layout": [layout(16), layout(8)]}, r"layout: .* the same tokens_per_block, got \[8, 16\]"),
    *((group, {"window": window}, f"window: .*{window}") for window in (0, True, 8.0)),
    (group, {"sinks": 4}, "sinks: expected 0 without a window.*got 4"),
    (group, {"kind": "full"}, "kind: expected one of attention, recurrent, cross.*got 'full'"),
    (group, {"kind": "cross", "window": 8}, "window: expected None in a cross group.*got 8"),
    (group, {"kind": "recurrent"}, "tokens_per_block: expected 1 in a recurrent group.*got 16"),
    (group, {"snapshot_tokens": 64}, "snapshot_tokens: expected None in a group of kind attention.*got 64"),
    (state, {"window": 8}, "window: expected None in a recurrent group.*got 8"),
    *((state, {"snapshot_tokens": tokens}, "snapshot_tokens: ") for tokens in (0, "64")),
    (groups_of, {"groups": FULL}, "groups: "),
    (groups_of, {"groups": [layout()]}, "groups: .*a list of LayerGroup"),
    (groups_of, {"groups": [CROSS]}, "groups: expected one at least that is for attention or recurrent, got "),
    (groups_of, {"groups": [FULL, group(layout(8))]}, r"groups\[1\].*: expected 16, as in groups\[0\], got 8"),
    (groups_of, {"groups": [RECURRENT, FULL, group(layout(8), kind="cross")]}, r"groups\[2\].*as in groups\[1\]"),
    (groups_of, {"groups": [FULL], "tokens_per_block": 16}, r"expected None, since groups\[0\] says 16.*got 16"),
    *((groups_of, {"groups": [RECURRENT], "tokens_per_block": n}, "tokens_per_block: ") for n in (None, 0, "x")),
    (groups_of, {"groups": [state(snapshot_tokens=40), FULL]}, r"groups\[0\].*multiple of tokens_per_block=16, got 40"),
    (capacities, {"device_blocks": 9}, "device_blocks: expected a list of 2 numbers.*got 9"),
    (capacities, {"device_blocks": [9]}, "device_blocks: expected one for each of the 2 groups.*got 1"),
    (capacities, {"host_blocks": [9, -1]}, r"host_blocks\[1\]: .*-1"),
    (capacities, {"host_blocks": [9, 2.0]}, r"host_blocks\[1\]: .*2.0"),
    (split, {"groups": [RECURRENT]}, "tokens_per_block: "),
    *((split, {"nbytes": nbytes}, "nbytes: ") for nbytes in (0, 1e9)),
    *((split, {"max_sequence_tokens": tokens}, "max_sequence_tokens: ") for tokens in (0, None)),
]


@pytest.mark.parametrize(("call", "arguments", "message"), REFUSED)
def test_wrong_arguments_are_refused_by_name(call: Callable[..., object], arguments: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call(**arguments)
