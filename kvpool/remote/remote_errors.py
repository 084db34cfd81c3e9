"""What goes wrong between two workers, as exceptions."""

from __future__ import annotations

from kvpool.errors import KVPoolError


class RemoteError(KVPoolError):
    """The other worker refused, or its answer is one that no server sends.

    Attributes: ``code`` is one word for programs, ``blocks`` how many blocks had entered the pool before the error.
    """

    def __init__(self, code: str, reason: str) -> None:
        # Both may be the words of another process, and may be printed on a terminal.
        self.code, self.reason, self.blocks = printable(code), printable(reason), 0
        super().__init__(f"{self.code}: {self.reason}")


class RemoteTimeout(RemoteError, TimeoutError):
    """The other worker did not answer in time. Blocks that came before have entered the pool, and nothing else."""

    def __init__(self, reason: str) -> None:
        super().__init__("timeout", reason)


def printable(text: str) -> str:
    """Words of another process, as they may be shown on a terminal."""
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)
