"""Closing: what is closed when its ``with`` block ends."""

from __future__ import annotations

from typing import TypeVar

Own = TypeVar("Own", bound="Closing")


class Closing:
    """A context manager. Leaving it calls ``close``, also after an error."""

    __slots__ = ()

    def close(self) -> object:
        raise NotImplementedError

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
