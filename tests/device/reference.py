"""What devices and kernels must do, in plain NumPy. It is slow and obvious, and the tests compare all others with
it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.common.arrays.layout import BlockLayout
from kvpool.device.regions import SOURCE, TARGET, TOKENS, Region


def block_view(layout: BlockLayout, device_pool: NDArray[Any], host_pool: NDArray[Any], block: int) -> NDArray[Any]:
    """One block as a view ``[layers, planes, tokens, heads, head_dim]``, for any layout.

    The pools have the shapes ``layout.device_shape`` and ``layout.host_shape``. ``block`` is an id of either tier.
    """
    blocks_axis = 2 if layout.order == "layer_first" else 0
    device_blocks = device_pool.shape[blocks_axis]
    if block < device_blocks:
        view = np.moveaxis(device_pool, blocks_axis, 0)[block]
    else:
        view = host_pool[block - device_blocks]
    return view if layout.tokens == "NHD" else view.swapaxes(2, 3)


def copy_blocks(
    layout: BlockLayout, device_pool: NDArray[Any], host_pool: NDArray[Any], moves: NDArray[np.int64]
) -> None:
    """``Device.copy_blocks``, row by row. The pools are as in ``block_view``. Moves are not checked."""
    for move in moves:
        source = block_view(layout, device_pool, host_pool, int(move[SOURCE]))
        target = block_view(layout, device_pool, host_pool, int(move[TARGET]))
        tokens = int(move[TOKENS])
        target[:, :, :tokens] = source[:, :, :tokens]


def move_tokens(layout: BlockLayout, device_pool: NDArray[Any], moves: NDArray[np.int64]) -> None:
    """``Device.move_tokens``, row by row."""
    nothing = np.empty(layout.host_shape(0), device_pool.dtype)
    for source, target in moves.tolist():
        (block, token), (to, place) = divmod(source, layout.tokens_per_block), divmod(target, layout.tokens_per_block)
        moved = block_view(layout, device_pool, nothing, block)[:, :, token]
        block_view(layout, device_pool, nothing, to)[:, :, place] = moved


def block_place(regions: Sequence[Region], block: int) -> tuple[int, int]:
    """The region of a block id of the pool, and the block's id there."""
    rest = block
    for number, region in enumerate(regions):
        if rest < region.device_blocks:
            return number, rest
        rest -= region.device_blocks
    for number, region in enumerate(regions):
        if rest < region.host_blocks:
            return number, region.device_blocks + rest
        rest -= region.host_blocks
    raise IndexError(block)


def copy_region_blocks(regions: Sequence[Region], moves: NDArray[np.int64]) -> None:
    """``copy_blocks`` for several regions. The pools of their parts are views as in ``block_view``."""
    for source, target, tokens, ticket in moves.tolist():
        region, first = block_place(regions, source)
        _, second = block_place(regions, target)
        for part in regions[region].parts:
            copy_blocks(*part, np.array([(first, second, tokens, ticket)]))


def move_region_tokens(regions: Sequence[Region], moves: NDArray[np.int64]) -> None:
    """``move_tokens`` for several regions, as in ``copy_region_blocks``."""
    width = max(region.tokens_per_block for region in regions)
    for source, target in moves.tolist():
        region, first = block_place(regions, source // width)
        _, second = block_place(regions, target // width)
        for part in regions[region].parts:
            local = [(first * width + source % width, second * width + target % width)]
            move_tokens(part.layout, part.device_pool, np.array(local))


def gather_kv(
    cache: NDArray[Any], slot_mapping: NDArray[Any], out: NDArray[Any], skip_prefix_n_tokens: int = 0
) -> None:
    """Read tokens of a paged cache into ``out``.

    ``cache`` is a view ``[planes, layers, blocks, tokens, heads, head_dim]`` of any strides. ``out`` is ``[planes,
    layers, n, heads, head_dim]``.
    """
    for t in range(skip_prefix_n_tokens, out.shape[2]):
        if slot_mapping[t] >= 0:
            block, token = divmod(int(slot_mapping[t]), cache.shape[3])
            out[:, :, t] = cache[:, :, block, token]


def scatter_kv(
    cache: NDArray[Any], slot_mapping: NDArray[Any], source: NDArray[Any], skip_prefix_n_tokens: int = 0
) -> None:
    """Write tokens of ``source`` into a paged cache: the reverse of ``gather_kv``. If two tokens have the same slot,
    the later one stays."""
    for t in range(skip_prefix_n_tokens, source.shape[2]):
        if slot_mapping[t] >= 0:
            block, token = divmod(int(slot_mapping[t]), cache.shape[3])
            cache[:, :, block, token] = source[:, :, t]


def step_tables(
    rows: Sequence[Sequence[int]], first: Sequence[int], counts: Sequence[int], tokens_per_block: int
) -> dict[str, NDArray[Any]]:
    """The tables of a step, by name. ``rows[i]`` are the blocks of the columns of sequence i, -1 where there is
    none."""
    slots, lengths = list[int](), [start + count for start, count in zip(first, counts, strict=True)]
    for row, start, length in zip(rows, first, lengths, strict=True):
        slots += [row[t // tokens_per_block] * tokens_per_block + t % tokens_per_block for t in range(start, length)]
    used = [list(row[: -(-length // tokens_per_block)]) for row, length in zip(rows, lengths, strict=True)]
    columns = max(map(len, used), default=0)
    blocks = [[block for block in row if block >= 0] for row in used]
    tables = {
        "seq_lens": lengths,
        "query_start_loc": np.cumsum([0, *counts]),
        "last_page_len": [(length - 1) % tokens_per_block + 1 if length else 0 for length in lengths],
        "table": np.array([row + [-1] * (columns - len(row)) for row in used]).reshape(len(used), columns),
        "indptr": np.cumsum([0, *map(len, blocks)]),
        "indices": [block for row in blocks for block in row],
    }
    return {"slot_mapping": np.array(slots, np.int64)} | {
        name: np.array(values, np.int32) for name, values in tables.items()
    }
