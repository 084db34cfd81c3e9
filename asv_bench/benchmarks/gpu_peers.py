"""Copies of other projects on a GPU, in turn with those of kvpool, where their wheels are installed."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from kvpool.device.regions import BYTES, FROM, TO

from . import gpu_cases
from .gpu_cases import LOAD, SAVE, Figures, KvCopies, Scenes

Copy = Callable[[], object]
"""Copies the same bytes as kvpool beside it, and may return before it is done."""


def tensor(memory: Any) -> Any:
    """An array of either tier for PyTorch, in place."""
    import torch

    return torch.from_numpy(memory) if isinstance(memory, np.ndarray) else torch.as_tensor(memory, device="cuda")


def columns(made: Scenes, way: int) -> list[Any]:
    """The addresses and sizes of all fragments, as vLLM takes them."""
    import torch

    return [torch.from_numpy(np.ascontiguousarray(column)) for column in made.work[way].rows.T]


def vllm_batched(made: Scenes, way: int) -> Copy:
    from vllm import _custom_ops

    fragments = columns(made, way)
    return lambda: _custom_ops.swap_blocks_batch(*fragments)


def vllm_triton(made: Scenes, way: int) -> Copy:
    """The Triton kernel that vLLM takes for small loads."""
    if way != LOAD:
        raise NotImplementedError("vLLM takes its Triton kernel for loads only")
    from vllm.v1.kv_offload.cpu import swap_blocks_triton

    fragments, chunk = columns(made, way), int(made.work[way].rows[0, BYTES])
    return lambda: swap_blocks_triton.swap_blocks_batch(*fragments, bytes_per_chunk=chunk)


def sglang(made: Scenes, way: int) -> Copy:
    """SGLang's kernel for one buffer, which takes the numbers of items."""
    import torch
    from sgl_kernel.kvcacheio import transfer_kv_per_layer_mla

    rows, size = made.work[way].rows, int(made.work[way].rows[0, BYTES])
    sides = [(FROM, way == LOAD), (TO, way == SAVE)]
    source, target = (tensor(made.tiers.memory[host]).view(-1, size) for _, host in sides)
    numbers = [torch.from_numpy((rows[:, side] - made.tiers.bases[host]) // size).cuda() for side, host in sides]
    of_both = {"src_indices": numbers[0], "dst_indices": numbers[1], "item_size": size}
    return lambda: transfer_kv_per_layer_mla(src=source, dst=target, **of_both)


def lmcache(made: KvCopies, gather: bool) -> Copy:
    """LMCache's kernel for all layers of a paged cache. A layer is [K and V, blocks, tokens, heads, elements]."""
    from lmcache import device_ops, lmcache_native

    way, layout = lmcache_native.TransferDirection, lmcache_native.EngineKVFormat.NL_X_TWO_NB_BS_NH_HS
    cache = made.cache
    staged, bases, where = tensor(made.staging), tensor(cache.bases[0].copy()), tensor(made.slots)
    arguments = staged, bases.to(where.device), where, where.device, cache.slots, way.D2H if gather else way.H2D, layout
    shape = {"block_size": cache.tokens_per_block, "head_size": cache.planes[0].run_bytes // staged.element_size()}
    return lambda: device_ops.multi_layer_kv_transfer(*arguments, **shape)


PEERS = {"vLLM, batched": vllm_batched, "vLLM, Triton": vllm_triton, "sgl-kernel": sglang}


def peer_copy(make: Callable[..., Copy], *arguments: Any) -> Copy:
    """Return a peer's copy. Raises NotImplementedError if its wheel is not installed or does not fit this machine."""
    try:
        return make(*arguments)
    except Exception as error:
        raise NotImplementedError(f"{make.__name__} is not measured: {type(error).__name__}: {error}") from error


class PeerCopies(Scenes):
    """The fragments of an engine with a HostCache, by one path of kvpool and by a peer."""

    def setup(self, peer: str, way: str, nbytes: int, path: str) -> None:  # type: ignore[override]
        super().setup(f"engine, {way}", nbytes, path)
        self.peer = peer_copy(PEERS[peer], self, SAVE if way == "save" else LOAD)

    def figures(self) -> Figures:
        return alternating(self.enqueue_all, self.peer, self.copied_bytes)


class PeerTokens(KvCopies):
    """Tokens between the device tier and contiguous staging, by kvpool and by LMCache."""

    def setup(self, direction: str, staging: str) -> None:  # type: ignore[override]
        super().setup(direction, staging, "layer_first")
        self.peer = peer_copy(lmcache, self, direction == "gather")

    def figures(self) -> Figures:
        return alternating(self.copy_tokens, self.peer, self.nbytes)


def alternating(kvpool_copy: Copy, peer: Copy, nbytes: int) -> Figures:
    """Return the median times per byte of alternating copies, until all is done. The first round warms up."""
    from cupy.cuda.runtime import deviceSynchronize

    names = {"time_per_byte": kvpool_copy, "time_per_byte_of_peer": peer}
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(gpu_cases.SIZES.rounds + 1):
        for name, copy in names.items():
            begin = perf_counter()
            copy()
            deviceSynchronize()
            times[name].append(perf_counter() - begin)
    return {name: 1e12 * median(seconds[1:]) / nbytes for name, seconds in times.items()}
