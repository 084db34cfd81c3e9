"""What goes wrong between two workers, as exceptions."""

from __future__ import annotations

from kvpool.errors import KVPoolError


class RemoteError(KVPoolError):
    """The other worker refused, or answered what no server sends.

    Attributes: ``code`` is one word for programs, ``blocks`` how many blocks had entered the pool before it.
    """

    def __init__(self, code: str, reason: str) -> None:
        # Both may be another process's words, and end on a terminal.
        self.code, self.reason, self.blocks = _printable(code), _printable(reason), 0
        super().__init__(f"{self.code}: {self.reason}")


class RemoteTimeout(RemoteError, TimeoutError):
    """The other worker did not answer in time. What came before has entered the pool, nothing else has."""

    def __init__(self, reason: str) -> None:
        super().__init__("timeout", reason)


def _printable(text: str) -> str:
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)
