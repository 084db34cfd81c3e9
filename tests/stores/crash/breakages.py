"""Wrong orders in DiskStore, made on purpose in a recorded process. The proof must see each."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from kvpool.storage.backends.disk.database import Database, GroupCommit
from kvpool.storage.backends.disk.slab import Slab


def row_first() -> None:
    """The bytes of a block are written with the commit after the one that makes its row durable."""
    write, commit = Slab.write, Database.write
    late, later = list[tuple[Slab, list[int], Any]](), list[tuple[Slab, list[int], Any]]()

    def write_later(slab: Slab, slots: list[int], rows: list[int]) -> None:
        later.append((slab, slots, rows))

    def commit_and_write(database: Database, pages: Any) -> None:
        commit(database, pages)
        for slab, slots, rows in late:
            with suppress(OSError):  # The slab was closed meanwhile.
                write(slab, slots, rows)
                slab.sync()
        late[:], later[:] = later, []

    Slab.write, Database.write = write_later, commit_and_write  # type: ignore


def acknowledged_first() -> None:
    """Most saves do not wait for their commit, which comes with that of a later one."""
    wait, count = GroupCommit.wait, [0]

    def sometimes(commits: GroupCommit) -> None:
        count[0] += 1
        if count[0] % 20 == 0:
            wait(commits)

    GroupCommit.wait = sometimes  # type: ignore


BREAKAGES = {"row first": row_first, "acknowledged first": acknowledged_first, "": lambda: None}
