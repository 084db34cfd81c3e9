"""MooncakeStore: keeps blocks in a Mooncake cluster, in the memory of many machines."""

from __future__ import annotations

import errno
import hashlib
import ipaddress
import mmap
import os
import queue
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import numpy as np

from kvpool.common.arguments import text_argument
from kvpool.common.arrays.layout import integer_argument
from kvpool.common.process import stays_here
from kvpool.errors import PoolClosed
from kvpool.storage.backends.mooncake import guarded_client as client
from kvpool.storage.backends.mooncake.guarded_client import Client
from kvpool.storage.backends.shared_secret import default_place, read_or_make_secret, secret_argument
from kvpool.storage.backends.tag_limits import Bools, TagLimits
from kvpool.storage.store import (
    ABSENT,
    CANCELLED,
    DAMAGED,
    FAILED,
    MAC_BYTES,
    MODEL_BYTES,
    OK,
    REFUSED,
    Bytes,
    Rows,
    Space,
    Stop,
    Store,
    parts,
)

SECRET_FILE = "KVPOOL_MOONCAKE_SECRET_FILE"
"""Names the file of the secret where no argument does."""

_CODES = {
    client.NO_SPACE: REFUSED,
    client.UNFINISHED: ABSENT,
    client.NOT_THERE: ABSENT,
    client.CHECKSUM: DAMAGED,
}
"""What codes of the library are for callers. All others are FAILED."""

_SEGMENT_MIN, _SEGMENT_MAX = 16 << 20, 1 << 40
_CALL_BYTES, _CALL_KEYS, _FIND_KEYS = 16 << 20, 32, 4096
"""Bounds of one call of the library. ``stop`` is asked between them. Each key of a machine that hangs takes seconds."""
_COPY_BYTES = 4 << 20
"""Bound of private memory for each call under way, where blocks are transformed."""


class Transform(Protocol):
    """Changes blocks on their way out and back in, such as by encryption.

    Attributes
    ----------
    extra : int
        Bytes by which an outgoing block is longer than the block.

    Notes
    -----
    Several threads call it at once. The memory that it gets must not be kept.
    """

    extra: int

    def outgoing(self, key: bytes, block: memoryview) -> bytes:
        """Return the bytes to keep.

        Parameters
        ----------
        key : bytes
            The key of the block, 32 bytes.
        block : memoryview
            The block.

        Returns
        -------
        bytes
            As many as the block has, and ``extra``.
        """

    def incoming(self, key: bytes, kept: memoryview) -> bytes:
        """Return the block of what was kept. Raises an Exception if ``outgoing`` cannot have returned it for this key.

        Parameters
        ----------
        key : bytes
            The key of the block, 32 bytes.
        kept : memoryview
            The bytes that were kept.

        Returns
        -------
        bytes
            The block.
        """


