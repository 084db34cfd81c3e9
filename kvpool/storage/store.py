"""Store: the interface of what keeps blocks beyond the host tier, by key."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from kvpool.common.arguments import bool_argument
from kvpool.common.arrays import Int64s, Uint8s
from kvpool.common.arrays.layout import integer_argument

KEY_BYTES, MAC_BYTES, TAG_BYTES, EPOCH_BYTES = 32, 16, 16, 16
EPOCHS_MAX = 4096
"""Models whose epochs a store remembers: the last ones that were reset."""
MODEL_BYTES = 8
"""The first bytes of a tag, which name the model. The others name a namespace of it."""

ABSENT = 0
"""The store does not have the block."""
OK = 1
"""The block is there, was saved, or was loaded."""
FAILED = 2
"""The store raised an error."""
DAMAGED = 3
"""The store returned other bytes than were saved."""
LATE = 4
"""The deadline came first."""
CANCELLED = 5
"""The caller gave up, the worker was closed, or the block is to be dropped."""
REFUSED = 6
"""The store is full, or the namespace of the block is at its limit."""

CODES = ("absent", "ok", "failed", "damaged", "late", "cancelled", "refused")
"""The names of the codes, in the order of their numbers."""

NO_LIMIT = (1 << 63) - 1
"""The limit of a save that has none."""
Bytes = Uint8s
Rows = Int64s
Stop = Callable[[], bool]


@dataclass(frozen=True)
class Space:
    """The blocks that a store keeps, and the memory that they are in.

    Parameters
    ----------
    fingerprint : bytes
        16 bytes, of the ``ModelIdentity``.
    rows : ndarray of uint8, shape (slots, block_bytes + row_padding)
        Where blocks are saved from and loaded into, C-contiguous. It stays in place until ``Store.close`` has returned.
    row_padding : int, default 0
        Bytes at the end of each row that are the store's own while one of its calls has the row. No other call has the
        row then.
    """

    fingerprint: bytes
    rows: Bytes
    row_padding: int = 0

    @property
    def memory(self) -> Bytes:
        """The blocks, uint8[slots, block_bytes]. With padding, the rows are not adjacent."""
        return self.rows[:, : self.block_bytes]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return int(self.rows.shape[1]) - self.row_padding


class Store(ABC):
    """Keeps blocks by key. Derive from it to keep blocks in another place; ``StoreWorker`` does the rest.

    A store has a ``name``, and the methods ``open``, ``find``, ``save``, ``load`` and ``forget``. All others have
    defaults.

    Attributes
    ----------
    name : str
        For metrics and logs: 1 to 64 of the characters a-z, 0-9, _ and -.
    threads : int, default 1
        The number of calls that run at a time, 1 to 256.
    clears_prefix : int, default 0
        The number of first bytes of a tag by which ``clear`` can drop blocks: TAG_BYTES; MODEL_BYTES for a store that
        does not know namespaces; 0 for a store without ``clear``.
    persistent : bool, default True
        Whether content can outlive the process.
    indexed : bool, default False
        Whether ``find`` only reads an index in memory. It is then called where nothing may wait.
    row_padding : int, default 0
        Bytes after each row that the store can use, up to 1 MiB: see ``Space``. Rows that are made for this store alone
        have them.
    url : str, default ""
        The text that the store was opened from, for messages. ``open_store`` sets it.

    Notes
    -----
    Calls may block, and may raise OSError, which fails all blocks of the call. They are made by the worker's threads,
    ``threads`` of them at a time; ``open``, ``stats``, and ``find`` of a store that is ``indexed``, by any thread.
    ``close`` is called once, when no other call is in flight. A store with files, sockets or threads raises
    ForkedProcess in a child of ``os.fork()``.

    The results of a store are not trusted: a block counts only if its bytes have the MAC that was made for its key. The
    attributes are read once, before ``open``.

    ``keys`` are uint8[n, KEY_BYTES], and contain nothing of the content. ``rows`` are int64[n], and index
    ``Space.memory``. ``macs`` are uint8[n, MAC_BYTES], kept with the blocks and returned by ``load``. All three are
    copies that the call owns. ``stop()`` turns true when nobody waits for the call any more: a long call checks it
    between blocks, and returns CANCELLED for the rest.

    Examples
    --------
    >>> import numpy as np, kvpool
    >>> from kvpool.storage import ABSENT, OK, BlockNames, Store, StoreWorker, staging_rows
    >>> class DictStore(Store):
    ...     name = "dict"
    ...     persistent = False
    ...
    ...     def open(self, space):
    ...         self.memory, self.blocks = space.memory, {}
    ...         return bytes(32)  # the secret: random, in a store that others can read
    ...
    ...     def find(self, keys):
    ...         return np.array([OK if bytes(key) in self.blocks else ABSENT for key in keys], np.uint8)
    ...
    ...     def save(self, keys, rows, macs, tag, limit, stop):
    ...         for key, row, mac in zip(keys, rows, macs):
    ...             self.blocks[bytes(key)] = self.memory[row].copy(), mac
    ...         return np.full(len(keys), OK, np.uint8)
    ...
    ...     def load(self, keys, rows, stop):
    ...         codes, macs = self.find(keys), np.zeros((len(keys), 16), np.uint8)
    ...         for place in np.flatnonzero(codes == OK):
    ...             self.memory[rows[place]], macs[place] = self.blocks[bytes(keys[place])]
    ...         return codes, macs
    ...
    ...     def forget(self, keys):
    ...         return sum(self.blocks.pop(bytes(key), None) is not None for key in keys)
    >>> model = kvpool.ModelIdentity("tiny", "rev 1", "float16", "2 layers", "mine 1")
    >>> with StoreWorker(DictStore(), staging_rows(4, 4096), model) as worker:
    ...     worker.memory[0] = 7
    ...     saved = worker.save(BlockNames([b"one"]), [0])
    ...     loaded = saved.wait(60.0) and worker.load(BlockNames([b"one"]), [1])
    ...     print(loaded.wait(60.0), loaded.ok, worker.memory[1].max())
    True 1 7
    """

    name: str = ""
    threads: int = 1
    clears_prefix: int = 0
    persistent: bool = True
    indexed: bool = False
    row_padding: int = 0
    url: str = ""

    @property
    def secret(self) -> bytes:
        """The result of ``open``, 32 bytes, also before it: for a pool whose keys are to last as long as the store.

        Raises
        ------
        OSError
            Where it cannot be read.
        NotImplementedError
            For a store that has it only once it is open.
        """
        raise NotImplementedError(f"the store {self.name!r} has no secret before it is opened")

    def epoch(self, model: bytes, new: bool) -> bytes | None:
        """Return the epoch of a model, after a new one has begun if it is ``new``.

        A block has another key in each epoch. An epoch is kept as durably as a block, and never evicted. By default
        none is kept: then a reset ends with the process.

        Parameters
        ----------
        model : bytes
            The first MODEL_BYTES of the model's tags.
        new : bool
            Whether a new epoch begins.

        Returns
        -------
        bytes or None
            Empty before the first one, EPOCH_BYTES random bytes for each later one, and None for a store that does not
            keep them.

        Raises
        ------
        OSError
            Where it cannot be read or written.
        """
        return None

    @abstractmethod
    def open(self, space: Space) -> bytes:
        """Begin.

        Parameters
        ----------
        space : Space
            The memory of the blocks, and the model.

        Returns
        -------
        bytes
            The store's secret, 32 bytes: the same for all who share its content, and known to nobody else.

        Raises
        ------
        ValueError
            For content that cannot be used with this space.
        OSError
            Where the store cannot be used.
        """

    @abstractmethod
    def find(self, keys: Bytes) -> Bytes:
        """Look up blocks.

        Parameters
        ----------
        keys : ndarray of uint8, shape (n, KEY_BYTES)
            The keys of the blocks.

        Returns
        -------
        ndarray of uint8, shape (n,)
            OK or ABSENT for each key. Other codes mean that it is not known.
        """

    @abstractmethod
    def save(self, keys: Bytes, rows: Rows, macs: Bytes, tag: bytes, limit: int, stop: Stop) -> Bytes:
        """Keep blocks.

        Parameters
        ----------
        keys, rows, macs : ndarray
            The blocks: see the notes of the class.
        tag : bytes
            TAG_BYTES bytes that name the namespace.
        limit : int
            The most blocks with this tag that the store may have. Beyond it, the store drops older blocks of the tag,
            or returns REFUSED.
        stop : callable
            See the notes of the class.

        Returns
        -------
        ndarray of uint8, shape (n,)
            The codes. OK means that the block is kept as durably as this store ever does, or was there before.
        """

    @abstractmethod
    def load(self, keys: Bytes, rows: Rows, stop: Stop) -> tuple[Bytes, Bytes]:
        """Write blocks into rows.

        Parameters
        ----------
        keys, rows : ndarray
            The blocks: see the notes of the class.
        stop : callable
            See the notes of the class.

        Returns
        -------
        codes : ndarray of uint8, shape (n,)
            A row whose code is not OK may have any content. Nothing is written after the call has returned.
        macs : ndarray of uint8, shape (n, MAC_BYTES)
            What was saved with the blocks.
        """

    @abstractmethod
    def forget(self, keys: Bytes) -> int:
        """Drop blocks.

        Parameters
        ----------
        keys : ndarray of uint8, shape (n, KEY_BYTES)
            The keys of the blocks.

        Returns
        -------
        int
            Number of blocks that were there.

        Notes
        -----
        When it returns, none of the blocks is found or loaded any more, even after a crash of a store that outlives its
        process. If that does not hold for all of them, it raises, and is called again. No save that began before may
        take effect later, such as a request that has timed out and still arrives at a server. The worker saves none of
        these blocks meanwhile, unless they were damaged.
        """

    def clear(self, tag: bytes) -> int:
        """Drop all blocks whose tag begins with these bytes. Otherwise as ``forget``.

        Parameters
        ----------
        tag : bytes
            MODEL_BYTES name a model, TAG_BYTES a namespace. There are never more than ``clears_prefix``.

        Returns
        -------
        int
            Number of blocks that were there.

        Raises
        ------
        NotImplementedError
            For a store that cannot drop blocks by their tag.
        """
        raise NotImplementedError(f"the store {self.name!r} cannot drop blocks by their tag")

    def stats(self) -> dict[str, int]:
        """Return figures of the store's own, such as ``capacity``, ``blocks`` and ``evicted``.

        Returns
        -------
        dict of str to int
            The figures.

        Notes
        -----
        Fast. Any thread may call it.
        """
        return {}

    def discard(self) -> None:  # noqa: B027  # Most stores make nothing before they are opened.
        """Remove what reading ``secret`` has made. Called for a store that will not be opened."""

    def close(self) -> None:  # noqa: B027  # Many stores have nothing to end.
        """End. Content that outlives the process stays."""


def store_argument(name: str, store: object) -> Store:
    """The store, whose attributes have the types and values that they may. Raises TypeError, ValueError."""
    if not isinstance(store, Store):
        raise TypeError(f"{name}: expected a Store, got {store!r:.80}")
    if not isinstance(store.name, str) or not re.fullmatch(r"[a-z0-9_-]{1,64}", store.name):
        raise ValueError(f"{name}.name: expected 1 to 64 of the characters a-z, 0-9, _ and -, got {store.name!r:.80}")
    integer_argument(f"{name}.threads", store.threads, 1, 256)
    integer_argument(f"{name}.clears_prefix", store.clears_prefix, 0, TAG_BYTES)
    integer_argument(f"{name}.row_padding", store.row_padding, 0, 1 << 20)
    bool_argument(f"{name}.persistent", store.persistent)
    bool_argument(f"{name}.indexed", store.indexed)
    return store


def parts(count: int, most: int) -> list[slice]:
    """Return slices of up to ``most``, from 0 to ``count``."""
    return [slice(first, min(first + most, count)) for first in range(0, count, most)]
