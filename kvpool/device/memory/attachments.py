"""The memory of a pool in other processes: its description, and arrays on it in the process that attaches it."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvpool.common.arrays.layout import BlockLayout, Tier, integer_argument
from kvpool.common.process import Closing
from kvpool.device.base import TIERS, Device, DeviceArray
from kvpool.device.cuda import close_unused, open_gpu_memory
from kvpool.device.memory.main_memory import GpuMemory, MainMemory, SharedMemory, is_there, open_shared
from kvpool.device.memory.pools import MemoryPools, shaped
from kvpool.device.regions import BLOCKS_MAX
from kvpool.errors import PoolClosed

VERSION = 1
TEXT_BYTES_MAX = 1 << 20
_ID_MAX = (1 << 31) - 1
_HANDLE_BYTES, _UUID_BYTES = 64, 16
_GONE = "the pool is gone: its process has ended, or has closed it"


class SharedPart(NamedTuple):
    """The memory of one layout of a group.

    Attributes
    ----------
    layout : BlockLayout
        The layout of a block.
    memory : MainMemory, GpuMemory or None
        How another process opens the memory. None if there are no blocks.
    """

    layout: BlockLayout
    memory: MainMemory | GpuMemory | None


class SharedGroup(NamedTuple):
    """The memory of a group of layers.

    Attributes
    ----------
    blocks : int
        Number of blocks in the tier.
    parts : tuple of SharedPart
        The memory of each layout of the group.
    """

    blocks: int
    parts: tuple[SharedPart, ...]


@dataclass(frozen=True)
class SharedTier:
    """The description of a tier of a pool, by which another process on the same machine attaches it.

    ``PoolMemory.share`` returns it, and ``kvpool.attach`` takes it. It can be pickled, or sent as JSON with ``to_json``
    and ``from_json``. Both are validated when they are read.

    Attributes
    ----------
    tier : {"device", "host"}
        The tier.
    device : str
        The name of the pool's device.
    groups : tuple of SharedGroup
        For each group of layers, its ``blocks`` in the tier and its ``parts``, each with a ``layout``.
    pid : int
        The id of the process that has the pool.
    fingerprint : str
        32 hexadecimal digits, which are equal for tiers whose arrays have the same shapes, element types and axes.

    Notes
    -----
    Immutable and thread-safe. It gives processes of the same user, machine and PID namespace access to all KV of the
    tier. Other processes cannot use it.
    """

    tier: Tier
    device: str
    groups: tuple[SharedGroup, ...]
    pid: int
    # Memory without content that exists as long as the pool does.
    sign: MainMemory
    machine: str
    namespace: int

    @cached_property
    def fingerprint(self) -> str:
        """The digest of the layouts and the numbers of blocks."""
        shapes = [(blocks, [tuple(asdict(part.layout).values()) for part in parts]) for blocks, parts in self.groups]
        content = repr(("kvpool shared tier", VERSION, self.tier, shapes))
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    def to_json(self) -> str:
        """Return the description as JSON.

        Returns
        -------
        str
            The text, for ``from_json`` and ``kvpool.attach``.
        """
        groups = [{"blocks": blocks, "parts": [_part_out(part) for part in parts]} for blocks, parts in self.groups]
        owner = {"pid": self.pid, "sign": _memory_out(self.sign), "machine": self.machine, "namespace": self.namespace}
        head = {"kvpool": VERSION, "tier": self.tier, "device": self.device, "fingerprint": self.fingerprint}
        return json.dumps({**head, "owner": owner, "groups": groups})

    @classmethod
    def from_json(cls, text: str) -> SharedTier:
        """Return the description that ``to_json`` has written.

        Parameters
        ----------
        text : str
            The JSON text.

        Returns
        -------
        SharedTier
            The description.

        Raises
        ------
        TypeError, ValueError
            For a text that is not such a description.
        """
        if not isinstance(text, str):
            raise TypeError(f"description: expected a string, got {text!r:.80}")
        if len(text) > TEXT_BYTES_MAX:
            raise ValueError(f"description: expected up to {TEXT_BYTES_MAX} characters, got {len(text)}")
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"description: expected JSON, got {error}") from None
        if not isinstance(fields, dict) or fields.get("kvpool") != VERSION:
            raise ValueError(
                f"description: expected what share() gives in a kvpool of version {VERSION}, got {text!r:.80}"
            )
        try:
            return _parsed(fields)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"description: {type(error).__name__}: {error}") from None

    def __reduce__(self) -> tuple[Callable[[str], SharedTier], tuple[str]]:
        return SharedTier.from_json, (self.to_json(),)

    def __repr__(self) -> str:
        blocks = [group.blocks for group in self.groups]
        return f"SharedTier({self.tier!r}, device={self.device!r}, pid={self.pid}, blocks={blocks})"


def _part_out(part: SharedPart) -> dict[str, Any]:
    return {"layout": asdict(part.layout), "memory": _memory_out(part.memory)}


def _memory_out(memory: MainMemory | GpuMemory | None) -> dict[str, Any] | None:
    if isinstance(memory, GpuMemory):
        return {"gpu": memory.uuid.hex(), "handle": memory.handle.hex(), "offset": memory.offset}
    return None if memory is None else memory._asdict()


def _memory_in(fields: Any) -> MainMemory | GpuMemory | None:
    if fields is None:
        return None
    if "gpu" in fields:
        uuid, handle = (bytes.fromhex(_string(name, fields[name])) for name in ("gpu", "handle"))
        if len(uuid) > _UUID_BYTES or len(handle) != _HANDLE_BYTES:
            accepted = f"expected up to {_UUID_BYTES} and {_HANDLE_BYTES} bytes"
            raise ValueError(f"gpu, handle: {accepted}, got {len(uuid)} and {len(handle)}")
        return GpuMemory(uuid, handle, integer_argument("offset", fields["offset"], 0, 1 << 62))
    name = _string("name", fields["name"])
    if not name.startswith("kvpool-") or not name.isprintable() or "/" in name or len(name) > 64:
        raise ValueError(f"name: expected a file of a kvpool, got {name!r:.80}")
    return MainMemory(integer_argument("fd", fields["fd"], 0, _ID_MAX), name)


def _string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a string, got {value!r:.80}")
    return value


def _parsed(fields: dict[str, Any]) -> SharedTier:
    groups = []
    for group in fields["groups"]:
        blocks = integer_argument("blocks", group["blocks"], 0, BLOCKS_MAX)
        parts = tuple(SharedPart(BlockLayout(**part["layout"]), _memory_in(part["memory"])) for part in group["parts"])
        if not parts or any((memory is None) != (blocks == 0) for _, memory in parts):
            accepted = "expected one part or more, with memory where there are blocks"
            raise ValueError(f"groups: {accepted}, got {len(parts)} for {blocks} blocks")
        groups.append(SharedGroup(blocks, parts))
    owner, tier, device = fields["owner"], fields["tier"], _string("device", fields["device"])
    sign = _memory_in(owner["sign"])
    if tier not in TIERS or not groups or not isinstance(sign, MainMemory):
        accepted = "expected a tier with one group or more, and the sign of its pool"
        raise ValueError(f"tier: {accepted}, got {tier!r:.80}, {len(groups)} groups, sign={sign!r:.80}")
    pid, namespace = (integer_argument(name, owner[name], 1, 1 << 62) for name in ("pid", "namespace"))
    parsed = SharedTier(tier, device, tuple(groups), pid, sign, _string("machine", owner["machine"]), namespace)
    if fields["fingerprint"] != parsed.fingerprint:
        raise ValueError(
            f"fingerprint: expected {parsed.fingerprint}, as its layouts have, got {fields['fingerprint']!r:.80}"
        )
    return parsed


def machine() -> str:
    """Return a string that differs between machines, and changes when a machine is restarted."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""  # A sandbox that has none. The name of the memory still differs.


