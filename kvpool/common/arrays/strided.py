"""StridedArray: where the elements of an array of any package lie. The package is not imported."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import islice
from types import SimpleNamespace
from typing import Any, TypeAlias, TypeVar

import numpy as np

from kvpool.common.arrays import Array, SupportsArrayInterface, SupportsCudaArrayInterface, SupportsDLPack, dlpack
from kvpool.common.arrays.layout import Tier, integer_argument

Own = TypeVar("Own")
MEMORIES: tuple[Tier, ...] = ("host", "device")
AnyArray: TypeAlias = "Array | SupportsDLPack | SupportsCudaArrayInterface | SupportsArrayInterface | StridedArray"
"""An array of any package."""
_AXES_MAX = 64
_HOST_DEVICE_TYPES, _GPU_DEVICE_TYPES = (dlpack.CPU, dlpack.CUDA_HOST), (dlpack.CUDA, dlpack.CUDA_MANAGED)
_PROTOCOLS = ("__dlpack__", "__cuda_array_interface__", "__array_interface__")
_KINDS = {0: "i", 1: "u", 2: "f", 4: "f", 6: "b"}  # of DLPack's type codes


class Placed:
    """What says where memory lies."""

    def __deepcopy__(self: Own, memo: dict[int, Any] | None = None) -> Own:
        """Itself: a copy of the owner would lie at other addresses."""
        return self

    __copy__ = __deepcopy__

    def __reduce__(self) -> Any:
        raise TypeError(f"a {type(self).__name__} cannot be pickled: its addresses mean nothing elsewhere")


@dataclass(frozen=True)
class StridedArray(Placed):
    """An array as an address, a shape and strides. Made by ``as_strided``, or directly from a raw pointer.

    Parameters
    ----------
    address : int
        Address of the element with all indices 0.
    shape : tuple of int
        Extents, each at least 0.
    itemsize : int
        Bytes of one element, at least 1.
    strides : tuple of int, optional
        Bytes from an element to the next along each axis, of any sign. By default C order without gaps.
    memory : {"host", "device"}, default "host"
        Which processor reads it without a copy. Pinned memory is host memory.
    kind : str, default "V"
        Kind of the elements as in NumPy: ``"i"``, ``"u"``, ``"f"``, ``"b"``, or ``"V"`` if it is not known.
    writable : bool, default True
        Whether the owner allows writing.
    owner : object, optional
        Keeps the memory alive.

    Raises
    ------
    TypeError, ValueError
        For an argument of the wrong type or value; the message names it.

    Examples
    --------
    >>> import numpy as np
    >>> from kvpool.device.memory import StridedArray
    >>> memory = np.arange(12, dtype=np.int16)
    >>> StridedArray(memory.ctypes.data, (3, 2), 2, strides=(8, 2), kind="i", owner=memory).host_view().tolist()
    [[0, 1], [4, 5], [8, 9]]
    """

    address: int
    shape: tuple[int, ...]
    itemsize: int
    strides: tuple[int, ...] | None = None
    memory: Tier = "host"
    kind: str = "V"
    writable: bool = True
    owner: object = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        shape = tuple(integer_argument("shape", extent, 0, 2**62) for extent in _items("shape", self.shape))
        itemsize = integer_argument("itemsize", self.itemsize, 1, 2**31)
        if self.strides is None:
            strides = tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        else:
            strides = tuple(integer_argument("strides", s, -(2**62), 2**62) for s in _items("strides", self.strides))
        if len(strides) != len(shape):
            raise ValueError(f"strides: expected {len(shape)}, one for each axis of shape {shape}, got {self.strides}")
        if self.memory not in MEMORIES:
            raise ValueError(f"memory: expected 'host' or 'device', got {self.memory!r:.80}")
        address = integer_argument("address", self.address, 0, 2**63 - 1)
        checked = {"address": address, "shape": shape, "itemsize": itemsize, "strides": strides}
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def steps(self) -> tuple[int, ...]:
        """The strides. They are never None once the array is made."""
        assert self.strides is not None
        return self.strides

    def host_view(self) -> Array:
        """Return the same elements as a NumPy array, which keeps ``owner`` alive.

        Returns
        -------
        ndarray
            A view.

        Raises
        ------
        ValueError
            For GPU memory.
        """
        if self.memory != "host":
            raise ValueError("memory of a GPU has no view in NumPy")
        order = "|" if self.itemsize == 1 or self.kind == "V" else "="
        interface = {
            "version": 3,
            "shape": self.shape,
            "strides": self.strides,
            "typestr": np.dtype(f"{order}{self.kind}{self.itemsize}").str,
            "data": (self.address, not self.writable),
        }
        return np.asarray(SimpleNamespace(__array_interface__=interface, array=self))


def _items(name: str, value: Any) -> tuple[Any, ...]:
    """The items, all read before one of them is looked at."""
    try:
        items = tuple(islice(value, _AXES_MAX + 1))
    except TypeError:
        raise TypeError(f"{name}: expected a tuple of integers, got {value!r:.80}") from None
    if len(items) > _AXES_MAX:
        raise ValueError(f"{name}: expected up to {_AXES_MAX} axes, as in NumPy, got more")
    return items


def as_strided(name: str, array: AnyArray) -> StridedArray:
    """Describe where the elements of an array lie.

    Parameters
    ----------
    name : str
        The argument that messages name.
    array : array
        A StridedArray, or an object with ``__cuda_array_interface__``, ``__array_interface__`` or ``__dlpack__``.

    Returns
    -------
    StridedArray
        The description, which keeps ``array`` alive.

    Raises
    ------
    TypeError
        For anything else.
    ValueError
        For elements that are not whole bytes, and for memory that belongs to neither the host nor a CUDA device.

    Notes
    -----
    Nothing is copied, and no stream is waited for: the caller names the stream on which the elements may be used.
    """
    if isinstance(array, StridedArray):
        return array
    protocols: tuple[tuple[str, Tier], ...] = (("__cuda_array_interface__", "device"), ("__array_interface__", "host"))
    for attribute, memory in protocols:
        # Some packages raise for types that the protocol has no name for. They offer DLPack for those.
        try:
            interface = getattr(array, attribute, None)
        except (TypeError, RuntimeError):
            continue
        if interface is not None:
            return _from_interface(name, array, interface, memory)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _from_dlpack(name, array)
    raise TypeError(
        f"{name}: expected an array with __cuda_array_interface__, __array_interface__ or __dlpack__, or a "
        f"StridedArray, got {type(array).__name__}"
    )


def _from_interface(name: str, array: Any, interface: Any, memory: Tier) -> StridedArray:
    if not isinstance(interface, dict) or not {"typestr", "data", "shape"} <= interface.keys():
        raise TypeError(f"{name}: expected an array interface with typestr, data and shape, got {interface!r:.80}")
    if interface.get("mask") is not None:
        raise ValueError(f"{name}: expected an array without a mask, got a masked one")
    try:
        dtype, (address, read_only) = np.dtype(interface["typestr"]), interface["data"]
    except (TypeError, ValueError):
        raise TypeError(
            f"{name}: expected an array interface with an address and a type of NumPy, got {interface!r:.80}"
        ) from None
    if dtype.kind == "O":
        raise ValueError(f"{name}: expected elements of bytes, got Python objects")
    if not dtype.isnative:
        raise ValueError(f"{name}: expected native byte order, got {dtype.str}")
    strides = interface.get("strides")
    shape, address = tuple(interface["shape"]), int(address or 0)
    return StridedArray(address, shape, dtype.itemsize, strides, memory, dtype.kind, not read_only, owner=array)


def _from_dlpack(name: str, array: Any) -> StridedArray:
    try:
        device_type = int(array.__dlpack_device__()[0])
    except (TypeError, ValueError, IndexError):
        raise TypeError(f"{name}: __dlpack_device__ of {type(array).__name__} gives no pair of integers") from None
    if device_type not in _HOST_DEVICE_TYPES + _GPU_DEVICE_TYPES:
        raise ValueError(
            f"{name}: expected memory of the host or of a CUDA device, got DLPack's device type {device_type}"
        )
    gpu = device_type in _GPU_DEVICE_TYPES
    try:
        # -1 tells the producer not to wait for anything. The capsule is never consumed, so dropping it releases the
        # tensor.
        capsule = _capsule(array, {"stream": -1} if gpu else {})
        tensor, head = dlpack.opened(capsule)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{name}: {type(array).__name__} does not give its memory: {error}") from error
    itemsize, rest = divmod(tensor.bits * tensor.lanes, 8)
    if rest or not itemsize:
        raise ValueError(f"{name}: expected elements of whole bytes, got {tensor.bits * tensor.lanes} bits")
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(step * itemsize for step in tensor.strides[: tensor.ndim]) if tensor.strides else None
    kind = _KINDS.get(tensor.code, "V") if tensor.lanes == 1 and itemsize in (1, 2, 4, 8) else "V"
    address, writable = (tensor.data or 0) + tensor.byte_offset, head is None or not head.flags & dlpack.READ_ONLY
    return StridedArray(
        address, shape, itemsize, strides, "device" if gpu else "host", kind, writable, owner=(array, capsule)
    )


def _capsule(array: Any, options: dict[str, Any]) -> Any:
    """A capsule, of version 1 if the package knows that version, which can say that memory is read-only."""
    try:
        return array.__dlpack__(**options, max_version=(1, 1))
    except TypeError:
        return array.__dlpack__(**options)


def read_only(values: Array) -> Array:
    """A view of contiguous memory that cannot be written. Nobody can make it writable: NumPy asks the buffer, which
    refuses."""
    return np.asarray(values.data.toreadonly())


def in_numpy(name: str, value: Any) -> Any:
    """The argument ``name`` as a NumPy array of the same memory, if it is an array of another package. Anything else is
    returned as it is.

    Raises TypeError for GPU memory, and what ``as_strided`` raises.
    """
    if isinstance(value, (np.ndarray, np.generic, list)):
        return value
    if not isinstance(value, StridedArray) and not any(hasattr(value, protocol) for protocol in _PROTOCOLS):
        return value
    strided = as_strided(name, value)
    if strided.memory != "host":
        raise TypeError(f"{name}: expected an array in main memory, got {type(value).__name__} in memory of a GPU")
    return strided.host_view()
