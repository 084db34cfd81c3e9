"""S3Store: keeps blocks as objects of a bucket, in S3 or in what speaks its protocol."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import numpy as np

from kvpool.arrays.layout import integer_argument
from kvpool.entry.arguments import text_argument
from kvpool.entry.process import Process
from kvpool.errors import PoolClosed
from kvpool.stores.seals import default_place, read_or_make_secret, secret_argument
from kvpool.stores.store import (
    ABSENT,
    CANCELLED,
    EPOCH_BYTES,
    FAILED,
    MODEL_BYTES,
    OK,
    SEAL_BYTES,
    Bytes,
    Rows,
    Space,
    Stop,
    parts,
)
from kvpool.stores.tag_limits import Bools, TagLimits

SECRET_FILE = "KVPOOL_S3_SECRET_FILE"
"""Names the file of the secret where no argument does."""
_AT_ONCE = 16
"""Requests of one call at a time. ``stop`` is asked between so many."""
_RETRIES = 4
_PLACE = re.compile(r"//([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])((?:/[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}){0,8})/?")
_MARK_BYTES = 16
"""Of an object that says that its block was forgotten. They are random, so that no two have one ETag."""
_AGAIN = b"\1"
"""Ends a block that was saved where such an object was."""
_THERE = 255
"""The code of a save whose condition was not met."""
_UNSURE_MAX = 4096
"""So many saves without an answer are kept in mind. Beyond it their names are forgotten, as by ``forget``."""


class S3Store:
    """A ``Store`` over a bucket. Needs the extra ``s3``. Thread-safe.

    Parameters
    ----------
    place
        ``"//BUCKET/PREFIX"``. Objects of others may be in the bucket, and not below the prefix.
    endpoint
        The address of a server that is not Amazon's, such as ``"https://s3.example.com"``. One with ``http:`` sends
        blocks and no credentials in the clear: use it on a loopback interface.
    region
        By default what the environment says (``AWS_REGION``), else us-east-1.
    secret, secret_file
        32 bytes, or a file with 64 hex digits that nobody else can read: the same for all who share the prefix. Without
        them: the file that ``KVPOOL_S3_SECRET_FILE`` names, else ``~/.config/kvpool/s3.secret``, which is made if it is
        not there.
    threads
        How many calls it makes at a time, 1 to 64, of up to 16 requests each.
    timeout_ms
        For one request with all that is tried again, 100 to 600000.

    Notes
    -----
    A block and its seal are one object, whose name tells nothing of its content. Every save has a condition: that there
    is no object, or just that mark of a forgotten block which was seen before (``If-None-Match``, ``If-Match``).
    ``forget`` writes such a mark. So a save that was sent before it and arrives later fails at the server.

    Credentials come from the usual places of the environment and the machine (``AWS_ACCESS_KEY_ID`` and others, roles
    of machines and containers), never from the text of a store, and are not shown. Nothing is evicted: give the bucket
    a rule that objects expire. A limit of a namespace counts what this object has saved.

    Bad arguments raise TypeError or ValueError, which show no secret. The constructor raises ImportError, which names
    what to install, and touches no network. ``open`` writes an object to see that the server keeps conditions, and
    raises OSError if it does not, or cannot be reached. A child of ``os.fork()`` gets ForkedProcess.
    """

    name = "s3"
    clears = MODEL_BYTES
    lasting = True
    indexed = False

    def __init__(
        self,
        place: str,
        *,
        endpoint: str = "",
        region: str = "",
        secret: bytes | None = None,
        secret_file: str | os.PathLike[str] | None = None,
        threads: int = 4,
        timeout_ms: int = 10_000,
    ) -> None:
        found = _PLACE.fullmatch(text_argument("place", place))
        if found is None:
            raise ValueError(f"place={place!r:.80}: accepted is //BUCKET or //BUCKET/PREFIX")
        self._bucket, self._root = found[1], found[2] and found[2].strip("/") + "/"
        self._endpoint = text_argument("endpoint", endpoint)
        if self._endpoint and not re.fullmatch(r"https?://[\w.:\[\]-]+/?", self._endpoint):
            raise ValueError("endpoint: accepted is an address such as https://s3.example.com, without credentials")
        self._region = text_argument("region", region)
        self.threads = integer_argument("threads", threads, 1, 64)
        self._timeout = timedelta(milliseconds=integer_argument("timeout_ms", timeout_ms, 100, 600_000))
        if secret is None and secret_file is None:
            named = os.environ.get(SECRET_FILE)
            self._secret = secret_argument(None, named) if named else read_or_make_secret(default_place("s3"))
        else:
            self._secret = secret_argument(secret, secret_file)
        self._api, self._made = _library()
        self._client: Any = None
        self._process, self._lock, self._counts = Process(), threading.Lock(), Counter[str]()
        self._limits, self._unsure, self._trouble = TagLimits(), set[str](), ""

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
        self._process.check(self)
        if self._client is not None:
            raise ValueError("this S3Store is open: each queue needs one of its own")
        own: dict[str, Any] = {"endpoint": self._endpoint} if self._endpoint else {}
        if self._region or "AWS_REGION" not in os.environ:
            own["region"] = self._region or "us-east-1"
        client = self._made(
            self._bucket,
            client_options={"timeout": self._timeout, "allow_http": self._endpoint.startswith("http:")},
            retry_config={"max_retries": _RETRIES, "retry_timeout": self._timeout},
            **own,
        )
        self._memory, self._size = space.memory, space.block_bytes + SEAL_BYTES
        model = hashlib.blake2b(b"kvpool s3" + space.fingerprint, key=self._secret, digest_size=MODEL_BYTES)
        self._folder = f"{self._root}kvpool3-blocks/{model.hexdigest()}/"
        # Whoever has no access learns it here, and not from every block.
        with self._raising("cannot be used"):
            self._check_conditions(client)
        self._client = client
        return self._secret

    def find(self, keys: Bytes) -> Bytes:
        codes = np.empty(len(keys), np.uint8)
        for part in parts(len(keys), _AT_ONCE):
            codes[part] = self._run([self._find(self._name(key)) for key in keys[part]])
        return codes

    def save(self, keys: Bytes, rows: Rows, seals: Bytes, tag: bytes, limit: int, stop: Stop) -> Bytes:
        codes = np.full(len(keys), CANCELLED, np.uint8)
        if len(self._unsure) > _UNSURE_MAX:
            self._settle()
        for part in parts(len(keys), _AT_ONCE):
            if stop():
                break
            codes[part] = self._save(keys[part], rows[part], seals[part], tag, limit)
        return codes

    def load(self, keys: Bytes, rows: Rows, stop: Stop) -> tuple[Bytes, Bytes]:
        codes, seals = np.full(len(keys), CANCELLED, np.uint8), np.zeros((len(keys), SEAL_BYTES), np.uint8)
        for part in parts(len(keys), _AT_ONCE):
            if stop():
                break
            wanted = zip(keys[part], rows[part].tolist(), seals[part], strict=True)
            codes[part] = self._run([self._load(self._name(key), row, seal) for key, row, seal in wanted])
        return codes, seals

    def forget(self, keys: Bytes) -> int:
        return self._forget([self._name(key) for key in keys])

    def clear(self, tag: bytes) -> int:
        """Drop all blocks of the model. Their objects do not say of which namespace they are."""
        if len(tag) != MODEL_BYTES:
            raise NotImplementedError("an S3Store cannot drop the blocks of a namespace")
        client, count = self._opened(), self._settle()
        with self._raising("has not dropped all blocks"):
            for found in client.list(self._folder, chunk_size=1000):
                # What was saved over a mark becomes a mark again: without one, an older save might still come.
                plain = [one["path"] for one in found if one["size"] == self._size]
                count += len(plain)
                client.delete(plain)
                count += self._forget([one["path"] for one in found if one["size"] not in (self._size, _MARK_BYTES)])
        return count

    def epoch(self, model: bytes, new: bool) -> bytes:
        name, client = f"{self._root}kvpool3-epochs/{model.hex()}", self._opened()
        with self._raising("has not kept the epoch" if new else "has not given the epoch"):
            if new:
                value = os.urandom(EPOCH_BYTES)
                self._api.put(client, name, value, use_multipart=False)
                return value
            try:
                found = self._api.get(client, name)
            except FileNotFoundError:
                return b""
            if found.meta["size"] != EPOCH_BYTES:
                raise ValueError(f"an epoch of {found.meta['size']} bytes: accepted are {EPOCH_BYTES}")
            return bytes(found.bytes())

    def stats(self) -> dict[str, int]:
        """``requests``, and how many ``failed``. Blocks: ``dropped`` for a limit; ``unsure``, whose save had no answer;
        ``unsure_dropped``, because there were too many of these."""
        with self._lock:
            found = {name: self._counts[name] for name in ("requests", "failed", "dropped", "unsure_dropped")}
            return {**found, "unsure": len(self._unsure)}

    def close(self) -> None:
        self._client = None

    # -- inside --------------------------------------------------------------------------------------

    def _opened(self) -> Any:
        self._process.check(self)
        if self._client is None:
            raise PoolClosed("this S3Store is not open")
        return self._client

    def _name(self, key: Bytes) -> str:
        return self._folder + key.tobytes().hex()

    def _check_conditions(self, client: Any) -> None:
        """Raises NotImplementedError if the server writes an object against its condition."""
        refused, name = 0, f"{self._root}kvpool3-conditions"
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

    def _save(self, keys: Bytes, rows: Rows, seals: Bytes, tag: bytes, limit: int) -> Bytes:
        def save(may: Bools) -> Bytes:
            wanted = zip(keys[may], rows[may].tolist(), seals[may], strict=True)
            return self._run(
                [self._put(self._name(key), self._memory[row].tobytes() + seal.tobytes()) for key, row, seal in wanted]
            )

        return self._limits.save(tag, keys, limit, save, lambda gone: self._count("dropped", self.forget(gone)))

    def _forget(self, names: list[str]) -> int:
        count = 0
        for part in parts(len(names), _AT_ONCE):
            codes = self._run([self._mark(name) for name in names[part]])
            if not np.isin(codes, (OK, ABSENT)).all():
                raise OSError(f"{self!r} has not dropped all blocks: {self._trouble}")
            count += int((codes == OK).sum())
            with self._lock:
                self._unsure.difference_update(names[part])
        return count

    def _settle(self) -> int:
        """Forget what was saved without an answer."""
        with self._lock:
            names = list(self._unsure)
        count = self._forget(names)
        self._count("unsure_dropped", count)
        return count

    # -- requests ------------------------------------------------------------------------------------

    def _run(self, calls: Sequence[Coroutine[Any, Any, int]]) -> Bytes:
        """The codes of what is done at a time."""

        async def all_of() -> list[int]:
            return await asyncio.gather(*calls)

        return np.array(asyncio.run(all_of()), np.uint8)

    async def _answer(self, request: Callable[[Any], Coroutine[Any, Any, Any]]) -> tuple[int, Any]:
        """A code and the answer of one request to the open client."""
        client, exceptions = self._opened(), self._api.exceptions
        self._count("requests")
        try:
            return OK, await asyncio.wait_for(request(client), self._timeout.total_seconds())
        except FileNotFoundError:
            return ABSENT, None
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            return _THERE, None
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

    async def _head(self, name: str) -> tuple[int, Any]:
        return await self._answer(lambda client: self._api.head_async(client, name))

    def _is_block(self, meta: Any) -> bool:
        return meta["size"] in (self._size, self._size + len(_AGAIN))

    async def _find(self, name: str) -> int:
        code, meta = await self._head(name)
        return ABSENT if code == OK and not self._is_block(meta) else code

    async def _write(self, name: str, data: bytes, mode: Any) -> int:
        code, _ = await self._answer(
            lambda client: self._api.put_async(client, name, data, mode=mode, use_multipart=False)
        )
        return FAILED if code == ABSENT else code

    async def _put(self, name: str, data: bytes) -> int:
        """Save where nothing is, or a mark. A request that was repeated finds its own block."""
        code = await self._write(name, data, "create")
        if code == _THERE:
            code, meta = await self._head(name)
            if code == OK and not self._is_block(meta):
                code = await self._write(name, data + _AGAIN, {"e_tag": meta["e_tag"]})
                if code == _THERE:
                    code = await self._find(name)
        if code == OK:
            return OK
        with self._lock:
            self._unsure.add(name)
        return FAILED

    async def _mark(self, name: str) -> int:
        """Forget a block. Returns OK if it was there, else ABSENT. Each mark is a new one: a save may wait for the
        one before."""
        code = await self._find(name)
        if code in (OK, ABSENT) and await self._write(name, os.urandom(_MARK_BYTES), "overwrite") != OK:
            return FAILED
        return code

    async def _load(self, name: str, row: int, seal: Bytes) -> int:
        async def get(client: Any) -> Any:
            answer = await self._api.get_async(client, name)
            return await answer.bytes_async() if self._is_block(answer.meta) else b""

        code, data = await self._answer(get)
        if code == OK:
            found = np.frombuffer(data, np.uint8)
            if not len(found):
                return ABSENT
            self._memory[row], seal[:] = found[: self._size - SEAL_BYTES], found[self._size - SEAL_BYTES : self._size]
        return code


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
