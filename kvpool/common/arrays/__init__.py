"""Descriptions of memory: the layout of a block, arrays of any package, paged caches of any engine; and the types of
plain arrays, whatever their shape."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Int64s: TypeAlias = npt.NDArray[np.int64]
Int32s: TypeAlias = npt.NDArray[np.int32]
Uint64s: TypeAlias = npt.NDArray[np.uint64]
Uint8s: TypeAlias = npt.NDArray[np.uint8]
Bools: TypeAlias = npt.NDArray[np.bool_]
Array: TypeAlias = npt.NDArray[Any]


class SupportsDLPack(Protocol):
    """An array of a package that implements DLPack, such as PyTorch, JAX or CuPy."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...


class SupportsCudaArrayInterface(Protocol):
    """An array in memory of a GPU."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


class SupportsArrayInterface(Protocol):
    """An array in main memory."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...


class SupportsItemsize(Protocol):
    """An element type of another package, such as ``torch.bfloat16``."""

    @property
    def itemsize(self) -> int: ...


ElementType: TypeAlias = "str | np.dtype[Any] | type[np.generic] | type[int] | type[float] | SupportsItemsize"
"""An element type, by its name or as a dtype of any package."""
