"""Export: the memory of a pool for arrays of other packages, by DLPack and ``__cuda_array_interface__``; and what of it is still held."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from kvpool import dlpack
from kvpool.device.base import Device
from kvpool.memory import MemoryPools
from kvpool.strided import StridedArray

_LEGACY_STREAM = 1


class Loan:
    """Memory in the hands of another package; lives as long as anything that was made of it."""

    __slots__ = ("__weakref__", "memory")

    def __init__(self, memory: Any) -> None:
        self.memory = memory


class Place(NamedTuple):
    """Which memory of a pool: of a tier, the blocks of a group of layers, and of these one part."""

    tier: str
    group: int
    part: int


class Lending:
    """How one pool lends its memory; ``loans`` are those that live. Thread-safe.

    ``open_pool`` gives the state lock, and raises PoolClosed inside it; ``follow`` has a stream wait for all copies enqueued so far.
    """

    def __init__(
        self, device: Device, pools: MemoryPools, loans: WeakSet[Loan], open_pool: Callable[[], AbstractContextManager[Any]],
        follow: Callable[[Any], None],
    ) -> None:  # fmt: skip
        self.device, self.pools, self.follow = device, pools, follow
        self._loans, self._open_pool = loans, open_pool

    def lend(self, place: Place) -> Loan:
        """A new loan, which keeps the memory of a place. Raises PoolClosed."""
        with self._open_pool():
            loan = Loan(self.pools.flat(*place))
            self._loans.add(loan)
            return loan


class Export:
    """A tier of a pool, or a part of it, for whatever takes arrays. Made by ``KVCacheManager.export``; nothing is ever copied.

    ``numpy.from_dlpack``, ``jax.dlpack.from_dlpack``, ``torch.from_dlpack`` and whatever else knows DLPack (0.x and 1.x) take it; main
    memory also goes to ``numpy.asarray``, memory of a GPU to whatever knows ``__cuda_array_interface__`` (3). An index of
    integers, slices and an ellipsis gives the export of that part.

    Attributes: ``tier``, ``group`` and ``part``; ``shape`` and ``strides`` (bytes); ``dtype``, the name of the element type, as in the
    layout, or (``raw``) of the integers that NumPy keeps it as; ``writable``. Thread-safe, immutable; keeps the pool, but holds none of
    its memory. What was made of it does, until it is gone: the pool does not close before.

    Streams: who asks for memory of a GPU, or for pinned memory, on a stream waits there for all copies that the pool has enqueued so far;
    ``__cuda_array_interface__`` names the legacy default stream, which then waits for them. Later ones are ordered by the ``stream`` of the
    pool's calls, and for the host by leases, as everywhere.
    """

    __slots__ = ("__weakref__", "_lending", "_loan", "_place", "_view", "dtype", "writable")

    def __init__(self, lending: Lending, place: Place, view: npt.NDArray[Any], dtype: str, writable: bool) -> None:
        # The view is an array of the right shape and strides that is never read: an index of it tells where a part lies.
        self._lending, self._place, self._view = lending, place, view
        self._loan: Loan | None = None
        self.dtype, self.writable = dtype, writable

    @classmethod
    def of_place(cls, lending: Lending, place: Place, writable: bool, raw: bool) -> Export:
        """All that is there. Raises PoolClosed."""
        pools = lending.pools
        layout, address, size = pools.layouts[place.group][place.part], pools.address(*place), pools.flat(*place).nbytes
        blocks = size // layout.block_bytes
        shape = layout.device_shape(blocks) if place.tier == "device" else layout.host_shape(blocks)
        storage = layout.storage_dtype
        view = StridedArray(address, shape, storage.itemsize, kind=storage.kind).host_view()
        return cls(lending, place, view, storage.name if raw else layout.dtype_name, writable)

    @property
    def tier(self) -> str:
        return self._place.tier

    @property
    def group(self) -> int:
        return self._place.group

    @property
    def part(self) -> int:
        return self._place.part

    @property
    def shape(self) -> tuple[int, ...]:
        return self._view.shape

    @property
    def strides(self) -> tuple[int, ...]:
        return self._view.strides

    def __getitem__(self, index: Any) -> Export:
        """The export of a part. Raises TypeError, IndexError."""
        parts = index if isinstance(index, tuple) else (index,)
        for part in parts:
            if isinstance(part, (bool, np.bool_)) or not (part is Ellipsis or isinstance(part, (int, np.integer, slice))):
                raise TypeError(f"index={index!r:.80}: accepted are integers, slices and an ellipsis")
        # With the ellipsis it is always a view, and nothing is read.
        found = self._view[parts if Ellipsis in parts else (*parts, ...)]
        return Export(self._lending, self._place, found, self.dtype, self.writable)

    def __repr__(self) -> str:
        return f"Export({self.tier!r}, shape={self.shape}, dtype={self.dtype!r}, writable={self.writable})"

    # -- protocols -------------------------------------------------------------------------------

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._lending.device.dlpack_device(self.tier)

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None) -> Any:
        """A capsule. Raises BufferError for what cannot be given, ValueError for a stream that means nothing, PoolClosed, DeviceError."""
        device = self.__dlpack_device__()
        if device[0] == dlpack.CPU:
            dlpack.check_no_stream(stream)
        elif stream == 0:
            raise ValueError("stream=0: DLPack has 1 for the legacy default stream; accepted are that, a handle, None (as 1), -1 (no wait)")
        elif stream != -1:
            self._lending.follow(_LEGACY_STREAM if stream is None else stream)
        return dlpack.make_capsule(
            self._lent(), device, dtype=self.dtype, writable=self.writable, max_version=max_version, dl_device=dl_device, copy=copy
        )  # fmt: skip

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Main memory as a NumPy array of the storage type, for ``numpy.asarray``."""
        if self._memory != "host":
            raise TypeError("memory of a GPU is no NumPy array: accepted are packages for GPUs, through DLPack or __cuda_array_interface__")
        found = self._lent()
        if dtype is not None and np.dtype(dtype) != found.dtype:
            if copy is False:
                raise ValueError(f"dtype={dtype!r}: the memory holds {found.dtype}; accepted is that, or a copy")
            return found.astype(dtype)
        return found.copy() if copy else found

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Memory of a GPU; the export itself counts as a view from then on. AttributeError for other memory, and types without a name."""
        if self._memory != "device":
            raise AttributeError("main memory has no __cuda_array_interface__")
        if self.dtype in dlpack.TYPE_CODES:
            raise AttributeError(f"__cuda_array_interface__ has no name for {self.dtype}: export with raw=True, or use DLPack")
        self._lending.follow(_LEGACY_STREAM)
        self._loan = self._loan or self._lending.lend(self._place)
        interface = self._view.__array_interface__
        return {
            "version": 3,
            "shape": interface["shape"],
            "strides": interface["strides"],
            "typestr": interface["typestr"],
            "data": (interface["data"][0], not self.writable),
            "stream": _LEGACY_STREAM,
        }

    @property
    def _memory(self) -> str:
        return "device" if self.__dlpack_device__()[0] == dlpack.CUDA else "host"

    def _lent(self) -> Any:
        """The memory as an array of its own package, on loan."""
        found, loan = self._view, self._lending.lend(self._place)
        address, kind = found.__array_interface__["data"][0], found.dtype.kind
        place = StridedArray(address, found.shape, found.itemsize, found.strides, self._memory, kind, self.writable, loan)
        return self._lending.device.as_array(place)
