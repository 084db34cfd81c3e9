"""S3Store: keeps blocks as objects of a bucket, in S3 or in what speaks its protocol."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
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

SECRET_FILE = "KVPOOL_S3_SECRET_FILE"
"""Names the file of the secret where no argument does."""
_AT_ONCE = 16
"""Requests of one call at a time. ``stop`` is asked between so many."""
_RETRIES = 4
SETTLE_SECONDS = 60.0
"""A save that has failed may still take effect for so long: what is forgotten meanwhile is forgotten again."""


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
        For one request with all that is tried again.

    Notes
    -----
    A block and its seal are one object, whose name tells nothing of its content. Credentials come from the usual places
    of the environment and the machine (``AWS_ACCESS_KEY_ID`` and others, roles of machines and containers), never from
    the text of a store, and are not shown. Nothing is evicted: give the bucket a rule that objects expire. A limit of a
    namespace counts what this process has saved.

    Bad arguments raise TypeError or ValueError, which show no secret. The constructor raises ImportError, which names
    what to install, and touches no network. A child of ``os.fork()`` gets ForkedProcess.
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
        found = re.fullmatch(r"//([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])/?([\w./-]*)", text_argument("place", place))
        if found is None:
            raise ValueError(f"place={place!r:.80}: accepted is //BUCKET/PREFIX")
        self._bucket, self._root = found[1], found[2].strip("/") + "/" if found[2].strip("/") else ""
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
        self._client: Any = None
        self._api, made = _library()
        self._made: Callable[..., Any] = made
        self._process, self._lock, self._counts = Process(), threading.Lock(), Counter[str]()
        self._unsure: dict[bytes, float] = {}
        self._of_tag: dict[bytes, set[bytes]] = {}

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
        own: dict[str, Any] = {"endpoint": self._endpoint} if self._endpoint else {}
        if self._region or "AWS_REGION" not in os.environ:
            own["region"] = self._region or "us-east-1"
        self._client = self._made(
            self._bucket,
            client_options={"timeout": self._timeout, "allow_http": self._endpoint.startswith("http:")},
            retry_config={"max_retries": _RETRIES, "retry_timeout": self._timeout},
            **own,
        )
        self._memory = space.memory
        model = hashlib.blake2b(b"kvpool s3" + space.fingerprint, key=self._secret, digest_size=MODEL_BYTES)
        self._folder = f"{self._root}kvpool3-{model.hexdigest()}/"
        # Whoever has no access learns it here, and not from every block.
        self._run([self._head(self._folder + "none")])
        if self._counts["failed"]:
            self._client = None
            raise OSError(f"{self!r} cannot be read: {self._trouble}")
        return self._secret

    def find(self, keys: Bytes) -> Bytes:
        codes = np.empty(len(keys), np.uint8)
        for part in parts(len(keys), _AT_ONCE):
            codes[part] = self._run([self._head(self._name(key)) for key in keys[part]])
        return codes

    def save(self, keys: Bytes, rows: Rows, seals: Bytes, tag: bytes, limit: int, stop: Stop) -> Bytes:
        codes = np.full(len(keys), CANCELLED, np.uint8)
        for part in parts(len(keys), _AT_ONCE):
            if stop():
                break
            wanted = list(zip(keys[part], rows[part].tolist(), seals[part], strict=True))
            calls = [self._put(key, self._memory[row].tobytes() + seal.tobytes()) for key, row, seal in wanted]
            codes[part] = self._run(calls)
        return codes

    def load(self, keys: Bytes, rows: Rows, stop: Stop) -> tuple[Bytes, Bytes]:
        codes, seals = np.full(len(keys), CANCELLED, np.uint8), np.zeros((len(keys), SEAL_BYTES), np.uint8)
        for part in parts(len(keys), _AT_ONCE):
            if stop():
                break
            codes[part] = self._run(
                [
                    self._get(key, row, seal)
                    for key, row, seal in zip(keys[part], rows[part].tolist(), seals[part], strict=True)
                ]
            )
        return codes, seals

    def forget(self, keys: Bytes) -> int:
        count = 0
        for part in parts(len(keys), _AT_ONCE):
            there = self._run([self._head(self._name(key)) for key in keys[part]])
            gone = self._run([self._delete(self._name(key)) for key in keys[part]])
            if (gone != OK).any() or (there == FAILED).any():
                raise OSError(f"{self!r} has not dropped all blocks: {self._trouble}")
            count += int((there == OK).sum())
        now = time.monotonic()
        with self._lock:
            self._unsure = {key: until for key, until in self._unsure.items() if until > now}
            unsure = any(key.tobytes() in self._unsure for key in keys)
        if unsure:
            raise OSError(f"{self!r}: a save that has failed may still arrive")
        return count

    def clear(self, tag: bytes) -> int:
        if len(tag) != MODEL_BYTES:
            raise NotImplementedError("an S3Store cannot drop the blocks of a namespace")
        count = 0
        for found in self._opened().list(self._folder, chunk_size=1000):
            names = [one["path"] for one in found]
            self._opened().delete(names)
            count += len(names)
        with self._lock:
            if any(until > time.monotonic() for until in self._unsure.values()):
                raise OSError(f"{self!r}: a save that has failed may still arrive")
        return count

    def epoch(self, model: bytes, new: bool) -> bytes:
        name = f"{self._root}kvpool3-epochs/{model.hex()}"
        if new:
            value = os.urandom(EPOCH_BYTES)
            if self._run([self._write(name, value)])[0] != OK:
                raise OSError(f"{self!r} has not kept the epoch: {self._trouble}")
            return value
        out = bytearray()
        code = self._run([self._read(name, out.extend)])[0]
        if code not in (OK, ABSENT):
            raise OSError(f"{self!r} has not given the epoch: {self._trouble}")
        return bytes(out)

    def stats(self) -> dict[str, int]:
        with self._lock:
            return {name: self._counts[name] for name in ("requests", "failed")}

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

    def _run(self, calls: list[Coroutine[Any, Any, int]]) -> Bytes:
        """The codes of requests that are made at a time."""

        async def all_of() -> list[int]:
            return await asyncio.gather(*calls)

        return np.array(asyncio.run(all_of()), np.uint8)

    async def _judged(self, request: Any) -> tuple[int, Any]:
        with self._lock:
            self._counts["requests"] += 1
        try:
            return OK, await request
        except FileNotFoundError:
            return ABSENT, None
        except Exception as error:  # the library's own have no base that says more
            with self._lock:
                self._counts["failed"] += 1
            # The rest of the text may have the request with its headers.
            self._trouble = f"{type(error).__name__}: {str(error).splitlines()[0]:.200}"
            return FAILED, None

    async def _head(self, name: str) -> int:
        return (await self._judged(self._api.head_async(self._opened(), name)))[0]

    async def _delete(self, name: str) -> int:
        code = (await self._judged(self._api.delete_async(self._opened(), name)))[0]
        return OK if code == ABSENT else code

    async def _write(self, name: str, data: bytes) -> int:
        code = (await self._judged(self._api.put_async(self._opened(), name, data, use_multipart=False)))[0]
        return FAILED if code == ABSENT else code

    async def _put(self, key: Bytes, data: bytes) -> int:
        code = await self._write(self._name(key), data)
        if code != OK:
            with self._lock:
                self._unsure[key.tobytes()] = time.monotonic() + SETTLE_SECONDS
        return code

    async def _read(self, name: str, take: Callable[[Any], Any]) -> int:
        code, answer = await self._judged(self._api.get_async(self._opened(), name))
        if code == OK:
            code, data = await self._judged(answer.bytes_async())
            if code == OK:
                take(memoryview(data))
        return code

    async def _get(self, key: Bytes, row: int, seal: Bytes) -> int:
        wrong = []

        def take(data: memoryview) -> None:
            found = np.frombuffer(data, np.uint8)
            if len(found) != self._memory.shape[1] + SEAL_BYTES:
                wrong.append(len(found))
                return
            self._memory[row], seal[:] = found[:-SEAL_BYTES], found[-SEAL_BYTES:]

        code = await self._read(self._name(key), take)
        return ABSENT if wrong else code


def _library() -> tuple[Any, Callable[..., Any]]:
    try:
        import obstore
        from obstore.store import S3Store as Client
    except ImportError as error:
        raise ImportError('S3Store needs obstore: pip install ".[s3]"') from error
    return obstore, Client
