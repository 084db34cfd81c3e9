"""A text names a store, and a wrong text names what is wrong."""

from __future__ import annotations

import pytest

from kvpool.stores import MemoryStore
from kvpool.stores.urls import bytes_argument, open_store


def test_a_text_opens_a_store() -> None:
    store = open_store("memory:?capacity=2MiB")
    assert isinstance(store, MemoryStore) and repr(store)


@pytest.mark.parametrize(
    "text", ["", "disk", "floppy:/a", "memory:?capacity=2XB", "memory:?capacity=-1", "memory:?capacity", "memory:?a=1"]
)
def test_a_wrong_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"store=|capacity="):
        open_store(text)


@pytest.mark.parametrize("text", [None, 3, b"disk:/a"])
def test_no_text_is_refused(text: object) -> None:
    with pytest.raises(TypeError, match="store"):
        open_store(text)


def test_a_secret_in_a_text_is_refused_and_not_repeated() -> None:
    with pytest.raises(ValueError, match="secret: accepted is secret_file=") as found:
        open_store("peer:tcp://127.0.0.1:1?secret=abcdef")
    assert "abcdef" not in str(found.value)


@pytest.mark.parametrize(
    "size", [10**400, 1 << 63, -1, True, 1.5, "9" * 400, "9" * 400 + "GiB", "1e3", "nan", "inf", None]
)
def test_a_size_that_is_none_is_refused(size: object) -> None:
    with pytest.raises(ValueError, match="staging="):
        bytes_argument("staging", size)


@pytest.mark.parametrize("size", [0, (1 << 53) + 1, (1 << 63) - 1])
def test_a_size_in_bytes_is_exact(size: int) -> None:
    assert bytes_argument("staging", size) == size
