"""Export: lends the memory of a pool to arrays of other packages, by DLPack and ``__cuda_array_interface__``, and
counts what is still lent."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import numpy as np

from kvpool.common.arrays import Array, dlpack
from kvpool.common.arrays.layout import Tier
from kvpool.common.arrays.strided import StridedArray
from kvpool.device.base import Device
from kvpool.device.memory.pools import MemoryPools

_LEGACY_STREAM = 1


class Loan:
    """Memory that another package uses. It lives as long as any array that was made of it."""

    __slots__ = ("__weakref__", "memory")

    def __init__(self, memory: Any) -> None:
        self.memory = memory


class PinnedPointer(Protocol):
    """A ``cupy.cuda.PinnedMemoryPointer``: an address of pinned memory, and the bytes after it."""

    @property
    def ptr(self) -> int: ...
    def size(self) -> int: ...


class TierPlace(NamedTuple):
    """Which memory of a pool: a tier, a group of layers, and one part of the group."""

    tier: Tier
    group: int
    part: int


class Lending:
    """The memory that one pool lends. ``loans`` are the loans that still live. Thread-safe.

    ``lock`` returns the state lock, under which ``check_open`` raises PoolClosed. ``follow`` has a stream wait for all
    copies enqueued so far.
    """

    def __init__(
        self,
        device: Device,
        pools: MemoryPools,
        loans: WeakSet[Loan],
        lock: Callable[[], AbstractContextManager[Any]],
        check_open: Callable[[], None],
        follow: Callable[[Any], None],
    ) -> None:
        self.device, self.pools, self.follow = device, pools, follow
        self._loans, self._lock, self._check_open = loans, lock, check_open

    def lend(self, place: TierPlace) -> Loan:
        """A new loan, which keeps the memory of a place alive. Raises PoolClosed."""
        with self._lock():
            self._check_open()
            loan = Loan(self.pools.flat(*place))
            self._loans.add(loan)
            return loan


class Export:
    """A tier of a pool, or a part of it, as an array for other packages, without a copy.

    ``PoolMemory.export`` returns it. Pass it to ``torch.from_dlpack``, ``jax.dlpack.from_dlpack``,
    ``numpy.from_dlpack``, or any other function that takes DLPack (0.x and 1.x). ``numpy.asarray`` takes main memory,
    and consumers of ``__cuda_array_interface__`` (version 3) take GPU memory. An index of integers, slices and an
    ellipsis returns the export of that part.

    Attributes
    ----------
    tier : {"device", "host"}
        The tier.
    group : int
        The index of the group of layers.
    part : int
        The index of the layout in the group.
    dtype : str
        The name of the element type as in the layout; with ``raw``, of the integers in which NumPy stores it.
    writable : bool
        Whether arrays that are made of it can be written.

    Notes
    -----
    Immutable and thread-safe. An export keeps the pool object alive, and does not prevent ``KVCacheManager.close``.
    Arrays that are made of it do, until they are gone.

    If GPU memory or pinned memory is requested on a stream, that stream waits for all copies that the pool has enqueued
    so far. ``__cuda_array_interface__`` names the legacy default stream, which then waits for them. Later copies are
    ordered by the ``stream`` of the pool's calls, and for the host by leases.
    """

    __slots__ = ("__weakref__", "_lending", "_loan", "_place", "_view", "dtype", "group", "part", "tier", "writable")

    def __init__(self, lending: Lending, place: TierPlace, view: Array, dtype: str, writable: bool) -> None:
        # The view is an array of the right shape and strides that is never read. An index of it gives the place of a
        # part.
        self._lending, self._place, self._view = lending, place, view
        self.tier, self.group, self.part = place
        self._loan: Loan | None = None
        self.dtype, self.writable = dtype, writable

    @classmethod
    def of_place(cls, lending: Lending, place: TierPlace, writable: bool, raw: bool) -> Export:
        """Return the export of a whole place. Raises PoolClosed."""
        pools = lending.pools
        layout, address, size = pools.layouts[place.group][place.part], pools.address(*place), pools.flat(*place).nbytes
        shape = layout.tier_shape(place.tier, size // layout.block_bytes)
        storage = layout.storage_dtype
        view = StridedArray(address, shape, storage.itemsize, kind=storage.kind).host_view()
        return cls(lending, place, view, storage.name if raw else layout.dtype_name, writable)

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of elements along each axis."""
        return self._view.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """The number of bytes from an element to the next along each axis."""
        return self._view.strides

    def __getitem__(self, index: Any) -> Export:
        """Return the export of a part. Raises TypeError, IndexError."""
        parts = tuple(index) if isinstance(index, tuple) else (index,)
        for part in parts:
            if isinstance(part, (bool, np.bool_)) or not (
                part is Ellipsis or isinstance(part, (int, np.integer, slice))
            ):
                raise TypeError(f"index: expected integers, slices or an ellipsis, got {index!r:.80}")
        # With the ellipsis the result is always a view, and nothing is read.
        try:
            view = self._view[parts if any(part is Ellipsis for part in parts) else (*parts, ...)]
        except (OverflowError, ValueError):
            raise IndexError(f"index: expected indices of an array of shape {self.shape}, got {index!r:.80}") from None
        return Export(self._lending, self._place, view, self.dtype, self.writable)

    def __repr__(self) -> str:
        return f"Export({self.tier!r}, shape={self.shape}, dtype={self.dtype!r}, writable={self.writable})"

    # -- protocols -------------------------------------------------------------------------------

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._lending.device.views.places[self.tier]

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None
    ) -> Any:
        """Return a capsule. Raises BufferError for a request that cannot be met, ValueError for an unknown stream,
        PoolClosed, DeviceError."""
        device = self.__dlpack_device__()
        if device[0] == dlpack.CPU:
            dlpack.check_no_stream(stream)
        elif stream == 0:
            raise ValueError(
                "stream: expected a handle, 1 for the legacy default stream, None (as 1) or -1 (no wait), got 0"
            )
        elif stream != -1:
            self._lending.follow(_LEGACY_STREAM if stream is None else stream)
        return dlpack.make_capsule(
            self._lent(),
            device,
            dtype=self.dtype,
            writable=self.writable,
            max_version=max_version,
            dl_device=dl_device,
            copy=copy,
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return main memory as a NumPy array of the storage type, for ``numpy.asarray``."""
        if self._memory != "host":
            raise TypeError(
                "tier: expected main memory for a NumPy array, got memory of a GPU: packages for GPUs take it through "
                "DLPack or __cuda_array_interface__"
            )
        array = self._lent()
        if dtype is not None and np.dtype(dtype) != array.dtype:
            if copy is False:
                raise ValueError(f"dtype: expected {array.dtype}, or a copy, got {dtype!r:.80}")
            return array.astype(dtype)
        return array.copy() if copy else array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The description of GPU memory for other packages. From then on, the export itself counts as a view. Raises
        AttributeError for other memory, and for element types without a name."""
        if self._memory != "device":
            raise AttributeError("main memory has no __cuda_array_interface__")
        if self.dtype in dlpack.TYPE_CODES:
            raise AttributeError(
                f"__cuda_array_interface__ has no name for {self.dtype}: export with raw=True, or use DLPack"
            )
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

    def pinned_memory(self) -> PinnedPointer:
        """Return pinned memory as CuPy's pinned memory, which is also a buffer of bytes.

        Returns
        -------
        cupy.cuda.PinnedMemoryPointer
            It counts as a view, as an array does.

        Raises
        ------
        BufferError
            For a part with gaps.
        TypeError
            For memory that is not pinned.
        PoolClosed
            After the pool was closed.

        Notes
        -----
        It does not wait for copies: read only the blocks of a lease.
        """
        if self.__dlpack_device__()[0] != dlpack.CUDA_HOST:
            name = self._lending.device.name
            raise TypeError(
                f"tier: expected pinned memory, which is 'host' of the 'cuda' device, got {self.tier!r} of {name!r}"
            )
        if not self._view.flags.c_contiguous:
            raise BufferError(
                f"index: expected a part without gaps, got shape {self.shape} with strides {self.strides}"
            )
        view = self._view
        place = StridedArray(
            view.__array_interface__["data"][0], (view.nbytes,), 1, owner=self._lending.lend(self._place)
        )
        pinned: PinnedPointer = self._lending.device.views.pinned(place)
        return pinned

    @property
    def _memory(self) -> Tier:
        return "device" if self.__dlpack_device__()[0] == dlpack.CUDA else "host"

    def _lent(self) -> Any:
        """Return the memory as an array of its own package, on loan."""
        view, loan = self._view, self._lending.lend(self._place)
        address, kind = view.__array_interface__["data"][0], view.dtype.kind
        place = StridedArray(address, view.shape, view.itemsize, view.strides, self._memory, kind, self.writable, loan)
        return self._lending.device.views.array(place)
