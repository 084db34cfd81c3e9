"""Layer groups: every argument is checked with the right error, and bytes are split in proportion to what one sequence
keeps."""

from __future__ import annotations

import re
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
    assert group.block_bytes == sum(part.block_bytes for part in parts) == 16 * 2 * 8 * 2 * (2 + 24)
    assert (group.window, group.sinks, group.kind, group.snapshot_tokens) == (64, 4, "attention", None)
    assert type(group.window) is type(group.sinks) is int
    assert FULL.layouts == (layout(),)


def test_groups_that_mean_the_same_are_equal_and_hash_alike() -> None:
    same = {LayerGroup(layout()), LayerGroup([layout()]), LayerGroup((layout(),), sinks=0, window=None)}
    assert len(same) == 1
    assert len({LayerGroup(layout()), LayerGroup(layout(), window=8), LayerGroup([layout(), layout()])}) == 3


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"layout": None}, TypeError, "layout: expected a BlockLayout.*got None"),
        ({"layout": []}, TypeError, r"layout: .*\[\]"),
        ({"layout": [layout(), "x"]}, TypeError, "layout: .*"),
        (
            {"layout": [layout(16), layout(8)]},
            ValueError,
            r"layout: expected parts with the same tokens_per_block, got \[8, 16\]",
        ),
        ({"window": 0}, ValueError, "window: .*0"),
        ({"window": True}, TypeError, "window: .*True"),
        ({"window": 8.0}, TypeError, "window: .*8.0"),
        ({"window": 8, "sinks": -1}, ValueError, "sinks: .*-1"),
        ({"sinks": 4}, ValueError, "sinks: expected 0 without a window.*got 4"),
        ({"kind": 3}, TypeError, "kind: .*3"),
        ({"kind": "full"}, ValueError, "kind: expected one of attention, recurrent, cross.*got 'full'"),
        ({"kind": "cross", "window": 8}, ValueError, "window: expected None in a cross group.*got 8"),
        (
            {"layout": STATE, "kind": "recurrent", "window": 8},
            ValueError,
            "window: expected None in a recurrent group.*got 8",
        ),
        ({"kind": "recurrent"}, ValueError, "tokens_per_block: expected 1 in a recurrent group.*got 16"),
        ({"snapshot_tokens": 64}, ValueError, "snapshot_tokens: expected None in a group of kind attention.*got 64"),
        ({"layout": STATE, "kind": "recurrent", "snapshot_tokens": 0}, ValueError, "snapshot_tokens: .*0"),
        ({"layout": STATE, "kind": "recurrent", "snapshot_tokens": "64"}, TypeError, "snapshot_tokens: .*'64'"),
    ],
)
def test_wrong_arguments_of_a_group_are_refused_by_name(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LayerGroup(**{"layout": layout()} | arguments)


@pytest.mark.parametrize(
    ("groups", "given", "width"),
    [
        ([FULL], None, 16),
        ((FULL, WINDOWED, RECURRENT, CROSS), None, 16),
        ([RECURRENT, CROSS], None, 16),
        ([RECURRENT], 32, 32),
        ([FULL, LayerGroup(STATE, kind="recurrent", snapshot_tokens=48)], None, 16),
    ],
)
def test_groups_agree_on_the_tokens_of_a_block(groups: Any, given: int | None, width: int) -> None:
    assert groups_argument(groups, given) == (tuple(groups), width)


@pytest.mark.parametrize(
    ("groups", "given", "error", "message"),
    [
        (FULL, None, TypeError, "groups: .*"),
        ([layout()], None, TypeError, "groups: .*a list of LayerGroup"),
        ([], None, ValueError, r"groups: expected one at least that is for attention or recurrent, got \[\]"),
        (
            [CROSS],
            None,
            ValueError,
            r"groups: expected one at least that is for attention or recurrent, got \['cross'\]",
        ),
        (
            [FULL, LayerGroup(layout(8))],
            None,
            ValueError,
            r"groups\[1\]\.tokens_per_block: expected 16, as in groups\[0\], got 8",
        ),
        ([RECURRENT, FULL, LayerGroup(layout(8), kind="cross")], None, ValueError, r"groups\[2\].*as in groups\[1\]"),
        ([FULL], 16, ValueError, r"tokens_per_block: expected None, since groups\[0\] says 16.*got 16"),
        ([RECURRENT], None, ValueError, "tokens_per_block: expected .*, got None"),
        ([RECURRENT], 0, ValueError, "tokens_per_block: .*0"),
        ([RECURRENT], "x", TypeError, "tokens_per_block: .*'x'"),
        (
            [LayerGroup(STATE, kind="recurrent", snapshot_tokens=40), FULL],
            None,
            ValueError,
            r"groups\[0\]\.snapshot_tokens: expected a multiple of tokens_per_block=16, got 40",
        ),
    ],
)
def test_groups_that_do_not_fit_together_are_refused_by_place(
    groups: Any, given: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        groups_argument(groups, given)


def test_capacities_are_one_number_for_each_group() -> None:
    two = (FULL, WINDOWED)
    assert capacities_argument("device_blocks", [5, np.int64(7)], two) == (5, 7)
    assert capacities_argument("device_blocks", np.array([5, 7]), two) == (5, 7)
    assert capacities_argument("host_blocks", [0, 7], two) == (0, 7)
    assert capacities_argument("host_blocks", 0, two) == (0, 0)
    assert (
        capacities_argument("device_blocks", 9, (FULL,)) == capacities_argument("device_blocks", [9], (FULL,)) == (9,)
    )
    assert capacities_argument("device_blocks", np.array(9), (FULL,)) == (9,)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("device_blocks", 9, ValueError, "device_blocks: expected a list of 2 numbers.*got 9"),
        ("host_blocks", 9, ValueError, "host_blocks: expected a list of 2 numbers.*got 9"),
        ("device_blocks", 0, ValueError, "device_blocks: .*0"),
        ("device_blocks", [9], ValueError, "device_blocks: expected one for each of the 2 groups.*got 1"),
        ("device_blocks", [9, 0], ValueError, r"device_blocks\[1\]: .*0"),
        ("host_blocks", [9, -1], ValueError, r"host_blocks\[1\]: .*-1"),
        ("host_blocks", [9, 2.0], TypeError, r"host_blocks\[1\]: .*2.0"),
        ("host_blocks", None, TypeError, "host_blocks: .*None"),
    ],
)
def test_wrong_capacities_are_refused_by_name(name: str, value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        capacities_argument(name, value, (FULL, WINDOWED))


def test_global_ids_have_all_device_blocks_first() -> None:
    groups = [FULL, WINDOWED, CROSS]
    with KVCacheManager(groups=groups, device_blocks=[5, 7, 2], host_blocks=[0, 3, 4], device="cpu") as cache:
        layer_groups = cache.groups
    assert [(g.index, g.kind, g.window, g.device_blocks, g.host_blocks) for g in layer_groups] == [
        (0, "attention", None, 5, 0),
        (1, "attention", 64, 7, 3),
        (2, "cross", None, 2, 4),
    ]
    assert [g.first_device_block for g in layer_groups] == [0, 5, 12]
    assert [g.first_host_block for g in layer_groups] == [14, 14, 17]
    assert [g.block_bytes for g in layer_groups] == [layout().block_bytes] * 3


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


def test_full_attention_counts_as_a_window_of_the_longest_sequence() -> None:
    windowed = [LayerGroup(layout(), window=1000, sinks=24), LayerGroup(layout(), window=3072)]
    assert split_blocks([windowed[0], FULL], 1 << 24, max_sequence_tokens=3072) == split_blocks(
        windowed, 1 << 24, max_sequence_tokens=9999
    )
    assert shares([windowed[1], FULL], 1 << 24, max_sequence_tokens=100) == pytest.approx([0.5, 0.5], abs=0.001)


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


def test_a_cross_group_counts_an_encoder_as_long_as_the_longest_sequence() -> None:
    cross, full = (split_blocks([WINDOWED, other], 1 << 20, max_sequence_tokens=1024) for other in (CROSS, FULL))
    assert cross == full


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
    with pytest.raises(
        ValueError, match=r"nbytes: expected (\d+) or more, for one block of groups\[1\], got 1000"
    ) as raised:
        split_blocks(groups, 1000, max_sequence_tokens=1024)
    needed = int(re.findall(r"expected (\d+) or more", str(raised.value))[0])
    assert split_blocks(groups, needed, max_sequence_tokens=1024) == [64, 1]
    with pytest.raises(ValueError, match=r"nbytes: expected \d+ or more"):
        split_blocks(groups, needed - 1, max_sequence_tokens=1024)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"groups": []}, ValueError, r"groups: expected one at least that is for attention or recurrent, got \[\]"),
        ({"nbytes": 0}, ValueError, "nbytes: .*0"),
        ({"nbytes": 1e9}, TypeError, "nbytes: .*1000000000.0"),
        ({"max_sequence_tokens": 0}, ValueError, "max_sequence_tokens: .*0"),
        ({"max_sequence_tokens": None}, TypeError, "max_sequence_tokens: .*None"),
        ({"tokens_per_block": 16}, ValueError, "tokens_per_block: expected None.*got 16"),
        ({"groups": [RECURRENT]}, ValueError, "tokens_per_block: expected .*, got None"),
    ],
)
def test_wrong_arguments_of_a_split_are_refused_by_name(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    options = {"groups": [FULL, WINDOWED], "nbytes": 1 << 20, "max_sequence_tokens": 1024} | arguments
    with pytest.raises(error, match=message):
        split_blocks(**options)


def test_a_pool_of_recurrent_groups_is_split_by_its_tokens_per_block() -> None:
    groups = [LayerGroup(STATE, kind="recurrent", snapshot_tokens=64), RECURRENT]
    assert split_blocks(groups, 8 * STATE.block_bytes, max_sequence_tokens=256, tokens_per_block=32) == [6, 2]
