"""What the devices and kernels do, in plain NumPy: slow, obvious, and the oracle of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.device.base import SOURCE, TARGET, TOKENS, Region
from kvpool.layout import BlockLayout


def block_view(layout: BlockLayout, device_pool: NDArray[Any], host_pool: NDArray[Any], block: int) -> NDArray[Any]:
    """One block as a view ``[layers, planes, tokens, heads, head_dim]``, whatever the layout.

    The pools have the shapes ``layout.device_shape`` and ``layout.host_shape``; ``block`` is an id of either tier.
    """
    blocks_axis = 2 if layout.order == "layer_first" else 0
    device_blocks = device_pool.shape[blocks_axis]
    if block < device_blocks:
        view = np.moveaxis(device_pool, blocks_axis, 0)[block]
    else:
        view = host_pool[block - device_blocks]
    return view if layout.tokens == "NHD" else view.swapaxes(2, 3)


def copy_blocks(layout: BlockLayout, device_pool: NDArray[Any], host_pool: NDArray[Any], moves: NDArray[np.int64]) -> None:
    """What ``Device.copy_blocks`` means, row by row. The pools are views as in ``block_view``; moves are trusted."""
    for move in moves:
        source = block_view(layout, device_pool, host_pool, int(move[SOURCE]))
        target = block_view(layout, device_pool, host_pool, int(move[TARGET]))
        tokens = int(move[TOKENS])
        target[:, :, :tokens] = source[:, :, :tokens]


def move_tokens(layout: BlockLayout, device_pool: NDArray[Any], moves: NDArray[np.int64]) -> None:
    """What ``Device.move_tokens`` means, row by row."""
    nothing = np.empty(layout.host_shape(0), device_pool.dtype)
    for source, target in moves.tolist():
        (block, token), (to, place) = divmod(source, layout.tokens_per_block), divmod(target, layout.tokens_per_block)
        moved = block_view(layout, device_pool, nothing, block)[:, :, token]
        block_view(layout, device_pool, nothing, to)[:, :, place] = moved


def block_place(regions: Sequence[Region], block: int) -> tuple[int, int]:
    """The region of a block id of the pool, and its id there."""
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
    """As ``copy_blocks``, for regions whose parts have views as in ``block_view`` for their pools."""
    for source, target, tokens, ticket in moves.tolist():
        region, first = block_place(regions, source)
        _, second = block_place(regions, target)
        for part in regions[region].parts:
            copy_blocks(*part, np.array([(first, second, tokens, ticket)]))


def move_region_tokens(regions: Sequence[Region], moves: NDArray[np.int64]) -> None:
    """As ``move_tokens``, for regions as in ``copy_region_blocks``."""
    width = max(region.tokens_per_block for region in regions)
    for source, target in moves.tolist():
        region, first = block_place(regions, source // width)
        _, second = block_place(regions, target // width)
        for part in regions[region].parts:
            local = [(first * width + source % width, second * width + target % width)]
            move_tokens(part.layout, part.device_pool, np.array(local))


def gather_kv(cache: NDArray[Any], slot_mapping: NDArray[Any], out: NDArray[Any], skip_prefix_n_tokens: int = 0) -> None:
    """Tokens out of a paged cache, a view ``[planes, layers, blocks, tokens, heads, head_dim]`` of any strides, into
    ``out`` ``[planes, layers, n, heads, head_dim]``."""
    for t in range(skip_prefix_n_tokens, out.shape[2]):
        if slot_mapping[t] >= 0:
            block, token = divmod(int(slot_mapping[t]), cache.shape[3])
            out[:, :, t] = cache[:, :, block, token]


def scatter_kv(cache: NDArray[Any], slot_mapping: NDArray[Any], source: NDArray[Any], skip_prefix_n_tokens: int = 0) -> None:
    """The other way: tokens of ``source`` into the cache. Of two with one slot, the later one stays."""
    for t in range(skip_prefix_n_tokens, source.shape[2]):
        if slot_mapping[t] >= 0:
            block, token = divmod(int(slot_mapping[t]), cache.shape[3])
            cache[:, :, block, token] = source[:, :, t]


def gather_rows(table: NDArray[np.int32], rows: NDArray[Any], scale: int, offset: int, width: int) -> NDArray[np.int32]:
    """The first ``width`` columns of some rows of a block table, each id as ``id * scale + offset``; -1 stays."""
    found = table[rows, :width]
    return np.where(found == -1, np.int32(-1), found * np.int32(scale) + np.int32(offset)).astype(np.int32)


def slot_mapping(
    table: NDArray[np.int32], rows: NDArray[Any], first_tokens: NDArray[Any], indptr: NDArray[Any], tokens_per_block: int
) -> NDArray[np.int64]:
    """The slots of tokens of several sequences, one sequence after the other.

    Sequence i has the row ``rows[i]`` of the block table and the tokens from ``first_tokens[i]`` on, as many as
    ``indptr[i + 1] - indptr[i]``. A token beyond its row, or without a block, has the slot -1.
    """
    slots = np.full(indptr[-1], -1, dtype=np.int64)
    for i, row in enumerate(rows):
        for k in range(indptr[i], indptr[i + 1]):
            column, inside = divmod(int(first_tokens[i]) + int(k - indptr[i]), tokens_per_block)
            if column < table.shape[1] and table[row, column] != -1:
                slots[k] = int(table[row, column]) * tokens_per_block + inside
    return slots
