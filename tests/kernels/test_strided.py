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


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.float16, np.int64, np.bool_])
@pytest.mark.parametrize("through", ["numpy", "dlpack", "cuda interface"])
def test_every_protocol_gives_the_same(dtype: Any, through: str) -> None:
    array = np.arange(60).reshape(3, 4, 5).astype(dtype)[::2, :, ::-1]
    source: Any = array
    if through == "dlpack":
        source = DLPackOnly(array)
    elif through == "cuda interface":
        source = SimpleNamespace(__cuda_array_interface__=interface(array))
    strided = as_strided("array", source)
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


@pytest.mark.parametrize("array", [None, [1, 2], 7, "ab", b"ab", object()])
def test_what_is_not_an_array_is_named(array: Any) -> None:
    with pytest.raises(
        TypeError,
        match="slots: expected an array with .*, got ",
    ):
        as_strided("slots", array)


@pytest.mark.parametrize(
    ("array", "match"),
    [
        (np.array([None]), "Python objects"),
        (SimpleNamespace(__cuda_array_interface__=interface(np.zeros(3), mask=object())), "masked"),
        (DLPackOnly(np.zeros(3), (10, 0)), "device type 10"),
    ],
)
def test_arrays_that_cannot_be_used_are_refused(array: Any, match: str) -> None:
    with pytest.raises(ValueError, match=f"x: .*{match}"):
        as_strided("x", array)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"address": -1}, ValueError, "address"),
        ({"address": 1.5}, TypeError, "address"),
        ({"shape": (2, -1)}, ValueError, "shape"),
        ({"itemsize": 0}, ValueError, "itemsize"),
        ({"strides": (4,)}, ValueError, "strides"),
        ({"memory": "gpu"}, ValueError, "memory"),
    ],
)
def test_raw_pointers_are_checked(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        StridedArray(**{"address": 64, "shape": (2, 3), "itemsize": 2, **arguments})


def test_raw_pointers_without_strides_are_in_c_order() -> None:
    assert StridedArray(64, (2, 3, 4), 2).steps == np.zeros((2, 3, 4), np.int16).strides
    assert StridedArray(64, (), 2).steps == ()
