"""A loader in a process of its own: attaches the device tier of another process's pool, and brings KV into a reservation there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvpool import BlockLayout, PagedKV, scatter_kv

Attach = Callable[[], tuple[Any, Any, Callable[[], None]]]
"""Gives the flat bytes of a device tier, a stream or None, and what waits for the stream and detaches."""


class MappedFile:
    """A device tier in main memory, which is a file that both processes map."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self) -> tuple[Any, Any, Callable[[], None]]:
        return np.asarray(np.memmap(self.path, np.uint8, "r+")), None, lambda: None


class CudaHandle:
    """A device tier on a GPU, by CUDA IPC: ``pool`` is the CuPy array of the process that owns it.

    A handle is that of the whole allocation; the tier begins somewhere inside.
    """

    def __init__(self, cupy: Any, pool: Any) -> None:
        base = pool.data.mem.ptr
        self.handle, self.first, self.nbytes = cupy.cuda.runtime.ipcGetMemHandle(base), pool.data.ptr - base, pool.nbytes

    def __call__(self) -> tuple[Any, Any, Callable[[], None]]:
        import cupy

        pointer = cupy.cuda.runtime.ipcOpenMemHandle(self.handle)
        memory = cupy.cuda.UnownedMemory(pointer, self.first + self.nbytes, None)
        array = cupy.ndarray((self.nbytes,), np.uint8, memptr=cupy.cuda.MemoryPointer(memory, self.first))
        stream = cupy.cuda.Stream(non_blocking=True)

        def detach() -> None:
            stream.synchronize()
            cupy.cuda.runtime.ipcCloseMemHandle(pointer)

        return array, stream, detach


def on_device(content: np.ndarray, pool: Any) -> Any:
    """The content where ``pool`` is."""
    if isinstance(pool, np.ndarray):
        return content
    import cupy

    copied = cupy.asarray(content)
    cupy.cuda.Device().synchronize()
    return copied


def load(attach: Attach, layout: BlockLayout, blocks: int, slots: np.ndarray, content: np.ndarray, skip: int) -> None:
    """What the process does, from beginning to end: when it is over, the bytes are there."""
    flat, stream, detach = attach()
    pool = flat.view(layout.storage_dtype).reshape(layout.device_shape(blocks))
    source = on_device(content, pool)
    scatter_kv(PagedKV.of_pool(layout, pool), slots, source, skip_prefix_n_tokens=skip, stream=stream)
    detach()
