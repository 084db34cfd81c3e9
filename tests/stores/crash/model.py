"""Which states of a folder a crash may leave behind, and a way to build them from a log of system calls.

A *crash point* is a place between two records of the log. What a file system must keep at that point is what a sync has
covered. All else may be there or not, as far as no rule below orders it:

- **Bytes and size of a file.** A write, truncation or allocation is durable once an fsync or fdatasync of the file has
  returned that began after the call had ended. fdatasync counts as fsync, because a file's size is among what it must
  keep. A write is durable when it returns if the file was opened with O_DSYNC, or the call had RWF_DSYNC.

- **What is not durable** survives in any subset. A page cache is written back in any order, at any time.
- **A write may survive in part**: each sector of 512 bytes has its new content, its old content, or, rarely, noise,
  which is what a device may leave that loses power while it writes. Only sectors of writes that are not durable are
  torn: sectors around them are safe. SQLite assumes the same of a device and calls it "powersafe overwrite".
- **Room that was never written** reads as zeros: ext4 in its usual modes, XFS and btrfs show no old content of others.
- **Names.** A new, removed or changed name is durable once an fsync of its folder has returned. Linux says so in
  fsync(2). ext4, XFS and btrfs keep more: an fsync of a new file keeps its name. The model is as strict as the manual.
- **Names that are not durable** survive in order: a journal keeps the order of changes. So the last ones are lost, and
  never one in the middle. Folders have an order each. A rename is whole or not there.
- **A file that is mapped for writing** is SQLite's index of its log. It is never synced, so its content is noise.

A kill of the process alone keeps the page cache: that is the state in which all that is not durable survives.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from tests.stores.crash.log import Kind, Record

SECTOR = 512


class Unsupported(Exception):
    """The program did something that this replay does not know."""


@dataclass(eq=False)
class Change:
    """A change of a file or of a folder's names that is not durable yet. ``parts``: those of a write that no later and
    durable write has replaced. ``ended``: the call has returned."""

    parts: list[Record]
    ended: bool = False


@dataclass(eq=False)
class File:
    """A file or a folder: what of it is durable, and what was changed since."""

    folder: bool = False
    mapped: bool = False
    data: bytearray = field(default_factory=bytearray)
    names: dict[str, File] = field(default_factory=dict)
    pending: list[tuple[Change, Callable[[dict[str, File]], None] | None]] = field(default_factory=list)


@dataclass(frozen=True)
class Fate:
    """What becomes of changes that are not durable. ``keep``: the probability that one survives. ``tear``: that a
    write survives in part instead. ``noise``: that a sector of such a write is noise. ``names``: as ``keep``, for
    names."""

    keep: float
    tear: float = 0.0
    noise: float = 0.0

    @classmethod
    def drawn(cls, rng: random.Random) -> Fate:
        kind = rng.randrange(6)
        if kind < 2:
            return (ALL, NOTHING)[kind]
        keep = rng.choice((0.1, 0.5, 0.9))
        tear = rng.choice((0.0, 0.3, 1.0))
        return cls(keep, tear, 0.1 if kind == 5 else 0.0)


ALL, NOTHING = Fate(1.0), Fate(0.0)

State = dict[str, bytes | None]
"""Paths below the folder, and the content of files. None is a folder."""


class Existing(NamedTuple):
    """A file, or a folder if it has no content."""

    number: int
    path: str
    content: bytes | None


class Disk:
    """The folder of a log at a crash point, which moves on with each record that is applied."""

    def __init__(self, folder: Path, there: Iterable[Existing] = ()) -> None:
        """``there``: what the folder has when the log begins. All of it is durable."""
        self._prefix, self._root = str(folder), File(folder=True)
        self._files: dict[int, File] = {}
        for number, path, content in there:
            file = File(folder=content is None, data=bytearray(content or b""))
            parent, name = self._place(f"{folder}/{path}")
            parent.names[name] = self._files[number] = file
        self._calls: dict[int, tuple[Record, dict[File, list[Change]]]] = {}
        self.point = 0

    def apply(self, records: Iterable[Record]) -> None:
        """Let these records happen next."""
        for record in records:
            self._apply(record)
            self.point += 1

    def _apply(self, record: Record) -> None:
        kind = record.kind
        if kind == Kind.UNKNOWN:
            raise Unsupported(record.path)
        if kind in (Kind.CREATE, Kind.MKDIR, Kind.LINK, Kind.RENAME, Kind.UNLINK):
            self._rename(record)
        elif kind in (Kind.WRITE, Kind.TRUNCATE, Kind.ALLOCATE):
            file, change = self._file(record.file), Change([record])
            file.pending.append((change, None))
            self._calls[record.call] = record, {file: [change]}
        elif kind == Kind.MAP:
            self._file(record.file).mapped = True
        elif kind in (Kind.SYNC, Kind.SYNC_ALL):
            files = [self._root, *self._files.values()] if kind == Kind.SYNC_ALL else [self._file(record.file)]
            covered = {file: [change for change, _ in file.pending if change.ended] for file in files}
            self._calls[record.call] = record, covered
        elif kind == Kind.END:
            self._end(record)

    def _file(self, number: int) -> File:
        return self._files.get(number, self._root)

    def _end(self, record: Record) -> None:
        begun, covered = self._calls.pop(record.call)
        if begun.kind in (Kind.SYNC, Kind.SYNC_ALL):
            if record.length:
                raise Unsupported("a sync that fails")
            for file, changes in covered.items():
                self._keep(file, changes)
            return
        ((file, (change,)),) = covered.items()
        if record.length < 0:
            file.pending = [entry for entry in file.pending if entry[0] is not change]
            return
        if begun.kind == Kind.WRITE and record.length < begun.length:
            raise Unsupported(f"a write of {begun.length} bytes that wrote {record.length}")
        change.ended = True
        if begun.kind == Kind.WRITE and begun.flags:
            self._keep(file, [change])

    def _keep(self, file: File, changes: list[Change]) -> None:
        """These changes are durable from now on."""
        kept, earlier = set(changes), list[Change]()
        for change, rename in file.pending:
            if change not in kept:
                earlier.append(change)
            elif rename is not None:
                rename(file.names)
            else:
                for part in change.parts:
                    _change(file.data, part)
                    for other in earlier:
                        other.parts = [rest for part_before in other.parts for rest in _outside(part_before, part)]
        file.pending = [entry for entry in file.pending if entry[0] not in kept]

    # -- names ---------------------------------------------------------------------------------------

    def _rename(self, record: Record) -> None:
        path, _, other = record.path.partition("\n")
        (parent, name), file = self._place(path), File(folder=record.kind == Kind.MKDIR)
        change: Callable[[dict[str, File]], None]
        if record.kind in (Kind.CREATE, Kind.MKDIR):
            self._files[record.file] = file

            def change(names: dict[str, File]) -> None:
                names[name] = file

        elif record.kind == Kind.UNLINK:

            def change(names: dict[str, File]) -> None:
                del names[name]

        else:
            second, new = self._place(other)
            if second is not parent or record.flags:
                raise Unsupported(f"a link or rename between folders, or an exchange: {record.path!r}")
            moved = record.kind == Kind.RENAME

            def change(names: dict[str, File]) -> None:
                names[new] = names.pop(name) if moved else names[name]

        parent.pending.append((Change([record], ended=True), change))

    def _place(self, path: str) -> tuple[File, str]:
        """The folder of a path as the program sees it now, and the name in it."""
        parts, folder = path[len(self._prefix) :].strip("/").split("/"), self._root
        for part in parts[:-1]:
            folder = _seen(folder)[part]
        return folder, parts[-1]

    # -- states --------------------------------------------------------------------------------------

    def mapped(self) -> set[str]:
        """The paths of the files that are mapped for writing."""
        return {path for path, file in _walk(self._root) if file.mapped}

    def state(self, fate: Fate, rng: random.Random) -> State:
        """One state that a crash may leave here."""
        contents: State = {}
        self._collect(self._root, "", fate, rng, contents)
        return contents

    def _collect(self, folder: File, path: str, fate: Fate, rng: random.Random, contents: State) -> None:
        names = dict(folder.names)
        for _, rename in folder.pending:
            if rng.random() >= fate.keep:
                break
            assert rename is not None
            rename(names)
        for name, file in names.items():
            if file.folder:
                contents[path + name] = None
                self._collect(file, f"{path}{name}/", fate, rng, contents)
            else:
                contents[path + name] = _content(file, fate, rng)


def _seen(folder: File) -> dict[str, File]:
    names = dict(folder.names)
    for _, rename in folder.pending:
        assert rename is not None
        rename(names)
    return names


def _walk(folder: File, path: str = "") -> Iterator[tuple[str, File]]:
    """Everything below a folder as the program sees it now."""
    for name, file in _seen(folder).items():
        yield path + name, file
        if file.folder:
            yield from _walk(file, f"{path}{name}/")


def _content(file: File, fate: Fate, rng: random.Random) -> bytes:
    data = bytearray(file.data)
    for change, _ in file.pending:
        whole = rng.random() < fate.keep
        torn = not whole and rng.random() < fate.tear
        for part in change.parts:
            if whole:
                _change(data, part)
            elif torn and part.kind == Kind.WRITE:
                _tear(data, part, fate.noise, rng)
    return rng.randbytes(len(data)) if file.mapped else bytes(data)


def _outside(record: Record, later: Record) -> Iterator[Record]:
    """What is left of a write where a later one has not written."""
    if record.kind != Kind.WRITE or later.kind != Kind.WRITE:
        yield record
        return
    end = record.offset + record.length
    for a, b in ((record.offset, min(end, later.offset)), (max(record.offset, later.offset + later.length), end)):
        if a < b:
            yield replace(record, offset=a, length=b - a, data=record.data[a - record.offset : b - record.offset])


def _change(data: bytearray, record: Record) -> None:
    """What a call does to a file's bytes."""
    if record.kind == Kind.TRUNCATE:
        del data[record.length :]
        _grow(data, record.length)
    elif record.kind == Kind.WRITE:
        _grow(data, record.offset)
        data[record.offset : record.offset + record.length] = record.data
    elif not record.flags:
        _grow(data, record.offset + record.length)
    else:
        raise Unsupported(f"fallocate with flags {record.flags}: {errno.errorcode[errno.EOPNOTSUPP]}")


