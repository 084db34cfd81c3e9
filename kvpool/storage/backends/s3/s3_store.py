"""S3Store: keeps blocks in a bucket, in S3 or in what speaks its protocol, several of them in an object."""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import numpy as np

from kvpool.common.arguments import number_argument, text_argument
from kvpool.common.arrays import Bools
from kvpool.common.arrays.layout import integer_argument
from kvpool.common.process import stays_here
from kvpool.errors import PoolClosed
from kvpool.storage.backends.s3.pack_index import LOG_BYTES_MAX, NAME_BYTES, DropLog, Pack, PackIndex, whole
from kvpool.storage.backends.shared_secret import default_place, read_or_make_secret, secret_argument
from kvpool.storage.backends.tag_limits import TagLimits
from kvpool.storage.store import (
    ABSENT,
    CANCELLED,
    EPOCH_BYTES,
    FAILED,
    MAC_BYTES,
    MODEL_BYTES,
    OK,
    TAG_BYTES,
    Bytes,
    Rows,
    Space,
    Stop,
    Store,
    parts,
)

SECRET_FILE = "KVPOOL_S3_SECRET_FILE"
"""Names the file of the secret where no argument does."""
_AT_ONCE = 16
"""Requests of one call at a time. ``stop`` is asked between so many."""
_PACK_BYTES = 8 << 20
"""A save is cut into packs of about this size, and a larger object is sent in parts of it."""
_RETRIES = 4
_PLACE = re.compile(r"//([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])((?:/[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}){0,8})/?")
_LISTED_SECONDS = 1.0
"""So long what others have saved is not looked for again."""
_CLOCK_SECONDS = 60
"""So much clocks of workers may differ. Packs of a worker whose clock is further off are found by those who open the
store later."""
_LATE_SECONDS = 3600
"""After which no save arrives any more: Amazon refuses a request 15 minutes after it was signed."""
_Found = TypeVar("_Found")
_UNMET = 255
"""The code of a request whose condition was not met."""