def namespace() -> int:
    """Return the namespace of process ids. In another one, the same ids mean other processes."""
    return os.stat("/proc/self/ns/pid").st_ino


class Sharing:
    """The descriptions of the memory of one pool for other processes. Thread-safe."""

    def __init__(self, device: Device, pools: MemoryPools) -> None:
        self._device, self._pools = device, pools
        self._lock, self._closed = threading.Lock(), False
        self._sign: SharedMemory | None = None

    def describe(self, tier: Tier) -> SharedTier:
        """Describe a tier. Raises ValueError for memory that cannot be shared, DeviceError, MemoryError, PoolClosed."""
        pools, groups = self._pools, []
        for group, layouts in enumerate(pools.layouts):
            arrays = [pools.flat(tier, group, part) for part in range(len(layouts))]
            blocks = arrays[0].nbytes // layouts[0].block_bytes
            handles = [self._device.views.handle(array, tier) if blocks else None for array in arrays]
            groups.append(SharedGroup(blocks, tuple(map(SharedPart, layouts, handles))))
        if not any(group.blocks for group in groups):
            raise ValueError(f"tier: expected one with blocks, got {tier!r}, where this pool has none")
        return SharedTier(tier, self._device.name, tuple(groups), os.getpid(), self._signed(), machine(), namespace())

    def _signed(self) -> MainMemory:
        with self._lock:
            if self._closed:
                raise PoolClosed("the pool is closed")
            self._sign = self._sign or SharedMemory(1)
            return self._sign.handle

    def close(self) -> None:
        """End sharing: the memory cannot be attached from now on. A second call does nothing."""
        with self._lock:
            self._closed = True
            if self._sign is not None:
                self._sign.close()