class MooncakeStore(Store):
    """A ``Store`` over a Mooncake cluster. Needs the extra ``mooncake``.

    Parameters
    ----------
    master : str, default "127.0.0.1:50051"
        ``"HOST:PORT"`` of ``mooncake_master``.
    segment : int, default 0
        Bytes of this process's memory that are lent to the cluster: 0, or 16 MiB to 1 TiB. Their content is lost when
        the process ends. Some process has to lend memory, or nothing can be kept.
    hostname : str, default ""
        Under which the other clients reach this one. By default the address by which this machine reaches the master.
    metadata : str, default "P2PHANDSHAKE"
        The metadata server, the same for all clients. ``"P2PHANDSHAKE"`` needs none.
    protocol : {"tcp", "rdma"}, default "tcp"
        The transport. "rdma" was not tested.
    devices : str, default ""
        The names of the devices for "rdma".
    secret : bytes, optional
        32 bytes, the same for all workers that share.
    secret_file : str or PathLike, optional
        A file with 64 hex digits that nobody else can read, instead of ``secret``. With neither of them: the file that
        ``KVPOOL_MOONCAKE_SECRET_FILE`` names. Else, with a master on this machine,
        ``~/.config/kvpool/mooncake.secret``, which is made if it is not there.
    threads : int, default 4
        Number of calls at a time, 1 to 64. One that waits for a machine that hangs takes a thread for up to a minute.
    transform : Transform, optional
        Changes blocks on their way. All workers that share have to give the same. Blocks are then copied, and the
        library never gets the address of the host tier's memory, which it otherwise opens to whoever reaches its ports.

    Raises
    ------
    TypeError, ValueError
        For a bad argument. No message contains a secret.
    ImportError
        Without the extra. It names what to install.
    OSError
        From ``open`` within about 5 seconds if no master answers, and from a call that fails.

    Notes
    -----
    Each block and its MAC are one object, written from their places in memory without a copy. Where its rows have
    padding, the two are one contiguous piece: each piece costs time, however small. A save is OK only if the object is
    there afterwards; it is then not evicted while its lease lasts. A limit of a namespace counts what this worker has
    saved, not what others have.

    ``open`` and ``close`` stop all Python threads for about a second, as the library holds the interpreter's lock.
    Settings of the library that are not in the environment get the values of
    ``kvpool.storage.backends.mooncake.guarded_client.ENVIRONMENT``. Any thread may call it. A child of ``os.fork()``
    gets ForkedProcess. It must end by ``os._exit``, as those of multiprocessing do: the library crashes at its exit.
    """

    name = "mooncake"
    clears_prefix = MODEL_BYTES
    row_padding = MAC_BYTES

    def __init__(
        self,
        master: str = "127.0.0.1:50051",
        *,
        segment: int = 0,
        hostname: str = "",
        metadata: str = "P2PHANDSHAKE",
        protocol: str = "tcp",
        devices: str = "",
        secret: bytes | None = None,
        secret_file: str | os.PathLike[str] | None = None,
        threads: int = 4,
        transform: Transform | None = None,
    ) -> None:
        self._master, self._segment = _master_argument(master), _segment_argument(segment)
        self._place = text_argument("hostname", hostname), text_argument("metadata", metadata)
        self._wire = _protocol_argument(protocol), text_argument("devices", devices)
        self.threads = integer_argument("threads", threads, 1, 64)
        self._transform, self._extra = transform, _extra_argument(transform)
        self._secret = _secret_argument(secret, secret_file, self._master)
        client.library()
        self._client: Client | None = None
        self._lock, self._counts = threading.Lock(), Counter[str]()
        self._limits = TagLimits()

    @property
    def secret(self) -> bytes:
        """The secret that all workers share, 32 bytes."""
        return self._secret

    def __repr__(self) -> str:
        return f"MooncakeStore({self._master!r}, segment={self._segment})"

    def __reduce__(self) -> Any:
        raise TypeError("a MooncakeStore is not pickled: its secret would travel with the pickle")

    def open(self, space: Space) -> bytes:
        if self._client is not None:
            raise ValueError(f"store: expected one that is not open, got {self!r}, which is")
        made = Client(self._master, self._segment, *self._place, *self._wire)
        self._memory, self._block_bytes = space.memory, space.block_bytes
        self._rows = space.rows
        self._mac = slice(space.block_bytes, space.block_bytes + MAC_BYTES)
        self._joined = space.row_padding >= MAC_BYTES and self._transform is None
        model = hashlib.blake2b(b"kvpool mooncake" + space.fingerprint, key=self._secret, digest_size=MODEL_BYTES)
        kind = "kvpool4-" if self._transform is None else "kvpool4t-"
        self._prefix = f"{kind}{model.hexdigest()}-"
        held = MAC_BYTES if self._transform is None else space.block_bytes + self._extra + MAC_BYTES
        most = _CALL_BYTES // space.block_bytes if self._transform is None else _COPY_BYTES // held
        self._most = min(max(1, most), _CALL_KEYS)
        raw = mmap.mmap(-1, self.threads * self._most * held, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        buffer = np.frombuffer(raw, np.uint8)
        try:
            # What is registered can be read and written by whoever reaches the ports of this client.
            if self._transform is None:
                made.register(self._rows)
            made.register(buffer)
        except BaseException:
            made.close()
            raise
        self._areas: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
        for area in buffer.reshape(self.threads, self._most, held):
            self._areas.put(area)
        self._client = made
        stays_here(self)
        return self._secret

    def find(self, keys: Bytes) -> Bytes:
        codes = np.empty(len(keys), np.uint8)
        for part in parts(len(keys), _FIND_KEYS):
            answer = self._opened().exist(self._names(keys[part]))
            codes[part] = self._judge(answer, lambda exists: OK if exists else ABSENT)
        return codes

    def save(self, keys: Bytes, rows: Rows, macs: Bytes, tag: bytes, limit: int, stop: Stop) -> Bytes:
        codes = np.full(len(keys), CANCELLED, np.uint8)
        with self._area() as area:
            for part in parts(len(keys), self._most):
                if stop():
                    break
                codes[part] = self._save_limited(keys[part], rows[part], macs[part], tag, limit, area)
        return codes

    def load(self, keys: Bytes, rows: Rows, stop: Stop) -> tuple[Bytes, Bytes]:
        codes, macs = np.full(len(keys), CANCELLED, np.uint8), np.zeros((len(keys), MAC_BYTES), np.uint8)
        with self._area() as area:
            for part in parts(len(keys), self._most):
                if stop():
                    break
                part_area = area[: part.stop - part.start]
                codes[part] = self._load(keys[part], rows[part], part_area)
                if self._joined:
                    macs[part] = self._rows[rows[part], self._mac]
                else:
                    macs[part] = part_area[:, -MAC_BYTES:]
        return codes, macs

    def forget(self, keys: Bytes) -> int:
        count = 0
        for part in parts(len(keys), _FIND_KEYS):
            answer = self._opened().remove(self._names(keys[part]))
            wrong = [code for code in answer if code < 0 and code != client.NOT_THERE]
            if wrong:
                codes = ", ".join(sorted({client.reason(self._counted(code)) for code in wrong}))
                raise OSError(errno.EIO, f"Mooncake has not dropped {len(wrong)} blocks: {codes}")
            count += answer.count(0)
        return count

    def clear(self, tag: bytes) -> int:
        """Drop all blocks of the model.

        Parameters
        ----------
        tag : bytes
            MODEL_BYTES that name the model.

        Returns
        -------
        int
            Number of blocks that were there.

        Raises
        ------
        NotImplementedError
            For a namespace, which the cluster does not record.
        OSError
            Where the cluster does not drop them.
        """
        if len(tag) != MODEL_BYTES:
            raise NotImplementedError("a MooncakeStore cannot drop the blocks of a namespace")
        count = self._opened().remove_matching(f"^{self._prefix}")
        if count < 0:
            raise OSError(errno.EIO, f"Mooncake has not dropped the blocks: {client.reason(self._counted(count))}")
        return count

    def stats(self) -> dict[str, int]:
        """Return bytes lent to the cluster (``segment``), ``calls`` in flight, and blocks by what became of them.

        Returns
        -------
        dict of str to int
            Besides, one figure for each of the library's errors; ``not_stored`` (reported as stored, and not there);
            ``wrong_size`` and ``not_decoded`` (never saved like this); ``dropped`` for a limit.
        """
        made = self._client
        names = (*client.every_reason(), "not_stored", "wrong_size", "not_decoded", "dropped")
        with self._lock:
            return {
                "segment": self._segment,
                "calls": made.calls if made else 0,
                **{name: self._counts[name] for name in names},
            }

    def close(self) -> None:
        """End. Waits for calls under way. What this process has lent to the cluster is lost."""
        made, self._client = self._client, None
        if made is not None:
            made.close()

    # -- inside --------------------------------------------------------------------------------------

    def _opened(self) -> Client:
        made = self._client
        if made is None:
            raise PoolClosed("this MooncakeStore is not open")
        return made

    @contextmanager
    def _area(self) -> Iterator[Bytes]:
        """Registered memory of a call: uint8[most, bytes], whose last MAC_BYTES of each row are a MAC."""
        self._opened()
        area = self._areas.get()
        try:
            yield area
        finally:
            self._areas.put(area)

    def _names(self, keys: Bytes) -> list[str]:
        """Keys as the cluster has them: those of a model begin alike. Blocks that were transformed have names of their
        own."""
        return [self._prefix + key.tobytes().hex() for key in keys]

    def _places(self, rows: Rows, area: Bytes) -> tuple[list[list[int]], list[list[int]]]:
        """Addresses and sizes of the parts of each object."""
        start, width = area.ctypes.data, area.shape[1]
        ends = [start + place * width for place in range(len(rows))]
        if self._transform is not None:
            return [[end] for end in ends], [[width]] * len(rows)
        base, stride = self._rows.ctypes.data, self._rows.shape[1]
        blocks = [base + row * stride for row in rows.tolist()]
        if self._joined:
            return [[block] for block in blocks], [[self._mac.stop]] * len(rows)
        return [[block, end] for block, end in zip(blocks, ends, strict=True)], [[self._block_bytes, width]] * len(rows)

    def _save_limited(self, keys: Bytes, rows: Rows, macs: Bytes, tag: bytes, limit: int, area: Bytes) -> Bytes:
        def save(may: Bools) -> Bytes:
            return self._save(keys[may], rows[may], macs[may], area)

        return self._limits.save(tag, keys, limit, save, self._drop)

    def _drop(self, keys: Bytes) -> None:
        self._count("dropped", self._remove(keys))

    def _save(self, keys: Bytes, rows: Rows, macs: Bytes, area: Bytes) -> Bytes:
        if not len(keys):
            return np.empty(0, np.uint8)
        area = area[: len(keys)]
        if self._joined:
            self._rows[rows, self._mac] = macs
        area[:, -MAC_BYTES:] = macs
        if self._transform is not None:
            self._encode(self._transform, keys, rows, area)
        names, made = self._names(keys), self._opened()
        codes = self._judge(made.put(names, *self._places(rows, area)), lambda done: OK)
        # It says 0 even if another client has begun with this object and will never end.
        said = np.flatnonzero(codes == OK)
        for place, code in zip(said, made.exist([names[place] for place in said]), strict=True):
            codes[place] = OK if code > 0 else self._code(code) if code else REFUSED
            self._count("not_stored", code == 0)
        return codes

    def _load(self, keys: Bytes, rows: Rows, area: Bytes) -> Bytes:
        addresses, sizes = self._places(rows, area)
        answer = self._opened().get(self._names(keys), addresses, sizes)
        size = sum(sizes[0])
        codes = self._judge(answer, lambda got: OK if got == size else DAMAGED)
        self._count("wrong_size", sum(0 <= code != size for code in answer))
        if self._transform is not None:
            for place in np.flatnonzero(codes == OK).tolist():
                codes[place] = self._decode(self._transform, keys[place], int(rows[place]), area[place])
        wrong = codes == DAMAGED
        if wrong.any():
            with suppress(OSError):
                self._remove(keys[wrong])
        return codes

    def _encode(self, transform: Transform, keys: Bytes, rows: Rows, area: Bytes) -> None:
        for key, row, kept in zip(keys, rows.tolist(), area[:, :-MAC_BYTES], strict=True):
            made = transform.outgoing(key.tobytes(), self._memory[row].data)
            if len(made) != len(kept):
                raise ValueError(f"transform.outgoing: expected {len(kept)} bytes, got {len(made)}")
            kept[:] = np.frombuffer(made, np.uint8)

    def _decode(self, transform: Transform, key: Bytes, row: int, kept: Bytes) -> int:
        try:
            block = transform.incoming(key.tobytes(), kept[:-MAC_BYTES].data)
            self._memory[row] = np.frombuffer(block, np.uint8, self._block_bytes)
        except Exception:  # What another has written is no error of this program.
            self._count("not_decoded", 1)
            return DAMAGED
        return OK

    def _remove(self, keys: Bytes) -> int:
        """Drop blocks, and say how many were there. Raises OSError if none could be dropped."""
        answer = self._opened().remove(self._names(keys))
        self._judge([code for code in answer if code != client.NOT_THERE], lambda done: OK)
        return answer.count(0)

    def _code(self, code: int) -> int:
        """Our code for one of the library's below zero, which is counted."""
        return _CODES.get(self._counted(code), FAILED)

    def _counted(self, code: int) -> int:
        self._count(client.reason(code), 1)
        return code

    def _count(self, name: str, count: int) -> None:
        if count:
            with self._lock:
                self._counts[name] += int(count)

    def _judge(self, answer: list[int], good: Callable[[int], int]) -> Bytes:
        """Our codes: ``good`` of an answer that is not below zero. Raises OSError if all have failed."""
        codes = np.array([good(code) if code >= 0 else self._code(code) for code in answer], np.uint8)
        if len(codes) and (codes == FAILED).all():
            raise OSError(errno.EIO, f"Mooncake, {len(codes)} blocks: {client.reason(answer[0])} (code {answer[0]})")
        return codes


def _master_argument(value: object) -> str:
    text = text_argument("master", value)
    match = re.fullmatch(r"(?:[\w.-]+|\[[0-9a-fA-F:.]+\]):([0-9]{1,5})", text)
    if match is None or not 0 < int(match[1]) < 1 << 16:
        raise ValueError(f"master: expected HOST:PORT of one master, got {text!r:.80}")
    return text


def _segment_argument(value: object) -> int:
    size = integer_argument("segment", value, 0, _SEGMENT_MAX)
    if 0 < size < _SEGMENT_MIN:
        raise ValueError(f"segment: expected 0, or {_SEGMENT_MIN} to {_SEGMENT_MAX} bytes, got {size}")
    return size


def _protocol_argument(value: object) -> str:
    if value not in ("tcp", "rdma"):
        raise ValueError(f'protocol: expected "tcp" or "rdma", got {value!r:.80}')
    return str(value)


def _extra_argument(transform: Any) -> int:
    if transform is None:
        return 0
    if not all(callable(getattr(transform, name, None)) for name in ("outgoing", "incoming")):
        raise TypeError(f"transform: expected an object with extra, outgoing and incoming, got {transform!r:.80}")
    return integer_argument("transform.extra", transform.extra, 0, 1 << 20)


def _secret_argument(secret: object, file: object, master: str) -> bytes:
    file = file or (os.environ.get(SECRET_FILE) or None if secret is None else None)
    if secret is None and file is None and not _on_this_machine(master):
        raise ValueError(
            f"secret_file: expected a file, since the master {master} is on another machine, got None. All workers "
            "that share need the same: openssl rand -hex 32, in a file with mode 600"
        )
    if secret is None and file is None:
        return read_or_make_secret(default_place("mooncake"))
    try:
        return secret_argument(secret, file)
    except TypeError as error:  # a text, which names no path here
        raise ValueError(str(error)) from None
    except OSError as error:
        raise ValueError(
            f"secret_file: expected a file that can be read, got {str(file)!r:.200}: {error.strerror}"
        ) from error


def _on_this_machine(master: str) -> bool:
    host = master.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
