"""Objects with threads and sockets belong to the process that made them. After a fork, the child's copies have no
threads, although they look alive."""

from __future__ import annotations

import os

from kvpool.errors import ForkedProcess


class Process:
    """The process that has made an object."""

    def __init__(self) -> None:
        self._id = os.getpid()

    def check(self, what: object) -> None:
        """Raise ForkedProcess in any other process, where a wait would never end."""
        here = os.getpid()
        if here != self._id:
            whose = f"this {type(what).__name__} belongs to process {self._id}, and this is process {here}"
            raise ForkedProcess(f"{whose}: make one of its own after os.fork()")