class Attachment(Closing):
    """The arrays of a tier of a pool in another process.

    ``kvpool.attach`` returns it. A context manager, which closes it.

    Attributes
    ----------
    description : SharedTier
        The description of the tier.

    Notes
    -----
    Thread-safe. The pool is not informed of the attachment. A forked child inherits an attachment to main memory.

    Main memory stays readable while a view of it lives, even after the pool is closed. GPU memory is undefined then.
    """

    __slots__ = ("__weakref__", "_pools", "description")

    def __init__(self, description: SharedTier, memory: list[list[DeviceArray]]) -> None:
        self.description = description
        pools = []
        for arrays, (blocks, parts) in zip(memory, description.groups, strict=True):
            each = zip(arrays, parts, strict=True)
            pools.append(tuple(shaped(array, part.layout, description.tier, blocks) for array, part in each))
        self._pools: tuple[tuple[DeviceArray, ...], ...] | None = tuple(pools)

    @property
    def pools(self) -> tuple[tuple[DeviceArray, ...], ...]:
        """The arrays, ``pools[group][part]``, as ``device_pools`` or ``host_pools`` of the pool have them.

        They are NumPy arrays for main memory, CuPy arrays for GPU memory.

        Raises
        ------
        PoolClosed
            After the attachment was closed.
        """
        pools = self._pools
        if pools is None:
            raise PoolClosed("the attachment is closed")
        return pools

    @property
    def pool(self) -> DeviceArray:
        """The array of a pool with one group of layers of one layout.

        Raises
        ------
        ValueError
            For a pool with several groups or layouts, which has ``pools``.
        PoolClosed
            After the attachment was closed.
        """
        pools = self.pools
        if len(pools) > 1 or len(pools[0]) > 1:
            parts = [len(group) for group in pools]
            raise ValueError(f"pool: expected pools[group][part] where there are several, got groups of {parts} parts")
        return pools[0][0]

    @property
    def layouts(self) -> tuple[tuple[BlockLayout, ...], ...]:
        """The layouts of the arrays, ``layouts[group][part]``."""
        return tuple(tuple(part.layout for part in group.parts) for group in self.description.groups)

    @property
    def alive(self) -> bool:
        """Whether the pool still exists: its process runs and has not closed it."""
        return is_there(self.description.pid, self.description.sign)

    @property
    def closed(self) -> bool:
        """Whether the attachment was closed."""
        return self._pools is None

    def close(self) -> None:
        """Release the memory.

        Raises
        ------
        DeviceError
            Where a GPU does not close the memory. A second call tries again.

        Notes
        -----
        Main memory stays mapped until the last view of ``pools`` is gone; GPU memory until a ``close`` or ``attach``
        after that. On a GPU, the call waits for all work that this process has enqueued. Do not call it while a stream
        is being captured, since CUDA would end the capture.
        """
        self._pools = None
        close_unused()

    def __repr__(self) -> str:
        return f"Attachment({self.description!r}, closed={self.closed})"


def attach(description: SharedTier | str) -> Attachment:
    """Make arrays on the memory of a pool of another process.

    Parameters
    ----------
    description : SharedTier or str
        The result of ``share`` of that pool's memory, or the same as JSON text.

    Returns
    -------
    Attachment
        The arrays. Nothing is copied.

    Raises
    ------
    TypeError
        For anything else.
    ValueError
        For a text that is not a description, and for the description of another machine, of another PID namespace, of a
        GPU that this process does not see, or of a pool on a GPU in this same process.
    PoolClosed
        If the pool is gone.
    PermissionError
        If the pool's process belongs to another user.
    DeviceError
        If a GPU does not open the memory.

    Notes
    -----
    Thread-safe. The pool's process decides which blocks may be written (``reserve``) or read (``pin``), and when;
    nothing here checks it. GPU memory is opened on the GPU that has the description's UUID.
    """
    if not isinstance(description, (str, SharedTier)):
        raise TypeError(f"description: expected what share() gave, got {description!r:.80}")
    parsed = SharedTier.from_json(description if isinstance(description, str) else description.to_json())
    if parsed.machine != machine():
        raise ValueError("description: the pool is on another machine, or was there before this one was started again")
    if parsed.namespace != namespace():
        raise ValueError("description: the pool is in another PID namespace, where process ids mean other processes")
    try:
        if not is_there(parsed.pid, parsed.sign):
            raise PoolClosed(_GONE)
        memory = [[_opened(parsed, group.blocks, part) for part in group.parts] for group in parsed.groups]
        if not is_there(parsed.pid, parsed.sign):
            raise PoolClosed(_GONE)
    except PermissionError as error:
        raise PermissionError(f"process {parsed.pid} has the pool and belongs to another user: {error}") from None
    return Attachment(parsed, memory)


def _opened(description: SharedTier, blocks: int, part: SharedPart) -> DeviceArray:
    layout, handle = part
    nbytes = blocks * layout.block_bytes
    if handle is None:
        return np.zeros(0, np.uint8)
    if isinstance(handle, GpuMemory):
        if description.pid == os.getpid():
            raise ValueError(
                "description: the pool is in this process, and CUDA opens handles in others: use device_pools"
            )
        return open_gpu_memory(handle, nbytes)
    return open_shared(description.pid, handle, nbytes)
