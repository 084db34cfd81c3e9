"""Descriptions of memory: the layout of a block, arrays of any package, paged caches of any engine; and the types of
plain arrays, whatever their shape."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Int64s: TypeAlias = npt.NDArray[np.int64]
Int32s: TypeAlias = npt.NDArray[np.int32]
Uint64s: TypeAlias = npt.NDArray[np.uint64]
Uint8s: TypeAlias = npt.NDArray[np.uint8]
Bools: TypeAlias = npt.NDArray[np.bool_]
Array: TypeAlias = npt.NDArray[Any]
