"""HostTier: the memory of host blocks. One process owns it, and others on the machine attach it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from kvpool.common.arrays import Uint8s
from kvpool.common.arrays.layout import BlockLayout, integer_argument
from kvpool.common.arrays.strided import AnyArray, as_strided
from kvpool.common.process import Closing, stays_here
from kvpool.device.memory.attachments import SharedGroup, SharedPart, SharedTier, attach, machine, namespace
from kvpool.device.memory.main_memory import MainMemory, SharedMemory, available_ram
from kvpool.device.regions import BLOCKS_MAX
from kvpool.errors import InsufficientMemory, PoolClosed
from kvpool.hostcache.identity import ModelIdentity, check_identity, identity_argument, layouts_of

VERSION = 1
BLOCK_BYTES_MAX = 2**31 - 1
_TEXT_MAX = 1 << 20


def block_argument(block_bytes: object, identity: object) -> tuple[int, ModelIdentity]:
    """The bytes of a host block, which may be given by layouts, and whose KV it has. Raises TypeError or ValueError."""
    layouts, nbytes = layouts_of(block_bytes), block_bytes
    if layouts:
        nbytes = sum(layout.block_bytes for layout in layouts)
    elif isinstance(block_bytes, (list, tuple)):
        raise TypeError(f"block_bytes: expected a number, a BlockLayout or a list of them, got {block_bytes!r:.80}")
    nbytes, whose = integer_argument("block_bytes", nbytes, 1, BLOCK_BYTES_MAX), identity_argument(identity)
    check_identity(whose, layouts)
    return nbytes, whose


def fingerprint_of(identity: ModelIdentity, host_blocks: int, block_bytes: int) -> str:
    """32 hex digits, which are equal for an index and a tier that belong together."""
    content = repr(("kvpool host tier", VERSION, identity.fingerprint, host_blocks, block_bytes))
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def layout_of(block_bytes: int) -> BlockLayout:
    """A host block as bytes."""
    return BlockLayout(layers=1, kv_heads=1, head_dim=block_bytes, tokens_per_block=1, dtype="uint8", planes=1)


@dataclass(frozen=True)
class HostSlots:
    """Host blocks as a message to a copy engine, in this process or another.

    Parameters
    ----------
    blocks : tuple of int
        The host blocks.
    fingerprint : str
        That of their cache.

    Notes
    -----
    Immutable and picklable, and safe to share between threads. A slice of it is such a message too.
    """

    blocks: tuple[int, ...]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, which: slice) -> HostSlots:
        if not isinstance(which, slice):
            raise TypeError(f"which: expected a slice, got {which!r:.80}")
        return HostSlots(self.blocks[which], self.fingerprint)


@dataclass(frozen=True)
class HostTierDescription:
    """What another process on the same machine needs to attach a ``HostTier``.

    ``HostTier.share`` returns it. It gives access to all KV of the tier, to processes of the same user, machine and PID
    namespace.

    Attributes
    ----------
    identity : ModelIdentity
        Whose KV the tier has.
    tier : SharedTier
        The memory.

    Notes
    -----
    Immutable, thread-safe, picklable. It can travel as text where pickles are not wanted.
    """

    identity: ModelIdentity
    tier: SharedTier

    @property
    def host_blocks(self) -> int:
        """Number of blocks."""
        return self.tier.groups[0].blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.tier.groups[0].parts[0].layout.block_bytes

    @property
    def pid(self) -> int:
        """The process that has made the tier."""
        return self.tier.pid

    @property
    def fingerprint(self) -> str:
        """32 hex digits, the same as those of the cache."""
        return fingerprint_of(self.identity, self.host_blocks, self.block_bytes)

    def to_json(self) -> str:
        """Return the description as JSON.

        Returns
        -------
        str
            What ``from_json`` reads.
        """
        tier = json.loads(self.tier.to_json())
        return json.dumps({"kvpool host tier": VERSION, "identity": asdict(self.identity), "tier": tier})

    @classmethod
    def from_json(cls, text: str) -> HostTierDescription:
        """Read the result of ``to_json``.

        Parameters
        ----------
        text : str
            The description as JSON.

        Returns
        -------
        HostTierDescription
            The description.

        Raises
        ------
        TypeError, ValueError
            For anything but the text of a description.
        """
        if not isinstance(text, str):
            raise TypeError(f"description: expected a string, got {text!r:.80}")
        if len(text) > _TEXT_MAX:
            raise ValueError(f"description: expected up to {_TEXT_MAX} characters, got {len(text)}")
        try:
            fields = json.loads(text)
            if fields["kvpool host tier"] != VERSION:
                raise ValueError(f"expected version {VERSION}, got {fields['kvpool host tier']!r:.80}")
            parsed = cls(ModelIdentity(**fields["identity"]), SharedTier.from_json(json.dumps(fields["tier"])))
            if parsed.tier.tier != "host" or [len(group.parts) for group in parsed.tier.groups] != [1]:
                raise ValueError("expected a host tier of one group and one part, got another")
            if parsed.host_blocks < 1 or parsed.tier.groups[0].parts[0].layout != layout_of(parsed.block_bytes):
                raise ValueError("expected one block of bytes or more, got another layout")
            if not isinstance(parsed.tier.groups[0].parts[0].memory, MainMemory):
                raise ValueError("expected main memory, got memory of a GPU")
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"description: expected what share() gave, got {type(error).__name__}: {error}") from None
        return parsed

    def __reduce__(self) -> tuple[Callable[[str], HostTierDescription], tuple[str]]:
        return HostTierDescription.from_json, (self.to_json(),)


class HostSizes(Protocol):
    """The sizes of a ``HostCache``, and whose KV it has."""

    host_blocks: int
    block_bytes: int
    identity: ModelIdentity


class HostTier(Closing):
    """The memory of the host blocks of a ``HostCache``. A context manager.

    Parameters
    ----------
    host_blocks : int
        As of the cache; see also ``of``.
    block_bytes : int, BlockLayout or list of BlockLayout
        As of the cache.
    identity : ModelIdentity
        As of the cache.
    memory : array, optional
        Memory of the caller's: an array of any package, C-contiguous, writable, in main memory, of exactly
        ``host_blocks * block_bytes`` bytes. It is kept alive, and cannot be shared. By default zeroed shared memory
        without a name in the file system, which processes of the same user can attach, and which is gone with the last
        of them. Its pages take no memory until they are touched.

    Raises
    ------
    TypeError, ValueError
        For an argument of the wrong type or value.
    InsufficientMemory
        Where the machine lacks the memory.

    Notes
    -----
    The cache decides which process may read or write a block. Not to be pickled: see ``share``. Any thread may use it.
    """

    def __init__(
        self,
        host_blocks: int,
        block_bytes: int | BlockLayout | list[BlockLayout],
        *,
        identity: ModelIdentity,
        memory: AnyArray | None = None,
    ) -> None:
        self.host_blocks = integer_argument("host_blocks", host_blocks, 1, BLOCKS_MAX)
        self.block_bytes, self.identity = block_argument(block_bytes, identity)
        nbytes = self.host_blocks * self.block_bytes
        self._shared: SharedMemory | None = None
        self._description: HostTierDescription | None = None
        if memory is None:
            self._shared = _allocate(nbytes)
            stays_here(self)
            flat = self._shared.array
        else:
            flat = _given(memory, nbytes)
        self._fill(flat)

    def _fill(self, flat: Uint8s) -> None:
        self._flat: Uint8s | None = flat
        self.fingerprint = fingerprint_of(self.identity, self.host_blocks, self.block_bytes)

    @classmethod
    def of(cls, cache: HostSizes, *, memory: AnyArray | None = None) -> HostTier:
        """Make the tier of a ``HostCache``.

        Parameters
        ----------
        cache : HostCache
            The cache, whose sizes and identity the tier gets.
        memory : array, optional
            As for the constructor.

        Returns
        -------
        HostTier
            The tier.
        """
        return cls(cache.host_blocks, cache.block_bytes, identity=cache.identity, memory=memory)

    @classmethod
    def attach(cls, description: HostTierDescription | str) -> HostTier:
        """Attach the tier of another process, in place.

        The memory stays usable here after that process has ended.

        Parameters
        ----------
        description : HostTierDescription or str
            The result of its ``share``, or the same as JSON text.

        Returns
        -------
        HostTier
            The tier.

        Raises
        ------
        TypeError, ValueError
            For anything but a description, and for one of another machine or PID namespace.
        PoolClosed
            If the memory is gone.
        PermissionError
            For a process of another user.
        """
        if not isinstance(description, (str, HostTierDescription)):
            raise TypeError(f"description: expected what share() gave, got {description!r:.80}")
        parsed = HostTierDescription.from_json(description if isinstance(description, str) else description.to_json())
        self = object.__new__(cls)
        self.host_blocks, self.block_bytes, self.identity = parsed.host_blocks, parsed.block_bytes, parsed.identity
        self._shared, self._description = None, parsed
        self._fill(np.asarray(attach(parsed.tier).pool).reshape(-1))
        return self

    @property
    def flat(self) -> Uint8s:
        """All bytes, block after block, in place: uint8[host_blocks * block_bytes].

        Raises
        ------
        PoolClosed
            After ``close``.
        ForkedProcess
            In a child of the process that made the tier. The child attaches it instead.
        """
        if self._flat is None:
            raise PoolClosed("the host tier is closed")
        return self._flat

    @property
    def blocks(self) -> Uint8s:
        """The blocks, in place: uint8[host_blocks, block_bytes]."""
        return self.flat.reshape(self.host_blocks, self.block_bytes)

    def share(self) -> HostTierDescription:
        """Return what ``attach`` takes in another process.

        Returns
        -------
        HostTierDescription
            The description, picklable.

        Raises
        ------
        ValueError
            For memory of the caller's.
        """
        self.flat  # noqa: B018  # It is open.
        if self._description is None:
            if self._shared is None:
                raise ValueError("memory: expected None for a tier that is shared, got the caller's memory")
            handle = self._shared.handle
            group = SharedGroup(self.host_blocks, (SharedPart(layout_of(self.block_bytes), handle),))
            # The memory is there as long as the tier is, and stands for it.
            tier = SharedTier("host", "cpu", (group,), os.getpid(), handle, machine(), namespace())
            self._description = HostTierDescription(self.identity, tier)
        return self._description

    def close(self) -> None:
        """Release the memory. It cannot be attached any more, and stays until its last view is gone."""
        self._flat, shared, self._shared = None, self._shared, None
        if shared is not None:
            shared.close()

    def __repr__(self) -> str:
        return f"HostTier(host_blocks={self.host_blocks}, block_bytes={self.block_bytes}, closed={self._flat is None})"

    def __reduce__(self) -> Any:
        raise TypeError("a HostTier cannot be pickled: pickle what its share() gives")


def _allocate(nbytes: int) -> SharedMemory:
    available = available_ram()
    if available is not None and nbytes > available:
        raise InsufficientMemory("host", nbytes, available)
    try:
        return SharedMemory(nbytes)
    except MemoryError as error:
        raise InsufficientMemory("host", nbytes, available or 0, str(error)) from error


def _given(memory: AnyArray, nbytes: int) -> Uint8s:
    """The caller's memory as flat bytes, in place."""
    strided = as_strided("memory", memory)
    if strided.memory != "host":
        raise ValueError("memory: expected main memory, got memory of a GPU")
    array = strided.host_view()
    if array.nbytes != nbytes:
        raise ValueError(f"memory: expected exactly the {nbytes} bytes of its blocks, got {array.nbytes}")
    if not array.flags.c_contiguous or not array.flags.writeable:
        raise ValueError("memory: expected a writable array in C order without gaps, got another")
    return array.reshape(-1).view(np.uint8)
