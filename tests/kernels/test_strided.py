"""as_strided: arrays of every protocol are understood without their package, and nothing else is."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool.common.arrays.strided import as_strided
from kvpool.device.memory import StridedArray


class DLPackOnly:
    """An array that knows no protocol but DLPack."""

    def __init__(self, array: np.ndarray, device: tuple[int, int] = (1, 0)) -> None:
        self.array, self.device, self.given = array, device, {}

    def __dlpack__(self, **options: Any) -> Any:
        self.given = options
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


def interface(array: np.ndarray, **changes: Any) -> dict[str, Any]:
    return {**array.__array_interface__, **changes}


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.float16, np.bool_])
@pytest.mark.parametrize("through", ["numpy", "dlpack", "cuda interface"])
def test_every_protocol_gives_the_same(dtype: Any, through: str) -> None:
    array = np.arange(60).reshape(3, 4, 5).astype(dtype)[::2, :, ::-1]
    sources = {
        "numpy": array,
        "dlpack": DLPackOnly(array),
        "cuda interface": SimpleNamespace(__cuda_array_interface__=interface(array)),
    }
    strided = as_strided("array", sources[through])
    assert (strided.address, strided.shape, strided.steps) == (array.ctypes.data, array.shape, array.strides)
    assert (strided.itemsize, strided.kind, strided.writable) == (array.itemsize, array.dtype.kind, True)
    assert strided.memory == ("device" if through == "cuda interface" else "host")
    if strided.memory == "host":
        np.testing.assert_array_equal(strided.host_view(), array)
        assert np.shares_memory(strided.host_view(), array)
    else:
        with pytest.raises(ValueError, match="GPU"):
            strided.host_view()


def test_memory_of_a_gpu_is_asked_for_by_dlpack_without_waiting() -> None:
    gpu, host = DLPackOnly(np.zeros(3), (2, 0)), DLPackOnly(np.zeros(3), (3, 0))
    assert as_strided("array", gpu).memory == "device" and gpu.given.pop("stream") == -1
    assert as_strided("array", host).memory == "host" and "stream" not in host.given
    assert gpu.given == host.given == {"max_version": (1, 1)}


def test_a_package_that_has_no_interface_for_a_type_is_asked_by_dlpack() -> None:
    class Tensor(DLPackOnly):
        @property
        def __cuda_array_interface__(self) -> Any:
            raise TypeError("no typestr for bfloat16")

    assert as_strided("array", Tensor(np.zeros(3))).shape == (3,)


def test_memory_stays_while_its_description_does() -> None:
    array = DLPackOnly(np.zeros(8))
    alive, strided = weakref.ref(array), as_strided("array", array)
    del array
    gc.collect()
    assert alive() is not None
    del strided
    gc.collect()
    assert alive() is None


def test_read_only_memory_says_so() -> None:
    array = np.zeros(3)
    array.flags.writeable = False
    strided = as_strided("array", array)
    assert not strided.writable and not strided.host_view().flags.writeable


@pytest.mark.parametrize(
    ("array", "match"),
    [
        *((array, "expected an array with .*, got ") for array in (None, [1, 2], 7, "ab", b"ab")),
        (np.array([None]), "Python objects"),
        (SimpleNamespace(__cuda_array_interface__=interface(np.zeros(3), mask=object())), "masked"),
        (DLPackOnly(np.zeros(3), (10, 0)), "device type 10"),
    ],
)
def test_what_is_not_an_array_or_cannot_be_used_is_named(array: Any, match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"slots: .*{match}"):
        as_strided("slots", array)


def test_raw_pointers_are_checked_and_in_c_order_without_strides() -> None:
    good: dict[str, Any] = {"address": 64, "shape": (2, 3), "itemsize": 2}
    assert StridedArray(**good).steps == np.zeros((2, 3), np.int16).strides
    bad = {"address": (-1, 1.5), "shape": ((2, -1),), "itemsize": (0,), "strides": ((4,),), "memory": ("gpu",)}
    for name, values in bad.items():
        for value in values:
            with pytest.raises((TypeError, ValueError), match=name):
                StridedArray(**good | {name: value})
