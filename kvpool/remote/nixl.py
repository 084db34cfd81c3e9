"""The NIXL transport: readers read blocks from the host tier themselves, and notify the server when they are done."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from threading import Event
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from kvpool.common.arrays import Array, Int64s, Uint8s, Uint64s
from kvpool.remote.session import Malformed, Received
from kvpool.remote.transport import Arrival, Buffer, ClientTransport, Host, Offer, Parts, ServerTransport

INSTALL = "pip install --no-deps nixl nixl-cu13"
_TAG_BYTES = 16
_ADDRESS = np.dtype("<u8")
MEMORY = "DRAM"


def available() -> str:
    """Return whether NIXL can be used, as a text.

    Returns
    -------
    str
        Empty if it can. Else why not, and what to install.
    """
    try:
        _api()
    except ImportError as error:
        return str(error)
    return ""


def _api() -> Any:
    try:
        import nixl._api as api
    except ImportError as error:
        raise ImportError(f"the NIXL transport needs NIXL: {INSTALL} ({error})") from error
    return api


def new_agent() -> Any:
    """An agent under a name of its own. Metadata goes through the server's socket, so no listener claims NIXL's fixed
    port."""
    api = _api()
    # Without the progress thread, a reader would wait until the server's thread calls into NIXL.
    config = api.nixl_agent_config(enable_prog_thread=True, enable_listen_thread=False, backends=["UCX"])
    return api.nixl_agent(f"kvpool-{secrets.token_hex(8)}", config)


class NixlServer(ServerTransport):
    """Registers the whole host tier once. An offer is a tag and the addresses of its blocks.

    Every client that the server accepts can read and overwrite all of the host tier, so accept only clients that may.

    Raises
    ------
    ImportError
        Without NIXL.

    Notes
    -----
    Used by the thread of one server.
    """

    name = "nixl"

    def __init__(self) -> None:
        self._agent: Any = new_agent()
        self._memory: Any = None
        self._host: Host = []
        # Whether each offer was read, as long as somebody wants to know that.
        self._read: WeakValueDictionary[bytes, Event] = WeakValueDictionary()

    def start(self, host: Host) -> None:
        self._host = host
        self._parts = [[(address(part), part.shape[1]) for part in parts] for parts in host]
        whole = [(address(part), part.nbytes) for parts in host for part in parts if part.nbytes]
        self._memory = self._agent.register_memory(regions(*zip(*whole, strict=True)), MEMORY)

    def welcome(self) -> list[bytes]:
        return [self._agent.get_agent_metadata()]

    def offer(self, group: int, rows: Int64s) -> Offer:
        tag, read = secrets.token_bytes(_TAG_BYTES), Event()
        self._read[tag] = read
        addresses = np.concatenate([base + rows * nbytes for base, nbytes in self._parts[group]]).astype(_ADDRESS)
        content = np.concatenate([part[rows] for part in self._host[group]], axis=1)
        return Offer([tag, addresses.tobytes()], [], [content], False, read.is_set)

    def poll(self) -> None:
        notifications = {} if self._agent is None else self._agent.get_new_notifs()
        for tags in notifications.values():
            for tag in tags:
                read = self._read.get(tag)
                if read is not None:
                    read.set()

    def close(self) -> None:
        agent, self._agent = self._agent, None
        if agent is None:
            return
        if self._memory is not None:
            agent.deregister_memory(self._memory)
        # Nobody can read the memory any more.
        for read in list(self._read.values()):
            read.set()


class NixlClient(ClientTransport):
    """Reads offered blocks into slots of its own memory, one slot for each message at a time.

    Raises
    ------
    ImportError
        Without NIXL.

    Notes
    -----
    Used by one client, and so by one thread at a time.
    """

    name = "nixl"
    reuses_memory = True

    def __init__(self) -> None:
        self._agent: Any = None
        _api()

    def connect(self, frames: Sequence[Buffer], parts: Parts, nbytes: int, messages: int) -> None:
        self.close()
        if len(frames) != 1:
            raise Malformed(f"welcome: expected one frame with NIXL's metadata after it, got {len(frames)}")
        self._agent = new_agent()
        self._parts, self._slots = parts, np.zeros((messages, nbytes), np.uint8)
        self._memory = self._agent.register_memory(regions([address(self._slots)], self._slots.nbytes), MEMORY)
        self._free, self._handles = list(range(messages)), dict[int, Any]()
        try:
            self._server = self._agent.add_remote_agent(bytes(frames[0]))
        except Exception as error:
            raise Malformed(f"metadata that NIXL does not take: {type(error).__name__}") from error

    def receive(self, received: Received, group: int, count: int) -> Arrival:
        parts, frames = self._parts[group], received.frames
        if received.blocks or [frame.nbytes for frame in frames] != [
            _TAG_BYTES,
            len(parts) * count * _ADDRESS.itemsize,
        ]:
            sizes = [frame.nbytes for frame in frames]
            raise Malformed(f"frames of {sizes!r:.80} bytes for {count} blocks of {len(parts)} parts to be read")
        number = self._free.pop()
        slot, size, agent = self._slots[number], sum(parts), self._agent
        from_here, from_there, lengths = _pieces(address(slot), np.frombuffer(frames[1], _ADDRESS), parts, count)
        local_regions = agent.get_xfer_descs(regions(from_here, lengths), MEMORY)
        remote_regions = agent.get_xfer_descs(regions(from_there, lengths), MEMORY)
        try:
            handle = agent.initialize_xfer("READ", local_regions, remote_regions, self._server, bytes(frames[0]))
            self._handles[number] = handle
            agent.transfer(handle)
        except Exception as error:
            raise Malformed(f"an offer that NIXL cannot read: {type(error).__name__}: {error}") from error

        def ready() -> bool:
            if number not in self._handles:
                return True
            state = agent.check_xfer_state(handle)
            if state == "ERR":
                raise Malformed("an offer that NIXL failed to read")
            if state == "DONE":
                agent.release_xfer_handle(self._handles.pop(number))
            return state == "DONE"

        blocks = [memoryview(slot[at : at + size]) for at in range(0, count * size, size)]
        return Arrival(blocks, [memoryview(slot[: count * size])], ready, lambda: self._free.append(number))

    def close(self) -> None:
        agent, self._agent = self._agent, None
        if agent is None:
            return
        for handle in self._handles.values():
            try:
                agent.release_xfer_handle(handle)
            except Exception:
                # NIXL cannot stop this read. Its memory is kept until the process ends.
                _abandoned.append((agent, handle, self._slots))
        if not any(slots is self._slots for _, _, slots in _abandoned):
            agent.deregister_memory(self._memory)


def _pieces(first: int, places: Array, parts: Sequence[int], count: int) -> tuple[Int64s, Array, Int64s]:
    """Where the bytes of blocks come from: addresses here and there, and lengths. Here, the blocks follow each other
    from ``first`` on.

    ``places`` has the addresses of all blocks there, part after part. Neighbours become one piece.
    """
    size, offsets = sum(parts), np.concatenate([[0], np.cumsum(parts)[:-1]])
    addresses = np.concatenate([first + offset + size * np.arange(count) for offset in offsets])
    nbytes = np.repeat(np.asarray(parts, np.int64), count)
    follow = (np.diff(addresses) == nbytes[:-1]) & (np.diff(places.astype(np.int64)) == nbytes[:-1])
    firsts = np.flatnonzero(np.append(True, ~follow))
    return addresses[firsts], places[firsts], np.add.reduceat(nbytes, firsts)


_abandoned: list[tuple[Any, Any, Any]] = []
"""Reads that could not be stopped, with the memory that they may still write."""


def regions(firsts: Any, nbytes: Any) -> Uint64s:
    """Regions of memory in NIXL's form: rows of (address, bytes, device). ``nbytes`` is one length, or one for each."""
    rows = np.zeros((len(firsts), 3), np.uint64)
    rows[:, 0], rows[:, 1] = firsts, nbytes
    return rows


def address(array: Uint8s) -> int:
    """The address of the first byte."""
    return int(array.__array_interface__["data"][0])