def _grow(data: bytearray, size: int) -> None:
    data.extend(bytes(max(size - len(data), 0)))


def _tear(data: bytearray, record: Record, noise: float, rng: random.Random) -> None:
    """Some sectors of a write."""
    at, end, keep = record.offset, record.offset + record.length, rng.random()
    while at < end:
        after = min(end, (at // SECTOR + 1) * SECTOR)
        if rng.random() < keep:
            _grow(data, after)
            new = record.data[at - record.offset : after - record.offset]
            data[at:after] = rng.randbytes(len(new)) if rng.random() < noise else new
        at = after


class Folder:
    """A real folder that is made equal to one state after the other. Only what differs is written."""

    def __init__(self, place: Path) -> None:
        self.place = place
        place.mkdir(mode=0o700, parents=True, exist_ok=True)

    def become(self, state: State) -> None:
        for path in sorted(self.place.rglob("*"), reverse=True):
            name = str(path.relative_to(self.place))
            if path.is_dir():
                if name not in state:
                    path.rmdir()
            elif state.get(name) is None:
                path.unlink()
        for name, content in state.items():
            path = self.place / name
            if content is None:
                path.mkdir(mode=0o700, exist_ok=True)
            else:
                path.touch(mode=0o600)
                path.write_bytes(content)

    def there(self) -> list[Existing]:
        """What is there now. Folders come before what is in them."""
        return [
            Existing(
                path.stat().st_ino, str(path.relative_to(self.place)), None if path.is_dir() else path.read_bytes()
            )
            for path in sorted(self.place.rglob("*"))
        ]
