"""What proves that the bytes of a block are those that were saved under its key; the keys themselves; and the secret
from which both are made, which several workers may share."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from kvpool.common.arrays import Int32s, Int64s
from kvpool.common.arrays.digest import Digest
from kvpool.hostcache.identity import ModelIdentity
from kvpool.storage.store import KEY_BYTES, MAC_BYTES, MODEL_BYTES, TAG_BYTES, Bytes, Rows

SECRET_BYTES = 32
_NAME = b"kvpool store 4 "
"""The format of keys and seals. Stores that outlive a process drop what was saved in another."""


class BlockNames:
    """Blocks as an engine names them, in place of their keys. A ``StoreWorker`` hashes them on its own threads.

    ``names``: bytes for each block. ``contexts``: for each block what its content depends on, besides its name, such as
    ``block_context`` gives it; None where names say all. It is not part of the key, and of the seal: a block that was
    saved in another context is DAMAGED. Immutable. It has parts, by a slice or by places int64[n]. Raises TypeError and
    ValueError.
    """

    __slots__ = ("contexts", "names")

    def __init__(self, names: Iterable[bytes], contexts: Iterable[bytes] | None = None) -> None:
        self.names = _exact_all(names)
        self.contexts = None if contexts is None else _exact_all(contexts)
        if self.contexts is not None and len(self.contexts) != len(self.names):
            raise ValueError(
                f"contexts: expected one for each of the {len(self.names)} names, got {len(self.contexts)}"
            )

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, which: slice | Rows) -> BlockNames:
        places = range(len(self.names))[which] if isinstance(which, slice) else which.tolist()
        contexts = None if self.contexts is None else [self.contexts[place] for place in places]
        return BlockNames([self.names[place] for place in places], contexts)


class Secret:
    """What is derived from the secret of a store for one model. Never shown. Thread-safe.

    All derivations are BLAKE2b in its keyed mode, under keys that are themselves derived from the secret, one for each
    purpose. Blocks enter it by their ``Digest``.
    """

    __slots__ = ("_digest", "_identity", "_opaque", "_macs", "_tags", "model")

    def __init__(self, secret: bytes, identity: ModelIdentity) -> None:
        if not isinstance(secret, bytes) or len(secret) != SECRET_BYTES:
            raise ValueError(f"secret: expected {SECRET_BYTES} bytes, got another value")
        self._identity = bytes.fromhex(identity.fingerprint)
        self._opaque, self._macs, self._tags, digests = (
            hashlib.blake2b(_NAME + purpose, key=secret, digest_size=32).digest()
            for purpose in (b"opaque", b"seals", b"tags", b"digests")
        )
        self._digest = Digest(digests)
        self.model = hashlib.blake2b(self._identity, key=self._tags, digest_size=MODEL_BYTES).digest()
        """What all tags of the model begin with."""

    def __repr__(self) -> str:
        return "Secret()"

    def __reduce__(self) -> Any:
        raise TypeError("a secret is not pickled: it would travel with the pickle")

    def tag(self, namespace: bytes) -> bytes:
        """The name of a namespace in the store: TAG_BYTES bytes, of which the first name the model."""
        size = TAG_BYTES - MODEL_BYTES
        digest = hashlib.blake2b(self._identity + namespace, key=self._tags, digest_size=size, person=b"namespace")
        return self.model + digest.digest()

    def derive_keys(self, names: BlockNames | Iterable[bytes]) -> Bytes:
        """Keys of blocks that an engine names itself: uint8[n, KEY_BYTES]."""
        block_names = names if isinstance(names, BlockNames) else BlockNames(names)
        begun = hashlib.blake2b(self._identity, key=self._opaque, digest_size=KEY_BYTES)
        digests = bytearray()
        for name in block_names.names:
            hashed = begun.copy()
            hashed.update(name)
            digests += hashed.digest()
        return np.frombuffer(digests, np.uint8).reshape(-1, KEY_BYTES)

    def in_epoch(self, keys: Bytes, epoch: bytes) -> Bytes:
        """What a store has blocks with these keys by, in this epoch of the model: uint8[n, KEY_BYTES]."""
        if not epoch:
            return keys
        # Keys are as good as random, so that a mask that nobody knows makes others of them at no cost.
        mask = hashlib.blake2b(epoch, key=self._opaque, digest_size=KEY_BYTES, person=b"epoch").digest()
        return keys ^ np.frombuffer(mask, np.uint8)

    def keys(self, blocks: Bytes | BlockNames) -> Bytes:
        """Makes keys of names, and leaves keys as they are: uint8[n, KEY_BYTES]."""
        return self.derive_keys(blocks) if isinstance(blocks, BlockNames) else blocks

    def mac(self, keys: Bytes, rows: Rows, memory: Bytes, contexts: Sequence[bytes] | None = None) -> Bytes:
        """Seals of rows of memory under these keys, in these contexts: uint8[n, MAC_BYTES]."""
        fixed = int(memory.shape[1]).to_bytes(8, "little") + self._identity
        whole, out = keys.tobytes(), []
        for place, row in enumerate(rows.tolist()):
            context = contexts[place] if contexts else b""
            named = whole[place * KEY_BYTES : (place + 1) * KEY_BYTES] + fixed
            named += len(context).to_bytes(8, "little") + context
            sealed = named + self._digest.of([memory[row]])
            out.append(hashlib.blake2b(sealed, key=self._macs, digest_size=MAC_BYTES).digest())
        return np.frombuffer(b"".join(out), np.uint8).reshape(-1, MAC_BYTES)


def block_context(parent: bytes, tokens: Int32s, extra: Int64s | None, namespace: bytes, group: int) -> bytes:
    """What a block of a prompt depends on, for ``BlockNames``: no two blocks have the same bytes.

    ``parent``: the pool's key of the block before it, or b"". ``tokens`` int32[n] and ``extra`` int64[n]: its tokens
    and their extra ids. ``namespace``: bytes that tell it from all others. ``group``: the index of its group of layers.
    """
    ids = tokens.astype("<i4").tobytes()
    more = b"" if extra is None or not extra.any() else extra.astype("<i8").tobytes()
    sizes = np.array([len(parent), len(namespace), len(ids), group], "<i8").tobytes()
    return sizes + parent + namespace + ids + more


def _exact_all(names: Iterable[bytes]) -> tuple[bytes, ...]:
    name_tuple = tuple(names)
    return name_tuple if [*map(type, name_tuple)].count(bytes) == len(name_tuple) else tuple(map(_exact, name_tuple))


def _exact(name: object) -> bytes:
    """The bytes as an exact builtin. Raises TypeError for anything else."""
    if not isinstance(name, bytes):
        raise TypeError(f"name: expected bytes, got {name!r:.80}")
    return bytes.__getitem__(name, slice(None))


_DIGITS = 2 * SECRET_BYTES


class SharedSecret:
    """A secret that the users of one store share. Never shown, never pickled.

    ``secret``: 32 bytes. ``secret_file``: instead, the path of a file with 64 hex digits, such as ``openssl rand -hex
    32`` prints. Only its owner may have access to it. Raises TypeError, ValueError, and OSError for a file that cannot
    be read. Messages do not have the secret.
    """

    __slots__ = ("_secret",)

    def __init__(self, secret: object = None, secret_file: object = None) -> None:
        self._secret = secret_argument(secret, secret_file)

    def derived(self, purpose: bytes) -> bytes:
        """32 bytes for one purpose, a name of up to 16 bytes. They tell nothing of the secret, nor of other
        purposes."""
        return hashlib.blake2b(key=self._secret, digest_size=SECRET_BYTES, person=purpose).digest()

    def __repr__(self) -> str:
        return "SharedSecret()"

    def __reduce__(self) -> Any:
        raise TypeError("a secret is not pickled: it would travel with the pickle")


def secret_argument(secret: object, secret_file: object) -> bytes:
    """The 32 bytes of one of them. Raises TypeError, ValueError, OSError."""
    if (secret is None) == (secret_file is None):
        raise ValueError(f"secret, secret_file: expected one of them, got {'both' if secret else 'none'}")
    if secret is None:
        if not isinstance(secret_file, (str, os.PathLike)):
            raise TypeError(f"secret_file: expected a path, got {secret_file!r:.80}")
        return read_secret(Path(secret_file))
    if not isinstance(secret, bytes):
        raise TypeError(
            f"secret: expected {SECRET_BYTES} bytes, or a text in secret_file=, got {type(secret).__name__}"
        )
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"secret: expected {SECRET_BYTES} bytes, or a text in secret_file=, got {len(secret)} bytes")
    return bytes(memoryview(secret))


def default_place(name: str) -> Path:
    """Where the secret of stores of this kind is, if no place was named: in ``~/.config/kvpool``, or in
    ``$XDG_CONFIG_HOME/kvpool``."""
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "kvpool" / f"{name}.secret"


def read_secret(path: Path) -> bytes:
    """The 32 bytes of a file that has 64 hex digits. Raises ValueError, which does not show the content, and OSError.

    The file must be a regular one of this user, or of root, that no group and nobody else may read or write.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC)) as file:
        seen = os.fstat(file.fileno())
        where = f"secret_file: {path}"
        if not stat.S_ISREG(seen.st_mode):
            raise ValueError(
                f"secret_file: expected a file with {_DIGITS} hex digits, got {path}, which is not a regular file"
            )
        if seen.st_mode & 0o077 or seen.st_uid not in (os.geteuid(), 0):
            raise ValueError(f"{where} holds a secret, and others can read or write it: chown it, and chmod 600 {path}")
        text = file.read(_DIGITS + 16).strip()
    with suppress(ValueError):
        secret = bytes.fromhex(text.decode("ascii"))
        if len(secret) == SECRET_BYTES:
            return secret
    raise ValueError(
        f"secret_file: expected {_DIGITS} hex digits, such as openssl rand -hex 32 prints, got other content in {path}"
    )


def read_or_make_secret(path: Path) -> bytes:
    """``read_secret`` of a file that is made, with a random secret, if it is not there. Processes that make it at once
    get the same."""
    with suppress(FileNotFoundError):
        return read_secret(path)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    with open(draft, "x", opener=lambda name, flags: os.open(name, flags | os.O_CLOEXEC, 0o600)) as file:
        file.write(os.urandom(SECRET_BYTES).hex() + "\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()
    return read_secret(path)
