"""The block copy in plain NumPy: slow, obvious, and the oracle of every device."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.device.base import SOURCE, TARGET, TOKENS
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