class S3Store(Store):
    """A ``Store`` over a bucket of S3, or of a server with the same protocol. Needs the extra ``s3``.

    Parameters
    ----------
    place : str
        ``"//BUCKET/PREFIX"``. Objects of others may be in the bucket, and not below the prefix.
    endpoint : str, default ""
        The address of a server that is not Amazon's, such as ``"https://s3.example.com"``. One with ``http:`` sends
        blocks and no credentials in the clear: use it on a loopback interface.
    region : str, default ""
        By default the environment's (``AWS_REGION``), else us-east-1.
    secret : bytes, optional
        32 bytes, the same for all who share the prefix.
    secret_file : str or PathLike, optional
        A file with 64 hex digits that nobody else can read, instead of ``secret``. With neither of them: the file that
        ``KVPOOL_S3_SECRET_FILE`` names, else ``~/.config/kvpool/s3.secret``, which is made if it is not there.
    threads : int, default 4
        Number of calls at a time, 1 to 64, of up to 16 requests each.
    timeout : float, default 10.0
        Seconds for one request with its retries, 0.1 to 600. One attempt has half of it.
    index_blocks : int, default 2**20
        Number of blocks that are known at a time, 1 or more. Each takes 170 to 370 bytes.

    Raises
    ------
    TypeError, ValueError
        For a bad argument. No message contains a secret.
    ImportError
        Without the extra. It names what to install.
    OSError
        From ``open`` where the server cannot be reached or does not keep conditions, and from a call that fails.

    Notes
    -----
    The blocks of one save are one object, of up to 8 MiB unless a block is larger, with their MACs and their names.
    Names are keyed hashes: they reveal nothing of the content, but which blocks are of one namespace. An index in
    memory has the blocks that are there. It is updated by listing the bucket, once a second at most.

    One small object, the log, records what was dropped. It is written under the condition that nobody else has changed
    it (``If-Match``), and each find, save and load reads it under the condition that it has changed. So a drop counts
    for all workers when it has returned. A save that was begun before it no longer counts, whenever it arrives and
    whoever has sent it.

    Credentials come from the usual places of the environment and the machine (``AWS_ACCESS_KEY_ID`` and others, roles
    of machines and containers), never from the text of a store, and are not shown. Nothing is evicted: give the bucket
    a rule that objects expire. A limit of a namespace counts what this object has saved, and holds for it alone.

    Any thread may call it. The constructor touches no network. A child of ``os.fork()`` gets ForkedProcess.
    """

    name = "s3"
    clears_prefix = TAG_BYTES

    def __init__(
        self,
        place: str,
        *,
        endpoint: str = "",
        region: str = "",
        secret: bytes | None = None,
        secret_file: str | os.PathLike[str] | None = None,
        threads: int = 4,
        timeout: float = 10.0,
        index_blocks: int = 1 << 20,
    ) -> None:
        match = _PLACE.fullmatch(text_argument("place", place))
        if match is None:
            accepted = "//BUCKET or //BUCKET/PREFIX, a bucket of 3 to 63 of a-z, 0-9, . and -"
            raise ValueError(f"place: expected {accepted}, got {place!r:.80}")
        self._bucket, self._root = match[1], match[2] and match[2].strip("/") + "/"
        self._endpoint = text_argument("endpoint", endpoint)
        if self._endpoint and not re.fullmatch(r"https?://[\w.:\[\]-]+/?", self._endpoint):
            raise ValueError(
                "endpoint: expected an address such as https://s3.example.com, without credentials, got another text"
            )
        self._region = text_argument("region", region)
        self.threads = integer_argument("threads", threads, 1, 64)
        self._timeout = timedelta(seconds=number_argument("timeout", timeout, 0.1, 600.0))
        if secret is None and secret_file is None:
            named = os.environ.get(SECRET_FILE)
            self._secret = secret_argument(None, named) if named else read_or_make_secret(default_place("s3"))
        else:
            self._secret = secret_argument(secret, secret_file)
        self._api, self._made = _library()
        self._client: Any = None
        self._lock, self._counts = threading.Lock(), Counter[str]()
        stays_here(self)
        self._limits, self._trouble = TagLimits(), ""
        self._index = PackIndex(integer_argument("index_blocks", index_blocks, 1, 1 << 40))
        # Of the listing: one at a time, when the last one began, and the smallest number a pack may have.
        self._listing, self._listed, self._oldest = threading.Lock(), 0.0, 0

    @property
    def secret(self) -> bytes:
        """The secret that all who share the prefix have, 32 bytes."""
        return self._secret

    def __repr__(self) -> str:
        return f"S3Store('//{self._bucket}/{self._root}')"

    def __reduce__(self) -> Any:
        raise TypeError("an S3Store is not pickled: its secret would travel with the pickle")

    # -- the store -----------------------------------------------------------------------------------

    def open(self, space: Space) -> bytes:
        if self._client is not None:
            raise ValueError(f"store: expected one that is not open, got {self!r}, which is")
        options: dict[str, Any] = {"endpoint": self._endpoint} if self._endpoint else {}
        if self._region or "AWS_REGION" not in os.environ:
            options["region"] = self._region or "us-east-1"
        client = self._made(
            self._bucket,
            client_options={"timeout": self._timeout / 2, "allow_http": self._endpoint.startswith("http:")},
            retry_config={"max_retries": _RETRIES, "retry_timeout": self._timeout / 2},
            **options,
        )
        self._memory, self._size = space.memory, space.block_bytes + MAC_BYTES
        model = hashlib.blake2b(
            b"kvpool s3" + space.fingerprint + self._size.to_bytes(8, "little"),
            key=self._secret,
            digest_size=MODEL_BYTES,
        ).hexdigest()
        self._folder, self._log = f"{self._root}kvpool5-packs/{model}/", f"{self._root}kvpool5-drops/{model}"
        # Whoever has no access learns it here, and not from every block.
        with self._raising("cannot be used"):
            self._check_conditions(client)
        self._client = client
        return self._secret

    def find(self, keys: Bytes) -> Bytes:
        names = _names(keys)
        self._learn(names)
        if self._sync() != OK:
            return np.full(len(keys), FAILED, np.uint8)
        return np.array([ABSENT if place is None else OK for place in self._index.find(names)], np.uint8)

    def save(self, keys: Bytes, rows: Rows, macs: Bytes, tag: bytes, limit: int, stop: Stop) -> Bytes:
        if self._sync() != OK:
            return np.full(len(keys), FAILED, np.uint8)
        # Of all packs of the save, so that what is dropped from now on counts in none.
        number, codes = self._index.log.number, np.full(len(keys), CANCELLED, np.uint8)
        for part in parts(len(keys), max(1, _PACK_BYTES // self._size)):
            if stop():
                break
            codes[part] = self._save(keys[part], rows[part], macs[part], tag, limit, number)
        return codes

    def load(self, keys: Bytes, rows: Rows, stop: Stop) -> tuple[Bytes, Bytes]:
        codes, macs = np.full(len(keys), ABSENT, np.uint8), np.zeros((len(keys), MAC_BYTES), np.uint8)
        names, wanted = _names(keys), dict[Pack, list[tuple[int, int]]]()
        self._learn(names)
        for which, location in enumerate(self._index.find(names)):
            if location is not None:
                wanted.setdefault(location[0], []).append((which, location[1]))
                codes[which] = CANCELLED
        for part in parts(len(wanted), _AT_ONCE):
            if stop():
                break
            packs = list(wanted.items())[part]
            calls: list[Callable[[], int]] = [self._sync, *(partial(self._read, *item, rows, macs) for item in packs)]
            synced, *answers = self._together(calls)
            for (_, places), code in zip(packs, answers, strict=True):
                codes[[which for which, _ in places]] = code if synced == OK else FAILED
        for pack, places in wanted.items():
            for which, _ in places:
                if codes[which] == OK and self._index.log.dropped(names[which], pack):
                    codes[which] = ABSENT
        return codes, macs

    def forget(self, keys: Bytes) -> int:
        return self._drop(_names(keys))

    def clear(self, tag: bytes) -> int:
        count, client = self._drop([whole(tag)]), self._opened()
        with self._raising("has not deleted all objects"):
            for page in client.list(self._folder, chunk_size=1000):
                packs = map(Pack.parse, (entry["path"].rpartition("/")[2] for entry in page))
                client.delete([self._folder + pack.name for pack in packs if pack and self._index.log.drops(pack)])
        return count

    def epoch(self, model: bytes, new: bool) -> bytes:
        name, client = f"{self._root}kvpool5-epochs/{model.hex()}", self._opened()
        with self._raising("has not kept the epoch" if new else "has not given the epoch"):
            if new:
                value = os.urandom(EPOCH_BYTES)
                self._api.put(client, name, value, use_multipart=False)
                return value
            try:
                answer = self._api.get(client, name)
            except FileNotFoundError:
                return b""
            if answer.meta["size"] != EPOCH_BYTES:
                raise ValueError(f"epoch: expected {EPOCH_BYTES} bytes, got {answer.meta['size']}")
            return bytes(answer.bytes())

    def stats(self) -> dict[str, int]:
        """Return ``requests`` and ``failed``; known ``blocks`` and ``packs``; blocks ``dropped`` for a limit.

        Returns
        -------
        dict of str to int
            The figures.
        """
        with self._lock:
            counts = {name: self._counts[name] for name in ("requests", "failed", "dropped")}
        return {**counts, "blocks": len(self._index), "packs": self._index.packs}

    def close(self) -> None:
        self._client = None

    # -- inside --------------------------------------------------------------------------------------

    def _opened(self) -> Any:
        if self._client is None:
            raise PoolClosed("this S3Store is not open")
        return self._client

    def _check_conditions(self, client: Any) -> None:
        """Raises NotImplementedError if the server writes an object against its condition."""
        refused, name = 0, f"{self._root}kvpool5-conditions"
        with suppress(self._api.exceptions.AlreadyExistsError):
            self._api.put(client, name, b"1", mode="create", use_multipart=False)
        for mode in ("create", {"e_tag": f'"{0:032x}"'}):
            try:
                self._api.put(client, name, b"2", mode=mode, use_multipart=False)
            except (self._api.exceptions.AlreadyExistsError, self._api.exceptions.PreconditionError):
                refused += 1
        if refused < 2:
            raise NotImplementedError("the server does not keep If-None-Match and If-Match of a PUT")

    def _count(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] += count

    def _save(self, keys: Bytes, rows: Rows, macs: Bytes, tag: bytes, limit: int, number: int) -> Bytes:
        def save(may: Bools) -> Bytes:
            return self._put(_names(keys[may]), rows[may], macs[may], tag, number)

        return self._limits.save(tag, keys, limit, save, self._make_room)

    def _make_room(self, keys: Bytes) -> None:
        """Drop blocks for a limit. Nobody else is told: they were saved here, and are gone when their pack is."""
        self._count("dropped", len(keys))
        self._delete(self._index.remove(_names(keys)))

    def _drop(self, names: Sequence[bytes]) -> int:
        """Write into the log that these blocks, or those with these tags, are dropped. Returns how many were there."""
        self._list()
        for _ in range(_RETRIES):
            if self._sync() != OK:
                break
            log = self._index.log
            code, count, packs = self._write_log(log.then(names, int(time.time()), self._oldest), log)
            if code == OK:
                self._delete(packs)
                return int(count)
        raise OSError(f"{self!r} has not dropped all blocks: {self._trouble}")

    def _delete(self, packs: Iterable[Pack]) -> None:
        """Delete packs of which nothing counts. What is not deleted is left to the bucket's rule."""
        names = [self._folder + pack.name for pack in packs]
        if names:
            with suppress(OSError), self._raising("has not deleted all objects"):
                self._opened().delete(names)

    # -- what others have saved ----------------------------------------------------------------------

    def _learn(self, names: Sequence[bytes]) -> None:
        """Look for blocks that are not known."""
        if None in self._index.find(names):
            self._list()

    def _list(self) -> None:
        """Learn of all packs at first, and then of those that were begun lately."""
        with self._listing:
            now_s, first = time.time(), not self._listed
            if 0 <= now_s - self._listed < _LISTED_SECONDS:
                return
            since = max(0, int(1e3 * (min(now_s, self._listed) - _CLOCK_SECONDS - self._timeout.total_seconds())))
            with self._raising("has not been listed"):
                pages = self._opened().list(self._folder, offset=f"{self._folder}{since:012x}", chunk_size=1000)
                named = [Pack.parse(entry["path"].rpartition("/")[2]) for page in pages for entry in page]
            packs = [pack for pack in named if pack is not None]
            if first:
                self._oldest = min([int(now_s) - _LATE_SECONDS, *(pack.number for pack in packs)])
            new = self._opened_packs([pack for pack in packs if pack.name not in self._index])
            # What has arrived after it was dropped counts no more.
            self._delete([pack for pack in new if not self._index.add(pack)])
            self._listed = now_s

    def _opened_packs(self, packs: Sequence[Pack]) -> Iterator[Pack]:
        """Packs with the names of their blocks, as many of the youngest as the index may have."""
        blocks = np.cumsum([pack.blocks for pack in reversed(packs)])
        young = packs[len(packs) - int(np.searchsorted(blocks, self._index.most, "right")) :]
        found_names = self._together([partial(self._names_in, pack) for pack in young])
        for pack, names in zip(young, found_names, strict=True):
            if isinstance(names, int):
                raise OSError(f"{self!r} has not been listed: {self._trouble}")
            yield pack._replace(names=names)

    # -- requests ------------------------------------------------------------------------------------

    def _together(self, calls: Sequence[Callable[[], _Found]]) -> list[_Found]:
        """What calls return that are made at a time."""
        # Not by the library's coroutines: a process that ends right after one of them is aborted.
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            return [begun.result() for begun in [threads.submit(call) for call in calls]]

    def _answer(self, request: Callable[[Any], Any]) -> tuple[int, Any]:
        """A code and the answer of one request to the open client."""
        client, exceptions = self._opened(), self._api.exceptions
        self._count("requests")
        try:
            return OK, request(client)
        except FileNotFoundError:
            return ABSENT, None
        except (exceptions.AlreadyExistsError, exceptions.NotModifiedError, exceptions.PreconditionError):
            return _UNMET, None
        except Exception as error:  # the library's own have no base that says more
            self._count("failed")
            self._trouble = _text_of(error)
            return FAILED, None

    @contextmanager
    def _raising(self, what: str) -> Iterator[None]:
        """Errors of the library as OSError."""
        self._count("requests")
        try:
            yield
        except (FileNotFoundError, PoolClosed):
            raise
        except Exception as error:
            self._count("failed")
            raise OSError(f"{self!r} {what}: {_text_of(error)}") from None

    def _write(self, name: str, data: Any, mode: Any = "overwrite") -> tuple[int, str]:
        """A code, and the server's name for what was written."""
        parted = len(data) > _PACK_BYTES
        code, answer = self._answer(
            lambda client: self._api.put(client, name, data, mode=mode, use_multipart=parted, chunk_size=_PACK_BYTES)
        )
        return (FAILED, "") if code == ABSENT else (code, answer["e_tag"] if answer else "")

    def _ranges(self, pack: Pack, starts: Sequence[int], size: int) -> tuple[int, Any]:
        """Parts of a pack. They are empty or too short if the object is."""

        def get(client: Any) -> Any:
            try:
                return self._api.get_ranges(
                    client, self._folder + pack.name, starts=starts, lengths=[size] * len(starts)
                )
            except self._api.exceptions.GenericError as error:
                if "416" not in str(error):
                    raise
                return [b""] * len(starts)

        code, chunks = self._answer(get)
        if code == ABSENT:
            self._index.discard(pack)
        return code, chunks

    def _names_in(self, pack: Pack) -> tuple[bytes, ...] | int:
        """The names of the blocks of a pack, or FAILED. There are none if it has gone."""
        if not pack.begins:
            return pack.names
        code, chunks = self._ranges(pack, [0], pack.begins)
        if code == FAILED:
            return FAILED
        data = bytes(chunks[0]) if code == OK else b""
        return tuple(data[part] for part in parts(len(data), NAME_BYTES))

    def _read(self, pack: Pack, places: Sequence[tuple[int, int]], rows: Rows, macs: Bytes) -> int:
        """Load blocks from a pack: each with its number in the call and its place in the pack."""
        starts = [pack.begins + place * self._size for _, place in places]
        code, chunks = self._ranges(pack, starts, self._size)
        for (which, _), data in zip(places, chunks if code == OK else (), strict=False):
            # What is too short keeps a MAC of zeros, which fits no block.
            if len(data) == self._size:
                got = np.frombuffer(data, np.uint8)
                macs[which], self._memory[rows[which]] = got[:MAC_BYTES], got[MAC_BYTES:]
        return code

    def _put(self, names: Sequence[bytes], rows: Rows, macs: Bytes, tag: bytes, number: int) -> Bytes:
        """Save the blocks that are not there in a pack. ``number``: of the log when the save began."""
        new = np.array([place is None for place in self._index.find(names)], bool)
        if not new.any():
            return np.full(len(names), OK, np.uint8)
        new_names = [name for name, is_new in zip(names, new.tolist(), strict=True) if is_new]
        pack = Pack.new(int(1e3 * time.time()), number, tag, new_names)
        data = np.empty(pack.begins + len(new_names) * self._size, np.uint8)
        data[: pack.begins] = np.frombuffer(b"".join(new_names), np.uint8)[: pack.begins]
        blocks = data[pack.begins :].reshape(len(new_names), self._size)
        blocks[:, :MAC_BYTES] = macs[new]
        for place, row in enumerate(rows[new].tolist()):
            blocks[place, MAC_BYTES:] = self._memory[row]
        code, _ = self._write(self._folder + pack.name, data)
        if code == OK:
            self._index.add(pack)
        return np.where(new, np.uint8(code), np.uint8(OK))

    # -- the log of drops ----------------------------------------------------------------------------

    def _sync(self) -> int:
        """Learn what was dropped. Returns OK, or FAILED."""

        def get(client: Any) -> tuple[bytes, str]:
            options = {"if_none_match": self._index.log.e_tag} if self._index.log.e_tag else None
            answer = self._api.get(client, self._log, options=options)
            large = answer.meta["size"] > LOG_BYTES_MAX
            return b"" if large else bytes(answer.bytes()), answer.meta["e_tag"]

        code, fetched = self._answer(get)
        known_log = self._index.log
        if code == OK:
            log = DropLog.decode(fetched[0], self._secret, fetched[1])
            if log is None:
                # Nobody knows what it said: all that was saved until now is dropped.
                number = max(known_log.number + 1, int(time.time()))
                return (self._write_log(DropLog(number, number), DropLog(e_tag=fetched[1])))[0]
            self._index.adopt(log)
        elif code == ABSENT and known_log.e_tag:
            self._index.adopt(known_log._replace(e_tag=""))
        return OK if code in (OK, ABSENT, _UNMET) else FAILED

    def _write_log(self, log: DropLog, before: DropLog) -> tuple[int, int, list[Pack]]:
        """Write the log, if the bucket has the one before still. A code, how many blocks that drops, and the packs that
        have none any more."""
        mode = {"e_tag": before.e_tag} if before.e_tag else "create"
        code, e_tag = self._write(self._log, log.encode(self._secret), mode)
        return code, *(self._index.adopt(log._replace(e_tag=e_tag)) if code == OK else (0, []))


def _names(keys: Bytes) -> list[bytes]:
    return [key.tobytes()[:NAME_BYTES] for key in keys]


def _text_of(error: Exception) -> str:
    """The first line: the rest may have the request with its headers."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), ''):.200}"


def _library() -> tuple[Any, Callable[..., Any]]:
    try:
        import obstore
        from obstore.store import S3Store as Client
    except ImportError as error:
        raise ImportError('S3Store needs obstore: pip install ".[s3]"') from error
    return obstore, Client
