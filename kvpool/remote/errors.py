"""What goes wrong between two workers, as exceptions."""

from __future__ import annotations

from kvpool.errors import KVPoolError


class RemoteError(KVPoolError):
    """The other worker refused, or answered what no server sends.

    Attributes: ``code`` is one word for programs, ``blocks`` how many blocks had entered the pool before it.
    """

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code, self.reason, self.blocks = code, reason, 0


class RemoteTimeout(RemoteError, TimeoutError):
    """The other worker did not answer in time. What came before has entered the pool, nothing else has."""

    def __init__(self, reason: str) -> None:
        super().__init__("timeout", reason)
