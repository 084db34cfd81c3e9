"""DLPack: reading what a capsule says about memory, and making capsules for arrays whose package cannot describe them
fully.

A capsule is always made by the package that owns the array (NumPy, CuPy), because any thread may call its destructor
and deleter, also while the interpreter ends. If the package has no name for an element type or a kind of memory, the
name is written into the capsule before anybody else sees it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
"""Types of devices."""
READ_ONLY, COPIED = 1, 2
"""Flags of a capsule of version 1."""

TYPE_CODES: Mapping[str, int] = MappingProxyType(
    {
        "bfloat16": 4,
        "float8_e4m3fn": 10,
        "float8_e4m3fnuz": 11,
        "float8_e5m2": 12,
        "float8_e5m2fnuz": 13,
        "float8_e8m0fnu": 14,
    }
)
"""Codes of the element types that NumPy has no name for."""
_CODES_OF_1_1 = 7  # and later versions


class Tensor(ctypes.Structure):
    """What a capsule points to, after the head that versioned capsules have."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Head(ctypes.Structure):
    """The head of a versioned capsule."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    ]


_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def opened(capsule: Any) -> tuple[Tensor, Head | None]:
    """The tensor of a capsule that nobody has consumed, and the capsule's head if it is of version 1. Both are valid
    while the capsule exists.

    Raises ValueError for anything else, and BufferError for a later version, whose tensor is unknown.
    """
    if _is_valid(capsule, b"dltensor"):
        return Tensor.from_address(_pointer(capsule, b"dltensor")), None
    if not _is_valid(capsule, b"dltensor_versioned"):
        raise ValueError(f"{capsule!r:.80} is no DLPack capsule, or has been consumed")
    start = _pointer(capsule, b"dltensor_versioned")
    head = Head.from_address(start)
    if head.major != 1:
        raise BufferError(f"DLPack: expected a version below 2, got {head.major}.{head.minor}")
    return Tensor.from_address(start + ctypes.sizeof(Head)), head


def check_no_stream(stream: Any) -> None:
    """Raise ValueError if main memory is requested on a stream."""
    if stream not in (None, -1):
        raise ValueError(f"stream: expected None, since main memory has no streams, got {stream!r}")


def make_capsule(
    array: Any,
    device: tuple[int, int] = (CPU, 0),
    *,
    dtype: str = "",
    writable: bool = True,
    max_version: Any = None,
    dl_device: Any = None,
    copy: bool | None = None,
) -> Any:
    """Make a capsule for an array of NumPy, or of the package that owns GPU memory. The capsule keeps the array alive.

    ``device`` (type, index) is what the capsule says about the memory. ``dtype`` is the name of its element type, if
    that is one of ``TYPE_CODES``. ``max_version``, ``dl_device`` and ``copy`` are as in ``__dlpack__``. Pinned memory
    can also be requested as memory of the CPU. The caller has ordered streams. Raises BufferError for a request that
    cannot be met; nothing has been handed out then.
    """
    on_host = device[0] in (CPU, CUDA_HOST)
    if dl_device is not None and tuple(dl_device) != device:
        if not on_host or tuple(dl_device) != (CPU, 0):
            raise BufferError(
                f"dl_device: expected {device}, where the memory is{', or (1, 0)' * on_host}, got {dl_device!r:.80}"
            )
        device = (CPU, 0)
    if copy and not on_host:
        raise BufferError("copy: expected None or False, since memory of a GPU is handed over in place only, got True")
    versioned = max_version is not None and max_version[0] >= 1
    if copy:
        array, writable = array.copy(), True
    if not writable and not versioned:
        raise BufferError(
            "this memory is read-only, which capsules say since version 1: ask with max_version=(1, 0), or copy=True"
        )
    options = {"max_version": (1, 0)} if versioned else {}
    capsule = array.__dlpack__(**options) if on_host else array.__dlpack__(stream=-1, **options)
    tensor, head = opened(capsule)
    tensor.device_type, tensor.device_id = device
    tensor.code = TYPE_CODES.get(dtype, tensor.code)
    if head is not None:
        head.minor = max(head.minor, int(tensor.code >= _CODES_OF_1_1))
        head.flags |= (0 if writable else READ_ONLY) | (COPIED if copy else 0)
    return capsule
