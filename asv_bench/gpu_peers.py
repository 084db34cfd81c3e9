"""Copies of other projects on a GPU, in turn with those of kvpool, where their wheels are installed: a part of
``asv_bench.gpu_table``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from asv_bench.benchmarks.gpu import LOAD, REPEATS, SAVE, KvCopies, Scenes
from kvpool.common.arrays.paged import PagedKV
from kvpool.device.cuda.calibration import PATHS
from kvpool.device.regions import BYTES, FROM, TO

SIZES = (4 << 10, 16 << 10, 64 << 10)
Copies = Iterator[tuple[str, Callable[[], object]]]
"""Names, and calls that copy the same bytes as the path beside them, and may return before it is done."""


def tensor(memory: Any) -> Any:
    """An array of either tier for PyTorch, in place."""
    import torch

    return torch.from_numpy(memory) if isinstance(memory, np.ndarray) else torch.as_tensor(memory, device="cuda")


def vllm(made: Scenes, way: int) -> Copies:
    """vLLM's batched copy, and the Triton kernel that it takes for small loads. Both take addresses and sizes."""
    import torch
    from vllm import _custom_ops
    from vllm.v1.kv_offload.cpu import swap_blocks_triton

    rows = made.work[way].rows
    columns = [torch.from_numpy(np.ascontiguousarray(column)) for column in rows.T]
    yield "vLLM, batched", lambda: _custom_ops.swap_blocks_batch(*columns)
    if way == LOAD:
        chunk = int(rows[0, BYTES])
        yield "vLLM, Triton", lambda: swap_blocks_triton.swap_blocks_batch(*columns, bytes_per_chunk=chunk)


def sglang(made: Scenes, way: int) -> Copies:
    """SGLang's kernel for one buffer, which takes the numbers of items."""
    import torch
    from sgl_kernel.kvcacheio import transfer_kv_per_layer_mla

    assert made.tiers is not None
    rows, size = made.work[way].rows, int(made.work[way].rows[0, BYTES])
    ends = [(FROM, way == LOAD), (TO, way == SAVE)]
    source, target = (tensor(made.tiers.memory[host]).view(-1, size) for _, host in ends)
    numbers = [torch.from_numpy((rows[:, end] - made.tiers.bases[host]) // size).cuda() for end, host in ends]
    of_both = {"src_indices": numbers[0], "dst_indices": numbers[1], "item_size": size}
    yield "sgl-kernel", lambda: transfer_kv_per_layer_mla(src=source, dst=target, **of_both)


def lmcache(cache: PagedKV, staging: Any, slots: Any, gather: bool) -> Copies:
    """LMCache's kernel for all layers of a paged cache. A layer is [K and V, blocks, tokens, heads, elements]."""
    from lmcache import device_ops, lmcache_native

    way, layout = lmcache_native.TransferDirection, lmcache_native.EngineKVFormat.NL_X_TWO_NB_BS_NH_HS
    staged, bases, where = tensor(staging), tensor(cache.bases[0].copy()), tensor(slots)
    call_arguments = (
        staged,
        bases.to(where.device),
        where,
        where.device,
        cache.slots,
        way.D2H if gather else way.H2D,
        layout,
    )
    shape = {"block_size": cache.tokens_per_block, "head_size": cache.planes[0].run_bytes // staged.element_size()}
    yield "LMCache", lambda: device_ops.multi_layer_kv_transfer(*call_arguments, **shape)


def fragments(peers: Callable[[Scenes, int], Copies]) -> Iterator[str]:
    """A line for each way, size and path of kvpool."""
    for way, size, path in product((LOAD, SAVE), SIZES, PATHS):
        scene, made = ("engine, load", "engine, save")[way], Scenes()
        try:
            made.setup(scene, path, size)
            for peer in peers(made, way):
                yield f"{scene}, {size:,} bytes: {in_turn([(path, made.enqueue_all), peer], made.copied_bytes)}"
        except NotImplementedError as error:
            yield f"{scene}, {size:,} bytes: {error}"
        finally:
            made.teardown()


def tokens() -> Iterator[str]:
    """A line for each way and place of the staging."""
    for way, place in product(*KvCopies.params):
        made = KvCopies()
        try:
            made.setup(way, place)
            for peer in lmcache(made.cache, made.staging, made.slots, way == "gather"):
                yield f"{way}, staging in {place} memory: {in_turn([('kvpool', made._copy_tokens), peer], made.nbytes)}"
        finally:
            made.teardown()


PEERS = {"vLLM": lambda: fragments(vllm), "sgl-kernel": lambda: fragments(sglang), "LMCache": tokens}


def peer_rows() -> Iterator[str]:
    """The medians of alternating runs of kvpool and of a peer, in GB/s."""
    for name, lines in PEERS.items():
        try:
            yield from lines()
        except Exception as error:  # A wheel that is not there, or does not fit this machine.
            yield f"{name} is not measured: {type(error).__name__}: {error}"


def in_turn(copies: list[tuple[str, Callable[[], object]]], nbytes: int) -> str:
    """Times until all is done. The first run of each warms up."""
    from cupy.cuda.runtime import deviceSynchronize

    times: dict[str, list[float]] = {name: [] for name, _ in copies}
    for _ in range(REPEATS + 1):
        for name, copy in copies:
            begin = perf_counter()
            copy()
            deviceSynchronize()
            times[name].append(perf_counter() - begin)
    return ", ".join(f"{name} {nbytes / median(some[1:]) / 1e9:.1f} GB/s" for name, some in times.items())
